#!/usr/bin/env bash
# torch-geometric 2.8.1: in a graph with as many edges as nodes, Data.subgraph cuts an attribute of edges as one of nodes.
#
# Whether an attribute belongs to nodes or edges is concluded from its length, except where its name contains
# "edge". With 4 nodes and 4 edges, "amount" counts as an attribute of nodes: the edges 1-2 and 2-3 remain, with
# the amounts of edges 1, 2 and 3. With a fifth edge the same code keeps the right two.
#
# Output seen:
#   4 edges: kept edges have amount [20.0, 30.0, 40.0]
#   5 edges: kept edges have amount [20.0, 30.0]
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import torch
from torch_geometric.data import Data

source, target = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([1, 2, 3, 0, 2])
amount = torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0])
for number, expected in ((4, [20, 30, 40]), (5, [20, 30])):
    edges = torch.stack([source, target])[:, :number]
    data = Data(x=torch.eye(4), edge_index=edges, amount=amount[:number])
    kept = data.subgraph(torch.tensor([1, 2, 3]))
    print(f"{number} edges: kept edges have amount {kept.amount.tolist()}")
    assert kept.num_edges == 2 and kept.amount.tolist() == expected
END
