"""Few-shot episodes: small classification tasks drawn from a client's training nodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Episodes", "draw_episodes", "ranks_in_class"]


@dataclass(frozen=True, eq=False)
class Episodes:
    """B episodes of at most M nodes each.

    ``index`` (B, M) are positions in the list of training nodes; ``is_support`` and
    ``is_query`` (B, M) their roles, neither for padding; ``classes`` (B, C) those of each
    episode.
    """

    index: Tensor
    is_support: Tensor
    is_query: Tensor
    classes: Tensor


def ranks_in_class(sorted_labels: Tensor, num_classes: int) -> Tensor:
    """Return each node's position in its class, from 0; labels (n,) are ascending."""
    count = torch.bincount(sorted_labels, minlength=num_classes)
    start = count.cumsum(0) - count
    place = torch.arange(len(sorted_labels), device=sorted_labels.device)
    return place - start[sorted_labels]


def draw_episodes(
    labels: Tensor,
    num_classes: int,
    *,
    episodes: int,
    ways: int,
    shots: int,
    queries: int,
    generator: torch.Generator,
) -> Episodes:
    """Draw B ``episodes`` of classes, with disjoint support and query nodes of each class.

    A class has ``shots`` support nodes, but leaves at least one node for the queries. A
    class of a single node has it in the support set and has no query. ``ways``, ``shots``
    and ``queries`` are the largest numbers of classes per episode, and of support and
    query nodes per class. The generator is on the CPU.
    """
    device, size = labels.device, len(labels)
    own = torch.unique(labels)
    scores = torch.rand(episodes, len(own), generator=generator).to(device)
    chosen = own[scores.topk(min(ways, len(own)), dim=1).indices]  # (B, N)
    classes = torch.zeros(episodes, num_classes, dtype=torch.bool, device=device)
    classes.scatter_(1, chosen, value=True)
    # every row lists the nodes class by class, in random order within a class
    order = torch.rand(episodes, size, generator=generator).to(device).argsort(dim=1)
    order = order.gather(1, labels[order].argsort(dim=1, stable=True))
    listed = labels.sort().values
    rank = ranks_in_class(listed, num_classes)
    available = torch.bincount(labels, minlength=num_classes)[listed]
    number = (available - 1).clamp(min=1, max=shots)
    is_support = classes[:, listed] & (rank < number)
    is_query = classes[:, listed] & (rank >= number) & (rank < number + queries)
    is_used = is_support | is_query
    width = int(is_used.sum(dim=1).max())
    front = is_used.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    front = front[:, :width]
    return Episodes(
        order.gather(1, front),
        is_support.gather(1, front),
        is_query.gather(1, front),
        classes,
    )
