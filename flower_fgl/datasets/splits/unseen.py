"""Unseen data: closed set, open set, missing classes and a new client, FedLoG A.10.

"Subgraph Federated Learning for Local Generalization" (FedLoG), ICLR 2025, Appendix A.10.
Each client trains on a METIS part of the largest connected component without its rarest
class, and is scored on what lies around the part as well:

========== ============================ =============================================
symbol     here                         what it is
========== ============================ =============================================
V_k        ``UnseenPart.nodes``         nodes of client k, its removed class left out
V_k^u      ``UnseenPart.around``        nodes within h hops of V_k, V_k left out
M_k        ``UnseenPart.missing``       classes without a node in V_k
V_crop     ``UnseenPartition.cropped``  nodes that nobody holds (open set)
h          ``hops``                     radius of the expansion
========== ============================ =============================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.seeds import SERVER, numpy_generator
from flower_fgl.datasets.client_graph import ClientGraph, Graph, NodeDataset
from flower_fgl.datasets.partition.partition import partition_nodes
from flower_fgl.datasets.transforms.subgraph import (
    cut_clients,
    induced_subgraph,
    select_rows,
)

__all__ = [
    "UNSEEN_SPLIT",
    "UnseenPart",
    "UnseenPartition",
    "cut_unseen_clients",
    "expansion_hops",
    "hide_classes",
    "partition_unseen",
    "surroundings",
]

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

UNSEEN_SPLIT = "40/30/30"
"""Default split of a client's nodes, at random over all classes together."""

EXPANSION_HOPS = {"cora": 2, "citeseer": 3}
"""Radius h by data set, 1 for all others: what gives the sizes FedLoG prints."""

MIN_MISSING = 5
"""Nodes of missing classes that a client's expansion should have."""

CROPPED = 5
"""In the open set every fifth node is held by nobody."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class UnseenPart:
    """One client's nodes, in numbers of the largest component.

    Parameters
    ----------
    nodes : ndarray of shape (n,), int64
        V_k, ascending.
    around : ndarray of shape (u,), int64
        V_k^u, ascending; disjoint from ``nodes``.
    missing : ndarray of shape (m,), int64
        M_k, ascending: classes without a node in ``nodes``.
    """

    nodes: IntArray
    around: IntArray
    missing: IntArray


@dataclass(frozen=True, eq=False)
class UnseenPartition:
    """Who holds what, in numbers of the largest component.

    Parameters
    ----------
    parts : list of UnseenPart
        One for each of the K clients.
    new_client : ndarray of shape (n,), int64, or None
        The part that no client holds, ascending; ``None`` in the open set, where it is
        not scored.
    cropped : ndarray of shape (c,), int64
        Nodes that belong to no part, ascending; none in the closed set.
    """

    parts: list[UnseenPart]
    new_client: IntArray | None
    cropped: IntArray

    @property
    def arrays(self) -> list[IntArray]:
        """All node lists, for the partition's hash."""
        held = [nodes for part in self.parts for nodes in (part.nodes, part.around)]
        beside = () if self.new_client is None else (self.new_client,)
        return [*held, *beside, self.cropped]


def expansion_hops(dataset: str, hops: int) -> int:
    """Return the radius of the expansion in hops.

    Parameters
    ----------
    dataset : str
        Name of the data set.
    hops : int
        Setting ``expansion-hops``; 0 takes the data set's.
    """
    return hops or EXPANSION_HOPS.get(dataset, 1)


