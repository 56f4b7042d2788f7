"""Write a run folder during the run."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_fgl.core.atomic import write_file
from flower_fgl.core.errors import RunError
from flower_fgl.core.settings import owners_name
from flower_fgl.runs.environment import environment_comments
from flower_fgl.runs.files import (
    CLIENTS_FILE,
    CONFIG_FILE,
    HEADER,
    IN_RUN_FOLDER,
    MODEL,
    ORIGIN,
    RELEASES,
    ROUNDS,
    SUMMARY,
    OnRound,
    Row,
    parse_row,
    read_lines,
    read_text,
    settings_toml,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RunWriter", "default_folder", "finite", "replace_file"]
__all__ += ["require_empty", "write_lines", "writing"]

ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def replace_file(path: Path, data: bytes, *, is_private: bool = False) -> None:
    """Create or replace a file atomically, and sync it to disk, or raise a RunError."""
    remedy = "set output-dir to" if path.name in IN_RUN_FOLDER else "choose a file in"
    with writing(path, remedy):
        write_file(path, data, is_private=is_private)


@contextlib.contextmanager
def writing(path: Path, way_out: str = "set output-dir to") -> Iterator[None]:
    """Convert an OSError in the body to a RunError that names a remedy."""
    try:
        yield
    except OSError as error:
        advice = f"Free disk space, or {way_out} a writable folder."
        if isinstance(error, FileNotFoundError) and not path.parent.exists():
            advice = f"The folder {path.parent} does not exist: create it first."
        raise RunError(
            f"Cannot write {path}: {error.strerror or error}. {advice}"
        ) from error


def finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot represent, with ``None``."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_lines(rows: Iterable[Row]) -> bytes:
    """Serialise rows as JSON lines; NaN and infinities become ``null``."""
    lines = []
    for row in rows:
        try:
            lines.append(ENCODER.encode(row))
        except (TypeError, ValueError):  # NaN, an infinity or another kind of mapping
            lines.append(ENCODER.encode(finite(row)))
    return "".join(f"{line}\n" for line in lines).encode()


def default_folder(output_dir: Path, method: str, dataset: str, seed: int) -> Path:
    """Return the path of a new run folder; of a graph file's path only the name is used.

    It is ``<output_dir>/<YYYYmmdd-HHMMSS>-<method>-<dataset>-<seed>`` in local time,
    with the suffix ``-2``, ``-3``, … if that folder exists.
    """
    data = re.sub(r"[^\w.+-]+", "-", Path(dataset.replace("\\", "/")).name)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{method}-{data}-{seed}"
    folder, suffix = output_dir / name, 2
    while folder.exists():
        folder, suffix = output_dir / f"{name}-{suffix}", suffix + 1
    return folder


def require_empty(folder: Path) -> None:
    """Raise a RunError if a new run's folder exists and is not empty."""
    if folder.is_dir() and any(folder.iterdir()):
        raise RunError(
            f"The run folder {folder} is not empty. Set another run-dir, or leave it unset "
            "to create a new folder in output-dir."
        )


