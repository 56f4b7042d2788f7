"""The ``explain`` command: which features and edges carry the score of one item."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flower_fgl.cli.arguments import show

__all__ = ["explain"]


def explain(
    model: Annotated[
        Path, typer.Option(help="Model folder of a data owner, or a run folder.")
    ],
    graph: Annotated[
        Path,
        typer.Option(help="Graph or set of graphs: an .npz file or a CSV folder."),
    ],
    item: Annotated[
        list[str],
        typer.Option(
            help="Identifier of a node or graph; twice for both ends of a pair."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="HTML page with text and picture.", dir_okay=False),
    ] = None,
    target: Annotated[
        str,
        typer.Option(help="Class or number to explain; by default the predicted one."),
    ] = "",
    seed: Annotated[int, typer.Option(help="Seed of masks and random edges.")] = 0,
) -> None:
    """Say which features and edges carry the score of one item.

    Everything is computed here, and nothing leaves this machine.
    """
    from flower_fgl.simulation.prediction import explain_item

    found = explain_item(model, graph, item, target=target, seed=seed)
    show(found.text)
    if output is not None:
        from flower_fgl.lab.report.explanation import write_explanation

        write_explanation(found, output)
        show(f"Page: {output}")
