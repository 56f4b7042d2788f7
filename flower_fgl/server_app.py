"""The ServerApp that Flower loads: settings, method, rounds, run folder."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_fgl.core.atomic import hold
from flower_fgl.core.checks.rules import num_sampled
from flower_fgl.core.config import RunConfig, pyproject_table
from flower_fgl.core.connection_watch import (
    prefer_stop,
    runtime_address,
    watch_connection,
)
from flower_fgl.core.errors import ConfigError, FglError, RunError, refuse
from flower_fgl.core.extensions import Kind
from flower_fgl.core.flower_internals import add_exit_handler
from flower_fgl.core.model_spec import read_model, split_models
from flower_fgl.core.options import AUTO, Scalar, kebab
from flower_fgl.core.score_names import score_title
from flower_fgl.core.settings import GeneralSettings
from flower_fgl.core.targets import CLASSES, TargetKind
from flower_fgl.core.unused_settings import check_app_table, reject_unused_settings
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.methods.method import require_half
from flower_fgl.protocols.differential_privacy import accounted_epsilon, epsilon
from flower_fgl.runs.card import run_card, write_card
from flower_fgl.runs.checkpoints import LET_GO_SECONDS, Checkpoint, Checkpoints, rewind
from flower_fgl.runs.environment import describe_environment
from flower_fgl.runs.files import OnRound, Row, flatten_config, status_of
from flower_fgl.runs.flower_log import flower_log, log_results, log_rounds, log_settings
from flower_fgl.runs.model_file import save_model
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.state_files import LinkedStates, StateKeeper
from flower_fgl.runs.summary import rounds_without_gain, summarise
from flower_fgl.runs.writer import RunWriter, default_folder, finite

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Result

    from flower_fgl.runs.trackers import Tracker
    from flower_fgl.strategies.base import FglStrategy
    from flower_fgl.strategies.federation import Federation

__all__ = ["app", "run_server", "warn_of_many_clients"]

log = logging.getLogger(__name__)
app = ServerApp()
MANY_CLIENTS = 200
"""Clients above which a run in Flower's simulation begins with a line on its cost."""
MESSAGE_SECONDS = (0.012, 0.03)
"""Seconds of a message in Flower's simulation, whose link state scans all messages for
every node; measured with 1,000 clients on two cores."""
STOPPED = (
    "Flower stopped the ServerApp before the last round: by `flwr stop`, or because its "
    "SuperLink ended. The run can resume from its last checkpoint, if it wrote one."
)


def run_server(
    grid: Grid,
    values: Mapping[str, Scalar],
    *,
    engine: str,
    states: StateKeeper | None = None,
    on_round: OnRound | None = None,
    config: RunConfig | None = None,
    trackers: Sequence[Tracker] = (),
) -> Path:
    """Run a method's server half and write its run folder.

    ``values`` is Flower's flat run config, ``config`` the same if the caller has checked
    it. ``engine`` says where the clients are: ``local``, ``ray`` or ``deployment``, whose
    clients store their own ``states``; those of others are saved for checkpoints.
    ``on_round`` gets the row of each round, as ``trackers`` do besides those that the
    setting ``track`` names. Returns the run folder.

    Raises a ConfigError if the settings are wrong, before a folder is made; a RunError if
    the run fails, which ``summary.json`` then holds; or if ``resume`` is set and the run in
    ``run-dir`` cannot be resumed, whose folder remains unchanged.
    """
    config = config or parse_config(values)
    hosts_many = config.clients_per_node > 1 and engine != "local"
    if hosts_many:
        grid = _host_clients(grid, config, engine)
    refuse(
        {
            "stacked = true trains the clients of one process together, but here every "
            f"client has its own process (engine {engine}). Use --engine local, or "
            'clients-per-node, or stacked = "auto".': (
                config.stacked == "true" and engine != "local" and not hosts_many
            ),
            "keep-client-models stores models in the run folder of a simulation: set "
            "run-dir in `flwr run`. In a deployment each SuperNode keeps its own model "
            "(model-dir in its node config).": config.keep_client_models
            and (engine == "deployment" or not config.run_dir),
        }
    )
    group = None
    if config.track or trackers:
        # further files: a plain round does not run through them
        from flower_fgl.runs.trackers import TrackerGroup, open_trackers

        group = TrackerGroup([*open_trackers(config.track), *trackers])
    keeps = engine == "deployment" or states is not None
    if config.resume:
        if not (config.run_dir and keeps):
            missing = {"run-dir": config.run_dir, "state-dir": keeps}
            names = " and ".join(key for key, value in missing.items() if not value)
            raise ConfigError(
                f"resume needs {names}: run-dir is the run folder to resume, and in a "
                "simulation state-dir holds the clients' states."
            )
        folder = Path(config.run_dir)
        if config.target_kind == AUTO:  # that of the run, from the files of its owners
            before = RunFolder.load(folder).config.get("target-kind", AUTO)
            config = config if before == AUTO else of_kind(config, before)
        with hold(folder, is_server=True, timeout=LET_GO_SECONDS):
            resumed = rewind(folder, config)
            writer = RunWriter(folder, on_round)
            _run(grid, config, writer, engine, states, resumed, group)
        return folder
    base, data = Path(config.output_dir), config.data_name
    new = config.run_dir or default_folder(base, config.method, data, config.seed)
    folder = Path(new)
    writer = RunWriter.create(
        folder,
        config=config.flat(),
        sources=config.sources,
        on_round=on_round,
        environment=describe_environment(engine, config.device, _named_rows(config)),
        engine=engine,
    )
    with hold(folder, is_server=True):
        _run(grid, config, writer, engine, states, None, group)
    return folder


