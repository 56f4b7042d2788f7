"""Declaration of single settings, and parsing of values into settings dataclasses."""

import ast
import difflib
import inspect
import json
import math
import operator
import os
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, field, fields
from functools import cache
from itertools import pairwise
from typing import Any, cast, get_type_hints

from flower_fgl.core.errors import ConfigError

__all__ = ["AUTO", "Scalar", "drop_removed", "fields_by_key", "help_texts", "kebab"]
__all__ += [
    "listed",
    "load_toml",
    "nearest",
    "option",
    "parse_settings",
    "removed_settings",
]

Scalar = bool | int | float | str
AUTO = "auto"
MOST_LISTED = 150
"""Most names that an error lists whole; settings are fewer."""
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
"""Bounds of :func:`option`, named as in ``operator``, and their signs."""
BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
"""Texts that count as booleans: in TOML, in Python, and each of them in quotes."""


def listed(values: Mapping[str, Scalar]) -> str:
    """Return values for a log line: ``key = value``, separated by commas."""
    return ", ".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}"
        for key, value in values.items()
    )


def option(
    default: Scalar,
    text: str = "",
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: str = "",
    auto: bool = False,
    keeps_commas: bool = False,
    is_path: bool = False,
    may_be_number: bool = False,
    holds_numbers: bool = False,
) -> Any:
    """Declare one setting of a settings dataclass.

    Parameters
    ----------
    default : bool, int, float or str
        Value if the user gives none.
    text : str, optional
        Help text: meaning, unit, special values and source. By default it is the string
        below the field, see :func:`help_texts`.
    ge, gt, le, lt : float, optional
        Bounds of a number.
    choices : str
        Space-separated values that a string may take; empty: any.
    auto : bool
        Whether a method may have its own default (the value ``"auto"``).
    keeps_commas : bool
        Whether a comma belongs to a single value (a list, or a path). The command line
        then does not read it as several values of a grid.
    is_path : bool
        Whether the value is a path, in which ``~`` stands for the user's home folder.
    may_be_number : bool
        Whether the value is a name that may be a whole number, which then needs no quotes.
    holds_numbers : bool
        Whether the text is a list of numbers; a single one needs no quotes.
    """
    metadata = {
        "text": text,
        "ge": ge,
        "gt": gt,
        "le": le,
        "lt": lt,
        "choices": tuple(choices.split()),
        "auto": auto,
        "keeps_commas": keeps_commas,
        "is_path": is_path,
        "may_be_number": may_be_number,
        "holds_numbers": holds_numbers,
    }
    return field(default=default, metadata=metadata)


