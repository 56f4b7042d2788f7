"""Readers for published files that no library loads; nothing is ever unpickled."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.options import nearest
from flower_fgl.core.settings import ALL_TARGETS
from flower_fgl.core.targets import LABELS, NUMBERS, Target
from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.graph_files.archive import Array, integers, read_arrays
from flower_fgl.datasets.graph_files.npz import GRAPH_KEYS, node_dataset
from flower_fgl.datasets.graph_files.own_split import PARTS
from flower_fgl.datasets.graph_files.target_arrays import target_values
from flower_fgl.datasets.transforms.canonical import (
    compact_features,
    csr_tensor,
    undirected_simple,
)
from flower_fgl.datasets.transforms.typed import NodeTable, TypedTarget, typed_dataset
from flower_fgl.nn.graph_union import GraphBatch, select_rows

__all__ = [
    "Raw",
    "aifb",
    "choose_target",
    "collab_npz",
    "few_shot",
    "fold_ppi",
    "read_targets",
    "twitch",
]


log = logging.getLogger(__name__)


class Raw(NamedTuple):
    """What a reader returns: a dataset without name, with all targets if it has several.

    ``entries`` is the number of columns of ``edge_index`` in the published files.
    """

    dataset: NodeDataset | GraphDataset
    entries: int | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        edge_index: Tensor,
        y: Tensor,
        *,
        names: tuple[str, ...] | None = None,
        entries: int | None = None,
        **fields: Any,
    ) -> Raw:
        """Make a dataset: a :class:`GraphDataset` if ``fields`` have a ``batch``.

        ``y`` is the class of each of I nodes or graphs, (I,), -1 where unknown. Of several
        targets (I, T) it says whether an item belongs to each, int8, or is T numbers,
        float64, NaN where unknown. ``names`` are by default numbers.
        """
        targets = None
        if y.dim() == 2:
            kind = NUMBERS if y.is_floating_point() else LABELS
            target = Target(kind, names or tuple(map(str, range(y.shape[1]))))
            _, y, targets = target_values(target, y)
        else:
            number = int(y.max()) + 1 if y.numel() else 0
            target = Target.classes(names or tuple(map(str, range(number))))
        kind_of: Any = GraphDataset if "batch" in fields else NodeDataset
        return cls(
            kind_of(
                name="",
                x=x,
                edge_index=edge_index,
                y=y,
                target=target,
                targets=targets,
                **fields,
            ),
            entries,
        )


def few_shot(folder: Path, *, prefix: str, is_partial: bool = False) -> Raw:
    """Read a few-shot dataset in the layout of GPN (Ding et al., CIKM 2020).

    ``PREFIX_network`` holds one edge per line: two node numbers separated by a tab.
    ``PREFIX_train.mat`` holds the nodes of the base classes and ``PREFIX_test.mat``
    those of the novel classes: ``Index`` (node numbers), ``Attributes`` (sparse) and
    ``Label``.

    Classes are numbered by ascending published label; the label is the class name. A
    node in neither table keeps its edges, and has zero features and no class. With
    ``is_partial`` the folder lacks ``PREFIX_train.mat``: such nodes and their edges are
    dropped. A warning counts the nodes in both cases.
    """
    edges = np.loadtxt(folder / f"{prefix}_network", dtype=np.int64, ndmin=2)
    index, label, attributes = _mat_tables(
        [folder / f"{prefix}_{part}.mat" for part in ("train", "test")[is_partial:]]
    )
    num_nodes = 1 + int(max(edges.max(initial=-1), index.max(initial=-1)))
    if len(edges) and edges.shape[1] != 2:
        raise DataError(
            f"{folder / prefix}_network: expected two numbers per line, got "
            f"{edges.shape[1]}. Download the file again."
        )
    names, local = np.unique(label, return_inverse=True)
    entries = len(edges)
    if is_partial:
        row = np.full(num_nodes, -1)
        row[np.sort(index)] = np.arange(len(index))
        index, edges = row[index], row[edges]
        edges = edges[(edges >= 0).all(axis=1)]
        log.warning(
            "%s: %s_train.mat is missing. Kept the %d of %d nodes that have features, "
            "and %d of %d edge entries: results are not comparable to published ones.",
            folder,
            prefix,
            len(index),
            num_nodes,
            len(edges),
            entries,
        )
        num_nodes = len(index)
    elif len(index) < num_nodes:
        log.warning(
            "%s: %d of %d nodes are in neither table: they get zero features and no class.",
            folder,
            num_nodes - len(index),
            num_nodes,
        )
    y = np.full(num_nodes, -1)
    y[index] = local
    place = scipy.sparse.csr_matrix(
        (np.ones(len(index)), (index, np.arange(len(index)))),
        shape=(num_nodes, len(index)),
    )
    return Raw.of(
        x=compact_features(csr_tensor((place @ attributes).tocsr())),
        edge_index=undirected_simple(torch.from_numpy(edges.T.copy()), num_nodes),
        y=torch.from_numpy(y),
        entries=entries,
        names=tuple(str(int(name)) for name in names),
    )


def _mat_tables(paths: list[Path]) -> tuple[Array, Array, scipy.sparse.csr_matrix]:
    """Concatenate the node numbers, labels and attributes of MATLAB files."""
    import scipy.io  # takes half a second to import, and workers do not need it

    tables = [scipy.io.loadmat(str(path)) for path in paths]
    index = np.concatenate([t["Index"].ravel() for t in tables]).astype(np.int64)
    label = np.concatenate([t["Label"].ravel() for t in tables])
    attributes = scipy.sparse.vstack(
        [scipy.sparse.csr_matrix(t["Attributes"]) for t in tables], format="csr"
    )
    where = " and ".join(path.name for path in paths)
    if not len(index) == len(label) == attributes.shape[0]:
        raise DataError(
            f"{where}: Index, Label and Attributes must have the same number of rows, "
            f"got {len(index)}, {len(label)} and {attributes.shape[0]}. Download the "
            "files again."
        )
    if len(np.unique(index)) < len(index) or index.min(initial=0) < 0:
        raise DataError(
            f"{where}: Index must name each node once, by a number of 0 or more; a node "
            "number is repeated or negative. Download the files again."
        )
    return index, label, attributes


def fold_ppi(folder: Path) -> Raw:
    """Read Fold-PPI (Huang and Zitnik, NeurIPS 2020) from ``fold_ppi.npz``.

    The file holds ``x``, ``edge_index``, ``y`` and ``class_names`` as in
    docs/graph-files.md, and ``network`` of shape (N,), integers, the network of
    each node. Nodes without a fold category have class -1.

    Raises
    ------
    DataError
        If an array is missing or has the wrong shape, or an edge joins two networks.

    Notes
    -----
    1. The dataset is published as pickles (``graph_dgl.pkl``, ``features.npy``,
       ``label.pkl`` in the folder ``fold_PPI`` of G-Meta's data). Unpickling can run any
       code a file contains, so this package never unpickles. If you trust the files,
       convert them once, with DGL installed::

           graphs = pickle.loads(Path("graph_dgl.pkl").read_bytes())
           features = np.load("features.npy", allow_pickle=True)
           label = pickle.loads(Path("label.pkl").read_bytes())  # {"0_5": category}
           sizes = [len(f) for f in features]
           start = np.cumsum([0, *sizes])
           names, category = np.unique(list(label.values()), return_inverse=True)
           node = [start[int(g)] + int(v) for g, v in (k.split("_") for k in label)]
           y = np.full(start[-1], -1)
           y[node] = category
           edges = [np.stack(g.edges()) + s for g, s in zip(graphs, start)]
           np.savez(
               "fold_ppi.npz",
               x=np.concatenate(list(features)).astype("float32"),
               edge_index=np.concatenate(edges, axis=1),
               y=y,
               class_names=names.astype(str),
               network=np.repeat(np.arange(len(sizes)), sizes),
           )
    """
    path = folder / "fold_ppi.npz"
    known = GRAPH_KEYS | {"class_names", "network"}
    arrays = read_arrays(path, known)
    network = torch.from_numpy(integers(arrays, "network", str(path)))
    names = tuple(str(name) for name in arrays.get("class_names", ()))
    dataset = node_dataset(arrays, str(path), Target.classes(names))
    if network.shape != dataset.y.shape:
        raise DataError(
            f"{path}: network must have shape {tuple(dataset.y.shape)}, one number per "
            f"node, got {tuple(network.shape)}. Convert the dataset again."
        )
    row, col = dataset.edge_index
    if bool((network[row] != network[col]).any()):
        raise DataError(
            f"{path}: an edge joins nodes of two networks. Convert the dataset again."
        )
    entries = arrays["edge_index" if "edge_index" in arrays else "edges"].size // 2
    x = compact_features(dataset.x)
    dataset = replace(dataset, x=x, network=network, masks={}, messages=None)
    return Raw(dataset, entries)


def aifb(folder: Path) -> Raw:
    """Read AIFB (Ristoski et al., ISWC 2016) from ``aifb.npz``.

    The file holds ``node_types`` (A,) with ``num_nodes`` (A,), ``edge_types`` (R, 3), of
    which the edges from ``edge_ptr[r]`` to ``edge_ptr[r + 1]`` are rows of ``edge_src``
    and ``edge_dst`` (numbers within their types), ``target_type``, and ``y``,
    ``train_mask``, ``val_mask`` and ``test_mask`` of its nodes. Nodes have no features,
    and reverse relations are not listed. ``.`` replaces the ``#`` in names of relations,
    which may be names of files.
    """
    path = folder / "aifb.npz"
    arrays = read_arrays(path, {*AIFB, "num_classes"})
    if missing := [key for key in AIFB if key not in arrays]:
        raise DataError(
            f"{path}: the array {missing[0]} is missing. Get the file again."
        )
    where = str(path)
    sizes = integers(arrays, "num_nodes", where)
    source, target, start, y = (
        torch.from_numpy(integers(arrays, key, where))
        for key in ("edge_src", "edge_dst", "edge_ptr", "y")
    )
    kinds, triples = arrays["node_types"].tolist(), arrays["edge_types"].tolist()
    if len(start) != len(triples) + 1 or len(sizes) != len(kinds):
        raise DataError(f"{path}: edge_ptr or num_nodes has the wrong length.")
    tables = {
        kind: NodeTable(torch.empty(size, 0))
        for kind, size in zip(kinds, sizes.tolist(), strict=True)
    }
    relations = {
        (a, name.replace("#", "."), b): torch.stack(
            [source[start[r] : start[r + 1]], target[start[r] : start[r + 1]]]
        )
        for r, (a, name, b) in enumerate(triples)
    }
    names = tuple(map(str, range(int(y.max()) + 1)))
    masks = {part: torch.from_numpy(arrays[f"{part}_mask"]) for part in PARTS}
    wanted = TypedTarget(y, Target.classes(names), masks)
    predicted = str(arrays["target_type"])
    found = typed_dataset(where, tables, relations, predicted, wanted)
    return Raw(found, len(source))


AIFB = (
    *("node_types", "num_nodes", "edge_types", "edge_ptr", "edge_src", "edge_dst"),
    *("target_type", "y", *(f"{part}_mask" for part in PARTS)),
)
"""Arrays of AIFB."""
TWITCH_FEATURES = 3170
"""Feature ids of Twitch, 0 to 3169 over all countries; each country lacks some."""


def twitch(folder: Path, *, name: str) -> Raw:
    """Read the Twitch streamers of a country, e.g. ``DE`` (Rozemberczki et al., JCN 2021).

    The folder holds ``musae_NAME_edges.csv`` (``from,to``),
    ``musae_NAME_features.json`` (ids of the features by node) and
    ``musae_NAME_target.csv`` (``mature`` by ``new_id``). Features are binary, one
    column per feature id, the same columns for every country.

    Raises a DataError if a column is missing, a node has two labels or none, or a node
    or feature is out of range.
    """
    with (folder / f"musae_{name}_target.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"new_id", "mature"} <= rows[0].keys():
        raise DataError(
            f"{folder}: musae_{name}_target.csv needs the columns new_id and mature. "
            "Download it again."
        )
    labels = {(int(row["new_id"]), row["mature"] == "True") for row in rows}
    features = json.loads((folder / f"musae_{name}_features.json").read_text("utf-8"))
    table = [(int(node), int(f)) for node, ids in features.items() for f in set(ids)]
    edges = np.loadtxt(
        folder / f"musae_{name}_edges.csv", np.int64, delimiter=",", skiprows=1, ndmin=2
    )
    node, column = np.array(table, dtype=np.int64).reshape(-1, 2).T
    numbers = [number for number, _ in sorted(labels)]
    num_nodes = len(set(numbers))
    inside = (node < num_nodes) & (column < TWITCH_FEATURES) & (column >= 0)
    is_whole = numbers == list(range(num_nodes)) and bool(inside.all())
    if not is_whole or edges.max(initial=0) >= num_nodes:
        raise DataError(
            f"{folder}: the files of {name} do not fit each other: every node from 0 to "
            f"{num_nodes - 1} needs one label, and features are 0 to "
            f"{TWITCH_FEATURES - 1}. Download them again."
        )
    x = scipy.sparse.csr_matrix(
        (np.ones(len(node), dtype=np.float32), (node, column)),
        shape=(num_nodes, TWITCH_FEATURES),
    )
    return Raw.of(
        x=compact_features(csr_tensor(x)),
        edge_index=undirected_simple(torch.from_numpy(edges.T.copy()), num_nodes),
        y=torch.tensor([int(is_mature) for _, is_mature in sorted(labels)]),
        entries=len(edges),
        names=("not mature", "mature"),
    )


def collab_npz(folder: Path) -> Raw:
    """Read the TU dataset COLLAB from one ``COLLAB.npz`` instead of 300 MB of text.

    It holds ``num_nodes`` (G,), ``y`` (G,), ``edge_ptr`` (G+1,) and ``edge_u``, ``edge_v``
    (E,), the ends of each edge, numbered within its graph.

    Raises a DataError if an array is missing, unknown or does not hold integers.
    """
    path = folder / "COLLAB.npz"
    names = ("num_nodes", "y", "edge_ptr", "edge_u", "edge_v")
    arrays = read_arrays(path, names)
    num_nodes, y, edge_ptr, u, v = (integers(arrays, n, str(path)) for n in names)
    batch = np.repeat(np.arange(len(num_nodes)), num_nodes)
    first_node = np.cumsum(num_nodes) - num_nodes
    offset = np.repeat(first_node, np.diff(edge_ptr))
    edges = torch.from_numpy(np.stack([u + offset, v + offset]))
    return Raw.of(
        x=torch.empty((len(batch), 0)),
        edge_index=undirected_simple(edges, len(batch)),
        batch=torch.from_numpy(batch),
        y=torch.from_numpy(y),
    )


MOST_NAMES = 30
"""Names of targets that an error lists."""


def read_targets(y: Tensor, name: str) -> Tensor:
    """Convert the labels of several targets (n, T) to int8, and check them.

    1 if an item belongs to the target, 0 if not, NaN (in the result -1) if unknown.

    Raises a DataError if another number occurs.
    """
    values = y.nan_to_num(nan=-1.0) if y.is_floating_point() else y
    known = values[~y.isnan()] if y.is_floating_point() else values
    if bool(((known != 0) & (known != 1)).any()):
        raise DataError(
            f"{name}: expected labels of {y.shape[1]} targets that are 0 or 1, got other "
            "numbers. Download the dataset again."
        )
    return values.to(torch.int8)


def choose_target(
    dataset: NodeDataset | GraphDataset, chosen: str
) -> NodeDataset | GraphDataset:
    """Reduce several labels to one, with the classes ``no <target>`` and ``<target>``.

    The target ``all`` keeps all of them. Numbers are kept too; :func:`expect_target` then
    chooses. A node without a label stays in the graph, with class -1. A graph without one
    is left out, and a warning counts such graphs. A ConfigError says that there is no such
    target; a DataError that no graph has a label.
    """
    target, names = dataset.target, dataset.target.names
    if not target.has_numbers and chosen != ALL_TARGETS:
        if chosen not in names:
            raise ConfigError(
                f'target = "{chosen}" is not one of {dataset.name}. '
                f"{_list_of(chosen, names)}"
            )
        assert dataset.targets is not None
        y = dataset.targets[:, names.index(chosen)].to(torch.int64)
        target = Target.classes((f"no {chosen}", chosen))
        dataset = replace(dataset, y=y, target=target, targets=None)
    if isinstance(dataset, NodeDataset) or bool((dataset.y >= 0).all()):
        return dataset
    kept, total = (dataset.y >= 0).nonzero().flatten(), dataset.num_graphs
    if not len(kept):
        raise DataError(
            f'{dataset.name}: no graph has a label for target = "{chosen}".'
        )
    log.warning(
        '%s: %s of %s graphs have no label for target = "%s" and are left out.',
        dataset.name,
        total - len(kept),
        total,
        chosen,
    )
    part = GraphBatch(dataset.edge_index, dataset.batch, total).select(kept)
    messages = dataset.messages
    if messages is not None:
        sent = GraphBatch(messages.index, dataset.batch, total).select(kept)
        messages = replace(messages.select(sent.edges), index=sent.edge_index)
    return replace(
        dataset,
        x=select_rows(dataset.x, part.nodes),
        edge_index=part.edge_index,
        messages=messages,
        batch=part.batch,
        y=dataset.y[kept],
        masks={split: mask[kept] for split, mask in dataset.masks.items()},
        targets=None if dataset.targets is None else dataset.targets[kept],
    )


def _list_of(target: str, names: Sequence[str]) -> str:
    """Return the closest target and the list of targets, or the first of many."""
    if len(names) <= MOST_NAMES:
        return nearest(target, names)
    hint = nearest(target, names).partition("Known:")[0]
    shown = ", ".join(names[:MOST_NAMES])
    return f"{hint}It has {len(names)}: {shown}, …, {names[-1]}."
