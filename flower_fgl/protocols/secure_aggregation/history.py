"""What a client remembers of the sums that it helped to open.

The difference of two sums over different clients is the sum of the clients that differ, if
all others sent the same upload twice. Equal downloads give equal uploads.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.secure_aggregation.keys import KEY_BYTES, view_digest

__all__ = ["SumHistory", "client_label", "group_of"]

IDENTITY_END = KEY_BYTES + 32
"""Where the identity ends in a client's row of a roster."""


def client_label(card: bytes, partition_id: int) -> bytes:
    """Return a client's identity, or its partition-id if it has none, as 32 bytes.

    ``card`` is the client's row of a roster.
    """
    identity = card[KEY_BYTES:IDENTITY_END]
    return identity if any(identity) else partition_id.to_bytes(32, "big")


def group_of(labels: Iterable[bytes]) -> str:
    """Return a text that is equal for equal sets of clients only."""
    return view_digest(*sorted(labels)).hex()


@dataclass
class SumHistory:
    """Sums that a client helped to open, by download.

    ``sums`` has roster and clients in the sum, as of :func:`group_of`, by the start of
    the download's hash; the first entry is the first sum. ``is_fixed`` means that the
    data owner allows sums over all clients of its first roster only.
    """

    sums: dict[str, list[str]] = field(default_factory=dict)
    is_fixed: bool = False

    @classmethod
    def from_json(cls, text: str, *, is_fixed: bool = False) -> Self:
        """Parse the output of :meth:`to_json`; raise ValueError if the text is damaged."""
        sums = json.loads(text)
        if not isinstance(sums, dict) or not all(
            isinstance(pair, list) and list(map(type, pair)) == [str, str]
            for pair in sums.values()
        ):
            raise ValueError("no history of sums")
        return cls(sums, is_fixed)

    def to_json(self) -> str:
        """Return the sums as a JSON object."""
        return json.dumps(self.sums, separators=(",", ":"))

    def check_roster(self, roster: str) -> None:
        """Raise a PayloadError for a roster other than the first, if the owner fixed it."""
        first = next(iter(self.sums.values()), [roster])[0]
        if self.is_fixed and roster != first:
            raise PayloadError(
                "the roster differs from that of the first sum, and the node config of "
                "this client demands fixed-roster = true. Run with the same clients"
            )

    def check_download(self, download: bytes, roster: str) -> None:
        """Reject a download that was summed under another roster."""
        before = self.sums.get(_key(download))
        if before is not None and before[0] != roster:
            raise PayloadError(
                "this client has answered an equal download under another roster: the "
                "difference of both sums would be the upload of single clients. Run with "
                "the same clients, or with another seed"
            )

    def check_sum(self, download: bytes, roster: str, group: str) -> None:
        """Reject a sum of an equal download over other clients, or of some clients only."""
        self.check_roster(roster)
        if self.is_fixed and group != roster:
            raise PayloadError(
                "clients of the roster are missing in the sum, and the node config of this "
                "client demands fixed-roster = true. The round must be repeated with all"
            )
        before = self.sums.get(_key(download))
        if before is not None and before != [roster, group]:
            raise PayloadError(
                "this client has helped to open a sum of an equal download over other "
                "clients: the difference of both sums would be the upload of single "
                "clients. Run with the same clients, or with another seed"
            )

    def add(self, download: bytes, roster: str, group: str) -> None:
        """Note a sum, before the client's shares are sent."""
        self.sums[_key(download)] = [roster, group]


def _key(download: bytes) -> str:
    """Return the start of a hash, 128 bits, by which a download is found."""
    return download[:16].hex()
