#!/usr/bin/env bash
# torch-geometric 2.8.1: NormalizeFeatures, described as row-normalization to sum up to one, first subtracts the
# smallest value of the whole matrix, and leaves rows alone that then sum up to less than one.
#
# So a row of the smallest value becomes zero, and a node's features depend on those of other nodes. The same node
# at two owners of parts of a graph gets other features.
#
# Output seen:
#   [0.2, 0.2] beside [3.0, 1.0]: [0.0, 0.0]
#   [0.2, 0.2] beside [3.0, -1.0]: [0.5, 0.5]
#   [0.3, 0.1] beside [0.0, 0.0]: [0.3, 0.1]
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import NormalizeFeatures

for own, other, expected in (
    ([0.2, 0.2], [3.0, 1.0], [0.0, 0.0]),
    ([0.2, 0.2], [3.0, -1.0], [0.5, 0.5]),
    ([0.3, 0.1], [0.0, 0.0], [0.3, 0.1]),
):
    row = NormalizeFeatures()(Data(x=torch.tensor([own, other]))).x[0]
    shown = [round(value, 4) for value in row.tolist()]
    print(f"{own} beside {other}: {shown}")
    assert shown == expected
END
