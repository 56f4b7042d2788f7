from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_fgl.core.errors import PayloadError
from flower_fgl.methods import parse_config
from flower_fgl.strategies.aggregation import (
    PIECE,
    mean_of_sums,
    mean_pairwise_distance,
    robust_mean,
    weighted_mean,
)

STATES = [{"w": torch.tensor([value])} for value in (0.0, 1.0, 2.0, 4.0, 5.0, 90.0)]
START = {"w": torch.tensor([1.0])}


def test_the_weighted_mean_by_hand() -> None:
    found = weighted_mean(STATES[:3], [1, 2, 5])
    assert found["w"].tolist() == pytest.approx([(2 + 10) / 8])
    with pytest.raises(ValueError, match="At least one weight must be positive"):
        weighted_mean(STATES[:2], [0, 0])


def combined(**settings: object) -> tuple[float, dict[str, float]]:
    """Return the value that a rule gives for six clients, the last of ten times weight."""
    config = parse_config({"method": "fedavg", **settings})
    state, numbers = robust_mean(config, STATES, [1, 1, 1, 1, 1, 10], START)
    return float(state["w"]), numbers


def test_the_median_and_the_trimmed_mean_by_hand() -> None:
    assert combined(aggregation="median") == (3.0, {})
    trimmed = {"aggregation": "trimmed-mean", "trimmed-share": 0.3}  # two of each side
    assert combined(**trimmed) == (3.0, {})
    config = parse_config({"method": "fedavg", **trimmed, "trimmed-share": 0.1})
    # one of each side: (2 + 4 + 5) / 3 remain of five clients
    state, _ = robust_mean(config, STATES[1:], [1] * 5, START)
    assert float(state["w"]) == pytest.approx(11 / 3)


def test_krum_by_hand() -> None:
    # with one attacker each client is judged by its three nearest: the sums are
    # 1 + 4 + 16, 1 + 1 + 9, 4 + 1 + 4, 1 + 4 + 9, 1 + 9 + 16 and large
    krum = {"aggregation": "krum", "krum-attackers": 1}
    assert combined(**krum, **{"krum-keep": 1}) == (2.0, {"largest_update": 1.0})
    assert combined(**krum, **{"krum-keep": 2}) == (1.5, {"largest_update": 1.0})
    # by default n − f − 2 = 3 clients, and never more
    three = pytest.approx((1 + 2 + 4) / 3), {"largest_update": 3.0}
    assert combined(**krum, **{"krum-keep": 0}) == three
    assert combined(**krum, **{"krum-keep": 5}) == three


def test_clipping_by_hand() -> None:
    # updates −1, 0, 1, 3, 4 and 89; a bound of 3 shortens the last two
    clip = {"aggregation": "norm-clip", "norm-bound": 3.0}
    value, numbers = combined(**clip)
    assert value == pytest.approx(1 + (-1 + 0 + 1 + 3 + 3 + 30) / 15)
    assert numbers == {"norm_bound": 3.0, "clipped": 2.0}
    # by default the median of the lengths 0, 1, 1, 3, 4, 89
    value, numbers = combined(aggregation="norm-clip")
    assert value == pytest.approx(1 + (-1 + 0 + 1 + 2 + 2 + 20) / 15)
    assert numbers == {"norm_bound": 2.0, "clipped": 3.0}


def test_masked_sums_are_divided_by_their_weight() -> None:
    sums = {"weight": torch.tensor(4.0), "weights/a": torch.tensor([2.0, 6.0])}
    assert mean_of_sums(sums, 4.0, ["a"])["a"].tolist() == [0.5, 1.5]
    assert mean_of_sums(sums, 4.0, ["a"])["a"].dtype == torch.float32
    half = {**sums, "weight": torch.tensor(0.5)}
    assert mean_of_sums(half, 0.5, ["a"])["a"].tolist() == [4.0, 12.0]
    with pytest.raises(PayloadError, match=r"add up to 5, the total .* got 4"):
        mean_of_sums(sums, 5.0, ["a"])
    with pytest.raises(PayloadError, match="got 0"):
        mean_of_sums({**sums, "weight": torch.tensor(0.0)}, 0.0, ["a"])


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
