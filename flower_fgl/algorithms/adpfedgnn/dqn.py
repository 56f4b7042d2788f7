"""Deep Q-network for neighbour selection, Mnih et al., Nature 2015."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.adpfedgnn.neighbor_sampling import Candidates
from flower_fgl.nn import GraphInput
from flower_fgl.nn.graph_union import select_rows

__all__ = [
    "QNetwork",
    "ReplayBuffer",
    "RunningDeviation",
    "Steps",
    "feature_table",
    "keep_probabilities",
    "next_candidates",
    "reward",
    "shuffled",
    "td_loss",
]

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
