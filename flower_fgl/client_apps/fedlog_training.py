"""One round of FedLoG's local training: local fitting and local generalisation.

Kim et al., "Subgraph Federated Learning for Local Generalization", ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

import torch
from torch import Tensor

from flower_fgl.algorithms.fedlog.losses import branch_loss, node_norm
from flower_fgl.algorithms.fedlog.network import (
    BRANCH_NAMES,
    FedLogBranchNet,
    self_loops,
)
from flower_fgl.algorithms.fedlog.prompts import apply_generators, prompt_pairs
from flower_fgl.algorithms.fedlog.synthetic import scale_nodes, update_scaling
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.core.errors import PayloadError
from flower_fgl.methods.fedlog import FedLogSettings

__all__ = ["LocalLearner"]

Client = AnyClient[FedLogSettings]


class LocalLearner:
    """One round of a client's training: FedLoG's local fitting and generalisation.

    ``nodes`` (C·s, d) are X^g, ``None`` before the server has made them. The client holds
    γ_k and the prompt generators; PayloadError if it never received any, but there are
    synthetic nodes.
    """

    def __init__(
        self, client: Client, network: FedLogBranchNet, nodes: Tensor | None
    ) -> None:
        self.client, self.network = client, network
        self.method_config = client.config.method_config
        self.data = client.data.training
        classes, device = network.num_classes, client.device
        kept = client.state.group("scaling").get("gamma", torch.zeros(classes))
        self.gamma = kept.to(device)
        self.nodes = None if nodes is None else nodes.to(device)
        self.labels = torch.arange(classes, device=device).repeat_interleave(
            self.method_config.nodes_per_class
        )
        self._sums = dict.fromkeys(("cls", "norm", "g"), torch.zeros((), device=device))
        self._steps = 0
        self.prompts: Mapping[str, Tensor] = {}
        if self.nodes is not None and self.method_config.pg:
            group = client.state.group("prompts")
            if not group:
                raise PayloadError(
                    "the download has synthetic nodes, but there are no prompt generators: "
                    "neither in it nor in the client's state"
                )
            self.prompts = {name: group[name].to(device) for name in group}

    def train(self, server_round: int) -> float:
        """Take ``local-epochs`` · max(1, ⌊n / batch-size⌋) steps; return the last loss.

        It is the mean of the last epoch.
        With ``check-every`` the network keeps the weights and learnable nodes best on the
        validation nodes; γ keeps its value after the last step.
        """

        def run(
            optimizer: torch.optim.Optimizer, generator: torch.Generator, number: int
        ) -> float:
            self.network.train()
            return [self.epoch(optimizer, generator) for _ in range(number)][-1]

        return self.client.train_by(run, self.network, server_round)

    def epoch(
        self, optimizer: torch.optim.Optimizer, generator: torch.Generator
    ) -> float:
        """Train one epoch on whole batches of the training nodes; return the mean loss."""
        number = len(self.data.index)
        size = min(self.client.config.batch_size or number, number)
        order = torch.randperm(number, generator=generator).to(self.data.index.device)
        whole = torch.split(order[: number - number % size], size)
        batches: list[Tensor | None] = [*whole]
        is_sequential = (
            self.nodes is not None and self.method_config.lg_mode == "sequential"
        )
        if is_sequential:  # None marks a step on the synthetic nodes alone
            batches += [None] * len(batches)
        total = torch.zeros((), device=self.client.device)
        self._sums = dict.fromkeys(self._sums, torch.zeros_like(total))
        self._steps = len(batches)
        for batch in batches:
            optimizer.zero_grad(set_to_none=True)
            prototypes = self.network.prototypes()
            loss, hits = torch.zeros((), device=self.client.device), None
            if batch is not None:
                loss = self.fitting_loss(batch, prototypes)
            if self.nodes is not None and (batch is None or not is_sequential):
                general, hits = self.general_loss(prototypes)
                loss = loss + general
                self._add(g=general)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if hits is not None and self.method_config.fs:
                self.gamma = update_scaling(
                    self.gamma,
                    hits,
                    step=self.method_config.gamma_step,
                    threshold=self.method_config.gamma_threshold,
                )
            total += loss.detach()
        return float(total) / len(batches)

    def fitting_loss(self, batch: Tensor, prototypes: Mapping[str, Tensor]) -> Tensor:
        """Return L_cls + β L_norm of a batch of training nodes (local fitting)."""
        graph, index = self.data.inputs, self.data.index[batch]
        h, around = self.embed_batch(index)
        head, tail = self.network.branch_log_probs(h, around, prototypes)
        alpha = self.network.head_weights(graph)[index]
        is_mixture = self.method_config.loss_mix == "mixture"
        labels = self.data.labels[batch]
        loss = branch_loss(head, tail, alpha, labels, is_mixture=is_mixture)
        nodes = [self.network.nodes[name] for name in BRANCH_NAMES]
        kind = cast(Literal["fro", "sum"], self.method_config.norm)
        norm = node_norm(nodes, kind=kind)
        self._add(cls=loss, norm=norm)
        return loss + self.method_config.beta * norm

    def _add(self, **terms: Tensor) -> None:
        """Add terms of a step's loss for :meth:`terms`."""
        for name, value in terms.items():
            self._sums[name] = self._sums[name] + value.detach()

    def terms(self) -> dict[str, float]:
        """Return L_cls, L_norm and L_g, means over the last epoch's steps, and mean γ."""
        found = {name: float(t) / max(1, self._steps) for name, t in self._sums.items()}
        return found | {"gamma": float(self.gamma.mean())}

    def embed_batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return h_v and n_v (b, E) of distinct training nodes, FedLoG Eqs. (1) and (7).

        A small batch is embedded from its computation graph instead of the whole graph.
        """
        reach = self.network.encoder.reach
        part = None if reach is None else self.data.field_of(reach + 1, index)
        if part is None or reach is None:
            graph = self.data.inputs
            h = self.network.embed(graph)
            return h[index], graph.propagate(h, "mean")[index]
        h = self.network.embed(part)  # the nodes, then their neighbours
        return h[: len(index)], part.level(reach).propagate(h, "mean")

    def general_loss(self, prototypes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return L_g of the scaled synthetic nodes, and a mask of the correctly classified.

        Without prompt generators a synthetic node is its own neighbour.
        """
        assert self.nodes is not None
        x = scale_nodes(self.nodes, self.gamma)
        if self.method_config.pg:
            graph = prompt_pairs(x, apply_generators(self.prompts, x))
        else:
            graph = self_loops(x)
        h = self.network.embed(graph)
        around = graph.propagate(h, "mean")
        size = len(x)
        head, tail = self.network.branch_log_probs(h[:size], around[:size], prototypes)
        half = torch.full((size,), 0.5, device=x.device)
        loss = branch_loss(head, tail, half, self.labels)
        mixture = torch.logaddexp(head.detach(), tail.detach())
        return loss, mixture.argmax(1) == self.labels
