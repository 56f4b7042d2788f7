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


def invoke(*words: object, code: int = 0) -> Result:
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == code, done.output
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


def solubility(smiles: str) -> float:
    """A rule in place of measurements: carbon repels water, oxygen attracts it."""
    return 1.0 - 0.5 * smiles.upper().count("C") + 1.0 * smiles.upper().count("O")


def write_molecules(folder: Path, smiles: list[str]) -> None:
    folder.mkdir(parents=True)
    rows = "".join(f"{folder.name}-{s},{s},{solubility(s):.2f}\n" for s in smiles)
    (folder / "graphs.csv").write_text(f"id,smiles,target:logS\n{rows}", "utf-8")
    (folder / "targets.csv").write_text("name,unit\nlogS,log10 mol/L\n", "utf-8")


def test_a_chemist_trains_on_tables_of_smiles_and_predicts_new_molecules(
    tmp_path: Path,
) -> None:
    pytest.importorskip("rdkit")
    # chains and rings with none, one and two hydroxyl groups
    chains = ["C" * n for n in range(1, 13)]
    chains += [f"{'C' * n}O" for n in range(1, 13)]
    chains += [f"O{'C' * n}O" for n in range(2, 10)]
    rings = [f"c1ccccc1{'C' * n}" for n in range(9)]
    rings += [f"c1ccccc1{'C' * n}O" for n in range(9)]
    rings += [f"Oc1ccccc1{'C' * n}O" for n in range(1, 9)]
    write_molecules(tmp_path / "owners" / "chains", chains)
    write_molecules(tmp_path / "published" / "rings", [*rings, "c1ccccc"])
    task = ["setting=graph", "target-kind=numbers", "model=gine"]
    words = [word for pair in task for word in ("--set", pair)]

    # the faulty line is named, and left out on request
    published, clean = tmp_path / "published" / "rings", tmp_path / "owners" / "rings"
    shown = invoke("check-graph", published, *words, code=1).output
    assert f'graphs.csv, line {len(rings) + 2}: "c1ccccc" is not a SMILES' in shown
    invoke("check-graph", published, "--drop-unreadable", clean)
    for owner, number in (("chains", len(chains)), ("rings", len(rings))):
        shown = invoke("check-graph", tmp_path / "owners" / owner, *words).output
        assert f"{number} graphs, {number} of them with a known value" in shown
        assert 'The split follows split-by = "skeleton"' in shown

    # two owners train together
    train = ["rounds=40", "local-epochs=4", "batch-size=8", "dropout=0"]
    train += ["weight-decay=0", "hidden-channels=32", f"owners={tmp_path / 'owners'}"]
    words += [word for pair in train for word in ("--set", pair)]
    place = tmp_path / "run"
    done = invoke("run", "--method", "fedavg", *words, "--set", f"run-dir={place}")
    assert "test RMSE ↓ (log10 mol/L)" in done.output
    assert "2 clients (2 train), 1 number, 177 features" in done.output
    best = load(place).summary["best"]["test"]
    assert best["rmse"] < 1.0  # the values have a standard deviation of 2

    # molecules that nobody measured
    new = {"tridecanol": f"{'C' * 13}O", "1,3-butanediol": "CC(O)CCO"}
    new["2-butanol"] = "CCC(C)O"
    (tmp_path / "new").mkdir()
    rows = "".join(f'"{name}",{smiles}\n' for name, smiles in new.items())
    (tmp_path / "new" / "graphs.csv").write_text(f"id,smiles\n{rows}", "utf-8")
    output = tmp_path / "new.csv"
    invoke(
        *("predict", "--model", place, "--graph", tmp_path / "new"), "--output", output
    )
    with output.open(encoding="utf-8") as file:
        found = {row["graph"]: float(row["predicted"]) for row in csv.DictReader(file)}
    assert list(found) == list(new)
    for name, smiles in new.items():
        assert found[name] == pytest.approx(solubility(smiles), abs=1.0), name
