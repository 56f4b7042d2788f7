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

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.distillation import distillation, received_logits
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import DataLoss
from flower_fgl.methods.feded import FedEDSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedEDClientApp", "absent_distillation", "corrected_entropy", "suppression"]

Client = AnyClient[FedEDSettings]

LEAST_PRIOR = 1e-9
"""Lower bound of a class's share: the logarithm of an absent class would be infinite."""


def corrected_entropy(logits: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    """Compute the cross-entropy of the logits plus log π, which strengthens rare classes.

    Parameters
    ----------
    logits : Tensor of shape (b, C), float
        z.
    labels : Tensor of shape (b,), int64
        Classes.
    prior : Tensor of shape (C,), float
        Share π of each class among the client's training nodes.

    Returns
    -------
    Tensor of shape ()
        Mean over the rows.
    """
    return F.cross_entropy(logits + prior.clamp(min=LEAST_PRIOR).log(), labels)


def absent_distillation(logits: Tensor, received: Tensor, absent: Tensor) -> Tensor:
    """Compute KL(softmax_O(z_w) ‖ softmax_O(z_θ)) over the classes O a client lacks.

    Parameters
    ----------
    logits, received : Tensor of shape (b, C), float
        Logits of the model in training, and of the received one without gradient.
    absent : Tensor of shape (C,), bool
        O.

    Returns
    -------
    Tensor of shape ()
        Mean over the rows; zero for fewer than two absent classes.
    """
    return distillation(logits[:, absent], received[:, absent])


def suppression(logits: Tensor, labels: Tensor, prior: Tensor) -> Tensor:
    """Compute Σ_c π(c)·log((1/n) Σ_{x: y≠c} exp(z_c − log π(c) + log(1/C))).

    Parameters
    ----------
    logits : Tensor of shape (n, C), float
        z.
    labels : Tensor of shape (n,), int64
        Classes y.
    prior : Tensor of shape (C,), float
        π.

    Returns
    -------
    Tensor of shape ()
        Classes that the client lacks, or that all n rows have, add nothing.
    """
    size, classes = logits.shape
    is_own = F.one_hot(labels, classes).bool()
    used = (prior > 0) & ~is_own.all(dim=0)
    share = prior[used]
    shifted = logits[:, used] - share.log() - math.log(classes)
    total = shifted.masked_fill(is_own[:, used], -math.inf).logsumexp(dim=0)
    return (share * (total - math.log(size))).sum()


class FedEDClientApp(FedAvgClientApp):
    """Train with FedED's three terms; the rest is FedAvg.

    Notes
    -----
    1. With ``batch-size`` the suppression uses the nodes of the batch, and n is their
       number; π stays that of all training nodes.
    2. The prior corrects training only: models are evaluated by their plain logits.
    """

    stacked = "flower_fgl.client_apps.stacked.averaging:StackedFedED"

    def data_loss(self, client: Client, model: Backbone, download: Weights) -> DataLoss:
        """Return the sum of the three terms."""
        method_config = client.config.method_config
        distill: float = method_config.distill_weight
        suppress: float = method_config.suppress_weight
        own = client.data.training.labels
        count = torch.bincount(own, minlength=client.data.num_classes)
        prior = count / count.sum().clamp(min=1)
        absent = count == 0
        received = received_logits(client, model)

        def loss(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
            value = corrected_entropy(logits, labels, prior)
            if int(absent.sum()) > 1 and distill:
                kept = absent_distillation(logits, received[index], absent)
                value = value + distill * kept
            return value + suppress * suppression(logits, labels, prior)

        return loss
