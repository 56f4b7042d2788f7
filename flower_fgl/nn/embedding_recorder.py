"""A backbone that remembers its last embedding: penalties need no second pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput

__all__ = ["RecordingBackbone"]


class RecordingBackbone(Backbone):
    """Wrap a backbone, and what is trained together with it.

    Parameters
    ----------
    backbone : Backbone
        Shares its parameters.
    extra : torch.nn.Module, optional
        Trained by the same optimizer, e.g. an attention scorer.

    Notes
    -----
    1. ``embedding`` is what :meth:`embed` returned last, of shape
       (N, hidden_channels); for a readout (G, hidden_channels).
    2. ``items`` are the graphs it is of, numbers in the whole union, where a mini-batch
       of graphs was embedded; ``None`` where it is of all nodes or graphs.
    """

    def __init__(self, backbone: Backbone, extra: nn.Module | None = None) -> None:
        nn.Module.__init__(self)
        self.backbone = backbone
        self.extra = extra
        self.embedding: Tensor
        self.items: Tensor | None = None

    def embed(self, graph: GraphInput) -> Tensor:
        """Return and keep the penultimate representation of each node."""
        self.embedding = self.backbone.embed(graph)
        self.items = graph.selected
        return self.embedding

    @torch.no_grad()
    def at_rest(self, graph: GraphInput) -> Tensor:
        """Embed without dropout, and leave the network in evaluation mode.

        Parameters
        ----------
        graph : GraphInput
            As for :meth:`embed`.

        Returns
        -------
        Tensor of shape (N, hidden_channels), for a readout (G, hidden_channels)
            Without gradient.
        """
        self.eval()
        return self.embed(graph)

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes from what :meth:`embed` returned."""
        return self.backbone.head(h, graph)
