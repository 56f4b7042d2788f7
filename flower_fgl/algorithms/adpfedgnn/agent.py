"""The agent that selects neighbours, Mnih et al., Nature 2015, and what it selects from."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import GraphInput
from flower_fgl.nn.computation_graph import NeighbourLists
from flower_fgl.nn.graph_union import select_rows

__all__ = ["Block", "Candidates", "NeighbourAgent", "NeighbourLists", "QNetwork"]
__all__ += ["ReplayBuffer", "RunningDeviation", "Steps", "feature_table"]
__all__ += ["keep_probabilities", "next_candidates", "reward", "sample_block"]
__all__ += ["sample_neighbours", "shuffled", "td_loss"]


class Candidates(NamedTuple):
    """Pairs of a target node and a neighbour that may be kept, both (m,), int64.

    Targets are ascending positions. Pairs are distinct unless the graph has duplicate
    edges.
    """

    target: Tensor
    neighbour: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """The nodes (n,) whose features determine a batch's predictions, ADPFedGNN Sec. 3.2.

    The batch's nodes come first. ``layers`` are the pairs of each layer as positions in
    ``nodes``, the first layer first.
    """

    nodes: Tensor
    layers: tuple[Candidates, ...]


def sample_neighbours(
    lists: NeighbourLists, nodes: Tensor, limit: int, generator: torch.Generator
) -> Candidates:
    """Draw up to ``limit`` (k) neighbours of each node, without replacement, on the CPU.

    A node with at most k keeps all; for other nodes every set of k is equally likely. The
    targets are positions in ``nodes``, the neighbours nodes of the graph.
    """
    target, entry = lists.sample(nodes, limit, generator)
    return Candidates(target, lists.neighbour.index_select(0, entry))


def sample_block(
    lists: NeighbourLists,
    batch: Tensor,
    *,
    limit: int,
    num_layers: int,
    generator: torch.Generator,
) -> Block:
    """Draw a block: neighbours of distinct nodes, their neighbours, and so on.

    Up to ``limit`` neighbours per node and layer, drawn independently in each layer.
    """
    place = torch.full((lists.num_nodes,), -1, device=batch.device)
    place[batch] = torch.arange(len(batch), device=batch.device)
    nodes, layers = batch, []
    for _ in range(num_layers):
        target, neighbour = sample_neighbours(lists, nodes, limit, generator)
        fresh = torch.unique(neighbour[place[neighbour] < 0])
        place[fresh] = len(nodes) + torch.arange(len(fresh), device=batch.device)
        nodes = torch.cat([nodes, fresh])
        layers.append(Candidates(target, place[neighbour]))
    return Block(nodes, tuple(layers[::-1]))


DROP, KEEP = 0, 1
BRANCHES = 2
"""b = 0: global, b = 1: local."""
EPSILON = 1e-10
"""Least variance of the rewards that is not taken as rounding."""


def feature_table(graph: GraphInput, nodes: Tensor) -> GraphInput:
    """Return the features of some nodes (n,) as a graph without edges."""
    edges = torch.empty(2, 0, dtype=torch.int64, device=nodes.device)
    return GraphInput(select_rows(graph.x, nodes), edges)


class QNetwork(nn.Module):
    """Q(s, a) of dropping and of keeping a neighbour, ADPFedGNN Sec. 3.2.

    The state is ``[x_v ; x_u ; b]``, Eq. (1): features of target and candidate, and the
    branch. ``width`` is that of the two hidden layers.
    """

    def __init__(self, num_features: int, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(2 * num_features + 1, width)
        self.rest = nn.Sequential(
            nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def project(self, table: GraphInput) -> tuple[Tensor, Tensor]:
        """Map features for the roles of target and candidate: two (n, width).

        The first layer is linear in ``[x_v ; x_u ; b]``, so each node's part is
        computed once for all its pairs.
        """
        sizes = [table.num_features, table.num_features, 1]
        of_target, of_neighbour, _ = torch.split(self.first.weight, sizes, dim=1)
        return table.linear(None, of_target), table.linear(None, of_neighbour)

    def forward(self, target: Tensor, neighbour: Tensor, branch: Tensor) -> Tensor:
        """Return Q(s, ·), the values of dropping and of keeping each of m pairs: (m, 2).

        ``target`` and ``neighbour`` (m, width) are rows of the results of
        :meth:`project`, and ``branch`` (m, 1) is b.
        """
        of_branch = self.first.weight[:, -1]
        hidden = target + neighbour + branch * of_branch + self.first.bias
        out: Tensor = self.rest(hidden)
        return out


@torch.no_grad()
def keep_probabilities(agent: QNetwork, table: GraphInput, pairs: Candidates) -> Tensor:
    """Return P(keep | s) of each candidate in each branch, (2, m), ADPFedGNN Eq. (2).

    ``table`` has the features of the nodes that ``pairs`` index.
    """
    of_target, of_neighbour = agent.project(table)
    target, neighbour = of_target[pairs.target], of_neighbour[pairs.neighbour]
    rows = []
    for b in range(BRANCHES):
        values = agent(target, neighbour, target.new_full((len(target), 1), float(b)))
        rows.append((values[:, KEEP] - values[:, DROP]).sigmoid())  # 2-way softmax
    return torch.stack(rows)


def shuffled(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Shuffle each row: the number of kept entries stays, their choice is random."""
    order = torch.rand(rows.shape, generator=generator).argsort(dim=1)
    return rows.gather(1, order.to(rows.device))


