"""What both halves of secure aggregation agree on beside the payloads."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["SEAL", "WITNESS", "threshold", "with_witness"]

SEAL = "share"
"""Purpose of the keys that seal shares."""
WITNESS = "witness"
"""A summand that every client sets to 1: it must sum up to their number."""


def threshold(clients: int, share: float) -> int:
    """Return how many clients must stay: ⌈share · n⌉, and more than half of them.

    With more than half, no two lists of survivors can both find enough clients, so that
    never both secrets of a client are put together.

    Parameters
    ----------
    clients : int
        n, the clients asked.
    share : float in (0.5, 1]
        ``secure-threshold``.
    """
    return max(clients // 2 + 1, math.ceil(share * clients - 1e-9))


def with_witness(summands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the summand that counts clients."""
    return {WITNESS: torch.ones(()), **summands}
