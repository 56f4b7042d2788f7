"""Graphs of ``torch_geometric.data.Data`` as datasets and as graph files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    EdgeTable,
    Graph,
    GraphDataset,
    NodeDataset,
)
from flower_fgl.datasets.graph_files.own_split import split_names
from flower_fgl.datasets.graph_files.precision import check_whole_numbers
from flower_fgl.datasets.graph_files.validate import (
    MOST_CLASSES,
    check_class_names,
    check_feature_names,
    doubtful_labels,
    validate_edges,
    validate_graph_dataset,
    validate_node_dataset,
)
from flower_fgl.datasets.graph_files.write import save_client_graph
from flower_fgl.datasets.pyg_split import own_masks
from flower_fgl.datasets.transforms.canonical import compact_features, undirected_simple

__all__ = [
    "graph_dataset",
    "is_data",
    "node_dataset",
    "store_graph",
    "store_graphs",
    "to_npz",
]

log = logging.getLogger(__name__)

EDGE_LABELS = ("edge_label", "edge_y")
KINDS = ("node_type", "edge_type")
READ = {"x", "edge_index", "y", "num_nodes", *KINDS}
READ_WITH_LABELS = {*EDGE_LABELS, "edge_attr", "edge_time"}
BOOKKEEPING = {"batch", "ptr", "n_id", "e_id", "input_id", "batch_size"}
"""Attributes that PyG adds to batches and sampled graphs."""
SPARSEST = 10
"""Classes per class with an item, above which ``y`` holds no class numbers."""
MORE_DIGITS = (torch.float64, torch.int32, torch.int64)
"""Types of numbers that float32 may not hold."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NO_CLASSES = ("",)
"""Class names of nodes without classes, as of a file that is read without labels."""


def is_data(thing: object) -> bool:
    """Return whether an object is a ``torch_geometric.data.Data``."""
    from torch_geometric.data import Data

    return isinstance(thing, Data)


