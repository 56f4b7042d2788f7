from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_fgl.strategies.aggregation import PIECE, mean_pairwise_distance


def test_the_mean_pairwise_distance_by_hand() -> None:
    # distances 5, 1 and sqrt(3² + 3²) between (0, 0), (3, 4) and (0, 1), in two tensors
    states = [
        {"a": torch.tensor([x]), "b": torch.tensor([[y]])}
        for x, y in [(0.0, 0.0), (3.0, 4.0), (0.0, 1.0)]
    ]
    expected = (5 + 1 + math.sqrt(18)) / 3
    assert mean_pairwise_distance(states) == pytest.approx(expected)


@given(st.integers(2, 6), st.integers(0, 2**31), st.sampled_from([0.0, 100.0]))
def test_the_mean_pairwise_distance_matches_a_loop(
    size: int, seed: int, offset: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    states = [
        {
            "a": offset + torch.randn(3, 4, generator=draw),
            "b": torch.randn(5, generator=draw),
        }
        for _ in range(size)
    ]
    flat = [torch.cat([s["a"].flatten(), s["b"]]).double() for s in states]
    pairs = [
        float((flat[i] - flat[j]).norm())
        for i in range(size)
        for j in range(i + 1, size)
    ]
    expected = sum(pairs) / len(pairs)
    assert mean_pairwise_distance(states) == pytest.approx(expected, rel=1e-4)


def test_tensors_longer_than_one_piece_are_compared_completely() -> None:
    size = 2 * PIECE + 3
    states = [{"a": torch.full((size,), 1e3)}, {"a": torch.full((size,), 1e3 + 2)}]
    assert mean_pairwise_distance(states) == pytest.approx(2 * math.sqrt(size))


def test_equal_states_have_distance_0() -> None:
    state = {"a": torch.full((1000,), 1e3)}
    assert mean_pairwise_distance([state, state, state]) == 0.0


def test_the_distance_of_many_clients_is_that_of_some_at_equal_intervals(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    states = [{"w": torch.rand(3, generator=generator)} for _ in range(12)]
    expected = mean_pairwise_distance(states[::3])
    monkeypatch.setattr("flower_fgl.strategies.aggregation.MOST", 4)
    assert mean_pairwise_distance(states) == pytest.approx(expected)
