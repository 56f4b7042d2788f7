"""DENSE's losses and generated graphs, by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.algorithms.dense import (
    FeatureGenerator,
    disagreement,
    ensemble_logits,
    nearest_neighbors,
    student_loss,
)

LN3 = math.log(3)


def test_the_ensemble_by_hand() -> None:
    logits = torch.tensor([[[1.0, 2.0]], [[3.0, 8.0]]])  # (K, b, C)
    found = ensemble_logits(logits, torch.tensor([0.5, 0.25]))
    assert found.tolist() == [[1.25, 3.0]]


def test_nodes_lead_to_their_nearest_ones() -> None:
    features = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    edges = nearest_neighbors(features, 1)
    assert sorted(map(tuple, edges.T.tolist())) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    everyone = nearest_neighbors(features, 9)  # all others, each once, no self-loop
    assert everyone.shape == (2, 12)
    assert not (everyone[0] == everyone[1]).any()


def test_a_generated_graph_links_similar_rows_both_ways() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-0.1, 1.0]])
    assert nearest_neighbors(x, 1).T.tolist() == [[0, 1], [1, 0], [2, 3], [3, 2]]
    assert nearest_neighbors(x, 9).shape == (2, 12)


def test_only_nodes_with_another_prediction_count() -> None:
    ensemble = torch.tensor([[LN3, 0.0], [LN3, 0.0]])  # (.75, .25)
    student = torch.tensor([[0.0, LN3], [0.0, -1.0]], requires_grad=True)
    first = 0.75 * math.log(3) + 0.25 * math.log(1 / 3)
    value = disagreement(ensemble, student)
    assert value.item() == pytest.approx(first / 2)
    value.backward()
    # (q − p) / 2 for the first node, nothing for the second
    torch.testing.assert_close(student.grad, torch.tensor([[-0.25, 0.25], [0.0, 0.0]]))
    assert student_loss(student, ensemble, 1.0) > value


def test_the_students_loss_by_hand() -> None:
    student = torch.tensor([[0.0, 0.0]], requires_grad=True)
    found = student_loss(student, torch.tensor([[2 * LN3, 0.0]]), 2.0)
    expected = 4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert found.item() == pytest.approx(expected)
    found.backward()
    torch.testing.assert_close(student.grad, torch.tensor([[-0.5, 0.5]]))


def test_a_new_draw_replaces_all_weights_of_the_generator() -> None:
    network = FeatureGenerator(4, 6, 5)
    for parameter in network.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    network.draw(torch.Generator().manual_seed(0))
    first = {n: t.clone() for n, t in network.named_parameters()}
    assert all(float(t.detach().abs().max()) < 1.2 for t in first.values())
    network.draw(torch.Generator().manual_seed(0))
    assert all(torch.equal(t, first[n]) for n, t in network.named_parameters())


def test_the_noise_and_the_generator_get_a_gradient() -> None:
    torch.manual_seed(0)
    network = FeatureGenerator(4, 6, 5, length=2.0)
    noise = torch.randn(8, 4, requires_grad=True)
    made = network(noise)
    torch.testing.assert_close(made.norm(dim=1), torch.full((8,), 2.0))
    (made * torch.randn(8, 5)).sum().backward()
    assert noise.grad is not None
    assert noise.grad.any()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        # BatchNorm removes the biases before it
        if name not in ("layers.0.bias", "layers.3.bias"):
            assert parameter.grad.abs().max() > 1e-7, name


def test_each_loss_of_the_server_has_a_gradient() -> None:
    torch.manual_seed(0)
    network, noise = FeatureGenerator(4, 6, 5), torch.randn(8, 4)
    labels, client = torch.arange(8) % 3, torch.nn.Linear(5, 3)
    F.cross_entropy(client(network(noise)), labels).backward()
    assert all(
        p.grad is not None and p.grad.any() for p in network.layers[-1].parameters()
    )
    student = torch.zeros(2, 3, requires_grad=True)
    ensemble = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    student_loss(student, ensemble, 2.0).backward()
    # τ · (softmax(f_S/τ) − softmax(D/τ)) / b, zero where both agree
    expected = 2 * (1 / 3 - (ensemble / 2).softmax(dim=1)) / 2
    torch.testing.assert_close(student.grad, expected)
