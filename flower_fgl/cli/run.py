"""The ``run`` command: one run or a grid, with a progress bar and a results table."""

import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from flower_fgl.cli.arguments import Given, rows_table, show
from flower_fgl.cli.progress import GridProgress
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar
from flower_fgl.core.settings import GeneralSettings, listed_names
from flower_fgl.core.unused_settings import reject_unused_settings
from flower_fgl.lab.experiments.experiment_file import (
    REPLICATES,
    Experiment,
    PlannedRun,
    describe_tuning,
    read_experiment,
    with_clients,
)
from flower_fgl.lab.results import RunSet
from flower_fgl.lab.tables.compare import unequal_settings
from flower_fgl.methods import drop_removed, parse_config
from flower_fgl.runs.environment import mixed_versions
from flower_fgl.runs.files import OnRound, flatten_config, grouped, in_folder_name
from flower_fgl.runs.run import RunFolder

__all__ = ["RunOptions", "resume_folder", "run_all", "run_experiment"]


@dataclass(frozen=True)
class RunOptions:
    """Engine and display options of a run, as ``flower-fgl run`` takes them."""

    engine: str
    workers: int | None = None
    client_gpus: float = 0.0
    quiet: bool = False
    jobs: int = 1


def run_all(
    experiment_file: Path | None,
    options: Mapping[str, Given],
    run_options: RunOptions,
    console: Console,
    *,
    cases: Sequence[str] = (),
    draws: int | None = None,
    without: Sequence[str] = (),
) -> list[RunFolder]:
    """Run all runs of an experiment, or the run or grid that the options describe.

    Complete runs of a grid are skipped, interrupted ones resume, and a run that fails
    does not stop the others. Options override the settings of the file; a list is a
    grid. All settings are checked before the first run.
    """
    if (engine := run_options.engine) not in ("auto", "local", "ray"):
        raise ConfigError(f'engine must be "auto", "local" or "ray", got "{engine}".')
    if experiment_file is None:
        experiment = _ad_hoc(options, draws or 0)
        whole = _with_earlier_draws(experiment)
    else:
        experiment = read_experiment(experiment_file)
        if without:
            before = listed_names(str(experiment.config.get("without-owners", "")))
            left_out = ",".join(dict.fromkeys([*before, *without]))
            # the owners are counted again
            options = {**options, "without-owners": left_out, "clients": 0}
        experiment = whole = experiment.with_options(options)
        experiment = experiment.with_cases(cases) if cases else experiment
        experiment = experiment if draws is None else experiment.with_draws(draws)
    planned = [_with_run_dir(experiment, run) for run in experiment.runs()]
    _check_all(planned, options)
    if experiment.is_grid:
        from flower_fgl.lab.experiments.jobs import check_jobs
        from flower_fgl.lab.tabulate import copy_experiment
        from flower_fgl.simulation.resources import num_cpus

        how = replace(run_options, jobs=run_options.jobs or num_cpus())
        check_jobs(how.jobs, how.engine, how.workers, how.client_gpus)
        folder = Path(str(planned[0].settings["run-dir"])).parent
        is_changed = bool(options.keys() - {"output-dir"})
        copy = partial(
            copy_experiment, whole, experiment_file, folder, is_changed=is_changed
        )
        every = [_with_run_dir(whole, run) for run in whole.runs()]
        return _run_grid(experiment, planned, every, how, console, copy)
    if run_options.jobs != 1:
        raise ConfigError(
            f"--jobs {run_options.jobs} runs the runs of a grid side by side, but there is "
            "only one run. List several values, e.g. --seed 0..4, or use --workers."
        )
    from flower_fgl.simulation.run import run_one

    (run,) = planned
    rounds = parse_config(run.settings).rounds
    with _progress(console, run.name, rounds, run_options.quiet) as on_round:
        made = run_one(
            run.settings,
            engine=run_options.engine,
            workers=run_options.workers,
            client_gpus=run_options.client_gpus,
            on_round=on_round,
        )
    show(made.table(), console)
    return [made]


