from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.adpfedgnn.dqn import (
    QNetwork,
    ReplayBuffer,
    Steps,
    feature_table,
    keep_probabilities,
    next_candidates,
    reward,
    shuffled,
    td_loss,
)
from flower_fgl.algorithms.adpfedgnn.neighbor_sampling import Candidates
from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import csr_matrix

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
    of_target, of_neighbour = agent.project(graph)
    found = agent(of_target[v], of_neighbour[u], b)
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
    assert reward(0.8, [0.9, 1.1], scale=1.0) == pytest.approx(0.2)
    assert reward(1.2, [0.9, 1.1], scale=1.0) == pytest.approx(-0.2)
    assert reward(0.8, [1.0], scale=1.0, is_literal=True) == pytest.approx(-0.2)
    assert reward(0.8, [1.0], scale=0.5) == pytest.approx(0.1)


def test_the_reward_is_zero_at_first_and_never_beyond_one() -> None:
    assert reward(5.0, [], scale=1.0) == 0
    assert reward(0.0, [9.0], scale=1.0) == 1
    assert reward(9.0, [0.0], scale=1.0) == -1


def test_the_next_state_is_the_next_candidate_of_the_same_target() -> None:
    pairs = Candidates(torch.tensor([0, 0, 0, 2, 3, 3]), torch.arange(10, 16))
    assert next_candidates(pairs).tolist() == [11, 12, -1, -1, 15, -1]
    nothing = Candidates(torch.arange(0), torch.arange(0))
    assert next_candidates(nothing).numel() == 0


def steps_of(*neighbours: int) -> Steps:
    count = len(neighbours)
    column = torch.tensor(neighbours)
    zeros = torch.zeros(count, dtype=torch.int64)
    return Steps(column, column, column, zeros, zeros, column.float())


def test_the_buffer_is_a_ring(generator: torch.Generator) -> None:
    buffer = ReplayBuffer(4)
    buffer.push(steps_of(1, 2, 3), generator)
    assert len(buffer) == 3
    buffer.push(steps_of(4, 5), generator)
    assert len(buffer) == 4
    assert sorted(buffer.steps.target.tolist()) == [2, 3, 4, 5]  # 1 was the oldest
    other = ReplayBuffer(4)
    other.load({name: t.clone() for name, t in buffer.tensors().items()})
    other.push(steps_of(6), generator)
    assert sorted(other.steps.target.tolist()) == [3, 4, 5, 6]
    assert set(other.draw(50, generator).target.tolist()) == {3, 4, 5, 6}


def test_a_random_subset_is_kept_if_steps_exceed_the_capacity(
    generator: torch.Generator,
) -> None:
    buffer = ReplayBuffer(4)
    buffer.push(steps_of(*range(100)), generator)
    kept = buffer.steps.target.tolist()
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
    loss = td_loss(agent, frozen, graph, Steps(v, u, ahead, b, a, r), discount=discount)
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    loss.backward()
    assert float(agent.first.weight.grad.abs().sum()) > 0
    assert all(p.grad is None for p in frozen.parameters())


def test_a_table_holds_the_features_of_its_nodes(graph: GraphInput) -> None:
    table = feature_table(graph, torch.tensor([4, 1]))
    torch.testing.assert_close(dense(table), dense(graph)[[4, 1]])
    assert table.edge_index.shape == (2, 0)
