"""The reply to the resume query: a client rewinds to the round of a checkpoint."""

from __future__ import annotations

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flower_fgl.client_apps.runtime.describe import agreed_place, read_agreement
from flower_fgl.client_apps.runtime.model_store import copy_model_of_run
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import CONFIG, INFO

__all__ = ["rewind_client"]


def rewind_client(session: Session, message: Message, context: Context) -> Message:
    """Rewind a client to a run id and round; reply with its last trained round, or 0.

    A client rewinds at most once in a run, and before its first answer, else
    PayloadError: the server could get a second answer to the same round.
    """
    if "graph" in context.node_config:
        session.open(message, context)  # checks the limits that depend on the graph
    point = message.content.config_records[CONFIG]
    partition_id, _ = agreed_place(read_agreement(message), context)
    store = session.states(session.config(context), context)
    current = store.load(context, partition_id)
    keys = current.group("secure")
    run_id, server_round = int(point["run-id"]), int(point["server-round"])  # type: ignore[arg-type]
    if not point["is-restored"]:
        if current.has_answered:
            raise PayloadError(
                "the client has answered messages of this run and does not rewind"
            )
        store.rewind(context, partition_id, run_id, server_round)
    copy_model_of_run(context, partition_id, run_id, server_round)
    state = store.load(context, partition_id)
    if keys:  # drawn when the run resumed; the server knows only these
        answered = state.group("secure").get("masked-round", torch.tensor(0))
        # a round that was answered in this run stays answered
        keys["masked-round"] = max(answered, keys.get("masked-round", answered))
        state.set_group("secure", keys)
        store.save(context, partition_id, state)
    info = ConfigRecord({"round": int(state.values.get("round", 0))})
    return Message(RecordDict({INFO: info}), reply_to=message)
