#!/usr/bin/env bash
# torch-geometric 2.8.1: label -1, by which loaders and users mark nodes of unknown class, is a class for
# RandomNodeSplit and for homophily.
#
# RandomNodeSplit(num_val=1, num_test=1) puts 7 nodes without a class into train_mask, where cross entropy raises
# for -1. Two nodes of unknown class count as equal in homophily: a graph whose known classes always differ
# across edges has 0.5.
#
# Output seen:
#   training nodes without a class: 7 of 8
#   homophily: 0.5
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import homophily

torch.manual_seed(0)
y = torch.tensor([-1] * 9 + [0])
split = RandomNodeSplit(num_val=1, num_test=1)(Data(x=torch.eye(10), y=y))
unknown, number = int((y[split.train_mask] < 0).sum()), int(split.train_mask.sum())
print(f"training nodes without a class: {unknown} of {number}")
assert number == 8 and unknown >= 7
edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
found = homophily(edges, torch.tensor([-1, -1, 0, 1]))
print(f"homophily: {found}")
assert found == 0.5
END
