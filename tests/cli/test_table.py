"""The command ``table``: from an experiment file to a table, through run folders."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.lab.results import Run
from flower_fgl.lab.tables.cells import read_cells
from tests.support.written_cells import make_row, write_run

FILE = """
# two rows
title = "Two rows"
output-dir = "{folder}"
draws = 5
[config]
dataset = "synthetic"
clients = 2
rounds = 1
synthetic.nodes = 80
synthetic.features = 8
[[case]]
name = "local"
method = "local"
[[case]]
name = "fedavg, both"
method = "fedavg"
evaluate = "both"
weight-decay = 0.0
[published]
"fedavg, both" = 82.5
"""


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the experiment once; return its output folder and what it printed."""
    folder = tmp_path_factory.mktemp("made")
    (file := folder / "two.toml").write_text(FILE.format(folder=folder / "runs"))
    done = invoke("run", file, "--engine", "local", "--quiet")
    assert done.exit_code == 0, done.output
    return folder / "runs" / "two", done.output


def test_a_grid_without_a_number_of_clients_becomes_a_table(tmp_path: Path) -> None:
    small = "rounds=1 hidden-channels=8 synthetic.nodes=300 synthetic.features=8"
    words = [word for pair in small.split() for word in ("--set", pair)]
    done = invoke(
        "run", "--method", "local,fedavg", "--seed", "0..1", *words,
        "--set", f"output-dir={tmp_path}", "--engine", "local", "--quiet",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (folder,) = tmp_path.iterdir()
    table = invoke("table", folder, "--format", "csv")
    assert table.exit_code == 0, table.output
    rows = {line.split(",")[1] for line in table.output.splitlines()[1:]}
    assert rows == {"local", "fedavg"}
    # another number than the default one is still another experiment
    other = folder / "fedavg-seed0" / "config.toml"
    other.write_text(other.read_text().replace("clients = 10", "clients = 9"))
    with pytest.raises(RunError, match="clients is 9, not 10"):
        invoke("table", folder)


def test_draws_of_a_grid_without_a_file_vary_the_partition(tmp_path: Path) -> None:
    small = "rounds=1 hidden-channels=8 synthetic.nodes=300 synthetic.features=8"
    words = [word for pair in small.split() for word in ("--set", pair)]
    words += ["--set", f"output-dir={tmp_path}", "--engine", "local", "--quiet"]
    for draws, runs in ((2, 4), (3, 6), (1, 6)):
        done = invoke("run", "--method", "local,fedavg", "--draws", draws, *words)
        assert done.exit_code == 0, done.output
        assert "one partition" not in done.output
        (folder,) = tmp_path.iterdir()
        assert len([path for path in folder.iterdir() if path.is_dir()]) == runs
    table = invoke("table", folder, "--format", "csv").output.splitlines()
    assert {row["draws"] for row in csv.DictReader(table)} == {"3"}
    hashes = {
        Run.load(path).summary["partition_sha256"] for path in folder.glob("fed*")
    }
    assert len(hashes) == 3
    seeds = invoke("run", "--method", "local,fedavg", "--seed", "0..1", *words)
    assert "± is over initial models on one partition and split" in seeds.output


@pytest.mark.thorough
def test_an_experiment_becomes_a_table_and_cells(
    made: tuple[Path, str], tmp_path: Path
) -> None:
    folder, printed = made
    assert (folder / "two.toml").read_text().startswith("\n# two rows\n")
    warning = "weight decay: weight-decay is 0.0005 (local), 0 (fedavg, both)"
    assert f"warning: {warning}" in printed
    done = invoke("table", folder, "--cells", tmp_path / "cells")
    assert f"Warning: {warning}." in done.stdout
    for text in ("| local |", "| fedavg, both |", "| fedavg, both, global model |"):
        assert text in done.stdout
    assert "| 82.5 |" in done.stdout
    assert "± is the standard deviation over 5 draws of partition, split" in done.stdout
    cells = read_cells(tmp_path / "cells")
    assert {cell.row for cell in cells} == {"local", "fedavg, both"}
    for cell in cells:
        assert len({draw.partition for draw in cell.draws}) == len(cell.draws) == 5
        assert len(cell.source_sha256) == 64
    again = invoke("table", tmp_path / "cells").stdout
    assert again.split("- Bold")[1] == done.stdout.split("- Bold")[1]
    assert "also holds rows" not in done.stderr
    path = tmp_path / "cells" / "two.jsonl"
    path.write_text(path.read_text().replace('"row": "local"', '"row": "renamed"'))
    done = invoke("table", folder, "--cells", tmp_path / "cells")
    assert "rows that were not written now: renamed." in done.stderr


def test_the_table_goes_to_a_file_and_warnings_of_csv_to_stderr(
    made: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = made
    out = tmp_path / "x.csv"
    done = invoke("table", folder, "--format", "csv", "--out", out)
    assert "Warning: weight decay" in done.stderr
    assert len(out.read_text().splitlines()) == 4
    assert "Warning" not in out.read_text()
    rows = invoke("table", folder, "--row", "local", "--layout", "overview")
    assert "fedavg" not in rows.stdout
    (labels := tmp_path / "labels.toml").write_text('local = "Local"')
    done = invoke("table", folder, "--labels", labels, "--layout", "overview")
    assert "| Local |" in done.stdout


def test_compare_prints_unequal_defaults(made: tuple[Path, str]) -> None:
    folder, _ = made
    done = invoke("compare", f"{folder}:local", f"{folder}:fedavg, both")
    text = "Warning: weight decay: weight-decay is 0.0005 (local), 0 (fedavg)"
    assert text in " ".join(done.output.split())
    assert "n = 5 pairs" in done.output


def test_a_row_whose_draws_are_missing_is_refused(
    made: tuple[Path, str], tmp_path: Path
) -> None:
    folder = tmp_path / "two"
    shutil.copytree(made[0], folder)
    shutil.rmtree(folder / "local-draw3")
    with pytest.raises(RunError, match='unequal draws: "local" lacks draw 3'):
        invoke("table", folder)
    done = invoke("table", folder, "--draws", "3")
    assert "± is the standard deviation over 3 draws" in done.stdout
    assert "The experiment plans 5 draws." in done.stdout
    assert "not testable: 3 pairs, 5 are needed" in done.stdout
    done = invoke("table", folder, "--draws", "1")
    assert "Scores are of one draw, so they have no ±" in done.stdout
    assert "standard deviation" not in done.stdout
    done = invoke("table", folder, "--skip-incomplete")
    assert 'two: row "local" is left out, it lacks 1 of 5 draws.' in done.stderr
    assert "| local |" not in done.stdout
    # rows and draws are chosen first: of what is left, nothing is incomplete
    for words in (["--row", "local"], ["--draws", "3"]):
        done = invoke("table", folder, "--skip-incomplete", *words)
        assert "left out" not in done.stderr
        assert "| local |" in done.stdout


def test_run_writes_the_experiment_that_options_make(tmp_path: Path) -> None:
    text = FILE.format(folder=tmp_path).replace("draws = 5", "draws = 1")
    (file := tmp_path / "two.toml").write_text(text)
    words = ["--engine", "local", "--quiet"]
    words += ["--case", "local", "--set", "dropout=0.1,0.2", "--set", "rounds=2"]
    assert invoke("run", file, *words).exit_code == 0
    done = invoke("table", tmp_path / "two", "--layout", "overview")
    assert "| local, dropout=0.1 |" in done.stdout
    assert "not run or not selected: fedavg, both, dropout=0.1" in done.stderr
    assert Run.load(tmp_path / "two" / "local-dropout0.1-draw0").config["rounds"] == 2


def test_folders_that_hold_no_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    with pytest.raises(RunError, match=r"holds no run folder\. Pass run folders"):
        invoke("table", tmp_path / "x")
    (tmp_path / "x" / "tune").mkdir()
    (tmp_path / "x" / "tune" / "study.json").write_text("{}")
    with pytest.raises(RunError, match="holds a study, but no run folder"):
        invoke("table", tmp_path / "x")
    (tmp_path / "x" / "tune" / "study.json").unlink()
    (tmp_path / "x" / "a.jsonl").write_text("{}")
    with pytest.raises(RunError, match="is no row of a results table"):
        invoke("table", tmp_path / "x")


def test_wrong_rows_and_label_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(make_row("local", [0.5, 0.6]).to_json())
    with pytest.raises(ConfigError, match=r'has no row "x"\. Its rows: local'):
        invoke("table", path, "--row", "x")
    (labels := tmp_path / "labels.toml").write_text("local = 3")
    with pytest.raises(ConfigError, match="each label must be a text"):
        invoke("table", path, "--labels", labels)
    labels.write_text("local = ")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        invoke("table", path, "--labels", labels)
    with pytest.raises(ConfigError, match="--ranks needs scores of several rows"):
        invoke("table", path, "--ranks", tmp_path / "x.svg", "--out", tmp_path / "x.md")
    assert not (tmp_path / "x.md").exists()
    (tmp_path / "b.jsonl").write_text(make_row("fedavg", [0.6, 0.7]).to_json())
    for row in ("local", "fedavg"):
        cell = make_row(row, [0.5, 0.6], dataset="other")
        (tmp_path / f"other-{row}.jsonl").write_text(cell.to_json())
    with pytest.raises(ConfigError, match="diagram needs tested ranks"):
        invoke(
            "table", tmp_path, "--ranks", tmp_path / "x.svg", "--out", tmp_path / "x.md"
        )
    assert not (tmp_path / "x.md").exists()


def test_the_ending_of_the_file_chooses_the_format(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(make_row("local", [0.5, 0.6]).to_json())
    for name, begin in (("x.html", "<"), ("x.csv", "experiment,"), ("x.txt", "|")):
        assert invoke("table", path, "--out", tmp_path / name).exit_code == 0
        assert (tmp_path / name).read_text().startswith(begin)
    with pytest.raises(ConfigError, match=r"x.pdf has none of the endings \.md, "):
        invoke("table", path, "--out", tmp_path / "x.pdf")
    assert not (tmp_path / "x.pdf").exists()
    words = ["--format", "markdown", "--out", tmp_path / "y.html"]
    assert invoke("table", path, *words).exit_code == 0
    assert (tmp_path / "y.html").read_text() == (tmp_path / "x.txt").read_text()


def test_the_diagram_of_the_ranks_is_drawn(tmp_path: Path) -> None:
    for k, dataset in enumerate("abcde"):
        for gap, row in enumerate(("one", "two", "three")):
            cell = make_row(row, [0.5 + 0.1 * gap + 0.01 * k] * 2, dataset=dataset)
            (tmp_path / f"{dataset}-{row}.jsonl").write_text(cell.to_json())
    picture = tmp_path / "x.svg"
    done = invoke("table", tmp_path, "--layout", "overview", "--ranks", picture)
    assert "Average ranks over 5 datasets: three 1.00" in done.stdout
    assert picture.read_text().startswith("<?xml")
    # without an ending the file is printed as it is named
    done = invoke("table", tmp_path, "--ranks", tmp_path / "r")
    assert f"Picture: {tmp_path / 'r.svg'}" in " ".join(done.stdout.split())
    assert not (tmp_path / "r.png").exists()
    words = ["--ranks", tmp_path / "r.foo", "--out", tmp_path / "x.md"]
    with pytest.raises(RunError, match=r"Cannot write .*r\.foo: .*not supported.*svg"):
        invoke("table", tmp_path, *words)
    assert not (tmp_path / "x.md").exists()


def test_a_number_of_nodes_is_no_score(tmp_path: Path) -> None:
    cell = make_row("local", [0.5, 0.6])
    scores = {"own": {"test": {"accuracy": 0.5, "num_nodes": 30}}}
    draws = [replace(draw, scores=scores) for draw in cell.draws]
    (tmp_path / "a.jsonl").write_text(replace(cell, draws=draws).to_json())
    known = r"Known: accuracy, bytes, bytes_down, bytes_up, seconds\."
    with pytest.raises(ConfigError, match=f'"num_nodes" of "test"[.] {known}'):
        invoke("table", tmp_path, "--metric", "num_nodes")
    write_run(tmp_path / "runs" / "a", [0.5, 0.6])
    with pytest.raises(RunError, match='no validation score "num_nodes" to select'):
        invoke("table", tmp_path / "runs", "--select", "num_nodes")
