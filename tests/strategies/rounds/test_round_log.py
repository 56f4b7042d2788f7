"""The line of a round."""

from __future__ import annotations

from flower_fgl.strategies.rounds.messenger import Failure
from flower_fgl.strategies.rounds.round_log import RoundLog


def test_the_reason_of_a_failed_round_counts_each_client_once() -> None:
    log = RoundLog(1)
    log.failures += [Failure(2, "gone"), Failure(2, "gone"), Failure(0, "gone")]
    log.close(is_ok=False, min_replies=1)
    assert "gone (2 clients)" in log.why_failed()
