#!/usr/bin/env bash
# torch-geometric 2.8.1: the same layer gives other values for the same graph as edge_index and as a sparse adjacency.
#
# SAGEConv takes no edge weights: with edge_index its mean is that of the neighbors. Given the adjacency that
# ToSparseTensor(layout=torch.sparse_csr) makes of a graph with edge_weight, it multiplies every neighbor by the weight
# and divides by their number, without a word. Parallel edges, which count twice in edge_index, count once there.
#
# Output seen (node 2 with the neighbors 1.0 and 3.0):
#   weights 10 and 1: edge_index 2.0, sparse 6.5
#   two parallel edges to 1.0: edge_index 1.6667, sparse 2.0
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 torch-geometric==2.8.1
"$scratch/venv/bin/python" -W ignore - <<'END'
import torch
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.transforms import ToSparseTensor

x = torch.tensor([[1.0], [3.0], [0.0]])
layer = SAGEConv(1, 1, root_weight=False, bias=False)
torch.nn.init.ones_(layer.lin_l.weight)


def both(**graph):
    data = Data(x=x, **graph)
    listed = layer(x, data.edge_index)[2].item()
    sparse = layer(x, ToSparseTensor(layout=torch.sparse_csr)(data).adj_t)[2].item()
    return round(listed, 4), round(sparse, 4)


weighted = both(edge_index=torch.tensor([[0, 1], [2, 2]]), edge_weight=torch.tensor([10.0, 1.0]))
print("weights 10 and 1: edge_index {}, sparse {}".format(*weighted))
parallel = both(edge_index=torch.tensor([[0, 0, 1], [2, 2, 2]]))
print("two parallel edges to 1.0: edge_index {}, sparse {}".format(*parallel))
assert weighted == (2.0, 6.5) and parallel == (1.6667, 2.0)
END
