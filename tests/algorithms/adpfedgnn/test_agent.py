from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.adpfedgnn import agent as agent_module
from flower_fgl.algorithms.adpfedgnn.agent import (
    AgentMemory,
    Candidates,
    NeighbourAgent,
    NeighbourLists,
    QNetwork,
    ReplayBuffer,
    RunningDeviation,
    Steps,
    feature_table,
    keep_probabilities,
    next_candidates,
    reward,
    sample_block,
    sample_neighbours,
    shuffled,
    td_loss,
)
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import csr_matrix

NODES = 60


@pytest.fixture
def edge_index(generator: torch.Generator) -> Tensor:
    """A random graph: the first node is linked to all others, the last to none."""
    upper = torch.rand(NODES, NODES, generator=generator).triu(1) > 0.85
    upper[0, 1:] = True
    upper[:, -1] = False
    return (upper | upper.T).nonzero().T.contiguous()


def neighbours_of(edge_index: Tensor) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(NODES)]
    for source, target in edge_index.T.tolist():
        found[target].add(source)
    return found


def test_lists_hold_the_neighbours_of_every_node(edge_index: Tensor) -> None:
    lists = NeighbourLists.of(edge_index, NODES)
    assert lists.num_nodes == NODES
    for node, expected in enumerate(neighbours_of(edge_index)):
        held = lists.neighbour[lists.start[node] : lists.start[node + 1]]
        assert sorted(held.tolist()) == sorted(expected)


@pytest.mark.parametrize("limit", [1, 3, 10, 1000])
def test_every_node_gets_different_neighbours_up_to_the_limit(
    edge_index: Tensor, limit: int, generator: torch.Generator
) -> None:
    lists = NeighbourLists.of(edge_index, NODES)
    nodes = torch.tensor([5, 0, NODES - 1, 7])
    target, neighbour = sample_neighbours(lists, nodes, limit, generator)
    assert torch.equal(target, target.sort().values)
    expected = neighbours_of(edge_index)
    for place, node in enumerate(nodes.tolist()):
        mine = neighbour[target == place].tolist()
        assert len(mine) == len(set(mine)) == min(limit, len(expected[node]))
        assert set(mine) <= expected[node]


def test_every_set_of_neighbours_is_equally_likely(
    generator: torch.Generator,
) -> None:
    star = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
    lists = NeighbourLists.of(star, 5)
    draws = 6000
    _, neighbour = sample_neighbours(
        lists, torch.zeros(draws, dtype=torch.int64), 2, generator
    )
    counts = Counter(frozenset(pair) for pair in neighbour.view(draws, 2).tolist())
    assert len(counts) == 6
    # a binomial count of mean 1000 has standard deviation 29
    assert all(abs(count - 1000) < 150 for count in counts.values())


def test_a_block_lists_each_node_once_and_the_batch_first(
    edge_index: Tensor, generator: torch.Generator
) -> None:
    lists = NeighbourLists.of(edge_index, NODES)
    batch = torch.tensor([9, 3, NODES - 1])
    block = sample_block(lists, batch, limit=4, num_layers=2, generator=generator)
    assert torch.equal(block.nodes[:3], batch)
    assert len(block.nodes.unique()) == len(block.nodes)
    expected = neighbours_of(edge_index)
    first, last = layers = block.places(NODES)
    assert set(last.target.tolist()) == {0, 1}  # the third has no neighbours
    for layer, nodes in zip(layers, block.layers, strict=True):
        assert torch.equal(block.nodes[layer.target], nodes.target)
        assert torch.equal(block.nodes[layer.neighbour], nodes.neighbour)
        for target, neighbour in zip(*(t.tolist() for t in layer), strict=True):
            node = int(block.nodes[target])
            assert int(block.nodes[neighbour]) in expected[node]
    # the first layer computes the batch and the neighbours in the last layer
    asked = {0, 1, 2, *last.neighbour.tolist()}
    assert set(first.target.tolist()) == asked - {2}


