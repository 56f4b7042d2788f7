"""The state of the round loop: what checkpoints store besides the method's own state."""

import logging
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field

from torch import Tensor

from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.round_log import RoundLog

__all__ = ["MAX_PAUSE", "LoopState", "Silence", "note_replies", "without_paused"]

log = logging.getLogger(__name__)
MAX_PAUSE = 32
"""Most rounds for which a silent client is not asked."""


@dataclass(frozen=True)
class Silence:
    """Number of rounds that a client missed without a reply in between, and the last."""

    missed: int
    last: int

    @property
    def next_round(self) -> int:
        """The round in which the client is asked again: after 1, 2, 4, 8 … rounds."""
        return self.last + 1 + int(min(2 ** min(self.missed - 1, 30), MAX_PAUSE))

    def is_paused(self, server_round: int) -> bool:
        """Return whether a round does not ask the client."""
        return server_round < self.next_round


def note_replies(
    silent: MutableMapping[int, Silence],
    server_round: int,
    asked: Collection[int],
    lost: Collection[int],
    *,
    kind: str = "Client",
) -> None:
    """Note which clients were silent in an exchange; a reply ends the silence.

    Several exchanges of one round count once.
    """
    for key in sorted(asked):
        before = silent.get(key)
        if key not in lost:
            if silent.pop(key, None) is not None:
                log.info("%s %s replies again.", kind, key)
        elif before is None or before.last != server_round:
            now = Silence(before.missed + 1 if before else 1, server_round)
            silent[key] = now
            log.warning(
                "%s %s sent no reply in %s. It is asked again in round %s.",
                kind,
                key,
                f"round {server_round}"
                if now.missed == 1
                else f"{now.missed} rounds in a row",
                now.next_round,
            )


def without_paused(
    able: Collection[int], silent: Mapping[int, Silence], server_round: int, least: int
) -> list[int]:
    """Return the clients that a round may ask, ascending.

    At least ``least`` clients remain, if there are so many: those whose pause ends first.
    """
    paused = [p for p in able if p in silent and silent[p].is_paused(server_round)]
    missing = max(0, least - (len(able) - len(paused)))
    paused.sort(key=lambda pid: (silent[pid].next_round, pid))
    rest = set(paused[missing:])
    return sorted(pid for pid in able if pid not in rest)


@dataclass
class LoopState:
    """The state of a run's loop between two rounds; clients are by partition-id."""

    log: RoundLog
    federation: Federation = field(init=False)
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
