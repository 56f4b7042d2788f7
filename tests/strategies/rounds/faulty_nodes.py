"""Nodes that say nothing, or garbage, when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from tests.strategies.rounds.test_rejoining import Nodes

Plan = Callable[[int, str, int], str]
"""Takes a partition-id, a message type and a number; returns the fault, or ``""``.

The number is the round of a training or evaluation message, and otherwise counts the
messages of this type that the node received, from 1.
"""


def faulty(plan: Plan) -> type[Nodes]:
    """Return a grid whose nodes have the faults of a plan, and that notes all messages."""

    class FaultyNodes(Nodes):
        asked: list[tuple[int, str, int]] = []  # noqa: RUF012 (one grid per class)

        def _handle(self, key: str, sent: Message, content: RecordDict) -> Message:
            node, kind = sent.metadata.dst_node_id, sent.metadata.message_type
            if node not in self.contexts:
                return super()._handle(key, sent, content)
            pid = int(self.contexts[node].node_config["partition-id"])
            config: Any = content.config_records.get("config", ConfigRecord())
            number = config.get("server-round") if "query" not in kind else None
            if number is None:
                number = 1 + sum((p, k) == (pid, kind) for p, k, _ in self.asked)
            self.asked.append((pid, kind, int(number)))
            fault = plan(pid, kind, int(number))
            reply = super()._handle(key, sent, content)
            if fault == "silent":
                error = Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable")
                return Message(error, reply_to=_message(key, sent))
            if fault == "raise":
                text = "<class 'ValueError'>:<'bug'>"  # as a SuperNode writes it
                error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, text)
                return Message(error, reply_to=_message(key, sent))
            if fault == "garbage":
                return Message(RecordDict(), reply_to=_message(key, sent))
            return reply

        def rounds_of(self, pid: int, kind: str = "train") -> list[int]:
            """Return the rounds in which a node received a message of a type."""
            return [n for p, k, n in self.asked if (p, k) == (pid, kind)]

    return FaultyNodes


def places_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return node configs of three clients that keep their states in a folder."""
    return [
        {
            "partition-id": i,
            "num-partitions": 3,
            "state-dir": str(folder / f"{name}-{i}"),
        }
        for i in range(3)
    ]


def _message(key: str, sent: Message) -> Message:
    """Return the message that a reply answers, with its sender as the receiver."""
    message = Message(
        RecordDict(), sent.metadata.dst_node_id, sent.metadata.message_type
    )
    message.metadata.__dict__["_message_id"] = key
    return message
