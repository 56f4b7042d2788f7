from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.gpu import (
    add_row,
    arguments,
    forms,
    has_stacked_form,
    measure,
    new_table,
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


@pytest.mark.parametrize("method", ["fedgta", "fedlog"])
def test_methods_without_a_stacked_form_run_one_by_one(method: str) -> None:
    options = arguments(["--device", "cpu"])
    assert not has_stacked_form(method)
    found = forms(options, method)
    assert list(found) == ["one by one", "on the CPU"]
    assert found["on the CPU"]["stacked"] == "false"
