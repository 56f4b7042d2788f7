from __future__ import annotations

import pytest
import torch

from flower_fgl.algorithms.opfgl.labels import (
    distillation_factor,
    homophily,
    propagate_labels,
    reliable_nodes,
)
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.nn.sparse import SparseOperator


def walk(edge_index: torch.Tensor, n: int) -> SparseOperator:
    degree = torch.bincount(edge_index[1], minlength=n).float()
    value = (degree[edge_index[0]] * degree[edge_index[1]]).rsqrt()
    return SparseOperator.from_entries(*edge_index.flip(0), value, (n, n))


@pytest.mark.parametrize(("steps", "share"), [(0, 0.9), (2, 0.9), (5, 0.6)])
def test_label_propagation_is_that_of_a_slow_loop(
    toy: NodeDataset, steps: int, share: float
) -> None:
    edges = toy.edge_index.T.tolist()
    labels0 = torch.zeros(6, 2)
    labels0[0, 0] = labels0[4, 1] = 1
    degree = [sum(v == t for _, t in edges) for v in range(6)]
    soft = labels0.tolist()
    for _ in range(steps):
        spread = [[(1 - share) * y for y in row] for row in labels0.tolist()]
        for u, v in edges:
            for c in range(2):
                spread[v][c] += share * soft[u][c] / (degree[u] * degree[v]) ** 0.5
        soft = [[min(max(y, 0), 1) for y in row] for row in spread]
    want = torch.tensor([row if sum(row) else [0.5, 0.5] for row in soft])
    out = propagate_labels(walk(toy.edge_index, 6), labels0, steps=steps, share=share)
    torch.testing.assert_close(out, want)


def test_unreached_nodes_are_uniform_and_others_are_not_normalised():
    # 0 – 1 – 2 – 3, only 0 labelled: after two steps of a = .5 node 3 has no label
    pairs = torch.tensor([[0, 1], [1, 2], [2, 3]])
    edge_index = torch.cat([pairs, pairs.flip(1)]).T
    labels0 = torch.zeros(4, 4)
    labels0[0, 2] = 1
    out = propagate_labels(walk(edge_index, 4), labels0, steps=2, share=0.5)
    assert out[3].tolist() == [0.25] * 4
    # node 1: S_01 = 1/√2; Y1(1) = .5/√2, Y2(0) = .5 + .5·Y1(1)/√2 = .625, at step 2
    # Y2(1) = .5·Y1(0)/√2 = .5·.5/√2 = .17678
    assert out[0, 2] == pytest.approx(0.625)
    assert out[1, 2] == pytest.approx(0.17678, abs=1e-5)


def test_label_propagation_leaves_the_given_labels_alone(toy: NodeDataset):
    labels0 = torch.eye(6)[:, :2]
    before = labels0.clone()
    propagate_labels(walk(toy.edge_index, 6), labels0, steps=3, share=0.9)
    assert torch.equal(labels0, before)


def test_homophily_is_that_of_a_slow_loop(generator: torch.Generator):
    edge_index = torch.randint(0, 30, (2, 120), generator=generator)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1).unique(dim=1)
    labels = torch.randint(-1, 3, (30,), generator=generator)
    want = [0.0] * 4
    for v in range(30):
        if labels[v] < 0:
            continue
        neighbours = [int(u) for u, w in edge_index.T.tolist() if w == v]
        seen = [int(labels[u]) for u in neighbours if labels[u] >= 0]
        if seen:
            want[int(labels[v])] += seen.count(int(labels[v])) / len(seen)
    assert homophily(edge_index, labels, 4).tolist() == pytest.approx(want)


def test_homophily_of_the_toy_graph(toy: NodeDataset):
    # two triangles joined by 2 – 3: nodes 2 and 3 have 2 of 3 neighbours of their class
    assert homophily(toy.edge_index, toy.y, 2).tolist() == pytest.approx([8 / 3, 8 / 3])
    # without node 3's label node 2 is purely homophilic, and 4, 5 see one another
    labels = toy.y.clone()
    labels[3] = -1
    assert homophily(toy.edge_index, labels, 2).tolist() == pytest.approx([3, 2])


def test_self_loops_do_not_make_a_node_homophilic():
    loop = torch.tensor([[0, 0, 1], [0, 1, 0]])
    assert homophily(loop, torch.tensor([0, 1]), 2).tolist() == [0, 0]


def test_a_graph_without_edges_has_no_homophily():
    none = torch.empty((2, 0), dtype=torch.int64)
    assert homophily(none, torch.tensor([0, -1, 1]), 3).tolist() == [0, 0, 0]


def test_the_distillation_factor_has_the_values_of_the_table():
    # 1/(1 + ln 2) = .5906, 1/(1 + ln 6) = .3582, 1/(1 + ln 21) = .2472, 1/(1 + ln 61)
    factor = distillation_factor(torch.tensor([0.0, 1, 5, 20, 60]))
    assert factor.tolist() == pytest.approx([1, 0.591, 0.358, 0.247, 0.196], abs=5e-4)


def test_reliable_nodes_meet_every_condition():
    soft = torch.tensor(
        [
            [0.0, 0.4, 0.0],  # all right: 100 % class 1
            [0.0, 0.4, 0.1],  # 80 %
            [0.0, 0.4, 0.0],  # has a label
            [0.0, 0.4, 0.0],  # degree too small
            [0.3, 0.0, 0.0],  # class 0 is not among the two most homophilic
            [0.0, 0.0, 0.2],  # all right: class 2
        ]
    )
    found = reliable_nodes(
        soft,
        torch.tensor([3, 3, 3, 2, 3, 3]),
        torch.tensor([True, True, False, True, True, True]),
        torch.tensor([0.5, 4.0, 0.6]),
        min_confidence=1.0,
        min_degree=3,
        num_classes_kept=2,
    )
    assert found.tolist() == [1, -1, -1, -1, -1, 2]


def test_equally_homophilic_classes_are_ranked_by_id():
    found = reliable_nodes(
        torch.eye(4),
        torch.ones(4),
        torch.ones(4, dtype=torch.bool),
        torch.tensor([1.0, 2.0, 2.0, 2.0]),
        min_confidence=0.9,
        min_degree=0,
        num_classes_kept=2,
    )
    assert found.tolist() == [-1, 1, 2, -1]


def test_keeping_more_classes_than_there_are_keeps_all():
    found = reliable_nodes(
        torch.eye(2),
        torch.ones(2),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(2),
        min_confidence=0.9,
        min_degree=0,
        num_classes_kept=9,
    )
    assert found.tolist() == [0, 1]
