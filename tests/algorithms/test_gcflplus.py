"""GCFL+'s equations, by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flower_fgl.algorithms.gcflplus import (
    bipartition,
    dtw_distances,
    splits,
    update_norms,
)

SERIES = [[1.0, 2, 3], [1, 1, 2], [5, 6, 7], [5, 5, 6]]


def slow_dtw(a: list[float], b: list[float]) -> float:
    if len(a) == 1 or len(b) == 1:
        pairs = itertools.product(a, b)
        return sum((x - y) ** 2 for x, y in pairs)
    rest = [(a[:-1], b), (a, b[:-1]), (a[:-1], b[:-1])]
    return (a[-1] - b[-1]) ** 2 + min(slow_dtw(x, y) for x, y in rest)


def test_distances_of_four_series_by_hand() -> None:
    found = dtw_distances(torch.tensor(SERIES))
    expected = {
        (0, 1): 1.0, (0, 2): 6.9282, (0, 3): 5.8310,
        (1, 2): 8.1240, (1, 3): 6.9282, (2, 3): 1.0,
    }  # fmt: skip
    for (i, j), value in expected.items():
        assert found[i, j].item() == pytest.approx(value, abs=1e-4)
        assert found[j, i] == found[i, j]
    assert not found.diagonal().any()


def test_distances_equal_a_recursion() -> None:
    series = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).tolist()
    found = dtw_distances(torch.tensor(series))
    for i, j in itertools.combinations(range(5), 2):
        slow = math.sqrt(slow_dtw(series[i], series[j]))
        assert found[i, j].item() == pytest.approx(slow, abs=1e-5)


def test_the_minimum_cut_by_hand() -> None:
    distances = dtw_distances(torch.tensor(SERIES))
    assert bipartition(distances) == ([0, 1], [2, 3])
    similarity = distances.max() - distances
    weights = {}
    for size in (1, 2):
        for part in itertools.combinations(range(4), size):
            rest = [i for i in range(4) if i not in part]
            weights[part] = float(similarity[list(part)][:, rest].sum())
    assert weights[0, 1] == pytest.approx(4.6848, abs=1e-3)
    others = [w for part, w in weights.items() if part not in ((0, 1), (2, 3))]
    assert min(others) == pytest.approx(8.3199, abs=1e-3)


def test_equal_series_can_be_cut() -> None:
    first, second = bipartition(dtw_distances(torch.ones(3, 2)))
    assert sorted(first + second) == [0, 1, 2]
    assert first[0] == 0


def test_a_cluster_splits_when_opposite_updates_cancel() -> None:
    updates = torch.tensor([[3.0, 4.0], [-3.0, -4.0], [0.0, 0.3]])
    mean, largest = update_norms(updates)
    assert mean == pytest.approx(0.1)
    assert largest == pytest.approx(5.0)
    assert splits(mean, largest, eps1=0.2, eps2=4.0)
    assert not splits(mean, largest, eps1=0.1 - 1e-6, eps2=4.0)
    assert not splits(mean, largest, eps1=0.2, eps2=5.1)