def run_experiment(
    file: Path | str,
    *,
    cases: Sequence[str] = (),
    draws: int | None = None,
    engine: str = "auto",
    workers: int | None = None,
    jobs: int = 1,
    progress: bool = False,
    **settings: Any,
) -> RunSet:
    """Run all runs of an experiment file.

    A run that is complete is skipped, and an interrupted one resumes, so that the same call
    continues an experiment.

    Parameters
    ----------
    file : Path or str
        Experiment file (TOML), or the ``config.toml`` of a run.
    cases : sequence of str
        Cases of the file to run; all if empty.
    draws : int, optional
        Number of draws of the file to run, the first ones; by default all.
    engine : {"auto", "local", "ray"}
        As for ``flower-fgl run --engine``.
    workers : int, optional
        Worker processes of a run.
    jobs : int
        Runs at once, each in a process of its own; 0: one per core. The numbers are the
        same.
    progress : bool
        Whether to print the progress and the results table.
    **settings
        Settings that override those of the file, as for :func:`flower_fgl.simulate`.

    Returns
    -------
    RunSet
        The runs, in the order of the file.

    Raises
    ------
    FglError
        If the file or a setting is wrong, which is checked before the first run, or if a
        run fails. The folders of earlier runs are kept.
    """
    from flower_fgl.simulation.local import flat_settings

    # rich would need ipywidgets to draw in a notebook
    console = Console(
        quiet=not progress, force_jupyter=False, markup=False, emoji=False
    )
    runs = run_all(
        Path(file).expanduser(),
        flat_settings(settings),
        RunOptions(engine, workers, quiet=not progress, jobs=jobs),
        console,
        cases=cases,
        draws=draws,
    )
    return RunSet(runs)


def _ad_hoc(options: Mapping[str, Given], draws: int) -> Experiment:
    """Return the single run that options describe, or the grid of lists and draws.

    The folder of a grid is named after its settings, so that the same command resumes
    it.
    """
    single = {k: v for k, v in options.items() if not isinstance(v, list)}
    if len(single) == len(options) and not draws:
        return Experiment("run", config=single)
    if draws and (seeds := options.keys() & set(REPLICATES)):
        raise ConfigError(
            f"--draws sets {' and '.join(REPLICATES)} of every draw. Leave out "
            f"{' and '.join(sorted(seeds))}."
        )
    method = str(single.pop("method", GeneralSettings.method))
    lists = {k: v for k, v in options.items() if isinstance(v, list)}
    grid: dict[str, Sequence[Scalar]] = {"method": [method], **lists}
    for key in REPLICATES:  # the last keys vary fastest
        if key in grid:
            grid[key] = grid.pop(key)
    fixed = {k: v for k, v in single.items() if k != "output-dir"}
    fixed |= {"method": method} if "method" not in lists else {}
    varied = [*sorted(lists), *(["draws"] if draws else [])]
    text = json.dumps([sorted(fixed.items()), varied])
    parts = [str(fixed.get("method", "")), str(fixed.get("dataset", ""))]
    parts = ["grid", *(Path(part).stem for part in parts), *varied]
    name = "-".join(in_folder_name(part) for part in parts if part)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    shown = {
        k: grid.get(k) or [fixed[k]] for k in ("method", "dataset") if k in fixed | grid
    }
    title = " on ".join(", ".join(map(str, values)) for values in shown.values())
    return Experiment(
        f"{name[:80]}-{digest}", title, config=single, grid=grid, draws=draws
    )


def _with_earlier_draws(experiment: Experiment) -> Experiment:
    """Add the draws of an earlier command to a grid without a file."""
    if not experiment.draws:
        return experiment
    base = Path(os.path.expanduser(str(experiment.config.get("output-dir", "runs"))))
    copy = base / experiment.name / f"{experiment.name}.toml"
    earlier = read_experiment(copy).draws if copy.is_file() else 0
    return replace(experiment, draws=max(experiment.draws, earlier))


