"""Validation of datasets from any source, and of numbers that float32 does not hold."""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.agreement import marks_unknown, plain_spelling
from flower_fgl.core.errors import (
    DataError,
    ErrorCollector,
    clip,
    has_control_characters,
)
from flower_fgl.datasets.client_graph import EdgeTable, GraphDataset, NodeDataset
from flower_fgl.datasets.graph_files.archive import Array

__all__ = [
    "EXACT",
    "check_edge_features",
    "check_feature_names",
    "check_mask",
    "check_target_names",
    "check_texts",
    "check_whole_numbers",
    "doubtful_labels",
    "equal_cells",
    "inexact_columns",
    "validate_edges",
    "validate_graph_dataset",
    "validate_node_dataset",
]


LONGEST_NAME = 300
"""Characters of a class name or node id; the server accepts no longer class name."""
MOST_CLASSES = 10_000
FEWEST_IDS = 10
"""Classes from which labels may be ids: fewer are possible in a small graph."""


def check_target_names(names: Sequence[str], where: str, noun: str = "class") -> None:
    """Check the names of classes, labels or targets (``noun``) of a data owner.

    A DataError, which says ``where``, names one that is no text, occurs twice, also in
    another spelling such as ``Fraud`` and ``fraud`` or ``1`` and ``1.0``, is longer
    than 300 characters, or contains a control character; or there are more than 10,000.
    """
    check_texts(names, where)
    if len(names) > MOST_CLASSES:
        raise DataError(
            f"{where} has {len(names):,} {_plural(noun)}, the limit is {MOST_CLASSES:,}."
            + " Check that the labels are classes, not ids or numbers to predict."
            * (noun == "class")
        )
    if len(set(names)) < len(names):
        raise DataError(f"{where} names a {noun} twice. Give each {noun} its own name.")
    for name in names:
        if len(name) > LONGEST_NAME or has_control_characters(name):
            raise DataError(
                f'{where}: {noun} "{clip(name)}" must be one line of at most '
                f"{LONGEST_NAME} characters. Shorten it, or remove the control characters."
            )
    spellings: dict[str, str] = {}
    for name in names:
        other = spellings.setdefault(plain_spelling(name), name)
        if other != name:
            raise DataError(
                f'{where} spells a {noun} "{clip(other)}" and "{clip(name)}". Spell it in '
                f"one way; two {_plural(noun)} need names that differ in more than capital "
                "letters, blanks, or the form of a number."
            )


def _plural(noun: str) -> str:
    """Return ``classes``, ``labels`` or ``targets``."""
    return f"{noun}es" if noun == "class" else f"{noun}s"


def doubtful_labels(
    y: Tensor,
    names: Sequence[str],
    declared: Collection[str] = (),
    *,
    item: str = "node",
    unknown: str = "",
    declare: str = "",
) -> str:
    """Describe labels that are probably no classes: markers of unknown ones, or ids.

    ``y`` (N,) are classes in [-1, C) of the items (nodes, edges or graphs) with the
    ``names``; the owner has confirmed those ``declared``. ``unknown`` and ``declare`` say
    how to mark an item of unknown class, and how to confirm a class. The result is empty
    without doubt.
    """
    counts = torch.bincount(y[y >= 0], minlength=len(names)).tolist()
    sure = set(declared)
    held = {n: c for n, c in zip(names, counts, strict=True) if c and n not in sure}
    labelled = sum(counts)
    marks = {name: count for name, count in held.items() if marks_unknown(name)}
    if marks:
        listed = " or ".join(f'"{clip(name)}"' for name in marks)
        return (
            f"{sum(marks.values()):,} of {labelled:,} labelled {item}s have the class "
            f"{listed}, which usually means that their class is unknown. {unknown} if it "
            f"is. If it is a class of its own, {declare}."
        )
    if len(held) >= FEWEST_IDS and 2 * len(held) > labelled:
        return (
            f"{labelled:,} labelled {item}s have {len(held):,} different classes, such as "
            f'"{clip(next(iter(held)))}". These look like names, ids or numbers to '
            "predict, and the names of classes leave their owner. Correct the labels. If "
            f"they are classes, {declare}."
        )
    return ""


