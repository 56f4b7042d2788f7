"""Gradient of a GCN on constant targets, written out: training steps without autograd.

With small graphs autograd, and the loss as a function of the logits, take longer than the
products of a step.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from flower_fgl.nn.backbone import Backbone
from flower_fgl.nn.graph_input import GraphInput
from flower_fgl.nn.layers import ONE_STEP
from flower_fgl.nn.message_passing import GCN
from flower_fgl.nn.sparse import SparseOperator, multiply
from flower_fgl.nn.stacked import StackedInput

__all__ = ["GCNGradient"]


class GCNGradient:
    """The loss ``least − Σ_i T_i · log p_i`` of a GCN without dropout, or of K of them.

    ``rows`` T (..., n, C) are the targets of each node, and ``least`` (...) a constant;
    with stacked weights, and a :class:`StackedInput`, they start with K.
    """

    def __init__(
        self, model: Backbone, inputs: GraphInput, rows: Tensor, least: Tensor
    ) -> None:
        layers: Any = (*cast(nn.ModuleList, model.encoder), model.classifier)
        self._layers: list[tuple[nn.Parameter, nn.Parameter]] = [
            (layer.lin.weight, layer.bias) for layer in layers
        ]
        operator = cast(SparseOperator, inputs.topology.operator("normalised"))
        self._forth, self._back = operator.matrix, operator.transpose
        is_sparse = inputs.x.layout == torch.sparse_csr
        self._features = SparseOperator(inputs.x) if is_sparse else None
        self._x = None if is_sparse else inputs.propagated("normalised", ONE_STEP)
        self._product = torch.mm if rows.dim() == 2 else torch.bmm
        self._rows, self._least = rows, least
        self._total = rows.sum(dim=-1, keepdim=True)

    @staticmethod
    def suits(model: Backbone, inputs: GraphInput) -> bool:
        """Return whether the gradient of a network on a graph can be computed here."""
        return (
            type(model) is GCN
            and type(inputs) in (GraphInput, StackedInput)
            and model.dropout == 0
            and model.edge_direction == "both"
            and not model.has_linear_head
            and model.decoder is None
            and inputs.union is None
            and inputs.topology.is_constant
            and not inputs.x.requires_grad
            and all(parameter.requires_grad for parameter in model.parameters())
        )

    @torch.no_grad()
    def compute(self) -> None:
        """Run the network, and set the gradient of each of its parameters."""
        hidden: list[Tensor] = []
        for weight, bias in self._layers:
            if hidden:
                z = self._along(self._forth, self._product(hidden[-1], weight.mT))
            elif self._features is None:
                z = self._product(cast(Tensor, self._x), weight.mT)
            else:
                across = weight.mT.reshape(-1, weight.shape[-2])
                z = multiply(self._features.matrix, across)
                z = self._along(self._forth, z.view(*self._rows.shape[:-1], -1))
            z = z.add_(bias.unsqueeze(-2))
            hidden.append(z.clamp_(min=0) if len(hidden) + 1 < len(self._layers) else z)
        self._logits = hidden.pop()
        # (Σ_c T_ic) p_i − T_i; softmax of a few classes takes ten times as long
        grad = (self._logits - self._logits.amax(dim=-1, keepdim=True)).exp_()
        grad.mul_(self._total / grad.sum(dim=-1, keepdim=True)).sub_(self._rows)
        for number in reversed(range(len(self._layers))):
            weight, bias = self._layers[number]
            bias.grad = grad.sum(dim=-2)
            if not number and self._features is None:
                weight.grad = self._to_weight(grad, cast(Tensor, self._x), weight)
                break
            grad = self._along(self._back, grad)
            if not number:
                assert self._features is not None
                flat = multiply(
                    self._features.transpose, grad.reshape(-1, grad.shape[-1])
                )
                weight.grad = _in_layout(flat.view(weight.mT.shape).mT, weight)
                break
            weight.grad = self._to_weight(grad, hidden[number - 1], weight)
            grad = torch.ops.aten.threshold_backward(
                self._product(grad, weight), hidden[number - 1], 0
            )

    @torch.no_grad()
    def loss(self) -> Tensor:
        """Return the loss of the last :meth:`compute`, (...)."""
        fitted = self._rows * self._logits.log_softmax(dim=-1)
        return self._least - fitted.sum(dim=(-2, -1))

    def _along(self, matrix: Tensor, z: Tensor) -> Tensor:
        """Propagate representations."""
        return multiply(matrix, z.reshape(-1, z.shape[-1])).view(z.shape)

    def _to_weight(self, grad: Tensor, h: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the weights of a product, in their layout."""
        if weight.is_contiguous():
            return self._product(grad.mT, h)
        return _in_layout(self._product(h.mT, grad).mT, weight)


def _in_layout(grad: Tensor, weight: Tensor) -> Tensor:
    """Copy a gradient if its layout is not that of the weights."""
    if grad.stride() == weight.stride():
        return grad
    return torch.empty_like(weight, requires_grad=False).copy_(grad)
