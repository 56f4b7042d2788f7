from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_fgl.algorithms.clusteredsampling import (
    draw_clients,
    table_by_similarity,
    table_by_size,
    update_angles,
)
from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.simulation.local import run_config_of
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.clusteredsampling import ClusteredSampling
from tests.support.clients import federation_of


def strategy_of(
    num_train: list[int], participation: float, **settings: Any
) -> ClusteredSampling:
    values = run_config_of(
        method="clustered-sampling",
        dataset="synthetic",
        clients=len(num_train),
        seed=0,
        settings={
            "hidden_channels": 4,
            "participation": participation,
            "clustered-sampling": settings,
        },
    )
    strategy = ClusteredSampling(parse_config(values))
    strategy.federation = federation_of(num_train)
    strategy.prepare()
    return strategy


def model(strategy: ClusteredSampling, value: float) -> Upload:
    """Make an upload that adds one value to all initial weights."""
    tensors = {n: t + value for n, t in strategy.weights.tensors.items()}
    return Upload(Weights(tensors), 99.0)


def test_clusters_by_size_by_hand() -> None:
    # n = 10, m = 2: clients add 2·(2, 5, 3) = 4, 10, 6 to rows of 10, largest first
    table = table_by_size(np.array([2, 5, 3]), 2)
    assert table.tolist() == [[0, 10, 0], [4, 0, 6]]
    # n = 9: 6, 8, 4 into rows of 9: client 1 leaves room for 1 of client 0
    table = table_by_size(np.array([3, 4, 2]), 2)
    assert table.tolist() == [[1, 8, 0], [5, 0, 4]]


def test_clusters_of_similar_updates_by_hand() -> None:
    # updates of 0 and 2 are similar, and of 1 and 3; n = 8, m = 2: 4 each, rows of 8
    updates = np.array([[1, 0.1], [0.1, 1], [1, 0], [0, 1]], dtype=np.float32)
    table = table_by_similarity(np.array([2, 2, 2, 2]), 2, update_angles(updates))
    assert sorted(table.tolist()) == [[0, 4, 0, 4], [4, 0, 4, 0]]


def test_clients_that_do_not_fit_into_a_cluster_fill_the_others() -> None:
    # 0, 1, 2 are similar: 2·(2, 2, 2, 2) = 4 each, rows of 8: two of them fill a row, the
    # third fills the row of client 3, which is similar to none
    angles = np.array(
        [[0, 0.1, 0.2, 1], [0.1, 0, 0.2, 1], [0.2, 0.2, 0, 1], [1, 1, 1, 0]]
    )
    table = table_by_similarity(np.array([2, 2, 2, 2]), 2, angles)
    assert table.tolist() == [[4, 4, 0, 0], [0, 0, 4, 4]]


def test_a_client_larger_than_a_distribution_fills_whole_distributions() -> None:
    # n = 10, m = 3: 3·(7, 1, 2) = 21, 3, 6: client 0 fills two rows of 10, and 1 remains
    angles = np.ones((3, 3)) - np.eye(3)
    table = table_by_similarity(np.array([7, 1, 2]), 3, angles)
    assert table.tolist() == [[10, 0, 0], [10, 0, 0], [1, 3, 6]]


def test_angles_by_hand() -> None:
    updates = np.array([[2, 0], [0, 3], [-1, 0], [1, 1], [0, 0], [0, 0]], np.float32)
    angles = update_angles(updates)
    half, third = math.pi / 2, math.pi / 4
    expected = [0, half, math.pi, third, half, half]
    np.testing.assert_allclose(angles[0], expected, atol=1e-6)
    assert angles[4, 5] == 0  # two clients that never took part


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(0, 99),
)
def test_the_draws_are_unbiased(sizes: list[int], draws: int, seed: int) -> None:
    counts = np.array(sizes)
    updates = np.random.default_rng(seed).normal(size=(len(sizes), 3))
    updates[seed % len(sizes)] = 0
    angles = update_angles(updates.astype(np.float32))
    for table in (
        table_by_size(counts, draws),
        table_by_similarity(counts, draws, angles),
    ):
        assert (table >= 0).all()
        assert (table.sum(axis=1) == counts.sum()).all()  # Σ_i r_k(i) = 1
        assert (table.sum(axis=0) == draws * counts).all()  # Σ_k r_k(i) = m n_i / n


