"""Compare the airlines' models with their majorities and with boosted trees.

python examples/airlines/trees.py [CELLS] [--data DIR] [--draws 10]

Every airline trains scikit-learn's gradient boosting on its own routes, with the columns
of the route, of its two airports and the mean of those of its planes. The splits are those
of ``prepare.py``. ``CELLS`` is the file that ``flower-fgl table --cells`` wrote of
``experiments/owners/owners-openflights.toml``; its rows are tested against the trees, and
the airlines' gains over ``local``, by paired t-tests over the draws with Holm's adjustment.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from prepare import find_data
from sklearn.ensemble import HistGradientBoostingClassifier
from tables import Airline, read_airlines, split_routes

from flower_fgl.lab.tables.cells import Cell, read_cells
from flower_fgl.lab.tables.statistics import compare_all, paired_test

TREES = {"learning_rate": 0.1, "max_iter": 50, "early_stopping": False}
"""Chosen on validation routes of draw 10, which no table shows."""


def share_right(airline: Airline, masks: Mapping[str, np.ndarray], draw: int) -> list:
    """Return the shares of correct test routes: of the majority, and of the trees."""
    x, y = airline.flat(), airline.label
    train, test = masks["train"], masks["test"]
    majority = int(2 * y[train].sum() > train.sum())
    if len(set(y[train].tolist())) == 1:
        found = np.full(test.sum(), majority)
    else:
        trees = HistGradientBoostingClassifier(**TREES, random_state=draw)
        found = trees.fit(x[train], y[train]).predict(x[test])
    return [float((y[test] == majority).mean()), float((y[test] == found).mean())]


def cell_scores(cell: Cell, draws: int) -> list[dict[str, float]]:
    """Return the airlines' test accuracy in each draw."""
    return [
        {name: scores["accuracy"] for name, scores in draw.owners["own"].items()}
        for draw in cell.draws[:draws]
    ]


def spread(values: list[float]) -> str:
    """Return mean ± standard deviation in percent."""
    deviation = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{deviation}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="?", type=Path)
    parser.add_argument("--data", type=Path, help="folder with routes.dat.gz, …")
    parser.add_argument("--draws", type=int, default=10)
    given = parser.parse_args()
    cells = read_cells(given.cells) if given.cells else []
    draws = min([given.draws, *(len(cell.draws) for cell in cells)])
    airlines = read_airlines(find_data(given.data))
    rows: dict[str, list[dict[str, float]]] = {"majority": [], "trees": []}
    counts: list[dict[str, int]] = []
    for draw in range(draws):
        masks = split_routes(airlines, draw)
        found = {
            code: share_right(one, masks[code], draw) for code, one in airlines.items()
        }
        counts.append({code: int(masks[code]["test"].sum()) for code in airlines})
        for place, row in enumerate(rows):
            rows[row].append({code: pair[place] for code, pair in found.items()})
    rows |= {cell.row: cell_scores(cell, draws) for cell in cells}
    whole = {
        row: [
            sum(score[code] * count[code] for code in airlines) / sum(count.values())
            for score, count in zip(scores, counts, strict=True)
        ]
        for row, scores in rows.items()
    }
    others = [row for row in rows if row != "trees"]
    tests = compare_all([paired_test(whole[row], whole["trees"]) for row in others])
    verdicts = dict(zip(others, (test.brief for test in tests), strict=True))
    print("| row | test accuracy | against trees |\n|---|---|---|")
    for row, values in whole.items():
        print(f"| {row} | {spread(values)} | {verdicts.get(row, '')} |")
    if "local" in rows:
        print_gains(rows, list(airlines))


def print_gains(rows: Mapping[str, list[dict[str, float]]], codes: list[str]) -> None:
    """Print how many airlines gain or lose over ``local``, with tests of each."""
    print("\n| row | mean higher | significantly | mean lower | significantly |")
    print("|---|---|---|---|---|")
    for row, scores in rows.items():
        if row == "local":
            continue
        tests = [
            paired_test(
                [score[code] for score in scores],
                [score[code] for score in rows["local"]],
            )
            for code in codes
        ]
        known = zip(codes, compare_all(tests), strict=True)
        sides: list[list[str]] = [[], []]
        total = [
            sum(t.difference > 0 for t in tests),
            sum(t.difference < 0 for t in tests),
        ]
        for code, test in known:
            if test.is_significant:
                sides[test.difference < 0].append(code)
        texts = [", ".join(side) or "none" for side in sides]
        print(f"| {row} | {total[0]} | {texts[0]} | {total[1]} | {texts[1]} |")


if __name__ == "__main__":
    main()
