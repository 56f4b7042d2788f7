"""A graph network under a linear classifier of some of the classes."""

from __future__ import annotations

import math

from torch import Tensor, nn

from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.models import build_model
from flower_fgl.nn.normalize import RepNorm, bound

__all__ = ["PersonalNet", "build_encoder"]


def build_encoder(
    name: str,
    *,
    in_channels: int,
    hidden_channels: int,
    num_layers: int,
    dropout: float,
    initialise: bool = True,
) -> Backbone:
    """Build a backbone that represents nodes and has no classifier.

    Parameters
    ----------
    name, in_channels, hidden_channels, num_layers, dropout, initialise
        As in :func:`~flower_fgl.nn.build_model`. All ``num_layers`` layers of layered
        backbones are ``hidden_channels`` wide.

    Returns
    -------
    Backbone
        To be asked for :meth:`Backbone.represent`.

    Raises
    ------
    ConfigError
        If the name is unknown or a size is out of range.
    """
    encoder = build_model(
        name,
        in_channels=in_channels,
        hidden_channels=hidden_channels,
        num_classes=1,
        num_layers=num_layers,
        dropout=dropout,
        has_linear_head=True,  # all layers are the encoder's
        initialise=initialise,
    )
    encoder.classifier = nn.Identity()
    return encoder


class PersonalNet(Backbone):
    """A graph network θ^g and a linear classifier over some of the classes.

    Parameters
    ----------
    encoder : Backbone
        Made by :func:`build_encoder`; shared with the caller.
    classifier : torch.nn.Linear
        From H to the number of ``classes``, or to all of them; shared with the caller.
    classes : Tensor of shape (c,), int64
        Those that are predicted, in the order of the classifier's outputs.
    num_classes : int
        C.
    rep_norm : {"l2", "tanh", "none"}
        What bounds representations.
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
        """That of the encoder."""
        return self.encoder.reach

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the bounded representation of each node: (N, H)."""
        return bound(self.encoder.represent(graph), self.rep_norm)

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes: logits (N, C), -inf for classes that are not its own."""
        own: Tensor = self.classifier(h)
        if own.shape[1] != len(self.classes):
            own = own.index_select(1, self.classes)
        logits = own.new_full((len(own), self.num_classes), -math.inf)
        return logits.index_copy(1, self.classes, own)
