"""Backbones that pass messages in every layer, and a multi-layer perceptron."""

from __future__ import annotations

from math import gcd
from typing import Any, ClassVar

from torch import Tensor, nn

from flower_fgl.core.errors import ConfigError
from flower_fgl.nn import layers
from flower_fgl.nn.backbone import Backbone, Parts
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.layers import GATConv, GCN2Conv, GCNConv, GINConv, SAGEConv
from flower_fgl.nn.topology import edge_messages

__all__ = ["GAT", "GCN", "GCNII", "GIN", "GINE", "MLP", "GraphSAGE", "LayeredNet"]


class LayeredNet(Backbone):
    """Layers of one type with ReLU and dropout between them; the last is the head.

    ``num_layers``, at least 2, counts all of them. With a readout or a linear head, all
    layers belong to the encoder, each followed by ReLU and dropout, and the head is a
    linear map.
    """

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct the layers."""
        hidden = self.hidden_channels
        widths = [in_channels] + [hidden] * (num_layers - 1)
        if not self.has_linear_head:
            widths.pop()
        encoder = nn.ModuleList(self.make_layer(width, hidden) for width in widths)
        if self.has_linear_head:
            return encoder, nn.Linear(hidden, num_outputs)
        return encoder, self.make_layer(hidden, num_outputs, is_last=True)

    def make_layer(self, width: int, out: int, *, is_last: bool = False) -> Any:
        """Construct a layer of input and output channels; ``is_last`` is the head."""
        raise NotImplementedError

    def run_layer(self, layer: Any, graph: GraphInput, h: Tensor | None) -> Tensor:
        """Run a layer of :meth:`make_layer`, without activation: (N, out).

        ``h`` are node representations (N, width), or ``None`` for the graph's features.
        """
        out: Tensor = layer(graph, h)
        return out

    def represent(self, graph: GraphInput) -> Tensor:
        """Return the last encoder layer's linear output: (N, hidden_channels)."""
        encoder: Any = self.encoder
        first, *rest = encoder
        h = self.run_layer(first, graph.level(0), None)
        for number, layer in enumerate(rest, start=1):
            h = self.run_layer(layer, graph.level(number), self._relu_dropout(h))
        return h

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return :meth:`represent` after ReLU and dropout: (N, hidden_channels)."""
        return self._relu_dropout(self.represent(graph))

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Run the last layer: logits (N, C), for a readout (G, C)."""
        if self.has_linear_head:
            return super().head(h, graph)
        encoder: Any = self.encoder
        return self.run_layer(self.classifier, graph.level(len(encoder)), h)

    @property
    def reach(self) -> int | None:
        """The number of layers, each of which may read the neighbours."""
        if self.edge_direction != "both":
            return None
        encoder: Any = self.encoder
        return len(encoder) + (not self.has_linear_head)


class DirectedNet(LayeredNet):
    """Layers that also run on directed edges, by one operator for each way.

    With ``forward`` a layer is that of the directed graph. With ``separate`` a layer on the
    reversed graph is added, with weights of its own; the bias, and the root weight of
    GraphSAGE, belong to the first. Repeated edges count repeatedly, as in PyG.
    """

    def make_layer(self, width: int, out: int, *, is_last: bool = False) -> Any:
        """Construct a layer; with ``separate`` two of them."""
        if self.edge_direction != "separate":
            return self.make_conv(width, out)
        back = self.make_conv(width, out, is_back=True)
        return nn.ModuleDict({"ahead": self.make_conv(width, out), "back": back})

    def run_layer(self, layer: Any, graph: GraphInput, h: Tensor | None) -> Tensor:
        """Propagate along the edges, or with ``both`` along undirected ones."""
        if self.edge_direction == "both":
            return super().run_layer(layer, graph, h)
        ahead, back = graph.directed(self.edge_direction)
        if back is None:
            return super().run_layer(layer, ahead, h)
        out: Tensor = layer["ahead"](ahead, h) + layer["back"](back, h)
        return out

    def make_conv(self, width: int, out: int, *, is_back: bool = False) -> Any:
        """Construct a layer, without bias if it ``is_back``."""
        raise NotImplementedError


class GCN(DirectedNet):
    """Graph convolutional network, Kipf & Welling, ICLR 2017.

    Notes
    -----
    1. The paper also drops features. Here only hidden representations are dropped, as is
       common in federated graph learning benchmarks.
    2. On directed edges, degrees are in-degrees, and each way has self-loops.
    """

    stacks = True

    def make_conv(self, width: int, out: int, *, is_back: bool = False) -> Any:
        """Construct a layer with the parameters of PyG's ``GCNConv``."""
        return GCNConv(width, out, bias=not is_back)


class GraphSAGE(DirectedNet):
    """GraphSAGE with the mean of all neighbours, Hamilton et al., NeurIPS 2017.

    Notes
    -----
    1. Neighbours are not sampled, and representations are not normalised to unit
       length. Methods that need either implement it themselves.
    """

    stacks = True

    def make_conv(self, width: int, out: int, *, is_back: bool = False) -> Any:
        """Construct a layer with the parameters of PyG's ``SAGEConv``."""
        return SAGEConv(width, out, bias=not is_back, root_weight=not is_back)


