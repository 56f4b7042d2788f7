"""Few shots: K training nodes and 15 queries per class on every client, FedPANO.

"Personalized Federated Few-Shot Node Classification" (FedPANO): on every client the
classes with more than 25 nodes are kept; of each, K nodes train and 15 others test.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.core.seeds import numpy_generator
from flower_fgl.datasets.client_graph import Graph

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

IntArray = NDArray[np.int64]

NUM_QUERIES = 15
"""Test nodes per class."""

MORE_THAN = 25
"""A class is kept on a client where it has more nodes than this."""

MAX_SHOTS = MORE_THAN + 1 - NUM_QUERIES
"""Shots that every class which is kept has beside its queries."""

MIN_CLASSES = 2
"""Classes below which a client takes no part."""

MAX_DRAWS = 100
"""Draws of candidate classes before it is given up."""


def eligible_classes(
    labels: IntArray, num_classes: int, candidates: IntArray | None = None
) -> IntArray:
    """Find the classes with more than 25 nodes, the Y_i of FedPANO.

    Parameters
    ----------
    labels : ndarray of shape (n,), int64
        Classes of the client's nodes, -1 where unknown.
    num_classes : int
        Number of classes C.
    candidates : ndarray of shape (c,), int64, optional
        Classes to choose from; by default all.

    Returns
    -------
    ndarray of shape (C_i,), int64
        Ascending; none if fewer than two are left, since there is nothing to tell apart.
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
    """Draw a third of all classes for one network, FedPANO's rule for Fold-PPI.

    Parameters
    ----------
    labels : ndarray of shape (n,), int64
        Classes of the network's nodes, -1 where unknown.
    num_classes : int
        Number of classes C.
    generator : numpy.random.Generator
        Source of the draws.

    Returns
    -------
    ndarray of shape (⌊C/3⌋,), int64
        Ascending classes of which at least two are eligible; after 100 draws without
        such a pair whatever was drawn last, so that the client takes no part.
    """
    for _ in range(MAX_DRAWS):
        drawn = np.sort(generator.choice(num_classes, num_classes // 3, replace=False))
        if len(eligible_classes(labels, num_classes, drawn)):
            break
    return drawn


def few_shot_split(
    labels: IntArray, classes: IntArray, shots: int, *, generator: np.random.Generator
) -> dict[str, Tensor]:
    """Draw training and test nodes of each class, FedPANO Sec. 4.1.

    Parameters
    ----------
    labels : ndarray of shape (n,), int64
        Classes of the client's nodes, -1 where unknown.
    classes : ndarray of shape (C_i,), int64
        Ascending classes to draw from, each of at least ``shots`` + 15 nodes.
    shots : int
        Training nodes K per class.
    generator : numpy.random.Generator
        In the same state a larger K draws the same training nodes and more.

    Returns
    -------
    dict of str to Tensor of shape (n,), bool
        ``train``: the first K of each class in a random order; ``test``: the last 15,
        whatever K is; ``val``: nothing.

    Raises
    ------
    ValueError
        If a class is too small.
    """
    shuffled = generator.permutation(np.flatnonzero(np.isin(labels, classes)))
    node = shuffled[np.argsort(labels[shuffled], kind="stable")]  # class by class
    counts = np.bincount(labels[node], minlength=classes.max(initial=-1) + 1)[classes]
    if counts.min(initial=shots + NUM_QUERIES) < shots + NUM_QUERIES:
        raise ValueError(
            f"every class needs {shots} + {NUM_QUERIES} nodes, one has {counts.min()}."
        )
    place = np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts, counts)
    size = np.repeat(counts, counts)
    masks = {
        name: np.zeros(len(labels), dtype=np.bool_) for name in ("train", "val", "test")
    }
    masks["train"][node[place < shots]] = True
    masks["test"][node[place >= size - NUM_QUERIES]] = True
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
    """Choose a client's classes and draw from them, FedPANO Sec. 4.1.

    Parameters
    ----------
    labels : Tensor of shape (n,), int64
        Classes of the client's nodes, -1 where unknown.
    num_classes : int
        Number of classes C.
    shots : int
        Training nodes K per class.
    has_networks : bool
        Whether the client's network has a third of the classes as candidates.
    seed : int
        Seed of partition and split.
    partition_id : int
        Number of the client.

    Returns
    -------
    dict of str to Tensor of shape (n,), bool
        As of :func:`few_shot_split`; all empty where fewer than two classes are
        eligible. Given the data they depend on seed, client and K only.
    """

    def generator(purpose: str) -> np.random.Generator:
        return numpy_generator(seed, 0, partition_id, purpose)

    label = labels.numpy()
    candidates = None
    if has_networks:
        candidates = draw_candidates(
            label, num_classes, generator=generator("candidate classes")
        )
    classes = eligible_classes(label, num_classes, candidates)
    return few_shot_split(label, classes, shots, generator=generator("few-shot"))


def few_shot_labels(graph: Graph) -> Tensor:
    """Hide the class of every node that neither trains nor scores.

    Parameters
    ----------
    graph : Graph
        With masks.

    Returns
    -------
    Tensor of shape (N,), int64
        ``graph.y``, -1 outside all masks.
    """
    is_used = torch.stack(list(graph.masks.values())).any(dim=0)
    return graph.y.masked_fill(~is_used, -1)
