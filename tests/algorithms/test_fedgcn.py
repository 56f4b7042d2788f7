"""FedGCN's sums of neighbours against the whole graph, and against hand numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.fedgcn import (
    OwnedEdges,
    SummedGraph,
    degrees,
    listed_nodes,
    partial_sums,
    readable_nodes,
    summed_graph,
)
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.transforms.subgraph import cut_clients
from flower_fgl.nn import GraphInput, build_model

PATH = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
"""The path 0-1-2-3."""


def owned(edge_index: Tensor, size: int, parts: list[Tensor]) -> list[OwnedEdges]:
    """Return the edges of each client of a whole graph."""
    arrays = [part.numpy() for part in parts]
    inside = cut_clients(edge_index, size, arrays)
    between = cut_clients(edge_index, size, arrays, are_inside=False)
    out = []
    for edges, (own, other), part in zip(inside, between, parts, strict=True):
        ids, place = torch.unique(other, return_inverse=True)
        out.append(OwnedEdges(edges, own, place, ids, part))
    return out


def everything(edges: OwnedEdges) -> tuple[Tensor, Tensor]:
    """Return the listed own nodes and all outside neighbours."""
    own = listed_nodes(edges, min_outside=1, hops=2)
    return own, torch.arange(len(edges.outside))


def total_sums(x: Tensor, clients: list[OwnedEdges]) -> Tensor:
    """Add up the parts of all clients: one row per node of the whole graph."""
    total = torch.zeros_like(x)
    for edges in clients:
        own, other = everything(edges)
        part = partial_sums(x[edges.ids], edges, own, other)
        named = torch.cat([edges.ids[own], edges.outside[other]])
        total[named] += part
    return total


def completed(x: Tensor, clients: list[OwnedEdges], hops: int) -> list[SummedGraph]:
    """Return every client's completed graph."""
    total = total_sums(x, clients)
    known = torch.zeros(len(x))
    for edges in clients:
        known[edges.ids] = degrees(edges).float()
    out = []
    for edges in clients:
        own, other = everything(edges)
        rows = torch.cat([edges.ids[own], edges.outside[other]])
        out.append(
            summed_graph(
                x[edges.ids],
                edges,
                own,
                other,
                total[rows],
                known[edges.outside[other]],
                hops=hops,
            )
        )
    return out


