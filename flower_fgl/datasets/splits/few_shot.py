"""Few-shot splits: K training nodes and 15 queries per class on every client, FedPANO."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.seeds import numpy_generator
from flower_fgl.datasets.client_graph import Graph
from flower_fgl.datasets.partition.partition import IntArray
from flower_fgl.datasets.splits.split import SPLITS

__all__ = [
    "MAX_SHOTS",
    "MIN_CLASSES",
    "NUM_QUERIES",
    "draw_candidates",
    "draw_few_shot",
    "eligible_classes",
    "few_shot_labels",
    "few_shot_split",
]


NUM_QUERIES = 15
"""Test nodes per class."""
MORE_THAN = 25
"""A client keeps the classes with more nodes than this."""
MAX_SHOTS = MORE_THAN + 1 - NUM_QUERIES
"""Maximum K: every kept class has this many nodes in addition to its queries."""
MIN_CLASSES = 2
"""Minimum number of classes of a client; with fewer it does not participate."""
MAX_DRAWS = 100
"""Maximum number of attempts to sample candidate classes."""


def eligible_classes(
    labels: IntArray, num_classes: int, candidates: IntArray | None = None
) -> IntArray:
    """Return the classes with more than 25 nodes, Y_i of FedPANO, ascending.

    ``labels`` (n,) are -1 if unknown; by default all classes are ``candidates``. The result
    is empty if fewer than two are eligible, as one class cannot be classified.
    """
    counts = np.bincount(labels[labels >= 0], minlength=num_classes)
    is_kept = counts > MORE_THAN
    if candidates is not None:
        is_kept &= np.isin(np.arange(num_classes), candidates)
    kept = np.flatnonzero(is_kept).astype(np.int64)
    return kept if len(kept) >= MIN_CLASSES else kept[:0]


def draw_candidates(
    labels: IntArray, num_classes: int, *, generator: np.random.Generator
) -> IntArray:
    """Sample a third of all classes for one network, FedPANO's rule for Fold-PPI.

    Of the ⌊C/3⌋ ascending classes at least two are eligible. If 100 attempts find no such
    sample, the last one is returned, and the client does not participate.
    """
    for _ in range(MAX_DRAWS):
        sampled = np.sort(
            generator.choice(num_classes, num_classes // 3, replace=False)
        )
        if len(eligible_classes(labels, num_classes, sampled)):
            break
    return sampled


def few_shot_split(
    labels: IntArray, classes: IntArray, shots: int, *, generator: np.random.Generator
) -> dict[str, Tensor]:
    """Sample training and test nodes of each class, FedPANO Sec. 4.1.

    ``labels`` (n,) are the classes of the client's nodes, -1 if unknown, and ``classes``
    (C_i,) the ascending ones to sample from.

    Returns
    -------
    dict of str to Tensor of shape (n,), bool
        In a random order of each class, ``train`` holds the first K = ``shots`` nodes and
        ``test`` the last 15, independent of K; ``val`` is empty. In an equal state of the
        generator, a larger K samples a superset of the training nodes.

    Raises
    ------
    ValueError
        If a class has fewer than ``shots`` + 15 nodes.
    """
    shuffled = generator.permutation(np.flatnonzero(np.isin(labels, classes)))
    node = shuffled[np.argsort(labels[shuffled], kind="stable")]  # class by class
    counts = np.bincount(labels[node], minlength=classes.max(initial=-1) + 1)[classes]
    if counts.min(initial=shots + NUM_QUERIES) < shots + NUM_QUERIES:
        raise ValueError(
            f"classes must only hold classes with at least {shots} + {NUM_QUERIES} "
            f"nodes, one has {counts.min()}."
        )
    rank = np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = np.repeat(counts, counts)
    masks = {name: np.zeros(len(labels), dtype=np.bool_) for name in SPLITS}
    masks["train"][node[rank < shots]] = True
    masks["test"][node[rank >= size - NUM_QUERIES]] = True
    return {name: torch.from_numpy(mask) for name, mask in masks.items()}


def draw_few_shot(
    labels: Tensor,
    num_classes: int,
    shots: int,
    *,
    has_networks: bool,
    seed: int,
    partition_id: int,
) -> dict[str, Tensor]:
    """Choose a client's classes and sample its few-shot split, FedPANO Sec. 4.1.

    ``labels`` (n,) are -1 if unknown, and ``shots`` is K. With ``has_networks`` only a
    third of the classes are candidates, as in Fold-PPI. All masks are empty if fewer
    than two classes are eligible. For given labels they depend only on seed, client and
    K.
    """
    label, candidates = labels.numpy(), None
    if has_networks:
        draw = numpy_generator(seed, 0, partition_id, "candidate classes")
        candidates = draw_candidates(label, num_classes, generator=draw)
    classes = eligible_classes(label, num_classes, candidates)
    draw = numpy_generator(seed, 0, partition_id, "few-shot")
    return few_shot_split(label, classes, shots, generator=draw)


def few_shot_labels(graph: Graph) -> Tensor:
    """Return the classes (N,) with -1 for every node outside all masks."""
    is_used = torch.stack(list(graph.masks.values())).any(dim=0)
    return graph.y.masked_fill(~is_used, -1)
