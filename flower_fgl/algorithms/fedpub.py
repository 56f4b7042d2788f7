"""Backbone with trained element-wise masks on its weights, for FED-PUB."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput

__all__ = ["MaskedBackbone"]


class MaskedBackbone(Backbone):
    """Multiply every weight of a backbone, not copied, by an entry of a trained mask.

    ``masks`` are the initial ones, in the order and of the shapes of
    ``backbone.parameters()``. In evaluation mode, entries below ``threshold`` in absolute
    value are pruned to 0. In training mode they keep their values, so that they can grow.
    """

    def __init__(
        self, backbone: Backbone, masks: Sequence[Tensor], *, threshold: float
    ) -> None:
        nn.Module.__init__(self)
        self.backbone = backbone
        self.masks = nn.ParameterList(masks)
        self.threshold = threshold

    @property
    def undecayed(self) -> list[Tensor]:
        """The masks, which have the penalty ‖ν‖₁ instead of ``weight-decay``."""
        return list(self.masks)

    def effective(self) -> dict[str, Tensor]:
        """Return the masked weights under the backbone's names."""
        return {
            name: weight * self._shown(mask)
            for (name, weight), mask in zip(
                self.backbone.named_parameters(), self.masks, strict=True
            )
        }

    def _shown(self, mask: Tensor) -> Tensor:
        if self.training:
            return mask
        return torch.where(mask.abs() < self.threshold, 0.0, mask)

    def forward(self, graph: GraphInput) -> Tensor:
        """Return the logits under the masked weights."""
        out: Tensor = functional_call(self.backbone, self.effective(), (graph,))
        return out
