"""The local engine beyond what the contract tests cover."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from flower_fgl import simulate
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.core.config import RunConfig


def test_the_settings_of_a_run_are_parsed_once(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []
    parse = RunConfig.parse.__func__  # type: ignore[attr-defined]

    def counting(cls: type[RunConfig], *arguments: Any, **options: Any) -> RunConfig:
        parsed.append(arguments)
        return parse(cls, *arguments, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(RunConfig, "parse", classmethod(counting))
    simulate("fedavg", **small)
    assert len(parsed) == 1


def test_a_run_returns_the_garbage_collector_as_it_was(small: dict[str, Any]) -> None:
    frozen = []
    simulate(
        "fedavg", **small, on_round=lambda row: frozen.append(gc.get_freeze_count())
    )
    assert gc.get_freeze_count() == 0
    assert min(frozen) > 0


def test_a_run_frees_its_graphs_without_the_garbage_collector(
    small: dict[str, Any],
) -> None:
    gc.collect()
    before = {id(o) for o in gc.get_objects() if type(o) is ClientData}
    gc.disable()
    try:
        simulate("fedavg", **small)
        found = {id(o) for o in gc.get_objects() if type(o) is ClientData}
        assert found <= before  # other tests' graphs
    finally:
        gc.enable()
