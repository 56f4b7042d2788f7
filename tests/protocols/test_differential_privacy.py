from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor

from flower_fgl.protocols.base import Empty, Payload
from flower_fgl.protocols.differential_privacy import (
    accounted_epsilon,
    clip_and_add_noise,
    epsilon,
    numbers_of,
    pld_epsilon,
    refuse_unbounded,
    with_numbers,
)


def test_an_upload_is_clipped_by_hand() -> None:
    # ‖(3, 4, 12)‖ = 13, to 6.5: half of everything
    numbers = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
    one, other = clip_and_add_noise(numbers, clip=6.5)
    assert one.tolist() == [1.5, 2.0]
    assert other.tolist() == [[6.0]]
    assert [t.tolist() for t in clip_and_add_noise(numbers, clip=13.0)] == [
        t.tolist() for t in numbers
    ]
    assert clip_and_add_noise([torch.zeros(2)], clip=1.0)[0].tolist() == [0, 0]


def test_weights_are_clipped_around_what_the_server_knows() -> None:
    upload, known = [torch.tensor([13.0, 14.0])], [torch.tensor([10.0, 10.0])]
    (out,) = clip_and_add_noise(upload, clip=1.0, origin=known)
    torch.testing.assert_close(out, torch.tensor([10.6, 10.8]))


