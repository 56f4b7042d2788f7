"""FedNH's equations and head, by hand."""

from __future__ import annotations

import pytest
import torch

from flower_fgl.algorithms.fednh import (
    SphereHead,
    move_prototypes,
    separate,
    unit_class_means,
)

X, Y = [1.0, 0.0], [0.0, 1.0]


def test_few_classes_get_orthogonal_prototypes() -> None:
    torch.manual_seed(0)
    rows = separate(torch.randn(3, 8))
    torch.testing.assert_close(rows @ rows.T, torch.eye(3), atol=1e-6, rtol=0)


def test_many_classes_are_spread_over_the_sphere() -> None:
    # three directions of a plane are at best 120 degrees apart
    torch.manual_seed(0)
    rows = separate(torch.randn(3, 2))
    cosines = rows @ rows.T
    torch.testing.assert_close(cosines.diagonal(), torch.ones(3))
    others = cosines[~torch.eye(3, dtype=torch.bool)]
    torch.testing.assert_close(others, torch.full((6,), -0.5), atol=0.05, rtol=0)


def test_class_means_are_directions_of_unit_embeddings() -> None:
    # lengths do not count: (10, 0) and (0, 1) have their mean on the diagonal
    h = torch.tensor([[10.0, 0.0], [0.0, 1.0], [3.0, 4.0]])
    means = unit_class_means(h, torch.tensor([0, 0, 1]), 3)
    expected = torch.tensor([[0.7071, 0.7071], [0.6, 0.8], [0.0, 0.0]])
    torch.testing.assert_close(means, expected, atol=1e-4, rtol=0)


def test_prototypes_move_towards_the_weighted_mean() -> None:
    # Σ n μ / Σ n = (.75, .25), as a unit vector (.9487, .3162)
    means = torch.tensor([[X, [0.0, 0.0]], [Y, [0.0, 0.0]]])
    counts = torch.tensor([[3, 0], [1, 0]])
    old = torch.tensor([X, Y])
    found = move_prototypes(old, means, counts, rho=0.9)
    expected = torch.tensor([[0.9995, 0.0318], Y])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert torch.equal(move_prototypes(old, means, counts, rho=1.0), old)
    moved = move_prototypes(old, means, counts, rho=0.0)[0]
    torch.testing.assert_close(moved, torch.tensor([0.9487, 0.3162]), atol=1e-4, rtol=0)


def test_logits_are_scaled_cosines_and_train_body_and_scale_only() -> None:
    head = SphereHead(torch.tensor([X, Y]), 20.0, is_trained=True)
    h = torch.tensor([[3.0, 4.0]], requires_grad=True)
    logits = head(h)
    assert logits.tolist() == [[pytest.approx(12.0), pytest.approx(16.0)]]
    torch.nn.functional.cross_entropy(logits, torch.tensor([0])).backward()
    assert h.grad is not None
    assert h.grad.any()
    assert head.scale.grad is not None
    assert head.scale.grad.item() > 0  # the wrong class is nearer: a smaller s helps
    assert [name for name, _ in head.named_parameters()] == ["scale"]
    fixed = SphereHead(torch.tensor([X, Y]), 30.0, is_trained=False)
    assert not fixed.scale.requires_grad
