"""Run a Flower app in Flower's simulation, in a private Flower home.

``flwr run`` alone returns 0 if the ServerApp raised, may submit the run to another user's
SuperLink, and can wait forever for a run that never starts.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import tomli_w

from flower_fgl.core.errors import RunError
from flower_fgl.core.options import Scalar
from flower_fgl.simulation.flower.superlink import CONNECTION, FlowerHome, tail
from flower_fgl.simulation.flower.supervisor import is_running
from flower_fgl.simulation.resources import (
    fitting_workers,
    on_cluster,
    require_cluster,
)

__all__ = ["FlowerRun", "LaunchResult", "StuckError", "launch", "sigterm_as_interrupt"]
__all__ += ["write_app_folder"]

Tick = Callable[[], None]
T = TypeVar("T")

TICK = 0.2
"""Seconds between two calls of ``on_tick``."""
_POLL = 0.05
_START_TIMEOUT = 60.0
_ANSWER_TIMEOUT = 30.0
# Seconds after the end of the run's process. By then Flower knows the status of any run
# that was not killed, and the log has ended, which Flower polls every 0.5 s.
_STATUS_TIMEOUT = 3.0


@dataclass(frozen=True)
class LaunchResult:
    """Final status and end of the log of a run.

    ``flower_status`` is ``finished:completed``, ``finished:failed`` or
    ``finished:stopped``; ``failed`` if the SuperLink or the run's process was killed.
    Flower reports ``finished:completed`` even if every client failed or the ServerApp
    called ``sys.exit(3)``. ``log_tail`` holds the last 40 lines of the run's log, and the
    ``reason`` of a failure.
    """

    run_id: int | None
    flower_status: str
    log_tail: str
    reason: str = ""


class StuckError(Exception):
    """The SuperLink did not start the run; a new SuperLink may."""


class FlowerRun:
    """One run in an entered Flower home; ``on_tick`` is called while it waits."""

    def __init__(self, flower: FlowerHome, log: Path, on_tick: Tick) -> None:
        self._flower = flower
        self._log = log
        self._on_tick = on_tick
        self._next_tick = 0.0

    def follow(
        self,
        app_dir: Path,
        run_config: Mapping[str, Scalar],
        sizes: str,
        pending_timeout: float,
    ) -> LaunchResult:
        """Submit the run, wait until it ends, and return its status.

        ``sizes`` is the federation configuration in the format of ``flwr run``.
        """
        is_up = self._until(
            lambda: self._flower.is_ready or not self._flower.is_alive, _START_TIMEOUT
        )
        if not (is_up and self._flower.is_alive):
            raise StuckError("the SuperLink did not start.")
        run_id = self._submit(app_dir.resolve(), run_config, sizes)
        stream = ["log", str(run_id), CONNECTION, "--stream"]
        following = self._flower.flwr(stream, self._log)
        simulation = self._until_started(pending_timeout)
        self._until(
            lambda: (
                following.poll() is not None  # the log ends with the run
                or not self._flower.is_alive
                or not is_running(simulation)
            )
        )
        self._until(lambda: following.poll() is not None, _STATUS_TIMEOUT)
        status, details = self._status(run_id, simulation)
        last_lines = f"{tail(self._log)}\n{details}".strip()
        if status != "finished:completed":
            with self._log.open("a", encoding="utf-8") as log:
                log.write(f"{details}\n{self._flower.crash_reports()}")
        return LaunchResult(run_id, status, last_lines, details)

    def _submit(
        self, app_dir: Path, run_config: Mapping[str, Scalar], sizes: str
    ) -> int:
        """Submit the run; return its ID."""
        command = ["run", str(app_dir), CONNECTION, "--format", "json"]
        command += ["--federation-config", sizes]
        if run_config:
            overrides = self._flower.folder / "run-config.toml"
            overrides.write_text(tomli_w.dumps(run_config), encoding="utf-8")
            command += ["--run-config", str(overrides)]
        answer = self._flwr(command)
        if not answer.get("run-id"):
            if not self._flower.is_alive:
                raise StuckError("the SuperLink ended.")
            message = str(answer.get("error-message", ""))
            reason = message.partition("\n\n")[2].strip()  # after "Using SuperLink"
            raise RunError(f"Flower rejected the run: {reason or message}")
        return int(answer["run-id"])

    def _until_started(self, timeout: float) -> psutil.Process:
        """Wait until the SuperExec has started a process for the run."""

        def check() -> psutil.Process | str | None:
            if simulation := self._flower.find("flwr-simulation"):
                return simulation
            superexec = self._flower.find("flower-superexec")
            if superexec is None or not is_running(superexec):
                return "its SuperExec, which starts runs, has ended."
            return None

        found = self._until(check, timeout)
        if isinstance(found, psutil.Process):
            return found
        raise StuckError(found or f"it stayed pending for {timeout:g} seconds.")

    def _status(self, run_id: int, simulation: psutil.Process) -> tuple[str, str]:
        """Return status and reason, from Flower or, if Flower has none, from processes."""
        command = ["list", CONNECTION, "--run-id", str(run_id), "--format", "json"]
        end = None
        while self._flower.is_alive:
            run = (self._flwr(command).get("runs") or [{}])[0]
            if str(run.get("status")).startswith("finished"):
                return str(run["status"]), str(run.get("status-details") or "")
            if end is None and not is_running(simulation):
                end = time.monotonic() + _STATUS_TIMEOUT
            if end is not None and time.monotonic() > end:
                return "failed", "The run's process was killed before its end."
            self._until(lambda: not self._flower.is_alive, 1.0)
        return "failed", "The SuperLink was killed before the end of the run."

    def _flwr(self, command: list[str]) -> dict[str, Any]:
        """Run a ``flwr`` command and return its JSON answer."""
        output = self._flower.folder / "answer.json"
        asked = self._flower.flwr(command, output)
        if not self._until(lambda: asked.poll() is not None, _ANSWER_TIMEOUT):
            asked.kill()
            return {"error-message": f"no answer in {_ANSWER_TIMEOUT:g} seconds."}
        text = output.read_text(encoding="utf-8")
        with contextlib.suppress(ValueError):  # Flower may print notes around the JSON
            answer, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
            return dict(answer)
        return {"error-message": text.strip() or "no message"}

    def _until(
        self, condition: Callable[[], T], timeout: float = float("inf")
    ) -> T | None:
        """Wait until a condition is true; return its value, or None after the timeout."""
        end = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if now >= self._next_tick:
                self._next_tick = now + TICK
                self._on_tick()
            if value := condition():
                return value
            if now >= end:
                return None
            time.sleep(_POLL)


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

    ``app_dir`` is that of :func:`write_app_folder`; paths in ``run_config`` should be
    absolute. ``client_cpus`` are also the threads of a client. By default, as many
    ``workers`` train at once as the machine has resources for. A submitted run that does
    not start within ``pending_timeout`` seconds gets another SuperLink once. ``on_tick``
    is called about five times a second; an exception that it raises ends the run. If
    ``RAY_ADDRESS`` is set, the run joins that Ray cluster, whose resources are not
    checked here, and ``workers`` is not allowed.
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

    ``config`` holds all keys that a run may set, with their defaults.
    """
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
