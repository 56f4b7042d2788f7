"""Commands on single scores of a model: calibrate and explain."""

from pathlib import Path
from typing import Annotated

import typer

from flower_fgl.cli.arguments import GraphFile, ModelFolder, show

__all__ = ["calibrate", "explain"]


def calibrate(
    model: ModelFolder,
    graph: GraphFile,
    labels: Annotated[
        Path,
        typer.Option(
            help="CSV file with known items: the columns of predictions that identify "
            "them, and label.",
            dir_okay=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="Folder of the calibrated model.", file_okay=False)
    ],
    coverage: Annotated[
        float,
        typer.Option(help="Share of sets or intervals that are to hold the truth."),
    ] = 0.9,
    score: Annotated[
        str,
        typer.Option(help="Conformal score: aps, lac, raps, daps; numbers: scaled."),
    ] = "aps",
    from_time: Annotated[
        float | None,
        typer.Option(
            "--from", help="For edges: messages pass over edges before a time."
        ),
    ] = None,
    isotonic: Annotated[
        bool,
        typer.Option(
            "--isotonic", help="Also map probabilities, by half of the items."
        ),
    ] = False,
) -> None:
    """Calibrate a saved model with items whose truth is known.

    Use items that neither trained the model nor chose its round. Nothing leaves this
    machine.
    """
    from flower_fgl.simulation.prediction import calibrate_model

    found = calibrate_model(
        model, graph, labels, output,
        coverage=coverage, score=score, from_time=from_time, is_isotonic=isotonic,
    )  # fmt: skip
    shown = ", ".join(f"{value:.4g}" for value in found.thresholds)
    show(
        f"{output}: {found.items:,} items, temperature {found.temperature:.3g}"
        + (f", coverage {found.coverage:g}, thresholds {shown}" if shown else "")
    )


def explain(
    model: ModelFolder,
    graph: GraphFile,
    item: Annotated[
        list[str],
        typer.Option(
            help="Identifier of a node or graph; twice for both ends of a pair, of which "
            "the last edge is explained."
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
