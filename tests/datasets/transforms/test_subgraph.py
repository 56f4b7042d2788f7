from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_fgl import Run, simulate
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError
from flower_fgl.datasets import store
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import Graph
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.transforms.canonical import csr_tensor
from flower_fgl.datasets.transforms.subgraph import (
    Sparsity,
    cut_clients,
    induced_subgraph,
    inductive_graphs,
    remove_edges,
    remove_features,
    remove_labels,
    select_rows,
    sparsify,
)
from flower_fgl.methods import parse_config
from tests.support.methods import OF_PLAIN_GRAPHS
from tests.support.owners import owner_graphs
from tests.support.short_runs import SMALL, shortened
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


SHARES = (0.0, 0.2, 0.5, 0.8, 0.999)

ALL_THREE = {"feature-sparsity": 0.5, "edge-sparsity": 0.5, "label-sparsity": 0.5}


def draw() -> np.random.Generator:
    return np.random.default_rng(3)


def ring(num_nodes: int) -> Tensor:
    here = torch.arange(num_nodes)
    there = (here + 1) % num_nodes
    both = torch.stack([torch.cat([here, there]), torch.cat([there, here])])
    return both[:, np.lexsort((both[1].numpy(), both[0].numpy()))]


def pairs(edge_index: Tensor) -> set[tuple[int, ...]]:
    return {tuple(edge) for edge in edge_index.T.tolist()}


def twenty() -> Graph:
    """Twenty nodes in a ring: training nodes 0..9, of classes 0 (7), 1 (2) and 2 (1)."""
    nodes = torch.arange(20)
    y = torch.tensor([0] * 7 + [1] * 2 + [2] + [0, 1] * 5)
    masks = {"train": nodes < 10, "val": (nodes >= 10) & (nodes < 15)}
    return Graph(torch.ones(20, 5), ring(20), y, masks | {"test": nodes >= 15})


def config(**values: Any) -> RunConfig:
    settings = {"synthetic.nodes": 90, "synthetic.classes": 3, "synthetic.blocks": 6}
    return parse_config({**settings, **values})


def test_edges_are_removed_in_both_directions_and_a_larger_share_removes_a_superset() -> (
    None
):
    edge_index, larger = ring(10), set()
    for share, left in zip(SHARES, (10, 8, 5, 2, 1), strict=True):
        kept = remove_edges(edge_index, 10, share, generator=draw())
        assert kept.shape == (2, 2 * left)
        assert pairs(kept) == pairs(kept.flip(0))
        gone = pairs(edge_index) - pairs(kept)
        assert larger <= gone
        larger = gone


def test_a_graph_without_edges_is_unchanged() -> None:
    none = torch.empty((2, 0), dtype=torch.int64)
    assert remove_edges(none, 4, 0.5, generator=draw()).shape == (2, 0)


def test_every_class_loses_its_share_of_labels_and_keeps_one() -> None:
    graph, larger = twenty(), torch.zeros(20, dtype=torch.bool)
    expected = ([0, 0, 0], [1, 0, 0], [3, 1, 0], [5, 1, 0], [6, 1, 0])
    for share, lost in zip(SHARES, expected, strict=True):
        chosen = remove_labels(graph.y, graph.masks["train"], share, generator=draw())
        assert torch.bincount(graph.y[chosen], minlength=3).tolist() == lost
        assert not (chosen & ~graph.masks["train"]).any()
        assert not (larger & ~chosen).any()
        larger = chosen


def test_a_share_counts_as_the_decimal_it_was_written_as() -> None:
    # 0.29 · 100 is 28.999999999999996 in floating point
    kept = remove_edges(ring(100), 100, 0.29, generator=draw())
    assert kept.shape == (2, 2 * 71)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_only_the_chosen_nodes_lose_features(is_sparse: bool) -> None:
    x = torch.arange(20.0).reshape(4, 5) % 3  # zeros at 0, 3, 6, 9, 12, 15, 18
    nodes = torch.tensor([True, False, True, False])
    given = csr_tensor(scipy.sparse.csr_matrix(x.numpy())) if is_sparse else x
    held = x[nodes].count_nonzero()  # 3 + 4
    larger = torch.zeros(4, 5, dtype=torch.bool)
    for share, lost in zip(SHARES, (0, 1, 3, 5, 6), strict=True):
        left = remove_features(given, nodes, share, generator=draw())
        assert left.layout == given.layout
        gone = left.to_dense() != x
        assert int(gone.sum()) == lost
        assert held - left.to_dense()[nodes].count_nonzero() == lost
        assert not gone[~nodes].any()
        assert not (larger & ~gone).any()
        larger = gone
    assert torch.equal(given.to_dense(), x)


def test_dense_and_sparse_features_lose_the_same_entries() -> None:
    x = torch.eye(8) + torch.eye(8).roll(1, 0)
    nodes = torch.arange(8) > 1
    sparse = csr_tensor(scipy.sparse.csr_matrix(x.numpy()))
    left = remove_features(sparse, nodes, 0.5, generator=draw())
    dense = remove_features(x, nodes, 0.5, generator=draw())
    assert torch.equal(left.to_dense(), dense)
    assert left.values().numel() == dense.count_nonzero()


