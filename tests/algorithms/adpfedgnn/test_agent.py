from __future__ import annotations

import pytest
import torch

from flower_fgl.algorithms.adpfedgnn.agent import NeighbourAgent
from flower_fgl.algorithms.adpfedgnn.dqn import QNetwork, keep_probabilities
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
