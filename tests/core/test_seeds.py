"""Numbers that hide something come from the operating system."""

from __future__ import annotations

import math
import os

import pytest
import torch

from flower_fgl.core.seeds import (
    derive_seed,
    hidden_normal,
    hidden_uniform,
    numpy_generator,
    seeded,
    torch_generator,
)


def test_a_seed_depends_on_each_of_its_parts() -> None:
    base = derive_seed(0, 1, 2, "dropout")
    others = [
        derive_seed(1, 1, 2, "dropout"),
        derive_seed(0, 2, 2, "dropout"),
        derive_seed(0, 1, 3, "dropout"),
        derive_seed(0, 1, 2, "batches"),
    ]
    assert len({base, *others}) == 5
    assert derive_seed(0, 1, 2, "dropout") == base
    assert 0 <= base < 2**63


def test_a_seed_is_the_same_in_every_version() -> None:
    assert derive_seed(0, 1, 2, "dropout") == 3719375658264748528


def test_generators_repeat() -> None:
    assert torch.equal(
        torch.rand(3, generator=torch_generator(0, 1, 2, "a")),
        torch.rand(3, generator=torch_generator(0, 1, 2, "a")),
    )
    first, second = numpy_generator(0, 1, 2, "a"), numpy_generator(0, 1, 2, "a")
    assert first.random() == second.random()


def test_a_seeded_block_repeats_and_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    with seeded(7):
        first = torch.rand(3)
    with seeded(7):
        second = torch.rand(3)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


def test_normal_numbers_have_the_moments_and_tails_of_the_normal_distribution() -> None:
    values = hidden_normal((400, 500), dtype=torch.float64)
    assert values.shape == (400, 500)
    assert abs(values.mean()) < 0.015  # seven standard errors
    assert abs(values.std() - 1) < 0.012
    for bound in (0.5, 1.0, 2.0, 3.0):
        share = (values.abs() > bound).double().mean()
        expected = math.erfc(bound / math.sqrt(2))
        assert share == pytest.approx(expected, abs=7 * math.sqrt(expected / 200_000))


def test_uniform_numbers_fill_the_interval() -> None:
    values = hidden_uniform((200_000,))
    assert 0 <= values.min() < 1e-3
    assert 1 - 1e-3 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.005


@pytest.mark.parametrize("byte", [b"\x00", b"\xff", b"\x01"])
def test_the_most_extreme_bits_give_finite_numbers(
    byte: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", lambda number: byte * number)
    values = hidden_normal((3,), dtype=torch.float64)
    assert values.isfinite().all()
    assert values.abs().max() < 8.3
    assert hidden_uniform((3,)).max() < 1


def test_no_seed_decides_the_numbers() -> None:
    torch.manual_seed(0)
    first = hidden_normal((4,))
    torch.manual_seed(0)
    assert not torch.equal(first, hidden_normal((4,)))


def test_a_generator_repeats_the_numbers_in_tests() -> None:
    draws = [
        hidden_normal((4,), generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    ]
    assert torch.equal(*draws)
