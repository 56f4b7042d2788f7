"""Rows that other packages add to the tables of methods, backbones and datasets.

Every process that has such a package installed finds its entry points
``flower_fgl.methods``, ``flower_fgl.backbones`` and ``flower_fgl.datasets``.
:func:`flower_fgl.register` adds rows to this process only.
"""

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from flower_fgl.core.errors import ConfigError

__all__ = ["REINSTALL", "Kind", "Registered", "Table", "adopt", "code_of", "described"]
__all__ += ["known_names", "owner_of", "refusal", "register_row", "registered"]
__all__ += ["version_of"]

log = logging.getLogger(__name__)

Kind = Literal["methods", "backbones", "datasets"]
Row = TypeVar("Row")
Registered = dict[str, dict[str, Any]]

OURS = "flower-fgl"
NAME = re.compile(r"[a-z][a-z0-9+-]*")
REINSTALL = (
    "If a package of yours adds it: a new entry point needs a reinstall of the package "
    "(pip install -e .)."
)
"""End of the error for an unknown row: pip reads entry points when it installs."""
SINGULAR = {"methods": "method", "backbones": "backbone", "datasets": "dataset"}

# Tables are per process, as METHODS itself is: what a notebook registers, and why an
# installed row is not used.
_registered: Registered = {"methods": {}, "backbones": {}, "datasets": {}}
_refused: dict[str, dict[str, str]] = {"methods": {}, "backbones": {}, "datasets": {}}


@lru_cache(maxsize=3)
def installed(kind: Kind) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Find the rows of installed packages by sorted name, without importing them."""
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for entry in entry_points(group=f"flower_fgl.{kind}"):
        # an editable installation may be listed twice
        found.setdefault(entry.name, {})[_package_of(entry), entry.value] = entry
    return {
        name: tuple(rows[key] for key in sorted(rows))
        for name, rows in sorted(found.items())
    }


def _package_of(entry: EntryPoint) -> str:
    """Return the name of the package that offers a row."""
    return "unknown" if entry.dist is None else entry.dist.name


def _origin(entry: EntryPoint) -> str:
    """Return package and line of an entry point, for a message."""
    line = f"{entry.group}: {entry.name} = {entry.value}"
    return f"package {_package_of(entry)} (entry point {line})"


def known_names(kind: Kind) -> set[str]:
    """Return the names that other packages or this process add, without importing them."""
    return {*installed(kind), *_registered[kind]}


def version_of(kind: Kind, name: str) -> str:
    """Return package and version of an installed row, e.g. ``mine 1.0``; else empty."""
    found = next((entry.dist for entry in installed(kind).get(name, ())), None)
    return f"{found.name} {found.version}" if found else ""


def code_of(kind: Kind, name: str) -> tuple[str, Path] | None:
    """Return package with version, and the folder or file with the code, of a row.

    ``None`` if the row is one of flower-fgl or of this process, or its code is not found.
    """
    rows = installed(kind).get(name, ())
    if not rows or name in _registered[kind]:
        return None
    spec = find_spec(rows[0].module.partition(".")[0])
    if spec is None:
        return None
    place = [*(spec.submodule_search_locations or ()), spec.origin][0]
    return (version_of(kind, name), Path(place)) if place else None


def owner_of(kind: Kind, name: str) -> str:
    """Return where a row of another package comes from, for a message; else empty."""
    if name in _registered[kind]:
        return "flower_fgl.register in this process"
    return " and ".join(map(_origin, installed(kind).get(name, ())))


def described(kind: Kind, name: str) -> str:
    """Return a name and where it comes from, for a message: ``"mine" of package …``."""
    owner = owner_of(kind, name)
    return f'"{name}" of {owner}' if owner else f'"{name}"'


def refusal(kind: Kind, name: str) -> str:
    """Return why an installed row is not used; empty if it is, or if there is none."""
    return _refused[kind].get(name, "")


def registered() -> Registered:
    """Return the rows registered in this process, by kind and name."""
    return {kind: dict(rows) for kind, rows in _registered.items() if rows}


def adopt(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Register rows that another process has registered; a worker process calls this."""
    for kind, named in rows.items():
        _registered[kind].update(named)


