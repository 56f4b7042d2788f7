"""Personalized averages: each client receives its own weighted mean of all models.

One rule covers FED-PUB, FedAux, FedGTA, FedIIH and TopFGL:

``a_ij = ρ_j g(S_ij) / Σ_l ρ_l g(S_il)`` and ``w_i = Σ_j a_ij θ_j``

S is the similarity of two clients, symmetric, and ρ a prior, at least 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

__all__ = ["Part", "cosine_similarity", "linear_weights", "mix_numbers", "mix_states"]
__all__ += ["mixture_table", "softmax_weights", "threshold_weights"]

SHARED = 1e-6
"""Weight from which a client counts as a partner."""


class Part(NamedTuple):
    """A slice ``start:stop`` of a parameter's dimension ``axis``.

    The matrix with the index ``block`` averages it; ``None`` gives all clients equal
    weights.
    """

    block: int | None
    axis: int
    start: int
    stop: int


def cosine_similarity(descriptors: Tensor) -> Tensor:
    """Compute the cosines of all pairs of rows (K, v): (K, K), float64; the diagonal is 1.

    A zero row has similarity 0 to the others.
    """
    unit = F.normalize(descriptors.double(), dim=1)
    return (unit @ unit.T).fill_diagonal_(1.0)


def softmax_weights(
    similarity: Tensor, prior: Tensor | None = None, *, scale: float
) -> Tensor:
    """Compute the weights with g(s) = e^{scale·s}: (..., K, K), float64.

    A constant added to all entries of S (..., K, K), ``similarity``, changes nothing. With
    ``scale`` 0 the clients are weighted by ρ (K,), ``prior``, alone, by default equally. A
    row of the result without a positive entry keeps the client's own model.
    """
    rows = scale * similarity
    rows = rows - rows.amax(dim=-1, keepdim=True)
    return linear_weights(rows.exp(), prior)


def threshold_weights(similarity: Tensor, prior: Tensor, *, least: float) -> Tensor:
    """Compute the weights with g(s) = 1 for s of at least ε = ``least``, else 0.

    See :func:`softmax_weights`.
    """
    return linear_weights((similarity >= least).to(similarity.dtype), prior)


def linear_weights(similarity: Tensor, prior: Tensor | None = None) -> Tensor:
    """Compute the weights with g(s) = s; see :func:`softmax_weights`."""
    rows = similarity if prior is None else similarity * prior
    total = rows.sum(dim=-1, keepdim=True)
    own = torch.eye(similarity.shape[-1], dtype=rows.dtype, device=rows.device)
    return torch.where(total > 0, rows / total.where(total > 0, 1.0), own)


def mix_states(
    states: Sequence[Mapping[str, Tensor]],
    attention: Tensor,
    parts: Mapping[str, Sequence[Part]] | None = None,
) -> list[dict[str, Tensor]]:
    """Compute w_i = Σ_j a_ij θ_j for every client, Baek et al. 2023, Eq. (3).

    ``states`` are θ_j, with equal names and shapes, ``attention`` a_ij, (K, K), or (B, K,
    K) of B blocks. ``parts`` divides each parameter into parts that together cover it; by
    default the first block averages everything. A parameter that is not listed gets equal
    weights.
    """
    blocks = attention if attention.dim() == 3 else attention[None]
    number = len(states)
    equal = torch.full((number, number), 1 / number, dtype=blocks.dtype)
    mixed: list[dict[str, Tensor]] = [{} for _ in states]
    for name in states[0]:
        rows = torch.stack([state[name] for state in states])  # (K, …)
        if parts is None:
            made = torch.tensordot(blocks[0], rows, dims=1)
        elif not parts.get(name):
            made = torch.tensordot(equal, rows, dims=1)
        else:
            made = torch.empty_like(rows)
            for part in parts[name]:
                where = (part.axis + 1, part.start, part.stop - part.start)
                matrix = equal if part.block is None else blocks[part.block]
                mean = torch.tensordot(matrix, rows.narrow(*where), dims=1)
                made.narrow(*where).copy_(mean)
        for state, tensor in zip(mixed, made, strict=True):
            state[name] = tensor
    return mixed


def mix_numbers(attention: Tensor, similarity: Tensor) -> dict[str, float]:
    """Describe how personal the mixtures are, from a and S (..., K, K).

    ``self_weight``: mean of a_ii, 1 for local training, 1/K for equal weights.
    ``partners``: mean of exp(entropy) of the rows, the number of clients that share a
    mixture, 1 to K. ``shared_pairs``: share of pairs i ≠ j with a_ij > 1e-6.
    ``similarity_min`` and ``similarity_mean``: of pairs i ≠ j. With one client the last
    three are left out.
    """
    rows = attention.double()
    number = rows.shape[-1]
    entropy = torch.special.entr(rows).sum(dim=-1)
    found = {
        "self_weight": float(rows.diagonal(dim1=-2, dim2=-1).mean()),
        "partners": float(entropy.exp().mean()),
    }
    if number > 1:
        others = ~torch.eye(number, dtype=torch.bool)
        pairs = similarity.double()[..., others]
        found["shared_pairs"] = float((rows[..., others] > SHARED).double().mean())
        found["similarity_min"] = float(pairs.min())
        found["similarity_mean"] = float(pairs.mean())
    return found


def mixture_table(clients: Sequence[int], attention: Tensor) -> dict[str, Any]:
    """Return the clients and the weights of their mixtures for the run folder.

    ``attention`` is a, (K, K) or (B, K, K); of several blocks the mean is stored. Row i of
    ``weights``, rounded to 4 digits, is the mixture that client i receives.
    """
    rows = attention.double()
    mean = rows.mean(dim=0) if rows.dim() == 3 else rows
    weights = [[round(value, 4) for value in row] for row in mean.tolist()]
    return {"clients": list(clients), "weights": weights}
