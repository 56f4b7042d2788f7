from __future__ import annotations

from typing import Any

import pytest
import torch

from flower_fgl.algorithms.adpfedgnn import agent as agent_module
from flower_fgl.algorithms.adpfedgnn import dqn
from flower_fgl.algorithms.adpfedgnn.agent import NeighbourAgent
from flower_fgl.algorithms.adpfedgnn.dqn import (
    QNetwork,
    RunningDeviation,
    keep_probabilities,
)
from flower_fgl.algorithms.adpfedgnn.neighbor_sampling import Block, Candidates
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import GraphInput

GRAPH = GraphInput(torch.eye(3), torch.tensor([[1, 2], [0, 0]]))
BLOCK = Block(
    torch.arange(3), (Candidates(torch.tensor([0, 0]), torch.tensor([1, 2])),)
)


def agent_of(seed: int = 0, **settings: object) -> NeighbourAgent:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = QNetwork(3, 16)
    return NeighbourAgent(
        network,
        ADPFedGNNSettings(**{"gamma_rl": 0.0, **settings}),  # type: ignore[arg-type]
        GRAPH,
        {},
        draws=torch.Generator().manual_seed(1),
        replay=torch.Generator().manual_seed(2),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("is_good", [True, False])
def test_the_agent_learns_to_keep_a_neighbour_that_lowers_the_loss(
    is_good: bool,
) -> None:
    agent = agent_of()
    optimizer = torch.optim.Adam(agent.network.parameters(), lr=0.01)
    shares = []
    for _ in range(300):
        kept = agent.choose(GRAPH, BLOCK.layers[0])
        share = float(kept[:, 0].float().mean())  # node 1; node 2 does not matter
        agent.learn(BLOCK, kept, 1 - share if is_good else share)
        optimizer.step()
        shares.append(share)
    last = sum(shares[-100:]) / 100
    first = sum(shares[:50]) / 50
    assert last > first if is_good else last < first


def test_neighbours_are_kept_with_the_agents_probabilities() -> None:
    draws = 4000
    pairs = Candidates(torch.zeros(draws).long(), torch.ones(draws).long())
    shares = {}
    for selection in ("dqn", "random-drop"):
        agent = agent_of(selection=selection)
        with torch.no_grad():
            agent.network.first.weight[:, -1] += 3.0  # branches differ
            agent.network.rest[-1].weight *= 4
        shares[selection] = agent.choose(GRAPH, pairs).float().mean(dim=1)
    expected = keep_probabilities(agent.network, GRAPH, pairs)[:, 0]
    assert abs(expected[0] - expected[1]) > 0.05
    # a share of 4000 draws has a standard deviation of at most 0.008
    torch.testing.assert_close(shares["dqn"], expected, atol=0.03, rtol=0)
    assert torch.equal(shares["dqn"], shares["random-drop"])


def test_the_memory_restores_buffer_and_history() -> None:
    agent = agent_of(reward_window=2)
    for task in (1.0, 0.9, 0.8):
        agent.learn(BLOCK, agent.choose(GRAPH, BLOCK.layers[0]), task)
    memory = agent.memory()
    assert memory["losses"].tolist() == [0.9, 0.8]
    restored = agent_of(reward_window=2)
    restored = NeighbourAgent(
        restored.network,
        restored.method_config,
        GRAPH,
        memory,
        draws=restored.draws,
        replay=restored.replay,
    )
    assert restored.history == [0.9, 0.8]
    assert len(restored.buffer) == 3 * 4  # two pairs, two branches
    # nothing before the first; 1 − 0.9; the mean of 1 and 0.9, minus 0.8
    rewards = restored.buffer.steps.reward[:12].view(3, 4)
    torch.testing.assert_close(rewards[:, 0], torch.tensor([0.0, 0.1, 0.15]))
    assert bool((rewards == rewards[:, :1]).all())


def test_losses_of_rounds_are_compared_by_their_mean() -> None:
    agent = agent_of(reward_scale="round")
    for task in (1.0, 0.5):
        agent.learn(BLOCK, agent.choose(GRAPH, BLOCK.layers[0]), task)
    assert agent.history == []
    assert agent.memory()["losses"].tolist() == [0.75]


def big_block(pairs: int) -> Block:
    """Block with many candidates of one target."""
    candidates = Candidates(
        torch.zeros(pairs).long(), torch.ones(pairs, dtype=torch.int64)
    )
    return Block(torch.arange(3), (candidates,))


def test_a_buffer_holds_a_part_of_each_batch_and_so_many_rewards() -> None:
    found = {}
    for limit in (0, 200):
        agent = agent_of(buffer=2000, steps_per_batch=limit)
        block = big_block(900)
        for number in range(12):
            kept = torch.ones(2, 900, dtype=torch.bool)
            agent.learn(block, kept, 1.0 / (1 + number))
        found[limit] = agent.distinct_rewards(), len(agent.buffer)
    # 1800 steps a batch fill the buffer with the last two batches
    assert found[0] == (2, 2000)
    assert found[200] == (10, 2000)  # the last ten of twelve


def test_the_stored_part_of_a_batch_is_random_and_has_both_branches() -> None:
    agent = agent_of(steps_per_batch=100)
    agent.learn(big_block(300), torch.arange(600).view(2, 300) % 2 == 0, 1.0)
    steps = agent.buffer.steps.take(torch.arange(len(agent.buffer)))
    assert len(steps.reward) == 100
    assert 30 < int(steps.branch.sum()) < 70
    assert 30 < int(steps.action.sum()) < 70


def test_the_running_deviation_is_that_of_the_last_values() -> None:
    deviation = RunningDeviation()
    assert deviation.value() == 1.0
    deviation.add(0.3)
    assert deviation.value() == 1.0  # one value does not differ
    deviation.add(0.5)
    # weights 0.99 and 1: variance w₁w₂/(w₁+w₂)² · 0.2²
    assert deviation.value() == pytest.approx(0.2 * (0.99 / 1.99**2) ** 0.5)
    draws = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * 0.014
    for value in draws.tolist():
        deviation.add(value)
    assert deviation.value() == pytest.approx(0.014, rel=0.2)
    assert RunningDeviation(deviation.sums).value() == deviation.value()


@pytest.mark.parametrize("reward_norm", ["running", "none"])
def test_rewards_are_learnt_from_in_units_of_their_deviation(
    reward_norm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def td_loss(*given: Any, **options: Any) -> torch.Tensor:
        seen.append(given[3].reward)
        return dqn.td_loss(*given, **options)

    monkeypatch.setattr(agent_module, "td_loss", td_loss)
    agent = agent_of(reward_norm=reward_norm)
    draws = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 0.01 + 1
    for task in draws.tolist():
        agent.learn(BLOCK, agent.choose(GRAPH, BLOCK.layers[0]), task)
    deviation = float(seen[-1].std())
    assert deviation == pytest.approx(
        1.0 if reward_norm == "running" else 0.01, rel=0.3
    )
    assert float(torch.cat(seen).abs().max()) <= 3.0
    assert float(agent.buffer.steps.reward.abs().max()) < 0.1  # stored as in Eq. (3)


def test_a_memory_without_reward_sums_can_be_loaded() -> None:
    agent = agent_of()
    agent.learn(BLOCK, agent.choose(GRAPH, BLOCK.layers[0]), 1.0)
    memory = agent.memory()
    del memory["reward-sums"]
    restored = agent_of()
    restored = NeighbourAgent(
        restored.network, restored.method_config, GRAPH, memory,
        draws=restored.draws, replay=restored.replay,
    )  # fmt: skip
    assert restored.deviation.value() == 1.0
