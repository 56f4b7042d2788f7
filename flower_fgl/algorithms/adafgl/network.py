"""AdaFGL's second step: a homophily head and a heterophily head on frozen predictions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.adafgl.messages import signed_messages
from flower_fgl.algorithms.adafgl.propagation import (
    UNKNOWN,
    alike_pairs,
    propagated,
    propagated_linear,
    propagation_matrix,
)
from flower_fgl.algorithms.own_network import NetworkSizes, sized_backbone
from flower_fgl.methods.adafgl import AdaFGLSettings
from flower_fgl.nn import Backbone, GraphInput

__all__ = ["AdaFGLNet", "Outputs", "adafgl_loss", "build_network", "combine"]

TINY = 1e-12


class Outputs(NamedTuple):
    """Logits of the four heads, each of shape (N, C)."""

    smooth: Tensor
    """Of the homophily head."""
    raw: Tensor
    propagated: Tensor
    messages: Tensor
    """These three are those of the heterophily head."""


def adafgl_loss(out: Outputs, soft: Tensor, index: Tensor, labels: Tensor) -> Tensor:
    """Compute CE + MSE of the homophily head, and three CE of the heterophily head.

    ``soft`` (N, C) is Y; ``index`` and ``labels`` (n,) are training nodes and their
    classes. No parameter belongs to both heads, so that one loss trains them as two
    would.
    """
    entropies = [F.cross_entropy(logits[index], labels) for logits in out]
    return torch.stack(entropies).sum() + F.mse_loss(out.smooth, soft)


def combine(out: Outputs, soft: Tensor, confidence: Tensor) -> Tensor:
    """Mix both heads: h · (softmax + Y)/2 + (1 − h) · mean of three softmaxes.

    ``soft`` (N, C) is Y, and ``confidence`` (1,), in [0, 1], is h. Returns probabilities
    (N, C).

    Notes
    -----
    1. The published code uses the homophily head alone if h is at least .9, and else the
       other one alone. Here both are mixed, as in the paper.
    """
    smooth, *others = [logits.softmax(dim=1) for logits in out]
    hom = (smooth + soft) / 2
    het = torch.stack(others).mean(dim=0)
    return confidence * hom + (1 - confidence) * het


class _Constants(NamedTuple):
    """What the second step computes once for a graph."""

    soft: Tensor
    """Y."""
    alike: Tensor
    """B."""
    linear: Callable[[Tensor], Tensor]
    """Maps weights W to X̂ Wᵀ."""


class AdaFGLNet(Backbone):
    """The frozen federated model ``extractor``, and the heads of the second step.

    For N nodes it takes N² numbers of memory in each of about five tensors, once;
    training takes blocks of them. Matrices of a graph are computed at its first use: the
    state of the extractor and the graph must not change afterwards.
    """

    confidence: Tensor

    def __init__(self, settings: AdaFGLSettings, **sizes: Unpack[NetworkSizes]) -> None:
        nn.Module.__init__(self)
        self.readout, self.dropout = False, sizes["dropout"]
        self.alpha, self.beta = settings.alpha, settings.beta
        self.steps = settings.steps
        self.extractor = sized_backbone(sizes).requires_grad_(False)
        self.hidden_channels = self.extractor.hidden_channels
        width, own = settings.width, sizes["num_features"]
        wide, after = own * (settings.steps + 1), [width, width, sizes["num_classes"]]
        self.smooth_head = _Head([wide, *after[1:]], self.dropout)
        self.raw_head = _Head([own, *after], self.dropout)
        self.wide_head = _Head([wide, *after], self.dropout)
        self.message_head = _Head([wide, *after], self.dropout)
        self.slope = nn.Parameter(torch.full((1,), 0.25))
        self.register_buffer("confidence", torch.full((1,), UNKNOWN))
        self._known: list[tuple[GraphInput, _Constants]] = []

    def _constants(self, graph: GraphInput) -> _Constants:
        """Return Y, X̂ and B of a graph, computed once."""
        for known, found in self._known:
            if known is graph:
                return found
        # scores are computed in inference mode, whose tensors cannot be trained with
        with torch.inference_mode(False), torch.no_grad():
            soft = self.extractor.eval()(graph).softmax(dim=1)
            alike = alike_pairs(soft)
            matrix = propagation_matrix(graph.edge_index, alike, alpha=self.alpha)
            if self.maps_first(graph):
                linear = partial(propagated_linear, matrix, graph, steps=self.steps)
            else:
                x = graph.dense_features()
                linear = partial(F.linear, propagated(matrix, x, steps=self.steps))
            alike = alike.to(soft.dtype)  # adding bool takes longer
        found = _Constants(soft, alike, linear)
        self._known.append((graph, found))
        return found

    def maps_first(self, graph: GraphInput) -> bool:
        """Return whether mapping sparse features before propagation costs less."""
        if graph.x.layout != torch.sparse_csr:
            return False
        number, width = graph.x.shape
        wide = width * (self.steps + 1)
        mapped = graph.x.values().numel() * (self.steps + 1) + number**2 * self.steps
        return mapped < number * wide

    def soft(self, graph: GraphInput) -> Tensor:
        """Return Y."""
        return self._constants(graph).soft

    def outputs(self, graph: GraphInput) -> Outputs:
        """Return the logits of all heads."""
        found = self._constants(graph)
        # the first layers of three heads, which have the same input, are one product
        heads = (self.smooth_head, self.wide_head, self.message_head)
        weight = torch.cat([head.first.weight for head in heads])
        bias = torch.cat([head.first.bias for head in heads])
        smooth, wide, message = (found.linear(weight) + bias).chunk(len(heads), dim=1)
        first = self.raw_head.first
        raw = graph.linear(None, first.weight, first.bias)
        e = self.message_head(message)
        return Outputs(
            self.smooth_head(smooth),
            self.raw_head(raw),
            self.wide_head(wide),
            signed_messages(found.alike, e, self.slope, beta=self.beta),
        )

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the federated model's embeddings."""
        return self.extractor.embed_nodes(graph)

    def forward(self, graph: GraphInput) -> Tensor:
        """Return the logarithm of the mixed predictions, of shape (N, C)."""
        mixed = combine(self.outputs(graph), self.soft(graph), self.confidence)
        return mixed.clamp(min=TINY).log()


class _Head(nn.Sequential):
    """Linear layers with PReLU and dropout between them; the caller applies the first."""

    def __init__(self, widths: list[int], dropout: float) -> None:
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            linear = nn.Linear(before, after)
            nn.init.xavier_uniform_(linear.weight, gain=nn.init.calculate_gain("relu"))
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.PReLU(), nn.Dropout(dropout)]
        super().__init__(*layers[:-2])

    @property
    def first(self) -> nn.Linear:
        """The first layer."""
        layer = self[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, mapped: Tensor) -> Tensor:
        """Continue after the first layer."""
        for layer in list(self)[1:]:
            mapped = layer(mapped)
        return mapped


def build_network(
    method_config: AdaFGLSettings, **sizes: Unpack[NetworkSizes]
) -> AdaFGLNet:
    """Build AdaFGL's network of the given sizes; torch's global generator draws weights."""
    return AdaFGLNet(method_config, **sizes)
