"""Layers of PyG, imported without PyG's deprecation warning."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # PyG compiles one of its classes with TorchScript, which torch 2.13 deprecates
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.* is deprecated")
    from torch_geometric.nn import (
        GATConv,
        GCN2Conv,
        GCNConv,
        GINConv,
        SAGEConv,
        SGConv,
        SSGConv,
    )
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

__all__ = [
    "GATConv",
    "GCN2Conv",
    "GCNConv",
    "GINConv",
    "SAGEConv",
    "SGConv",
    "SSGConv",
    "gcn_norm",
]
