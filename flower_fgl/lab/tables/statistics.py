"""Comparisons of paired scores: one row is better, two are tied, or there are too few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from flower_fgl.core.score_names import EQUAL, ScoreScale

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["LEVEL", "MIN_PAIRS", "POWER", "Comparison", "adjust_holm"]
__all__ += ["compare_all", "compare_series", "paired_test"]

LEVEL = 0.05
"""A difference is significant if its p-value is below this level."""
MIN_PAIRS = 5
"""A t-test of fewer pairs says little about spread, and is not made."""
POWER = 0.8
"""Probability with which the detectable difference is found."""


SHARE = ScoreScale()
"""The scale of accuracies, and of other shares of which more is better."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """Paired scores of two rows A and B, and what the gains of A over B show.

    The gain is A minus B, or B minus A of an error: positive is good. ``n`` counts the
    tested pairs: runs on one of several partitions are averaged first. ``t`` has n − 1
    degrees of freedom, ``p`` is two-sided, ``interval`` is the 95 % confidence interval
    of the gain. ``detectable`` is the smallest true difference that such a test finds
    with probability 0.8. ``p_equivalent`` is the p-value of the hypothesis that the
    rows differ by the margin of the score or more (two one-sided tests). All are NaN if
    not testable, see ``why_not``.

    ``one`` and ``other`` are the scores by run, ``unpaired`` numbers of completed runs
    without a partner, ``partitions`` those among the pairs, 0 if unknown: below ``n``,
    the test says less about other partitions.
    """

    n: int
    difference: float
    t: float = math.nan
    p: float = math.nan
    interval: tuple[float, float] = (math.nan, math.nan)
    detectable: float = math.nan
    p_equivalent: float = math.nan
    why_not: str = ""
    one: tuple[float, ...] = ()
    other: tuple[float, ...] = ()
    names: tuple[str, str] = ("A", "B")
    unpaired: tuple[int, int] = (0, 0)
    partitions: int = 0
    scale: ScoreScale = SHARE

    @property
    def is_significant(self) -> bool:
        """Whether the p-value is below :data:`LEVEL`."""
        return self.p < LEVEL

    @property
    def is_tied(self) -> bool:
        """Whether a difference of the margin or more can be excluded."""
        return self.p_equivalent < LEVEL

    @property
    def kind(self) -> str:
        """``above``, ``below``, ``tied``, ``undecided``; empty if not testable."""
        if self.why_not:
            return ""
        if self.is_significant:
            return "above" if self.difference > 0 else "below"
        return "tied" if self.is_tied else "undecided"

    @property
    def shares_partitions(self) -> bool:
        """Whether several of the tested pairs have the same partition."""
        return 0 < self.partitions < self.n

    @property
    def points(self) -> str:
        """The gain in points or units, with its sign."""
        return self.scale.show_gain(self.difference)

    @property
    def _by_little(self) -> str:
        """What a significant difference adds if it is below the margin."""
        return f", by less than {self.scale.margin_text}" if self.is_tied else ""

    @property
    def brief(self) -> str:
        """The difference and the verdict, as a table shows them."""
        if self.why_not:
            return f"{self.points}, not testable: {self.why_not}"
        if self.is_significant:
            word = "better" if self.difference > 0 else "worse"
            return f"{self.points}, {word}{self._by_little} (p = {self.p:.3g})"
        if self.is_tied:
            return f"{self.points}, tied (p = {self.p_equivalent:.3g})"
        return (
            f"{self.points}, undecided (p = {self.p:.3g}; "
            f"{self.scale.show(self.detectable, 1)} would be found)"
        )

    @property
    def verdict(self) -> str:
        """Which row is better in words, or what the runs can and cannot show."""
        if self.why_not:
            return f"not testable: {self.why_not}"
        if self.is_significant:
            side = self.names[0 if self.difference > 0 else 1]
            return f"{side} is significantly better at 95 %{self._by_little}"
        size = self.scale.show(self.detectable, 1)
        size += "" if self.scale.kind.has_units else " points"
        found = f"a difference of {size} would be found in 80 %"
        within = f"tied within {self.scale.margin_text}"
        if self.is_tied:
            return f"{within} (p = {self.p_equivalent:.3g}); {found}"
        return f"no significant difference at 95 %, and not {within}; {found}"

    def __repr__(self) -> str:
        """State the difference, its interval and the verdict."""
        text = " minus ".join(self.names)
        if self.scale.is_error:
            text = f"gain in {self.scale.title} of {' over '.join(self.names)}"
        text += f" = {self.scale.show(self.difference, sign='+')}"
        text += f", n = {self.n} pairs"
        if self.shares_partitions:
            several = f"{self.partitions} partitions"
            text += f" on {'one partition' if self.partitions == 1 else several}"
        if self.n < len(self.one):
            text += f" ({len(self.one)} runs, averaged on each partition)"
        if not self.why_not:
            low, high = (self.scale.show(bound, sign="+") for bound in self.interval)
            text += f", 95 % interval {low} to {high}"
            text += f", t = {self.t:.3f}, p = {self.p:.3g}"
        return f"{text}: {self.verdict}"

    def reverse(self) -> Comparison:
        """Return the comparison of B with A."""
        low, high = self.interval
        return replace(
            self,
            difference=-self.difference,
            t=-self.t,
            interval=(-high, -low),
            one=self.other,
            other=self.one,
        )


def compare_series(
    one: pd.Series, other: pd.Series, scale: ScoreScale = SHARE
) -> Comparison | None:
    """Compare two rows by the draws that both have, ``None`` without any.

    Runs that share one of several partitions are no independent draws: their mean is
    one pair of the test, which would otherwise find differences that other partitions
    lack.
    """
    import pandas as pd

    shared = one.index.intersection(other.index, sort=False)
    if not len(shared) or not (one.index.is_unique and other.index.is_unique):
        return None
    pairs = pd.DataFrame({"one": one.loc[shared], "other": other.loc[shared]})
    tested = pairs
    if pairs.index.get_level_values("partition_seed").nunique() > 1:
        tested = pairs.groupby(level="partition_seed", sort=False).agg(fmean)
    return replace(
        paired_test(tested["one"].tolist(), tested["other"].tolist(), scale),
        one=tuple(pairs["one"].tolist()),
        other=tuple(pairs["other"].tolist()),
        partitions=pairs.index.get_level_values("partition").nunique(),
    )


def paired_test(
    one: Sequence[float], other: Sequence[float], scale: ScoreScale = SHARE
) -> Comparison:
    """Test whether the mean paired gain is 0, and whether it is below the margin.

    Fewer than :data:`MIN_PAIRS` pairs, or differences that are all equal, are not
    tested: their p-value would be 0 or 1 without evidence.
    """
    if scale.is_error:
        one, other = other, one
    differences = [a - b for a, b in zip(one, other, strict=True)]
    n, mean = len(differences), fmean(differences)
    if n < MIN_PAIRS:
        why = f"{n} {'pair' if n == 1 else 'pairs'}, {MIN_PAIRS} are needed"
        return Comparison(n, mean, why_not=why, scale=scale)
    spread = stdev(differences)
    if spread < EQUAL * scale.size or not spread:
        why = "all differences are equal"
        return Comparison(n, mean, why_not=why, scale=scale)
    # slow to import, and selecting runs does not need them
    import numpy as np
    from scipy import stats
    from statsmodels.stats.weightstats import ttost_paired

    result = stats.ttest_rel(one, other)
    interval = result.confidence_interval(1 - LEVEL)
    margin, pair = scale.margin, (np.array(one), np.array(other))
    has_margin = not math.isnan(margin)
    p_equivalent = ttost_paired(*pair, -margin, margin)[0] if has_margin else math.nan
    return Comparison(
        n,
        mean,
        float(result.statistic),
        float(result.pvalue),
        (float(interval.low), float(interval.high)),
        _detectable_effect(n) * spread,
        float(p_equivalent),
        scale=scale,
    )


@cache
def _detectable_effect(n: int, level: float = LEVEL) -> float:
    """Return the detectable difference of n pairs, in standard deviations.

    statsmodels' ``TTestPower`` finds too small ones for few pairs at strict levels.
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, t

    bound = t.isf(level / 2, n - 1)
    return float(
        brentq(lambda effect: nct.sf(bound, n - 1, effect * n**0.5) - POWER, 0.0, 1e3)
    )


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of one table for their number, by Holm's method.

    NaN stands for comparisons that cannot be tested, which do not count.
    """
    import numpy as np
    import pandas as pd

    # statsmodels has it too, but visits all objects of the process in every call
    found = pd.Series(p_values, dtype=float).dropna().sort_values()
    adjusted = (found * np.arange(len(found), 0, -1)).cummax().clip(upper=1.0)
    return list(adjusted.reindex(range(len(p_values))))


def compare_all(found: Sequence[Comparison]) -> list[Comparison]:
    """Adjust all comparisons of one table for their number, both kinds of p-values apart.

    The detectable differences are those of Holm's first step, the strictest.
    """
    number = sum(not math.isnan(one.p) for one in found)
    level = LEVEL / max(number, 1)
    differ = adjust_holm([one.p for one in found])
    equal = adjust_holm([one.p_equivalent for one in found])
    return [
        replace(
            one,
            p=p,
            p_equivalent=p_equivalent,
            detectable=math.nan
            if math.isnan(one.detectable)
            else one.detectable
            * _detectable_effect(one.n, level)
            / _detectable_effect(one.n),
        )
        for one, p, p_equivalent in zip(found, differ, equal, strict=True)
    ]
