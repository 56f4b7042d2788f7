"""Messages of a run, recorded at one node, to send them again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.errors import FglError
from flower_fgl.core.options import Scalar
from flower_fgl.simulation.local_grid import carry, task_identity
from tests.support.owners import run_owners

__all__ = ["Node", "record"]


class Node:
    """A SuperNode that keeps its context between messages, as Flower does.

    Parameters
    ----------
    node_config, run_config : mapping of str to bool, int, float or str
        What Flower puts into the context.
    run_id : int
        Flower's id of the run.
    """

    def __init__(
        self,
        node_config: Mapping[str, Scalar],
        run_config: Mapping[str, Scalar],
        run_id: int = 7,
    ) -> None:
        self.context = Context(
            run_id=run_id,
            node_id=5,
            node_config=dict(node_config),
            state=RecordDict(),
            run_config=dict(run_config),
        )
        self.restart()

    def restart(self) -> None:
        """Start a new process for the messages; the context stays."""
        self._app = Dispatcher(Session())

    def lose_memory(self) -> None:
        """Restart the SuperNode: what is not on disk is lost."""
        self.context.state = RecordDict()
        self.restart()

    def ask(self, sent: Message, kind: str = "", **settings: Any) -> RecordDict:
        """Send a recorded message, with changed settings; return the reply's content."""
        content = carry(sent.content)
        if settings:
            record = content.config_records["config"]
            for key, value in settings.items():
                record[key.replace("_", "-")] = value
        return self.send(content, kind or sent.metadata.message_type)

    def send(self, content: RecordDict, kind: str) -> RecordDict:
        """Send a message; return the content of the reply, or raise its error."""
        with task_identity(self.context.run_id):
            message = Message(content, 5, kind)
            message.metadata.__dict__["_message_id"] = "again"
            return self._app(message, self.context).content

    def refuses(self, sent: Message, match: str, kind: str = "", **more: Any) -> None:
        """Check that a message is refused."""
        with pytest.raises(FglError, match=match):
            self.ask(sent, kind, **more)


def record(
    monkeypatch: pytest.MonkeyPatch,
    nodes: Sequence[Mapping[str, Scalar]],
    folder: Path,
    **settings: Any,
) -> tuple[dict[str, list[Message]], dict[str, Scalar]]:
    """Run with data owners; return the first owner's messages by type, and the settings."""
    found: dict[str, list[Message]] = {}
    config: dict[str, Scalar] = {}
    original = Dispatcher.__call__

    def call(app: Any, message: Message, context: Context) -> Message:
        if context.node_config["graph"] == nodes[0]["graph"]:
            found.setdefault(message.metadata.message_type, []).append(message)
            config.update(context.run_config)
        return original(app, message, context)

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "__call__", call)
        run_owners(nodes, folder, **settings)
    return found, config
