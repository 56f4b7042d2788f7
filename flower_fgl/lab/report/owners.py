"""Table of natural owners: who gains from federating, who loses, and the worst owner."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from flower_fgl.lab.report.lines import Line
from flower_fgl.lab.tables.compare import common_scale
from flower_fgl.lab.tables.per_owner import owner_metric, rows_per_owner
from flower_fgl.runs.run import RunFolder

__all__ = ["owner_table"]

TITLES = {"auroc": "area under the ROC curve (AUROC)", "accuracy": "accuracy"}


def owner_table(
    runs: Sequence[RunFolder], lines: Sequence[Line], against: str
) -> dict[str, Any]:
    """Return the template's table of owners, with a column for each line.

    The gains refer to the line of the method ``against``, if exactly one has it. The
    table is empty unless all runs have the same natural owners, and scores of them.
    """
    owners = {run.config.get("owners") or "" for run in runs}
    if "" in owners or len({run.summary["dataset"] for run in runs}) > 1:
        return {}
    metric = owner_metric(runs)
    scale = common_scale(metric, runs)
    bases = [n for n, line in enumerate(lines) if line.method == against]
    base = bases[0] if len(bases) == 1 and len(lines) > 1 else None
    rows = rows_per_owner([line.runs for line in lines], base, metric=metric)
    if not rows:
        return {}
    worst, mean, winners = [], [], []
    for number in range(len(lines)):
        known = {row.name: row.means[number] for row in rows}
        scores = {name: value for name, value in known.items() if value is not None}
        last = scale.worst(scores) if scores else ""
        worst.append((last, scores.get(last)))
        mean.append(fmean(scores.values()) if scores else None)
        gains = [row.gains[number] for row in rows]
        compared = [gain for gain in gains if gain is not None]
        winners.append((sum(gain > 0 for gain in compared), len(compared)))
    return {
        "metric": TITLES.get(metric, scale.title),
        "scale": scale,
        "lines": [line.label or line.method for line in lines],
        "base": base,
        "rows": rows,
        "worst": worst,
        "mean": mean,
        "winners": winners,
    }
