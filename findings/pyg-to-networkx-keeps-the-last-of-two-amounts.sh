#!/usr/bin/env bash
# torch-geometric 2.8.1 and python-louvain 0.16: of the edges u-v and v-u, to_networkx(to_undirected=True) keeps the one
# listed last, with its attributes; amounts are not added up.
#
# In a graph of payments nearly every pair has two amounts. Which one weighs the pair depends on the order of the list,
# and so do the communities that Louvain finds: sorting the same payments otherwise gives owners other nodes. Parallel
# payments in one direction are lost in the same way. ToUndirected of the same library adds such values up.
#
# Output seen:
#   amounts of 0-1 and 1-0 are 9 and 1: weight 1.0 in this order, 9.0 in the other
#   Louvain: {0, 1} and {2, 3} in one order, {0, 3} and {1, 2} in the other
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 torch-geometric==2.8.1 networkx==3.6.1 python-louvain==0.16
"$scratch/venv/bin/python" -W ignore - <<'END'
import community
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_networkx

# a ring of four; 0-1 and 2-3 pay 9 there and 1 back, 1-2 and 3-0 pay 1 there and 9 back
there = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
amounts = torch.tensor([9.0, 1.0, 9.0, 1.0])
edges = torch.cat([there, there.flip(0)], dim=1)
paid = torch.cat([amounts, 10.0 - amounts])


def undirected(order):
    data = Data(edge_index=edges[:, order], paid=paid[order], num_nodes=4)
    return to_networkx(data, to_undirected=True, edge_attrs=["paid"])


def groups(graph):
    found = community.best_partition(graph, weight="paid", random_state=0)
    parts = {}
    for node in sorted(found):
        parts.setdefault(found[node], set()).add(node)
    return sorted(parts.values(), key=min)


one, other = undirected(torch.arange(8)), undirected(torch.arange(8).flip(0))
weights = one[0][1]["paid"], other[0][1]["paid"]
print(f"amounts of 0-1 and 1-0 are 9 and 1: weight {weights[0]} in this order, {weights[1]} in the other")
first, second = groups(other), groups(one)
print("Louvain: {} and {} in one order, {} and {} in the other".format(*first, *second))
assert weights == (1.0, 9.0)
assert first == [{0, 1}, {2, 3}] and second == [{0, 3}, {1, 2}]
END