def reward(
    loss: float, history: Sequence[float], *, scale: float, is_literal: bool = False
) -> float:
    """Reward a batch whose loss is below the mean of earlier losses, ADPFedGNN Eq. (3).

    ``loss`` is L_task of the batch, ``history`` the earlier losses (0 without any), and
    ``scale`` λ_rl. The reward is in [-1, 1].

    Notes
    -----
    1. The printed formula rewards a *higher* loss. The default has the opposite sign;
       ``is_literal`` uses the printed one.
    """
    if not history:
        return 0.0
    gain = scale * (sum(history) / len(history) - loss)
    return max(-1.0, min(1.0, -gain if is_literal else gain))


class RunningDeviation:
    """Standard deviation of a sequence, with exponentially falling weights.

    ``sums`` (3,), float64: of the weights, the weighted values and their squares.
    """

    MEMORY = 0.99
    """Factor by which a value's weight falls with each later value."""

    def __init__(self, sums: Tensor | None = None) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64) if sums is None else sums

    def add(self, value: float) -> None:
        """Append a value."""
        new = torch.tensor([1.0, value, value * value], dtype=torch.float64)
        self.sums = self.MEMORY * self.sums + new

    def value(self) -> float:
        """Return the deviation; 1 while the values do not differ."""
        total, first, second = self.sums.tolist()
        if not total:
            return 1.0
        variance = second / total - (first / total) ** 2
        return float(variance**0.5) if variance > EPSILON else 1.0


def next_candidates(pairs: Candidates) -> Tensor:
    """Return the neighbour of the following pair of the same target, else −1: (m,)."""
    following = torch.full_like(pairs.neighbour, -1)
    is_same = pairs.target[1:] == pairs.target[:-1]
    following[:-1][is_same] = pairs.neighbour[1:][is_same]
    return following


class Steps(NamedTuple):
    """Steps (s, a, r, s') of the agent, all of length m.

    ``target``, ``neighbour`` and ``following`` (v, u, and u' of s'; −1 where the
    episode ends), int32, are nodes of the client's graph; ``branch`` and ``action`` (b,
    a) are int32.
    """

    target: Tensor
    neighbour: Tensor
    following: Tensor
    branch: Tensor
    action: Tensor
    reward: Tensor

    @classmethod
    def empty(cls, size: int) -> Steps:
        """Allocate ``size`` steps of zeros."""
        v, u, following, b, a = torch.zeros(5, size, dtype=torch.int32)
        return Steps(v, u, following, b, a, torch.zeros(size))

    def take(self, index: Tensor) -> Steps:
        """Return the steps at the given indices."""
        return Steps(*(column[index] for column in self))


