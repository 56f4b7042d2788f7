"""Loss and scores of several labels per item, against slow loops and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flower_fgl.core.multi_label import binary_loss, score_targets

NAN = math.nan
LOGITS = torch.tensor(
    [
        [2.0, -1.0, 0.5],
        [-1.0, 0.0, -2.0],
        [0.3, 1.0, 3.0],
        [1.0, -3.0, -0.1],
        [9.0, 9.0, 9.0],
    ]
)
LABELS = torch.tensor(
    [
        [1.0, 0.0, NAN],
        [1.0, 1.0, 0.0],
        [0.0, NAN, 1.0],
        [NAN, 1.0, 1.0],
        [NAN, NAN, NAN],
    ]
)
EVERY = torch.ones(5, dtype=torch.bool)


def test_the_loss_is_the_mean_over_the_known_labels() -> None:
    losses = []
    for row, labels in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        for value, label in zip(row, labels, strict=True):
            if not math.isnan(label):
                p = 1 / (1 + math.exp(-value))
                losses.append(-math.log(p if label else 1 - p))
    assert len(losses) == 9
    found = binary_loss(LOGITS, LABELS)
    assert float(found) == pytest.approx(sum(losses) / 9, rel=1e-6)


def test_unknown_labels_have_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    binary_loss(logits, LABELS).backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad != 0, ~LABELS.isnan())
    nothing = LOGITS.clone().requires_grad_()
    loss = binary_loss(nothing, torch.full_like(LABELS, NAN))
    loss.backward()
    assert float(loss.detach()) == 0
    assert nothing.grad is not None
    assert not bool(nothing.grad.any())


def test_scores_equal_those_counted_by_hand() -> None:
    # predicted: target 0 by items 0, 2 (3 unknown); 1 by items 1 (2 unknown); 2 by item 2
    # right: (0,0) (0,1) (1,1) (1,2) (2,2); wrong: (1,0) (2,0) (3,1) (3,2)
    found = score_targets(LOGITS, LABELS, EVERY)
    assert found.num_nodes == 4  # the last item has no known label
    assert found.accuracy == pytest.approx(5 / 9)
    # hits 1, 1, 1; predicted 2, 1, 1; labels 2, 2, 2
    assert found.micro_f1 == pytest.approx(2 * 3 / (4 + 6))
    assert found.macro_f1 == pytest.approx((2 / 4 + 2 / 3 + 2 / 3) / 3)
    assert found.macro_recall == pytest.approx(0.5)
    # target 0 ranks items 0 (yes), 2 (no), 1 (yes): areas 1/2; 5/6
    # target 1 ranks items 1 (yes), 0 (no), 3 (yes): areas 1/2; 5/6
    # target 2 ranks items 2 (yes), 3 (yes), 1 (no): areas 1; 1
    assert found.auroc == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert found.auprc == pytest.approx((5 / 6 + 5 / 6 + 1) / 3)


def test_scores_without_unknown_labels_equal_those_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    labels = (rng.random((60, 7)) < 0.3).astype(int)
    logits = rng.normal(size=(60, 7)) + labels
    chosen = rng.random(60) < 0.7
    found = score_targets(
        torch.tensor(logits),
        torch.tensor(labels, dtype=torch.float32),
        torch.tensor(chosen),
    )
    y, predicted = labels[chosen], (logits >= 0)[chosen]
    assert found.num_nodes == int(chosen.sum())
    assert found.accuracy == pytest.approx((y == predicted).mean())
    for average in ("micro", "macro"):
        f1 = metrics.f1_score(y, predicted, average=average)
        assert getattr(found, f"{average}_f1") == pytest.approx(f1)
    recall = metrics.recall_score(y, predicted, average="macro")
    assert found.macro_recall == pytest.approx(recall)
    shown = 1 / (1 + np.exp(-logits[chosen]))
    area = metrics.roc_auc_score(y, shown, average="macro")
    assert found.auroc == pytest.approx(area, abs=1e-6)
    precision = metrics.average_precision_score(y, shown, average="macro")
    assert found.auprc == pytest.approx(precision, abs=1e-6)


def test_a_target_without_labels_and_predictions_counts_as_the_setting_says() -> None:
    logits = torch.tensor([[1.0, -1.0], [1.0, -1.0]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    every = torch.ones(2, dtype=torch.bool)
    found = score_targets(logits, labels, every)
    assert found.macro_f1 == pytest.approx(2 / 3)
    assert (found.macro_recall, found.accuracy) == (1.0, 0.75)
    zero = score_targets(logits, labels, every, absent_classes="zero")
    assert zero.macro_f1 == pytest.approx(1 / 3)
    assert zero.macro_recall == pytest.approx(1 / 2)


def test_the_order_of_large_scores_counts() -> None:
    labels = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    every = torch.ones(4, dtype=torch.bool)
    # the sigmoid of all of them is exactly 1 in float64
    found = score_targets(torch.tensor([[60.0], [50.0], [55.0], [40.0]]), labels, every)
    assert (found.auroc, found.auprc) == (1.0, 1.0)
    # pairs of a "yes" and a "no": the first is above both, the last below one and tied
    tied = score_targets(torch.tensor([[60.0], [50.0], [40.0], [40.0]]), labels, every)
    assert tied.auroc == pytest.approx((1 + 1 + 0 + 0.5) / 4)


def test_the_accuracy_is_exact() -> None:
    labels = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]])
    found = score_targets(torch.ones(1, 5), labels, torch.ones(1, dtype=torch.bool))
    assert found.accuracy == 3 / 5


def test_scores_that_are_undefined_are_left_out() -> None:
    logits = torch.full((2, 2), -1.0)
    found = score_targets(logits, torch.zeros(2, 2), torch.ones(2, dtype=torch.bool))
    shown = {"num_nodes": 2, "accuracy": 1.0, "macro_f1": 0.0, "macro_recall": 0.0}
    assert found.as_dict() == shown
    none = score_targets(logits, torch.zeros(2, 2), torch.zeros(2, dtype=torch.bool))
    assert none.num_nodes == 0
    assert math.isnan(none.accuracy)
