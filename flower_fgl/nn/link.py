"""Decoders of pairs of nodes, and negatives of link prediction.

A decoder of links turns the embeddings of two nodes into the logits of the classes
``no link`` (0) and ``link`` (the score). Their cross-entropy is the binary cross-entropy of
the score. The decoder of edges turns them into one logit per class.
"""

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

__all__ = ["DotDecoder", "EdgeDecoder", "MLPDecoder", "draw_negatives", "graph_sides"]
__all__ += ["make_decoder", "pair_codes", "pair_sides"]

MAX_DRAWS = 100
"""Attempts to draw enough negatives; each one at least halves what is missing."""
MIN_CYCLES = 10
"""Independent cycles, all of them even, that show that a graph has two sides. In a random
graph each is odd or even with about equal chance: 2^-10 is one in a thousand."""


class DotDecoder(nn.Module):
    """Score a pair by the dot product of its embeddings; it has no parameters."""

    def forward(self, embedding: Tensor, pairs: Tensor) -> Tensor:
        """Return the logits (P, 2) of pairs (2, P) of nodes, from embeddings (N, p)."""
        one, other = embedding[pairs[0]], embedding[pairs[1]]
        return _logits((one * other).sum(dim=-1))


class MLPDecoder(nn.Module):
    """Score a pair by a network of two layers on the product of its embeddings.

    The elementwise product makes the score the same for both directions of a pair.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, 1)

    def forward(self, embedding: Tensor, pairs: Tensor) -> Tensor:
        """Return the logits of pairs, see :meth:`DotDecoder.forward`."""
        product = embedding[pairs[0]] * embedding[pairs[1]]
        return _logits(self.out(F.relu(self.hidden(product))).squeeze(-1))


class EdgeDecoder(nn.Module):
    """Predict an edge by a network of two layers on both ends and the edge's features.

    The ends are concatenated in the order source, target: an edge has a direction here,
    whatever the direction in which messages are passed.
    """

    def __init__(self, channels: int, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(2 * channels + num_features, channels)
        self.out = nn.Linear(channels, num_outputs)

    def forward(self, embedding: Tensor, pairs: Tensor, pair_x: Tensor) -> Tensor:
        """Return the logits (P, C) of edges (2, P) with features (P, a), from (N, p)."""
        both = torch.cat([embedding[pairs[0]], embedding[pairs[1]], pair_x], dim=1)
        out: Tensor = self.out(F.relu(self.hidden(both)))
        return out


def _logits(score: Tensor) -> Tensor:
    """Return logits whose softmax is the sigmoid of the score."""
    return torch.stack([torch.zeros_like(score), score], dim=-1)


def make_decoder(kind: str, channels: int) -> nn.Module:
    """Build a decoder for embeddings of a width, for the setting ``link-decoder``.

    ``edge:CxA`` is an :class:`EdgeDecoder` with C outputs and A features, see
    :meth:`~flower_fgl.core.config.RunConfig.decoder`.
    """
    if kind.startswith("edge:"):
        num_outputs, num_features = map(int, kind.removeprefix("edge:").split("x"))
        return EdgeDecoder(channels, num_features, num_outputs)
    return MLPDecoder(channels) if kind == "mlp" else DotDecoder()


def pair_codes(pairs: Tensor, num_nodes: int) -> Tensor:
    """Return a number per undirected pair: smaller node · N + larger node; (P,), int64."""
    low, high = pairs.amin(dim=0), pairs.amax(dim=0)
    return low * num_nodes + high


def graph_sides(edges: Tensor, num_nodes: int) -> tuple[Tensor, bool]:
    """Find the sides of the nodes, (N,), int64, and whether the graph is bipartite.

    Undirected ``edges`` (2, E) are given once or in both directions. A connected component
    without odd cycles has two sides; in any other one all nodes have the same side. The
    graph is bipartite if no component has an odd cycle, and there are at least
    ``MIN_CYCLES`` independent cycles: a forest says nothing about sides.

    In the bipartite double cover each node v has two copies, and each edge (u, v) joins one
    copy of u with the other copy of v. The copies of a node are connected if and only if
    its component has an odd cycle.
    """
    row, col = edges.numpy()
    cover = scipy.sparse.coo_array(
        (np.ones(2 * len(row), dtype=np.int8),
         (np.concatenate([row, row + num_nodes]), np.concatenate([col + num_nodes, col]))),
        shape=(2 * num_nodes, 2 * num_nodes),
    )  # fmt: skip
    number, label = scipy.sparse.csgraph.connected_components(cover, directed=False)
    side, other = torch.from_numpy(label.astype(np.int64)).view(2, num_nodes)
    if bool((side == other).any()):
        return side, False
    # without an odd cycle each component has two copies in the cover
    distinct = len(torch.unique(pair_codes(edges, num_nodes)))
    return side, distinct - num_nodes + number // 2 >= MIN_CYCLES


def pair_sides(
    edges: Tensor,
    num_nodes: int,
    node_type: Tensor | None = None,
    training: Tensor | None = None,
) -> Tensor | None:
    """Return the side of each node, (N,), int64: negatives join different sides.

    All predicted ``edges`` (2, E) decide whether there are sides; those of a bipartite
    graph follow from ``training`` (2, T), by default all. The result is ``None`` in a plain
    graph that is not bipartite. In a typed graph only nodes of the kinds that ``edges``
    join have a side, others -1; two kinds are two sides, and each node of a single kind is
    one by itself.
    """
    kinds = None if node_type is None else torch.unique(node_type[edges])
    if kinds is None or node_type is None or len(kinds) < 2:
        side, is_bipartite = graph_sides(edges, num_nodes)
        if is_bipartite and training is not None:
            side = graph_sides(training, num_nodes)[0]
        if kinds is None or node_type is None:
            return side if is_bipartite else None
        side = side if is_bipartite else torch.arange(num_nodes)
    else:
        side = (node_type == kinds[1]).long()
    return torch.where(torch.isin(node_type, kinds), side, -1)


def draw_negatives(
    known: Tensor,
    num_nodes: int,
    number: int,
    generator: torch.Generator,
    side: Tensor | None = None,
) -> Tensor:
    """Draw distinct pairs of different nodes that are not known, uniformly.

    Returns pairs (2, n) of (smaller node, larger node), in random order; n is ``number``,
    or that of all free pairs if it is smaller. ``known`` (E,) are the :func:`pair_codes` of
    known pairs. Two nodes of one ``side`` (N,), see :func:`pair_sides`, are no pair, and
    nodes with -1 are in none. The generator draws on the CPU.
    """
    known = torch.unique(known)
    between = None if side is None else _PairsBetween(side)
    total = num_nodes * (num_nodes - 1) // 2 if between is None else between.number
    free = total - len(known)
    if free <= 2 * number:  # draw from the list of all free pairs
        every = (
            torch.triu_indices(num_nodes, num_nodes, 1)
            if between is None
            else between.pairs(torch.arange(total))
        )
        codes = pair_codes(every, num_nodes)
        left = every[:, ~torch.isin(codes, known)]
        return left[:, torch.randperm(left.shape[1], generator=generator)[:number]]
    found = torch.zeros(0, dtype=torch.int64)
    for _ in range(MAX_DRAWS):
        missing = number - len(found)
        if not missing:
            break
        if between is None:
            drawn = torch.randint(num_nodes, (2, 2 * missing + 16), generator=generator)
        else:
            place = torch.randint(total, (2 * missing + 16,), generator=generator)
            drawn = between.pairs(place)
        codes = pair_codes(drawn[:, drawn[0] != drawn[1]], num_nodes)
        codes = codes[~torch.isin(codes, known)]
        # the first of each repeated code, in the order drawn
        both = torch.cat([found, codes])
        distinct, place = torch.unique(both, return_inverse=True)
        first = torch.full((len(distinct),), len(both)).scatter_reduce_(
            0, place, torch.arange(len(both)), "amin"
        )
        found = both[first.sort().values][:number]
    return torch.stack([found // num_nodes, found % num_nodes])


class _PairsBetween:
    """All pairs of nodes of different sides, numbered from 0; side -1 has none."""

    def __init__(self, side: Tensor) -> None:
        ordered, nodes = side.sort(stable=True)
        self.nodes = nodes[ordered >= 0]
        sizes = torch.unique_consecutive(ordered[ordered >= 0], return_counts=True)[1]
        # a node's partners are the nodes behind its side, in the order of sides
        self.begin = sizes.cumsum(0).repeat_interleave(sizes)
        self.last = (len(self.nodes) - self.begin).cumsum(0)

    @property
    def number(self) -> int:
        """Number of pairs."""
        return int(self.last[-1]) if len(self.last) else 0

    def pairs(self, place: Tensor) -> Tensor:
        """Return pairs by their numbers, each as (smaller node, larger node)."""
        one = torch.searchsorted(self.last, place, right=True)
        other = len(self.nodes) - (self.last[one] - place)
        ends = self.nodes[torch.stack([one, other])]
        return torch.stack([ends.amin(dim=0), ends.amax(dim=0)])
