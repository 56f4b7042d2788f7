from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks import gpu
from benchmarks.gpu import (
    add_row,
    arguments,
    forms,
    has_stacked_form,
    measure,
    measure_all,
    new_table,
    quick_cases,
    quick_row,
    settings,
)


def test_the_dry_run_measures_every_form_on_the_cpu() -> None:
    options = arguments(["--device", "cpu", "--clients", "2", "--rounds", "1"])
    table = new_table(options)
    found = {
        form: measure({**settings(options, "fedavg", 2), **change})
        for form, change in forms(options, "fedavg").items()
    }
    assert list(found) == ["stacked", "one by one", "on the CPU"]
    assert all(result["seconds"] > 0 for result in found.values())
    assert len({round(result["accuracy"], 3) for result in found.values()}) == 1
    add_row(table, "fedavg", 2, found)
    console = Console(width=150)
    with console.capture() as captured:
        console.print(table)
    text = captured.get()
    assert "dry run" in text
    assert "fedavg" in text


@pytest.mark.parametrize("method", ["feddc", "fednh"])
def test_methods_without_a_stacked_form_run_one_by_one(method: str) -> None:
    options = arguments(["--device", "cpu"])
    assert not has_stacked_form(method)
    found = forms(options, method)
    assert list(found) == ["one by one", "on the CPU"]
    assert found["on the CPU"]["stacked"] == "false"


def test_the_quick_form_names_a_method_that_fails_and_measures_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "QUICK", ((2, 60, 8), (3, 30, 8)))
    monkeypatch.setattr(gpu, "has_stacked_form", lambda method: method != "fedlog")
    monkeypatch.setitem(gpu.SHORT, "fedlog", {"model": "unknown"})
    options = arguments(["--device", "cpu", "--rounds", "1"])
    cases = list(quick_cases(options))
    methods = [[values["method"] for values in found] for _, found in cases]
    stacked = ["fedavg", "fedpg"]
    large = [stacked, [*stacked, "fedlog"], ["fedlog"]]
    assert methods == [*large, stacked, stacked, stacked]
    measure_all(cases[1][1])
    first, _, failed = map(json.loads, capsys.readouterr().out.splitlines())
    assert failed["error"].startswith("ConfigError: ")
    row = quick_row({"stacked": {**first, "seconds": 1.0}, "on the CPU": first})
    assert row[:2] == ["1.000", "-"]
    assert row[-2] == "0.0e+00"
    assert quick_row({"one by one": failed})[:3] == ["-", "failed", "-"]
