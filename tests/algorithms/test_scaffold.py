"""SCAFFOLD's equations, by hand."""

from __future__ import annotations

import pytest
import torch

from flower_fgl.algorithms.scaffold import control_term, new_control


def test_the_gradient_of_the_term_is_the_correction() -> None:
    y = [
        torch.tensor([1.0, 2.0], requires_grad=True),
        torch.ones(1, requires_grad=True),
    ]
    changes = [torch.tensor([0.5, -1.0]), torch.tensor([2.0])]
    value = control_term(y, changes)
    value.backward()
    assert value.item() == pytest.approx(0.5 - 2.0 + 2.0)
    for parameter, change in zip(y, changes, strict=True):
        assert torch.equal(parameter.grad, change)  # type: ignore[arg-type]


def test_the_new_control_is_the_mean_gradient_of_plain_steps() -> None:
    # loss y²/2 from x = 1 with η = .1, c = .3, c_i = .2: steps of gradient y + .1
    y, gradients = 1.0, []
    for _ in range(3):
        gradients.append(y)
        y -= 0.1 * (y - 0.2 + 0.3)
    own, common, x = (torch.tensor([v]) for v in (0.2, 0.3, 1.0))
    found = new_control(own, common, x, torch.tensor([y]), steps=3, lr=0.1)
    assert found.item() == pytest.approx(sum(gradients) / 3)
    assert new_control(own, common, x, x, steps=0, lr=0.1) is own
