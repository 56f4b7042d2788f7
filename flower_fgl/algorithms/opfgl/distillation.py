"""Loss of the second stage on the client, O-pFGL Eqs. (17)-(19)."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.gcn_gradient import GCNGradient
from flower_fgl.nn.sparse import with_slope

__all__ = ["SoftTargets", "TargetLoss", "class_weights", "node_weights"]
__all__ += ["personal_loss", "soft_targets"]


class SoftTargets(NamedTuple):
    """Targets of the second stage, constant: one loss is ``least − Σ_i T_i · log p_i``.

    ``rows`` T (..., N, C) are the targets of each node, zero for a node without loss, and
    ``least`` (...) is the part of the loss that does not depend on the student.
    """

    rows: Tensor
    least: Tensor


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


def soft_targets(
    index: Tensor,
    labels: Tensor,
    teacher_log_probs: Tensor,
    *,
    gamma: Tensor | None = None,
    class_weight: Tensor | None = None,
) -> SoftTargets:
    """Add up the targets of cross-entropy and distillation, O-pFGL Eqs. (17) and (18).

    ``L = Σ_i a_i CE(y_i, p_i) + (1/N) Σ_i γ_i KL(q_i ‖ p_i)`` for the student's
    probabilities p. Both terms are linear in log p, with the targets ``T_i = a_i
    e_{y_i} + γ_i q_i / N``.

    ``index`` and ``labels`` (n,) are training nodes and classes, ``teacher_log_probs``
    (N, C) is log q. Without γ, ``gamma`` (N,) of Eq. (19), there is no distillation;
    without ``class_weight`` (C,), of a weighted mean, classes are equal in the
    cross-entropy.

    Notes
    -----
    1. The paper prints the sum over nodes and KL(student, teacher) in Eq. (18). Its
       published code takes the mean and the direction used here.
    """
    share = torch.ones_like(labels, dtype=teacher_log_probs.dtype)
    if class_weight is not None:
        share = class_weight[labels].to(share)
    rows = torch.zeros_like(teacher_log_probs)
    rows[index, labels] = share / share.sum()
    least = rows.new_zeros(())
    if gamma is not None:
        taught = gamma[:, None] / len(gamma) * teacher_log_probs.exp()
        rows = rows + taught
        least = (taught * teacher_log_probs).nan_to_num(nan=0.0).sum()  # 0 · log 0
    return SoftTargets(rows, least)


def personal_loss(logits: Tensor, targets: SoftTargets) -> Tensor:
    """Return the loss of the second stage, O-pFGL Eq. (17), for each client: (...).

    ``logits`` are (..., N, C); differentiable once. One exponential serves the loss and
    its gradient ``(Σ_c T_ic) p_i − T_i``.
    """
    rows, least = targets
    with torch.no_grad():
        weight = rows.sum(dim=-1, keepdim=True)
        z = logits - logits.amax(dim=-1, keepdim=True)
        # before z.exp_(), which needs no memory of its own
        fitted = (rows * z).sum(dim=(-2, -1))
        total = z.exp_().sum(dim=-1, keepdim=True)
        loss = least + (weight * total.log()).sum(dim=(-2, -1)) - fitted
        slope = z.mul_(weight / total).sub_(rows)
    return with_slope(loss, logits, slope)


@dataclass(frozen=True, eq=False)
class TargetLoss:
    """The loss of networks on the targets of their graphs, see :func:`personal_loss`."""

    of_training_nodes: ClassVar[bool] = False
    inputs: GraphInput
    targets: SoftTargets

    @classmethod
    def of_classes(cls, inputs: GraphInput, labels: Tensor, num_classes: int) -> Self:
        """Return the cross-entropy, a mean, of the labels (N,) of all nodes."""
        rows = F.one_hot(labels, num_classes).to(inputs.x.dtype) / len(labels)
        return cls(inputs, SoftTargets(rows, rows.new_zeros(1)))

    def __call__(self, model: Backbone) -> Tensor:
        """Return the loss of each client; differentiable once."""
        return personal_loss(model(self.inputs), self.targets)

    def gradient(self, model: Backbone) -> GCNGradient | None:
        """Return what computes the gradient of a GCN, ``None`` for other networks."""
        if not GCNGradient.suits(model, self.inputs):
            return None
        return GCNGradient(model, self.inputs, *self.targets)


def class_weights(counts: Tensor) -> Tensor:
    """Weight classes by inverse frequency, the variant ft_imb of O-pFGL: (C,).

    Proportional to 1/N with N, ``counts`` (C,), the number of labelled nodes of each
    class; with mean 1 over the classes present; 0 for absent classes.
    """
    present = counts > 0
    inverse = present / counts.clamp(min=1)
    return inverse * (present.sum() / inverse.sum().clamp(min=1e-30))
