"""One JSON file per cell: what it holds, and runs that make no cell."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flower_fgl.core.errors import RunError
from flower_fgl.lab.tables.cells import Cell, make_cell, read_cells, write_cells
from flower_fgl.lab.tables.frame import COSTS, Scores, frame_of_cells
from flower_fgl.runs.environment import hash_source
from tests.support.written_cells import ENVIRONMENT, make_row, write_run


def values_of(cell: Cell, model: str, column: str, metric: str) -> list[float]:
    """Return a value of each draw, as a table has it."""
    key = ("", "", metric) if metric in COSTS else (model, column, metric)
    return Scores(frame_of_cells([cell])).values(cell.place_key, cell.row, *key)


def test_a_cell_holds_both_models_and_the_worst_client_of_each_draw(
    tmp_path: Path,
) -> None:
    runs = [
        write_run(tmp_path / f"a-draw{k}", a, draw=k, scopes=("local", "global"))
        for k, a in ((1, [0.9, 0.5]), (0, [0.8, 0.6]))
    ]
    cell = make_cell(runs, experiment="x", row="a")
    assert [draw.seed for draw in cell.draws] == [0, 1]
    assert cell.models == ["own", "global"]
    assert values_of(cell, "own", "test", "accuracy") == [0.7, 0.7]
    assert values_of(cell, "own", "test", "worst_accuracy") == [0.6, 0.5]
    assert values_of(cell, "global", "test", "accuracy") == [0.35, 0.35]
    assert values_of(cell, "global", "test", "worst_accuracy") == [0.3, 0.25]
    assert values_of(cell, "own", "", "bytes_up") == [100, 100]
    assert values_of(cell, "own", "", "bytes") == [400, 400]
    assert values_of(cell, "own", "", "seconds") == [2.0, 2.0]
    assert values_of(cell, "own", "unseen", "accuracy") == []
    assert [draw.partition for draw in cell.draws] == ["cora0", "cora1"]
    assert cell.place == {"dataset": "cora", "partition": "metis", "clients": 2}
    assert cell.settings == {"lr": 0.01}
    assert (cell.source_sha256, cell.device) == ("b" * 64, "cpu")


def test_a_cell_names_all_devices_and_hosts_of_its_draws(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"a-draw{k}", [0.8, 0.6], draw=k) for k in (0, 1, 2)]
    hosts: list[dict[str, Any]] = [{"cpu": "A", "cores": 2}, {"cpu": "B", "cores": 2}]
    devices = ["cpu", "cuda", "cpu"]
    for run, device, host in zip(runs, devices, [*hosts, hosts[0]], strict=True):
        run.summary["environment"] = {**ENVIRONMENT, "device": device, "host": host}
    cell = make_cell(runs, experiment="x", row="a")
    assert cell.device == "cpu and cuda"
    assert cell.host == {"cpu": "A and B", "cores": 2}
    del runs[2].summary["environment"]["device"], runs[2].summary["environment"]["host"]
    cell = make_cell(runs, experiment="x", row="a")
    assert cell.device == "cpu and cuda and unknown"
    assert cell.host == {"cpu": "A and B and unknown", "cores": "2 and unknown"}


def test_a_run_that_scores_only_the_global_model_has_no_own_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.8, 0.4], scopes=("global",))
    cell = make_cell([run], experiment="x", row="a")
    assert cell.models == ["global"]
    assert values_of(cell, "global", "test", "worst_accuracy") == [0.2]


def test_after_fine_tuning_the_own_model_is_the_fine_tuned_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.8, 0.4])
    test = {"num_nodes": 20, "accuracy": 0.9, "macro_recall": 0.7, "macro_f1": 0.8}
    tuned = {"round": 2, "test": test}
    run.summary["finetuned"] = tuned
    run.config["owners"] = "a.npz,b.npz"
    run.clients.extend(
        {"round": 2, "partition_id": k, "metrics": {"local": {"test": {"accuracy": v}}}}
        for k, v in enumerate((0.95, 0.85))
    )
    cell = make_cell([run], experiment="x", row="a")
    assert values_of(cell, "own", "test", "accuracy") == [0.9]
    assert values_of(cell, "own", "test", "macro_recall") == [0.7]
    assert values_of(cell, "own", "test", "worst_accuracy") == [0.85]
    assert values_of(cell, "before", "test", "accuracy") == [0.6]
    owners = cell.draws[0].owners["own"]  # which --layout owners shows
    assert [scores["accuracy"] for scores in owners.values()] == [0.95, 0.85]


@pytest.mark.parametrize(("positive", "metric"), [("1", "auroc"), ("", "accuracy")])
def test_the_main_score_is_the_one_that_selects_the_round(
    positive: str, metric: str
) -> None:
    cell = make_row("local", [0.5], settings={"positive-class": positive})
    assert cell.main_metric == metric


def test_a_run_whose_fine_tuning_failed_makes_no_cell(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.8, 0.4])
    run.rounds.append({"round": 2, "phase": "finetune", "status": "failed"})
    with pytest.raises(
        RunError, match="a: the fine-tuning after the last round has no"
    ):
        make_cell([run], experiment="x", row="a")


def test_a_cell_survives_its_file_and_holds_no_path(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "a-draw0", [0.8], dataset="/home/someone/mine.npz", scopes=("local",)
    )
    cell = replace(
        make_cell([run], experiment="x", row="a, reset"),
        published={"accuracy": 80.5},
        tuning={"budget": 12, "draws": [0], "metric": "x", "study": "y"},
    )
    (path,) = write_cells([cell], tmp_path / "cells")
    assert path == tmp_path / "cells" / "x.jsonl"
    assert read_cells(path) == read_cells(tmp_path / "cells") == [cell]
    assert "/home" not in path.read_text("utf-8")
    assert cell.place["dataset"] == "mine.npz"
    assert cell.to_json() == read_cells(path)[0].to_json()


def test_a_row_on_several_data_is_several_lines_of_one_file(tmp_path: Path) -> None:
    one, other = make_row("a", [0.5]), make_row("a", [0.6])
    other = Cell(**{**vars(other), "place": {**other.place, "clients": 20}})
    (path,) = write_cells([one, other], tmp_path)
    assert len(path.read_text("utf-8").splitlines()) == 2
    assert [cell.place["clients"] for cell in read_cells(path)] == [10, 20]


def test_rows_that_are_not_written_now_are_kept_and_returned(tmp_path: Path) -> None:
    before = [make_row("a", [0.5]), make_row("b", [0.6], order=1)]
    (path,) = write_cells(before, tmp_path)
    now = make_row("b", [0.7], order=1)
    assert [c.row for c in write_cells([now], tmp_path)[path]] == ["a"]
    expected = [before[0].to_json(), now.to_json()]
    assert [cell.to_json() for cell in read_cells(path)] == expected


def test_a_line_ends_only_where_a_cell_ends(tmp_path: Path) -> None:
    cell = make_row("a\u2028b", [0.6])
    write_cells([cell], tmp_path)
    assert read_cells(tmp_path) == [cell]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{",
            "x.jsonl, line 1, is damaged or was edited: Expecting property name.* Write it",
        ),
        ("[]", "is no row of a results table in JSON. Pass files"),
        ('{"status": "completed"}', "is no row of a results table"),
        ('{"format": 2}', "format that this version cannot read. Update"),
        ('{"format": 1, "row": "a"}', "edited: 'draws' is missing. Write it again"),
    ],
)
def test_a_file_that_is_no_cell_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(RunError, match=message):
        read_cells(tmp_path)
    with pytest.raises(RunError, match="holds no cells"):
        read_cells(tmp_path / "nowhere")


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of a cell."""
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def scores_of(table: dict[str, Any]) -> dict[str, Any]:
    return table["draws"][0]["scores"]["own"]["test"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: scores_of(t).update(accuracy=math.nan),
            "accuracy of own, test, must",
        ),
        (
            lambda t: scores_of(t).update(accuracy=81.65),
            "number between 0 and 1, got 81",
        ),
        (lambda t: scores_of(t).update(r2=-math.inf), "number between -inf and 1, got"),
        (lambda t: scores_of(t).update(accuracy="0.8"), "between 0 and 1, got '0.8'"),
        (lambda t: scores_of(t).update(accuracy=True), "between 0 and 1, got True"),
        (
            lambda t: t["draws"][0].update(scores=None),
            '"scores" of a draw cannot be None',
        ),
        (lambda t: t["draws"][0].update(seed="0"), "\"seed\" of a draw cannot be '0'"),
        (lambda t: t.update(settings=[]), '"settings" of the cell cannot be'),
        (lambda t: t.update(order="1"), '"order" of the cell cannot be'),
        (lambda t: t.update(published={"accuracy": "81"}), "a published value must be"),
        (
            lambda t: t.update(tuning={"budget": 1}),
            '"tuning" lacks draws, metric, study',
        ),
        (lambda t: t.update(place={}), '"place" names no dataset'),
        (lambda t: t.update(draws=[]), "it has no draw"),
        (lambda t: t.update(draws=[t["draws"][0]] * 2), "a draw is there twice"),
    ],
)
def test_an_edited_cell_with_a_value_that_none_has_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    (path,) = write_cells([make_row("a", [0.8, 0.7])], tmp_path)
    edited(path, change)
    with pytest.raises(RunError, match=f"line 1, is damaged .*{re.escape(message)}"):
        read_cells(path)


