"""Attributes of a ``torch_geometric.data.Data``, its split included, read and checked."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.held_kind import kind_of_most
from flower_fgl.core.schema import has_name
from flower_fgl.core.targets import CLASSES, EDGE, NUMBERS, Target, TargetKind
from flower_fgl.datasets.client_graph import MessageEdges
from flower_fgl.datasets.graph_files.own_split import PARTS, split_names
from flower_fgl.datasets.graph_files.target_arrays import (
    TargetValues,
    read_names,
    read_values,
)
from flower_fgl.datasets.graph_files.validate import (
    MOST_CLASSES,
    check_edge_features,
    check_feature_names,
    check_mask,
    check_target_names,
    check_whole_numbers,
)
from flower_fgl.datasets.transforms.canonical import compact_features, undirected_simple

__all__ = [
    "EDGE_LABELS",
    "check_columns",
    "check_numbering",
    "held_kind",
    "joined",
    "own_masks",
    "read_edges",
    "read_features",
    "read_index",
    "read_inputs",
    "read_target",
    "read_times",
    "real_tensor",
    "unread_of_plain",
]


log = logging.getLogger(__name__)

EDGE_LABELS = ("edge_label", "edge_y")
KINDS = ("node_type", "edge_type")
TARGET_KEYS = ("y_mask", "target_names", "target_units", "label_names")
READ = {"x", "edge_index", "edge_attr", "y", "num_nodes", *KINDS}
READ_WITH_LABELS = {*EDGE_LABELS, "edge_time"}
BOOKKEEPING = {"batch", "ptr", "n_id", "e_id", "input_id", "batch_size"}
"""Attributes that PyG adds to batches and sampled graphs."""
SPARSEST = 10
"""Classes per class with an item, above which ``y`` holds no class numbers."""
MORE_DIGITS = (torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64)
"""Types of numbers that float32 may not hold."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def real_tensor(found: Any, key: str, name: str) -> Any:
    """Return an attribute on the CPU, if it is there; reject what is no real tensor."""
    if found is None:
        return None
    if not isinstance(found, Tensor):
        raise DataError(
            f"{name}: {key} must be a torch.Tensor, got {type(found).__name__}. Convert "
            f"it, e.g. with torch.as_tensor({key})."
        )
    if found.is_complex():
        raise DataError(f"{name}: {key} must hold real numbers, got {found.dtype}.")
    return found.detach().cpu()


def read_inputs(
    data: Any, name: str, names: Sequence[str] = ()
) -> tuple[Tensor, Tensor]:
    """Return features and undirected simple edges of a graph with one kind of each."""
    x = read_features(data.x, name, names)
    edge_index = read_index(data.edge_index, name, (len(x), len(x)))
    return x, undirected_simple(edge_index, len(x))


def read_features(x: Any, name: str, names: Sequence[str] = ()) -> Tensor:
    """Return features (N, d) in the smaller of two layouts; ``names`` of its columns."""
    x = real_tensor(x, "x", name)
    if x is None or x.dim() != 2 or 0 in x.shape:
        got = "none" if x is None else tuple(x.shape)
        raise DataError(
            f"{name}: expected features x of shape (nodes, features), neither of them 0, "
            f"got {got}. Without features, add some, e.g. "
            "torch_geometric.transforms.OneHotDegree."
        )
    is_sparse = x.layout == torch.sparse_csr
    x = x if is_sparse else x.to_dense()
    if x.dtype in MORE_DIGITS:
        values = (x.values() if is_sparse else x).numpy()
        columns = x.col_indices().numpy() if is_sparse else None
        check_whole_numbers(values, f"{name}: x", names, columns)
    return compact_features(x.to(torch.float32))


def read_index(edge_index: Any, name: str, sizes: tuple[int, int]) -> Tensor:
    """Return edges (2, M), int64, between nodes of which there are ``sizes``."""
    edge_index = real_tensor(edge_index, "edge_index", name)
    is_edges = edge_index is not None and edge_index.layout == torch.strided
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
    index: Tensor = edge_index.to(torch.int64)
    for row, size in zip(index, sizes, strict=True):
        if bool(((row < 0) | (row >= size)).any()):
            low, high = (int(v) for v in index.aminmax())
            raise DataError(
                f"{name}: edge_index names nodes {low} to {high}, but x has the rows 0 to "
                f"{size - 1}."
            )
    return index


