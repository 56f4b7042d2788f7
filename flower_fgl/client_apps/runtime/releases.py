"""What a node keeps on disk for all runs: its number of replies, and its secure sums."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from flower_fgl.core.atomic import make_private_folder, write_file
from flower_fgl.core.errors import RunError
from flower_fgl.protocols.secure_aggregation.history import SumHistory

__all__ = ["ReleaseLedger", "SumLedger"]


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
            make_private_folder(self.folder)
            with FileLock(f"{self.path}.lock"):
                self.require()
                data = json.dumps({"releases": self.count() + 1}).encode()
                write_file(self.path, data, is_private=True)
        except OSError as error:
            raise RunError(
                "the counter of max-releases cannot be written to its state-dir: "
                f"{error.strerror}."
            ) from error


@dataclass(frozen=True)
class SumLedger:
    """File with the sums of secure aggregation that a node has helped to open.

    Parameters
    ----------
    folder : Path
        The node config's ``state-dir``.
    owner : str
        Name of the node's files.
    """

    folder: Path
    owner: str

    @property
    def path(self) -> Path:
        """File of the sums."""
        return self.folder / f"sums-{self.owner}.json"

    @contextlib.contextmanager
    def held(self, *, is_fixed: bool) -> Iterator[SumHistory]:
        """Read the sums, and write those that were added; other processes wait.

        Parameters
        ----------
        is_fixed : bool
            The node config's ``fixed-roster``.

        Raises
        ------
        RunError
            If the file is damaged, which is never an empty history, or cannot be written.
        """
        with contextlib.ExitStack() as stack:
            with self._writing():
                make_private_folder(self.folder)
                stack.enter_context(FileLock(f"{self.path}.lock"))
                text = self.path.read_text() if self.path.exists() else "{}"
                history = SumHistory.from_json(text, is_fixed=is_fixed)
            known = dict(history.sums)
            yield history
            if history.sums != known:
                with self._writing():
                    write_file(self.path, history.to_json().encode(), is_private=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Convert an error of the file to one that names the remedy."""
        try:
            yield
        except (OSError, ValueError) as error:
            raise RunError(
                "the history of its secure sums in its state-dir cannot be used. The data "
                "owner must restore or delete the file sums-*.json there."
            ) from error
