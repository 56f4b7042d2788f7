"""Local training's server half: it only counts."""

from __future__ import annotations

from collections.abc import Mapping

from flower_fgl.protocols.base import Empty, Payload
from flower_fgl.strategies.base import FglStrategy, Upload

__all__ = ["Local"]


class Local(FglStrategy):
    """Let every client train alone; nothing but scores is exchanged."""

    down = Empty
    up = Empty

    def download(self, server_round: int, partition_id: int) -> Payload:
        """Send nothing."""
        return Empty()

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Keep nothing."""
