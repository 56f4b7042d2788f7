"""Average ranks over several datasets, and their critical-difference diagram.

Demšar, "Statistical Comparisons of Classifiers over Multiple Data Sets", JMLR 7, 2006.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flower_fgl.core.errors import ConfigError
from flower_fgl.lab.tables.statistics import LEVEL

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MIN_BLOCKS", "Ranks", "draw_ranks", "rank_rows"]

MIN_BLOCKS = 5
"""Datasets below which ranks are not tested."""
FEW_BLOCKS = 10
"""Up to this number of datasets, Friedman's p-value is a rough approximation."""
MIN_ROWS = 3


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
    p_values: "pd.DataFrame | None" = None
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
    import pandas as pd  # takes a second to import
    from scipy import stats

    blocks = pd.DataFrame(scores)
    ranks = (
        blocks.rank(axis="columns", ascending=False).mean().sort_values(kind="stable")
    )
    average, (number, size) = ranks.to_dict(), blocks.shape
    if number < MIN_BLOCKS or size < MIN_ROWS:
        why = (
            f"{size} rows on {number} datasets, at least {MIN_ROWS} rows on {MIN_BLOCKS} "
            "datasets are needed"
        )
        return Ranks(average, number, why_not=why)
    if (blocks.nunique(axis="columns") == 1).all():
        return Ranks(average, number, why_not="the rows are equal on every dataset")
    error = math.sqrt(size * (size + 1) / (6 * number))
    wide = stats.studentized_range.ppf(1 - LEVEL, size, math.inf)
    apart = ranks.to_numpy()[:, None] - ranks.to_numpy()
    p_values = pd.DataFrame(
        stats.studentized_range.sf(abs(apart) / error * math.sqrt(2), size, math.inf),
        index=ranks.index,
        columns=ranks.index,
    )
    p = float(stats.friedmanchisquare(*scores.values()).pvalue)
    return Ranks(average, number, p, float(wide) / math.sqrt(2) * error, p_values)


def draw_ranks(ranks: Ranks, path: Path) -> Path:
    """Draw the critical-difference diagram, as SVG by default; return its file.

    Raises a ConfigError if the ranks are not testable, or scikit-posthocs is not
    installed, and a RunError if the file cannot be written.
    """
    if not path.suffix:
        path = path.with_name(f"{path.name}.svg")
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
            ranks.p_values,
            ax=axes,
            alpha=LEVEL,
            label_fmt_left="{label} ({rank:.2f})  ",
            label_fmt_right="  ({rank:.2f}) {label}",
        )
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        save_figure(figure, path, bbox_inches="tight", metadata=metadata)
    return path
