#!/usr/bin/env bash
# torch-geometric 2.8.1: TUDataset numbers the classes and the kinds of nodes that a folder holds, so owners who write
# one set of molecules as several TU folders get other numbers for the same class and the same atom.
#
# Classes become 0, 1, ... in the order of those present, and codes of nodes lose their smallest value. Here both
# owners write class 3, carbon as 6 and oxygen as 8. Class 1 of the first and class 2 of the second are both 0. The
# second owner has no code below 6: its carbon has column 0, which is another atom at the first, and three columns
# where the first has nine. Owners whose widths agree by chance train one model on opposite labels without an error.
#
# Output seen:
#   classes [1, 3, 3] -> [0, 1, 1], atoms [0, 6, 6, 8, 0, 6] -> columns [0, 6, 6, 8, 0, 6] of 9
#   classes [2, 3, 2] -> [0, 1, 0], atoms [6, 7, 6, 8, 7, 6] -> columns [0, 1, 0, 2, 1, 0] of 3
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 torch-geometric==2.8.1
SCRATCH="$scratch" "$scratch/venv/bin/python" - <<'END'
import os
from pathlib import Path

from torch_geometric.datasets import TUDataset

found = []
for owner, classes, atoms in (
    ("first", [1, 3, 3], [0, 6, 6, 8, 0, 6]),
    ("second", [2, 3, 2], [6, 7, 6, 8, 7, 6]),
):
    root = Path(os.environ["SCRATCH"], owner)
    raw = root / "OWN" / "raw"
    raw.mkdir(parents=True)
    files = {
        "A": [f"{2 * graph + 1}, {2 * graph + 2}" for graph in range(3)],
        "graph_indicator": [graph + 1 for graph in range(3) for _ in range(2)],
        "graph_labels": classes,
        "node_labels": atoms,
    }
    for name, lines in files.items():
        (raw / f"OWN_{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    graphs = TUDataset(str(root), "OWN")
    numbers = [int(graph.y) for graph in graphs]
    columns = [int(column) for graph in graphs for column in graph.x.argmax(1)]
    print(f"classes {classes} -> {numbers}, atoms {atoms} -> columns {columns} of {graphs.num_features}")
    found.append((numbers, columns, graphs.num_features))
assert found == [
    ([0, 1, 1], [0, 6, 6, 8, 0, 6], 9),
    ([0, 1, 0], [0, 1, 0, 2, 1, 0], 3),
]
END