class ReplayBuffer:
    """Ring buffer of the agent's last steps: node numbers and rewards, no features."""

    def __init__(self, capacity: int) -> None:
        self.steps = Steps.empty(capacity)
        self.cursor = torch.zeros(2, dtype=torch.int64)

    def __len__(self) -> int:
        """Return the number of stored steps."""
        return int(self.cursor[1])

    def push(self, steps: Steps, generator: torch.Generator) -> None:
        """Overwrite the oldest steps; store a random subset if there are too many."""
        capacity = len(self.steps.reward)
        count = len(steps.reward)
        if count > capacity:
            chosen = torch.randperm(count, generator=generator)[:capacity]
            steps, count = steps.take(chosen), capacity
        start, filled = self.cursor.tolist()
        slots = (start + torch.arange(count)) % capacity
        for ring, column in zip(self.steps, steps, strict=True):
            ring[slots] = column.to(ring)
        self.cursor = torch.tensor(
            [(start + count) % capacity, min(capacity, filled + count)]
        )

    def draw(self, count: int, generator: torch.Generator) -> Steps:
        """Draw steps with replacement; the buffer must not be empty."""
        index = torch.randint(len(self), (count,), generator=generator)
        return self.steps.take(index)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to save, by name."""
        return {**self.steps._asdict(), "cursor": self.cursor}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the result of :meth:`tensors`; an empty dict changes nothing."""
        if tensors:
            self.cursor = tensors.pop("cursor")
            self.steps = Steps(**tensors)


def td_loss(
    agent: QNetwork,
    frozen: QNetwork,
    graph: GraphInput,
    steps: Steps,
    *,
    discount: float,
) -> Tensor:
    """Return the Huber loss of ``r + γ (1 − done) max_a' Q⁻(s', a') − Q(s, a)``.

    Q is ``agent``, Q⁻ ``frozen``, its copy from the beginning of the round, and γ
    ``discount``. ``steps`` are a batch of m steps, which index the nodes of the client's
    ``graph``.
    """
    steps = Steps(*(column.to(graph.device) for column in steps))
    branch = steps.branch[:, None].to(graph.x.dtype)
    is_done = steps.following < 0
    rows = [steps.target, steps.neighbour, steps.following.clamp(min=0)]
    table = feature_table(graph, torch.cat(rows).long())
    size = len(is_done)
    of_target, of_neighbour = agent.project(table)
    values = agent(of_target[:size], of_neighbour[size : 2 * size], branch)
    chosen = values.gather(1, steps.action[:, None].long()).squeeze(1)
    with torch.no_grad():
        of_target, of_neighbour = frozen.project(table)
        ahead = frozen(of_target[:size], of_neighbour[2 * size :], branch).amax(dim=1)
        goal = steps.reward + discount * ahead.masked_fill(is_done, 0.0)
    return F.smooth_l1_loss(chosen, goal)


REWARD_SCALE = 1.0
"""λ_rl, scale of the reward in Eq. (3)."""
REPLAY_BATCH = 128
"""Steps from the replay buffer in each update of the agent."""
LARGEST = 3.0
"""Bound on a reward after its division by the running deviation."""


