"""Bound the length or the range of representations."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

__all__ = ["RepNorm", "bound"]


RepNorm = Literal["l2", "tanh", "none"]
"""What bounds representations."""


def bound(h: Tensor, how: RepNorm) -> Tensor:
    """Bound representations.

    Parameters
    ----------
    h : Tensor of shape (N, H), float32
        Representations.
    how : {"l2", "tanh", "none"}
        Unit length (rows of zeros stay as they are), tanh of each entry, or neither.

    Returns
    -------
    Tensor of shape (N, H), float32

    Notes
    -----
    1. A row of zeros, which a node without features and neighbours may have, passes its
       gradient on undivided: dividing by a tiny length would make it enormous.
    """
    if how == "tanh":
        return h.tanh()
    if how == "l2":
        length: Tensor = torch.linalg.vector_norm(h, dim=1, keepdim=True)
        return h / (length + (length == 0))
    return h
