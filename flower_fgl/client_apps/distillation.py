"""Distillation from the received model, for several client halves."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.nn import Backbone

__all__ = ["distillation", "masked_divergence", "received_logits"]


@torch.no_grad()
def received_logits(group: Group, model: Backbone) -> Tensor:
    """Predict the training graphs with the received weights in ``model``, once per round.

    The logits (K, n, C), of one client (N, C), or (G, C) for graph classification, are
    without dropout and gradient; ``model`` stays in evaluation mode.
    """
    model.eval()
    logits: Tensor = model(group.inputs)
    return logits


def masked_divergence(student: Tensor, teacher: Tensor, used: Tensor) -> Tensor:
    """Return KL(softmax(teacher) ‖ softmax(student)) of each row over the used columns.

    Parameters
    ----------
    student, teacher : Tensor of shape (t, C), float
        Logits, with and without gradient.
    used : Tensor of shape (t, C), bool
        Columns of each row that enter both softmaxes.

    Returns
    -------
    Tensor of shape (t,)
        Zero for rows of fewer than two used columns.
    """
    # a finite mark instead of −∞: its exponential is 0, and no gradient is NaN
    least = torch.finfo(student.dtype).min / 2
    of_student = student.masked_fill(~used, least).log_softmax(1)
    of_teacher = teacher.masked_fill(~used, least).log_softmax(1)
    terms = of_teacher.exp() * (of_teacher - of_student)
    return torch.where(used, terms, 0).sum(1)


def distillation(student: Tensor, teacher: Tensor, *, tau: float = 1.0) -> Tensor:
    """Compute the mean of KL(softmax(teacher/τ) ‖ softmax(student/τ)), Hinton 2015.

    Parameters
    ----------
    student : Tensor of shape (b, c), float
        Logits, with gradient.
    teacher : Tensor of shape (b, c), float
        Logits, without gradient.
    tau : float, positive
        Temperature.

    Returns
    -------
    Tensor of shape ()
        Not scaled by τ²; zero for fewer than two columns.
    """
    return F.kl_div(
        F.log_softmax(student / tau, dim=1),
        F.log_softmax(teacher / tau, dim=1),
        reduction="batchmean",
        log_target=True,
    )
