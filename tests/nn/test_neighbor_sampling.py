from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.nn import GraphInput, build_model
from flower_fgl.nn.computation_graph import NeighborSampler
from flower_fgl.nn.sparse import csr_matrix
from flower_fgl.nn.topology import OperatorKind

N, D = 30, 4


def make_graph(*, is_sparse: bool = False) -> GraphInput:
    """A random graph with hubs, one self-loop, and a node without neighbours."""
    draw = torch.Generator().manual_seed(0)
    upper = (torch.rand(N, N, generator=draw) > 0.7).triu(1)
    upper[:3] |= torch.rand(3, N, generator=draw) > 0.3
    upper = upper.triu(1)
    upper[:, -1] = False
    both = upper | upper.T
    both[5, 5] = True
    x = torch.randn(N, D, generator=draw)
    if is_sparse:
        row, column = torch.arange(N).repeat_interleave(D), torch.arange(D).repeat(N)
        x = csr_matrix(row, column, x.flatten(), (N, D))
    return GraphInput(x, both.nonzero().T)


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_rows(
    graph: GraphInput, kind: OperatorKind, row: int, kept: set[int]
) -> dict[int, float]:
    """Compute a node's row of a sampled operator, entry by entry."""
    dense = graph.operator(kind).matrix.to_dense()  # type: ignore[attr-defined]
    around = [u for u in range(N) if u != row and dense[row, u] != 0]
    scale = len(around) / len(kept) if kept else 1.0
    found = {u: float(dense[row, u]) * scale for u in kept}
    if dense[row, row] != 0:
        found[row] = float(dense[row, row])
    return found


@pytest.mark.parametrize("kind", ["normalised", "mean", "sum"])
def test_a_sampled_operator_equals_a_loop_over_its_entries(kind: OperatorKind) -> None:
    graph = make_graph(is_sparse=True)
    field = NeighborSampler(graph).draw(torch.tensor([7, 0, 29, 5]), [3, 2], rng(1))
    for number in range(2):
        level = field.level(number)
        inputs = level._nodes.tolist()  # type: ignore[attr-defined]
        outputs = level.output_nodes.tolist()  # type: ignore[attr-defined]
        matrix = level._operator(kind).matrix.to_dense()  # type: ignore[attr-defined]
        limit = [2, 3][number]  # the last layer's number comes first
        for row, node in enumerate(outputs):
            entries = {inputs[c]: float(v) for c, v in enumerate(matrix[row]) if v != 0}
            kept = set(entries) - {node}
            degree = int(
                ((graph.edge_index[1] == node) & (graph.edge_index[0] != node)).sum()
            )
            assert len(kept) == min(limit, degree)
            assert entries == pytest.approx(slow_rows(graph, kind, node, kept))


@pytest.mark.thorough
def test_the_mean_of_many_draws_is_the_whole_neighbourhood() -> None:
    graph = make_graph(is_sparse=True)
    sampler = NeighborSampler(graph)
    targets = torch.tensor([0, 1, 7, 5])
    h = torch.randn(N, D, generator=rng(2))
    generator = rng(3)
    draws = 3000
    kinds: tuple[OperatorKind, ...] = ("normalised", "mean", "sum")
    found: dict[OperatorKind, list[Tensor]] = {kind: [] for kind in kinds}
    for _ in range(draws):
        field: Any = sampler.draw(targets, [3], generator)
        for kind in kinds:
            found[kind].append(field.propagate(h[field._nodes], kind))
    for kind in kinds:
        stack = torch.stack(found[kind])
        error = stack.std(0) / draws**0.5
        expected = graph.propagate(h, kind)[targets]
        assert ((stack.mean(0) - expected).abs() <= 4.5 * error + 1e-5).all()
        assert (error[:2] > 0).all()  # hubs were really sampled


@pytest.mark.parametrize("name", ["gcn", "graphsage", "gin"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_large_limits_give_the_outputs_of_the_whole_graph(
    name: str, is_sparse: bool
) -> None:
    graph = make_graph(is_sparse=is_sparse)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(
            name,
            in_channels=D,
            hidden_channels=8,
            num_classes=3,
            num_layers=3,
            dropout=0.0,
        )
    targets = torch.tensor([4, 29, 0])
    field = NeighborSampler(graph).draw(targets, [N, N, N], rng(0))
    torch.testing.assert_close(model(field), model(graph)[targets])


def test_the_first_layer_of_strided_features_is_exact() -> None:
    graph = make_graph()
    weight = torch.randn(2, D, generator=rng(0))
    field = NeighborSampler(graph).draw(torch.tensor([0, 7]), [1, 1], rng(1))
    level = field.level(0)
    nodes: Tensor = level.output_nodes  # type: ignore[attr-defined]
    given = {"kind": "mean", "coefficients": (0.0, 1.0)}
    found = level.filtered_linear(None, weight, **given)  # type: ignore[arg-type]
    whole = graph.filtered_linear(None, weight, **given)  # type: ignore[arg-type]
    torch.testing.assert_close(found, whole[nodes])
    assert len(nodes) == 4  # two targets, one neighbour of each


def test_equal_generators_draw_equal_neighbours() -> None:
    sampler = NeighborSampler(make_graph())
    targets = torch.arange(6)
    drawn = [
        sampler.draw(targets, [2, 2], rng(seed)).level(1)._nodes  # type: ignore[attr-defined]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
