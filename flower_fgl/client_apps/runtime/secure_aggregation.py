"""The client's steps of secure aggregation."""

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict
from torch import Tensor

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import agreed_place
from flower_fgl.client_apps.runtime.session import Opened, Session
from flower_fgl.client_apps.runtime.state import StateStore
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.core.options import Scalar
from flower_fgl.protocols.base import Payload, round_settings
from flower_fgl.protocols.differential_privacy import (
    numbers_of,
    origin_of,
    with_numbers,
)
from flower_fgl.protocols.secure_aggregation import messages
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload
from flower_fgl.protocols.secure_aggregation.client import Member
from flower_fgl.protocols.secure_aggregation.identities import (
    Identity,
    load_identity,
    read_peers,
)
from flower_fgl.protocols.secure_aggregation.noise import NoiseShare

__all__ = ["answer", "check_identity", "download_digest", "join", "pack_masked"]

SECURE = "secure-"
"""Start of the names of the records of secure aggregation."""


def check_identity(node: Mapping[str, Scalar], *, creates: bool = True) -> None:
    """Reject a node config whose identity or peers cannot be used.

    ``identity`` is the absolute path of the owner's private key, created if missing and
    ``creates``; ``peers`` that of the file of pinned public keys. RunError if a file
    cannot be read, or ``peers`` is given without ``identity``.
    """
    _pinned(node)
    if creates or os.path.exists(os.path.expanduser(str(node.get("identity", "")))):
        _identity(node)


def _identity(node: Mapping[str, Scalar]) -> Identity | None:
    """Return the data owner's identity, if the node config names one."""
    if "identity" not in node:
        return None
    return load_identity(Path(os.path.expanduser(str(node["identity"]))))


def _pinned(node: Mapping[str, Scalar]) -> dict[bytes, str] | None:
    """Return the pinned identities, if the node config names a file of them."""
    if "peers" not in node:
        return None
    path = Path(os.path.expanduser(str(node["peers"])))
    if "identity" not in node:
        raise RunError(
            "The node config has peers but no identity: the other owners cannot recognise "
            'this node. Add identity="/path/to/identity.key".'
        )
    return read_peers(path)


def join(client: Client, store: StateStore, context: Context) -> bytes:
    """Draw and store the client's key pair for this run; return the public key."""
    member = Member(
        client.partition_id,
        client.config,
        client.state.group("secure"),
        run_id=context.run_id,
        identity=_identity(context.node_config),
    )
    key = member.join()
    client.state.set_group("secure", member.memory)
    store.save(context, client.partition_id, client.state)
    return key


def answer(session: Session, message: Message, context: Context) -> Message:
    """Answer a query: send a key or shares, confirm the sum, or reveal shares.

    The client's new state is stored before the reply is returned. PayloadError if secure
    aggregation is off, or the request is malformed or out of order.
    """
    config = session.config(context)
    if not config.secure_aggregation:
        raise PayloadError("secure-aggregation is off on this client")
    partition_id, _ = agreed_place(message, context)
    store = session.states(config, context)
    state = store.load(context, partition_id)
    with session.sums(context, state) as history:
        member = Member(
            partition_id,
            config,
            state.group("secure"),
            run_id=context.run_id,
            history=history,
        )
        reply = _reply_of(member, message, context)
    state.set_group("secure", member.memory)
    store.save(context, partition_id, state)
    return Message(reply.to_record(), reply_to=message)


def _reply_of(member: Member, message: Message, context: Context) -> Payload:
    """Return the client's payload for a query."""
    content, kind = message.content, message.metadata.message_type
    server_round = int(round_settings(content)["server-round"])  # type: ignore[arg-type]
    if kind.endswith(messages.KEYS):
        member.identity = _identity(context.node_config)
        return messages.PublicKey.of(member.join())
    if kind.endswith(messages.SHARES):
        member.peers = _pinned(context.node_config)
        return member.offer(server_round, messages.Roster.from_record(content))
    if kind.endswith(messages.CHECK):
        return member.check(server_round, messages.Survivors.from_record(content))
    return member.reveal(server_round, messages.Confirmations.from_record(content))


def pack_masked(
    session: Session,
    opened: Opened,
    upload: Payload,
    *,
    records: Collection[str],
    depends_on_download: bool = True,
) -> RecordDict:
    """Mask an upload and pack it; without peers the result is empty.

    The client's state changes and must be stored before the reply is sent. The download
    is the origin of the clipping; ``records`` are the names of its records. Unless the
    upload ``depends_on_download``, all sums of the method count as sums of one download.
    PayloadError if the upload cannot be masked, or the message holds arrays of no use.
    """
    client, context, content = opened.client, opened.context, opened.message.content
    if messages.Peers.records[0] not in content or not isinstance(
        upload, AdditivePayload
    ):
        return RecordDict()
    noise = None
    if client.config.upload_noise_model == "distributed":
        noise = _noise_share(client, upload, opened.download)
    seen = download_digest(content, records)
    origin = hashlib.sha256(client.config.method.encode()).digest()
    if depends_on_download:
        origin = seen
    with session.sums(context, client.state) as history:
        member = Member(
            client.partition_id,
            client.config,
            client.state.group("secure"),
            run_id=context.run_id,
            history=history,
        )
        masked = member.mask(
            opened.server_round,
            messages.Peers.from_record(content),
            upload.summands(client.weight),
            noise=noise,
            download=seen,
            origin=origin,
        )
    client.state.set_group("secure", member.memory)
    return masked.to_record()


def _noise_share(client: Client, upload: AdditivePayload, download: Any) -> NoiseShare:
    """Return the client's share of the noise in a sum."""
    if upload.public_summands is None or client.weight != 1:
        raise PayloadError(
            'upload-noise-model = "distributed" needs weight-by = "equal" and an upload '
            "whose sum is the sum of the clipped numbers"
        )
    numbers = numbers_of(upload)
    start = origin_of(numbers, numbers_of(download))
    origin: AdditivePayload = with_numbers(
        upload, dict(zip(numbers, start, strict=True))
    )
    summands: Mapping[str, Tensor] = origin.summands(client.weight)
    return NoiseShare(
        client.config.upload_clip,
        client.config.upload_noise,
        summands,
        upload.public_summands,
    )


def download_digest(content: RecordDict, records: Collection[str]) -> bytes:
    """Hash (32 bytes) all arrays that the server sent, except those of secure aggregation.

    Other arrays than those of the download's ``records`` would make equal downloads look
    different: PayloadError.
    """
    out = hashlib.sha256()
    for name, record in sorted(content.items()):
        if isinstance(record, ArrayRecord) and not name.startswith(SECURE):
            if name not in records:
                raise PayloadError(
                    f'the message holds the arrays "{name[:50]}", which are no part of the '
                    "download. With secure aggregation every array must have a use"
                )
            for key, array in sorted(record.items()):
                head = repr((name, key, array.dtype, tuple(array.shape)))
                out.update(f"{len(head)}/{head}/{len(array.data)}/".encode())
                out.update(array.data)
    return out.digest()
