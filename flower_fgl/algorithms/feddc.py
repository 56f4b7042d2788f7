"""Equations of FedDC: the penalty of a local step.

Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction", CVPR 2022.

===========  ==========================================================
symbol       argument
===========  ==========================================================
θ, w         ``parameters``, ``received``
h_i          ``drift``
Δ_i, Δ̄       ``own_change``, ``mean_change``
η, S         ``lr``, ``steps``
α            ``alpha``
===========  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["drift_penalty", "gradient_correction"]


def gradient_correction(
    own_change: Tensor, mean_change: Tensor, *, steps: int, lr: float
) -> Tensor:
    """Compute (Δ_i − Δ̄)/(η S), the client's excess over the mean step.

    Δ_i and Δ̄ are of the last round, which took S = ``steps`` optimizer steps; 0 without
    steps.
    """
    if steps == 0:
        return torch.zeros_like(own_change)
    return (own_change - mean_change) / (lr * steps)


def drift_penalty(
    parameters: Iterable[Tensor],
    received: Iterable[Tensor],
    drift: Iterable[Tensor],
    corrections: Iterable[Tensor],
    *,
    alpha: float,
) -> Tensor:
    """Compute (α/2)‖θ + h_i − w‖² + ⟨θ, (Δ_i − Δ̄)/(ηS)⟩, Gao et al. 2022, Eq. (4).

    Parameters
    ----------
    parameters : iterable of Tensor
        θ, with gradient.
    received, drift, corrections : iterable of Tensor
        w, h_i and :func:`gradient_correction`, constants in the same order.
    alpha : float, at least 0
    """
    terms = [
        0.5 * alpha * (theta + h - w).square().sum() + (theta * change).sum()
        for theta, w, h, change in zip(
            parameters, received, drift, corrections, strict=True
        )
    ]
    return torch.stack(terms).sum()
