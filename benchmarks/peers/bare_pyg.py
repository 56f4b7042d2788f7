"""Average the weights of GCNs of plain PyG, client after client, in one process.

    python benchmarks/peers/bare_pyg.py FOLDER --rounds 10

A script as researchers write it, with the layers and optimizers of their libraries. It
trains on the ``.npz`` files of ``flower-fgl export``, one per client, and prints the
accuracy on test nodes after each round. ``compare.py`` measures it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from clients import load_clients
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

EPOCHS, HIDDEN = 3, 64
"""Epochs of a round and width of the hidden layer, the defaults of flower-fgl."""


class GCN(torch.nn.Module):
    """Two layers of GCNConv, as ``model = "gcn"`` has by default."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = GCNConv(features, hidden)
        self.second = GCNConv(hidden, classes)

    def forward(self, data: Data) -> Tensor:
        h = self.first(data.x, data.edge_index).relu()
        return self.second(F.dropout(h, 0.5, self.training), data.edge_index)


def train(model: GCN, data: Data, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    model.train()
    for _ in range(epochs):
        optimizer.zero_grad()
        out = model(data)[data.train_mask]
        F.cross_entropy(out, data.y[data.train_mask]).backward()
        optimizer.step()


@torch.no_grad()
def score(model: GCN, data: Data) -> list[int]:
    """Count right predictions on validation and test nodes."""
    model.eval()
    is_right = model(data).argmax(1) == data.y
    return [int(is_right[mask].sum()) for mask in (data.val_mask, data.test_mask)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clients, classes = load_clients(options.folder)
    model = GCN(clients[0].num_features, HIDDEN, classes)
    weights = torch.tensor([float(data.train_mask.sum()) for data in clients])
    weights /= weights.sum()
    nodes = sum(int(data.test_mask.sum()) for data in clients)
    for number in range(1, options.rounds + 1):
        start = {name: value.clone() for name, value in model.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        right = 0
        for data, weight in zip(clients, weights, strict=True):
            model.load_state_dict(start)
            train(model, data, EPOCHS)
            right += score(model, data)[1]
            for name, value in model.state_dict().items():
                total[name] += weight * value
        model.load_state_dict(total)
        print(f"round {number}: {right / nodes:.4f}", flush=True)


if __name__ == "__main__":
    main()
