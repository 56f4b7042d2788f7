"""Equations and modules of TopFGL: structural encoding, topology learner, new edges.

"TopFGL", ICDE 2026.
"""

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from flower_fgl.algorithms.fedstar import return_probabilities
from flower_fgl.algorithms.fedtad import row_products
from flower_fgl.algorithms.prototypes.graph_views import union_pairs
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn import layers as conv
from flower_fgl.nn.layers import GCNConv
from flower_fgl.nn.sparse import index_sum

__all__ = ["AugmentedNet", "TopologyLearner", "drop_distant", "edge_statistics"]
__all__ += ["likely_edges", "linear_cka", "nearest_pairs", "probe_graph"]
__all__ += ["structural_encoding"]

WALKS = 8
"""Numbers of the walk part of h^T, and channels of the learner's first layer."""

PROBE_NODES, PROBE_RATE = 100, 0.06
"""Nodes of the probe graph, and probability of each of its edges."""

DROPPED = 0.3
"""Share of the added edges that is dropped at once."""

BLOCK = 1 << 22
"""Pairs of nodes in memory at once."""


def edge_statistics(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Compute the degree part and the Jaccard part of h^T: (N, 2), float32.

    ``1/(1 + |deg_i − deg_q|)`` and ``|Γ_i ∩ Γ_q| / |Γ_i ∪ Γ_q|``, scaled to [0, 1] over
    all edges and averaged over the neighbours q of i. 0 for isolated nodes, and where all
    edges have one value. ``edge_index`` (2, E) has each undirected edge in both
    directions; self-loops are ignored.
    """
    source, target = edge_index.cpu()
    codes = (source * num_nodes + target)[source != target].unique()
    if not len(codes):
        return torch.zeros(num_nodes, 2)
    source, target = codes // num_nodes, codes % num_nodes
    degree = torch.bincount(source, minlength=num_nodes).double()
    edges, ones = torch.stack([source, target]), np.ones(len(source))
    adjacency = csr_array((ones, tuple(edges.numpy())), shape=(num_nodes, num_nodes))
    common = row_products(adjacency, edges)
    jaccard = common / (degree[source] + degree[target] - common)
    nearness = 1 / (1 + (degree[source] - degree[target]).abs())
    values = torch.stack([nearness, jaccard], dim=1)
    low, high = values.amin(dim=0), values.amax(dim=0)
    spread = torch.where(high > low, high - low, 1.0)
    scaled = (values - low) / spread
    total = index_sum(scaled, source, num_nodes)
    return (total / degree.clamp(min=1)[:, None]).float()


def structural_encoding(graph: GraphInput) -> Tensor:
    """Compute h^T: return probabilities, then :func:`edge_statistics`: (N, 10), float32.

    Notes
    -----
    1. The paper takes Node2Vec vectors, whose axes differ between clients, so that one
       averaged layer cannot read them. Here the walk part holds the probabilities of
       being back after 1 to 8 steps, which are equal on equal graphs.
    """
    walks = return_probabilities(graph, WALKS)
    edges = edge_statistics(graph.edge_index, graph.num_nodes).to(walks.device)
    return torch.cat([walks, edges], dim=1)


class TopologyLearner(nn.Module):
    """Two GCN layers on h^T, and a linear map of their output beside the logits Z.

    The second layer has q = max(1, ⌊10·C/p⌋) channels, p the ``width`` of the graph
    network.

    Notes
    -----
    1. There is no activation after the first layer, as in the published code.
    """

    def __init__(self, num_classes: int, width: int, dropout: float) -> None:
        super().__init__()
        channels = max(1, 10 * num_classes // width)
        self.dropout = dropout
        self.first = GCNConv(WALKS + 2, WALKS)
        self.second = GCNConv(WALKS, channels)
        self.classifier = nn.Linear(num_classes + channels, num_classes)

    def forward(
        self,
        structure: GraphInput,
        logits: Tensor,
        uniform: conv.Uniform = torch.rand_like,
    ) -> Tensor:
        """Return E (..., N, C) from a graph whose features are h^T (..., N, 10), and Z.

        Z (..., N, C), ``logits``, is a constant. ``uniform`` draws for dropout. Weights of
        several clients are stacked, see :mod:`flower_fgl.nn.stacked`.
        """
        h = self.first(structure)
        h = conv.dropout(h, self.dropout, self.training, uniform)
        h = self.second(structure, h)
        u = conv.relu_dropout(h, self.dropout, self.training, uniform)
        z = torch.cat([logits.detach(), u], dim=-1)
        return structure.linear(z, self.classifier.weight, self.classifier.bias)


def probe_graph(num_features: int, generator: torch.Generator) -> GraphInput:
    """Draw the random graph on which learners are compared.

    100 nodes, edges of probability 0.06, standard normal features.
    """
    number = PROBE_NODES
    drawn = torch.rand(number, number, generator=generator) < PROBE_RATE
    pairs = drawn.triu(diagonal=1).nonzero().T
    x = torch.randn(number, num_features, generator=generator)
    return GraphInput(x, torch.cat([pairs, pairs.flip(0)], dim=1))


def linear_cka(outputs: Tensor) -> Tensor:
    """Compute the linear CKA of all pairs, ``‖E_iᵀE_j‖² / (‖E_iᵀE_i‖ ‖E_jᵀE_j‖)``: (K, K).

    Of ``outputs`` E_i (K, N, C), whose columns are centred first; float64 in [0, 1], with
    ones on the diagonal. Constant outputs are alike to none. The row and the column of
    outputs that are not finite are NaN.
    """
    centred = outputs.double() - outputs.double().mean(dim=1, keepdim=True)
    products = torch.einsum("inc,jnd->ijcd", centred, centred).square().sum(dim=(2, 3))
    norm = products.diagonal().sqrt()
    scale = norm[:, None] * norm
    found = torch.where(scale == 0, 0.0, products / scale.where(scale != 0, 1.0))
    one = torch.where(norm.isfinite(), 1.0, torch.nan)
    return found.clamp(max=1.0).diagonal_scatter(one)


def nearest_pairs(points: Tensor, number: int) -> Tensor:
    """Link each point (N, c) to its ``number`` nearest by Euclidean distance.

    Returns each linked pair (2, M) once, the smaller index first, sorted.
    """
    size = len(points)
    number = min(number, size - 1)
    if number < 1:
        return torch.zeros(2, 0, dtype=torch.int64, device=points.device)
    rows = torch.arange(size, device=points.device)
    links = []
    for block in torch.split(rows, max(1, BLOCK // size)):
        distance = torch.cdist(points[block], points)
        distance.scatter_(1, block[:, None], torch.inf)
        near = distance.topk(number, dim=1, largest=False).indices
        node = block[:, None].expand_as(near)
        links.append(torch.stack([node, near]).flatten(1))
    return union_pairs(size, *links)


def likely_edges(
    points: Tensor, unsure: Tensor, edge_index: Tensor, *, number: int
) -> Tensor:
    """Choose the edges to add, E^Aug: (2, M), each new pair once, the smaller index first.

    Edges of the largest connected component of the k-NN graph of E, ``points`` (N, c),
    whose two ends are both ``unsure`` (N,): network and learner predict different
    classes. Those of ``edge_index`` (2, E), present in both directions, are left out; k
    is ``number``.

    Notes
    -----
    1. The published code needs one unsure end only, and keeps an edge if both ends have
       the same true label, test nodes included. Here no label decides.
    2. Of components of equal size the one with the smallest node is taken. The published
       code always takes the first one.
    """
    size = len(points)
    pairs = nearest_pairs(points, number)
    if not pairs.shape[1]:
        return pairs
    one, other = pairs.cpu().numpy()
    links = csr_array((np.ones(len(one)), (one, other)), shape=(size, size))
    _, labels = connected_components(links, directed=False)
    # components are numbered in the order of their smallest node
    inside = torch.from_numpy(labels == np.bincount(labels).argmax()).to(points.device)
    kept = inside[pairs[0]] & unsure[pairs[0]] & unsure[pairs[1]]
    present = edge_index[0] * size + edge_index[1]
    return pairs[:, kept & ~torch.isin(pairs[0] * size + pairs[1], present)]


def drop_distant(pairs: Tensor, points: Tensor, most: float, noise: Tensor) -> Tensor:
    """Drop 30 % of the added pairs if they are too many, more likely distant ones.

    ``pairs`` (2, M) stay in order; if they are more than ``most``, a pair is drawn with a
    probability proportional to its distance in E, ``points`` (N, c). ``noise`` (M,) are
    uniform numbers in [0, 1).
    """
    number = pairs.shape[1]
    if number <= most:
        return pairs
    distance = (points[pairs[0]] - points[pairs[1]]).norm(dim=1).double()
    # the smallest of exponential waiting times of rate d: drawn without replacement
    waiting = -torch.log1p(-noise.double()) / distance
    order = waiting.nan_to_num(nan=torch.inf).argsort(stable=True)
    kept = order[int(DROPPED * number) :].sort().values
    return pairs[:, kept]


class AugmentedNet(Backbone):
    """A backbone, not copied, that reads its client's training graph with further edges.

    ``added`` (2, M) are undirected pairs, each once. Other graphs are read as they are.
    """

    def __init__(self, backbone: Backbone, graph: GraphInput, added: Tensor) -> None:
        nn.Module.__init__(self)
        self.backbone = backbone
        self.hidden_channels = backbone.hidden_channels
        self.dropout, self.readout = backbone.dropout, backbone.readout
        self._graph = self.augmented = graph
        if added.shape[1]:
            edges = torch.cat([graph.edge_index, added, added.flip(0)], dim=1)
            self.augmented = graph.with_edges(edges)

    @property
    def reach(self) -> int | None:
        """That of the backbone, unless a receptive field would lack the added edges."""
        return self.backbone.reach if self.augmented is self._graph else None

    def _view(self, graph: GraphInput) -> GraphInput:
        """Return the graph that the backbone reads."""
        return self.augmented if graph is self._graph else graph

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the penultimate representation of each node."""
        return self.backbone.embed_nodes(self._view(graph))

    def head(self, h: Tensor, graph: GraphInput) -> Tensor:
        """Predict classes from embeddings."""
        return self.backbone.head(h, self._view(graph))

    def fixed(self) -> Backbone:
        """Return the backbone, which reads every graph as it is."""
        return self.backbone
