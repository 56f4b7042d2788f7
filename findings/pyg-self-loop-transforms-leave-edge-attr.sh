#!/usr/bin/env bash
# torch-geometric 2.8.1: RemoveSelfLoops and AddSelfLoops change the edges, and leave edge_attr as it was.
#
# Both transforms know one edge attribute, edge_weight by default. Every other one keeps its rows: after
# RemoveSelfLoops a graph of 3 edges has 4 rows of edge_attr, and row 1 belongs to the removed loop. coalesce()
# merges edge_attr, and leaves other attributes of edges at their old length. Nothing is raised; only validate(),
# which no transform calls, finds the length of edge_attr.
#
# Output seen:
#   RemoveSelfLoops: 3 edges, edge_attr [10.0, 20.0, 30.0, 40.0]
#   AddSelfLoops: 7 edges, edge_attr [10.0, 20.0, 30.0, 40.0]
#   coalesce: 2 edges, edge_attr [1.0, 5.0], edge_time [3.0, 4.0, 9.0]
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import AddSelfLoops, RemoveSelfLoops

edges = torch.tensor([[0, 1, 1, 2], [1, 1, 2, 0]])  # edge 1 is a self-loop
amounts = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
for transform, number in ((RemoveSelfLoops(), 3), (AddSelfLoops(), 7)):
    found = transform(Data(x=torch.eye(3), edge_index=edges, edge_attr=amounts))
    rows = found.edge_attr.flatten().tolist()
    print(f"{type(transform).__name__}: {found.num_edges} edges, edge_attr {rows}")
    assert found.num_edges == number and rows == [10, 20, 30, 40]
twice = torch.tensor([[0, 0, 1], [1, 1, 2]])
merged = Data(
    x=torch.eye(3), edge_index=twice,
    edge_attr=torch.tensor([[0.0], [1.0], [5.0]]), edge_time=torch.tensor([3.0, 4.0, 9.0]),
).coalesce()
rows, times = merged.edge_attr.flatten().tolist(), merged.edge_time.tolist()
print(f"coalesce: {merged.num_edges} edges, edge_attr {rows}, edge_time {times}")
assert merged.num_edges == 2 and rows == [1, 5] and times == [3, 4, 9]
END
