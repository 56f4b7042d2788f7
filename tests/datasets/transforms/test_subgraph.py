from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_fgl.datasets.client_graph import Graph
from flower_fgl.datasets.transforms.subgraph import (
    cut_clients,
    induced_subgraph,
    inductive_graphs,
    owner_of_nodes,
    select_rows,
)
from tests.support.sparse import sparse


@st.composite
def cut_graphs(draw):
    """Draw edges, a number of nodes, and disjoint parts that need not cover them."""
    num_nodes = draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends = rng.integers(0, num_nodes, (2, draw(st.integers(0, 90))))
    ends = ends[:, ends[0] != ends[1]]
    both = np.unique(np.concatenate([ends, ends[::-1]], axis=1), axis=1)
    num_clients = draw(st.integers(1, 5))
    owner = rng.integers(-1, num_clients, num_nodes)
    parts = [np.flatnonzero(owner == client) for client in range(num_clients)]
    return torch.from_numpy(both), num_nodes, parts


@given(cut_graphs())
def test_cutting_all_clients_agrees_with_a_loop_over_edges(drawn):
    edge_index, num_nodes, parts = drawn
    pieces = cut_clients(edge_index, num_nodes, parts)
    assert len(pieces) == len(parts)
    for part, piece in zip(parts, pieces, strict=True):
        place = {int(node): i for i, node in enumerate(part)}
        kept = [
            [place[u], place[v]]
            for u, v in edge_index.T.tolist()
            if u in place and v in place
        ]
        assert piece.dtype == torch.int64
        assert piece.shape == (2, len(kept))
        assert piece.T.tolist() == kept
        assert torch.equal(piece, induced_subgraph(edge_index, num_nodes, part))


@given(cut_graphs())
def test_partitioning_never_increases_a_degree(drawn):
    edge_index, num_nodes, parts = drawn
    degree = torch.bincount(edge_index[0], minlength=num_nodes)
    pieces = cut_clients(edge_index, num_nodes, parts)
    for part, piece in zip(parts, pieces, strict=True):
        local = torch.bincount(piece[0], minlength=len(part))
        assert (local <= degree[part]).all()


def test_a_client_without_edges_keeps_an_edge_index_of_shape_two_by_zero(toy):
    lonely, empty, rest = cut_clients(
        toy.edge_index, 6, [np.array([0, 5]), np.array([], int), np.array([1, 2, 3, 4])]
    )
    assert lonely.shape == empty.shape == (2, 0)
    assert lonely.dtype == empty.dtype == torch.int64
    assert rest.tolist() == [[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]
    assert induced_subgraph(toy.edge_index, 6, torch.tensor([0, 5])).shape == (2, 0)


def test_client_edges_do_not_share_memory_with_the_complete_graph(toy):
    (piece,) = cut_clients(toy.edge_index, 6, [np.arange(6)])
    assert torch.equal(piece, toy.edge_index)
    piece += 1
    assert int(toy.edge_index.min()) == 0


def test_an_induced_subgraph_follows_the_order_of_the_list(toy):
    edges = induced_subgraph(toy.edge_index, 6, torch.tensor([3, 2, 0]))
    # 0-2 and 2-3 stay; 3, 2, 0 are now 0, 1, 2
    assert sorted(edges.T.tolist()) == [[0, 1], [1, 0], [1, 2], [2, 1]]


def test_parts_that_share_a_node_are_rejected(toy):
    with pytest.raises(ValueError, match="they list 4 nodes of which only 3 differ"):
        cut_clients(toy.edge_index, 6, [np.array([0, 1]), np.array([1, 2])])


def test_an_unassigned_node_has_no_owner():
    owner = owner_of_nodes(4, [np.array([2]), np.array([0])])
    assert owner.tolist() == [1, -1, 0, -1]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [[2, 0], [1], [], [0, 1, 2, 3], [3, 3]])
def test_rows_of_a_sparse_matrix_are_those_of_the_dense_one(rows, index):
    dense = torch.tensor([[0, 1.5, 0], [0, 0, 0], [2, 0, 3], [0, 0, 4]])
    whole = sparse(dense)
    stored = torch.sparse_csr_tensor(
        whole.crow_indices().to(index),
        whole.col_indices().to(index),
        whole.values(),
        size=whole.shape,
        check_invariants=True,
    )
    taken = select_rows(stored, torch.tensor(rows, dtype=torch.int64))
    assert taken.layout == torch.sparse_csr
    assert taken.crow_indices().dtype == taken.col_indices().dtype == index
    torch.testing.assert_close(taken.to_dense(), dense[rows])


@pytest.fixture
def path():
    """A path of eight nodes: three train, two validate, two test, one is in no mask."""
    first = torch.arange(7)
    edges = torch.cat(
        [torch.stack([first, first + 1]), torch.stack([first + 1, first])], 1
    )
    role = ["train", "train", "val", "val", "test", "test", "none", "train"]
    return Graph(
        x=torch.tensor(
            [[1.0, 5], [3, 5], [5, 5], [7, 6], [9, 5], [11, 5], [0, 0], [5, 5]]
        ),
        edge_index=edges[:, torch.argsort(edges[0] * 8 + edges[1])],
        y=torch.arange(8),
        masks={
            name: torch.tensor([own == name for own in role])
            for name in ("train", "val", "test")
        },
    )


def test_inductive_graphs_keep_only_edges_within_each_set(path):
    (train, val, test), nodes = inductive_graphs(path)
    assert nodes.tolist() == [0, 1, 7]
    assert train.y.tolist() == [0, 1, 7]
    assert train.edge_index.tolist() == [[0, 1], [1, 0]]
    assert {name: mask.tolist() for name, mask in train.masks.items()} == {
        "train": [True, True, True],
        "val": [False, False, False],
        "test": [False, False, False],
    }
    for name, part, own in (("val", val, [2, 3]), ("test", test, [4, 5])):
        assert part.y.tolist() == own
        assert part.edge_index.tolist() == [[0, 1], [1, 0]]
        assert {key: mask.tolist() for key, mask in part.masks.items()} == {
            name: [True, True]
        }
    torch.testing.assert_close(test.x, path.x[4:6])


def test_empty_validation_and_test_sets_give_graphs_without_nodes(path):
    none = torch.zeros(8, dtype=torch.bool)
    masks = {"train": ~none, "val": none, "test": none}
    (train, val, test), _ = inductive_graphs(
        Graph(path.x, path.edge_index, path.y, masks)
    )
    assert torch.equal(train.edge_index, path.edge_index)
    assert val.x.shape == test.x.shape == (0, 2)
    assert val.edge_index.shape == (2, 0)
