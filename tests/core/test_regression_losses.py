"""Losses of standardised numbers, some of which are unknown."""

import math

import pytest
import torch

from flower_fgl.core.regression_losses import regression_loss

NAN = math.nan


@pytest.mark.parametrize(
    ("loss", "expected"), [("mse", 2.125), ("huber", 0.8125), ("mae", 1.25)]
)
def test_losses_of_a_batch_with_an_unknown_number(loss: str, expected: float) -> None:
    output = torch.tensor([[0.5], [-1.0], [2.0]], requires_grad=True)
    z = torch.tensor([[0.0], [1.0], [NAN]])
    value = regression_loss(output, z, loss=loss)
    assert value.item() == pytest.approx(expected)
    value.backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    assert output.grad.isfinite().all()
    if loss == "mse":
        assert output.grad.flatten().tolist() == [0.5, -2, 0]


def test_huber_is_linear_from_delta_on() -> None:
    output, z = torch.tensor([[3.0]]), torch.tensor([[0.0]])
    assert regression_loss(output, z, loss="huber", delta=2.0).item() == 4  # 2·(3 − 1)
    assert regression_loss(output, z, loss="huber", delta=5.0).item() == 4.5


def test_targets_count_equally_or_by_their_known_numbers() -> None:
    output = torch.zeros(3, 3)
    z = torch.tensor([[1.0, 2.0, NAN], [1.0, NAN, NAN], [1.0, NAN, NAN]])
    # errors² 1 1 1 of the first target, 4 of the second, none of the third
    assert regression_loss(output, z).item() == pytest.approx(7 / 4)
    equal = regression_loss(output, z, target_weight="targets")
    assert equal.item() == pytest.approx((1 + 4) / 2)


@pytest.mark.parametrize("loss", ["mse", "huber", "mae"])
@pytest.mark.parametrize("target_weight", ["entries", "targets"])
def test_nothing_known_gives_zero_with_a_zero_gradient(
    loss: str, target_weight: str
) -> None:
    output = torch.ones(2, 2, requires_grad=True)
    value = regression_loss(
        output, torch.full((2, 2), NAN), loss=loss, target_weight=target_weight
    )
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == 0
    assert output.grad is not None
    assert not output.grad.any()
