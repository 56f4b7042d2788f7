"""FedSage+: generation of missing neighbours (NeighGen), without communication.

Zhang et al., "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS
2021.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.nn import GraphInput, GraphSAGE, Topology
from flower_fgl.nn.graph_union import select_rows
from flower_fgl.nn.layers import SAGEConv
from flower_fgl.nn.sparse import csr_matrix, index_sum

__all__ = ["FeatureGenerator", "HiddenNodes", "MendedGraph", "NeighbourGenerator"]
__all__ += ["closest_rows", "generator_loss", "group_means", "hide_nodes", "match_loss"]
__all__ += ["noise_like"]


@dataclass(frozen=True, eq=False)
class HiddenNodes:
    """A graph with some nodes hidden, so that the missing neighbours are known.

    ``inputs`` are the n remaining nodes, ``kept`` (n,) their numbers in the whole graph,
    and ``counts`` (n,) their numbers of hidden neighbours. ``centres`` (M,) are the nodes
    that lost a neighbour, ``hidden`` (H, d) the features of the hidden nodes with a
    remaining neighbour, and ``lost`` (M, H), sparse CSR, is 1 where a hidden node was a
    centre's neighbour.
    """

    inputs: GraphInput
    kept: Tensor
    hidden: Tensor
    centres: Tensor
    lost: Tensor
    counts: Tensor

    def wanted(self, most: int) -> Tensor:
        """Return the number of neighbours to generate for each centre: (M,), int64."""
        return self.counts[self.centres].clamp(max=most)

    @property
    def num_bytes(self) -> int:
        """Approximate memory of edges and features, in bytes."""
        x = self.inputs.x
        size = x.values().numel() * 3 if x.layout == torch.sparse_csr else x.numel()
        return 4 * size + 48 * self.inputs.edge_index.shape[1] + self.hidden.nbytes


def hide_nodes(graph: GraphInput, is_hidden: Tensor) -> HiddenNodes:
    """Hide nodes and all their edges, Zhang et al. 2021, Sec. 3.2.

    ``graph`` is undirected; at least one node must remain.
    """
    kept = (~is_hidden).nonzero().squeeze(1)
    number = torch.full_like(is_hidden, -1, dtype=torch.int64)
    number[kept] = torch.arange(len(kept), device=kept.device)
    source, target = graph.edge_index
    inner = ~(is_hidden[source] | is_hidden[target])
    is_lost = ~is_hidden[source] & is_hidden[target]
    centre = number[source[is_lost]]
    counts = torch.bincount(centre, minlength=len(kept))
    centres, row = torch.unique(centre, return_inverse=True)
    found, column = torch.unique(target[is_lost], return_inverse=True)
    shape, ones = (len(centres), len(found)), torch.ones(len(row), device=row.device)
    return HiddenNodes(
        GraphInput(select_rows(graph.x, kept), number[graph.edge_index[:, inner]]),
        kept,
        select_rows(graph.x, found).to_dense(),
        centres,
        csr_matrix(row, column, ones, shape),
        counts,
    )


class MendedGraph(GraphInput):
    """A graph with generated nodes, each connected to one node of the graph.

    ``owner`` (M,) are those nodes. The generated nodes have the features ``generated``
    (M, d), which may require grad, and the numbers N to N + M − 1. The two blocks of
    features are projected separately and then concatenated, so sparse features never
    become a dense matrix of N rows, except in :meth:`dense_features`. Propagated features
    are not cached. ``x`` holds the features of the graph's own nodes only.
    """

    def __init__(self, graph: GraphInput, owner: Tensor, generated: Tensor) -> None:
        size = graph.num_nodes
        number = torch.arange(size, size + len(owner), device=owner.device)
        new = torch.stack([torch.cat([owner, number]), torch.cat([number, owner])])
        edges = torch.cat([graph.edge_index, new], dim=1)
        self.union = None
        self.topology = Topology(edges, None, size + len(owner), graph.x.dtype)
        self.generated = generated
        self._set_features(graph.x)

    def with_generated(self, generated: Tensor) -> Self:
        """Return the same graph with new features (M, d) of the generated nodes."""
        out = copy(self)
        out.generated = generated
        return out

    @property
    def num_bytes(self) -> int:
        """Memory added to the graph, in bytes, with estimated operators."""
        return self.generated.nbytes + 48 * self.edge_index.shape[1]

    @property
    def _is_kept(self) -> bool:
        return False

    def dense_features(self) -> Tensor:
        """Return own and generated features as a strided tensor (N + M, d), not cached."""
        return torch.cat([super().dense_features(), self.generated])

    def linear(
        self, h: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Map node representations linearly, see :meth:`GraphInput.linear`."""
        if h is not None:
            return super().linear(h, weight, bias)
        own = super().linear(None, weight, bias)
        return torch.cat([own, F.linear(self.generated, weight, bias)])