def test_the_order_of_the_draws_in_a_file_means_nothing(tmp_path: Path) -> None:
    (path,) = write_cells([make_row("a", [0.8, 0.7, 0.6])], tmp_path)
    (before,) = read_cells(path)
    edited(path, lambda table: table["draws"].reverse())
    assert read_cells(path) == [before]


def test_a_cell_has_more_digits_than_a_table(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.8133498])
    cell = make_cell([run], experiment="x", row="a")
    assert values_of(cell, "own", "test", "accuracy") == [0.8133498]  # not 81.34 %


def test_a_newer_format_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"format": 2}')
    with pytest.raises(RunError) as caught:
        read_cells(tmp_path)
    assert "is damaged" not in str(caught.value)


def test_a_row_that_is_there_twice_is_refused_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    cells = [make_row("a", [0.5]), make_row("b", [0.5]), make_row("b", [0.6])]
    with pytest.raises(RunError, match='row "b" of x-cora is there twice'):
        write_cells(cells, tmp_path)
    assert not list(tmp_path.iterdir())


def test_runs_of_two_code_versions_are_named_and_not_mixed(tmp_path: Path) -> None:
    other = {**ENVIRONMENT, "source_sha256": "c" * 64}
    runs = [
        write_run(tmp_path / "a-draw0", [0.8]),
        write_run(tmp_path / "a-draw1", [0.8], draw=1, environment=other),
    ]
    message = r"2 code versions \(a-draw0: .*source bbbb.*; a-draw1: .*source cccc"
    with pytest.raises(RunError, match=message):
        make_cell(runs, experiment="x", row="a")
    # nor code of a package that adds the method
    other = {**ENVIRONMENT, "extensions": {"mine 1.0": "e" * 64}}
    runs[1] = write_run(tmp_path / "a-draw2", [0.8], draw=1, environment=other)
    with pytest.raises(RunError, match=r"a-draw2: .*bbbb, mine 1.0 source eeee"):
        make_cell(runs, experiment="x", row="a")
    cell = make_cell(runs[1:], experiment="x", row="a")
    assert Cell.from_json(cell.to_json(), "x").extensions == {"mine 1.0": "e" * 64}
    # a commit that changes no source file is the same version
    moved = {**ENVIRONMENT, "commit": "d" * 40}
    runs[1] = write_run(tmp_path / "again", [0.8], draw=1, environment=moved)
    assert len(make_cell(runs, experiment="x", row="a").draws) == 2


