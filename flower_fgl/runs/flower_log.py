"""What a run under Flower writes to Flower's log: rounds, results and errors."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import hide_traceback
from flower_fgl.core.options import Scalar, listed
from flower_fgl.runs.files import OnRound, Row
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.summary import describe_round

__all__ = ["flower_log", "log_results", "log_rounds", "log_settings"]

log = logging.getLogger(__name__)
FLOWER = logging.getLogger("flwr")
"""Flower's logger, whose records ``flwr log`` and ``flwr run --stream`` show."""


class _Forward(logging.Handler):
    """Pass each record on to Flower's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        FLOWER.handle(record)


@contextlib.contextmanager
def flower_log() -> Iterator[None]:
    """Write this package's log, from level INFO on, to Flower's log inside the block.

    Flower logs the error that ends a run after the block. An
    :class:`~flower_fgl.core.errors.FglError` stays without traceback until the process
    ends.
    """
    FLOWER.addFilter(hide_traceback)
    own = logging.getLogger("flower_fgl")
    before = own.level, own.propagate
    handler = _Forward()
    own.addHandler(handler)
    own.setLevel(logging.INFO)
    own.propagate = False  # handlers of the root logger get the records from Flower's
    try:
        yield
    finally:
        own.removeHandler(handler)
        own.setLevel(before[0])
        own.propagate = before[1]


def log_settings(given: Mapping[str, Scalar], config: RunConfig) -> None:
    """Log the settings that the user changed, and the other ones that are no defaults.

    Flower drops a part of ``--run-config`` that it cannot read, without an error.
    """
    log.info(
        "Settings from --run-config or the app's pyproject.toml: %s.",
        listed(given) or "none differs from its default",
    )
    flat = config.flat()
    for source, name in (
        ("method", f"method {config.method}"),
        ("data set", f"dataset {config.data_name}"),
        ("setting", f"setting {config.setting}"),
    ):
        keys = [
            k for k, by in config.sources.items() if by == source and k not in given
        ]
        if keys:
            log.info(
                "Settings by the %s: %s.", name, listed({k: flat[k] for k in keys})
            )


def log_rounds(rounds: int) -> OnRound:
    """Return a callback that logs one line per round of ``rounds``."""

    def on_round(row: Row) -> None:
        number, phase = row["round"], row["phase"]
        name = f"Round {number} of {rounds}" if phase == "train" else f"Phase {phase}"
        seconds = row.get("seconds", {}).get("total")
        took = "" if seconds is None else f"  ({seconds:.1f} s)"
        log.info("%s: %s%s", name, describe_round(row), took)

    return on_round


def log_results(folder: Path) -> None:
    """Log the results table of a run, and the owners that were left out of it."""
    run = RunFolder.load(folder.resolve())
    for line in run.table().splitlines():
        log.info("%s", line)
    for one in run.summary.get("refused", ()):
        log.warning("%s did not take part: %s", one["name"], one["reason"])
