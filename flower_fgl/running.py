"""What ``flower-fgl run`` does: one run or a grid, with progress and the true status."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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

from flower_fgl.config import RunConfig, Scalar, pyproject_table
from flower_fgl.datasets.sources import data_folder
from flower_fgl.errors import ConfigError, FglError, RunError
from flower_fgl.experiments import (
    Experiment,
    PlannedRun,
    read_experiment,
    results_table,
)
from flower_fgl.methods import METHODS
from flower_fgl.runs import Run, RunWriter, default_folder

__all__ = ["run_all", "run_one"]

OnRound = Callable[[Mapping[str, Any]], None]
DEFAULT_CLIENTS = 10


def run_all(
    experiment_file: Path | None,
    options: Mapping[str, Scalar],
    *,
    engine: str,
    workers: int | None,
    client_gpus: float,
    console: Console,
    quiet: bool,
) -> list[Run]:
    """Run an experiment's grid, or the one run that the options describe.

    Runs of a grid have folders of their own names; those that are complete are not run
    again, so that an interrupted grid goes on where it stopped.

    Parameters
    ----------
    experiment_file : Path or None
        Experiment TOML.
    options : mapping
        Settings from the command line; they win over the file.
    engine : str
        ``"local"`` or ``"ray"``.
    workers : int or None
        Clients at once under Ray.
    client_gpus : float
        Share of a GPU per client under Ray.
    console : Console
        Where to print.
    quiet : bool
        Whether to leave out the progress bar.

    Returns
    -------
    list of Run

    Raises
    ------
    FglError
        If a run fails; earlier ones stay.
    """
    experiment = Experiment("run", config=options)
    if experiment_file is not None:
        read = read_experiment(experiment_file)
        experiment = Experiment(
            read.name,
            read.title,
            {**read.config, **options},
            [
                {k: v for k, v in case.items() if k not in options}
                for case in read.cases
            ],
            {k: v for k, v in read.grid.items() if k not in options},
            read.published,
            read.output_dir,
        )
    done: list[tuple[PlannedRun, Run]] = []
    for planned in experiment.runs():
        name = planned.name
        values: dict[str, Scalar] = {"clients": DEFAULT_CLIENTS, **planned.settings}
        if experiment.is_grid:
            base = str(options.get("output-dir", experiment.output_dir or "runs"))
            folder = Path(base) / experiment.name / name
            values["run-dir"] = str(folder.resolve())
            finished = _finished(folder)
            if finished is not None:
                console.print(f"{name}: already complete", highlight=False)
                done.append((planned, finished))
                continue
        total = RunConfig.parse(values, METHODS).rounds
        with _progress(console, name, total, quiet) as on_round:
            run = run_one(
                values,
                engine=engine,
                workers=workers,
                client_gpus=client_gpus,
                on_round=on_round,
            )
        done.append((planned, run))
        said = f"Run folder: {run.path}" if experiment.is_grid else run.table()
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    if experiment.is_grid:
        _print_results(experiment, done, console)
    return [run for _, run in done]


def _print_results(
    experiment: Experiment,
    done: list[tuple[PlannedRun, Run]],
    console: Console,
) -> None:
    from flower_fgl.cli import rows_table

    console.print(experiment.title or experiment.name, markup=False)
    console.print(rows_table(results_table(experiment, done)))
    hashes = sorted({str(run.summary.get("partition_sha256", "")) for _, run in done})
    console.print(
        f"partition {', '.join(hashes)}", markup=False, highlight=False, soft_wrap=True
    )


def _finished(folder: Path) -> Run | None:
    """Return a run that is complete; clear one that is not."""
    if not folder.exists():
        return None
    try:
        run = Run.load(folder)
    except FglError:
        run = None
    if run is not None and run.status == "completed":
        return run
    shutil.rmtree(folder)
    return None


def run_one(
    values: Mapping[str, Scalar],
    *,
    engine: str,
    workers: int | None = None,
    client_gpus: float = 0.0,
    on_round: OnRound | None = None,
) -> Run:
    """Run one configuration to its end.

    Parameters
    ----------
    values : mapping
        Flat run config with ``clients``.
    engine : str
        ``"local"`` or ``"ray"``.
    workers : int, optional
        Clients at once under Ray; by default one per core.
    client_gpus : float
        Share of a GPU per client under Ray.
    on_round : callable, optional
        Called with each round's line as it comes.

    Returns
    -------
    Run

    Raises
    ------
    ConfigError, DataError
        Before anything starts.
    RunError
        If the run did not complete; the message names its folder.
    """
    from flower_fgl.local_engine import check_run, run_local

    config = check_run(values)
    values = _absolute(values, config)
    folder = Path(str(values["run-dir"]))
    try:
        if engine == "local":
            return run_local(values, on_round=on_round)
        return _run_ray(values, config, folder, workers, client_gpus, on_round)
    except KeyboardInterrupt:
        _mark_status(folder, "interrupted")
        raise
    except (ConfigError, RunError) as error:
        if (folder / "summary.json").exists():
            raise RunError(f"{error}\nRun folder: {folder}") from error
        raise


def _absolute(values: Mapping[str, Scalar], config: RunConfig) -> dict[str, Scalar]:
    """Make paths absolute: Flower's processes run in folders of their own."""
    folder = config.run_dir or default_folder(
        Path(config.output_dir), config.method, config.dataset, config.seed
    )
    out = {**values, "run-dir": str(Path(folder).resolve())}
    raw = data_folder(config.data_dir)
    if raw is not None:
        out["data-dir"] = str(raw.resolve())
    if Path(config.dataset).exists():
        out["dataset"] = str(Path(config.dataset).resolve())
    return out


