"""Scores of link prediction, against loops and scikit-learn."""

from __future__ import annotations

import math

import pytest
import torch

from flower_fgl.core.metrics import Scores, link_ranking, pool, score, score_links


def test_ranks_of_a_small_example_by_hand() -> None:
    score_of = torch.tensor([3.0, 1.0, 2.0, 1.0, 0.0])
    y = torch.tensor([1, 1, 0, 0, 0])
    # 3 beats all: rank 1; 1 loses to 2 and ties with 1: rank 1 + 1 + 1/2
    mrr, hits = link_ranking(score_of, y, k=2)
    assert mrr == pytest.approx((1 + 1 / 2.5) / 2)
    assert hits == 0.5
    assert link_ranking(score_of, y, k=3)[1] == 1.0
    assert link_ranking(score_of, y, k=1)[1] == 0.5  # a rank of K is a hit


def test_hits_of_fewer_negatives_than_k_are_undefined_and_not_pooled() -> None:
    # OGB's evaluator has 1.0 here, whatever the scores are
    score_of, y = torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([1, 1, 0, 0])
    assert link_ranking(score_of, y, k=2)[1] == 0.0
    assert math.isnan(link_ranking(score_of, y, k=3)[1])
    few, many = (Scores(4, 0.5, 0.5, 0.5, hits=h) for h in (math.nan, 0.25))
    assert pool([few, many])["hits"] == 0.25


def test_ranks_equal_a_loop() -> None:
    draw = torch.Generator().manual_seed(0)
    score_of = torch.randint(0, 20, (80,), generator=draw).float()
    y = torch.randint(0, 2, (80,), generator=draw)
    negatives = score_of[y == 0].tolist()
    ranks = [
        1 + sum(n > s for n in negatives) + sum(n == s for n in negatives) / 2
        for s in score_of[y == 1].tolist()
    ]
    mrr, hits = link_ranking(score_of, y, k=7)
    assert mrr == pytest.approx(sum(1 / r for r in ranks) / len(ranks))
    assert hits == pytest.approx(sum(r <= 7 for r in ranks) / len(ranks))


def test_areas_equal_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(60, 2, generator=draw)
    y = torch.randint(0, 2, (60,), generator=draw)
    mask = torch.ones(60, dtype=torch.bool)
    found = score_links(score(logits, y, mask, 2), logits, y, mask, k=5)
    margin = (logits[:, 1] - logits[:, 0]).numpy()
    assert found.auroc == pytest.approx(metrics.roc_auc_score(y, margin), abs=1e-6)
    area = metrics.average_precision_score(y, margin)
    assert found.auprc == pytest.approx(area, abs=1e-6)
    assert (found.mrr, found.hits) == link_ranking(torch.from_numpy(margin), y, k=5)
    assert found.selected("auroc") == found.auroc
    assert found.selected("accuracy") == score(logits, y, mask, 2).accuracy


def test_clients_are_pooled_by_their_pairs() -> None:
    nan = math.nan
    clients = [
        Scores(10, 0.5, 0.5, 0.5, 0.6, 0.7, 0.2, 0.1),
        Scores(30, 0.5, 0.5, 0.5, 0.8, 0.9, 0.4, 0.3),
        Scores(0, nan, nan, nan),
    ]
    found = pool(clients)
    assert found["mrr"] == pytest.approx((10 * 0.2 + 30 * 0.4) / 40)
    assert found["mean_auprc"] == pytest.approx(0.8)
    assert found["hits"] == pytest.approx((10 * 0.1 + 30 * 0.3) / 40)
