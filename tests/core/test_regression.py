"""Scores of predicted numbers, and the record in which they are sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord
from scipy.stats import spearmanr

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.flower_internals import carried
from flower_fgl.core.metrics import pool
from flower_fgl.core.regression import NumberScores, regression_loss, score_numbers
from flower_fgl.protocols.base import read_metrics, write_metrics
from flower_fgl.protocols.number_scores import read_number_scores

NAN = math.nan
SPREAD = 8**0.5


def scores(
    y: list[Any], predicted: list[Any], std: list[float] | None = None
) -> NumberScores:
    values = torch.tensor(y, dtype=torch.float64).view(len(y), -1)
    outputs = torch.tensor(predicted, dtype=torch.float64).view(len(y), -1)
    spread = torch.tensor(std or [SPREAD] * values.shape[1], dtype=torch.float64)
    mask = torch.ones(len(y), dtype=torch.bool)
    return score_numbers(outputs, values, mask, spread)


A = scores([1, 2, 3, 4], [1, 2, 3, 8])
B = scores([10, 12], [11, 11])


def test_one_owner_has_the_scores_worked_out_by_hand() -> None:
    assert (A.num_nodes, A.rmse, A.mae) == (4, 2.0, 1.0)
    assert A.targets.mse == (4.0,)
    assert A.targets.sst == (5.0,)
    assert A.r2 == pytest.approx(-2.2)
    assert A.spearman == pytest.approx(1.0)
    assert (B.rmse, B.mae, B.r2) == (1.0, 1.0, 0.0)
    assert math.isnan(B.spearman)  # the predictions are all equal


def test_pooled_scores_are_those_of_all_items_together() -> None:
    found = pool([A, B])
    assert found["num_nodes"] == 6
    assert found["rmse"] == pytest.approx(3**0.5)  # not the mean of RMSEs, 1.6667
    assert found["nrmse"] == pytest.approx(0.6124, abs=1e-4)
    assert found["mae"] == 1.0
    assert found["r2"] == pytest.approx(-1.5714, abs=1e-4)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["mean_rmse"] == 1.5
    assert found["targets"]["num_values"] == [6]
    assert found["targets"]["sst"] == [7.0]


def test_an_owner_whose_values_are_equal_adds_nothing_to_r2() -> None:
    constant = scores([3, 3, 3], [0, 1, 2])
    assert math.isnan(constant.r2)
    assert pool([A, constant])["r2"] == pytest.approx(-2.2)


def test_ties_share_their_mean_rank() -> None:
    assert scores([1, 2, 2, 3], [2, 1, 3, 4]).spearman == pytest.approx(
        0.6325, abs=1e-4
    )
    generator = np.random.default_rng(0)
    one, other = (generator.integers(0, 9, 40).astype(float) for _ in range(2))
    expected = spearmanr(one, other).statistic
    assert scores([*one], [*other]).spearman == pytest.approx(expected)


def test_unknown_values_and_items_outside_the_mask_do_not_count() -> None:
    y = torch.tensor([[1.0, NAN], [NAN, NAN], [2.0, 5.0], [9.0, 9.0]]).double()
    mask = torch.tensor([True, True, True, False])
    found = score_numbers(torch.zeros(4, 2).double(), y, mask, torch.ones(2).double())
    assert found.num_nodes == 2
    assert found.targets.n == (2, 1)
    assert found.targets.mse == (2.5, 25.0)
    assert found.nrmse == found.rmse == pytest.approx((2.5**0.5 + 5) / 2)


def test_the_scale_of_a_target_does_not_change_the_normalised_error() -> None:
    y, out = [[1.0, 2.0], [3.0, 5.0]], [[2.0, 1.0], [1.0, 4.0]]
    large = [[a, 1000 * b] for a, b in y], [[a, 1000 * b] for a, b in out]
    one, other = scores(y, out, [1.0, 3.0]), scores(*large, [1.0, 3000.0])
    assert other.nrmse == pytest.approx(one.nrmse)
    assert one.selected("rmse") == one.nrmse  # of several targets
    assert A.selected("rmse") == A.rmse


def test_an_empty_set_has_no_scores() -> None:
    empty = scores([NAN, NAN], [1, 2])
    assert empty.num_nodes == 0
    assert math.isnan(empty.rmse)
    assert math.isnan(empty.nrmse)
    assert pool([empty, A]) == pool([A])
    assert math.isnan(pool([empty])["rmse"])


def test_an_output_that_is_not_finite_has_no_error_and_is_refused() -> None:
    found = scores([[1.0, 2.0]], [[math.inf, 2.0]])
    assert math.isnan(found.rmse)
    assert math.isnan(found.nrmse)
    with pytest.raises(PayloadError, match="Training diverged"):
        sent(found)


def sent(found: NumberScores, std: list[float] | None = None) -> NumberScores:
    """Return scores as the server reads them from a reply."""
    record = carried("metrics", write_metrics({"local": {"val": found}}, {}))
    assert isinstance(record, MetricRecord)
    values = read_metrics(record).scores["local"]["val"]
    return read_number_scores("local/val", values, std or found.std)


def test_a_record_keeps_all_scores_and_its_size() -> None:
    found = scores([[1.0, 5.0], [2.0, NAN], [4.0, 6.5]], [[1.0, 4.0], [3.0, 0], [3, 7]])
    assert sent(found) == found
    assert sum(8 * len(x) for x in found.as_record().values() if type(x) is list) == 80
    unknown = sent(found, [NAN, NAN])  # the spreads are the owner's own
    assert unknown.std == ()
    assert pool([unknown])["nrmse"] == found.nrmse


def test_many_targets_send_errors_and_means_only() -> None:
    generator = torch.Generator().manual_seed(0)
    y, out = (torch.randn(6, 201, generator=generator).double() for _ in range(2))
    mask = torch.ones(6, dtype=torch.bool)
    found = score_numbers(out, y, mask, torch.ones(201).double())
    read = sent(found)
    assert sum(8 * len(x) for x in found.as_record().values() if type(x) is list) == (
        16 * 201
    )
    assert read.targets.mae == ()
    assert (read.rmse, read.nrmse, read.mae, read.r2, read.spearman) == (
        found.rmse, found.nrmse, found.mae, found.r2, found.spearman,
    )  # fmt: skip
    assert pool([read])["rmse"] == pytest.approx(found.rmse)
    assert pool([read])["r2"] == pytest.approx(found.r2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("sst"), "missing or unexpected"),
        (lambda r: r.update(n=[4, 4]), "must be 1 numbers"),
        (lambda r: r.update(mse=[-1.0]), "cannot|Training diverged"),
        (lambda r: r.update(mae=[NAN]), "Training diverged"),
        (lambda r: r.update(spearman=[1.5]), "Training diverged"),
        (lambda r: r.update(n=[5]), "more values than items"),
        (lambda r: r.update(n=[1.5]), "no count"),
        (lambda r: r.update(nrmse=NAN), "cannot be nan"),
    ],
)
def test_scores_that_no_evaluation_has_are_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    record = A.as_record()
    change(record)
    with pytest.raises(PayloadError, match=message):
        read_number_scores("local/val", record, A.std)


def test_rounded_scores_have_two_digits_and_small_targets_are_left_out() -> None:
    found = scores([[1.0, 500.0], [2.0, NAN]], [[1.333, 876.5], [2.9, 0.0]])
    rounded = found.rounded()
    assert rounded.targets.mse == (0.46, 140000.0)
    assert rounded.targets.n == (2, 1)
    assert str(sent(rounded).targets) == str(rounded.targets)
    hidden = found.with_enough(2)
    assert hidden.targets.n == (2, 0)
    assert hidden.nrmse == pytest.approx(found.targets.rmse[0] / SPREAD)
    assert sent(hidden).targets.n == (2, 0)


@pytest.mark.parametrize(
    ("loss", "expected"), [("mse", 2.125), ("huber", 0.8125), ("mae", 1.25)]
)
def test_losses_of_a_batch_with_an_unknown_number(loss: str, expected: float) -> None:
    output = torch.tensor([[0.5], [-1.0], [2.0]], requires_grad=True)
    z = torch.tensor([[0.0], [1.0], [NAN]])
    value = regression_loss(output, z, loss=loss)
    assert value.item() == pytest.approx(expected)
    value.backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    assert output.grad.isfinite().all()
    if loss == "mse":
        assert output.grad.flatten().tolist() == [0.5, -2, 0]


def test_huber_is_linear_from_delta_on() -> None:
    output, z = torch.tensor([[3.0]]), torch.tensor([[0.0]])
    assert regression_loss(output, z, loss="huber", delta=2.0).item() == 4  # 2·(3 − 1)
    assert regression_loss(output, z, loss="huber", delta=5.0).item() == 4.5


def test_targets_count_equally_or_by_their_known_numbers() -> None:
    output = torch.zeros(3, 3)
    z = torch.tensor([[1.0, 2.0, NAN], [1.0, NAN, NAN], [1.0, NAN, NAN]])
    # errors² 1 1 1 of the first target, 4 of the second, none of the third
    assert regression_loss(output, z).item() == pytest.approx(7 / 4)
    equal = regression_loss(output, z, target_weight="targets")
    assert equal.item() == pytest.approx((1 + 4) / 2)


@pytest.mark.parametrize("loss", ["mse", "huber", "mae"])
@pytest.mark.parametrize("target_weight", ["entries", "targets"])
def test_nothing_known_gives_zero_with_a_zero_gradient(
    loss: str, target_weight: str
) -> None:
    output = torch.ones(2, 2, requires_grad=True)
    value = regression_loss(
        output, torch.full((2, 2), NAN), loss=loss, target_weight=target_weight
    )
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == 0
    assert output.grad is not None
    assert not output.grad.any()
