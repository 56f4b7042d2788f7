from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from tests.datasets.partition.summary import describe_partition


def test_the_summary_of_two_triangles_agrees_with_a_count_by_hand(toy):
    summary = describe_partition(toy, [np.array([0, 1, 2, 3]), np.array([4, 5])])
    assert summary.sizes.tolist() == [4, 2]
    assert summary.class_counts.tolist() == [[3, 1], [0, 2]]
    # five of seven edges stay; 3-4 and 3-5 join two clients
    assert summary.share_edges_kept == pytest.approx(5 / 7)
    assert summary.num_classes_present.tolist() == [2, 1]
    assert summary.num_classes_present.mean() == 1.5
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    np.testing.assert_allclose(summary.exp_label_entropy, [math.exp(entropy), 1.0])
    assert summary.exp_label_entropy.mean() == pytest.approx(
        (math.exp(entropy) + 1) / 2
    )


def test_nodes_of_unknown_class_count_for_size_only(toy):
    hidden = NodeDataset(
        toy.name,
        toy.x,
        toy.edge_index,
        torch.tensor([-1, -1, -1, 1, 0, 1]),
        toy.target,
    )
    summary = describe_partition(hidden, [np.array([0, 1, 2]), np.array([3, 4, 5])])
    assert summary.sizes.tolist() == [3, 3]
    assert summary.class_counts.tolist() == [[0, 0], [1, 2]]
    assert summary.exp_label_entropy[0] == 0


def test_edges_of_unassigned_nodes_are_not_kept(toy):
    summary = describe_partition(toy, [np.array([0, 1])])
    assert summary.share_edges_kept == pytest.approx(1 / 7)


def test_a_graph_without_edges_keeps_all_edges(toy):
    bare = NodeDataset(toy.name, toy.x, toy.edge_index[:, :0], toy.y, toy.target)
    summary = describe_partition(bare, [np.arange(3), np.arange(3, 6)])
    assert summary.share_edges_kept == 1


def test_partitioned_graphs_keep_all_their_edges():
    dataset = GraphDataset(
        name="pairs",
        x=torch.zeros(6, 0),
        edge_index=torch.tensor([[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4]]),
        batch=torch.tensor([0, 0, 1, 1, 2, 2]),
        y=torch.tensor([0, 1, 1]),
        target=Target.classes("ab"),
    )
    summary = describe_partition(dataset, [np.array([0, 2]), np.array([1])])
    assert summary.share_edges_kept == 1
    assert summary.class_counts.tolist() == [[1, 1], [0, 1]]
