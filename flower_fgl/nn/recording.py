"""A backbone that remembers its last embedding: penalties need no second pass."""

from __future__ import annotations

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
       (N, hidden_channels).
    """

    def __init__(self, backbone: Backbone, extra: nn.Module | None = None) -> None:
        nn.Module.__init__(self)
        self.backbone = backbone
        self.extra = extra
        self.embedding: Tensor

    def embed(self, graph: GraphInput) -> Tensor:
        """Return and keep the penultimate representation of each node."""
        self.embedding = self.backbone.embed(graph)
        return self.embedding

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes from what :meth:`embed` returned."""
        return self.backbone.head(h, graph)
