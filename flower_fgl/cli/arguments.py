"""Arguments that several commands share, their app, console and tables.

A value of a setting is one value, a list, or a range of whole numbers.
"""

import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import click
import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperCommand

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar, fields_by_key, kebab, load_toml
from flower_fgl.core.settings import GeneralSettings, SyntheticSettings
from flower_fgl.core.unused_settings import (
    DATA_SETTINGS,
    reject_unread_settings,
    reject_unused_settings,
)
from flower_fgl.lab.experiments.experiment_file import with_clients
from flower_fgl.methods import METHODS, parse_config

__all__ = ["App", "Given", "GraphFile", "ModelFolder", "SettingPairs", "console"]
__all__ += ["data_config", "encodable", "make_table", "parse_pairs"]
__all__ += ["parse_value", "read_options", "read_values"]
__all__ += ["reject_given_twice", "rows_table", "show", "split_pair"]

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
    field = fields_by_key(cls).get(name) if cls else None
    return field, get_type_hints(cls)[field.name] if field else None


WIDE = 160
"""Width in characters of output that goes to a file or another program."""
console = Console(
    width=None if sys.stdout.isatty() else WIDE, markup=False, emoji=False
)

SettingPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any run-config key, e.g. --set fedprox.mu=0.1. Repeatable. `run` "
        "also takes a list or a range.",
    ),
]

ModelFolder = Annotated[
    Path, typer.Option(help="Model folder of a data owner, or a run folder.")
]
GraphFile = Annotated[
    Path, typer.Option(help="Graph or set of graphs: an .npz file or a CSV folder.")
]

Dataset = Annotated[
    str | None,
    typer.Option(help="Dataset (default synthetic), see flower-fgl datasets."),
]
Clients = Annotated[
    int | None,
    typer.Option(help="Number of clients; by default 10, or that of the owners."),
]
Rule = Annotated[
    str | None,
    typer.Option(help="Partition rule (default metis): louvain, dirichlet, …"),
]
GraphPath = Annotated[Path, typer.Argument(help="Graph: an .npz file or a CSV folder.")]
NpzFolder = Annotated[
    Path, typer.Argument(help="Folder for the .npz files.", file_okay=False)
]
NodeSet = Annotated[str, typer.Option(help="Node set: test, val, …")]
RunFolders = Annotated[
    list[str],
    typer.Argument(
        help="Run folders, folders of run folders, or patterns; FOLDER:NAME selects the "
        "runs of one case, or of one method."
    ),
]


def show(text: object, to: Console = console, style: str | None = None) -> None:
    """Print text without markup, highlighting or line wrapping."""
    to.print(
        encodable(str(text)), style=style, markup=False, highlight=False, soft_wrap=True
    )


def encodable(text: str) -> str:
    """Return text that any terminal can print: parts of odd file names are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def parse_pairs(pairs: Sequence[str]) -> dict[str, Scalar]:
    """Parse ``key=value`` pairs of single values, see :func:`read_values`."""
    out: dict[str, Scalar] = {}
    for key, text in map(split_pair, pairs):
        value, *more = read_values(key, text)
        if more:
            raise ConfigError(f"--set {key} expects a single value, got {text}.")
        if key in out:
            raise ConfigError(f"--set {key}=… is given twice: give it once.")
        out[key] = value
    return out


def data_config(
    dataset: str | None,
    clients: int | None,
    rule: str | None,
    settings: Sequence[str] | None,
    *,
    command: str,
) -> RunConfig:
    """Return the checked settings of a command that only reads data."""
    pairs = parse_pairs(settings or [])
    options: dict[str, Scalar | None] = {"dataset": dataset, "partition": rule}
    options["clients"] = clients
    own = {key: value for key, value in options.items() if value is not None}
    reject_given_twice(own, pairs)
    values = with_clients({**own, **pairs})
    config = parse_config(values)
    reject_unread_settings(pairs, DATA_SETTINGS | {"synthetic"}, command)
    reject_unused_settings({**own, **pairs}, [config])
    if config.owners:
        from flower_fgl.simulation.local import count_owners

        return parse_config(count_owners(values))
    if config.clients < 1:
        raise ConfigError(f"--clients must be at least 1, got {config.clients}.")
    return config


def make_table(*names: str) -> Table:
    """Return an empty table whose first column is never truncated."""
    first, *rest = names
    return Table(
        Column(first, no_wrap=True), *(Column(name, overflow="fold") for name in rest)
    )


def rows_table(sections: Sequence[Sequence[Mapping[str, str]]]) -> Table:
    """Build a table of sections of rows; cells of missing keys stay empty."""
    columns = dict.fromkeys(key for rows in sections for row in rows for key in row)
    table = make_table(*columns)
    for rows in sections:
        for row in rows:
            table.add_row(*(row.get(column, "") for column in columns))
        table.add_section()
    return table


class _Command(TyperCommand):
    """Command that refuses a repeated option, and expands ``~`` in every path.

    Click would use the last value of a repeated option. A shell does not expand ``~`` in
    ``--out=~/report.html``.
    """

    def make_parser(self, ctx: click.Context) -> Any:
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            values, rest, order = parse(args=args)
            for param, number in Counter(order).items():
                if (
                    number > 1
                    and isinstance(param, click.Option)
                    and not param.multiple
                ):
                    name = max(param.opts, key=len)
                    hint = f" Several values are a list: {name} A,B."
                    is_setting = kebab(param.name or "") in fields_by_key(
                        GeneralSettings
                    )
                    is_list = ctx.command.name == "run" and is_setting
                    raise ConfigError(
                        f"{name} is given {number} times: give it once."
                        f"{hint if is_list else ''}"
                    )
            for param in self.params:
                if isinstance(param.type, click.Path) and values.get(param.name):
                    values[param.name] = _expanded(values[param.name])
            return values, rest, order

        parser.parse_args = parse_once
        return parser


def _expanded(value: Any) -> Any:
    """Return a path, or several, with the user's home folder in place of ``~``."""
    if isinstance(value, str):
        return os.path.expanduser(value)
    return [_expanded(part) for part in value] if isinstance(value, list) else value


class App(typer.Typer):
    """App whose commands refuse an option given twice, and expand ``~`` in paths."""

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        """Register a command, see :meth:`typer.Typer.command`."""
        return super().command(name, **{"cls": _Command, **options})
