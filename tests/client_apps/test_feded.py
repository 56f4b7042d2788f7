from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.feded import (
    FedEDClientApp,
    absent_distillation,
    corrected_entropy,
    suppression,
)
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.client_apps.stacked.group import Rows
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.protocols.fedavg import Weights
from tests.client_apps.runtime.test_client import client_of


def rows_of(*labels: int, clients: tuple[int, ...] = ()) -> Rows:
    """Return rows of one client, or of the named clients."""
    place = torch.tensor(clients or [0] * len(labels))
    index = torch.arange(len(labels))
    return Rows(index, place, torch.tensor(labels), int(place.max()) + 1)


def test_the_prior_shifts_the_logits() -> None:
    # softmax(log π) = π: with equal logits the loss is −log of the share of the class
    prior = torch.tensor([[0.75, 0.25]])
    loss = corrected_entropy(torch.zeros(1, 2), rows_of(1), prior)
    assert loss.item() == pytest.approx(math.log(4), rel=1e-6)


def test_an_absent_class_has_a_finite_shift_and_no_gradient_on_its_logit() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    prior = torch.tensor([[0.5, 0.5, 0.0]])
    loss = corrected_entropy(logits, rows_of(0), prior)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2), rel=1e-5)
    assert logits.grad is not None
    assert logits.grad[0, 2].abs() < 1e-8


def test_equal_shares_do_not_change_the_cross_entropy() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]])
    loss = corrected_entropy(logits, rows_of(2, 1), torch.full((1, 3), 1 / 3))
    expected = F.cross_entropy(logits, torch.tensor([2, 1]))
    torch.testing.assert_close(loss, expected[None])


def test_distillation_is_restricted_to_the_absent_classes() -> None:
    absent = torch.tensor([[False, True, True]])
    # softmax over the absent classes 1 and 2: (3/4, 1/4)
    received = torch.tensor([[50.0, math.log(3.0), 0.0]])
    loss = absent_distillation(torch.zeros(1, 3), received, rows_of(0), absent)
    by_hand = 3 / 4 * math.log(1.5) + 1 / 4 * math.log(0.5)
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("number", [0, 1])
def test_fewer_than_two_absent_classes_distil_nothing(number: int) -> None:
    absent = (torch.arange(3) < number)[None]
    logits, received = torch.randn(2, 3), torch.randn(2, 3)
    value = absent_distillation(logits, received, rows_of(2, 2), absent)
    assert value.item() == 0


def test_suppression_of_two_nodes_by_hand() -> None:
    # C = 3, π = (1/2, 1/2, 0); class 0: the node of class 1 has z_0 = 1,
    # 1 − log(1/2) + log(1/3) − log 2 = 1 − log 3; class 1: z_1 = −2, −2 − log 3
    logits = torch.tensor([[9.0, -2.0, 4.0], [1.0, 9.0, 4.0]])
    prior = torch.tensor([[0.5, 0.5, 0.0]])
    value = suppression(logits, rows_of(0, 1), prior)
    by_hand = 0.5 * (1 - math.log(3)) + 0.5 * (-2 - math.log(3))
    assert value.item() == pytest.approx(by_hand, rel=1e-5)


def slow_suppression(logits: Tensor, labels: Tensor, prior: Tensor) -> float:
    size, classes = logits.shape
    total = 0.0
    for c in range(classes):
        rows = [x for x in range(size) if int(labels[x]) != c]
        share = float(prior[c])
        if not rows or not share:
            continue
        summed = sum(
            math.exp(float(logits[x, c]) - math.log(share) + math.log(1 / classes))
            for x in rows
        )
        total += share * (math.log(summed) - math.log(size))
    return total


def test_suppression_equals_a_slow_loop(generator: torch.Generator) -> None:
    logits = torch.randn(7, 5, generator=generator)
    labels = torch.tensor([0, 0, 1, 3, 3, 3, 1])
    prior = torch.bincount(labels, minlength=5) / 7
    expected = slow_suppression(logits, labels, prior)
    value = suppression(logits, rows_of(*labels.tolist()), prior[None])
    assert value.item() == pytest.approx(expected)


def test_two_clients_have_the_terms_of_each_alone(generator: torch.Generator) -> None:
    logits = torch.randn(7, 4, generator=generator)
    received = torch.randn(7, 4, generator=generator)
    labels, clients = (0, 0, 1, 3, 1, 1, 1), (0, 0, 0, 0, 1, 1, 1)
    both = rows_of(*labels, clients=clients)
    count = both.class_counts(4)
    prior, absent = count / count.sum(1, keepdim=True), count == 0
    # the second client has one class: its suppression has no row
    for term in (
        lambda z, w, rows, k: corrected_entropy(z, rows, prior[k]),
        lambda z, w, rows, k: absent_distillation(z, w, rows, absent[k]),
        lambda z, w, rows, k: suppression(z, rows, prior[k]),
    ):
        alone = [
            term(logits[part], received[part], rows_of(*labels[part]), [k])
            for k, part in enumerate((slice(4), slice(4, 7)))
        ]
        together = term(logits, received, both, [0, 1])
        torch.testing.assert_close(together, torch.cat(alone))


def test_suppression_lowers_only_logits_of_other_labels() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    prior = torch.tensor([[0.5, 0.5, 0.0]])
    suppression(logits, rows_of(0, 1), prior).backward()
    expected = torch.tensor([[0.0, 0.5, 0.0], [0.5, 0.0, 0.0]])
    torch.testing.assert_close(logits.grad, expected)


def test_a_client_with_one_class_keeps_finite_losses_and_gradients() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    prior, rows = torch.tensor([[0.0, 1.0, 0.0]]), rows_of(1, 1, 1, 1)
    value = suppression(logits, rows, prior) + corrected_entropy(logits, rows, prior)
    value.backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_one_absent_class_leaves_the_loss_finite(toy: NodeDataset) -> None:
    client = client_of(toy, method="feded")
    model = client.build_model(initialise=True)
    loss = FedEDClientApp().data_loss(client, model, Weights(state_of(model)))
    data = client.data.training  # only class 0; class 1 is absent: |O| = 1
    logits = data.logits(model, data.index).detach().requires_grad_()
    value = loss(logits, data.labels, data.index)
    value.backward()
    assert math.isfinite(value.item())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_the_loss_is_the_weighted_sum_of_its_terms(toy: NodeDataset) -> None:
    names = ("a", "b", "c", "d")
    wide = NodeDataset(
        toy.name, toy.x, toy.edge_index, toy.y * 2, Target.classes(names)
    )
    client = client_of(wide, method="feded")  # all training nodes are of class 0
    model = client.build_model(initialise=True)
    loss = FedEDClientApp().data_loss(client, model, Weights(state_of(model)))
    data = client.data.training
    received = data.logits(model.eval(), data.index).detach()
    logits = torch.randn(received.shape, requires_grad=True)
    prior = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    rows = Rows.of_one(data.index, data.labels)
    kept = absent_distillation(logits, received, rows, prior == 0)
    expected = corrected_entropy(logits, rows, prior) + 0.1 * kept
    expected = expected + 0.005 * suppression(logits, rows, prior)
    found = loss(logits, data.labels, data.index)
    torch.testing.assert_close(found, expected.squeeze())
    (gradient,) = torch.autograd.grad(kept, logits)
    assert gradient[:, 1:].abs().sum() > 0
