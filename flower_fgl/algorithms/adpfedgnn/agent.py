"""The agent that selects neighbours, Mnih et al., Nature 2015, and what it selects from.

Functions and networks serve one client, or K of a stack: nodes are then the flattened rows
of a :class:`~flower_fgl.nn.stacked.StackedInput`, and other shapes begin with K.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import GraphInput
from flower_fgl.nn.computation_graph import ClientDraws, NeighbourLists
from flower_fgl.nn.graph_union import select_rows
from flower_fgl.nn.stacked import Ragged, StackedInput, map_rows

__all__ = ["Block", "Candidates", "NeighbourAgent", "NeighbourLists", "QNetwork"]
__all__ += ["ReplayBuffer", "RunningDeviation", "Steps", "feature_table"]
__all__ += ["keep_probabilities", "next_candidates", "reward", "sample_block"]
__all__ += ["sample_neighbours", "shuffled", "td_loss"]
__all__ += ["AgentMemory", "project_rows"]


class Candidates(NamedTuple):
    """Pairs of a target node and a neighbour that may be kept, both (m,), int64.

    The pairs of a target are consecutive, and distinct unless the graph has duplicate
    edges.
    """

    target: Tensor
    neighbour: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """The nodes (n,) whose features determine a batch's predictions, ADPFedGNN Sec. 3.2.

    The batch's nodes come first, those of several clients by client. ``layers`` are the
    pairs of each layer, the first layer first.
    """

    nodes: Tensor
    layers: tuple[Candidates, ...]

    def places(self, num_nodes: int) -> tuple[Candidates, ...]:
        """Return the layers with positions in ``nodes``, of a graph with N nodes."""
        place = torch.empty(num_nodes, dtype=torch.int64, device=self.nodes.device)
        place[self.nodes] = torch.arange(len(self.nodes), device=place.device)
        return tuple(Candidates(place[v], place[u]) for v, u in self.layers)


def sample_neighbours(
    lists: NeighbourLists,
    nodes: Tensor,
    limit: int,
    generator: torch.Generator | ClientDraws,
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
    generator: torch.Generator | ClientDraws,
) -> Block:
    """Draw a block: neighbours of distinct nodes, their neighbours, and so on.

    Up to ``limit`` neighbours per node and layer, drawn independently in each layer. The
    ``batch`` of several clients is sorted by client.
    """
    is_known = torch.zeros(lists.num_nodes, dtype=torch.bool, device=batch.device)
    is_known[batch] = True
    nodes, layers = batch, []
    for _ in range(num_layers):
        target, neighbour = sample_neighbours(lists, nodes, limit, generator)
        layers.append(Candidates(nodes[target], neighbour))
        fresh = torch.unique(neighbour[~is_known[neighbour]])
        is_known[fresh] = True
        nodes = torch.cat([nodes, fresh])
        if isinstance(generator, ClientDraws):
            nodes = generator.in_order(nodes)
    return Block(nodes, tuple(layers[::-1]))


DROP, KEEP = 0, 1
BRANCHES = 2
"""b = 0: global, b = 1: local."""
EPSILON = 1e-10
"""Least variance of the rewards that is not taken as rounding."""


def feature_table(graph: GraphInput, nodes: Tensor) -> tuple[GraphInput, Tensor]:
    """Return a graph without edges that has the features of some nodes, and their rows.

    The rows have the shape of ``nodes``. A stack is its own table: reading all rows is
    faster there.
    """
    if isinstance(graph, StackedInput):
        return graph, nodes
    edges = torch.empty(2, 0, dtype=torch.int64, device=nodes.device)
    rows = torch.arange(nodes.numel(), device=nodes.device).view(nodes.shape)
    return GraphInput(select_rows(graph.x, nodes.flatten()), edges), rows


Projection = tuple[Tensor, Tensor, Tensor]
"""The first layer's maps of a table's nodes as targets and as candidates, and of b."""


class _InParts(torch.autograd.Function):
    """Divide the weights of ``[x_v ; x_u ; b]``, whose gradient has their layout.

    Autograd's own concatenates the gradients and adds them, before it copies the sum.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Projection:
        ctx.save_for_backward(weight)
        return _parts(weight)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Tensor:
        gradient = torch.empty_like(*ctx.saved_tensors)
        for part, found in zip(_parts(gradient), outputs, strict=True):
            part.copy_(found)
        return gradient


