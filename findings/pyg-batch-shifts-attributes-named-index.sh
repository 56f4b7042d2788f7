#!/usr/bin/env bash
# torch-geometric 2.8.1: a batch adds the number of nodes before a graph to every attribute whose name contains
# "index" or is "face".
#
# A number that names an owner, a class or a row of a table is changed in the second graph of a batch if its name
# ends in "_index", and left alone if it ends in "_id". Taking the graphs out of the batch again subtracts it, so
# that a test of that round trip passes.
#
# Output seen:
#   site_index: [7, 10]
#   site_id: [7, 7]
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import torch
from torch_geometric.data import Batch, Data

edges = torch.tensor([[0, 1], [1, 2]])
for name, expected in (("site_index", [7, 10]), ("site_id", [7, 7])):
    graphs = [Data(x=torch.eye(3), edge_index=edges, **{name: torch.tensor([7])}) for _ in range(2)]
    batch = Batch.from_data_list(graphs)
    print(f"{name}: {batch[name].tolist()}")
    assert batch[name].tolist() == expected
    assert [int(graph[name]) for graph in batch.to_data_list()] == [7, 7]
END
