"""Every method of this package keeps the contract of ``flower_fgl.testing``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

import pytest

import flower_fgl
from flower_fgl import METHODS
from flower_fgl.core.options import help_texts
from flower_fgl.testing import (
    ExchangeContract,
    RunContract,
    SettingContract,
    WireContract,
)
from tests.contract.cases import CASES, WEIGHTED
from tests.support.methods import collected

NO_TERM = collected("NO_TERM")


def test_the_facts_are_those_of_methods_of_this_package() -> None:
    assert set(collected("METHOD")) <= set(METHODS.own)


@pytest.mark.parametrize("name", sorted(METHODS.own))
def test_every_weight_of_a_term_is_in_the_test_of_its_gradient(name: str) -> None:
    settings = METHODS[name].settings
    weights = {
        name
        for name, text in (help_texts(settings) if settings else {}).items()
        if re.search(r"(^|, )weight of ", text)
    }
    known = WEIGHTED.get(name, {}).keys() | NO_TERM.get(name, {}).keys()
    assert weights <= known, "add them to WEIGHTED, or to NO_TERM with the reason"
    assert NO_TERM.get(name, {}).keys() <= weights


def test_the_settings_that_mypy_checks_in_each_half_are_those_of_the_row() -> None:
    for name, row in METHODS.own.items():
        known = {cls.__name__ for cls in getattr(row.settings, "__mro__", ())}
        for cls in row.load_strategy().__mro__:
            if config := vars(cls).get("__annotations__", {}).get("config"):
                # an annotation is a text in modules that evaluate it later
                (settings,) = re.findall(r"(\w+)\]$", str(config))
                assert settings in known, name
                break
        module = sys.modules[row.load_client_app().__module__]
        (kind,) = get_args(getattr(module, "Client", None)) or (object,)
        assert kind is object or kind.__name__ in known, name


@pytest.mark.parametrize("folder", ["strategies", "client_apps"])
def test_no_half_reads_settings_that_mypy_does_not_know(folder: str) -> None:
    typed = re.compile(
        r"(RunConfig|AnyClient)\[\w+Settings\]|: [\w| ]+Settings = \S+\.method_config"
        r"|method_config: \w+Settings"
    )
    read = re.compile(r"\.method_config(\.\w|$)", re.MULTILINE)
    texts = {
        path.name: path.read_text("utf-8")
        for path in (Path(flower_fgl.__file__).parent / folder).glob("*.py")
    }
    found = {name for name, text in texts.items() if read.search(text)}
    assert found
    assert not {name for name in found if not typed.search(texts[name])}


class TestExchanges(ExchangeContract):
    cases = CASES


@pytest.mark.thorough
class TestRuns(RunContract):
    cases = CASES


class TestWire(WireContract):
    cases = CASES


@pytest.mark.slow
class TestSettings(SettingContract):
    # three methods are in tests/contract/test_setting_runs.py, in each setting
    cases = tuple(c for c in CASES if c.name not in ("local", "fedavg", "fedprox"))
