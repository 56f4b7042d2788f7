"""Write a table of SMILES and values as a raw dataset of OGB, split by scaffold.

python examples/molecules/ogb_layout.py TABLE NAME DATA [--smiles smiles] [--value y]

TABLE is a CSV file, NAME e.g. ogbg-molfreesolv, and DATA the folder for data-dir. Atoms and
bonds are those of OGB's smiles2graph. The split is the usual one by Bemis-Murcko scaffolds:
the largest groups of molecules train, 80/10/10.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles


def scaffold_split(smiles: Sequence[str]) -> dict[str, list[int]]:
    """Return the rows of each part; all molecules of a scaffold are in one."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, one in enumerate(smiles):
        groups[MurckoScaffoldSmiles(smiles=one)].append(row)
    parts: dict[str, list[int]] = {"train": [], "valid": [], "test": []}
    for group in sorted(groups.values(), key=lambda g: (-len(g), -g[0])):
        size = len(parts["train"]) + len(group)
        if size <= 0.8 * len(smiles):
            parts["train"] += group
        elif size + len(parts["valid"]) <= 0.9 * len(smiles):
            parts["valid"] += group
        else:
            parts["test"] += group
    return parts


def write(table: Any, name: str, folder: Path, smiles: str, value: str) -> None:
    """Write the tables of ``NAME/raw``, ``split`` and ``mapping``."""
    from ogb.utils import smiles2graph

    graphs = [smiles2graph(one) for one in table[smiles]]
    one_way = [g["edge_index"][0] < g["edge_index"][1] for g in graphs]
    tables = {
        "raw/edge": np.concatenate(
            [g["edge_index"][:, k].T for g, k in zip(graphs, one_way, strict=True)]
        ),
        "raw/edge-feat": np.concatenate(
            [g["edge_feat"][k] for g, k in zip(graphs, one_way, strict=True)]
        ),
        "raw/node-feat": np.concatenate([g["node_feat"] for g in graphs]),
        "raw/num-node-list": [g["num_nodes"] for g in graphs],
        "raw/num-edge-list": [int(kept.sum()) for kept in one_way],
        "raw/graph-label": table[value],
    }
    for part, rows in scaffold_split(list(table[smiles])).items():
        tables[f"split/scaffold/{part}"] = rows
    place = folder / name.replace("-", "_")
    for path, values in tables.items():
        file = place / f"{path}.csv.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(values).to_csv(file, header=False, index=False)
    (place / "mapping").mkdir()
    mapping = table[[value, smiles]].rename(columns={smiles: "smiles"})
    mapping["mol_id"] = range(len(table))
    mapping.to_csv(place / "mapping" / "mol.csv.gz", index=False)
    (place / "RELEASE_v1.txt").touch()


def main() -> None:
    """Read the table, and write the dataset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("name", help="e.g. ogbg-molfreesolv")
    parser.add_argument("data", type=Path, help="folder of datasets, for data-dir")
    parser.add_argument("--smiles", default="smiles", help="column of SMILES")
    parser.add_argument("--value", default="y", help="column of values")
    given = parser.parse_args()
    write(pd.read_csv(given.table), given.name, given.data, given.smiles, given.value)


if __name__ == "__main__":
    main()
