"""Run an experiment file from Python, as ``flower-fgl run`` does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flower_fgl.cli.run import RunOptions, run_all
from flower_fgl.lab.results import RunSet

__all__ = ["run_experiment"]


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
    from flower_fgl.simulation.local import flat_settings  # loads torch

    # rich would need ipywidgets to draw in a notebook
    console = Console(quiet=not progress, force_jupyter=False)
    runs = run_all(
        Path(file).expanduser(),
        flat_settings(settings),
        RunOptions(engine, workers, quiet=not progress, jobs=jobs),
        console,
        cases=cases,
        draws=draws,
    )
    return RunSet(runs)
