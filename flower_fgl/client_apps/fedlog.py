"""Client half of FedLoG: two branches on the client's graph, and global synthetic nodes.

Kim et al., "Subgraph Federated Learning for Local Generalization", ICLR 2025.

=====================  ==================================================
symbol                 argument or attribute
=====================  ==================================================
φ_k                    ``FedLogBranchNet.encoder``
θ_k^H, θ_k^T           ``FedLogBranchNet.classifier["head"]``, ``["tail"]``
X_k^H, X_k^T           ``FedLogBranchNet.nodes["head"]``, ``["tail"]``
γ_k                    ``LocalLearner.gamma``
X^g, x̂                 ``download.nodes``, ``scale_nodes(...)``
β, λ, s                ``fedlog.beta``, ``tail-degree``, ``nodes-per-class``
=====================  ==================================================

===============================================  ===========================
algorithm, client                                function
===============================================  ===========================
prompt generator, Eqs. (11)-(13)                 ``train_prompt_generators``
pretraining of the published code                ``pretrain_encoder``
local fitting, L_cls and L_norm                  ``LocalLearner.fitting_loss``
local generalisation, Eq. (5) and L_g            ``LocalLearner.general_loss``
prediction, Eqs. (1)-(3)                         ``FedLogBranchNet.head``
===============================================  ===========================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor

from flower_fgl.algorithms.fedlog import synthetic
from flower_fgl.algorithms.fedlog.branches import branch_loss, node_norm
from flower_fgl.algorithms.fedlog.matching import PromptTask, RandomNets
from flower_fgl.algorithms.fedlog.network import (
    BRANCH_NAMES,
    FedLogBranchNet,
    LinearTop,
    self_loops,
    start_nodes,
)
from flower_fgl.algorithms.fedlog.prompts import (
    apply_generators,
    make_generator,
    prompt_pairs,
    train_prompt_generators,
)
from flower_fgl.client_apps.base import Fit, once
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.training import load_state, refuse_non_finite
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import SERVER, derive_seed, seeded, torch_generator
from flower_fgl.methods.fedlog import FedLogSettings
from flower_fgl.protocols.fedlog import (
    PRETRAIN,
    FedLogDownload,
    FedLogShapes,
    FedLogUpload,
    PromptUpload,
    build_network,
)

__all__ = ["FedLogClientApp", "LocalLearner"]

Client = AnyClient[FedLogSettings]

PATIENCE = 10
"""Epochs without improvement that end pretraining, as in the published code."""


class FedLogClientApp(GroupClientApp):
    """Train on real and synthetic nodes; keep the learnable nodes and γ.

    Notes
    -----
    1. Before its first upload a client uses the initial learnable nodes, the same on all
       clients.
    2. Before the first round the published code trains each client's encoder under a linear
       classifier and stops by test accuracy; the paper does not mention it. Here it is off
       by default. ``local-pretrain-epochs`` turns it on, in the first round in which a
       client trains. It keeps the epoch with the best validation accuracy, or the last
       epoch without validation nodes.
    3. If no training node of a client has a neighbour, the client uploads its initial
       prompt generator, which is weighted like the others.
    4. The batches of an epoch are parts of one permutation of the training nodes, so that
       no node is drawn twice. The remainder after the last whole batch is skipped.
    5. For a class with fewer training nodes than ``min-class-count`` a client uploads the
       initial learnable nodes, which the server knows, as if it had no node of the class.
    6. The noise of ``class-rate-noise`` comes from the operating system's entropy.
    7. A client with more than 2,048 training nodes trains its prompt generator on 256
       of them per epoch by default (``prompt-batch-size``); the paper uses all.
    8. Each round starts with a new Adam optimizer, as in the published code. Its first step
       moves every entry by the learning rate, whatever the gradient. A client with one
       batch per round takes only such steps. ``optimizer-state = "keep"`` avoids this.
    9. The random networks of Eq. (12) are drawn anew in each epoch, the same on all
       clients, so that a process with several clients draws them once.
    """

    down = FedLogDownload
    up = FedLogUpload
    group_action = PRETRAIN
    group_is_once = True

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        self.train(PRETRAIN)(partial(self.handle_fit, fit=self.pretrain, last=once))

    def download_spec(self, client: Client) -> FedLogShapes:
        """Return the shapes of the client's network."""
        settings = client.config.method_config
        key = ("fedlog-shapes", settings, client.config.hidden_channels)
        return client.cached(key, lambda: FedLogShapes.of(self.build(client), settings))

    def pretrain(
        self, client: Client, server_round: int, download: FedLogDownload
    ) -> Fit:
        """Train PG_k of one client, see :meth:`fit_group`."""
        return super().fit(client, server_round, download)

    def fit_group(self, group: Group, downloads: Sequence[FedLogDownload]) -> GroupFit:
        """Train PG_k by Eqs. (11)-(13), and upload it with the share of each class."""
        clients: Sequence[Client] = group.clients
        losses = [(0.0, 0.0) for _ in clients]
        prompts: list[dict[str, Tensor]] = [{} for _ in clients]
        is_on = clients[0].config.method_config.pg
        if is_on:
            losses, prompts = train_prompts(clients)
        uploads = [
            PromptUpload(disguised_rates(client), state)
            for client, state in zip(clients, prompts, strict=True)
        ]
        return GroupFit(
            None,
            uploads,
            [sum(pair) for pair in losses],
            terms=[
                {"features": feat, "gradients": grad} if is_on else {}
                for feat, grad in losses
            ],
        )

    def fit(self, client: Client, server_round: int, download: FedLogDownload) -> Fit:
        """Train for ``local-epochs``; store X_k^H, X_k^T and γ_k."""
        kept = cast(FedLogBranchNet | None, self.personal_model(client, None))
        network = kept or new_network(client)
        load_weights(network, download)
        if kept is None and client.config.method_config.local_pretrain_epochs:
            pretrain_encoder(client, network)
        if download.prompts:
            client.state.set_group("prompts", dict(download.prompts))
        learner = LocalLearner(client, network, download.nodes)
        loss = learner.train(server_round)
        client.state.set_group("scaling", {"gamma": learner.gamma.cpu()})
        return Fit(network, self.upload(client, network), loss, terms=learner.terms())

    def upload(self, client: Client, network: FedLogBranchNet) -> FedLogUpload:
        """Return the weights and the learnable nodes of ``synthetic-mode``'s branch."""
        method_config = client.config.method_config
        branch = "tail" if method_config.synthetic_mode.endswith("T") else "head"
        nodes = network.nodes[branch].detach() if method_config.lg else None
        if nodes is not None and client.config.min_class_count > 1:
            counts = client.data.graph.class_counts("train")
            is_rare = (counts < client.config.min_class_count).repeat_interleave(
                method_config.nodes_per_class
            )
            start = initial_nodes(client, network)[branch].to(nodes)
            nodes = torch.where(is_rare.to(nodes.device)[:, None], start, nodes)
        return FedLogUpload(network.shared_state(), nodes)

    def build(self, client: Client) -> FedLogBranchNet:
        """Build the client's network; its learnable nodes are overwritten."""
        return client.build_own(build_network)

    def first_model(
        self, client: Client, download: FedLogDownload | None
    ) -> FedLogBranchNet | None:
        """Return a network with the initial learnable nodes and the received weights."""
        if download is None:
            return None
        network = new_network(client)
        load_weights(network, download)
        return network


