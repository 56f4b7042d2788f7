#!/usr/bin/env bash
# torch-geometric 2.8.1: reading a HeteroData by the name of a relation that joins two pairs of kinds returns an empty
# kind of nodes, and adds it to the graph.
#
# With one triple of that name the same expression returns its edges. Code that was written for a graph without reverse
# relations of the same name therefore sees no edge later, and a kind of nodes without a number of nodes appears in
# node_types, metadata() and everything that is built from them.
#
# Output seen:
#   one triple: 1 edges, kinds ['card', 'shop']
#   two triples: {}, kinds ['card', 'shop', 'pays']
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" -W ignore - <<'END'
import torch
from torch_geometric.data import HeteroData


def graph(*triples):
    data = HeteroData()
    data["card"].x, data["shop"].x = torch.ones(2, 1), torch.ones(1, 1)
    for triple in triples:
        data[triple].edge_index = torch.tensor([[0], [0]])
    return data


forth, back = ("card", "pays", "shop"), ("shop", "pays", "card")
data = graph(forth)
edges = data["pays"].edge_index.shape[1]
print(f"one triple: {edges} edges, kinds {data.node_types}")
assert (edges, data.node_types) == (1, ["card", "shop"])
data = graph(forth, back)
print(f"two triples: {data['pays']}, kinds {data.node_types}")
assert data.node_types == ["card", "shop", "pays"]
END
