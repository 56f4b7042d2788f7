"""Graphs of molecules from a column of SMILES, by rdkit and torch-geometric.

Atoms have the 9 categories of ``torch_geometric.utils.from_smiles``, one-hot: 177 columns
named ``atomic_num=6`` etc. Bonds have 3: 30 columns such as ``bond_type=SINGLE``. So
another version with other categories differs in the names of its columns.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.csv_rows import Table, csv_rows
from flower_fgl.datasets.graph_files.graph_file import GRAPHS
from flower_fgl.datasets.graph_files.problems import ErrorCollector, clip, show_path

__all__ = ["drop_unreadable", "inchikeys", "read_molecules"]

MOST_FAULTS = 20
"""Faulty rows that are reported."""
SKELETON = 14
"""Characters of an InChIKey that stand for atoms and bonds, without stereo marks."""
CHARGES = (-5, 6)
"""Charges of an atom that torch-geometric's table holds."""


def read_molecules(graphs: Table, attempt: ErrorCollector) -> dict[str, Array]:
    """Convert the column ``smiles`` to the arrays of a set of graphs.

    These are ``graph_of_node``, ``edges``, the features of atoms (sparse) and bonds
    with their names, and ``smiles`` (G,). A DataError says that rdkit is missing, or
    that rows cannot be read: of these 20 are named, and all counted.
    """
    parse = _Parser(graphs.where)
    from torch_geometric.utils.smiles import e_map, x_map

    molecules, faults = [], []
    for line, smiles in graphs.cells("smiles"):
        molecule = parse(smiles)
        if isinstance(molecule, str):
            faults.append(f"{graphs.where}, line {line}: {molecule}")
        else:
            molecules.append(molecule)
    for fault in faults[:MOST_FAULTS]:
        attempt.add(fault)
    if faults:
        raise DataError(
            f"{graphs.where}: {len(faults):,} of {len(graphs.lines):,} SMILES cannot be "
            "used. flower-fgl check-graph --drop-unreadable FOLDER writes the others to a "
            "new folder."
        )
    atoms, bonds, kinds = zip(*molecules, strict=True)
    sizes = [len(codes) for codes in atoms]
    first = np.cumsum([0, *sizes])
    edges = [ends + start for ends, start in zip(bonds, first, strict=False)]
    columns, names = _columns(np.concatenate(atoms), x_map)
    of_bonds, bond_names = _columns(np.concatenate(kinds), e_map)
    edge_attr = np.zeros((len(of_bonds), len(bond_names)), dtype=np.float32)
    np.put_along_axis(edge_attr, of_bonds, 1, axis=1)
    return {
        "graph_of_node": np.repeat(np.arange(len(sizes)), sizes),
        "edges": np.concatenate(edges),
        "smiles": np.array(graphs.text["smiles"], dtype=object),
        "x_indptr": np.arange(len(columns) + 1) * columns.shape[1],
        "x_indices": columns.ravel(),
        "x_data": np.ones(columns.size, dtype=np.float32),
        "x_shape": np.array([len(columns), len(names)]),
        "feature_names": np.array(names, dtype=np.str_),
        "edge_attr": edge_attr,
        "edge_attr_names": np.array(bond_names, dtype=np.str_),
    }


class _Parser:
    """Convert one SMILES after the other, and say what is wrong with those that fail."""

    def __init__(self, where: str) -> None:
        chemistry = _rdkit(where)
        # torch-geometric takes a second to load, and only molecules need it
        from torch_geometric.utils import from_smiles

        self._read, self._convert = chemistry.MolFromSmiles, from_smiles

    def __call__(self, smiles: str) -> tuple[Array, Array, Array] | str:
        """Return atoms (n, 9), bonds (2m, 2) and their kinds (2m, 3), or what is wrong."""
        molecule = self._read(smiles) if smiles else None
        # from_smiles makes a graph without nodes of text that rdkit cannot read
        if molecule is None or not molecule.GetNumAtoms():
            return (
                f'"{clip(smiles)}" is not a SMILES that rdkit can read. Correct it, or '
                "remove the line."
            )
        low, high = CHARGES
        for atom in molecule.GetAtoms():
            if not low <= atom.GetFormalCharge() <= high:
                return (
                    f"the charge {atom.GetFormalCharge():+d} of an atom is outside "
                    f"−{-low} … {high}. Remove the line."
                )
        try:
            data = self._convert(smiles)
        except ValueError as error:
            return (
                f'"{clip(smiles)}" has an atom or bond that torch-geometric does not know '
                f"({clip(error)}). Remove the line."
            )
        return data.x.numpy(), data.edge_index.numpy().T, data.edge_attr.numpy()


def _rdkit(where: str) -> Any:
    """Return ``rdkit.Chem`` without its log; raise an error if it is missing."""
    try:
        from rdkit import Chem, rdBase
    except ImportError as error:
        raise DataError(
            f"{where} has a column smiles, which needs rdkit. Install it: pip install "
            "'flower-fgl[chemistry]'."
        ) from error
    rdBase.DisableLog("rdApp.*")
    return Chem


def _columns(
    codes: Array, kinds: Mapping[str, Sequence[Any]]
) -> tuple[Array, list[str]]:
    """Return the columns that are 1 in each row of categories (n, k), and all names."""
    first = np.cumsum([0, *(len(values) for values in kinds.values())])[:-1]
    names = [f"{key}={value}" for key, values in kinds.items() for value in values]
    return codes + first, names


def inchikeys(smiles: Sequence[str], where: str, *, is_skeleton: bool) -> list[str]:
    """Return the InChIKey of each molecule, or the part of it that stands for its skeleton.

    The SMILES have been read before. A molecule for which there is no InChIKey, such as one
    with an unknown atom, has its canonical SMILES instead. ``where`` names the file.
    """
    chemistry, length = _rdkit(where), SKELETON if is_skeleton else None
    return [
        chemistry.MolToInchiKey(molecule)[:length] or chemistry.MolToSmiles(molecule)
        for molecule in map(chemistry.MolFromSmiles, smiles)
    ]


def drop_unreadable(folder: Path, out: Path) -> int:
    """Copy the tables of a set without rows whose SMILES cannot be used; count these."""
    source = folder / GRAPHS
    rows = csv_rows(source, ("id", "smiles"))
    _, header = next(rows)
    parse, place = _Parser(show_path(source)), header.index("smiles")
    found = [row for _, row in rows]
    kept = [row for row in found if not isinstance(parse(row[place].strip()), str)]
    try:
        out.mkdir(parents=True)
        for table in folder.glob("*.csv"):
            shutil.copyfile(table, out / table.name)
        with open(out / GRAPHS, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *kept])
    except OSError as error:
        raise DataError(
            f"Cannot write to {show_path(out)}: {error.strerror}. Choose a new folder."
        ) from error
    return len(found) - len(kept)
