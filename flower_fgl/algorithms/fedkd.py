"""FedKD's losses, and the factors in which it sends weights.

Wu et al., "Communication-Efficient Federated Learning via Knowledge Distillation", Nature
Communications 13, 2022.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.nn import Backbone, GraphInput

__all__ = ["PARTS", "MutualPair", "compress", "energy_threshold", "mutual_loss"]
__all__ += ["rank_for", "restore"]

PARTS = ("u", "s", "v")
"""Factors of a matrix M = U diag(s) V, with V of shape (r, n)."""
TINY = 1e-8
"""Least divisor of the losses between both models."""


def energy_threshold(
    server_round: int, rounds: int, *, start: float, end: float
) -> float:
    """Return the share of the energy to keep in round t: linearly from T_start to T_end.

    Rounds later than ``rounds`` count as the last one.
    """
    return start + min(server_round / rounds, 1.0) * (end - start)


def rank_for(singular: Tensor, energy: float) -> int:
    """Return the smallest rank whose share of Σ s² exceeds ``energy``; s is descending.

    All ranks are kept if no smaller number exceeds the share. Some implementations send
    an empty matrix then.
    """
    kept = singular.double().square().cumsum(0)
    below = int((kept <= energy * kept[-1]).sum())
    return min(below + 1, len(singular))


def compress(state: Mapping[str, Tensor], energy: float) -> dict[str, Tensor]:
    """Replace every matrix by its factors where these are smaller.

    A matrix (m, n) with r(m + n + 1) < mn becomes ``name/u`` (m, r), ``name/s`` (r,) and
    ``name/v`` (r, n); all other tensors keep their names.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        value = tensor.detach().cpu().contiguous()
        if value.dim() != 2:
            found[name] = value
            continue
        u, s, v = torch.linalg.svd(value, full_matrices=False)
        rank = rank_for(s, energy)
        if rank * (sum(value.shape) + 1) < value.numel():
            factors = (u[:, :rank], s[:rank], v[:rank])
            for part, factor in zip(PARTS, factors, strict=True):
                found[f"{name}/{part}"] = factor.contiguous()
        else:
            found[name] = value
    return found


def restore(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply the factors of :func:`compress`: the state, with the kept energy."""
    found: dict[str, Tensor] = {}
    for name, tensor in factors.items():
        whole, _, part = name.rpartition("/")
        if part == "u" and whole:
            found[whole] = (tensor * factors[f"{whole}/s"]) @ factors[f"{whole}/v"]
        elif part not in PARTS or not whole:
            found[name] = tensor
    return found


def mutual_loss(
    teacher: Tensor,
    student: Tensor,
    hidden_teacher: Tensor,
    hidden_student: Tensor,
    labels: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the losses of teacher and student, and return their sum.

    ``L^t = CE^t + (KL(y^s‖y^t) + MSE(H^t, W^h H^s)) / (CE^t + CE^s)``, and for the
    student with KL(y^t‖y^s). ``teacher`` and ``student`` (b, C) are the logits y^t and
    y^s, the hidden states (b, p) H^t and W^h H^s. The gradient of the sum is that of L^t
    for the teacher, of L^s for the student and W^h. The single terms are returned too,
    without gradient.

    Notes
    -----
    1. A network learns from its own loss only: the other's prediction is a constant in
       its divergence. The distance of the hidden states is the same in both losses, so it
       stands in the sum once, with a gradient for both.
    2. The divisor is a weight and has no gradient. Otherwise a larger cross-entropy would
       reduce the loss.
    """
    own = {
        "teacher": F.cross_entropy(teacher, labels),
        "student": F.cross_entropy(student, labels),
    }
    log_t, log_s = teacher.log_softmax(dim=1), student.log_softmax(dim=1)
    kept = {"reduction": "batchmean", "log_target": True}
    shared = {
        "distill_teacher": F.kl_div(log_t, log_s.detach(), **kept),  # type: ignore[arg-type]
        "distill_student": F.kl_div(log_s, log_t.detach(), **kept),  # type: ignore[arg-type]
        "hidden": F.mse_loss(hidden_student, hidden_teacher),
    }
    divisor = (own["teacher"] + own["student"]).detach().clamp(min=TINY)
    loss = torch.stack(list(own.values())).sum()
    loss = loss + torch.stack(list(shared.values())).sum() / divisor
    return loss, {name: term.detach() for name, term in (own | shared).items()}


class MutualPair(Backbone):
    """Teacher and student, shared, not copied, which train in one pass.

    In training mode a forward pass returns, side by side, the logits of both and their
    hidden states, that of the student mapped by W^h. In evaluation mode it returns the
    teacher's logits. The gradient of each module of ``clipped`` is scaled to a norm.
    """

    clipped: tuple[list[nn.Module], float]

    def __init__(self, teacher: Backbone, student: Backbone) -> None:
        nn.Module.__init__(self)
        self.teacher, self.student = teacher, student
        self.projection = nn.Linear(
            student.hidden_channels, teacher.hidden_channels, bias=False
        )

    def forward(self, graph: GraphInput) -> Tensor:
        """Return (N, 2C + 2p) in training, (N, C) in evaluation."""
        if not self.training:
            logits: Tensor = self.teacher(graph)
            return logits
        h, own = self.teacher.embed(graph), self.student.embed(graph)
        z, other = self.teacher.head(h, graph), self.student.head(own, graph)
        return torch.cat([z, other, h, self.projection(own)], dim=1)

    def split(self, rows: Tensor, num_classes: int) -> list[Tensor]:
        """Separate rows of :meth:`forward`: logits of both, hidden states of both."""
        width = self.teacher.hidden_channels
        return list(torch.split(rows, [num_classes, num_classes, width, width], dim=1))