def train_prompts(
    clients: Sequence[Client],
) -> tuple[list[tuple[float, float]], list[dict[str, Tensor]]]:
    """Train PG_k of clients with the same features; return L_feat, L_grad and states."""
    first = clients[0]
    config, settings = first.config, first.config.method_config
    width = first.data.training.inputs.num_features
    tasks, generators = [], []
    for client in clients:
        data = client.data.training
        tasks.append(
            PromptTask(data.inputs, data.index, data.labels, client.data.num_classes)
        )
        with seeded(derive_seed(config.seed, 0, SERVER, "prompts")):
            generators.append(make_generator(width).to(client.device))

    def networks(epoch: int) -> RandomNets:
        purpose = f"random networks of epoch {epoch}"
        return RandomNets.draw(
            settings.prompt_networks,
            width,
            first.data.num_classes,
            first.device,
            generator=torch_generator(config.seed, 0, SERVER, purpose),
        )

    losses = train_prompt_generators(
        generators,
        tasks,
        epochs=settings.prompt_epochs,
        networks=networks,
        seeds=lambda place, epoch: clients[place].seed(0, f"prompts of epoch {epoch}"),
        lr=settings.prompt_lr,
        batch_sizes=[settings.prompt_batch(len(task.index)) for task in tasks],
        is_mean=settings.pg_norm == "mean",
    )
    states = [
        {name: tensor.detach().cpu() for name, tensor in one.state_dict().items()}
        for one in generators
    ]
    for state in states:
        refuse_non_finite(state, rate="fedlog.prompt-lr")
    return losses, states


def disguised_rates(client: Client) -> Tensor:
    """Return the share of each class among the training labels, as it is uploaded."""
    method_config = client.config.method_config
    labels = client.data.training.labels.cpu()
    counts = client.data.graph.class_counts("train")
    # the server knows the run's seed and could undo noise drawn from it
    return synthetic.disguise_rates(
        synthetic.class_rates(labels, client.data.num_classes),
        cast(synthetic.ClassNoise, method_config.class_rate_noise),
        scale=method_config.noise_scale,
        shared=counts >= client.config.min_class_count,
    )


def new_network(client: Client) -> FedLogBranchNet:
    """Build a network with the initial learnable nodes, the same on all clients."""
    network = client.build_own(build_network)
    nodes = initial_nodes(client, network)
    load_state(network, {f"nodes.{name}": x for name, x in nodes.items()})
    return network


def initial_nodes(client: Client, network: FedLogBranchNet) -> dict[str, Tensor]:
    """Return the initial learnable nodes (C·s, d) of each branch, the same everywhere."""
    size, width = network.nodes["head"].shape
    with seeded(derive_seed(client.config.seed, 0, SERVER, "nodes")):
        return start_nodes(size, width)


def load_weights(network: FedLogBranchNet, download: FedLogDownload) -> None:
    """Load φ and θ from the download; the learnable nodes do not change."""
    if not download.weights:
        raise PayloadError("the download contains no weights")
    load_state(network, download.weights)


def pretrain_encoder(client: Client, network: FedLogBranchNet) -> None:
    """Train φ, as received, under a linear classifier that is then discarded."""
    with seeded(client.seed(1, "classifier of pretraining"), client.device):
        width, classes = client.config.hidden_channels, network.num_classes
        model = LinearTop(network.encoder, width, classes).to(client.device)
    config = replace(
        client.config, check_every=1, patience=PATIENCE, optimizer_state="reset"
    )
    epochs: int = client.config.method_config.local_pretrain_epochs
    replace(client, config=config).train(model, 1, epochs=epochs, purpose="pretraining")


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
                self.gamma = synthetic.update_scaling(
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
        x = synthetic.scale_nodes(self.nodes, self.gamma)
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
