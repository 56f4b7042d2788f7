"""The local engine: all clients in this process, with serialised messages."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid

from flower_fgl.client_apps.dispatch import FEW, Dispatcher
from flower_fgl.client_apps.runtime.session import Session, choose_device
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, report_lack_of_memory
from flower_fgl.core.options import Scalar, kebab
from flower_fgl.core.settings import GeneralSettings, is_file
from flower_fgl.core.unused_settings import reject_unused_settings
from flower_fgl.datasets.owners import absolute_owners, list_owners
from flower_fgl.datasets.pyg_data import store_graph, store_graphs
from flower_fgl.datasets.sources.load import cache_folder
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import METHODS, Method, parse_config
from flower_fgl.runs.files import OnRound
from flower_fgl.runs.state_files import StateKeeper
from flower_fgl.runs.trackers import Tracker, open_trackers
from flower_fgl.server_app import run_server
from flower_fgl.simulation.experiments import DEFAULT_CLIENTS
from flower_fgl.simulation.flower_simulation import check_workers, num_cpus
from flower_fgl.simulation.local_grid import (
    LocalGrid,
    frozen_objects,
    task_identity,
)
from flower_fgl.simulation.memory import require_memory
from flower_fgl.simulation.progress import show_progress
from flower_fgl.simulation.results import Run
from flower_fgl.simulation.superlink import on_cluster

__all__ = [
    "absolute_paths",
    "check_run",
    "count_owners",
    "flat_settings",
    "run_config_of",
    "run_local",
    "simulate",
]


def run_config_of(
    *, method: str, dataset: str, clients: int, seed: int, settings: Mapping[str, Any]
) -> dict[str, Scalar]:
    """Convert Python keywords to a flat run config.

    Parameters
    ----------
    method, dataset : str
        Values of these settings.
    clients, seed : int
        Values of these settings.
    settings : mapping of str to bool, int, float, str or mapping
        Other settings: ``local_epochs=1``, ``{"fedprox.mu": 0.1}``, or a mapping of a
        method's settings, ``fedprox={"mu": 0.1}``.

    Returns
    -------
    dict of str to bool, int, float or str
        Values by kebab-case key.
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
    """Set ``clients`` to the number of owners, and make their paths absolute.

    Parameters
    ----------
    values : mapping of str to bool, int, float or str
        Flat run config.

    Returns
    -------
    dict of str to bool, int, float or str
        Equal to ``values`` without ``owners``.

    Raises
    ------
    ConfigError
        If a setting is wrong, or ``clients`` is another number.
    DataError
        If the folder or a file of ``owners`` is missing.
    """
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
    """Make the paths of the data absolute, so that a run can resume in any folder.

    Parameters
    ----------
    values : mapping of str to bool, int, float or str
        Flat run config.

    Returns
    -------
    dict of str to bool, int, float or str
        With absolute ``data-dir``, and ``dataset`` if it is a file.
    """
    out = dict(values)
    for key in ("data-dir", "dataset"):
        path = values.get(key)
        if isinstance(path, str) and path and (key == "data-dir" or is_file(path)):
            out[key] = str(Path(os.path.expanduser(path)).resolve())
    return out


def check_run(
    values: Mapping[str, Scalar],
    config: RunConfig | None = None,
    *,
    logs_notes: bool = False,
) -> RunConfig:
    """Check settings and prepare the clients' graphs before a run starts.

    Parameters
    ----------
    values : mapping of str to bool, int, float or str
        Flat run config; ``clients`` must be at least 1.
    config : RunConfig, optional
        The same settings, if the caller has parsed them.
    logs_notes : bool
        Whether to log notes on suspect data of the owners.

    Raises
    ------
    ConfigError
        If a setting is wrong.
    DataError
        If the data are missing or cannot be partitioned among so many clients.
    """
    config = config or parse_config(values)
    if config.clients < 1:
        raise ConfigError(f"clients must be at least 1, got {config.clients}.")
    open_trackers(config.track)  # reports a missing package before a folder is made
    store = open_store(config, config.clients)
    if logs_notes:
        store.log_notes()
    return config


