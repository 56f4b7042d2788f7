"""Layers of PyG 2.8: their parameters, and forward passes on a :class:`GraphInput`.

The classes have the names, shapes and initialisation of PyG's parameters. PyG is not
imported, since that takes longer than importing torch. The forward passes compute PyG's
formulas in another order, and take representations (N, p), by default the graph's features.
PyG's forward gathers and scatters one row per edge, normalises the adjacency in each call,
and cannot take sparse features: this takes half of a training step on a small graph.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.sparse import index_sum

__all__ = ["GATConv", "GCN2Conv", "GCNConv", "GINConv", "RepNorm", "SAGEConv", "SGConv"]
__all__ += ["bound", "dropout", "mlp", "relu_dropout"]


def _glorot(tensor: Tensor) -> None:
    """Draw from ±√(6 / (rows + columns)), Glorot & Bengio, AISTATS 2010."""
    bound = math.sqrt(6.0 / (tensor.size(-2) + tensor.size(-1)))
    tensor.data.uniform_(-bound, bound)


class _Linear(nn.Linear):
    """A linear map with initial weights drawn as PyG draws them."""

    def __init__(
        self, width: int, out: int, *, bias: bool, is_glorot: bool = False
    ) -> None:
        self._is_glorot = is_glorot  # read by the constructor, which draws
        super().__init__(width, out, bias=bias)

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


class _Layer(nn.Module):
    """A layer of other layers, and of weights and a bias of its own."""

    def reset_parameters(self) -> None:
        """Draw all weights, its own by Glorot's rule; its own bias is zero."""
        part: Any
        for part in self.children():
            part.reset_parameters()
        for name, parameter in self.named_parameters(recurse=False):
            if name == "bias":
                parameter.data.zero_()
            else:
                _glorot(parameter)


class GCNConv(_Layer):
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

    def forward(self, graph: GraphInput, h: Tensor | None = None) -> Tensor:
        """Compute ``S H Wᵀ + b``, Kipf & Welling, ICLR 2017, Eq. (2) without activation.

        ``h`` (N, p) is by default the graph's features; the result is (N, q).
        """
        return graph.filtered_linear(
            h, self.lin.weight, self.bias, kind="normalised", coefficients=ONE_STEP
        )


class SAGEConv(_Layer):
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

    def forward(self, graph: GraphInput, h: Tensor | None = None) -> Tensor:
        """Compute ``mean(H) W_lᵀ + b + H W_rᵀ``, Hamilton et al., NeurIPS 2017, mean.

        The mean is weighted by edge weights; the second term needs a root weight.
        """
        if graph.shape and self.root_weight:
            total = self.lin_r.weight + self.lin_l.weight
            if graph.shape == "loops":
                return graph.linear(h, total, self.lin_l.bias)
            # outputs of nodes a, b: their sum depends on a + b, their difference on a - b
            a, b = (graph.x if h is None else h).chunk(2, dim=-2)
            bias = None if self.lin_l.bias is None else 2 * self.lin_l.bias
            both = graph.linear(a + b, total, bias)
            gap = graph.linear(a - b, self.lin_r.weight - self.lin_l.weight)
            return torch.cat([both + gap, both - gap], dim=-2) / 2
        neighbours = graph.filtered_linear(
            h, self.lin_l.weight, self.lin_l.bias, kind="mean", coefficients=ONE_STEP
        )
        if not self.root_weight:
            return neighbours
        return neighbours + graph.linear(h, self.lin_r.weight)


class GATConv(_Layer):
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

    def forward(self, graph: GraphInput, h: Tensor | None = None) -> Tensor:
        """Attend to the neighbours, Veličković et al., ICLR 2018, Eq. (3), (4), (5).

        Heads are concatenated to (N, heads · q), and attention has no dropout. A weight
        multiplies the unnormalised attention of its edge: weight 0 removes the edge, weight
        1 gives the published formula.
        """
        z = graph.linear(h, self.lin.weight)
        z = z.view(-1, self.heads, self.out_channels)
        source, target, weight = graph.topology.attention_edges()
        score = (z * self.att_src).sum(-1).index_select(0, source)
        score = score + (z * self.att_dst).sum(-1).index_select(0, target)
        score = F.leaky_relu(score, self.negative_slope)  # (E', heads)
        with torch.no_grad():  # subtracting the maximum cancels and avoids overflow
            top = score.new_zeros(len(z), self.heads).scatter_reduce(
                0, target[:, None].expand_as(score), score, "amax", include_self=False
            )
        attention = (score - top.index_select(0, target)).exp()
        if weight is not None:
            attention = attention * weight[:, None]
        total = index_sum(attention, target, len(z))  # (N, heads)
        messages = (attention[..., None] * z.index_select(0, source)).flatten(1)
        out = index_sum(messages, target, len(z)).view_as(z) / total[..., None]
        return out.flatten(1) + self.bias


