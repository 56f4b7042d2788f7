"""Backbone wrapper that keeps the last embedding for penalty terms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput

__all__ = ["RecordingBackbone"]


class RecordingBackbone(Backbone):
    """Wrap a backbone, not copied, and keep the embedding of its last forward pass.

    ``extra`` is a module that the same optimizer trains, e.g. an attention scorer.

    ``embedding`` is the last result of :meth:`embed`, of shape (N, hidden_channels), for
    a readout (G, hidden_channels). ``items`` are the embedded graphs if the last input
    was a mini-batch of graphs, numbered as in the whole batch; ``None`` if it was all
    nodes or graphs.
    """

    def __init__(self, backbone: Backbone, extra: nn.Module | None = None) -> None:
        nn.Module.__init__(self)
        self.backbone = backbone
        self.extra = extra
        self.embedding: Tensor
        self.items: Tensor | None = None

    @property
    def undecayed(self) -> list[nn.Parameter]:
        """Parameters of both modules that have no weight decay."""
        parts = (self.backbone, self.extra)
        return [p for part in parts for p in getattr(part, "undecayed", ())]

    def embed(self, graph: GraphInput) -> Tensor:
        """Return and keep the penultimate representation of each node or graph."""
        self.embedding = self.backbone.embed(graph)
        self.items = graph.selected
        return self.embedding

    @torch.no_grad()
    def at_rest(self, graph: GraphInput) -> Tensor:
        """Switch to evaluation mode and embed, without dropout and gradient."""
        self.eval()
        return self.embed(graph)

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes from embeddings."""
        return self.backbone.head(h, graph)

    def decode(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict pairs of nodes from the output of :meth:`head`."""
        return self.backbone.decode(h, graph)
