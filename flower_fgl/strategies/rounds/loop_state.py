"""The state of the round loop: what checkpoints store besides the method's own state."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.round_log import RoundLog
from flower_fgl.strategies.rounds.silence import Silence

__all__ = ["LoopState"]


@dataclass
class LoopState:
    """The state of a run's loop between two rounds.

    Parameters
    ----------
    federation : Federation
        The clients; replaced when one joins or reconnects.
    log : RoundLog
        Log of the current round or phase.
    trained : dict of int to int
        Round of each client's last upload, by partition-id.
    failed_in_a_row : int
        Rounds that failed since the last successful one.
    owes_scores : bool
        Whether a round that should have been scored failed.
    any_scored : bool
        Whether a successful round was scored.
    last_success : int
        The last successful round, 0 before it.
    best_score : tuple of int and float, or None
        Validation nodes and accuracy of the best round so far that has an aggregated
        model.
    best_state : dict of str to Tensor
        Aggregated model of that round.
    best_round : int
        That round.
    unscored : set of int
        Clients whose node configs withhold all scores, by partition-id.
    silent : dict of int to Silence
        Clients that did not reply when they were last asked, by partition-id.
    """

    federation: Federation = field(init=False)
    log: RoundLog = field(default_factory=lambda: RoundLog(0))
    trained: dict[int, int] = field(default_factory=dict)
    failed_in_a_row: int = 0
    owes_scores: bool = False
    any_scored: bool = False
    last_success: int = 0
    best_score: tuple[int, float] | None = None
    best_state: dict[str, Tensor] = field(default_factory=dict)
    best_round: int = 0
    unscored: set[int] = field(default_factory=set)
    silent: dict[int, Silence] = field(default_factory=dict)
