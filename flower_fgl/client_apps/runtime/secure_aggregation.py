"""The client's steps of secure aggregation."""

from __future__ import annotations

from flwr.app import Context, Message, RecordDict

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.describe import agreed_place, read_agreement
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import StateStore
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import CONFIG, Payload
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload
from flower_fgl.protocols.secure_aggregation.client import Member
from flower_fgl.protocols.secure_aggregation.messages import (
    KEYS,
    Peers,
    PublicKey,
    Roster,
    Survivors,
)

__all__ = ["answer", "join", "pack_masked"]


def join(client: Client, store: StateStore, context: Context) -> bytes:
    """Draw and store the client's key pair for this run; return the public key."""
    member = Member(client.partition_id, client.config, {})
    key = member.join()
    client.state.set_group("secure", member.memory)
    store.save(context, client.partition_id, client.state)
    return key


def answer(session: Session, message: Message, context: Context) -> Message:
    """Answer a query: send a key or shares, or reveal shares.

    Parameters
    ----------
    session : Session
        Per-process cache.
    message : Message
        Roster of a round, survivors of a round, or an empty message (key request).
    context : Context
        Flower's context of this client.

    Returns
    -------
    Message
        The reply; the client's new state is already stored.

    Raises
    ------
    PayloadError
        If secure aggregation is off, or the request is malformed or out of order.
    """
    config = session.config(context)
    if not config.secure_aggregation:
        raise PayloadError("secure-aggregation is off on this client")
    partition_id, _ = agreed_place(read_agreement(message), context)
    store = session.states(config, context)
    state = store.load(context, partition_id)
    member = Member(partition_id, config, state.group("secure"))
    content = message.content
    server_round = int(content.config_records[CONFIG]["server-round"])  # type: ignore[arg-type]
    reply: Payload
    if message.metadata.message_type.endswith(KEYS):
        reply = PublicKey.of(member.join())
    elif Roster.record in content:
        reply = member.offer(server_round, Roster.from_record(content))
    else:
        reply = member.reveal(server_round, Survivors.from_record(content))
    state.set_group("secure", member.memory)
    store.save(context, partition_id, state)
    return Message(reply.to_record(), reply_to=message)


def pack_masked(
    client: Client, server_round: int, content: RecordDict, upload: Payload
) -> RecordDict:
    """Mask an upload and pack it; without peers the result is empty.

    Parameters
    ----------
    client : Client
        The client; its state changes and must be stored before the reply is sent.
    server_round : int
        Round.
    content : RecordDict
        Content of the server's message.
    upload : Payload
        The method's upload.

    Raises
    ------
    PayloadError
        If the upload cannot be masked.
    """
    if Peers.record not in content or not isinstance(upload, AdditivePayload):
        return RecordDict()
    member = Member(client.partition_id, client.config, client.state.group("secure"))
    peers = Peers.from_record(content)
    masked = member.mask(server_round, peers, upload.summands(client.weight))
    client.state.set_group("secure", member.memory)
    return masked.to_record()
