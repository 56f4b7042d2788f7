"""Messages of the local engine."""

from __future__ import annotations

import pytest
import torch
from flwr.app import (
    ConfigRecord,
    MetricRecord,
    RecordDict,
)

from flower_fgl.protocols.base import write_tensors
from flower_fgl.simulation.local_grid import carry


def test_carried_content_shares_no_object_and_is_equal() -> None:
    content = RecordDict(
        {
            "a": write_tensors({"w": torch.rand(2)}),
            "m": MetricRecord({"x": 1, "y": float("inf"), "z": [1, 2]}),
            "p": MetricRecord({"x": 1, "y": -0.0, "big": 2**63}),
            "c": ConfigRecord({"n": 1}),
        }
    )
    found = carry(content)
    assert found == content
    for name, record in content.items():
        assert found[name] is not record
    assert found["a"]["w"] is not content["a"]["w"]  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    "record",
    [MetricRecord({"x": 2**64}), MetricRecord({"x": -(2**63) - 1})],
)
def test_what_flower_cannot_transmit_fails_in_the_local_engine(
    record: MetricRecord,
) -> None:
    with pytest.raises(ValueError, match="range"):
        carry(RecordDict({"m": record}))
    with pytest.raises(ValueError, match="surrogates"):
        carry(RecordDict({"m": MetricRecord({"\ud800": 1.0})}))
