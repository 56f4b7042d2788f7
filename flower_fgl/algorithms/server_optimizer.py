"""Server optimizers: the mean update of a round is a gradient for the global model.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2; momentum: Hsu et
al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019, Sec. 4 (FedAvgM).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["server_step"]


def server_step(
    kind: str,
    weights: Mapping[str, Tensor],
    mean: Mapping[str, Tensor],
    moments: Mapping[str, Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    tau: float,
    correction: float = 1.0,
    starts_at_zero: bool = False,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Move the global model along the mean update, Reddi et al. 2021, Algorithm 2.

    The rule ``kind`` is ``momentum``, ``adam``, ``yogi`` or ``adagrad``: FedAvgM,
    FedAdam, FedYogi or FedAdagrad. ``weights`` are x_t, which the clients started from,
    ``mean`` is the weighted mean of their parameters, and ``moments``, m_t and v_t, are the
    result of the last step, empty before the first one. ``lr`` is η, which ``correction``
    multiplies, and ``tau`` τ; ``beta1`` is not used by ``adagrad``, which has β1 = 0 in
    the paper's experiments, and ``beta2`` is used by ``adam`` and ``yogi``. With
    ``starts_at_zero`` v starts at 0, as in Flower, instead of τ². Returns x_{t+1} and the
    moments for the next step.

    Notes
    -----
    1. ``"momentum"`` is not damped: m_t = β1 m_{t-1} + Δ_t. With β1 = 0 and η = 1 the
       result is the mean.
    """
    moved, kept = {}, {}
    for name, start in weights.items():
        change = mean[name] - start
        m = moments.get(f"m/{name}", torch.zeros_like(start))
        if kind == "momentum":
            m = beta1 * m + change
            moved[name] = start + lr * m
            kept[f"m/{name}"] = m
            continue
        decay = 0.0 if kind == "adagrad" else beta1
        m = decay * m + (1 - decay) * change
        first = 0.0 if starts_at_zero else tau**2
        v = moments.get(f"v/{name}", torch.full_like(start, first))
        square = change.square()
        if kind == "adagrad":
            v = v + square
        elif kind == "yogi":
            v = v - (1 - beta2) * square * (v - square).sign()
        else:
            v = beta2 * v + (1 - beta2) * square
        moved[name] = start + lr * correction * m / (v.sqrt() + tau)
        kept |= {f"m/{name}": m, f"v/{name}": v}
    return moved, kept
