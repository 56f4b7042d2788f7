"""Every method of this package keeps the contract of ``flower_fgl.testing``."""

from __future__ import annotations

import pytest

from flower_fgl import METHODS
from flower_fgl.testing import (
    ExchangeContract,
    RunContract,
    SettingContract,
    WireContract,
)
from tests.contract.cases import CASES, UNWEIGHTED, WEIGHTED


def test_every_method_is_listed() -> None:
    assert set(WEIGHTED) | set(UNWEIGHTED) == set(METHODS.own)


class TestExchanges(ExchangeContract):
    cases = CASES


class TestRuns(RunContract):
    cases = CASES


class TestWire(WireContract):
    cases = CASES


@pytest.mark.slow
class TestSettings(SettingContract):
    # three methods are in tests/contract/test_setting_runs.py, in each setting
    cases = tuple(c for c in CASES if c.name not in ("local", "fedavg", "fedprox"))
