"""Average ranks over several datasets, and their critical-difference diagram.

Demšar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 7, 2006.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from flower_fgl.core.errors import ConfigError
from flower_fgl.lab.tables.statistics import LEVEL

__all__ = ["MIN_BLOCKS", "Ranks", "draw_ranks", "rank_rows"]

MIN_BLOCKS = 5
"""Datasets below which ranks are not tested."""
FEW_BLOCKS = 10
"""Up to this number of datasets, Friedman's p-value is a rough approximation."""
MIN_ROWS = 3
PICTURES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Ranks:
    """Average ranks of rows over ``num_blocks`` datasets; 1 is best, and best comes first.

    ``p`` is that of Friedman's test of equal ranks; ``p_values`` of each pair of rows
    and ``critical_difference`` are Nemenyi's at 95 %. ``why_not`` says why they are not
    testable.
    """

    average: Mapping[str, float]
    num_blocks: int
    p: float = math.nan
    critical_difference: float = math.nan
    p_values: Mapping[str, Mapping[str, float]] | None = None
    why_not: str = ""

    def __str__(self) -> str:
        """State the ranks and what they show."""
        listed = ", ".join(f"{name} {rank:.2f}" for name, rank in self.average.items())
        text = f"Average ranks over {self.num_blocks} datasets: {listed}. "
        if self.why_not:
            return f"{text}Not testable: {self.why_not}."
        test = f"Friedman's test: p = {self.p:.2g}"
        if self.num_blocks <= FEW_BLOCKS:
            test += f" (a rough value with {self.num_blocks} datasets)"
        return (
            f"{text}{test}. Nemenyi's critical difference at 95 %: "
            f"{self.critical_difference:.2f}."
        )


def rank_rows(scores: Mapping[str, Sequence[float]]) -> Ranks:
    """Rank rows by their scores on each dataset, higher is better, and test the ranks.

    Equal scores share their mean rank. The replicates of the test are datasets, never
    draws of one dataset.
    """
    from scipy import stats

    names, blocks = list(scores), list(zip(*scores.values(), strict=True))
    ranks = [stats.rankdata([-value for value in block]) for block in blocks]
    found = {
        name: fmean(float(rank[place]) for rank in ranks) if ranks else math.nan
        for place, name in enumerate(names)
    }
    average = dict(sorted(found.items(), key=lambda entry: entry[1]))
    number, size = len(blocks), len(names)
    if number < MIN_BLOCKS or size < MIN_ROWS:
        why = (
            f"{size} rows on {number} datasets, at least {MIN_ROWS} rows on {MIN_BLOCKS} "
            "datasets are needed"
        )
        return Ranks(average, number, why_not=why)
    if all(len(set(block)) == 1 for block in blocks):
        return Ranks(average, number, why_not="the rows are equal on every dataset")
    error = math.sqrt(size * (size + 1) / (6 * number))
    wide = stats.studentized_range.ppf(1 - LEVEL, size, math.inf)
    p_values = {
        one: {
            other: float(
                stats.studentized_range.sf(
                    abs(average[one] - average[other]) / error * math.sqrt(2),
                    size,
                    math.inf,
                )
            )
            if one != other
            else 1.0
            for other in average
        }
        for one in average
    }
    p = float(stats.friedmanchisquare(*scores.values()).pvalue)
    return Ranks(average, number, p, float(wide) / math.sqrt(2) * error, p_values)


def draw_ranks(ranks: Ranks, path: Path) -> Path:
    """Draw the critical-difference diagram as SVG, PNG or PDF; return its file.

    Raises a ConfigError if the ranks are not testable, or scikit-posthocs is not
    installed.
    """
    if not path.suffix:
        path = path.with_name(f"{path.name}.svg")
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(
            f"{path} has none of the endings {', '.join(PICTURES)}. Use one of them."
        )
    if ranks.p_values is None:
        raise ConfigError(
            f"A critical-difference diagram needs tested ranks: {ranks.why_not}."
        )
    try:
        import scikit_posthocs
    except ImportError as error:
        raise ConfigError(
            "--ranks needs scikit-posthocs. Install it: pip install "
            "'flower-fgl[ranks]'."
        ) from error
    import matplotlib as mpl
    import pandas as pd
    from matplotlib.figure import Figure

    from flower_fgl.lab.plots import save_figure

    # the same file for the same ranks
    with mpl.rc_context({"svg.hashsalt": "ranks", "svg.fonttype": "path"}):
        figure = Figure(figsize=(8, 1.4 + 0.2 * len(ranks.average)))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_title(
            f"Average rank over {ranks.num_blocks} columns, 1 is best. Bars join rows that "
            f"do\nnot differ at 95 % (critical difference {ranks.critical_difference:.2f})",
            fontsize=10,
        )
        scikit_posthocs.critical_difference_diagram(
            dict(ranks.average),
            pd.DataFrame(ranks.p_values),
            ax=axes,
            alpha=LEVEL,
            label_fmt_left="{label} ({rank:.2f})  ",
            label_fmt_right="  ({rank:.2f}) {label}",
        )
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        save_figure(figure, path, bbox_inches="tight", metadata=metadata)
    return path
