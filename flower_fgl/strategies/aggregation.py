"""Averages of client uploads, and the mean distance between client models."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from flower_fgl.algorithms import robust_means
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError

__all__ = ["mean_of_holders", "mean_of_sums", "mean_pairwise_distance", "robust_mean"]
__all__ += ["weighted_mean"]

MOST = 256
"""Clients whose pairwise distances are computed: time and memory grow with the square."""
BLOCK = 128
"""States whose inner products are computed at a time."""
PIECE = 1 << 15
"""Entries of each state that are compared at a time: 128 KiB of float32."""


def weighted_mean(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]
) -> dict[str, Tensor]:
    """Average model states, ``Σ_i (n_i/n) θ_i``, McMahan et al. 2017, Algorithm 1.

    The ``states`` have equal names and shapes; the ``weights`` n_i are not negative.
    Raises a ValueError if none is positive.
    """
    total = float(sum(weights))
    if not total > 0:
        raise ValueError(f"At least one weight must be positive, got {list(weights)}.")
    mean = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    for state, weight in zip(states, weights, strict=True):
        for name, tensor in state.items():
            mean[name].add_(tensor, alpha=weight / total)
    return mean


def mean_of_holders(
    states: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    before: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Average each tensor over the states that have it, ``Σ_{i∈K} n_i θ_i / Σ_{i∈K} n_i``.

    The states have some of the names in ``before``, whose tensors stay as they are if no
    state, or none of positive weight, has them.
    """
    mean = {}
    for name, old in before.items():
        found = [
            ({name: state[name]}, weight)
            for state, weight in zip(states, weights, strict=True)
            if name in state and weight > 0
        ]
        mean[name] = weighted_mean(*zip(*found, strict=True))[name] if found else old
    return mean


def robust_mean(
    config: RunConfig,
    states: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float],
    reference: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Combine model states by the setting ``aggregation``, other than ``mean``.

    Only ``norm-clip`` uses ``weights``: the other rules give each client one vote.
    Returns the state, and numbers for the log. ``reference`` has the weights before the
    round.
    """
    if config.aggregation == "median":
        return robust_means.median(states), {}
    if config.aggregation == "trimmed-mean":
        return robust_means.trimmed_mean(states, config.trimmed_share), {}
    norms = robust_means.update_norms(states, reference)
    if config.aggregation == "krum":
        most = len(states) - config.krum_attackers - 2
        keep = min(config.krum_keep or most, most)
        chosen = robust_means.krum(states, config.krum_attackers, keep)
        largest = max(norms[i] for i in chosen)
        kept = [states[i] for i in chosen]
        return weighted_mean(kept, [1.0] * keep), {"largest_update": largest}
    bound = config.norm_bound or statistics.median(norms)
    clipped = robust_means.clip_updates(states, reference, bound)
    numbers = {"norm_bound": bound, "clipped": float(sum(n > bound for n in norms))}
    return weighted_mean(clipped, weights), numbers


def mean_of_sums(
    sums: Mapping[str, Tensor], expected: float, names: Iterable[str]
) -> dict[str, Tensor]:
    """Divide the sums of secure aggregation, ``Σ_i n_i θ_i / Σ_i n_i``, for the ``names``.

    ``sums`` has Σ n_i as ``weight``, Σ n_i θ_i as ``weights/<name>``. A PayloadError says
    that Σ n_i is not as ``expected`` by the clients' descriptions.
    """
    total = float(sums["weight"])
    if total != expected or not total > 0:
        raise PayloadError(
            f"Expected the client weights in the secure sum to add up to {expected:g}, the "
            f"total of the clients' descriptions, got {total:g}."
        )
    return {name: (sums[f"weights/{name}"] / total).float() for name in names}


def mean_pairwise_distance(states: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the mean Euclidean distance between two clients' parameters, FedPANO Fig. 4.

    ``2/(n(n−1)) Σ_{i<j} ‖θ_i − θ_j‖`` of at least two states with equal names and shapes.

    Notes
    -----
    1. Distances are computed from inner products of the differences to the mean, n²
       numbers per tensor: the differences of all pairs would not fit in memory.
    2. Of more than ``MOST`` clients, ``MOST`` at equal intervals are compared.
    3. Long tensors are split into pieces that fit in a processor's cache. This is nine
       times as fast for five matrices of 128 x 6,805.
    """
    if len(states) > MOST:
        states = [states[number * len(states) // MOST] for number in range(MOST)]
    size = len(states)
    product = torch.zeros(size, size, dtype=torch.float64)
    for name in states[0]:
        whole = [state[name].flatten() for state in states]
        pieces = (
            zip(*(torch.split(tensor, PIECE) for tensor in whole), strict=True)
            if whole[0].numel() > PIECE
            else [whole]
        )
        for piece in pieces:
            rows = torch.stack(list(piece))
            rows -= rows.mean(dim=0)
            for start in range(
                0, size, BLOCK
            ):  # the part below the diagonal is not used
                block = rows[start : start + BLOCK] @ rows[start:].T
                product[start : start + BLOCK, start:] += block
    square = product.diagonal()
    first, second = torch.triu_indices(size, size, offset=1)
    squares = square[first] + square[second] - 2 * product[first, second]
    return float(squares.clamp(min=0).sqrt().mean())
