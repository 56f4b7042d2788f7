"""Cells from run folders and their experiment file; folders that do not fit it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.lab.experiments.experiment_file import read_experiment
from flower_fgl.lab.tables.compare import select_runs
from flower_fgl.lab.tables.results_table import ResultsTable
from flower_fgl.lab.tables.table_formats import format_table
from flower_fgl.lab.tabulate import copy_experiment, tabulate_runs
from tests.support.written_cells import write_run

FILE = """
title = "Two rows"
draws = 2
[config]
dataset = "cora"
clients = 2
lr = 0.01
[[case]]
name = "a, reset"
method = "fedavg"
[[case]]
name = "b"
method = "local"
[published]
"a, reset" = 82.5
[published-macro-f1]
b = 40.0
"""
TUNING = """
[tuning]
experiment = "first"
budget = 3
draws = [2]
metric = "validation accuracy"
study = "{study}"
[tuning.trials]
"a, reset" = 3
[tuning.settings]
"a, reset" = ["lr"]
"""


def write_runs(folder: Path, file: str = FILE, **others: object) -> None:
    """Write an experiment file and its four runs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{folder.name}.toml").write_text(file)
    for draw in range(2):
        for name, method in (("a_reset", "fedavg"), ("b", "local")):
            place = folder / f"{name}-draw{draw}"
            write_run(place, [0.8, 0.6], draw=draw, **{"method": method, **others})


def test_the_experiment_file_of_a_renamed_folder_is_named(tmp_path: Path) -> None:
    write_runs(tmp_path / "first")
    (tmp_path / "first").rename(tmp_path / "second")
    _, notes = tabulate_runs(select_runs(str(tmp_path / "second")))
    (note,) = notes
    assert note.endswith(
        "first.toml is not used, because the experiment file of the runs in second is "
        "second.toml. Give the folder or the file its old name."
    )


def test_rows_published_values_and_draws_come_from_the_experiment_file(
    tmp_path: Path,
) -> None:
    write_runs(tmp_path / "x")
    cells, missing = tabulate_runs(select_runs(str(tmp_path / "x")))
    assert [(cell.row, cell.method, cell.order) for cell in cells] == [
        ("a, reset", "fedavg", 0), ("b", "local", 1),
    ]  # fmt: skip
    assert [cell.published for cell in cells] == [
        {"accuracy": 82.5},
        {"macro_f1": 40.0},
    ]
    assert {cell.experiment for cell in cells} == {"x"}
    assert {cell.title for cell in cells} == {"Two rows"}
    assert {cell.planned_draws for cell in cells} == {2}
    assert "Settings are those of the experiment file, not tuned." in format_table(
        ResultsTable(cells)
    )
    assert not missing


def test_a_grid_over_the_data_gives_columns_and_not_rows(tmp_path: Path) -> None:
    file = FILE.replace("clients = 2\n", "").split("[published]")[0]
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "x.toml").write_text(f"{file}\n[grid]\nclients = [2, 3]\nlr = [0.1]\n")
    for number in (2, 3):
        write_run(folder / f"b-clients{number}-lr0.1-draw0", [0.5] * number,
                  method="local", lr=0.1)  # fmt: skip
    cells, missing = tabulate_runs(select_runs(str(folder)))
    assert [(cell.row, cell.place["clients"]) for cell in cells] == [
        ("b, lr=0.1", 2), ("b, lr=0.1", 3),
    ]  # fmt: skip
    assert missing[0].startswith("x: not run or not selected: a, reset, clients=2")


def test_a_published_value_of_all_classes_is_left_out_beside_some_of_them(
    tmp_path: Path,
) -> None:
    write_runs(tmp_path / "x")
    runs = select_runs(str(tmp_path / "x"))
    for run in runs:
        run.summary["class_names"] = ["1", "2", "3"]
    cells, _ = tabulate_runs(runs)
    assert [cell.published for cell in cells] == [{}, {}]
    assert cells[0].notes == [
        "Published values are left out: the runs have 3 of 7 classes."
    ]


def test_runs_that_are_not_complete_are_named(tmp_path: Path) -> None:
    write_runs(tmp_path / "x")
    folder = tmp_path / "x" / "b-draw1"
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "failed"}))
    cells, missing = tabulate_runs(select_runs(str(tmp_path / "x")))
    assert [len(cell.draws) for cell in cells] == [2, 1]
    assert missing == ["x, b: not complete: b-draw1 (failed)."]
    with pytest.raises(RunError, match=r"No run is complete\. .* b-draw1 \(failed\)"):
        tabulate_runs(select_runs(str(folder)))


def test_a_folder_without_the_file_is_grouped_by_settings(tmp_path: Path) -> None:
    write_runs(tmp_path / "x")
    (tmp_path / "x" / "x.toml").unlink()
    runs = select_runs(str(tmp_path / "x"))
    cells, _ = tabulate_runs(runs)
    assert [(cell.row, len(cell.draws)) for cell in cells] == [
        ("fedavg", 2),
        ("local", 2),
    ]
    assert "Settings are not tuned." in format_table(ResultsTable(cells))
    elsewhere = tmp_path / "files" / "x.toml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(FILE)
    cells, _ = tabulate_runs(runs, [elsewhere])
    with pytest.raises(ConfigError, match=r"files/x\.toml and .* have the same name"):
        tabulate_runs(runs, [elsewhere, tmp_path / "x.toml"])
    assert [cell.row for cell in cells] == ["a, reset", "b"]
    said = r'in a folder "y" that holds no y\.toml\. Folders given: .*x\.'
    with pytest.raises(RunError, match=said):
        tabulate_runs(runs, [elsewhere.rename(elsewhere.with_name("y.toml"))])