def test_noise_comes_from_the_operating_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A seeded generator of torch has 2^32 states, which a server could try."""
    monkeypatch.setattr("flower_fgl.core.seeds.os.urandom", lambda n: bytes(n))
    (out,) = clip_and_add_noise([torch.zeros(3)], clip=2.0, noise=1.5)
    extreme = float(torch.special.ndtri(torch.tensor(2.0**-54, dtype=torch.float64)))
    torch.testing.assert_close(out, torch.full((3,), 3.0 * extreme))


def test_noise_has_the_requested_standard_deviation(generator: torch.Generator) -> None:
    numbers = [torch.zeros(50_000), torch.zeros((10, 5000))]
    out = clip_and_add_noise(numbers, clip=2.0, noise=1.5, generator=generator)
    for tensor in out:
        assert tensor.dtype == torch.float32
        assert abs(float(tensor.std()) - 3.0) < 0.05
        assert abs(float(tensor.mean())) < 0.05


def test_numbers_that_are_not_finite_cannot_be_clipped() -> None:
    with pytest.raises(ValueError, match="not finite"):
        clip_and_add_noise([torch.tensor([math.nan])], clip=1.0)


@pytest.mark.parametrize(("noise", "releases"), [(2.0, 1), (5.0, 1), (10.0, 20)])
def test_epsilon_gives_back_delta_by_numerical_integration(
    noise: float, releases: int
) -> None:
    delta = 1e-4
    value = epsilon(noise, releases, delta)
    # hockey-stick divergence of N(μ, 1) from N(0, 1), the definition of δ(ε)
    mu = 2 * math.sqrt(releases) / noise
    start = value / mu + mu / 2
    found, _ = quad(
        lambda x: norm.pdf(x - mu) - math.exp(value) * norm.pdf(x), start, start + 12,
        epsabs=1e-12,
    )  # fmt: skip
    assert found == pytest.approx(delta, rel=1e-4)


def test_epsilon_keeps_below_the_classical_bound() -> None:
    # Dwork & Roth, Theorem A.1: σ ≥ √(2 ln(1.25/δ))·Δ/ε suffices for ε < 1
    for target in (0.1, 0.5, 0.99):
        noise = 2 * math.sqrt(2 * math.log(1.25 / 1e-5)) / target
        assert 0.5 * target < epsilon(noise, 1, 1e-5) < target


def test_epsilon_keeps_below_composed_renyi_divergences() -> None:
    # Mironov 2017: T·α·Δ²/(2σ²) + log(1/δ)/(α − 1) for every α
    noise, releases, delta = 8.0, 100, 1e-5
    rho = releases * 4 / (2 * noise**2)
    renyi = min(a * rho + math.log(1 / delta) / (a - 1) for a in range(2, 200))
    assert 0.6 * renyi < epsilon(noise, releases, delta) < renyi


def test_epsilon_grows_with_uploads_and_falls_with_noise() -> None:
    assert epsilon(3.0, 0, 1e-5) == 0
    assert epsilon(3.0, 1, 1e-5) < epsilon(3.0, 2, 1e-5)
    # four uploads with twice the noise equal one upload
    assert epsilon(3.0, 1, 1e-5) == pytest.approx(epsilon(6.0, 4, 1e-5))
    assert epsilon(1e6, 1, 1e-5) == 0
    assert epsilon(0.05, 100, 1e-5) > 1e4
    assert epsilon(1e-9, 10**6, 1e-12) > 1e23  # tiny noise is a number, too


@dataclass(frozen=True)
class Inner:
    values: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Outer:
    state: dict[str, Tensor]
    inner: Inner
    many: tuple[Tensor, ...]
    name: str


class Undeclared(Payload):
    """Its author forgot ``@dataclass``."""

    records = ()

    def __init__(self) -> None:
        self.drift = torch.ones(2)

    def to_record(self) -> RecordDict:
        return RecordDict()

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any) -> Undeclared:
        return cls()

    @property
    def num_bytes(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("payload", "place"),
    [
        (Inner(torch.ones(1), 0.5), "/counts is a float"),  # type: ignore[arg-type]
        (Inner(torch.ones(1), np.ones(2)), "/counts is a ndarray"),  # type: ignore[arg-type]
        (Outer({"w": torch.ones(1, dtype=torch.cfloat)}, None, (), ""), "/state/w"),  # type: ignore[arg-type]
        (Undeclared(), "the payload is a Undeclared"),
    ],
)
def test_numbers_that_cannot_be_bounded_are_refused(payload: Any, place: str) -> None:
    with pytest.raises(TypeError, match=place):
        refuse_unbounded(payload)


def test_whole_numbers_texts_and_empty_payloads_need_no_bound() -> None:
    refuse_unbounded(Outer({}, Inner(torch.ones(1), torch.ones(1)), (), "a"))
    refuse_unbounded(Inner(torch.ones(1), 3))  # type: ignore[arg-type]
    refuse_unbounded(Empty())


def test_all_floating_tensors_of_a_payload_are_found_and_replaced() -> None:
    one = torch.ones
    payload = Outer(
        {"w": one(2)}, Inner(one(3), one(3, dtype=torch.int64)), (one(1),), "a"
    )
    found = numbers_of(payload)
    sizes = {place: t.numel() for place, t in found.items()}
    assert sizes == {"/state/w": 2, "/inner/values": 3, "/many/0": 1}
    other = with_numbers(payload, {place: 2 * t for place, t in found.items()})
    assert other.state["w"].tolist() == [2, 2]
    assert other.inner.counts.tolist() == [1, 1, 1]
    assert other.many[0].item() == 2
    assert other.name == "a"
    assert payload.inner.values.tolist() == [1, 1, 1]


# ------------------------------------------------------------ privacy loss distributions
@pytest.mark.thorough
@pytest.mark.parametrize("noise", [1.0, 5.0, 50.0])
@pytest.mark.parametrize("releases", [1, 20, 100])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_privacy_loss_distributions_bound_the_exact_epsilon(
    noise: float, releases: int, delta: float
) -> None:
    exact = epsilon(noise, releases, delta)
    bound = pld_epsilon(noise, releases, delta)
    # rounded up to the grid, apart from the root finder's tolerance
    assert exact * (1 - 1e-6) <= bound <= exact * 1.001 + 1e-4


def test_a_wide_discrete_gaussian_has_the_epsilon_of_the_gaussian() -> None:
    from dp_accounting.pld import privacy_loss_distribution

    noise, width = 2.0, 200  # steps; the sensitivity is width · 2 / noise
    one = privacy_loss_distribution.from_discrete_gaussian_mechanism(
        width, sensitivity=int(2 * width / noise)
    )
    found = one.self_compose(10).get_epsilon_for_delta(1e-5)
    assert found == pytest.approx(epsilon(noise, 10, 1e-5), rel=0.01)


def test_no_release_and_tiny_noise_are_accounted() -> None:
    assert pld_epsilon(1.0, 0, 1e-5) == 0
    assert pld_epsilon(0.05, 3, 1e-5) >= epsilon(0.05, 3, 1e-5) * (1 - 1e-6)


def test_without_the_package_the_exact_formula_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert accounted_epsilon(5.0, 20, 1e-5)[1] == "pld"
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    assert accounted_epsilon(5.0, 20, 1e-5) == (epsilon(5.0, 20, 1e-5), "exact")
