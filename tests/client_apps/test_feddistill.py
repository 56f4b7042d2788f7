"""FedDistill's loss, by hand, and what a client uploads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl import simulate
from flower_fgl.client_apps.feddistill import distillation_term
from flower_fgl.strategies.fedproto import FedDistill

LN3 = math.log(3)


def test_the_term_by_hand() -> None:
    # softmax (ln 3, 0) = (.75, .25); the model predicts (.5, .5): cross-entropy ln 2.
    # The second node's class has no mean logits.
    target = torch.tensor([[LN3, 0.0], [9.0, 9.0]])
    present = torch.tensor([True, False])
    logits = torch.zeros(2, 2, requires_grad=True)
    term = distillation_term(logits, torch.tensor([0, 1]), target, present)
    assert term.item() == pytest.approx(math.log(2) / 2)
    term.backward()
    # (softmax(z) − softmax(z̄)) / 2
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.125, 0.125], [0.0, 0.0]]))


def test_mean_logits_are_not_read_as_probabilities() -> None:
    # raw logits as class probabilities would make the term depend on their level
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    target, present = torch.randn(3, 3), torch.ones(3, dtype=torch.bool)
    first = distillation_term(logits, labels, target, present)
    torch.testing.assert_close(
        first, distillation_term(logits, labels, target + 7, present)
    )
    expected = F.cross_entropy(logits, target.softmax(dim=1)[labels])
    torch.testing.assert_close(first, expected)


@pytest.mark.parametrize("batch_size", [0, 7])
def test_the_upload_averages_each_training_node_of_the_last_epoch_once(
    batch_size: int, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = FedDistill.aggregate

    def aggregate(self: Any, server_round: int, uploads: Any) -> None:
        for pid, upload in uploads.items():
            described = self.federation.clients[pid]
            counts = upload.payload.counts
            assert int(counts.sum()) == described.num_train
            assert counts[:, 0].tolist() == list(described.class_counts)
            assert upload.payload.values[counts[:, 0] > 0].any()
            seen.append(pid)
        original(self, server_round, uploads)

    monkeypatch.setattr(FedDistill, "aggregate", aggregate)
    simulate("feddistill", **{**small, "batch_size": batch_size})
    assert len(seen) == 6


def test_owners_of_a_class_count_equally() -> None:
    strategy = object.__new__(FedDistill)
    uploads = torch.tensor([[[2.0, 4.0]], [[6.0, 8.0]]])[:, None]  # (K, 1, 1, C)
    found = strategy.combine(1, uploads, torch.tensor([[[1]], [[9]]]))
    assert found.flatten().tolist() == [4, 6]
