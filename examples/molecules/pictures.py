"""The two pictures of docs/molecules.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from scores import ROWS, Scored, rmse
from sources import OWNERS, UNIT

__all__ = ["draw_gains", "draw_predictions"]

COLORS = {"fedavg": "#0072B2", "fedper": "#E69F00", "pooled": "#999999"}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "molecules", "font.size": 9}


def draw_gains(scores: Sequence[Scored], path: Path) -> None:
    """Draw the gain of each owner over training alone: mean of the draws, and each draw."""
    alone = {(s.owner, s.draw): s.rmse for s in scores if s.row == "local"}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 3), layout="constrained")
        ax = figure.subplots()
        width = 0.8 / len(COLORS)
        for number, (row, color) in enumerate(COLORS.items()):
            for place, owner in enumerate(OWNERS):
                gains = [
                    alone[s.owner, s.draw] - s.rmse
                    for s in scores
                    if (s.row, s.owner) == (row, owner)
                ]
                at = place + (number - (len(COLORS) - 1) / 2) * width
                label = None if place else ROWS[row]
                ax.bar(at, fmean(gains), 0.9 * width, color=color, label=label)
                if len(gains) > 1:
                    ax.plot([at] * len(gains), gains, "k.", markersize=3)
        ax.axhline(0, color="black", linewidth=0.8)
        counts = {s.owner: s.molecules for s in scores}
        ax.set_xticks(
            range(len(OWNERS)), [f"{owner}\n{counts[owner]:,}" for owner in OWNERS]
        )
        ax.set_xlabel("owner, and its test molecules")
        ax.set_ylabel(f"gain of RMSE over alone\n({UNIT})")
        ax.legend(ncols=len(COLORS), frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})


def draw_predictions(pairs: pd.DataFrame, path: Path) -> None:
    """Draw predicted against measured solubility, one panel for each owner."""
    every = pairs[["measured", "predicted"]]
    low, high = every.min().min() - 0.5, every.max().max() + 0.5
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 8), layout="constrained")
        axes = figure.subplots(3, 3, sharex=True, sharey=True)
        for ax, (owner, found) in zip(axes.flat, pairs.groupby("owner"), strict=True):
            ax.plot([low, high], [low, high], color="#777777", linewidth=0.8)
            ax.scatter(
                *(found["measured"], found["predicted"]),
                s=5,
                color=COLORS["fedavg"],
                alpha=0.4,
                linewidths=0,
                rasterized=True,
            )
            ax.set_title(f"{owner} {OWNERS[str(owner)]}, RMSE {rmse(found):.2f}")
            ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
        figure.supxlabel(f"measured ({UNIT})")
        figure.supylabel(f"predicted ({UNIT})")
        figure.savefig(path, metadata={"Date": None}, dpi=150)
