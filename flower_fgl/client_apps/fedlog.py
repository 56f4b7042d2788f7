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
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
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
    shared_weights,
    start_nodes,
)
from flower_fgl.algorithms.fedlog.prompts import (
    apply_generators,
    make_generator,
    prompt_pairs,
    train_prompt_generators,
)
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import refuse_non_finite
from flower_fgl.client_apps.stacked.cohort import Cohort, Uniform
from flower_fgl.client_apps.stacked.group import (
    Group,
    GroupClientApp,
    GroupFit,
    Rows,
    Steps,
    terms_of_clients,
)
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.seeds import SERVER, derive_seed, seeded, torch_generator
from flower_fgl.methods.fedlog import FedLogSettings
from flower_fgl.nn.stacked import Ragged
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
       clients, so that a process with several clients draws them once. By default an
       epoch has one, and the paper 20: on Cora with 10 clients ten draws find no
       difference, and the start takes a fraction of the time.
    """

    stacked = True
    down = FedLogDownload
    up = FedLogUpload
    group_action = PRETRAIN
    group_is_once = True

    def download_spec(self, client: Client) -> FedLogShapes:
        """Return the shapes of the client's network."""
        settings = client.config.method_config
        key = ("fedlog-shapes", settings, client.config.hidden_channels)
        return client.cached(key, lambda: FedLogShapes.of(self.build(client), settings))

    def act_group(self, group: Group, downloads: Sequence[FedLogDownload]) -> GroupFit:
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

    def why_alone(self, client: Client) -> str:
        """Return a reason for clients that first train their encoder alone."""
        is_first = bool(client.config.method_config.local_pretrain_epochs)
        return "local-pretrain-epochs differ by client" if is_first else ""

    def stack_key(self, client: Client, download: FedLogDownload) -> Hashable:
        """Clients of a stack take the same number of steps, and have X^g or none."""
        number = len(client.data.training.index)
        size = min(client.config.batch_size or number, number)
        return number // size, download.nodes is None

    def fit_group(self, group: Group, downloads: Sequence[FedLogDownload]) -> GroupFit:
        """Train for ``local-epochs``; store X_k^H, X_k^T and γ_k."""
        clients = cast(Sequence[Client], group.clients)
        network = self.assemble(group, downloads)
        first = clients[0]
        if first.config.method_config.local_pretrain_epochs and not group.stored()[0]:
            pretrain_encoder(first, network)
        for client, download in zip(clients, downloads, strict=True):
            if download.prompts:
                client.state.set_hashed_group("prompts", download.prompts)
                client.state.share_group("prompts", first.state)
        learner = LocalLearner(group, network, downloads[0].nodes)
        losses = learner.train()
        group.keep("scaling", {"gamma": learner.gamma.cpu()})
        states = group.split(network.state_dict())
        uploads = [
            self.upload(client, network, state)
            for client, state in zip(clients, states, strict=True)
        ]
        terms = terms_of_clients(learner.terms(), len(group))
        return GroupFit(network, uploads, losses, terms=terms)

    def assemble(
        self, group: Group, downloads: Sequence[FedLogDownload]
    ) -> FedLogBranchNet:
        """Join φ and θ of the downloads and the learnable nodes, at first initial ones."""
        if not all(download.weights for download in downloads):
            raise PayloadError("the download contains no weights")
        client, kept = cast(Client, group.clients[0]), group.stored()
        network, initial = self.build(client), dict[str, Tensor]()
        if not all(kept):
            start = initial_nodes(client, network)
            initial = {f"nodes.{name}": x for name, x in start.items()}
        pairs = zip(kept, downloads, strict=True)
        states = [{**(state or initial), **one.weights} for state, one in pairs]
        return group.load(network, states)

    def upload(
        self, client: Client, network: FedLogBranchNet, state: Mapping[str, Tensor]
    ) -> FedLogUpload:
        """Return the weights and the learnable nodes of ``synthetic-mode``'s branch."""
        method_config = client.config.method_config
        branch = "tail" if method_config.synthetic_mode.endswith("T") else "head"
        nodes = state[f"nodes.{branch}"].detach() if method_config.lg else None
        if nodes is not None and client.config.min_class_count > 1:
            counts = client.data.graph.class_counts("train")
            is_rare = (counts < client.config.min_class_count).repeat_interleave(
                method_config.nodes_per_class
            )
            start = initial_nodes(client, network)[branch].to(nodes)
            nodes = torch.where(is_rare.to(nodes.device)[:, None], start, nodes)
        return FedLogUpload(shared_weights(state), nodes)

    def build(self, client: Client) -> FedLogBranchNet:
        """Build the client's network; its learnable nodes are overwritten."""
        return client.build_own(build_network)

    def first_model(
        self, client: Client, download: FedLogDownload | None
    ) -> FedLogBranchNet | None:
        """Return a network with the initial learnable nodes and the received weights."""
        return None if download is None else self.assemble(Group(client), [download])


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