class GAT(LayeredNet):
    """Graph attention network, Veličković et al., ICLR 2018.

    Notes
    -----
    1. Hidden layers have gcd(4, hidden_channels) heads that share the width, the last
       layer has one; the paper has 8 heads of 8 channels.
    2. The paper uses ELU and dropout of attention and features. Here the activation is
       ReLU with dropout of hidden representations, as in the other backbones.
    """

    reach = None
    """A receptive field does not provide the edges that attention needs."""

    def make_layer(self, width: int, out: int, *, is_last: bool = False) -> Any:
        """Construct a layer with the parameters of PyG's ``GATConv``."""
        heads = 1 if is_last else gcd(4, out)
        return GATConv(width, out // heads, heads=heads)


class GIN(LayeredNet):
    """Graph isomorphism network, Xu et al., ICLR 2019.

    Notes
    -----
    1. ε is 0 (the paper's GIN-0) and not part of the state.
    2. The layers' MLPs (two linear layers, ReLU) have no batch normalisation: its
       statistics are undefined for a client with one node and cannot be averaged.
    3. A readout uses the embedding of the last layer only; the paper concatenates those
       of all layers.
    """

    stacks = True
    pooling = "sum"
    """As in the paper: a sum distinguishes multisets that a mean does not."""

    def make_layer(self, width: int, out: int, *, is_last: bool = False) -> Any:
        """Construct a layer with the parameters of PyG's ``GINConv``."""
        return GINConv(layers.mlp(width, self.hidden_channels, out))


class MLP(LayeredNet):
    """Multi-layer perceptron: the backbone that ignores the edges."""

    stacks = True

    def make_layer(self, width: int, out: int, *, is_last: bool = False) -> Any:
        """Construct a linear layer."""
        return nn.Linear(width, out)

    def run_layer(self, layer: Any, graph: GraphInput, h: Tensor | None) -> Tensor:
        """Map each node independently."""
        return graph.linear(h, layer.weight, layer.bias)


class GCNII(Backbone):
    """GCN with initial residual and identity mapping, Chen et al., ICML 2020.

    ``num_layers``, at least 1, counts the propagating layers, between two linear maps.
    Layer l maps by ``(1 − β) I + β W`` with β = log(theta / l + 1).

    Notes
    -----
    1. Dropout precedes each layer as in the paper, except the first linear map:
       features are never dropped.
    """

    min_layers = 1
    alpha: ClassVar[float] = 0.1
    """Weight of the initial representation, as in the paper."""
    theta: ClassVar[float] = 0.5
    """The paper's λ."""

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct two linear maps and the layers between them."""
        hidden = self.hidden_channels
        convs = [
            GCN2Conv(hidden, self.alpha, self.theta, layer=number)
            for number in range(1, num_layers + 1)
        ]
        encoder = nn.ModuleDict(
            {"input": nn.Linear(in_channels, hidden), "convs": nn.ModuleList(convs)}
        )
        return encoder, nn.Linear(hidden, num_outputs)

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the input (N, hidden_channels) of the last linear map."""
        encoder: Any = self.encoder
        first = encoder["input"]
        start = graph.linear(None, first.weight, first.bias).relu()
        h = self._dropout(start)
        for layer in encoder["convs"]:
            h = self._relu_dropout(layer(graph, h, start))
        return h


class GINE(Backbone):
    """Graph isomorphism network with features of edges, Hu et al., ICLR 2020.

    A linear map of the node features, then ``num_layers`` layers, at least 1::

        m_i = Σ_{(j→i)} ReLU(h_j + W_e x_ji + b_e)
        h_i' = MLP((1 + ε) h_i + m_i)

    With the direction ``separate`` a second sum with weights of its own runs over the
    edges (i→j). ReLU and dropout follow each layer; the head is a linear map.

    Notes
    -----
    1. This is PyG's layer ``GINEConv``. The paper adds the embeddings of edges without the
       inner ReLU, and has one for self-loops, as far as we know it.
    2. ε is 0, the MLPs (two linear layers, ReLU) have no batch normalisation, and a readout
       sums the embeddings of the last layer, all as in :class:`~flower_fgl.nn.GIN`.
    3. Two directions are added. Egressy et al. (AAAI 2024) concatenate them, as far as we
       know it.
    """

    min_layers = 1
    pooling = "sum"

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct the input map, the MLPs, and the maps of the features of edges."""
        if not self.edge_channels:
            raise ConfigError('model = "gine" needs features of edges.')
        hidden = self.hidden_channels
        names = (
            ["edges", "edges_back"] if self.edge_direction == "separate" else ["edges"]
        )
        parts: dict[str, nn.Module] = {"input": nn.Linear(in_channels, hidden)}
        for name in names:
            parts[name] = nn.ModuleList(
                nn.Linear(self.edge_channels, hidden) for _ in range(num_layers)
            )
        parts["mlps"] = nn.ModuleList(
            layers.mlp(hidden, hidden, hidden) for _ in range(num_layers)
        )
        return nn.ModuleDict(parts), nn.Linear(hidden, num_outputs)

    def represent(self, graph: GraphInput) -> Tensor:
        """Return the last layer's linear output: (N, hidden_channels)."""
        encoder: Any = self.encoder
        first = encoder["input"]
        h = graph.linear(None, first.weight, first.bias)
        ways = [edges for edges in graph.ways(self.edge_direction) if edges is not None]
        for number, mlp in enumerate(encoder["mlps"]):
            h = self._relu_dropout(h) if number else h
            total = h
            for edges, name in zip(ways, ("edges", "edges_back"), strict=False):
                total = total + edge_messages(h, edges, encoder[name][number])
            h = mlp(total)
        return h

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return :meth:`represent` after ReLU and dropout: (N, hidden_channels)."""
        return self._relu_dropout(self.represent(graph))
