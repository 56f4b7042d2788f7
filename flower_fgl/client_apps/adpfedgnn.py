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
"""

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.adpfedgnn.agent import (
    BRANCHES,
    AgentMemory,
    Block,
    Candidates,
    NeighbourAgent,
    NeighbourLists,
    QNetwork,
    feature_table,
    next_candidates,
    sample_block,
)
from flower_fgl.algorithms.adpfedgnn.masks import (
    global_mask,
    local_mask,
    per_tensor,
    personalise,
)
from flower_fgl.algorithms.adpfedgnn.network import (
    MIEstimator,
    TwoBranchNet,
    build_backbone,
    build_networks,
    club_bound,
    residual_loss,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.state import part_of
from flower_fgl.client_apps.runtime.training import train_and_check
from flower_fgl.client_apps.stacked.cohort import Cohort
from flower_fgl.client_apps.stacked.group import (
    Group,
    GroupClientApp,
    GroupFit,
    GroupOptimizer,
    Rows,
    cross_entropy,
)
from flower_fgl.core.seeds import seeded
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import Backbone, GraphInput, state_shapes
from flower_fgl.nn.backbone import copy_network
from flower_fgl.nn.computation_graph import ClientDraws
from flower_fgl.nn.sparse import lay_out_for_sparse
from flower_fgl.nn.stacked import Ragged, StackedInput
from flower_fgl.nn.state import state_to_vector, vector_to_state
from flower_fgl.protocols.adpfedgnn import MaskedWeights, SharedWeights, Sizes

__all__ = ["ADPFedGNNClientApp", "LocalTraining"]

log = logging.getLogger(__name__)


class ADPFedGNNClientApp(GroupClientApp):
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

    stacked = True
    down = SharedWeights
    up = MaskedWeights

    def download_spec(self, client: Client) -> Sizes:
        """Return the shapes of the weights of backbone, agent and estimator."""

        def sizes() -> Sizes:
            backbone, networks = empty_networks(client)
            return Sizes(state_shapes(backbone), state_shapes(networks))

        return client.cached(("adpfedgnn", "sizes"), sizes)

    def why_alone(self, client: Client) -> str:
        """Return a reason for clients some of whose batches may have no neighbours."""

        def reason() -> str:
            data = client.data.training
            linked = torch.bincount(
                data.inputs.edge_index[1], minlength=data.inputs.num_nodes
            )
            alone = int((linked[data.index] == 0).sum())
            size = len(data.index)
            least = size % (client.config.batch_size or size) or size
            return "a batch of it may have no neighbours" if alone >= least else ""

        return client.cached(("adpfedgnn", "alone"), reason)

    def fit_group(self, group: Group, downloads: Sequence[SharedWeights]) -> GroupFit:
        """Apply Eq. (15), train by Eq. (13), update the masks, return shared weights."""
        net, networks = open_networks(group, downloads)
        training = LocalTraining(group, net, networks)
        losses = training.train()
        with training.timed("masks"):
            self.refresh_masks(group, net, downloads, training.gradients)
        terms = training.keep()
        weights, mask = net.weights(), net.global_mask
        shared = {"values": weights * mask.to(weights), "mask": mask}
        uploads = [
            MaskedWeights(
                mine["values"].cpu(),
                mine["mask"].cpu(),
                {name: t.detach().cpu() for name, t in own.items()},
                int(client.weight),
            )
            for client, mine, own in zip(
                group.clients,
                group.split(shared),
                group.split(networks.state_dict()),
                strict=True,
            )
        ]
        return GroupFit(net, uploads, losses, terms=terms, seconds=training.seconds)

    def refresh_masks(
        self,
        group: Group,
        net: TwoBranchNet,
        downloads: Sequence[SharedWeights],
        gradients: Sequence[Tensor],
    ) -> None:
        """Compute both masks of each client from the gradients of the round and Δ."""
        settings: ADPFedGNNSettings = group.config.method_config
        if not settings.decouple:
            return
        received = vectors(downloads)
        before = group.stored("received")
        for client, weights in zip(group.clients, received, strict=True):
            client.state.set_group("received", {"weights": weights}, is_copied=False)
        known = [place for place, found in enumerate(before) if found]
        if not known:
            return
        directions = torch.stack(
            [received[place] - before[place]["weights"] for place in known]
        )
        # of one client without K
        rows: Any = known if group.is_stacked else slice(None)
        of_global, of_local = (part[rows] for part in gradients)
        shared = per_tensor(
            partial(global_mask, share=settings.q, score=settings.mask_score),
            net.shapes,
            of_global,
            directions.view(of_global.shape).to(group.device),
        )
        taken = [shared] if settings.overlap == "excluded" else []
        own = per_tensor(
            partial(local_mask, share=settings.q), net.shapes, of_local, *taken
        )
        net.global_mask[rows], net.local_mask[rows] = shared, own

    def personal_model(
        self, client: Client, download: SharedWeights | None
    ) -> Backbone | None:
        """Return the model trained last, combined with the download by Eq. (15)."""
        if download is None and not client.state.group("model"):
            return None
        return open_networks(Group(client), [download])[0]

    def refreshed_model(
        self, client: Client, server_round: int, download: SharedWeights
    ) -> Backbone | None:
        """Apply Eq. (15) with the newest global model, without training."""
        return self.personal_model(client, download)

    def refreshed_group(
        self, group: Group, downloads: Sequence[SharedWeights]
    ) -> tuple[Backbone, None]:
        """Apply Eq. (15) with the newest global model to each client."""
        return open_networks(group, downloads)[0], None


def empty_networks(client: Client) -> tuple[Backbone, nn.ModuleDict]:
    """Build the client's backbone, agent and estimator in uninitialised memory."""
    config, features = client.config, client.data.graph.num_features
    backbone = build_backbone(
        config,
        client.model_name,
        num_features=features,
        num_outputs=client.data.graph.target.width,
        initialise=False,
    )
    with torch.device("meta"):
        networks = build_networks(config, features, backbone.hidden_channels)
    return backbone, copy_network(networks, is_empty=True)