def initial_nodes(client: Client, network: FedLogBranchNet) -> dict[str, Tensor]:
    """Return the initial learnable nodes (C·s, d) of each branch, the same everywhere."""
    size, width = network.nodes["head"].shape[-2:]
    with seeded(derive_seed(client.config.seed, 0, SERVER, "nodes")):
        return start_nodes(size, width)


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


Embedded = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""A batch: h_v, n_v, α_v, labels, and weights in the mean."""


class LocalLearner:
    """One round of a client's training: FedLoG's local fitting and generalisation.

    ``nodes`` (C·s, d) are X^g, ``None`` before the server has made them. The client holds
    γ_k and the prompt generators; PayloadError if it never received any, but there are
    synthetic nodes. Clients of a stack have equal prompt generators; then losses and terms
    are (K,), γ is (K, C), and the nodes of a batch are padded to those of the client with
    the most.
    """

    def __init__(
        self, group: Group, network: FedLogBranchNet, nodes: Tensor | None
    ) -> None:
        self.group, self.network = group, network
        client: Client = group.clients[0]
        self.method_config = client.config.method_config
        classes, device = network.num_classes, group.device
        none = {"gamma": torch.zeros(classes)}
        kept = group.join([found or none for found in group.stored("scaling")])
        self.gamma = kept["gamma"]
        self.nodes = None if nodes is None else nodes.to(device)
        self.labels = torch.arange(classes, device=device).repeat_interleave(
            self.method_config.nodes_per_class
        )
        self._sums = dict.fromkeys(("cls", "norm", "g"), self.gamma.new_zeros(()))
        self._steps = 0
        self.prompts: Mapping[str, Tensor] = {}
        if self.nodes is not None and self.method_config.pg:
            prompts = group.stored("prompts")[0]
            if not prompts:
                raise PayloadError(
                    "the download has synthetic nodes, but there are no prompt generators: "
                    "neither in it nor in the client's state"
                )
            self.prompts = {name: prompts[name].to(device) for name in sorted(prompts)}
            for other in group.clients[1:]:
                if not other.state.share_group("prompts", client.state):
                    raise PayloadError("clients have different prompt generators")

    def train(self) -> list[float]:
        """Take ``local-epochs`` · max(1, ⌊n / batch-size⌋) steps; return the last losses.

        They are means of the last epoch.
        With ``check-every`` the network keeps the weights and learnable nodes best on the
        validation nodes; γ keeps its value after the last step.
        """
        group, network = self.group, self.network
        size = group.config.batch_size
        assert group.server_round is not None

        def run(
            optimizer: Steps, generators: Sequence[torch.Generator], number: int
        ) -> Tensor:
            network.train()
            found = self.gamma.new_full((len(group),), math.nan)
            for _ in range(number):
                batches = group.batches(size, generators, only_whole=True)
                found = self.epoch(optimizer, [*batches])
            return found

        if not isinstance(group, Cohort):
            loss = group.clients[0].train_by(
                lambda optimizer, draw, number: float(run(optimizer, [draw], number)),
                network,
                group.server_round,
            )
            return [loss]
        optimizer = group.open_optimizer("optimizer", network, group.config)
        draws = group.draws("training")
        nodes = [client.data.inputs[0].num_nodes for client in group.clients]
        self._of_graph = Uniform(draws, nodes, {})
        self._of_equal = Uniform(draws, [-1] * len(draws), {})
        network.encoder.uniform = self._of_equal
        found = run(optimizer, group.generators("batches"), group.config.local_epochs)
        optimizer.save()
        losses: list[float] = found.tolist()
        return losses

    def epoch(self, optimizer: Steps, batches: list[Rows | None]) -> Tensor:
        """Train one epoch on batches of the training nodes; return the mean loss."""
        is_sequential = (
            self.nodes is not None and self.method_config.lg_mode == "sequential"
        )
        if is_sequential:  # None marks a step on the synthetic nodes alone
            batches += [None] * len(batches)
        total = torch.zeros((), device=self.group.device)
        self._sums = dict.fromkeys(self._sums, torch.zeros_like(total))
        self._steps = len(batches)
        for batch in batches:
            for parameter in self.network.parameters():
                parameter.grad = None
            prototypes = self.network.prototypes()
            loss, hits = torch.zeros((), device=self.group.device), None
            if batch is not None:
                loss = self.fitting_loss(batch, prototypes)
            if self.nodes is not None and (batch is None or not is_sequential):
                general, hits = self.general_loss(prototypes)
                loss = loss + general
                self._add(g=general)
            loss.sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if hits is not None and self.method_config.fs:
                self.gamma = synthetic.update_scaling(
                    self.gamma,
                    hits,
                    step=self.method_config.gamma_step,
                    threshold=self.method_config.gamma_threshold,
                )
            total = total + loss.detach()
        return total / len(batches)

    def fitting_loss(self, batch: Rows, prototypes: Mapping[str, Tensor]) -> Tensor:
        """Return L_cls + β L_norm of a batch of training nodes (local fitting)."""
        h, around, alpha, labels, share = self.embed_batch(batch)
        head, tail = self.network.branch_log_probs(h, around, prototypes)
        is_mixture = self.method_config.loss_mix == "mixture"
        loss = branch_loss(
            head, tail, alpha, labels, is_mixture=is_mixture, share=share
        )
        nodes = [self.network.nodes[name] for name in BRANCH_NAMES]
        kind = cast(Literal["fro", "sum"], self.method_config.norm)
        norm = node_norm(nodes, kind=kind)
        self._add(cls=loss, norm=norm)
        return loss + self.method_config.beta * norm

    def _add(self, **terms: Tensor) -> None:
        """Add terms of a step's loss for :meth:`terms`."""
        for name, value in terms.items():
            self._sums[name] = self._sums[name] + value.detach()

    def terms(self) -> dict[str, Tensor]:
        """Return L_cls, L_norm and L_g, means over the last epoch's steps, and mean γ."""
        steps, gamma = max(1, self._steps), self.gamma.mean(-1)
        found = {name: (t / steps).expand_as(gamma) for name, t in self._sums.items()}
        return found | {"gamma": gamma}

    def embed_batch(self, batch: Rows) -> Embedded:
        """Return h_v and n_v (b, E) of training nodes, FedLoG Eqs. (1) and (7).

        Then their α (b,), labels (b,), and weights in the mean, ``None`` for 1/b. In a
        stack all are those of padded nodes (K, b).
        """
        graph, network = self.group.inputs, self.network
        if not self.group.is_stacked:
            alpha = network.head_weights(graph)[batch.index]
            return *self.embed_nodes(batch.index), alpha, batch.labels, None
        ragged = Ragged(batch.count.tolist(), self.group.device)
        share = torch.zeros(ragged.index.shape, device=self.group.device)
        share.view(-1)[ragged.slots] = batch.share
        network.encoder.uniform = self._of_graph
        h = network.embed(graph)
        network.encoder.uniform = self._of_equal
        around, alpha = graph.propagate(h, "mean"), network.head_weights(graph)
        index = batch.index[ragged.index]
        h, around, alpha = (t.flatten(0, 1)[index] for t in (h, around, alpha))
        return h, around, alpha, batch.labels[ragged.index], share

    def embed_nodes(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return h_v and n_v (b, E) of distinct training nodes of one client.

        Few nodes are embedded from their computation graph instead of the whole graph.
        """
        data, reach = self.group.clients[0].data.training, self.network.encoder.reach
        part = None if reach is None else data.field_of(reach + 1, index)
        if part is None or reach is None:
            h = self.network.embed(data.inputs)
            return h[index], data.inputs.propagate(h, "mean")[index]
        h = self.network.embed(part)  # the nodes, then their neighbours
        return h[: len(index)], part.level(reach).propagate(h, "mean")

    def generate(self, x: Tensor) -> Tensor:
        """Return the prompts of the scaled synthetic nodes x̂ (C·s, d).

        Those of a stack, (K, C·s, d), are computed once for clients with the same γ.
        """
        assert self.nodes is not None
        if not self.group.is_stacked:
            return apply_generators(self.prompts, x)
        known, place = torch.unique(self.gamma, return_inverse=True)  # place (K, C)
        if len(known) >= len(x):
            return apply_generators(self.prompts, x)
        classes = torch.arange(self.network.num_classes, device=x.device)
        gamma = known[:, None].expand(-1, len(classes))
        scaled = synthetic.scale_nodes(self.nodes, gamma)
        found = apply_generators(self.prompts, scaled)
        by_class = found.view(len(known), len(classes), -1, x.shape[2])
        return by_class[place, classes].flatten(1, 2)

    def general_loss(self, prototypes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return L_g of the scaled synthetic nodes, and a mask of the correctly classified.

        Without prompt generators a synthetic node is its own neighbour.
        """
        assert self.nodes is not None
        x = synthetic.scale_nodes(self.nodes, self.gamma)
        if self.method_config.pg:
            graph = prompt_pairs(x, self.generate(x))
        else:
            graph = self_loops(x)
        h = self.network.embed(graph)
        around = graph.propagate(h, "mean")
        size = x.shape[-2]
        head, tail = self.network.branch_log_probs(
            h[..., :size, :], around[..., :size, :], prototypes
        )
        labels = self.labels.expand(head.shape[:-1])
        half = torch.full(labels.shape, 0.5, device=x.device)
        loss = branch_loss(head, tail, half, labels)
        mixture = torch.logaddexp(head.detach(), tail.detach())
        return loss, mixture.argmax(-1) == labels
