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
    """The state of a run's loop between two rounds; clients are by partition-id."""

    federation: Federation = field(init=False)
    log: RoundLog = field(default_factory=lambda: RoundLog(0))
    trained: dict[int, int] = field(default_factory=dict)  # round of the last upload
    failed_in_a_row: int = 0
    owes_scores: bool = False  # a round that should have been scored failed
    any_scored: bool = False
    last_success: int = 0
    best_score: tuple[int, float] | None = None  # validation nodes and score
    best_state: dict[str, Tensor] = field(default_factory=dict)
    best_round: int = 0
    unscored: set[int] = field(default_factory=set)  # node configs withhold all scores
    silent: dict[int, Silence] = field(default_factory=dict)
