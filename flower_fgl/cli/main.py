"""The command line: ``flower-fgl run``, ``methods``, ``partition`` and so on."""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flower_fgl.cli.tables import WIDE, make_table
from flower_fgl.core.config import DATASET_DEFAULTS, RunConfig
from flower_fgl.core.errors import ConfigError, FglError
from flower_fgl.core.options import Scalar, kebab, nearest
from flower_fgl.core.unused_settings import refuse_idle
from flower_fgl.methods import METHODS

__all__ = ["app", "main"]


typer.core.HAS_RICH = False  # it would escape brackets for a markup that is not used
app = typer.Typer(
    help="Federated graph learning as Flower apps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    suggest_commands=False,  # click does
)
console = Console(width=None if sys.stdout.isatty() else WIDE)
errors = Console(stderr=True)

SettingPairs = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any run-config key, e.g. --set fedprox.mu=0.1."),
]


def main() -> None:
    """Run the command line; errors a user can mend print without a traceback."""
    try:
        app()
    except FglError as error:
        errors.print(
            f"Error: {error}",
            style="bold red",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        sys.exit(1)


@contextmanager
def telling_how_to_go_on() -> Iterator[None]:
    """After Ctrl-C say how the run, whose folder the interrupt names, is continued."""
    try:
        yield
    except KeyboardInterrupt as stop:
        from flower_fgl.runs.checkpoints import newest_checkpoint

        told = "Interrupted."
        for folder in stop.args:
            kept = newest_checkpoint(Path(folder))
            told += (
                f" Run folder: {folder}"
                if kept is None
                else (
                    f" It goes on from round {kept.server_round} with: flower-fgl run "
                    f"--resume {shlex.quote(folder)}"
                )
            )
        errors.print(
            told, style="bold yellow", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(130) from stop


def parse_settings(pairs: Sequence[str]) -> dict[str, Scalar]:
    """Read ``key=value`` pairs; values are TOML, bare words are strings.

    Parameters
    ----------
    pairs : sequence of str
        E.g. ``["rounds=5", "model=gin", "fedprox.mu=0.1"]``.

    Returns
    -------
    dict

    Raises
    ------
    ConfigError
        If a pair has no ``=`` or its value is a list or table.
    """
    out: dict[str, Scalar] = {}
    for pair in pairs:
        key, sign, text = pair.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f'--set takes key=value, got "{pair}".')
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(f"--set {key} takes one value, got {text}.")
        out[key.strip()] = value
    return out


def given(**values: Scalar | None) -> dict[str, Scalar]:
    """Keep the options a user gave, with their config keys."""
    return {k.replace("_", "-"): v for k, v in values.items() if v is not None}


@app.command()
def run(
    experiment: Annotated[
        Path | None, typer.Argument(help="An experiment TOML, or a run's config.toml.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="See flower-fgl methods.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="See flower-fgl datasets.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients [10].")] = None,
    rounds: Annotated[int | None, typer.Option(help="Federated rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run [0].")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="local: this process; ray: Flower's simulation [ray]."),
    ] = None,
    settings: SettingPairs = None,
    workers: Annotated[
        int | None, typer.Option(help="Clients at once under Ray [one per core].")
    ] = None,
    client_gpus: Annotated[
        float, typer.Option(help="Share of a GPU per client under Ray.")
    ] = 0.0,
    quiet: Annotated[bool, typer.Option(help="No progress bar.")] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Continue an interrupted run: its folder.")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only this case of an experiment file; may be repeated."),
    ] = None,
) -> None:
    """Train a method over the clients of a data set and leave a run folder."""
    from flower_fgl.cli.run import How, resume_run, run_all

    options = given(
        method=method, dataset=dataset, clients=clients, rounds=rounds, seed=seed
    )
    pairs = parse_settings(settings or [])
    if twice := sorted(options.keys() & pairs.keys()):
        raise ConfigError(
            f"--{twice[0]} and --set {twice[0]}=… say the same: give one of them."
        )
    options |= pairs
    if resume is not None:
        if experiment is not None or options or engine is not None or case:
            raise ConfigError(
                "--resume continues a run with its own settings and engine: give only "
                "the folder, and --workers, --client-gpus or --quiet if need be."
            )
        with telling_how_to_go_on():
            resume_run(resume, How("", workers, client_gpus, quiet), console)
        return
    engine = engine or "ray"
    if engine not in ("local", "ray"):
        raise ConfigError(f'--engine must be "local" or "ray", got "{engine}".')
    if engine == "local" and (workers is not None or client_gpus):
        raise ConfigError(
            "--workers and --client-gpus belong to Ray: leave them out with --engine "
            "local, which runs one client after the other in this process."
        )
    if case and experiment is None:
        raise ConfigError("--case chooses from an experiment file: give one.")
    how = How(engine, workers, client_gpus, quiet)
    with telling_how_to_go_on():
        run_all(experiment, options, how, console, cases=case or ())


