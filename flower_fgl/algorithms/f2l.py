"""Few-shot adaptation module of F²L and its losses on episodes.

Wang et al., "Federated Few-shot Learning", KDD 2023. All functions accept one episode,
or a batch of episodes with a leading dimension B; "…" denotes this optional dimension.
"""

import math
from collections.abc import Mapping
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.methods.f2l import F2LSettings
from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput

__all__ = ["INNER_LR", "Adaptation", "AdaptedModel", "adapt", "attend", "contrast"]
__all__ += ["episode_losses", "masked_cross_entropy", "teacher_divergence"]

Parameters = Mapping[str, Tensor]
INNER_LR = 0.1
"""Learning rate (SGD) of the adaptation steps on a support set."""


class Adaptation(nn.Module):
    """Attention over the support set and a classifier: 3p² + pC + C parameters.

    An episode uses the rows of its own N of the C classes.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.classifier = nn.Linear(width, num_classes)

    @classmethod
    def blank(cls, width: int, num_classes: int, device: torch.device) -> Self:
        """Build an uninitialised module without drawing from the global generator."""
        with torch.device("meta"):
            module = cls(width, num_classes)
        return module.to_empty(device=device)


def attend(
    parameters: Parameters, h: Tensor, support: Tensor, is_support: Tensor
) -> tuple[Tensor, Tensor]:
    """Represent and classify nodes by attention to a support set: (…, M, p), (…, M, C).

    ``r_u = h_u + softmax(Q h_u · K h_S / √p) V h_S``, then a linear map. The parameters
    of an :class:`Adaptation` are shared by a batch, or have a dimension B. ``h`` (…, M,
    p) are embeddings, ``support`` (…, S, p) those to attend to, of which ``is_support``
    (…, S) marks the valid ones, at least one.
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
    """Average the cross-entropy of selected rows over selected classes: (…).

    ``logits`` (…, M, C) and ``labels`` (…, M) are scores and classes; ``rows`` (…, M)
    marks the selected rows, without any of which the loss is 0, and ``classes`` (…, C)
    the classes that can be predicted, among them those of the selected rows.
    """
    masked = logits.masked_fill(~classes[..., None, :], -torch.inf)
    own = masked.log_softmax(dim=-1).gather(-1, labels[..., None]).squeeze(-1)
    return -_mean(own, rows)


def contrast(one: Tensor, other: Tensor, rows: Tensor, *, tau: float) -> Tensor:
    """Contrast two representations of the same nodes, InfoNCE: (…).

    ``−mean_u log( e^{cos(a_u, b_u)/τ} / Σ_v e^{cos(a_u, b_v)/τ} )`` of a and b (…, M,
    p), over the ``rows`` (…, M) as u and as v; 0 if there are none. A smaller value
    means more mutual information.
    """
    cosine = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).mT / tau
    # unselected rows keep all entries: a softmax over none is undefined
    is_hidden = rows[..., :, None] & ~rows[..., None, :]
    scores = cosine.masked_fill(is_hidden, -torch.inf).log_softmax(dim=-1)
    return -_mean(scores.diagonal(dim1=-2, dim2=-1), rows)


def teacher_divergence(
    teacher: Tensor, student: Tensor, rows: Tensor, classes: Tensor
) -> Tensor:
    """Average KL(teacher ‖ student) of logits (…, M, C): (…).

    ``rows`` and ``classes`` select as in :func:`masked_cross_entropy`; both distributions
    use only these classes.
    """
    is_other = ~classes[..., None, :]
    target, guess = (
        logits.masked_fill(is_other, -torch.inf).log_softmax(dim=-1)
        for logits in (teacher, student)
    )
    gap = (target - guess).masked_fill(is_other, 0)  # (−inf) − (−inf) is NaN
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

    The initial ``parameters`` of an :class:`Adaptation` need gradients; in a batch each
    has a dimension B, so that every episode takes its own ``steps``. ``h`` (…, M, p)
    and ``labels`` (…, M) are embeddings and classes; ``is_support`` (…, M) marks the
    rows of the support set, at least one, and ``classes`` (…, C) those of the episode.
    """
    current = dict(parameters)
    for _ in range(steps):
        _, logits = attend(current, h, h, is_support)
        loss = masked_cross_entropy(logits, labels, is_support, classes)
        # episodes share no parameters: the gradient of the sum is that of each
        slopes = torch.autograd.grad(
            loss.sum(), list(current.values()), create_graph=True
        )
        current = {
            name: value - lr * slope
            for (name, value), slope in zip(current.items(), slopes, strict=True)
        }
    return current


def episode_losses(
    module: Adaptation,
    settings: F2LSettings,
    h: Tensor,
    teacher: Tensor,
    labels: Tensor,
    is_support: Tensor,
    is_query: Tensor,
    classes: Tensor,
) -> Tensor:
    """Adapt to support sets; sum the query, contrastive and distillation losses: (B,).

    ``h`` (B, M, p) are embeddings by the client model, ``teacher`` (B, M, C) logits by
    its classifier of all classes, constant, and ``labels`` (B, M) classes.
    ``is_support`` and ``is_query`` (B, M) mark the rows of both sets; other rows are
    padding. ``classes`` (B, C) marks the N classes of each episode.
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
        steps=settings.inner_steps,
        lr=INNER_LR,
    )
    representation, logits = attend(adapted, h, h, is_support)
    loss = masked_cross_entropy(logits, labels, is_query, classes)
    contrastive = contrast(representation, h, is_support, tau=settings.tau)
    divergence = teacher_divergence(teacher, logits, is_query, classes)
    loss = loss + settings.contrast_weight * contrastive
    return loss + settings.distillation_weight * divergence


class AdaptedModel(Backbone):
    """Classify the embeddings of a backbone by a module adapted to a support set.

    ``support`` (S, p) are the embeddings of the support set, and ``classes`` (C,),
    bool, the classes that can be predicted.
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
