"""Kind of target that graph files hold, from the names of their arrays and columns."""

import csv
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from flower_fgl.core.options import Scalar
from flower_fgl.core.settings import NUMBER_DATASETS, is_file, without_names
from flower_fgl.core.targets import CLASSES, EDGE, LABELS, LINK, NUMBERS, TargetKind

__all__ = ["AUTO", "BROKEN_ARCHIVE", "LABEL", "TARGET", "kind_of_column"]
__all__ += ["kind_of_most", "with_held_kind"]

AUTO = "auto"
LABEL, TARGET = "label:", "target:"
"""Beginnings of the names of columns of labels and of numbers."""
BROKEN_ARCHIVE = (
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions of ``zipfile`` for malformed archives."""


def with_held_kind(
    values: Mapping[str, Scalar], files: Iterable[Path] | None = None
) -> Mapping[str, Scalar]:
    """Return a flat run config in which ``auto`` is the kind that most graph files hold.

    The files are by default those of ``owners``, else that of ``dataset``. The run config
    is returned unchanged if ``target-kind`` is set, or if no other kind than classes has a
    majority. Only names are read: the reader of the files reports what is wrong with them.
    """
    if values.get("target-kind", AUTO) != AUTO or values.get("setting") == LINK:
        return values
    held = _kinds(values) if files is None else (_kind(f, values) for f in files)
    kind = kind_of_most(held)
    return values if kind == CLASSES else {**values, "target-kind": kind}


def kind_of_most(kinds: Iterable[TargetKind]) -> TargetKind:
    """Return the kind of more than half of all; classes if there is none."""
    counts = Counter(kinds)
    kind = max(counts, key=counts.__getitem__, default=CLASSES)
    return kind if 2 * counts[kind] > counts.total() else CLASSES


def kind_of_column(column: str, *, of_edges: bool) -> TargetKind | None:
    """Return what a column of a table holds; ``None`` if it is no target.

    The column ``target`` of edges is one of their ends.
    """
    if column == "label":
        return CLASSES
    if column.startswith(LABEL) and not of_edges:
        return LABELS
    is_alone = column == "target" and not of_edges
    return NUMBERS if is_alone or column.startswith(TARGET) else None


def _kinds(values: Mapping[str, Scalar]) -> Iterator[TargetKind]:
    """Yield the kind of each owner, or of the dataset if it is a file."""
    owners, dataset = (str(values.get(key, "")) for key in ("owners", "dataset"))
    if not owners:
        if is_file(dataset):
            yield _kind(Path(os.path.expanduser(dataset)), values)
        return
    whole = _find(owners, values)
    entries = [part.strip() for part in owners.split(",")]
    if whole is not None and os.path.isdir(whole):
        entries = [str(place) for place in whole.iterdir() if place.name[0] != "."]
    left_out = without_names(str(values.get("without-owners", "")))
    for entry in entries:
        path = _find(entry, values)
        name = os.path.basename(entry).removesuffix(".npz")
        if name in left_out or (whole is not None and not _is_owner(Path(entry))):
            continue
        if path is None:
            yield NUMBERS if entry in NUMBER_DATASETS else CLASSES
        else:
            yield _kind(path, values)


def _is_owner(path: Path) -> bool:
    tables = ("nodes.csv", "graphs.csv", "relations.csv")
    return path.suffix == ".npz" or any(os.path.exists(path / t) for t in tables)


def _find(text: str, values: Mapping[str, Scalar]) -> Path | None:
    """Return an existing path, in the working folder or in the data folder."""
    path = Path(os.path.expanduser(text))
    data = values.get("data-dir") or os.environ.get("FLOWER_FGL_DATA", "")
    for place in (path, Path(os.path.expanduser(str(data))) / path):
        if os.path.exists(place):
            return place
    return None


def _kind(path: Path, values: Mapping[str, Scalar]) -> TargetKind:
    """Return what one graph file holds; classes if it is unclear or cannot be read."""
    path = Path(os.path.expanduser(path))
    of_edges = values.get("setting") == EDGE
    found: set[TargetKind] = set()
    try:
        if os.path.isdir(path):
            for table in filter(os.path.isfile, _tables(path, values)):
                with open(table, encoding="utf-8-sig", newline="") as file:
                    header = [cell.strip() for cell in next(csv.reader(file), [])]
                held = (kind_of_column(c, of_edges=of_edges) for c in header)
                found |= {kind for kind in held if kind is not None}
        elif os.path.isfile(path):  # a pipe or a device may never end
            with zipfile.ZipFile(path) as archive:
                names = set(archive.namelist())
            prefix = "edge_" if of_edges else ""
            found |= {NUMBERS} if f"{prefix}target_names.npy" in names else set()
            found |= {LABELS} if f"{prefix}label_names.npy" in names else set()
    except (*BROKEN_ARCHIVE, csv.Error):
        return CLASSES
    return found.pop() if len(found) == 1 else CLASSES


def _tables(folder: Path, values: Mapping[str, Scalar]) -> list[Path]:
    """Return the tables of what the run predicts: graphs, nodes or edges."""
    if values.get("setting") == "graph":
        return [folder / "graphs.csv"]
    items = "edges" if values.get("setting") == EDGE else "nodes"
    if not os.path.exists(folder / "relations.csv"):
        return [folder / f"{items}.csv"]
    wanted = str(values.get(f"target-{'node' if items == 'nodes' else 'relation'}", ""))
    tables = sorted((folder / items).glob("*.csv"))
    return [t for t in tables if t.stem in wanted.split(":")] or tables
