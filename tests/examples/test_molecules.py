"""The example of molecules: its tables, its scores, and the command on small sources."""

from __future__ import annotations

import csv
import gzip
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from flower_fgl import simulate
from flower_fgl.core.targets import NUMBERS, Target
from flower_fgl.datasets.client_graph import GraphDataset
from flower_fgl.datasets.sources import load as load_module
from flower_fgl.datasets.sources.load import load

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "molecules"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """Import the modules of the example, and forget them afterwards."""
    pytest.importorskip("rdkit")
    names = ("sources", "scores", "pictures", "run", "ogb_layout")
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


def test_a_table_of_molecules_becomes_a_dataset_of_ogb(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = ["c1ccccc1" + "C" * n for n in range(9)]
    smiles = [*rings, "C1CC1", "C1CCC1", "CCO", "CC=O"]
    parts = example["ogb_layout"].scaffold_split(smiles)
    # of 13: the 9 benzenes train, the 2 without a ring no longer fit into 80 %
    assert parts == {"train": [*range(9), 10], "valid": [11, 12], "test": [9]}
    values = [float(len(text)) for text in smiles]
    table = pd.DataFrame({"text": smiles, "energy": values})
    example["ogb_layout"].write(
        table, "ogbg-molfreesolv", tmp_path / "data", "text", "energy"
    )
    dataset = load(
        "ogbg-molfreesolv", data_dir=tmp_path / "data", cache_dir=tmp_path / "cache",
        check=False,
    )  # fmt: skip
    assert isinstance(dataset, GraphDataset)
    assert dataset.target == Target(NUMBERS, ("energy",))
    assert dataset.targets is not None
    assert dataset.targets.flatten().tolist() == values
    assert dataset.masks["train"].nonzero().flatten().tolist() == parts["train"]
    # a linear layer on the attributes of bonds is OGB's encoder of bonds
    encoders = importlib.import_module("ogb.graphproppred.mol_encoder")
    encoder = encoders.BondEncoder(4)
    weight = torch.cat([one.weight for one in encoder.bond_embedding_list])
    found = importlib.import_module("ogb.utils").smiles2graph("c1ccccc1")
    one_way = found["edge_index"][0] < found["edge_index"][1]
    assert dataset.messages is not None
    assert dataset.messages.index[:, :6].tolist() == (
        found["edge_index"][:, one_way].tolist()
    )
    expected = encoder(torch.from_numpy(found["edge_feat"][one_way]))
    torch.testing.assert_close(dataset.messages.x[:6] @ weight, expected)
    monkeypatch.setattr(load_module, "_check_statistics", lambda *_: None)
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "cache2"))
    run = simulate(
        "fedavg", dataset="ogbg-molfreesolv", data_dir=str(tmp_path / "data"),
        setting="graph", partition="uniform", split="public", model="gine", clients=1,
        rounds=2, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    assert run.summary["best"]["test"]["num_nodes"] == 1
    assert run.summary["best"]["test"]["rmse"] > 0


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
