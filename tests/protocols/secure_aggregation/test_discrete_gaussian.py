"""The exact sampler against its probabilities, and its use of random bits."""

from __future__ import annotations

import os

import numpy as np
import pytest
from scipy.stats import chi2

from flower_fgl.protocols.secure_aggregation import discrete_gaussian as sampler
from flower_fgl.protocols.secure_aggregation.discrete_gaussian import (
    MAX_SIGMA,
    discrete_gaussian,
)

SIZE = 200_000


def p_value(drawn: np.ndarray, support: np.ndarray, weights: np.ndarray) -> float:
    """Chi-squared test; cells with fewer than 10 expected samples are merged."""
    expected = weights / weights.sum() * len(drawn)
    counts = np.array([(drawn == x).sum() for x in support], dtype=float)
    rare = expected < 10
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], len(drawn) - counts[~rare].sum())
    kept = expected > 0
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    return float(chi2.sf(statistic, kept.sum() - 1))


@pytest.mark.parametrize("sigma", [1, 2, 3, 7])
def test_probabilities_are_those_of_the_definition(sigma: int) -> None:
    support = np.arange(-12 * sigma, 12 * sigma + 1)
    drawn = discrete_gaussian(sigma, SIZE)
    weights = np.exp(-(support.astype(float) ** 2) / (2 * sigma**2))
    assert p_value(drawn, support, weights) > 1e-6


@pytest.mark.parametrize("scale", [1, 4])
def test_the_proposal_is_a_discrete_laplace_distribution(scale: int) -> None:
    support = np.arange(-40 * scale, 40 * scale + 1)
    drawn = sampler._discrete_laplace(scale, SIZE)
    assert p_value(drawn, support, np.exp(-np.abs(support) / scale)) > 1e-6


@pytest.mark.parametrize("gamma", [(0, 7), (3, 7), (7, 7)])
def test_a_coin_has_the_probability_of_the_exponential(gamma: tuple[int, int]) -> None:
    top, bottom = gamma
    tops = np.full(SIZE, top)
    coin = sampler._bernoulli_exp(SIZE, lambda j, k: sampler._is_below(tops[j], bottom))
    expected = np.exp(-top / bottom)
    spread = np.sqrt(expected * (1 - expected) / SIZE)
    assert abs(coin.mean() - expected) <= 6 * spread


@pytest.mark.parametrize("sigma", [10**6, 2**40 + 1, MAX_SIGMA])
def test_moments_of_wide_distributions(sigma: int) -> None:
    size = 20_000
    scaled = discrete_gaussian(sigma, size) / sigma
    # mean, variance and fourth moment of a Gaussian, six standard deviations
    assert abs(scaled.mean()) < 6 / np.sqrt(size)
    assert abs((scaled**2).mean() - 1) < 6 * np.sqrt(2 / size)
    assert abs((scaled**4).mean() - 3) < 6 * np.sqrt(96 / size)
    assert np.unique(scaled).size > 0.9 * size
    low = np.bincount(discrete_gaussian(sigma, size) % 2, minlength=2)
    assert abs(low[0] - size / 2) < 3 * np.sqrt(size)  # the low bit is fair too


@pytest.mark.parametrize("bound", [1, 2, 3, 200, 256, 257, 2**33, 2**56])
def test_uniform_integers_stay_below_their_bound(bound: int) -> None:
    drawn = sampler._uniform(bound, 5000)
    assert drawn.dtype == np.int64
    assert drawn.min() >= 0
    assert drawn.max() < bound
    if bound > 1:
        spread = bound / np.sqrt(12 * 5000)
        assert abs(drawn.mean() - (bound - 1) / 2) < 6 * spread + 1e-9


def test_all_bits_come_from_the_operating_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bits(seed: int) -> None:
        source = np.random.default_rng(seed)
        monkeypatch.setattr(os, "urandom", lambda size: source.bytes(size))

    bits(1)
    first = discrete_gaussian(1000, 50)
    bits(1)
    assert np.array_equal(discrete_gaussian(1000, 50), first)
    bits(2)
    assert not np.array_equal(discrete_gaussian(1000, 50), first)


def test_no_step_uses_floating_point_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    class Watched(np.ndarray):
        def __array_ufunc__(
            self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: object
        ) -> object:
            plain = [np.asarray(i) for i in inputs]
            seen.update(a.dtype.kind for a in plain)
            kwargs.pop("out", None)
            out = getattr(ufunc, method)(*plain, **kwargs)
            outs = out if isinstance(out, tuple) else (out,)
            seen.update(np.asarray(o).dtype.kind for o in outs)
            views = tuple(np.asarray(o).view(Watched) for o in outs)
            return views if isinstance(out, tuple) else views[0]

    original = sampler._uniform
    monkeypatch.setattr(sampler, "_uniform", lambda b, n: original(b, n).view(Watched))
    discrete_gaussian(12345, 500)
    assert seen <= {"i", "u", "b"}
    assert "i" in seen


@pytest.mark.parametrize("sigma", [0, -1, MAX_SIGMA + 1])
def test_widths_out_of_range_are_refused(sigma: int) -> None:
    with pytest.raises(ValueError, match="sigma must lie in"):
        discrete_gaussian(sigma, 1)


def test_no_samples_are_an_empty_array() -> None:
    assert discrete_gaussian(5, 0).shape == (0,)
