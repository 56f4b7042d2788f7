"""What a node keeps on disk for all runs: replies, secure sums, and its first split."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock

from flower_fgl.core.atomic import make_private_folder, write_file
from flower_fgl.core.errors import RunError
from flower_fgl.core.options import Scalar
from flower_fgl.protocols.secure_aggregation.history import SumHistory

__all__ = ["OwnerFile", "ReleaseLedger", "SplitRecord", "SumLedger"]


@dataclass(frozen=True)
class OwnerFile:
    """JSON file of a node in its ``state-dir``, which only its user may read.

    It belongs to the node and not to a run: no rewound, repeated or new run changes it
    back. ``owner`` is the name of the node's files.
    """

    folder: Path
    owner: str
    kind: ClassVar[str]

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.folder / f"{self.kind}-{self.owner}.json"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let other processes wait; create the folder if it is missing."""
        make_private_folder(self.folder)
        with FileLock(f"{self.path}.lock", mode=0o600):
            yield

    def read(self) -> Any:
        """Return the content; ValueError if it is no JSON."""
        return json.loads(self.path.read_text(encoding="utf-8"))

    def write(self, content: Any) -> None:
        """Replace the content atomically."""
        write_file(self.path, json.dumps(content).encode(), is_private=True)


@dataclass(frozen=True)
class ReleaseLedger(OwnerFile):
    """Counter of replies with uploads or scores; ``limit`` is ``max-releases``."""

    limit: int
    kind = "releases"

    def count(self) -> int:
        """Return the number of replies so far; RunError if the file is damaged."""
        try:
            value = self.read()["releases"]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(value)
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                "the counter of max-releases in its state-dir cannot be read. The data "
                "owner must restore or delete the file releases-*.json there."
            ) from error
        return value

    def require(self) -> None:
        """Raise a RunError if no reply is left."""
        if self.count() >= self.limit:
            raise RunError(
                f"its node config allows max-releases = {self.limit} replies with uploads "
                "or scores in all runs together, and all of them are used."
            )

    def add(self) -> None:
        """Count one reply, on disk, before it is sent; RunError if none is left."""
        try:
            with self.locked():
                self.require()
                self.write({"releases": self.count() + 1})
        except OSError as error:
            raise RunError(
                "the counter of max-releases cannot be written to its state-dir: "
                f"{error.strerror}."
            ) from error


@dataclass(frozen=True)
class SumLedger(OwnerFile):
    """File with the sums of secure aggregation that a node has helped to open."""

    kind = "sums"

    @contextlib.contextmanager
    def held(self, *, is_fixed: bool) -> Iterator[SumHistory]:
        """Read the sums, and write those that were added; other processes wait.

        ``is_fixed`` is the node config's ``fixed-roster``. A damaged file is never an
        empty history: RunError.
        """
        with contextlib.ExitStack() as stack:
            with self._writing():
                stack.enter_context(self.locked())
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


@dataclass(frozen=True)
class SplitRecord(OwnerFile):
    """File with the settings from which the split of an owner's first run was drawn.

    Two splits that differ by one item give away what that item adds to an upload.
    ``label`` is the name of the node, for errors; ``drawn`` are the settings, by name,
    from which the run draws the split.
    """

    label: str
    drawn: tuple[tuple[str, Scalar], ...]
    kind = "split"

    def require(self) -> None:
        """Raise a RunError if the first run had another split, or the file is damaged."""
        try:
            first = self.read()
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError):
            first = None
        if not isinstance(first, dict):
            raise RunError(
                f"{self.label} refuses the run: the record of its split, {self.path.name} "
                "in its state-dir, is damaged. The data owner must restore or delete it."
            )
        if first != dict(self.drawn):
            raise RunError(
                f"{self.label} refuses the run: it draws the split from "
                f"{_text(dict(self.drawn))}, the owner's first run drew it from "
                f"{_text(first)}. Use these settings. For another split the data owner "
                f"deletes {self.path.name} in its state-dir."
            )

    def keep(self) -> None:
        """Store the settings of the first run on disk; compare those of a later one."""
        try:
            with self.locked():
                self.require()
                if not self.path.exists():
                    self.write(dict(self.drawn))
        except OSError as error:
            raise RunError(
                f"{self.label} refuses the run: the record of its split cannot be written "
                f"to its state-dir: {error.strerror}."
            ) from error


def _text(drawn: dict[str, Scalar]) -> str:
    """Write settings for a message."""
    return ", ".join(f"{key} = {value}" for key, value in drawn.items())
