"""Distillation in the second stage on the client, O-pFGL Eqs. (18) and (19)."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

__all__ = ["class_weights", "distillation_loss", "node_weights"]


def node_weights(
    soft: Tensor,
    factor: Tensor,
    *,
    beta: float,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """Compute the distillation weight of each node, O-pFGL Eq. (19).

    ``γ_i = clip(β ỹ_i · w, γ_min, γ_max)``.

    Parameters
    ----------
    soft, factor : Tensor of shape (N, C) and (C,), float32
        ỹ, not normalised, and w_dist.
    beta : float, non-negative
        β.
    low, high : float, optional
        γ_min and γ_max; by default no bounds.

    Returns
    -------
    Tensor of shape (N,), float32

    Notes
    -----
    1. The paper prints no bounds; its published commands have them, with β up to 5.
    """
    weight = beta * (soft @ factor)
    if low is None and high is None:
        return weight
    return weight.clamp(min=low, max=high)


def distillation_loss(
    student_logits: Tensor, teacher_log_probs: Tensor, weights: Tensor
) -> Tensor:
    """Fit the student's predictions to the teacher's, O-pFGL Eq. (18).

    ``L = (1/N) Σ_i γ_i KL(teacher ‖ student)``.

    Parameters
    ----------
    student_logits : Tensor of shape (N, C), float32
        With gradient.
    teacher_log_probs : Tensor of shape (N, C), float32
        Log-softmax of the teacher's logits.
    weights : Tensor of shape (N,), float32
        γ.

    Returns
    -------
    Tensor of shape ()

    Notes
    -----
    1. The paper prints the sum over nodes and KL(student, teacher). Its published code
       takes the mean and the direction used here.
    """
    log_probs = F.log_softmax(student_logits, dim=1)
    divergence = F.kl_div(
        log_probs, teacher_log_probs, reduction="none", log_target=True
    )
    return (weights * divergence.sum(dim=1)).mean()


def class_weights(counts: Tensor) -> Tensor:
    """Weight classes by inverse frequency, the variant ft_imb of O-pFGL.

    Parameters
    ----------
    counts : Tensor of shape (C,), int64
        Number of labelled nodes of each class.

    Returns
    -------
    Tensor of shape (C,), float32
        Proportional to 1/N, with mean 1 over the classes present; 0 for absent classes.
    """
    present = counts > 0
    inverse = present / counts.clamp(min=1)
    return inverse * (present.sum() / inverse.sum().clamp(min=1e-30))
