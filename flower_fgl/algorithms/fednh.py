"""Equations and network of FedNH: a head of unit class prototypes.

Dai et al., "Tackling Data Heterogeneity in Federated Learning with Class Prototypes",
AAAI 2023.
"""

from typing import Unpack

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.own_network import NetworkSizes, SplitNet, sized_backbone
from flower_fgl.algorithms.prototypes.hop_prototypes import class_means
from flower_fgl.algorithms.prototypes.universal import mean_prototypes
from flower_fgl.methods.fednh import FedNHSettings

__all__ = ["PROTOTYPES", "FedNHNet", "SphereHead", "move_prototypes", "separate"]
__all__ += ["unit_class_means"]

PROTOTYPES = "classifier.weight"
"""Name of W in the state of the network; clients do not upload it."""

STEPS, RATE = 1000, 0.1
"""Gradient steps of :func:`separate`, and their size."""


def separate(start: Tensor) -> Tensor:
    """Spread directions over the unit sphere, Dai et al. 2023, Section "Uniformity".

    The rows of ``start`` (C, p) are independent, e.g. drawn at random. Returns unit rows
    (C, p): orthogonal if p ≥ C, else the result of gradient steps on the mean over the
    rows of their largest cosine.
    """
    if start.shape[1] >= len(start):
        orthogonal: Tensor = torch.linalg.qr(start.T)[0]
        return orthogonal.T.contiguous()
    with torch.enable_grad():
        rows = F.normalize(start, dim=1)
        own = 2 * torch.eye(len(rows))
        for _ in range(STEPS):
            rows = rows.detach().requires_grad_()
            unit = F.normalize(rows, dim=1)
            loss = (unit @ unit.T - own).amax(dim=1).mean()
            (gradient,) = torch.autograd.grad(loss, rows)
            rows = F.normalize(rows.detach() - RATE * gradient, dim=1)
    return rows.detach()


def unit_class_means(embedding: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Compute μ_c, the direction of the mean unit embedding of a class: (C, p).

    Of the training nodes' ``embedding`` (n, p) and ``labels`` (n,). Unit rows; zero for a
    class without nodes.
    """
    means = class_means(F.normalize(embedding, dim=1), labels, num_classes)
    return F.normalize(means, dim=1)


def move_prototypes(
    prototypes: Tensor, means: Tensor, counts: Tensor, *, rho: float
) -> Tensor:
    """Compute W ← norm(ρ W + (1 − ρ) norm(Σ_i n_i^c μ_i^c)), Dai et al. 2023, Eq. (7).

    W is ``prototypes`` (C, p); a class that no client has keeps its own. ``means`` (K,
    C, p) are μ_i^c of K clients and ``counts`` (K, C) are n_i^c; 0 marks a missing
    mean.
    """
    found = mean_prototypes(means[:, :, None], counts[..., None])[:, 0]
    moved = rho * prototypes + (1 - rho) * F.normalize(found, dim=1)
    owned = (counts > 0).any(dim=0)
    return torch.where(owned[:, None], F.normalize(moved, dim=1), prototypes)


class SphereHead(nn.Module):
    """Logits s·⟨h/‖h‖, W_c⟩ with fixed prototypes W, Dai et al. 2023, Eq. (3).

    ``prototypes`` (C, p) are W, unit rows; s starts at ``scale`` and has a gradient if it
    ``is_trained``.
    """

    weight: Tensor

    def __init__(self, prototypes: Tensor, scale: float, *, is_trained: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([scale]), requires_grad=is_trained)
        self.register_buffer("weight", prototypes)

    def forward(self, h: Tensor) -> Tensor:
        """Return the logits (N, C) of embeddings (N, p)."""
        return self.scale * (F.normalize(h, dim=1) @ self.weight.T)


class FedNHNet(SplitNet):
    """A backbone's layers as encoder, and a :class:`SphereHead`.

    Torch's global generator draws weights and prototypes.
    """

    def __init__(self, settings: FedNHSettings, **sizes: Unpack[NetworkSizes]) -> None:
        encoder = sized_backbone(sizes, num_outputs=1, has_linear_head=True)
        encoder.classifier = nn.Identity()
        start = torch.randn(sizes["num_outputs"], encoder.hidden_channels)
        scale, is_trained = settings.scale, settings.train_scale
        head = SphereHead(separate(start), scale, is_trained=is_trained)
        super().__init__(encoder, head)
