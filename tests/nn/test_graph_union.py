from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.nn.graph_union import GraphBatch, concatenated_ranges, select_rows
from tests.support.sparse import sparse

EMPTY_EDGES = torch.empty(2, 0, dtype=torch.int64)


@st.composite
def unions(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Sizes of the graphs (0 among them) and edges (graph, source, target)."""
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    places = [g for g, size in enumerate(sizes) if size]
    if not places:
        return sizes, []
    graph = st.sampled_from(places)
    edge = graph.flatmap(
        lambda g: st.tuples(
            st.just(g), st.integers(0, sizes[g] - 1), st.integers(0, sizes[g] - 1)
        )
    )
    return sizes, draw(st.lists(edge, max_size=12))


def build(sizes: list[int], edges: list[tuple[int, int, int]]) -> GraphBatch:
    first = [sum(sizes[:g]) for g in range(len(sizes))]
    columns = [(first[g] + u, first[g] + v) for g, u, v in edges]
    edge_index = torch.tensor(columns).T if columns else EMPTY_EDGES
    counts = torch.tensor(sizes, dtype=torch.int64)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    return GraphBatch(edge_index, batch, len(sizes))


@settings(max_examples=60, deadline=None)
@given(unions(), st.data())
def test_a_selection_is_the_batch_of_the_chosen_graphs(
    given_union: tuple[list[int], list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    sizes, edges = given_union
    chosen = data.draw(st.permutations(range(len(sizes))))
    chosen = chosen[: data.draw(st.integers(0, len(sizes)))]
    part = build(sizes, edges).select(torch.tensor(chosen, dtype=torch.int64))
    expected = build(
        [sizes[g] for g in chosen],
        [(chosen.index(g), u, v) for g, u, v in edges if g in chosen],
    )
    assert torch.equal(part.batch, expected.batch)
    pairs = sorted(part.edge_index.T.tolist())
    assert pairs == sorted(expected.edge_index.T.tolist())
    first = [sum(sizes[:g]) for g in range(len(sizes))]
    nodes = [first[g] + n for g in chosen for n in range(sizes[g])]
    assert part.nodes.tolist() == nodes
    assert torch.equal(
        part.nodes[part.edge_index], build(sizes, edges).edge_index[:, part.edges]
    )


def test_ranges_are_concatenated() -> None:
    first, count = torch.tensor([5, 0, 9, 2]), torch.tensor([2, 0, 1, 3])
    assert concatenated_ranges(first, count).tolist() == [5, 6, 9, 2, 3, 4]
    assert concatenated_ranges(first[:0], count[:0]).tolist() == []


@pytest.mark.parametrize(
    ("batch", "num_graphs"),
    [
        (torch.tensor([0, 1, 0]), None),
        (torch.tensor([0, 0, 2]), 2),
        (torch.tensor([-1, 0, 0]), None),
        (torch.tensor([0.0, 0.0, 1.0]), None),
        (torch.zeros(3, 1, dtype=torch.int64), None),
    ],
)
def test_a_malformed_batch_is_rejected(batch: Tensor, num_graphs: int | None) -> None:
    with pytest.raises(DataError, match="batch must"):
        GraphBatch(EMPTY_EDGES, batch, num_graphs)


def test_rows_of_sparse_features_are_those_of_dense_ones() -> None:
    dense = torch.tensor([[0.0, 1, 2], [0, 0, 0], [3, 0, 4], [0, 5, 0]])
    rows = torch.tensor([2, 1, 0, 2])
    assert torch.equal(select_rows(sparse(dense), rows).to_dense(), dense[rows])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ranges_follow_each_other_in_their_own_type(dtype: torch.dtype) -> None:
    first, count = torch.tensor([[7, 0, 3], [2, 0, 4]], dtype=dtype)
    expected = torch.tensor([7, 8, 3, 4, 5, 6], dtype=dtype)
    assert torch.equal(concatenated_ranges(first, count), expected)
    assert first.tolist() == [7, 0, 3]
