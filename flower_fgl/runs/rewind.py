"""Reset a run folder to its newest checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.runs.checkpoints import Checkpoint, newest_checkpoint
from flower_fgl.runs.files import (
    CLIENTS_FILE,
    CONFIG_FILE,
    HEADER,
    ROUNDS,
    read_text,
)
from flower_fgl.runs.run import RunFolder, require_rounds
from flower_fgl.runs.writer import RunWriter, replace_file

__all__ = ["LET_GO_SECONDS", "require_checkpoint", "rewind"]


SETTING_OF_ROUNDS = re.compile(r"^rounds = \d+", re.MULTILINE)
LET_GO_SECONDS = 30.0
"""Seconds to wait for the processes of a killed launcher to release the run folder."""


def rewind(folder: Path, config: RunConfig) -> Checkpoint:
    """Reset a run folder to its newest checkpoint and delete the rows of later rounds.

    No other process may write to it. A ``config`` with more rounds extends the run, and
    ``config.toml`` gets their number. Raises a RunError, and leaves the folder unchanged,
    if the run cannot resume with ``config``.
    """
    run = RunFolder.load(folder)
    before = int(run.config["rounds"])
    is_extended = config.rounds > before
    if run.status == "completed" and not is_extended:
        raise RunError(
            f"The run in {folder} is complete: there is nothing to resume. To add rounds, "
            f"set rounds above {before}."
        )
    checkpoint = require_checkpoint(folder)
    checkpoint.check(config)
    ended = max(
        (row["round"] for row in run.rounds if row["phase"] == "train"), default=0
    )
    if run.status == "completed" and ended < before:
        raise RunError(
            f"The run in {folder} ended after round {ended} of {before}, "
            "because no later round scored better (round-patience). Start a new run "
            "without round-patience."
        )
    require_rounds(run.rounds, checkpoint.server_round, folder)
    if is_extended:
        text = read_text(folder / CONFIG_FILE)
        longer = SETTING_OF_ROUNDS.sub(f"rounds = {config.rounds}", text, count=1)
        replace_file(folder / CONFIG_FILE, longer.encode())
    for name in (ROUNDS, CLIENTS_FILE):
        _drop_later_rows(folder / name, checkpoint.server_round)
    header = {key: run.summary.get(key) for key in HEADER}
    header |= {"engine": checkpoint.engine, "clients": len(checkpoint.clients)}
    summary = {**header, "rounds": checkpoint.server_round, "status": "running"}
    RunWriter(folder).write_summary(summary)
    return checkpoint


def require_checkpoint(folder: Path) -> Checkpoint:
    """Return the newest intact checkpoint; raise RunError if there is none."""
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        if RunFolder.load(folder).status == "completed":
            raise RunError(
                f"The run in {folder} cannot get more rounds: it kept no checkpoint when "
                "it ended. Run it again with keep-checkpoint = true."
            )
        again = f"flower-fgl run {folder}/config.toml"
        if RunFolder.load(folder).summary.get("engine") == "deployment":
            again = (
                "the same `flwr run` command without resume, and with another run-dir"
            )
        raise RunError(
            f"The run in {folder} has no checkpoint: it ended before the first one, or its "
            f"settings have checkpoint-every = 0. Start it again: {again}"
        )
    return checkpoint


def _drop_later_rows(path: Path, server_round: int) -> None:
    """Delete the rows of later rounds, and an incomplete last line."""
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
