"""Peak memory and time to check sets of many small graphs: .npz, tables and SMILES.

python benchmarks/million_graphs.py FOLDER [--graphs 1000000] [--smiles FILE]

Writes sets of random trees of 5 to 10 nodes with 4 features and one number, and, with a
text file of one SMILES per line, a table of molecules that repeats those of 5 to 10 atoms.
docs/deployment.md shows the results.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def write_rows(path: Path, header: str, rows: Iterable[str]) -> None:
    """Write a CSV table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{header}\n")
        file.writelines(f"{row}\n" for row in rows)


def write_trees(folder: Path, number: int) -> list[Path]:
    """Write the same set of trees as a file and as tables."""
    draw = np.random.default_rng(0)
    size = draw.integers(5, 11, number)
    start = np.cumsum(size) - size
    graph = np.repeat(np.arange(number), size)
    place = np.arange(len(graph)) - start[graph]
    x = draw.standard_normal((len(graph), 4)).astype(np.float32).round(3)
    child = np.flatnonzero(place > 0)
    parent = start[graph[child]] + (draw.random(len(child)) * place[child]).astype(int)
    y = x[start].sum(axis=1, dtype=np.float64).round(3)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / "set.npz",
        x=x,
        edges=np.stack([parent, child], axis=1),
        graph_of_node=graph,
        y=y,
        target_names=np.array(["v"]),
        graph_ids=np.array([f"M{g}" for g in range(number)]),
    )
    tables = folder / "tables"
    numbers = (f"M{g},{v}" for g, v in enumerate(y.tolist()))
    write_rows(tables / "graphs.csv", "id,target:v", numbers)
    nodes = zip(graph, place, x.round(3).astype(str), strict=True)
    rows = (f"M{g},{p},{','.join(row)}" for g, p, row in nodes)
    write_rows(tables / "nodes.csv", "graph,id,a,b,c,d", rows)
    edges = zip(graph[child], place[parent], place[child], strict=True)
    rows = (f"M{g},{a},{b}" for g, a, b in edges)
    write_rows(tables / "edges.csv", "graph,source,target", rows)
    return [folder / "set.npz", tables]


def write_molecules(folder: Path, number: int, smiles: Path) -> Path:
    """Write a table of molecules, drawn from a list."""
    from rdkit import Chem, rdBase

    rdBase.DisableLog("rdApp.*")
    known = []
    for line in smiles.read_text(encoding="utf-8").split():
        molecule = Chem.MolFromSmiles(line)
        if molecule is not None and 5 <= molecule.GetNumAtoms() <= 10:
            known.append(line)
    chosen = np.random.default_rng(0).integers(len(known), size=number)
    rows = (f"M{g},{known[k]},{k}" for g, k in enumerate(chosen))
    write_rows(folder / "smiles" / "graphs.csv", "id,smiles,target:v", rows)
    return folder / "smiles"


def measure(path: Path) -> None:
    """Check a set in a process of its own, and print what that takes."""
    command = ["check-graph", str(path), "--set", "setting=graph", "--set", "model=gin"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flower_fgl", *command], stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    unit = 1 if sys.platform == "darwin" else 1024
    print(
        f"{path.name}: {used.ru_maxrss * unit / 1e9:.2f} GB, "
        f"{used.ru_utime + used.ru_stime:.0f} s of processor time, exit {status}"
    )


def main() -> None:
    """Write the sets, and measure one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--graphs", type=int, default=10**6)
    parser.add_argument("--smiles", type=Path)
    given = parser.parse_args()
    paths = write_trees(given.folder, given.graphs)
    if given.smiles:
        paths.append(write_molecules(given.folder, given.graphs, given.smiles))
    for path in paths:
        measure(path)


if __name__ == "__main__":
    main()
