"""Tables of an experiment file, with those of the files that it extends."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import load_toml
from flower_fgl.runs.files import flatten_config, read_text, require_whole

__all__ = ["read_tables", "standalone_text"]

EXTENDS = "extends"
"""Key of an experiment file: path of another one, relative to the file's own folder."""


def read_tables(path: Path) -> dict[str, Any]:
    """Read an experiment file, merged with the file that it extends, and so on.

    Tables are merged key by key. Any other value, lists, all ``[[case]]`` together and
    a range of ``[tune]`` included, replaces the one of the file it extends. An extended
    file has no published values or tuned settings, which belong to one dataset.
    """
    return _read(path, [])


def standalone_text(path: Path) -> str:
    """Return the file's own text, or the merged tables if it extends another file."""
    if EXTENDS not in _load(path, []):
        return read_text(path)
    table = read_tables(path)
    if (
        "grid" in table
    ):  # not nested: a table would come last, and the order names the runs
        table["grid"] = dict(flatten_config(table["grid"]))
    return f"# Written by flower-fgl run: {path.name} and what it extends.\n\n" + (
        tomli_w.dumps(table)
    )


def _read(path: Path, extending: list[Path]) -> dict[str, Any]:
    """Return the merged tables of a file; ``extending`` are the files that lead to it."""
    table = _load(path, extending)
    own = sorted(k for k in table if k.startswith("published") or k == "tuning")
    if extending and own:
        raise ConfigError(
            f"{extending[-1]} extends {path}, which has [{own[0]}]: its values are those "
            "of one dataset. Move this table into the files that extend it."
        )
    if EXTENDS not in table:
        return table
    name = table.pop(EXTENDS)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{path}: {EXTENDS} must be the path of an experiment file beside this one, "
            f'such as "base.toml", got {name!r}.'
        )
    base, way = path.parent / name, [*extending, path]
    if base.resolve() in [file.resolve() for file in way]:
        names = " extends ".join(str(file) for file in [*way, base])
        raise ConfigError(f"Experiment files extend each other: {names}.")
    return _merged(_read(base, way), table)


def _load(path: Path, extending: list[Path]) -> dict[str, Any]:
    """Parse one file."""
    try:
        text = path.read_text("utf-8-sig")
        require_whole(text, path)
        return load_toml(text)
    except OSError as error:
        what = f"{path}, which {extending[-1]} extends" if extending else str(path)
        raise ConfigError(
            f"Cannot read experiment {what}: {error.strerror}."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a TOML file: it holds no text.") from error


def _merged(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return two tables as one; where both have a value that is no table, the second's."""
    out = dict(base)
    for key, value in table.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        is_range = both and {"low", "high"} & (value.keys() | out[key].keys())
        out[key] = _merged(out[key], value) if both and not is_range else value
    return out
