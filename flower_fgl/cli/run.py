"""What ``flower-fgl run`` does: one run or a grid, with progress and a table at the end."""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar
from flower_fgl.core.unused_settings import reject_unused_settings
from flower_fgl.methods import parse_config
from flower_fgl.runs.files import OnRound, flatten_config
from flower_fgl.runs.run import Run
from flower_fgl.simulation.experiments import (
    Experiment,
    PlannedRun,
    read_experiment,
    results_table,
)

__all__ = ["RunOptions", "resume_run", "run_all"]

DEFAULT_CLIENTS = 10


@dataclass(frozen=True)
class RunOptions:
    """How to run what the settings describe.

    Parameters
    ----------
    engine : str
        ``"local"`` or ``"ray"``.
    workers : int or None
        Clients at once under Ray.
    client_gpus : float
        Share of a GPU per client under Ray.
    quiet : bool
        Whether to leave out the progress bar.
    """

    engine: str
    workers: int | None = None
    client_gpus: float = 0.0
    quiet: bool = False


def run_all(
    experiment_file: Path | None,
    options: Mapping[str, Scalar],
    run_options: RunOptions,
    console: Console,
    *,
    cases: Sequence[str] = (),
) -> list[Run]:
    """Run an experiment's grid, or the one run that the options describe.

    Runs of a grid have folders of their own names; those that are complete are not run
    again, and one that was interrupted continues from its checkpoint, so that a grid goes
    on where it stopped.

    Parameters
    ----------
    experiment_file : Path or None
        Experiment TOML.
    options : mapping
        Settings from the command line; they win over the file.
    how : How
        Engine and display.
    console : Console
        Where to print.
    cases : sequence of str
        Of the file; all if empty.

    Returns
    -------
    list of Run

    Raises
    ------
    FglError
        If the file or a setting is wrong, before anything starts; or if a run fails:
        earlier ones stay.
    """
    experiment = Experiment("run", config=options)
    if experiment_file is not None:
        experiment = read_experiment(experiment_file).with_options(options)
        experiment = experiment.with_cases(cases) if cases else experiment
    planned = [_with_place(experiment, run) for run in experiment.runs()]
    _check_all(planned, options)
    # loads torch: the settings of all runs are checked first
    from flower_fgl.simulation.run import run_one

    done: list[tuple[PlannedRun, Run]] = []
    for run in planned:
        if experiment.is_grid:
            finished, goes_on = _standing(run)
            if finished is not None:
                console.print(f"{run.name}: already complete", highlight=False)
                done.append((run, finished))
                continue
            if goes_on:
                console.print(f"{run.name}: continues", highlight=False)
                run = replace(run, settings={**run.settings, "resume": True})
        rounds = parse_config(run.settings).rounds
        with _progress(console, run.name, rounds, run_options.quiet) as on_round:
            made = run_one(
                run.settings,
                engine=run_options.engine,
                workers=run_options.workers,
                client_gpus=run_options.client_gpus,
                on_round=on_round,
            )
        done.append((run, made))
        said = f"Run folder: {made.path}" if experiment.is_grid else made.table()
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    if experiment.is_grid:
        _print_results(experiment, done, console)
    return [run for _, run in done]


def _with_place(experiment: Experiment, run: PlannedRun) -> PlannedRun:
    """Add the default number of clients and, in a grid, the run's own folder."""
    settings: dict[str, Scalar] = {"clients": DEFAULT_CLIENTS, **run.settings}
    if experiment.is_grid:
        base = Path(str(settings.get("output-dir", "runs")))
        settings["run-dir"] = str((base / experiment.name / run.name).resolve())
    return PlannedRun(run.name, run.row, settings)


def _check_all(planned: list[PlannedRun], options: Mapping[str, Scalar]) -> None:
    """Check every run's settings, that no two share a folder, and that options count."""
    configs = []
    for run in planned:
        try:
            config = parse_config(run.settings)
            if config.clients < 1:
                raise ConfigError(f"clients must be at least 1, got {config.clients}.")
            configs.append(config)
        except ConfigError as error:
            if len(planned) == 1:
                raise
            raise ConfigError(f'Run "{run.name}": {error}') from error
    reject_unused_settings(options, configs)
    twins = [name for name, n in Counter(r.name for r in planned).items() if n > 1]
    if twins:
        raise ConfigError(
            f"Several runs of the experiment would have the same folder: {twins}. Give "
            "the cases names that differ in letters or digits, and each value of the grid "
            "once."
        )