def of_kind(config: RunConfig, kind: TargetKind) -> RunConfig:
    """Return the checked settings of a run whose data owners hold a kind of target."""
    known = parse_config({**config.flat(), "target-kind": kind})
    return replace(known, sources={**config.sources, "target-kind": "data set"})


def _host_clients(grid: Grid, config: RunConfig, engine: str) -> Grid:
    """Return a grid of the clients that the nodes of a grid host."""
    start = f"clients-per-node = {config.clients_per_node} is not possible: "
    reasons = {
        f"{start}secure-aggregation takes every client for another party, but a SuperNode "
        "is that of all its clients. Set clients-per-node to 1.": config.secure_aggregation,
        f"{start}a SuperNode does not rewind the clients that it hosts, so that no run "
        "resumes. Set clients-per-node to 1.": config.resume,
    }
    refuse(reasons if engine == "deployment" else {})
    # other runs do not load its file
    from flower_fgl.strategies.rounds.hosting import HostedGrid

    return HostedGrid(grid, config.clients_per_node, config.max_message_mb)


def _run(
    grid: Grid,
    config: RunConfig,
    writer: RunWriter,
    engine: str,
    states: StateKeeper | None,
    resumed: Checkpoint | None,
    tracker: Tracker | None,
) -> None:
    """Run all rounds; write the summary whatever happens."""
    checkpoints = None
    writes = config.checkpoint_every or config.keep_checkpoint or resumed is not None
    if writes and (engine == "deployment" or states is not None):
        checkpoints = Checkpoints(
            writer.folder,
            config=config,
            engine=engine,
            run_id=grid.run.run_id,
            states=states,
            resumed=resumed,
        )
    elif writes:
        log.info(
            "No checkpoints: they need state-dir, since Flower does not save client states."
        )
    if resumed is not None:
        log.info("Resumes after round %s of %s.", resumed.server_round, config.rounds)
        writer.rounds += RunFolder.load(writer.folder).rounds
    if engine != "local":
        log.info("Run folder: %s", writer.folder.resolve())
        add_exit_handler(
            partial(_record_stop, writer.folder), run_before_force_exit=True
        )
    if tracker is not None:
        first = resumed.server_round + 1 if resumed is not None else 1
        tracker.on_start(writer.folder, config.flat(), first)
        writer.listeners.insert(0, tracker.on_round)
    from flower_fgl.strategies.base import FglStrategy  # loads torch
    from flower_fgl.strategies.rounds.candidates import OtherKindError

    strategy: FglStrategy | None = None
    status, error = "failed", ""
    try:
        load = METHODS[config.method].load_strategy()
        require_half(config.method, load, FglStrategy)
        strategy = load(config, writer, checkpoints)
        # Flower stops no run of the local engine
        with nullcontext() if engine == "local" else prefer_stop(grid.get_node_ids):
            try:
                strategy.start(grid, should_stop=_stop_early(config, writer))
            except OtherKindError as found:  # before round 1
                config = of_kind(config, found.kind)
                log.info(
                    "Most data owners hold %s, which the run predicts.", found.kind
                )
                writer.write_settings(config.flat(), config.sources)
                if checkpoints is not None:
                    checkpoints.config = config
                strategy = load(config, writer, checkpoints)
                strategy.start(grid, should_stop=_stop_early(config, writer))
        state, model = strategy.best_state(), None
        if state is not None:
            scale, model = (
                strategy.federation.known_scale(config),
                strategy.model_card(),
            )
            save_model(writer.folder, state, model, target_scale=scale)
        status = "completed"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as reason:
        error = str(reason) if isinstance(reason, FglError) else repr(reason)
        raise
    except BaseException as reason:
        if isinstance(reason, SystemExit) and status_of(writer.folder) == "running":
            error = f"Code of the server half called sys.exit({reason.code!r})."
        else:  # Flower ends a stopped run by exceptions like these
            status = "interrupted"
            error = f"{STOPPED} ({type(reason).__name__})"
        raise
    finally:
        federation = getattr(strategy, "federation", None)
        about = {"engine": engine, "status": status, "error": error or None}
        summary = _summary(config, federation, writer.rounds, about)
        if config.upload_clip:
            summary["upload_privacy"] = privacy = upload_privacy(config, writer)
            log.info("Privacy of the uploads: %s.", _privacy_text(privacy))
        try:
            writer.write_summary(summary)
            if status == "completed":
                card = run_card(
                    config, {**summary, **writer.origin}, model, writer.folder
                )
                write_card(writer.folder, card)
        except RunError as late:
            if not error:
                raise
            log.warning("The summary was not updated: %s", late)  # the error is raised
        if tracker is not None:
            tracker.on_end(finite({**summary, **writer.origin}))
    if checkpoints is not None and not config.keep_checkpoint:
        checkpoints.remove()


