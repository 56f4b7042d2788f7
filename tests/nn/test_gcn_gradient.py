"""The gradient of a GCN without autograd, against autograd's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.gcn_gradient import GCNGradient
from flower_fgl.nn.models import build_model
from flower_fgl.nn.sparse import csr_matrix, lay_out_for_sparse
from flower_fgl.nn.stacked import StackedInput, stack_model

C, D, H = 3, 6, 4


def network(*, name: str = "gcn", layers: int = 2, dropout: float = 0.0) -> Backbone:
    return build_model(
        name, in_channels=D, hidden_channels=H, num_classes=C, num_layers=layers,
        dropout=dropout,
    )  # fmt: skip


def graph(size: int, generator: torch.Generator, *, is_sparse: bool) -> GraphInput:
    x = torch.randn(size, D, generator=generator)
    x *= torch.rand(size, D, generator=generator) < 0.5
    path = torch.stack([torch.arange(size - 1), torch.arange(1, size)])
    edges = torch.cat([path, path.flip(0)], dim=1)
    if is_sparse:
        row, column = x.nonzero().T
        x = csr_matrix(row, column, x[row, column], (size, D))
    return GraphInput(x, edges)


def compare(model: Backbone, inputs: GraphInput, rows: Tensor, least: Tensor) -> None:
    """Compare the losses, and all gradients, with those of autograd."""
    log_probs = model(inputs).log_softmax(dim=-1)
    loss = least - (rows * log_probs).sum(dim=(-2, -1))
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(loss.sum(), list(parameters.values()))
    assert GCNGradient.suits(model, inputs)
    written = GCNGradient(model, inputs, rows, least)
    written.compute()
    torch.testing.assert_close(written.loss(), loss.detach())
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride(), name
        assert parameter.grad.any()
        torch.testing.assert_close(parameter.grad, gradient, msg=name)


@pytest.mark.parametrize("is_turned", [True, False])
@pytest.mark.parametrize("is_sparse", [True, False])
@pytest.mark.parametrize("layers", [2, 3])
def test_gradients_are_those_of_autograd(
    generator: torch.Generator, layers: int, is_sparse: bool, is_turned: bool
) -> None:
    model, inputs = network(layers=layers), graph(5, generator, is_sparse=is_sparse)
    if is_turned:
        lay_out_for_sparse(model, D)
    rows = torch.rand(5, C, generator=generator)
    rows[2] = 0.0  # a node without loss
    compare(model, inputs, rows, torch.tensor([0.3]))


@pytest.mark.parametrize("is_turned", [True, False])
@pytest.mark.parametrize("is_sparse", [True, False])
def test_gradients_of_a_stack_are_those_of_autograd(
    generator: torch.Generator, is_sparse: bool, is_turned: bool
) -> None:
    graphs = [graph(size, generator, is_sparse=is_sparse) for size in (5, 3)]
    template = network()
    if is_turned:
        lay_out_for_sparse(template, D)
    states = [network().state_dict() for _ in graphs]
    model = stack_model(template, states, 2)
    rows = torch.rand(2, 5, C, generator=generator)
    rows[1, 3:] = 0.0
    compare(model, StackedInput(graphs), rows, torch.tensor([0.3, 0.1]))


def test_edge_weights_count(generator: torch.Generator) -> None:
    plain = graph(4, generator, is_sparse=False)
    weight = torch.rand(plain.edge_index.shape[1], generator=generator)
    inputs = GraphInput(plain.x, plain.edge_index, weight)
    rows = torch.rand(4, C, generator=generator)
    compare(network(), inputs, rows, torch.zeros(1))


def test_other_networks_are_left_to_autograd(generator: torch.Generator) -> None:
    inputs = graph(4, generator, is_sparse=False)
    x = inputs.x.clone().requires_grad_()
    frozen = network()
    next(frozen.parameters()).requires_grad_(False)
    assert GCNGradient.suits(network(), inputs)
    assert not GCNGradient.suits(network(dropout=0.5), inputs)
    assert not GCNGradient.suits(network(name="graphsage"), inputs)
    assert not GCNGradient.suits(frozen, inputs)
    assert not GCNGradient.suits(network(), GraphInput(x, inputs.edge_index))
