"""How large a message may be."""

from __future__ import annotations

from flwr.app import RecordDict

from flower_fgl.errors import PayloadError
from flower_fgl.protocols.base import record_bytes

__all__ = ["check_size"]

MEGABYTE = 1_000_000


def check_size(content: RecordDict, max_mb: float) -> None:
    """Refuse a message that is too large, before anything of it is read.

    Parameters
    ----------
    content : RecordDict
        What came.
    max_mb : float
        ``max-message-mb``, in units of 10⁶ bytes.

    Raises
    ------
    PayloadError
        Naming both sizes.
    """
    size = sum(record_bytes(content).values())
    if size > max_mb * MEGABYTE:
        raise PayloadError(
            f"a message of {size / MEGABYTE:.3g} MB came, more than max-message-mb = "
            f"{max_mb:g} allows"
        )