def _summary(
    config: RunConfig, federation: Federation | None, rounds: list[Row], about: Row
) -> dict[str, Any]:
    """Summarise a run that has ended, before or after its clients were known."""
    summary = summarise(
        rounds,
        method=config.method,
        dataset=config.data_name,
        clients=config.clients,
        seed=config.seed,
        partition_sha256="",
        evaluate=config.evaluate,
        metric=config.main_score,
        **about,
    )
    if federation is None:
        return summary
    if federation.is_owned:
        summary["dataset"] = "own graphs"
    summary["clients"] = len(federation.clients)
    summary["partition_sha256"] = federation.partition_sha256
    if not (config.has_local_heads or federation.target.has_numbers):
        summary["class_names"] = list(federation.target.names)
    if federation.refused:
        summary["refused"] = [asdict(one) for one in federation.refused]
    if config.predicts != CLASSES:
        from flower_fgl.strategies.federation import describe_target

        summary["target"] = describe_target(config, federation)
    return summary


def _stop_early(
    config: RunConfig, writer: RunWriter
) -> Callable[[int, Result], bool] | None:
    """Return the condition of ``round-patience``, None if it is off."""
    if not config.round_patience:
        return None

    def should_stop(server_round: int, result: Result) -> bool:
        waited = rounds_without_gain(writer.rounds, config.main_score)
        if waited < config.round_patience:
            return False
        log.info(
            "The run ends after round %s: %s evaluated rounds without a better validation "
            "%s (round-patience = %s).",
            server_round,
            waited,
            score_title(config.main_score),
            config.round_patience,
        )
        return True

    return should_stop


def _record_stop(folder: Path) -> None:
    """Set the status of a run that Flower stops; it may end this process at any moment."""
    run = RunFolder.load(folder)
    summary = dict(run.summary)
    if summary["status"] == "running":
        summary |= {"status": "interrupted", "error": STOPPED}
        first = (row for row in run.clients if not row["round"])
        hashes = {row.get("partition_sha256") for row in first}
        if summary.get("engine") == "deployment" and hashes == {""}:
            summary["dataset"] = "own graphs"
        RunWriter(folder).write_summary(summary)


def _named_rows(config: RunConfig) -> list[tuple[Kind, str]]:
    """Return the rows of the run that other packages may have added."""
    models = [read_model(text).name for text in split_models(config.model)]
    rows: list[tuple[Kind, str]] = [("backbones", name) for name in models]
    return [("methods", config.method), ("datasets", config.dataset), *rows]