def simulate(
    method: str = "fedavg",
    dataset: Any = "synthetic",
    *,
    clients: int | None = None,
    seed: int = 0,
    workers: int | None = 1,
    progress: bool = False,
    on_round: OnRound | None = None,
    track: str | Tracker | Sequence[Tracker] = "",
    **settings: Any,
) -> Run:
    """Train a method over the clients of a partitioned dataset, or over owners.

    Parameters
    ----------
    method : str
        A name in ``METHODS``, see :func:`flower_fgl.register` for methods of your own.
    dataset : str, torch_geometric.data.Data or list of Data
        A dataset name, ``tu:NAME``, or the path of a graph file; a graph, which is then
        partitioned; or a list with one graph for each client, as ``owners``. Graphs are
        written to the cache folder as graph files, see :func:`flower_fgl.to_npz`.
    clients : int, optional
        Number of clients K, at least 1; by default 10, or the number of ``owners``.
    seed : int
        Seed of the run; the partition has its own seed (``partition_seed``).
    workers : int, optional
        Processes that share the clients. 1 runs them in this process, more start as many
        Ray actors, ``None`` as many as save time. The numbers are the same, up to
        rounding where clients train together (setting ``stacked``).
    progress : bool
        Whether to show a progress bar, or lines of text where no bar can be drawn.
    on_round : callable, optional
        Called with the row of each round.
    track : str, Tracker or sequence of Tracker
        Experiment trackers: ``"tensorboard"``, ``"mlflow"``, ``"wandb"``, or several of
        them separated by commas; or own ones, see :mod:`flower_fgl.runs.trackers`.
    **settings
        Other settings, with ``_`` in place of ``-``. Settings of a method are a mapping:
        ``simulate("fedprox", fedprox={"mu": 0.1}, local_epochs=1)``.

    Returns
    -------
    Run
        Settings and results, read from the run folder.

    Raises
    ------
    ConfigError
        If a setting is unknown, of the wrong type or out of range, or has no effect.
    DataError
        If the data are missing or cannot be partitioned among so many clients.
    RunError
        If the run fails, e.g. because no client replied.
    """
    own = _check_keywords(workers, on_round, track)
    if not isinstance(dataset, str):
        dataset, settings = _graphs_as_files(dataset, clients, settings)
    if clients is None:
        clients = 0 if settings.get("owners") else DEFAULT_CLIENTS
    values = run_config_of(
        method=method, dataset=dataset, clients=clients, seed=seed, settings=settings
    )
    if isinstance(track, str):
        values["track"] = track
    values = absolute_paths(values)
    config = parse_config(values)
    if not config.resume:  # the folder of an older version may hold such settings
        reject_unused_settings(flat_settings(settings), [config])
    if not progress:
        return _run_parsed(values, config, workers, 0.0, on_round, own)
    with show_progress(f"{method} on {dataset}", config.rounds, on_round) as shown:
        return _run_parsed(values, config, workers, 0.0, shown, own)


def _check_keywords(workers: Any, on_round: Any, track: Any) -> list[Tracker]:
    """Reject keywords of :func:`simulate` of a wrong type; return the own trackers."""
    if workers is not None:  # None: as many as pay
        check_workers(workers)
    if on_round is not None and not callable(on_round):
        raise ConfigError(
            f"on_round must be a function of one row, got {type(on_round).__name__}."
        )
    if isinstance(track, str):
        return []
    own = [track] if isinstance(track, Tracker) else track
    is_list = isinstance(own, Sequence)
    if not is_list or not all(isinstance(tracker, Tracker) for tracker in own):
        raise ConfigError(
            'track must be names separated by commas, as in "mlflow,wandb", a Tracker or '
            f"a list of Trackers, got {track!r}."
        )
    return list(own)


