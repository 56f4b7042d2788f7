"""Parts that FedPANO's clients share: graph network, generic classifier, generator."""

from __future__ import annotations

from typing import Any

from torch import nn

from flower_fgl.algorithms.fedpano.generator import NodeGenerator
from flower_fgl.algorithms.fedpano.model import build_encoder
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn.backbone import Backbone

__all__ = ["SharedParts"]


class SharedParts(nn.Module):
    """θ^g, θ^s and φ, as far as a variant sends them; the server initialises them once.

    Sizes are those of :func:`~flower_fgl.algorithms.fedpano.model.build_encoder`, C is
    that of all clients, and ``method_config`` determines which parts exist. Without
    ``initialise`` the caller must load the encoder's parameters. Parameters: P_g = 2dH +
    H + (L − 1)(2H² + H) for GraphSAGE, P_s = HC + C, P_φ = 3H² + 2H.
    """

    def __init__(
        self,
        model: str,
        *,
        num_classes: int,
        method_config: FedPANOSettings,
        **sizes: Any,
    ) -> None:
        super().__init__()
        self.encoder: Backbone = build_encoder(model, **sizes)
        width = self.encoder.hidden_channels
        self.classifier: nn.Linear | None = None
        self.generator: NodeGenerator | None = None
        if method_config.use_shared_classifier:
            self.classifier = nn.Linear(width, num_classes)
        if method_config.sends_generator:
            self.generator = NodeGenerator(width)
