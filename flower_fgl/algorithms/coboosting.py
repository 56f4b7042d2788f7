"""Co-Boosting's hard samples and the weights of its ensemble.

Dai et al., "Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting",
ICLR 2024.

===========  ==========================================================
symbol       argument
===========  ==========================================================
w_k          ``weights``, of the clients' logits in the ensemble
μ, ε         ``step``, ``size``
===========  ==========================================================
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.dense import ensemble_logits

__all__ = ["hard_cross_entropy", "perturb", "stepped_weights"]


def hard_cross_entropy(ensemble: Tensor, labels: Tensor, power: float) -> Tensor:
    """Compute the mean of (1 − p_y)^power · CE, p_y the predicted probability of y.

    Parameters
    ----------
    ensemble : Tensor of shape (b, C), float
        Logits, with gradient.
    labels : Tensor of shape (b,), int64
        Classes y.
    power : float, at least 0
        0 gives the cross-entropy; a larger one counts nodes less that are easy.

    Returns
    -------
    Tensor of shape ()
        No gradient flows through the weights of the nodes.
    """
    each = F.cross_entropy(ensemble, labels, reduction="none")
    hardness = 1 - (-each.detach()).exp()
    return (hardness**power * each).mean()


def perturb(features: Tensor, gradient: Tensor, size: float) -> Tensor:
    """Move every row by ``size`` along its gradient.

    Parameters
    ----------
    features, gradient : Tensor of shape (b, d), float
        A row without gradient does not move.
    size : float
        ε, length of the step.
    """
    return features + size * F.normalize(gradient, dim=1)


def stepped_weights(
    weights: Tensor, logits: Tensor, labels: Tensor, step: float
) -> Tensor:
    """Compute clip(w_k − μ·sign(∂CE/∂w_k), 0, 1).

    Parameters
    ----------
    weights : Tensor of shape (K,), float
        w_k.
    logits : Tensor of shape (K, b, C), float
        Predictions of the clients' models for generated nodes.
    labels : Tensor of shape (b,), int64
        The classes that the generator was asked for.
    step : float
        μ.

    Returns
    -------
    Tensor of shape (K,)
        In [0, 1], not scaled to a sum of 1.
    """
    free = weights.detach().clone().requires_grad_()
    loss = F.cross_entropy(ensemble_logits(logits, free), labels)
    (gradient,) = torch.autograd.grad(loss, free)
    return (weights - step * gradient.sign()).clamp(0, 1)
