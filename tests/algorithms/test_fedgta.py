"""FedGTA's equations on a path of three nodes, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.fedgta import (
    FLAT,
    confidence,
    moments,
    propagate_labels,
    sharpen,
)
from flower_fgl.nn import GraphInput
from flower_fgl.protocols.weights import MomentWeights

PATH = GraphInput(torch.eye(3), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
START = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.2, 0.8]])
FIRST, ONE_HOT = torch.tensor([0]), torch.tensor([[1.0, 0.0]])


def propagated(steps: int, *, adds: bool = False) -> Tensor:
    operator = PATH.operator("normalised")
    return propagate_labels(operator, START, FIRST, steps=steps, adds=adds)


def close(found: Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


def test_one_and_five_steps_of_label_propagation() -> None:
    close(propagated(1), [[1, 0], [0.5783, 0.4966], [0.2521, 0.7021]])
    close(propagated(5), [[1, 0], [0.6176, 0.4625], [0.3003, 0.6602]])


def test_the_published_code_adds_to_the_training_rows() -> None:
    close(propagated(5, adds=True)[:1], [[2.2399, 0.1351]])


def test_moments_and_confidence_of_the_first_step() -> None:
    labels = propagated(1)
    sharp = sharpen(labels, FIRST, ONE_HOT)
    close(sharp, [[1, 0], [0.5204, 0.4796], [0.3894, 0.6106]])
    raw = moments(sharp, orders=2, kind="raw")
    close(raw, [[0.6366, 0.3634], [0.4741, 0.2010]])
    central = moments(sharp, orders=2, kind="central")
    close(central, [[0, 0], [0.0689, 0.0689]])
    both = moments(sharp, orders=2, kind="hybrid")
    assert torch.equal(both, torch.cat([raw, central]))
    flat = sharpen(labels, FIRST, ONE_HOT, temperature=FLAT)
    terms = [confidence(flat[[u]], torch.ones(1)) for u in range(3)]
    close(torch.stack(terms)[None], [[0.7358, 0.0426, 0.0427]])
    found = confidence(flat, torch.tensor([1, 2, 1]))
    assert found.item() == pytest.approx(0.8637, abs=1e-4)
    assert confidence(flat, torch.zeros(3)) == 0


def test_clients_at_once_have_the_moments_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.rand(2, 4, 3, generator=generator).softmax(-1)
    degree = torch.tensor([[1, 2, 0, 3], [2, 2, 1, 0]])
    real = torch.tensor([[True] * 4, [True, True, True, False]])
    for kind in ("raw", "central", "hybrid"):
        found = moments(labels, orders=3, kind=kind, real=real)
        alone = [
            moments(labels[k, :n], orders=3, kind=kind) for k, n in enumerate((4, 3))
        ]
        torch.testing.assert_close(found, torch.stack(alone))
    torch.testing.assert_close(
        confidence(labels, degree),
        torch.stack([confidence(labels[k], degree[k]) for k in range(2)]),
    )


def test_moments_of_rare_classes_are_withheld() -> None:
    payload = MomentWeights(
        {"w": torch.ones(2)},
        {"moments": torch.ones(4, 3), "confidence": torch.tensor([-1.0])},
    )
    kept = payload.withhold(torch.tensor([True, False, False]), 5)
    assert kept.descriptor["moments"].tolist() == [[1, 0, 0]] * 4
    # the labels of a node sum to 1: one class alone would follow from the others
    kept = payload.withhold(torch.tensor([True, False, True]), 5)
    assert kept.descriptor["moments"].tolist() == [[1, 0, 0]] * 4
    kept = payload.withhold(torch.tensor([True, True, False]), 5)
    assert kept.descriptor["moments"].tolist() == [[0, 1, 0]] * 4
    assert payload.in_range().descriptor["confidence"].item() == 0
    assert payload.num_bytes == 4 * (2 + 2 * 2 * 3 + 1)
