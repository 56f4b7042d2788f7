"""FLIT's weights of items and FLIT+'s virtual adversarial loss, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.flit import (
    difficulty,
    item_losses,
    item_weights,
    output_distance,
    running_mean,
    shift_shapes,
    shifted_output,
    virtual_loss,
)
from flower_fgl.core.label_scores import binary_loss
from flower_fgl.core.regression import mean_of_known, regression_loss
from flower_fgl.core.schema import Schema
from flower_fgl.nn import Backbone, GraphInput, build_model
from tests.nn.test_gine import model_and_graph
from tests.nn.test_typed import SCHEMA, typed_input
from tests.nn.test_typed import build as build_typed

NONE = torch.full((1,), torch.nan)


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def known(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def test_each_item_has_its_own_weight() -> None:
    own, received = column(0.2, 1.0, 2.0), column(0.5, 0.4, 1.5)
    phi = difficulty(own, received)
    torch.testing.assert_close(phi, column(0.2, 1.6, 2.5))
    mean = running_mean(NONE, phi, known(phi))
    assert mean.item() == pytest.approx(1.4333, abs=1e-4)
    omega = item_weights(phi, mean, gamma=0.5)
    torch.testing.assert_close(omega, column(0.3609, 0.8201, 0.9084), atol=1e-4, rtol=0)
    loss = mean_of_known(omega * own, known(own), by_target=False)
    assert loss.item() == pytest.approx(0.9030, abs=1e-4)
    following = running_mean(mean, column(0.4, 0.8), known(column(0.4, 0.8)))
    assert following.item() == pytest.approx(0.8 * 1.43333 + 0.2 * 0.6, abs=1e-4)
    assert following.item() == pytest.approx(1.2667, abs=1e-4)


def test_without_power_all_weights_are_one() -> None:
    own = column(0.0, 1e-8, 3.0).requires_grad_()
    phi = difficulty(own, column(0.0, 0.0, 5.0))
    omega = item_weights(phi, running_mean(NONE, phi, known(phi)), gamma=0.0)
    assert omega.tolist() == [[1.0]] * 3
    (omega * own).mean().backward()  # type: ignore[no-untyped-call]
    assert own.grad is not None
    torch.testing.assert_close(own.grad, torch.full((3, 1), 1 / 3))


def test_equal_items_weigh_alike_and_the_gradient_flows_through_the_weights() -> None:
    outputs = torch.full((4, 1), 0.3, requires_grad=True)
    slopes = {}
    for is_fixed in (True, False):
        own, _ = item_losses(outputs, torch.ones(4, 1), kind="numbers")
        phi = difficulty(own, own)
        omega = item_weights(phi, running_mean(NONE, phi, known(phi)), gamma=0.5)
        assert omega.tolist() == [[pytest.approx(0.7951, abs=1e-4)]] * 4
        fixed = omega.detach() if is_fixed else omega
        (slopes[is_fixed],) = torch.autograd.grad((fixed * own).mean(), outputs)
    (plain,) = torch.autograd.grad((outputs - 1).square().mean(), outputs)
    torch.testing.assert_close(slopes[True], 0.795060 * plain)
    # ∂(ωℓ)/∂ℓ = ω + ½ e^{−1} / ω · ℓ/D, and ℓ = D for equal items
    whole = 0.795060 + 0.5 * math.exp(-1) / 0.795060
    torch.testing.assert_close(slopes[False], whole * plain, atol=1e-5, rtol=1e-4)


def test_a_target_without_a_known_entry_keeps_its_mean() -> None:
    phi = torch.tensor([[1.0, 9.0], [3.0, 5.0]])
    is_known = torch.tensor([[True, False], [True, False]])
    first = running_mean(NONE.expand(2), phi, is_known)
    assert first[0] == 2.0
    assert first[1].isnan()
    second = running_mean(first, phi, ~is_known)
    assert second.tolist() == [2.0, 7.0]
    assert item_weights(phi * is_known, first, gamma=0.5).isfinite().all()


@pytest.mark.parametrize("loss", ["mse", "huber", "mae"])
@pytest.mark.parametrize("by_target", [False, True])
def test_equal_weights_give_the_loss_of_the_task(loss: str, by_target: bool) -> None:
    output = torch.tensor([[0.5, -1.0], [2.0, 0.0]], requires_grad=True)
    z = torch.tensor([[0.0, 1.0], [torch.nan, 0.5]])
    own, is_known = item_losses(output, z, kind="numbers", loss=loss)
    found = mean_of_known(own, is_known, by_target=by_target)
    weight = "targets" if by_target else "entries"
    torch.testing.assert_close(
        found, regression_loss(output, z, loss=loss, target_weight=weight)
    )
    found.backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    assert output.grad.isfinite().all()
    assert output.grad[1, 0] == 0
    labels = torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])
    own, is_known = item_losses(output, labels, kind="labels")
    total = mean_of_known(own, is_known, by_target=False)
    torch.testing.assert_close(total, binary_loss(output, labels))


def test_the_distance_of_two_outputs_by_hand() -> None:
    fixed, moved = torch.zeros(1, 2), torch.tensor([[math.log(3), 0.0]])
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    classes = output_distance(fixed, moved, kind="classes")
    assert classes.tolist() == [[pytest.approx(kl)]]
    entropy = -0.5 * math.log(0.75) - 0.5 * math.log(0.25)
    labels = output_distance(fixed, moved, kind="labels")
    assert labels.tolist() == [[pytest.approx(entropy), pytest.approx(math.log(2))]]
    numbers = output_distance(fixed, moved, kind="numbers")
    assert numbers.tolist() == [[pytest.approx(math.log(3) ** 2), 0.0]]


def test_the_worst_shift_of_a_linear_map_is_its_weight() -> None:
    # f(u) = u·(3, 4): the worst direction is (.6, .8), so v = (2.5 · 5)² = 156.25
    weight = torch.tensor([3.0, 4.0], requires_grad=True)
    u = torch.tensor([[1.0, 2.0], [0.0, 0.0]])

    def output(shifts: Sequence[Tensor]) -> Tensor:
        moved = u + shifts[0] if shifts else u
        return (moved @ weight)[:, None]

    noise = [torch.tensor([[0.3, 0.1], [-0.5, 0.2]])]
    found = virtual_loss(output, noise, kind="numbers")
    torch.testing.assert_close(found, column(156.25, 156.25), rtol=1e-3, atol=0)
    # f(u) and g are constants: ∂v/∂w = 2 (f(u + ε g) − f(u)) (u + ε g), with opposite g
    # 2 · 12.5 · (1 + 1.5, 2 + 2) + 2 · (−12.5) · (−1.5, −2)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    wanted = torch.tensor([62.5 + 37.5, 100.0 + 50.0])
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-2, atol=0)


def small(name: str, *, is_sparse: bool = False) -> tuple[Backbone, GraphInput]:
    if name.startswith("gine"):
        return model_and_graph(name.partition("-")[2])
    _, graph = model_and_graph("both")
    x = graph.x.to_sparse_csr() if is_sparse else graph.x
    model = build_model(
        name, in_channels=4, hidden_channels=5, num_outputs=3, num_layers=2, dropout=0
    )
    return model.eval(), GraphInput(x, graph.edge_index)


@pytest.mark.parametrize("name", ["gcn", "gin", "gcnii", "gine-both", "gine-separate"])
def test_shifts_of_zero_change_nothing(name: str) -> None:
    model, graph = small(name)
    shapes = shift_shapes(model, graph)
    zeros = [torch.zeros(shape) for shape in shapes]
    torch.testing.assert_close(shifted_output(model, graph, zeros), model(graph))
    shifted = shifted_output(model, graph, [part + 0.1 for part in zeros])
    assert (shifted - model(graph)).abs().max() > 1e-3


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_network_without_input_layer_has_shifted_features(is_sparse: bool) -> None:
    model, graph = small("gcn", is_sparse=is_sparse)
    shift = torch.randn(6, 4, generator=torch.Generator().manual_seed(5))
    assert shift_shapes(model, graph) == [(6, 4)]
    wanted = model(GraphInput(graph.dense_features() + shift, graph.edge_index))
    torch.testing.assert_close(shifted_output(model, graph, [shift]), wanted)


@pytest.mark.parametrize("direction", ["both", "separate", "forward"])
def test_a_constant_shift_is_a_shift_of_the_biases(direction: str) -> None:
    model, graph = small(f"gine-{direction}")
    shapes = shift_shapes(model, graph)
    assert len(shapes) == (3 if direction == "separate" else 2)
    rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(6))
    shifts = [row.expand(s) for row, s in zip(rows, shapes, strict=False)]
    found = shifted_output(model, graph, shifts)
    names = ("encoder.input.", "encoder.edges.", "encoder.edges_back.")
    with torch.no_grad():
        for parameter, bias in model.named_parameters():
            for name, row in zip(names, rows, strict=True):
                if parameter.startswith(name) and parameter.endswith("bias"):
                    bias += row
    torch.testing.assert_close(found, model(graph))


@pytest.mark.parametrize("name", ["gcn", "gine-separate"])
@pytest.mark.parametrize("kind", ["classes", "labels", "numbers"])
def test_the_virtual_loss_trains_the_network(name: str, kind: str) -> None:
    model, graph = small(name)
    draw = torch.Generator().manual_seed(7)
    noise = [torch.rand(s, generator=draw) - 0.5 for s in shift_shapes(model, graph)]
    found = virtual_loss(
        lambda shifts: shifted_output(model, graph, shifts),
        noise,
        kind=kind,  # type: ignore[arg-type]
    )
    assert found.shape == (6, 1 if kind == "classes" else 3)
    assert all(parameter.grad is None for parameter in model.parameters())
    found.mean().backward()
    slopes = {n: p.grad for n, p in model.named_parameters()}
    assert all(s is not None and s.isfinite().all() for s in slopes.values())
    assert (
        sum(float(s.abs().max()) > 1e-6 for s in slopes.values() if s is not None) > 3
    )
    plain = output_distance(
        model(graph),
        shifted_output(model, graph, [2.5 * n for n in noise]),
        kind=kind,  # type: ignore[arg-type]
    )
    assert found.mean() > plain.mean()  # the direction found is worse than a random one


def test_a_typed_network_has_shifted_hidden_features() -> None:
    model, graph = build_typed("rgcn").eval(), typed_input()
    row = torch.randn(4, generator=torch.Generator().manual_seed(8))
    assert shift_shapes(model, graph) == [(5, 4)]
    found = shifted_output(model, graph, [row.expand(5, 4)])
    with torch.no_grad():
        for kind in model.encoder["types"]:
            kind.bias += row
    torch.testing.assert_close(found, model(graph))


def test_a_typed_graph_without_features_has_nothing_to_shift() -> None:
    schema = Schema("a", (("a", 0), ("b", 0)), SCHEMA.relations)
    model, graph = build_typed("rgcn", schema), typed_input()
    graph = graph.with_features(graph.x[:, :0])
    noise = [torch.rand(shape) - 0.5 for shape in shift_shapes(model, graph)]
    found = virtual_loss(
        lambda shifts: shifted_output(model, graph, shifts), noise, kind="classes"
    )
    torch.testing.assert_close(found, torch.zeros(5, 1))