class NeighbourAgent:
    """One client's agent in one round, ADPFedGNN Sec. 3.2.

    It computes the gradients of ``network``; the caller's optimizer applies them.
    ``memory`` is the result of :meth:`memory` in the client's last round, empty before
    the first. ``draws`` and ``replay`` draw actions, and samples of the replay buffer.

    Attributes
    ----------
    rates, spreads : list of float
        Share of the candidates kept in each batch, and standard deviation of P(keep) over
        the candidates of each batch.

    Notes
    -----
    1. All steps of a batch have the same reward. A buffer of whole batches holds a few
       distinct rewards only, so by default it holds a random part of each batch.
    2. Rewards are differences of losses, some hundredths. Divided by their running
       standard deviation, and bounded by 3 in size, they have the scale of the
       Q-network's values. The buffer holds them undivided.
    """

    def __init__(
        self,
        network: QNetwork,
        method_config: ADPFedGNNSettings,
        graph: GraphInput,
        memory: Mapping[str, Tensor],
        *,
        draws: torch.Generator,
        replay: torch.Generator,
    ) -> None:
        self.network, self.method_config, self.graph = network, method_config, graph
        self.draws, self.replay = draws, replay
        self.frozen = copy.deepcopy(network)
        kept = dict(memory)
        self.history: list[float] = kept.pop("losses", torch.empty(0)).tolist()
        self.deviation = RunningDeviation(kept.pop("reward-sums", None))
        self.buffer = ReplayBuffer(method_config.buffer)
        self.buffer.load(kept)
        self.rates: list[float] = []
        self.spreads: list[float] = []
        self._losses: list[float] = []

    def choose(self, table: GraphInput, pairs: Candidates) -> Tensor:
        """Draw which candidates each branch keeps: (2, m), bool."""
        chance = keep_probabilities(self.network, table, pairs)
        draw = torch.rand(chance.shape, generator=self.draws).to(chance.device)
        kept = draw < chance
        if self.method_config.selection == "random-drop":
            kept = shuffled(kept, self.draws)
        if chance.numel():  # none if all nodes of the batch are isolated
            self.rates.append(float(kept.float().mean()))
            self.spreads.append(float(chance.std(correction=0)))
        return kept

    def learn(self, block: Block, kept: Tensor, task: float) -> None:
        """Compute the reward, store the steps, and compute a gradient.

        ``kept`` (2, m), bool, is the result of :meth:`choose`; ``task`` is the batch's
        L_task.
        """
        gain = reward(
            task,
            self.history,
            scale=REWARD_SCALE,
            is_literal=self.method_config.reward_sign == "literal",
        )
        if self.history:
            self.deviation.add(gain)
        self._remember(block, kept, gain)
        self._losses.append(task)
        if self.method_config.reward_scale == "batch":
            self._append_loss(task)
        self.network.zero_grad()
        if len(self.buffer):
            td_loss(
                self.network,
                self.frozen,
                self.graph,
                self._scaled(self.buffer.draw(REPLAY_BATCH, self.replay)),
                discount=self.method_config.gamma_rl,
            ).backward()  # type: ignore[no-untyped-call]

    def _scaled(self, steps: Steps) -> Steps:
        """Divide the rewards by their running deviation."""
        if self.method_config.reward_norm == "none":
            return steps
        scaled = steps.reward / self.deviation.value()
        return steps._replace(reward=scaled.clamp(-LARGEST, LARGEST))

    def distinct_rewards(self) -> int:
        """Count the different rewards in the replay buffer."""
        rewards = self.buffer.steps.reward[: len(self.buffer)]
        return len(set(rewards.tolist()))

    def _remember(self, block: Block, kept: Tensor, gain: float) -> None:
        """Store a step for pairs and branches, a random part of them if there are many."""
        target, neighbour, following = (
            torch.cat(columns)
            for columns in zip(
                *((*layer, next_candidates(layer)) for layer in block.layers),
                strict=True,
            )
        )
        nodes, size = block.nodes, len(target)
        ahead = torch.where(following < 0, -1, nodes[following.clamp(min=0)])
        steps = Steps(
            nodes[target].repeat(BRANCHES),
            nodes[neighbour].repeat(BRANCHES),
            ahead.repeat(BRANCHES),
            torch.arange(BRANCHES, device=nodes.device).repeat_interleave(size),
            kept.flatten().to(nodes.device),
            torch.full((BRANCHES * size,), gain, device=nodes.device),
        )
        limit = self.method_config.steps_per_batch
        if 0 < limit < BRANCHES * size:
            part = torch.randperm(BRANCHES * size, generator=self.replay)[:limit]
            steps = steps.take(part.to(target.device))
        self.buffer.push(Steps(*(column.cpu() for column in steps)), self.replay)

    def _append_loss(self, loss: float) -> None:
        """Append a loss to the history that rewards are computed from."""
        self.history = [*self.history, loss][-self.method_config.reward_window :]

    def memory(self) -> dict[str, Tensor]:
        """End the round; return the replay buffer and the loss history."""
        if self.method_config.reward_scale == "round" and self._losses:
            self._append_loss(sum(self._losses) / len(self._losses))
        losses = torch.tensor(self.history, dtype=torch.float64)
        sums = self.deviation.sums
        return {**self.buffer.tensors(), "losses": losses, "reward-sums": sums}