def to_npz(
    data: Any,
    path: str | os.PathLike[str],
    *,
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] = (),
    edge_class_names: Sequence[str] | None = None,
    edge_feature_names: Sequence[str] = (),
    declared_classes: Sequence[str] = (),
) -> Path:
    """Write a PyG graph as a data owner's graph file.

    Parameters
    ----------
    data : torch_geometric.data.Data
        One graph: ``x`` (N, d), ``edge_index`` (2, E), ``y`` (N,) with -1 for unknown
        classes, and optionally ``train_mask``, ``val_mask`` and ``test_mask`` (N,), or
        ``train_idx`` etc., lists of nodes. To classify edges: ``edge_label`` or
        ``edge_y`` (E,), and optionally ``edge_attr`` (E, a), ``edge_time`` (E,),
        ascending, and ``edge_train_mask`` or ``edge_train_idx`` etc. Link prediction and
        edges need no ``y``.
    path : path-like
        The ``.npz`` file to write; its folder must exist.
    class_names : sequence of str, optional
        Length C. Data owners agree on classes by name. By default the numbers 0, 1, ….
    feature_names : sequence of str
        Length d: names of the columns of ``x``; data owners agree on them too.
    edge_class_names : sequence of str, optional
        Names of the classes of edges, by default the numbers 0, 1, ….
    edge_feature_names : sequence of str
        Length a: names of the columns of ``edge_attr``.
    declared_classes : sequence of str
        Classes of nodes or edges that are classes although their name usually marks an
        unknown class (``unknown``, ``NA``), or although nearly every class has one item.

    Returns
    -------
    Path
        ``path``, for ``dataset`` or for a SuperNode's ``graph``.

    Raises
    ------
    DataError
        If the graph lacks features or edges, has several kinds of nodes or edges, no node
        has a class although ``y`` is given, ``y`` holds floats, they do not fit each
        other, or an attribute looks like a split that cannot be read.
    OSError
        If the file cannot be written.

    Notes
    -----
    1. Without classes of edges, the file holds an undirected simple graph: weights and
       attributes of edges, self-loops and duplicate edges are left out.
    2. A warning names all attributes that are not read.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise DataError(f"A graph file ends in .npz, got {path.name}.")
    dataset = node_dataset(
        data,
        path.name,
        class_names=class_names,
        feature_names=feature_names,
        edge_class_names=edge_class_names,
        edge_feature_names=edge_feature_names,
        declared_classes=declared_classes,
    )
    if data.get("y") is None and dataset.edges is None:
        log.warning(
            "%s: without y, the graph is of use for link prediction only.", path
        )
    _save(dataset, path)
    return path


def node_dataset(
    data: Any,
    name: str,
    *,
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] = (),
    edge_class_names: Sequence[str] | None = None,
    edge_feature_names: Sequence[str] = (),
    declared_classes: Sequence[str] = (),
) -> NodeDataset:
    """Convert a PyG graph to a dataset for the classification of nodes or edges.

    Arguments and errors are those of :func:`to_npz`; ``name`` is for messages.
    """
    dataset = _converted(
        data,
        name,
        class_names,
        feature_names,
        edge_class_names,
        edge_feature_names,
    )
    _warn_of_unread([data], name)
    check_class_names(declared_classes, f"{name}: declared_classes")
    _check_labels([dataset], declared_classes)
    if class_names is None:
        _check_numbering(dataset.y, name)
    if edge_class_names is None and dataset.edges is not None:
        _check_numbering(dataset.edges.y, name, "edge")
    return dataset


def _converted(
    data: Any,
    name: str,
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] = (),
    edge_class_names: Sequence[str] | None = None,
    edge_feature_names: Sequence[str] = (),
) -> NodeDataset:
    """Return a graph, of which nothing is checked that depends on other graphs."""
    if not is_data(data):
        raise DataError(
            f"{name}: expected a torch_geometric.data.Data with one kind of nodes and "
            f"edges, got {type(data).__name__}."
        )
    x, edge_index = _inputs(data, name, feature_names)
    edges = _edges(data, name, edge_class_names, edge_feature_names)
    if data.get("y") is None:  # enough for links and edges; other runs report it
        y = torch.full((x.shape[0],), -1)
        names: tuple[str, ...] = NO_CLASSES
        if class_names is not None and len(class_names):
            check_class_names(class_names, f"{name}: class_names")
            names = tuple(class_names)
    else:
        y = _labels(data, name)
        names = _class_names(y, class_names, name)
    if y.numel() != x.shape[0]:
        raise DataError(
            f"{name}: expected one class for each of the {x.shape[0]} nodes, got "
            f"{y.numel()}."
        )
    check_feature_names(feature_names, name)
    if len(feature_names) not in (0, x.shape[1]):
        raise DataError(
            f"{name}: x has {x.shape[1]} columns, but there are {len(feature_names)} "
            "feature names."
        )
    dataset = NodeDataset(
        name=name,
        x=x,
        edge_index=edge_index,
        y=y,
        class_names=names,
        masks=own_masks(data, name),
        feature_names=tuple(feature_names),
        edges=edges,
    )
    validate_node_dataset(dataset)
    return dataset


def _edges(
    data: Any,
    name: str,
    class_names: Sequence[str] | None,
    columns: Sequence[str],
) -> EdgeTable | None:
    """Return the edges with their classes; ``None`` if they have none."""
    held = [key for key in EDGE_LABELS if data.get(key) is not None]
    if not held:
        if class_names is not None or len(columns):
            raise DataError(
                f"{name}: there are names of classes or features of edges, but the graph "
                "has no edge_label."
            )
        return None
    if data.get("edge_label_index") is not None or len(held) > 1:
        raise DataError(
            f"{name}: expected one class for each edge of edge_index, as edge_label or "
            "edge_y; edge_label_index, which refers to other edges, is not supported."
        )
    y = _labels(data, name, held[0])
    attr, time = data.get("edge_attr"), data.get("edge_time")
    for key, values in (("edge_attr", attr), ("edge_time", time)):
        if values is not None and values.is_complex():
            raise DataError(
                f"{name}: {key} must hold real numbers, got {values.dtype}."
            )
    x = torch.zeros(len(y), 0) if attr is None else attr.detach().cpu()
    x = x[:, None] if x.dim() == 1 else x
    if x.dtype in MORE_DIGITS:
        check_whole_numbers(x.numpy(), f"{name}: edge_attr", columns)
    x = x.float()
    check_feature_names(columns, f"{name}, edges")
    if len(columns) not in (0, x.shape[-1]):
        raise DataError(
            f"{name}: edge_attr has {x.shape[-1]} columns, but there are {len(columns)} "
            "edge feature names."
        )
    table = EdgeTable(
        data.edge_index.detach().cpu().to(torch.int64),
        y,
        _class_names(y, class_names, name, "edge"),
        x,
        tuple(columns),
        None if time is None else time.detach().cpu().to(torch.float64),
        own_masks(data, name, "edge_"),
    )
    validate_edges(table, name)
    return table


def _check_labels(
    datasets: Sequence[NodeDataset], declared: Collection[str] = ()
) -> None:
    """Reject classes that are probably none, in a graph and in all of them together."""
    of_nodes = [(d.name, d.y, d.class_names) for d in datasets]
    tables = [(d.name, d.edges) for d in datasets if d.edges is not None]
    of_edges = [(name, table.y, table.class_names) for name, table in tables]
    for key, item, parts in (("y", "node", of_nodes), ("edge_label", "edge", of_edges)):
        longest = max((names for *_, names in parts), key=len, default=())
        whole = torch.cat(
            [torch.empty(0, dtype=torch.int64), *(y for _, y, _ in parts)]
        )
        if not doubtful_labels(whole, longest, declared):
            continue
        for name, y, names in parts:
            doubt = doubtful_labels(
                y,
                names,
                declared,
                item=item,
                unknown=f"Set {key} to -1",
                declare="write the graph with to_npz(…, declared_classes=…)",
            )
            if doubt:
                raise DataError(f"{name}, {key}: {doubt}")


def graph_dataset(graphs: Sequence[Any], name: str) -> GraphDataset:
    """Convert G PyG graphs with ``x``, ``edge_index`` and one class each to a dataset.

    Raises
    ------
    DataError
        If the graphs do not fit each other.
    """
    from torch_geometric.data import Batch

    if not graphs or not all(map(is_data, graphs)):
        raise DataError(
            f"{name}: expected a list of torch_geometric.data.Data, one per graph."
        )
    union = Batch.from_data_list(list(graphs))
    x, edge_index = _inputs(union, name)
    y = _labels(union, name)
    if y.numel() != len(graphs):
        raise DataError(
            f"{name}: expected one class for each of the {len(graphs)} graphs, got "
            f"{y.numel()}."
        )
    dataset = GraphDataset(
        name, x.to_dense(), edge_index, union.batch, y, _class_names(y, None, name)
    )
    _warn_of_unread(graphs, name)
    _check_numbering(y, name, "graph")
    validate_graph_dataset(dataset)
    return dataset


def store_graph(data: Any, folder: Path) -> Path:
    """Write a PyG graph to a folder, under a name that depends on its content.

    An equal graph gives the same path and is written once.

    Raises
    ------
    DataError
        If the graph is malformed, or the file cannot be written.
    """
    dataset = node_dataset(data, "the graph")
    path = folder / f"graph-{_digest(dataset)}.npz"
    return _stored([(path, dataset)], path)


def store_graphs(graphs: Sequence[Any], folder: Path) -> Path:
    """Write PyG graphs, one per client, to a folder of their own below ``folder``.

    Returns
    -------
    Path
        Folder with one graph file per client, in the order of the clients.

    Raises
    ------
    DataError
        If there is no graph, a graph is malformed, or a file cannot be written.
    """
    if not graphs:
        raise DataError("The list of graphs is empty: give one graph for each client.")
    datasets = [_converted(g, f"graph {k} of the list") for k, g in enumerate(graphs)]
    _warn_of_unread(graphs, "the list of graphs")
    _check_labels(datasets)
    _check_numbering(torch.cat([d.y for d in datasets]), "the list of graphs")
    tables = [d.edges.y for d in datasets if d.edges is not None]
    _check_numbering(torch.cat([torch.empty(0), *tables]), "the list of graphs", "edge")
    digests = "".join(map(_digest, datasets))
    digest = hashlib.sha256(digests.encode()).hexdigest()[:16]
    where = folder / f"graphs-{len(datasets)}-{digest}"
    width = max(4, len(str(len(datasets))))
    paths = [where / f"client-{k:0{width}}.npz" for k in range(len(datasets))]
    return _stored(list(zip(paths, datasets, strict=True)), where)


def _stored(files: Sequence[tuple[Path, NodeDataset]], result: Path) -> Path:
    """Write the files that do not exist, and return ``result``."""
    try:
        for path, dataset in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _save(dataset, path)
    except OSError as error:
        raise DataError(
            f"Cannot write the graph to {result}: {error}. Free some disk space, or set "
            "FLOWER_FGL_CACHE to another folder."
        ) from error
    return result


def _save(dataset: NodeDataset, path: Path) -> None:
    """Write a dataset as a graph file."""
    graph = Graph(dataset.x, dataset.edge_index, dataset.y, dict(dataset.masks))
    nodes = torch.arange(dataset.num_nodes)
    client = ClientGraph(
        0,
        graph,
        dataset.class_names,
        nodes,
        feature_names=dataset.feature_names,
        edges=dataset.edges,
    )
    save_client_graph(path, client)


def _digest(dataset: NodeDataset) -> str:
    """Return a hash of a dataset's content."""
    x, found = dataset.x, hashlib.sha256(repr(dataset.class_names).encode())
    is_sparse = x.layout == torch.sparse_csr
    parts = [x.crow_indices(), x.col_indices(), x.values()] if is_sparse else [x]
    masks = [dataset.masks[name] for name in sorted(dataset.masks)]
    if (edges := dataset.edges) is not None:
        found.update(repr((edges.class_names, edges.feature_names)).encode())
        masks += [edges.pairs, edges.y, edges.x]
        masks += [edges.masks[name] for name in sorted(edges.masks)]
        masks += [] if edges.time is None else [edges.time]
    for tensor in (*parts, dataset.edge_index, dataset.y, *masks):
        found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _inputs(data: Any, name: str, names: Sequence[str] = ()) -> tuple[Tensor, Tensor]:
    """Return features and undirected simple edges."""
    x, edge_index = data.x, data.edge_index
    if not isinstance(x, Tensor) or x.dim() != 2 or 0 in x.shape:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise DataError(
            f"{name}: expected features x of shape (nodes, features), neither of them 0, "
            f"got {got}. Without features, add some, e.g. "
            "torch_geometric.transforms.OneHotDegree."
        )
    is_edges = isinstance(edge_index, Tensor) and edge_index.layout == torch.strided
    if not is_edges or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise DataError(
            f"{name}: expected edge_index of shape (2, edges), got "
            f"{tuple(edge_index.shape) if is_edges else type(edge_index).__name__}."
        )
    is_integer = edge_index.dtype in INTEGERS or not edge_index.numel()
    if not is_integer:  # an empty tensor is of floats by default
        raise DataError(
            f"{name}: edge_index must hold integers, got {edge_index.dtype}."
        )
    if x.is_complex():
        raise DataError(f"{name}: x must hold real numbers, got {x.dtype}.")
    edge_index = edge_index.detach().cpu().to(torch.int64)
    if edge_index.numel():
        low, high = (int(v) for v in edge_index.aminmax())
        if low < 0 or high >= x.shape[0]:
            raise DataError(
                f"{name}: edge_index names nodes {low} to {high}, but x has the rows 0 to "
                f"{x.shape[0] - 1}."
            )
    _reject_kinds(data, name)
    x = x.detach().cpu()
    if x.dtype in MORE_DIGITS and x.layout == torch.strided:
        check_whole_numbers(x.numpy(), f"{name}: x", names)
    elif x.dtype in MORE_DIGITS and x.layout == torch.sparse_csr:
        parts = (x.values().numpy(), x.col_indices().numpy())
        check_whole_numbers(parts[0], f"{name}: x", names, parts[1])
    if x.layout not in (torch.strided, torch.sparse_csr):
        x = x.to_dense()
    return compact_features(x), undirected_simple(edge_index, int(x.shape[0]))


