from __future__ import annotations

import csv
import gzip
import hashlib
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flower_fgl.cli.main import app
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.graph_set import (
    OwnedSet,
    inspect_graph_set,
    load_graph_set,
)
from flower_fgl.datasets.splits.graph_sets import client_from_set, split_keys, split_set
from flower_fgl.methods import parse_config
from tests.support.graph_sets import write_tables

pytest.importorskip("rdkit")

MOLECULES = """
    id,smiles,label
    ethanol,CCO,yes
    again,OCC,no
    helium,[He],no
    acetate,CC(=O)[O-].[Na+],yes
    acid,CC(=O)O,yes
    any,*C,no
"""


def molecules(folder: Path, text: str = MOLECULES, **more: str) -> Path:
    return write_tables(folder, graphs=text, **more)


def by_id(owned: OwnedSet, name: str) -> tuple[list[list[str]], int]:
    """Return the names of the columns that are 1 at each atom, and the number of bonds."""
    data = owned.dataset
    nodes = data.batch == owned.ids.index(name)
    rows = data.x.to_dense()[nodes]
    assert set(rows.unique().tolist()) == {0, 1}
    chosen = [[data.feature_names[c] for c in row.nonzero().flatten()] for row in rows]
    return chosen, int(nodes[data.edge_index[0]].sum()) // 2


def test_a_molecule_is_the_graph_of_its_atoms(tmp_path: Path) -> None:
    owned = load_graph_set(molecules(tmp_path))
    assert owned.dataset.num_features == 177
    atoms, bonds = by_id(owned, "ethanol")
    assert bonds == 2
    kinds = ["atomic_num", "chirality", "degree", "formal_charge", "num_hs"]
    kinds += ["num_radical_electrons", "hybridization", "is_aromatic", "is_in_ring"]
    assert [name.partition("=")[0] for name in atoms[0]] == kinds
    assert [atom[0] for atom in atoms] == [f"atomic_num={z}" for z in (6, 6, 8)]
    assert [atom[4] for atom in atoms] == ["num_hs=3", "num_hs=2", "num_hs=1"]
    assert by_id(owned, "helium")[1] == 0  # one atom, no bond: a graph
    assert len(by_id(owned, "acetate")[0]) == 5  # both fragments
    assert by_id(owned, "acetate")[0][-1][3] == "formal_charge=1"
    assert by_id(owned, "any")[0][0][0] == "atomic_num=0"


def test_bonds_have_features_in_both_directions(tmp_path: Path) -> None:
    rows = "id,smiles,label\na,C=O,x\nb,CO,y"
    data = load_graph_set(molecules(tmp_path, rows)).dataset
    bonds = data.messages
    assert bonds is not None
    assert bonds.index.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert bonds.x.shape == (4, 30)
    named = [
        [bonds.feature_names[column] for column in row.nonzero().flatten()]
        for row in bonds.x
    ]
    double = ["bond_type=DOUBLE", "stereo=STEREONONE", "is_conjugated=False"]
    assert named == [double, double, *[["bond_type=SINGLE", *double[1:]]] * 2]


def test_molecules_are_split_by_their_skeleton(tmp_path: Path) -> None:
    owned = load_graph_set(molecules(tmp_path))
    keys = dict(zip(owned.ids, split_keys(owned, "skeleton"), strict=True))
    assert keys["ethanol"] == keys["again"] == "LFQSCWFLJHTTHZ"
    assert (keys["acid"], keys["acetate"]) == ("QTBSBXVTEAMEQO", "VMHLLURERBWHNL")
    assert keys["any"] == "*C"  # an unknown atom has no InChIKey
    assert split_keys(owned, "inchikey")[0] == "LFQSCWFLJHTTHZ-UHFFFAOYSA-N"
    config = parse_config({"setting": "graph", "partition-seed": 7})
    client = client_from_set(owned, config)
    assert dict(client.drawn_from)["split-by"] == "skeleton"
    test = client.evaluation[1]
    assert test.num_items == 1  # acetic acid, u = .038451
    assert int(test.y) == 1
    skeleton = parse_config({"setting": "graph", "split-by": "id"})
    assert dict(client_from_set(owned, skeleton).drawn_from)["split-by"] == "id"


def test_unreadable_rows_are_named_by_their_line(tmp_path: Path) -> None:
    rows = "id,smiles,label\na,CCO,x\nb,foo,y\nc,,y\nd,[Fe+7],y\ne,C,x"
    owned, problems = inspect_graph_set(molecules(tmp_path / "own", rows))
    assert owned is None
    first, second, third, total = problems
    assert 'line 3: "foo" is not a SMILES that rdkit can read. Correct it' in first
    assert 'line 4: "" is not a SMILES' in second
    assert "line 5: the charge +7 of an atom is outside −5 … 6. Remove" in third
    assert "3 of 5 SMILES cannot be used. flower-fgl check-graph --drop" in total
    with pytest.raises(DataError, match='line 3: "foo" is not'):
        load_graph_set(tmp_path / "own")


def test_at_most_twenty_faults_are_listed(tmp_path: Path) -> None:
    rows = "id,smiles,label\n" + "\n".join(f"m{k},foo,x" for k in range(30))
    _, problems = inspect_graph_set(molecules(tmp_path, rows))
    assert len(problems) == 21
    assert "30 of 30 SMILES" in problems[-1]


