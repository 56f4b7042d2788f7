"""The local engine: all clients in this process, with serialised messages."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.serverapp import Grid

from flower_fgl.client_apps.dispatch import FEWEST_STACKED, Dispatcher
from flower_fgl.client_apps.runtime.session import Session, choose_device
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, RunError, report_lack_of_memory
from flower_fgl.core.options import Scalar, kebab
from flower_fgl.core.settings import is_file
from flower_fgl.datasets.owners import absolute_owners, list_owners
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.runs.files import OnRound
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.state_files import StateKeeper
from flower_fgl.runs.writer import default_folder
from flower_fgl.server_app import run_server
from flower_fgl.simulation.local_grid import LocalGrid, frozen_objects, task_identity
from flower_fgl.simulation.memory import (
    graph_sizes,
    has_stacked_form,
    may_stack,
    require_memory,
)
from flower_fgl.simulation.resources import num_cpus, on_cluster

if TYPE_CHECKING:
    from flower_fgl.runs.trackers import Tracker

log = logging.getLogger(__name__)

LARGE_CLIENT, LONG_RUN = 2000, 20
"""Nodes per client, on average, and rounds from which worker processes save time."""

__all__ = ["absolute_paths", "check_run", "check_workers", "count_owners"]
__all__ += ["flat_settings", "pick_workers", "run_config_of", "run_local"]


def run_config_of(
    *, method: str, dataset: str, clients: int, seed: int, settings: Mapping[str, Any]
) -> dict[str, Scalar]:
    """Convert Python keywords to a flat run config by kebab-case key.

    ``settings`` are ``local_epochs=1``, ``{"fedprox.mu": 0.1}``, or a mapping of a
    method's settings, ``fedprox={"mu": 0.1}``.
    """
    first: dict[str, Scalar] = {"method": method, "dataset": dataset}
    first |= {"clients": clients, "seed": seed}
    return {**first, **flat_settings(settings)}


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return settings given as Python keywords by kebab-case key."""
    flat: dict[str, Scalar] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            if wrong := [k for k in value if not isinstance(k, str)]:
                raise ConfigError(
                    f"{key} must be a mapping of the names of settings to their values, "
                    f"got the name {wrong[0]!r}."
                )
            flat |= {f"{kebab(key)}.{kebab(k)}": v for k, v in value.items()}
        else:
            flat[kebab(key)] = value
    return flat