def test_a_block_over_all_neighbours_draws_nothing_at_random(
    edge_index: Tensor,
) -> None:
    lists = NeighbourLists.of(edge_index, NODES)
    blocks = [
        sample_block(
            lists,
            torch.arange(5),
            limit=NODES,
            num_layers=2,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (1, 2)
    ]
    assert torch.equal(blocks[0].nodes, blocks[1].nodes)
    assert torch.equal(blocks[0].layers[0].neighbour, blocks[1].layers[0].neighbour)


def test_a_block_of_a_graph_without_edges_is_the_batch(
    generator: torch.Generator,
) -> None:
    lists = NeighbourLists.of(torch.empty(2, 0, dtype=torch.int64), 4)
    block = sample_block(
        lists, torch.tensor([2, 1]), limit=3, num_layers=2, generator=generator
    )
    assert block.nodes.tolist() == [2, 1]
    assert all(len(layer.target) == 0 for layer in block.layers)


N, D = 12, 5
NO_EDGES = torch.empty(2, 0, dtype=torch.int64)


@pytest.fixture(params=["strided", "sparse"])
def graph(request: pytest.FixtureRequest, generator: torch.Generator) -> GraphInput:
    x = torch.randn(N, D, generator=generator)
    if request.param == "sparse":
        row, column = torch.ones(N, D).nonzero().T
        x = csr_matrix(row, column, x.flatten(), (N, D))
    return GraphInput(x, NO_EDGES)


def dense(graph: GraphInput) -> Tensor:
    return graph.x.to_dense() if graph.x.layout == torch.sparse_csr else graph.x


def values_by_concatenation(
    agent: QNetwork, x: Tensor, v: Tensor, u: Tensor, b: Tensor
) -> Tensor:
    """Q of the states [x_v ; x_u ; b], concatenated as printed."""
    state = torch.cat([x[v], x[u], b], dim=1)
    assert state.shape[1] == 2 * D + 1
    return agent.rest(agent.first(state))


def test_the_factored_first_layer_is_that_of_the_whole_state(
    graph: GraphInput, generator: torch.Generator
) -> None:
    agent = QNetwork(D, 16)
    v, u = torch.randint(N, (2, 30), generator=generator)
    b = torch.randint(2, (30, 1), generator=generator).float()
    of_target, of_neighbour, of_branch = agent.project(graph)
    found = agent(of_target[v], of_neighbour[u], of_branch, b)
    assert found.shape == (30, 2)
    torch.testing.assert_close(
        found, values_by_concatenation(agent, dense(graph), v, u, b)
    )


def test_neighbours_are_kept_with_the_softmax_of_the_values(
    graph: GraphInput, generator: torch.Generator
) -> None:
    agent = QNetwork(D, 16)
    with torch.no_grad():
        agent.first.weight[:, -1] += 3.0  # branches differ
        agent.rest[-1].weight *= 4
    v, u = torch.randint(N, (2, 30), generator=generator)
    found = keep_probabilities(agent, graph, Candidates(v, u))
    assert not found.requires_grad
    for branch in (0, 1):
        b = torch.full((30, 1), float(branch))
        values = values_by_concatenation(agent, dense(graph), v, u, b).detach()
        torch.testing.assert_close(found[branch], values.softmax(dim=1)[:, 1])


def test_shuffling_permutes_the_entries_of_each_row(
    generator: torch.Generator,
) -> None:
    rows = torch.arange(200.0).view(2, 100)
    found = shuffled(rows, generator)
    assert torch.equal(found.sort(dim=1).values, rows)
    assert not torch.equal(found, rows)
    assert not torch.equal(found[0] + 100, found[1])


def test_a_loss_below_the_earlier_ones_is_rewarded() -> None:
    assert reward(0.8, [0.9, 1.1]) == pytest.approx(0.2)
    assert reward(1.2, [0.9, 1.1]) == pytest.approx(-0.2)
    assert reward(0.8, [1.0], is_literal=True) == pytest.approx(-0.2)


def test_the_reward_is_zero_at_first_and_never_beyond_one() -> None:
    assert reward(5.0, []) == 0
    assert reward(0.0, [9.0]) == 1
    assert reward(9.0, [0.0]) == -1


def test_the_next_state_is_the_next_candidate_of_the_same_target() -> None:
    pairs = Candidates(torch.tensor([0, 0, 0, 2, 3, 3]), torch.arange(10, 16))
    assert next_candidates(pairs).tolist() == [11, 12, -1, -1, 15, -1]
    nothing = Candidates(torch.arange(0), torch.arange(0))
    assert next_candidates(nothing).numel() == 0


def steps_of(*neighbours: int) -> Steps:
    count = len(neighbours)
    column = torch.tensor(neighbours)
    zeros = torch.zeros(count, dtype=torch.int64)
    return Steps(torch.stack([column, column, column, zeros, zeros]), column.float())


def targets(steps: Steps) -> list[int]:
    return steps.numbers[0].tolist()


def test_the_buffer_is_a_ring(generator: torch.Generator) -> None:
    buffer = ReplayBuffer(4)
    buffer.push(steps_of(1, 2, 3), generator)
    assert len(buffer) == 3
    buffer.push(steps_of(4, 5), generator)
    assert len(buffer) == 4
    assert sorted(targets(buffer.steps)) == [2, 3, 4, 5]  # 1 was the oldest
    other = ReplayBuffer(4)
    other.load({name: t.clone() for name, t in buffer.tensors().items()})
    other.push(steps_of(6), generator)
    assert sorted(targets(other.steps)) == [3, 4, 5, 6]
    assert set(targets(other.draw(50, generator))) == {3, 4, 5, 6}


def test_a_buffer_of_separate_columns_can_be_loaded(generator: torch.Generator) -> None:
    buffer, other = ReplayBuffer(4), ReplayBuffer(4)
    buffer.push(steps_of(1, 2, 3), generator)
    kept = buffer.tensors()
    names = ("target", "neighbour", "following", "branch", "action")
    other.load(dict(zip(names, kept.pop("numbers"), strict=True)) | kept)
    assert torch.equal(other.steps.numbers, buffer.steps.numbers)
    assert len(other) == 3


def test_a_random_subset_is_kept_if_steps_exceed_the_capacity(
    generator: torch.Generator,
) -> None:
    buffer = ReplayBuffer(4)
    buffer.push(steps_of(*range(100)), generator)
    kept = targets(buffer.steps)
    assert len(set(kept)) == len(buffer) == 4
    assert kept != [96, 97, 98, 99]
    assert buffer.steps.reward.tolist() == [float(k) for k in kept]


@pytest.mark.parametrize("discount", [0.0, 0.9])
def test_the_loss_of_the_agent_equals_a_loop(
    graph: GraphInput, discount: float, generator: torch.Generator
) -> None:
    agent, frozen = QNetwork(D, 16), QNetwork(D, 16)
    count = 20
    v, u, ahead = torch.randint(N, (3, count), generator=generator)
    ahead[::3] = -1
    b, a = torch.randint(2, (2, count), generator=generator)
    r = 4 * torch.randn(count, generator=generator)
    losses = []
    for i in range(count):
        one = v[i : i + 1], u[i : i + 1], b[i : i + 1, None].float()
        value = values_by_concatenation(agent, dense(graph), *one)[0, a[i]]
        goal = r[i]
        if ahead[i] >= 0:
            following = one[0], ahead[i : i + 1], one[2]
            best = values_by_concatenation(frozen, dense(graph), *following).max()
            goal = goal + discount * best.detach()
        losses.append(F.huber_loss(value, goal))
    steps = Steps(torch.stack([v, u, ahead, b, a]), r)
    loss = td_loss(agent, frozen, graph, steps, discount=discount)
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    loss.backward()
    assert float(agent.first.weight.grad.abs().sum()) > 0
    assert all(p.grad is None for p in frozen.parameters())


def test_a_table_holds_the_features_of_its_nodes(graph: GraphInput) -> None:
    table, rows = feature_table(graph, torch.tensor([[4], [1]]))
    assert rows.tolist() == [[0], [1]]
    torch.testing.assert_close(dense(table), dense(graph)[[4, 1]])
    assert table.edge_index.shape == (2, 0)


GRAPH = GraphInput(torch.eye(3), torch.tensor([[1, 2], [0, 0]]))
PAIRS = Candidates(torch.tensor([0, 0]), torch.tensor([1, 2]))


def memory_of(kept: dict[str, Tensor] | None = None, **settings: object) -> AgentMemory:
    values = ADPFedGNNSettings(**{"gamma_rl": 0.0, **settings})  # type: ignore[arg-type]
    return AgentMemory(values, kept or {}, torch.Generator().manual_seed(2))


def agent_of(memory: AgentMemory, seed: int = 0) -> NeighbourAgent:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = QNetwork(3, 16)
    return NeighbourAgent(network, GRAPH, [memory], [torch.Generator().manual_seed(1)])


def learn(agent: NeighbourAgent, pairs: Candidates, kept: Tensor, task: float) -> None:
    size = len(pairs.target)
    agent.learn(pairs, next_candidates(pairs), [size], kept, [task])


@pytest.mark.thorough
@pytest.mark.parametrize("is_good", [True, False])
def test_the_agent_learns_to_keep_a_neighbour_that_lowers_the_loss(
    is_good: bool,
) -> None:
    agent = agent_of(memory_of())
    optimizer = torch.optim.Adam(agent.network.parameters(), lr=0.01)
    shares = []
    for _ in range(300):
        kept = agent.choose(GRAPH, PAIRS, [2])
        share = float(kept[:, 0].float().mean())  # node 1; node 2 does not matter
        learn(agent, PAIRS, kept, 1 - share if is_good else share)
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
        agent = agent_of(memory_of(selection=selection))
        with torch.no_grad():
            agent.network.first.weight[:, -1] += 3.0  # branches differ
            agent.network.rest[-1].weight *= 4
        shares[selection] = agent.choose(GRAPH, pairs, [draws]).float().mean(dim=1)
    expected = keep_probabilities(agent.network, GRAPH, pairs)[:, 0]
    assert abs(expected[0] - expected[1]) > 0.05
    # a share of 4000 draws has a standard deviation of at most 0.008
    torch.testing.assert_close(shares["dqn"], expected, atol=0.03, rtol=0)
    assert torch.equal(shares["dqn"], shares["random-drop"])


def test_the_memory_restores_buffer_and_history() -> None:
    memory = memory_of(reward_window=2)
    agent = agent_of(memory)
    for task in (1.0, 0.9, 0.8):
        learn(agent, PAIRS, agent.choose(GRAPH, PAIRS, [2]), task)
    kept = memory.tensors()
    assert kept["losses"].tolist() == [0.9, 0.8]
    restored = memory_of(kept, reward_window=2)
    assert restored.history == [0.9, 0.8]
    assert len(restored.buffer) == 3 * 4  # two pairs, two branches
    # nothing before the first; 1 − 0.9; the mean of 1 and 0.9, minus 0.8
    rewards = restored.buffer.steps.reward[:12].view(3, 4)
    torch.testing.assert_close(rewards[:, 0], torch.tensor([0.0, 0.1, 0.15]))
    assert bool((rewards == rewards[:, :1]).all())


def test_losses_of_rounds_are_compared_by_their_mean() -> None:
    memory = memory_of(reward_scale="round")
    agent = agent_of(memory)
    for task in (1.0, 0.5):
        learn(agent, PAIRS, agent.choose(GRAPH, PAIRS, [2]), task)
    assert memory.history == []
    assert memory.tensors()["losses"].tolist() == [0.75]


def many(pairs: int) -> Candidates:
    """Return many candidates of one target."""
    return Candidates(torch.zeros(pairs).long(), torch.ones(pairs, dtype=torch.int64))


def test_a_buffer_holds_a_part_of_each_batch_and_so_many_rewards() -> None:
    found = {}
    for limit in (0, 200):
        memory = memory_of(buffer=2000, steps_per_batch=limit)
        agent = agent_of(memory)
        for number in range(12):
            kept = torch.ones(2, 900, dtype=torch.bool)
            learn(agent, many(900), kept, 1.0 / (1 + number))
        found[limit] = memory.distinct_rewards(), len(memory.buffer)
    # 1800 steps a batch fill the buffer with the last two batches
    assert found[0] == (2, 2000)
    assert found[200] == (10, 2000)  # the last ten of twelve


def test_the_stored_part_of_a_batch_is_random_and_has_both_branches() -> None:
    memory = memory_of(steps_per_batch=100)
    kept = torch.arange(600).view(2, 300) % 2 == 0
    learn(agent_of(memory), many(300), kept, 1.0)
    steps = memory.buffer.steps.take(torch.arange(len(memory.buffer)))
    assert len(steps.reward) == 100
    assert 30 < int(steps.numbers[3].sum()) < 70
    assert 30 < int(steps.numbers[4].sum()) < 70


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

    def recorded(*given: Any, **options: Any) -> torch.Tensor:
        seen.append(given[3].reward)
        return td_loss(*given, **options)

    monkeypatch.setattr(agent_module, "td_loss", recorded)
    memory = memory_of(reward_norm=reward_norm)
    agent = agent_of(memory)
    draws = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 0.01 + 1
    for task in draws.tolist():
        learn(agent, PAIRS, agent.choose(GRAPH, PAIRS, [2]), task)
    deviation = float(seen[-1].std())
    assert deviation == pytest.approx(
        1.0 if reward_norm == "running" else 0.01, rel=0.3
    )
    assert float(torch.cat(seen).abs().max()) <= 3.0
    assert float(memory.buffer.steps.reward.abs().max()) < 0.1  # stored as in Eq. (3)


def test_a_memory_without_reward_sums_can_be_loaded() -> None:
    memory = memory_of()
    agent = agent_of(memory)
    learn(agent, PAIRS, agent.choose(GRAPH, PAIRS, [2]), 1.0)
    kept = memory.tensors()
    del kept["reward-sums"]
    assert memory_of(kept).deviation.value() == 1.0
