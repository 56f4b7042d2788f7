"""Load a dataset by its name, and compare it with its published statistics.

``registry.py`` lists the datasets, and ``raw_paths.py`` says where their files lie. The
data folder is only read. A library loader works in ``<cache>/sources/<name>/stage-…``,
with links to the raw files, and its downloads are kept in ``…/<name>/download``. Both
are written under a temporary name and renamed when complete, under one lock per dataset.
"""

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from filelock import FileLock

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.extensions import owner_of, refusal
from flower_fgl.core.options import nearest
from flower_fgl.core.settings import SyntheticSettings
from flower_fgl.core.targets import CLASSES, TargetKind
from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.graph_files.validate import (
    validate_graph_dataset,
    validate_node_dataset,
)
from flower_fgl.datasets.pyg_data import GivenNames, graph_dataset, node_dataset
from flower_fgl.datasets.sources import raw_paths
from flower_fgl.datasets.sources.raw_paths import Layout
from flower_fgl.datasets.sources.raw_readers import Raw, choose_target
from flower_fgl.datasets.sources.registry import (
    GRAPH_SPLIT,
    MORRIS,
    SOURCES,
    TWITCH,
    Source,
    Statistics,
)
from flower_fgl.datasets.sources.synthetic import synthetic_dataset

__all__ = [
    "Source",
    "Statistics",
    "find_source",
    "is_missing",
    "load",
]

PROBE_SECONDS = 10.0
"""Timeout of the first request to a server."""
STALL_SECONDS = 60.0
"""Timeout of a download that receives no data."""
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

log = logging.getLogger(__name__)


def find_source(name: str) -> Source:
    """Look up a dataset by its name.

    This is a key of ``SOURCES``, ``tu:NAME`` for any TU Dortmund dataset, or
    ``twitch:NAME`` for a country of Twitch.

    Raises a ConfigError if the name is unknown; the message suggests the nearest one.
    """
    if name in SOURCES or refusal("datasets", name):
        return SOURCES[name]
    if match := re.fullmatch(r"tu:([A-Za-z0-9_-]+)", name):
        title = f"{match[1]}, {MORRIS}"
        return Source(title, "graph", GRAPH_SPLIT, Statistics(), raw_paths.tu(match[1]))
    if (country := name.removeprefix("twitch:")) != name:
        if country not in TWITCH:
            raise ConfigError(
                f'Unknown country "{country}" of Twitch. {nearest(country, TWITCH)}'
            )
        title = f"Twitch streamers, {country}, Rozemberczki et al., JCN 2021"
        nodes, edges = TWITCH[country]
        statistics = Statistics(nodes, edges, 3170, 2)
        layouts = raw_paths.twitch(country)
        return Source(title, "node", "20/40/40", statistics, layouts)
    raise ConfigError(
        f'Unknown dataset "{name}". {nearest(name, SOURCES)} You can also give tu:NAME '
        "for a TU Dortmund dataset, twitch:NAME for a country of Twitch, or the path of "
        "a graph file."
    )


def is_missing(name: str, *, data_dir: Path | None, cache_dir: Path) -> bool:
    """Return whether :func:`load` must download a dataset; arguments as there."""
    source = find_source(name)
    if source.loader or not source.layouts:
        return False
    return _find(source.layouts, data_dir, _home(name, cache_dir)) is None


def load(
    name: str,
    *,
    data_dir: Path | None,
    cache_dir: Path,
    check: bool = True,
    target: str = "",
    kind: TargetKind = CLASSES,
) -> NodeDataset | GraphDataset:
    """Load a complete dataset, undirected and simple, by its name in :func:`find_source`.

    Features are float32; they are sparse CSR if there are at least 64 columns and less
    than 15 % of the entries are non-zero. ``data_dir`` is only read, ``cache_dir`` is for
    downloads and processed files. Tests with reduced files ``check`` no statistics.
    ``target`` is that of a dataset with several, or ``all``, see ``core/settings.py``; by
    default the first, for a run that does not read classes. ``kind`` is what ``y`` of
    another package's dataset holds. A ConfigError says that the name or the target is
    unknown; a DataError that the files are missing or damaged, or differ from the published
    dataset.
    """
    source = find_source(name)
    if source.loader:
        dataset = _call(name, source, kind)
        if check:
            _check_statistics(name, source.statistics, _measure(dataset, dataset))
        return dataset
    if not source.layouts:
        return synthetic_dataset(SyntheticSettings())
    (found, entries), layout = _obtain(name, source.layouts, data_dir, cache_dir)
    dataset = whole = replace(found, name=name)
    if whole.targets is not None:
        dataset = choose_target(whole, target or whole.target.names[0])
    _validate(dataset)
    if check and not layout.is_partial:
        measured = replace(_measure(dataset, whole), entries=entries)
        _check_statistics(name, source.statistics, measured)
    return dataset


