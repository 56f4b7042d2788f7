"""The local engine beyond what the contract tests cover."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from flower_fgl import simulate, to_npz
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError


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


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"workers": -1}, "workers must be a whole number and at least 1, got -1"),
        ({"workers": 0}, "at least 1, got 0"),
        ({"workers": "2"}, "at least 1, got '2'"),
        ({"workers": 1.5}, r"at least 1, got 1\.5"),
        ({"workers": True}, "at least 1, got True"),
        ({"on_round": 3}, "on_round must be a function of one row, got int"),
        ({"track": 3}, "track must be names separated by commas, .* got 3"),
        ({"track": ["mlflow"]}, r"track must be names .* got \['mlflow'\]"),
        ({"fedprox": {1: 2}}, "fedprox must be a mapping of the names .* name 1"),
    ],
)
def test_a_keyword_of_a_wrong_type_is_named(
    keywords: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = {"rounds": 1, "output_dir": str(tmp_path / "runs"), **keywords}
    with pytest.raises(ConfigError, match=message):
        simulate("fedprox", **values)
    assert not list(tmp_path.iterdir())


def test_a_run_holds_the_absolute_paths_of_its_data(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = Data(
        x=torch.eye(40)[:, :4],
        edge_index=torch.stack([torch.arange(40), torch.arange(40).roll(1)]),
        y=torch.arange(40) % 2,
    )
    for name in ("g", "raw"):
        (tmp_path / name).mkdir()
    to_npz(graph, "g/ok.npz")
    values = {k: v for k, v in small.items() if k not in ("dataset", "synthetic")}
    values |= {"clients": 2, "rounds": 1, "data_dir": "raw"}
    run = simulate("fedavg", "g/ok.npz", **values)
    assert run.config["dataset"] == str(tmp_path / "g" / "ok.npz")
    assert run.config["data-dir"] == str(tmp_path / "raw")


def found_data() -> set[int]:
    """Return the clients' graphs that a search for cyclic garbage would visit."""
    return {id(o) for o in gc.get_objects() if type(o) is ClientData}


def test_a_run_returns_the_garbage_collector_as_it_was(small: dict[str, Any]) -> None:
    frozen, searched = [], []

    def look(row: Any) -> None:
        frozen.append(gc.get_freeze_count())
        searched.append(found_data())

    before = found_data()
    simulate("fedavg", **small, on_round=look)
    assert gc.get_freeze_count() == 0
    assert min(frozen) > 0
    assert set.union(*searched) <= before  # the clients' graphs are left out too


@pytest.mark.thorough
def test_a_run_frees_its_graphs_without_the_garbage_collector(
    small: dict[str, Any],
) -> None:
    gc.collect()
    before = found_data()
    gc.disable()
    try:
        simulate("fedavg", **small)
        assert found_data() <= before  # other tests' graphs
    finally:
        gc.enable()