@app.command()
def methods() -> None:
    """List the methods and what they send."""
    table = make_table("method", "paper", "per round and client")
    for name, method in sorted(METHODS.items()):
        table.add_row(name, method.paper, method.payload)
    console.print(table)
    console.print("flower-fgl settings METHOD explains a method's own settings.")


@app.command()
def settings(
    method: Annotated[
        str | None, typer.Argument(help="Only what is this method's own.")
    ] = None,
) -> None:
    """Explain every key of the run config."""
    from flower_fgl.core.settings import GeneralSettings, SyntheticSettings

    table = make_table("key", "default", "meaning")
    if method is None:
        _explain(table, "", GeneralSettings)
        _explain(table, "synthetic.", SyntheticSettings)
    elif method not in METHODS:
        raise ConfigError(f'Unknown method "{method}". {nearest(method, METHODS)}')
    for name in sorted(METHODS) if method is None else [method]:
        _explain(table, f"{name}.", METHODS[name].settings)
    for key, value in METHODS[method].defaults.items() if method else ():
        table.add_row(key, f"{value!r}", "general, with a default of the method's own")
    console.print(table)
    if method is None:
        defaults = "; ".join(
            f"{name}: {key} = {value}"
            for name, values in DATASET_DEFAULTS.items()
            for key, value in values.items()
        )
        console.print(
            '(auto): the value "auto" takes the default of the method, else that of the '
            f"data set ({defaults}), else the one shown."
        )


def _explain(table: Table, prefix: str, cls: Any) -> None:
    """Add the fields of a dataclass of settings to a table."""
    from dataclasses import fields

    for f in () if cls is None else fields(cls):
        mark = " (auto)" if f.metadata["auto"] else ""
        choices = ", ".join(f.metadata["choices"])
        text = f.metadata["text"] + (f": {choices}" if choices else "")
        table.add_row(prefix + kebab(f.name), f"{f.default!r}{mark}", text)


@app.command()
def datasets() -> None:
    """List the data sets with their published statistics."""
    from flower_fgl.datasets.sources.load import SOURCES

    table = make_table(
        "data set", "task", "nodes", "edges", "features", "classes", "split"
    )
    for name, source in SOURCES.items():
        statistics = source.statistics
        table.add_row(
            name,
            source.task,
            *(_number(getattr(statistics, key, None)) for key in _STATISTICS),
            source.split,
        )
    console.print(table)
    console.print("Any other TU set as tu:NAME; a graph file by its path.")


_STATISTICS = ("nodes", "edges", "features", "classes")


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


@app.command()
def partition(
    dataset: Annotated[
        str, typer.Option(help="See flower-fgl datasets.")
    ] = "synthetic",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 10,
    rule: Annotated[str, typer.Option(help="metis, louvain, dirichlet …")] = "metis",
    settings: SettingPairs = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a heat map of class by client (PNG).")
    ] = None,
) -> None:
    """Cut a data set and say what the clients get."""
    from flower_fgl.cli.partition import describe_clients, write_heat_map

    config = data_config(dataset, clients, rule, settings)
    description = describe_clients(config)
    sets = ("train", "val", "test", *description.columns)
    table = make_table("client", description.items, *sets, "classes", "exp(entropy)")
    for row in description.rows:
        table.add_row(*row)
    console.print(table)
    console.print(description.summary, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        write_heat_map(description, out)
        console.print(f"Heat map: {out}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Where the .npz files go.")],
    dataset: Annotated[
        str, typer.Option(help="See flower-fgl datasets.")
    ] = "synthetic",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 10,
    rule: Annotated[str, typer.Option(help="metis, louvain, dirichlet …")] = "metis",
    settings: SettingPairs = None,
) -> None:
    """Write each client's graph as .npz, so that a deployment can be rehearsed."""
    from flower_fgl.cli.partition import export_clients

    for path in export_clients(data_config(dataset, clients, rule, settings), folder):
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)


@app.command("check-graph")
def check_graph(
    graph: Annotated[Path, typer.Argument(help="An .npz file or a CSV folder.")],
    settings: SettingPairs = None,
) -> None:
    """Say what is wrong with an owner's graph, and what the server would learn of it."""
    from flower_fgl.cli.graph_file import print_check

    if not print_check(graph, parse_settings(settings or []), console):
        raise typer.Exit(1)


@app.command()
def predict(
    model: Annotated[Path, typer.Option(help="An owner's model, or a run folder.")],
    graph: Annotated[Path, typer.Option(help="An .npz file or a CSV folder.")],
    output: Annotated[Path, typer.Option(help="CSV file to write.")],
) -> None:
    """Write the class probabilities of a graph's nodes as CSV."""
    from flower_fgl.cli.graph_file import print_prediction

    print_prediction(model, graph, output, console)


