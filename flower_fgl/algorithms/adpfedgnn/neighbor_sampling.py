"""Neighbour sampling for all nodes at once, and the resulting blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flower_fgl.nn.graph_union import concatenated_ranges

__all__ = ["Block", "Candidates", "NeighbourLists", "sample_block", "sample_neighbours"]


@dataclass(frozen=True, eq=False)
class NeighbourLists:
    """The neighbours of every node, in compressed sparse rows.

    Parameters
    ----------
    start : Tensor of shape (N + 1,), int64
        Start of each node's neighbours in ``neighbour``.
    neighbour : Tensor of shape (E,), int64
        Sources of the edges, sorted by target.
    """

    start: Tensor
    neighbour: Tensor

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int) -> NeighbourLists:
        """Sort the edges of a graph by their target.

        Parameters
        ----------
        edge_index : Tensor of shape (2, E), int64
            Sources and targets.
        num_nodes : int
            Number of nodes N.

        Returns
        -------
        NeighbourLists
            Usable inside and outside inference mode.
        """
        with torch.inference_mode(False):
            source, target = edge_index.clone()
            order = torch.argsort(target, stable=True)
            start = torch.zeros(num_nodes + 1, dtype=torch.int64, device=target.device)
            start[1:] = torch.bincount(target, minlength=num_nodes).cumsum(0)
            return cls(start, source[order])

    @property
    def num_nodes(self) -> int:
        """Number of nodes N."""
        return self.start.numel() - 1

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return int(self.start.nbytes + self.neighbour.nbytes)


class Candidates(NamedTuple):
    """Pairs of a target node and a neighbour that may be kept.

    Parameters
    ----------
    target : Tensor of shape (m,), int64
        Positions of the targets, ascending.
    neighbour : Tensor of shape (m,), int64
        Their neighbours. Pairs are distinct unless the graph has duplicate edges.
    """

    target: Tensor
    neighbour: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """The nodes whose features determine a batch's predictions, ADPFedGNN Sec. 3.2.

    Parameters
    ----------
    nodes : Tensor of shape (n,), int64
        Nodes of the graph, those of the batch first.
    layers : tuple of Candidates
        Pairs of each layer as positions in ``nodes``, the first layer first.
    """

    nodes: Tensor
    layers: tuple[Candidates, ...]


def sample_neighbours(
    lists: NeighbourLists, nodes: Tensor, limit: int, generator: torch.Generator
) -> Candidates:
    """Draw up to ``limit`` neighbours of each node, without replacement.

    Parameters
    ----------
    lists : NeighbourLists
        The graph.
    nodes : Tensor of shape (n,), int64
        Targets.
    limit : int
        Maximum number of neighbours per node, k in the paper, at least 1. A node with
        at most k keeps all; for other nodes every set of k is equally likely.
    generator : torch.Generator
        Draws on the CPU.

    Returns
    -------
    Candidates
        Targets as positions in ``nodes``; neighbours as nodes of the graph.
    """
    first = lists.start[nodes]
    degree = lists.start[nodes + 1] - first
    count = degree.clamp(max=limit)
    place = torch.arange(len(nodes), device=nodes.device)
    target = torch.repeat_interleave(place, count)
    entry = concatenated_ranges(first, count)
    crowded = degree > limit
    if bool(crowded.any()):
        picks = _distinct(degree[crowded], limit, generator)
        drawn = first[crowded][:, None] + picks
        entry.masked_scatter_(crowded.index_select(0, target), drawn)
    return Candidates(target, lists.neighbour.index_select(0, entry))


def _distinct(sizes: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``count`` different numbers below each size: (n, count), int64."""
    # Floyd's algorithm (Bentley & Floyd, CACM 30(9), 1987) for all rows at once: step j
    # draws t from 0 to size − count + j, and takes that maximum instead if t was drawn
    # before. The work does not grow with the sizes.
    # float64 can represent every integer up to 2⁵³
    draws = torch.rand(count, len(sizes), generator=generator, dtype=torch.float64).to(
        sizes.device
    )
    picks = torch.empty_like(draws, dtype=torch.int64)
    for j in range(count):
        last = sizes - count + j
        pick = (draws[j] * (last + 1)).long()
        is_taken = torch.zeros_like(pick, dtype=torch.bool)
        for earlier in picks[:j]:
            is_taken |= earlier == pick
        picks[j] = torch.where(is_taken, last, pick)
    return picks.T


def sample_block(
    lists: NeighbourLists,
    batch: Tensor,
    *,
    limit: int,
    num_layers: int,
    generator: torch.Generator,
) -> Block:
    """Draw a block: neighbours of the batch, their neighbours, and so on.

    Parameters
    ----------
    lists, limit, generator
        As in :func:`sample_neighbours`; the limit holds per node and layer.
    batch : Tensor of shape (B,), int64
        Distinct nodes.
    num_layers : int
        Layers of the network.

    Returns
    -------
    Block
        Neighbours are drawn independently in each layer.
    """
    place = torch.full((lists.num_nodes,), -1, device=batch.device)
    place[batch] = torch.arange(len(batch), device=batch.device)
    nodes, layers = batch, []
    for _ in range(num_layers):
        target, neighbour = sample_neighbours(lists, nodes, limit, generator)
        fresh = torch.unique(neighbour[place[neighbour] < 0])
        place[fresh] = len(nodes) + torch.arange(len(fresh), device=batch.device)
        nodes = torch.cat([nodes, fresh])
        layers.append(Candidates(target, place[neighbour]))
    return Block(nodes, tuple(layers[::-1]))
