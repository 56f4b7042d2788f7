"""Robust means against hand numbers, slow loops and Flower's functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from flwr.server.strategy.aggregate import (
    aggregate_krum,
    aggregate_median,
    aggregate_trimmed_avg,
)
from torch import Tensor

from flower_fgl.algorithms.robust_means import (
    clip_updates,
    krum,
    median,
    trimmed_mean,
    update_norms,
)

State = dict[str, Tensor]
LARGEST = float(torch.finfo(torch.float32).max)


def states_of(*rows: Sequence[float]) -> list[State]:
    """Make one state per row, of a matrix of two weights and the rest as a vector."""
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    return [{"w": t[:2].reshape(2, 1), "b": t[2:]} for t in tensors]


def random_states(count: int, seed: int = 0) -> list[State]:
    draw = torch.Generator().manual_seed(seed)
    return [
        {"w": torch.randn(4, 3, generator=draw), "b": torch.randn(5, generator=draw)}
        for _ in range(count)
    ]


def flat(state: State) -> list[float]:
    return torch.cat([tensor.flatten() for tensor in state.values()]).tolist()


def arrays(states: Sequence[State]) -> list[tuple[list[np.ndarray], int]]:  # type: ignore[type-arg]
    return [([tensor.numpy() for tensor in state.values()], 1) for state in states]


def test_the_median_by_hand() -> None:
    states = states_of([1, 5, 0], [2, -7, 0], [LARGEST, 6, 4], [3, 5, 2])
    # sorted: 1 2 3 max; -7 5 5 6; 0 0 2 4
    assert flat(median(states)) == [2.5, 5.0, 1.0]
    assert flat(median(states[:3])) == [2.0, 5.0, 0.0]
    assert flat(median(states[:1])) == [1.0, 5.0, 0.0]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_the_median_is_flowers(count: int) -> None:
    states = random_states(count)
    expected = aggregate_median(arrays(states))
    for tensor, array in zip(median(states).values(), expected, strict=True):
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-6)
    assert {t.dtype for t in median(states).values()} == {torch.float32}


def test_the_trimmed_mean_by_hand() -> None:
    rows = [[v, -v, 0] for v in (1, 2, 3, 4, 100)]
    # a fifth of five is one value at each end; 0.21 of five is two
    assert flat(trimmed_mean(states_of(*rows), 0.2)) == [3.0, -3.0, 0.0]
    assert flat(trimmed_mean(states_of(*rows[:4]), 0.2)) == [2.5, -2.5, 0.0]
    rows[3] = [LARGEST, -LARGEST, 0]
    rows[4] = [LARGEST, -LARGEST, 0]
    assert flat(trimmed_mean(states_of(*rows), 0.21)) == [3.0, -3.0, 0.0]


def test_a_trimmed_mean_of_few_states_keeps_one_value() -> None:
    states = states_of([1, 1, 1], [2, 2, 2], [9, 9, 9])
    assert flat(trimmed_mean(states, 0.01)) == [2.0, 2.0, 2.0]
    assert flat(trimmed_mean(states, 0.49)) == [2.0, 2.0, 2.0]
    assert flat(trimmed_mean(states[:1], 0.49)) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("count", "share"), [(10, 0.2), (20, 0.35), (100, 0.07)])
def test_the_trimmed_mean_is_flowers(count: int, share: float) -> None:
    states = random_states(count)
    expected = aggregate_trimmed_avg(arrays(states), share)
    for tensor, array in zip(
        trimmed_mean(states, share).values(), expected, strict=True
    ):
        np.testing.assert_allclose(tensor.numpy(), array, rtol=1e-5, atol=1e-6)


def test_krum_by_hand() -> None:
    # on a line at 0, 1, 3, 4, 50 with f = 1: the sums of the two smallest squares are
    # 1 + 9, 1 + 4, 1 + 4, 1 + 9 and 46² + 47²
    states = states_of(*([x, 0, 0] for x in (0, 1, 3, 4, 50)))
    assert krum(states, 1) == [1]
    assert krum(states, 1, keep=2) == [1, 2]
    assert krum(states, 1, keep=4) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="at least 7 states, got 5"):
        krum(states, 2)


@pytest.mark.parametrize("attackers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_krum_is_flowers(attackers: int, seed: int) -> None:
    states = random_states(9, seed)
    (chosen,) = krum(states, attackers)
    expected = aggregate_krum(arrays(states), attackers, 0)
    for tensor, array in zip(states[chosen].values(), expected, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)
    kept = krum(states, attackers, keep=3)
    mean = aggregate_krum(arrays(states), attackers, 3)
    for name, array in zip(states[0], mean, strict=True):
        stacked = torch.stack([states[i][name] for i in kept])
        np.testing.assert_allclose(stacked.mean(dim=0).numpy(), array, atol=1e-6)


def test_krum_does_not_choose_the_largest_floats() -> None:
    honest = random_states(4)
    huge = {name: torch.full_like(t, LARGEST) for name, t in honest[0].items()}
    other = {name: -tensor for name, tensor in huge.items()}
    assert set(krum([huge, *honest], 1, keep=2)) <= {1, 2, 3, 4}
    assert set(krum([huge, other, *honest, *random_states(1, 9)], 2)) <= set(
        range(2, 7)
    )


def test_krum_in_pieces_is_krum(monkeypatch: pytest.MonkeyPatch) -> None:
    states = random_states(9)
    whole = krum(states, 2, keep=3)
    monkeypatch.setattr("flower_fgl.algorithms.robust_means.PIECE", 2)
    assert krum(states, 2, keep=3) == whole


def test_norms_and_clipping_by_hand() -> None:
    (start,) = states_of([1, 1, 1, 1])
    # differences (3, 0, 4, 0) of norm 5 and (0, 0.5, 0, 0) of norm 0.5
    states = states_of([4, 1, 5, 1], [1, 1.5, 1, 1])
    assert update_norms(states, start) == [5.0, 0.5]
    clipped, kept = clip_updates(states, start, 2.5)
    assert flat(clipped) == [2.5, 1.0, 3.0, 1.0]
    assert all(torch.equal(kept[name], states[1][name]) for name in kept)
    assert flat(clip_updates(states, start, 0.0)[0]) == flat(start)


def test_clipping_of_the_largest_floats_is_exact_to_rounding() -> None:
    start = random_states(1)[0]
    huge = {name: torch.full_like(t, LARGEST) for name, t in start.items()}
    assert math.isfinite(update_norms([huge], start)[0])
    (clipped,) = clip_updates([huge], start, 1.0)
    assert update_norms([clipped], start)[0] == pytest.approx(1.0, rel=1e-5)


def test_no_rule_depends_on_the_order_of_the_states() -> None:
    states = random_states(8)
    for rule in (median, lambda s: trimmed_mean(s, 0.2)):
        for name, tensor in rule(states).items():
            torch.testing.assert_close(tensor, rule(states[::-1])[name])
    assert [7 - i for i in krum(states[::-1], 2)] == krum(states, 2)