CHUNK = 1 << 24
"""Number of distances computed at once: 64 MB."""


class FeatureGenerator(nn.Sequential):
    """fGen: three linear maps from an embedding to the features of ``most`` neighbours.

    ``hidden`` are the widths between the maps; 256 and 2048 in the paper.

    Notes
    -----
    1. The last activation is tanh, so features outside [−1, 1] are never generated.
    2. :meth:`generate` uses only the required rows of the last weight. This is a third
       of the rows if nodes miss one or two of at most five neighbours.
    """

    def __init__(
        self, in_channels: int, hidden: tuple[int, int], most: int, num_features: int
    ) -> None:
        first, second = hidden
        super().__init__(
            nn.Linear(in_channels, first),
            nn.ReLU(),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, most * num_features),
            nn.Tanh(),
        )
        self.most = most

    def generate(self, inputs: Tensor, counts: Tensor) -> Tensor:
        """Generate the first neighbours of each node: (Σ counts, d), grouped by node.

        ``inputs`` (M, p) are embeddings with noise; ``counts`` (M,) are at most ``most``.
        """
        *first, last, _ = list[Any](self.children())
        hidden = inputs
        for layer in first:
            hidden = layer(hidden)
        number = torch.arange(self.most, device=counts.device)
        nodes, place = (number < counts[:, None]).nonzero().unbind(1)
        weights = last.weight.unflatten(0, (self.most, -1)).unbind(0)
        biases = last.bias.unflatten(0, (self.most, -1)).unbind(0)
        made = [
            F.linear(hidden[nodes[place == number]], weight, bias)
            for number, (weight, bias) in enumerate(zip(weights, biases, strict=True))
        ]
        order = torch.argsort(place, stable=True).argsort()
        return torch.cat(made)[order].tanh()