def _validate(dataset: NodeDataset | GraphDataset) -> None:
    if isinstance(dataset, GraphDataset):
        validate_graph_dataset(dataset)
    else:
        validate_node_dataset(dataset)


def _call(name: str, source: Source, kind: TargetKind) -> NodeDataset | GraphDataset:
    """Call the loader of another package's dataset, and convert what it returns."""
    loader = source.loader
    try:
        found: Any = (resolve_name(loader) if isinstance(loader, str) else loader)()
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f'The dataset "{name}" of {owner_of("datasets", name)} cannot be loaded: '
            f"{type(error).__name__}: {error}."
        ) from error
    dataset: NodeDataset | GraphDataset
    if isinstance(found, GraphDataset | NodeDataset):
        dataset = replace(found, name=name)
        _validate(dataset)
    elif isinstance(found, list | tuple):
        dataset = graph_dataset(found, name, kind)
    else:
        dataset = node_dataset(found, name, GivenNames.of_kind(kind))
    if isinstance(dataset, GraphDataset) != (source.task == "graph"):
        raise DataError(
            f'The dataset "{name}" is declared with task = "{source.task}", but its '
            f"loader returns {'graphs' if source.task == 'node' else 'one graph'}."
        )
    return dataset


def _measure(
    dataset: NodeDataset | GraphDataset, whole: NodeDataset | GraphDataset
) -> Statistics:
    """Compute the statistics of a dataset; the ``whole`` has graphs without a label too."""
    graphs, classes = None, dataset.target.width if dataset.targets is None else 2
    if isinstance(dataset, GraphDataset):
        graphs = len(whole.y)
    elif dataset.network is not None:
        graphs = int((dataset.network.bincount() > 0).sum())
    return Statistics(
        nodes=int(whole.x.shape[0]),
        edges=whole.edge_index.shape[1] // 2,
        features=dataset.num_features,
        classes=None if dataset.target.has_numbers else classes,
        graphs=graphs,
        targets=None if whole.targets is None else whole.targets.shape[1],
    )


def _check_statistics(name: str, published: Statistics, found: Statistics) -> None:
    """Raise an error that lists every published number the dataset does not match."""
    wrong = []
    for field in fields(Statistics):
        expected, actual = getattr(published, field.name), getattr(found, field.name)
        if expected is not None and expected != actual:
            wrong.append(f"published {expected:,} {field.name}, found {actual:,}")
    if wrong:
        raise DataError(
            f'The files of "{name}" differ from the published dataset: '
            f"{'; '.join(wrong)}. Download them again, or load your own graph from a "
            "graph file."
        )


def _obtain(
    name: str, layouts: tuple[Layout, ...], data_dir: Path | None, cache_dir: Path
) -> tuple[Raw, Layout]:
    """Read a dataset from the data folder, the cache or the network, in this order."""
    home = _home(name, cache_dir)
    found = _find(layouts, data_dir, home)
    if found is not None and found[0].leaf is None:
        return _guarded(name, found[1], found[0].read, found[1]), found[0]
    with _locked(home):
        # another process may have downloaded it meanwhile
        found = found or _find(layouts, data_dir, home)
        if found is not None:
            layout, folder = found
            return _guarded(name, folder, _read_staged, layout, folder, home), layout
        layout = layouts[0]
        reason = "It is not downloaded automatically."
        if layout.can_download:
            try:
                return _download(layout, home), layout
            except (Exception, SystemExit) as error:  # loaders raise any kind of error
                reason = f"The download failed: {_brief(error)}."
    raise DataError(_missing(name, layout, data_dir, home, reason))


def _home(name: str, cache_dir: Path) -> Path:
    """Return a dataset's folder in the cache."""
    return cache_dir / "sources" / name.replace(":", "-").replace("/", "-")


def _find(
    layouts: tuple[Layout, ...], data_dir: Path | None, home: Path
) -> tuple[Layout, Path] | None:
    """Return the first layout with all of its files, and its folder."""
    places = []
    if data_dir is not None:
        places += [(layout, data_dir / layout.folder) for layout in layouts]
    places += [(lay, home / "download" / lay.leaf) for lay in layouts if lay.leaf]
    for layout, folder in places:
        if all((folder / file).is_file() for file in layout.files):
            return layout, folder
    return None


