"""The models of many clients on one graph, in one forward pass.

A server that distils the clients' models runs all of them on each generated graph. Their
weights are stacked to (K, out, in), see :mod:`flower_fgl.nn.stacked`; the features, the
edges and their propagation are shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.nn.backbone import Backbone, copy_network
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.sparse import Operator
from flower_fgl.nn.stacked import StackedWeights, can_stack, map_each, stack_model
from flower_fgl.nn.topology import OperatorKind

__all__ = ["Ensemble", "SharedInput"]


class _EachOperator:
    """One operator (n, n) on the representations (K, n, p) of K models."""

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def matmul(self, dense: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply each (n, p) from the left, and add a bias (K, p) to the rows."""
        models, rows, _ = dense.shape
        out = self._operator.matmul(dense.transpose(0, 1).reshape(rows, -1))
        out = out.view(rows, models, -1).transpose(0, 1)
        return out if bias is None else out + bias[:, None]


class SharedInput(StackedWeights):
    """A single graph as input of a backbone with the stacked weights of K models.

    What the graph caches serves both inputs.
    """

    def __init__(self, graph: GraphInput) -> None:
        vars(self).update(vars(graph))
        self._graph = graph

    def operator(self, kind: OperatorKind) -> Operator:
        """Return a propagation operator for all models, see :meth:`Topology.operator`."""
        return _EachOperator(self.topology.operator(kind))

    def propagated(self, kind: OperatorKind, coefficients: tuple[float, ...]) -> Tensor:
        """Return the propagated features (n, d), see :meth:`GraphInput.propagated`."""
        return self._graph.propagated(kind, coefficients)

    def linear(
        self, h: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Map representations by the weights of each model: (K, n, q).

        ``h`` are the representations (K, n, p) of each model, or (n, p) of all, or
        ``None`` for the graph's features. Weights are (K, q, p), and the bias (K, q).
        """
        rows = self.x if h is None else h
        if rows.dim() == 3:
            return map_each(rows, weight.transpose(1, 2), bias)
        every = weight.flatten(0, 1)  # (K·q, p)
        if h is None and self._sparse is not None:
            out = self._sparse.matmul(every.t())
        else:
            out = F.linear(rows, every)
        out = out.view(len(out), len(weight), -1).transpose(0, 1)
        return out if bias is None else out + bias[:, None]


class Ensemble:
    """Constant networks of K clients that predict the same nodes.

    ``template`` is a network of the clients' architecture, not changed, and ``states``
    are the clients' K weights, which are copied. Networks that
    :func:`~flower_fgl.nn.stacked.can_stack` are evaluated at once, all others one after
    the other. Both give the same predictions up to rounding.
    """

    def __init__(
        self, template: Backbone, states: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._stack: Backbone | None = None
        self._parts: list[Backbone] = []
        if can_stack(template):
            count = len(states)
            made = [stack_model(template, states, count, torch.rand_like)]
            self._stack = made[0]
        else:
            made = [copy_network(template) for _ in states]
            for part, state in zip(made, states, strict=True):
                part.load_state_dict(dict(state))
            self._parts = made
        for network in made:
            network.eval().requires_grad_(requires_grad=False)

    def predict(self, graph: GraphInput) -> Tensor:
        """Return the logits (K, n, C) of all nodes of a graph, without dropout."""
        if self._stack is not None:
            found: Tensor = self._stack(SharedInput(graph))
            return found
        return torch.stack([part(graph) for part in self._parts])

    def classify(self, embeddings: Tensor, graph: GraphInput) -> Tensor:
        """Return what the heads predict for the same embeddings (n, p): (K, n, C)."""
        if self._stack is not None:
            return self._stack.head(embeddings, SharedInput(graph))
        return torch.stack([part.head(embeddings, graph) for part in self._parts])
