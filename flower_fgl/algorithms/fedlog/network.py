"""FedLoG's network: an encoder, two branches, and learnable nodes per class."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedlog.branches import Branch, degree_weights, mix_log_probs
from flower_fgl.algorithms.own_network import SplitNet
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.stacked import StackedInput

__all__ = ["BRANCH_NAMES", "FedLogBranchNet", "LinearTop", "graphs_of", "self_loops"]
__all__ += ["shared_weights", "start_nodes"]

BRANCH_NAMES = ("head", "tail")
PAIRS = 1 << 14
"""Pairs of node and prototype computed at once without gradient: 4 MB at 64 channels.
These fit a core's cache and take half as long as blocks of 8 MB."""
STACKED_BLOCKS = 4
"""How much larger the blocks of a stack are: products of each client's rows by its own
weights are slow with few rows."""
FEWEST = 64
"""Nodes computed at once however many prototypes there are: with 40 classes, the calls of
smaller blocks would take longer than their arithmetic."""


def self_loops(x: Tensor) -> GraphInput:
    """Return a graph of features (n, d) in which each node is its own only neighbour.

    From those (K, n, d) of K clients, one of each.
    """
    nodes = torch.arange(x.shape[-2], device=x.device)
    graph = graphs_of(x, torch.stack([nodes, nodes]))
    if x.dim() == 3:
        graph.shape = "loops"
    return graph


def graphs_of(x: Tensor, edge_index: Tensor) -> GraphInput:
    """Return a graph of features (n, d), or K with the same edges of (K, n, d)."""
    if x.dim() == 2:
        return GraphInput(x, edge_index)
    return StackedInput.of_equal(x, edge_index)


