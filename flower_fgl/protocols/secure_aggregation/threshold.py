"""Threshold and check entry of secure aggregation, shared by server and clients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["SEAL", "WITNESS", "threshold", "with_witness"]

SEAL = "share"
"""Purpose of the keys that encrypt shares."""
WITNESS = "witness"
"""Summand that every client sets to 1; its sum must be the number of clients."""


def threshold(clients: int, share: float) -> int:
    """Return how many clients must stay: ⌈share · n⌉, and more than half of n.

    With more than half, two different lists of survivors cannot both reach the threshold.
    So the server never reconstructs both secrets of a client.

    Parameters
    ----------
    clients : int
        n, number of sampled clients.
    share : float in (0.5, 1]
        ``secure-threshold``.
    """
    return max(clients // 2 + 1, math.ceil(share * clients - 1e-9))


def with_witness(summands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the summand ``witness`` that counts clients."""
    return {WITNESS: torch.ones(()), **summands}