def _run_ray(
    values: Mapping[str, Scalar],
    config: RunConfig,
    folder: Path,
    workers: int | None,
    client_gpus: float,
    on_round: OnRound | None,
) -> Run:
    """Run in Flower's simulation, in a private Flower home."""
    from flower_fgl.launcher import launch, write_app_folder

    values = {"state-dir": str(folder / "state"), **values}
    home = Path(tempfile.mkdtemp(prefix="flower-fgl-"))
    tail = _Tail(folder / "rounds.jsonl", on_round)
    try:
        app_dir = write_app_folder(home / "flower-fgl", config=pyproject_table(METHODS))
        result = launch(
            app_dir,
            run_config=values,
            num_clients=config.clients,
            home=home,
            client_cpus=config.threads,
            client_gpus=client_gpus,
            workers=workers,
            on_tick=tail,
            log_file=home / "flower.log",
        )
        tail()
    finally:
        if folder.exists() and (home / "flower.log").exists():
            shutil.copy(home / "flower.log", folder / "flower.log")
        shutil.rmtree(home, ignore_errors=True)
    return _true_result(folder, result.flower_status, result.log_tail)


def _true_result(folder: Path, flower_status: str, log_tail: str) -> Run:
    """Return the run if both its folder and Flower call it complete.

    Flower alone cannot be trusted: it says ``completed`` when every client failed, or
    when the server half left by ``sys.exit``.
    """
    if not (folder / "summary.json").exists():
        raise RunError(
            f"The run left no folder; Flower says {flower_status}. Its log ends:\n"
            f"{log_tail}"
        )
    run = Run.load(folder)
    if run.status == "completed" and flower_status == "finished:completed":
        return run
    if run.status == "running":
        _mark_status(folder, "failed", error=f"Flower says {flower_status}")
        run = Run.load(folder)
    reason = run.summary.get("error") or f"Its log ends:\n{log_tail}"
    raise RunError(f"The run {run.status} (Flower says {flower_status}). {reason}")


def _mark_status(folder: Path, status: str, *, error: str = "") -> None:
    """Correct the summary of a run that could not do so itself."""
    if (folder / "summary.json").exists():
        summary = dict(Run.load(folder).summary) | {"status": status}
        RunWriter(folder).write_summary(summary | ({"error": error} if error else {}))


class _Tail:
    """Read the lines that a run in other processes adds to ``rounds.jsonl``."""

    def __init__(self, path: Path, on_round: OnRound | None) -> None:
        self._path = path
        self._on_round = on_round
        self._offset = 0

    def __call__(self) -> None:
        if self._on_round is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._on_round(json.loads(line))


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
            progress.update(
                task,
                description=f"{name}: round",
                completed=row["round"],
                total=rounds,
                numbers=_numbers(row),
            )

        yield on_round


def _numbers(row: Mapping[str, Any]) -> str:
    parts = [f"loss {row['loss']:.3f}"] if row.get("loss") is not None else []
    modes = row.get("metrics") or {}
    columns = modes.get("local") or modes.get("global") or {}
    for column in ("val", "test"):
        value = columns.get(column, {}).get("accuracy")
        if value is not None:
            parts.append(f"{column} {100 * value:.1f} %")
    return "  ".join(parts)
