"""Latent types of edges: their clusters, the network with a channel each, the matching.

Xie, Xiong and Yang, "Federated Node Classification over Graphs with Latent Link-type
Heterogeneity", WWW 2023, as its published code computes them, but for its errors.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms.own_network import NetworkSizes
from flower_fgl.methods.fedlit import FedLITSettings
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.layers import GCNConv

__all__ = ["CENTROIDS", "CHANNEL", "FedLITNet", "assign_types", "average_types"]
__all__ += ["edge_vectors", "first_centroids", "in_order", "match_types"]
__all__ += ["move_centroids", "undirected"]

CHANNEL, CENTROIDS = "encoder.channels.", "centroids"
"""Beginning of the names of a channel's weights, and name of the centroids."""


def undirected(edge_index: Tensor) -> Tensor:
    """Return each edge once, from its lower node u to v: (2, E), without self-loops."""
    return edge_index[:, edge_index[0] < edge_index[1]]


def edge_vectors(h: Tensor, ends: Tensor, *, edge: str) -> Tensor:
    """Return the vector of each edge (E, 2p): ``[h_u ‖ h_v]``.

    With ``edge`` = ``"symmetric"`` it is ``[h_u + h_v ‖ |h_u − h_v|]``. ``h`` is (N, p)
    and ``ends`` (2, E), both ends of each edge.
    """
    u, v = h.index_select(0, ends[0]), h.index_select(0, ends[1])
    return torch.cat([u, v] if edge == "ordered" else [u + v, (u - v).abs()], dim=1)


