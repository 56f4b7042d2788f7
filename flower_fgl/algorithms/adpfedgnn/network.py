"""ADPFedGNN's model: one backbone under two masks, and the estimator of what they share.

All serve one client, or K of a stack, whose shapes begin with K.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flower_fgl.algorithms.adpfedgnn.agent import (
    BRANCHES,
    Candidates,
    NeighbourLists,
    QNetwork,
    keep_probabilities,
    sample_neighbours,
    shuffled,
)
from flower_fgl.algorithms.own_network import NetworkSizes, sized_backbone
from flower_fgl.core.seeds import SERVER, derive_seed, seeded
from flower_fgl.methods.adpfedgnn import ADPFedGNNSettings
from flower_fgl.nn import Backbone, GraphInput, build_model, state_shapes
from flower_fgl.nn.computation_graph import ClientDraws
from flower_fgl.nn.layers import mlp, relu_dropout
from flower_fgl.nn.stacked import StackedInput, map_rows
from flower_fgl.nn.state import state_to_vector, vector_to_state

__all__ = ["MIEstimator", "MaskedBranch", "TwoBranchNet"]
__all__ += ["build_backbone", "build_network", "build_networks", "club_bound"]
__all__ += ["residual_loss"]


class MIEstimator(nn.Module):
    """Networks f_μ and f_σ that predict local features of width H from global features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = max(1, width // 2)
        self.mean = mlp(width, hidden, width)
        self.log_variance = mlp(width, hidden, width).append(nn.Tanh())

    def forward(self, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Predict μ and log σ² of the local features, both (B, H), ADPFedGNN Eq. (7).

        From h^g (B, H), unit length; log σ² is within [−1, 1].
        """
        return map_rows(self.mean, shared), map_rows(self.log_variance, shared)


def _average(values: Tensor, share: Tensor | None, dim: int) -> Tensor:
    """Average over the nodes of a batch; ``share`` weights them, 0 for padding."""
    if share is None:
        return values.mean(dim)
    return (values * (share[..., None] if dim == -2 else share)).sum(dim)


def club_bound(
    mean: Tensor,
    log_variance: Tensor,
    local: Tensor,
    *,
    norm: str = "mean",
    share: Tensor | None = None,
) -> Tensor:
    """Bound the mutual information of global and local features, ADPFedGNN Eq. (6).

    ``mean`` and ``log_variance`` (B, H) are μ and log σ² of each node, and ``local`` (B,
    H) is h^l, unit length. ``norm`` is CLUB's estimate (``mean``), or the sums as printed
    (``literal``). The bound is at least 0. With a stack, ``share`` (K, B) is one divided
    by the number of a client's nodes, and 0 for padding.

    Notes
    -----
    1. The paper prints a sum over the terms of other nodes. This is B − 1 times too large
       for a bound, and its scale depends on the batch. CLUB takes the mean over all
       nodes, a factor ½, and the mean over the batch.
    2. The estimate has no lower bound, so it would reward anti-correlated features
       without limit. Therefore the result is clamped and features have unit length.
    3. The mean over all nodes is μ² − 2μ E[h] + E[h²], without a matrix (B, B).
    """
    precision = (-log_variance).exp()
    own = (mean - local).square()
    first, second = (
        _average(values, share, -2)[..., None, :] for values in (local, local.square())
    )
    others = mean.square() - 2 * mean * first + second
    if norm == "literal":
        # the sum over all nodes includes each node's own term, which Eq. (6) excludes
        if share is None:
            return ((len(local) * others - 2 * own) * precision).sum().clamp(min=0)
        count = (share > 0).sum(-1)[:, None, None]
        terms = ((count * others - 2 * own) * precision).sum(dim=-1)
        return (terms * (share > 0)).sum(dim=-1).clamp(min=0)
    terms = (0.5 * (others - own) * precision).sum(dim=-1)
    return _average(terms, share, -1).clamp(min=0)


def residual_loss(
    mean: Tensor, log_variance: Tensor, local: Tensor, share: Tensor | None = None
) -> Tensor:
    """Return twice the negative log-likelihood of local features, ADPFedGNN Eq. (8).

    Up to a constant; to be minimised. Arguments as in :func:`club_bound`, h^l detached.

    Notes
    -----
    1. The paper prints it without log σ² and with the sign of a likelihood. Minimising
       that increases the error, and maximising it sends σ² to infinity.
    """
    squares = (mean - local).square() * (-log_variance).exp()
    return _average((squares + log_variance).sum(dim=-1), share, -1)


def build_backbone(
    config: Any,
    name: str,
    *,
    num_features: int,
    num_outputs: int,
    initialise: bool = True,
) -> Backbone:
    """Build ``num-layers`` layers d→H→H and a linear classifier H→C of nodes.

    The initial weights are those of the run's seed, or uninitialised memory.
    """
    with seeded(derive_seed(config.seed, 0, SERVER, "init")):
        return build_model(
            name,
            in_channels=num_features,
            hidden_channels=config.hidden_channels,
            num_outputs=num_outputs,
            num_layers=config.num_layers,
            dropout=config.dropout,
            has_linear_head=True,
            initialise=initialise,
        )


def build_networks(config: Any, num_features: int, width: int) -> nn.ModuleDict:
    """Build ``agent`` and ``estimator``, where the settings use them, by the run's seed."""
    method_config = config.method_config
    networks = nn.ModuleDict()
    with seeded(derive_seed(config.seed, 0, SERVER, "init-networks")):
        if method_config.has_agent:
            networks["agent"] = QNetwork(num_features)
        if method_config.has_estimator:
            networks["estimator"] = MIEstimator(width)
    return networks


class MaskedBranch(nn.Module):
    """Run a backbone of :func:`build_backbone` with different edges in each layer."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(
        self, graphs: Sequence[GraphInput], rows: Tensor | slice | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return features (B, H), after dropout, and logits (B, C) of some rows, or all.

        ``graphs`` are the same nodes with the edges of each layer.
        """
        backbone: Any = self.backbone
        h = None
        for layer, graph in zip(backbone.encoder, graphs, strict=True):
            h = backbone.run_layer(layer, graph, h)
            h = relu_dropout(h, backbone.dropout, self.training, backbone.uniform)
        assert h is not None
        if rows is not None:
            h = h.flatten(0, -2)[rows]
        return h, backbone.head(h, graphs[-1])


class TwoBranchNet(Backbone):
    """Fuse the predictions of the global and the local branch, ADPFedGNN Eq. (4)–(11).

    The state of this module is the state that a client keeps: θ_i, the ``backbone`` of
    :func:`build_backbone`, both masks, and the agent that it received last. Without an
    ``agent`` that selects neighbours, or if the ``settings`` have none, all are kept. A
    prediction draws the neighbours beyond ``eval_fanout``, and shuffles, by the seed of
    each client.
    """

    global_mask: Tensor
    local_mask: Tensor

    def __init__(
        self,
        backbone: Backbone,
        agent: QNetwork | None,
        settings: ADPFedGNNSettings,
        *,
        seeds: Sequence[int] = (0,),
    ) -> None:
        nn.Module.__init__(self)
        self.branch = MaskedBranch(backbone)
        self.agent = agent if settings.has_agent else None
        self.beta, self.fanout, self.seeds = settings.beta, settings.eval_fanout, seeds
        self.is_greedy = settings.eval_actions == "greedy"
        self.is_shuffled = settings.selection == "random-drop"
        shapes = state_shapes(backbone)
        self.is_stacked = len(shapes["classifier.weight"]) == 3
        self.shapes = {name: s[int(self.is_stacked) :] for name, s in shapes.items()}
        first = backbone.get_parameter("classifier.weight")
        size = sum(p.numel() for p in backbone.state_dict().values())
        clients = first.shape[: int(self.is_stacked)]  # (K,), or () of one client
        for name in ("global_mask", "local_mask"):
            ones = first.new_ones(*clients, size // clients.numel(), dtype=torch.bool)
            self.register_buffer(name, ones)

    @property
    def backbone(self) -> Backbone:
        """θ."""
        return self.branch.backbone

    def weights(self) -> Tensor:
        """Return θ as one vector (P,), of a stack (K, P)."""
        return state_to_vector(self.backbone.state_dict(), is_stacked=self.is_stacked)

    @torch.no_grad()
    def load_weights(self, flat: Tensor) -> None:
        """Overwrite θ with the result of :meth:`weights`."""
        self.backbone.load_state_dict(vector_to_state(flat, self.shapes))

    def masks(self) -> list[dict[str, Tensor]]:
        """Return M^g and M^l by name, as numbers in the memory layout of the weights.

        A product with a mask of booleans takes several times as long.
        """
        found: list[dict[str, Tensor]] = [{}, {}]
        weights = dict(self.backbone.named_parameters())
        for mine, mask in zip(found, (self.global_mask, self.local_mask), strict=True):
            for name, part in vector_to_state(mask, self.shapes).items():
                mine[name] = torch.empty_like(weights[name], requires_grad=False)
                mine[name].copy_(part)
        return found

    def effective(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return θ ⊙ M of one of :meth:`masks`, by name, detached."""
        weights = self.backbone.named_parameters()
        return {name: weight.detach() * masks[name] for name, weight in weights}

    def run_branch(
        self,
        effective: Mapping[str, Tensor],
        graphs: Sequence[GraphInput],
        rows: Tensor | slice | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the backbone with the given weights, see :class:`MaskedBranch`."""
        weights = {f"backbone.{name}": value for name, value in effective.items()}
        out: tuple[Tensor, Tensor] = functional_call(
            self.branch, weights, (graphs, rows)
        )
        return out

    def fuse(self, logits: Sequence[Tensor]) -> Tensor:
        """Return ``β z^g + (1 − β) z^l``, Eq. (11)."""
        return self.beta * logits[0] + (1 - self.beta) * logits[1]

    def forward(self, graph: GraphInput) -> Tensor:
        """Predict all nodes: logits (N, C). All layers use the same sampled neighbours."""
        generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        draws: torch.Generator | ClientDraws = generators[0]
        nodes = torch.arange(graph.num_nodes, device=graph.device)
        counts = None
        if isinstance(graph, StackedInput):
            draws = ClientDraws(generators, graph.num_rows)
            nodes = graph.real.flatten().nonzero().squeeze(1)
        lists = NeighbourLists.of(graph.edge_index, graph.num_nodes)
        target, neighbour = sample_neighbours(lists, nodes, self.fanout, draws)
        pairs = Candidates(nodes[target], neighbour)
        if isinstance(draws, ClientDraws):
            counts = draws.counts(pairs.target)
        edges = torch.stack([pairs.neighbour, pairs.target])
        depth = len(self.backbone.encoder)  # type: ignore[arg-type]
        logits = []
        weights = self.edge_weights(graph, pairs, counts, generators)
        for masks, weight in zip(self.masks(), weights, strict=True):
            kept = weight > 0
            view = graph.with_edges(edges[:, kept], weight[kept])
            _, z = self.run_branch(self.effective(masks), [view] * depth)
            logits.append(z)
        return self.fuse(logits)

    def edge_weights(
        self,
        graph: GraphInput,
        pairs: Candidates,
        counts: list[int] | None,
        generators: Sequence[torch.Generator],
    ) -> Tensor:
        """Return the weight in [0, 1] of each of m candidates: (2, m).

        ``counts`` are those of the candidates of each client of a stack.
        """
        if self.agent is None:
            return torch.ones(BRANCHES, len(pairs.target), device=graph.device)
        chance = keep_probabilities(self.agent, graph, pairs, counts)
        if self.is_greedy:
            chance = (chance >= 0.5).to(chance)  # keep if both actions are equal
        if not self.is_shuffled:
            return chance
        parts = torch.split(chance, counts or [chance.shape[1]], dim=1)
        rows = zip(parts, generators, strict=True)
        return torch.cat([shuffled(part, draws) for part, draws in rows], dim=1)


def build_network(
    method_config: ADPFedGNNSettings, **sizes: Unpack[NetworkSizes]
) -> TwoBranchNet:
    """Build the network of a saved model, whose weights the caller must load.

    Neighbours beyond ``eval-fanout`` are drawn with seed 0, not with the run's seed.
    """
    backbone = sized_backbone(sizes, has_linear_head=True, initialise=False)
    agent = QNetwork(sizes["num_features"])
    return TwoBranchNet(backbone, agent, method_config)
