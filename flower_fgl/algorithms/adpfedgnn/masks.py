"""Global and local weight masks: selection and averaging.

A mask has one entry per weight of a network. Tensors are flattened and concatenated in
the order of the network's state. The masks of K clients have the shape (K, P).
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from flower_fgl.nn.sparse import marked

__all__ = ["global_mask", "local_mask", "masked_mean", "per_tensor", "personalise"]

EPSILON = 1e-12
"""Added to a mean square before its square root."""

Shapes = Mapping[str, tuple[int, ...]]


def per_tensor(make: Callable[..., Tensor], shapes: Shapes, *flat: Tensor) -> Tensor:
    """Compute a mask of each flattened tensor, and concatenate them: (P,), bool."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    rows = zip(*(torch.split(part, sizes, dim=-1) for part in flat), strict=True)
    return torch.cat([make(*row) for row in rows], dim=-1)


def local_mask(
    gradient: Tensor, taken: Tensor | None = None, *, share: float
) -> Tensor:
    """Select the weights that the local loss depends on most, ADPFedGNN Sec. 3.3.

    ``gradient``, (n,) or (K, n), is g^l, the sum of the gradients with respect to the
    effective weights of a tensor; the mask has its shape. With q = ``share``, ⌊q · n⌋
    entries are 1, or all eligible ones with a nonzero gradient if they are fewer. Entries
    that are ``taken``, those of the global mask, cannot be selected.

    Notes
    -----
    1. The paper does not say whether a weight may be in both masks. Both masks prefer
       large gradients. Chosen independently they share about 40 % of all weights, and as
       many are in neither, so the branches are hardly decoupled.
    """
    size = gradient.abs()
    eligible = size > 0 if taken is None else (size > 0) & ~taken
    return _largest(size, eligible, _count(share, gradient))


def global_mask(
    gradient: Tensor, direction: Tensor, *, share: float, score: str = "product"
) -> Tensor:
    """Select the weights that client and global model change alike, ADPFedGNN Sec. 3.3.

    ``gradient`` and ``direction``, (n,) or (K, n), are g^g, the sum of the gradients with
    respect to the effective weights of a tensor, and Δ, the change of the global weights;
    the mask has their shape. With q = ``share``, ⌊q · n⌋ entries are 1, or all with a
    nonzero gradient if they are fewer. ``score`` is the measure of agreement: the
    ``product`` of −g^g and Δ, each divided by its root mean square, or minus the
    distance of the two (``neg-abs-diff``).

    Notes
    -----
    1. The paper says "the top q% of parameters most similar to the local training
       gradients and global non-zero gradients". Entries with nonzero g^g and Δ are ranked
       by the score. If they are fewer than q%, the entries with the largest |g^g| follow.
       An entry without gradient is never shared: it holds no information of the client.
    2. The distance prefers entries that are tiny in both.
    """
    descent, moved = -_scaled(gradient), _scaled(direction)
    agreement = descent * moved if score == "product" else -(descent - moved).abs()
    count, has_gradient = _count(share, gradient), gradient != 0
    chosen = _largest(agreement, has_gradient & (direction != 0), count)
    missing = count - chosen.sum(dim=-1)
    return chosen | _largest(gradient.abs(), has_gradient & ~chosen, missing)


def _count(share: float, tensor: Tensor) -> Tensor:
    count = int(share * tensor.shape[-1] + 1e-9)  # rounding can put 0.3 · 10 below 3
    return torch.full(tensor.shape[:-1], count, device=tensor.device)


def _scaled(values: Tensor) -> Tensor:
    return values / (values.square().mean(dim=-1, keepdim=True) + EPSILON).sqrt()


def _largest(values: Tensor, eligible: Tensor, counts: Tensor) -> Tensor:
    """Mark the ``counts`` largest eligible entries of each row, or all if fewer."""
    if values.dim() == 1:
        return _largest_of_row(values, eligible, int(counts))
    rows = zip(values, eligible, counts.tolist(), strict=True)
    return torch.stack([_largest_of_row(*row) for row in rows])


def _largest_of_row(values: Tensor, eligible: Tensor, count: int) -> Tensor:
    if count <= 0:
        return torch.zeros_like(eligible)
    among = values.index_select(0, marked(eligible))
    if count >= len(among):
        return eligible
    if among.device.type == "cpu":
        # NumPy's introselect, ten times as fast as topk unless many entries are equal
        place = len(among) - count
        least = float(np.partition(among.numpy(), place)[place])
        mask = eligible & (values >= least)
        if int(mask.sum()) == count:
            return mask
    # more entries equal the smallest selected one, or there is a NaN
    mask = torch.zeros_like(eligible)
    best = values.masked_fill(~eligible, -torch.inf).topk(count, sorted=False)
    mask[best.indices] = True
    return mask


def personalise(own: Tensor, shared: Tensor, mask: Tensor) -> Tensor:
    """Take θ^global (P,) except where the local mask M^l (P,) is 1, ADPFedGNN Eq. (15)."""
    return torch.where(mask, own, shared)


def masked_mean(
    previous: Tensor,
    values: Tensor,
    masks: Tensor,
    weights: Tensor,
    *,
    is_literal: bool = False,
) -> Tensor:
    """Average the weights that the clients share, ADPFedGNN Eq. (14): (P,), float32.

    ``values`` (K, P) are θ_i where M^g_i, ``masks`` (K, P), are true, and 0 elsewhere; n_i,
    ``weights`` (K,), float64, are positive; ``previous`` (P,) is θ^global.
    ``is_literal`` divides by the sum of all n_i, as printed.

    Notes
    -----
    1. The printed formula divides the sum over the sharing clients by the weights of all
       clients. An entry that one of five clients shares shrinks to a fifth. An entry that
       none shares becomes 0, and Eq. (15) writes it into every client. Here each entry is
       divided by the weights of the clients that share it, and keeps its previous value
       if none does.
    """
    total = weights @ values.double()
    if is_literal:
        return (total / weights.sum()).float()
    share = weights @ masks.double()
    return torch.where(share > 0, total / share.clamp(min=EPSILON), previous).float()
