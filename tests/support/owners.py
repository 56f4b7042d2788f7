"""Data owners in this process, each with its own node config."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flower_fgl import Run
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.core.options import Scalar
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import parse_config
from flower_fgl.runs.files import OnRound
from flower_fgl.server_app import run_server
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from tests.support.short_runs import SMALL, shortened

CLASSES = ("flu", "cold", "well")


def owner_graphs(num: int = 3, method: str = "fedavg") -> list[ClientGraph]:
    """Partition a small graph; client 1 has no labelled node of the last class."""
    settings = shortened(method, SMALL)
    values = run_config_of(
        method=method, dataset="synthetic", clients=num, seed=0, settings=settings
    )
    store = open_store(parse_config(values), num)
    graphs = [
        replace(store.load(i), target=Target.classes(CLASSES)) for i in range(num)
    ]
    y = graphs[1].graph.y.clone()
    y[y == 2] = -1
    graphs[1] = replace(graphs[1], graph=replace(graphs[1].graph, y=y))
    return graphs


def in_own_order(client: ClientGraph, names: Sequence[str]) -> ClientGraph:
    """Renumber the classes in the order of ``names``; other classes must have no node."""
    table = torch.full((len(CLASSES) + 1,), -1)
    for number, name in enumerate(names):
        table[CLASSES.index(name)] = number
    y = table[client.graph.y]
    assert int((y >= 0).sum()) == int((client.graph.y >= 0).sum())
    return replace(
        client, target=Target.classes(names), graph=replace(client.graph, y=y)
    )


def run_owners(
    nodes: Sequence[Mapping[str, Scalar]],
    folder: Path,
    engine: str = "local",
    on_round: OnRound | None = None,
    **settings: Any,
) -> Run:
    """Run with one client per node config, in this process."""
    method = str(settings.pop("method", "fedavg"))
    values = run_config_of(
        method=method,
        dataset="synthetic",
        clients=len(nodes),
        seed=0,
        settings={**SMALL, "run_dir": str(folder), "join_timeout": 1.0, **settings},
    )
    session = Session(memory=MemoryStates())
    run_id = secrets.randbits(40) + 1
    with task_identity(run_id):
        grid = LocalGrid(DispatchingClientApp(session), len(nodes), values, run_id)
        for context, node in zip(grid.contexts.values(), nodes, strict=True):
            place = str(folder.with_name(f"{folder.name}-models"))
            context.node_config = {"model-dir": place, **node}
        return Run.load(run_server(grid, values, engine=engine, on_round=on_round))
