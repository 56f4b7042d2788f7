"""Write the sources of AqSolDB as the folders of nine data owners, and of one pooled owner.

AqSolDB (Sorkun, Khetan and Er, Scientific Data 6, 143, 2019) collects the solubility of
molecules in water from nine published sources. Here every source is a data owner.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path

OWNERS = {
    "A": "eChemPortal",
    "B": "EPI Suite",
    "C": "Raevsky",
    "D": "EPI Suite (1994)",
    "E": "Huuskonen",
    "F": "Wang",
    "G": "Delaney (ESOL)",
    "H": "Wang",
    "I": "Llinas",
}
TARGET, UNIT = "logS", "log10 mol/L"
NEW_MOLECULES = {
    "aspirin": "CC(=O)Oc1ccccc1C(=O)O",
    "caffeine": "Cn1cnc2c1c(=O)n(C)c(=O)n2C",
    "ibuprofen": "CC(C)Cc1ccc(cc1)C(C)C(=O)O",
    "paracetamol": "CC(=O)Nc1ccc(O)cc1",
    "glucose": "OCC1OC(O)C(O)C(O)C1O",
    "glycine": "NCC(=O)O",
    "ethanol": "CCO",
    "benzene": "c1ccccc1",
    "naphthalene": "c1ccc2ccccc2c1",
    "hexane": "CCCCCC",
    "hexadecane": "CCCCCCCCCCCCCCCC",
    "DDT": "Clc1ccc(cc1)C(c1ccc(Cl)cc1)C(Cl)(Cl)Cl",
}
"""Common compounds, for which the example predicts without a value."""
Rows = Sequence[tuple[str, str, float]]


def read_source(data: Path, owner: str) -> list[tuple[str, str, float]]:
    """Return id, SMILES and measured value of each row of a source."""
    path = data / f"dataset-{owner}.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [
            (row["ID"], row["SMILES"], float(row["Solubility"]))
            for row in csv.DictReader(file)
        ]


def write_table(
    path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """Write one CSV table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def write_owner(folder: Path, rows: Rows) -> None:
    """Write the tables of an owner: molecules with values, and the unit of the values."""
    folder.mkdir(parents=True)
    write_table(folder / "graphs.csv", ("id", "smiles", f"target:{TARGET}"), rows)
    write_table(folder / "targets.csv", ("name", "unit"), [(TARGET, UNIT)])


def write_pooled(folder: Path, owners: Sequence[Path]) -> None:
    """Write the checked tables of all owners as those of one owner."""
    rows = []
    for owner in owners:
        with (owner / "graphs.csv").open(encoding="utf-8", newline="") as file:
            rows += [tuple(row.values()) for row in csv.DictReader(file)]
    write_owner(folder, rows)


def write_new(folder: Path) -> None:
    """Write molecules without values."""
    folder.mkdir()
    write_table(folder / "graphs.csv", ("id", "smiles"), NEW_MOLECULES.items())