def _reject_kinds(data: Any, name: str) -> None:
    """Reject a graph with several kinds of nodes or of edges."""
    found = {key: data.get(key) for key in KINDS}
    kinds = {k: len(torch.unique(v)) for k, v in found.items() if isinstance(v, Tensor)}
    if several := {key: number for key, number in kinds.items() if number > 1}:
        what = " and ".join(
            f"{number} kinds of {key[:4]}s" for key, number in several.items()
        )
        raise DataError(
            f"{name}: {' and '.join(several)} distinguish {what}, which would be lost. "
            "Delete the attribute to treat all alike, or write the kinds of nodes into x, "
            "as columns of 0 and 1."
        )


def _warn_of_unread(graphs: Sequence[Any], name: str) -> None:
    """Log the attributes that none of the graphs is read with, once."""
    unread: set[str] = set()
    for data in graphs:
        has_labels = any(data.get(key) is not None for key in EDGE_LABELS)
        known = READ | BOOKKEEPING | (READ_WITH_LABELS if has_labels else set())
        used = [key for key in set(data.keys()) if has_labels or "edge" not in key]
        parts, _ = split_names(used)
        unread |= set(data.keys()).difference(known, *parts.values())
    if not unread:
        return
    of_edges = any(key.startswith("edge_") for key in unread)
    log.warning(
        "%s: not read: %s. Features of nodes are the columns of x%s.",
        name,
        ", ".join(sorted(unread)),
        "; those of edges, edge_attr, are read with edge_label only, to classify edges"
        if of_edges
        else "",
    )