@cache
def help_texts(cls: Any) -> Mapping[str, str]:
    """Return the help text of each field of a settings dataclass, by the field's name.

    A string below a field is read from the source code; without that it is empty.
    """
    texts = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # typed in a shell, or object itself
            continue
        for declared, below in pairwise(cast(ast.ClassDef, tree.body[0]).body):
            match declared, below:
                case (
                    ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[name] = " ".join(text.split())
    own = {field.name: field.metadata["text"] for field in fields(cls)}
    return {name: text or texts.get(name, "") for name, text in own.items()}


def kebab(name: str) -> str:
    """Convert a Python name to a kebab-case config key."""
    return name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the closest name and the list: ``'Did you mean "a"? Known: a, b.'``.

    Of more than ``MOST_LISTED`` names, such as the nodes of a graph, it lists the first 20.
    """
    names = sorted(known)
    # papers write "FedPG" and "FED-PUB", users "round" for "rounds"
    given = _letters(name)
    same = [n for n in names if given and _letters(n) in (given, f"{given}s")]
    name = name.lower()
    lower = {known.lower(): known for known in names}
    # "link-prediction" means "link", although "inductive" has more letters in common
    begins = [known for known in lower if name.startswith(f"{known}-")]
    swapped = [known for known in lower if sorted(known) == sorted(name)]
    longer = [known for known in lower if known.startswith(f"{name}-")]
    found = begins[-1:] or swapped or longer
    found = found or difflib.get_close_matches(name, lower, n=1, cutoff=0.6)
    close = same or [lower[known] for known in found]
    hint = f'Did you mean "{close[0]}"? ' if close else ""
    between = "; " if any("," in name for name in names) else ", "
    if len(names) <= MOST_LISTED:
        return f"{hint}Known: {between.join(names)}."
    return f"{hint}Known: {between.join(names[:20])}, … ({len(names):,} in all)."


def _letters(name: str) -> str:
    """Return the letters, digits and ``+`` of a name, in lower case."""
    return "".join(c for c in name.casefold() if c.isalnum() or c == "+")


def load_toml(text: str) -> dict[str, Any]:
    """Parse TOML that may write booleans as Python does, ``True`` and ``False``."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        bare = r"(?<=[=\[,])(\s*)(True|False)(?=\s*(?:[,\]#]|$))"
        lower = re.sub(bare, lambda m: m[1] + m[2].lower(), text, flags=re.MULTILINE)
        if lower == text:
            raise
        return tomllib.loads(lower)


def _shown(bound: float) -> str:
    """Return a bound for a message; ``:g`` would write a million as 1e+06."""
    return f"{bound:g}" if bound < 10**5 else f"{bound:,}"


def _check(cls: Any, field: Field[Any], key: str, value: Any) -> Scalar:
    """Return ``value`` converted to the type of the field, or raise ConfigError."""
    kind, metadata = _types_of(cls)[field.name], field.metadata
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    takes_bool = kind is bool or "true" in metadata["choices"]
    if takes_bool and str(value) in BOOLEANS:  # a TOML file holds true without quotes
        value = BOOLEANS[str(value)] if kind is bool else str(value).lower()
    is_name = metadata["may_be_number"] and isinstance(value, int)
    if is_number and (is_name or metadata["holds_numbers"]):
        value, is_number = str(value), False
    fits = {
        bool: isinstance(value, bool),
        int: is_number and math.isfinite(value) and float(value).is_integer(),
        float: is_number and math.isfinite(value),
        str: isinstance(value, str),
    }[kind]
    if not fits:
        hint = f' (or "{AUTO}")' if metadata["auto"] else ""
        finite = "finite and " if is_number and not math.isfinite(value) else ""
        raise ConfigError(
            f"{key} must be {finite}of type {kind.__name__}{hint}, got {value!r} "
            f"({type(value).__name__}). {key}: {help_texts(cls)[field.name]}."
        )
    bounds = {n: metadata[n] for n in BOUNDS if metadata[n] is not None}
    if not all(getattr(operator, n)(value, bound) for n, bound in bounds.items()):
        text = " and ".join(f"{BOUNDS[n]} {_shown(bounds[n])}" for n in bounds)
        raise ConfigError(f"{key} must be {text}, got {value!r}.")
    if metadata["choices"] and value not in metadata["choices"]:
        raise ConfigError(
            f'{key} = "{value}" is unknown. {nearest(str(value), metadata["choices"])}'
        )
    if metadata["is_path"]:
        value = os.path.expanduser(value)
    typed: Scalar = kind(value)
    return typed


@cache
def fields_by_key(cls: Any) -> Mapping[str, Field[Any]]:
    """Return the fields of a settings dataclass by kebab-case key."""
    return {kebab(f.name): f for f in fields(cls)}


_types_of = cache(get_type_hints)


def removed_settings(cls: type[Any] | None) -> Mapping[str, Scalar]:
    """Return the former settings, class variable ``REMOVED``, with the values used now."""
    removed: Mapping[str, Scalar] = getattr(cls, "REMOVED", {})
    return removed


def drop_removed(
    cls: type[Any] | None, values: Mapping[str, Any], *, prefix: str = ""
) -> dict[str, Any]:
    """Leave out the former settings of a settings class, which earlier run folders hold.

    A ConfigError says that one has another value than its fixed one.
    """
    removed = removed_settings(cls)
    for key, fixed in removed.items():
        if key in values and values[key] != fixed:
            raise ConfigError(
                f"{prefix}.{key} is no longer a setting: its value is always {fixed!r}, "
                f"got {values[key]!r}. Remove the key, or use the version of flower-fgl "
                "that the file was written with."
            )
    return {key: value for key, value in values.items() if key not in removed}


def parse_settings(cls: Any, values: Mapping[str, Any], *, prefix: str = "") -> Any:
    """Build a settings dataclass, declared by :func:`option`, from kebab-case values.

    Missing keys take their default. ``prefix`` is the table's name for messages, e.g.
    ``"fedprox"``. Raises a ConfigError for an unknown key, a wrong type, a value out of
    range, or another value than the fixed one of a removed key.
    """
    dot = f"{prefix}." if prefix else ""
    values = drop_removed(cls, values, prefix=prefix)
    known = fields_by_key(cls)
    unknown = [key for key in values if key not in known]
    if unknown:
        names = [dot + name for name in known]
        raise ConfigError(
            f'Unknown setting "{dot}{unknown[0]}". {nearest(dot + unknown[0], names)}'
        )
    return cls(
        **{
            known[key].name: _check(cls, known[key], dot + key, value)
            for key, value in values.items()
        }
    )
