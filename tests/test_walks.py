"""The first ten minutes of new users, command by command."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flower_fgl import RunSet, compare, load
from flower_fgl.cli.main import app

SMALL = ["rounds=2", "hidden-channels=8", "synthetic.nodes=300", "synthetic.features=8"]


def invoke(*words: object) -> Result:
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.pictures
def test_a_student_compares_two_methods_and_writes_a_latex_table(
    tmp_path: Path,
) -> None:
    words = [word for pair in SMALL for word in ("--set", pair)]
    words += ["--set", f"output-dir={tmp_path / 'runs'}", "--draws", "5"]
    done = invoke("run", "--method", "fedavg,local", *words, "--quiet")
    (grid,) = (tmp_path / "runs").iterdir()
    # a table in every format, with the same numbers
    printed = invoke("table", grid).output
    means = {}
    for ending in ("md", "tex", "csv", "html"):
        file = tmp_path / f"table.{ending}"
        invoke("table", grid, "--out", file)
        text = file.read_text(encoding="utf-8")
        assert "fedavg" in text.lower()
        means[ending] = text
    rows = list(csv.DictReader(io.StringIO(means["csv"])))
    assert {row["row"] for row in rows} == {"fedavg", "local"}
    for row in rows:
        percent = f"{100 * float(row['test_accuracy_mean']):.2f}"
        assert row["draws"] == "5"
        for text in (done.output, printed, means["md"], means["tex"], means["html"]):
            assert percent in text
    assert r"\label{" in means["tex"]

    # one comparison, on the command line and in a notebook
    compared = invoke("compare", f"{grid}:fedavg", f"{grid}:local").output
    runs = RunSet.load(grid)
    assert len(runs) == 10
    by_method = runs.by_method()
    found = compare(by_method["fedavg"], by_method["local"])
    assert f"{100 * abs(found.difference):.2f}" in compared

    # the report, and what a notebook shows
    page = invoke("report", grid, "--out", tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000, page.output
    frame = runs.to_frame()
    assert len(frame) == 10
    assert runs.plot() is not None
    one = load(next(path for path in sorted(grid.iterdir()) if path.is_dir()))
    assert one.status == "completed"
    assert one._repr_html_()
