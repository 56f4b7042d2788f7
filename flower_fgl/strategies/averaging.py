"""Averages that server halves take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["weighted_mean"]


def weighted_mean(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> dict[str, Tensor]:
    """Average model states, ``Σ_i (n_i/n) θ_i``, McMahan et al. 2017, Algorithm 1.

    Parameters
    ----------
    states : sequence of mapping of str to Tensor, float32
        One state per client, with equal names and shapes.
    weights : sequence of float
        n_i, not negative, not all zero.

    Returns
    -------
    dict of str to Tensor, float32

    Raises
    ------
    ValueError
        If no weight is positive.
    """
    total = float(sum(weights))
    if not total > 0:
        raise ValueError(f"At least one weight must be positive, got {list(weights)}.")
    mean = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    for state, weight in zip(states, weights, strict=True):
        for name, tensor in state.items():
            mean[name].add_(tensor, alpha=weight / total)
    return mean
