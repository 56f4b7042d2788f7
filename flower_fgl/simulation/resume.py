"""Resume an interrupted run, as ``flower-fgl run --resume`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flower_fgl.core.errors import RunError
from flower_fgl.core.options import Scalar
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.rewind import require_checkpoint
from flower_fgl.simulation.progress import show_progress
from flower_fgl.simulation.results import Run

__all__ = ["resume"]


def resume(
    folder: Path | str,
    *,
    workers: int | None = None,
    client_gpus: float = 0.0,
    progress: bool = False,
    on_round: Callable[[Mapping[str, Any]], None] | None = None,
) -> Run:
    """Resume an interrupted run from its newest checkpoint, with its own settings.

    On CPU the results equal those of an uninterrupted run bit for bit.

    Parameters
    ----------
    folder : Path or str
        Run folder.
    workers, client_gpus
        As for :func:`flower_fgl.simulation.run.run_one`.
    progress : bool
        As for :func:`flower_fgl.simulate`.
    on_round : callable, optional
        Called with the row of each further round.

    Returns
    -------
    Run
        The completed run. A run that was complete before is only read.

    Raises
    ------
    RunError
        If the run has no intact checkpoint, another process uses its folder, it was a
        deployment, the code, the settings or the data have changed, or it does not
        complete.
    """
    from flower_fgl.simulation.run import run_one

    path = Path(folder).resolve()
    run = Run.load(path)
    if run.status == "completed":
        return run
    engine = require_checkpoint(path).engine
    if engine == "deployment":
        raise RunError(
            f"The run in {path} was a deployment: repeat its `flwr run` command with "
            f'run-dir="{path}" resume=true added to --run-config.'
        )
    values: dict[str, Scalar] = dict(flatten_config(run.config))
    about = f"{run.summary['method']} on {run.summary['dataset']}"
    rounds, before = int(values["rounds"]), int(run.summary["rounds"])
    shown = show_progress(about, rounds, on_round, first=before)
    with shown if progress else nullcontext(on_round) as callback:
        return run_one(
            {**values, "run-dir": str(path), "resume": True},
            engine=engine,
            workers=workers,
            client_gpus=client_gpus,
            on_round=callback,
        )