def check_feature_names(names: Sequence[str], where: str) -> None:
    """Check that feature columns have different names, each of 1 to 300 characters."""
    check_texts(names, f"{where}: feature_names")
    bad = [
        name
        for name in names
        if not name.strip() or not name.isprintable() or len(name) > LONGEST_NAME
    ]
    if bad or len(set(names)) < len(names):
        what = f"got {bad[0][:50]!r}" if bad else "a name occurs twice"
        raise DataError(
            f"{where}: the features need different names, each one line of 1 to "
            f"{LONGEST_NAME} characters; {what}."
        )


def check_texts(names: Sequence[object], where: str) -> None:
    """Reject a single text in place of a list, and names that are no texts."""
    wrong = [name for name in names if not isinstance(name, str)]
    if isinstance(names, str) or wrong:
        shown = names if isinstance(names, str) else wrong[0]
        raise DataError(f"{where} must be a list of texts, got {clip(repr(shown))}.")


def validate_node_dataset(
    dataset: NodeDataset, attempts: ErrorCollector | None = None
) -> None:
    """Check that a graph meets the requirements of :class:`NodeDataset`.

    By default the first DataError is raised; ``attempts`` may collect them.
    """
    num_nodes, name = dataset.num_nodes, dataset.name
    attempt = attempts or ErrorCollector()
    attempt(_check_features, dataset.x, num_nodes, name)
    attempt(_check_labels, dataset.y, dataset.target.width, name, lowest=-1)
    attempt(_check_edges, dataset.edge_index, num_nodes, name)
    shapes = [
        attempt(check_mask, f"{mask}_mask", member, num_nodes, name)
        for mask, member in dataset.masks.items()
    ]
    if None not in shapes:
        attempt(_check_disjoint, dataset.masks, name)
    network = dataset.network
    if network is not None and network.shape != (num_nodes,):
        raise DataError(
            f"{name}: network must hold one number per node, shape ({num_nodes},), "
            f"got {tuple(network.shape)}."
        )


def check_mask(
    key: str, mask: Tensor, number: int, name: str, item: str = "node"
) -> bool:
    """Check dtype and shape of a mask; return ``True``, or say how to convert it."""
    if mask.dtype == torch.bool and mask.shape == (number,):
        return True
    is_whole = not mask.is_floating_point() and not mask.is_complex()
    if mask.dtype == torch.bool:
        remedy = f"It needs one value for each {item}."
    elif mask.shape == (number,) and bool(((mask == 0) | (mask == 1)).all()):
        remedy = f"Its values are 0 and 1: convert it, {key} = {key} != 0."
    elif is_whole and mask.dim() == 1 and bool(((mask >= 0) & (mask < number)).all()):
        remedy = (
            f"It seems to list the numbers of {item}s. Convert it: mask = "
            f"numpy.zeros({number}, dtype=bool); mask[{key}] = True."
        )
    else:
        remedy = f"Save True or False for each {item}."
    raise DataError(
        f"{name}: {key} must be bool of shape ({number},), got {str(mask.dtype)[6:]} of "
        f"shape {tuple(mask.shape)}. {remedy}"
    )


def _check_disjoint(masks: Mapping[str, Tensor], name: str, item: str = "node") -> None:
    """Reject masks that share a node, e.g. for training and testing."""
    for (one, first), (other, second) in itertools.combinations(masks.items(), 2):
        shared = int((first & second).sum())
        if shared:
            raise DataError(
                f'{name}: {shared} {item}s are in both masks "{one}" and "{other}". '
                f"Assign each {item} to at most one of train, val and test."
            )


