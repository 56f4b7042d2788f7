"""FedKD's losses and factors, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.fedkd import (
    MutualPair,
    compress,
    energy_threshold,
    mutual_loss,
    rank_for,
    restore,
)
from flower_fgl.core.errors import PayloadError
from flower_fgl.nn import GraphInput, build_model
from flower_fgl.protocols.base import write_tensors
from flower_fgl.protocols.weights import FactoredWeights

LN3 = math.log(3)


def test_the_energy_rises_linearly() -> None:
    found = [energy_threshold(t, 4, start=0.95, end=0.98) for t in (0, 2, 4, 9)]
    assert found == pytest.approx([0.95, 0.965, 0.98, 0.98])


def test_the_rank_by_hand() -> None:
    singular = torch.tensor([3.0, 2.0, 1.0])  # shares 9, 13, 14 of 14
    assert rank_for(singular, 0.6) == 1
    assert rank_for(singular, 9 / 14 + 1e-6) == 2
    assert rank_for(singular, 0.95) == 3
    assert rank_for(singular, 1.0) == 3  # all of them, not none
    assert rank_for(torch.zeros(3), 0.95) == 3


def test_factors_keep_the_energy_and_the_rest_is_sent_whole() -> None:
    torch.manual_seed(0)
    low = torch.randn(9, 1) @ torch.randn(1, 8)
    state = {"low": low, "full": torch.randn(3, 3), "bias": torch.randn(4)}
    factors = compress(state, 0.95)
    assert sorted(factors) == ["bias", "full", "low/s", "low/u", "low/v"]
    back = restore(factors)
    assert set(back) == set(state)
    for name, tensor in state.items():
        torch.testing.assert_close(back[name], tensor)
    assert FactoredWeights(factors).num_bytes == 4 * (9 + 8 + 1 + 9 + 4)
    noisy = low + 0.01 * torch.randn(9, 8)
    error = (noisy - restore(compress({"m": noisy}, 0.95))["m"]).square().sum()
    assert 0 < float(error / noisy.square().sum()) < 0.05


def losses() -> tuple[list[Tensor], Tensor]:
    parts = [
        torch.tensor([[LN3, 0.0]]),  # teacher: (.75, .25)
        torch.tensor([[0.0, 0.0]]),  # student: (.5, .5)
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([[1.0, 4.0]]),
    ]
    return [p.requires_grad_() for p in parts], torch.tensor([0])


def test_the_losses_by_hand() -> None:
    parts, labels = losses()
    loss, terms = mutual_loss(*parts, labels)
    assert {name: float(t) for name, t in terms.items()} == pytest.approx(
        {
            "teacher": math.log(4 / 3),
            "student": math.log(2),
            "distill_teacher": 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2),
            "distill_student": 0.75 * math.log(1.5) + 0.25 * math.log(0.5),
            "hidden": 2.0,
        }
    )
    own = math.log(4 / 3) + math.log(2)
    shared = sum(float(t) for n, t in terms.items() if n not in ("teacher", "student"))
    assert loss.item() == pytest.approx(own + shared / own)


def test_each_term_teaches_its_own_network() -> None:
    parts, labels = losses()
    mutual_loss(*parts, labels)[0].backward()
    divisor = math.log(4 / 3) + math.log(2)
    teacher, student, hidden, projected = (part.grad for part in parts)
    # cross-entropy: p − y; divergence from the other: p − q
    first = -0.25 + (0.75 - 0.5) / divisor
    torch.testing.assert_close(teacher, torch.tensor([[first, -first]]))
    first = -0.5 + (0.5 - 0.75) / divisor
    torch.testing.assert_close(student, torch.tensor([[first, -first]]))
    torch.testing.assert_close(hidden, torch.tensor([[0.0, -2 / divisor]]))
    torch.testing.assert_close(projected, torch.tensor([[0.0, 2 / divisor]]))


def test_a_pair_trains_all_parts_and_evaluates_the_teacher() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "in_channels": 3, "num_classes": 2, "num_layers": 2, "dropout": 0.0,
    }  # fmt: skip
    pair = MutualPair(
        build_model("gin", hidden_channels=6, **sizes),
        build_model("gcn", hidden_channels=4, **sizes),
    )
    graph = GraphInput(torch.randn(5, 3), torch.tensor([[0, 1, 2], [1, 0, 3]]))
    rows = pair.train()(graph)
    z, other, h, projected = pair.split(rows, 2)
    torch.testing.assert_close(z, pair.teacher(graph))
    torch.testing.assert_close(other, pair.student(graph))
    torch.testing.assert_close(h, pair.teacher.embed(graph))
    torch.testing.assert_close(projected, pair.projection(pair.student.embed(graph)))
    mutual_loss(z, other, h, projected, torch.tensor([0, 1, 0, 1, 0]))[0].backward()
    for name, parameter in pair.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    torch.testing.assert_close(pair.eval()(graph), pair.teacher(graph))


BAD = {
    "missing": {"w/u": (4, 1), "w/s": (1,)},
    "singular values": {"w/u": (4, 5), "w/s": (5,), "w/v": (5, 6)},
    "must have shape": {"w/u": (4, 2), "w/s": (2,), "w/v": (1, 6)},
    "unexpected": {"w": (4, 6), "x": (1,)},
}


@pytest.mark.parametrize("problem", BAD)
def test_impossible_factors_are_refused(problem: str) -> None:
    tensors = {name: torch.ones(shape) for name, shape in BAD[problem].items()}
    content = RecordDict({"weights": write_tensors(tensors)})
    with pytest.raises(PayloadError, match=problem):
        FactoredWeights.from_record(content, {"w": (4, 6)})


def test_clients_may_have_different_teachers(small: dict[str, Any]) -> None:
    run = simulate("fedkd", **{**small, "model": "gin,gcn:2x6,mlp"})
    assert not any(row["failures"] for row in run.rounds)
    assert 0 < run.rounds[-1]["numbers"]["upload_share"] <= 1


def test_the_loss_is_finite_where_both_models_are_certain() -> None:
    logits = torch.tensor([[40.0, 0.0], [0.0, 40.0]])
    teacher, student = logits.requires_grad_(), (0.9 * logits.detach()).requires_grad_()
    hidden = torch.zeros(2, 3, requires_grad=True)
    projected = torch.ones(2, 3, requires_grad=True)
    labels = torch.tensor([0, 1])
    loss, terms = mutual_loss(teacher, student, hidden, projected, labels)
    assert float(terms["teacher"]) == float(terms["student"]) == 0.0
    loss.backward()
    for tensor in (loss, teacher.grad, student.grad, hidden.grad, projected.grad):
        assert tensor is not None
        assert tensor.isfinite().all()