def data_config(
    dataset: str, clients: int, rule: str, settings: Sequence[str] | None
) -> RunConfig:
    """Check the settings of a command that only looks at data."""
    pairs = parse_settings(settings or [])
    values: dict[str, Scalar] = {
        "dataset": dataset,
        "clients": clients,
        "partition": rule,
        **pairs,
    }
    config = RunConfig.parse(values, METHODS)
    refuse_idle(pairs, [config])
    if config.clients < 1:
        raise ConfigError(f"--clients must be at least 1, got {clients}.")
    return config


@app.command()
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Run folders, folders of them or patterns; FOLDER:NAME takes one "
            "method's or case's runs."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write the page.")] = None,
    against: Annotated[
        str, typer.Option(help="Mark what is significantly better than this method.")
    ] = "",
    pictures: Annotated[
        Path | None, typer.Option(help="Folder for the pictures, each an SVG file.")
    ] = None,
    client: Annotated[
        list[int] | None,
        typer.Option(
            help="Client whose nodes to draw (needs a checkpoint); may repeat."
        ),
    ] = None,
) -> None:
    """Draw a run, or compare several, as one HTML page."""
    from flower_fgl.runs.compare import select_runs
    from flower_fgl.runs.report.page import write_report

    path = write_report(
        [run for text in runs for run in select_runs(text)],
        out,
        against=against,
        pictures=pictures,
        clients=client or (),
    )
    console.print(f"Report: {path}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def embeddings(
    run: Annotated[Path, typer.Argument(help="Run folder with a checkpoint.")],
    out: Annotated[Path, typer.Option(help="Picture to write (PNG, SVG, PDF).")],
    client: Annotated[list[int], typer.Option(help="Client to draw; may repeat.")],
) -> None:
    """Draw clients' training, test and synthetic nodes on their principal plane."""
    from flower_fgl.cli.embeddings import draw_embeddings

    path = draw_embeddings(run, client, out)
    console.print(f"Picture: {path}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def compare(
    one: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="Run folders, folders of them or patterns, separated by commas; "
            "FOLDER:NAME takes one method's or case's runs.",
        ),
    ],
    other: Annotated[str, typer.Argument(metavar="B", help="The same of the other.")],
    column: Annotated[str, typer.Option(help="Which nodes' scores.")] = "test",
    metric: Annotated[
        str,
        typer.Option(
            help="accuracy, macro_f1, mean_accuracy …; if not given the accuracy, with "
            "few shots the mean of the clients' accuracies.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Test whether two methods differ: paired t-test over data sets and seeds."""
    from flower_fgl.runs.compare import (
        common_metric,
        compare_runs,
        describe,
        select_runs,
        verdict,
    )

    sides = {"A": select_runs(one), "B": select_runs(other)}
    metric = metric or common_metric([run for runs in sides.values() for run in runs])
    result = compare_runs(sides["A"], sides["B"], column=column, metric=metric)
    table = make_table("", "method", f"{column} {metric}, %", "not completed")
    for (side, runs), scores in zip(
        sides.items(), (result.one, result.other), strict=True
    ):
        pending = [run.path.name for run in runs if run.status != "completed"]
        method = str(runs[0].summary["method"])
        table.add_row(side, method, describe(scores), ", ".join(pending))
    console.print(table)
    console.print(
        f"A - B = {100 * result.difference:+.2f}, n = {len(result.one)} pairs, "
        f"t = {result.t:.3f}, p = {result.p:.4f}: {verdict(result)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def reach(
    accuracy: Annotated[float, typer.Argument(help="For example 0.8.")],
    runs: Annotated[
        list[str],
        typer.Argument(help="Run folders, folders of them, patterns or FOLDER:NAME."),
    ],
    column: Annotated[str, typer.Option(help="Which nodes' accuracy.")] = "test",
) -> None:
    """Tell rounds, bytes and seconds until runs had reached an accuracy."""
    from flower_fgl.runs.compare import select_runs
    from flower_fgl.runs.cost_to_accuracy import cost_until
    from flower_fgl.runs.report.page import show_bytes, show_seconds

    table = make_table("run", "round", "bytes", "time", f"best {column} accuracy, %")
    for run in (run for text in runs for run in select_runs(text)):
        cost = cost_until(run, accuracy, column=column)
        table.add_row(
            run.path.name,
            "not reached" if cost.server_round is None else str(cost.server_round),
            show_bytes(cost.num_bytes),
            show_seconds(cost.seconds),
            "-" if cost.best is None else f"{100 * cost.best:.2f}",
        )
    console.print(table)
