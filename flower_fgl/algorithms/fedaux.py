"""FedAux's network: nodes that are near on a trained direction are smoothed together.

Zhuo, Zhan and Yu, "FedAux", NeurIPS 2025.
"""

from typing import Unpack

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flower_fgl.algorithms.own_network import NetworkSizes, sized_backbone
from flower_fgl.methods.fedaux import FedAuxSettings
from flower_fgl.nn import Backbone, GraphInput

__all__ = ["DIRECTION", "FedAuxNet", "kernel_smooth", "position_scores"]

DIRECTION = "direction"
"""Name of a in the state of the network."""

TINY = 1e-12
CHUNK = 2048
"""Rows of the kernel that are computed at once: 2048 × N floats of memory."""


def position_scores(h: Tensor, direction: Tensor, *, kind: str = "longest") -> Tensor:
    """Compute the position of every node on the direction, s_i = ⟨h_i/m, a⟩: (N,).

    Of the embeddings ``h`` (N, p) and a, ``direction`` (p,). m is the length of the
    ``longest`` embedding, a constant without gradient; with the kind ``cosine`` both
    h_i and a have unit length.
    """
    if kind == "cosine":
        return F.cosine_similarity(h, direction[None], dim=1, eps=TINY)
    longest = h.detach().norm(dim=1).max().clamp(min=TINY)
    scores: Tensor = (h / longest) @ direction
    return scores


def kernel_smooth(scores: Tensor, h: Tensor, *, sigma: float) -> Tensor:
    """Compute z_i = Σ_j κ_ij h_j / Σ_j κ_ij with κ_ij = exp(−(s_i − s_j)²/σ²): (N, p).

    The rows of κ are normalised by a softmax, which has no underflow: κ_ii = 1.
    ``scores`` (N,) are s, and ``h`` (N, p) the embeddings of all nodes, labelled or
    not. With more nodes than ``CHUNK``, the rows computed at once, the backward pass
    computes the kernel again, so that N² numbers are never stored.
    """

    def rows(some: Tensor) -> Tensor:
        distance = (some[:, None] - scores[None, :]) / sigma
        return (-distance.square()).softmax(dim=1) @ h

    if len(scores) <= CHUNK:
        return rows(scores)
    pieces = [
        checkpoint(rows, some, use_reentrant=False)
        for some in torch.split(scores, CHUNK)
    ]
    return torch.cat(pieces)


class FedAuxNet(Backbone):
    """A backbone, a direction, and a linear classifier of ``[h ‖ z]`` for C classes.

    The backbone's :meth:`~flower_fgl.nn.Backbone.represent` gives h; its classifier is
    dropped.
    """

    def __init__(self, settings: FedAuxSettings, **sizes: Unpack[NetworkSizes]) -> None:
        nn.Module.__init__(self)
        self.readout = False
        self.sigma, self.score = settings.sigma, settings.score
        self.encoder: Backbone = sized_backbone(sizes, has_linear_head=True)
        self.encoder.classifier = nn.Identity()
        width = self.encoder.hidden_channels
        self.hidden_channels = 2 * width
        self.classifier: nn.Linear = nn.Linear(2 * width, sizes["num_outputs"])
        self.direction = nn.Parameter(torch.randn(width))

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return ``[h ‖ z]``, of shape (N, 2p)."""
        h = self.encoder.represent(graph)
        scores = position_scores(h, self.direction, kind=self.score)
        return torch.cat([h, kernel_smooth(scores, h, sigma=self.sigma)], dim=1)
