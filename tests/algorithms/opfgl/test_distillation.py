from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.algorithms.opfgl.distillation import (
    SoftTargets,
    class_weights,
    node_weights,
    personal_loss,
    soft_targets,
)


def test_node_weights_are_clipped_sums():
    # β ỹ·w = 2·(.5·.4 + .1·1) = .6; 2·.05·.4 = .04; 2·(.9·.4 + 1) = 2.72
    soft = torch.tensor([[0.5, 0.1], [0.05, 0.0], [0.9, 1.0]])
    factor = torch.tensor([0.4, 1.0])
    free = node_weights(soft, factor, beta=2.0)
    assert free.tolist() == pytest.approx([0.6, 0.04, 2.72])
    both = node_weights(soft, factor, beta=2.0, low=0.05, high=0.7)
    assert both.tolist() == pytest.approx([0.6, 0.05, 0.7])
    upper = node_weights(soft, factor, beta=2.0, high=0.15)
    assert upper.tolist() == pytest.approx([0.15, 0.04, 0.15])


def test_a_uniform_soft_label_gives_beta_times_the_mean_factor(
    generator: torch.Generator,
) -> None:
    factor = torch.rand(5, generator=generator)
    weight = node_weights(torch.full((3, 5), 0.2), factor, beta=0.3)
    torch.testing.assert_close(weight, (0.3 * factor.mean()).expand(3))


def test_the_personal_loss_is_cross_entropy_and_divergence_of_a_loop(
    generator: torch.Generator,
) -> None:
    logits = torch.randn(7, 4, generator=generator, requires_grad=True)
    teacher = F.log_softmax(torch.randn(7, 4, generator=generator), dim=1)
    index, labels = torch.tensor([5, 0, 2]), torch.tensor([3, 1, 1])
    gamma = torch.rand(7, generator=generator)
    for weight in (None, torch.tensor([0.0, 2.0, 1.0, 0.5])):
        targets = soft_targets(index, labels, teacher, gamma=gamma, class_weight=weight)
        loss = personal_loss(logits, targets)
        log_probs = F.log_softmax(logits, dim=1)
        expected = F.nll_loss(log_probs[index], labels, weight)
        for node in range(7):
            for c in range(4):
                q, p = teacher[node, c], log_probs[node, c]
                expected = expected + gamma[node] / 7 * q.exp() * (q - p)
        torch.testing.assert_close(loss, expected)
        found = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(found, torch.autograd.grad(expected, logits))


def test_a_student_equal_to_its_teacher_has_no_distillation_loss(
    generator: torch.Generator,
) -> None:
    """Only the cross-entropy of node 0 is left."""
    logits = torch.randn(7, 4, generator=generator, requires_grad=True)
    teacher = F.log_softmax(logits.detach(), dim=1)
    first = torch.tensor([0])
    targets = soft_targets(first, first, teacher, gamma=torch.full((7,), 100.0))
    loss = personal_loss(logits, targets)
    assert float(loss.detach()) == pytest.approx(-float(teacher[0, 0]), abs=1e-4)
    (to_student,) = torch.autograd.grad(loss, logits)
    assert float(to_student[1:].abs().max()) < 1e-5


def test_the_personal_loss_has_the_value_of_the_hand_example():
    # teacher (.75, .25), student (.5, .5): KL(t‖s) = .75 ln 1.5 + .25 ln .5 = .13081;
    # the second node has weight 0 and the label 1: mean (.2·.13081 + 0)/2 + ln 2
    teacher = torch.tensor([[0.75, 0.25], [0.9, 0.1]]).log()
    student = torch.zeros(2, 2, requires_grad=True)
    one = torch.tensor([1])
    targets = soft_targets(one, one, teacher, gamma=torch.tensor([0.2, 0.0]))
    loss = personal_loss(student, targets)
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(loss.detach()) == pytest.approx(0.1 * kl + math.log(2))
    loss.backward()
    assert student.grad is not None
    # dKL/ds = softmax(s) − t = (−.25, .25); dCE/ds = (.5, −.5)
    assert student.grad.tolist() == [
        pytest.approx([-0.025, 0.025]),
        pytest.approx([0.5, -0.5]),
    ]


def test_the_loss_of_padded_clients_is_that_of_each_alone(
    generator: torch.Generator,
) -> None:
    logits = torch.randn(2, 5, 3, generator=generator, requires_grad=True)
    parts = []
    for place, size in enumerate((5, 3)):
        teacher = F.log_softmax(torch.randn(size, 3, generator=generator), dim=1)
        index = torch.arange(2 + place)
        gamma = torch.rand(size, generator=generator)
        parts.append(soft_targets(index, index % 3, teacher, gamma=gamma))
    rows = torch.zeros(2, 5, 3)
    rows[0], rows[1, :3] = parts[0].rows, parts[1].rows
    least = torch.stack([part.least for part in parts])
    both = personal_loss(logits, SoftTargets(rows, least))
    alone = [
        personal_loss(z[: len(part.rows)], part)
        for z, part in zip(logits, parts, strict=True)
    ]
    torch.testing.assert_close(both, torch.stack(alone))
    (slope,) = torch.autograd.grad(both.sum(), logits)
    assert not slope[1, 3:].any()


def test_class_weights_are_inverse_counts_of_mean_one():
    # 1/4, 1/1, absent, 1/2: mean of the present 7/12
    weight = class_weights(torch.tensor([4, 1, 0, 2]))
    assert weight.tolist() == pytest.approx([3 / 7, 12 / 7, 0, 6 / 7])


def test_class_weights_of_large_classes_have_mean_one():
    assert class_weights(torch.tensor([10, 10, 40])).tolist() == pytest.approx(
        [4 / 3, 4 / 3, 1 / 3]
    )


def test_class_weights_without_any_label_are_zero():
    assert class_weights(torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]
