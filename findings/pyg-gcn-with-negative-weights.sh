#!/usr/bin/env bash
# torch-geometric 2.8.1: GCNConv with signed edge weights (trust and distrust, correlations) returns zeros or NaN.
#
# The degree of a node is the sum of its weights and 1 for the self-loop. With one edge of weight -1 it is 0, and
# the node loses its own features too; below 0 its root is NaN, which reaches all neighbors. Weights are accepted
# without a word.
#
# Output seen:
#   weight -0.5: finite, not zero
#   weight -1.0: all zero
#   weight -2.0: NaN
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 torch-geometric==2.8.1 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import torch
from torch_geometric.nn import GCNConv

torch.manual_seed(0)
conv = GCNConv(2, 2)
edges = torch.tensor([[0, 1], [1, 0]])
for weight, expected in ((-0.5, "finite, not zero"), (-1.0, "all zero"), (-2.0, "NaN")):
    out = conv(torch.ones(2, 2), edges, torch.full((2,), weight)).detach()
    kind = "NaN" if out.isnan().all() else "all zero" if not out.any() else "finite, not zero"
    print(f"weight {weight}: {kind}")
    assert kind == expected
END
