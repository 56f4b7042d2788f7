"""The example of molecules: its tables, its scores, and the command on small sources."""

from __future__ import annotations

import csv
import gzip
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "molecules"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Import the modules of the example, and forget them afterwards."""
    pytest.importorskip("rdkit")
    names = ("sources", "scores", "pictures", "run")
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in names:
            sys.modules.pop(name, None)
            if before[name] is not None:
                sys.modules[name] = before[name]


def write_small_sources(folder: Path, owners: Any) -> None:
    """Write alkanes and alcohols in the layout of AqSolDB; B has a row without a sense."""
    folder.mkdir()
    for place, owner in enumerate(owners):
        rows = [
            (f"{owner}-{n}", f"{'C' * n}{end}", f"{1 - 0.5 * n - 0.01 * place}")
            for n in range(1, 11)
            for end in ("", "N")
        ]
        rows = [(f"{name}{smiles[-1]}", smiles, value) for name, smiles, value in rows]
        rows += [("B-0", "c1ccccc", "0.0")] if owner == "B" else []
        path = folder / f"dataset-{owner}.csv.gz"
        with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("ID", "Name", "SMILES", "Solubility"))
            writer.writerows((name, "x", smiles, value) for name, smiles, value in rows)


def test_a_gain_is_positive_where_the_error_is_lower_than_alone(example: Any) -> None:
    scores = example["scores"]
    rmse = {"local": 1.5, "fedavg": 1.2, "fedper": 1.6, "pooled": 1.0}
    found = [
        scores.Scored(row, owner, 1, value + (owner == "B"), 30 if owner == "A" else 10)
        for row, value in rmse.items()
        for owner in example["sources"].OWNERS
    ]
    lines = {line[0]: line[1:] for line in scores.table(found)}
    assert lines["A eChemPortal"] == [
        *("30", "1.50", "1.20", "1.60", "1.00"),
        *("+0.30", "-0.10", "+0.50"),
    ]
    # over all molecules: √((30·1.5² + 10·2.5² + 70·1.5²)/110)
    assert lines["all"][:2] == ["110", "1.62"]
    several = [
        *found,
        *(scores.Scored(s.row, s.owner, 2, s.rmse + 0.1, 30) for s in found),
    ]
    assert (
        dict(line[:3:2] for line in scores.table(several))["C Raevsky"] == "1.55 ± 0.07"
    )


@pytest.mark.thorough
def test_the_example_runs(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write_small_sources(tmp_path / "data", example["sources"].OWNERS)
    folder = tmp_path / "out"
    arguments = ["run.py", str(folder), f"--data={tmp_path / 'data'}"]
    options = ["--rounds=2", "--jobs=1", "--no-rehearsal"]
    monkeypatch.setattr(sys, "argv", [*arguments, *options])
    example["run"].main()
    shown = capsys.readouterr().out
    assert 'line 22: "c1ccccc" is not a SMILES that rdkit can read' in shown
    assert "left out 1 lines" in shown
    assert "| I Llinas | " in shown
    with (folder / "scores.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 9
    # the pooled model is scored on the same molecules as the owners' models
    counts = {(row["row"], row["owner"]): row["test_molecules"] for row in rows}
    for owner in example["sources"].OWNERS:
        assert counts["pooled", owner] == counts["local", owner] != "0"
    assert {path.name for path in folder.glob("*.svg")} == {
        "gains.svg",
        "predictions.svg",
    }
    with (folder / "new.csv").open(encoding="utf-8") as file:
        assert [row["graph"] for row in csv.DictReader(file)] == list(
            example["sources"].NEW_MOLECULES
        )


def test_the_two_rows_of_epi_suite_that_cannot_be_read_are_named(
    example: Any, tmp_path: Path, real_data: Path
) -> None:
    rows = example["sources"].read_source(real_data / "AqSolDB", "B")
    faulty = [row for row in rows if "[NH++]" in row[1]]
    example["sources"].write_owner(tmp_path / "B", [rows[0], *faulty])
    problems = example["run"].problems_of(tmp_path / "B")
    assert [row[0] for row in faulty] == ["B-1579", "B-1866"]
    assert len(problems) == 3
    for problem, (_, smiles, _) in zip(problems, faulty, strict=False):
        assert f'"{smiles}" is not a SMILES that rdkit can read' in problem