def resume_run(folder: Path, run_options: RunOptions, console: Console) -> Run:
    """Continue one run that was interrupted; say so if it is complete.

    Parameters
    ----------
    folder : Path
        Its run folder.
    how : How
        Display, and sizes under Ray; the engine is the run's own.
    console : Console
        Where to print.

    Returns
    -------
    Run

    Raises
    ------
    FglError
        As :func:`flower_fgl.simulation.resume.resume`.
    """
    before = Run.load(folder)
    if before.status == "completed":
        console.print("The run is complete: there is nothing to resume.")
        console.print(before.table(), markup=False, highlight=False, soft_wrap=True)
        return before
    # loads torch: a folder that holds no run is reported first
    from flower_fgl.simulation.resume import resume

    rounds = int(before.config["rounds"])
    with _progress(console, folder.name, rounds, run_options.quiet) as on_round:
        run = resume(
            folder,
            workers=run_options.workers,
            client_gpus=run_options.client_gpus,
            on_round=on_round,
        )
    console.print(run.table(), markup=False, highlight=False, soft_wrap=True)
    return run


def _standing(planned: PlannedRun) -> tuple[Run | None, bool]:
    """Return a run that is complete, and whether one that was interrupted goes on.

    One that failed, or has no checkpoint yet, is cleared.

    Raises
    ------
    RunError
        If the folder is no run's, is being written, was made with other settings, or has
        a checkpoint that the run cannot go on from.
    """
    folder = Path(str(planned.settings["run-dir"]))
    if not folder.exists() or not any(folder.iterdir()):
        return None, False
    if not (folder / "config.toml").exists():
        raise RunError(f"{folder} is no run folder: move it, or set output-dir.")
    # loads torch, which an experiment's first start does not need at this point
    from flower_fgl.core.locks import hold
    from flower_fgl.runs.checkpoints import UNCOMPARED

    config = parse_config(planned.settings)
    with hold(folder):
        run = Run.load(folder)
        before, now = (
            config.general_defaults() | dict(flatten_config(run.config)),
            config.flat(),
        )
        changed = [
            key
            for key, value in now.items()
            if key not in UNCOMPARED and before.get(key) != value
        ]
        if run.status != "completed":
            goes_on = _goes_on(run, config)
            if not goes_on:
                shutil.rmtree(folder)
            return None, goes_on
    if changed:
        raise RunError(
            f"{folder} was run with other settings ({', '.join(changed)}). Move it away, "
            "or set output-dir, to run the experiment as it is now."
        )
    return run, False


def _goes_on(run: Run, config: RunConfig) -> bool:
    """Say whether a run was interrupted, not failed, and has a checkpoint."""
    from flower_fgl.runs.checkpoints import newest_checkpoint  # loads torch

    if run.status not in ("running", "interrupted"):
        return False
    try:
        checkpoint = newest_checkpoint(run.path)
        if checkpoint is not None:
            checkpoint.check(config)
    except RunError as error:
        raise RunError(
            f"{run.path} was interrupted. {error} Or move the folder away."
        ) from error
    return checkpoint is not None


def _print_results(
    experiment: Experiment, done: list[tuple[PlannedRun, Run]], console: Console
) -> None:
    from flower_fgl.cli.tables import rows_table

    console.print(experiment.title or experiment.name, markup=False)
    console.print(rows_table(results_table(experiment, done)))
    hashes = sorted({str(run.summary.get("partition_sha256", "")) for _, run in done})
    console.print("partition", *hashes, sep="\n  ", markup=False, highlight=False)


@contextmanager
def _progress(
    console: Console, name: str, rounds: int, quiet: bool
) -> Iterator[OnRound | None]:
    """Draw a bar with round, loss, validation and test accuracy and time left."""
    if quiet:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{name}: starting", total=None, numbers="")

        def on_round(row: Mapping[str, Any]) -> None:
            is_round = row["phase"] == "train"
            progress.update(
                task,
                description=f"{name}: {'round' if is_round else row['phase']}",
                completed=min(row["round"], rounds),
                total=rounds,
                numbers=_numbers(row),
            )

        with _logged_to(progress.console):
            yield on_round


@contextmanager
def _logged_to(console: Console) -> Iterator[None]:
    """Show what this process logs above the bar, e.g. the steps of a server's training."""
    logger = logging.getLogger("flower_fgl")
    handler = logging.Handler()
    handler.emit = lambda record: console.print(  # type: ignore[method-assign]
        record.getMessage(), markup=False, highlight=False
    )
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _numbers(row: Mapping[str, Any]) -> str:
    parts = [f"loss {row['loss']:.3f}"] if row.get("loss") is not None else []
    modes = row.get("metrics") or {}
    columns = modes.get("local") or modes.get("global") or {}
    for column in ("val", "test"):
        value = columns.get(column, {}).get("accuracy")
        if value is not None and not math.isnan(value):  # NaN: no such nodes
            parts.append(f"{column} {100 * value:.1f} %")
    return "  ".join(parts)