def upload_privacy(config: RunConfig, writer: RunWriter) -> dict[str, Any]:
    """Return how uploads were clipped and noised, with the largest ε of any client.

    The keys are ``clip``, ``noise``; with noise also ``delta``, ``uploads`` (of that
    client) and ``epsilon``; with distributed noise also ``model`` and ``accountant``.
    """
    found: dict[str, Any] = {"clip": config.upload_clip, "noise": config.upload_noise}
    if config.upload_noise:
        uploads = max(writer.count_releases().values(), default=0)
        spent = config.upload_noise, uploads, config.upload_delta
        found |= {"delta": config.upload_delta, "uploads": uploads}
        found["epsilon"] = epsilon(*spent)
        if config.upload_noise_model == "distributed":
            found["model"] = "distributed"
            found["epsilon"], found["accountant"] = accounted_epsilon(*spent)
    return found


def _privacy_text(spent: Mapping[str, Any]) -> str:
    """Return what ``upload_privacy`` holds, for people."""
    clip = f"clipped to an L2 norm of {spent['clip']:g}"
    if not spent["noise"]:
        return f"{clip}, no noise, so there is no ε"
    where = "sums of all clients" if "model" in spent else "single uploads"
    return (
        f"{clip}, noise multiplier {spent['noise']:g}; ε = {spent['epsilon']:.4g} at "
        f"δ = {spent['delta']:g} for the client with most uploads ({spent['uploads']}), "
        f"against readers of {where}"
    )


def warn_of_many_clients(config: RunConfig, nodes: int) -> None:
    """Log what Flower's simulation of over 200 nodes costs, and what is faster."""
    if nodes <= MANY_CLIENTS:
        return
    sampled = num_sampled(config, nodes) if config.clients_per_node == 1 else nodes
    low, high = (2 * sampled * seconds for seconds in MESSAGE_SECONDS)
    log.warning(
        "Flower's simulation of %s nodes spends about %.0f to %.0f s per round on "
        "messages alone (2 for each of %s sampled nodes, 12 to 30 ms each), %.1f to "
        "%.1f hours in %s rounds. Faster, with the same numbers up to rounding: "
        "clients-per-node = %s, which lets 8 nodes host all clients; or "
        "flower-fgl run --engine local --workers N, with N up to the number of cores.",
        f"{nodes:,}",
        low,
        high,
        f"{sampled:,}",
        low * config.rounds / 3600,
        high * config.rounds / 3600,
        f"{config.rounds:,}",
        -(-max(config.clients, nodes) // 8),
    )


def read_run_config(values: Mapping[str, Scalar]) -> RunConfig:
    """Parse the run config of ``flwr run``; log it, and reject settings without effect.

    Raises a ConfigError if a setting is wrong, has no effect and differs from its default,
    or if Flower ignores the table of the settings because its name is misspelt.
    """
    check_app_table(sys.path)
    config = parse_config(values)
    defaults = dict(flatten_config(pyproject_table(METHODS)))
    # a repeated run holds the values that "auto" stood for
    general = {kebab(name): value for name, value in asdict(GeneralSettings()).items()}
    usual = general | dict(METHODS[config.method].defaults)
    changed = [
        key
        for key, value in values.items()
        if value not in (defaults.get(key), usual.get(key))
    ]
    if not config.resume:  # a run of an older version may hold such settings
        reject_unused_settings(changed, [config])
    log_settings({key: values[key] for key in changed}, config)
    return config


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run under Flower: in its simulation or on a SuperLink."""
    is_simulation = type(grid).__name__ == "InMemoryGrid"
    address = None if is_simulation else runtime_address(sys.argv)
    with flower_log(), watch_connection(address):
        config = read_run_config(context.run_config)
        if is_simulation:
            nodes = config.num_nodes or len(list(grid.get_node_ids()))
            warn_of_many_clients(config, nodes)
        has_states = is_simulation and config.state_dir
        states = LinkedStates(Path(config.state_dir)) if has_states else None
        run = run_server(
            grid,
            context.run_config,
            engine="ray" if is_simulation else "deployment",
            states=states,
            on_round=log_rounds(config.rounds),
            config=config,
        )
        log_results(run)
