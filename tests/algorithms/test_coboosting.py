"""Co-Boosting's equations, by hand, and its distiller."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flower_fgl.algorithms.coboosting import (
    hard_cross_entropy,
    perturb,
    stepped_weights,
)
from flower_fgl.methods.coboosting import CoBoostingSettings
from flower_fgl.nn import build_model
from flower_fgl.strategies.dense import BoostingDistiller

LN3 = math.log(3)


def test_hard_nodes_count_more_by_hand() -> None:
    ensemble = torch.tensor([[LN3, 0.0], [0.0, LN3]], requires_grad=True)
    labels = torch.tensor([0, 0])  # p = .75 and .25
    found = hard_cross_entropy(ensemble, labels, 1.0)
    expected = 0.25 * math.log(4 / 3) + 0.75 * math.log(4)
    assert found.item() == pytest.approx(expected / 2)
    found.backward()
    # weight · (p − y) / 2: the weights themselves have no gradient
    torch.testing.assert_close(
        ensemble.grad,
        torch.tensor([[-0.25 * 0.25, 0.25 * 0.25], [-0.75 * 0.75, 0.75 * 0.75]]) / 2,
    )
    plain = hard_cross_entropy(ensemble, labels, 0.0)
    assert plain.item() == pytest.approx((math.log(4 / 3) + math.log(4)) / 2)


def test_a_perturbation_has_its_length() -> None:
    found = perturb(torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.0, 0.0]]), 0.5)
    torch.testing.assert_close(found, torch.tensor([[0.3, 0.4], [0.0, 0.0]]))


def test_a_client_that_is_right_gains_weight() -> None:
    logits = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]], [[0.0, 0.0]]])
    weights = torch.tensor([0.5, 0.5, 0.5])
    found = stepped_weights(weights, logits, torch.tensor([0]), 0.1)
    torch.testing.assert_close(found, torch.tensor([0.6, 0.4, 0.5]))
    ends = stepped_weights(
        torch.tensor([0.95, 0.05, 0.5]), logits, torch.tensor([0]), 0.1
    )
    torch.testing.assert_close(ends, torch.tensor([1.0, 0.0, 0.5]))


def distiller_of(**changes: Any) -> BoostingDistiller:
    torch.manual_seed(0)
    models = [
        build_model(
            "gcn", in_channels=4, hidden_channels=6, num_outputs=3, num_layers=2,
            dropout=0.0,
        )
        for _ in range(3)
    ]  # fmt: skip
    settings = CoBoostingSettings(
        server_epochs=2, generator_steps=3, generator_channels=8, noise_channels=4,
        batch=12, perturbation=0.5, weight_step=0.05, **changes,
    )  # fmt: skip
    return BoostingDistiller(
        [model.state_dict() for model in models[:2]], models[2], (4, 3), settings,
        generator=torch.Generator().manual_seed(0), seed=1,
    )  # fmt: skip


def test_nodes_with_equal_predictions_count_in_the_disagreement() -> None:
    # divided by tau = 3: (.9, .1) and (.6, .4), which predict the same class, and
    # (.75, .25) and (.25, .75)
    ensemble = torch.tensor([[3 * math.log(9), 0.0], [3 * LN3, 0.0]])
    student = torch.tensor([[3 * math.log(1.5), 0.0], [0.0, 3 * LN3]])
    alike = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    apart = 0.75 * math.log(3) + 0.25 * math.log(1 / 3)
    distiller = distiller_of()
    assert distiller.settings.adversarial_tau == 3
    found = distiller.apart(ensemble, student)
    assert found.item() == pytest.approx(9 * (alike + apart) / 2)  # times tau²
    assert found.item() == pytest.approx(3.490177, rel=1e-5)
    doubled = distiller_of(adversarial_tau=6.0).apart(2 * ensemble, 2 * student)
    assert doubled.item() == pytest.approx(4 * found.item())


def test_the_distiller_weighs_and_perturbs() -> None:
    distiller = distiller_of()
    batch = distiller.generate()
    moved = distiller.prepared(batch)
    step = (moved.graph.x - batch.graph.x).norm(dim=1)
    torch.testing.assert_close(step, torch.full_like(step, 0.5))
    assert not torch.equal(moved.logits, batch.logits)
    # the weights step from the second epoch on, once for each earlier batch
    distiller.pool = [batch]
    distiller.reweigh(1)
    assert torch.equal(distiller.weights, torch.full((2,), 0.5))
    distiller.pool = [batch, batch, moved]
    distiller.reweigh(3)
    size = 0.05 * 0.99**2
    once = stepped_weights(torch.full((2,), 0.5), batch.logits, batch.labels, size)
    twice = stepped_weights(once, batch.logits, batch.labels, size)
    assert torch.equal(distiller.weights, twice)
    distiller.pool, distiller.weights = [], torch.full((2,), 0.5)
    numbers = distiller.run()
    assert 0 <= numbers["smallest_weight"] < numbers["largest_weight"] <= 1
    assert not torch.equal(distiller.weights, torch.full((2,), 0.5))