class RunWriter:
    """Write the files of one run folder; :meth:`create` makes a new one.

    ``listeners`` get the row of each round. ``rounds`` holds the rows of all rounds so
    far, for the summary.
    """

    def __init__(self, folder: Path, on_round: OnRound | None = None) -> None:
        self.folder = folder
        self.listeners = [] if on_round is None else [on_round]
        self.rounds: list[Row] = []
        self._settings: tuple[Row, Mapping[str, str]] = ({}, {})
        self._about = ""
        self._origin: Row = {}

    @classmethod
    def create(
        cls,
        folder: Path,
        *,
        config: Row,
        sources: Mapping[str, str],
        on_round: OnRound | None = None,
        environment: Row | None = None,
        engine: str | None = None,
    ) -> RunWriter:
        """Create the folder with its settings and a summary of status ``running``.

        The folder must not exist or be empty. Settings of a method have dotted keys or
        are a table; ``None`` is omitted. ``sources`` names the source of each value
        (``user``, ``method``, ``default``, …) by dotted key. If the folder cannot be
        written, new files and folders are removed again and a RunError is raised.
        """
        with writing(folder):
            require_empty(folder)
        writer = cls(folder, on_round)
        if environment is not None:
            started = datetime.now(UTC).isoformat(timespec="seconds")
            writer._origin = {"started": started, "environment": environment}
            writer._about = environment_comments(started, environment)
        made: list[Path] = []
        try:
            with writing(folder):
                for missing in reversed([folder, *folder.parents]):
                    if not missing.exists():
                        missing.mkdir()
                        made.append(missing)
            writer.write_settings(config, sources)
            known = {key: config.get(key) for key in HEADER} | {"engine": engine}
            if config.get("owners"):
                known["dataset"] = owners_name(str(config["owners"]))
            writer.write_summary({**known, "rounds": 0, "status": "running"})
        except RunError:
            with contextlib.suppress(OSError):
                (folder / CONFIG_FILE).unlink(missing_ok=True)
                for path in reversed(made):
                    path.rmdir()
            raise
        return writer

    def write_settings(self, config: Row, sources: Mapping[str, str]) -> None:
        """Replace ``config.toml``, or raise a RunError.

        ``run-dir``, and a ``state-dir`` inside the run folder, are written empty, so
        that a run with this file as experiment gets new folders.
        """
        self._settings = (config, sources)
        inside = self.folder.resolve()
        kept = {
            key: ""
            if key == "run-dir"
            or (key == "state-dir" and Path(str(value)).is_relative_to(inside))
            else value
            for key, value in config.items()
        }
        text = settings_toml(kept, sources, self._about)
        replace_file(self.folder / CONFIG_FILE, text.encode())

    @property
    def origin(self) -> Row:
        """Start time and environment of the run, which every summary repeats."""
        return self._origin

    def append_round(self, row: Row) -> None:
        """Append one row to ``rounds.jsonl``, or raise a RunError.

        The row has ``round``, ``phase``, ``status``, ``replies``, ``failures``,
        ``loss``, ``metrics`` (in rounds with evaluation), ``seconds`` and ``bytes``.
        """
        self.rounds.append(row)
        self._append(ROUNDS, [row])
        for listener in self.listeners:
            listener(finite(row))

    def describe_clients(self, rows: Sequence[Row]) -> None:
        """Append the clients' descriptions; store their number if ``clients`` is 0."""
        config, sources = self._settings
        number = rows[0].get("num_partitions") if rows else None
        if number and not config.get("clients"):
            self.write_settings({**config, "clients": number}, sources)
        self.append_clients(rows)

    def append_clients(self, rows: Iterable[Row]) -> None:
        """Append rows to ``clients.jsonl``; otherwise like :meth:`append_round`."""
        self._append(CLIENTS_FILE, rows)

    def append_release(self, row: Row) -> None:
        """Append ``round`` and ``clients`` (the IDs asked) to ``releases.jsonl``."""
        self._append(RELEASES, [row])

    def count_releases(self) -> Counter[int]:
        """Count the uploads that each client was asked for, by partition ID."""
        lines = read_lines(self.folder / RELEASES)
        return Counter(pid for line in lines for pid in line["clients"])

    def write_summary(self, summary: Row) -> None:
        """Replace ``summary.json``; start time and environment of a resumed run stay."""
        path = self.folder / SUMMARY
        if not self._origin and path.exists():
            before = parse_row(read_text(path), str(path), "status")
            self._origin = {key: before[key] for key in ORIGIN if key in before}
        text = json.dumps(
            finite({**summary, **self._origin}), indent=2, allow_nan=False
        )
        replace_file(path, f"{text}\n".encode())

    def write_model(
        self,
        state: Mapping[str, Tensor],
        header: Mapping[str, str] | None = None,
        *,
        is_private: bool = False,
    ) -> None:
        """Replace ``model.safetensors``, or raise a RunError."""
        import safetensors.torch  # loads torch, which the reader of a run does not need

        own = {
            name: tensor.detach().cpu().clone().contiguous()
            for name, tensor in state.items()
        }
        data = safetensors.torch.save(own, None if header is None else dict(header))
        replace_file(self.folder / MODEL, data, is_private=is_private)

    def _append(self, name: str, rows: Iterable[Row]) -> None:
        """Append rows to a file; a failed write leaves no partial line."""
        data = write_lines(rows)
        path = self.folder / name
        with writing(path), path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                written = file.write(data)
                while written < len(data):  # a nearly full disk accepts only a part
                    written += file.write(data[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise
