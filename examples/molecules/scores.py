"""Scores of each owner's test molecules, and the tables of docs/molecules.md."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import pandas as pd
from sources import OWNERS, TARGET

from flower_fgl import Run
from flower_fgl.datasets.graph_files.graph_set import load_graph_set
from flower_fgl.datasets.splits.graph_sets import split_set
from flower_fgl.methods import parse_config
from flower_fgl.runs.files import flatten_config

ROWS = {
    "local": "alone",
    "fedavg": "FedAvg",
    "fedper": "FedPer",
    "pooled": "pooled",
}
"""Rows of the table: name of the runs, and title."""


@dataclass(frozen=True)
class Scored:
    """RMSE of one model on one owner's test molecules.

    Parameters
    ----------
    row, owner : str
        Key of ``ROWS`` and of ``OWNERS``.
    draw : int
        Seed of the split and of the models.
    rmse : float
        In log10 mol/L.
    molecules : int
        Test molecules.
    """

    row: str
    owner: str
    draw: int
    rmse: float
    molecules: int


def test_molecules(pooled: Path, owners: Mapping[str, Path], run: Run) -> pd.DataFrame:
    """Return ``measured`` and ``owner`` of the test molecules of all owners, by their id.

    The split depends on the molecule and the settings of the run only, so that the set of
    all owners together has the parts of each owner's.
    """
    owned = load_graph_set(pooled)
    masks, _ = split_set(owned, parse_config(dict(flatten_config(run.config))))
    measured = owned.dataset.targets[:, 0].numpy()
    owner_of = {
        molecule: owner
        for owner, folder in owners.items()
        for molecule in pd.read_csv(folder / "graphs.csv")["id"]
    }
    frame = pd.DataFrame({"measured": measured}, index=list(owned.ids))
    frame["owner"] = [owner_of[molecule] for molecule in owned.ids]
    return frame[masks["test"].numpy()]


def rmse(pairs: pd.DataFrame) -> float:
    """Return the root of the mean squared error of ``predicted``."""
    return math.sqrt(((pairs["predicted"] - pairs["measured"]) ** 2).mean())


def score_owners(row: str, draw: int, run: Run) -> list[Scored]:
    """Return the scores of the owners' models, from the run folder."""
    counts = {
        entry["name"]: entry["num_test"] for entry in run.clients if "name" in entry
    }
    return [
        Scored(row, owner, draw, value, counts[owner])
        for owner, value in run.per_owner("test", "rmse").items()
    ]


def score_pooled(draw: int, pairs: pd.DataFrame) -> list[Scored]:
    """Score predictions of one model for the test molecules of each owner."""
    return [
        Scored("pooled", str(owner), draw, rmse(found), len(found))
        for owner, found in pairs.groupby("owner")
    ]


def over_all(scores: Sequence[Scored]) -> float:
    """Return the RMSE over the molecules of all owners, from the owners' RMSE."""
    total = sum(score.molecules for score in scores)
    return math.sqrt(sum(s.molecules * s.rmse**2 for s in scores) / total)


def _cell(values: Sequence[float], sign: str = "") -> str:
    """Return the mean of the draws, with their standard deviation if there are several."""
    spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.2f}{spread}"


def table(scores: Sequence[Scored]) -> list[list[str]]:
    """Return the lines of the table, the header first: RMSE, and gains over training alone.

    A gain is the RMSE alone minus the other RMSE: positive is good.
    """
    draws = sorted({score.draw for score in scores})
    others = [row for row in ROWS if row != "local"]
    lines = [
        [
            "owner",
            "test molecules",
            *(f"RMSE {title}" for title in ROWS.values()),
            *(f"gain {ROWS[row]}" for row in others),
        ]
    ]
    for owner in [*OWNERS, "all"]:
        mine = [s for s in scores if owner in (s.owner, "all")]
        by_row = {
            row: [
                over_all([s for s in mine if (s.row, s.draw) == (row, draw)])
                for draw in draws
            ]
            for row in ROWS
        }
        counts = [
            sum(s.molecules for s in mine if (s.row, s.draw) == ("local", draw))
            for draw in draws
        ]
        gains = [
            [
                alone - rmse
                for alone, rmse in zip(by_row["local"], by_row[row], strict=True)
            ]
            for row in others
        ]
        title = f"{owner} {OWNERS[owner]}" if owner in OWNERS else owner
        lines.append(
            [
                title,
                f"{fmean(counts):,.0f}",
                *(_cell(values) for values in by_row.values()),
                *(_cell(values, "+") for values in gains),
            ]
        )
    return lines


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    header, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([header, "|---" * len(lines[0]) + "|", *rest])


def write_scores(folder: Path, scores: Sequence[Scored]) -> str:
    """Write ``scores.csv``, one line per score, and ``scores.md``; return the latter."""
    with (folder / "scores.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("draw", "row", "owner", "test_molecules", f"rmse_{TARGET}"))
        writer.writerows(
            (s.draw, s.row, s.owner, s.molecules, f"{s.rmse:.6g}") for s in scores
        )
    text = as_markdown(table(scores))
    (folder / "scores.md").write_text(f"{text}\n", encoding="utf-8")
    return text
