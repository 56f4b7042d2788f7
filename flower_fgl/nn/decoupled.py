"""Backbones that separate propagation from learnt transformations."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.nn.backbone import Backbone, Parts
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.layers import SGConv
from flower_fgl.nn.topology import graph_filter

__all__ = ["APPNP", "GAMLP", "SGC", "SIGN", "SSGC"]


class SGC(Backbone):
    """Simple graph convolution, Wu et al., ICML 2019: ``S^K X W``.

    ``num_layers``, at least 1, is the number K of propagation steps.

    Notes
    -----
    1. The paper has one matrix from d to C. Here it is a product of two through the
       embedding width, without an activation in between.
    """

    min_layers = 1
    stacks = True

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct two linear maps."""
        hidden = self.hidden_channels
        self.coefficients = self.filter(num_layers)
        return SGConv(in_channels, hidden), nn.Linear(hidden, num_outputs)

    def filter(self, steps: int) -> tuple[float, ...]:
        """Return the coefficients of the powers of S."""
        return (0.0,) * steps + (1.0,)

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Propagate the features and map them to (N, hidden_channels)."""
        lin: Any = self.encoder.lin
        h = graph.filtered_linear(
            None,
            lin.weight,
            lin.bias,
            kind="normalised",
            coefficients=self.coefficients,
        )
        return self._dropout(h)


class SSGC(SGC):
    """Simple spectral graph convolution, Zhu & Koniusz, ICLR 2021.

    Filters by ``α X + (1 − α) / K · Σ_{k=1..K} S^k X``, α = 0.05.

    Notes
    -----
    1. As in PyG, the mean runs over k = 1 to K; X itself has weight α only.
    2. The weight matrix is a product of two through the embedding width as in
       :class:`SGC`.
    """

    stacks = True
    alpha: ClassVar[float] = 0.05
    """Weight of the features themselves, as in the paper's citation experiments."""

    def filter(self, steps: int) -> tuple[float, ...]:
        """Return α and (1 − α) / K for each power."""
        return (self.alpha, *[(1 - self.alpha) / steps] * steps)


class APPNP(Backbone):
    """Personalised propagation, Gasteiger et al., ICLR 2019, power iteration.

    ``num_layers``, at least 2, counts the linear layers, including the head.

    Notes
    -----
    1. The paper propagates the logits. Here the last hidden representation is
       propagated and the head maps the result. Propagation and the map commute (except
       for the head's bias, which is not propagated), so the model is the same. The
       embedding then depends on the graph, which methods that exchange embeddings need.
    2. Edges are not dropped.
    """

    steps: int = 10
    """Propagation steps K, as in the paper."""
    alpha: ClassVar[float] = 0.1
    """Teleport probability, as in the paper."""

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct the linear layers."""
        hidden = self.hidden_channels
        stay, move = self.alpha, 1 - self.alpha
        powers = [stay * move**k for k in range(self.steps)]
        self.coefficients = (*powers, move**self.steps)
        encoder = _linear_stack(in_channels, hidden, num_layers - 1)
        return encoder, nn.Linear(hidden, num_outputs)

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Map the features to (N, hidden_channels) and propagate."""
        encoder: Any = self.encoder
        first, *rest = encoder
        h = self._relu_dropout(graph.linear(None, first.weight, first.bias))
        for layer in rest:
            h = self._relu_dropout(layer(h))
        return graph_filter(graph.operator("normalised"), h, self.coefficients)


class SIGN(Backbone):
    """Inception-like network on propagated features, Frasca et al., 2020 (SIGN).

    ``num_layers``, at least 1, is the largest power r of the propagation operator.

    Notes
    -----
    1. The paper maps the concatenated branches to the classes. Here they are mapped to
       the embedding width, with ReLU, and from there to the classes.
    2. The activation is ReLU instead of PReLU; only powers of the normalised adjacency.
    """

    min_layers = 1

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct one branch per power and the merging layers."""
        hidden = self.hidden_channels
        count = num_layers + 1
        branches = [nn.Linear(in_channels, hidden) for _ in range(count)]
        encoder = nn.ModuleDict(
            {
                "branches": nn.ModuleList(branches),
                "merge": nn.Linear(count * hidden, hidden),
            }
        )
        return encoder, nn.Linear(hidden, num_outputs)

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Map each power of propagation and merge them to (N, hidden_channels)."""
        encoder: Any = self.encoder
        parts = [
            graph.filtered_linear(
                None,
                branch.weight,
                branch.bias,
                kind="normalised",
                coefficients=(0.0,) * power + (1.0,),
            )
            for power, branch in enumerate(encoder["branches"])
        ]
        h = self._relu_dropout(torch.cat(parts, dim=1))  # (N, (r + 1) · p)
        return self._relu_dropout(encoder["merge"](h))


