"""Start and resume a run from Python: the functions ``simulate`` and ``resume``."""

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from flower_fgl.core.atomic import cache_folder
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar, kebab
from flower_fgl.core.settings import GeneralSettings
from flower_fgl.core.targets import KINDS
from flower_fgl.core.unused_settings import reject_unused_settings
from flower_fgl.datasets.pyg_data import store_graph, store_graphs, store_set
from flower_fgl.datasets.pyg_read import held_kind
from flower_fgl.datasets.pyg_typed import TypeNames
from flower_fgl.lab.experiments.experiment_file import DEFAULT_CLIENTS
from flower_fgl.lab.results import Run
from flower_fgl.methods import parse_config
from flower_fgl.runs.checkpoints import require_checkpoint
from flower_fgl.runs.files import OnRound, Row, flatten_config
from flower_fgl.runs.summary import describe_round
from flower_fgl.runs.trackers import Tracker
from flower_fgl.simulation.local import (
    absolute_paths,
    check_workers,
    flat_settings,
    run_config_of,
    run_local,
)
from flower_fgl.simulation.run import run_one

__all__ = ["resume", "show_progress", "simulate"]


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
    dataset : str, torch_geometric.data.Data or HeteroData, or list of these
        A dataset name, ``tu:NAME``, or the path of a graph file; a graph, which is then
        partitioned; or a list with one graph for each client, as ``owners``. With
        ``setting="graph"`` a list is a set of graphs, which may be typed, and is
        partitioned. Graphs are written to the cache folder as graph files, see
        :func:`flower_fgl.to_npz`.
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
    shown = show_progress(f"{method} on {dataset}", config.rounds, on_round)
    with shown if progress else nullcontext(on_round) as callback:
        return Run.of(
            run_local(values, config, workers=workers, on_round=callback, trackers=own)
        )


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
    said = {kebab(name): value for name, value in settings.items()}
    target, relation = (
        str(said.get(f"target-{of}", "")) for of in ("node", "relation")
    )
    setting, kind = str(said.get("setting", "")), said.get("target-kind", "auto")
    if kind not in KINDS:
        kind = held_kind(dataset, setting=setting, target=target, relation=relation)
    if isinstance(dataset, os.PathLike):
        return str(dataset), dict(settings)
    if not isinstance(dataset, list | tuple):
        types = TypeNames(target=target, relation=relation)
        return str(store_graph(dataset, folder, kind, types)), dict(settings)
    if setting == "graph":
        return str(store_set(dataset, folder, kind)), dict(settings)
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
    # owners agree on kinds by name, unless none is read
    is_single = said.get("types") == "ignore"
    types = TypeNames(target=target, relation=relation, is_single=is_single)
    owners = str(store_graphs(dataset, folder, kind, types))
    return GeneralSettings.dataset, {**settings, "owners": owners}


def resume(
    folder: Path | str,
    *,
    rounds: int | None = None,
    workers: int | None = None,
    client_gpus: float = 0.0,
    progress: bool = False,
    on_round: Callable[[Mapping[str, Any]], None] | None = None,
) -> Run:
    """Resume an interrupted run from its newest checkpoint, with its own settings.

    On CPU the results equal those of an uninterrupted run bit for bit.

    Parameters
    ----------
    folder : Path or str
        Run folder.
    rounds : int, optional
        A larger number of rounds than that of the run, which may then be complete if it
        was run with ``keep_checkpoint=True``.
    workers, client_gpus
        As for :func:`flower_fgl.simulation.run.run_one`.
    progress : bool
        As for :func:`flower_fgl.simulate`.
    on_round : callable, optional
        Called with the row of each further round.

    Returns
    -------
    Run
        The completed run. A run that was complete before is only read.

    Raises
    ------
    RunError
        If the run has no intact checkpoint, another process uses its folder, it was a
        deployment, the code, the settings or the data have changed, its method plans
        with the number of rounds, or it does not complete.
    """
    path = Path(folder).resolve()
    run = Run.load(path)
    before = int(run.config["rounds"])
    if rounds is not None and rounds < before:
        raise RunError(
            f"The run in {path} has {before} rounds, got rounds = {rounds}. Give a larger "
            "number to add rounds."
        )
    rounds = rounds or before
    if run.status == "completed" and rounds == before:
        return run
    engine = require_checkpoint(path).engine
    if engine == "deployment":
        raise RunError(
            f"The run in {path} was a deployment: repeat its `flwr run` command with "
            f'run-dir="{path}" resume=true added to --run-config.'
        )
    values: dict[str, Scalar] = dict(flatten_config(run.config))
    about = f"{run.summary['method']} on {run.summary['dataset']}"
    shown = show_progress(about, rounds, on_round, first=int(run.summary["rounds"]))
    with shown if progress else nullcontext(on_round) as callback:
        done = run_one(
            {**values, "rounds": rounds, "run-dir": str(path), "resume": True},
            engine=engine,
            workers=workers,
            client_gpus=client_gpus,
            on_round=callback,
        )
    return Run.of(done)


LINES = 10
"""Largest number of lines that a run prints where no bar can be drawn."""


@contextmanager
def show_progress(
    name: str, rounds: int, on_round: OnRound | None = None, *, first: int = 0
) -> Iterator[OnRound]:
    """Show the rounds of a run; yield the callback that gets the row of each round.

    A terminal and a notebook show a bar of tqdm. Elsewhere, e.g. in a log file, about
    ten lines are printed. ``on_round`` gets the rows as well; ``first`` rounds were
    complete before.
    """
    # a bar can be redrawn on a terminal and in a notebook
    is_notebook = type(sys.stderr).__module__.startswith("ipykernel")
    is_live = is_notebook or bool(getattr(sys.stderr, "isatty", lambda: False)())
    lines = _lines(name, rounds, sys.stderr)
    with _bar(name, rounds, first) if is_live else nullcontext(lines) as show:

        def both(row: Row) -> None:
            show(row)
            if on_round is not None:
                on_round(row)

        yield both


@contextmanager
def _bar(name: str, rounds: int, first: int) -> Iterator[OnRound]:
    """Draw a bar with round, loss, accuracies and remaining time."""
    with warnings.catch_warnings():
        # without ipywidgets a notebook gets a bar of text
        warnings.filterwarnings("ignore", message="IProgress not found")
        from tqdm.auto import tqdm

        bar = tqdm(total=rounds, initial=first, desc=name, unit="round")
    with bar:

        def show(row: Row) -> None:
            if row["phase"] == "train":
                bar.update(min(int(row["round"]), rounds) - bar.n)
            else:
                bar.set_description(f"{name}, {row['phase']}", refresh=False)
            bar.set_postfix_str(describe_round(row))

        yield show


def _lines(name: str, rounds: int, out: TextIO) -> OnRound:
    """Return what prints a line for about every tenth part of the run."""
    step = math.ceil(rounds / LINES)

    def show(row: Row) -> None:
        number = int(row["round"])
        if row["phase"] != "train":
            print(f"{name}, {row['phase']}: {describe_round(row)}", file=out)
        elif number % step == 0 or number >= rounds:
            text = f"{name}, round {number} of {rounds}: {describe_round(row)}"
            print(text, file=out, flush=True)

    return show