def validate_graph_dataset(
    dataset: GraphDataset, *, may_be_unknown: bool = False
) -> None:
    """Check that a set of graphs meets the requirements of :class:`GraphDataset`.

    With ``may_be_unknown`` a label may be -1. A DataError also says that a graph has no
    nodes, or that an edge joins two graphs.
    """
    batch, name = dataset.batch, dataset.name
    _check_features(dataset.x, batch.numel(), name)
    lowest = -1 if may_be_unknown else 0
    _check_labels(dataset.y, dataset.target.width, name, lowest=lowest)
    _check_edges(dataset.edge_index, batch.numel(), name)
    for mask, member in dataset.masks.items():
        check_mask(f"{mask}_mask", member, dataset.num_graphs, name, "graph")
    _check_disjoint(dataset.masks, name, "graph")
    is_ascending = batch.numel() == 0 or bool((batch.diff() >= 0).all())
    out_of_range = bool(((batch < 0) | (batch >= dataset.num_graphs)).any())
    if not is_ascending or out_of_range:
        raise DataError(
            f"{name}: batch must hold the graph of each node, ascending and in "
            f"[0, {dataset.num_graphs}). Sort the nodes by graph."
        )
    sizes = torch.bincount(batch, minlength=dataset.num_graphs)
    empty = (sizes == 0).nonzero().flatten().tolist()
    if empty:
        raise DataError(
            f"{name}: {len(empty):,} graphs have no nodes, the first is graph {empty[0]}. "
            "Remove them; torch_geometric.utils.from_smiles returns such a graph for a "
            "SMILES that it cannot read."
        )
    row, col = dataset.edge_index
    if (across := (batch[row] != batch[col]).nonzero().flatten()).numel():
        a, b = int(row[across[0]]), int(col[across[0]])
        raise DataError(
            f"{name}: an edge joins nodes of two graphs, node {a} of graph {batch[a]} and "
            f"node {b} of graph {batch[b]}. Remove such edges."
        )


def validate_edges(table: EdgeTable, name: str) -> None:
    """Check the classes, features, times and split of edges whose ends were checked."""
    num_edges = table.pairs.shape[1]
    parts = {"edge_label": table.y}
    if table.time is not None:
        parts["edge_time"] = table.time
    for key, tensor in parts.items():
        if tensor.dim() != 1 or len(tensor) != num_edges:
            raise DataError(_edge_shape(tensor, key, num_edges, name))
    for part, mask in table.masks.items():
        check_mask(f"edge_{part}_mask", mask, num_edges, name, "edge")
    _check_labels(table.y, table.target.width, f"{name}, edges", lowest=-1)
    check_edge_features(table.x, num_edges, name)
    if table.time is not None and not bool(table.time.isfinite().all()):
        raise DataError(
            f"{name}: edge_time holds NaN or infinite values. Give every edge a time, or "
            "remove the array."
        )
    if table.time is not None and bool((table.time.diff() < 0).any()):
        place = int((table.time.diff() < 0).nonzero()[0, 0]) + 1
        raise DataError(
            f"{name}: edge_time goes backwards at edge {place}, from "
            f"{float(table.time[place - 1]):.15g} to {float(table.time[place]):.15g}. "
            "Sort the edges by time. An hour of the day, which starts again every day, is "
            "no time."
        )
    if table.masks and set(table.masks) != {"train", "val", "test"}:
        raise DataError(
            f"{name}: a split of edges needs edge_train_mask, edge_val_mask and "
            f"edge_test_mask, got {', '.join(f'edge_{m}_mask' for m in table.masks)}."
        )
    _check_disjoint(table.masks, f"{name}, edges", "edge")


def check_edge_features(x: Tensor, num_edges: int, name: str) -> None:
    """Check that edges have one row of finite features each."""
    if x.dim() != 2 or len(x) != num_edges:
        raise DataError(_edge_shape(x, "edge_attr", num_edges, name))
    if not _all_finite(x):
        raise DataError(
            f"{name}: edge_attr holds NaN or infinite values. Impute them, or drop these "
            "edges or columns."
        )


