#!/usr/bin/env bash
# torch-geometric 2.8.1: GATConv and GATv2Conv between two kinds of nodes add an edge from the n-th node of one kind to
# the n-th of the other.
#
# Self-loops are added by default, also where the source and the target are users and items: user 0 takes part in what
# item 0 becomes although nothing joins them. Nodes of two kinds that stand at one row by chance exchange their
# features, and reordering the users changes all items. Here only user 2 (value 9) rated item 0, and item 1 has user 0.
#
# Output seen:
#   item 0, rated by user 2 alone, with user 0 at 5 and at 50: GATConv 6.48 and 9.17, GATv2Conv 5.26 and 9.0
#   the same without self-loops: GATConv 9.0 and 9.0, GATv2Conv 9.0 and 9.0
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 torch-geometric==2.8.1
"$scratch/venv/bin/python" -W ignore - <<'END'
import torch
from torch_geometric.nn import GATConv, GATv2Conv

rated = torch.tensor([[2, 0], [0, 1]])  # users above, items below
items = torch.zeros(2, 1)


def item_0(kind, **given):
    found = []
    for user_0 in (5.0, 50.0):
        torch.manual_seed(0)
        layer = kind((1, 1), 1, bias=False, **given)
        for name, weight in layer.named_parameters():
            if name.startswith("lin") and name.endswith("weight"):
                torch.nn.init.ones_(weight)
            elif name.endswith("bias"):
                torch.nn.init.zeros_(weight)
        users = torch.tensor([[user_0], [7.0], [9.0]])
        found.append(round(layer((users, items), rated)[0].item(), 2))
    return found


default = item_0(GATConv), item_0(GATv2Conv)
plain = item_0(GATConv, add_self_loops=False), item_0(GATv2Conv, add_self_loops=False)
shown = "GATConv {} and {}, GATv2Conv {} and {}"
print("item 0, rated by user 2 alone, with user 0 at 5 and at 50:", shown.format(*default[0], *default[1]))
print("the same without self-loops:", shown.format(*plain[0], *plain[1]))
assert all(row[0] != row[1] for row in default)
assert all(row == [9.0, 9.0] for row in plain)
END