class GINConv(nn.Module):
    """The network ``nn`` of PyG's ``GINConv``; ε is 0 and no part of the state."""

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        self.nn = network
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights."""
        for layer in self.nn:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def forward(self, graph: GraphInput, h: Tensor | None = None) -> Tensor:
        """Compute ``MLP(H + A H)``, Xu et al., ICLR 2019, Eq. (4.1) with ε = 0.

        The MLP starts with a linear layer.
        """
        layers: Any = self.nn
        first, *rest = layers
        out = graph.filtered_linear(
            h, first.weight, first.bias, kind="sum", coefficients=(1.0, 1.0)
        )
        for layer in rest:
            if isinstance(layer, nn.Linear):  # its weights may be stacked
                out = graph.linear(out, layer.weight, layer.bias)
            else:
                out = layer(out)
        return out


class GCN2Conv(_Layer):
    """``weight1`` (p, p) of PyG's ``GCN2Conv``; β = log(theta / layer + 1)."""

    def __init__(
        self, channels: int, alpha: float, theta: float, *, layer: int
    ) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, math.log(theta / layer + 1)
        self.weight1 = nn.Parameter(torch.empty(channels, channels))
        self.reset_parameters()

    def forward(self, graph: GraphInput, h: Tensor, start: Tensor) -> Tensor:
        """Compute one GCNII layer, Chen et al., ICML 2020, Eq. (5) without activation.

        ``start`` (N, p) are the representations before the first layer (initial residual).
        """
        mixed = (1 - self.alpha) * graph.operator("normalised").matmul(h)
        mixed = mixed + self.alpha * start
        return torch.addmm(
            mixed, mixed, self.weight1, beta=1 - self.beta, alpha=self.beta
        )


class SGConv(_Layer):
    """``lin`` of PyG's ``SGConv`` and ``SSGConv``."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.lin = _Linear(in_channels, out_channels, bias=True)
        self.reset_parameters()


def mlp(width: int, hidden: int, out: int) -> nn.Sequential:
    """Construct two linear layers with ReLU between them."""
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))


ONE_STEP = (0.0, 1.0)

Uniform = Callable[[Tensor], Tensor]
"""Draws numbers in [0, 1) of the shape of a tensor."""


def dropout(
    h: Tensor, rate: float, is_training: bool, uniform: Uniform = torch.rand_like
) -> Tensor:
    """Zero entries with probability ``rate``, scale the rest, Srivastava et al., JMLR 2014.

    ``uniform`` takes ``h`` and returns uniform numbers of its shape. ``F.dropout`` draws
    Bernoulli numbers, which take four times as long on a CPU.
    """
    if not is_training or rate == 0:
        return h
    return h * _scaled(uniform(h) >= rate, rate, h.dtype)


def relu_dropout(
    h: Tensor, rate: float, is_training: bool, uniform: Uniform = torch.rand_like
) -> Tensor:
    """Apply ReLU, then :func:`dropout`, as one product with a mask."""
    if not is_training or rate == 0:
        return h.relu()
    kept = (uniform(h) >= rate) & (h.detach() > 0)
    return h * _scaled(kept, rate, h.dtype)


def _scaled(kept: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """Turn a mask of kept entries into factors 0 and 1 / (1 − rate)."""
    return kept.to(dtype).mul_(1 / (1 - rate))


RepNorm = Literal["l2", "tanh", "none"]
"""Normalisation of representations: unit length, tanh, or none."""


def bound(h: Tensor, how: RepNorm) -> Tensor:
    """Bound representations (N, H) in length or range; rows of zeros stay zeros.

    A node without features and neighbours may have such a row. Its gradient is not divided
    by the length: division by a tiny length would make it enormous.
    """
    if how == "tanh":
        return h.tanh()
    if how == "l2":
        length: Tensor = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
        return h / (length + (length == 0))
    return h
