"""Train over banks' files in this process, each bank with its own node config."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_fgl import Run
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.server_app import run_server
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity

__all__ = ["train"]


def train(
    method: str,
    banks: Mapping[str, Path],
    folder: Path,
    floors: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Run:
    """Run a method with the messages and checks of a deployment, without its processes.

    Parameters
    ----------
    method : str
        A method.
    banks : mapping of str to Path
        Graph file of each bank, by its name.
    folder : Path
        New run folder; the banks' models go to the folder ``<folder>-models``.
    floors : mapping of str to mapping, optional
        Node config of some banks, as in ``--node-config`` of a SuperNode.
    **settings
        Settings of the run, with ``_`` in place of ``-``.

    Returns
    -------
    Run
        Results, read from the run folder.
    """
    values = run_config_of(
        method=method,
        dataset="synthetic",  # has no effect: every bank brings its graph
        clients=len(banks),
        seed=int(settings.pop("seed", 0)),
        settings={"run_dir": str(folder), "join_timeout": 5.0, **settings},
    )
    models = folder.with_name(f"{folder.name}-models")
    run_id = secrets.randbits(40) + 1
    with task_identity(run_id):
        app = DispatchingClientApp(Session(memory=MemoryStates()))
        grid = LocalGrid(app, len(banks), values, run_id)
        for context, (name, graph) in zip(
            grid.contexts.values(), banks.items(), strict=True
        ):
            node: dict[str, Any] = {"graph": str(graph), "model-dir": str(models)}
            context.node_config = {**node, "name": name, **(floors or {}).get(name, {})}
        return Run.load(run_server(grid, values, engine="local"))
