"""Shares of the noise in secure sums."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import chi2

from flower_fgl import METHODS, Run, simulate
from flower_fgl.core.errors import ConfigError, PayloadError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.secure_aggregation import noise as noise_module
from flower_fgl.protocols.secure_aggregation import noise as sampler
from flower_fgl.protocols.secure_aggregation.noise import (
    MAX_SIGMA,
    NoiseShare,
    add_noise_share,
    clip_steps,
    discrete_gaussian,
    share_width,
)
from flower_fgl.protocols.secure_aggregation.quantization import (
    decode,
    encode,
    with_witness,
)

DISTRIBUTED: dict[str, Any] = {
    "secure_aggregation": True,
    "upload_clip": 1.0,
    "upload_noise": 0.5,
    "upload_noise_model": "distributed",
    "weight_by": "equal",
}


# ------------------------------------------------------------------------- the share
@pytest.mark.parametrize("need", [2, 3, 7, 67])
@pytest.mark.parametrize(("clip", "noise"), [(1.0, 1.0), (0.1, 3.7), (25.0, 0.01)])
def test_the_threshold_s_shares_have_the_variance_and_no_more_than_needed(
    need: int, clip: float, noise: float
) -> None:
    width = share_width(clip, noise, fraction_bits=24, threshold=need)
    wanted = (Fraction(clip) * Fraction(noise) * 2**24) ** 2 + 64
    assert need * width**2 >= wanted > need * (width - 1) ** 2


@pytest.mark.parametrize(
    ("clip", "noise", "match"),
    [(1e-6, 0.1, "Raise secure-fraction"), (1e6, 1e9, "Lower secure-fraction")],
)
def test_noise_that_fixed_point_cannot_hold_is_refused(
    clip: float, noise: float, match: str
) -> None:
    with pytest.raises(PayloadError, match=match):
        share_width(clip, noise, fraction_bits=24, threshold=3)


# -------------------------------------------------------------------------- clipping
def test_integers_are_clipped_to_the_norm_exactly(generator: torch.Generator) -> None:
    for scale in (1.0, 1e3, 1e9):
        change = (torch.randn(500, generator=generator) * scale * 100).long().numpy()
        bound = Fraction(scale) * 7
        clipped = clip_steps(change, bound)
        assert sum(int(x) ** 2 for x in clipped) <= bound**2
        if scale > 1:  # and not further than rounding needs
            assert sum(int(x) ** 2 for x in clipped) >= (bound * Fraction(9, 10)) ** 2
            one, other = clipped.astype(float), change.astype(float)
            cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
            assert cosine > 0.99


def test_integers_within_the_norm_stay() -> None:
    change = np.array([3, -4, 0])
    assert np.array_equal(clip_steps(change, Fraction(5)), change)
    assert sum(x * x for x in clip_steps(change, Fraction(49, 10)).tolist()) < 25


def test_a_norm_below_one_step_is_refused() -> None:
    with pytest.raises(PayloadError, match="raise secure-fraction-bits"):
        clip_steps(np.array([1]), Fraction(1, 2))


# ------------------------------------------------------------- the vector with noise
def summands(values: torch.Tensor) -> dict[str, torch.Tensor]:
    return with_witness(Weights({"w": values}).summands(1.0))


def share(origin: torch.Tensor, *, clip: float = 1.0, noise: float = 1.0) -> NoiseShare:
    return NoiseShare(
        clip, noise, Weights({"w": origin}).summands(1.0), frozenset({"weight"})
    )


SHAPES = {"witness": (), "weight": (), "weights/w": (20_000,)}


def test_the_sum_of_the_threshold_s_shares_has_the_central_noise(
    generator: torch.Generator,
) -> None:
    need, clients = 4, 5
    origin = torch.randn(20_000, generator=generator)
    ups = [origin + 0.001 * torch.randn(20_000, generator=generator) for _ in range(4)]
    total = sum(
        add_noise_share(
            summands(up), share(origin, noise=0.5), fraction_bits=24, clients=clients,
            threshold=need,
        )
        for up in ups
    )  # fmt: skip
    sums = decode(total, SHAPES, fraction_bits=24)  # type: ignore[arg-type]
    assert float(sums["witness"]) == float(sums["weight"]) == 4  # public: no noise
    noise = sums["weights/w"] - sum(up.double() for up in ups)  # type: ignore[arg-type]
    spread = float(noise.std())
    assert abs(spread - 0.5) < 0.5 * 6 / math.sqrt(2 * 20_000)
    assert abs(float(noise.mean())) < 6 * 0.5 / math.sqrt(20_000)


def test_a_share_alone_has_a_share_of_the_noise(generator: torch.Generator) -> None:
    origin = torch.randn(20_000, generator=generator)
    vector = add_noise_share(
        summands(origin), share(origin), fraction_bits=24, clients=9, threshold=9
    )
    found = decode(vector, SHAPES, fraction_bits=24)["weights/w"] - origin
    assert abs(float(found.std()) - 1 / 3) < 6 / 3 / math.sqrt(2 * 20_000)


def test_the_change_is_clipped_around_the_origin(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        noise_module, "discrete_gaussian", lambda _, n: np.zeros(n, np.int64)
    )
    origin = 50 + torch.randn(20_000, generator=generator)
    up = origin + torch.randn(20_000, generator=generator)  # at distance 141
    vector = add_noise_share(
        summands(up), share(origin), fraction_bits=24, clients=5, threshold=4
    )
    steps = vector.view(np.int64)[1:-1]
    start = encode(Weights({"w": origin}).summands(1.0), fraction_bits=24, summands=5)
    change = (steps - start.view(np.int64)[1:]).tolist()
    norm = sum(x * x for x in change)
    assert norm <= 2**48
    assert norm > 2**48 * 0.999


def test_the_sum_with_all_noise_cannot_wrap_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    width = share_width(1.0, 1.0, fraction_bits=24, threshold=4)
    extreme = 40 * width
    monkeypatch.setattr(
        noise_module, "discrete_gaussian", lambda _, n: np.full(n, extreme)
    )
    clients = 5
    # the largest number that is accepted: found by bisection
    low, high = 0.0, 2.0**39
    for _ in range(80):
        middle = (low + high) / 2
        values = torch.full((3,), middle, dtype=torch.float64)
        try:
            add_noise_share(
                summands(values), share(values), fraction_bits=24, clients=clients,
                threshold=4,
            )  # fmt: skip
            low = middle
        except PayloadError as error:
            assert "holds a number outside" in str(error)  # noqa: PT017
            high = middle
    values = torch.full((3,), low, dtype=torch.float64)
    vector = add_noise_share(
        summands(values), share(values), fraction_bits=24, clients=clients, threshold=4
    )
    exact = sum(int(vector.view(np.int64)[1]) for _ in range(clients))
    assert 2**62 < exact < 2**63
    monkeypatch.setattr(
        noise_module, "discrete_gaussian", lambda _, n: np.full(n, extreme + 1)
    )
    with pytest.raises(PayloadError, match="beyond 40 standard deviations"):
        add_noise_share(
            summands(values), share(values), fraction_bits=24, clients=5, threshold=4
        )


def test_numbers_that_are_not_finite_are_refused() -> None:
    bad = torch.tensor([float("nan"), 1.0])
    with pytest.raises(PayloadError, match="non-finite"):
        add_noise_share(
            summands(bad),
            share(torch.zeros(2)),
            fraction_bits=24,
            clients=5,
            threshold=4,
        )


# ----------------------------------------------------------------------------- runs
def model(run: Run) -> torch.Tensor:
    tensors = load_file(run.path / "model.safetensors")
    return torch.cat([tensor.flatten() for _, tensor in sorted(tensors.items())])


def test_the_mean_of_a_run_has_the_noise_of_the_sum(small: dict[str, Any]) -> None:
    settings = {
        **small, "clients": 7, "rounds": 1, "hidden_channels": 64, "upload_clip": 1.0,
    }  # fmt: skip
    noise = 20.0
    clean = simulate(**{**settings, "weight_by": "equal"})
    both = {
        name: simulate(
            **{
                **settings, **DISTRIBUTED, "upload_noise": noise,
                "upload_noise_model": name,
            }
        )
        for name in ("distributed", "local")
    }  # fmt: skip
    spread = {
        name: float((model(run) - model(clean)).std()) for name, run in both.items()
    }
    # 7 of 7 clients stay and the threshold is 5: z·S·√(7/5)/7; local: z·S/√7
    count = model(clean).numel()
    for name, wanted in (
        ("distributed", noise * math.sqrt(7 / 5) / 7),
        ("local", noise / math.sqrt(7)),
    ):
        assert abs(spread[name] / wanted - 1) < 6 / math.sqrt(2 * count) + 0.01
    privacy = both["distributed"].summary["upload_privacy"]
    assert privacy["model"] == "distributed"
    assert privacy["accountant"] == "pld"
    other = both["local"].summary["upload_privacy"]
    assert privacy["uploads"] == other["uploads"] == 1
    assert privacy["epsilon"] == pytest.approx(other["epsilon"], rel=1e-3)
    assert privacy["epsilon"] >= other["epsilon"]


def test_a_run_with_distributed_noise_is_not_reproducible(
    small: dict[str, Any],
) -> None:
    first, second = (
        simulate(**{**small, **DISTRIBUTED, "clients": 4}) for _ in range(2)
    )
    assert not torch.equal(model(first), model(second))
    for run in (first, second):
        assert [row["status"] for row in run.rounds] == ["ok"] * 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"secure-aggregation": False}, "set secure-aggregation = true"),
        ({"upload-clip": 0.0, "upload-noise": 0.0}, "set upload-clip above 0"),
        ({"upload-noise": 0.0}, "set upload-noise above 0"),
        ({"weight-by": "train-nodes"}, 'set weight-by = "equal"'),
        ({"upload-noise-model": "central"}, '"central" is unknown'),
    ],
)
def test_distributed_noise_needs_a_secure_sum_of_clipped_uploads(
    change: dict[str, Any], match: str
) -> None:
    values = {key.replace("_", "-"): value for key, value in DISTRIBUTED.items()}
    assert parse_config(values).upload_noise_model == "distributed"
    with pytest.raises(ConfigError, match=match):
        parse_config({**values, **change})


def test_a_row_allows_distributed_noise_if_and_only_if_its_upload_does() -> None:
    values = {key.replace("_", "-"): value for key, value in DISTRIBUTED.items()}
    for name, row in METHODS.items():
        if not row.additive:
            continue
        up = row.load_strategy().up
        assert row.sums_scaled_uploads == (up.public_summands is not None)
        if row.sums_scaled_uploads:
            parse_config({**values, "method": name})
        else:
            with pytest.raises(ConfigError, match="sums other numbers"):
                parse_config({**values, "method": name})


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