def register_row(kind: Kind, name: str, row: Any, own: Mapping[str, Any]) -> None:
    """Add a row to a table of this process, or replace one that was added before.

    The name must be well-formed and free: no row of this package (``own``) or an
    installed one.
    """
    check_name(kind, name)
    taken = OURS if name in own else owner_of(kind, name)
    if taken and name not in _registered[kind]:
        raise ConfigError(
            f'The {SINGULAR[kind]} "{name}" exists already: it comes from {taken}. '
            "Register yours under another name."
        )
    _registered[kind][name] = row


def check_name(kind: Kind, name: str) -> None:
    """Raise ConfigError if a row has no valid name."""
    if not isinstance(name, str) or not NAME.fullmatch(name) or name == "synthetic":
        raise ConfigError(
            f"The name of a {SINGULAR[kind]} must start with a letter and contain "
            "lower-case letters, digits, - and + only (and not be synthetic), got "
            f"{name!r}."
        )


class Table(Mapping[str, Row], Generic[Row]):
    """Rows by name: those of this package, of installed packages and of ``register``.

    Installed rows are imported when the table is first read; ``read`` checks and converts
    them. Reading a row that cannot be used raises an error with the reason; listing the
    table logs it once. Rows of a light table must not import torch, since the command
    line reads it.
    """

    def __init__(
        self,
        kind: Kind,
        own: Mapping[str, Row],
        read: Callable[[str, Any], Row],
        *,
        is_light: bool = True,
    ) -> None:
        self.own = dict(own)
        self._kind, self._read, self._is_light = kind, read, is_light
        self._installed: dict[str, Row] | None = None
        self._given: dict[str, tuple[Any, Row]] = {}
        self._unreported: list[str] = []
        self._lock = threading.RLock()

    def __getitem__(self, name: str) -> Row:
        """Return a row; ConfigError if a package offers it and it cannot be used."""
        if name in self.own:
            return self.own[name]
        given = _registered[self._kind]
        if name in given:
            if name not in self._given or self._given[name][0] is not given[name]:
                self._given[name] = given[name], self._read(name, given[name])
            return self._given[name][1]
        found = self._complete()
        if name not in found and refusal(self._kind, name):
            raise ConfigError(refusal(self._kind, name))
        return found[name]

    def __contains__(self, name: object) -> bool:
        """Return whether there is a usable row of this name."""
        return (
            name in self.own
            or name in _registered[self._kind]
            or name in self._complete()
        )

    def __iter__(self) -> Iterator[str]:
        """Yield the names: our own in their order, then the others."""
        self._complete()
        while self._unreported:
            log.warning(self._unreported.pop())
        return iter([*self.own, *sorted({*self._complete(), *_registered[self._kind]})])

    def __len__(self) -> int:
        """Return the number of usable rows."""
        return len(list(iter(self)))

    def _complete(self) -> dict[str, Row]:
        """Return the rows of installed packages; import them at the first call."""
        if self._installed is None:
            with self._lock:
                if self._installed is None:
                    # set first: a row's module may read the table while it is imported
                    self._installed = {}
                    for name, rows in installed(self._kind).items():
                        self._add(self._installed, name, rows)
        return self._installed

    def _add(
        self, table: dict[str, Row], name: str, rows: tuple[EntryPoint, ...]
    ) -> None:
        """Import one installed row; leave it out if it cannot be used."""
        what, is_ours = SINGULAR[self._kind], name in self.own
        owners = [OURS] * is_ours + [*map(_origin, rows)]
        had_torch, problem = "torch" in sys.modules, ""
        if len(owners) > 1:
            kept = f"That of {OURS} is used." if is_ours else "Neither is used."
            problem = (
                f'The {what} "{name}" comes from two packages: {" and ".join(owners)}. '
                f"{kept} Rename one of them, or uninstall its package."
            )
        else:
            try:
                check_name(self._kind, name)
                table[name] = self._read(name, rows[0].load())
            except Exception as error:
                problem = (
                    f'The {what} "{name}" of {owners[0]} cannot be used: '
                    f"{type(error).__name__}: {error}. Fix or uninstall the package."
                )
        if problem:
            _refused[self._kind][name] = problem
            self._unreported.append(problem)
        elif self._is_light and not had_torch and "torch" in sys.modules:
            log.warning(
                'The %s "%s" of %s imports torch where it is listed, which delays every '
                "command by seconds. Import torch only in the modules that the row names.",
                what,
                name,
                owners[0],
            )