def _all_finite(values: Tensor) -> bool:
    """Return whether all values are finite; ``isfinite`` copies them twice."""
    return not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all())


def _edge_shape(tensor: Tensor, key: str, num_edges: int, name: str) -> str:
    """Say that an array has another number of rows than there are edges."""
    return (
        f"{name}: {key} must hold one entry for each of the {num_edges} edges of the file, "
        f"got shape {tuple(tensor.shape)}."
    )


def _check_features(x: Tensor, num_nodes: int, name: str) -> None:
    """Check dtype, shape and finite values of features."""
    if x.dtype != torch.float32 or x.dim() != 2 or x.shape[0] != num_nodes:
        raise DataError(
            f"{name}: features must be float32 of shape ({num_nodes}, d), got "
            f"{x.dtype} of shape {tuple(x.shape)}."
        )
    values = x.values() if x.layout == torch.sparse_csr else x
    if _all_finite(values):
        return
    if x.layout == torch.sparse_csr:
        entry = int((~values.isfinite()).nonzero()[0, 0])
        node = int(torch.searchsorted(x.crow_indices(), entry, right=True)) - 1
        column = int(x.col_indices()[entry])
    else:
        node, column = (int(i) for i in (~values.isfinite()).nonzero()[0])
    bad = int((~values.isfinite()).sum())
    raise DataError(
        f"{name}: {bad:,} feature values are NaN or infinite, the first at node "
        f"{node}, column {column}. Impute them, or drop these nodes or columns."
    )


def _check_labels(y: Tensor, num_classes: int, name: str, *, lowest: int) -> None:
    """Check dtype, shape and range of labels."""
    if y.dtype != torch.int64 or y.dim() != 1:
        raise DataError(
            f"{name}: labels must be int64 with one dimension, got {y.dtype} of shape "
            f"{tuple(y.shape)}."
        )
    wrong = ((y < lowest) | (y >= num_classes)).nonzero()
    if wrong.numel():
        first = int(wrong[0, 0])
        raise DataError(
            f"{name}: {len(wrong):,} labels are outside [{lowest}, {num_classes}), the "
            f"first is y[{first}] = {int(y[first])}. There are {num_classes} classes"
            + (" and -1 means unknown." if lowest < 0 else ".")
            + f" Number them 0 to {num_classes - 1}, or correct the names of the classes."
        )


def _check_edges(edge_index: Tensor, num_nodes: int, name: str) -> None:
    """Check that edges are in range, undirected, simple and sorted."""
    is_pairs = edge_index.dim() == 2 and edge_index.shape[0] == 2
    if edge_index.dtype != torch.int64 or not is_pairs:
        raise DataError(
            f"{name}: edge_index must be int64 of shape (2, 2E), got "
            f"{edge_index.dtype} of shape {tuple(edge_index.shape)}."
        )
    if edge_index.numel() == 0:
        return
    row, col = edge_index
    if int(edge_index.min()) < 0 or int(edge_index.max()) >= num_nodes:
        raise DataError(
            f"{name}: edges name nodes {int(edge_index.min())} to "
            f"{int(edge_index.max())}, but nodes are numbered 0 to {num_nodes - 1}."
        )
    is_sorted = bool(((row * num_nodes + col).diff() > 0).all())
    degrees = [end.bincount(minlength=num_nodes) for end in edge_index]
    is_two_way = torch.equal(*degrees)
    if not is_sorted or not is_two_way or bool((row == col).any()):
        raise DataError(
            f"{name}: edges must be undirected and simple: both directions, sorted by "
            "(row, column), without self-loops or duplicates. Pass them through "
            "undirected_simple()."
        )


