"""Files of data owners: which they are, and the kind of target that they hold.

Only names of files, arrays and columns are read; the module loads no torch.
"""

import csv
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from flower_fgl.core.options import AUTO, Scalar
from flower_fgl.core.settings import NUMBER_DATASETS, is_file, listed_names
from flower_fgl.core.targets import CLASSES, EDGE, LABELS, LINK, NUMBERS, TargetKind

__all__ = ["BROKEN_ARCHIVE", "EDGES", "GRAPHS", "LABEL", "NODES", "RELATIONS"]
__all__ += ["TARGET", "find_owner", "is_owner", "kind_of_column", "kind_of_most"]
__all__ += ["name_of_file", "owners_in", "with_held_kind"]

NODES, EDGES, GRAPHS = "nodes.csv", "edges.csv", "graphs.csv"
RELATIONS = "relations.csv"
TABLES = (NODES, GRAPHS, RELATIONS)
"""Tables by which the folder of one owner is recognized."""
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


def is_owner(path: Path) -> bool:
    """Return whether a path is a graph file, or a folder with the tables of one owner."""
    if os.path.isdir(path):
        return any(os.path.exists(path / table) for table in TABLES)
    return path.suffix == ".npz"


def owners_in(folder: Path) -> Iterator[Path]:
    """Yield the graph files and CSV folders in a folder, but no hidden ones."""
    visible = (path for path in folder.iterdir() if not path.name.startswith("."))
    return filter(is_owner, visible)


def name_of_file(path: Path) -> str:
    """Return the name of an owner: that of its folder, or of its file without ``.npz``."""
    return path.name.removesuffix(".npz")


def find_owner(text: str, data_dir: Path | None) -> Path | None:
    """Return an existing path, in the working folder or in the data folder."""
    path = Path(os.path.expanduser(text))
    places = (path,) if data_dir is None else (path, data_dir / path)
    # Path.exists raises an error for long names
    return next((place for place in places if os.path.exists(place)), None)


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
            yield _kind(Path(dataset), values)
        return
    text = str(values.get("data-dir") or os.environ.get("FLOWER_FGL_DATA", ""))
    data_dir = Path(os.path.expanduser(text)) if text else None
    whole = find_owner(owners, data_dir)
    if whole is not None and os.path.isdir(whole):
        found: list[Path | str] = [*owners_in(whole)]
    else:
        entries = listed_names(owners)
        found = [find_owner(entry, data_dir) or entry for entry in entries]
    left_out = listed_names(str(values.get("without-owners", "")))
    for owner in found:
        if isinstance(owner, str):
            yield NUMBERS if owner in NUMBER_DATASETS else CLASSES
        elif name_of_file(owner) not in left_out:
            yield _kind(owner, values)


def _kind(path: Path, values: Mapping[str, Scalar]) -> TargetKind:
    """Return what one graph file holds; classes if it is unclear or cannot be read."""
    path = Path(os.path.expanduser(path)).absolute()
    of_edges = values.get("setting") == EDGE
    files = _tables(path, values) if os.path.isdir(path) else [path]
    found: set[TargetKind] = set()
    try:
        for file in filter(os.path.isfile, files):  # a pipe or a device may never end
            now = os.stat(file)
            found |= _held(file, of_edges, (now.st_mtime_ns, now.st_size))
    except (*BROKEN_ARCHIVE, csv.Error):
        return CLASSES
    return found.pop() if len(found) == 1 else CLASSES


@lru_cache(maxsize=4096)
def _held(file: Path, of_edges: bool, state: tuple[int, int]) -> frozenset[TargetKind]:
    """Return the kinds in a table or graph file, read once for each ``state``."""
    if file.suffix == ".csv":
        with open(file, encoding="utf-8-sig", newline="") as table:
            header = [cell.strip() for cell in next(csv.reader(table), [])]
        held = (kind_of_column(column, of_edges=of_edges) for column in header)
        return frozenset(kind for kind in held if kind is not None)
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
    prefix = "edge_" if of_edges else ""
    kinds = {NUMBERS: "target_names", LABELS: "label_names"}
    return frozenset(k for k, name in kinds.items() if f"{prefix}{name}.npy" in names)


def _tables(folder: Path, values: Mapping[str, Scalar]) -> list[Path]:
    """Return the tables of what the run predicts: graphs, nodes or edges."""
    if values.get("setting") == "graph":
        return [folder / GRAPHS]
    items = "edges" if values.get("setting") == EDGE else "nodes"
    if not os.path.exists(folder / RELATIONS):
        return [folder / f"{items}.csv"]
    wanted = str(values.get(f"target-{'node' if items == 'nodes' else 'relation'}", ""))
    tables = sorted((folder / items).glob("*.csv"))
    return [t for t in tables if t.stem in wanted.split(":")] or tables