def test_one_draw_samples_a_client_in_proportion_to_its_size() -> None:
    counts = np.array([1, 2, 5])
    angles = np.ones((3, 3)) - np.eye(3)
    assert table_by_similarity(counts, 1, angles).tolist() == [[1, 2, 5]]
    assert table_by_size(counts, 1).tolist() == [[1, 2, 5]]


def test_clients_are_drawn_with_the_probabilities_of_the_table() -> None:
    table = np.array([[0, 3, 1], [4, 0, 0]])
    generator = np.random.default_rng(0)
    drawn = np.array([draw_clients(table, generator) for _ in range(4000)])
    assert set(drawn[:, 1]) == {0}
    share = Counter(drawn[:, 0].tolist())
    assert share[0] == 0
    # standard deviation √(0.75·0.25/4000) = 0.007
    assert share[1] / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_client_drawn_twice_has_twice_the_weight() -> None:
    strategy = strategy_of([1, 1, 1, 1, 1, 25], 0.5)
    assert strategy.sample(1) == sorted(strategy.draws)
    assert sum(strategy.draws.values()) == 3
    # m·n_i/n = 75/30: client 5 fills two of the three distributions alone
    assert strategy.draws[5] >= 2
    before = strategy.weights.tensors
    strategy.draws = Counter({5: 2, 0: 1})
    strategy.aggregate(1, {0: model(strategy, 3.0), 5: model(strategy, 6.0)})
    for name, tensor in strategy.weights.tensors.items():  # (2·6 + 1·3) / 3
        torch.testing.assert_close(tensor, before[name] + 5.0)


def test_a_client_drawn_twice_counts_as_two_replies() -> None:
    strategy = strategy_of([1, 1, 1, 1, 1, 25], 0.5)
    strategy.draws = Counter({5: 2, 0: 1})
    both = {0: model(strategy, 3.0), 5: model(strategy, 6.0)}
    assert strategy.num_replies(both) == 3
    assert strategy.num_replies({0: both[0]}) == 1
    strategy.draws.clear()  # all take part
    assert strategy.num_replies(both) == 2


def test_a_failed_client_is_left_out_of_the_mean() -> None:
    strategy = strategy_of([4, 4, 4, 4], 0.5)
    before = strategy.weights.tensors
    strategy.draws = Counter({0: 1, 2: 1})
    strategy.aggregate(1, {2: model(strategy, 1.0)})
    for name, tensor in strategy.weights.tensors.items():
        torch.testing.assert_close(tensor, before[name] + 1.0)


def test_full_participation_equals_fedavg() -> None:
    strategy = strategy_of([1, 3], 1.0)
    assert strategy.sample(1) == [0, 1]
    before = strategy.weights.tensors
    low = Upload(model(strategy, 0.0).payload, 1.0)
    high = Upload(model(strategy, 4.0).payload, 3.0)
    strategy.aggregate(1, {0: low, 1: high})
    for name, tensor in strategy.weights.tensors.items():
        torch.testing.assert_close(tensor, before[name] + 3.0)


def test_one_participant_is_sampled_before_any_client_has_uploaded() -> None:
    strategy = strategy_of([3, 1, 4, 1, 5], 0.01)
    assert all(len(strategy.sample(number)) == 1 for number in range(1, 6))


def test_clients_with_similar_updates_are_not_sampled_together() -> None:
    strategy = strategy_of([2, 2, 2, 2], 0.5)
    ups = {pid: model(strategy, value) for pid, value in enumerate((1, -1, 2, -2))}
    strategy.aggregate(1, ups)
    for number in range(2, 12):
        drawn = strategy.sample(number)
        assert len(drawn) == 2
        assert sum(pid % 2 for pid in drawn) == 1


def test_a_restored_state_gives_the_same_draws() -> None:
    strategy, twin = (strategy_of([2, 3, 4, 5], 0.5) for _ in range(2))
    ups = {pid: model(strategy, value) for pid, value in enumerate((1, -1, 2, -2))}
    strategy.aggregate(1, ups)
    twin.load_server_state(strategy.server_state())
    assert [twin.sample(n) for n in range(2, 9)] == [
        strategy.sample(n) for n in range(2, 9)
    ]


def test_with_clusters_by_size_no_updates_are_stored() -> None:
    strategy = strategy_of([2, 3, 4, 5], 0.5, clusters="size")
    drawn = strategy.sample(1)
    strategy.aggregate(1, {pid: model(strategy, 1.0) for pid in drawn})
    assert strategy.updates == {}
