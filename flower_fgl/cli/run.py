"""The ``run`` command: one run or a grid, with a progress bar and a results table."""

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
from flower_fgl.methods import drop_removed, parse_config
from flower_fgl.runs.files import OnRound, flatten_config
from flower_fgl.runs.run import Run
from flower_fgl.simulation.experiments import (
    Experiment,
    PlannedRun,
    read_experiment,
    results_table,
)

__all__ = ["RunOptions", "resume_folder", "run_all"]

DEFAULT_CLIENTS = 10


@dataclass(frozen=True)
class RunOptions:
    """Engine and display options of a run.

    Parameters
    ----------
    engine : str
        ``"local"`` or ``"ray"``.
    workers : int or None
        Clients that train at once with Ray; ``None`` for one per core.
    client_gpus : float
        GPUs per client with Ray.
    quiet : bool
        Whether to hide the progress bar.
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
    """Run all runs of an experiment, or the one run that the options describe.

    Each run of a grid has a folder with a fixed name. A run that is complete is skipped,
    and an interrupted one resumes from its checkpoint.

    Parameters
    ----------
    experiment_file : Path or None
        Experiment file (TOML).
    options : mapping of str to bool, int, float or str
        Settings from the command line, which override those of the file.
    run_options : RunOptions
        Engine and display options.
    console : Console
        Console to print to.
    cases : sequence of str
        Cases of the file to run; all if empty.

    Returns
    -------
    list of Run
        Runs in the order of the grid.

    Raises
    ------
    FglError
        If the file or a setting is wrong, which is checked before the first run, or if a
        run fails. The folders of earlier runs are kept.
    """
    experiment = Experiment("run", config=options)
    if experiment_file is not None:
        experiment = read_experiment(experiment_file).with_options(options)
        experiment = experiment.with_cases(cases) if cases else experiment
    planned = [_with_run_dir(experiment, run) for run in experiment.runs()]
    _check_all(planned, options)
    # loads torch: the settings of all runs are checked first
    from flower_fgl.simulation.local import count_owners
    from flower_fgl.simulation.run import run_one

    planned = [replace(run, settings=count_owners(run.settings)) for run in planned]
    done: list[tuple[PlannedRun, Run]] = []
    for run in planned:
        if experiment.is_grid:
            finished, can_resume = _existing_run(run)
            if finished is not None:
                console.print(f"{run.name}: already complete", highlight=False)
                done.append((run, finished))
                continue
            if can_resume:
                console.print(f"{run.name}: resumes", highlight=False)
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
        text = f"Run folder: {made.path}" if experiment.is_grid else made.table()
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if experiment.is_grid:
        _print_results(experiment, done, console)
    return [run for _, run in done]


def _with_run_dir(experiment: Experiment, run: PlannedRun) -> PlannedRun:
    """Add the default number of clients and, in a grid, the run folder."""
    settings: dict[str, Scalar] = dict(run.settings)
    if not settings.get("owners"):  # else the owners are counted
        settings.setdefault("clients", DEFAULT_CLIENTS)
    if experiment.is_grid:
        base = Path(str(settings.get("output-dir", "runs")))
        settings["run-dir"] = str((base / experiment.name / run.name).resolve())
    return PlannedRun(run.name, run.row, settings)


def _check_all(planned: list[PlannedRun], options: Mapping[str, Scalar]) -> None:
    """Reject wrong settings, options without effect, and runs with the same folder."""
    configs = []
    for run in planned:
        try:
            config = parse_config(run.settings)
            if config.clients < 1 and not config.owners:
                raise ConfigError(f"clients must be at least 1, got {config.clients}.")
            configs.append(config)
        except ConfigError as error:
            if len(planned) == 1:
                raise
            raise ConfigError(f'Run "{run.name}": {error}') from error
    reject_unused_settings(options, configs)
    duplicates = [name for name, n in Counter(r.name for r in planned).items() if n > 1]
    if duplicates:
        raise ConfigError(
            f"Several runs of the experiment would have the same folder: {duplicates}. "
            "Use case names that differ in letters or digits, and list each grid value "
            "only once."
        )


def resume_folder(folder: Path, run_options: RunOptions, console: Console) -> Run:
    """Resume an interrupted run; only print the results if it is complete.

    Parameters
    ----------
    folder : Path
        Run folder.
    run_options : RunOptions
        Display and Ray options; the engine is read from the checkpoint.
    console : Console
        Console to print to.

    Returns
    -------
    Run
        The completed run.

    Raises
    ------
    FglError
        In the cases of :func:`flower_fgl.simulation.resume.resume`.
    """
    before = Run.load(folder)
    if before.status == "completed":
        console.print("The run is complete: there is nothing to resume.")
        console.print(before.table(), markup=False, highlight=False, soft_wrap=True)
        return before
    # loads torch: a missing run folder is reported first
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


def _existing_run(planned: PlannedRun) -> tuple[Run | None, bool]:
    """Return the run if it is complete, and whether it can resume; delete failed runs."""
    folder = Path(str(planned.settings["run-dir"]))
    if not folder.exists() or not any(folder.iterdir()):
        return None, False
    if not (folder / "config.toml").exists():
        raise RunError(f"{folder} is not a run folder: move it, or set output-dir.")
    # loads torch: only needed if there is a run already
    from flower_fgl.core.locks import hold
    from flower_fgl.runs.checkpoints import UNCOMPARED

    config = parse_config(planned.settings)
    with hold(folder):
        run = Run.load(folder)
        before, now = (
            config.general_defaults() | drop_removed(dict(flatten_config(run.config))),
            config.flat(),
        )
        changed = [
            key
            for key, value in now.items()
            if key not in UNCOMPARED and before.get(key) != value
        ]
        if run.status != "completed":
            can_resume = _can_resume(run, config)
            if not can_resume:
                shutil.rmtree(folder)
            return None, can_resume
    if changed:
        raise RunError(
            f"{folder} holds a run with other settings ({', '.join(changed)}). To run "
            "the experiment with the current ones, move the folder or set output-dir."
        )
    return run, False


def _can_resume(run: Run, config: RunConfig) -> bool:
    """Return whether a run was interrupted (not failed) and has a checkpoint."""
    from flower_fgl.runs.checkpoints import newest_checkpoint  # loads torch

    if run.status not in ("running", "interrupted"):
        return False
    try:
        checkpoint = newest_checkpoint(run.path)
        if checkpoint is not None:
            checkpoint.check(config)
    except RunError as error:
        raise RunError(
            f"{run.path} was interrupted. {error} Or move the folder."
        ) from error
    return checkpoint is not None


def _print_results(
    experiment: Experiment, done: list[tuple[PlannedRun, Run]], console: Console
) -> None:
    """Print the results table of a grid and the hashes of its partitions."""
    from flower_fgl.cli.tables import rows_table

    console.print(experiment.title or experiment.name, markup=False)
    console.print(rows_table(results_table(experiment, done)))
    hashes = sorted({str(run.summary.get("partition_sha256", "")) for _, run in done})
    console.print("partition", *hashes, sep="\n  ", markup=False, highlight=False)


@contextmanager
def _progress(
    console: Console, name: str, rounds: int, quiet: bool
) -> Iterator[OnRound | None]:
    """Show a progress bar with round, loss, accuracies and remaining time."""
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
    """Print log records of this package above the progress bar."""
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
    """Return loss and accuracies of a round as text for the progress bar."""
    parts = [f"loss {row['loss']:.3f}"] if row.get("loss") is not None else []
    modes = row.get("metrics") or {}
    columns = modes.get("local") or modes.get("global") or {}
    for column in ("val", "test"):
        value = columns.get(column, {}).get("accuracy")
        if value is not None and not math.isnan(
            value
        ):  # NaN if there are no such nodes
            parts.append(f"{column} {100 * value:.1f} %")
    return "  ".join(parts)
