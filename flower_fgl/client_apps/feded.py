"""Client half of FedED: FedAvg with a loss that accounts for classes a client lacks.

Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning" (FedVLS, first
called FedED), 2024.

=====================  ==================================================
symbol                 argument
=====================  ==================================================
π_i                    ``prior``
O_i                    ``absent``
z_w, z_θ               ``received``, ``logits``
λ, κ                   ``feded.distill-weight``, ``feded.suppress-weight``
=====================  ==================================================
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.fedntd import masked_divergence, received_logits
from flower_fgl.client_apps.stacked.group import Group, Rows, RowsLoss, cross_entropy
from flower_fgl.methods.feded import FedEDSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedEDClientApp", "absent_distillation", "corrected_entropy", "suppression"]

LEAST_PRIOR = 1e-9
"""Lower bound of a class's share: the logarithm of an absent class would be infinite."""


def corrected_entropy(logits: Tensor, rows: Rows, prior: Tensor) -> Tensor:
    """Compute the cross-entropy of the logits plus log π, which strengthens rare classes.

    The mean (K,) over the ``rows`` of each client, of logits z (t, C). π is ``prior``
    (K, C), the share of each class among a client's training nodes.
    """
    offset = prior.clamp(min=LEAST_PRIOR).log()
    return rows.mean(cross_entropy(logits + offset[rows.client], rows.labels))


def absent_distillation(
    logits: Tensor, received: Tensor, rows: Rows, absent: Tensor
) -> Tensor:
    """Compute KL(softmax_O(z_w) ‖ softmax_O(z_θ)) over the classes O a client lacks.

    The mean (K,) over the rows of each client; zero for a client that lacks fewer than
    two classes. ``logits`` and ``received`` (t, C) are those of the models in training,
    and of the received ones without gradient; O is ``absent`` (K, C).
    """
    return rows.mean(masked_divergence(logits, received, absent[rows.client]))


def suppression(logits: Tensor, rows: Rows, prior: Tensor) -> Tensor:
    """Compute Σ_c π(c)·log((1/n) Σ_{x: y≠c} exp(z_c − log π(c) + log(1/C))).

    Of the logits z (t, C) of each client's n ``rows``, with π ``prior`` (K, C): (K,).
    Classes that a client lacks, or that all its rows have, add nothing.
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


class FedEDClientApp(FedAvgClientApp):
    """Train with FedED's three terms; the rest is FedAvg.

    Notes
    -----
    1. With ``batch-size`` the suppression uses the nodes of the batch, and n is their
       number; π stays that of all training nodes.
    2. The prior corrects training only: models are evaluated by their plain logits.
    """

    stacked = True

    def data_losses(
        self, group: Group, model: Backbone, downloads: Sequence[Weights]
    ) -> RowsLoss:
        """Return the sum of the three terms."""
        settings: FedEDSettings = group.config.method_config
        count = group.rows.class_counts(group.num_classes)
        prior = count / count.sum(1, keepdim=True).clamp(min=1)
        absent = (count == 0) & ((count == 0).sum(1, keepdim=True) > 1)
        received = received_logits(group, model)

        def loss(logits: Tensor, rows: Rows) -> Tensor:
            value = corrected_entropy(logits, rows, prior)
            if settings.distill_weight:
                kept = absent_distillation(logits, rows.pick(received), rows, absent)
                value = value + float(settings.distill_weight) * kept
            suppressed = suppression(logits, rows, prior)
            return value + float(settings.suppress_weight) * suppressed

        return loss
