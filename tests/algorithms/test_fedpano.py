from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flower_fgl.algorithms.fedpano import (
    NodeGenerator,
    PersonalNet,
    SharedParts,
    build_encoder,
    descend_distance,
    entropy_slope,
    gaussian_copies,
    mean_distance,
    mean_rows,
    spread,
    synthesise,
)
from flower_fgl.core.metrics import auroc, score
from flower_fgl.methods.fedpano import FedPANOSettings
from flower_fgl.nn import GraphInput, num_parameters
from flower_fgl.nn.layers import bound
from flower_fgl.nn.stacked import Descent, stack_model

EDGES = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])  # node 3 is isolated
SIZES = {"in_channels": 6, "hidden_channels": 8, "num_layers": 2, "dropout": 0.0}


def graph() -> GraphInput:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    return GraphInput(x, EDGES)


def net(model: str = "graphsage", classes: tuple[int, ...] = (1, 3)) -> PersonalNet:
    encoder = build_encoder(model, **SIZES)  # type: ignore[arg-type]
    own = nn.Linear(8, len(classes))
    return PersonalNet(encoder, own, torch.tensor(classes), 5, "l2")


def test_representations_are_bounded_by_rep_norm() -> None:
    h = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(bound(h, "l2"), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    torch.testing.assert_close(bound(h, "tanh"), h.tanh())
    assert bound(h, "none") is h


def test_a_row_of_zeros_has_a_moderate_gradient() -> None:
    h = torch.zeros(1, 3, requires_grad=True)
    bound(h, "l2").sum().backward()
    assert h.grad is not None
    assert h.grad.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("model", ["graphsage", "gcn", "gat", "gin", "sgc", "appnp"])
def test_only_own_classes_are_predicted(model: str) -> None:
    logits = net(model).eval()(graph())
    assert logits.shape == (4, 5)
    assert bool(logits[:, [0, 2, 4]].isneginf().all())
    assert bool(logits[:, [1, 3]].isfinite().all())
    assert set(logits.argmax(dim=1).tolist()) <= {1, 3}
    chances = logits.softmax(dim=1)
    torch.testing.assert_close(chances.sum(dim=1), torch.ones(4))


def test_metrics_accept_logits_without_some_classes() -> None:
    logits = net().eval()(graph())
    y, mask = torch.tensor([1, 3, 0, 1]), torch.ones(4, dtype=torch.bool)
    found = score(logits, y, mask, 5)
    assert found.num_nodes == 4
    assert 0 <= found.accuracy <= 0.75  # class 0 cannot be met
    assert 0 <= auroc(logits, y, mask, 5) <= 1


def test_a_classifier_of_all_classes_can_be_restricted() -> None:
    encoder = build_encoder("graphsage", **SIZES)  # type: ignore[arg-type]
    classifier = nn.Linear(8, 5)
    every = PersonalNet(encoder, classifier, torch.arange(5), 5, "none").eval()(graph())
    some = PersonalNet(encoder, classifier, torch.tensor([0, 4]), 5, "none").eval()
    logits = some(graph())
    torch.testing.assert_close(logits[:, [0, 4]], every[:, [0, 4]])
    assert bool(logits[:, [1, 2, 3]].isneginf().all())


@pytest.mark.parametrize("model", ["graphsage", "gcn", "gat"])
def test_a_representation_is_linear_in_the_last_layer(model: str) -> None:
    encoder = build_encoder(model, **SIZES).eval()  # type: ignore[arg-type]
    h = encoder.represent(graph())
    assert h.shape == (4, 8)
    assert bool((h < 0).any())
    torch.testing.assert_close(encoder.embed_nodes(graph()), h.relu())


def test_the_shared_parts_have_the_stated_numbers_of_parameters() -> None:
    d, h, c = 6, 8, 5
    sizes = {**SIZES, "num_classes": c, "model": "graphsage"}
    network = (2 * d * h + h) + (2 * h * h + h)
    generic, generator = h * c + c, 3 * h * h + 2 * h
    for settings, expected in [
        ({}, network + generic + generator),
        ({"use_client_classifier": False}, network + generic + generator),
        ({"use_shared_classifier": False}, network + generator),
        ({"use_generator": False}, network + generic),
        ({"aggregate_generator": False}, network + generic),
        ({"augment": "gaussian"}, network + generic),
    ]:
        parts = SharedParts(method_config=FedPANOSettings(**settings), **sizes)  # type: ignore[arg-type]
        assert num_parameters(parts) == expected, settings


def test_the_distance_of_equation_7_by_hand() -> None:
    # h = (0, 0), two copies at (3, 4) and (0, 0): (5 + 0) / 2; squared it would be 12.5
    nodes = torch.zeros(1, 2)
    synthetic = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    torch.testing.assert_close(mean_distance(nodes, synthetic), torch.tensor(2.5))


def test_the_distance_has_a_finite_gradient_where_it_is_zero() -> None:
    synthetic = torch.zeros(2, 3, 4, requires_grad=True)
    mean_distance(torch.zeros(2, 4), synthetic).backward()
    assert synthetic.grad is not None
    assert bool(synthetic.grad.isfinite().all())


def test_synthetic_nodes_are_those_of_a_loop(generator: torch.Generator) -> None:
    n, m, width = 4, 3, 5
    phi = NodeGenerator(width)
    nodes = torch.randn(n, width, generator=generator)
    around = torch.randn(n, width, generator=generator)
    noise = torch.randn(n, m, 2 * width, generator=generator)
    made = synthesise(phi, nodes, around, noise.clone())
    assert made.shape == (n, m, width)
    assert bool((made.abs() < 1).all())
    first, second = phi[0], phi[2]
    for u in range(n):
        for j in range(m):
            context = torch.cat([nodes[u], around[u]]) + noise[u, j]
            hidden = (first.weight @ context + first.bias).clamp(min=0)
            expected = torch.tanh(second.weight @ hidden + second.bias)
            torch.testing.assert_close(made[u, j], expected)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_step_on_the_distance_is_that_of_autograd_for_each_client(
    decay: float, generator: torch.Generator
) -> None:
    clients, n, m, width = 3, 4, 2, 5
    phis = [NodeGenerator(width) for _ in range(clients)]
    stack = stack_model(
        NodeGenerator(width), [phi.state_dict() for phi in phis], clients
    )
    nodes, around = torch.randn(2, clients, n, width, generator=generator)
    noise = torch.randn(clients, n, m, 2 * width, generator=generator)
    noise[1, -1], nodes[1, -1], around[1, -1] = 0, 0, 0  # padding
    share = torch.tensor([[1 / 4] * 4, [1 / 3] * 3 + [0], [1 / 4] * 4])
    with torch.no_grad():
        found = descend_distance(
            stack, nodes, around, noise.clone(), share, Descent(0.2, decay)
        )
    for k, (phi, size) in enumerate(zip(phis, (4, 3, 4), strict=True)):
        made = synthesise(phi, nodes[k, :size], around[k, :size], noise[k, :size])
        loss = mean_distance(nodes[k, :size], made)
        loss.backward()
        torch.testing.assert_close(found[k], loss.detach())
        torch.optim.SGD(phi.parameters(), lr=0.2, weight_decay=decay).step()
        for name, weight in phi.named_parameters():
            assert weight.grad is not None
            assert bool(weight.grad.any())
            torch.testing.assert_close(stack.state_dict()[name][k], weight.detach())


def test_the_slope_of_the_entropy_is_that_of_autograd(
    generator: torch.Generator,
) -> None:
    logits = torch.randn(2, 3, 4, generator=generator)
    logits[1, :, 2] = -torch.inf  # a class that the client does not predict
    labels = torch.tensor([[0, 3, 2], [1, 0, 3]])
    weight = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    loss, slope = entropy_slope(logits, labels, weight)
    logits.requires_grad_()
    for k in range(2):
        each = nn.functional.cross_entropy(logits[k], labels[k], reduction="none")
        torch.testing.assert_close(loss[k], (each * weight[k]).sum().detach())
        (expected,) = torch.autograd.grad((each * weight[k]).sum(), logits)
        torch.testing.assert_close(slope[k], expected[k].nan_to_num())


def test_a_generator_has_the_stated_number_of_parameters() -> None:
    # 3·128² + 2·128 = 49,408
    assert sum(p.numel() for p in NodeGenerator(128).parameters()) == 49_408
    assert NodeGenerator(7)[0].in_features == 14


def test_gaussian_copies_add_their_noise() -> None:
    noise = torch.tensor([[[0.5, 0.0], [0.0, -1.0]]])
    made = gaussian_copies(torch.tensor([[1.0, 2.0]]), noise)
    assert made.tolist() == [[[1.5, 2.0], [1.0, 1.0]]]


def test_the_spread_is_the_distance_of_two_copies_and_0_for_one() -> None:
    made = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]]])
    assert float(spread(made)) == 2.5  # (5 + 0) / 2
    assert float(spread(made[:, :1])) == 0.0