def surroundings(
    edge_index: IntArray, nodes: IntArray, pool: BoolArray, hops: int
) -> IntArray:
    """Find what lies within some hops of a client's nodes, FedLoG Appendix A.10.

    Parameters
    ----------
    edge_index : ndarray of shape (2, 2E), int64
        Both directions of each edge.
    nodes : ndarray of shape (n,), int64
        V_k.
    pool : ndarray of shape (N,), bool
        Nodes that may be reached; paths run through them and ``nodes`` only.
    hops : int, at least 0
        h.

    Returns
    -------
    ndarray of shape (u,), int64
        Ascending nodes of ``pool`` at most h hops from ``nodes``, these left out.
    """
    is_own = np.zeros(len(pool), dtype=np.bool_)
    is_own[nodes] = True
    reached = is_own.copy()
    source, target = edge_index[:, pool[edge_index[1]]]
    for _ in range(hops):
        reached[target[reached[source]]] = True
    return np.flatnonzero(reached & ~is_own).astype(np.int64)


def hide_classes(
    labels: IntArray,
    num_classes: int,
    part: IntArray,
    expand: Callable[[IntArray], IntArray],
) -> UnseenPart:
    """Remove a client's rarest class so that it can be missed, FedLoG Appendix A.10.

    Parameters
    ----------
    labels : ndarray of shape (N,), int64
        Classes, -1 where unknown.
    num_classes : int
        Number of classes C.
    part : ndarray of shape (n,), int64
        All nodes of the client's part, ascending.
    expand : callable
        From V_k to V_k^u.

    Returns
    -------
    UnseenPart
        Without the class of fewest nodes (of equals the first); if fewer than
        ``MIN_MISSING`` nodes of M_k lie in V_k^u, without the next as well, and so on up
        to ⌊C/3⌋ classes. A client's last class stays.
    """
    label = labels[part]
    counts = np.bincount(label[label >= 0], minlength=num_classes)
    present = np.flatnonzero(counts)
    rarest_first = present[np.argsort(counts[present], kind="stable")]
    most = max(0, min(num_classes // 3, len(present) - 1))
    for num_hidden in range(min(1, most), most + 1):
        kept = part[~np.isin(label, rarest_first[:num_hidden])]
        around = expand(kept)
        missing = np.setdiff1d(np.arange(num_classes), labels[kept])
        if np.isin(labels[around], missing).sum() >= MIN_MISSING:
            break
    return UnseenPart(kept, around, missing)


def partition_unseen(
    dataset: NodeDataset, num_clients: int, *, is_open: bool, hops: int, seed: int
) -> UnseenPartition:
    """Cut a connected graph into K clients and a new client, FedLoG Appendix A.10.

    Parameters
    ----------
    dataset : NodeDataset
        The largest component, of N nodes.
    num_clients : int
        Number of clients K, at least 1.
    is_open : bool
        Whether a fifth of the nodes is held back first, and only these are unseen: the
        open set. Else all nodes that a client does not hold may be: the closed set.
    hops : int
        h.
    seed : int
        Partition seed.

    Returns
    -------
    UnseenPartition

    Raises
    ------
    ConfigError
        If the seed is out of range.
    DataError
        If the nodes do not make K + 1 parts.
    """
    edges, labels = dataset.edge_index.numpy(), dataset.y.numpy()
    is_cropped = np.zeros(dataset.num_nodes, dtype=np.bool_)
    if is_open:
        draw = numpy_generator(seed, 0, SERVER, "crop").permutation(dataset.num_nodes)
        is_cropped[draw[: dataset.num_nodes // CROPPED]] = True
    pool = is_cropped if is_open else np.ones_like(is_cropped)
    *parts, new_client = _metis(
        dataset, np.flatnonzero(~is_cropped), num_clients + 1, is_open, seed
    )

    def expand(nodes: IntArray) -> IntArray:
        return surroundings(edges, nodes, pool, hops)

    held = [hide_classes(labels, dataset.num_classes, part, expand) for part in parts]
    for client, (part, before) in enumerate(zip(held, parts, strict=True)):
        log.info(
            "Client %d: %d of %d nodes removed, classes %s missing, %d nodes around.",
            client,
            len(before) - len(part.nodes),
            len(before),
            part.missing.tolist(),
            len(part.around),
        )
    return UnseenPartition(
        held, None if is_open else new_client, np.flatnonzero(is_cropped)
    )


def _metis(
    dataset: NodeDataset, nodes: IntArray, num_parts: int, is_open: bool, seed: int
) -> list[IntArray]:
    """Cut the graph on some nodes into parts, none empty."""
    kept = torch.from_numpy(nodes)
    local = replace(  # METIS reads nothing but edges and the number of nodes
        dataset,
        edge_index=induced_subgraph(dataset.edge_index, dataset.num_nodes, kept),
        y=dataset.y[kept],
    )
    try:
        if num_parts > len(nodes):
            raise DataError("more parts than nodes")
        parts = partition_nodes(local, "metis", num_parts, seed=seed)
    except DataError as error:
        setting = "open-set" if is_open else "closed-set"
        raise DataError(
            f'setting = "{setting}" cuts {len(nodes)} nodes of the largest connected '
            f"component into clients + 1 = {num_parts} METIS parts, one of them the new "
            "client: they are too few. Use fewer clients."
        ) from error
    return [nodes[part] for part in parts]


def cut_unseen_clients(
    dataset: NodeDataset,
    node_ids: Tensor,
    partition: UnseenPartition,
    masks: Sequence[Mapping[str, Tensor]],
) -> list[ClientGraph]:
    """Cut the clients' training and evaluation graphs, FedLoG Appendix A.10.

    Parameters
    ----------
    dataset : NodeDataset
        The largest component.
    node_ids : Tensor of shape (N,), int64
        Numbers of its nodes in the source data.
    partition : UnseenPartition
        Who holds what.
    masks : sequence of K mappings of str to Tensor of shape (n_k,), bool
        Split of each V_k into ``train``, ``val`` and ``test``.

    Returns
    -------
    list of ClientGraph
        ``graph`` is induced on V_k. ``evaluation`` holds the graph induced on V_k and
        V_k^u, all edges, with the masks ``unseen`` (V_k^u of known classes that the
        client has) and ``missing`` (those it lacks), and in the closed set the new
        client's graph with the mask ``new_client``.
    """
    pieces = cut_clients(
        dataset.edge_index, dataset.num_nodes, [p.nodes for p in partition.parts]
    )
    everywhere: tuple[Graph, ...] = ()
    if partition.new_client is not None:
        new = _induced(dataset, torch.from_numpy(partition.new_client))
        everywhere = (replace(new, masks={"new_client": new.y >= 0}),)
    clients = []
    for pid, (part, edges) in enumerate(zip(partition.parts, pieces, strict=True)):
        nodes = torch.from_numpy(part.nodes)
        x, y = select_rows(dataset.x, nodes), dataset.y[nodes]
        clients.append(
            ClientGraph(
                pid,
                Graph(x, edges, y, masks[pid]),
                dataset.class_names,
                node_ids[nodes],
                (_expanded(dataset, part), *everywhere),
            )
        )
    return clients


def _expanded(dataset: NodeDataset, part: UnseenPart) -> Graph:
    """Return the graph on V_k and V_k^u with masks ``unseen`` and ``missing``."""
    nodes = torch.from_numpy(np.union1d(part.nodes, part.around))
    graph = _induced(dataset, nodes)
    is_around = torch.isin(nodes, torch.from_numpy(part.around))
    is_missing = torch.isin(graph.y, torch.from_numpy(part.missing))
    return replace(
        graph,
        masks={
            "unseen": is_around & ~is_missing & (graph.y >= 0),
            "missing": is_around & is_missing,
        },
    )


def _induced(dataset: NodeDataset, nodes: Tensor) -> Graph:
    """Return the induced subgraph, without masks."""
    edge_index = induced_subgraph(dataset.edge_index, dataset.num_nodes, nodes)
    return Graph(select_rows(dataset.x, nodes), edge_index, dataset.y[nodes], {})