class NeighbourGenerator(nn.Module):
    """NeighGen: an encoder, dGen, fGen, and the classifier of the mended graph.

    dGen's bias starts at 1, so that its ReLU has a gradient. An output below 0 for all
    nodes would never change.
    """

    def __init__(
        self,
        features: FeatureGenerator,
        *,
        num_features: int,
        hidden_channels: int,
        num_outputs: int,
    ) -> None:
        super().__init__()
        widths = (num_features, hidden_channels)
        self.encoder = nn.ModuleList(SAGEConv(w, hidden_channels) for w in widths)
        self.counter = nn.Linear(hidden_channels, 1)
        nn.init.ones_(self.counter.bias)
        self.features = features
        self.classifier = GraphSAGE(
            in_channels=num_features,
            hidden_channels=hidden_channels,
            num_outputs=num_outputs,
            num_layers=2,
            dropout=0.0,
        )

    def embed(self, graph: GraphInput) -> Tensor:
        """Return z, of shape (N, p)."""
        encoder: Any = self.encoder
        first, second = encoder
        out: Tensor = second(graph, first(graph).relu()).relu()
        return out

    def count(self, z: Tensor) -> Tensor:
        """Return ñ, of shape (N,): missing neighbours per node, at least 0."""
        out: Tensor = self.counter(z).squeeze(1)
        return out.relu()

    @torch.no_grad()
    def mend(
        self, graph: GraphInput, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Generate the missing neighbours of a graph's nodes, with noise drawn on the CPU.

        Returns the node (M,) to which each generated node is connected, ascending, and the
        generated features (M, d).
        """
        z = self.embed(graph)
        counts = self.count(z).round().clamp(max=self.features.most).long()
        nodes = counts.nonzero().squeeze(1)
        inputs = z[nodes] + noise_like(z[nodes], generator)
        owner = nodes.repeat_interleave(counts[nodes])
        return owner, self.features.generate(inputs, counts[nodes])


def noise_like(z: Tensor, generator: torch.Generator) -> Tensor:
    """Draw standard normal noise of the shape of ``z``, identical on every device."""
    return torch.randn(z.shape, generator=generator).to(z.device)


def closest_rows(
    generated: Tensor, x: Tensor, allowed: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Find the nearest row of ``x`` (N, d), strided or sparse CSR, for each vector (S, d).

    ``allowed`` limits the candidates: the second tensor (S,) gives each vector a row of
    the first (M, N), sparse CSR, whose non-zeros are the candidates, at least one.
    Returns row numbers (S,); there is at least one vector and one row.
    """
    square = _row_squares(x)
    found = []
    step = max(1, CHUNK // len(square))
    for start in range(0, len(generated), step):
        part = generated[start : start + step]
        distance = square - 2 * (x @ part.T).T  # the vector's own square cancels
        if allowed is not None:
            rows = select_rows(allowed[0], allowed[1][start : start + step])
            distance = distance.masked_fill(rows.to_dense() == 0, torch.inf)
        found.append(distance.argmin(dim=1))
    return torch.cat(found)


def _row_squares(x: Tensor) -> Tensor:
    """Return the squared norm of each row."""
    if x.layout != torch.sparse_csr:
        return x.square().sum(dim=1)
    return index_sum(x.values().square(), _rows_of(x), x.shape[0])


def _rows_of(x: Tensor) -> Tensor:
    """Return the row of each stored entry of a sparse CSR matrix."""
    return torch.repeat_interleave(x.crow_indices().diff().long())


def group_means(x: Tensor, least: int) -> Tensor:
    """Average groups of consecutive rows, so that no result belongs to a single row.

    The groups depend on nothing but the order of the rows, and their size is a power of
    two, so that every group for a larger ``least`` consists of groups for a smaller one.
    With other groups in another run, differences of means would be those of single rows.

    Groups of ``x`` (N, d), strided or sparse CSR, have the next power of two from
    ``least`` on, the last one up to twice as many. With fewer rows than that there is one
    group of all, and none if N < ``least``. The means (G, d) are strided.
    """
    size, width = x.shape
    if size < least:
        return x.new_zeros((0, width), layout=torch.strided)
    rows = 1 << (least - 1).bit_length()
    number = max(1, size // rows)
    group = (torch.arange(size, device=x.device) // rows).clamp(max=number - 1)
    counts = torch.bincount(group).unsqueeze(1)
    if x.layout != torch.sparse_csr:
        return index_sum(x, group, number) / counts
    entry = group[_rows_of(x)] * width + x.col_indices()
    return index_sum(x.values(), entry, number * width).view(number, width) / counts


def match_loss(
    generated: Tensor, x: Tensor, allowed: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Compute the squared error of each generated vector to the nearest row, L^f.

    The mean over vectors and features of ``generated`` (S, d), with gradient; zero without
    vectors. ``x`` and ``allowed`` are as in :func:`closest_rows`.
    """
    if not len(generated):
        return generated.sum()
    target = select_rows(x, closest_rows(generated.detach(), x, allowed))
    return F.mse_loss(generated, target.to_dense())


def generator_loss(
    network: NeighbourGenerator,
    impaired: HiddenNodes,
    mended: MendedGraph,
    noise: Tensor,
    index: Tensor,
    labels: Tensor,
) -> Tensor:
    """Compute a client's own loss L_gen, Zhang et al. 2021, Eqs. (3), (4) and (6).

    The sum of SmoothL1(ñ, n), the greedy feature loss, and the cross-entropy of the
    mended graph; without training nodes the last term is omitted. ``mended`` is the
    remaining graph with :meth:`HiddenNodes.wanted` generated nodes per centre; this
    function replaces their features. ``noise`` (M, p) is added to the embeddings of the
    M centres. ``index`` and ``labels`` (t,) are the training nodes that remain.
    """
    most = network.features.most
    z = network.embed(impaired.inputs)
    missing = impaired.counts.clamp(max=most).to(z.dtype)
    loss = F.smooth_l1_loss(network.count(z), missing)
    wanted = impaired.wanted(most)
    made = network.features.generate(z[impaired.centres] + noise, wanted)
    place = torch.arange(len(wanted), device=wanted.device).repeat_interleave(wanted)
    loss = loss + match_loss(made, impaired.hidden, (impaired.lost, place))
    if len(index):
        logits = network.classifier(mended.with_generated(made))
        loss = loss + F.cross_entropy(logits[index], labels)
    return loss
