"""Run a Flower app in Flower's simulation, in a private Flower home.

``flwr run`` alone has three problems: it returns 0 if the ServerApp raised, it may submit
the run to another user's SuperLink, and it can wait forever for a run that never starts.
:func:`launch` starts a SuperLink for one run, limits the wait, returns Flower's status of
the run, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import math
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
from flower_fgl.simulation.flower.ray_cluster import require_cluster
from flower_fgl.simulation.flower.superlink import FlowerHome, on_cluster, tail

__all__ = [
    "LaunchResult",
    "check_client_gpus",
    "check_workers",
    "fitting_workers",
    "launch",
    "num_cpus",
    "sigterm_as_interrupt",
    "write_app_folder",
]

SMALLEST_SHARE = 1e-4
"""Smallest share of a GPU that Ray distinguishes from 0."""


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
    """Run a Flower app in simulation and wait until it has ended.

    All processes have ended when this function returns or raises. In the main thread,
    SIGTERM raises KeyboardInterrupt, as Ctrl-C does. If this process itself is killed,
    its children end within seconds.

    Parameters
    ----------
    app_dir : Path
        Folder of the app's ``pyproject.toml``, see :func:`write_app_folder`.
    run_config : mapping of str to bool, int, float or str
        Overrides of keys in the app's configuration. Paths should be absolute.
    num_clients : int
        Number of virtual clients (SuperNodes).
    home : Path
        Folder in which each launch creates a private Flower home and removes it again.
    client_cpus : int
        CPUs per client, which are also its threads.
    client_gpus : float
        GPUs per client; 0.25 lets four clients share one.
    workers : int, optional
        Clients that train at once; by default as many as the machine has resources for.
        Not allowed with ``RAY_ADDRESS``.
    pending_timeout : float
        Seconds within which a submitted run must start. If it does not, the SuperLink is
        replaced once.
    on_tick : callable, optional
        Called about five times a second; an exception that it raises ends the run.
    log_file : Path, optional
        File to which the run's log is written continuously.
    environment : mapping of str to str, optional
        Variables for Flower's processes, which override those of this process.

    Raises
    ------
    ConfigError
        If an argument is out of range or of a type that Flower's configuration cannot
        hold.
    RunError
        If the machine has too few CPUs or GPUs, the cluster of ``RAY_ADDRESS`` does not
        answer, Flower does not start or rejects the run, or two SuperLinks in turn did
        not start the run.
    KeyboardInterrupt
        After Ctrl-C or SIGTERM.

    Notes
    -----
    1. If ``RAY_ADDRESS`` is set in the environment, the run joins that Ray cluster, whose
       CPUs and GPUs are not checked here. Otherwise the run starts its own Ray processes.
    """
    environment = environment or {}
    if os.name != "posix":
        raise RunError(
            'Flower\'s simulation needs Linux or macOS. Use engine "local" or WSL.'
        )
    sizes = _federation_config(
        num_clients,
        client_cpus,
        client_gpus,
        workers,
        is_cluster=on_cluster({**os.environ, **environment}),
    )
    _check_values(run_config)
    require_cluster({**os.environ, **environment})
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

    ``config`` holds all keys that a run may set, with their defaults; the apps are
    named as ``module:attribute``. Raises a ConfigError if a value has a type that
    Flower's configuration cannot hold.
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


def check_workers(workers: int) -> None:
    """Raise ConfigError if a number of worker processes is no whole number from 1."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(
            f"workers must be a whole number and at least 1, got {workers!r}."
        )


def check_client_gpus(client_gpus: float) -> None:
    """Reject a number of GPUs per worker process that Ray cannot give.

    These are negative numbers, those that are not finite, below Ray's smallest share,
    or above 1 but not whole.
    """
    is_share = client_gpus == 0 or SMALLEST_SHARE <= client_gpus <= 1
    is_number = math.isfinite(client_gpus) and client_gpus > 1
    if not is_share and not (is_number and client_gpus == int(client_gpus)):
        raise ConfigError(
            f"client_gpus must be 0, a fraction from {SMALLEST_SHARE:g} to 1, or a whole "
            f"number, because Ray can only share a single GPU. Got {client_gpus}."
        )


def _federation_config(
    num_clients: int,
    client_cpus: int,
    client_gpus: float,
    workers: int | None,
    *,
    is_cluster: bool,
) -> str:
    """Check the resources of a run; return the federation config for ``flwr run``."""
    for name, value in (
        ("num_clients", num_clients),
        ("client_cpus", client_cpus),
        ("workers", 1 if workers is None else workers),
    ):
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


def fitting_workers(client_cpus: int, client_gpus: float, workers: int | None) -> int:
    """Return ``workers``, or by default how many the machine has resources for.

    ``client_cpus`` and ``client_gpus`` are those of each worker process. Raises a
    RunError if the machine has too few CPUs or GPUs.
    """
    cpus = num_cpus()
    wanted = client_cpus * (workers or 1)
    if wanted > cpus:
        raise RunError(
            f"{workers or 1} clients at once with {client_cpus} CPUs each need "
            f"{wanted} CPUs; this process may use {cpus}. Use fewer workers or fewer CPUs "
            "per client."
        )
    fitting = cpus // client_cpus
    if client_gpus > 0:
        gpus = _num_gpus()
        if client_gpus * (workers or 1) > gpus:
            raise RunError(
                f"{workers or 1} clients at once with {client_gpus:g} GPUs each need "
                f"more than the {gpus} GPUs that torch finds here. Use fewer workers or a "
                "smaller share, or train on CPU: --client-gpus 0."
            )
        fitting = min(fitting, _gpu_slots(gpus, client_gpus))
    return workers or fitting


def _gpu_slots(gpus: int, client_gpus: float) -> int:
    """Return how many clients fit on the GPUs; fractions of two GPUs are not combined."""
    if client_gpus > 1:
        return gpus // int(client_gpus)
    return gpus * int(1 / client_gpus + 1e-9)  # 1 / 0.1 may fall just below 10


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_gpus() -> int:
    """Return the number of GPUs that torch finds."""
    import torch  # takes seconds to import, and most runs do not need it

    return torch.cuda.device_count()


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
