from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.client_apps.fedntd import FedNTDClientApp, not_true_distillation
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.protocols.fedavg import Weights
from tests.client_apps.runtime.test_client import client_of


def test_the_true_class_is_left_out_of_the_distillation() -> None:
    # class 1 is true: of (0, 2) the teacher gives (2/3, 1/3), the student (1/2, 1/2)
    student = torch.tensor([[0.0, 5.0, 0.0]])
    teacher = torch.tensor([[math.log(2.0), -7.0, 0.0]])
    loss = not_true_distillation(student, teacher, torch.tensor([1]), tau=1.0)
    by_hand = 2 / 3 * math.log((2 / 3) / 0.5) + 1 / 3 * math.log((1 / 3) / 0.5)
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)


def test_the_temperature_divides_the_logits_and_its_square_scales_the_loss() -> None:
    student = torch.zeros(1, 3)
    teacher = torch.tensor([[3 * math.log(2.0), 0.0, 9.0]])
    loss = not_true_distillation(student, teacher, torch.tensor([2]), tau=3.0)
    by_hand = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    assert loss.item() == pytest.approx(9 * by_hand, rel=1e-5)


def test_the_distillation_matches_the_mean_of_a_slow_loop(
    generator: torch.Generator,
) -> None:
    student = torch.randn(6, 4, generator=generator)
    teacher = torch.randn(6, 4, generator=generator)
    labels = torch.tensor([0, 3, 1, 1, 2, 0])
    total = 0.0
    for z, w, y in zip(student, teacher, labels.tolist(), strict=True):
        kept = [c for c in range(4) if c != y]
        p, q = w[kept].div(2).softmax(0), z[kept].div(2).softmax(0)
        total += float((p * (p / q).log()).sum()) * 4
    loss = not_true_distillation(student, teacher, labels, tau=2.0)
    assert loss.mean().item() == pytest.approx(total / 6, rel=1e-5)


@pytest.mark.parametrize("classes", [1, 2])
def test_without_two_other_classes_the_distillation_is_zero(classes: int) -> None:
    logits = torch.randn(3, classes, requires_grad=True)
    teacher = torch.randn(3, classes)
    loss = not_true_distillation(logits, teacher, torch.zeros(3).long(), tau=1.0)
    assert loss.tolist() == [0, 0, 0]


def test_the_gradient_never_reaches_the_logit_of_the_true_class() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    teacher = torch.tensor([[1.0, 0.0, 2.0]])
    not_true_distillation(logits, teacher, torch.tensor([0]), tau=1.0).backward()
    assert logits.grad is not None
    assert logits.grad[0, 0] == 0
    assert logits.grad[0, 1:].abs().min() > 0


def test_the_first_loss_is_the_plain_cross_entropy(toy: NodeDataset) -> None:
    client = client_of(toy, method="fedntd")
    model = client.build_model(initialise=True)
    loss = FedNTDClientApp().data_loss(client, model, Weights(state_of(model)))
    data = client.data.training
    logits = data.logits(model.eval(), data.index)
    expected = F.cross_entropy(logits, data.labels)
    torch.testing.assert_close(loss(logits, data.labels, data.index), expected)


def test_the_loss_compares_rows_with_the_received_logits_of_the_same_nodes(
    toy: NodeDataset,
) -> None:
    wide = NodeDataset(toy.name, toy.x, toy.edge_index, toy.y, Target.classes("abcd"))
    client = client_of(wide, method="fedntd", **{"fedntd.beta": 0.3, "fedntd.tau": 2.0})
    model = client.build_model(initialise=True)
    loss = FedNTDClientApp().data_loss(client, model, Weights(state_of(model)))
    received = model.eval()(client.data.inputs[0]).detach()
    index = torch.tensor([4, 1])
    labels = wide.y[index]
    logits = torch.tensor([[1.0, -2.0, 0.5, 0.0], [0.3, 0.1, -1.0, 2.0]])
    kept = not_true_distillation(logits, received[index], labels, tau=2.0).mean()
    assert kept > 0
    expected = F.cross_entropy(logits, labels) + 0.3 * kept
    torch.testing.assert_close(loss(logits, labels, index), expected)