def shared_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return φ, θ^H and θ^T of a state, without the learnable nodes."""
    return {n: t for n, t in state.items() if not n.startswith("nodes.")}


def start_nodes(num_nodes: int, num_features: int) -> dict[str, Tensor]:
    """Draw the initial features (C·s, d) of the learnable nodes of both branches, by name.

    Xavier-uniform, from torch's global generator. Clients with the same seed get equal
    rows, so that a row has the same meaning on all clients.
    """
    empty = {name: torch.empty(num_nodes, num_features) for name in BRANCH_NAMES}
    return {name: nn.init.xavier_uniform_(x) for name, x in empty.items()}


class FedLogBranchNet(Backbone):
    """Classify a node by its distance to learnable nodes, in two branches.

    The outputs of the ``encoder`` φ are embeddings of ``width`` E. ``threshold`` is λ
    of Eq. (3), and ``alpha``, if given, α of all nodes. The ``options`` are those of
    :class:`Branch`.

    Notes
    -----
    1. The learnable nodes are isolated in the paper. Here each is its own neighbour, so
       that all weights of the encoder affect them, as in ``[h_j ‖ h_j]`` of Eq. (7).
    2. Parameters are named ``encoder.``, ``classifier.`` (both are shared with the
       server) and ``nodes.`` (local to a client). The nodes are uninitialised, see
       :func:`start_nodes`.
    3. A node's degree is that in the input graph, without its self-loop, although the λ +
       1 of Eq. (3) suggests otherwise.
    """

    def __init__(
        self,
        encoder: Backbone,
        *,
        width: int,
        num_classes: int,
        nodes_per_class: int,
        num_features: int,
        threshold: float,
        alpha: float | None = None,
        **options: bool,
    ) -> None:
        nn.Module.__init__(self)
        self.num_classes, self.threshold, self.alpha = num_classes, threshold, alpha
        self.encoder: Backbone = encoder
        self.classifier: nn.ModuleDict = nn.ModuleDict(
            {name: Branch(width, **options) for name in BRANCH_NAMES}
        )
        shape = (num_classes * nodes_per_class, num_features)
        self.nodes = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape)) for name in BRANCH_NAMES}
        )

    def shared_state(self) -> dict[str, Tensor]:
        """Return φ, θ^H and θ^T by name, without the learnable nodes."""
        return shared_weights(self.state_dict())

    @property
    def undecayed(self) -> list[Tensor]:
        """The learnable nodes, which have L_norm instead of ``weight-decay``."""
        return list(self.nodes.values())

    def prototypes(self) -> dict[str, Tensor]:
        """Embed the learnable nodes, FedLoG Eq. (1): (C·s, E) by branch."""
        nodes = torch.cat([self.nodes[name] for name in BRANCH_NAMES], dim=-2)
        h = self.encoder(self_loops(nodes))
        return dict(zip(BRANCH_NAMES, h.chunk(2, dim=-2), strict=True))

    def branch_log_probs(
        self, h: Tensor, neighbours: Tensor, prototypes: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return log p_H and log p_T (n, C) of nodes, FedLoG Eq. (2).

        From h_v and n_v (n, E), and the result of :meth:`prototypes`.
        """
        head, tail = (
            self.classifier[name](h, neighbours, prototypes[name], self.num_classes)
            for name in BRANCH_NAMES
        )
        return head, tail

    def head_weights(self, graph: GraphInput) -> Tensor:
        """Return α of every node, FedLoG Eq. (3): (N,), or (K, n), float32."""
        count = graph.topology.num_nodes
        if self.alpha is not None:
            alpha = torch.full((count,), self.alpha, device=graph.device)
        else:
            degree = torch.bincount(graph.edge_index[1], minlength=count)
            alpha = degree_weights(degree, self.threshold)
        if isinstance(graph, StackedInput):
            return alpha.view(-1, graph.num_rows)
        return alpha

    def embed(self, graph: GraphInput) -> Tensor:
        """Return h_v of every node, FedLoG Eq. (1): (N, E)."""
        h: Tensor = self.encoder(graph)
        return h

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict from all embeddings (N, E) of a graph, FedLoG Eqs. (2) and (3).

        Returns log p(v) (N, C), whose softmax is p(v).
        """
        return self._log_probs(*self._columns(h, graph))

    def predict(self, graph: GraphInput, wanted: Tensor) -> Tensor:
        """Predict the ``wanted`` nodes (N,) as :meth:`head`; other rows may be zero.

        Of K clients, ``wanted`` is (K, n) and the result (K, n, C).
        """
        most = int(wanted.sum(-1).max())
        order = wanted.int().argsort(stable=True, dim=-1, descending=True)
        index = order[..., :most, None]
        h, around, alpha = self._columns(self.embed(graph), graph)
        rows = index.expand(*index.shape[:-1], h.shape[-1])
        found = self._log_probs(
            h.gather(-2, rows), around.gather(-2, rows), alpha.gather(-1, index[..., 0])
        )
        out = found.new_zeros(*wanted.shape, self.num_classes)
        return out.scatter(-2, index.expand_as(found), found)

    def _columns(self, h: Tensor, graph: GraphInput) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of a node's prediction: h_v, n_v and α_v of all nodes."""
        return h, graph.operator("mean").matmul(h), self.head_weights(graph)

    def _log_probs(self, h: Tensor, neighbours: Tensor, alpha: Tensor) -> Tensor:
        prototypes = self.prototypes()
        size = max(FEWEST, PAIRS // prototypes["head"].shape[-2])
        dim = alpha.dim() - 1
        if dim:  # all clients at once
            size = max(1, STACKED_BLOCKS * size // len(alpha))
        columns = (h, neighbours, alpha)
        parts = [
            mix_log_probs(*self.branch_log_probs(some, around, prototypes), weight)
            for some, around, weight in zip(
                *(torch.split(column, size, dim) for column in columns), strict=True
            )
        ]
        return torch.cat(parts, dim)


class LinearTop(SplitNet):
    """The encoder φ, not copied, with a new linear classifier, for pretraining."""

    def __init__(self, encoder: Backbone, width: int, num_classes: int) -> None:
        super().__init__(encoder, nn.Linear(width, num_classes))

    def embed(self, graph: GraphInput) -> Tensor:
        """Return the embeddings of all nodes: (N, E)."""
        h: Tensor = self.encoder(graph)
        return h
