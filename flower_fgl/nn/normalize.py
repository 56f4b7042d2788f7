"""Normalisation of representations to unit length or to a bounded range."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["RepNorm", "bound"]


RepNorm = Literal["l2", "tanh", "none"]
"""Normalisation of representations: unit length, tanh, or none."""


def bound(h: Tensor, how: RepNorm) -> Tensor:
    """Bound representations (N, H) in length or range.

    ``l2`` scales each row to unit length and keeps rows of zeros; ``tanh`` applies tanh
    to each entry; ``none`` returns ``h``. A node without features and neighbours may have
    a row of zeros. Its gradient is not divided by the length: division by a tiny length
    would make it enormous.
    """
    if how == "tanh":
        return h.tanh()
    if how == "l2":
        length: Tensor = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
        return h / (length + (length == 0))
    return h