def count_owners(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Set ``clients`` to the number of ``owners``, if any; make their paths absolute."""
    if not values.get("owners"):
        return dict(values)
    config = parse_config(values)
    found = len(list_owners(config))
    if config.clients not in (0, found):
        raise ConfigError(
            f"owners holds {found} graphs, one client each, but clients = "
            f"{config.clients}. Remove clients, or set it to {found}."
        )
    paths = absolute_owners(config.owners, config)
    return {**values, "clients": found, "owners": paths}


def absolute_paths(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Make paths of data and of a model absolute: a run can resume in any folder."""
    out = dict(values)
    for key in ("data-dir", "initial-model", "dataset"):
        path = values.get(key)
        if isinstance(path, str) and path and (key != "dataset" or is_file(path)):
            out[key] = str(Path(os.path.expanduser(path)).resolve())
    return out


def check_run(
    values: Mapping[str, Scalar], config: RunConfig | None = None
) -> RunConfig:
    """Check settings and prepare the clients' graphs before a run starts.

    ``config`` are the same settings, if the caller has parsed them.
    """
    config = config or parse_config(values)
    if config.clients < 1:
        raise ConfigError(f"clients must be at least 1, got {config.clients}.")
    if config.without_owners and not config.owners:
        raise ConfigError(
            "without-owners names owners, but the clients are parts of a dataset: set "
            "owners too, or remove without-owners."
        )
    if config.track:  # further files: a plain run does not run through them
        from flower_fgl.runs.trackers import open_trackers

        open_trackers(config.track)  # reports a missing package before a folder is made
    open_store(config, config.clients)
    return config


def check_workers(workers: int) -> None:
    """Raise ConfigError if a number of worker processes is no whole number from 1."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(
            f"workers must be a whole number and at least 1, got {workers!r}."
        )


def refuse_unstackable(config: RunConfig) -> None:
    """Raise a ConfigError with the reason if no client of a run could be stacked."""
    from flower_fgl.client_apps.stacked.grouping import why_not_run

    able = [name for name, row in METHODS.items() if has_stacked_form(row)]
    reason = why_not_run(config, {})
    if config.method not in able:
        reason = f"only these methods have a stacked form: {', '.join(able)}"
    if reason:
        raise ConfigError(
            f"stacked = true is not possible with method = {config.method}: {reason}. "
            'Use stacked = "auto".'
        )


def pick_workers(config: RunConfig) -> int:
    """Return the number of worker processes that save time, 1 for none of them.

    The clients must train one by one on a CPU. With few nodes per client the messages
    between processes take longer than the training that they divide, and in a short run
    Ray's start of about 15 s is lost; docs/results/performance.md has the measurements.
    The memory must suffice.
    """
    number = min(config.clients, num_cpus() // config.threads)
    if number < 2 or config.rounds < LONG_RUN:
        return 1
    if config.clients >= FEWEST_STACKED and may_stack(config):
        return 1
    if choose_device(config.device).type != "cpu":
        return 1
    together, _ = graph_sizes(open_store(config, config.clients))
    if together.num_nodes < LARGE_CLIENT * config.clients:
        return 1
    try:
        require_memory(config, engine="local", workers=number)
    except RunError as error:
        log.info("The run stays in one process. %s", error)
        return 1
    log.info("The clients run in %d worker processes. Choose with --workers.", number)
    return number


@report_lack_of_memory()
@frozen_objects()
def run_local(
    values: Mapping[str, Scalar],
    config: RunConfig | None = None,
    *,
    workers: int | None = None,
    client_gpus: float = 0.0,
    on_round: OnRound | None = None,
    trackers: Sequence[Tracker] = (),
) -> RunFolder:
    """Run a flat run config with the local engine; see :func:`flower_fgl.simulate`.

    ``config`` are the same settings, where the caller has parsed them. 1 worker runs the
    clients in this process, more start as many Ray actors with ``client_gpus`` each; by
    default :func:`pick_workers` chooses. ``trackers`` are added to those of the setting
    ``track``.
    """
    if values.get("owners"):
        values, config = count_owners(values), None
    config = check_run(values, config)
    open_store(config, config.clients).log_notes()
    if config.keep_client_models and not config.run_dir:
        place = (config.method, config.data_name, config.seed)
        folder = default_folder(Path(config.output_dir).resolve(), *place)
        values = {**values, "run-dir": str(folder)}
        config = parse_config(values)
    if config.stacked == "true":
        refuse_unstackable(config)
    if workers is None:
        workers = pick_workers(config)
    is_cluster = workers > 1 and on_cluster(os.environ)
    require_memory(config, engine="local", workers=workers, is_cluster=is_cluster)
    run_id = secrets.randbits(62) + 1
    threads = torch.get_num_threads()
    # clients set it too, but with workers none is in this process
    torch.set_num_threads(config.threads)
    try:
        with (
            task_identity(run_id),
            _open_grid(values, config, run_id, workers, client_gpus) as (grid, states),
        ):
            folder = run_server(
                grid,
                values,
                engine="local",
                states=states,
                on_round=on_round,
                config=config,
                trackers=trackers,
            )
    finally:
        torch.set_num_threads(threads)
    return RunFolder.load(folder)


@contextmanager
def _open_grid(
    values: Mapping[str, Scalar],
    config: RunConfig,
    run_id: int,
    workers: int,
    client_gpus: float,
) -> Iterator[tuple[Grid, StateKeeper]]:
    """Yield the grid of the clients and the keeper of their states."""
    number = config.clients
    if workers > 1:
        from flower_fgl.simulation.workers import (
            WorkerGrid,
            WorkerStates,
            start_workers,
        )

        nodes = {secrets.randbits(62) + 2: k for k in range(number)}
        with start_workers(
            values,
            num_clients=number,
            run_id=run_id,
            workers=min(workers, number),
            cpus=config.threads,
            gpus=client_gpus,
        ) as started:
            yield WorkerGrid(started, nodes, run_id), WorkerStates(started, number)
        return
    memory = MemoryStates()
    session = Session(memory=memory)
    session.add_config(values, config)
    dispatcher = Dispatcher(session)
    grid = LocalGrid(dispatcher, number, values, run_id=run_id, freezes=True)
    try:
        yield grid, memory
    finally:
        dispatcher.clear()
