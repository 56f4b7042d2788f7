"""Small Flower apps for tests: written to a folder, without torch, and fast."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flower_fgl.simulation.flower.flower_simulation import write_app_folder

_MODULE = '''
import os, sys, time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

app = ServerApp()
client = ClientApp()


def ask_clients(grid, count):
    """Wait for `count` clients and return their answers."""
    grid.pull_interval = 0.005
    while len(ids := list(grid.get_node_ids())) < count:
        time.sleep(0.02)
    replies = grid.send_and_receive(
        [Message(RecordDict(), dst_node_id=i, message_type=MessageType.QUERY)
         for i in ids]
    )
    return [dict(reply.content["answer"]) for reply in replies]


@app.main()
def main(grid: Grid, context: Context):
{server}


@client.query()
def answer(message: Message, context: Context):
    answer = {{"partition-id": int(context.node_config["partition-id"])}}
{client}
    return Message(RecordDict({{"answer": ConfigRecord(answer)}}), reply_to=message)
'''


@dataclass(frozen=True)
class TinyApp:
    """An app folder, and the environment that makes its module importable."""

    folder: Path
    environment: Mapping[str, str]


def write_tiny_app(
    folder: Path,
    server: str,
    client: str = "pass",
    config: Mapping[str, object] | None = None,
) -> TinyApp:
    """Write an app whose ServerApp and ClientApp run the given statements.

    ``server`` can use ``grid``, ``context`` and ``ask_clients``; ``client`` can use
    ``message`` and ``context``, and add entries to the dictionary ``answer``.
    """
    modules = folder / "modules"
    modules.mkdir(parents=True)
    (modules / "tiny_app.py").write_text(
        _MODULE.format(
            server=textwrap.indent(textwrap.dedent(server).strip(), "    "),
            client=textwrap.indent(textwrap.dedent(client).strip(), "    "),
        )
    )
    write_app_folder(
        folder / "app",
        config=config or {},
        server_app="tiny_app:app",
        client_app="tiny_app:client",
    )
    return TinyApp(folder / "app", {"PYTHONPATH": str(modules)})