def read_edges(data: Any, name: str, names: Sequence[str] = ()) -> MessageEdges:
    """Return the edges with their features, in the order of ``edge_index``.

    ``names`` are those of the columns of ``edge_attr``.
    """
    index = data.edge_index.detach().cpu().to(torch.int64)
    x = real_tensor(data.get("edge_attr"), "edge_attr", name)
    x = torch.zeros(index.shape[1], 0) if x is None else x.to_dense()
    x = x[:, None] if x.dim() == 1 else x
    if x.dtype in MORE_DIGITS:
        check_whole_numbers(x.numpy(), f"{name}: edge_attr", names)
    x = x.float()
    check_edge_features(x, index.shape[1], name)
    check_columns(names, x, name, "edge")
    return MessageEdges(index, x, tuple(names))


def joined(graphs: Sequence[Any], name: str, keys: Sequence[str]) -> Any:
    """Return graphs as one with their edges, and attributes that all or none have.

    ``batch`` is the graph of each node.
    """
    from torch_geometric.data import Data

    for key in keys:
        shapes = [getattr(graph.get(key), "shape", None) for graph in graphs]
        widths = [shape and shape[1:] for shape in shapes]
        odd = next((i for i, width in enumerate(widths) if width != widths[0]), 0)
        if odd:
            one, other = (
                "is missing" if shape is None else f"has shape {tuple(shape)}"
                for shape in (shapes[0], shapes[odd])
            )
            raise DataError(
                f"{name}: {key} {one} in graph 0, but {other} in graph {odd}. Give all "
                "graphs the same columns."
            )
    parts: dict[str, list[Tensor]] = {"edge_index": []}
    sizes: list[int] = []
    for number, graph in enumerate(graphs):
        where = f"graph {number} of {name}"
        found = {key: real_tensor(graph.get(key), key, where) for key in keys}
        held = {key: one.to_dense() for key, one in found.items() if one is not None}
        rows = held["x"].shape[:1] if "x" in held else (graph.num_nodes,)
        size = int(next(iter(rows), 0) or 0)
        index = read_index(graph.get("edge_index"), where, (size, size))
        for key, one in held.items():
            is_edge = key.startswith("edge")
            items, what = (index.shape[1], "edges") if is_edge else (size, "nodes")
            if one.shape[:1] != (items,):
                raise DataError(
                    f"{where}: {key} must hold one entry for each of the {items} {what}, "
                    f"got shape {tuple(one.shape)}."
                )
            parts.setdefault(key, []).append(one)
        parts["edge_index"].append(index)
        sizes.append(size)
    # much faster than a Batch of many small graphs
    first = torch.tensor([0, *sizes]).cumsum(0)
    shift = first[:-1].repeat_interleave(
        torch.tensor([index.shape[1] for index in parts["edge_index"]])
    )
    edge_index = torch.cat(parts.pop("edge_index"), dim=1) + shift
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    columns = {key: torch.cat(rows) for key, rows in parts.items()}
    return Data(edge_index=edge_index, batch=batch, num_nodes=len(batch), **columns)


def unread_of_plain(data: Any, *, has_values: bool, is_set: bool = False) -> set[str]:
    """Return the attributes with which a graph with one kind of nodes is not read.

    If it is one of a set, neither a split nor classes of edges are read.
    """
    has_labels = not is_set and any(data.get(k) is not None for k in EDGE_LABELS)
    known = READ | BOOKKEEPING | (READ_WITH_LABELS if has_labels else set())
    known |= set(TARGET_KEYS) if has_values else set()
    used = [key for key in set(data.keys()) if has_labels or "edge" not in key]
    parts, _ = split_names([] if is_set else used)
    return set(data.keys()).difference(known, *parts.values())


def read_labels(data: Any, name: str, key: str = "y") -> Tensor:
    """Return one class per node, graph or edge."""
    y = real_tensor(data.get(key), key, name)
    item = "node" if key == "y" else "edge"
    if y is None or (y.dim() == 2 and y.shape[1] != 1) or y.dim() > 2:
        got = "none" if y is None else tuple(y.shape)
        raise DataError(
            f"{name}: expected {key} with one class each, of shape ({item}s,), got {got}. "
            'For several labels or numbers of each item set target-kind = "labels" or '
            '"numbers".'
        )
    y = y.flatten()
    if y.is_floating_point():
        has_nan = bool(y.isnan().any())
        cast = "nan_to_num(-1).long()" if has_nan else "long()"
        raise DataError(
            f"{name}: {key} must hold class numbers 0, 1, … (-1 if unknown), got "
            f"{y.dtype}{' with NaN' if has_nan else ''}. If these are classes, convert "
            f"them to integers: data.{key} = data.{key}.{cast}. Set target-kind = "
            '"numbers" to predict them as numbers.'
        )
    found: Tensor = y.to(torch.int64)
    return found


