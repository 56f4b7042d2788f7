"""Commands that read run folders: report, embeddings, compare and reach."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from flower_fgl.cli.arguments import NodeSet, RunFolders, console, make_table, show
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.lab.report.numbers import cost_until, selecting_metric
from flower_fgl.lab.tables.compare import (
    common_metric,
    common_scale,
    compare_runs,
    finetuned_note,
    gains_per_owner,
    owner_metric,
    place_name,
    select_runs,
    side_names,
    unequal_settings,
)
from flower_fgl.lab.units import show_bytes, show_seconds
from flower_fgl.runs.environment import mixed_versions
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.run import RunFolder

__all__ = ["compare", "embeddings", "reach", "report"]


def report(
    runs: RunFolders,
    out: Path | None = typer.Option(None, help="HTML file or folder to write."),
    against: str = typer.Option(
        "", help="Mark runs that are significantly better than this method, or row."
    ),
    pictures: Path | None = typer.Option(
        None,
        help="Folder to which all pictures are written as SVG files.",
        file_okay=False,
    ),
    client: list[int] | None = typer.Option(
        None, help="Client whose nodes to draw (needs a checkpoint). Repeatable."
    ),
) -> None:
    """Write an HTML report of one or several runs."""
    found = [run for text in runs for run in select_runs(text)]
    from flower_fgl.lab.report.page import write_report
    from flower_fgl.lab.tabulate import order_runs

    nodes = None
    if client:
        if len(found) > 1:
            raise RunError(
                f"--client draws the nodes of a single run, got {len(found)} runs. Give "
                "one run folder."
            )
        from flower_fgl.cli.embeddings import embedding_figure

        nodes = embedding_figure(found[0], client)
    found, title = order_runs(found)
    path = write_report(
        found, out, against=against, pictures=pictures, nodes=nodes, title=title
    )
    show(f"Report: {path}")


def embeddings(
    run: Path = typer.Argument(..., help="Run folder with a checkpoint."),
    out: Path = typer.Option(
        ..., help="Picture to write: PNG, SVG or PDF.", dir_okay=False
    ),
    client: list[int] = typer.Option(..., help="Client to draw. Repeatable."),
) -> None:
    """Draw the embeddings of clients' nodes.

    Shows training, test and synthetic nodes on their first two principal components.
    """
    RunFolder.load(run)
    from flower_fgl.cli.embeddings import draw_embeddings

    path = draw_embeddings(run, client, out)
    show(f"Picture: {path}")


def compare(
    one: str = typer.Argument(
        ...,
        metavar="A",
        help="Run folders, folders of run folders, or patterns, separated by "
        "commas; FOLDER:NAME selects the runs of one case, or of one method.",
    ),
    other: str = typer.Argument(..., metavar="B", help="Runs to compare with A."),
    column: NodeSet = "test",
    metric: str = typer.Option(
        "",
        help="accuracy, macro_f1, auroc, …; by default the score that selects the "
        "round (accuracy or auroc), and mean_accuracy for few-shot runs. With "
        "--per-owner it is auroc only if every owner has one.",
    ),
    per_owner: bool = typer.Option(
        False, "--per-owner", help="Show what each owner gains from A to B."
    ),
) -> None:
    """Compare two methods by their paired differences.

    Runs are paired by dataset, partition, number of clients and seed. A t-test needs five
    pairs. The command also tells whether the methods are tied within one point, and how
    large a difference the runs could have shown.
    """
    sides = select_runs(one), select_runs(other)
    every = [run for runs in sides for run in runs]
    default = common_metric(every)
    if per_owner:
        # an owner has no AUROC if its items are of one class, and no mean over clients
        is_plain = default in ("accuracy", "mean_accuracy")
        default = "accuracy" if is_plain else owner_metric(every, column)
        _show_owners(*sides, column, metric or default)
        return
    metric = metric or default
    found = compare_runs(*sides, column=column, metric=metric)
    rows = dict(zip(next(iter(found.values())).names, sides, strict=True))
    for place, result in found.items():
        if len(found) > 1:
            show(f"{place}:")
        title = result.scale.title if result.scale.is_error else metric
        title += "" if result.scale.kind.has_units else ", %"
        table = make_table("runs", f"{column} {title}", "not completed")
        for name, scores in zip(rows, (result.one, result.other), strict=True):
            pending = [
                run.path.name
                for run in rows[name]
                if run.status != "completed" and place_name(run) == place
            ]
            table.add_row(name, result.scale.show_mean(scores), ", ".join(pending))
        console.print(table)
        show(str(result))
    if len(found) > 1:
        show(
            f"The p-values are Holm-adjusted for the {len(found)} comparisons. There is no "
            "mean over datasets."
        )
    if any(result.shares_partitions for result in found.values()):
        show(
            "Warning: several pairs have the same partition, and the difference may be "
            "another on other partitions. An experiment file with draws = 10 varies "
            "partition, split and model together."
        )
    paired = sum(len(result.one) for result in found.values())
    for name, runs in rows.items():
        if number := sum(run.status == "completed" for run in runs) - paired:
            show(
                f"Warning: {number} of the completed runs of {name} are left out: no run "
                "of the other side has the same dataset, partition, clients, split, "
                "target and seed."
            )
    _show_finetuned(rows)
    first = {name: dict(flatten_config(runs[0].config)) for name, runs in rows.items()}
    versions = mixed_versions({str(run.path): run.environment for run in every})
    for text in (*unequal_settings(first), *versions):
        show(f"Warning: {text}")


def _show_owners(
    one: Sequence[RunFolder], other: Sequence[RunFolder], column: str, metric: str
) -> None:
    """Print the scores and the gain of each owner, who wins and who loses."""
    gains = gains_per_owner(one, other, column=column, metric=metric)
    names = side_names(one, other)
    scale = common_scale(metric, [*one, *other])
    end = f", {scale.title}" if scale.is_error else ""
    end += "" if scale.kind.has_units else ", %"
    table = make_table("owner", *(f"{n}{end}" for n in names), "gain", "better in")
    for owner, *scores, gain, pairs, wins in gains.itertuples(name=None):
        texts = [*map(scale.show, scores), scale.show(gain, sign="+")]
        table.add_row(owner, *texts, f"{wins} of {pairs}")
    console.print(table)
    winners, losers = (gains["gain"] > 0).sum(), (gains["gain"] < 0).sum()
    sides = [gains[side].sort_index().to_dict() for side in ("one", "other")]
    lowest = ", ".join(
        f"{(worst := scale.worst(scores))} {scale.show(scores[worst])} with {method}"
        for scores, method in zip(sides, names, strict=True)
    )
    show(
        f"{winners} of {len(gains)} owners gain, {losers} lose ({column} {metric}, "
        f"{names[1]} against {names[0]}). Worst owner: {lowest}."
    )
    _show_finetuned(dict(zip(names, (one, other), strict=True)))


def _show_finetuned(rows: Mapping[str, Sequence[RunFolder]]) -> None:
    """Say which scores are taken after fine-tuning."""
    tuned = [
        n for n, runs in rows.items() if any("finetuned" in r.summary for r in runs)
    ]
    if tuned:
        show(finetuned_note(tuned))


def reach(
    target: Annotated[
        float,
        typer.Argument(
            metavar="SCORE", help="Target accuracy, AUROC or RMSE, e.g. 0.8."
        ),
    ],
    runs: RunFolders,
    column: NodeSet = "test",
    metric: str = typer.Option(
        "",
        help="accuracy, macro_f1, auroc, …; by default the score that selects the "
        "run's best round.",
    ),
) -> None:
    """Show the cost of runs until they reach a score.

    The cost is the number of rounds, bytes and seconds. The score is the accuracy, or
    AUROC or RMSE where runs are selected by it.
    """
    found = [run for text in runs for run in select_runs(text)]
    names = {metric or selecting_metric(run) for run in found}
    if len(names) > 1:
        raise ConfigError(
            f"The runs are selected by different scores ({', '.join(sorted(names))}). "
            "Set --metric to the one to compare."
        )
    (name,) = names
    scale = common_scale(name, found)
    title = scale.title + ("" if scale.kind.has_units else ", %")
    table = make_table("run", "round", "bytes", "time", f"best {column} {title}")
    for run in found:
        cost = cost_until(run, target, column=column, metric=name)
        table.add_row(
            run.path.name,
            "not reached" if cost.server_round is None else str(cost.server_round),
            show_bytes(cost.num_bytes),
            show_seconds(cost.seconds),
            "-" if cost.best is None else scale.show(cost.best),
        )
    console.print(table)