def open_networks(
    group: Group, downloads: Sequence[SharedWeights | None]
) -> tuple[TwoBranchNet, nn.ModuleDict]:
    """Return the clients' network, and their agent and estimator, updated by a download."""
    (first, *_), settings = group.clients, group.config.method_config
    backbone, networks = empty_networks(first)
    first.settle(backbone)
    if first.data.graph.graph.x.layout == torch.sparse_csr:
        width = 2 * first.data.graph.num_features + 1  # of the agent
        lay_out_for_sparse(networks, width)
    saved = group.stored()
    received = [one for one in downloads if one is not None]
    own: list[Mapping[str, Tensor]]
    own = [part_of(state, "branch.backbone.") for state in saved]
    if received:
        # without own weights or decoupling, the download replaces all weights
        own = [
            mine if mine and settings.decouple else one.weights
            for mine, one in zip(own, received, strict=True)
        ]
        group.load(networks, [one.networks for one in received])
    elif settings.has_agent:
        agents = [part_of(state, "agent.") for state in saved]
        group.load(networks["agent"], agents)
    group.load(backbone, own)
    networks.to(group.device)
    agent = cast(QNetwork, networks["agent"]) if settings.has_agent else None
    seeds = [client.seed(0, "evaluation") for client in group.clients]
    net = TwoBranchNet(backbone, agent, settings, seeds=seeds).to(group.device)
    masks = dict(net.named_buffers())
    for mine, state in zip(group.split(masks), saved, strict=True):
        for name, mask in mine.items() if state else ():
            mask.copy_(state[name])
    if received and settings.decouple and any(saved):
        weights = torch.stack(vectors(received)).to(group.device)
        mixed = personalise(net.weights(), weights, net.local_mask)
        net.load_weights(mixed.view_as(net.local_mask))
    return net, networks


def vectors(downloads: Sequence[SharedWeights]) -> list[Tensor]:
    """Return the weights of each download, of a broadcast one tensor for all clients."""
    found = {id(one): one for one in downloads}
    flat = {place: state_to_vector(one.weights) for place, one in found.items()}
    return [flat[id(one)] for one in downloads]


