"""FedPANO's network: a graph encoder and a linear classifier of selected classes."""

from __future__ import annotations

import math
from typing import Any, cast

from torch import Tensor, nn

from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.layers import RepNorm, bound
from flower_fgl.nn.models import build_model

__all__ = ["PersonalNet", "StackedPersonalNet", "build_encoder"]


def build_encoder(name: str, **sizes: Any) -> Backbone:
    """Build a backbone without classifier, for :meth:`Backbone.represent`.

    Parameters and errors are those of :func:`~flower_fgl.nn.build_model`, without
    ``num_classes``. All layers of layered backbones have width ``hidden_channels``.
    """
    # with a linear head all layers belong to the encoder
    encoder = build_model(name, num_classes=1, has_linear_head=True, **sizes)
    encoder.classifier = nn.Identity()
    return encoder


class PersonalNet(Backbone):
    """A graph network θ^g and a linear classifier of selected classes, not copied.

    ``classes`` (c,), int64, are the predicted classes, in the order of the classifier's
    outputs; a classifier may also have all C. Representations are normalised by
    ``rep_norm``, see :func:`~flower_fgl.nn.layers.bound`.
    """

    classes: Tensor
    rep_norm: RepNorm

    def __init__(
        self,
        encoder: Backbone,
        classifier: nn.Linear,
        classes: Tensor,
        num_classes: int,
        rep_norm: RepNorm,
    ) -> None:
        nn.Module.__init__(self)
        self.encoder: Backbone = encoder
        self.classifier = classifier
        self.register_buffer("classes", classes)
        self.num_classes, self.rep_norm = num_classes, rep_norm
        self.hidden_channels = encoder.hidden_channels
        self.dropout, self.readout = encoder.dropout, False

    @property
    def reach(self) -> int | None:
        """The encoder's number of layers that read neighbours."""
        return self.encoder.reach

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the normalised representation of each node: (N, H)."""
        return bound(self.encoder.represent(graph), self.rep_norm)

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes: logits (N, C), -inf for classes not in ``classes``."""
        own: Tensor = self.classifier(h)
        if own.shape[1] != len(self.classes):
            own = own.index_select(1, self.classes)
        logits = own.new_full((len(own), self.num_classes), -math.inf)
        return logits.index_copy(1, self.classes, own)


class StackedPersonalNet(PersonalNet):
    """The networks of K clients, with classifiers of all C classes.

    ``classes`` (K, C), bool, are those that each client predicts.
    """

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes: logits (K, n, C), -inf for classes that a client has not."""
        classifier = cast(nn.Linear, self.classifier)
        every = graph.linear(h, classifier.weight, classifier.bias)
        return every.masked_fill(~self.classes[:, None], -math.inf)