def first_centroids(
    edges: Tensor, types: int, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Cluster edges (E, q) by k-means++ and one Lloyd step.

    Return the centroids (M, q), 0 where there are fewer different edges than clusters, and
    the cluster (E,) of each edge, that of the nearest seed. The CPU generator draws the
    first seed uniformly, further ones by the squared distance to the nearest seed.
    """
    centroids = edges.new_zeros(types, edges.shape[1])
    if not len(edges):
        return centroids, torch.zeros(0, dtype=torch.int64, device=edges.device)
    place = int(torch.randint(len(edges), (), generator=generator))
    apart: list[Tensor] = []
    nearest = edges.new_full((len(edges),), math.inf)
    for _ in range(types):
        apart.append((edges - edges[place]).square().sum(dim=1))
        nearest = torch.minimum(nearest, apart[-1])
        total = nearest.double().cumsum(0)
        if not float(total[-1]):
            break
        drawn = torch.rand((), generator=generator, dtype=torch.float64).to(
            total.device
        )
        # right: an edge at distance 0, a seed, has no share
        place = int(torch.searchsorted(total, drawn * total[-1], right=True))
    assigned = torch.stack(apart).argmin(dim=0)
    return move_centroids(edges, assigned, centroids), assigned


def assign_types(edges: Tensor, centroids: Tensor) -> Tensor:
    """Return the centroid (E,) of largest cosine, of equal ones the first, E step.

    ``edges`` is (E, q) and ``centroids`` (M, q).
    """
    # the length of an edge's vector does not change which cosine is the largest
    return (edges @ F.normalize(centroids, dim=1).T).argmax(dim=1)


def move_centroids(edges: Tensor, assigned: Tensor, centroids: Tensor) -> Tensor:
    """Return the mean (M, q) of each type's edges, M step; a type without keeps its own.

    ``edges`` is (E, q), ``assigned`` (E,) and ``centroids`` (M, q).
    """
    count = torch.bincount(assigned, minlength=len(centroids))[:, None]
    total = torch.zeros_like(centroids).index_add(0, assigned, edges)
    return torch.where(count > 0, total / count.clamp(min=1), centroids)


class Channel(nn.Module):
    """Weights of one type: a linear map and L layers of GCN, all of width p."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)
        layers = (GCNConv(width, width) for _ in range(num_layers))
        self.convs = nn.ModuleList(layers)


class FedLITNet(Backbone):
    """A linear map, a channel for each type of edge, and a linear classifier.

    Torch's global generator draws the weights. Dropout follows each GCN layer.

    Notes
    -----
    1. The centroids are a buffer of the state. A pass in training mode assigns the edges to
       types and moves the centroids; a pass in evaluation mode only assigns.
    2. A node without edges has the embedding 0. The published code gives no self-loops to
       the other nodes; here the GCN layers have them, as everywhere in the library.
    """

    centroids: Tensor

    def __init__(self, settings: FedLITSettings, **sizes: Unpack[NetworkSizes]) -> None:
        nn.Module.__init__(self)
        self.readout, self.dropout = False, sizes["dropout"]
        self.em_steps, self.edge = settings.em_steps, settings.edge
        self.hidden_channels = width = sizes["width"]
        depth, count = sizes["num_layers"], settings.types
        first = nn.Linear(sizes["num_features"], width)
        channels = nn.ModuleList(Channel(width, depth) for _ in range(count))
        self.encoder = nn.ModuleDict({"input": first, "channels": channels})
        self.classifier = nn.Linear(width, sizes["num_outputs"])
        self.register_buffer(CENTROIDS, torch.zeros(count, 2 * width))
        self.assigned: Tensor | None = None  # types of the last pass in training mode
        self._first: Tensor | None = None

    def first_map(self, graph: GraphInput) -> Tensor:
        """Return H (N, p), the first linear map of the features."""
        layer: Any = self.encoder["input"]  # type: ignore[index]
        return graph.linear(None, layer.weight, layer.bias)

    @torch.no_grad()
    def start_types(self, graph: GraphInput, generator: torch.Generator) -> None:
        """Set the first centroids; the next pass in training mode has their types."""
        ends = undirected(graph.edge_index)
        edges = edge_vectors(self.first_map(graph), ends, edge=self.edge)
        count = len(self.centroids)
        found, self._first = first_centroids(edges, count, generator=generator)
        self.centroids.copy_(found)

    @torch.no_grad()
    def types_of(self, h: Tensor, ends: Tensor) -> Tensor:
        """Return the type (E,) of each edge; in training mode move the centroids."""
        edges = edge_vectors(h, ends, edge=self.edge)
        if not self.training:
            return assign_types(edges, self.centroids)
        types, self._first = self._first, None
        for _ in range(self.em_steps if types is None else 0):
            types = assign_types(edges, self.centroids)
            self.centroids.copy_(move_centroids(edges, types, self.centroids))
        assert types is not None  # there is at least one step
        self.assigned = types
        return types

    def embed_nodes(self, graph: GraphInput) -> Tensor:
        """Return the sum (N, p) of the channels over the edges of their types."""
        h = self.first_map(graph)
        ends = undirected(graph.edge_index)
        types = self.types_of(h.detach(), ends)
        total = torch.zeros_like(h)
        for number, channel in enumerate(self.encoder["channels"]):  # type: ignore[index]
            own = ends[:, types == number]
            if not own.numel():
                continue
            part = graph.with_edges(torch.cat([own, own.flip(0)], dim=1))
            z = channel.map(h)
            for layer in channel.convs:
                z = self._relu_dropout(layer(part, z))
            is_end = torch.zeros(len(h), 1, dtype=h.dtype, device=h.device)
            total = total + z * is_end.index_fill_(0, own.flatten(), 1.0)
        return total


def match_types(centroids: Tensor, has_edges: Tensor, centres: Tensor) -> list[int]:
    """Return the centre of each of a client's types, one to one.

    Pairs of ``centroids`` and ``centres``, both (M, q), are chosen greedily by the largest
    cosine; of equal ones the first type, then the first centre. Types without edges, by
    ``has_edges`` (M,), get the centres that are left, in order.

    Notes
    -----
    1. The published code reads its matrix of similarities transposed, which is right only
       for a matching that is its own inverse.
    """
    count = len(centres)
    units = (F.normalize(rows.double(), dim=1) for rows in (centroids, centres))
    own, other = units
    free = (own @ other.T).masked_fill(~has_edges[:, None], -math.inf)
    groups: dict[int, int] = {}
    for _ in range(int(has_edges.sum())):
        cluster, centre = divmod(int(free.argmax()), count)
        groups[cluster] = centre
        free[cluster], free[:, centre] = -math.inf, -math.inf
    left = sorted(set(range(count)) - set(groups.values()))
    rest = (cluster for cluster in range(count) if cluster not in groups)
    groups |= dict(zip(rest, left, strict=True))
    return [groups[cluster] for cluster in range(count)]


def in_order(state: Mapping[str, Tensor], order: Sequence[int]) -> dict[str, Tensor]:
    """Return a state whose type m is type ``order[m]`` of ``state``: channel, centroid."""
    out = {}
    for name, tensor in state.items():
        if name == CENTROIDS:
            out[name] = tensor[list(order)]
        elif name.startswith(CHANNEL):
            number, _, rest = name.removeprefix(CHANNEL).partition(".")
            out[name] = state[f"{CHANNEL}{order[int(number)]}.{rest}"]
        else:
            out[name] = tensor
    return out


def average_types(
    states: Sequence[Mapping[str, Tensor]], sizes: Tensor, before: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the unweighted means of channels and centroids of K clients.

    ``states`` have their types in the server's order, as have ``sizes`` (K, M, 2): edges of
    each type, and whether one ends at a training node. Centroids count with an edge,
    channels with a training node. A type that nobody has stays as ``before``.
    """
    counted = sizes > 0
    out = {CENTROIDS: before[CENTROIDS].clone()}
    for m in range(sizes.shape[1]):
        have, train = (counted[:, m, k].nonzero().flatten().tolist() for k in (0, 1))
        if have:
            rows = torch.stack([states[k][CENTROIDS][m] for k in have])
            out[CENTROIDS][m] = rows.mean(dim=0)
        start = f"{CHANNEL}{m}."
        for name in (name for name in before if name.startswith(start)):
            found = [states[k][name] for k in train]
            out[name] = torch.stack(found).mean(dim=0) if found else before[name]
    return out
