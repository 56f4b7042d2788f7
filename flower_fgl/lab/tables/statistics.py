"""Tests of paired scores: one method is better, two are tied, or there are too few runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev

__all__ = ["LEVEL", "MARGIN", "MIN_PAIRS", "POWER", "PairedTest", "adjust_holm"]
__all__ += ["compare_all", "paired_test", "partition_means", "proportion_interval"]

LEVEL = 0.05
"""A difference is significant if its p-value is below this level."""
MARGIN = 0.01
"""Two methods are tied if their difference is less than one point."""
MIN_PAIRS = 5
"""A t-test of fewer pairs says little about spread, and is not made."""
EQUAL = 1e-6
"""Differences with a standard deviation below it are equal: cells hold rounded scores."""
POWER = 0.8
"""Probability with which the detectable difference is found."""


@dataclass(frozen=True)
class PairedTest:
    """Tests of n paired differences A minus B.

    Parameters
    ----------
    n : int
        Number of pairs.
    difference : float
        Mean difference.
    t, p : float
        Student's t statistic with n − 1 degrees of freedom, and its two-sided p-value.
        NaN if the differences cannot be tested.
    interval : tuple of float
        95 % confidence interval of the difference; NaN if not testable.
    detectable : float
        Smallest true difference that such a test finds with probability 0.8, given the
        spread of these differences; NaN if not testable.
    p_equivalent : float
        p-value of the hypothesis that the methods differ by :data:`MARGIN` or more (two
        one-sided tests); NaN if not testable.
    why_not : str
        Why the differences cannot be tested; else empty.
    """

    n: int
    difference: float
    t: float = math.nan
    p: float = math.nan
    interval: tuple[float, float] = (math.nan, math.nan)
    detectable: float = math.nan
    p_equivalent: float = math.nan
    why_not: str = ""

    @property
    def is_significant(self) -> bool:
        """Whether the p-value is below :data:`LEVEL`."""
        return self.p < LEVEL

    @property
    def is_tied(self) -> bool:
        """Whether a difference of :data:`MARGIN` or more can be excluded."""
        return self.p_equivalent < LEVEL

    @property
    def is_undecided(self) -> bool:
        """Whether the test shows neither a difference nor a tie."""
        return not (self.why_not or self.is_significant or self.is_tied)

    def __str__(self) -> str:
        """State the verdict and its numbers."""
        difference = f"{100 * self.difference:+.2f}".replace("-", "−")
        if self.why_not:
            return f"{difference}, not testable: {self.why_not}"
        if self.is_significant:
            word = "better" if self.difference > 0 else "worse"
            tied = ", by less than one point" if self.is_tied else ""
            return f"{difference}, {word}{tied} (p = {self.p:.3g})"
        if self.is_tied:
            return f"{difference}, tied (p = {self.p_equivalent:.3g})"
        return (
            f"{difference}, undecided (p = {self.p:.3g}; "
            f"{100 * self.detectable:.1f} would be found)"
        )


def paired_test(
    one: Sequence[float], other: Sequence[float], *, margin: float = MARGIN
) -> PairedTest:
    """Test whether the mean paired difference is 0, and whether it is below a margin.

    Parameters
    ----------
    one, other : sequence of float
        Length n, at least 1: paired scores of A and B.
    margin : float
        Largest difference of tied methods.

    Notes
    -----
    1. Fewer than :data:`MIN_PAIRS` pairs, or differences that are all equal, are not
       tested: their p-value would be 0 or 1 without evidence.
    """
    differences = [a - b for a, b in zip(one, other, strict=True)]
    n, mean = len(differences), fmean(differences)
    if n < MIN_PAIRS:
        why = f"{n} {'pair' if n == 1 else 'pairs'}, {MIN_PAIRS} are needed"
        return PairedTest(n, mean, why_not=why)
    spread = stdev(differences)
    if spread < EQUAL:
        return PairedTest(n, mean, why_not="all differences are equal")
    # slow to import, and selecting runs does not need them
    import numpy as np
    from scipy import stats
    from statsmodels.stats.weightstats import ttost_paired

    result = stats.ttest_rel(one, other)
    interval = result.confidence_interval(1 - LEVEL)
    p_equivalent, *_ = ttost_paired(np.array(one), np.array(other), -margin, margin)
    return PairedTest(
        n,
        mean,
        float(result.statistic),
        float(result.pvalue),
        (float(interval.low), float(interval.high)),
        _detectable_effect(n) * spread,
        float(p_equivalent),
    )


def partition_means(
    scores: Sequence[float], partitions: Sequence[Hashable]
) -> list[float]:
    """Average the scores on each partition, if there are several partitions.

    Runs that share a partition are no independent draws: a test that counted each of them
    would find differences that other partitions do not show.

    Parameters
    ----------
    scores : sequence of float
        Length n, one score per run.
    partitions : sequence of hashable
        Length n, the partition of each run.

    Returns
    -------
    list of float
        One mean per partition, in the order in which they first occur; ``scores`` if all
        runs share one.
    """
    found: dict[Hashable, list[float]] = {}
    for score, partition in zip(scores, partitions, strict=True):
        found.setdefault(partition, []).append(score)
    return [fmean(part) for part in found.values()] if len(found) > 1 else [*scores]


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


def _detectable_at(test: PairedTest, level: float) -> float:
    """Return the difference that a test at another level finds.

    Parameters
    ----------
    test : PairedTest
        A test at :data:`LEVEL`.
    level : float
        Level of the test, e.g. of one among several.

    Returns
    -------
    float
        Found with probability :data:`POWER`; NaN if not testable.
    """
    if math.isnan(test.detectable):
        return math.nan
    return (
        test.detectable * _detectable_effect(test.n, level) / _detectable_effect(test.n)
    )


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of one table for their number, by Holm's method.

    Parameters
    ----------
    p_values : sequence of float
        p-values; NaN for comparisons that cannot be tested, which do not count.

    Returns
    -------
    list of float
        Adjusted p-values in the same order; NaN stays NaN.
    """
    places = [place for place, p in enumerate(p_values) if not math.isnan(p)]
    places.sort(key=lambda place: p_values[place])
    out = [math.nan] * len(p_values)
    # statsmodels has it too, but visits all objects of the process in every call
    least = 0.0
    for rank, place in enumerate(places):
        least = max(least, (len(places) - rank) * p_values[place])
        out[place] = min(least, 1.0)
    return out


