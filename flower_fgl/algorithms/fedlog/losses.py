"""Losses of FedLoG's local training.

Kim et al., "Subgraph Federated Learning for Local Generalization", ICLR 2025.
"""

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

    Parameters
    ----------
    head, tail : Tensor of shape (n, C), float32
        log p_H and log p_T.
    alpha : Tensor of shape (n,), float32, in [0, 1]
        Weight of the head branch.
    labels : Tensor of shape (n,), int64
        Classes.
    is_mixture : bool
        Take the logarithm of the mixture of Eq. (3), as printed.

    Returns
    -------
    Tensor of shape ()
        ``mean_v [−α_v log p_H(y_v) − (1 − α_v) log p_T(y_v)]``.

    Notes
    -----
    1. The paper prints ``−log p(y_v)`` with p of Eq. (3), summed over nodes. The mean
       of the branches' weighted losses is an upper bound. It gives each branch a
       gradient in proportion to its weight, as in the published code.
    """
    if is_mixture:
        return F.nll_loss(mix_log_probs(head, tail, alpha), labels)
    first = F.nll_loss(head, labels, reduction="none")
    second = F.nll_loss(tail, labels, reduction="none")
    return (alpha * first + (1 - alpha) * second).mean()


def node_norm(nodes: Sequence[Tensor], *, kind: Literal["fro", "sum"]) -> Tensor:
    """Return the penalty on the norm of the learnable nodes, FedLoG L_norm.

    Parameters
    ----------
    nodes : sequence of Tensor of shape (C·s, d), float32
        X_k^H and X_k^T.
    kind : {"fro", "sum"}
        Half the Frobenius norm of each, or the sum of the norms of all rows.

    Returns
    -------
    Tensor of shape ()

    Notes
    -----
    1. The paper prints the sum, whose scale grows with C·s; the published code has half
       the Frobenius norm.
    """
    if kind == "sum":
        return torch.stack([x.norm(dim=1).sum() for x in nodes]).sum()
    return torch.stack([0.5 * x.norm() for x in nodes]).sum()
