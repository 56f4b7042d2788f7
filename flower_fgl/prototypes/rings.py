"""Which nodes lie at which distance of which: the neighbourhoods of FedPG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from flower_fgl.nn.sparse import csr_matrix

__all__ = ["Pairs", "annotate", "ring_pairs", "select_pairs"]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Centres and their neighbours at one hop.

    Parameters
    ----------
    centre, neighbour : Tensor of shape (E,), int64
        v and u of each pair, sorted by centre.
    """

    centre: Tensor
    neighbour: Tensor
    _incidence: list[Tensor] = field(default_factory=list, repr=False)

    def incidence(self, num_nodes: int) -> tuple[Tensor, Tensor]:
        """Return the 0/1 matrices that sum over the pairs of each node, made once.

        Parameters
        ----------
        num_nodes : int
            Number of nodes N.

        Returns
        -------
        by_neighbour, by_centre : Tensor of shape (N, E), sparse CSR, float32
        """
        if not self._incidence:
            place = torch.arange(len(self.centre), device=self.centre.device)
            ones = torch.ones(len(place), device=place.device)
            shape = (num_nodes, len(place))
            self._incidence.extend(
                csr_matrix(node, place, ones, shape)
                for node in (self.neighbour, self.centre)
            )
        return self._incidence[0], self._incidence[1]


def ring_pairs(
    edge_index: Tensor, num_nodes: int, hops: int, *, mode: str = "ring"
) -> list[Pairs]:
    """Find the nodes at each distance of each node, FedPG Sec. III-A.

    Parameters
    ----------
    edge_index : Tensor of shape (2, E), int64
        Undirected edges in both directions.
    num_nodes : int
        Number of nodes N.
    hops : int, at least 0
        L, the largest distance.
    mode : {"ring", "within"}
        Nodes at distance exactly h, or at distance 1 to h.

    Returns
    -------
    list of Pairs
        Length L + 1; hop 0 pairs each node with itself. Beyond the diameter of the
        graph a hop has no pairs.

    Notes
    -----
    1. The paper does not say which of the two; its "h-hop neighbours" are read as
       exactly h (``ring``).
    2. The nodes first reached by h + 1 steps are the product of those reached by h and
       the adjacency matrix, less all reached before: sparse products, no loop over
       nodes. Memory is that of the largest ring.
    """
    source, target = edge_index.cpu().numpy()
    ones = np.ones(len(source), dtype=np.float32)
    shape = (num_nodes, num_nodes)
    adjacency = sparse.csr_matrix((ones, (source, target)), shape=shape)
    identity = sparse.identity(num_nodes, dtype=np.float32, format="csr")
    frontier, reached = identity, identity
    out = [_pairs(identity, edge_index.device)]
    for _ in range(hops):
        step = _boolean(frontier @ adjacency)
        frontier = _boolean(step - step.multiply(reached))
        reached = _boolean(reached + frontier)
        kept = frontier if mode == "ring" else _boolean(reached - identity)
        out.append(_pairs(kept, edge_index.device))
    return out


def _boolean(matrix: sparse.csr_matrix) -> sparse.csr_matrix:
    """Set all non-zero entries to 1 and drop the zeros, columns sorted."""
    matrix = matrix.tocsr()
    matrix.eliminate_zeros()
    matrix.sort_indices()
    matrix.data[:] = 1
    return matrix


def _pairs(matrix: sparse.csr_matrix, device: torch.device) -> Pairs:
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    columns = matrix.indices.astype(np.int64)
    return Pairs(
        torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)
    )


def annotate(
    logits: Tensor, index: Tensor, labels: Tensor, *, min_confidence: float
) -> Tensor:
    """Label nodes by prediction, training nodes by their label, FedPG Algorithm 1.

    Parameters
    ----------
    logits : Tensor of shape (N, C), float32
        Predictions for all local nodes.
    index, labels : Tensor of shape (n,), int64
        Training nodes and their classes.
    min_confidence : float in [0, 1]
        Softmax probability below which a node stays without label.

    Returns
    -------
    Tensor of shape (N,), int64
        Class of each node, -1 for none.
    """
    confidence, classes = logits.softmax(dim=1).max(dim=1)
    annotation = torch.where(confidence >= min_confidence, classes, -1)
    annotation[index] = labels
    return annotation


def select_pairs(
    hops: Sequence[Pairs],
    annotation: Tensor,
    *,
    same_class: bool,
    limit: int,
    generator: torch.Generator,
) -> list[Pairs]:
    """Keep the pairs that enter prototypes, N_c^h(v) of FedPG Sec. III-A.

    Parameters
    ----------
    hops : sequence of Pairs
        Hop 0 first.
    annotation : Tensor of shape (N,), int64
        Class of each node, -1 for none.
    same_class : bool
        Whether a neighbour must have its centre's class.
    limit : int
        Neighbours of a node and hop kept at most.
    generator : torch.Generator
        Draws which ones, on the CPU.

    Returns
    -------
    list of Pairs
        Centres are annotated.
    """
    out = []
    for pairs in hops:
        wanted = annotation[pairs.centre]
        keep = wanted >= 0
        if same_class:
            keep &= annotation[pairs.neighbour] == wanted
        kept = Pairs(pairs.centre[keep], pairs.neighbour[keep])
        out.append(_subsample(kept, len(annotation), limit, generator))
    return out


def _subsample(
    pairs: Pairs, num_nodes: int, limit: int, generator: torch.Generator
) -> Pairs:
    """Draw ``limit`` neighbours, each set alike, of every node that has more."""
    degree = torch.bincount(pairs.centre, minlength=num_nodes)
    crowded = (degree > limit)[pairs.centre]
    if not bool(crowded.any()):
        return pairs
    places = crowded.nonzero().squeeze(1)
    draw = torch.rand(len(places), generator=generator, dtype=torch.float64)
    draw = draw.to(places.device)
    # the `limit` smallest draws of a node are below this with near certainty
    ceiling = (limit + 6 * limit**0.5) / degree[pairs.centre[places]]
    low = draw < ceiling
    many = torch.bincount(pairs.centre[places[low]], minlength=num_nodes)
    if bool((many >= limit)[degree > limit].all()):
        places, draw = places[low], draw[low]
    else:
        many = torch.where(degree > limit, degree, 0)
    # sorting by centre plus a number below 1 shuffles within each centre
    places = places[torch.argsort(pairs.centre[places] + draw)]
    start = many.cumsum(0) - many
    rank = torch.arange(len(places), device=places.device)
    rank -= start[pairs.centre[places]]
    keep = ~crowded
    keep[places[rank < limit]] = True
    return Pairs(pairs.centre[keep], pairs.neighbour[keep])
