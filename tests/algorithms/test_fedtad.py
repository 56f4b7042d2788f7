"""FedTAD's reliability, generated graphs and losses, by hand and against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from flower_fgl.algorithms.fedgen import diversity_loss
from flower_fgl.algorithms.fedtad import (
    NOISE,
    GraphGenerator,
    balanced_classes,
    class_reliability,
    discrepancy,
    generator_loss,
    node_features,
    normalise_reliability,
    row_weights,
)
from flower_fgl.nn import GraphInput
from flower_fgl.nn.sparse import csr_matrix


def test_reliability_of_a_node_with_one_similar_neighbour() -> None:
    x = csr_array(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
    edges = torch.tensor([[0, 1, 0, 2, 0], [1, 0, 2, 0, 0]])  # the last is a loop
    found = class_reliability(x, edges, torch.tensor([0]), torch.tensor([1]), 3)
    torch.testing.assert_close(found, torch.tensor([0.0, 2 / 3, 0.0]))
    # node 1 has node 0 alone, and node 2 a neighbour with cosine 0
    found = class_reliability(x, edges, torch.tensor([1, 2]), torch.tensor([0, 0]), 1)
    assert found.item() == pytest.approx(1 + 0.5)


def test_features_of_both_layouts_end_with_the_walks() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    row, column = x.nonzero().T
    sparse = csr_matrix(row, column, x[row, column], (3, 2))
    end = [0, 0.5, 0, 0.5, 0]
    expected = [[1, 0, *end], [0, 2, 0, 1, 0, 1, 0], [0, 0, *end]]
    for features in (x, sparse):
        found = node_features(GraphInput(features, path)).toarray()
        assert found.tolist() == expected


def test_reliabilities_are_shares_over_the_clients() -> None:
    found = normalise_reliability(torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]))
    assert found.tolist() == [[0.25, 0, 1], [0.75, 0, 0]]


def test_the_last_class_takes_the_rest() -> None:
    assert balanced_classes(8, 3).tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    assert balanced_classes(2, 3).tolist() == [0, 1, 2]
    weights = row_weights(torch.tensor([[0.5, 0.0, 1.0]]), balanced_classes(4, 3))
    assert weights.tolist() == [[0.5, 0.0, 0.5, 0.5]]


def test_losses_by_hand() -> None:
    # two clients, one node of class 0; weights 1 and 0.5
    common = torch.tensor([[0.0, 0.0]])
    clients = torch.tensor([[[1.0, -1.0]], [[0.0, 4.0]]])
    weights = torch.tensor([[1.0], [0.5]])
    apart = 1.0 * 1 + 0.5 * 2
    assert discrepancy(common, clients, weights).item() == pytest.approx(apart)
    semantic = math.log(1 + math.exp(-2)) + 0.5 * math.log(1 + math.exp(4))
    found = generator_loss(
        common, clients, weights, torch.tensor([0]), torch.tensor(0.25)
    )
    assert found.item() == pytest.approx(semantic - apart + 2 * 0.25, rel=1e-5)
    # pairs (a, b) and (b, a) of four: ‖z‖² = (4 + 0)/2, ‖x‖ = 3
    z, x = torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([[0.0], [3.0]])
    assert diversity_loss(z, x).item() == pytest.approx(math.exp(-3), rel=1e-5)


def test_a_bounded_generator_has_features_between_minus_1_and_1() -> None:
    torch.manual_seed(0)
    bounded = GraphGenerator(3, 5)
    linear = GraphGenerator(3, 5, is_bounded=False)
    linear.load_state_dict(bounded.state_dict())
    for generator in (bounded, linear):
        for parameter in generator.layers[-1].parameters():
            parameter.data *= 100
    classes, noise = balanced_classes(9, 3), torch.randn(9, NOISE)
    free = linear(classes, noise)
    assert float(free.detach().abs().max()) > 1
    assert torch.equal(bounded(classes, noise), free.tanh())


def test_every_term_reaches_the_generator() -> None:
    torch.manual_seed(0)
    generator, classes = GraphGenerator(3, 5), balanced_classes(9, 3)
    noise = torch.randn(9, NOISE)
    teacher, common = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    weights = torch.rand(1, 9)
    zero = torch.zeros(())
    found = []
    for number in range(3):
        x = generator(classes, noise)
        logits = teacher(x)[None]
        if number == 0:  # equal models: no discrepancy
            loss = generator_loss(logits[0], logits, weights, classes, zero)
        elif number == 1:
            loss = discrepancy(common(x), logits, weights)
        else:
            loss = diversity_loss(noise, x)
        generator.zero_grad()
        loss.backward()
        gradient = [p.grad for p in generator.parameters()]
        assert all(g is not None and g.any() for g in gradient)
        found.append(gradient[-1])
    assert not torch.equal(found[0], found[1])  # type: ignore[arg-type]


def test_the_discrepancy_trains_the_model() -> None:
    common = torch.tensor([[0.0, 0.0], [1.0, 1.0]], requires_grad=True)
    clients = torch.tensor([[[1.0, -1.0], [1.0, 1.0]], [[0.0, 4.0], [0.0, 2.0]]])
    weights = torch.tensor([[1.0, 1.0], [0.5, 0.25]])
    discrepancy(common, clients, weights).backward()
    # ±weight / C of each client that differs
    expected = torch.tensor([[-0.5, 0.5 - 0.25], [0.125, -0.125]])
    torch.testing.assert_close(common.grad, expected)
