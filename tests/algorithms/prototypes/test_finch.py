from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.finch import (
    cluster_means,
    finch,
    first_neighbour_clusters,
)


def at(*degrees: float) -> Tensor:
    """Points on the unit circle."""
    return torch.tensor(
        [[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees]
    )


def slow_clusters(points: Tensor) -> list[set[int]]:
    """Link pairs by the definition, one after the other."""
    unit = torch.nn.functional.normalize(points, dim=1)
    nearest = []
    for i in range(len(points)):
        others = [j for j in range(len(points)) if j != i]
        nearest.append(max(others, key=lambda j: float(unit[i] @ unit[j])))
    clusters = [{i} for i in range(len(points))]
    for i in range(len(points)):
        for j in range(i):
            if nearest[i] == j or nearest[j] == i or nearest[i] == nearest[j]:
                one = next(c for c in clusters if i in c)
                other = next(c for c in clusters if j in c)
                if one is not other:
                    clusters.remove(other)
                    one |= other
    return clusters


def as_sets(labels: Tensor) -> set[frozenset[int]]:
    return {
        frozenset((labels == c).nonzero().squeeze(1).tolist())
        for c in range(int(labels.max()) + 1)
    }


@pytest.mark.parametrize("seed", range(5))
def test_one_level_follows_the_definition(seed: int) -> None:
    points = torch.randn(23, 4, generator=torch.Generator().manual_seed(seed))
    expected = {frozenset(cluster) for cluster in slow_clusters(points)}
    assert as_sets(first_neighbour_clusters(points)) == expected


def test_levels_by_hand() -> None:
    # nearest: 0-2, 20-22 (18 from 2), 180-183, 200-203: four pairs; their means at 1, 21,
    # 181.5 and 201.5 pair up again; one more level would join all
    points = at(0, 2, 20, 22, 180, 183, 200, 203)
    assert first_neighbour_clusters(points).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert finch(points).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    means = cluster_means(points)
    torch.testing.assert_close(
        means, torch.stack([points[:4].mean(0), points[4:].mean(0)])
    )


@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_points_are_one_cluster(number: int) -> None:
    assert finch(at(*range(0, 10 * number, 10))).tolist() == [0] * number


def test_points_of_zeros_are_clustered_too() -> None:
    assert finch(torch.zeros(4, 3)).tolist() == [0] * 4


def test_each_cluster_has_at_least_two_points() -> None:
    points = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    assert int(torch.bincount(finch(points)).min()) >= 2
