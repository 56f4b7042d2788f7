"""Client half of FedNTD: FedAvg with distillation over the classes that are not true.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated
Learning", NeurIPS 2022.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.stacked.group import Group, Rows, RowsLoss, cross_entropy
from flower_fgl.methods.fedntd import FedNTDSettings
from flower_fgl.nn import Backbone
from flower_fgl.protocols.fedavg import Weights

__all__ = ["FedNTDClientApp", "masked_divergence", "not_true_distillation"]
__all__ += ["received_logits"]


@torch.no_grad()
def received_logits(group: Group, model: Backbone) -> Tensor:
    """Predict the training graphs with the received weights in ``model``, once per round.

    The logits (K, n, C), of one client (N, C), or (G, C) for graph classification, are
    without dropout and gradient; ``model`` stays in evaluation mode.
    """
    model.eval()
    logits: Tensor = model(group.inputs)
    return logits


def masked_divergence(student: Tensor, teacher: Tensor, used: Tensor) -> Tensor:
    """Return KL(softmax(teacher) ‖ softmax(student)) of each row over the used columns.

    ``student`` and ``teacher`` (t, C) are logits with and without gradient; ``used``
    (t, C) are the columns of each row that enter both softmaxes. The result (t,) is
    zero for rows of fewer than two used columns.
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
    """Compute τ²·KL over all classes but the true one, Lee et al. 2022, Eq. (4).

    ``logits`` (b, C) are those of the model in training, ``received`` (b, C) those of
    the received model, without gradient; both softmaxes exclude the true classes
    ``labels`` (b,). One number per row, (b,); zero for fewer than three classes.
    """
    used = ~F.one_hot(labels, logits.shape[1]).bool()
    return tau**2 * masked_divergence(logits / tau, received / tau, used)


class FedNTDClientApp(FedAvgClientApp):
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