def test_a_generator_that_ignores_its_noise_has_no_spread() -> None:
    class Copy(nn.Module):
        def forward(self, context: Tensor) -> Tensor:
            return torch.zeros(*context.shape[:-1], 2)

    made = synthesise(Copy(), torch.ones(3, 2), torch.ones(3, 2), torch.randn(3, 4, 4))
    assert float(spread(made)) == 0.0


def test_the_mean_over_neighbours_is_that_of_a_loop(
    generator: torch.Generator,
) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 1], [1, 0, 1, 1, 2]])  # node 4 is isolated
    h = torch.randn(5, 3, generator=generator)
    nodes = torch.tensor([1, 4, 0])
    out = mean_rows(edge_index, nodes, 5).matmul(h)
    for row, u in enumerate(nodes.tolist()):
        found = [h[a] for a, b in edge_index.T.tolist() if b == u]
        expected = torch.stack(found).mean(dim=0) if found else torch.zeros(3)
        torch.testing.assert_close(out[row], expected)


def test_the_mean_over_neighbours_of_a_graph_without_edges_is_0() -> None:
    empty = torch.empty(2, 0, dtype=torch.int64)
    out = mean_rows(empty, torch.tensor([0, 2]), 3).matmul(torch.ones(3, 2))
    assert out.tolist() == [[0.0, 0.0], [0.0, 0.0]]
