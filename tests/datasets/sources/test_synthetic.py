from __future__ import annotations

import numpy as np
import pymetis
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.settings import SyntheticSettings
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.graph_files.validate import validate_node_dataset
from flower_fgl.datasets.sources.synthetic import synthetic_dataset


def draw(seed: int = 0, **changes: float) -> NodeDataset:
    return synthetic_dataset(SyntheticSettings(**changes), seed)


def adjacency(dataset: NodeDataset) -> scipy.sparse.csr_matrix:
    row, col = dataset.edge_index.numpy()
    size = (dataset.num_nodes, dataset.num_nodes)
    return scipy.sparse.csr_matrix((np.ones(len(row)), (row, col)), size)


def metis_class_shares(dataset: NodeDataset, clients: int) -> np.ndarray:
    matrix = adjacency(dataset)
    graph = pymetis.CSRAdjacency(matrix.indptr, matrix.indices)
    _, part = pymetis.part_graph(clients, adjacency=graph)
    counts = np.zeros((clients, dataset.num_classes))
    np.add.at(counts, (np.array(part), dataset.y.numpy()), 1)
    return counts / counts.sum(axis=1, keepdims=True)


def nearest_mean_accuracy(x: np.ndarray, y: np.ndarray) -> float:
    """Fit nearest class means on the even nodes, score them on the odd ones."""
    classes = np.unique(y)
    means = np.stack([x[::2][y[::2] == c].mean(axis=0) for c in classes])
    distance = ((x[1::2, None] - means) ** 2).sum(axis=2)
    return float((classes[distance.argmin(axis=1)] == y[1::2]).mean())


def test_edges_and_homophily_are_exact():
    dataset = draw(homophily=0.63, degree=9.3)
    row, col = dataset.edge_index
    assert dataset.edge_index.shape[1] == 2 * 9300  # 2000 nodes · 9.3 / 2
    same = int((dataset.y[row] == dataset.y[col]).sum()) // 2
    assert same == 5859  # 9300 · 0.63


def test_the_same_seed_gives_the_same_graph_and_another_one_does_not():
    first, again, other = draw(), draw(), draw(seed=1)
    assert torch.equal(first.edge_index, again.edge_index)
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.y, again.y)
    assert not torch.equal(first.y, other.y)


def test_classes_follow_their_block():
    alike, skewed = draw(block_skew=0.0, nodes=20000), draw(nodes=20000)
    for dataset in (alike, skewed):  # each class is favoured by as many blocks
        assert dataset.y.bincount().numpy() / 20000 == pytest.approx(0.2, abs=0.02)
    # a block of 1000 nodes: its own class has the share 0.3 / 5 + 0.7 = 0.76
    largest = metis_class_shares(skewed, 20).max(axis=1)
    assert np.median(largest) == pytest.approx(0.76, abs=0.08)
    assert np.median(metis_class_shares(alike, 20).max(axis=1)) < 0.5


def test_features_are_noise_around_standard_normal_class_means():
    dataset = draw(nodes=20000, features=50, feature_noise=3.0, classes=40)
    means = torch.stack([dataset.x[dataset.y == c].mean(0) for c in range(40)])
    assert float((dataset.x - means[dataset.y]).std()) == pytest.approx(3.0, rel=0.02)
    assert float(means.std()) == pytest.approx(1.0, rel=0.05)


def test_features_of_a_class_are_equal_without_noise():
    dataset = draw(feature_noise=0.0)
    for c in range(5):
        assert len(dataset.x[dataset.y == c].unique(dim=0)) == 1


def test_neighbours_improve_classification():
    dataset = draw()
    x, y = dataset.x.numpy(), dataset.y.numpy()
    matrix = adjacency(dataset) + scipy.sparse.eye(dataset.num_nodes)
    mean = scipy.sparse.diags(1 / matrix.sum(axis=1).A1) @ matrix
    alone, smoothed = nearest_mean_accuracy(x, y), nearest_mean_accuracy(mean @ x, y)
    assert 0.4 < alone < 0.75
    assert smoothed > alone + 0.1
    assert smoothed < 0.97  # a task with something left to learn


def test_the_defaults_are_a_valid_graph():
    dataset = synthetic_dataset(SyntheticSettings(), seed=3)
    validate_node_dataset(dataset)
    assert dataset.x.shape == (2000, 64)
    assert dataset.class_names == ("0", "1", "2", "3", "4")


def test_a_graph_of_the_size_of_ogbn_arxiv_gets_all_its_edges():
    dataset = draw(nodes=169_343, classes=40, degree=13.8, features=16)
    assert dataset.edge_index.shape[1] == 2 * round(169_343 * 6.9)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"nodes": 10, "degree": 8.0}, "inside a class"),
        ({"nodes": 10, "degree": 8.0, "homophily": 0.0}, "between classes"),
    ],
)
def test_a_graph_too_dense_to_draw_is_rejected(changes, kind):
    with pytest.raises(
        ConfigError, match=rf"requested .* edges {kind}.*synthetic\.degree"
    ):
        draw(**changes)


@given(
    nodes=st.integers(2, 60),
    classes=st.integers(2, 6),
    homophily=st.floats(0, 1),
    degree=st.floats(0, 6),
    blocks=st.integers(1, 80),
    block_skew=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_any_settings_give_the_specified_graph_or_one_error(**values):
    try:
        dataset = draw(features=3, **values)
    except ConfigError:
        return
    validate_node_dataset(dataset)
    wanted = round(values["nodes"] * values["degree"] / 2)
    assert dataset.edge_index.shape == (2, 2 * wanted)
    row, col = dataset.edge_index
    same = int((dataset.y[row] == dataset.y[col]).sum())
    assert same == 2 * round(wanted * values["homophily"])
