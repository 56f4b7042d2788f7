"""Run a Flower app in Flower's simulation, in a private Flower home.

``flwr run`` alone returns 0 if the ServerApp raised, may submit the run to another user's
SuperLink, and can wait forever for a run that never starts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar
from flower_fgl.simulation.flower.flower_run import (
    FlowerRun,
    LaunchResult,
    StuckError,
    Tick,
)
from flower_fgl.simulation.flower.superlink import FlowerHome, tail
from flower_fgl.simulation.resources import (
    check_client_gpus,
    fitting_workers,
    on_cluster,
    require_cluster,
)

__all__ = ["LaunchResult", "launch", "sigterm_as_interrupt", "write_app_folder"]


def launch(
    app_dir: Path,
    *,
    run_config: Mapping[str, Scalar],
    num_clients: int,
    home: Path,
    client_cpus: int = 1,
    client_gpus: float = 0.0,
    workers: int | None = None,
    pending_timeout: float = 120.0,
    on_tick: Tick | None = None,
    log_file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> LaunchResult:
    """Run a Flower app in simulation and wait until all its processes have ended.

    In the main thread, SIGTERM raises KeyboardInterrupt, as Ctrl-C does. If this process
    itself is killed, its children end within seconds.

    ``app_dir`` is that of :func:`write_app_folder`; paths in ``run_config``, which
    overrides the app's configuration, should be absolute. ``home`` gets a private Flower
    home for the launch. ``client_cpus`` are also the threads of a client. As many
    ``workers`` train at once as the machine has resources for, unless set. A submitted
    run that does not start within ``pending_timeout`` seconds gets another SuperLink
    once. ``on_tick`` is called about five times a second; an exception that it raises
    ends the run. ``environment`` overrides variables of this process. If ``RAY_ADDRESS``
    is set, the run joins that Ray cluster, whose resources are not checked here, and
    ``workers`` is not allowed.

    Raises a ConfigError if an argument is out of range or of a type that Flower's
    configuration cannot hold; a RunError if the machine has too few CPUs or GPUs, the
    cluster does not answer, or Flower rejects or does not start the run.
    """
    environment = environment or {}
    if os.name != "posix":
        raise RunError(
            'Flower\'s simulation needs Linux or macOS. Use engine "local" or WSL.'
        )
    variables = {**os.environ, **environment}
    has_cluster = on_cluster(variables)
    sizes = _federation_config(
        num_clients, client_cpus, client_gpus, workers, is_cluster=has_cluster
    )
    _check_values(run_config)
    require_cluster(variables)
    home.mkdir(parents=True, exist_ok=True)
    with sigterm_as_interrupt():
        reason = ""
        for _ in range(2):
            with FlowerHome(home, environment) as flower:
                log = (log_file or flower.folder / "run.log").resolve()
                log.parent.mkdir(parents=True, exist_ok=True)
                run = FlowerRun(flower, log, on_tick or (lambda: None))
                try:
                    return run.follow(app_dir, run_config, sizes, pending_timeout)
                except StuckError as error:
                    reason = f"{error}\n{tail(flower.superlink_log)}".rstrip()
        raise RunError(f"Flower did not start the run in two attempts: {reason}")


def write_app_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    server_app: str = "flower_fgl.server_app:app",
    client_app: str = "flower_fgl.client_app:app",
) -> Path:
    """Write an app for ``flwr run`` that refers to installed modules and holds no code.

    ``config`` holds all keys that a run may set, with their defaults, or a ConfigError is
    raised.
    """
    _check_values(config)
    app = {
        "publisher": "flower-fgl",
        "fab-include": ["flower-fgl.md"],  # each pattern must match a file
        "components": {"serverapp": server_app, "clientapp": client_app},
        "config": dict(config),
    }
    project = {
        "name": "flower-fgl",
        "version": version("flower-fgl"),
        "description": "Federated graph learning methods as Flower apps",
        "license": "Apache-2.0",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "flower-fgl.md").write_text("Runs the installed package flower_fgl.\n")
    text = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def _federation_config(
    num_clients: int,
    client_cpus: int,
    client_gpus: float,
    workers: int | None,
    *,
    is_cluster: bool,
) -> str:
    """Check the resources of a run; return the federation config for ``flwr run``."""
    counts = {"num_clients": num_clients, "client_cpus": client_cpus}
    counts["workers"] = 1 if workers is None else workers
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}.")
    check_client_gpus(client_gpus)
    sizes = {
        "num-supernodes": str(num_clients),
        "client-resources-num-cpus": str(client_cpus),
        "client-resources-num-gpus": str(float(client_gpus)),
        "init-args-log-to-driver": "false",
    }
    if not is_cluster:
        # Ray gets only the CPUs that the workers need: each idle worker process would
        # hold torch in memory.
        fitting = fitting_workers(client_cpus, client_gpus, workers)
        sizes["init-args-num-cpus"] = str(client_cpus * min(fitting, num_clients))
    elif workers is not None:
        raise RunError(
            "RAY_ADDRESS names a Ray cluster, which determines how many clients train at "
            f"once: leave out workers (got {workers}), or unset RAY_ADDRESS."
        )
    return " ".join(f"{key}={value}" for key, value in sizes.items())


def _check_values(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value that Flower's configuration cannot hold."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _check_values({f"{key}.{name}": inner for name, inner in value.items()})
        elif not isinstance(value, bool | int | float | str):
            raise ConfigError(
                f"{key} must be a bool, int, float or str, got {value!r} "
                f"({type(value).__name__}): Flower's configuration holds nothing else."
            )


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, unless a handler is already installed."""
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if not is_ours:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