def held_kind(
    graphs: Any, *, setting: str, target: str = "", relation: str = ""
) -> TargetKind:
    """Return numbers if what a run predicts of most graphs has a fraction; else classes.

    Of a ``HeteroData`` only the nodes of the kind ``target``, or the edges of the
    ``relation``, count. A set is read as a whole. Integers among numbers are an error.
    """
    listed = graphs if isinstance(graphs, list | tuple) else [graphs]
    held = [_held_kinds(graph, setting, target, relation) for graph in listed]
    if setting == "graph":
        return NUMBERS if any(NUMBERS in kinds for kinds in held) else CLASSES
    own = [NUMBERS if NUMBERS in kinds else CLASSES for kinds in held if kinds]
    kind = kind_of_most(own)
    if kind == NUMBERS and {CLASSES} in held:
        key = "edge_label" if setting == EDGE else "y"
        raise DataError(
            f"graph {held.index({CLASSES})} of the list: {key} holds integers, which are "
            "classes, but most graphs hold numbers with fractions. Convert it to floats if "
            'it holds numbers, too, or set target-kind = "numbers".'
        )
    return kind


def _held_kinds(
    graph: Any, setting: str, target: str, relation: str
) -> set[TargetKind]:
    """Return what a graph holds; floats without a fraction may be either, thus nothing."""
    stores = getattr(graph, "stores", ())
    if hasattr(graph, "node_items"):  # a HeteroData
        nodes = [own for kind, own in graph.node_items() if target in ("", kind)]
        edges = [own for one, own in graph.edge_items() if has_name(one, relation)]
        stores = {"graph": stores[:1], EDGE: edges}.get(setting, nodes)
    found: set[TargetKind] = set()
    for store in stores:
        for key in EDGE_LABELS if setting == EDGE else ("y",):
            y = store.get(key)
            if isinstance(y, Tensor) and not y.is_floating_point():
                found.add(CLASSES)
            elif isinstance(y, Tensor) and bool(y.nan_to_num().frac().any()):
                found.add(NUMBERS)
    return found


def read_times(data: Any, name: str) -> Tensor | None:
    """Return the times of the edges, float64, if they have any."""
    time = real_tensor(data.get("edge_time"), "edge_time", name)
    return None if time is None else time.to(torch.float64)


def read_target(
    data: Any,
    name: str,
    given: Target | None,
    names: Sequence[str] | None,
    num_items: int,
    *,
    key: str = "y",
    item: str = "node",
) -> TargetValues:
    """Return what is predicted of each item: ``given`` values, or classes."""
    if given is not None:
        return _read_several(data, name, given, num_items, key, item)
    y = read_labels(data, name, key)
    if item != "edge" and y.numel() != num_items:  # edges are validated with others
        raise DataError(
            f"{name}: expected one class for each of the {num_items} {item}s, got "
            f"{y.numel()}."
        )
    return TargetValues(Target.classes(_name_classes(y, names, name, item)), y)


def _read_several(
    data: Any, name: str, given: Target, num_items: int, key: str, item: str
) -> TargetValues:
    """Return labels or numbers of each node, graph or edge; ``given`` may lack names.

    They are then those of the graph's attributes, or numbers, and ``target`` of a single
    column. ``y_mask`` (I, T) is False where a value is unknown.
    """
    prefix = "edge_" if item == "edge" else ""
    y = real_tensor(data.get(key), key, name)
    mask = None if prefix else real_tensor(data.get("y_mask"), "y_mask", name)
    held = prefix + ("target_names" if given.has_numbers else "label_names")
    units_held = f"{prefix}target_units"
    if y is None or y.dim() not in (1, 2):
        got = "none" if y is None else tuple(y.shape)
        raise DataError(
            f"{name}: expected {key}, real numbers of shape ({item}s, {given.noun}s), got "
            f"{got}."
        )
    values = y.to(torch.float64)
    values = values[:, None] if values.dim() == 1 else values
    if mask is not None:
        known = mask.bool()
        known = known[:, None] if known.dim() == 1 else known
        if known.shape != values.shape:
            raise DataError(
                f"{name}: y_mask must have the shape of y, {tuple(values.shape)}, got "
                f"{tuple(known.shape)}."
            )
        values = values.masked_fill(~known, torch.nan)
    names = given.names or _texts(data, held, name)
    if not names:
        width = values.shape[1]
        names = ("target",) if width == 1 else tuple(map(str, range(width)))
    stored = "edge_target" if prefix else "y"
    arrays = {stored: values.numpy(), held: np.array(names, dtype=np.str_)}
    if units := given.units or _texts(data, units_held, name):
        arrays[units_held] = np.array(units, dtype=np.str_)
    if not given.has_numbers:
        whole = values.nan_to_num(nan=-1.0)
        arrays["y"] = (
            whole.long() if bool((whole == whole.round()).all()) else whole
        ).numpy()
    target = read_names(arrays, name, item=item)
    return read_values(arrays, name, target, num_items, item=item)


