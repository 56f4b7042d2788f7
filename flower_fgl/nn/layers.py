"""Parameters of the layers of PyG 2.8: their names, shapes and initialisation.

:mod:`flower_fgl.nn.conv` has the forward passes, which take PyG's own layers as well. PyG
is not imported, since that takes longer than importing torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = [
    "GATConv",
    "GCN2Conv",
    "GCNConv",
    "GINConv",
    "SAGEConv",
    "SGConv",
    "gcn_norm",
]


def gcn_norm(
    edge_index: Tensor, weight: Tensor | None, num_nodes: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return self-looped edges and ``D^-1/2 (A + I) D^-1/2``, Kipf & Welling, ICLR 2017.

    A self-loop of weight 1 is added where a node has none; of several, the last counts.
    The edges (2, E') are those without self-loops, then one loop per node; the values are
    (E',). ``weight`` (E,) may require grad; without it each edge has weight 1 of ``dtype``.
    """
    others = edge_index[0] != edge_index[1]
    loops = torch.arange(num_nodes, device=edge_index.device)
    edges = torch.cat([edge_index[:, others], loops.expand(2, -1)], dim=1)
    if weight is None:
        weight = torch.ones(edges.shape[1], dtype=dtype, device=edges.device)
    else:
        own = weight.new_ones(num_nodes)
        own[edge_index[0][~others]] = weight[~others]
        weight = torch.cat([weight[others], own])
    source, target = edges
    degree = weight.new_zeros(num_nodes).scatter_add_(0, target, weight)
    scale = degree.pow_(-0.5)
    scale.masked_fill_(scale == math.inf, 0)
    return edges, scale[source] * weight * scale[target]


def _glorot(tensor: Tensor) -> None:
    """Draw from ±√(6 / (rows + columns)), Glorot & Bengio, AISTATS 2010."""
    bound = math.sqrt(6.0 / (tensor.size(-2) + tensor.size(-1)))
    tensor.data.uniform_(-bound, bound)


class _Linear(nn.Module):
    """Weight (out, in) and bias (out,) of a linear map."""

    bias: nn.Parameter | None

    def __init__(
        self, width: int, out: int, *, bias: bool, is_glorot: bool = False
    ) -> None:
        super().__init__()
        self._is_glorot = is_glorot
        self.weight = nn.Parameter(torch.empty(out, width))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights by Glorot's or by He's rule."""
        width = self.weight.shape[1]
        if self._is_glorot:
            _glorot(self.weight)
        else:
            bound = math.sqrt(6 / ((1 + math.sqrt(5) ** 2) * width))
            self.weight.data.uniform_(-bound, bound)
        if self.bias is not None:
            bound = 1.0 / math.sqrt(width)
            self.bias.data.uniform_(-bound, bound)


class GCNConv(nn.Module):
    """``lin.weight`` (out, in) and ``bias`` (out,) of PyG's ``GCNConv``."""

    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.lin = _Linear(in_channels, out_channels, bias=False, is_glorot=True)
        own = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.register_parameter("bias", own)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights; the bias is zero."""
        self.lin.reset_parameters()
        if self.bias is not None:
            self.bias.data.zero_()


class SAGEConv(nn.Module):
    """``lin_l`` of the neighbours, and ``lin_r`` of PyG's ``SAGEConv`` with the mean."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        bias: bool = True,
        root_weight: bool = True,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.root_weight = root_weight
        self.lin_l = _Linear(in_channels, out_channels, bias=bias)
        if root_weight:
            self.lin_r = _Linear(in_channels, out_channels, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        self.lin_l.reset_parameters()
        if self.root_weight:
            self.lin_r.reset_parameters()


class GATConv(nn.Module):
    """``lin.weight``, ``att_src``, ``att_dst`` and ``bias`` of PyG's ``GATConv``."""

    negative_slope = 0.2

    def __init__(self, in_channels: int, out_channels: int, *, heads: int = 1) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.heads = heads
        self.lin = _Linear(
            in_channels, heads * out_channels, bias=False, is_glorot=True
        )
        self.att_src = nn.Parameter(torch.empty(1, heads, out_channels))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_channels))
        self.bias = nn.Parameter(torch.empty(heads * out_channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights; the bias is zero."""
        self.lin.reset_parameters()
        _glorot(self.att_src)
        _glorot(self.att_dst)
        self.bias.data.zero_()


class GINConv(nn.Module):
    """The network ``nn`` of PyG's ``GINConv``; ε is 0 and no part of the state."""

    initial_eps = 0.0

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.nn = network
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        for layer in self.nn:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()


class GCN2Conv(nn.Module):
    """``weight1`` (p, p) of PyG's ``GCN2Conv``; β = log(theta / layer + 1)."""

    def __init__(
        self, channels: int, alpha: float, theta: float, *, layer: int
    ) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, math.log(theta / layer + 1)
        self.weight1 = nn.Parameter(torch.empty(channels, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight."""
        _glorot(self.weight1)


class SGConv(nn.Module):
    """``lin`` of PyG's ``SGConv`` and ``SSGConv``."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = _Linear(in_channels, out_channels, bias=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        self.lin.reset_parameters()
