"""AdaFGL's second step, by hand and against slow loops."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms import adafgl
from flower_fgl.algorithms.adafgl import (
    AdaFGLNet,
    Outputs,
    adafgl_loss,
    combine,
    homophily_confidence,
    likeness,
    propagated,
    propagated_linear,
    propagation_matrix,
    signed_messages,
    signed_products,
)
from flower_fgl.methods.adafgl import AdaFGLSettings
from flower_fgl.nn import GraphInput
from tests.support.sparse import sparse

# a path 0-1-2-3
PAIRS = torch.tensor([[0, 1, 2], [1, 2, 3]])
PATH = torch.cat([PAIRS, PAIRS.flip(0)], dim=1)


def close(found: Tensor, expected: object) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


def test_likeness_is_the_cosine_of_the_predictions() -> None:
    # .9·.1 + .1·.9 = .18 over .82
    close(
        likeness(torch.tensor([[0.9, 0.1], [0.1, 0.9]])), [[0, 0.2195], [0.2195, 0.0]]
    )


def test_the_propagation_matrix_by_hand() -> None:
    # only nodes 0 and 3 are alike: B_03 = 1
    soft = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]])
    found = propagation_matrix(PATH, likeness(soft) > adafgl.ALIKE, alpha=0.25)
    # row sums with the diagonal: 1 + .25 + .75, 1 + .25 + .25
    ends, inner = 2.0, 1.5
    mixed = 0.25 / math.sqrt(ends * inner)
    expected = [
        [1 / ends, mixed, 0.0, 0.75 / ends],
        [mixed, 1 / inner, 0.25 / inner, 0.0],
        [0.0, 0.25 / inner, 1 / inner, mixed],
        [0.75 / ends, 0.0, mixed, 1 / ends],
    ]
    close(found, expected)
    x = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    once, twice = found @ x, found @ found @ x
    close(propagated(found, x, steps=2), torch.cat([x, once, twice], dim=1).tolist())


@pytest.mark.parametrize("is_sparse", [True, False])
def test_mapping_first_equals_mapping_propagated_features(
    is_sparse: bool, generator: torch.Generator
) -> None:
    x = torch.rand(4, 3, generator=generator)
    x = x * (x > 0.5)
    matrix = torch.rand(4, 4, generator=generator)
    weight = torch.randn(2, 12, generator=generator, requires_grad=True)
    mark = torch.randn(4, 2, generator=generator)
    graph = GraphInput(sparse(x) if is_sparse else x, PATH)
    found = propagated_linear(matrix, graph, weight, steps=3)
    expected = propagated(matrix, x, steps=3) @ weight.T
    torch.testing.assert_close(found, expected)
    (slope,) = torch.autograd.grad((mark * found).sum(), weight)
    (slow,) = torch.autograd.grad((mark * expected).sum(), weight)
    torch.testing.assert_close(slope, slow)


def unit_rows(generator: torch.Generator, number: int) -> Tensor:
    return torch.nn.functional.normalize(torch.rand(number, 3, generator=generator))


def signed_weights(relation: Tensor) -> Tensor:
    """S entry by entry, as the paper defines it."""
    mean, largest = relation.mean(), relation.max()
    rows = [
        [
            relation.new_ones(()) if i == j
            else (value - mean) / (largest - mean) if value > mean
            else -(mean - value) / mean
            for j, value in enumerate(row)
        ]
        for i, row in enumerate(relation)
    ]  # fmt: skip
    return torch.stack([torch.stack(row) for row in rows])


def test_signed_weights_by_hand() -> None:
    # mean .4 with the diagonal, maximum .9
    relation = torch.tensor([[0.0, 0.9, 0.3], [0.9, 0.0, 0.6], [0.3, 0.6, 0.0]])
    expected = [[1.0, 1.0, -0.25], [1.0, 1.0, 0.4], [-0.25, 0.4, 1.0]]
    close(signed_weights(relation), expected)
    unit = torch.linalg.cholesky(relation + torch.eye(3))  # rows with these cosines
    unlike = torch.zeros(3, 3, dtype=torch.bool)
    parts = signed_products(unit, torch.eye(3), unlike, beta=0.0)
    close(sum(parts, torch.zeros(3, 3)), expected)
    assert (parts[0] >= 0).all()
    assert (parts[1] <= 0).all()
    # all pairs unlike, and a single node
    for number in (2, 1):
        own = torch.eye(number)
        positive, negative = signed_products(own, own, own > 1, beta=0.2)
        assert torch.equal(positive, own)
        assert not negative.any()


@pytest.mark.parametrize("beta", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("block", [7, 1 << 18])
def test_signed_products_and_gradients_are_those_of_the_matrix(
    beta: float,
    block: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adafgl, "BLOCK", block)  # 7: one row at a time
    unit = unit_rows(generator, 7).double().requires_grad_()
    e = torch.randn(7, 2, generator=generator).double().requires_grad_()
    alike = torch.zeros(7, 7, dtype=torch.bool)
    alike[0, 3] = alike[3, 0] = True
    marks = torch.randn(2, 7, 2, generator=generator).double()
    own = torch.eye(7, dtype=torch.bool)
    relation = (beta * alike + (1 - beta) * unit @ unit.T).masked_fill(own, 0.0)
    signed = signed_weights(relation)
    slow = torch.stack([signed.clamp(min=0) @ e, signed.clamp(max=0) @ e])
    found = torch.stack(signed_products(unit, e, alike, beta=beta))
    torch.testing.assert_close(found, slow)
    expected = torch.autograd.grad((marks * slow).sum(), (unit, e))
    slopes = torch.autograd.grad((marks * found).sum(), (unit, e))
    torch.testing.assert_close(slopes, expected)
    assert slopes[0].any() or beta == 1


def test_signed_messages_are_the_slow_loop(generator: torch.Generator) -> None:
    e = torch.randn(5, 3, generator=generator)
    alike = torch.zeros(5, 5, dtype=torch.bool)
    alike[1, 2] = alike[2, 1] = True
    found = signed_messages(alike, e, torch.tensor([0.25]), beta=0.2)
    signed = signed_weights(0.2 * alike + 0.8 * likeness(e.softmax(dim=1)))

    def prelu(value: float) -> float:
        return value if value > 0 else 0.25 * value

    def softmax(row: list[float]) -> list[float]:
        total = sum(math.exp(v) for v in row)
        return [math.exp(v) / total for v in row]

    for i in range(5):
        sides = []
        for sign in (1, -1):
            weights = [prelu(sign * float(r)) for r in signed[i]]
            columns = e.T.tolist()
            sums = [sum(map(operator.mul, weights, column)) for column in columns]
            sides.append(softmax(sums))
        slow = [(a - b + float(v)) / 2 for a, b, v in zip(*sides, e[i], strict=True)]
        close(found[i], slow)


def confidence(labels: list[int], order: list[int]) -> float:
    graph = GraphInput(torch.zeros(4, 1), PATH)
    return homophily_confidence(
        graph.operator("normalised"),
        torch.arange(4)[: len(labels)],
        torch.tensor(labels),
        torch.tensor(order),
        num_nodes=4,
        num_classes=2,
    )


def test_the_homophily_is_the_accuracy_of_spread_labels() -> None:
    # nodes 0 and 3 are known, 1 and 2 get the class of their neighbour
    assert confidence([0, 0, 1, 1], [0, 3, 1, 2]) == 1.0
    assert confidence([0, 1, 0, 1], [0, 3, 1, 2]) == 0.0
    assert confidence([0, 1, 1, 1], [0, 3, 1, 2]) == 0.5
    assert confidence([1], [0]) == 0.5  # cannot be measured
    # three nodes: one is known
    assert confidence([0, 0, 1], [0, 1, 2]) == 0.5


def test_the_loss_and_the_mixture_by_hand() -> None:
    soft = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    zeros = torch.zeros(2, 2)
    sure = torch.tensor([[0.0, 0.0], [50.0, -50.0]])
    out = Outputs(zeros, sure, sure, zeros)
    index, labels = torch.tensor([1]), torch.tensor([0])
    # CE log 2 of two heads and 0 of the sure ones; MSE (.25 + .25 + 1 + 0)/4
    found = adafgl_loss(out, soft, index, labels)
    assert float(found) == pytest.approx(2 * math.log(2) + 0.375, abs=1e-6)
    # node 1: (.5 + 1)/2 = .75 and (1 + 1 + .5)/3 = .8333
    mixed = combine(out, soft, torch.tensor([0.2]))
    close(mixed, [[0.5, 0.5], [0.2 * 0.75 + 0.8 * 0.8333, 1 - 0.15 - 0.66667]])


def test_every_head_has_a_gradient_and_the_extractor_none() -> None:
    torch.manual_seed(0)
    network = AdaFGLNet(
        AdaFGLSettings(width=6),
        model="gcn", num_features=3, num_outputs=2, width=4, num_layers=2, dropout=0.0,
    )  # fmt: skip
    graph = GraphInput(torch.randn(4, 3), PATH)
    out = network.train().outputs(graph)
    soft = network.soft(graph)
    adafgl_loss(out, soft, torch.tensor([0, 2]), torch.tensor([0, 1])).backward()  # type: ignore[no-untyped-call]
    for name, parameter in network.named_parameters():
        if name.startswith("extractor."):
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert parameter.grad.any(), name
    mixed = network.eval()(graph).exp()
    torch.testing.assert_close(mixed.sum(dim=1), torch.ones(4))


def test_sparse_and_dense_features_give_the_same_predictions(
    generator: torch.Generator,
) -> None:
    torch.manual_seed(0)
    network = AdaFGLNet(
        AdaFGLSettings(width=6),
        model="gcn", num_features=40, num_outputs=2, width=4, num_layers=2, dropout=0.0,
    ).eval()  # fmt: skip
    x = torch.rand(4, 40, generator=generator)
    x = x * (x > 0.9)
    thin, dense = GraphInput(sparse(x), PATH), GraphInput(x, PATH)
    torch.testing.assert_close(network(thin), network(dense))
    assert [network.maps_first(graph) for graph in (thin, dense)] == [True, False]


def test_permuted_nodes_permute_the_predictions() -> None:
    torch.manual_seed(0)
    network = AdaFGLNet(
        AdaFGLSettings(),
        model="gcn", num_features=3, num_outputs=2, width=4, num_layers=2, dropout=0.5,
    ).eval()  # fmt: skip
    x, order = torch.randn(4, 3), torch.tensor([2, 0, 3, 1])
    moved = GraphInput(x[order], torch.argsort(order)[PATH])
    torch.testing.assert_close(
        network(moved), network(GraphInput(x, PATH))[order], atol=1e-5, rtol=1e-5
    )


def test_each_term_has_a_gradient_of_its_own() -> None:
    index, labels = torch.tensor([0, 2]), torch.tensor([0, 1])
    soft = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    out = Outputs(*(torch.zeros(3, 2, requires_grad=True) for _ in Outputs._fields))
    adafgl_loss(out, soft, index, labels).backward()  # type: ignore[no-untyped-call]
    # cross-entropy of log 2: (p − y) / n of the training nodes
    entropy = torch.tensor([[-0.25, 0.25], [0.0, 0.0], [0.25, -0.25]])
    for name, logits in out._asdict().items():
        # distance to the predictions: 2·(0 − Y) / (N·C), of all nodes
        distance = -2 * soft / 6 if name == "smooth" else 0
        torch.testing.assert_close(logits.grad, entropy + distance)