def test_check_graph_writes_the_readable_rows(tmp_path: Path) -> None:
    rows = 'id,smiles,label\na,CCO,"x, y"\n\nb,foo,z\nc,C,z'
    own = molecules(
        tmp_path / "own", rows, classes="name\nx, y\nz".replace("x, y", '"x, y"')
    )
    out = tmp_path / "new" / "own"
    command = ["check-graph", str(own), "--drop-unreadable", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert "left out 1 lines" in result.output
    owned = load_graph_set(out)
    assert owned.ids == ("a", "c")
    assert owned.dataset.class_names == ("x, y", "z")
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "Choose a new folder" in str(result.exception)


def test_tables_beside_smiles_are_refused(tmp_path: Path) -> None:
    path = molecules(tmp_path, nodes="graph,id,x\nethanol,a,1")
    with pytest.raises(DataError, match=r"nodes\.csv would not be read"):
        load_graph_set(path)


def test_without_rdkit_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(DataError, match=r"pip install 'flower-fgl\[molecules\]'"):
        load_graph_set(molecules(tmp_path))


def aqsoldb(data: Path, name: str) -> list[dict[str, str]]:
    """Return the rows of one source of AqSolDB."""
    source = data / "AqSolDB" / f"dataset-{name}.csv.gz"
    with gzip.open(source, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(folder: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as a set, with the split of AqSolDB's README, by the whole InChIKey."""
    folder.mkdir(exist_ok=True)
    with open(folder / "graphs.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "smiles", "target:Solubility", "split"])
        for row in rows:
            digest = hashlib.sha256(row["InChIKey"].encode()).hexdigest()
            part = "train" if int(digest, 16) % 5 else "test"
            table.writerow([row["ID"], row["SMILES"], row["Solubility"], part])


@pytest.mark.thorough
def test_three_sources_of_aqsoldb_share_no_compound_across_parts(
    real_data: Path, tmp_path: Path
) -> None:
    parts: dict[str, str] = {}
    numbers = {"setting": "graph", "target-kind": "numbers"}
    published = {"G": (918, 226, 2.209), "H": (449, 129, 3.088), "I": (77, 17, 0.951)}
    for name, (num_train, num_test, rmse) in published.items():
        write_rows(tmp_path / name, aqsoldb(real_data, name))
        owned = load_graph_set(tmp_path / name)
        masks, _ = split_set(owned, parse_config(numbers))
        for part, mask in masks.items():
            for key, is_in in zip(
                split_keys(owned, "skeleton"), mask.tolist(), strict=True
            ):
                assert not is_in or parts.setdefault(key, part) == part
        own = client_from_set(owned, parse_config({**numbers, "split": "public"}))
        train, test = (graph.targets for graph in (own.graph, own.evaluation[1]))
        assert train is not None
        assert test is not None
        assert (len(train), len(test)) == (num_train, num_test)
        mean_error = (test - train.mean()).square().mean().sqrt()
        assert round(float(mean_error), 3) == rmse
    assert len(parts) > 1000


@pytest.mark.thorough
@pytest.mark.parametrize("name", "ABCDEFGHI")
def test_two_rows_of_aqsoldb_cannot_be_read(
    name: str, real_data: Path, tmp_path: Path
) -> None:
    rows = aqsoldb(real_data, name)
    write_rows(tmp_path, rows)
    owned, problems = inspect_graph_set(tmp_path)
    if name != "B":
        assert owned is not None
        assert owned.dataset.num_graphs == len(rows)
        assert bool((torch.bincount(owned.dataset.batch) > 0).all())
        return
    lines = [rows.index(row) + 2 for row in rows if row["ID"] in ("B-1579", "B-1866")]
    assert len(problems) == 3
    for line, problem in zip(lines, problems[:2], strict=True):
        assert f"line {line}:" in problem
        assert "[NH++]" in problem


def test_molecules_are_collected_in_few_bytes_for_each_atom(tmp_path: Path) -> None:
    ibuprofen = "CC(C)Cc1ccc(cc1)C(C)C(=O)O"

    def peak(number: int) -> int:
        rows = "".join(f"\nm{i},{ibuprofen},{'xy'[i % 2]}" for i in range(number))
        path = molecules(tmp_path / str(number), f"id,smiles,label{rows}")
        tracemalloc.start()
        try:
            data = load_graph_set(path).dataset
            assert data.batch.numel() == 15 * number
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)  # imports
    few, many = peak(200), peak(1000)
    assert (many - few) / (800 * 15) < 450  # bytes; 658 with arrays of each molecule


def test_features_of_bonds_are_bytes_until_they_are_trained_on(tmp_path: Path) -> None:
    owned = load_graph_set(molecules(tmp_path))
    assert owned.dataset.messages is not None
    assert owned.dataset.messages.x.dtype == torch.uint8
    client = client_from_set(owned, parse_config({"setting": "graph", "model": "gine"}))
    held = [graph.messages.x for graph in client.graphs if graph.messages is not None]
    assert [x.dtype for x in held] == 3 * [torch.float32]
    assert sum(float(x.sum()) for x in held) == float(owned.dataset.messages.x.sum())
