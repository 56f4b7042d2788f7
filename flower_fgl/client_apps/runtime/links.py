"""Training edges of a client: to classify, or with new negatives in each epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flower_fgl.client_apps.runtime.training import TrainingSet
from flower_fgl.datasets.client_graph import Graph
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.link import draw_negatives, pair_codes, pair_sides

__all__ = ["EdgeTrainingSet", "LinkTrainingSet", "pair_training_set"]


def pair_training_set(graph: Graph, inputs: GraphInput, labels: Tensor) -> TrainingSet:
    """Return the training edges of a graph on the CPU; with ``pair_x``: edges with labels.

    ``inputs`` is its model input, ``labels`` are classes or numbers of all pairs.
    """
    if graph.pair_x is None:
        return LinkTrainingSet.of(graph, inputs)
    index = (graph.masks["train"] & (graph.y >= 0)).nonzero().squeeze(1)
    device = inputs.device
    return EdgeTrainingSet(inputs, index.to(device), labels[index].to(device))


@dataclass(frozen=True, eq=False)
class EdgeTrainingSet(TrainingSet):
    """Training edges with classes or numbers; ``index`` refers to pairs of ``inputs``."""

    def logits(self, model: Backbone, index: Tensor) -> Tensor:
        """Return differentiable logits of some edges, of shape (b, C)."""
        pairs, pair_x = self.inputs.pairs, self.inputs.pair_x
        assert pairs is not None
        assert pair_x is not None
        out: Tensor = model(self.inputs.with_pairs(pairs[:, index], pair_x[index]))
        return out


@dataclass(frozen=True, eq=False)
class LinkTrainingSet(TrainingSet):
    """Training edges as positives; :meth:`epoch` adds as many negatives.

    ``index`` refers to ``pairs`` (2, n) of nodes. ``known`` (T,) are codes of the T
    training edges on the CPU, see :func:`~flower_fgl.nn.link.pair_codes`; ``side`` (N,)
    is the side of each node if negatives join different ones, see
    :func:`~flower_fgl.nn.link.pair_sides`.

    Notes
    -----
    1. A negative is never a training edge. It may be a validation or test edge: a client
       that left these out would use them in training.
    2. All edges decide whether the graph is bipartite; the sides follow from the training
       edges alone.
    """

    pairs: Tensor
    known: Tensor
    side: Tensor | None = None

    @classmethod
    def of(cls, graph: Graph, inputs: GraphInput) -> LinkTrainingSet:
        """Return the training edges of a graph on the CPU with ``pairs``, and its input."""
        assert graph.pairs is not None
        pairs = graph.pairs[:, graph.masks["train"]]
        index = torch.arange(pairs.shape[1], device=inputs.device)
        edges, number = graph.pairs[:, graph.y == 1], graph.num_nodes
        return cls(
            inputs,
            index,
            torch.ones_like(index),
            pairs.to(inputs.device),
            pair_codes(pairs, number),
            pair_sides(edges, number, graph.node_type, pairs),
        )

    def epoch(self, generator: torch.Generator | None) -> LinkTrainingSet:
        """Return the training edges and as many new negatives, from a CPU generator."""
        if generator is None:
            raise ValueError("Link prediction needs a generator, to draw negatives.")
        number = len(self.known)
        drawn = draw_negatives(
            self.known, self.inputs.num_nodes, number, generator, self.side
        )
        pairs = torch.cat([self.pairs[:, :number], drawn.to(self.pairs.device)], dim=1)
        index = torch.arange(pairs.shape[1], device=pairs.device)
        return replace(self, index=index, labels=(index < number).long(), pairs=pairs)

    def logits(self, model: Backbone, index: Tensor) -> Tensor:
        """Return differentiable logits of some pairs, of shape (b, 2)."""
        out: Tensor = model(self.inputs.with_pairs(self.pairs[:, index]))
        return out
