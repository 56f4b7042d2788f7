"""Client side of secure aggregation in four messages, Bonawitz et al. 2017, Fig. 4."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.settings import MIN_SECURE_CLIENTS
from flower_fgl.protocols.secure_aggregation import keys
from flower_fgl.protocols.secure_aggregation.history import (
    SumHistory,
    client_label,
    group_of,
)
from flower_fgl.protocols.secure_aggregation.identities import (
    IDENTITY_BYTES,
    Identity,
    check_roster,
)
from flower_fgl.protocols.secure_aggregation.messages import (
    Confirmations,
    MaskedUpload,
    Offer,
    Peers,
    Reveal,
    Roster,
    Survivors,
    Tags,
    from_bytes,
    to_bytes,
)
from flower_fgl.protocols.secure_aggregation.noise import NoiseShare, add_noise_share
from flower_fgl.protocols.secure_aggregation.quantization import encode, with_witness

__all__ = ["Member"]

BOTH = 2 * keys.SHARE_BYTES


@dataclass
class Member:
    """One client of the protocol.

    Rounds, threshold, precision and noise come with the run, so a server could give
    different clients different ones: :meth:`check` confirms that all have the same. All
    keys and confirmations depend on Flower's ``run_id``.

    ``memory`` is the group ``secure`` of the client's state: each secret is deleted as soon
    as it has been used. The caller stores ``memory`` after each call and ``history`` after
    :meth:`reveal`, before the reply is sent. ``identity`` signs the key of the run. With
    ``peers``, pinned identities and their owners' names, every client of a roster must have
    one of them.
    """

    partition_id: int
    config: RunConfig
    memory: dict[str, Tensor]
    run_id: int = 0
    identity: Identity | None = None
    peers: Mapping[bytes, str] | None = None
    history: SumHistory = field(default_factory=SumHistory)

    def join(self) -> bytes:
        """Draw the key pair of the run, delete all other secrets, return the public key.

        With an identity it is a card of 128 bytes. The number of the last round with a
        masked vector stays, so that no round is answered twice.
        """
        secret = keys.draw_secret()
        card = keys.public_key(secret)
        if self.identity is not None:
            card = self.identity.card(
                card, run_id=self.run_id, partition_id=self.partition_id
            )
        self._forget()
        self.memory |= {"run-key": from_bytes([secret]), "card": from_bytes([card])}
        return card

    def offer(self, server_round: int, roster: Roster) -> Offer:
        """Draw the secrets of the round and split them into shares.

        The keys that encrypt the shares depend on the whole roster: a client that was
        sent another roster can decrypt none of them.
        """
        ids = self._listed(roster.ids, "roster")
        if len(ids) < MIN_SECURE_CLIENTS:
            raise PayloadError(
                f"secure aggregation needs at least {MIN_SECURE_CLIENTS} clients, got "
                f"{len(ids)}."
            )
        self._check_round(server_round)
        cards = dict(zip(ids, map(to_bytes, roster.keys), strict=True))
        self._check_keys(cards)
        labels = [client_label(card, pid) for pid, card in cards.items()]
        self.history.check_roster(group_of(labels))
        context = keys.view_digest(
            str(self.run_id).encode(), to_bytes(roster.ids), to_bytes(roster.keys)
        )
        agreement = keys.KeyAgreement(
            to_bytes(self.memory["run-key"][0]), server_round, context=context
        )
        pairs = [
            agreement.key(to_bytes(key), "pair", *sorted((self.partition_id, pid)))
            for pid, key in zip(ids, roster.keys[:, : keys.KEY_BYTES], strict=True)
        ]
        seed, mask_secret = keys.draw_secret(), keys.draw_secret()
        need = keys.threshold(len(ids), self.config.secure_threshold)
        points = [pid + 1 for pid in ids]
        shares = list(
            zip(
                keys.split(seed, threshold=need, points=points),
                keys.split(mask_secret, threshold=need, points=points),
                strict=True,
            )
        )
        mask_key = keys.public_key(mask_secret)
        sealed = [
            keys.seal(
                keys.derive(pair, "share", self.partition_id, pid),
                b"".join((*both, mask_key)),
            )
            for pid, pair, both in zip(ids, pairs, shares, strict=True)
        ]
        digests = from_bytes([keys.digest(a) + keys.digest(b) for a, b in shares])
        self._forget()
        self.memory |= {
            "round": torch.tensor(server_round),
            "ids": roster.ids,
            "labels": from_bytes(labels),
            "pairs": from_bytes(pairs),
            "roster": from_bytes([context]),
            "seed": from_bytes([seed]),
            "mask-secret": from_bytes([mask_secret]),
        }
        return Offer(
            mask_key=from_bytes([mask_key])[0],
            seed_digest=from_bytes([keys.digest(seed)])[0],
            sealed=from_bytes(sealed),
            digests=digests.reshape(len(ids), 2, -1),
        )

    def mask(
        self,
        server_round: int,
        peers: Peers,
        summands: Mapping[str, Tensor],
        *,
        noise: NoiseShare | None = None,
        download: bytes = bytes(32),
        origin: bytes = b"",
    ) -> MaskedUpload:
        """Decrypt the other clients' shares, encode the summands and mask them.

        ``download`` is the hash, of 32 bytes, of the download, which all clients must
        have received alike. ``origin`` is the hash of what the upload depends on, by
        which the history finds equal uploads; by default ``download``.
        """
        self._expect("seed", server_round)
        sampled = self.memory["ids"].tolist()
        ids = self._listed(peers.ids, "peers")
        need = keys.threshold(len(sampled), self.config.secure_threshold)
        if not set(ids) <= set(sampled) or len(ids) < need:
            raise PayloadError(
                f"at least {need} of the clients {sampled} must have sent shares, "
                f"got shares of {ids}"
            )
        labels = self.memory["labels"]
        origin = origin or download
        self.history.check_download(origin, group_of(map(to_bytes, labels)))
        pairs = self._pairs(sampled, ids)
        held, mask_keys = self._open_shares(ids, pairs, peers)
        bits, count = self.config.secure_fraction_bits, len(ids)
        if noise is None:
            vector = encode(with_witness(summands), fraction_bits=bits, summands=count)
        else:
            vector = add_noise_share(
                with_witness(summands),
                noise,
                fraction_bits=bits,
                clients=count,
                threshold=need,
            )
        agreement = keys.KeyAgreement(
            to_bytes(self.memory["mask-secret"][0]), server_round
        )
        pair_keys = {
            pid: agreement.key(key, "mask", *sorted((self.partition_id, pid)))
            for pid, key in mask_keys.items()
            if pid != self.partition_id
        }
        keys.add_masks(vector, partition_id=self.partition_id, pair_keys=pair_keys)
        vector += keys.mask_stream(to_bytes(self.memory["seed"][0]), len(vector))
        seen = keys.view_digest(
            to_bytes(self.memory["roster"][0]),
            to_bytes(peers.ids),
            b"".join(mask_keys.values()),
            download,
            repr(
                (server_round, need, bits, len(vector), noise and noise.terms)
            ).encode(),
        )
        self._forget()
        self.memory |= {
            "round": torch.tensor(server_round),
            "masked-round": torch.tensor(server_round),
            "sampled": torch.tensor(sampled),
            "labels": labels,
            "download": from_bytes([origin]),
            "peers": peers.ids,
            "pairs": from_bytes(pairs),
            "threshold": torch.tensor(need),
            "held": from_bytes(held),
            "seen": from_bytes([seen]),
        }
        return MaskedUpload(torch.from_numpy(vector.view(np.int64)))

    def check(self, server_round: int, survivors: Survivors) -> Tags:
        """Confirm to each client in the sum what this client has seen in the round.

        That is the run, the round, the roster, the threshold, the peers with their mask
        keys, the download, the noise and the clients in the sum. Each round is confirmed
        once.
        """
        self._expect("held", server_round)
        ids = self.memory["peers"].tolist()
        need = self._number("threshold")
        alive = self._listed(survivors.ids, "survivors")
        if "survivors" in self.memory:
            raise PayloadError(
                f"this client has already confirmed the clients in the sum of round "
                f"{server_round}"
            )
        if not set(alive) <= set(ids) or len(alive) < need:
            raise PayloadError(
                f"a sum must contain at least {need} of the clients {ids}, got {alive}"
            )
        self.history.check_sum(*self._sum_over(alive))
        seen = keys.view_digest(
            to_bytes(self.memory["seen"][0]), to_bytes(survivors.ids)
        )
        tags = [
            keys.tag(keys.derive(pair, "check", self.partition_id, pid), seen)
            for pid, pair in zip(alive, self._pairs(ids, alive), strict=True)
        ]
        self.memory |= {"survivors": survivors.ids, "seen": from_bytes([seen])}
        return Tags(from_bytes(tags))

    def reveal(self, server_round: int, confirmations: Confirmations) -> Reveal:
        """Return one share per client to the server, never both shares of a client.

        At least the threshold of clients in the sum, this one included, must have seen
        the same. All shares are deleted with the reply.
        """
        self._expect("held", server_round)
        if "survivors" not in self.memory:
            raise PayloadError(
                f"round {server_round} of secure aggregation is not at this step: the "
                "clients in the sum are not confirmed"
            )
        ids, alive = self.memory["peers"].tolist(), self.memory["survivors"].tolist()
        seen = to_bytes(self.memory["seen"][0])
        pairs = dict(zip(alive, self._pairs(ids, alive), strict=True))
        agreed = {self.partition_id}
        for pid, found in zip(
            confirmations.ids.tolist(), confirmations.tags, strict=True
        ):
            if pid in pairs and pid != self.partition_id:
                key = keys.derive(pairs[pid], "check", pid, self.partition_id)
                if keys.is_tag(key, seen, to_bytes(found)):
                    agreed.add(pid)
        if len(agreed) < self._number("threshold"):
            raise PayloadError(
                f"only the clients {sorted(agreed)} have seen the same roster, peers, "
                f"settings, download and clients in the sum; {self._number('threshold')} "
                "are needed. Another client disagrees, or the server sent clients "
                "different messages"
            )
        opened = self._sum_over(alive)
        self.history.check_sum(*opened)
        self.history.add(*opened)
        of_seed, of_key = torch.split(self.memory["held"], keys.SHARE_BYTES, dim=1)
        in_sum = torch.tensor([pid in pairs for pid in ids])
        self._forget()
        return Reveal(torch.where(in_sum[:, None], of_seed, of_key).contiguous())

    def _check_round(self, server_round: int) -> None:
        """Reject a round that the run does not have, or that is already answered."""
        # sums over the edges between clients precede round 1
        first = 0 if self.config.needs_cross_edges else 1
        # the sums of a calibration follow the last round
        last = self.config.rounds + (self.config.calibration == "shared")
        if not first <= server_round <= last:
            raise PayloadError(
                f"the run has rounds {first} to {last}, got round {server_round}"
            )
        has_masked = "masked-round" in self.memory
        if has_masked and server_round <= self._number("masked-round"):
            raise PayloadError(
                f"this client has already sent a masked vector in round "
                f"{self._number('masked-round')} and answers no round up to it again"
            )

    def _check_keys(self, cards: Mapping[int, bytes]) -> None:
        """Reject a roster without the client's own key, or with keys that cannot be."""
        if "run-key" not in self.memory:
            raise PayloadError(
                "the client has lost its key (was its SuperNode restarted?). It can take "
                "part again in the next run"
            )
        own, listed = to_bytes(self.memory["card"][0]), cards[self.partition_id]
        if listed[: len(own)] != own or any(listed[len(own) :]):
            raise PayloadError("the roster has another key of this client than its own")
        if len({card[: keys.KEY_BYTES] for card in cards.values()}) < len(cards):
            raise PayloadError("two clients of the roster have the same key")
        if self.peers is not None:
            identity = own[keys.KEY_BYTES : keys.KEY_BYTES + IDENTITY_BYTES]
            check_roster(cards, self.peers, identity, run_id=self.run_id)

    def _sum_over(self, alive: list[int]) -> tuple[bytes, str, str]:
        """Return the download of the round, its roster, and the clients in its sum."""
        labels = {
            pid: to_bytes(label)
            for pid, label in zip(
                self.memory["sampled"].tolist(), self.memory["labels"], strict=True
            )
        }
        download = to_bytes(self.memory["download"][0])
        in_sum = group_of(labels[pid] for pid in alive)
        return download, group_of(labels.values()), in_sum

    def _pairs(self, ids: list[int], wanted: list[int]) -> list[bytes]:
        """Return the keys shared with some of the clients ``ids``."""
        pairs = dict(zip(ids, self.memory["pairs"], strict=True))
        return [to_bytes(pairs[pid]) for pid in wanted]

    def _open_shares(
        self, ids: list[int], pairs: list[bytes], peers: Peers
    ) -> tuple[list[bytes], dict[int, bytes]]:
        """Decrypt the peers' shares for this client; return them and the mask keys."""
        held, mask_keys = [], {}
        for pid, pair, sealed in zip(ids, pairs, peers.sealed, strict=True):
            opened = keys.unseal(
                keys.derive(pair, "share", pid, self.partition_id), to_bytes(sealed)
            )
            if opened is None:
                raise PayloadError(
                    f"the shares of client {pid} cannot be decrypted: it received another "
                    "roster, or the shares were changed. This client does not send its "
                    "upload in this round"
                )
            held.append(opened[:BOTH])
            mask_keys[pid] = opened[BOTH:]
        if len(set(mask_keys.values())) < len(mask_keys):
            raise PayloadError("two clients sent the same mask key")
        return held, mask_keys

    def _listed(self, ids: Tensor, what: str) -> list[int]:
        """Return the ids as a list; they must include this client."""
        listed: list[int] = ids.tolist()
        if self.partition_id not in listed or listed[0] < 0:
            raise PayloadError(
                f"the {what} must list partition-ids, among them {self.partition_id}, got "
                f"{listed}"
            )
        return listed

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
        keep = ("run-key", "card", "masked-round")
        kept = {name: self.memory[name] for name in keep if name in self.memory}
        self.memory.clear()
        self.memory.update(kept)