def test_a_run_of_another_experiment_is_refused(tmp_path: Path) -> None:
    write_runs(tmp_path / "x")
    write_run(tmp_path / "x" / "c-draw0", [0.5])
    with pytest.raises(
        RunError, match=r"c-draw0 is no run of .*x\.toml, whose rows are "
    ):
        tabulate_runs(select_runs(str(tmp_path / "x")))
    write_runs(tmp_path / "y", lr=0.1)
    with pytest.raises(
        RunError, match=r"other settings than .*y\.toml .*\(lr is 0\.1, not 0\.01\)"
    ):
        tabulate_runs(select_runs(str(tmp_path / "y")))


def test_a_graph_file_may_be_relative_in_the_experiment_file(tmp_path: Path) -> None:
    file = FILE.replace('"cora"', '"data/otc.npz"').split("[published]")[0]
    write_runs(tmp_path / "x", file, dataset="/srv/data/otc.npz")
    cells, _ = tabulate_runs(select_runs(str(tmp_path / "x")))
    assert [len(cell.draws) for cell in cells] == [2, 2]
    write_runs(tmp_path / "y", file, dataset="/srv/data/alpha.npz")
    with pytest.raises(RunError, match=r"dataset is '/srv/data/alpha\.npz', not 'data"):
        tabulate_runs(select_runs(str(tmp_path / "y")))


def test_a_setting_that_the_file_no_longer_has_is_named(tmp_path: Path) -> None:
    write_runs(tmp_path / "x")
    settings = tmp_path / "x" / "b-draw1" / "config.toml"
    more = "rounds = 7  # user\nthreads = 2  # user\npatience = 3  # default\n"
    settings.write_text(more + settings.read_text())
    with pytest.raises(
        RunError, match=r"b-draw1 was .* \(rounds is 7, not set there\)"
    ):
        tabulate_runs(select_runs(str(tmp_path / "x")))


def write_study(folder: Path, score: float) -> None:
    trial = {"trial": 0, "settings": {"lr": 0.01}, "score": score}
    study = {"experiment": "first", "rows": {"a, reset": {"trials": [trial]}}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(study))


def test_tuned_settings_of_another_study_are_refused(tmp_path: Path) -> None:
    write_study(tmp_path / "first" / "tune", 0.5)
    content = '[["a, reset", 0, [["lr", 0.01]], 0.5]]'
    digest = hashlib.sha256(content.encode()).hexdigest()
    write_runs(tmp_path / "x", FILE + TUNING.format(study=digest))
    cells, _ = tabulate_runs(select_runs(str(tmp_path / "x")))
    assert cells[0].tuning["trials"] == 3
    assert cells[0].tuning["settings"] == ["lr"]
    assert cells[1].tuning == {}
    write_study(tmp_path / "first" / "tune", 0.6)
    with pytest.raises(
        RunError, match=rf"of study {digest[:12]} of first, but .* is now study"
    ):
        tabulate_runs(select_runs(str(tmp_path / "x")))
    (tmp_path / "first" / "tune" / "study.json").write_text("{}")
    with pytest.raises(RunError, match=r"study\.json is damaged"):
        tabulate_runs(select_runs(str(tmp_path / "x")))


def test_the_copy_of_an_experiment_plans_the_same_runs(tmp_path: Path) -> None:
    (file := tmp_path / "x.toml").write_text(FILE + TUNING.format(study="abc"))
    whole = read_experiment(file)
    copy = copy_experiment(whole, file, tmp_path / "out" / "x", is_changed=False)
    assert copy == tmp_path / "out" / "x" / "x.toml"
    assert copy.read_bytes() == file.read_bytes()
    changed = whole.with_options({"rounds": 7, "dropout": [0.1, 0.2]})
    assert copy_experiment(changed, file, copy.parent, is_changed=True) == copy
    again = read_experiment(copy)
    assert again.runs() == changed.runs()
    assert again.published == changed.published
    assert again.tuning == changed.tuning


def test_the_copy_of_a_grid_names_the_same_runs(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        'title = "g"\n[config]\ndataset = "synthetic"\nclients = 3\nrounds = 1\n'
        '[[case]]\nname = "near"\nmethod = "fedprox"\n'
        '[grid]\n"fedprox.mu" = [0.1, 1.0]\nseed = [0, 1]\n'
    )
    whole = read_experiment(file).with_options({"rounds": 2})
    copy = copy_experiment(whole, file, tmp_path / "out", is_changed=True)
    again = read_experiment(copy)
    assert [run.name for run in again.runs()] == [run.name for run in whole.runs()]
    assert [run.settings for run in again.runs()] == [r.settings for r in whole.runs()]
