"""A small module that adapts to a few labelled nodes, and its losses on episodes.

Wang et al., "Federated Few-shot Learning", KDD 2023. All functions take one episode, or
a batch of them with a leading dimension B; "…" stands for that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput

__all__ = [
    "Adaptation",
    "AdaptedModel",
    "EpisodeWeights",
    "adapt",
    "attend",
    "contrast",
    "distillation",
    "episode_losses",
    "masked_cross_entropy",
]

Parameters = Mapping[str, Tensor]


class Adaptation(nn.Module):
    """Attention over the support set and a classifier: 3p² + pC + C parameters.

    Parameters
    ----------
    width : int
        p.
    num_classes : int
        C. An episode uses the rows of its own N classes.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.classifier = nn.Linear(width, num_classes)

    @classmethod
    def blank(cls, width: int, num_classes: int, device: torch.device) -> Self:
        """Build one to be overwritten, without drawing from the global generator."""
        with torch.device("meta"):
            module = cls(width, num_classes)
        return module.to_empty(device=device)


def attend(
    parameters: Parameters, h: Tensor, support: Tensor, is_support: Tensor
) -> tuple[Tensor, Tensor]:
    """Represent and classify nodes in the light of a support set.

    ``r_u = h_u + softmax(Q h_u · K h_S / √p) V h_S``, then a linear map.

    Parameters
    ----------
    parameters : mapping of str to Tensor
        Of an :class:`Adaptation`; each the same for a batch, or with a dimension B.
    h : Tensor of shape (…, M, p), float32
        Embeddings.
    support : Tensor of shape (…, S, p), float32
        Embeddings to attend to.
    is_support : Tensor of shape (…, S), bool
        Which of them count; at least one.

    Returns
    -------
    representation : Tensor of shape (…, M, p)
    logits : Tensor of shape (…, M, C)
    """
    query = h @ parameters["query.weight"].mT
    key = support @ parameters["key.weight"].mT
    value = support @ parameters["value.weight"].mT
    scores = query @ key.mT / math.sqrt(h.shape[-1])  # (…, M, S)
    scores = scores.masked_fill(~is_support[..., None, :], -torch.inf)
    representation = h + scores.softmax(dim=-1) @ value
    logits = representation @ parameters["classifier.weight"].mT
    return representation, logits + parameters["classifier.bias"].unsqueeze(-2)


def masked_cross_entropy(
    logits: Tensor, labels: Tensor, rows: Tensor, classes: Tensor
) -> Tensor:
    """Average the cross-entropy of some rows over some classes.

    Parameters
    ----------
    logits : Tensor of shape (…, M, C), float32
        Scores.
    labels : Tensor of shape (…, M), int64
        Classes; of the rows that count among ``classes``.
    rows : Tensor of shape (…, M), bool
        Rows that count; without any the loss is 0.
    classes : Tensor of shape (…, C), bool
        Classes that can be predicted.

    Returns
    -------
    Tensor of shape (…)
    """
    masked = logits.masked_fill(~classes[..., None, :], -torch.inf)
    own = masked.log_softmax(dim=-1).gather(-1, labels[..., None]).squeeze(-1)
    return -_mean(own, rows)


def contrast(one: Tensor, other: Tensor, rows: Tensor, *, tau: float) -> Tensor:
    """Contrast two representations of the same nodes, InfoNCE.

    ``−mean_u log( e^{cos(a_u, b_u)/τ} / Σ_v e^{cos(a_u, b_v)/τ} )``: the smaller, the
    more they tell of each other.

    Parameters
    ----------
    one, other : Tensor of shape (…, M, p), float32
        a and b.
    rows : Tensor of shape (…, M), bool
        Nodes that count, as u and as v; without any the loss is 0.
    tau : float, positive
        τ.

    Returns
    -------
    Tensor of shape (…)
    """
    cosine = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).mT / tau
    # rows that do not count keep all entries: without any, their softmax is undefined
    is_hidden = rows[..., :, None] & ~rows[..., None, :]
    scores = cosine.masked_fill(is_hidden, -torch.inf).log_softmax(dim=-1)
    return -_mean(scores.diagonal(dim1=-2, dim2=-1), rows)


def distillation(
    teacher: Tensor, student: Tensor, rows: Tensor, classes: Tensor
) -> Tensor:
    """Average KL(teacher ‖ student) of some rows over some classes.

    Parameters
    ----------
    teacher, student : Tensor of shape (…, M, C), float32
        Logits.
    rows : Tensor of shape (…, M), bool
        Rows that count; without any the loss is 0.
    classes : Tensor of shape (…, C), bool
        Classes to which both are restricted.

    Returns
    -------
    Tensor of shape (…)
    """
    is_other = ~classes[..., None, :]
    target, guess = (
        logits.masked_fill(is_other, -torch.inf).log_softmax(dim=-1)
        for logits in (teacher, student)
    )
    gap = (target - guess).masked_fill(is_other, 0)  # (−inf) − (−inf) is no number
    return _mean((target.exp() * gap).sum(dim=-1), rows)