def _run_grid(
    experiment: Experiment,
    planned: Sequence[PlannedRun],
    every: Sequence[PlannedRun],
    run_options: RunOptions,
    console: Console,
    copy: Callable[[], object],
) -> list[RunFolder]:
    """Run the missing runs of a grid, store its file, print the table, write the report."""
    from flower_fgl.lab.experiments.jobs import Job, run_jobs

    if any(run.settings.get("owners") for run in planned):
        # loads torch, which other grids do not need in this process
        from flower_fgl.simulation.local import count_owners

        # so that the settings equal those in the run folder
        planned = [replace(run, settings=count_owners(run.settings)) for run in planned]
    done: dict[str, RunFolder] = {}
    jobs, rounds = [], dict[str, int]()
    for run in planned:
        finished, can_resume = _existing_run(run)
        if finished is not None:
            console.print(f"{run.name}: already complete", highlight=False)
            done[run.name] = finished
            continue
        settings = dict(run.settings)
        if can_resume:
            console.print(f"{run.name}: resumes", highlight=False)
            settings["resume"] = True
        jobs.append(Job(run.name, settings))
        rounds[run.name] = parse_config(settings).rounds
    copy()
    errors = {}
    if jobs:
        try:
            with GridProgress(console, rounds, quiet=run_options.quiet) as progress:
                errors = run_jobs(
                    jobs,
                    progress,
                    side_by_side=run_options.jobs,
                    engine=run_options.engine,
                    workers=run_options.workers,
                    client_gpus=run_options.client_gpus,
                )
        except KeyboardInterrupt:
            console.print(
                "To continue the grid, run the same command again: complete runs are "
                "skipped, interrupted ones resume from their last checkpoint."
            )
            raise KeyboardInterrupt from None
    for run in planned:
        if run.name not in errors and run.name not in done:
            done[run.name] = RunFolder.load(str(run.settings["run-dir"]))
    complete = [(run, done[run.name]) for run in planned if run.name in done]
    if complete:
        _print_results(experiment, complete, every, console)
    if errors:
        same = grouped(errors, errors.__getitem__).items()
        each = "\n".join(f"{', '.join(names)}: {error}" for error, names in same)
        raise RunError(
            f"{len(errors)} of {len(planned)} runs failed. The same command runs only "
            f"these again.\n{each}"
        )
    return [run for _, run in complete]


def _with_run_dir(experiment: Experiment, run: PlannedRun) -> PlannedRun:
    """Add the default number of clients and, in a grid, the run folder."""
    settings = with_clients(run.settings)
    if experiment.is_grid:
        if settings.get("run-dir"):
            raise ConfigError(
                f"run-dir = {settings['run-dir']} is the folder of one run, but "
                f"{experiment.name} may have several. Remove it, or set output-dir, in "
                "which each run has a folder of its own."
            )
        base = Path(os.path.expanduser(str(settings.get("output-dir", "runs"))))
        settings["run-dir"] = str((base / experiment.name / run.name).resolve())
    return replace(run, settings=settings)


def _check_all(planned: list[PlannedRun], options: Mapping[str, Given]) -> None:
    """Reject wrong settings, options without effect, and runs with the same folder."""
    configs = []
    for run in planned:
        try:
            number = run.settings.get("clients", 0)
            if (
                isinstance(number, int)
                and number < 1
                and not run.settings.get("owners")
            ):
                raise ConfigError(f"clients must be at least 1, got {number}.")
            configs.append(parse_config(run.settings))
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


def resume_folder(
    folder: Path,
    run_options: RunOptions,
    console: Console,
    *,
    rounds: int | None = None,
) -> RunFolder:
    """Resume an interrupted run, or add ``rounds``; else print the complete results."""
    before = RunFolder.load(folder)
    rounds = int(before.config["rounds"]) if rounds is None else rounds
    if before.status == "completed" and rounds == before.config["rounds"]:
        console.print("The run is complete: there is nothing to resume.")
        show(before.table(), console)
        return before
    from flower_fgl.lab.simulate import resume

    with _progress(console, folder.name, rounds, run_options.quiet) as on_round:
        run = resume(
            folder,
            rounds=rounds,
            workers=run_options.workers,
            client_gpus=run_options.client_gpus,
            on_round=on_round,
        )
    show(run.table(), console)
    return run


def _existing_run(planned: PlannedRun) -> tuple[RunFolder | None, bool]:
    """Return the run if it is complete, and whether it can resume; delete failed runs."""
    folder = Path(str(planned.settings["run-dir"]))
    if not folder.exists() or not any(folder.iterdir()):
        return None, False
    if not (folder / "config.toml").exists():
        raise RunError(f"{folder} is not a run folder: move it, or set output-dir.")
    from flower_fgl.core.atomic import hold
    from flower_fgl.runs.checkpoints import differing_settings
    from flower_fgl.simulation.local import absolute_paths

    config = parse_config(absolute_paths(planned.settings))
    with hold(folder):
        run = RunFolder.load(folder)
        before = drop_removed(dict(flatten_config(run.config)))
        changed = differing_settings(config, before)
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


