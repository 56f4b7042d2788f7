"""Client half of ADPFedGNN: two masked branches over neighbours chosen by an agent.

Guan et al., "ADPFedGNN: Adaptive Decoupling Personalized Federated Graph Neural
Network", IJCAI 2025.

===============================  ==================================================
symbol                           argument or attribute
===============================  ==================================================
θ_i                              ``TwoBranchNet.backbone``
M^g_i, M^l_i                     ``TwoBranchNet.global_mask``, ``.local_mask``
θ_μ, θ_σ                         ``networks["estimator"]``
θ_q                              ``networks["agent"]``
N(v, b)                          ``kept[b]`` of the candidates of a ``Block``
D                                ``ReplayBuffer``
R                                ``NeighbourAgent.history``
Δ                                download minus ``state.group("received")``
===============================  ==================================================

===============================================  ===========================
Algorithm 1, client                              function
===============================================  ===========================
Eq. (15)                                         ``personalise``
sample a two-layer block                         ``sample_block``
actions by Eq. (2)                               ``NeighbourAgent.choose``
train by Eq. (13)                                ``LocalTraining.descend``
reward by Eq. (3), learn from the buffer         ``NeighbourAgent.learn``
new masks                                        ``local_mask``, ``global_mask``
===============================================  ===========================
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.adpfedgnn import network
from flower_fgl.algorithms.adpfedgnn.agent import (
    BRANCHES,
    Block,
    Candidates,
    NeighbourAgent,
    NeighbourLists,
    QNetwork,
    feature_table,
    sample_block,
)
from flower_fgl.algorithms.adpfedgnn.masks import (
    global_mask,
    local_mask,
    per_tensor,
    personalise,
)
from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.training import (
    load_state,
    make_optimizer,
    train_and_check,
)
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import Backbone, GraphInput, state_shapes
from flower_fgl.nn.state import state_to_vector, vector_to_state
from flower_fgl.protocols.adpfedgnn import MaskedWeights, SharedWeights, Sizes

__all__ = ["ADPFedGNNClientApp", "LocalTraining"]

log = logging.getLogger(__name__)

Client = AnyClient[ADPFedGNNSettings]


class ADPFedGNNClientApp(FglClientApp):
    """Train both branches, upload the weights under the global mask, keep the rest.

    Notes
    -----
    1. Masks are all ones until a client has received two global models: the paper does not
       describe rounds without a global direction Δ. A client that has not trained yet
       starts from the global weights; a local mask of ones would discard them.
    2. Mask scores use gradients with respect to the effective weights θ ⊙ M. With respect
       to θ, a masked-out weight would have no gradient and would stay masked out.
    3. The paper does not say whether the two masks may overlap. By default the local mask
       excludes the weights of the global mask (``adpfedgnn.overlap``). The shares of
       weights in both and in no mask are logged.
    4. The paper does not say which neighbours a prediction uses. Training draws actions by
       Eq. (2), so a prediction weights each neighbour by its probability. Taking the better
       action alone would drop whole neighbourhoods because of differences that are noise.
    """

    down = SharedWeights
    up = MaskedWeights

    def download_spec(self, client: Client) -> Sizes:
        """Return the shapes of the weights of backbone, agent and estimator."""

        def sizes() -> Sizes:
            backbone = backbone_of(client)
            features, width = client.data.graph.num_features, backbone.hidden_channels
            networks = network.build_networks(client.config, features, width)
            return Sizes(state_shapes(backbone), state_shapes(networks))

        return client.cached(("adpfedgnn", "sizes"), sizes)

    def fit(self, client: Client, server_round: int, download: SharedWeights) -> Fit:
        """Apply Eq. (15), train by Eq. (13), update the masks, return shared weights."""
        net, networks = open_networks(client, download)
        training = LocalTraining(client, server_round, net, networks)
        loss = training.train()
        with training.timed("masks"):
            self.refresh_masks(client, net, download, training)
        training.keep()
        upload = MaskedWeights(
            net.weights().cpu() * net.global_mask.cpu(),
            net.global_mask.cpu(),
            {name: t.detach().cpu() for name, t in networks.state_dict().items()},
            int(client.weight),
        )
        return Fit(net, upload, loss, training.seconds, training.numbers())

    def refresh_masks(
        self,
        client: Client,
        net: network.TwoBranchNet,
        download: SharedWeights,
        training: LocalTraining,
    ) -> None:
        """Compute both masks from the gradients of the round and Δ."""
        method_config = client.config.method_config
        if not method_config.decouple:
            return
        received = state_to_vector(download.weights)
        before = client.state.group("received")
        client.state.set_group("received", {"weights": received})
        if not before:
            return
        of_global, of_local = training.gradients
        direction = (received - before["weights"]).to(client.device)
        net.global_mask = per_tensor(
            partial(global_mask, share=method_config.q, score=method_config.mask_score),
            net.shapes,
            of_global,
            direction,
        )
        taken = [net.global_mask] if method_config.overlap == "excluded" else []
        net.local_mask = per_tensor(
            partial(local_mask, share=method_config.q), net.shapes, of_local, *taken
        )

    def personal_model(
        self, client: Client, download: SharedWeights | None
    ) -> Backbone | None:
        """Return the model trained last, combined with the download by Eq. (15)."""
        if download is None and not client.state.group("model"):
            return None
        return open_networks(client, download)[0]

    def refreshed_model(
        self, client: Client, server_round: int, download: SharedWeights
    ) -> Backbone | None:
        """Apply Eq. (15) with the newest global model, without training."""
        return self.personal_model(client, download)


def backbone_of(client: Client) -> Backbone:
    """Build the client's backbone with the initial weights of the run."""
    graph = client.data.graph
    return network.build_backbone(
        client.config,
        client.model_name,
        num_features=graph.num_features,
        num_classes=graph.num_classes,
    )


