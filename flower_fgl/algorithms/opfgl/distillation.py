"""Distillation in the second stage on the client, O-pFGL Eqs. (18) and (19)."""

from __future__ import annotations

import math

import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

__all__ = ["class_weights", "distillation_loss", "node_weights"]


def node_weights(
    soft: Tensor,
    factor: Tensor,
    *,
    beta: float,
    low: float = 0.0,
    high: float = math.inf,
) -> Tensor:
    """Compute the distillation weight of each node, O-pFGL Eq. (19): (N,).

    ``γ_i = clip(β ỹ_i · w, γ_min, γ_max)`` from ỹ, ``soft`` (N, C), not normalised, and
    w_dist, ``factor`` (C,). γ_min = ``low`` and γ_max = ``high`` are by default no
    bounds.

    Notes
    -----
    1. The paper prints no bounds; its published commands have them, with β up to 5.
    """
    return (beta * (soft @ factor)).clamp(min=low, max=high)


def distillation_loss(
    student_logits: Tensor, teacher_log_probs: Tensor, weights: Tensor
) -> Tensor:
    """Fit the student's predictions to the teacher's, O-pFGL Eq. (18).

    ``L = (1/N) Σ_i γ_i KL(teacher ‖ student)`` from the student's logits (N, C), with
    gradient, the teacher's log-softmax (N, C), and γ, ``weights`` (N,).

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
    """Weight classes by inverse frequency, the variant ft_imb of O-pFGL: (C,).

    Proportional to 1/N with N, ``counts`` (C,), the number of labelled nodes of each
    class; with mean 1 over the classes present; 0 for absent classes.
    """
    present = counts > 0
    inverse = present / counts.clamp(min=1)
    return inverse * (present.sum() / inverse.sum().clamp(min=1e-30))