def _can_resume(run: RunFolder, config: RunConfig) -> bool:
    """Return whether a run was interrupted (not failed) and has a checkpoint."""
    from flower_fgl.runs.checkpoints import newest_checkpoint

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
    experiment: Experiment,
    done: list[tuple[PlannedRun, RunFolder]],
    every: Sequence[PlannedRun],
    console: Console,
) -> None:
    """Print the table and the partitions of a grid; write its report of ``every`` run."""
    from flower_fgl.lab.report.page import write_report
    from flower_fgl.lab.tabulate import results_table

    console.print(experiment.title or experiment.name, markup=False)
    console.print(rows_table(results_table(experiment, done)))
    hashes = sorted({str(run.summary.get("partition_sha256", "")) for _, run in done})
    console.print("partition", *hashes, sep="\n  ", markup=False, highlight=False)
    if text := _one_partition(done):
        show(text, console)
    settings = {run.label: dict(flatten_config(made.config)) for run, made in done}
    tuned = {
        run.label: experiment.tuning.get("settings", {}).get(run.row, [])
        for run, _ in done
    }
    versions = mixed_versions({run.name: made.environment for run, made in done})
    unequal = [*unequal_settings(settings, tuned), *_unequal_partitions(done)]
    for text in (*unequal, *versions):
        show(f"warning: {text}", console)
    if tuning := describe_tuning(experiment.tuning):
        show(f"tuning: {tuning}", console)
    folder = done[0][1].path.parent
    made = {run.name: finished for run, finished in done}
    found = []
    for run in every:  # also those of earlier commands
        with suppress(RunError):
            read = made.get(run.name) or RunFolder.load(str(run.settings["run-dir"]))
            found += [read] if run.name in made or read.status == "completed" else []
    report = write_report(found, title=experiment.title)
    for text in (f"Run folders: {folder}", f"Report: {report}"):
        show(text, console)


def _unequal_partitions(done: Sequence[tuple[PlannedRun, RunFolder]]) -> list[str]:
    """Name runs of one draw that have different data, one sentence for each draw."""
    from flower_fgl.lab.tables.frame import place_of

    def draw(pair: tuple[PlannedRun, RunFolder]) -> tuple[Any, ...]:
        run = pair[1]
        return place_of(run), run.config["partition-seed"], run.summary["seed"]

    out = []
    for pairs in grouped(done, draw).values():
        data = grouped(pairs, lambda pair: str(pair[1].summary["partition_sha256"]))
        if len(data) > 1:
            names = [", ".join(run.name for run, _ in same) for same in data.values()]
            out.append(
                f"partition: {'; '.join(names)} have different data in one draw, so that "
                "their scores are not paired. Run them again with the same data"
            )
    return out


def _one_partition(done: Sequence[tuple[PlannedRun, RunFolder]]) -> str:
    """Return a note if the seeds of a row vary the model only; else an empty text."""
    for row in grouped(done, lambda pair: pair[0].row).values():
        seeds = {run.config["partition-seed"] for _, run in row}
        hashes = {run.summary.get("partition_sha256") for _, run in row}
        if len(row) > 1 and len(seeds) == len(hashes) == 1:
            return (
                "± is over initial models on one partition and split, and says nothing "
                "about other partitions. --draws 5 in place of seeds varies all three."
            )
    return ""


@contextmanager
def _progress(
    console: Console, name: str, rounds: int, quiet: bool
) -> Iterator[OnRound | None]:
    """Show a progress bar with round, loss, accuracies and remaining time."""
    if quiet:
        yield None
        return
    from flower_fgl.lab.experiments.jobs import logged_to  # other commands need no pool

    with GridProgress(console, {name: rounds}) as shown:
        shown.start(name)
        with logged_to(partial(show, to=console), logging.INFO):
            yield partial(shown.round, name)
        shown.end(name, "")
