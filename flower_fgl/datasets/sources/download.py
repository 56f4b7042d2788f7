"""Find raw files, lend them to a stock loader in a scratch folder, or download them.

The data folder is only read. A stock loader works in ``<cache>/sources/<name>/stage-…``
where the raw files are symbolic links; what it downloads is kept in ``…/download``.
Both are made beside their place and moved there when complete, under one lock per data
set.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import socket
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.sources.layout import Layout
from flower_fgl.datasets.sources.raw_readers import Raw

__all__ = ["obtain"]

PROBE_SECONDS = 10.0
"""How long to wait for the server's first answer before calling it out of reach."""

STALL_SECONDS = 60.0
"""How long a download may stand still."""

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)

log = logging.getLogger(__name__)


def obtain(
    name: str,
    layouts: tuple[Layout, ...],
    *,
    data_dir: Path | None,
    cache_dir: Path,
    allow_download: bool,
) -> tuple[Raw, Layout]:
    """Read a data set from the data folder, the cache or the network, in this order.

    Parameters
    ----------
    name : str
        Its name, for messages and for its folder in the cache.
    layouts : tuple of Layout
        The forms it may have; the first one found is read.
    data_dir : Path or None
        Folder of raw data, only read.
    cache_dir : Path
        Folder of what this package may write.
    allow_download : bool
        Whether to fetch what is nowhere on disk.

    Returns
    -------
    RawNodes or RawGraphs
        The data.
    Layout
        The form they were found in.

    Raises
    ------
    DataError
        If the data are nowhere, damaged, or cannot be fetched, or ``cache_dir`` cannot
        be written; the message says where they were looked for and how to get them.
    """
    home = cache_dir / "sources" / name.replace(":", "-").replace("/", "-")
    found = _find(layouts, data_dir, home)
    if found is not None and found[0].leaf is None:
        return _guarded(name, found[1], found[0].read, found[1]), found[0]
    with _locked(home):
        found = found or _find(layouts, data_dir, home)  # fetched while we waited
        if found is not None:
            layout, folder = found
            return _guarded(name, folder, _read_staged, layout, folder, home), layout
        layout = layouts[0]
        reason = "Downloads are switched off."
        if not layout.can_download:
            reason = "It is not downloaded by itself."
        elif allow_download:
            try:
                return _download(layout, home), layout
            except (Exception, SystemExit) as error:  # loaders fail in all ways
                reason = f"The download failed: {_brief(error)}."
    raise DataError(_missing(name, layout, data_dir, home, reason))


def _find(
    layouts: tuple[Layout, ...], data_dir: Path | None, home: Path
) -> tuple[Layout, Path] | None:
    """Return the first layout of which all files are there, and its folder."""
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
    """Read, and turn whatever a reader may raise over bad files into one error."""
    try:
        return read(*arguments)
    except (DataError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
            raise DataError(
                f'Data set "{name}" cannot be processed: {error}. Free some space, or '
                "set FLOWER_FGL_CACHE to another folder."
            ) from error
        raise DataError(
            f'Data set "{name}" cannot be read from {folder}: {_brief(error)}. A file '
            "may be damaged or of another data set: fetch it again."
        ) from error


def _brief(error: BaseException) -> str:
    """Return kind and first line of an error: some of torch's fill a page."""
    first, _, _ = str(error).strip().partition("\n")
    return f"{type(error).__name__}: {first.rstrip('. ')}"


def _read_staged(layout: Layout, folder: Path, home: Path) -> Raw:
    """Run a stock loader in a folder of links to the raw files, made once."""
    stage = home / f"stage-{_fingerprint(folder)}"
    if stage.is_dir():
        try:
            return layout.read(stage)
        except DataError:
            raise
        except Exception as error:
            log.warning("%s is damaged (%s): made again.", stage, _brief(error))
    with _scratch(home) as root:
        _link_files(folder, root / str(layout.leaf))
        raw = layout.read(root)
        for stale in home.glob("stage-*"):
            shutil.rmtree(stale)
        os.replace(root, stage)
    return raw


def _download(layout: Layout, home: Path) -> Raw:
    """Let a stock loader fetch the raw files; keep them when all have come."""
    _probe(layout.url)
    with _scratch(home) as root, _stall_limit():
        raw = layout.read(root)
        folder = root / str(layout.leaf)
        shutil.rmtree(folder / "processed", ignore_errors=True)
        absent = [file for file in layout.files if not (folder / file).is_file()]
        if absent:
            raise DataError(f"{', '.join(absent)} did not come")
        shutil.rmtree(home / "download", ignore_errors=True)  # some files were gone
        os.replace(root, home / "download")
    return raw


def _probe(url: str) -> None:
    """Ask the server for any answer, so that no loader waits on a dead network."""
    request = urllib.request.Request(url, method="HEAD")
    with contextlib.suppress(urllib.error.HTTPError):  # an answer, if not a kind one
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()


@contextlib.contextmanager
def _stall_limit() -> Iterator[None]:
    """Limit the wait on sockets opened in the block: the loaders set no limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Let one process at a time work in a data set's folder of the cache."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = FileLock(home / "lock")
        lock.acquire()
    except OSError as error:
        raise DataError(
            f"The cache folder {home} cannot be written: {error}. Set FLOWER_FGL_CACHE "
            "to a folder that can."
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    """Make a folder that is gone after the block unless it was moved away."""
    for left_over in home.glob("partial-*"):  # of a killed process: we hold the lock
        shutil.rmtree(left_over)
    root = Path(tempfile.mkdtemp(prefix="partial-", dir=home))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _raw_files(folder: Path) -> list[Path]:
    """List all files of a data set but those a loader has made."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and "processed" not in path.relative_to(folder).parts
    )


def _link_files(source: Path, target: Path) -> None:
    for path in _raw_files(source):
        link = target / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path.resolve())


def _fingerprint(folder: Path) -> str:
    """Name the state of the raw files and the version of the loader."""
    digest = hashlib.sha256(version("torch-geometric").encode())
    for path in _raw_files(folder):
        stat = path.stat()
        digest.update(
            f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode()
        )
    return digest.hexdigest()[:16]


def _missing(
    name: str, layout: Layout, data_dir: Path | None, home: Path, reason: str
) -> str:
    """Say what is missing, where it was looked for, and how to get it."""
    places = [str(data_dir / layout.folder)] if data_dir is not None else []
    places += [str(home / "download")] if layout.leaf else []
    looked = f"Not found in {', nor in '.join(places)}. " if places else ""
    if data_dir is None:
        looked += "No data folder is set. "
    files = ", ".join(layout.files)
    return (
        f'Data set "{name}" is missing. {looked}{reason} Get {files} from '
        f"{layout.url}, put them into the folder {layout.folder} of a data folder, and "
        "name the data folder by data-dir or FLOWER_FGL_DATA."
    )
