"""Equations of SCAFFOLD: the correction of a local step, and the control variates.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020.

===========  ==========================================================
symbol       argument
===========  ==========================================================
x, y_i       ``received``, ``trained``
c, c_i       ``common``, ``own``
K, η_l       ``steps``, ``lr``
===========  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["control_term", "new_control"]


def control_term(parameters: Iterable[Tensor], corrections: Iterable[Tensor]) -> Tensor:
    """Compute ⟨y, c − c_i⟩, whose gradient corrects a local step by c − c_i.

    ``parameters`` are y, with gradient, and ``corrections`` c − c_i, constants, in the
    same order.
    """
    pairs = zip(parameters, corrections, strict=True)
    return torch.stack([(theta * change).sum() for theta, change in pairs]).sum()


def new_control(
    own: Tensor,
    common: Tensor,
    received: Tensor,
    trained: Tensor,
    *,
    steps: int,
    lr: float,
) -> Tensor:
    """Compute c_i⁺ = c_i − c + (x − y_i)/(K η_l), Algorithm 1, option II.

    K = ``steps`` are the optimizer steps of the round, not epochs; with 0 steps c_i does
    not change. All tensors have one shape.
    """
    if steps == 0:
        return own
    return own - common + (received - trained) / (steps * lr)
