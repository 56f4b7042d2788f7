"""One tidy frame of scores, from which all tables and comparisons are made.

A line of the frame is one score of one run: ``place`` (the data), ``row``, ``model`` (see
:data:`~flower_fgl.lab.tables.cells.MODELS`), the draw (``partition``, its hash;
``partition_seed``; ``seed``), ``column`` (node set), ``score`` and ``value``.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from flower_fgl.lab.tables.cells import EARLIER, PLACE, Cell
from flower_fgl.runs.run import RunFolder

__all__ = ["COSTS", "DRAW", "Scores", "frame_of_cells", "frame_of_runs", "place_of"]

KEYS = ["place", "row", "model", "column", "score"]
DRAW = ["partition", "partition_seed", "seed"]
"""What identifies a draw. Scores of two rows are paired by it."""
COSTS = ("bytes", "bytes_up", "bytes_down", "seconds")
"""Values of a run that are no scores: less is better, and they are not tested. Their model
and column are empty."""
Line = tuple[Hashable, ...]


def frame_of_cells(cells: Iterable[Cell]) -> pd.DataFrame:
    """Return the tidy frame of cells; ``place`` is their :meth:`Cell.place_key`."""
    lines: list[Line] = []
    for cell in cells:
        for draw in cell.draws:
            which = (draw.partition, draw.partition_seed, draw.seed)
            up, down = draw.bytes_up, draw.bytes_down
            costs = dict(zip(COSTS, (up + down, up, down, draw.seconds), strict=True))
            lines += _lines(cell.place_key, cell.row, which, {"": {"": costs}})
            lines += _lines(cell.place_key, cell.row, which, draw.scores)
    return _frame(lines)


def frame_of_runs(
    runs: Iterable[tuple[Hashable, Hashable, RunFolder]],
) -> pd.DataFrame:
    """Return the tidy frame of runs, each with its ``place`` and ``row``."""
    lines: list[Line] = []
    for place, row, run in runs:
        summary = run.summary
        which = (
            str(summary.get("partition_sha256") or ""),
            run.config.get("partition-seed", 0),
            summary.get("seed", 0),
        )
        models = {
            "own": run.final,
            "global": summary.get("global", {}).get("best"),
            "before": run.best if summary.get("finetuned") else None,
        }
        lines += _lines(place, row, which, models)
    return _frame(lines)


def _lines(
    place: Hashable, row: Hashable, which: Line, models: Mapping[str, Any]
) -> Iterator[Line]:
    """Yield the lines of the scores of one run, by model, node set and name."""
    for model, columns in models.items():
        for column, scores in (columns or {}).items():
            if isinstance(scores, Mapping):  # not the number of the round
                for name, value in scores.items():
                    if name == "targets":  # their own numbers
                        continue
                    if value is not None and not math.isnan(value):
                        yield place, row, model, *which, column, name, float(value)


def _frame(lines: list[Line]) -> pd.DataFrame:
    """Return lines as a frame."""
    return pd.DataFrame(lines, columns=[*KEYS[:3], *DRAW, *KEYS[3:], "value"])


def place_of(run: RunFolder) -> tuple[Any, ...]:
    """Return what runs must share to be compared: the data, and how clients hold it."""
    held = (run.summary["dataset"], run.summary["clients"])
    keys = [key for key in PLACE if key not in ("dataset", "clients")]
    own = str(run.config.get(str(run.summary["dataset"]), ""))  # of synthetic graphs
    return (*held, *map({**EARLIER, **run.config}.get, keys), own)


class Scores:
    """The values of a tidy frame by place, row, model, node set and score."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame
        self._values = frame["value"].to_numpy(dtype=float)
        self._places = frame.groupby(KEYS, sort=False).indices if len(frame) else {}

    def values(self, *key: Hashable) -> list[float]:
        """Return the values of the draws that have one, in their order."""
        found = self._places.get(key)
        return [] if found is None else [float(v) for v in self._values[found]]

    def series(self, *key: Hashable) -> pd.Series:
        """Return the same values, indexed by draw."""
        lines = self.frame.iloc[self._places.get(key, [])]
        return lines.set_index(DRAW)["value"]
