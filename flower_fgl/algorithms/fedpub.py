"""FED-PUB: masks on a backbone's weights, and the graph on which models are compared."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flower_fgl.core.seeds import SERVER, torch_generator
from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput

__all__ = ["MaskedBackbone", "proxy_graph"]

BLOCKS, BLOCK_SIZE, LINK_SHARE = 5, 100, 0.1
"""Proxy graph: number of blocks, nodes per block, edge probability within a block."""


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


def proxy_graph(seed: int, num_features: int) -> tuple[Tensor, Tensor]:
    """Draw the random proxy graph on which models are compared, Baek et al., Sec. 4.1.

    Returns standard normal features (500, d) and the undirected edges (2, 2E), each
    within one of the five blocks.
    """
    generator = torch_generator(seed, 0, SERVER, "proxy")
    pairs = torch.rand((BLOCKS, BLOCK_SIZE, BLOCK_SIZE), generator=generator)
    block, source, target = (pairs < LINK_SHARE).triu(diagonal=1).nonzero().unbind(1)
    edges = torch.stack([source, target]) + BLOCK_SIZE * block
    x = torch.randn((BLOCKS * BLOCK_SIZE, num_features), generator=generator)
    return x, torch.cat([edges, edges.flip(0)], dim=1)
