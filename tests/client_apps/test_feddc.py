"""FedDC's penalty by hand."""

from __future__ import annotations

import pytest
import torch

from flower_fgl.client_apps.feddc import drift_penalty, gradient_correction


def test_the_correction_is_the_excess_over_the_mean_step() -> None:
    own, mean = torch.tensor([0.3, 0.0]), torch.tensor([0.1, 0.2])
    found = gradient_correction(own, mean, steps=2, lr=0.1)
    torch.testing.assert_close(found, torch.tensor([1.0, -1.0]))
    assert not gradient_correction(own, mean, steps=0, lr=0.1).any()


def test_the_penalty_and_its_gradient() -> None:
    # (.1/2)(1 + .5 − .2)² + 1 · 1, and .05 (0 + 0 − 2)² − 0
    theta = [
        torch.tensor([1.0], requires_grad=True),
        torch.zeros(1, requires_grad=True),
    ]
    received = [torch.tensor([0.2]), torch.tensor([2.0])]
    drift = [torch.tensor([0.5]), torch.zeros(1)]
    corrections = [torch.tensor([1.0]), torch.tensor([-1.0])]
    value = drift_penalty(theta, received, drift, corrections, alpha=0.1)
    assert value.item() == pytest.approx(0.0845 + 1.0 + 0.2)
    value.backward()
    gradients = [t.grad.item() for t in theta if t.grad is not None]
    assert gradients == [pytest.approx(0.13 + 1.0), pytest.approx(-0.2 - 1.0)]
