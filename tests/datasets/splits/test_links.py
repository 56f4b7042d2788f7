"""Split of edges: sizes, leakage, negatives, features, bad input, hash."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.targets import LINK_CLASSES, Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.splits.edges import require_pairs
from flower_fgl.datasets.splits.links import (
    degree_features,
    degree_names,
    follow_degrees,
    link_client,
    links_sha256,
    split_links,
)
from flower_fgl.methods import parse_config
from flower_fgl.nn.link import draw_negatives, pair_codes

SHARES = (Fraction(85, 100), Fraction(5, 100), Fraction(10, 100))


def random_edges(num_nodes: int, share: float, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    upper = torch.rand(num_nodes, num_nodes, generator=draw).triu(1) > 1 - share
    return (upper | upper.T).nonzero().T.contiguous()


def client_of(edge_index: Tensor, num_nodes: int, **fields: Any) -> ClientGraph:
    draw = torch.Generator().manual_seed(1)
    y = torch.zeros(num_nodes, dtype=torch.int64)
    masks = {
        n: torch.zeros(num_nodes, dtype=torch.bool) for n in ("train", "val", "test")
    }
    graph = Graph(torch.randn(num_nodes, 5, generator=draw), edge_index, y, masks)
    graph = replace(graph, **fields)
    return ClientGraph(0, graph, Target.classes(("a",)), torch.arange(num_nodes))


def config_of(**values: Any) -> Any:
    return parse_config(
        {"setting": "link", **{k.replace("_", "-"): v for k, v in values.items()}}
    )


def codes(pairs: Tensor, num_nodes: int) -> set[int]:
    return set(pair_codes(pairs, num_nodes).tolist())


@pytest.fixture(scope="module")
def whole() -> Tensor:
    return random_edges(60, 0.15)


@pytest.fixture(scope="module")
def split(whole: Tensor) -> Any:
    return split_links(whole, 60, SHARES, generator=torch.Generator().manual_seed(0))


def test_every_edge_is_in_exactly_one_part(whole: Tensor, split: Any) -> None:
    edge_index, pairs, y, masks = split
    number = whole.shape[1] // 2
    sizes = {name: int((masks[name] & (y == 1)).sum()) for name in masks}
    assert sizes["val"] == int(0.05 * number)
    assert sizes["test"] == int(0.10 * number)
    assert sum(sizes.values()) == number
    parts = [codes(pairs[:, masks[name] & (y == 1)], 60) for name in masks]
    assert set().union(*parts) == codes(whole, 60)
    assert sum(map(len, parts)) == number
    assert int(sum(mask.long() for mask in masks.values()).eq(1).sum()) == len(y)
    assert edge_index.shape[1] == 2 * sizes["train"]


def test_no_held_out_edge_nor_its_reverse_is_in_the_training_graph(split: Any) -> None:
    edge_index, pairs, y, masks = split
    held_out = pairs[:, (masks["val"] | masks["test"]) & (y == 1)]
    directed = set(map(tuple, edge_index.T.tolist()))
    for u, v in held_out.T.tolist():
        assert (u, v) not in directed
        assert (v, u) not in directed
    assert directed == {(v, u) for u, v in directed}
    assert codes(edge_index, 60) == codes(pairs[:, masks["train"]], 60)


def test_negatives_are_distinct_and_never_an_edge(whole: Tensor, split: Any) -> None:
    _, pairs, y, masks = split
    negatives = pairs[:, y == 0]
    assert negatives.shape[1] == len(codes(negatives, 60))
    assert not codes(negatives, 60) & codes(whole, 60)
    assert bool((negatives[0] < negatives[1]).all())
    for name in ("val", "test"):
        assert int((y[masks[name]] == 1).sum()) == int((y[masks[name]] == 0).sum())
    assert not bool((masks["train"] & (y == 0)).any())


def bipartite_edges(one: int, other: int, number: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    code = torch.randperm(one * other, generator=draw)[:number]
    pairs = torch.stack([code // other, one + code % other])
    both = torch.cat([pairs, pairs.flip(0)], dim=1)
    return both[:, (both[0] * (one + other) + both[1]).argsort()]


def negatives_of(edge_index: Tensor, num_nodes: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    _, pairs, y, _ = split_links(edge_index, num_nodes, SHARES, generator=draw)
    return pairs[:, y == 0]


def test_negatives_of_a_bipartite_graph_join_its_sides() -> None:
    edges = bipartite_edges(40, 20, 300)
    negatives = negatives_of(edges, 62)  # the last two nodes have no edge
    assert negatives.shape[1] == 15 + 30
    isolated = negatives >= 60
    is_between = (negatives[0] < 40) != (negatives[1] < 40)
    assert bool((is_between | isolated.any(dim=0)).all())
    assert not codes(negatives, 62) & codes(edges, 62)
    # one edge between two of the 40: the graph has no sides any more
    odd = torch.cat([edges, torch.tensor([[0, 1], [1, 0]])], dim=1)
    odd = odd[:, (odd[0] * 62 + odd[1]).argsort()]
    assert bool((negatives_of(odd, 62) < 40).all(dim=0).any())


def test_negatives_of_trees_and_other_graphs_are_any_pairs(whole: Tensor) -> None:
    parent = torch.arange(60) // 2
    tree = torch.stack([parent, torch.arange(1, 61)])
    tree = torch.cat([tree, tree.flip(0)], dim=1)
    tree = tree[:, (tree[0] * 61 + tree[1]).argsort()]
    for edges, size in ((whole, 60), (tree, 61)):
        draw = torch.Generator().manual_seed(0)
        upper = edges[:, edges[0] < edges[1]]
        torch.randperm(upper.shape[1], generator=draw)
        number = int(upper.shape[1] * 0.05) + int(upper.shape[1] * 0.1)
        any_pairs = draw_negatives(pair_codes(upper, size), size, number, draw)
        assert torch.equal(negatives_of(edges, size), any_pairs)


def test_a_complete_bipartite_graph_is_refused() -> None:
    with pytest.raises(DataError, match="0 pairs of nodes of different sides"):
        negatives_of(bipartite_edges(6, 8, 48), 14)


def test_the_split_is_seeded_and_hashed(whole: Tensor) -> None:
    client = client_of(whole, 60)
    made = [link_client(client, config_of(partition_seed=s)) for s in (0, 0, 1)]
    hashes = [links_sha256("partition", [one]) for one in made]
    assert hashes[0] == hashes[1] != hashes[2]
    assert links_sha256("another", made[:1]) != hashes[0]


def test_degree_features_count_training_edges_only(whole: Tensor) -> None:
    client = link_client(client_of(whole, 60), config_of(link_features="degree"))
    kept = client.graph.edge_index
    degree = [int((kept[0] == node).sum()) for node in range(60)]
    column = [0 if d == 0 else d.bit_length() for d in degree]
    assert client.graph.x.argmax(dim=1).tolist() == column
    assert client.graph.x.sum(dim=1).tolist() == [1.0] * 60
    before = torch.bincount(whole[0], minlength=60).tolist()
    assert degree != before
    assert client.feature_names == degree_names()


def test_degrees_fall_into_powers_of_two() -> None:
    star = torch.tensor([[0] * 5, list(range(1, 6))])
    both = torch.cat([star, star.flip(0)], dim=1)
    assert degree_features(both, 7).argmax(dim=1).tolist() == [3, 1, 1, 1, 1, 1, 0]
    assert degree_names()[:4] == (
        "degree 0", "degree from 1", "degree from 2", "degree from 4",
    )  # fmt: skip


def test_features_made_of_all_degrees_are_refused(whole: Tensor) -> None:
    leaking = degree_features(whole, 60)
    assert follow_degrees(leaking, whole)
    with pytest.raises(DataError, match='link-features = "degree"'):
        link_client(client_of(whole, 60, x=leaking), config_of())
    assert not follow_degrees(torch.ones(60, 3), whole)
    assert not follow_degrees(client_of(whole, 60).graph.x, whole)
    degrees = torch.arange(1, 9).repeat_interleave(torch.arange(1, 9))[None] - 1
    assert not follow_degrees(torch.randn(8, 2), degrees)  # no two of one degree


def test_a_graph_without_features_gets_degrees(whole: Tensor) -> None:
    client = link_client(client_of(whole, 60, x=torch.empty(60, 0)), config_of())
    assert client.num_features == 16
    assert client.class_names == LINK_CLASSES


def test_a_graph_with_three_edges_is_refused() -> None:
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    three = torch.cat([edges, edges.flip(0)], dim=1)
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(DataError, match=r"3 undirected edges.*at least 10"):
        split_links(three, 4, SHARES, generator=generator)
    alone = link_client(client_of(three, 4), config_of())
    assert alone.graph.y.numel() == 0
    with pytest.raises(DataError, match="the largest has 3 undirected edges"):
        require_pairs([alone], config_of())


def test_ten_edges_give_one_for_validation_and_one_for_test() -> None:
    ring = torch.stack([torch.arange(10), (torch.arange(10) + 1) % 10])
    both = torch.cat([ring, ring.flip(0)], dim=1)
    made = split_links(both, 10, SHARES, generator=torch.Generator().manual_seed(0))
    _, _, y, masks = made
    assert [int((y[masks[n]] == 1).sum()) for n in ("train", "val", "test")] == [
        8,
        1,
        1,
    ]


def test_a_complete_graph_is_refused() -> None:
    with pytest.raises(DataError, match="almost complete"):
        link_client(client_of(random_edges(12, 2.0), 12), config_of())


def test_settings_that_do_not_go_with_links_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fedproto cannot predict links.*fedavg"):
        config_of(method="fedproto")
    with pytest.raises(ConfigError, match="num-neighbors is not possible"):
        config_of(num_neighbors="10,5", batch_size=16)
    with pytest.raises(ConfigError, match='split = "public" is not'):
        config_of(split="public")
    with pytest.raises(ConfigError, match="edge-sparsity"):
        config_of(edge_sparsity=0.5)
