#!/usr/bin/env bash
# torch-geometric 2.8.1: HeteroData.to_homogeneous() gives NaN as features to the nodes of a kind that has none.
#
# Unequal widths are filled with zeros, and a kind without features is common (only num_nodes is set). There is no
# warning, and the loss of the first step of any network is NaN. With dummy values off x is left out for all kinds.
#
# Output seen:
#   [[1.0, 1.0], [1.0, 1.0], [nan, nan]]
#   without dummy values: ['edge_index', 'node_type', 'edge_type']
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" -W ignore - <<'END'
import torch
from torch_geometric.data import HeteroData

data = HeteroData()
data["card"].x = torch.ones(2, 2)
data["shop"].num_nodes = 1
data["card", "pays", "shop"].edge_index = torch.tensor([[0, 1], [0, 0]])
x = data.to_homogeneous().x
print(x.tolist())
assert x.shape == (3, 2) and bool(x[2].isnan().all()) and not bool(x[:2].isnan().any())
keys = data.to_homogeneous(dummy_values=False).keys()
print(f"without dummy values: {sorted(keys, key=['edge_index', 'node_type', 'edge_type'].index)}")
assert "x" not in keys
END
