"""Client side of secure aggregation, Bonawitz et al. 2017, Fig. 4.

A round has three messages. Between them the secrets are kept in the client's state, group
``secure``; each is deleted as soon as it has been used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.settings import MIN_SECURE_CLIENTS
from flower_fgl.protocols.secure_aggregation.keys import (
    KeyAgreement,
    add_masks,
    digest,
    draw_secret,
    mask_stream,
    public_key,
    seal,
    unseal,
)
from flower_fgl.protocols.secure_aggregation.messages import (
    MaskedUpload,
    Offer,
    Peers,
    Reveal,
    Roster,
    Survivors,
    from_bytes,
    to_bytes,
)
from flower_fgl.protocols.secure_aggregation.quantization import encode
from flower_fgl.protocols.secure_aggregation.shamir import SHARE_BYTES, split
from flower_fgl.protocols.secure_aggregation.threshold import (
    SEAL,
    threshold,
    with_witness,
)

__all__ = ["Member"]

MISSING = b"\xff" * SHARE_BYTES
"""Marks a share that could not be decrypted; it is no field element."""


@dataclass
class Member:
    """One client of the protocol.

    Parameters
    ----------
    partition_id : int
        Partition-id of the client.
    config : RunConfig
        Source of ``secure_threshold`` and ``secure_fraction_bits``, which the client does
        not accept from the server.
    memory : dict of str to Tensor
        Group ``secure`` of the client's state, changed in place. The caller must store it
        after each call, before the reply is sent.
    """

    partition_id: int
    config: RunConfig
    memory: dict[str, Tensor]

    def join(self) -> bytes:
        """Draw the client's key pair for this run and delete all other secrets.

        Returns
        -------
        bytes of length 32
            The public key, with which other clients encrypt shares to this one.
        """
        secret = draw_secret()
        self.memory.clear()
        self.memory["identity"] = from_bytes([secret])
        return public_key(secret)

    def offer(self, server_round: int, roster: Roster) -> Offer:
        """Draw the secrets of the round and split them into shares.

        Raises
        ------
        PayloadError
            If the client has no key or is not in the roster, if the roster has fewer than
            three clients, or if the client has sent a masked vector in this or a later
            round.
        """
        ids = self._listed(roster.ids, "roster")
        if len(ids) < MIN_SECURE_CLIENTS:
            raise PayloadError(
                f"secure aggregation needs at least {MIN_SECURE_CLIENTS} clients, got "
                f"{len(ids)}."
            )
        if server_round <= self._number("masked-round"):
            raise PayloadError(
                f"this client has already sent a masked vector in round {server_round} or "
                "later"
            )
        identity = self._identity(server_round)
        seed, mask_secret = draw_secret(), draw_secret()
        need = threshold(len(ids), self.config.secure_threshold)
        points = [pid + 1 for pid in ids]
        pairs = list(
            zip(
                split(seed, threshold=need, points=points),
                split(mask_secret, threshold=need, points=points),
                strict=True,
            )
        )
        sealed = [
            seal(identity.key(to_bytes(key), SEAL, self.partition_id, pid), b"".join(p))
            for pid, key, p in zip(ids, roster.keys, pairs, strict=True)
        ]
        digests = from_bytes([digest(a) + digest(b) for a, b in pairs])
        self._forget()
        self.memory |= {
            "round": torch.tensor(server_round),
            "ids": roster.ids,
            "keys": roster.keys,
            "seed": from_bytes([seed]),
            "mask-secret": from_bytes([mask_secret]),
        }
        return Offer(
            mask_key=from_bytes([public_key(mask_secret)])[0],
            seed_digest=from_bytes([digest(seed)])[0],
            sealed=from_bytes(sealed),
            digests=digests.reshape(len(ids), 2, -1),
        )

    def mask(
        self, server_round: int, peers: Peers, summands: Mapping[str, Tensor]
    ) -> MaskedUpload:
        """Decrypt the other clients' shares, encode the summands and mask them.

        Raises
        ------
        PayloadError
            If the client sent no shares in this round or has already sent its masked
            vector; if the peers are not in the roster, are fewer than the threshold or
            do not include the client; or if a summand cannot be encoded.
        """
        self._expect("seed", server_round)
        sampled = self.memory["ids"].tolist()
        ids = self._listed(peers.ids, "peers")
        need = threshold(len(sampled), self.config.secure_threshold)
        if not set(ids) <= set(sampled) or len(ids) < need:
            raise PayloadError(
                f"at least {need} of the clients {sampled} must have sent shares, "
                f"got shares of {ids}"
            )
        vector = encode(
            with_witness(summands),
            fraction_bits=self.config.secure_fraction_bits,
            summands=len(ids),
        )
        held = self._open_shares(server_round, ids, sampled, peers)
        agreement = KeyAgreement(to_bytes(self.memory["mask-secret"][0]), server_round)
        pair_keys = {
            other: agreement.key(
                to_bytes(key), "mask", *sorted((self.partition_id, other))
            )
            for other, key in zip(ids, peers.mask_keys, strict=True)
            if other != self.partition_id
        }
        add_masks(vector, partition_id=self.partition_id, pair_keys=pair_keys)
        vector += mask_stream(to_bytes(self.memory["seed"][0]), len(vector))
        self._forget()
        self.memory |= {
            "round": torch.tensor(server_round),
            "masked-round": torch.tensor(server_round),
            "peers": peers.ids,
            "threshold": torch.tensor(need),
            "held": held,
        }
        return MaskedUpload(torch.from_numpy(vector.view(np.int64)))

    def reveal(self, server_round: int, survivors: Survivors) -> Reveal:
        """Return one share per client to the server, never both shares of a client.

        All shares are deleted with the reply, so a second request is rejected, whatever it
        lists.

        Raises
        ------
        PayloadError
            If the client sent no masked vector in this round or has already replied; or
            if the survivors are no peers, are fewer than the threshold or do not include
            the client.
        """
        self._expect("held", server_round)
        ids = self.memory["peers"].tolist()
        need = self._number("threshold")
        alive = set(self._listed(survivors.ids, "survivors"))
        if not alive <= set(ids) or len(alive) < need:
            raise PayloadError(
                f"a sum must contain at least {need} of the clients {ids}, got "
                f"{sorted(alive)}"
            )
        of_seed, of_key = torch.split(self.memory["held"], SHARE_BYTES, dim=1)
        in_sum = torch.tensor([pid in alive for pid in ids])
        self._forget()
        return Reveal(torch.where(in_sum[:, None], of_seed, of_key).contiguous())

    def _open_shares(
        self, server_round: int, ids: list[int], sampled: list[int], peers: Peers
    ) -> Tensor:
        """Decrypt the shares of the peers for this client, uint8 of shape (m, 66)."""
        identity = self._identity(server_round)
        keys = dict(zip(sampled, self.memory["keys"], strict=True))
        rows = []
        for pid, sealed in zip(ids, peers.sealed, strict=True):
            key = identity.key(to_bytes(keys[pid]), SEAL, pid, self.partition_id)
            opened = unseal(key, to_bytes(sealed))
            rows.append(opened if opened is not None else MISSING + MISSING)
        return from_bytes(rows)

    def _listed(self, ids: Tensor, what: str) -> list[int]:
        """Return the ids as a list; they must include this client."""
        listed: list[int] = ids.tolist()
        if self.partition_id not in listed or listed[0] < 0:
            raise PayloadError(
                f"the {what} must list partition-ids, among them {self.partition_id}, got "
                f"{listed}"
            )
        return listed

    def _identity(self, server_round: int) -> KeyAgreement:
        """Return the key agreement of the client's key of this run."""
        if "identity" not in self.memory:
            raise PayloadError(
                "the client has lost its key (was its SuperNode restarted?). It can take "
                "part again in the next run"
            )
        return KeyAgreement(to_bytes(self.memory["identity"][0]), server_round)

    def _expect(self, secret: str, server_round: int) -> None:
        """Reject a message that does not follow the previous one."""
        if secret not in self.memory or self._number("round") != server_round:
            raise PayloadError(
                f"round {server_round} of secure aggregation is not at this step: a client "
                "answers each request once, in order"
            )

    def _number(self, name: str) -> int:
        """Return a number of the memory, 0 if it is missing."""
        return int(self.memory.get(name, torch.tensor(0)))

    def _forget(self) -> None:
        """Delete the secrets of the round."""
        keep = ("identity", "masked-round")
        kept = {name: self.memory[name] for name in keep if name in self.memory}
        self.memory.clear()
        self.memory.update(kept)
