"""The ``prepare`` command: from an owner's tables to a graph file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flower_fgl.cli.arguments import show
from flower_fgl.core.errors import ConfigError

__all__ = ["prepare"]


def prepare(
    recipe: Annotated[
        Path,
        typer.Argument(help="Recipe (TOML): what the columns mean.", dir_okay=False),
    ],
    tables: Annotated[
        list[Path], typer.Argument(help="CSV, Parquet, GraphML or .npz files.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="New folder of CSV tables, or new .npz file, to write."),
    ] = None,
    propose: Annotated[
        Path | None,
        typer.Option(
            help="Write a vocabulary from these tables instead, for all parties to share.",
            dir_okay=False,
        ),
    ] = None,
    no_labels: Annotated[
        bool,
        typer.Option(
            "--no-labels", help="Prepare tables without labels, for flower-fgl predict."
        ),
    ] = False,
) -> None:
    """Make a graph file from an owner's tables.

    The recipe declares each column: number, category, date, yes/no, id, label, time or
    ignore. docs/prepare.md describes it, and examples/recipes has some.
    """
    if (output is None) == (propose is None):
        raise ConfigError(
            "Give either --output, a graph file to write, or --propose, a vocabulary to "
            "write."
        )
    # loads torch: the arguments are checked first
    from flower_fgl.datasets.tables.prepare import prepare_graph, propose_vocabulary

    if propose is not None:
        for line in propose_vocabulary(recipe, tables, propose):
            show(line)
        show(
            f"{propose} holds the values of categories, and mean, standard deviation and "
            "median of numbers. Read it before you send it to the other parties."
        )
    if output is not None:
        for line in prepare_graph(recipe, tables, output, has_labels=not no_labels):
            show(line)
        then = "flower-fgl predict" if no_labels else f"flower-fgl check-graph {output}"
        show(f"{output} is written. Next: {then}")