def _parts(weight: Tensor) -> Projection:
    size = weight.shape[-1] // 2
    of_target, of_neighbour, of_branch = torch.split(weight, [size, size, 1], dim=-1)
    return of_target, of_neighbour, of_branch


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

    def project(self, table: GraphInput) -> Projection:
        """Map features for the roles of target and candidate: two (n, width), and b.

        The first layer is linear in ``[x_v ; x_u ; b]``, so each node's part is
        computed once for all its pairs. The map of b is (1, width).
        """
        parts: Projection = _InParts.apply(self.first.weight)  # type: ignore[no-untyped-call]
        of_target, of_neighbour, of_branch = parts
        target = table.linear(None, of_target, self.first.bias)
        return target, table.linear(None, of_neighbour), of_branch.mT

    def forward(
        self, target: Tensor, neighbour: Tensor, of_branch: Tensor, branch: Tensor
    ) -> Tensor:
        """Return Q(s, ·), the values of dropping and of keeping each of m pairs: (m, 2).

        ``target`` and ``neighbour`` (m, width) are rows of the first two results of
        :meth:`project`, ``of_branch`` is the third, and ``branch`` (m, 1) is b.
        """
        hidden = torch.addcmul(target + neighbour, branch, of_branch)
        return map_rows(self.rest, hidden)

    @torch.no_grad()
    def preference(self, hidden: Tensor) -> Tensor:
        """Return Q(s, keep) − Q(s, drop) of outputs (m, width) of the first layer: (m,)."""
        _, middle, _, last = cast(Sequence[nn.Linear], self.rest)
        h = map_rows(middle, hidden.relu()).relu_()
        weight = last.weight[..., KEEP, :] - last.weight[..., DROP, :]
        bias = last.bias[..., KEEP] - last.bias[..., DROP]
        return (h @ weight[..., None]).squeeze(-1) + bias[..., None]


@torch.no_grad()
def keep_probabilities(
    agent: QNetwork,
    table: GraphInput,
    pairs: Candidates,
    counts: Sequence[int] | None = None,
    known: Projection | None = None,
) -> Tensor:
    """Return P(keep | s) of each candidate in each branch, (2, m), ADPFedGNN Eq. (2).

    ``table`` has the features of the nodes that ``pairs`` index. Pairs of a stack are
    sorted by client, ``counts`` of each. ``known`` are those of :func:`project_rows`, if
    they are known.
    """
    ragged = None
    if counts is not None:
        ragged = Ragged(counts, table.device)
        pairs = Candidates(*(column[ragged.index] for column in pairs))
    of_target, of_neighbour, of_branch = known or project_rows(agent, table)
    hidden = rows_at(of_target, pairs.target).add_(
        rows_at(of_neighbour, pairs.neighbour)
    )
    chances = []
    for b in range(BRANCHES):
        if b:
            hidden += of_branch
        chances.append(agent.preference(hidden).sigmoid())  # 2-way softmax
    found = torch.stack(chances)
    return found if ragged is None else ragged.flat(found)


def project_rows(agent: QNetwork, table: GraphInput) -> Projection:
    """Return the results of :meth:`QNetwork.project` with a row per node."""
    of_target, of_neighbour, of_branch = agent.project(table)
    return of_target.flatten(0, -2), of_neighbour.flatten(0, -2), of_branch


def rows_at(matrix: Tensor, index: Tensor) -> Tensor:
    """Return rows of a matrix (n, p) in the shape of their numbers ``index``: (..., p)."""
    # index_select and its derivative take half the time of matrix[index]
    rows = matrix.index_select(0, index.flatten())
    return rows.view(*index.shape, matrix.shape[1])


