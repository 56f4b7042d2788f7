"""Neighbour sampling for all nodes at once, and the resulting blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flower_fgl.nn.computation_graph import NeighbourLists

__all__ = ["Block", "Candidates", "NeighbourLists", "sample_block", "sample_neighbours"]


class Candidates(NamedTuple):
    """Pairs of a target node and a neighbour that may be kept, both (m,), int64.

    Targets are ascending positions. Pairs are distinct unless the graph has duplicate
    edges.
    """

    target: Tensor
    neighbour: Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """The nodes (n,) whose features determine a batch's predictions, ADPFedGNN Sec. 3.2.

    The batch's nodes come first. ``layers`` are the pairs of each layer as positions in
    ``nodes``, the first layer first.
    """

    nodes: Tensor
    layers: tuple[Candidates, ...]


def sample_neighbours(
    lists: NeighbourLists, nodes: Tensor, limit: int, generator: torch.Generator
) -> Candidates:
    """Draw up to ``limit`` (k) neighbours of each node, without replacement, on the CPU.

    A node with at most k keeps all; for other nodes every set of k is equally likely. The
    targets are positions in ``nodes``, the neighbours nodes of the graph.
    """
    target, entry = lists.sample(nodes, limit, generator)
    return Candidates(target, lists.neighbour.index_select(0, entry))


def sample_block(
    lists: NeighbourLists,
    batch: Tensor,
    *,
    limit: int,
    num_layers: int,
    generator: torch.Generator,
) -> Block:
    """Draw a block: neighbours of distinct nodes, their neighbours, and so on.

    Up to ``limit`` neighbours per node and layer, drawn independently in each layer.
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