def _labels(data: Any, name: str, key: str = "y") -> Tensor:
    """Return one class per node, graph or edge."""
    y, item = data.get(key), "node" if key == "y" else "edge"
    if not isinstance(y, Tensor) or (y.dim() == 2 and y.shape[1] != 1) or y.dim() > 2:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise DataError(
            f"{name}: expected {key} with one class each, of shape ({item}s,), got {got}. "
            f"Several labels per {item} are not supported."
        )
    y = y.detach().cpu().flatten()
    if y.is_complex() or y.is_floating_point():
        has_nan = not y.is_complex() and bool(y.isnan().any())
        cast = "nan_to_num(-1).long()" if has_nan else "long()"
        raise DataError(
            f"{name}: {key} must hold class numbers 0, 1, … (-1 if unknown), got "
            f"{y.dtype}{' with NaN' if has_nan else ''}. If these are classes, convert "
            f"them to integers: data.{key} = data.{key}.{cast}. Other numbers cannot be "
            "predicted."
        )
    return y.to(torch.int64)


def _check_numbering(y: Tensor, name: str, item: str = "node") -> None:
    """Reject or report numbers that leave classes without items."""
    used = torch.unique(y[y >= 0]).tolist()
    if not used:
        return
    key, last = "edge_label" if item == "edge" else "y", int(used[-1])
    if last + 1 > SPARSEST * len(used):
        shown = ", ".join(f"{int(c)}" for c in used[:3])
        raise DataError(
            f"{name}: {key} holds {len(used)} different numbers up to {last} ({shown}, …). "
            f"As class numbers they would give {last + 1:,} classes, most of them without "
            f"{item}s. Number the classes 0 to {len(used) - 1}, e.g. with "
            f"{key}.unique(return_inverse=True), or give the names of all classes."
        )
    if len(used) > 1 and used[0] == 1 and last == len(used):
        log.warning(
            "%s: %s holds the classes 1 to %d. Classes are numbered from 0, and class 0 "
            "has no %s: subtract 1, or give the names of all classes.",
            name,
            key,
            last,
            item,
        )


def _class_names(
    y: Tensor, names: Sequence[str] | None, where: str, item: str = "node"
) -> tuple[str, ...]:
    """Return the given class names, or the numbers of the classes."""
    num_classes = int(y.max()) + 1 if y.numel() else 0
    if num_classes < 1:
        raise DataError(f"{where}: no {item} has a class.")
    if names is None and num_classes > MOST_CLASSES:
        raise DataError(
            f"{where}: there is the class {num_classes - 1}, but at most {MOST_CLASSES:,} "
            f"classes are possible. Number the classes of {item}s 0, 1, …, and check that "
            "they are no ids or numbers to predict."
        )
    if names is None:
        return tuple(str(c) for c in range(num_classes))
    if len(names) < num_classes:
        raise DataError(
            f"{where}: there is the class {num_classes - 1}, but there are only "
            f"{len(names)} class names."
        )
    check_class_names(names, f"{where}: class_names")
    return tuple(names)