class GAMLP(Backbone):
    """Graph attention MLP, Zhang et al., KDD 2022, with recursive attention.

    Each node weights its propagated features S^k X, k = 0..K, by its own attention
    scores, see :func:`recursive_attention`; an MLP follows. ``num_layers``, at least 2,
    counts the linear layers, including the head.

    Notes
    -----
    1. Attention compares the features after the first linear layer, which all powers
       share, instead of raw features. This takes p·d parameters instead of (K + 1)·p·d,
       and sparse features stay sparse. Propagation commutes with that layer.
    2. No label reuse, no residual connections.
    """

    stacks = True
    steps: int = 3
    """Propagation steps K, as in FedPG's experiments."""

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct the linear layers and the attention scorer."""
        hidden = self.hidden_channels
        encoder = nn.ModuleDict(
            {
                "layers": _linear_stack(in_channels, hidden, num_layers - 1),
                "attention": nn.Linear(2 * hidden, 1),
            }
        )
        return encoder, nn.Linear(hidden, num_outputs)

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Project, propagate, and mix the powers to (N, hidden_channels)."""
        encoder: Any = self.encoder
        attention = encoder["attention"]
        first, *rest = encoder["layers"]
        operator = graph.operator("normalised")
        powers = [graph.linear(None, first.weight)]
        for _ in range(self.steps):
            powers.append(operator.matmul(powers[-1]))
        # The bias b of the first layer is that of every hop. Weights sum to 1, so b adds
        # s · [b ‖ b] to all scores, and itself to the mixture.
        both = torch.cat([first.bias, first.bias], dim=-1)
        shift = attention.bias + (attention.weight * graph.per_row(both)).sum(-1)
        h = graph.per_row(first.bias)
        weight = recursive_attention(powers, attention.weight, shift)
        for share, power in zip(weight, powers, strict=True):
            h = h + share[..., None] * power
        h = self._relu_dropout(h)
        for layer in rest:
            h = self._relu_dropout(graph.linear(h, layer.weight, layer.bias))
        return h


def recursive_attention(hops: Sequence[Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    """Weight each hop by comparing it with the mixture of the previous hops, GAMLP.

    The score of hop k is ``e_k = LeakyReLU([h_k ‖ x_k] · s + b)``. The history h_k mixes
    the hops before k by softmax(e_0..e_{k-1}), and h_0 = x_0. The weights (K + 1, N) are
    softmax(e_0..e_K). ``hops`` are x_0 to x_K, each (N, p), ``weight`` (1, 2p) is s. For
    stacked clients all have one more dimension, before the last two of a hop and of
    ``weight``.

    The product with s distributes over the mixture, so each history is mixed as one number
    per hop instead of p.
    """
    halves = weight.view(*weight.shape[:-2], 2, -1)
    parts = torch.stack([x @ halves.transpose(-1, -2) for x in hops])  # (K + 1, N, 2)
    of_history, of_hop = parts.unbind(-1)
    scores = [F.leaky_relu(of_history[0] + of_hop[0] + bias, 0.2)]
    for k in range(1, len(hops)):
        mixture = torch.stack(scores).softmax(0)  # (k, N)
        history = (mixture * of_history[:k]).sum(0)
        scores.append(F.leaky_relu(history + of_hop[k] + bias, 0.2))
    return torch.stack(scores).softmax(0)


def _linear_stack(width: int, hidden: int, count: int) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Linear(width if number == 0 else hidden, hidden) for number in range(count)
    )
