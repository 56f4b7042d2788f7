"""Run a Flower app in simulation, in a private Flower home, and learn how it ended.

``flwr run`` alone returns 0 for a ServerApp that raised, may hand the run to a foreign
SuperLink, and can wait for ever for a run that nobody takes up. :func:`launch` starts a
SuperLink for this one run, limits the wait, reports Flower's own status, and leaves no
process behind.
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
from flower_fgl.simulation.flower_run import (
    FlowerRun,
    LaunchResult,
    StuckError,
    Tick,
)
from flower_fgl.simulation.superlink import FlowerHome, on_cluster, tail

__all__ = ["LaunchResult", "launch", "write_app_folder"]


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

    All processes are ended before this returns or raises. SIGTERM in the main thread
    acts as Ctrl-C: it raises KeyboardInterrupt here. Should this process itself be
    killed, its children end within seconds.

    Parameters
    ----------
    app_dir : Path
        Folder of the app's ``pyproject.toml``, see :func:`write_app_folder`.
    run_config : mapping of str to bool, int, float or str
        Overrides of the app's configuration, under names that it knows. Paths in it
        should be absolute.
    num_clients : int
        Virtual clients (SuperNodes).
    home : Path
        Folder in which each launch makes, and removes, a Flower home of its own.
    client_cpus : int
        CPUs per client, which are also its threads.
    client_gpus : float
        GPUs per client; 0.25 lets four share one.
    workers : int, optional
        Clients at work at once; as many as the machine carries where not given. Not
        allowed with ``RAY_ADDRESS``.
    pending_timeout : float
        Seconds until a submitted run must have been taken up. If it is not, the
        SuperLink is replaced, once.
    on_tick : callable, optional
        Called about five times a second; what it raises ends the run.
    log_file : Path, optional
        File that takes the run's log as it goes.
    environment : mapping of str to str, optional
        Variables for Flower's processes, over those of this process.

    Returns
    -------
    LaunchResult

    Raises
    ------
    ConfigError
        If an argument is out of range or of a type that Flower cannot carry.
    RunError
        If the machine has too few CPUs or GPUs, Flower does not start or refuses the
        run, or the run was not taken up twice.

    Notes
    -----
    ``RAY_ADDRESS`` in the environment is taken as meant: the run then joins that Ray
    cluster, whose CPUs and GPUs are not checked here. Unset, the run has Ray processes
    of its own.
    """
    environment = environment or {}
    if os.name != "posix":
        raise RunError(
            'Flower\'s simulation needs Linux or macOS; use engine "local" or WSL.'
        )
    sizes = _federation_config(
        num_clients,
        client_cpus,
        client_gpus,
        workers,
        is_cluster=on_cluster({**os.environ, **environment}),
    )
    _check_values(run_config)
    home.mkdir(parents=True, exist_ok=True)
    with _sigterm_as_interrupt():
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
        raise RunError(f"Flower did not start the run, tried twice: {reason}")


def write_app_folder(
    folder: Path,
    *,
    config: Mapping[str, Any],
    server_app: str = "flower_fgl.server_app:app",
    client_app: str = "flower_fgl.client_app:app",
) -> Path:
    """Write an app for ``flwr run`` that holds no code but names installed modules.

    Parameters
    ----------
    folder : Path
        Folder to write to; made if it does not exist.
    config : mapping
        The app's configuration: all names that a run may set, with their defaults;
        bool, int, float, str, or tables of these.
    server_app, client_app : str
        The components, as ``module:attribute``.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ConfigError
        If a value is of a type that Flower cannot carry.
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
    """Check the sizes of a run against the machine; spell them for ``flwr run``.

    Ray gets just the CPUs that the workers need, so that it starts no more of them: an
    idle worker holds a process with torch in it.
    """
    for name, value in (
        ("num_clients", num_clients),
        ("client_cpus", client_cpus),
        ("workers", 1 if workers is None else workers),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more, got {value}.")
    if client_gpus < 0 or (client_gpus > 1 and client_gpus != int(client_gpus)):
        raise ConfigError(
            "client_gpus must be a fraction up to 1, or a whole number: "
            f"Ray shares no more than one GPU. Got {client_gpus}."
        )
    sizes = {
        "num-supernodes": str(num_clients),
        "client-resources-num-cpus": str(client_cpus),
        "client-resources-num-gpus": str(float(client_gpus)),
        "init-args-log-to-driver": "false",
    }
    if not is_cluster:
        fitting = _fitting_workers(client_cpus, client_gpus, workers)
        sizes["init-args-num-cpus"] = str(client_cpus * min(fitting, num_clients))
    elif workers is not None:
        raise RunError(
            "RAY_ADDRESS names a Ray cluster, which sets how many clients work at "
            f"once: leave out workers (got {workers}), or unset RAY_ADDRESS."
        )
    return " ".join(f"{key}={value}" for key, value in sizes.items())


def _fitting_workers(client_cpus: int, client_gpus: float, workers: int | None) -> int:
    """Return how many clients work at once; raise RunError if they do not fit."""
    cpus = _num_cpus()
    wanted = client_cpus * (workers or 1)
    if wanted > cpus:
        raise RunError(
            f"{workers or 1} clients at once with {client_cpus} CPUs each need "
            f"{wanted} CPUs; this process may use {cpus}. Ask for fewer workers or "
            "fewer CPUs per client."
        )
    fitting = cpus // client_cpus
    if client_gpus > 0:
        gpus = _num_gpus()
        if client_gpus * (workers or 1) > gpus:
            raise RunError(
                f"{workers or 1} clients at once with {client_gpus:g} GPUs each need "
                f"more than the {gpus} GPUs that torch finds here. Ask for fewer "
                "workers or a smaller share, or none: --client-gpus 0."
            )
        fitting = min(fitting, _gpu_slots(gpus, client_gpus))
    return workers or fitting


def _gpu_slots(gpus: int, client_gpus: float) -> int:
    """Return how many clients the GPUs carry; a client never spans parts of two."""
    if client_gpus > 1:
        return gpus // int(client_gpus)
    return gpus * int(1 / client_gpus + 1e-9)  # 1 / 0.1 may fall just below 10


def _num_cpus() -> int:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _num_gpus() -> int:
    """Return the GPUs that torch finds."""
    import torch  # takes seconds, and most runs need no answer

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
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, unless the program handles it already."""
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
