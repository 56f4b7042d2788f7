"""Loss and scores of several labels per item, against slow loops and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.core.label_scores import (
    THRESHOLDS,
    average_precision,
    balanced_weights,
    best_threshold,
    binary_loss,
    precision_at_k,
    score_positive_class,
    score_targets,
    scores_at_threshold,
)
from flower_fgl.core.metrics import Scores

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


P = torch.tensor([0.9, 0.8, 0.7, 0.2], dtype=torch.float64)
MEMBERS = torch.tensor([True, False, True, False])


def test_balanced_weights_are_inversely_proportional_to_counts() -> None:
    # n = 10 items of m = 2 classes: 10 / (2 · 8) and 10 / (2 · 2)
    weights = balanced_weights(torch.tensor([8, 0, 2]))
    assert weights.tolist() == [0.625, 1.0, 2.5]
    assert float((weights * torch.tensor([8, 0, 2])).sum()) == 10
    assert balanced_weights(torch.tensor([3, 3])).tolist() == [1.0, 1.0]
    assert balanced_weights(torch.tensor([0, 0])).tolist() == [1.0, 1.0]


def test_balanced_weights_give_each_class_the_same_say() -> None:
    logits = torch.zeros(10, 2)
    logits[:, 1] = math.log(3.0)  # softmax (1/4, 3/4)
    y = torch.tensor([0] * 8 + [1] * 2)
    loss = F.cross_entropy(logits, y, balanced_weights(torch.bincount(y)))
    assert float(loss) == pytest.approx((math.log(4) + math.log(4 / 3)) / 2)


def test_average_precision_by_hand() -> None:
    # members at ranks 1 and 3: (1/1 + 2/3) / 2
    assert average_precision(P, MEMBERS) == pytest.approx(5 / 6)


def test_precision_at_k_by_hand() -> None:
    values = [precision_at_k(P, MEMBERS, k) for k in (1, 2, 3, 4, 100)]
    assert values == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2, 1 / 2])


def test_items_with_one_score_share_the_places_that_are_left() -> None:
    tied = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.1])
    member = torch.tensor([False, True, False, True, False])
    # two places for three tied items, two of which are members: 2 · 2/3 hits of 3
    assert precision_at_k(tied, member, 3) == pytest.approx(4 / 9)
    order = torch.tensor([3, 4, 2, 1, 0])
    assert precision_at_k(tied[order], member[order], 3) == pytest.approx(4 / 9)


def test_the_threshold_has_the_largest_f1() -> None:
    # F1 is 2/3 from 0.9 on, 1/2 from 0.8, 4/5 from 0.7 and 2/3 from 0.2
    assert best_threshold(P, MEMBERS) == 0.7
    assert scores_at_threshold(P, MEMBERS, 0.7) == pytest.approx((2 / 3, 1, 0.8))
    assert scores_at_threshold(P, MEMBERS, 0.95) == (0.0, 0.0, 0.0)


def test_of_equally_good_thresholds_the_largest_is_chosen() -> None:
    # F1 is 2/3 from 0.9 on (P 1, R 1/2) and from 0.2 on (P 1/2, R 1)
    probability = torch.tensor([0.9, 0.8, 0.7, 0.2], dtype=torch.float64)
    assert best_threshold(probability, torch.tensor([True, False, False, True])) == 0.9


@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_is_that_of_a_slow_search(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    probability = torch.randint(10, (40,), generator=draw).double() / 10
    member = torch.rand(40, generator=draw) < 0.2
    found = {
        level: scores_at_threshold(probability, member, level)[2]
        for level in THRESHOLDS
    }
    best = max(found.values())
    assert best_threshold(probability, member) == max(
        level for level, f1 in found.items() if f1 == best
    )


def test_the_threshold_is_never_the_probability_of_an_item() -> None:
    # a server that knows the model would compute the item's feature from it
    probability = torch.tensor([0.912345, 0.81, 0.712345, 0.003217]).double()
    assert best_threshold(probability, MEMBERS) == 0.71
    rare = torch.tensor([0.004567, 0.000321, 0.0001]).double()
    assert best_threshold(rare, torch.tensor([True, False, False])) == 0.004
    assert best_threshold(rare, torch.tensor([True, True, False])) == 0.0003


def column(probability: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.stack([torch.zeros(len(member)), torch.logit(probability)], dim=1)
    return logits, member.long()


def test_the_threshold_comes_from_validation_and_is_scored_elsewhere() -> None:
    empty = {name: Scores(4, 0.5, 0.5, 0.5) for name in ("val", "test")}
    test = torch.tensor([False, True, True, False])
    items = {"val": column(P, MEMBERS), "test": column(P, test)}
    out = score_positive_class(empty, items, 1, k=2)
    assert math.isnan(out["val"].threshold)
    assert math.isnan(out["val"].threshold_f1)
    assert out["test"].threshold == pytest.approx(0.7)
    assert out["test"].threshold_precision == pytest.approx(2 / 3)
    assert out["test"].threshold_recall == 1
    assert out["test"].precision_at_k == 1 / 2
    # other test labels change the scores, never the threshold
    items["test"] = column(P, ~test)
    other = score_positive_class(empty, items, 1, k=2)
    assert other["test"].threshold == out["test"].threshold
    assert other["test"].threshold_recall == 1 / 2
    without = score_positive_class(empty, {"test": items["test"]}, 1, k=2)
    assert math.isnan(without["test"].threshold)
    assert without["test"].auprc == other["test"].auprc


@pytest.mark.parametrize("members", [torch.zeros(4), torch.ones(4), torch.zeros(0)])
def test_without_members_or_non_members_nothing_is_defined(members: Tensor) -> None:
    is_member, probability = members.bool(), P[: len(members)]
    assert math.isnan(average_precision(probability, is_member))
    assert math.isnan(precision_at_k(probability, is_member, 2))
    assert math.isnan(best_threshold(probability, is_member))
    empty = {"val": Scores(4, 0.5, 0.5, 0.5), "test": Scores(4, 0.5, 0.5, 0.5)}
    items = {"val": column(P, MEMBERS), "test": column(probability, is_member)}
    scores = score_positive_class(empty, items, 1, k=2)["test"].as_dict()
    assert set(scores) == {"num_nodes", "accuracy", "macro_f1", "macro_recall"}
