"""Sums over validation items: round trip, number of bytes, and sums that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.calibration import class_sums, number_sums, sum_shapes
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.calibration import CalibrationSums

SHAPES = sum_shapes(is_free=False)


def sums_of(n: int) -> dict[str, Tensor]:
    logits = torch.randn(n, 3)
    return class_sums(logits, torch.arange(n) % 3, torch.rand(n), "aps")


def test_sums_survive_the_message_and_have_the_stated_size() -> None:
    sent = CalibrationSums(sums_of(20))
    found = CalibrationSums.from_record(sent.to_record(), (SHAPES, 20))
    assert found.sums.keys() == sent.sums.keys() == SHAPES.keys()
    assert all(torch.equal(found.sums[name], sent.sums[name]) for name in SHAPES)
    assert sent.num_bytes == 8 * (1 + 65 * (1 + 1 + 45 + 512)) == 290_688
    labels = class_sums(torch.randn(9, 2), torch.ones(9, 2), torch.rand(9), "aps")
    assert CalibrationSums(labels).num_bytes == 24_448
    numbers = number_sums(torch.zeros(9, 4), torch.ones(9, 4), torch.ones(4))
    assert CalibrationSums(numbers).num_bytes == 8 + 4 * 2_576


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("items", -1.0),
        ("items", 21.0),
        ("scores", float("nan")),
        ("scores", 1e9),
        ("nll", float("inf")),
        ("bins", -0.5),
    ],
)
def test_impossible_sums_are_refused(name: str, value: float) -> None:
    sums = sums_of(20)
    sums[name].view(-1)[0] = value
    with pytest.raises(PayloadError, match=f"calibration/{name}"):
        CalibrationSums.from_record(CalibrationSums(sums).to_record(), (SHAPES, 20))


@pytest.mark.parametrize("change", [{"more": torch.zeros(1)}, {"nll": torch.zeros(2)}])
def test_other_tensors_are_refused(change: dict[str, Any]) -> None:
    content = CalibrationSums(sums_of(20) | change).to_record()
    with pytest.raises(PayloadError):
        CalibrationSums.from_record(content, (SHAPES, 20))
