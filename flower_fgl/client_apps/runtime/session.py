"""What outlives a message in one process, and how a client is opened from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, MessageType

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import (
    DataCache,
    file_stamps,
    open_client_data,
)
from flower_fgl.client_apps.runtime.describe import agreed_place, read_agreement
from flower_fgl.client_apps.runtime.state import (
    ContextStates,
    FileStates,
    MemoryStates,
    StateStore,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError, RunError
from flower_fgl.methods import parse_config
from flower_fgl.runs.state_files import state_folder

__all__ = ["Session", "choose_device"]


@dataclass
class Session:
    """What outlives a message in one process.

    Parameters
    ----------
    graphs : DataCache
        Opened graphs.
    memory : MemoryStates or None
        Client states of the local engine; elsewhere ``None``.
    """

    graphs: DataCache = field(default_factory=DataCache)
    memory: MemoryStates | None = None
    configs: dict[tuple[Any, ...], RunConfig] = field(default_factory=dict)

    def config(self, context: Context) -> RunConfig:
        """Parse a run config once."""
        key = tuple(sorted(context.run_config.items()))
        if key not in self.configs:
            self.configs[key] = parse_config(context.run_config)
        return self.configs[key]

    def states(self, config: RunConfig, context: Context) -> StateStore:
        """Choose where client states live; never where a run tells an owner to write.

        Raises
        ------
        RunError
            If the node config's ``state-dir`` is no absolute path: each message may
            find its process in another folder.
        """
        if self.memory is not None:
            return self.memory
        own = context.node_config.get("state-dir")
        if own is not None and not Path(str(own)).is_absolute():
            raise RunError(
                f"The node config's state-dir must be an absolute path, got {own!r}. "
                "Start the SuperNode with --node-config 'state-dir=\"/path\" …'."
            )
        folder = state_folder(context.node_config, config.state_dir)
        if not folder:
            return ContextStates()
        return FileStates(Path(folder), keep_every=config.checkpoint_every)

    def open(self, message: Message, context: Context) -> tuple[Client, StateStore]:
        """Gather a client's graph, settings and memory.

        Parameters
        ----------
        message : Message
            May hold what was agreed with owners of graphs.
        context : Context
            Flower's, of this client.

        Returns
        -------
        client : Client
        place : StateStore
            Where to keep the client's state.

        Raises
        ------
        FglError
            If the settings, the graph or the state cannot be read.
        """
        agreement = read_agreement(message)
        if (
            agreement is None
            and "graph" in context.node_config
            and not _is_query(message)
        ):
            raise PayloadError(
                "the message lacks what was agreed with owners of graphs"
            )
        config = self.config(context)
        if torch.get_num_threads() != config.threads:
            torch.set_num_threads(config.threads)
        device = choose_device(config.device)
        partition_id, num_partitions = agreed_place(agreement, context)
        key = (
            id(config),
            str(device),
            tuple(sorted(context.node_config.items())),
            agreement,
            file_stamps(context.node_config),
        )
        data = self.graphs.get(
            key, lambda: open_client_data(config, context, device, agreement)
        )
        store = self.states(config, context)
        state = store.load(context, partition_id)
        client = Client(config, partition_id, num_partitions, data, state, device)
        return client, store


def _is_query(message: Message) -> bool:
    return message.metadata.message_type.startswith(MessageType.QUERY)


def choose_device(name: str) -> torch.device:
    """Turn the setting ``device``, which is checked, into a torch device.

    Raises
    ------
    RunError
        If the device does not exist here.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    found = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= found:
        raise RunError(
            f'device = "{name}", but torch sees {found} GPUs here. Use device = "auto"; '
            "under Ray a client sees a GPU only with --client-gpus."
        )
    return device
