"""The line of a round."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.metrics import AnyScores, Scores
from flower_fgl.core.regression import score_numbers
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import write_metrics
from flower_fgl.strategies.fedavg import FedAvg
from flower_fgl.strategies.rounds.messenger import Failure, _last_line
from flower_fgl.strategies.rounds.round_log import Expected, RoundLog


def test_the_reason_of_a_failed_round_counts_each_client_once() -> None:
    log = RoundLog(1)
    log.failures += [Failure(2, "gone"), Failure(2, "gone"), Failure(0, "gone")]
    log.close(is_ok=False, min_replies=1)
    assert log.why_failed().endswith("min-replies is 1. gone (2 clients)")


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("<class 'ValueError'>:<'no file'>", "no file"),  # a SuperNode's
        # the last two lines of a simulation's
        ("\nException ClientAppException occurred. Message: no file'>", "no file"),
        ("no file", "no file"),
        (None, "unknown"),
    ],
)
def test_a_reason_is_shown_without_the_marks_of_flower(
    reason: str | None, line: str
) -> None:
    assert _last_line(reason) == line


def of_numbers(*pairs: tuple[float, float]) -> AnyScores:
    values, outputs = torch.tensor(pairs, dtype=torch.float64).T[:, :, None]
    mask = torch.ones(len(pairs), dtype=torch.bool)
    return score_numbers(outputs, values, mask, torch.ones(1, dtype=torch.float64))


def logged(*found: AnyScores, std: tuple[float, ...]) -> RoundLog:
    log = RoundLog(1)
    for pid, scores in enumerate(found):
        metrics = write_metrics({"local": {"val": scores}}, {}, 0.5)
        log.add_reply(pid, metrics, Expected(1, {"val": None}, std))
    return log


def test_scores_of_numbers_are_pooled_and_stand_in_the_lines() -> None:
    log = logged(of_numbers((1, 2), (2, 4)), of_numbers((5, 5)), std=(1.0,))
    assert log.validation("rmse") == (3, pytest.approx((5 / 3) ** 0.5))
    assert log.row()["metrics"]["local"]["val"]["mean_mae"] == 0.75
    first, second = log.client_rows()
    assert first["metrics"]["local"]["val"]["targets"]["num_values"] == [2]
    assert second["metrics"]["local"]["val"]["rmse"] == 0.0


def test_the_lines_have_one_order_whatever_that_of_a_message() -> None:
    one = Scores(1, 1.0, 1.0, 1.0)
    asked = Expected(1, {"val": None, "test": None}, ())
    lines = []
    for names in (("val", "test"), ("test", "val")):
        log = RoundLog(1)
        scores = {mode: dict.fromkeys(names, one) for mode in names}
        log.add_reply(0, write_metrics(scores, {}, 0.5), asked)
        lines.append(
            json.dumps([log.row()["metrics"], log.client_rows()[0]["metrics"]])
        )
    assert lines[0] == lines[1]


def test_a_reply_with_scores_of_another_kind_is_refused() -> None:
    with pytest.raises(PayloadError, match="numbers, expected those of classes"):
        logged(of_numbers((1, 2)), std=())
    with pytest.raises(PayloadError, match="classes, expected those of numbers"):
        logged(Scores(1, 1.0, 1.0, 1.0), std=(1.0,))
    with pytest.raises(PayloadError, match='n" must be 2 numbers'):
        logged(of_numbers((1, 2)), std=(1.0, 1.0))


def best_round(rounds: list[AnyScores | None], *, spreads: tuple[float, ...]) -> int:
    """Return the round whose model a run keeps, from the scores of its rounds."""
    config = parse_config({"method": "fedavg", "evaluate": "global"})
    if spreads:
        config = replace(config, main_score="rmse")
    strategy = FedAvg(config)
    strategy.messenger.spreads = spreads
    strategy.global_state = lambda: {"weight": torch.zeros(1)}  # type: ignore[method-assign]
    for number, scores in enumerate(rounds, start=1):
        strategy.loop.log = RoundLog(number)
        if scores is not None:
            metrics = write_metrics({"global": {"val": scores}}, {})
            expected = Expected(1, {"val": None}, spreads)
            strategy.loop.log.add_evaluation(0, metrics, expected)
        strategy._keep_best(number)
    return strategy.loop.best_round


@pytest.mark.parametrize(
    ("errors", "best"),
    [
        ([1.2, None, 0.9, 0.9, 1.1], 4),
        ([0.5, 0.6, 0.7], 1),
        ([0.7, 0.6, 0.5], 3),
        ([0.0, 0.0, 0.1], 2),
    ],
)
def test_the_model_with_the_lowest_error_is_kept_the_latest_of_equal_ones(
    errors: list[float | None], best: int
) -> None:
    numbers = [None if e is None else of_numbers((1.0, 1.0 + e)) for e in errors]
    shares = [None if e is None else Scores(1, 1.2 - e, 0.5, 0.5) for e in errors]
    shares = [s and replace(s, accuracy=s.accuracy / 1.2) for s in shares]
    assert best_round([*numbers], spreads=(2.0,)) == best
    assert best_round([*shares], spreads=()) == best


def test_of_several_numbers_the_normalised_error_selects_the_round() -> None:
    strategy = FedAvg(replace(parse_config({"method": "fedavg"}), main_score="rmse"))
    assert strategy.main_score == "rmse"
    strategy.messenger.spreads = (math.nan, math.nan)
    assert strategy.main_score == "nrmse"
