"""Losses of FPL: contrast with cluster prototypes, and distance to their mean.

Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View",
CVPR 2023.

===========  ==========================================================
symbol       argument
===========  ==========================================================
z_i          ``embedding``
P^k          rows of ``clusters`` of class k
U^k          :func:`unbiased_prototypes`
τ            ``tau``
===========  ==========================================================
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_prototypes import class_means

__all__ = ["cluster_contrast", "consistency", "unbiased_prototypes"]


def cluster_contrast(
    embedding: Tensor, labels: Tensor, clusters: Tensor, classes: Tensor, *, tau: float
) -> Tensor:
    """Compute the cluster prototype contrast, Huang et al. 2023, Eq. (8).

    ``mean_i −log( Σ_{P of the own class} e^{cos(z_i, P)/τ} / Σ_P e^{cos(z_i, P)/τ} )``,
    at least 0; 0 if all clusters are of one class.

    Parameters
    ----------
    embedding, labels : Tensor of shape (n, p), float32, and (n,), int64
        z, with gradient, and their classes, each with at least one cluster.
    clusters, classes : Tensor of shape (Q, p), float32, and (Q,), int64
        P, constants, and their classes.
    tau : float, positive
    """
    similarity = F.normalize(embedding, dim=1) @ F.normalize(clusters, dim=1).T / tau
    others = labels[:, None] != classes
    own = similarity.masked_fill(others, -torch.inf)
    return (similarity.logsumexp(dim=1) - own.logsumexp(dim=1)).mean()


def unbiased_prototypes(clusters: Tensor, classes: Tensor, num_classes: int) -> Tensor:
    """Average the clusters of each class, U (C, p), Huang et al., Eq. (9); 0 without."""
    return class_means(clusters, classes, num_classes)


def consistency(embedding: Tensor, labels: Tensor, unbiased: Tensor) -> Tensor:
    """Compute the distance to the unbiased prototypes, Huang et al. 2023, Eq. (10).

    The mean of the squared differences over nodes and dimensions, with ``embedding`` and
    ``labels`` as in :func:`cluster_contrast`, and U, ``unbiased`` (C, p), constants.
    """
    return F.mse_loss(embedding, unbiased[labels])
