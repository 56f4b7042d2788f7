"""Print the terms that clients report, as means over runs, clients and rounds.

    python benchmarks/mean_terms.py runs/adpfedgnn-table1-cora-tuned/adpfedgnn-draw* \
        --rounds 2-6,18-22,38-42,98-100

A term is a number that a method reports of its training, such as a loss or the overlap of
two masks; ``clients.jsonl`` of a run folder holds them. Runs count equally: the means over
clients and rounds are taken in each run first.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flower_fgl import Run


def window(text: str) -> range:
    """Read ``"2-6"`` or ``"4"`` as rounds."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def means(folder: Path, windows: list[range]) -> dict[tuple[str, int], float]:
    """Return the mean of each term in each window of one run."""
    values = defaultdict(list)
    for row in Run.load(folder).clients:
        for term, value in row.get("terms", {}).items():
            for number, rounds in enumerate(windows):
                if row["round"] in rounds:
                    values[term, number].append(value)
    return {key: statistics.fmean(found) for key, found in values.items()}


def main() -> None:
    """Read the runs and print one row per term."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("--rounds", default="1-1000000", help="windows, 2-6,98-100")
    options = parser.parse_args()
    names = options.rounds.split(",")
    runs = [
        means(folder, [window(name) for name in names]) for folder in options.folders
    ]
    table = Table(
        "term", *(f"round {name}" for name in names), title=f"{len(runs)} runs"
    )
    for term in dict.fromkeys(term for run in runs for term, _ in run):
        found = [
            [run[term, number] for run in runs if (term, number) in run]
            for number in range(len(names))
        ]
        table.add_row(term, *(f"{statistics.fmean(f):.4g}" if f else "" for f in found))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
