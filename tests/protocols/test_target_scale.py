"""Payloads with which clients agree on one scale of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.target_scale import Moments
from flower_fgl.protocols.target_scale import (
    SCALE,
    STATISTICS,
    AgreedScale,
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
