"""FedStar's structure encodings and its network of two channels.

Tan et al., "Federated Learning on Non-IID Graphs via Structural Knowledge Sharing",
AAAI 2023.
"""

from typing import Any, Unpack

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.own_network import NetworkSizes, backbone_sizes
from flower_fgl.methods.fedstar import FedStarSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn import layers as conv
from flower_fgl.nn.backbone import Parts
from flower_fgl.nn.layers import GCNConv, GINConv

__all__ = ["STRUCTURE", "FedStarNet", "degree_encoding", "return_probabilities"]
__all__ += ["structure_encoding"]

STRUCTURE = "encoder.structure."
"""Prefix of the shared tensors: the encoder of the structure."""
COLUMNS = 1024
"""Columns that the random walk propagates at a time."""


def return_probabilities(graph: GraphInput, steps: int) -> Tensor:
    """Compute the diagonals (N, steps) of (A D⁻¹)^k, k = 1 to ``steps``, of graphs.

    The probabilities that a random walk of k steps ends where it started; 0 for an
    isolated node. Walks of different graphs never meet, so one column starts a walk in
    every graph of a batch. There are as many columns as the largest graph has nodes.
    """
    number = graph.num_nodes
    nodes = torch.arange(number, device=graph.device)
    place = nodes
    if graph.union is not None:
        sizes = graph.union.num_nodes
        place = nodes - (sizes.cumsum(0) - sizes).index_select(0, graph.union.batch)
    found = torch.zeros(number, steps, dtype=graph.topology.dtype, device=graph.device)
    step = graph.operator("mean")  # D⁻¹A has the same diagonals
    for start in range(0, int(place.max()) + 1 if number else 0, COLUMNS):
        mine = nodes[(place >= start) & (place < start + COLUMNS)]
        column = place[mine] - start
        walk = found.new_zeros(number, int(column.max()) + 1)
        walk[mine, column] = 1
        for k in range(steps):
            walk = step.matmul(walk)
            found[mine, k] = walk[mine, column]
    return found


def degree_encoding(graph: GraphInput, degrees: int) -> Tensor:
    """Return the one-hot degree of every node, (N, degrees).

    Degrees below 1 count as 1, and those above ``degrees`` as ``degrees``.
    """
    degree = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
    place = degree.clamp(1, degrees) - 1
    return F.one_hot(place, degrees).to(graph.topology.dtype)


def structure_encoding(graph: GraphInput, walks: int, degrees: int) -> Tensor:
    """Join return probabilities and degrees, section 4.1: (N, walks + degrees), cached."""
    return graph.encode_nodes(
        ("fedstar", walks, degrees),
        lambda whole: torch.cat(
            [return_probabilities(whole, walks), degree_encoding(whole, degrees)], dim=1
        ),
    )


class FedStarNet(Backbone):
    """A GIN of the features that also reads, in each layer, a GCN of the structure.

    ``num_layers`` counts the layers of each channel.

    Notes
    -----
    1. A layer of the features reads the structure of the layer before.
    2. With ``readout`` the joined representations of a graph's nodes are summed, then
       classified; without it each node's is classified, which the paper does not do.
    """

    min_layers = 1
    pooling = "sum"

    def __init__(
        self,
        settings: FedStarSettings,
        *,
        readout: bool | str = False,
        **sizes: Unpack[NetworkSizes],
    ) -> None:
        self.walks, self.degrees = settings.walks, settings.degrees
        super().__init__(readout=readout, **backbone_sizes(sizes))

    def make(self, in_channels: int, num_outputs: int, num_layers: int) -> Parts:
        """Construct both channels and the classifier."""
        width = self.hidden_channels
        depth = range(num_layers)
        structure = {
            "input": nn.Linear(self.walks + self.degrees, width),
            "layers": nn.ModuleList(GCNConv(width, width) for _ in depth),
        }
        encoder = {
            "input": nn.Linear(in_channels, width),
            "layers": nn.ModuleList(
                GINConv(conv.mlp(2 * width, width, width)) for _ in depth
            ),
            "joint": nn.Linear(2 * width, width),
            "structure": nn.ModuleDict(structure),
        }
        head = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, num_outputs)])
        return nn.ModuleDict(encoder), head

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the joined representation (N, hidden_channels) of both channels."""
        encoder: Any = self.encoder
        structure = encoder["structure"]
        x = graph.linear(None, encoder["input"].weight, encoder["input"].bias)
        s = structure["input"](structure_encoding(graph, self.walks, self.degrees))
        layers = zip(encoder["layers"], structure["layers"], strict=True)
        for gin, gcn in layers:
            x = self._relu_dropout(gin(graph, torch.cat([x, s], dim=1)))
            s = gcn(graph, s).tanh()
        joined: Tensor = encoder["joint"](torch.cat([x, s], dim=1))
        return joined

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Return the logits (N, C), for a readout (G, C)."""
        layers: Any = self.classifier
        out: Tensor = layers[1](self._relu_dropout(layers[0](h)))
        return out
