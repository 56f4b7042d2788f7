"""Parts of a graph: induced subgraphs, the largest component, and random removal.

Removal follows X. Wu et al., "Federated Prototype Graph Learning", Sec. IV-H and Fig. 7.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.seeds import numpy_generator
from flower_fgl.datasets.client_graph import Graph, NodeDataset, numbered_within
from flower_fgl.datasets.transforms.canonical import csr_tensor, scipy_csr
from flower_fgl.nn.graph_union import select_rows
from flower_fgl.nn.link import pair_codes

__all__ = [
    "Sparsity",
    "cut_clients",
    "induced_graph",
    "induced_subgraph",
    "inductive_graphs",
    "largest_dataset",
    "sparsify",
    "sparsity_sha256",
]


IntArray = NDArray[np.int64]


def induced_subgraph(
    edge_index: Tensor, num_nodes: int, node_ids: Tensor | IntArray
) -> Tensor:
    """Keep the edges among different nodes, numbered by their position in ``node_ids``.

    They keep the order of ``edge_index``; without any the shape is (2, 0).
    """
    ends = numbered_within(edge_index, torch.as_tensor(node_ids), num_nodes)
    return ends[:, (ends >= 0).all(dim=0)]


def cut_clients(
    edge_index: Tensor,
    num_nodes: int,
    parts: Sequence[IntArray],
    *,
    are_inside: bool = True,
) -> list[Tensor]:
    """Compute the induced subgraphs of all clients in one pass over the edges.

    This is :func:`induced_subgraph` for each of the disjoint parts, without shared memory.
    Unless edges ``are_inside``, the result is those from each part to nodes of other parts:
    (2, m_i), the position of the client's node in its part, and the number of the other
    node in the whole graph; in the order of ``edge_index``.
    """
    owner = np.full(num_nodes, -1, dtype=np.int64)  # nodes of no client have -1
    local = np.empty(num_nodes, dtype=np.int64)
    for number, nodes in enumerate(parts):
        owner[nodes], local[nodes] = number, np.arange(len(nodes))
    source, target = edge_index.numpy()
    client = owner[source]
    chosen = np.flatnonzero(((client == owner[target]) == are_inside) & (client >= 0))
    # NumPy sorts 16-bit integers by radix, in time linear in the number of edges.
    narrow = np.int16 if len(parts) < 2**15 else np.int64
    order = chosen[np.argsort(client[chosen].astype(narrow), kind="stable")]
    sizes = np.bincount(client[chosen], minlength=len(parts))
    ends = local[target] if are_inside else target
    return [
        torch.from_numpy(np.stack([local[source[piece]], ends[piece]]))
        for piece in np.split(order, np.cumsum(sizes)[:-1])
    ]


def inductive_graphs(graph: Graph, target: int = 0) -> tuple[list[Graph], Tensor]:
    """Divide a graph so that training does not see validation and test nodes.

    The first graph has the training nodes and the edges among them, and all three masks.
    The others have the single mask of their name. Nodes in no mask are dropped. In a typed
    graph the nodes of other kinds than ``target`` are in all three. The ascending numbers
    of the nodes (n,) of the first graph follow.
    """
    stays = torch.zeros(graph.num_nodes, dtype=torch.bool)
    if graph.node_type is not None:
        stays = graph.node_type != target
    nodes = {
        n: (graph.masks[n] | stays).nonzero().flatten()
        for n in ("train", "val", "test")
    }
    train, val, test = (
        replace(induced_graph(graph, chosen), masks={name: graph.masks[name][chosen]})
        for name, chosen in nodes.items()
    )
    # a client's file holds no tensor twice
    none = torch.zeros(train.num_nodes, dtype=torch.bool)
    train = replace(train, masks={**train.masks, "val": none, "test": none.clone()})
    return [train, val, test], nodes["train"]


def induced_graph(
    graph: Graph | NodeDataset,
    nodes: Tensor,
    edge_index: Tensor | None = None,
    masks: Mapping[str, Tensor] | None = None,
) -> Graph:
    """Return the subgraph of some different nodes, by default without masks.

    ``edge_index`` are its edges if they are known.
    """
    return Graph(masks=masks or {}, **_induced(graph, nodes, edge_index))


def _induced(
    graph: Graph | NodeDataset, nodes: Tensor, edge_index: Tensor | None = None
) -> dict[str, Any]:
    """Return the fields of a subgraph that both classes have."""
    if edge_index is None:
        edge_index = induced_subgraph(graph.edge_index, graph.num_nodes, nodes)
    return {
        "x": select_rows(graph.x, nodes),
        "edge_index": edge_index,
        "y": graph.y[nodes],
        "targets": None if graph.targets is None else graph.targets[nodes],
        "messages": graph.messages and graph.messages.within(nodes, graph.num_nodes),
        "node_type": None if graph.node_type is None else graph.node_type[nodes],
    }


def largest_component(edge_index: IntArray, num_nodes: int) -> IntArray:
    """Return the ascending nodes of the largest component; on a tie, of the first one."""
    ones = np.ones(edge_index.shape[1], dtype=np.int8)
    shape = (num_nodes, num_nodes)
    adjacency = scipy.sparse.csr_array((ones, (edge_index[0], edge_index[1])), shape)
    # SciPy numbers components in the order of their first node
    _, component = scipy.sparse.csgraph.connected_components(adjacency, directed=False)
    largest = np.bincount(component).argmax()
    return np.flatnonzero(component == largest).astype(np.int64)


def largest_dataset(dataset: NodeDataset) -> tuple[NodeDataset, Tensor]:
    """Keep the largest connected component, FedLoG A.12; return its nodes, too."""
    found = largest_component(dataset.edge_index.numpy(), dataset.num_nodes)
    nodes = torch.from_numpy(found)
    component = replace(
        dataset,
        masks={name: mask[nodes] for name, mask in dataset.masks.items()},
        network=None if dataset.network is None else dataset.network[nodes],
        **_induced(dataset, nodes),
    )
    return component, nodes


BoolArray = NDArray[np.bool_]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sparsity:
    """Shares in [0, 1) of the data that are removed on every client.

    Non-zero features of nodes outside the training set, undirected edges, and training
    labels of each class.
    """

    features: float = 0.0
    edges: float = 0.0
    labels: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Sparsity:
        """Read ``feature-sparsity``, ``edge-sparsity`` and ``label-sparsity``."""
        return cls(config.feature_sparsity, config.edge_sparsity, config.label_sparsity)

    def __bool__(self) -> bool:
        """Return whether anything is removed."""
        return any(asdict(self).values())


def _lowest(scores: NDArray[np.float64], share: float) -> BoolArray:
    """Mark the ⌊share · n⌋ lowest of n scores; a larger share marks a superset."""
    chosen = np.zeros(len(scores), dtype=np.bool_)
    number = int(len(scores) * Fraction(str(share)))  # of the fraction as written
    chosen[np.argsort(scores, kind="stable")[:number]] = True
    return chosen


def remove_edges(
    edge_index: Tensor, num_nodes: int, share: float, *, generator: np.random.Generator
) -> Tensor:
    """Remove ⌊share · E⌋ undirected edges at random, FedPG Sec. IV-H.

    In an equal state of the generator, a larger share removes a superset.
    """
    source, target = edge_index.numpy()
    pair = np.minimum(source, target) * num_nodes + np.maximum(source, target)
    distinct, edge = np.unique(pair, return_inverse=True)
    is_removed = _lowest(generator.random(len(distinct)), share)
    return edge_index[:, torch.from_numpy(~is_removed[edge])]


def remove_labels(
    y: Tensor, is_train: Tensor, share: float, *, generator: np.random.Generator
) -> Tensor:
    """Choose the training nodes that lose their label, class by class: (N,), bool.

    ⌊share · n_c⌋ of the n_c training nodes of a class, so that every class keeps at least
    one. In an equal state of the generator, a larger share chooses a superset.
    """
    score = generator.random(len(y))
    label, train = y.numpy(), is_train.numpy()
    chosen = np.zeros(len(y), dtype=np.bool_)
    for c in np.unique(label[train]):
        nodes = np.flatnonzero(train & (label == c))
        chosen[nodes[_lowest(score[nodes], share)]] = True
    return torch.from_numpy(chosen)


def remove_features(
    x: Tensor, nodes: Tensor, share: float, *, generator: np.random.Generator
) -> Tensor:
    """Set a share of the non-zero features of some nodes to zero, FedPG Sec. IV-H.

    ⌊share · M⌋ of the M non-zero entries of ``nodes`` (N,), bool, in a copy; strided and
    sparse CSR lose the same entries. In an equal state of the generator, a larger share
    removes a superset.
    """
    is_sparse = x.layout == torch.sparse_csr
    matrix = scipy_csr(x).copy()
    matrix.eliminate_zeros()
    row = np.repeat(np.arange(len(nodes)), np.diff(matrix.indptr))
    score = generator.random(matrix.nnz)
    eligible = np.flatnonzero(nodes.numpy()[row])
    matrix.data[eligible[_lowest(score[eligible], share)]] = 0
    if not is_sparse:
        return torch.from_numpy(matrix.toarray())
    matrix.eliminate_zeros()
    return csr_tensor(matrix)


def sparsify(
    graph: Graph, sparsity: Sparsity, *, seed: int, partition_id: int
) -> Graph:
    """Remove labels, edges and features from one client's graph, FedPG Sec. IV-H.

    Notes
    -----
    1. The paper says "partial absence of features for unlabeled nodes". Here every node
       outside the training set, validation and test nodes included, may lose single
       entries instead of whole rows. Only non-zero entries are counted: dense and sparse
       features lose the same entries.
    2. The paper changes "the ratio of labeled nodes". Here training nodes lose their
       label: they get class -1, are in no mask, and can lose features like any other
       unlabelled node. Validation and test nodes stay, so scores remain comparable.
    3. Removals are nested: everything removed at one share is removed at every larger one.
    4. All counts are rounded down: no client loses its last edge or training node.
    """

    def draw(purpose: str) -> np.random.Generator:
        return numpy_generator(seed, 0, partition_id, f"{purpose}-sparsity")

    if not sparsity:
        return graph
    train = graph.masks["train"]
    lost = remove_labels(graph.y, train, sparsity.labels, generator=draw("label"))
    is_train = train & ~lost
    before = graph.edge_index.shape[1] // 2
    edge_index, x = graph.edge_index, graph.x
    if sparsity.edges:
        edge_index = remove_edges(
            edge_index, graph.num_nodes, sparsity.edges, generator=draw("edge")
        )
    if sparsity.features:
        x = remove_features(x, ~is_train, sparsity.features, generator=draw("feature"))
    log.info(
        "Client %d keeps %d of %d training labels and %d of %d edges.",
        partition_id,
        int(is_train.sum()),
        int(train.sum()),
        edge_index.shape[1] // 2,
        before,
    )
    messages = graph.messages
    if messages is not None and sparsity.edges:
        kept = torch.unique(pair_codes(edge_index, graph.num_nodes))
        is_loop = messages.index[0] == messages.index[1]
        codes = pair_codes(messages.index, graph.num_nodes)
        messages = messages.select(is_loop | torch.isin(codes, kept))
    return replace(
        graph,
        x=x,
        edge_index=edge_index,
        messages=messages,
        y=graph.y.masked_fill(lost, -1),
        masks={**graph.masks, "train": is_train},
    )


def sparsity_sha256(partition_sha256: str, sparsity: Sparsity) -> str:
    """Return the hash of a partition, or with sparsity the hash of both."""
    if not sparsity:
        return partition_sha256
    shares = "/".join(f"{k}={float(v)!r}" for k, v in asdict(sparsity).items())
    return hashlib.sha256(f"{partition_sha256}/{shares}".encode()).hexdigest()
