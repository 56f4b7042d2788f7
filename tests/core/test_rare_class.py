"""Class weights and the scores of a positive class, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.core.metrics import Scores
from flower_fgl.core.rare_class import (
    THRESHOLDS,
    average_precision,
    balanced_weights,
    best_threshold,
    precision_at_k,
    score_positive_class,
    scores_at_threshold,
)

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
