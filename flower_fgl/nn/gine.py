"""GINE: a graph isomorphism network whose messages contain the features of edges."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flower_fgl.core.errors import ConfigError
from flower_fgl.nn.backbone import Backbone, Parts
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.messages import edge_messages

__all__ = ["GINE"]


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

    def make(self, in_channels: int, num_classes: int, num_layers: int) -> Parts:
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
            nn.Sequential(
                nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden)
            )
            for _ in range(num_layers)
        )
        return nn.ModuleDict(parts), nn.Linear(hidden, num_classes)

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
