"""Unseen data: closed set, open set, missing classes and a new client, FedLoG A.10.

"Subgraph Federated Learning for Local Generalization" (FedLoG), ICLR 2025, Appendix A.10.
Each client trains on a METIS part of the largest connected component, without the rarest
classes of that part. It is also evaluated on nodes around the part:

========== ============================ =============================================
symbol     here                         meaning
========== ============================ =============================================
V_k        ``UnseenPart.nodes``         nodes of client k without its removed classes
V_k^u      ``UnseenPart.around``        nodes within h hops of V_k, without V_k
M_k        ``UnseenPart.missing``       classes without a node in V_k
V_crop     ``UnseenPartition.cropped``  nodes of no client (open set)
h          ``hops``                     radius of the expansion
========== ============================ =============================================
"""

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
from flower_fgl.datasets.partition.partition import IntArray, partition_nodes
from flower_fgl.datasets.transforms.subgraph import (
    cut_clients,
    induced_graph,
    induced_subgraph,
)

__all__ = [
    "UNSEEN_SPLIT",
    "UnseenPart",
    "UnseenPartition",
    "cut_unseen_clients",
    "expansion_hops",
    "partition_unseen",
]

BoolArray = NDArray[np.bool_]

UNSEEN_SPLIT = "40/30/30"
"""Default split of a client's nodes, at random and not per class."""
EXPANSION_HOPS = {"cora": 2, "citeseer": 3}
"""Radius h by dataset, 1 for all others; it reproduces the sizes printed in FedLoG."""
MIN_MISSING = 5
"""Minimum number of nodes of missing classes in a client's expansion."""
CROPPED = 5
"""In the open set, 1 / CROPPED of the nodes belong to no client."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class UnseenPart:
    """One client's V_k, V_k^u and M_k, ascending, numbered as in the largest component."""

    nodes: IntArray
    around: IntArray
    missing: IntArray


@dataclass(frozen=True, eq=False)
class UnseenPartition:
    """Parts of the K clients, numbered as in the largest component.

    ``new_client`` are the nodes of the new client, ``None`` in the open set. ``cropped``
    are the nodes outside all parts; empty in the closed set.
    """

    parts: list[UnseenPart]
    new_client: IntArray | None
    cropped: IntArray

    @property
    def arrays(self) -> list[IntArray]:
        """All node arrays, in the order of the partition's hash."""
        held = [nodes for part in self.parts for nodes in (part.nodes, part.around)]
        new_client = () if self.new_client is None else (self.new_client,)
        return [*held, *new_client, self.cropped]


def expansion_hops(dataset: str, hops: int) -> int:
    """Return the radius of the expansion; ``hops`` 0 selects the default of the dataset."""
    return hops or EXPANSION_HOPS.get(dataset, 1)


def surroundings(
    edge_index: IntArray, nodes: IntArray, pool: BoolArray, hops: int
) -> IntArray:
    """Find the nodes within h hops of a client's nodes V_k, FedLoG Appendix A.10.

    Paths only use nodes of ``pool`` (N,), bool, and ``nodes``; the result is without
    ``nodes``.
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
    """Remove a client's rarest classes, which it then lacks, FedLoG Appendix A.10.

    The part loses its rarest class (on a tie, the first). While V_k^u, to which ``expand``
    maps V_k, holds fewer than ``MIN_MISSING`` nodes of M_k, the next rarest class is
    removed too, up to ⌊C/3⌋ classes. The client keeps at least one class.
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
    """Partition the largest component into K clients and a new client, FedLoG A.10.

    In the open set a fifth of the nodes is first held back, and only these can be unseen.
    In the closed set, all nodes that a client does not hold can be unseen.
    """
    edges, labels = dataset.edge_index.numpy(), dataset.y.numpy()
    is_cropped = np.zeros(dataset.num_nodes, dtype=np.bool_)
    if is_open:
        order = numpy_generator(seed, 0, SERVER, "crop").permutation(dataset.num_nodes)
        is_cropped[order[: dataset.num_nodes // CROPPED]] = True
    pool = is_cropped if is_open else np.ones_like(is_cropped)
    *parts, new_client = _metis(
        dataset, np.flatnonzero(~is_cropped), num_clients + 1, is_open, seed
    )

    def expand(nodes: IntArray) -> IntArray:
        return surroundings(edges, nodes, pool, hops)

    held = [hide_classes(labels, dataset.target.width, part, expand) for part in parts]
    for client, (part, before) in enumerate(zip(held, parts, strict=True)):
        log.info(
            "Client %d: %d of %d nodes removed, classes %s missing, %d nodes around it.",
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
    """Partition the subgraph of some nodes into parts, none empty."""
    kept = torch.from_numpy(nodes)
    local = replace(  # METIS reads only the edges and the number of nodes
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
            f'setting = "{setting}" divides {len(nodes)} nodes of the largest connected '
            f"component into clients + 1 = {num_parts} METIS parts, one of them for the "
            "new client, but these are too few nodes. Use fewer clients."
        ) from error
    return [nodes[part] for part in parts]


def cut_unseen_clients(
    dataset: NodeDataset,
    node_ids: Tensor,
    partition: UnseenPartition,
    masks: Sequence[Mapping[str, Tensor]],
) -> list[ClientGraph]:
    """Build the clients' training and evaluation graphs, FedLoG Appendix A.10.

    ``node_ids`` (N,) are the nodes' numbers in the source. ``graph`` is induced on V_k;
    ``evaluation`` holds the graph induced on V_k and V_k^u, and in the closed set the new
    client's graph with the mask ``new_client``.
    """
    pieces = cut_clients(
        dataset.edge_index, dataset.num_nodes, [p.nodes for p in partition.parts]
    )
    shared: tuple[Graph, ...] = ()
    if partition.new_client is not None:
        new = induced_graph(dataset, torch.from_numpy(partition.new_client))
        shared = (replace(new, masks={"new_client": new.y >= 0}),)
    clients = []
    for pid, (part, edges) in enumerate(zip(partition.parts, pieces, strict=True)):
        nodes = torch.from_numpy(part.nodes)
        client = dataset.client_of(
            induced_graph(dataset, nodes, edges, masks[pid]),
            partition_id=pid,
            node_ids=node_ids[nodes],
            evaluation=(_expanded(dataset, part), *shared),
        )
        clients.append(client)
    return clients


def _expanded(dataset: NodeDataset, part: UnseenPart) -> Graph:
    """Return the graph on V_k and V_k^u with masks ``unseen`` and ``missing``."""
    nodes = torch.from_numpy(np.union1d(part.nodes, part.around))
    graph = induced_graph(dataset, nodes)
    is_around = torch.isin(nodes, torch.from_numpy(part.around))
    is_missing = torch.isin(graph.y, torch.from_numpy(part.missing))
    return replace(
        graph,
        masks={
            "unseen": is_around & ~is_missing & (graph.y >= 0),
            "missing": is_around & is_missing,
        },
    )
