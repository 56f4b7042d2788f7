"""The line of a round."""

from __future__ import annotations

import pytest

from flower_fgl.strategies.rounds.messenger import Failure, _last_line
from flower_fgl.strategies.rounds.round_log import RoundLog


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
