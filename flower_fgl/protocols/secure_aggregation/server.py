"""Server side of secure aggregation for one round, without the messaging.

Bonawitz et al. 2017, Fig. 4: U1 is :attr:`SecureRound.asked`, U2 the clients in
:attr:`SecureRound.offers`, U3 the clients given to :meth:`SecureRound.survivors`, U4 those
given to :meth:`SecureRound.confirmations`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Shapes
from flower_fgl.protocols.secure_aggregation import messages
from flower_fgl.protocols.secure_aggregation.keys import (
    KeyAgreement,
    add_masks,
    combine,
    digest,
    draw_secret,
    mask_stream,
    public_key,
    threshold,
)
from flower_fgl.protocols.secure_aggregation.quantization import WITNESS, Vector, decode

__all__ = ["SecureRound"]

Kind = TypeVar("Kind")


class SecureRound:
    """State of the server in one round: public keys, encrypted shares, digests.

    ``keys`` has the public key of each sampled client by partition-id, 32 bytes, or 128
    with an identity; ``share`` is ``secure-threshold``, in (2/3, 1].
    """

    def __init__(
        self, keys: Mapping[int, bytes], *, server_round: int, share: float
    ) -> None:
        self.asked = sorted(keys)
        self.threshold = threshold(len(keys), share)
        self.offers: dict[int, messages.Offer] = {}
        self._keys = keys
        self.number = server_round
        self._in_sum: list[int] = []
        self._revealed: dict[int, dict[int, bytes]] = {}

    def roster(self) -> messages.Roster:
        """Return the sampled clients and their keys, the same message for all."""
        width = max(map(len, self._keys.values()))
        rows = [self._keys[pid].ljust(width, b"\0") for pid in self.asked]
        return messages.Roster(torch.tensor(self.asked), messages.from_bytes(rows))

    def add(self, partition_id: int, offer: messages.Offer) -> None:
        """Store an offer; refuse a mask key on which all other clients would fail."""
        mask_key = messages.to_bytes(offer.mask_key)
        KeyAgreement(draw_secret(), self.number).key(mask_key, "check", partition_id, 0)
        self.offers[partition_id] = offer

    def peers(self) -> dict[int, messages.Peers]:
        """Return, per client that sent an offer, the part of its training message."""
        sealed = {pid: offer.sealed for pid, offer in self.offers.items()}
        return _for_each(messages.Peers, sealed, self.asked)

    def survivors(self, partition_ids: Iterable[int]) -> messages.Survivors:
        """Fix the clients whose vectors are summed."""
        self._in_sum = sorted(partition_ids)
        self._revealed = {pid: {} for pid in self.offers}
        return messages.Survivors(torch.tensor(self._in_sum))

    def confirmations(
        self, tags: Mapping[int, messages.Tags]
    ) -> dict[int, messages.Confirmations]:
        """Return, per client that sent codes, the codes that were made for it."""
        rows = {pid: sent.tags for pid, sent in tags.items()}
        return _for_each(messages.Confirmations, rows, self._in_sum)

    def take(self, partition_id: int, reveal: messages.Reveal) -> None:
        """Store the shares that a client reveals, if all match their senders' digests."""
        holder = self.asked.index(partition_id)
        good = {}
        for owner, row in zip(sorted(self.offers), reveal.shares, strict=True):
            which = 0 if owner in self._in_sum else 1
            expected = messages.to_bytes(self.offers[owner].digests[holder, which])
            good[owner] = messages.to_bytes(row)
            if digest(good[owner]) != expected:
                raise PayloadError(
                    f"its share of a secret of client {owner} is not the one it received"
                )
        for owner, share in good.items():
            self._revealed[owner][partition_id + 1] = share

    def total(
        self, vectors: Mapping[int, Vector], shapes: Shapes, *, fraction_bits: int
    ) -> dict[str, Tensor]:
        """Sum the survivors' masked vectors, remove the masks, and return float64 sums."""
        total = np.zeros(len(next(iter(vectors.values()))), dtype=np.uint64)
        for pid in self._in_sum:
            total += vectors[pid]
            offer, seed = self.offers[pid], self._combine(pid)
            if seed is None or digest(seed) != messages.to_bytes(offer.seed_digest):
                raise PayloadError(
                    f"The shares of client {pid} do not reconstruct its seed."
                )
            total -= mask_stream(seed, len(total))
        for lost in sorted(set(self.offers) - set(self._in_sum)):
            self._take_out(lost, total)
        sums = decode(total, {WITNESS: (), **shapes}, fraction_bits=fraction_bits)
        count = float(sums.pop(WITNESS))
        if count != len(self._in_sum):
            raise PayloadError(
                f"The masks did not cancel: the check entry sums up to {count:g} instead "
                f"of {len(self._in_sum)} clients. A client sent a vector that is not "
                "masked as agreed; the server cannot know which client."
            )
        return sums

    def _take_out(self, lost: int, total: Vector) -> None:
        """Add the pairwise masks that a dropped-out client would have added."""
        offer, secret = self.offers[lost], self._combine(lost)
        if secret is None or public_key(secret) != messages.to_bytes(offer.mask_key):
            raise PayloadError(
                f"The shares of client {lost} do not reconstruct its key."
            )
        agreement = KeyAgreement(secret, self.number)
        pair_keys = {
            pid: agreement.key(
                messages.to_bytes(self.offers[pid].mask_key),
                "mask",
                *sorted((lost, pid)),
            )
            for pid in self._in_sum
        }
        add_masks(total, partition_id=lost, pair_keys=pair_keys)

    def _combine(self, owner: int) -> bytes | None:
        """Reconstruct a secret of a client from the revealed shares."""
        shares = sorted(self._revealed[owner].items())
        if len(shares) < self.threshold:
            raise PayloadError(
                f"{len(shares)} clients sent a share of client {owner}'s secret, "
                f"{self.threshold} of {len(self.asked)} are needed."
            )
        return combine(dict(shares[: self.threshold]))


def _for_each(
    kind: Callable[[Tensor, Tensor], Kind],
    sent: Mapping[int, Tensor],
    receivers: list[int],
) -> dict[int, Kind]:
    """Return what the senders have for each of them; a row is for one of ``receivers``."""
    ids = sorted(sent)
    rows = torch.tensor([receivers.index(pid) for pid in ids])
    table = torch.stack([sent[pid][rows] for pid in ids])  # (sender, receiver, bytes)
    return {
        pid: kind(torch.tensor(ids), table[:, to].contiguous())
        for to, pid in enumerate(ids)
    }
