"""Threshold and check entry of secure aggregation, shared by server and clients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["WITNESS", "threshold", "with_witness"]

WITNESS = "witness"
"""Summand that every client sets to 1; its sum must be the number of clients."""


def threshold(clients: int, share: float) -> int:
    """Return how many of n clients must stay: ⌈share · n⌉, and more than 2n/3.

    Two groups of more than 2n/3 clients have more than n/3 clients in common. If fewer
    than n/3 clients help the server, an honest client is in both groups, so the server
    cannot show two groups different lists (Bonawitz et al. 2017, Theorem 6.5).
    """
    return max(2 * clients // 3 + 1, math.ceil(share * clients - 1e-9))


def with_witness(summands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the summand ``witness`` that counts clients."""
    return {WITNESS: torch.ones(()), **summands}
