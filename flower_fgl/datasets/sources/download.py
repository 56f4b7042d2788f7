"""Locate the raw files of a dataset, or download them, and run its reader.

The data folder is only read. A library loader works in ``<cache>/sources/<name>/stage-…``,
with links to the raw files, and its downloads are kept in ``…/<name>/download``. Both
are written under a temporary name and renamed when complete, under one lock per dataset.
"""

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
from flower_fgl.datasets.sources.raw_paths import Layout
from flower_fgl.datasets.sources.raw_readers import Raw

__all__ = ["is_on_disk", "obtain"]

PROBE_SECONDS = 10.0
"""Timeout of the first request to a server."""
STALL_SECONDS = 60.0
"""Timeout of a download that receives no data."""
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
    """Read a dataset from the data folder, the cache or the network, in this order.

    The first complete layout is read; ``data_dir`` is only read. Returns the dataset and
    its layout.

    Raises a DataError if the files are missing, damaged or cannot be downloaded, or
    ``cache_dir`` cannot be written. The message lists the searched folders and the way
    to get the files.
    """
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
        reason = "Downloads are disabled."
        if not layout.can_download:
            reason = "It is not downloaded automatically."
        elif allow_download:
            try:
                return _download(layout, home), layout
            except (Exception, SystemExit) as error:  # loaders raise any kind of error
                reason = f"The download failed: {_brief(error)}."
    raise DataError(_missing(name, layout, data_dir, home, reason))


def is_on_disk(
    name: str, layouts: tuple[Layout, ...], *, data_dir: Path | None, cache_dir: Path
) -> bool:
    """Return whether :func:`obtain` needs no download."""
    return _find(layouts, data_dir, _home(name, cache_dir)) is not None


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
