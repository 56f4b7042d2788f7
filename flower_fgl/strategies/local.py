"""Server half of local training: exchange scores only."""

from collections.abc import Mapping

from flower_fgl.protocols.base import Empty, Payload
from flower_fgl.strategies.base import FglStrategy, Upload

__all__ = ["Local"]


class Local(FglStrategy):
    """Let every client train alone; only scores are exchanged."""

    down = Empty
    up = Empty

    def download(self, server_round: int, partition_id: int) -> Payload:
        """Return an empty payload."""
        return Empty()

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Do nothing: uploads are empty."""
