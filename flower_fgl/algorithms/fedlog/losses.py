"""Losses of FedLoG's local training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.fedlog.branches import mix_log_probs

__all__ = ["branch_loss", "node_norm"]


def branch_loss(
    head: Tensor,
    tail: Tensor,
    alpha: Tensor,
    labels: Tensor,
    *,
    is_mixture: bool = False,
) -> Tensor:
    """Return the classification loss of both branches, FedLoG L_cls, L_g.

    ``mean_v [−α_v log p_H(y_v) − (1 − α_v) log p_T(y_v)]`` from ``head`` and ``tail`` (n,
    C), log p_H and log p_T, ``alpha`` (n,), the weight of the head branch, and classes
    ``labels`` (n,). If it ``is_mixture``, the logarithm of the mixture of Eq. (3), as
    printed.

    Notes
    -----
    1. The paper prints ``−log p(y_v)`` with p of Eq. (3), summed over nodes. The mean of
       the branches' weighted losses is an upper bound. It gives each branch a gradient in
       proportion to its weight, as in the published code.
    """
    if is_mixture:
        return F.nll_loss(mix_log_probs(head, tail, alpha), labels)
    first = F.nll_loss(head, labels, reduction="none")
    second = F.nll_loss(tail, labels, reduction="none")
    return (alpha * first + (1 - alpha) * second).mean()


def node_norm(nodes: Sequence[Tensor], *, kind: Literal["fro", "sum"]) -> Tensor:
    """Return the penalty on the norm of the learnable nodes, FedLoG L_norm.

    Of X_k^H and X_k^T (C·s, d): half the Frobenius norm of each (``fro``), or the sum of
    the norms of all rows (``sum``).

    Notes
    -----
    1. The paper prints the sum, whose scale grows with C·s; the published code has half
       the Frobenius norm.
    """
    if kind == "sum":
        return torch.stack([x.norm(dim=1).sum() for x in nodes]).sum()
    return torch.stack([0.5 * x.norm() for x in nodes]).sum()
