"""Write a run folder during the run."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from flower_fgl.core.errors import RunError
from flower_fgl.runs.files import (
    CLIENTS,
    CONFIG,
    HEADER,
    MODEL,
    RELEASES,
    ROUNDS,
    SUMMARY,
    Row,
    finite,
    read_lines,
    replace_file,
    settings_toml,
    write_lines,
    writing,
)

__all__ = ["RunWriter", "default_folder"]


def default_folder(output_dir: Path, method: str, dataset: str, seed: int) -> Path:
    """Return the path of a new run folder.

    Parameters
    ----------
    output_dir : Path
        Parent of the run folders.
    method, dataset : str
        Names; of the path of a graph file only the file name is used.
    seed : int
        Seed of the run.

    Returns
    -------
    Path
        ``<output_dir>/<YYYYmmdd-HHMMSS>-<method>-<dataset>-<seed>`` in local time, with
        the suffix ``-2``, ``-3``, … if that folder exists.
    """
    data = re.sub(r"[^\w.+-]+", "-", Path(dataset.replace("\\", "/")).name)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{method}-{data}-{seed}"
    folder, suffix = output_dir / name, 2
    while folder.exists():
        folder, suffix = output_dir / f"{name}-{suffix}", suffix + 1
    return folder


class RunWriter:
    """Write the files of one run folder; :meth:`create` makes a new one.

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
        """Create the folder with its settings and a summary of status ``running``.

        Parameters
        ----------
        folder : Path
            Folder that does not exist or is empty.
        config : mapping of str to bool, int, float, str or a mapping of these
            All resolved settings. Those of a method have dotted keys or are a table.
            ``None`` is omitted.
        sources : mapping of str to str
            Sources of the values (``user``, ``method``, ``default``, …) by dotted key.

        Returns
        -------
        RunWriter

        Raises
        ------
        RunError
            If the folder is not empty or cannot be written; new files and folders are
            removed again.
        """
        with writing(folder):
            is_taken = folder.is_dir() and any(folder.iterdir())
        if is_taken:
            raise RunError(
                f"The run folder {folder} is not empty. Set another run-dir, or leave it "
                "unset to create a new folder in output-dir."
            )
        writer = cls(folder)
        made: list[Path] = []
        try:
            with writing(folder):
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
        """Replace ``config.toml``.

        Parameters
        ----------
        config, sources : mapping
            Settings and their sources, as for :meth:`create`.

        Raises
        ------
        RunError
            If the file cannot be written.

        Notes
        -----
        1. ``run-dir``, and a ``state-dir`` inside the run folder, are written empty, so
           that a run with this file as experiment gets new folders.
        """
        inside = self.folder.resolve()
        kept = {
            key: ""
            if key == "run-dir"
            or (key == "state-dir" and Path(str(value)).is_relative_to(inside))
            else value
            for key, value in config.items()
        }
        replace_file(self.folder / CONFIG, settings_toml(kept, sources).encode())

    def append_round(self, row: Row) -> None:
        """Append one row to ``rounds.jsonl``.

        Parameters
        ----------
        row : mapping
            ``round``, ``phase``, ``status``, ``replies``, ``failures``, ``loss``,
            ``metrics`` (in rounds with evaluation), ``seconds`` and ``bytes``.

        Raises
        ------
        RunError
            If the file cannot be written.
        """
        self._append(ROUNDS, [row])

    def append_clients(self, rows: Iterable[Row]) -> None:
        """Append rows to ``clients.jsonl``; otherwise like :meth:`append_round`."""
        self._append(CLIENTS, rows)

    def append_release(self, row: Row) -> None:
        """Append a row to ``releases.jsonl``; otherwise like :meth:`append_round`.

        Parameters
        ----------
        row : mapping
            ``round``, and ``clients``: partition IDs of the clients asked for an upload.
        """
        self._append(RELEASES, [row])

    def count_releases(self) -> Counter[int]:
        """Count the uploads that each client was asked for, by partition ID."""
        lines = read_lines(self.folder / RELEASES)
        return Counter(pid for line in lines for pid in line["clients"])

    def write_summary(self, summary: Row) -> None:
        """Replace ``summary.json``.

        Parameters
        ----------
        summary : mapping
            Summary as :func:`summarise` returns it.

        Raises
        ------
        RunError
            If the file cannot be written.
        """
        text = json.dumps(finite(summary), indent=2, allow_nan=False)
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
            Metadata of the file, see :mod:`flower_fgl.runs.model_file`.

        Raises
        ------
        RunError
            If the file cannot be written.
        """
        own = {
            name: tensor.detach().cpu().clone().contiguous()
            for name, tensor in state.items()
        }
        data = safetensors.torch.save(own, None if header is None else dict(header))
        replace_file(self.folder / MODEL, data)

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
