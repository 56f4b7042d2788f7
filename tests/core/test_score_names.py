"""Which of two scores is better."""

from __future__ import annotations

import math

import pytest

from flower_fgl.core.score_names import ScoreScale, goodness, is_better, kind_of_score

NAN = math.nan
VALUES = (0.2, 0.9, NAN, None, 0.5, 0.9, 0.0)


@pytest.mark.parametrize("name", ["rmse", "nrmse", "mae", "worst_rmse", "mean_nrmse"])
def test_an_error_is_compared_like_its_negative(name: str) -> None:
    flipped = [None if value is None else -value for value in VALUES]
    for one, other in zip(VALUES, flipped, strict=True):
        assert goodness(name, other) == goodness("accuracy", one)
        for rival, turned in zip(VALUES, flipped, strict=True):
            assert is_better(name, other, turned) == is_better("accuracy", one, rival)


@pytest.mark.parametrize("name", ["accuracy", "rmse"])
def test_a_score_beats_nan_and_nan_beats_nothing(name: str) -> None:
    assert is_better(name, 0.5, NAN)
    assert is_better(name, 0.5, None)
    assert not is_better(name, NAN, 0.5)
    assert not is_better(name, NAN, NAN)
    assert not is_better(name, 0.5, 0.5)


def test_only_rmse_and_mae_have_units() -> None:
    assert kind_of_score("mean_rmse").has_units
    assert kind_of_score("worst_mae").has_units
    assert not kind_of_score("nrmse").has_units
    assert not kind_of_score("a score of another package").is_lower


def test_only_errors_of_numbers_are_tied_within_a_share_of_a_deviation() -> None:
    texts = [ScoreScale(name).margin_text for name in ("mean_rmse", "nrmse", "mae")]
    assert set(texts) == {"1 % of the target's standard deviation"}
    others = ("accuracy", "ece", "mean_brier_calibrated", "set_share")
    assert {ScoreScale(name).margin_text for name in others} == {"one point"}
