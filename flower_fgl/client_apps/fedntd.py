"""Client half of FedNTD: FedAvg with distillation over the classes that are not true.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.distillation import masked_divergence, received_logits
from flower_fgl.client_apps.fedavg import FedAvgTermsClientApp
from flower_fgl.client_apps.stacked.group import Group, Rows, RowsLoss, cross_entropy
from flower_fgl.methods.fedntd import FedNTDSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedNTDClientApp", "not_true_distillation"]


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
    Tensor of shape (b,)
        One per row; zero for fewer than three classes.
    """
    used = ~F.one_hot(labels, logits.shape[1]).bool()
    return tau**2 * masked_divergence(logits / tau, received / tau, used)


class FedNTDClientApp(FedAvgTermsClientApp):
    """Train with the not-true distillation; the rest is FedAvg."""

    stacked = True

    def data_losses(
        self, group: Group, model: Backbone, downloads: Sequence[Weights]
    ) -> RowsLoss:
        """Return the cross-entropy plus β times the distillation, Eq. (3)."""
        settings: FedNTDSettings = group.config.method_config
        received = received_logits(group, model)

        def loss(logits: Tensor, rows: Rows) -> Tensor:
            kept = not_true_distillation(
                logits, rows.pick(received), rows.labels, tau=settings.tau
            )
            entropy = rows.mean(cross_entropy(logits, rows.labels))
            return entropy + float(settings.beta) * rows.mean(kept)

        return loss
