"""Losses of standardised numbers, some of which may be unknown."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

__all__ = ["regression_loss"]


def regression_loss(
    output: Tensor,
    z: Tensor,
    *,
    loss: str = "mse",
    delta: float = 1.0,
    target_weight: str = "entries",
) -> Tensor:
    """Return the mean loss of the known numbers.

    Parameters
    ----------
    output : Tensor of shape (b, T), float32
        Predictions of the standardised numbers.
    z : Tensor of shape (b, T), float32
        Standardised numbers, NaN where unknown.
    loss : {"mse", "huber", "mae"}
        e², Huber's loss, or |e| of the error e = output − z.
    delta : float
        Error from which Huber's loss is linear: e²/2 up to δ, else δ·(|e| − δ/2).
    target_weight : {"entries", "targets"}
        Whether each known number counts equally, or each target that has one.

    Returns
    -------
    Tensor of shape ()
        0 if no number is known.

    Notes
    -----
    1. Unknown numbers are replaced before the subtraction: the gradient of
       ``torch.where(isnan, 0, (output - z) ** 2)`` is NaN.
    """
    is_known = ~z.isnan()
    z = z.nan_to_num()
    if loss == "huber":
        losses = F.huber_loss(output, z, reduction="none", delta=delta)
    else:
        power = F.mse_loss if loss == "mse" else F.l1_loss
        losses = power(output, z, reduction="none")
    losses = losses * is_known
    if target_weight == "targets":
        counts = is_known.sum(dim=0)
        means = losses.sum(dim=0) / counts.clamp(min=1)
        return means.sum() / (counts > 0).sum().clamp(min=1)
    return losses.sum() / is_known.sum().clamp(min=1)
