"""Means of model states that a few arbitrary states cannot move far.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML
2018; Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent", NeurIPS 2017, Section 4; norm thresholding: Sun et al., "Can You Really Backdoor
Federated Learning?", arXiv 1911.07963, 2019.

Flower has median, trimmed mean and Krum for NumPy arrays; the tests compare with them.
These here trim at least one value of each side, do not overflow for values near the
largest float32, and need no loop over pairs of clients.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["clip_updates", "krum", "median", "trimmed_mean", "update_norms"]

State = Mapping[str, Tensor]
PIECE = 1 << 15
"""Entries of each state whose distances are computed at a time."""


def median(states: Sequence[State]) -> dict[str, Tensor]:
    """Return the median of every weight, Yin et al. Definition 1.

    For an even number of states, the mean of the two middle values.
    """
    return _mean_of_middle(states, (len(states) - 1) // 2)


def trimmed_mean(states: Sequence[State], share: float) -> dict[str, Tensor]:
    """Return the mean of every weight without its extremes, Yin et al. Definition 2.

    ``states`` have equal names and shapes. ``share`` β in (0, 0.5) of the values is
    dropped at each end, rounded up; at least one value stays.
    """
    number = math.ceil(round(share * len(states), 9))  # 0.07 · 100 is above 7
    return _mean_of_middle(states, min(number, (len(states) - 1) // 2))


def _mean_of_middle(states: Sequence[State], number: int) -> dict[str, Tensor]:
    """Drop the ``number`` largest and smallest values of each weight; average the rest."""
    kept = slice(number, len(states) - number)
    return {
        name: torch.stack([state[name] for state in states])
        .sort(dim=0)
        .values[kept]
        .mean(dim=0)
        for name in states[0]
    }


def krum(states: Sequence[State], attackers: int, keep: int = 1) -> list[int]:
    """Return the states closest to their n − f − 2 nearest states, Blanchard et al.

    The n ``states`` have equal names and shapes. ``attackers`` is the assumed number f,
    and ``keep`` m the number of states to return, at least 1: 1 is Krum, more is
    Multi-Krum. Returns the indices of the m states with the smallest sums of squared
    distances, ascending; of equal sums those with the smaller index.

    Raises
    ------
    ValueError
        With fewer than 2·f + 3 states, for which Krum promises nothing.
    """
    count = len(states)
    if count < 2 * attackers + 3:
        raise ValueError(
            f"Krum with {attackers} attackers needs at least {2 * attackers + 3} states, "
            f"got {count}."
        )
    squares = torch.zeros(count, count, dtype=torch.float64)
    for name in states[0]:
        pieces = (torch.split(state[name].flatten(), PIECE) for state in states)
        for piece in zip(*pieces, strict=True):
            rows = torch.stack(piece).double()
            squares += torch.cdist(
                rows, rows, compute_mode="donot_use_mm_for_euclid_dist"
            ).square()
    squares.fill_diagonal_(torch.inf)  # a state is not its own neighbour
    nearest = squares.sort(dim=1).values[:, : count - attackers - 2]
    best = nearest.sum(dim=1).argsort(stable=True)[:keep]
    return sorted(best.tolist())


def update_norms(states: Sequence[State], reference: State) -> list[float]:
    """Return the L2 norm of each state's difference to the clients' starting state."""
    return [
        math.sqrt(
            math.fsum(
                float((state[name].double() - start.double()).square().sum())
                for name, start in reference.items()
            )
        )
        for state in states
    ]


def clip_updates(
    states: Sequence[State], reference: State, bound: float
) -> list[dict[str, Tensor]]:
    """Shorten differences to a norm, ``w + min(1, c/‖θ − w‖)(θ − w)``, Sun et al.

    ``states`` are θ, one per client, with the names and shapes of ``reference``, the w
    that the clients started from; ``bound`` is c, the largest L2 norm. States within the
    bound are returned unchanged, to the bit.
    """
    clipped = []
    for state, norm in zip(states, update_norms(states, reference), strict=True):
        if norm <= bound:
            clipped.append(dict(state))
            continue
        factor = bound / norm
        clipped.append(
            {
                name: (start + factor * (state[name].double() - start.double())).float()
                for name, start in reference.items()
            }
        )
    return clipped
