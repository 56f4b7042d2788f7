from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.algorithms.opfgl.distillation import (
    class_weights,
    distillation_loss,
    node_weights,
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


def test_a_student_equal_to_its_teacher_has_no_distillation_loss(
    generator: torch.Generator,
) -> None:
    logits = torch.randn(7, 4, generator=generator, requires_grad=True)
    teacher = F.log_softmax(logits.detach(), dim=1)
    loss = distillation_loss(logits, teacher, torch.ones(7))
    assert float(loss.detach()) == 0
    (to_student,) = torch.autograd.grad(loss, logits)
    assert float(to_student.abs().max()) < 1e-7


def test_the_distillation_loss_has_the_value_of_the_hand_example():
    # teacher (.75, .25), student (.5, .5): KL(t‖s) = .75 ln 1.5 + .25 ln .5 = .13081;
    # the second node has weight 0: mean (.2·.13081 + 0)/2
    teacher = torch.tensor([[0.75, 0.25], [0.9, 0.1]]).log()
    student = torch.zeros(2, 2, requires_grad=True)
    loss = distillation_loss(student, teacher, torch.tensor([0.2, 0.0]))
    kl = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert float(loss.detach()) == pytest.approx(0.1 * kl)
    loss.backward()
    assert student.grad is not None
    # dKL/ds = softmax(s) − t = (−.25, .25)
    assert student.grad[0].tolist() == pytest.approx([-0.025, 0.025])
    assert not student.grad[1].any()


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
