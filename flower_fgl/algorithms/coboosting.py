"""Co-Boosting's hard samples and the weights of its ensemble.

Dai et al., "Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting",
ICLR 2024.
"""

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.dense import ensemble_logits

__all__ = ["hard_cross_entropy", "perturb", "stepped_weights"]


def hard_cross_entropy(ensemble: Tensor, labels: Tensor, power: float) -> Tensor:
    """Compute the mean of (1 − p_y)^power · CE, p_y the predicted probability of y.

    Of logits ``ensemble`` (b, C), with gradient, and classes ``labels`` (b,). Power 0
    gives the cross-entropy; a larger one counts nodes less that are easy. No gradient
    flows through the weights of the nodes.
    """
    each = F.cross_entropy(ensemble, labels, reduction="none")
    hardness = 1 - (-each.detach()).exp()
    return (hardness**power * each).mean()


def perturb(features: Tensor, gradient: Tensor, size: float) -> Tensor:
    """Move every row of ``features`` (b, d) by ε = ``size`` along its ``gradient`` (b, d).

    A row without gradient does not move.
    """
    return features + size * F.normalize(gradient, dim=1)


def stepped_weights(
    weights: Tensor, logits: Tensor, labels: Tensor, step: float
) -> Tensor:
    """Compute clip(w_k − μ·sign(∂CE/∂w_k), 0, 1): (K,), not scaled to a sum of 1.

    ``weights`` (K,) are w_k and ``step`` is μ. ``logits`` (K, b, C) are predictions of
    the clients' models for nodes that the generator made of the classes ``labels``
    (b,).
    """
    free = weights.detach().clone().requires_grad_()
    loss = F.cross_entropy(ensemble_logits(logits, free), labels)
    (gradient,) = torch.autograd.grad(loss, free)
    return (weights - step * gradient.sign()).clamp(0, 1)