def test_a_node_that_lost_its_label_is_in_no_mask_and_may_lose_features() -> None:
    graph = twenty()
    out = sparsify(graph, Sparsity(0.9, 0.5, 0.5), seed=1, partition_id=0)
    lost = graph.masks["train"] & ~out.masks["train"]
    assert int(lost.sum()) == 3 + 1
    assert (out.y[lost] == -1).all()
    assert torch.equal(out.y[~lost], graph.y[~lost])
    for name in ("val", "test"):
        assert torch.equal(out.masks[name], graph.masks[name])
    assert (out.x[out.masks["train"]] == 1).all()
    assert int((out.x == 0).sum()) == 63  # of 5 · (10 + 4) = 70
    assert (out.x[lost] == 0).any()
    assert out.edge_index.shape == (2, 2 * 10)


def test_each_kind_of_sparsity_has_independent_random_draws() -> None:
    alone = sparsify(twenty(), Sparsity(edges=0.5), seed=1, partition_id=0)
    three = sparsify(twenty(), Sparsity(0.3, 0.5, 0.3), seed=1, partition_id=0)
    other = sparsify(twenty(), Sparsity(edges=0.5), seed=1, partition_id=1)
    assert torch.equal(alone.edge_index, three.edge_index)
    assert not torch.equal(alone.edge_index, other.edge_index)


def test_the_log_counts_the_remaining_labels_and_edges_of_a_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        sparsify(twenty(), Sparsity(edges=0.5, labels=0.5), seed=1, partition_id=7)
    assert "Client 7 keeps 6 of 10 training labels and 10 of 20 edges" in caplog.text


def test_hash_and_folder_are_unchanged_without_sparsity() -> None:
    none = config(partition="uniform", **dict.fromkeys(ALL_THREE, 0.0))
    plain = config(partition="uniform")
    assert store._folder_name(none, 3) == store._folder_name(plain, 3)
    clients, sha256, _ = build_clients(config(partition="uniform"), 3)
    parts = b"".join(c.node_ids.numpy().astype("<i8").tobytes() for c in clients)
    header = np.array([3, 30, 30, 30], "<i8").tobytes()
    assert sha256 == hashlib.sha256(header + parts).hexdigest()


@pytest.mark.parametrize("key", sorted(ALL_THREE))
def test_every_sparsity_changes_hash_and_folder(key: str) -> None:
    base = config(partition="uniform")
    some, more = (config(partition="uniform", **{key: s}) for s in (0.2, 0.4))
    assert len({store._folder_name(c, 3) for c in (base, some, more)}) == 3
    assert len({build_clients(c, 3)[1] for c in (base, some, more)}) == 3


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_validation_and_test_nodes_stay(setting: str) -> None:
    full, _, _ = build_clients(config(setting=setting), 3)
    less, _, _ = build_clients(config(setting=setting, **ALL_THREE), 3)
    for before, after in zip(full, less, strict=True):
        assert after.class_counts().sum() < before.class_counts().sum()
        assert ((after.class_counts() > 0) == (before.class_counts() > 0)).all()
        for left, right in zip(
            (before.graph, *before.evaluation),
            (after.graph, *after.evaluation),
            strict=True,
        ):
            for name in ("val", "test"):
                if name in left.masks:
                    assert left.masks[name].sum() == right.masks[name].sum()


@pytest.mark.parametrize("key", sorted(ALL_THREE))
@pytest.mark.parametrize("share", [1.0, -0.1, 2])
def test_a_share_out_of_range_is_rejected(key: str, share: float) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be >= 0 and < 1"):
        config(**{key: share})


@pytest.mark.parametrize("key", sorted(ALL_THREE))
def test_graph_classification_rejects_sparsity(key: str) -> None:
    values = {"dataset": "mutag", "setting": "graph", "partition": "uniform"}
    with pytest.raises(ConfigError, match=f"use {key} = 0, got 0.5"):
        config(**values, **{key: 0.5})


def test_an_owners_graph_rejects_sparsity(tmp_path: Path) -> None:
    save_client_graph(tmp_path / "mine.npz", owner_graphs()[0])
    with pytest.raises(ConfigError, match="An owner's graph file is used unchanged"):
        client_from_file(tmp_path / "mine.npz", config(**{"edge-sparsity": 0.5}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run on the whole graphs."""
    folder = str(tmp_path_factory.mktemp("whole"))
    return simulate(**{**SMALL, "rounds": 1, "clients": 3, "output_dir": folder})


@pytest.mark.parametrize("method", OF_PLAIN_GRAPHS)
def test_every_method_runs_with_sparsity(
    method: str, small: dict[str, Any], whole: Run
) -> None:
    shares = {key.replace("-", "_"): share for key, share in ALL_THREE.items()}
    run = simulate(method, **shortened(method, small), **shares)
    assert run.status == "completed"
    assert all(not row["failures"] for row in run.rounds)
    assert run.summary["partition_sha256"] != whole.summary["partition_sha256"]
    seen, known = (r.best["test"] for r in (run, whole))
    assert seen["num_nodes"] == known["num_nodes"]
