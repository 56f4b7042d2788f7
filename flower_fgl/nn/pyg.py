"""Layers of PyG, imported without PyG's deprecation warning."""

from __future__ import annotations

import atexit
import sys
import warnings
from pathlib import Path

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


@atexit.register
def _remove_generated_code() -> None:
    """Remove the temporary files to which PyG writes the code of layers, and leaves it."""
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if name.startswith("torch_geometric.") and path.name.startswith(f"{name}_"):
            path.unlink(missing_ok=True)
