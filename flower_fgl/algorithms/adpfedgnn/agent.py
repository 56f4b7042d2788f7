"""Agent that selects neighbours and learns from the rewards."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from flower_fgl.algorithms.adpfedgnn.dqn import (
    BRANCHES,
    QNetwork,
    ReplayBuffer,
    RunningDeviation,
    Steps,
    keep_probabilities,
    next_candidates,
    reward,
    shuffled,
    td_loss,
)
from flower_fgl.algorithms.adpfedgnn.neighbor_sampling import Block, Candidates
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import GraphInput

__all__ = ["NeighbourAgent"]

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
