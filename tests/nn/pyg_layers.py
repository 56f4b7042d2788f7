"""Layers of PyG with the parameters of ours."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn
from torch_geometric import nn as pyg

from flower_fgl.nn import layers

__all__ = ["as_pyg"]


def as_pyg(module: nn.Module, **options: Any) -> Any:
    """Return a module, all layers of ours replaced by PyG's with the same parameters."""
    makers: dict[type, Any] = {
        layers.GCNConv: lambda own: pyg.GCNConv(
            own.in_channels, own.out_channels, bias=own.bias is not None
        ),
        layers.SAGEConv: lambda own: pyg.SAGEConv(own.in_channels, own.out_channels),
        layers.GATConv: lambda own: pyg.GATConv(
            own.in_channels, own.out_channels, heads=own.heads
        ),
        layers.GINConv: lambda own: pyg.GINConv(deepcopy(own.nn)),
        layers.GCN2Conv: lambda own: _gcn2(own),
        layers.SGConv: lambda own: (pyg.SSGConv if "alpha" in options else pyg.SGConv)(
            own.lin.weight.shape[1], own.lin.weight.shape[0], **options
        ),
    }
    if type(module) not in makers:
        out = deepcopy(module)
        for name, child in module.named_children():
            setattr(out, name, as_pyg(child, **options))
        for name, parameter in module.named_parameters(recurse=False):
            setattr(out, name, parameter)
        return out
    made = makers[type(module)](module)
    for name, parameter in module.named_parameters():
        owner, _, key = name.rpartition(".")
        setattr(made.get_submodule(owner), key, parameter)
    return made


def _gcn2(own: layers.GCN2Conv) -> Any:
    made = pyg.GCN2Conv(len(own.weight1), own.alpha, 0.5, layer=1)
    made.beta = own.beta
    return made