@pytest.fixture(params=[2, 4])
def whole(request: pytest.FixtureRequest) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Features, edges and parts of a random graph of 60 nodes."""
    draw = torch.Generator().manual_seed(request.param)
    upper = torch.rand(60, 60, generator=draw).triu(1) > 0.93
    edges = (upper | upper.T).nonzero().T.contiguous()
    order = torch.randperm(60, generator=draw)
    parts = [part.sort().values for part in order.chunk(request.param)]
    return torch.randn(60, 5, generator=draw), edges, parts


def test_the_path_of_the_specification() -> None:
    clients = owned(PATH, 4, [torch.tensor([0, 1]), torch.tensor([2, 3])])
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    # A knows x_1 / sqrt(3) of node 2, B knows x_2 / sqrt(3) + x_3 / sqrt(2)
    first, second = clients
    assert listed_nodes(first, min_outside=1, hops=2).tolist() == [1]
    of_two = partial_sums(x[:2], first, torch.tensor([1]), torch.tensor([0]))[1]
    assert float(of_two) == pytest.approx(2 / math.sqrt(3), abs=1e-6)
    own = partial_sums(x[2:], second, torch.tensor([0]), torch.tensor([0]))[0]
    assert float(own) == pytest.approx(3 / math.sqrt(3) + 4 / math.sqrt(2), abs=1e-6)
    graphs = completed(x, clients, hops=2)
    expected = torch.tensor([1.3165, 2.0749, 3.2997, 3.2247])
    torch.testing.assert_close(graphs[0].x[:2, 0], expected[:2], atol=1e-4, rtol=0)
    torch.testing.assert_close(graphs[1].x[:2, 0], expected[2:], atol=1e-4, rtol=0)
    # each client also has the row of its one outside neighbour
    assert graphs[0].x[2, 0] == pytest.approx(3.2997, abs=1e-4)
    assert graphs[1].x[2, 0] == pytest.approx(2.0749, abs=1e-4)


def test_sums_equal_those_of_the_whole_graph(
    whole: tuple[Tensor, Tensor, list[Tensor]],
) -> None:
    x, edges, parts = whole
    expected = GraphInput(x, edges).propagate(x, "normalised")
    clients = owned(edges, len(x), parts)
    for hops in (1, 2):
        for graph, one in zip(completed(x, clients, hops), clients, strict=True):
            size = one.num_nodes
            torch.testing.assert_close(graph.x[:size], expected[one.ids])
            if hops == 2:
                torch.testing.assert_close(graph.x[size:], expected[one.outside])


def test_two_hops_make_two_layers_exact_and_one_hop_does_not(
    whole: tuple[Tensor, Tensor, list[Tensor]],
) -> None:
    x, edges, parts = whole
    torch.manual_seed(0)
    model = build_model(
        "gcn",
        in_channels=5,
        hidden_channels=8,
        num_outputs=3,
        num_layers=2,
        dropout=0.5,
    ).eval()
    expected = model(GraphInput(x, edges)).detach()
    clients = owned(edges, len(x), parts)
    wrong = 0.0
    for hops in (1, 2):
        for graph, one in zip(completed(x, clients, hops), clients, strict=True):
            logits = model(graph)[: one.num_nodes].detach()
            if hops == 2:
                torch.testing.assert_close(logits, expected[one.ids], atol=1e-5, rtol=0)
            else:
                wrong = max(wrong, float((logits - expected[one.ids]).abs().max()))
    assert wrong > 1e-2


def test_one_client_has_the_plain_graph(
    whole: tuple[Tensor, Tensor, list[Tensor]],
) -> None:
    x, edges, _ = whole
    (only,) = owned(edges, len(x), [torch.arange(len(x))])
    assert not len(listed_nodes(only, min_outside=1, hops=2))
    (graph,) = completed(x, [only], hops=2)
    plain = GraphInput(x, edges)
    torch.testing.assert_close(graph.x, plain.propagate(x, "normalised"))
    h = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        graph.propagate(h, "normalised"), plain.propagate(h, "normalised")
    )


def test_sparse_features_give_the_same_sums(
    whole: tuple[Tensor, Tensor, list[Tensor]],
) -> None:
    x, edges, parts = whole
    one = owned(edges, len(x), parts)[0]
    own, other = everything(one)
    mine = x[one.ids].clamp(min=0)
    torch.testing.assert_close(
        partial_sums(mine.to_sparse_csr(), one, own, other),
        partial_sums(mine, one, own, other),
    )


def test_sums_of_few_outside_nodes_can_be_left_out() -> None:
    # node 0 has the outside neighbours 2 and 3, node 1 has 3
    edges = torch.tensor([[0, 2], [0, 3], [1, 3], [0, 1]])
    both = torch.cat([edges, edges.flip(1)]).T
    order = (both[0] * 4 + both[1]).argsort()
    first, second = owned(
        both[:, order], 4, [torch.tensor([0, 1]), torch.tensor([2, 3])]
    )
    assert listed_nodes(first, min_outside=1, hops=1).tolist() == [0, 1]
    assert listed_nodes(first, min_outside=2, hops=1).tolist() == [0]
    # a receiver of the sum of node 3 would see 3 alone beside its own nodes
    assert listed_nodes(second, min_outside=2, hops=1).tolist() == [1]
    assert listed_nodes(second, min_outside=2, hops=2).tolist() == []


def test_another_backbone_is_refused_on_sums() -> None:
    clients = owned(PATH, 4, [torch.tensor([0, 1]), torch.tensor([2, 3])])
    graph = completed(torch.ones(4, 1), clients, hops=2)[0]
    with pytest.raises(DataError, match="use a GCN"):
        graph.propagate(torch.ones(3, 1), "mean")
    with pytest.raises(DataError, match="must be a GCN's"):
        graph.filtered_linear(
            None, torch.ones(1, 1), kind="normalised", coefficients=(0, 0, 1)
        )


def test_rows_that_reveal_single_nodes_are_found() -> None:
    # one node alone; two nodes that occur only together; three pairs of three nodes
    alone = torch.tensor([[1.0, 0.0, 0.0]])
    assert readable_nodes(alone).tolist() == [True, False, False]
    assert readable_nodes(torch.ones(1, 2)).tolist() == [False, False]
    pairs = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    assert readable_nodes(pairs).tolist() == [True] * 3
    assert readable_nodes(torch.zeros(0, 2)).tolist() == [False, False]
