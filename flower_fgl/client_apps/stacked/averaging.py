"""Stacked forms of FedAvg, FedProx, FedNTD and FedED."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.feded import LEAST_PRIOR
from flower_fgl.client_apps.stacked.cohort import (
    Cohort,
    Rows,
    StackedLoss,
    cross_entropy,
)
from flower_fgl.client_apps.stacked.half import StackedFit, StackedHalf
from flower_fgl.nn import Backbone
from flower_fgl.nn.stacked import split_state
from flower_fgl.protocols.fedavg import Weights

__all__ = [
    "StackedFedAvg",
    "StackedFedED",
    "StackedFedNTD",
    "StackedFedProx",
    "absent_distillation",
    "not_true_distillation",
    "suppression",
    "weights_of",
]


def weights_of(
    model: Backbone, tensors: Mapping[str, Tensor], losses: Sequence[float]
) -> StackedFit:
    """Return the result of a method whose clients upload weights.

    Parameters
    ----------
    model : Backbone
        The personalized models.
    tensors : mapping of str to Tensor of shape (K, ...)
        The uploads, stacked.
    losses : sequence of float
        K training losses.
    """
    uploads = [Weights(state) for state in split_state(tensors, len(losses))]
    return StackedFit(
        model,
        uploads,
        losses,
        lambda: Weights.stacked_records(tensors, len(losses)),
    )


class StackedFedAvg(StackedHalf):
    """Train the received weights, see :class:`~flower_fgl.client_apps.fedavg`."""

    def penalty(
        self, cohort: Cohort, model: Backbone, downloads: Sequence[Weights]
    ) -> Callable[[], Tensor] | None:
        """Return a term per client to add to the cross-entropy, by default ``None``."""
        return None

    def data_loss(self, cohort: Cohort, model: Backbone) -> StackedLoss | None:
        """Return what replaces the cross-entropy; ``model`` holds the received weights."""
        return None

    def fit(self, cohort: Cohort, downloads: Sequence[Any]) -> StackedFit:
        """Train for ``local-epochs`` from the received weights."""
        model = cohort.build_model([download.tensors for download in downloads])
        losses = cohort.train(
            model,
            data_loss=self.data_loss(cohort, model),
            penalty=self.penalty(cohort, model, downloads),
        )
        return weights_of(model, model.state_dict(), losses)


class StackedFedProx(StackedFedAvg):
    """Add the proximal term of every client."""

    def penalty(
        self, cohort: Cohort, model: Backbone, downloads: Sequence[Weights]
    ) -> Callable[[], Tensor]:
        """Return (μ/2)‖θ − w‖² of each client."""
        pairs = [(p, p.detach().clone()) for p in model.parameters()]
        half = 0.5 * cohort.config.method_config.mu

        def term() -> Tensor:
            squares = [(p - w).square().flatten(1).sum(1) for p, w in pairs]
            return float(half) * torch.stack(squares).sum(0)

        return term


def received_logits(cohort: Cohort, model: Backbone) -> Tensor:
    """Predict the training graphs with the received weights: (K, n, C)."""
    with torch.no_grad():
        logits: Tensor = model.eval()(cohort.inputs)
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


def not_true_distillation(
    logits: Tensor, received: Tensor, labels: Tensor, *, tau: float
) -> Tensor:
    """Compute each row's term of FedNTD's distillation, Lee et al. 2022, Eq. (4).

    Parameters
    ----------
    logits, received, labels, tau
        As in :func:`flower_fgl.client_apps.fedntd.not_true_distillation`.

    Returns
    -------
    Tensor of shape (t,)
    """
    used = ~F.one_hot(labels, logits.shape[1]).bool()
    return tau**2 * masked_divergence(logits / tau, received / tau, used)


class StackedFedNTD(StackedFedAvg):
    """Add the not-true distillation of every client."""

    def data_loss(self, cohort: Cohort, model: Backbone) -> StackedLoss:
        """Return the cross-entropy plus β times the distillation."""
        settings = cohort.config.method_config
        received = received_logits(cohort, model)

        def loss(logits: Tensor, rows: Rows) -> Tensor:
            kept = not_true_distillation(
                logits, rows.pick(received), rows.labels, tau=settings.tau
            )
            entropy = rows.mean(cross_entropy(logits, rows.labels))
            return entropy + float(settings.beta) * rows.mean(kept)

        return loss


def absent_distillation(
    logits: Tensor, received: Tensor, absent: Tensor, rows: Rows
) -> Tensor:
    """Compute FedED's distillation over the classes that each client lacks.

    Parameters
    ----------
    logits, received : Tensor of shape (t, C), float
        Logits of the models in training, and of the received ones without gradient.
    absent : Tensor of shape (K, C), bool
        Classes that a client lacks.
    rows : Rows
        The rows.

    Returns
    -------
    Tensor of shape (K,)
        Zero for a client that lacks fewer than two classes.
    """
    return rows.mean(masked_divergence(logits, received, absent[rows.client]))


def suppression(logits: Tensor, rows: Rows, prior: Tensor) -> Tensor:
    """Compute FedED's suppression of each client.

    See :func:`flower_fgl.client_apps.feded.suppression`.

    Parameters
    ----------
    logits : Tensor of shape (t, C), float
        z.
    rows : Rows
        The rows.
    prior : Tensor of shape (K, C), float
        Share of each class among a client's training nodes.

    Returns
    -------
    Tensor of shape (K,)
    """
    classes = logits.shape[1]
    is_own = F.one_hot(rows.labels, classes).bool()
    others = rows.sum((~is_own).to(logits.dtype))  # (K, C)
    used = (prior > 0) & (others > 0)
    # subtracting the largest entry of each client and class avoids overflow
    entries = logits.masked_fill(is_own, -math.inf)
    place = rows.client[:, None].expand_as(entries)
    top = logits.new_full(prior.shape, -math.inf).scatter_reduce(
        0, place, entries.detach(), "amax"
    )
    top = torch.where(used, top, 0)
    shifted = (logits - top[rows.client]).masked_fill(is_own, -math.inf)
    total = torch.where(used, rows.sum(shifted.exp()), 1).log() + top
    size = rows.count.clamp(min=1).to(logits.dtype).log()[:, None]
    share = torch.where(used, prior, 1)
    terms = prior * (total - share.log() - math.log(classes) - size)
    return torch.where(used, terms, 0).sum(1)


class StackedFedED(StackedFedAvg):
    """Train with FedED's three terms of every client."""

    def data_loss(self, cohort: Cohort, model: Backbone) -> StackedLoss:
        """Return the sum of the three terms."""
        settings, rows, classes = (
            cohort.config.method_config,
            cohort.rows,
            cohort.num_classes,
        )
        cells = rows.client * classes + rows.labels
        count = torch.bincount(cells, minlength=len(cohort) * classes)
        count = count.view(-1, classes)
        prior = count / count.sum(1, keepdim=True).clamp(min=1)
        offset = prior.clamp(min=LEAST_PRIOR).log()
        absent = (count == 0) & ((count == 0).sum(1, keepdim=True) > 1)
        received = received_logits(cohort, model)

        def loss(logits: Tensor, rows: Rows) -> Tensor:
            corrected = cross_entropy(logits + offset[rows.client], rows.labels)
            value = rows.mean(corrected)
            if settings.distill_weight:
                kept = absent_distillation(logits, rows.pick(received), absent, rows)
                value = value + float(settings.distill_weight) * kept
            suppressed = suppression(logits, rows, prior)
            return value + float(settings.suppress_weight) * suppressed

        return loss
