"""Client half of FedNTD: FedAvg with distillation over the classes that are not true.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.distillation import distillation, received_logits
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import DataLoss
from flower_fgl.methods.fedntd import FedNTDSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedNTDClientApp", "not_true_distillation"]

Client = AnyClient[FedNTDSettings]


def not_true_distillation(
    logits: Tensor, received: Tensor, labels: Tensor, *, tau: float
) -> Tensor:
    """Compute τ²·KL over all classes but the true one, Lee et al. 2022, Eq. (4).

    Parameters
    ----------
    logits : Tensor of shape (b, C), float
        Logits of the model in training.
    received : Tensor of shape (b, C), float
        Logits of the received model, without gradient.
    labels : Tensor of shape (b,), int64
        True classes, excluded from both softmaxes.
    tau : float, positive
        Temperature.

    Returns
    -------
    Tensor of shape ()
        Mean over the rows; zero for fewer than three classes.
    """
    classes = logits.shape[1]
    others = torch.arange(classes, device=labels.device) != labels[:, None]
    shape = (len(labels), classes - 1)
    student, teacher = logits[others].view(shape), received[others].view(shape)
    return tau**2 * distillation(student, teacher, tau=tau)


class FedNTDClientApp(FedAvgClientApp):
    """Train with the not-true distillation; the rest is FedAvg."""

    stacked = "flower_fgl.client_apps.stacked.averaging:StackedFedNTD"

    def data_loss(self, client: Client, model: Backbone, download: Weights) -> DataLoss:
        """Return the cross-entropy plus β times the distillation, Eq. (3)."""
        method_config = client.config.method_config
        beta: float = method_config.beta
        received = received_logits(client, model)

        def loss(logits: Tensor, labels: Tensor, index: Tensor) -> Tensor:
            kept = not_true_distillation(
                logits, received[index], labels, tau=method_config.tau
            )
            return F.cross_entropy(logits, labels) + beta * kept

        return loss