def open_networks(
    client: Client, download: SharedWeights | None
) -> tuple[network.TwoBranchNet, nn.ModuleDict]:
    """Return the client's network, and its agent and estimator, updated by a download."""
    method_config = client.config.method_config
    backbone = backbone_of(client)
    features, width = client.data.graph.num_features, backbone.hidden_channels
    networks = network.build_networks(client.config, features, width).to(client.device)
    agent = cast(QNetwork, networks["agent"]) if method_config.has_agent else None
    seed = client.seed(0, "evaluation")
    net = network.TwoBranchNet(backbone, agent, method_config, seed=seed).to(
        client.device
    )
    saved = client.state.group("model")
    load_state(net, saved)
    if download is not None:
        load_state(networks, download.networks)
        weights = state_to_vector(download.weights).to(client.device)
        # without own weights or decoupling, the download replaces all weights
        if saved and method_config.decouple:
            weights = personalise(net.weights(), weights, net.local_mask)
        net.load_weights(weights)
    return net, networks


class LocalTraining:
    """Training of one client in one round, ADPFedGNN Algorithm 1.

    The client's state holds optimizer moments, the replay buffer and former losses.
    ``networks`` are ``agent`` and ``estimator``, if the settings use them. ``gradients``
    (2, P) are sums of the gradients of Eq. (13), without its last term, with respect to
    the effective weights of the global and the local branch; ``seconds`` those of
    sampling, the agent, and forward and backward passes.
    """

    def __init__(
        self,
        client: Client,
        server_round: int,
        net: network.TwoBranchNet,
        networks: nn.ModuleDict,
    ) -> None:
        self.client, self.server_round = client, server_round
        self.net, self.networks = net, networks
        self.method_config = client.config.method_config
        # the decay is a step of its own, see descend_weights
        undecayed = replace(client.config, weight_decay=0.0)
        self.optimizer = make_optimizer(net.backbone, undecayed)
        self.learners: torch.optim.Optimizer | None = None
        if len(networks):
            self.learners = torch.optim.Adam(
                networks.parameters(), lr=self.method_config.network_lr, fused=True
            )
        for parts in self._optimizers():
            client.restore_moments(*parts)
        self._forget_unused()
        self.draws = self._generator("neighbours")
        self.order = self._generator("batches")
        self.agent: NeighbourAgent | None = None
        if net.agent is not None:
            self.agent = NeighbourAgent(
                net.agent,
                self.method_config,
                client.data.training.inputs,
                client.state.group("agent"),
                draws=self.draws,
                replay=self._generator("replay"),
            )
        self.gradients = torch.zeros(BRANCHES, len(net.weights()), device=client.device)
        self.seconds: dict[str, float] = defaultdict(float)
        self._bounds: list[float] = []

    def _generator(self, purpose: str) -> torch.Generator:
        return self.client.generator(self.server_round, purpose)

    def _optimizers(self) -> Iterator[tuple[str, nn.Module, torch.optim.Optimizer]]:
        yield "optimizer", self.net.backbone, self.optimizer
        if self.learners is not None:
            yield "network-optimizer", self.networks, self.learners

    @torch.no_grad()
    def _forget_unused(self) -> None:
        """Zero the moments of weights in no mask; without gradient these then rest."""
        used = self.net.global_mask | self.net.local_mask
        parts = vector_to_state(used, self.net.shapes)
        for name, weight in self.net.backbone.named_parameters():
            for value in self.optimizer.state.get(weight, {}).values():
                if isinstance(value, Tensor) and value.shape == weight.shape:
                    value.mul_(parts[name])

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to one part of the training."""
        clock = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - clock

    def train(self) -> float:
        """Train for ``local-epochs`` and return the mean L_task of the last epoch.

        With ``check-every`` the model keeps the weights best on the validation nodes.
        """
        client, config = self.client, self.client.config
        inputs = client.data.training.inputs
        self.lists = client.cached(
            ("neighbours",),
            lambda: NeighbourLists.of(inputs.edge_index, inputs.num_nodes),
        )
        with seeded(client.seed(self.server_round, "training"), client.device):
            if config.check_every:
                return train_and_check(
                    self.net,
                    self.run_epochs,
                    lambda: client.validate(self.net),
                    epochs=config.local_epochs,
                    check_every=config.check_every,
                    patience=config.patience,
                )
            return self.run_epochs(config.local_epochs)

    def run_epochs(self, number: int) -> float:
        """Train for a number of epochs on shuffled batches of the training nodes."""
        data = self.client.data.training
        size = len(data.index)
        batch_size = self.client.config.batch_size or size
        loss = float("nan")
        self.net.train()
        for _ in range(number):
            order = torch.randperm(size, generator=self.order).to(data.index.device)
            losses = [
                self.step(data.index[part], data.labels[part])
                for part in torch.split(order, batch_size)
            ]
            loss = sum(losses) / len(losses)
        return loss

    def step(self, index: Tensor, labels: Tensor) -> float:
        """Sample a block, choose neighbours, train, update the agent; return L_task."""
        inputs = self.client.data.training.inputs
        with self.timed("sampling"):
            block = sample_block(
                self.lists,
                index,
                limit=self.method_config.k,
                num_layers=self.depth,
                generator=self.draws,
            )
            table = feature_table(inputs, block.nodes)
            pairs = Candidates(*map(torch.cat, zip(*block.layers, strict=True)))
        with self.timed("agent"):
            if self.agent is not None:
                kept = self.agent.choose(table, pairs)
            else:
                kept = torch.ones(BRANCHES, len(pairs.target), dtype=torch.bool)
        with self.timed("forwards"):
            task = self.descend(table, block, kept.to(index.device), labels)
        with self.timed("agent"):
            if self.agent is not None:
                self.agent.learn(block, kept, task)
            if self.learners is not None:
                self.learners.step()
        return task

    @property
    def depth(self) -> int:
        """Number of layers of the backbone."""
        return len(self.net.backbone.encoder)  # type: ignore[arg-type]

    def descend(
        self, table: GraphInput, block: Block, kept: Tensor, labels: Tensor
    ) -> float:
        """Step on θ and compute the estimator's gradient, Eq. (13); return L_task."""
        leaves, features, logits = [], [], []
        sizes = [len(layer.target) for layer in block.layers]
        for branch in range(BRANCHES):
            chosen = torch.split(kept[branch], sizes)
            graphs = [
                table.with_edges(torch.stack([layer.neighbour, layer.target])[:, keep])
                for layer, keep in zip(block.layers, chosen, strict=True)
            ]
            effective = self.net.effective(branch)
            leaves.append([w.requires_grad_() for w in effective.values()])
            h, z = self.net.run_branch(effective, graphs, len(labels))
            features.append(h)
            logits.append(z)
        task = F.cross_entropy(self.net.fuse(logits), labels)
        loss, settings = task, self.method_config
        if settings.has_estimator:
            loss = task + settings.lambda_mi * self.mutual_information(*features)
        found = torch.autograd.grad(loss, leaves[0] + leaves[1], materialize_grads=True)
        names = list(self.net.shapes)
        parts = (found[: len(names)], found[len(names) :])
        named = [dict(zip(names, part, strict=True)) for part in parts]
        by_branch = torch.stack([state_to_vector(part) for part in named])
        self.gradients += by_branch
        masks = torch.stack([self.net.global_mask, self.net.local_mask])
        self.descend_weights((by_branch * masks).sum(dim=0))
        return task.item()

    def mutual_information(self, shared: Tensor, local: Tensor) -> Tensor:
        """Return Eq. (6); the gradient of Eq. (8) is left on the estimator only."""
        estimator = cast(network.MIEstimator, self.networks["estimator"])
        shared, local = F.normalize(shared, dim=1), F.normalize(local, dim=1)
        mean, log_variance = estimator(shared)
        bound = network.club_bound(
            mean, log_variance, local, norm=self.method_config.club_norm
        )
        self._bounds.append(bound.item())
        estimator.zero_grad()
        mean, log_variance = estimator(shared.detach())
        network.residual_loss(mean, log_variance, local.detach()).backward()  # type: ignore[no-untyped-call]
        return bound

    def descend_weights(self, gradient: Tensor) -> None:
        """Step on θ by the gradient of the losses and of ``λ_reg ‖θ‖²``, biases excepted.

        The setting ``weight-decay`` adds to ``2 λ_reg``.

        Notes
        -----
        1. A weight outside both masks has no gradient but that of the decay. Adam divides
           by the size of the gradient. With the decay inside the gradient, any λ_reg moves
           such weights by the whole learning rate and erases them in a few steps.
        2. A weight that leaves both masks would move on by its moments of former rounds.
           These are zero from the next round on, so it moves by the decay only.
        """
        parts = vector_to_state(gradient, self.net.shapes)
        decay = 2 * self.method_config.lambda_reg + self.client.config.weight_decay
        is_decoupled = self.method_config.reg_step == "decoupled"
        for name, weight in self.net.backbone.named_parameters():
            # fused optimizer steps need the memory layout of the weight
            weight.grad = torch.empty_like(weight).copy_(parts[name])
            if name.endswith("bias"):
                continue
            if is_decoupled:
                weight.detach().mul_(1 - self.client.config.lr * decay)
            else:
                weight.grad = weight.grad + decay * weight.detach()
        self.optimizer.step()

    def keep(self) -> None:
        """Store in the client's state what the next round needs, and log statistics."""
        state = self.client.state
        for parts in self._optimizers():
            self.client.keep_moments(*parts)
        if self.agent is not None:
            state.set_group("agent", self.agent.memory())
        numbers = self.numbers()
        state.values |= numbers
        log.info("Client %s: %s", self.client.partition_id, numbers)

    def numbers(self) -> dict[str, float]:
        """Return statistics of masks, mutual information and agent, for the log."""
        both, agent = (self.net.global_mask, self.net.local_mask), self.agent
        return {
            "kept": mean_of(agent.rates if agent else []),
            "keep-spread": mean_of(agent.spreads if agent else []),
            "distinct-rewards": float(agent.distinct_rewards() if agent else 0),
            "mutual-information": mean_of(self._bounds),
            "in-both-masks": share(both[0] & both[1]),
            "in-no-mask": share(~(both[0] | both[1])),
        }


def mean_of(values: list[float]) -> float:
    """Return the mean, 0 for an empty list."""
    return sum(values) / len(values) if values else 0.0


def share(mask: Tensor) -> float:
    """Return the share of entries of a mask that are 1, in [0, 1]."""
    return float(mask.float().mean())
