"""FedDistill's loss and the means of logits that it exchanges.

Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation
and Augmentation under Non-IID Private Data", arXiv 1811.11479, 2018.

===========  ==========================================================
symbol       argument
===========  ==========================================================
z            ``logits``
z̄^c          ``target[c]``, mean logits of class c of all its owners
===========  ==========================================================
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn.sparse import index_sum

__all__ = ["distillation_term", "sum_by_class"]


def distillation_term(
    logits: Tensor, labels: Tensor, target: Tensor, present: Tensor
) -> Tensor:
    """Compute the cross-entropy of softmax(z) with softmax(z̄^y), mean over nodes.

    Parameters
    ----------
    logits, labels : Tensor of shape (b, C), float, and (b,), int64
        z, with gradient, and classes y.
    target : Tensor of shape (C, C), float
        Mean logits by class, a constant.
    present : Tensor of shape (C,), bool
        Classes that have mean logits; nodes of other classes add 0.
    """
    soft = (target.softmax(dim=1) * present[:, None])[labels]
    return -(soft * F.log_softmax(logits, dim=1)).sum(dim=1).mean()


def sum_by_class(logits: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Add up the logits of each class: (C, C)."""
    return index_sum(logits.detach(), labels, num_classes)
