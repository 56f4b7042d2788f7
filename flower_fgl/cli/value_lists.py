"""Values of a setting on the command line: one, a list, or a range of whole numbers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, get_type_hints

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar, kebab, load_toml
from flower_fgl.core.settings import GeneralSettings, SyntheticSettings
from flower_fgl.methods import METHODS

__all__ = ["Given", "parse_value", "read_options", "read_value", "read_values"]
__all__ += ["reject_given_twice", "split_pair"]

Given = Scalar | list[Scalar]
"""One value for all runs, or the values of a grid."""
RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
BROKEN_RANGE = re.compile(r"-?[\d.]*\d\.\.\.?-?\d[\d.]*")
"""Text that looks like a range but is none: ``0.1..0.3``, ``0...4``."""
MOST = 10_000
"""Largest number of values of a range; a longer one is a typing error."""


def split_pair(pair: str) -> tuple[str, str]:
    """Split ``key=value``; raise ConfigError if there is no key or no ``=``."""
    key, sign, text = pair.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f'--set expects key=value, got "{pair}".')
    return key.strip(), text.strip()


def parse_value(text: str) -> Any:
    """Parse a TOML value; a bare word is a string, and ``True`` is the boolean."""
    try:
        return load_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_options(options: Mapping[str, str], pairs: Sequence[str]) -> dict[str, Given]:
    """Read the options of ``flower-fgl run`` that are settings, and its ``--set``."""
    texts = dict(options)
    for pair in pairs:
        key, text = split_pair(pair)
        reject_given_twice(options, [key])
        if key in texts:
            raise ConfigError(
                f"--set {key}=… is given twice: give it once. Several values are a list: "
                f"--set {key}={texts[key]},{text}"
            )
        texts[key] = text
    values = {key: read_values(key, text) for key, text in texts.items()}
    return {key: v if len(v) > 1 else v[0] for key, v in values.items()}


def read_value(key: str, text: str) -> Any:
    """Read the single value of a setting: TOML, or the text as typed."""
    return _as_text(parse_value(text), text, _declared(key)[1])


def reject_given_twice(options: Collection[str], pairs: Collection[str]) -> None:
    """Reject a setting that both an option and ``--set`` give."""
    for key in pairs:
        if key in options:
            option = "rule" if key == "partition" else key
            raise ConfigError(
                f"--{option} and --set {key}=… set the same key: give only one."
            )


def read_values(key: str, text: str) -> list[Scalar]:
    """Read the values of one setting: ``1``, ``1,2``, ``0..4`` or a TOML array.

    A setting whose single value may contain commas (``model``, paths) is not split: its
    lists are TOML arrays. In other settings, a text in quotes is a single value.
    """
    field, kind = _declared(key)
    value = parse_value(text)
    if isinstance(value, list):
        values = value
    elif value != text or field is None or field.metadata["keeps_commas"]:
        values = [_as_text(value, text, kind)]
    else:
        pieces = [piece.strip() for piece in text.split(",")]
        if len(pieces) > 1 and "" in pieces:
            raise ConfigError(
                f"{key} has an empty value between or beside commas: {text}."
            )
        values = [value for piece in pieces for value in _read_piece(key, piece, kind)]
    if not values or not all(isinstance(v, bool | int | float | str) for v in values):
        raise ConfigError(
            f"{key} expects a value, a list such as 1,2 or a range such as 0..4, got "
            f"{text}."
        )
    for position, one in enumerate(values):
        if one in values[:position]:
            raise ConfigError(f"{key} lists {one} twice: {text}. List each value once.")
    return values


def _as_text(value: Any, text: str, kind: type | None) -> Any:
    """Return the text as typed where a setting is a text but TOML reads another type."""
    return text if kind is str and not isinstance(value, str | list) else value


def _read_piece(key: str, piece: str, kind: type | None) -> list[Any]:
    """Read one element of a list, which may be a range."""
    bounds = RANGE.fullmatch(piece)
    if kind is str or (bounds is None and not BROKEN_RANGE.fullmatch(piece)):
        return [_as_text(parse_value(piece), piece, kind)]
    if kind is not int:
        raise ConfigError(
            f"{key} is no whole number: {piece} is not a range of it. List its values: "
            f"{key}=0.1,0.2"
        )
    if bounds is None:
        raise ConfigError(
            f"{key}: {piece} is no range. A range of whole numbers is a..b, e.g. 0..4."
        )
    first, last = int(bounds[1]), int(bounds[2])
    if not first <= last < first + MOST:
        raise ConfigError(
            f"{key}: a range a..b goes from the smaller to the larger number, both "
            f"included, and has at most {MOST:,} values, got {piece}."
        )
    return list(range(first, last + 1))


def _declared(key: str) -> tuple[Field[Any] | None, type | None]:
    """Return the declaration and the type of a setting, ``None`` if it is unknown."""
    table, dot, name = key.rpartition(".")
    cls: Any = GeneralSettings
    if dot:
        row = METHODS.get(table)
        cls = SyntheticSettings if table == "synthetic" else row and row.settings
    for field in fields(cls) if cls else ():
        if kebab(field.name) == name:
            return field, get_type_hints(cls)[field.name]
    return None, None