def _graphs_as_files(
    dataset: Any, clients: int | None, settings: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Write a graph, or one graph per client; return ``dataset`` and the settings."""
    folder = cache_folder() / "graphs"
    if isinstance(dataset, os.PathLike):
        return str(dataset), dict(settings)
    if not isinstance(dataset, list | tuple):
        return str(store_graph(dataset, folder)), dict(settings)
    if clients not in (None, len(dataset)):
        raise ConfigError(
            f"A list of {len(dataset)} graphs gives {len(dataset)} clients, got clients = "
            f"{clients}. Leave clients out."
        )
    keys = ("partition", "dirichlet-alpha", "owners")
    if unused := [k for k in map(kebab, settings) if k in keys]:
        raise ConfigError(
            f"{unused[0]} has no effect with a list of graphs: each is one client. Remove "
            "it, or give a single graph to partition."
        )
    owners = str(store_graphs(dataset, folder))
    return GeneralSettings.dataset, {**settings, "owners": owners}


def refuse_unstackable(config: RunConfig) -> None:
    """Reject ``stacked = true`` if no client of the run could be stacked.

    Parameters
    ----------
    config : RunConfig
        Checked settings.

    Raises
    ------
    ConfigError
        Naming the reason.
    """
    from flower_fgl.client_apps.stacked.grouping import why_not_run

    able = [name for name, row in METHODS.items() if _has_stacked_form(row)]
    reason = why_not_run(config, {})
    if config.method not in able:
        reason = f"only these methods have a stacked form: {', '.join(able)}"
    if reason:
        raise ConfigError(
            f"stacked = true is not possible with method = {config.method}: {reason}. "
            'Use stacked = "auto".'
        )


def _has_stacked_form(row: Method) -> bool:
    """Return whether a method's client half declares a stacked form."""
    return bool(vars(row.load_client_app()).get("stacked"))


def run_local(
    values: Mapping[str, Scalar],
    *,
    workers: int | None = None,
    client_gpus: float = 0.0,
    on_round: OnRound | None = None,
    trackers: Sequence[Tracker] = (),
) -> Run:
    """Run a flat run config with the local engine; see :func:`simulate`.

    Parameters
    ----------
    values : mapping of str to bool, int, float or str
        Flat run config; ``clients`` must be at least 1.
    workers : int, optional
        Processes that share the clients: 1 runs them in this process, more start as many
        Ray actors. By default the run moves to one actor per core in round 3, if that
        saves time. The numbers are the same, see :func:`simulate`.
    client_gpus : float
        GPUs of each actor.
    on_round : callable, optional
        Called with the row of each round.
    trackers : sequence of Tracker
        Trackers besides those of the setting ``track``.

    Raises
    ------
    FglError
        In the cases of :func:`simulate`, or if the run does not fit into the memory.
    """
    return _run_parsed(values, None, workers, client_gpus, on_round, trackers)


@report_lack_of_memory()
def _run_parsed(
    values: Mapping[str, Scalar],
    config: RunConfig | None,
    workers: int | None,
    client_gpus: float,
    on_round: OnRound | None,
    trackers: Sequence[Tracker],
) -> Run:
    """Run a flat run config that the caller may have parsed, see :func:`run_local`."""
    with frozen_objects():
        if values.get("owners"):
            values, config = count_owners(values), None
        return _run_local(values, config, workers, client_gpus, on_round, trackers)


def _run_local(
    values: Mapping[str, Scalar],
    config: RunConfig | None,
    workers: int | None,
    client_gpus: float,
    on_round: OnRound | None,
    trackers: Sequence[Tracker],
) -> Run:
    """Run a flat run config, see :func:`run_local`."""
    config = check_run(values, config, logs_notes=True)
    if config.stacked == "true":
        refuse_unstackable(config)
    require_memory(
        config,
        engine="local",
        workers=workers or 1,
        is_cluster=on_cluster(os.environ),
    )
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
    return Run.load(folder)


@contextmanager
def _open_grid(
    values: Mapping[str, Scalar],
    config: RunConfig,
    run_id: int,
    workers: int | None,
    client_gpus: float,
) -> Iterator[tuple[Grid, StateKeeper]]:
    """Yield the grid of the clients and the keeper of their states."""
    number = config.clients
    if workers is not None and workers > 1:
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
        ) as hosts:
            yield WorkerGrid(hosts, nodes, run_id), WorkerStates(hosts, len(nodes))
        return
    memory = MemoryStates()
    session = Session(memory=memory)
    session.add_config(values, config)
    app = Dispatcher(session)
    grid = LocalGrid(app, number, values, run_id=run_id, freezes=True)
    most = min(number, num_cpus() // config.threads)
    is_stacked = config.stacked != "false" and number >= FEW
    if is_stacked and _has_stacked_form(METHODS[config.method]):
        from flower_fgl.client_apps.stacked.grouping import num_stacks

        most = min(most, num_stacks(number))  # more would divide stacks
    with ExitStack() as stack:
        stack.callback(session.clear)
        if (
            workers is not None
            or most < 2
            or choose_device(config.device).type != "cpu"
        ):
            yield grid, memory
            return
        from flower_fgl.simulation.growing_grid import GrowingGrid

        with GrowingGrid(
            grid, memory, config, dict(values), most, lambda: app.has_stacked
        ) as growing:
            yield growing, growing