class Batch(NamedTuple):
    """The pairs (m,) of all layers of a block, those of each client together.

    ``places`` are rows of ``table``, and ``pairs`` and ``following`` nodes of the graphs;
    ``layer`` counts from 0, ``counts`` are the pairs of each client. A stack has ``ragged``
    training nodes.
    """

    table: GraphInput
    places: Candidates
    pairs: Candidates
    following: Tensor
    layer: Tensor
    counts: list[int]
    ragged: Ragged | None


class LocalTraining:
    """Training of one client, or of K as a stack, in one round, ADPFedGNN Algorithm 1.

    The clients' states hold optimizer moments, replay buffers and former losses.
    ``networks`` are ``agent`` and ``estimator``, if the settings use them. ``seconds`` are
    those of sampling, the agent, and forward and backward passes.

    Notes
    -----
    1. One client computes the nodes of each batch's block only. A stack computes all rows
       of its graphs, with the same neighbours, actions and dropout.
    """

    def __init__(
        self, group: Group, net: TwoBranchNet, networks: nn.ModuleDict
    ) -> None:
        self.group, self.net, self.networks = group, net, networks
        self.inputs = group.inputs
        self.method_config: ADPFedGNNSettings = group.config.method_config
        # the decay is a step of its own, see descend_weights
        config = replace(group.config, weight_decay=0.0)
        self.optimizer = group.open_optimizer("optimizer", net.backbone, config)
        self.learners: GroupOptimizer | None = None
        if len(networks):
            rate = self.method_config.network_lr
            config = replace(config, optimizer="adam", lr=rate, clip_gradient=0.0)
            self.learners = group.open_optimizer("network-optimizer", networks, config)
        self._forget_unused()
        self.draws = group.generators("neighbours")
        self.order = group.generators("batches")
        self.sampling: torch.Generator | ClientDraws = self.draws[0]
        if isinstance(self.inputs, StackedInput):
            self.sampling = ClientDraws(self.draws, self.inputs.num_rows)
        self.agent: NeighbourAgent | None = None
        if net.agent is not None:
            replay = zip(group.clients, group.generators("replay"), strict=True)
            memories = [
                AgentMemory(self.method_config, client.state.group("agent"), generator)
                for client, generator in replay
            ]
            self.agent = NeighbourAgent(net.agent, self.inputs, memories, self.draws)
        self.dropout = cast(Cohort, group).draws("training") if net.is_stacked else []
        self.masks = net.masks()
        self.sums = [
            {name: torch.zeros_like(w) for name, w in net.backbone.state_dict().items()}
            for _ in self.masks
        ]
        self.seconds: dict[str, float] = defaultdict(float)
        self._bounds: list[Tensor] = []

    @torch.no_grad()
    def _forget_unused(self) -> None:
        """Zero the moments of weights in no mask; without gradient these then rest."""
        used = (self.net.global_mask | self.net.local_mask).float()
        parts = vector_to_state(used, self.net.shapes)
        for name, moments in self.optimizer.moments().items():
            for moment in moments:
                moment.mul_(parts[name])

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of a block to one part of the training."""
        clock = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - clock

    def train(self) -> list[float]:
        """Train for ``local-epochs``; return each client's mean L_task of the last epoch.

        With ``check-every`` the model keeps the weights best on the validation nodes.
        """
        group, inputs, config = self.group, self.inputs, self.group.config
        key = ("neighbours",)
        if key not in group.memo:
            group.memo[key] = NeighbourLists.of(inputs.edge_index, inputs.num_nodes)
        self.lists: NeighbourLists = group.memo[key]
        first = group.clients[0]
        with seeded(first.seed(group.server_round or 0, "training"), group.device):
            if not config.check_every:
                return self.run_epochs(config.local_epochs)
            loss = train_and_check(
                self.net,
                lambda number: self.run_epochs(number)[0],
                lambda: group.validate(self.net)[0],
                epochs=config.local_epochs,
                check_every=config.check_every,
                patience=config.patience,
            )
        return [loss]

    def run_epochs(self, number: int) -> list[float]:
        """Train for a number of epochs on shuffled batches of the training nodes."""
        group = self.group
        size = group.config.batch_size or int(group.rows.count.max())
        found = [math.nan] * len(group)
        self.net.train()
        for _ in range(number):
            losses = [self.step(rows) for rows in group.batches(size, self.order)]
            found = [mean_of(mine) for mine in zip(*losses, strict=True)]
        return found

    def step(self, rows: Rows) -> list[float]:
        """Sample a block, choose neighbours, train, update the agents; return L_task."""
        with self.timed("sampling"):
            block = sample_block(
                self.lists,
                rows.index,
                limit=self.method_config.k,
                num_layers=self.depth,
                generator=self.sampling,
            )
            batch = self.batch_of(block, rows)
        with self.timed("agent"):
            if self.agent is not None:
                kept = self.agent.choose(batch.table, batch.places, batch.counts)
            else:
                kept = torch.ones(BRANCHES, len(batch.layer), dtype=torch.bool)
        with self.timed("forwards"):
            task = self.descend(batch, kept.to(rows.index.device), rows)
        with self.timed("agent"):
            if self.agent is not None:
                self.agent.learn(batch.pairs, batch.following, batch.counts, kept, task)
            if self.learners is not None:
                self.learners.step()
        return task

    @property
    def depth(self) -> int:
        """Number of layers of the backbone."""
        return len(self.net.backbone.encoder)  # type: ignore[arg-type]

    def batch_of(self, block: Block, rows: Rows) -> Batch:
        """Return the table of features of a block, and its pairs, sorted by client."""
        inputs, device = self.inputs, rows.index.device
        sizes = torch.tensor([len(layer.target) for layer in block.layers])
        layer = torch.repeat_interleave(torch.arange(self.depth), sizes).to(device)
        pairs = Candidates(*map(torch.cat, zip(*block.layers, strict=True)))
        following = torch.cat([next_candidates(layer) for layer in block.layers])
        if not isinstance(self.sampling, ClientDraws):
            table, _ = feature_table(inputs, block.nodes)
            layers = block.places(inputs.num_nodes)
            places = Candidates(*map(torch.cat, zip(*layers, strict=True)))
            counts = [len(layer)]
            return Batch(table, places, pairs, following, layer, counts, None)
        draws = self.sampling
        order = torch.argsort(pairs.target // draws.size, stable=True)
        pairs = Candidates(pairs.target[order], pairs.neighbour[order])
        counts = draws.counts(pairs.target)
        nodes = torch.split(block.nodes % draws.size, draws.counts(block.nodes))
        fields = {place: [mine] * 2 * self.depth for place, mine in enumerate(nodes)}
        cast(Cohort, self.group).draw_for(self.net, self.dropout, fields)
        ragged = Ragged(rows.count.tolist(), device)
        return Batch(
            inputs, pairs, pairs, following[order], layer[order], counts, ragged
        )

    def descend(self, batch: Batch, kept: Tensor, rows: Rows) -> list[float]:
        """Step on θ and compute the estimator's gradient, Eq. (13); return L_task."""
        leaves, features, logits = [], [], []
        edges = torch.stack([batch.places.neighbour, batch.places.target])
        size, ragged, share = len(rows.index), batch.ragged, None
        chosen: Tensor | slice = slice(size)  # the first nodes of the table
        if ragged is not None:
            chosen = rows.index[ragged.index]
            share = torch.zeros(chosen.shape, device=chosen.device)
            share.view(-1)[ragged.slots] = rows.share
        for branch in range(BRANCHES):
            graphs = [
                batch.table.with_edges(edges[:, kept[branch] & (batch.layer == number)])
                for number in range(self.depth)
            ]
            effective = self.net.effective(self.masks[branch])
            leaves.append([w.requires_grad_() for w in effective.values()])
            h, z = self.net.run_branch(effective, graphs, chosen)
            features.append(h)
            logits.append(z)
        fused = self.net.fuse(logits)
        if ragged is None:
            task = F.cross_entropy(fused, rows.labels)[None]
        else:
            fused = fused.flatten(0, 1)[ragged.slots]
            task = rows.mean(cross_entropy(fused, rows.labels))
        loss, settings = task, self.method_config
        if settings.has_estimator:
            bound = self.mutual_information(features[0], features[1], share)
            loss = task + settings.lambda_mi * bound
        found = torch.autograd.grad(
            loss.sum(), leaves[0] + leaves[1], materialize_grads=True
        )
        names = list(self.net.shapes)
        parts = (found[: len(names)], found[len(names) :])
        by_branch = [dict(zip(names, part, strict=True)) for part in parts]
        for sums, mine in zip(self.sums, by_branch, strict=True):
            for name, gradient in mine.items():
                sums[name] += gradient
        (of_global, of_local), (shared, local) = by_branch, self.masks
        gradients = {}
        for name in names:
            # in the weights' memory layout, which fused optimizer steps need
            out = torch.empty_like(shared[name])
            torch.mul(of_global[name], shared[name], out=out)
            gradients[name] = out.addcmul_(of_local[name], local[name])
        self.descend_weights(gradients)
        values: list[float] = task.tolist()
        return values

    def mutual_information(
        self, shared: Tensor, local: Tensor, share: Tensor | None
    ) -> Tensor:
        """Return Eq. (6); the gradient of Eq. (8) is left on the estimator only."""
        estimator = cast(MIEstimator, self.networks["estimator"])
        shared, local = F.normalize(shared, dim=-1), F.normalize(local, dim=-1)
        mean, log_variance = estimator(shared)
        norm = self.method_config.club_norm
        bound = club_bound(mean, log_variance, local, norm=norm, share=share)
        self._bounds.append(bound.detach().view(-1))
        estimator.zero_grad()
        mean, log_variance = estimator(shared.detach())
        loss = residual_loss(mean, log_variance, local.detach(), share)
        loss.sum().backward()  # type: ignore[no-untyped-call]
        return bound

    @property
    def gradients(self) -> list[Tensor]:
        """Sums of the gradients of Eq. (13), without its last term, of both branches.

        They are with respect to the effective weights, (P,), of a stack (K, P).
        """
        is_stacked = self.net.is_stacked
        return [state_to_vector(part, is_stacked=is_stacked) for part in self.sums]

    def descend_weights(self, gradients: Mapping[str, Tensor]) -> None:
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
        config = self.group.config
        decay = 2 * self.method_config.lambda_reg + config.weight_decay
        is_decoupled = self.method_config.reg_step == "decoupled"
        for name, weight in self.net.backbone.named_parameters():
            weight.grad = gradients[name]
            if name.endswith("bias"):
                continue
            if is_decoupled:
                weight.detach().mul_(1 - config.lr * decay)
            else:
                weight.grad = weight.grad + decay * weight.detach()
        self.optimizer.step()

    def keep(self) -> list[dict[str, float]]:
        """Store in the clients' states what the next round needs; return statistics."""
        self.optimizer.save()
        if self.learners is not None:
            self.learners.save()
        if self.agent is not None:
            for client, memory in zip(
                self.group.clients, self.agent.memories, strict=True
            ):
                client.state.set_group("agent", memory.tensors(), is_copied=False)
        found = self.numbers()
        for client, numbers in zip(self.group.clients, found, strict=True):
            client.state.values |= numbers
            log.info("Client %s: %s", client.partition_id, numbers)
        return found

    def numbers(self) -> list[dict[str, float]]:
        """Return statistics of masks, mutual information and agents, for the log."""
        both = self.group.split(
            {"global": self.net.global_mask, "local": self.net.local_mask}
        )
        bounds = torch.stack(self._bounds).T.tolist() if self._bounds else []
        memories = self.agent.memories if self.agent else []
        found = []
        for number, masks in enumerate(both):
            memory = memories[number] if memories else None
            of_global, of_local = masks["global"], masks["local"]
            found.append(
                {
                    "kept": mean_of(memory.rates if memory else []),
                    "keep-spread": mean_of(memory.spreads if memory else []),
                    "distinct-rewards": float(
                        memory.distinct_rewards() if memory else 0
                    ),
                    "mutual-information": mean_of(bounds[number] if bounds else []),
                    "in-both-masks": share_of(of_global & of_local),
                    "in-no-mask": share_of(~(of_global | of_local)),
                }
            )
        return found


def mean_of(values: Sequence[float]) -> float:
    """Return the mean, 0 for an empty list."""
    return sum(values) / len(values) if values else 0.0


def share_of(mask: Tensor) -> float:
    """Return the share of entries of a mask that are 1, in [0, 1]."""
    return float(mask.sum()) / mask.numel()
