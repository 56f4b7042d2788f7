"""Entry point of ``flower-fgl``: the app, and commands that train or list."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from flower_fgl.cli import (
    deployment_commands,
    graph_commands,
    model_commands,
    report_commands,
)
from flower_fgl.cli import new as new_package
from flower_fgl.cli import table as tables
from flower_fgl.cli import tune as tuning
from flower_fgl.cli.arguments import (
    App,
    SettingPairs,
    console,
    make_table,
    read_options,
    show,
)
from flower_fgl.cli.graph_commands import prepare
from flower_fgl.core.config import DATASET_DEFAULTS, SETTING_DEFAULTS
from flower_fgl.core.errors import ConfigError, FglError
from flower_fgl.core.version import VERSION
from flower_fgl.methods import METHODS
from flower_fgl.runs.files import CONFIG_FILE

__all__ = ["app", "main"]


typer.core.HAS_RICH = False  # rich would escape brackets for markup, which is off
app = App(
    help="Train, evaluate and compare federated graph learning methods with Flower.\n\n"
    "Example: flower-fgl run --method fedavg --dataset cora --clients 10",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    suggest_commands=False,  # click suggests them already
)
errors = Console(stderr=True)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        show(f"flower-fgl {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False,
        "--version",
        help="Show the version and exit.",
        callback=_show_version,
        is_eager=True,
    ),
) -> None:
    """Take the options that come before a command."""


def main() -> None:
    """Run the command line; print errors that a user can fix without a traceback."""
    try:
        app()
    except FglError as error:
        show(f"Error: {error}", errors, "bold red")
        sys.exit(1)


@contextmanager
def report_how_to_resume() -> Iterator[None]:
    """After Ctrl-C, print how to resume the run whose folder the interrupt names."""
    try:
        yield
    except KeyboardInterrupt as stop:
        message = "Interrupted."
        for folder in stop.args:
            # loads torch: an interrupt may come while it is being loaded
            from flower_fgl.runs.checkpoints import newest_checkpoint

            kept = newest_checkpoint(Path(folder))
            how = f" Run folder: {folder}"
            if kept is not None:
                how = f" To resume after round {kept.server_round}: flower-fgl run "
                how += f"--resume {shlex.quote(folder)}"
            message += how
        show(message, errors, "bold yellow")
        raise typer.Exit(130) from stop


@app.command()
def run(
    experiment: Path | None = typer.Argument(
        None, help="Experiment file (TOML), or the config.toml of a run."
    ),
    method: str | None = typer.Option(
        None,
        help="Method (default fedavg), see flower-fgl methods; several: local,fedavg.",
    ),
    dataset: str | None = typer.Option(
        None,
        help="Dataset (default synthetic), see flower-fgl datasets; several: "
        "cora,citeseer.",
    ),
    clients: str | None = typer.Option(
        None, help="Number of clients (default 10); several: 5,10."
    ),
    rounds: str | None = typer.Option(
        None, help="Number of rounds (default: see settings)."
    ),
    seed: str | None = typer.Option(
        None, help="Random seed (default 0); several: 0,1,2 or 0..4."
    ),
    engine: str | None = typer.Option(
        None,
        help="local: in this process, or in --workers; ray: Flower's simulation; "
        "auto (default): local, with workers where they save time.",
    ),
    settings: SettingPairs = None,
    workers: int | None = typer.Option(
        None,
        help="Worker processes (default: one per core with ray, none with local). "
        "auto starts one per core only for clients that train one by one on at "
        "least 2,000 nodes each, on average, for at least 20 rounds; with ten clients "
        "of Cora two workers take longer than none.",
    ),
    client_gpus: float = typer.Option(
        0.0, help="GPUs per worker process; 0.25 lets four share one."
    ),
    jobs: int = typer.Option(
        1, min=0, help="Runs of a grid at once, each in one process; 0: one per core."
    ),
    quiet: bool = typer.Option(False, help="Hide the progress bar."),
    track: str | None = typer.Option(
        None,
        help="Report every round to tensorboard, mlflow or wandb, or to several, "
        "separated by commas.",
    ),
    resume: Path | None = typer.Option(
        None,
        help="Folder of an interrupted run to resume. With more --rounds also of "
        "a complete run that has a checkpoint (keep-checkpoint).",
    ),
    case: list[str] | None = typer.Option(
        None, help="Run only this case of the experiment file. Repeatable."
    ),
    draws: int | None = typer.Option(
        None,
        min=1,
        help="Repeat every run with so many partitions, splits and initial models; of "
        "an experiment file with draws, run only the first ones.",
    ),
    without: list[str] | None = typer.Option(
        None,
        help="Train a run anew without this owner: flower-fgl run RUN_FOLDER "
        "--without NAME. Repeatable.",
    ),
) -> None:
    """Run a method, a grid of several values, or all runs of an experiment file.

    Each run writes a folder with its settings, the results of every round, and the
    aggregated model. A list of values (--method local,fedavg --seed 0..4) makes a grid:
    all combinations run, then a table and a report compare them. Runs of a grid that are
    complete are skipped.
    """
    from flower_fgl.cli.run import RunOptions, resume_folder, run_all

    options = {
        "method": method,
        "dataset": dataset,
        "clients": clients,
        "rounds": rounds,
        "seed": seed,
        "track": track,
    }
    given = {key: text for key, text in options.items() if text is not None}
    values = read_options(given, settings or [])
    if resume is not None:
        more = values.pop("rounds", None)
        if jobs != 1 or any((experiment, values, engine, case, draws, without)):
            raise ConfigError(
                "--resume keeps the settings and the engine of the run: besides the "
                "folder, only --rounds, --workers, --client-gpus and --quiet are allowed."
            )
        if more is not None and not isinstance(more, int):
            raise ConfigError(f"--rounds must be one number with --resume, got {more}.")
        how = RunOptions("", workers, client_gpus, quiet)
        with report_how_to_resume():
            resume_folder(resume, how, console, rounds=more)
        return
    if case and experiment is None:
        raise ConfigError(
            "--case selects from an experiment file: name the file as well."
        )
    if without:
        if experiment is None:
            raise ConfigError(
                "--without leaves an owner out of a run that was made: name its folder "
                "as well. For a new run, set without-owners."
            )
        if experiment.is_dir():
            experiment /= CONFIG_FILE
    run_options = RunOptions(engine or "auto", workers, client_gpus, quiet, jobs)
    with report_how_to_resume():
        run_all(
            experiment,
            values,
            run_options,
            console,
            cases=case or (),
            draws=draws,
            without=without or (),
        )


@app.command()
def methods() -> None:
    """List the methods and what a client sends per round."""
    table = make_table("method", "paper", "per round and client")
    for name, method in sorted(METHODS.items()):
        table.add_row(name, method.paper, method.payload)
    console.print(table)
    console.print(
        "up and down: bytes that a client sends and receives; P: parameters of the model, "
        "p: width of an embedding, d: features, C: classes; the other letters: "
        "docs/costs.md."
    )
    console.print("Run flower-fgl settings METHOD to see the settings of a method.")


@app.command()
def settings(
    method: str | None = typer.Argument(
        None,
        metavar="[METHOD | KEY]",
        help="Show only the settings of this method, or explain this setting: lr, "
        "fedprox.mu.",
    ),
) -> None:
    """List the settings with their defaults and meanings, or explain one."""
    from flower_fgl.cli.setting_help import all_settings, explain_setting

    if method is not None and method not in METHODS:
        show(explain_setting(method))
        return

    table = make_table("key", "default", "meaning")
    for key, field, _, text in all_settings():
        if method is None or key.startswith(f"{method}."):
            mark = " (auto)" if field.metadata["auto"] else ""
            choices = ", ".join(field.metadata["choices"])
            text += f": {choices}" if choices else ""
            table.add_row(key, f"{field.default!r}{mark}", text)
    for key, value in METHODS[method].defaults.items() if method else ():
        table.add_row(key, f"{value!r}", "general setting, with this method's default")
    console.print(table)
    if method is None:
        defaults = "; ".join(
            f"{name}: {key} = {value}"
            for name, values in (*DATASET_DEFAULTS.items(), *SETTING_DEFAULTS.items())
            for key, value in values.items()
        )
        console.print(
            '(auto): the value "auto" selects the default of the method, else that of the '
            f"dataset or setting ({defaults}), else the one shown."
        )


@app.command()
def datasets() -> None:
    """List the datasets with their published statistics."""
    from flower_fgl.core.settings import TARGETS
    from flower_fgl.datasets.sources.registry import SOURCES

    keys = ("nodes", "edges", "features", "classes")
    table = make_table("dataset", "task", *keys, "split")
    for name, source in SOURCES.items():
        numbers = [getattr(source.statistics, key, None) for key in keys]
        shown = [f"{n:,}" if isinstance(n, int) else "–" for n in numbers]
        table.add_row(name, source.task, *shown, source.split)
    console.print(table)
    console.print(
        "Other TU datasets: tu:NAME; countries of Twitch: twitch:DE. Your own graph: the "
        "path of an .npz file or a CSV folder. These have several labels, of which target "
        f"chooses one: {', '.join(TARGETS)}."
    )


for command in (
    graph_commands.partition,
    graph_commands.export,
    prepare,
    graph_commands.check_graph,
    graph_commands.import_partition,
    graph_commands.predict,
    model_commands.calibrate,
    model_commands.explain,
    graph_commands.identity,
    report_commands.report,
    report_commands.embeddings,
    report_commands.compare,
    report_commands.reach,
    tables.table,
    tuning.tune,
    new_package.new,
    deployment_commands.new_app,
    deployment_commands.certificates,
    deployment_commands.rehearse,
):
    app.command()(command)
