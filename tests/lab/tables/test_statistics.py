from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from flower_fgl.lab.tables.statistics import adjust_holm, paired_test

ONE = [0.84, 0.82, 0.85, 0.83, 0.86, 0.81]
OTHER = [0.80, 0.81, 0.82, 0.80, 0.81, 0.80]


def test_t_is_the_mean_difference_over_its_standard_error() -> None:
    # differences 1, 2, 3, 4, 5: mean 3, variance 2.5, t = 3 / √(2.5 / 5) = 3 · √2
    result = paired_test([2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.difference == pytest.approx(3)
    assert result.t == pytest.approx(3 * math.sqrt(2))
    # four degrees of freedom: P(|T| > t) = 1 − s (3 − s²) / 2, s = t / √(4 + t²)
    s = result.t / math.sqrt(4 + result.t**2)
    assert result.p == pytest.approx(1 - s * (3 - s * s) / 2)
    back = paired_test([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 6.0, 8.0, 10.0])
    assert (back.t, back.p) == pytest.approx((-result.t, result.p))


def test_the_interval_excludes_zero_if_and_only_if_the_test_is_significant() -> None:
    for shift in (0.0, 0.01, 0.02, 0.03):
        result = paired_test(ONE, [v + shift for v in OTHER])
        low, high = result.interval
        assert low < result.difference < high
        assert (low > 0 or high < 0) == result.is_significant


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ([0.8], [0.7], "1 pair, 5 are needed"),
        ([0.8, 0.9], [0.7, 0.8], "2 pairs, 5 are needed"),
        ([0.8, 0.9, 0.7, 0.8], [0.1, 0.2, 0.3, 0.2], "4 pairs, 5 are needed"),
        ([0.5] * 6, [0.5] * 6, "all differences are equal"),
        ([0.1, 0.2, 0.3, 0.4, 0.7], [0.2, 0.3, 0.4, 0.5, 0.8], "all differences are"),
    ],
)
def test_too_few_pairs_or_no_spread_are_not_tested(
    one: list[float], other: list[float], why: str
) -> None:
    result = paired_test(one, other)
    assert why in result.why_not
    assert math.isnan(result.p)
    assert math.isnan(result.p_equivalent)
    assert not result.is_significant
    assert not result.is_tied


def test_the_detectable_difference_is_found_with_probability_80_percent() -> None:
    result = paired_test(ONE, OTHER)
    spread = np.std(np.subtract(ONE, OTHER), ddof=1)
    draws = np.random.default_rng(0).normal(
        result.detectable, spread, (20_000, len(ONE))
    )
    found = (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean()
    assert found == pytest.approx(0.8, abs=0.01)


def test_tied_is_not_the_same_as_too_few_runs() -> None:
    noise = [0.001, -0.001, 0.002, -0.002, 0.0, 0.001]
    tied = paired_test([0.8 + e for e in noise], [0.8] * 6)
    assert tied.is_tied
    assert not tied.is_significant
    unsure = paired_test([0.8 + 40 * e for e in noise], [0.8] * 6)
    assert not unsure.is_tied
    assert not unsure.is_significant
    assert unsure.detectable > 0.05
    # the larger of the two one-sided p-values
    d = [0.0 + e for e in noise]
    low = stats.ttest_1samp(d, -0.01, alternative="greater").pvalue
    high = stats.ttest_1samp(d, 0.01, alternative="less").pvalue
    assert tied.p_equivalent == pytest.approx(max(low, high))


def test_holm_multiplies_the_smallest_by_the_number_of_tests() -> None:
    # 0.01 · 3, then max(0.03, 0.02 · 2), then max(0.04, 0.04 · 1)
    assert adjust_holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])


def test_holms_adjustment_equals_that_of_statsmodels() -> None:
    p_values = np.random.default_rng(4).uniform(size=40) ** 4
    p_values[:10] = p_values[10:20]  # ties
    theirs = multipletests(p_values, method="holm")[1]
    assert adjust_holm(p_values.tolist()) == theirs.tolist()


def test_comparisons_that_cannot_be_tested_do_not_count() -> None:
    adjusted = adjust_holm([math.nan, 0.01, 0.02])
    assert math.isnan(adjusted[0])
    assert adjusted[1:] == pytest.approx([0.02, 0.02])
    assert adjust_holm([]) == []
