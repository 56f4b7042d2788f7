#!/usr/bin/env bash
# torch-geometric 2.8.1: a batch of HeteroData has the kinds of nodes and the relations of its first graph. What only
# later graphs have is dropped without a warning; what only the first one has makes to_data_list() fail.
#
# Graphs of one dataset often lack a kind: a molecule without rings, a day without alerts. Whether their nodes reach
# the network then depends on the graph that a shuffling DataLoader happens to put first.
#
# Output seen:
#   the first graph lacks shops: ['card'], 3 cards, nodes in all 3 of 6
#   the first graph has shops: ['card', 'shop'], nodes in all 6 of 6
#   taking that batch apart: IndexError
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" -W ignore - <<'END'
import torch
from torch_geometric.data import Batch, HeteroData


def graph(cards, has_shops):
    data = HeteroData()
    data["card"].x = torch.ones(cards, 2)
    if has_shops:
        data["shop"].x = torch.ones(3, 1)
        data["card", "pays", "shop"].edge_index = torch.tensor([[0], [2]])
    return data


plain, full = graph(2, False), graph(1, True)
batch = Batch.from_data_list([plain, full])
print(
    f"the first graph lacks shops: {batch.node_types}, {len(batch['card'].x)} cards, "
    f"nodes in all {batch.num_nodes} of 6"
)
assert batch.node_types == ["card"] and batch.edge_types == [] and batch.num_nodes == 3
batch = Batch.from_data_list([full, plain])
print(f"the first graph has shops: {batch.node_types}, nodes in all {batch.num_nodes} of 6")
assert batch.node_types == ["card", "shop"] and batch.num_nodes == 6
try:
    batch.to_data_list()
except IndexError:
    print("taking that batch apart: IndexError")
else:
    raise SystemExit("to_data_list() works now")
END
