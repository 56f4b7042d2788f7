"""FPL's losses, by hand and against a loop."""

from __future__ import annotations

import math

import pytest
import torch

from flower_fgl.algorithms.fpl import (
    cluster_contrast,
    consistency,
    unbiased_prototypes,
)

CLUSTERS = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
CLASSES = torch.tensor([0, 0, 1])


def test_positives_are_summed_inside_the_logarithm() -> None:
    # cosines of (1, 0): 1, 0 and -1; the own class has two clusters
    z = torch.tensor([[1.0, 0.0]])
    found = cluster_contrast(z, torch.tensor([0]), CLUSTERS, CLASSES, tau=1.0)
    assert found.item() == pytest.approx(0.0943, abs=1e-4)
    other = cluster_contrast(z, torch.tensor([1]), CLUSTERS, CLASSES, tau=1.0)
    assert other.item() == pytest.approx(2.4076, abs=1e-4)


def test_the_mean_over_nodes_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(6, 4, generator=generator)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    clusters = torch.randn(5, 4, generator=generator)
    classes = torch.tensor([0, 0, 1, 2, 2])
    losses = []
    for node, label in zip(z, labels, strict=True):
        e = [
            math.exp(float(torch.cosine_similarity(node, row, dim=0)) / 0.5)
            for row in clusters
        ]
        own = sum(v for v, c in zip(e, classes, strict=True) if c == label)
        losses.append(-math.log(own / sum(e)))
    found = cluster_contrast(z, labels, clusters, classes, tau=0.5)
    assert found.item() == pytest.approx(sum(losses) / 6, rel=1e-5)


def test_one_class_alone_has_no_contrast() -> None:
    z = torch.tensor([[1.0, 0.5]], requires_grad=True)
    found = cluster_contrast(z, torch.tensor([0]), CLUSTERS[:2], CLASSES[:2], tau=0.02)
    found.backward()
    assert found.item() == 0
    assert z.grad is not None
    assert not z.grad.any()


def test_the_unbiased_prototype_is_the_mean_of_the_clusters() -> None:
    mean = unbiased_prototypes(CLUSTERS, CLASSES, 3)
    assert mean.tolist() == [[1, 1.5], [-1, 0], [0, 0]]
    z = torch.tensor([[1.0, 0.5], [0.0, 0.0]], requires_grad=True)
    found = consistency(z, torch.tensor([0, 1]), mean)
    assert found.item() == pytest.approx((0 + 1 + 1 + 0) / 4)
    found.backward()
    assert z.grad is not None
    assert z.grad.any()
