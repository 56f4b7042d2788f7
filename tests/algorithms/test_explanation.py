"""Attributions against functions whose gradients are known by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.explanation import (
    drops,
    edge_mask,
    integrated_gradients,
    overlap,
)


def test_attributions_of_a_linear_score_are_weight_times_feature() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    weight = torch.tensor([[2.0, 1.0], [0.0, -1.0]])
    found = integrated_gradients(lambda x: (weight * x).sum() + 7, x)
    torch.testing.assert_close(found, weight * x)


def test_attributions_of_a_product_share_it_equally() -> None:
    # ∂(x₁x₂)/∂x₁ on the path is α·x₂, so that both get x₁x₂ / 2
    found = integrated_gradients(
        lambda x: x[0, 0] * x[0, 1], torch.tensor([[3.0, 4.0]])
    )
    torch.testing.assert_close(found, torch.tensor([[6.0, 6.0]]))


def test_attributions_add_up_to_the_score(generator: torch.Generator) -> None:
    x = torch.randn(4, 3, generator=generator)
    weight = torch.randn(3, 5, generator=generator)

    def score(x: Tensor) -> Tensor:
        return (x @ weight).softmax(dim=1)[:, 2].sum()

    total = float(integrated_gradients(score, x).sum())
    assert total == pytest.approx(float(score(x) - score(0 * x)), abs=1e-3)


def test_a_mask_keeps_the_edge_that_the_score_needs(generator: torch.Generator) -> None:
    mask = edge_mask(lambda w: -w[1].clamp(min=1e-6).log(), 40, generator)
    assert int(mask.argmax()) == 1
    assert float(mask[1]) > 0.9
    assert float(mask.sort().values[-2]) < 0.5


def test_overlap_by_hand() -> None:
    # 1/3, 0 and 1/3
    assert overlap([{1, 2}, {2, 3}, {3, 4}]) == pytest.approx(2 / 9)
    assert overlap([{1}, {1}]) == 1
    assert math.isnan(overlap([{1}]))


def test_drops_by_hand(generator: torch.Generator) -> None:
    value = torch.tensor([4.0, 1.0, 1.0, 1.0])
    drop, others = drops(
        lambda w: (value * w).sum(), 4, torch.tensor([0]), generator, 200
    )
    assert drop == 4
    assert set(others) == {1.0, 4.0}
    assert sum(others) / 200 == pytest.approx(7 / 4, abs=0.3)
