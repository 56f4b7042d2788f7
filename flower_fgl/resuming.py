"""Going on with a run that was interrupted: ``flower-fgl run --resume``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flower_fgl.checkpoints import Checkpoint, newest_checkpoint
from flower_fgl.config import RunConfig
from flower_fgl.errors import ConfigError, RunError
from flower_fgl.options import Scalar
from flower_fgl.run_files import CLIENTS, HEADER, ROUNDS, flatten, replace_file
from flower_fgl.run_writer import RunWriter
from flower_fgl.runs import Run

__all__ = ["LET_GO_SECONDS", "resume", "rewind"]

LET_GO_SECONDS = 30.0
"""How long the processes of a run whose launcher was killed may still hold its folder."""


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
    from flower_fgl.engines import run_one

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
    values: dict[str, Scalar] = dict(flatten(run.config))
    return run_one(
        {**values, "run-dir": str(place), "resume": True},
        engine=engine,
        workers=workers,
        client_gpus=client_gpus,
        on_round=on_round,
    )


def rewind(folder: Path, config: RunConfig) -> Checkpoint:
    """Take a run folder back to its newest checkpoint; what came after is dropped.

    Parameters
    ----------
    folder : Path
        The run folder; no other process may be writing to it.
    config : RunConfig
        Settings with which the run is to go on.

    Returns
    -------
    Checkpoint

    Raises
    ------
    RunError
        If the run is complete or has no whole checkpoint, or its settings or versions
        are others; the folder stays as it is.
    """
    run = Run.load(folder)
    if run.status == "completed":
        raise RunError(f"The run in {folder} is complete: there is nothing to resume.")
    checkpoint = _checkpoint_of(folder)
    checkpoint.check(config)
    for name in (ROUNDS, CLIENTS):
        _cut(folder / name, checkpoint.server_round)
    header = {key: run.summary.get(key) for key in HEADER}
    header |= {"engine": checkpoint.engine, "clients": len(checkpoint.clients)}
    about = {**header, "rounds": checkpoint.server_round, "status": "running"}
    RunWriter(folder).write_summary(about)
    return checkpoint


def _checkpoint_of(folder: Path) -> Checkpoint:
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise RunError(
            f"The run in {folder} has no checkpoint: it ended before the first, or had "
            f"checkpoint-every = 0. Start it anew: flower-fgl run {folder}/config.toml"
        )
    return checkpoint


def _cut(path: Path, server_round: int) -> None:
    """Drop the lines of later rounds, and one that a kill cut off."""
    if not path.exists():
        return
    data = path.read_bytes()
    kept = b"".join(
        line
        for line in data.splitlines(keepends=True)
        if line.endswith(b"\n") and json.loads(line)["round"] <= server_round
    )
    if kept != data:
        replace_file(path, kept)
