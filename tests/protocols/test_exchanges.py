"""Payloads with which clients agree on one scale of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from flower_fgl.algorithms.calibration import class_sums, number_sums, sum_shapes
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.target_scale import Moments
from flower_fgl.protocols.exchanges import (
    SCALE,
    STATISTICS,
    AgreedScale,
    CalibrationSums,
    TargetStatistics,
)

SENT = TargetStatistics((Moments(7, -3.1, 12.25), Moments(0, 0.0, 0.0)))
Change = Callable[[dict[str, Any]], object]


def test_statistics_arrive_as_they_were_sent() -> None:
    assert TargetStatistics.from_record(SENT.to_record(), (2, 7)) == SENT
    assert SENT.num_bytes == 48


def test_the_scale_arrives_to_the_last_bit() -> None:
    sent = AgreedScale((-3.1, 1 / 3), (2.3, 5e-324))
    found = AgreedScale.from_record(sent.to_record(), 2)
    assert found == sent
    assert sent.num_bytes == 32
    assert AgreedScale.of(found.as_scale()) == sent
    assert found.as_scale().mean.dtype == torch.float64


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(count=[7]),
        lambda v: v.update(mean=[1.0, 2.0, 3.0]),
        lambda v: v.update(mean=[math.nan, 0.0]),
        lambda v: v.update(mean=[1e16, 0.0]),
        lambda v: v.update(m2=[math.inf, 0.0]),
        lambda v: v.update(m2=[-1.0, 0.0]),
        lambda v: v.update(m2=[1e300, 0.0]),
        lambda v: v.update(m2=[0, 0]),
        lambda v: v.update(count=[7.0, 0.0]),
        lambda v: v.update(count=[8, 0]),  # more than its training items
        lambda v: v.update(count=[-1, 0]),
        lambda v: v.update(count=[1, 0]),  # a spread of one value
        lambda v: v.update(mean=[-3.1, 2.0]),  # the mean of no value
        lambda v: v.update(m2=[12.25, 1.0]),
        lambda v: v.pop("m2"),
    ],
)
def test_nonsense_is_refused_and_no_value_is_named(change: Change) -> None:
    values = dict(SENT.to_record().config_records[STATISTICS])
    change(values)
    with pytest.raises(PayloadError) as caught:
        TargetStatistics.from_record(
            RecordDict({STATISTICS: ConfigRecord(values)}), (2, 7)
        )
    assert "3.1" not in str(caught.value)


def test_a_message_without_statistics_is_refused() -> None:
    with pytest.raises(PayloadError, match="has no config record"):
        TargetStatistics.from_record(RecordDict(), (2, 7))


@pytest.mark.parametrize(
    ("key", "value"),
    [("std", [1.0, 0.0]), ("std", [1.0]), ("mean", [math.inf, 0.0]), ("mean", [1, 2])],
)
def test_a_scale_that_does_not_fit_is_refused(key: str, value: Any) -> None:
    values = {"mean": [1.0, 2.0], "std": [1.0, 2.0]} | {key: value}
    with pytest.raises(PayloadError, match=f'"{key}"'):
        AgreedScale.from_record(RecordDict({SCALE: ConfigRecord(values)}), 2)


SHAPES = sum_shapes(is_free=False)


def sums_of(n: int) -> dict[str, Tensor]:
    logits = torch.randn(n, 3)
    return class_sums(logits, torch.arange(n) % 3, torch.rand(n), "aps")


def test_sums_survive_the_message_and_have_the_stated_size() -> None:
    sent = CalibrationSums(sums_of(20))
    found = CalibrationSums.from_record(sent.to_record(), (SHAPES, 20, 1))
    assert found.sums.keys() == sent.sums.keys() == SHAPES.keys()
    assert all(torch.equal(found.sums[name], sent.sums[name]) for name in SHAPES)
    assert sent.num_bytes == 8 * (1 + 65 * (1 + 1 + 45 + 512)) == 290_688
    labels = class_sums(torch.zeros(9, 2), torch.ones(9, 2), torch.rand(9), "aps")
    content = CalibrationSums(labels).to_record()
    assert CalibrationSums(labels).num_bytes == 24_448
    of_labels = sum_shapes(is_free=True)  # 9 items have 18 labels in one diagram
    CalibrationSums.from_record(content, (of_labels, 9, 2))
    with pytest.raises(PayloadError, match="calibration/bins"):
        CalibrationSums.from_record(content, (of_labels, 9, 1))
    numbers = number_sums(torch.zeros(9, 4), torch.ones(9, 4), torch.ones(4))
    assert CalibrationSums(numbers).num_bytes == 8 + 4 * 8 * (1_280 + 2)


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
        CalibrationSums.from_record(CalibrationSums(sums).to_record(), (SHAPES, 20, 1))


@pytest.mark.parametrize("change", [{"more": torch.zeros(1)}, {"nll": torch.zeros(2)}])
def test_other_tensors_are_refused(change: dict[str, Any]) -> None:
    content = CalibrationSums(sums_of(20) | change).to_record()
    with pytest.raises(PayloadError):
        CalibrationSums.from_record(content, (SHAPES, 20, 1))
