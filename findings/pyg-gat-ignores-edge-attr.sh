#!/usr/bin/env bash
# torch-geometric 2.8.1: GATConv takes edge_attr and leaves it out without a word, unless it was built with edge_dim.
#
# Given the same features of edges and no edge_dim, GATv2Conv and ResGatedGraphConv stop with an AssertionError without a
# text, and TransformerConv complains of sizes. So a model that "uses" bond types or amounts with GATConv may be compared
# with models that do, and nothing tells.
#
# Output seen:
#   GATConv: equal with and without features of edges; with edge_dim they differ
#   GATv2Conv: AssertionError, ResGatedGraphConv: AssertionError, TransformerConv: RuntimeError
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 torch-geometric==2.8.1
"$scratch/venv/bin/python" -W ignore - <<'END'
import torch
from torch_geometric.nn import GATConv, GATv2Conv, ResGatedGraphConv, TransformerConv

torch.manual_seed(0)
x, edges = torch.randn(4, 3), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
bonds = torch.eye(2)[[0, 1, 0, 1]]


def is_ignored(layer):
    return torch.equal(layer(x, edges), layer(x, edges, bonds))


def error_of(layer):
    try:
        is_ignored(layer)
    except (AssertionError, RuntimeError) as error:
        return type(error).__name__
    return "none"


plain, built = is_ignored(GATConv(3, 5)), is_ignored(GATConv(3, 5, edge_dim=2))
print("GATConv:", "equal" if plain else "other values", "with and without features of edges;",
      "with edge_dim they", "are equal" if built else "differ")
others = {kind.__name__: error_of(kind(3, 5)) for kind in (GATv2Conv, ResGatedGraphConv, TransformerConv)}
print(", ".join(f"{name}: {error}" for name, error in others.items()))
assert plain and not built
assert "none" not in others.values()
END