def compare_all(tests: Sequence[PairedTest]) -> list[PairedTest]:
    """Adjust all comparisons of one table for their number.

    Parameters
    ----------
    tests : sequence of PairedTest
        The comparisons.

    Returns
    -------
    list of PairedTest
        The same with Holm-adjusted p-values, both kinds apart. The detectable differences
        are those of Holm's first step, the strictest.
    """
    number = sum(not math.isnan(test.p) for test in tests)
    level = LEVEL / max(number, 1)
    differ = adjust_holm([test.p for test in tests])
    equal = adjust_holm([test.p_equivalent for test in tests])
    return [
        replace(
            test,
            p=p,
            p_equivalent=p_equivalent,
            detectable=_detectable_at(test, level),
        )
        for test, p, p_equivalent in zip(tests, differ, equal, strict=True)
    ]


def proportion_interval(share: float, number: int) -> tuple[float, float]:
    """Return the interval of a share of independent trials, by Wilson's method.

    Parameters
    ----------
    share : float in [0, 1]
        Share of the trials that succeeded.
    number : int, positive
        Number of trials.

    Returns
    -------
    low, high : float in [0, 1]
        Confidence interval at 1 - :data:`LEVEL`.
    """
    from statsmodels.stats.proportion import proportion_confint

    hits = round(share * number)
    low, high = proportion_confint(hits, number, alpha=LEVEL, method="wilson")
    return float(low), float(high)
