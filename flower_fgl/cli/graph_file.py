"""Commands for those who own a graph: ``check-graph`` and ``predict``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from flower_fgl.core.options import Scalar

__all__ = ["print_check", "print_prediction"]


def print_check(graph: Path, settings: dict[str, Scalar], console: Console) -> bool:
    """Print what is wrong with a file and what the server would learn.

    Parameters
    ----------
    graph : Path
        The file or folder.
    settings : dict
        Run config of the planned run.
    console : Console
        Where to print.

    Returns
    -------
    bool
        Whether the file can be used.
    """
    from flower_fgl.cli.check_graph import check_graph, told

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    report = check_graph(graph, settings)
    for number, problem in enumerate(report.problems, start=1):
        say(f"Problem {number}: {problem}")
    for note in report.notes:
        say(f"Note: {note}")
    if report.description is None:
        say(f"{graph} cannot be used yet: {len(report.problems)} problems.")
        return False
    say(f"{graph} can be used.")
    say("What the server would learn before round 1:")
    full = told(report.description, with_counts=True)
    bare = told(report.description, with_counts=False)
    for key, value in full.items():
        if bare[key] == value:
            say(f"  {key} = {'(empty)' if value in ('', b'') else value}")
        else:
            say(f"  {key} = {value}   (share-class-counts = true)")
            say(f"  {key} = {bare[key]}   (share-class-counts = false)")
    say("partition-id -1: the server gives the number, and then knows the model.")
    say("public-key: 32 random bytes with secure-aggregation = true.")
    return True


def print_prediction(model: Path, graph: Path, output: Path, console: Console) -> None:
    """Predict, write the table, and say what was done.

    Parameters
    ----------
    model, graph, output : Path
        Model folder, graph file, and the CSV file to write.
    console : Console
        Where to print.
    """
    from flower_fgl.cli.predict import predict, write_csv

    prediction = predict(model, graph)
    write_csv(prediction, output)
    card = prediction.card
    whose = f"of {card.owner}" if card.owner else "aggregated"
    console.print(
        f"{len(prediction.nodes):,} nodes, {len(card.class_names)} classes: {output}\n"
        f"model: {card.method}, {card.model}, round {card.round}, {whose}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
