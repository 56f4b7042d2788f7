"""Equations of FedGTA: propagated labels, their moments and their confidence.

Li et al., "FedGTA: Topology-Aware Averaging for Federated Graph Learning", VLDB 2024.
"""

import math

import torch
from torch import Tensor

from flower_fgl.nn.sparse import Operator

__all__ = ["confidence", "moments", "propagate_labels", "sharpen"]

STEPS = 5
"""Steps of label propagation."""
FLAT = 20.0
"""Temperature of the labels whose entropy is measured."""
TINY = 1e-8


def propagate_labels(
    operator: Operator,
    soft: Tensor,
    index: Tensor,
    *,
    steps: int = STEPS,
    adds: bool = False,
) -> Tensor:
    """Repeat ``F ← ½ P F + ½ F⁰``: (N, C).

    P is ``operator`` (N, N), F⁰ ``soft`` (N, C). The training nodes ``index`` (n,) are
    reset to F⁰ after each step; ``adds`` adds F⁰ to them instead, as the published code
    does.
    """
    fixed = soft[index]
    found = soft
    for _ in range(steps):
        found = 0.5 * operator.matmul(found) + 0.5 * soft
        found = found.index_copy(0, index, found[index] + fixed if adds else fixed)
    return found


def sharpen(
    labels: Tensor, index: Tensor, one_hot: Tensor, *, temperature: float = 1.0
) -> Tensor:
    """Compute ``softmax(F / temperature)`` of each row; training rows are one-hot.

    F are the ``labels`` (N, C); ``index`` (n,) are training nodes, and ``one_hot`` (n, C)
    their classes. The temperature is 1 for R, 20 for Q.

    Notes
    -----
    1. F lies in [0, 1], so that the rows stay close to uniform. The published code does
       the same.
    """
    return (labels / temperature).softmax(dim=1).index_copy(0, index, one_hot)


def moments(
    labels: Tensor, *, orders: int, kind: str, real: Tensor | None = None
) -> Tensor:
    """Compute moments of R, ``labels`` (..., N, C), over the nodes of each class.

    Orders k are 1 to n = ``orders``: ``mean(R^k)`` (``raw``) or ``mean((R − mean R)^k)``
    (``central``), (..., n, C), or both (``hybrid``), (..., 2n, C). ``real`` (..., N), bool,
    are the rows that are nodes, by default all.
    """
    counted = labels.new_ones(labels.shape[:-1]) if real is None else real.to(labels)
    number = counted.sum(dim=-1)[..., None]

    def mean(values: Tensor) -> Tensor:
        return (values * counted[..., None]).sum(dim=-2) / number

    apart = labels - mean(labels).unsqueeze(-2)
    values = {"raw": [labels], "central": [apart], "hybrid": [labels, apart]}[kind]
    rows = [mean(v**k) for v in values for k in range(1, orders + 1)]
    return torch.stack(rows, dim=-2)


def confidence(flat: Tensor, degree: Tensor) -> Tensor:
    """Compute ``H = Σ_u deg(u) [C/e + Σ_c Q_uc log(Q_uc + 1e-8)]``: (...).

    ``flat`` (..., N, C) is Q; ``degree`` (..., N) counts no self-loops. At least 0, since
    C/e ≥ log C; 0 without edges.
    """
    entropy = (flat * (flat + TINY).log()).sum(dim=-1)
    weighed = degree * (flat.shape[-1] / math.e + entropy)
    return weighed.sum(dim=-1).clamp(min=0)