EXACT = 1 << 24
"""Largest absolute value up to which float32 holds every whole number."""
EXACT_DOUBLE = 1 << 53
"""The same for float64."""
WHOLE = re.compile(r"[+-]?[0-9]+(\.0*)?")
REMEDY = (
    "are one value as float32, which is exact up to 16,777,216. Subtract the same offset "
    "at all owners (from times e.g. the first one), use a coarser unit, or leave the "
    "column out if it is an id."
)


def check_whole_numbers(
    values: Array, where: str, names: Sequence[str] = (), columns: Array | None = None
) -> None:
    """Reject a column of whole numbers of which two become equal as float32.

    float32 holds whole numbers exactly up to 2^24 = 16,777,216. Account numbers and Unix
    times are larger: 1,700,000,000 and 1,700,000,050 are one number there. ``values`` are
    features (N, d) in the dtype of their file, or with ``columns`` (n,) the values (n,)
    of a sparse matrix in these columns. The DataError names the column and two such
    numbers.

    A column with any fraction is no column of whole numbers: it was measured, and
    float32 holds seven of its digits. :func:`~flower_fgl.datasets.suspect.suspect_data`
    notes it if that is too few.
    """
    is_float = values.dtype.kind == "f"
    exact_bytes = 4 if is_float else 2
    if values.dtype.kind not in "fiu" or values.dtype.itemsize <= exact_bytes:
        return
    is_large = (values > EXACT) | (values < -EXACT)
    if (columns is None and values.ndim != 2) or not is_large.any():
        return
    found = columns[is_large] if columns is not None else is_large.nonzero()[1]
    for column in np.unique(found).tolist():
        cells = values[:, column] if columns is None else values[columns == column]
        if is_float and (cells != np.floor(cells)).any():
            continue
        numbers = np.unique(cells)
        if is_float:  # above, float64 is not exact either
            numbers = numbers[np.abs(numbers) < EXACT_DOUBLE]
        short = numbers.astype(np.float32)
        same = (short[1:] == short[:-1]).nonzero()[0]
        if len(same):
            one, other = (int(number) for number in numbers[same[0] : same[0] + 2])
            name = f'"{clip(names[column])}"' if len(names) > column else str(column)
            raise DataError(f"{where}, column {name}: {one} and {other} {REMEDY}")


def inexact_columns(wide: Array, short: Array) -> set[int]:
    """Return the columns with a whole number that float32 does not hold.

    ``wide`` and ``short`` (n, d) are the same rows before and after conversion.
    """
    size = np.abs(wide)
    if size.max(initial=0.0) <= EXACT:
        return set()
    is_inexact = (size >= EXACT_DOUBLE) | ((size > EXACT) & (wide != short))
    is_inexact &= wide == np.floor(wide)
    return set(is_inexact.any(axis=0).nonzero()[0].tolist())


def equal_cells(
    rows: Iterable[tuple[int, list[str]]], places: Iterable[int]
) -> dict[int, str]:
    """Find columns of a CSV table in which two whole numbers become equal as float32.

    ``rows`` are line number and cells of each row, and ``places`` the columns to check.
    The result says what is wrong with a column, with the numbers as they are in the
    table. Numbers with more digits than float64 holds are compared exactly.
    """
    seen: dict[int, dict[float, tuple[int, int]]] = {place: {} for place in places}
    found: dict[int, str] = {}
    for line, row in rows:
        for place in [*seen]:
            cell = row[place].strip()
            if not WHOLE.fullmatch(cell):  # a column of other numbers
                del seen[place]
                found.pop(place, None)
                continue
            number = int(cell.partition(".")[0])
            if abs(number) < EXACT or place in found:
                continue
            short = float(np.float32(float(number)))
            other, first = seen[place].setdefault(short, (number, line))
            if other != number:
                found[place] = (
                    f"{other} (line {first}) and {number} (line {line}) {REMEDY}"
                )
    return found