def _texts(data: Any, key: str, name: str) -> tuple[str, ...]:
    """Return the texts of an attribute, empty without it."""
    found = data.get(key)
    if found is None:
        return ()
    if not isinstance(found, list | tuple) or not all(
        isinstance(t, str) for t in found
    ):
        raise DataError(f"{name}: {key} must be a list of texts, got {found!r:.80}.")
    return tuple(found)


def check_numbering(y: Tensor, name: str, item: str = "node") -> None:
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


def _name_classes(
    y: Tensor, names: Sequence[str] | None, where: str, item: str
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
    check_target_names(names, f"{where}: class_names")
    return tuple(names)


def check_columns(names: Sequence[str], x: Tensor, where: str, of: str = "") -> None:
    """Check the names of the columns of ``x``, or with ``of`` of ``edge_attr``."""
    check_feature_names(names, f"{where}, edges" if of else where)
    if len(names) not in (0, x.shape[-1]):
        key, what = ("edge_attr", "edge feature") if of else ("x", "feature")
        raise DataError(
            f"{where}: {key} has {x.shape[-1]} columns, but there are {len(names)} {what} "
            "names."
        )


def own_masks(
    data: Any, name: str, of: str = "", *, size: int | None = None
) -> dict[str, Tensor]:
    """Return the split of a graph's nodes, or with ``of`` = ``edge_`` of its edges.

    ``size`` is the number of nodes, by default that of the rows of ``x``. The attributes
    are bool, such as ``train_mask``, or numbers of items, such as ``valid_idx``.
    """
    if size is None:
        size = int(data.edge_index.shape[1] if of else data.x.shape[0])
    held = {
        key: value
        for key, value in data.to_dict().items()
        if ("edge" in key) == bool(of)
        and isinstance(value, Tensor | np.ndarray | list | tuple | dict)
        and getattr(value, "shape", (1,)) != ()
    }
    parts, whole = split_names(held)
    whole = [k for k in whole if isinstance(held[k], dict) or len(held[k]) == size]
    if whole:
        raise DataError(
            f"{name}: {whole[0]} looks like a split, which cannot be read in this form. "
            f"Set data.{of}train_mask, data.{of}val_mask and data.{of}test_mask, bool of "
            f"shape ({size},); torch_geometric.utils.index_to_mask makes them from "
            "numbers."
        )
    if not parts:
        return {}
    for part in PARTS:
        if part not in parts:
            found = [key for keys in parts.values() for key in keys]
            raise DataError(
                f"{name} has {', '.join(found)} but no {of}{part}_mask. Add it (all False "
                "without any), or remove the masks: a split is then sampled."
            )
    item, masks = of.removesuffix("_") or "node", {}
    for part, keys in parts.items():
        same = [_mask(held[key], key, size, name, item) for key in keys]
        if any(not torch.equal(same[0], mask) for mask in same[1:]):
            raise DataError(f"{name}: {' and '.join(keys)} differ. Remove one of them.")
        masks[part] = same[0]
    return masks


def _mask(value: Any, key: str, size: int, name: str, item: str) -> Tensor:
    """Return one attribute as a mask of items."""
    try:
        values = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):  # a dict, texts, or lists of lists
        values = torch.empty(0, 0, 0)
    if values.dim() == 2:
        raise DataError(
            f"{name}: {key} holds {values.shape[1]} splits. Choose one, e.g. "
            f"data.{key} = data.{key}[:, 0]."
        )
    if values.dtype == torch.bool or "mask" in key.lower():
        check_mask(key, values, size, name, item)
        return values
    is_real = values.is_floating_point() or values.is_complex()
    if values.dim() == 1 and not (is_real and values.numel()):  # floats are the default
        mask = torch.zeros(size, dtype=torch.bool)
        numbers = values.to(torch.int64)
        if bool(((numbers >= 0) & (numbers < size)).all()):
            mask[numbers] = True
        if int(mask.sum()) == len(numbers):
            return mask
    raise DataError(
        f"{name}: {key} must be a mask, bool of shape ({size},), or a list of different "
        f"numbers from 0 to {size - 1}."
    )
