"""Global synthetic nodes: aggregation on the server and scaling on the client, FedLoG."""

from typing import Literal

import torch
from torch import Tensor

from flower_fgl.core.seeds import hidden_normal, hidden_uniform

__all__ = ["ClassNoise", "aggregation_weights", "blend_nodes", "class_rates"]
__all__ += ["disguise_rates", "permute_slots", "scale_nodes", "update_scaling"]

ClassNoise = Literal["none", "gauss", "permute"]
TAIL_EPSILON = 1e-6
"""ε in the weights of tail classes, "a very small positive value" in the paper."""


def class_rates(labels: Tensor, num_classes: int) -> Tensor:
    """Return the share of each class among training labels, ``r_k^c`` (C,) of FedLoG."""
    return torch.bincount(labels, minlength=num_classes).float() / len(labels)


def disguise_rates(
    rates: Tensor,
    kind: ClassNoise,
    *,
    scale: float,
    generator: torch.Generator | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """Hide the class distribution r_k, ``rates`` (C,), FedLoG, appendix on privacy.

    The result is not negative. ``gauss`` adds normal noise of standard deviation a ·
    r_k^c, a = ``scale``, to each rate; ``permute`` permutes the rates of the head
    classes among themselves, and likewise the tail classes. The randomness is the
    operating system's, in tests that of ``generator``. Classes that are not ``shared``
    (C,) get 0, and the rates of the shared ones are divided by their sum, from which
    the others would follow.

    Notes
    -----
    1. The paper does not define head classes. Here they are the classes with a rate above
       1/C. Rates that become negative by noise are set to 0; rates are not normalised
       again.
    """
    if shared is None:
        shared = torch.ones_like(rates, dtype=torch.bool)
    elif not bool(shared.all()):
        rates = rates.masked_fill(~shared, 0.0)
        rates = rates / rates.sum().where(rates.any(), 1.0)
    if kind == "gauss":
        noise = hidden_normal(rates.shape, generator=generator)
        return (rates * (1 + scale * noise)).clamp(min=0)
    out = rates.clone()
    if kind == "permute":
        is_head = rates > 1 / len(rates)
        for kept in (is_head & shared, ~is_head & shared):
            group = kept.nonzero()[:, 0]
            order = hidden_uniform(group.shape, generator=generator).argsort()
            out[group] = rates[group[order]]
    return out


def aggregation_weights(
    rates: Tensor, known: Tensor | None = None, *, tail_classes: bool = False
) -> Tensor:
    """Compute the clients' weights (K, C) for each class, FedLoG Eq. (4) or (15).

    Each column sums to 1; 1/K for a class that no client has. ``rates`` (K, C) are
    r_k^c; those of clients that are not ``known`` (K,) are 0, and so is their weight
    for a class that a known client has. ``tail_classes`` gives more weight to clients
    with few nodes of a class, by ``Σ_j r_j^c / (r_k^c + ε)`` instead of ``r_k^c``.
    """
    total = rates.sum(0)
    weight = total / (rates + TAIL_EPSILON) if tail_classes else rates
    if known is not None:
        weight = weight * known[:, None]
    weight = torch.where(total > 0, weight, torch.ones(()))
    return weight / weight.sum(0)


def blend_nodes(nodes: Tensor, weights: Tensor) -> Tensor:
    """Average the clients' learnable nodes to global synthetic nodes, FedLoG Eq. (4).

    From uploads ``nodes`` (K, C·s, d), grouped by class, and :func:`aggregation_weights`
    (K, C): X^g (C·s, d).
    """
    clients, classes = weights.shape
    by_class = nodes.view(clients, classes, -1, nodes.shape[-1])
    return torch.einsum("kc,kcsd->csd", weights, by_class).flatten(0, 1)


def permute_slots(
    nodes: Tensor, num_classes: int, generator: torch.Generator
) -> Tensor:
    """Shuffle the learnable nodes (K, C·s, d) of every client within each class."""
    clients, size, width = nodes.shape
    slots = size // num_classes
    draws = torch.rand((clients, num_classes, slots), generator=generator)
    order = draws.argsort(dim=2)[..., None].expand(-1, -1, -1, width)
    return (
        nodes.view(clients, num_classes, slots, width).gather(2, order).view_as(nodes)
    )


def scale_nodes(nodes: Tensor, gamma: Tensor) -> Tensor:
    """Move the nodes of each class towards the mean of all nodes, FedLoG Eq. (5).

    ``x̂_(c,i) = x^g_(c,i) + γ_c (x̄ − x^g_(c,i))`` for X^g, ``nodes`` (C·s, d), and γ_k
    (C,), or (K, C) of K clients.
    """
    slots = len(nodes) // gamma.shape[-1]
    rows = gamma.repeat_interleave(slots, dim=-1)[..., None]
    return nodes + rows * (nodes.mean(0) - nodes)


def update_scaling(
    gamma: Tensor, hits: Tensor, *, step: float, threshold: float
) -> Tensor:
    """Make the synthetic nodes of a class harder once they are learnt, FedLoG Sec. 4.3.

    ``step`` is added to γ_k, ``gamma`` (C,), where the share of correctly classified
    nodes of the class, ``hits`` (C·s,), is above ``threshold``, otherwise subtracted. γ
    stays in [0, 1].

    Notes
    -----
    1. The paper adds at the end of a round above an unspecified threshold, and never
       subtracts. Its largest γ, 0.297, is 3 steps per round times 99 rounds times 0.001.
       So, as in the published code, γ changes after every step of the optimizer.
    """
    share = hits.float().view(*gamma.shape, -1).mean(-1)
    change = torch.where(share > threshold, step, -step)
    return (gamma + change).clamp(0, 1)