def test_run_folders_without_a_hash_are_told_apart_by_their_commit(
    tmp_path: Path,
) -> None:
    old = {k: v for k, v in ENVIRONMENT.items() if k != "source_sha256"}
    runs = [
        write_run(tmp_path / "a-draw0", [0.8], environment=old),
        write_run(
            tmp_path / "b", [0.8], draw=1, environment={**old, "commit": "d" * 40}
        ),
    ]
    assert make_cell(runs[:1], experiment="x", row="a").source_sha256 == ""
    with pytest.raises(RunError, match=r"2 code versions .*commit aaaa.*commit dddd"):
        make_cell(runs, experiment="x", row="a")


def test_runs_of_one_draw_or_of_two_settings_make_no_cell(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [0.8])
    again = write_run(tmp_path / "b", [0.8])
    with pytest.raises(RunError, match="two runs of the same draw: "):
        make_cell([first, again], experiment="x", row="a")
    other = write_run(tmp_path / "c", [0.8], draw=1, lr=0.1)
    with pytest.raises(RunError, match=r"runs of different settings \(lr\)"):
        make_cell([first, other], experiment="x", row="a")


def test_the_hash_of_the_source_depends_on_names_and_contents(tmp_path: Path) -> None:
    hashes = []
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "1"), ("a.txt", "1")):
        folder = tmp_path / str(len(hashes))
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / name).write_text(text)
        hashes.append(hash_source(folder))
    assert len(set(hashes)) == 4
    (tmp_path / "0" / "deep" / "notes.txt").write_text("no source file")
    hash_source.cache_clear()
    assert hash_source(tmp_path / "0") == hashes[0]


def test_a_cell_is_one_line() -> None:
    text = make_row("a", [0.5, 0.6]).to_json()
    assert text.count("\n") == 1
    assert text.endswith("}\n")
