"""The run folder: what a run leaves behind, written as it goes and read again.

=================  ==================================================================
``config.toml``    every setting, resolved, with where its value came from
``rounds.jsonl``   one line per round: metrics, seconds, bytes, replies, failures
``clients.jsonl``  one line per client (round 0: what it holds), then per round and
                   client
``releases.jsonl`` with ``upload-noise``: who was asked for an upload and when, also in
                   rounds that a resumed run repeats
``summary.json``   the result; there from the start, with status ``running``
``model.safetensors``
                   weights of the aggregated model, best validation round
=================  ==================================================================

Lines are flushed one round at a time and files are replaced whole, so that a run that
was killed at any moment can be read. NaN (a metric without nodes) becomes ``null``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import tomli_w
from torch import Tensor

from flower_fgl.errors import RunError
from flower_fgl.metrics import SETTING_COLUMNS, summarise

__all__ = ["Run", "RunWriter", "default_folder", "flatten", "replace_file", "summarise"]

CONFIG, SUMMARY, MODEL = "config.toml", "summary.json", "model.safetensors"
ROUNDS, CLIENTS, RELEASES = "rounds.jsonl", "clients.jsonl", "releases.jsonl"
HEADER = ["method", "dataset", "clients", "seed", "engine"]
HEADER += ["partition_sha256", "evaluate"]
SETTING = re.compile(r'^("[^"]*"|[\w-]+) = .*  # ([a-z ]+)$')
TABLE = re.compile(r"^\[(.+)\]$")

Row = Mapping[str, Any]


def default_folder(output_dir: Path, method: str, dataset: str, seed: int) -> Path:
    """Name a run folder that does not exist yet.

    Parameters
    ----------
    output_dir : Path
        Where run folders go.
    method, dataset : str
        Names; of a path to a graph file only the file's name is used.
    seed : int
        The run's seed.

    Returns
    -------
    Path
        ``<output_dir>/<YYYYmmdd-HHMMSS>-<method>-<dataset>-<seed>``, local time, with
        ``-2``, ``-3``, … behind it where that is taken.
    """
    data = re.sub(r"[^\w.+-]+", "-", Path(dataset.replace("\\", "/")).name)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{method}-{data}-{seed}"
    folder, suffix = output_dir / name, 2
    while folder.exists():
        folder, suffix = output_dir / f"{name}-{suffix}", suffix + 1
    return folder


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all.

    Parameters
    ----------
    path : Path
        File to make or replace.
    data : bytes
        Its content.

    Raises
    ------
    RunError
        If it cannot be written; a former file is left as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise


class RunWriter:
    """Write one run folder; made by :meth:`create`.

    Parameters
    ----------
    folder : Path
        An existing run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def create(
        cls, folder: Path, *, config: Row, sources: Mapping[str, str]
    ) -> RunWriter:
        """Make the folder with its settings and a summary of status ``running``.

        Parameters
        ----------
        folder : Path
            Must not exist, or be empty.
        config : mapping of str to bool, int, float, str or a mapping of these
            Every setting, resolved; a method's by dotted key or as a table of its own;
            ``None`` is left out.
        sources : mapping of str to str
            Where values came from (``user``, ``method``, ``default``, …) by dotted key.

        Returns
        -------
        RunWriter

        Raises
        ------
        RunError
            If the folder holds something or cannot be written; nothing is left behind.
        """
        with _writing(folder):
            is_taken = folder.is_dir() and any(folder.iterdir())
        if is_taken:
            raise RunError(
                f"The run folder {folder} is not empty. Give another run-dir, or leave "
                "it unset for a new folder in output-dir."
            )
        writer = cls(folder)
        made: list[Path] = []
        try:
            with _writing(folder):
                for missing in reversed([folder, *folder.parents]):
                    if not missing.exists():
                        missing.mkdir()
                        made.append(missing)
            writer.write_settings(config, sources)
            known = {key: config.get(key) for key in HEADER}
            writer.write_summary({**known, "rounds": 0, "status": "running"})
        except RunError:
            with contextlib.suppress(OSError):
                (folder / CONFIG).unlink(missing_ok=True)
                for path in reversed(made):
                    path.rmdir()
            raise
        return writer

    def write_settings(self, config: Row, sources: Mapping[str, str]) -> None:
        """Replace ``config.toml``; parameters and errors as in :meth:`create`.

        Run again, the settings must lead to folders of their own: ``run-dir``, and a
        ``state-dir`` inside the run folder, are written empty.
        """
        inside = str(self.folder.resolve())
        kept = {
            key: ""
            if key == "run-dir"
            or (key == "state-dir" and str(value).startswith(inside))
            else value
            for key, value in config.items()
        }
        replace_file(self.folder / CONFIG, _config_toml(kept, sources).encode())

    def append_round(self, row: Row) -> None:
        """Add one line to ``rounds.jsonl``.

        Parameters
        ----------
        row : mapping
            ``round``, ``phase``, ``status``, ``replies``, ``failures``, ``loss``,
            ``metrics`` (in rounds with evaluation), ``seconds`` and ``bytes``.

        Raises
        ------
        RunError
            If it cannot be written.
        """
        self._append(ROUNDS, [row])

    def append_clients(self, rows: Iterable[Row]) -> None:
        """Add lines to ``clients.jsonl``; like :meth:`append_round`."""
        self._append(CLIENTS, rows)

    def append_release(self, row: Row) -> None:
        """Add a line to ``releases.jsonl``; like :meth:`append_round`.

        Parameters
        ----------
        row : mapping
            ``round``, and ``clients``: partition-ids of those asked for an upload.
        """
        self._append(RELEASES, [row])

    def count_releases(self) -> Counter[int]:
        """Count the uploads that every client was asked for, by partition-id."""
        lines = _read_lines(self.folder / RELEASES)
        return Counter(pid for line in lines for pid in line["clients"])

    def write_summary(self, summary: Row) -> None:
        """Replace ``summary.json``, at any time of the run.

        Parameters
        ----------
        summary : mapping
            As :func:`summarise` returns it.

        Raises
        ------
        RunError
            If it cannot be written.
        """
        text = json.dumps(_finite(summary), indent=2, allow_nan=False)
        replace_file(self.folder / SUMMARY, f"{text}\n".encode())

    def write_model(
        self, state: Mapping[str, Tensor], header: Mapping[str, str] | None = None
    ) -> None:
        """Replace ``model.safetensors``.

        Parameters
        ----------
        state : mapping of str to Tensor
            Weights by name, on any device.
        header : mapping of str to str, optional
            Text to keep with them, see ``model_files.py``.

        Raises
        ------
        RunError
            If it cannot be written.
        """
        own = {
            name: tensor.detach().cpu().clone().contiguous()
            for name, tensor in state.items()
        }
        data = safetensors.torch.save(own, None if header is None else dict(header))
        replace_file(self.folder / MODEL, data)

    def _append(self, name: str, rows: Iterable[Row]) -> None:
        """Add lines to a file; a failed write leaves no part of a line."""
        data = "".join(f"{_dumps(row)}\n" for row in rows).encode()
        path = self.folder / name
        with _writing(path), path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                written = file.write(data)
                while written < len(data):  # a nearly full disk takes a part first
                    written += file.write(data[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise


@dataclass(frozen=True, repr=False)
class Run:
    """A run folder, read; its ``repr`` is a short table of the results.

    Parameters
    ----------
    path : Path
        The folder.
    config : dict
        Every setting; a method's are a table of its name.
    sources : dict of str to str
        Where settings came from, by dotted key.
    summary : dict
        As :func:`summarise` returns it; of a run that was killed, of what it left.
    rounds, clients : list of dict
        The lines of ``rounds.jsonl`` and ``clients.jsonl``.
    """

    path: Path
    config: dict[str, Any]
    sources: dict[str, str]
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path | str) -> Run:
        """Read a run folder, finished or not.

        Parameters
        ----------
        path : Path or str
            The folder.

        Returns
        -------
        Run

        Raises
        ------
        RunError
            If the folder or one of its files is missing or garbled; a last line cut off
            by a kill is left out.
        """
        folder = Path(path)
        if not (folder / CONFIG).is_file():
            raise RunError(
                f"{folder} is no run folder: it has no {CONFIG}. Give a folder that "
                "`flower-fgl run` wrote."
            )
        text = _read(folder / CONFIG)
        try:
            config = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RunError(f"{folder / CONFIG} is garbled: {error}.") from error
        summary = _parse(_read(folder / SUMMARY), str(folder / SUMMARY), "status")
        rounds = _read_lines(folder / ROUNDS)
        clients = _read_lines(folder / CLIENTS)
        if summary["status"] == "running":  # at work, or killed: the lines know more
            header = {key: summary.get(key) for key in HEADER}
            summary |= summarise(rounds, status="running", **header)
        return cls(folder, config, _read_sources(text), summary, rounds, clients)

    @property
    def status(self) -> str:
        """``running`` (or killed), ``completed``, ``failed`` or ``interrupted``."""
        return str(self.summary["status"])

    @property
    def best(self) -> dict[str, Any] | None:
        """Scores of the round with the best validation accuracy."""
        return self.summary["best"]  # type: ignore[no-any-return]  # JSON

    @property
    def last(self) -> dict[str, Any] | None:
        """Scores of the last round with an evaluation."""
        return self.summary["last"]  # type: ignore[no-any-return]  # JSON

    def __repr__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the results as a few lines of text, scores in percent."""
        about = self.summary
        scored = [
            (
                "last round" if about["selection"] == "last" else "best validation",
                self.best,
            )
        ]
        if about["selection"] == "validation":
            scored.append(("last round", self.last))
        both = about.get("global", {})
        scored += [(f"{key}, aggregated", both.get(key)) for key in ("best", "last")]
        scored.append(("finetuned", about.get("finetuned")))
        lines = [f"{'':<20}{'round':>6}{'val acc':>9}{'test acc':>10}{'test F1':>9}"]
        is_ranked = any("auroc" in (e or {}).get("test", {}) for _, e in scored)
        lines[0] += f"{'test AUROC':>12}" if is_ranked else ""
        own = {k: t for k, t in SETTING_COLUMNS.items() if k in (self.last or {})}
        lines[0] += "".join(f"{title:>13}" for title in own.values())
        for name, entry in scored:
            if entry:
                val = _percent(entry, "val", "accuracy")
                test = _percent(entry, "test", "accuracy")
                f1 = _percent(entry, "test", "macro_f1")
                line = f"{name:<20}{entry['round']:>6}{val:>9}{test:>10}{f1:>9}"
                area = _percent(entry, "test", "auroc")
                line += f"{area:>12}" if is_ranked else ""
                more = (_percent(entry, column, "accuracy") for column in own)
                lines.append(line + "".join(f"{value:>13}" for value in more))
        head = (
            f"{about['method']} on {about['dataset']}, "
            f"{about['clients'] or '?'} clients, "
            f"seed {about['seed']}, {about['rounds']} rounds: {self.status}"
        )
        why = [f"error: {about['error']}"] if "error" in about else []
        return "\n".join(
            [head, *why, *(lines if lines[1:] else []), f"Run folder: {self.path}"]
        )


def _percent(entry: Row, column: str, metric: str) -> str:
    value = entry.get(column, {}).get(metric)
    return "-" if value is None else f"{100 * value:.2f}"


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failed write into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"Cannot write {path}: {error.strerror or error}. Free some space there, "
            "or set output-dir to a folder that can be written."
        ) from error


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by ``None``."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _dumps(row: Row) -> str:
    return json.dumps(_finite(row), allow_nan=False, separators=(",", ":"))


def flatten(config: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting of nested tables with its dotted key."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _config_toml(config: Row, sources: Mapping[str, str]) -> str:
    """Write settings one a line, general ones first, with sources as comments."""
    tables: dict[str, list[str]] = {"": []}
    for key, value in flatten(config):
        if value is None:
            continue
        table, name = key.split(".", 1) if "." in key else ("", key)
        if (
            table not in tables
        ):  # the empty table's dump is its header, quoted if need be
            tables[table] = [f"\n{tomli_w.dumps({table: {}}).strip()}"]
        line = tomli_w.dumps({name: value}).rstrip("\n")
        comment = f"  # {sources[key]}" if key in sources else ""
        tables[table].append(line + comment)
    head = "# All settings of this run; behind a value stands where it came from.\n"
    return head + "\n".join(line for lines in tables.values() for line in lines) + "\n"


def _read_sources(text: str) -> dict[str, str]:
    """Read the comments that :func:`_config_toml` wrote."""
    sources, table = {}, ""
    for line in text.split("\n"):  # splitlines also splits inside strings
        if header := TABLE.match(line):
            table = header[1].strip('"') + "."
        elif setting := SETTING.match(line):
            sources[table + setting[1].strip('"')] = setting[2]
    return sources


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise RunError(
            f"Cannot read {path}: {error.strerror}. Is this a run folder?"
        ) from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is garbled: {error}.") from error


def _parse(text: str, where: str, key: str) -> dict[str, Any]:
    """Read a JSON object that must hold ``key``."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise RunError(f"{where} is garbled: {error}.") from error
    if not isinstance(row, dict) or key not in row:
        raise RunError(
            f'{where} is garbled: expected an object with "{key}", got {text[:40]!r}.'
        )
    return row


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines; a last line without its end of line was cut off by a kill."""
    if not path.exists():
        return []
    *whole, _ = _read(path).split("\n")
    return [
        _parse(line, f"{path}, line {number}", "round")
        for number, line in enumerate(whole, start=1)
    ]
