"""The server's exchanges of secure aggregation before and after the training exchange."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.checks.rules import num_sampled
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.core.settings import MIN_SECURE_CLIENTS
from flower_fgl.protocols.base import METRICS, Empty, Payload, Shapes, read_payload
from flower_fgl.protocols.secure_aggregation import messages
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload
from flower_fgl.protocols.secure_aggregation.keys import KEY_BYTES
from flower_fgl.protocols.secure_aggregation.quantization import num_entries
from flower_fgl.protocols.secure_aggregation.server import SecureRound
from flower_fgl.strategies.rounds.messenger import Messenger

__all__ = ["SecureExchanges"]


class SecureExchanges:
    """The exchange before the training exchange of a round, and the two after it.

    ``peers`` are the mask keys and encrypted shares that a message of the round carries.
    """

    def __init__(self, messenger: Messenger, strategy: type, up: type[Payload]) -> None:
        self._messenger = messenger
        self._up = cast(type[AdditivePayload], up)
        _reject_inherited_sums(strategy)
        clients = messenger.loop.federation.clients
        able = messenger.loop.federation.trainable
        self._keys = {pid: clients[pid].public_key for pid in able}
        self._keys |= self._request_keys([p for p in able if clients[p].is_owned])
        without = [pid for pid, key in self._keys.items() if not key]
        if without or not issubclass(up, AdditivePayload):
            raise RunError(
                f"Clients {without} sent no key for secure aggregation: all must run "
                "with secure-aggregation = true and a method that can sum."
            )
        sampled = num_sampled(messenger.config, len(able))
        if sampled < MIN_SECURE_CLIENTS:
            raise RunError(
                f"Secure aggregation needs {MIN_SECURE_CLIENTS} sampled clients per "
                f"round, got {sampled} of {len(able)} with training nodes."
            )
        self._round: SecureRound | None = None
        self.peers: dict[int, messages.Peers] = {}
        self._shapes: Shapes = {}

    def _request_keys(self, partition_ids: Sequence[int]) -> dict[int, bytes]:
        """Request the keys of data owners, which had no partition-id when described."""
        asked = dict.fromkeys(partition_ids, Empty())
        found = self._messenger.query(0, messages.KEYS, asked, messages.PublicKey)
        return {pid: sent.key for pid, sent in found.items()}

    def renew(self, partition_id: int, public_key: bytes) -> None:
        """Store the new key of a reconnected client; request it from a data owner."""
        if not public_key:
            public_key = self._request_keys([partition_id]).get(partition_id, b"")
        others = (k for pid, k in self._keys.items() if pid != partition_id)
        if public_key and public_key[:KEY_BYTES] not in {k[:KEY_BYTES] for k in others}:
            self._keys[partition_id] = public_key

    def open(self, server_round: int, partition_ids: Sequence[int]) -> list[int]:
        """Collect key shares of the sampled clients; return the clients that sent them."""
        current = self._round = SecureRound(
            {pid: self._keys[pid] for pid in partition_ids},
            server_round=server_round,
            share=self._messenger.config.secure_threshold,
        )
        requests = dict.fromkeys(current.asked, current.roster())
        found = self._messenger.query(
            server_round,
            messages.SHARES,
            requests,
            messages.Offer,
            lambda _: {"N": len(requests)},
        )
        self._messenger.read_each(found, current.add)
        self._require(current, len(current.offers), "sent shares")
        self.peers = current.peers()
        return sorted(current.offers)

    def unpack(self, server_round: int, content: RecordDict, spec: Any) -> Payload:
        """Read a masked upload; outside a secure round return an empty payload."""
        if self._round is None or self._round.number != server_round:
            return Empty()
        self._shapes = self._up.summand_shapes(spec)
        number = {"N": 1 + num_entries(self._shapes)}
        return read_payload(messages.MaskedUpload, content, number, beside=[METRICS])

    def close(self, uploads: Mapping[int, messages.MaskedUpload]) -> dict[str, Tensor]:
        """Let the survivors confirm the sum, collect their shares, remove the masks."""
        current, self._round = self._round, None
        if current is None:
            raise PayloadError("No round of secure aggregation is open.")
        self._require(current, len(uploads), "sent a masked sum")
        requests = dict.fromkeys(uploads, current.survivors(uploads))
        tags = self._messenger.query(
            current.number,
            messages.CHECK,
            requests,
            messages.Tags,
            lambda _: {"N": len(uploads)},
        )
        self._require(current, len(tags), "confirmed the clients in the sum")
        found = self._messenger.query(
            current.number,
            messages.UNMASK,
            current.confirmations(tags),
            messages.Reveal,
            lambda _: {"N": len(current.offers)},
        )
        self._messenger.read_each(found, current.take)
        vectors = {
            pid: upload.vector.numpy().view(np.uint64)
            for pid, upload in uploads.items()
        }
        bits = self._messenger.config.secure_fraction_bits
        return current.total(vectors, self._shapes, fraction_bits=bits)

    def sum_query(
        self,
        server_round: int,
        action: str,
        payloads: Mapping[int, Payload],
        up: type[AdditivePayload],
        spec: Any,
    ) -> dict[str, Tensor]:
        """Sum the replies to a query over all of its clients, with all exchanges.

        All clients get the same payload, and each replies with a masked vector of the
        numbers of ``up``, once for each ``server_round``. All of them must reply.
        """
        keyless = sorted(set(payloads) - self._keys.keys())
        if keyless:
            raise PayloadError(
                f"the clients {keyless} have no training nodes and so no key for secure "
                "aggregation, but their neighbours need their part"
            )
        ids = self.open(server_round, sorted(payloads))
        self._shapes = up.summand_shapes(spec)
        number = {"N": 1 + num_entries(self._shapes)}
        uploads = {}
        if len(ids) == len(payloads):
            uploads = self._messenger.query(
                server_round,
                action,
                payloads,
                messages.MaskedUpload,
                lambda _: number,
                beside=self.peers,
                brings_upload=True,
            )
        if len(uploads) < len(payloads):
            self._round = None
            raise PayloadError(
                f"{len(uploads)} of {len(payloads)} clients sent a masked sum, and the sum "
                "needs all of them"
            )
        return self.close(uploads)

    def _require(self, current: SecureRound, found: int, what: str) -> None:
        """Raise an error if fewer clients remain than the threshold."""
        if found < current.threshold:
            raise PayloadError(
                f"Secure aggregation: {found} of {len(current.asked)} clients {what}, "
                f"{current.threshold} are needed (secure-threshold = "
                f"{self._messenger.config.secure_threshold:g})."
            )


def _reject_inherited_sums(strategy: type) -> None:
    """Reject a method that inherits ``aggregate_sums`` but has its own ``aggregate``."""
    owner = {
        name: next((c for c in strategy.__mro__ if name in vars(c)), object)
        for name in ("aggregate", "aggregate_sums")
    }
    if (
        issubclass(owner["aggregate"], owner["aggregate_sums"])
        and len(set(owner.values())) > 1
    ):
        raise RunError(
            f"{owner['aggregate'].__name__} defines aggregate but inherits "
            f"aggregate_sums of {owner['aggregate_sums'].__name__}, so secure sums would "
            "be aggregated by another rule. Define aggregate_sums too, or set additive to "
            "False."
        )
