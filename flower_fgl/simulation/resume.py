"""Going on with a run that was interrupted: ``flower-fgl run --resume``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.rewind import _checkpoint_of
from flower_fgl.runs.run import Run

__all__ = ["resume"]


def resume(
    folder: Path | str,
    *,
    workers: int | None = None,
    client_gpus: float = 0.0,
    on_round: Callable[[Mapping[str, Any]], None] | None = None,
) -> Run:
    """Continue an interrupted run from its newest checkpoint, with its own settings.

    On CPU the numbers are those of the run that was not interrupted, bit for bit.

    Parameters
    ----------
    folder : Path or str
        The run folder.
    workers : int, optional
        Clients at once under Ray; by default one per core.
    client_gpus : float
        Share of a GPU per client under Ray.
    on_round : callable, optional
        Called with the line of each round to come.

    Returns
    -------
    Run
        The run, complete; if it was so before, just read.

    Raises
    ------
    ConfigError
        If ``workers`` or ``client_gpus`` is given for a run of the local engine.
    RunError
        If there is no whole checkpoint, another process works on the run, it was a
        deployment, or the code, the settings or the data are not those of the run; or
        if it does not complete.
    """
    from flower_fgl.simulation.run import run_one

    place = Path(folder).resolve()
    run = Run.load(place)
    if run.status == "completed":
        return run
    engine = _checkpoint_of(place).engine
    if engine == "deployment":
        raise RunError(
            f"The run in {place} was a deployment: start it by the `flwr run` command of "
            f'before, with run-dir="{place}" resume=true added to its --run-config.'
        )
    if engine == "local" and (workers is not None or client_gpus):
        raise ConfigError(
            "The run was one of the local engine: leave out --workers and --client-gpus."
        )
    values: dict[str, Scalar] = dict(flatten_config(run.config))
    return run_one(
        {**values, "run-dir": str(place), "resume": True},
        engine=engine,
        workers=workers,
        client_gpus=client_gpus,
        on_round=on_round,
    )
