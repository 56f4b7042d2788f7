from __future__ import annotations

import numpy as np
import pytest

from flower_fgl.core.errors import DataError
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.datasets.partition.communities import group_nodes
from flower_fgl.datasets.partition.label_skew import (
    cluster_by_labels,
    count_classes,
    deal_evenly,
    deal_evenly_by_class,
    dirichlet_parts,
)

CORA = [351, 217, 418, 818, 426, 298, 180]  # nodes of each class


@pytest.fixture(scope="module")
def cora_labels():
    labels = np.repeat(np.arange(len(CORA)), CORA)
    return np.random.default_rng(0).permutation(labels)


def effective_classes(counts):
    share = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(share, out=np.zeros_like(share), where=share > 0)
    return np.exp(-(share * logs).sum(axis=1))


def dirichlet_by_the_letter(labels, num_clients, alpha, generator):
    """One try, class by class with Python lists: an independent, slow version."""
    clients = [[] for _ in range(num_clients)]
    for c in range(labels.max() + 1):
        ids = generator.permutation([i for i, y in enumerate(labels) if y == c])
        pi = generator.dirichlet([alpha] * num_clients)
        for i, client in enumerate(clients):
            if len(client) >= len(labels) / num_clients:
                pi[i] = 0
        pi = pi / pi.sum()
        begin = 0
        for i, client in enumerate(clients):
            end = int(np.floor(pi[: i + 1].sum() * len(ids)))
            end = len(ids) if i == num_clients - 1 else end
            client.extend(ids[begin:end])
            begin = end
    return [sorted(client) for client in clients]


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
@pytest.mark.parametrize("seed", [0, 42])
def test_the_dirichlet_rule_agrees_with_a_slow_reference_implementation(
    cora_labels, alpha, seed
):
    parts = dirichlet_parts(cora_labels, 5, alpha=alpha, seed=seed)
    for attempt in range(100):
        generator = numpy_generator(seed, 0, SERVER, f"partition/dirichlet/{attempt}")
        expected = dirichlet_by_the_letter(cora_labels, 5, alpha, generator)
        if min(map(len, expected)) >= 5:
            break
    assert [part.tolist() for part in parts] == expected


def test_dirichlet_clients_hold_at_least_five_members_at_any_skew():
    labels = np.repeat([0, 1, 2], 40)
    smallest = [
        min(map(len, dirichlet_parts(labels, 6, alpha=0.1, seed=seed)))
        for seed in range(20)
    ]
    assert min(smallest) >= 5


def test_large_alpha_gives_every_client_the_global_label_shares(cora_labels):
    parts = dirichlet_parts(cora_labels, 5, alpha=1000, seed=42)
    counts = count_classes(parts, cora_labels, 7)
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert np.abs(shares - np.array(CORA) / sum(CORA)).max() < 0.05


def test_small_alpha_skews_labels_clearly_more_than_large_alpha(cora_labels):
    def skew(alpha):
        parts = dirichlet_parts(cora_labels, 5, alpha=alpha, seed=42)
        return effective_classes(count_classes(parts, cora_labels, 7)).mean()

    assert skew(0.1) < 0.75 * skew(0.9)


def test_members_of_unknown_class_are_assigned_last_as_one_more_class():
    labels = np.random.default_rng(1).permutation(np.repeat([-1, 0, 1], 30))
    unknown_as_two = np.where(labels < 0, 2, labels)
    parts = dirichlet_parts(labels, 3, alpha=1, seed=0)
    expected = dirichlet_parts(unknown_as_two, 3, alpha=1, seed=0)
    assert [p.tolist() for p in parts] == [p.tolist() for p in expected]
    assert sorted(np.concatenate(parts)) == list(range(90))


def test_shares_too_small_for_a_float_still_cover_everything():
    labels = np.repeat(np.arange(20), 10)
    parts = dirichlet_parts(labels, 4, alpha=1e-12, seed=0)
    assert sorted(np.concatenate(parts)) == list(range(200))


def test_the_dirichlet_error_gives_the_maximum_number_of_clients():
    with pytest.raises(
        DataError, match=r"4 clients need 20, but the dataset has 19.*at most 3"
    ):
        dirichlet_parts(np.zeros(19, np.int64), 4, alpha=1, seed=0)


def test_dirichlet_fails_after_a_hundred_attempts_with_advice():
    with pytest.raises(
        DataError, match=r"alpha = 0\.01 .* in 100 attempts. Use a larger"
    ):
        dirichlet_parts(np.zeros(60, np.int64), 6, alpha=0.01, seed=0)


@pytest.mark.parametrize("num_clients", [1, 3, 7, 10])
def test_even_assignment_by_class_keeps_class_counts_and_sizes_within_one(num_clients):
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 3], [63, 125, 8]))
    parts = deal_evenly_by_class(labels, num_clients, seed=42)
    counts = count_classes(parts, labels, 4)
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp([len(part) for part in parts]) <= 1
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))


def test_even_assignment_shuffles_and_depends_on_the_seed():
    first, second = (deal_evenly(100, 4, seed=seed) for seed in (0, 1))
    assert [len(part) for part in first] == [25, 25, 25, 25]
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert any(np.ptp(np.diff(part)) > 0 for part in first)  # not every fourth node


def test_classes_are_counted_per_part_without_unknown_ones():
    labels = np.array([0, 2, -1, 2, 0, 0])
    parts = [np.array([0, 1, 3]), np.array([], dtype=np.int64), np.array([2, 4, 5])]
    counts = count_classes(parts, labels, 3)
    assert counts.tolist() == [[1, 0, 2], [0, 0, 0], [2, 0, 0]]


def test_communities_with_similar_labels_are_assigned_to_one_client():
    owner = np.repeat(np.arange(9), 10)
    labels = np.repeat(np.arange(9) % 3, 10)
    labels[::10] = (labels[::10] + 1) % 3  # shares (0.9, 0.1, 0) and its rotations
    parts = cluster_by_labels(group_nodes(owner, 9), labels, 3, 3, seed=0)
    kinds = sorted(np.unique(owner[part]).tolist() for part in parts)
    assert kinds == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_too_few_distinct_communities_are_an_error_with_both_numbers():
    communities = group_nodes(np.repeat(np.arange(4), 2), 4)
    labels = np.repeat([0, 0, 1, 1], 2)
    with pytest.raises(
        DataError, match=r"3 clients need 3.*4 communities with 2 different"
    ):
        cluster_by_labels(communities, labels, 2, 3, seed=0)


def test_an_empty_cluster_is_repeated_with_the_next_seed(monkeypatch):
    from flower_fgl.datasets.partition import label_skew

    seeds = []

    def clusters(points, num_clusters, *, seed):
        seeds.append(seed)
        return np.array([0, 0, 0]) if len(seeds) < 3 else np.array([0, 1, 0])

    monkeypatch.setattr(label_skew, "_kmeans", clusters)
    communities = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5])]
    parts = cluster_by_labels(communities, np.array([0, 0, 1, 1, 0, 1]), 2, 2, seed=42)
    assert seeds == [42, 43, 44]
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3]]


def test_permanently_empty_clusters_are_an_error(monkeypatch):
    from flower_fgl.datasets.partition import label_skew

    monkeypatch.setattr(
        label_skew, "_kmeans", lambda points, num_clusters, *, seed: np.zeros(2, int)
    )
    with pytest.raises(DataError, match="for 100 seeds from 42 on"):
        cluster_by_labels(
            [np.array([0]), np.array([1])], np.array([0, 1]), 2, 2, seed=42
        )