def _guarded(
    name: str, folder: Path, read: Callable[..., Raw], *arguments: object
) -> Raw:
    """Call a reader, and turn any error into a ``DataError``."""
    try:
        return read(*arguments)
    except (DataError, MemoryError):
        raise
    except Exception as error:
        if getattr(error, "errno", None) in CANNOT_WRITE:
            raise DataError(
                f'Cannot process dataset "{name}": {error}. Free some disk space, or '
                "set FLOWER_FGL_CACHE to another folder."
            ) from error
        raise DataError(
            f'Dataset "{name}" cannot be read from {folder}: {_brief(error)}. A file may '
            "be damaged or belong to another dataset: download it again."
        ) from error


def _brief(error: BaseException) -> str:
    """Return the type and first line of an error; torch raises very long ones."""
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first.rstrip('. ')}"


def _read_staged(layout: Layout, folder: Path, home: Path) -> Raw:
    """Run a library loader in a folder of links to the raw files, made once."""
    stage = home / f"stage-{_fingerprint(folder)}"
    if stage.is_dir():
        try:
            return layout.read(stage)
        except DataError:
            raise
        except Exception as error:
            log.warning("%s is damaged (%s) and will be rebuilt.", stage, _brief(error))
    with _scratch(home) as root:
        _link_files(folder, root / str(layout.leaf))
        raw = layout.read(root)
        for stale in home.glob("stage-*"):
            shutil.rmtree(stale)
        os.replace(root, stage)
    return raw


def _download(layout: Layout, home: Path) -> Raw:
    """Let a library loader download the raw files; keep them if all are complete."""
    _probe(layout.url)
    with _scratch(home) as root, _stall_limit():
        raw = layout.read(root)
        folder = root / str(layout.leaf)
        shutil.rmtree(folder / "processed", ignore_errors=True)
        absent = [file for file in layout.files if not (folder / file).is_file()]
        if absent:
            raise DataError(f"{', '.join(absent)} missing after the download")
        # an incomplete earlier download
        shutil.rmtree(home / "download", ignore_errors=True)
        os.replace(root, home / "download")
    return raw


def _probe(url: str) -> None:
    """Send a request to the server, so that no loader waits without a network."""
    request = urllib.request.Request(url, method="HEAD")
    # an error status also proves that the server answers
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()


@contextlib.contextmanager
def _stall_limit() -> Iterator[None]:
    """Set a timeout for sockets opened in the block; the loaders set none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Let one process at a time work in a dataset's cache folder."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        held = FileLock(home / "lock").acquire()
    except OSError as error:
        raise DataError(
            f"Cannot write to the cache folder {home}: {error}. Set FLOWER_FGL_CACHE to "
            "a writable folder."
        ) from error
    with held:
        yield


@contextlib.contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    """Make a temporary folder; delete it after the block unless it was renamed."""
    # left by a killed process: this one holds the lock
    for left_over in home.glob("partial-*"):
        shutil.rmtree(left_over)
    root = Path(tempfile.mkdtemp(prefix="partial-", dir=home))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _raw_files(folder: Path) -> list[Path]:
    """List all files of a dataset except those a loader has written."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and "processed" not in path.relative_to(folder).parts
    )


def _link_files(source: Path, target: Path) -> None:
    """Create symbolic links to all raw files of ``source`` below ``target``."""
    for path in _raw_files(source):
        link = target / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())


def _fingerprint(folder: Path) -> str:
    """Hash the paths, sizes and times of the raw files and the loader's version."""
    digest = hashlib.sha256(version("torch-geometric").encode())
    for path in _raw_files(folder):
        stat = path.stat()
        line = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
        digest.update(line.encode())
    return digest.hexdigest()[:16]


def _missing(
    name: str, layout: Layout, data_dir: Path | None, home: Path, reason: str
) -> str:
    """Describe the missing files, the searched folders and the way to get them."""
    places = [str(data_dir / layout.folder)] if data_dir is not None else []
    places += [str(home / "download")] if layout.leaf else []
    looked = f"Not found in {', nor in '.join(places)}. " if places else ""
    if data_dir is None:
        looked += "No data folder is set. "
    files = ", ".join(layout.files)
    return (
        f'Dataset "{name}" is missing. {looked}{reason} Download {files} from '
        f"{layout.url}, put them into the subfolder {layout.folder} of a data folder, "
        "and set data-dir or FLOWER_FGL_DATA to that data folder."
    )
