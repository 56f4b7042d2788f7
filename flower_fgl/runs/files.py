"""Files of a run folder, see docs/run-folder.md: names, and functions that read them.

Rows are flushed after each round and files are replaced atomically, so the folder of a
killed run is always readable. NaN (a metric without nodes) becomes ``null``.
"""

import contextlib
import json
import re
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, TypeVar

import tomli_w

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar

__all__ = ["CLIENTS_FILE", "CONFIG_FILE", "ENDED", "HEADER", "MEND", "MODEL", "ORIGIN"]
__all__ += ["RELEASES", "ROUNDS", "SUMMARY", "OnRound", "Row", "check_folder_name"]
__all__ += ["flatten_config", "grouped", "in_folder_name", "parse_row", "read_lines"]
__all__ += ["read_sources", "read_text", "require_whole", "settings_toml"]
__all__ += ["status_of", "tell_apart"]

CONFIG_FILE, SUMMARY, MODEL = "config.toml", "summary.json", "model.safetensors"
ROUNDS, CLIENTS_FILE, RELEASES = "rounds.jsonl", "clients.jsonl", "releases.jsonl"
IN_RUN_FOLDER = {CONFIG_FILE, SUMMARY, MODEL, ROUNDS, CLIENTS_FILE, RELEASES}
ORIGIN = ("started", "environment")
"""Entries of the summary that stay when it is replaced."""
ENDED = ("completed", "failed", "interrupted")
"""Values of ``status`` of a run that has ended."""
MEND = "Restore the file, or remove its folder and run the command again."
HEADER = ["method", "dataset", "clients", "seed", "engine"]
HEADER += ["partition_sha256", "evaluate"]
SETTING = re.compile(r'^("[^"]*"|[\w-]+) = .*  # ([a-z ]+)$')
TABLE = re.compile(r"^\[(.+)\]$")

TITLE = "# All settings of this run, down to the last line.\n"
END = "# end of settings"

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Row = Mapping[str, Any]
"""One row of ``rounds.jsonl`` or ``clients.jsonl``."""
OnRound = Callable[[Row], None]
"""Callback that receives the row of each round."""


def flatten_config(config: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting of nested tables as dotted key and value."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten_config(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def settings_toml(config: Row, sources: Mapping[str, str], about: str = "") -> str:
    """Format settings as TOML with sources as comments; ``about`` follows the title."""
    tables: dict[str, list[str]] = {"": []}
    for key, value in flatten_config(config):
        if value is None:
            continue
        table, name = key.split(".", 1) if "." in key else ("", key)
        if table not in tables:  # dumping an empty table gives its quoted header
            tables[table] = [f"\n{tomli_w.dumps({table: {}}).strip()}"]
        line = tomli_w.dumps({name: value}).rstrip("\n")
        comment = f"  # {sources[key]}" if key in sources else ""
        tables[table].append(line + comment)
    return (
        TITLE
        + about
        + "\n".join(line for lines in tables.values() for line in lines)
        + f"\n{END}\n"
    )


def require_whole(text: str, path: Path) -> None:
    """Raise a RunError if :func:`settings_toml` wrote the file and its end is missing."""
    if text.startswith(TITLE) and f"\n{END}" not in text:
        raise RunError(f'{path} is damaged: its last line, "{END}", is missing. {MEND}')


def read_sources(text: str) -> dict[str, str]:
    """Read the sources of values from the comments that :func:`settings_toml` wrote."""
    sources, table = {}, ""
    for line in text.split("\n"):  # splitlines also splits inside strings
        if header := TABLE.match(line):
            table = header[1].strip('"') + "."
        elif setting := SETTING.match(line):
            sources[table + setting[1].strip('"')] = setting[2]
    return sources


def read_text(path: Path) -> str:
    """Read a file of a run folder; raise RunError if it is unreadable or not UTF-8."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise RunError(
            f"Cannot read {path}: {error.strerror}. Is this a run folder?"
        ) from error
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged: {error}. {MEND}") from error


def status_of(folder: Path) -> str:
    """Return the status of a run that may be writing its folder; empty if it has none."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(json.loads((folder / SUMMARY).read_text("utf-8"))["status"])
    return ""


def parse_row(text: str, where: str, key: str) -> dict[str, Any]:
    """Parse a JSON object that contains ``key``; raise RunError if it is damaged."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise RunError(f"{where} is damaged: {error}. {MEND}") from error
    if not isinstance(row, dict) or key not in row:
        raise RunError(
            f'{where} is damaged: expected an object with "{key}", got {text[:40]!r}. '
            f"{MEND}"
        )
    if key == "round" and type(row[key]) is not int:
        raise RunError(f"{where} is damaged: its round is {row[key]!r}. {MEND}")
    return row


def read_lines(
    path: Path, *, key: str = "round", is_finished: bool = False
) -> list[dict[str, Any]]:
    """Read JSON lines, objects that contain ``key``; none if there is no file.

    An incomplete last line is skipped, or an error if the run is finished.
    """
    if not path.exists():
        return []
    *whole, rest = read_text(path).split("\n")
    if rest and is_finished:
        raise RunError(
            f"{path} is damaged: its last line is cut off, but the run is complete. Copy "
            "the folder again, or remove it and run the experiment again."
        )
    return [
        parse_row(line, f"{path}, line {number}", key)
        for number, line in enumerate(whole, start=1)
    ]


def in_folder_name(value: Scalar) -> str:
    """Convert a case name or grid value to text that is safe in a folder name."""
    text = "".join(c if c.isalnum() or c in ".+-" else "_" for c in str(value))
    return re.sub("_+", "_", text).strip("_")


def check_folder_name(name: str, what: str) -> None:
    """Reject a name of which :func:`in_folder_name` leaves nothing but dots, e.g. ``..``.

    ``what`` has the name; the message of the ConfigError begins with it.
    """
    if not in_folder_name(name).strip("."):
        raise ConfigError(
            f'{what} "{name}" cannot be the name of a run folder. Use a name with letters '
            "or digits."
        )


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return items by a key, which is in the order of its first item."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def tell_apart(
    configs: Sequence[Mapping[str, Any]], *, but: Collection[str] = ()
) -> list[str]:
    """Name runs by method and by the settings that differ among runs of that method.

    E.g. ``adpfedgnn · rl=false``; settings in ``but`` are not part of a name.
    """
    names = []
    for config in configs:
        method = str(config["method"])
        same = [other for other in configs if other["method"] == method]
        own = [
            f"{key.removeprefix(f'{method}.')}="
            f"{value if isinstance(value, str) else json.dumps(value)}"
            for key, value in config.items()
            if key not in but and any(other.get(key) != value for other in same)
        ]
        names.append(" · ".join([method, *own]))
    return names
