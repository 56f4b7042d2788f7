"""Partitions of the edges of a typed graph that clients share, Fu and King, IJCAI 2023.

The rules follow the published code: of K + 2 pieces, one is held by each client alone, one
by several clients, and one by all. An own generator replaces theirs.
"""

from __future__ import annotations

import numpy as np

from flower_fgl.core.errors import DataError
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.datasets.partition.communities import IntArray

__all__ = ["deal_edges", "deal_relations", "share_out"]


def deal_edges(num_edges: int, num_clients: int, *, seed: int) -> list[IntArray]:
    """Assign edges at random; a client's edges are ascending.

    Raises a DataError if there are fewer than K + 2 edges.
    """
    if num_edges < num_clients + 2:
        raise DataError(
            f'partition = "random-edges" needs at least {num_clients + 2} edges for '
            f"{num_clients} clients, but the graph has {num_edges}. Use fewer clients."
        )
    generator = numpy_generator(seed, 0, SERVER, "partition/random-edges")
    order = generator.permutation(num_edges)
    return share_out(order, num_clients, generator=generator)


def deal_relations(
    relations: IntArray, num_clients: int, *, seed: int
) -> list[IntArray]:
    """Assign the edges of whole relations at random, as :func:`deal_edges` single edges.

    ``relations`` (M,) are the relations of the edges. Relations without edges do not
    count.

    Raises a DataError if there are fewer than K + 1 relations.
    """
    held = np.unique(relations)
    if len(held) <= num_clients:
        raise DataError(
            f'partition = "random-edge-types" needs more relations than the {num_clients} '
            f"clients, but the graph has {len(held)} with edges. Use fewer clients, or "
            'partition = "random-edges".'
        )
    generator = numpy_generator(seed, 0, SERVER, "partition/random-edge-types")
    parts = share_out(generator.permutation(held), num_clients, generator=generator)
    return [np.flatnonzero(np.isin(relations, part)) for part in parts]


def share_out(
    order: IntArray, num_clients: int, *, generator: np.random.Generator
) -> list[IntArray]:
    """Give K clients pieces of their own, a piece that several share, and one of all.

    Parameters
    ----------
    order : ndarray of shape (E,), int64
        Shuffled edges or relations, at least K + 1.
    num_clients : int, at least 3
        Number of clients K.

    Returns
    -------
    list of ndarray, int64
        The ascending items of each client: with s = ⌊E / (K + 2)⌋ the k-th s items, the
        items after the first (K + 1)s, and of the s items before these some. Each of them
        goes to m random clients, with m uniform in 2, …, K - 1. With E = K + 1 a client
        has its own item and the last one.
    """
    size = len(order) // (num_clients + 2)
    own, last = size or 1, (num_clients + 1) * size or num_clients
    parts = [list(order[k * own : (k + 1) * own]) for k in range(num_clients)]
    for item in order[num_clients * own : last]:
        number = generator.integers(2, num_clients)
        for client in generator.choice(num_clients, number, replace=False):
            parts[client].append(item)
    return [
        np.sort(np.concatenate([np.array(part, dtype=np.int64), order[last:]]))
        for part in parts
    ]
