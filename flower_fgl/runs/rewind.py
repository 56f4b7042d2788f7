"""Take a run folder back to its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.runs.checkpoints import Checkpoint, newest_checkpoint
from flower_fgl.runs.files import CLIENTS, HEADER, ROUNDS, replace_file
from flower_fgl.runs.run import Run
from flower_fgl.runs.writer import RunWriter

__all__ = ["LET_GO_SECONDS", "rewind"]


LET_GO_SECONDS = 30.0
"""How long the processes of a run whose launcher was killed may still hold its folder."""


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
