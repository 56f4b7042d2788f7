"""Arguments that several commands share, and the console and tables that they print."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from flower_fgl.cli.value_lists import read_value, reject_given_twice, split_pair
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar
from flower_fgl.core.unused_settings import (
    DATA_SETTINGS,
    reject_unread_settings,
    reject_unused_settings,
)
from flower_fgl.lab.experiments.experiment_file import with_clients
from flower_fgl.methods import parse_config

__all__ = ["GraphFile", "ModelFolder", "SettingPairs", "console", "data_config"]
__all__ += ["encodable", "given", "make_table"]
__all__ += ["parse_pairs", "rows_table", "show"]

WIDE = 160
"""Width in characters of output that goes to a file or another program."""
console = Console(width=None if sys.stdout.isatty() else WIDE)

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
    """Parse ``key=value`` pairs; values are TOML, bare words are strings."""
    out: dict[str, Scalar] = {}
    for key, text in map(split_pair, pairs):
        value = read_value(key, text)
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(f"--set {key} expects a single value, got {text}.")
        if key in out:
            raise ConfigError(f"--set {key}=… is given twice: give it once.")
        out[key] = value
    return out


def given(**values: str | None) -> dict[str, str]:
    """Return the options that the user gave, by run-config key."""
    return {k.replace("_", "-"): v for k, v in values.items() if v is not None}


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
        # loads torch: the settings are checked first
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
