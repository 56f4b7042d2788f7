"""Count of a node's replies in all runs, for the node config's ``max-releases``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from flower_fgl.core.errors import RunError

__all__ = ["ReleaseLedger"]


@dataclass(frozen=True)
class ReleaseLedger:
    """Counter on disk of the replies that carried uploads or scores.

    It belongs to the node and not to a run: no rewound, repeated or new run lowers it.

    Parameters
    ----------
    folder : Path
        The node config's ``state-dir``.
    owner : str
        Name of the node's files.
    limit : int, positive
        ``max-releases``.
    """

    folder: Path
    owner: str
    limit: int

    @property
    def path(self) -> Path:
        """File of the counter."""
        return self.folder / f"releases-{self.owner}.json"

    def count(self) -> int:
        """Return the number of replies so far.

        Raises
        ------
        RunError
            If the file is damaged: it is never counted as 0.
        """
        try:
            value = json.loads(self.path.read_text())["releases"]
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                "the counter of max-releases in its state-dir cannot be read. The data "
                "owner must restore or delete the file releases-*.json there."
            ) from error
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RunError("the counter of max-releases in its state-dir is damaged.")
        return value

    def require(self) -> None:
        """Raise an error if no reply is left.

        Raises
        ------
        RunError
            If the limit is reached, or the counter is damaged.
        """
        if self.count() >= self.limit:
            raise RunError(
                f"its node config allows max-releases = {self.limit} replies with uploads "
                "or scores in all runs together, and all of them are used."
            )

    def add(self) -> None:
        """Count one reply, on disk, before it is sent.

        Raises
        ------
        RunError
            If the limit is reached, or the counter cannot be read or written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock"):
                self.require()
                self._write(self.count() + 1)
        except OSError as error:
            raise RunError(
                "the counter of max-releases cannot be written to its state-dir: "
                f"{error.strerror}."
            ) from error

    def _write(self, number: int) -> None:
        """Replace the file; the new content is on the disk when this returns."""
        scratch = self.path.with_suffix(f".{os.getpid()}.tmp")
        with open(scratch, "w", encoding="utf-8") as file:
            json.dump({"releases": number}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, self.path)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