def _mean(values: Tensor, rows: Tensor) -> Tensor:
    return torch.where(rows, values, 0).sum(dim=-1) / rows.sum(dim=-1).clamp(min=1)


def adapt(
    parameters: Parameters,
    h: Tensor,
    labels: Tensor,
    is_support: Tensor,
    classes: Tensor,
    *,
    steps: int,
    lr: float,
) -> dict[str, Tensor]:
    """Take gradient steps on a support set; gradients flow through them (MAML).

    Parameters
    ----------
    parameters : mapping of str to Tensor
        Of an :class:`Adaptation`, to start from; gradients are needed. In a batch each
        has a dimension B: every episode takes steps of its own.
    h : Tensor of shape (…, M, p), float32
        Embeddings.
    labels : Tensor of shape (…, M), int64
        Classes.
    is_support : Tensor of shape (…, M), bool
        Rows of the support set, at least one.
    classes : Tensor of shape (…, C), bool
        Classes of the episode.
    steps : int, at least 0
        Number of steps.
    lr : float, positive
        Learning rate.

    Returns
    -------
    dict of str to Tensor
    """
    current = dict(parameters)
    for _ in range(steps):
        _, logits = attend(current, h, h, is_support)
        loss = masked_cross_entropy(logits, labels, is_support, classes)
        # episodes share nothing, so the gradient of the sum is that of each
        slopes = torch.autograd.grad(
            loss.sum(), list(current.values()), create_graph=True
        )
        current = {
            name: value - lr * slope
            for (name, value), slope in zip(current.items(), slopes, strict=True)
        }
    return current


@dataclass(frozen=True)
class EpisodeWeights:
    """What :func:`episode_losses` is told.

    Parameters
    ----------
    steps : int, at least 0
        Inner steps.
    lr : float, positive
        Their learning rate.
    tau : float, positive
        Temperature of the contrast.
    contrast, distillation : float, at least 0
        Weights of the two links.
    """

    steps: int
    lr: float
    tau: float
    contrast: float
    distillation: float


def episode_losses(
    module: Adaptation,
    weights: EpisodeWeights,
    h: Tensor,
    teacher: Tensor,
    labels: Tensor,
    is_support: Tensor,
    is_query: Tensor,
    classes: Tensor,
) -> Tensor:
    """Adapt to support sets, then add up the loss on the queries and the two links.

    Parameters
    ----------
    module : Adaptation
        With gradient.
    weights : EpisodeWeights
        Coefficients.
    h : Tensor of shape (B, M, p), float32
        Embeddings by the client model.
    teacher : Tensor of shape (B, M, C), float32
        Logits by its classifier of all classes, constant.
    labels : Tensor of shape (B, M), int64
        Classes.
    is_support, is_query : Tensor of shape (B, M), bool
        Rows of either set; others are padding.
    classes : Tensor of shape (B, C), bool
        The N classes of each episode.

    Returns
    -------
    Tensor of shape (B,)
    """
    parameters = {
        name: value.expand(len(h), *value.shape)
        for name, value in module.named_parameters()
    }
    adapted = adapt(
        parameters,
        h,
        labels,
        is_support,
        classes,
        steps=weights.steps,
        lr=weights.lr,
    )
    representation, logits = attend(adapted, h, h, is_support)
    loss = masked_cross_entropy(logits, labels, is_query, classes)
    link = contrast(representation, h, is_support, tau=weights.tau)
    lesson = distillation(teacher, logits, is_query, classes)
    return loss + weights.contrast * link + weights.distillation * lesson


class AdaptedModel(Backbone):
    """A backbone's embedding under a module that has adapted to a support set.

    Parameters
    ----------
    backbone : Backbone
        Embeds.
    adaptation : Adaptation
        After its steps on the support set.
    support : Tensor of shape (S, p), float32
        Embeddings of the support set, at least one.
    classes : Tensor of shape (C,), bool
        Classes that can be predicted.
    """

    support: Tensor
    classes: Tensor

    def __init__(
        self,
        backbone: Backbone,
        adaptation: Adaptation,
        support: Tensor,
        classes: Tensor,
    ) -> None:
        nn.Module.__init__(self)
        self.backbone = backbone
        self.adaptation = adaptation
        self.register_buffer("support", support)
        self.register_buffer("classes", classes)

    def forward(self, graph: GraphInput) -> Tensor:
        """Return the logits of all nodes, or graphs: (N, C), −inf for other classes."""
        parameters = dict(self.adaptation.named_parameters())
        every = self.support.new_ones(len(self.support), dtype=torch.bool)
        _, logits = attend(parameters, self.backbone.embed(graph), self.support, every)
        out: Tensor = logits.masked_fill(~self.classes, -torch.inf)
        return out
