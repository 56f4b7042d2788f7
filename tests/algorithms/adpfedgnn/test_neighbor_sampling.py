from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.adpfedgnn.neighbor_sampling import (
    NeighbourLists,
    sample_block,
    sample_neighbours,
)

N = 60


@pytest.fixture
def edge_index(generator: torch.Generator) -> Tensor:
    """A random graph: the first node is linked to all others, the last to none."""
    upper = torch.rand(N, N, generator=generator).triu(1) > 0.85
    upper[0, 1:] = True
    upper[:, -1] = False
    return (upper | upper.T).nonzero().T.contiguous()


def neighbours_of(edge_index: Tensor) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(N)]
    for source, target in edge_index.T.tolist():
        found[target].add(source)
    return found


def test_lists_hold_the_neighbours_of_every_node(edge_index: Tensor) -> None:
    lists = NeighbourLists.of(edge_index, N)
    assert lists.num_nodes == N
    for node, expected in enumerate(neighbours_of(edge_index)):
        held = lists.neighbour[lists.start[node] : lists.start[node + 1]]
        assert sorted(held.tolist()) == sorted(expected)


@pytest.mark.parametrize("limit", [1, 3, 10, 1000])
def test_every_node_gets_different_neighbours_up_to_the_limit(
    edge_index: Tensor, limit: int, generator: torch.Generator
) -> None:
    lists = NeighbourLists.of(edge_index, N)
    nodes = torch.tensor([5, 0, N - 1, 7])
    target, neighbour = sample_neighbours(lists, nodes, limit, generator)
    assert torch.equal(target, target.sort().values)
    expected = neighbours_of(edge_index)
    for place, node in enumerate(nodes.tolist()):
        mine = neighbour[target == place].tolist()
        assert len(mine) == len(set(mine)) == min(limit, len(expected[node]))
        assert set(mine) <= expected[node]


def test_every_set_of_neighbours_is_equally_likely(
    generator: torch.Generator,
) -> None:
    star = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
    lists = NeighbourLists.of(star, 5)
    draws = 6000
    _, neighbour = sample_neighbours(
        lists, torch.zeros(draws, dtype=torch.int64), 2, generator
    )
    counts = Counter(frozenset(pair) for pair in neighbour.view(draws, 2).tolist())
    assert len(counts) == 6
    # a binomial count of mean 1000 has standard deviation 29
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_a_block_lists_each_node_once_and_the_batch_first(
    edge_index: Tensor, generator: torch.Generator
) -> None:
    lists = NeighbourLists.of(edge_index, N)
    batch = torch.tensor([9, 3, N - 1])
    block = sample_block(lists, batch, limit=4, num_layers=2, generator=generator)
    assert torch.equal(block.nodes[:3], batch)
    assert len(block.nodes.unique()) == len(block.nodes)
    expected = neighbours_of(edge_index)
    first, last = block.layers
    assert set(last.target.tolist()) == {0, 1}  # the third has no neighbours
    for layer in block.layers:
        for target, neighbour in zip(*(t.tolist() for t in layer), strict=True):
            node = int(block.nodes[target])
            assert int(block.nodes[neighbour]) in expected[node]
    # the first layer computes the batch and the neighbours in the last layer
    asked = {0, 1, 2, *last.neighbour.tolist()}
    assert set(first.target.tolist()) == asked - {2}


def test_a_block_over_all_neighbours_draws_nothing_at_random(
    edge_index: Tensor,
) -> None:
    lists = NeighbourLists.of(edge_index, N)
    blocks = [
        sample_block(
            lists,
            torch.arange(5),
            limit=N,
            num_layers=2,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (1, 2)
    ]
    assert torch.equal(blocks[0].nodes, blocks[1].nodes)
    assert torch.equal(blocks[0].layers[0].neighbour, blocks[1].layers[0].neighbour)


def test_a_block_of_a_graph_without_edges_is_the_batch(
    generator: torch.Generator,
) -> None:
    lists = NeighbourLists.of(torch.empty(2, 0, dtype=torch.int64), 4)
    block = sample_block(
        lists, torch.tensor([2, 1]), limit=3, num_layers=2, generator=generator
    )
    assert block.nodes.tolist() == [2, 1]
    assert all(len(layer.target) == 0 for layer in block.layers)