def shuffled(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Shuffle each row: the number of kept entries stays, their choice is random."""
    order = torch.rand(rows.shape, generator=generator).argsort(dim=1)
    return rows.gather(1, order.to(rows.device))


def reward(loss: float, history: Sequence[float], *, is_literal: bool = False) -> float:
    """Reward a batch whose loss is below the mean of earlier losses, ADPFedGNN Eq. (3).

    ``loss`` is L_task of the batch, ``history`` the earlier losses (0 without any); λ_rl
    is 1. The reward is in [-1, 1].

    Notes
    -----
    1. The printed formula rewards a *higher* loss. The default has the opposite sign;
       ``is_literal`` uses the printed one.
    """
    if not history:
        return 0.0
    gain = sum(history) / len(history) - loss
    return max(-1.0, min(1.0, -gain if is_literal else gain))


class RunningDeviation:
    """Standard deviation of a sequence, with exponentially falling weights.

    ``sums`` are those of the weights, the weighted values and their squares.
    """

    MEMORY = 0.99
    """Factor by which a value's weight falls with each later value."""

    def __init__(self, sums: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self.sums = sums

    def add(self, value: float) -> None:
        """Append a value."""
        new = (1.0, value, value * value)
        self.sums = [
            self.MEMORY * before + added
            for before, added in zip(self.sums, new, strict=True)
        ]

    def value(self) -> float:
        """Return the deviation; 1 while the values do not differ."""
        total, first, second = self.sums
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
    """Steps (s, a, r, s') of the agent.

    ``numbers`` (5, m), int32, are v, u and u' of s' (−1 where the episode ends), which are
    nodes of the client's graph, b and a. ``reward`` (m,) is r.
    """

    numbers: Tensor
    reward: Tensor

    def take(self, index: Tensor) -> Self:
        """Return the steps at the given indices."""
        return type(self)(*(column.index_select(-1, index) for column in self))


class ReplayBuffer:
    """Ring buffer of the agent's last steps: node numbers and rewards, no features."""

    def __init__(self, capacity: int) -> None:
        numbers = torch.zeros(5, capacity, dtype=torch.int32)
        self.steps = Steps(numbers, torch.zeros(capacity))
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
        until_end = min(count, capacity - start)
        for ring, new in zip(self.steps, steps, strict=True):
            ring[..., start : start + until_end] = new[..., :until_end]
            ring[..., : count - until_end] = new[..., until_end:]
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
        if not tensors:
            return
        self.cursor, reward = tensors["cursor"], tensors["reward"]
        if "numbers" not in tensors:  # of a run begun by an earlier version
            names = ("target", "neighbour", "following", "branch", "action")
            tensors["numbers"] = torch.stack([tensors[name] for name in names])
        self.steps = Steps(tensors["numbers"], reward)


def td_loss(
    agent: QNetwork,
    frozen: QNetwork,
    graph: GraphInput,
    steps: Steps,
    *,
    discount: float,
    of_agent: Projection | None = None,
    of_frozen: Projection | None = None,
) -> Tensor:
    """Return the Huber loss of ``r + γ (1 − done) max_a' Q⁻(s', a') − Q(s, a)``.

    Q is ``agent``, Q⁻ ``frozen``, its copy from the beginning of the round, and γ
    ``discount``. ``steps`` are a batch of m steps, which index the nodes of the client's
    ``graph``; of a stack (5, K, m) and (K, m), which gives losses (K,). ``of_agent`` and
    ``of_frozen`` are the :func:`project_rows` of the two networks, if they are known.
    """
    numbers, rewards = (column.to(graph.device) for column in steps)
    nodes, (branches, action) = numbers[:3].long(), numbers[3:]
    branch, is_done = branches[..., None].to(graph.x.dtype), nodes[2] < 0
    table, (target, neighbour, following) = feature_table(graph, nodes.clamp(min=0))
    of_target, of_neighbour, of_branch = of_agent or project_rows(agent, table)
    mapped = rows_at(of_target, target), rows_at(of_neighbour, neighbour)
    values = agent(*mapped, of_branch, branch)
    chosen = values.gather(-1, action[..., None].long()).squeeze(-1)
    with torch.no_grad():
        of_target, of_neighbour, of_branch = of_frozen or project_rows(frozen, table)
        mapped = rows_at(of_target, target), rows_at(of_neighbour, following)
        ahead = frozen(*mapped, of_branch, branch).amax(dim=-1)
        goal = rewards + discount * ahead.masked_fill(is_done, 0.0)
    return F.smooth_l1_loss(chosen, goal, reduction="none").mean(dim=-1)


REPLAY_BATCH = 128
"""Steps from the replay buffer in each update of the agent."""
LARGEST = 3.0
"""Bound on a reward after its division by the running deviation."""


class AgentMemory:
    """What one client's agent remembers of a round and of earlier ones.

    ``kept`` is the result of :meth:`tensors` in the client's last round, empty before the
    first; ``replay`` draws what the buffer stores and returns.

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
        method_config: ADPFedGNNSettings,
        kept: Mapping[str, Tensor],
        replay: torch.Generator,
    ) -> None:
        self.method_config, self.replay = method_config, replay
        kept = dict(kept)
        self.history: list[float] = kept.pop("losses", torch.empty(0)).tolist()
        sums = kept.pop("reward-sums", torch.zeros(3)).tolist()
        self.deviation = RunningDeviation(sums)
        self.buffer = ReplayBuffer(method_config.buffer)
        self.buffer.load(kept)
        self.rates: list[float] = []
        self.spreads: list[float] = []
        self._losses: list[float] = []

    def reward(self, task: float) -> float:
        """Return the reward of a batch by its L_task, and note this loss."""
        is_literal = self.method_config.reward_sign == "literal"
        gain = reward(task, self.history, is_literal=is_literal)
        if self.history:
            self.deviation.add(gain)
        self._losses.append(task)
        if self.method_config.reward_scale == "batch":
            self._append_loss(task)
        return gain

    def store(self, nodes: Tensor, kept: Tensor, gain: float) -> None:
        """Store a step for pairs and branches, a random part if there are many.

        All tensors are on the CPU; ``nodes`` (3, m) are targets, neighbours and the
        result of :func:`next_candidates`, ``kept`` (2, m) that of
        :meth:`NeighbourAgent.choose`.
        """
        size = nodes.shape[1]
        part = torch.arange(BRANCHES * size)
        limit = self.method_config.steps_per_batch
        if 0 < limit < len(part):
            part = torch.randperm(len(part), generator=self.replay)[:limit]
        branch = part // max(size, 1)
        chosen = nodes.index_select(1, part - size * branch)
        action = kept.flatten().index_select(0, part).long()
        numbers = torch.cat([chosen, torch.stack([branch, action])])
        self.buffer.push(Steps(numbers, torch.full((len(part),), gain)), self.replay)

    def distinct_rewards(self) -> int:
        """Count the different rewards in the replay buffer."""
        return len(torch.unique(self.buffer.steps.reward[: len(self.buffer)]))

    def _append_loss(self, loss: float) -> None:
        """Append a loss to the history that rewards are computed from."""
        self.history = [*self.history, loss][-self.method_config.reward_window :]

    def tensors(self) -> dict[str, Tensor]:
        """End the round; return the replay buffer and the loss history."""
        if self.method_config.reward_scale == "round" and self._losses:
            self._append_loss(sum(self._losses) / len(self._losses))
        losses = torch.tensor(self.history, dtype=torch.float64)
        sums = torch.tensor(self.deviation.sums, dtype=torch.float64)
        return {**self.buffer.tensors(), "losses": losses, "reward-sums": sums}


class NeighbourAgent:
    """The agents of one client, or of K as a stack, in one round, ADPFedGNN Sec. 3.2.

    It computes the gradients of ``network``; the caller's optimizer applies them.
    ``memories`` are those of the clients, whose actions the generators ``draws`` draw, and
    ``graph`` their training graphs.
    """

    def __init__(
        self,
        network: QNetwork,
        graph: GraphInput,
        memories: Sequence[AgentMemory],
        draws: Sequence[torch.Generator],
    ) -> None:
        self.network, self.graph, self.memories = network, graph, memories
        self.draws = draws
        self.frozen = copy.deepcopy(network)
        self._rows = graph.num_rows if isinstance(graph, StackedInput) else 0
        # a stack has one table, so that both networks map it once a round, or once a step
        self._of_frozen: Projection | None = None
        self._of_network: Projection | None = None
        if self._rows:
            with torch.no_grad():
                self._of_frozen = project_rows(self.frozen, graph)

    def choose(
        self, table: GraphInput, pairs: Candidates, counts: Sequence[int]
    ) -> Tensor:
        """Draw which candidates each branch keeps: (2, m), bool.

        The pairs are rows of ``table``, ``counts`` of each client, sorted by client.
        """
        stacked = None
        if self._rows:
            stacked, self._of_network = counts, project_rows(self.network, table)
        chance = keep_probabilities(
            self.network, table, pairs, stacked, self._of_network
        )
        draws = [
            torch.rand(BRANCHES, count, generator=generator)
            for count, generator in zip(counts, self.draws, strict=True)
        ]
        kept = torch.cat(draws, dim=1).to(chance.device) < chance
        if self.memories[0].method_config.selection == "random-drop":
            parts = torch.split(kept, list(counts), dim=1)
            kept = torch.cat(list(map(shuffled, parts, self.draws)), dim=1)
        self._note(chance, kept, counts)
        return kept

    def _note(self, chance: Tensor, kept: Tensor, counts: Sequence[int]) -> None:
        """Note the statistics of a batch in the clients' memories."""
        sizes = torch.tensor(counts, device=chance.device)
        client = torch.repeat_interleave(sizes)

        def means(values: Tensor) -> Tensor:
            sums = values.new_zeros(len(sizes)).index_add(0, client, values.sum(0))
            return sums / (BRANCHES * sizes)

        share = means(kept.double())
        around = chance.double() - means(chance.double())[client]
        spread = means(around.square()).sqrt()
        rows = zip(self.memories, counts, share.tolist(), spread.tolist(), strict=True)
        for memory, count, rate, deviation in rows:
            if count:  # 0 if all nodes of the batch are isolated
                memory.rates.append(rate)
                memory.spreads.append(deviation)

    def learn(
        self,
        pairs: Candidates,
        following: Tensor,
        counts: Sequence[int],
        kept: Tensor,
        tasks: Sequence[float],
    ) -> None:
        """Compute the rewards, store the steps, and compute a gradient.

        ``pairs`` and ``following`` (m,), see :func:`next_candidates`, are nodes of the
        graph; ``counts`` and ``kept`` (2, m) are those of :meth:`choose`, and ``tasks``
        L_task of each client's batch.
        """
        nodes = torch.stack([*pairs, following]).cpu()
        if self._rows:
            first = self._rows * torch.repeat_interleave(torch.tensor(counts))
            nodes = torch.where(nodes < 0, nodes, nodes - first)
        parts = torch.split(nodes, list(counts), dim=1)
        choices = torch.split(kept.cpu(), list(counts), dim=1)
        for memory, part, mine, task in zip(
            self.memories, parts, choices, tasks, strict=True
        ):
            memory.store(part, mine, memory.reward(task))
        self.network.zero_grad()
        if all(len(memory.buffer) for memory in self.memories):
            loss = td_loss(
                self.network,
                self.frozen,
                self.graph,
                self._drawn(),
                discount=self.memories[0].method_config.gamma_rl,
                of_agent=self._of_network,
                of_frozen=self._of_frozen,
            )
            loss.sum().backward()  # type: ignore[no-untyped-call]

    def _drawn(self) -> Steps:
        """Draw steps of all clients as nodes of the graph, see :func:`td_loss`.

        Their rewards are divided by the client's running deviation.
        """
        drawn = [
            memory.buffer.draw(REPLAY_BATCH, memory.replay) for memory in self.memories
        ]
        numbers = torch.stack([steps.numbers for steps in drawn], dim=1)
        rewards = torch.stack([steps.reward for steps in drawn])
        if self.memories[0].method_config.reward_norm != "none":
            units = [memory.deviation.value() for memory in self.memories]
            rewards = rewards / torch.tensor(units)[:, None]
            rewards.clamp_(-LARGEST, LARGEST)
        if not self._rows:
            return Steps(numbers[:, 0], rewards[0])
        first = self._rows * torch.arange(len(drawn), dtype=torch.int32)[:, None]
        numbers[:3] += (numbers[:3] >= 0) * first
        return Steps(numbers, rewards)
