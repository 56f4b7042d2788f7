"""Run one configuration to its end, here or under Ray, in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flower_fgl.core.config import RunConfig, pyproject_table
from flower_fgl.core.errors import ConfigError, FglError, RunError
from flower_fgl.core.locks import hold
from flower_fgl.core.options import Scalar
from flower_fgl.core.settings import is_file
from flower_fgl.methods import METHODS, drop_removed
from flower_fgl.runs.files import OnRound
from flower_fgl.runs.rewind import LET_GO_SECONDS, rewind
from flower_fgl.runs.run import Run
from flower_fgl.runs.writer import RunWriter, default_folder

__all__ = ["OnRound", "run_one"]

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""How long Flower may go on after the server half has written its last word."""
SUMMARY_SECONDS = 1.0
"""How often the summary of a run in other processes is looked at."""


def run_one(
    values: Mapping[str, Scalar],
    *,
    engine: str,
    workers: int | None = None,
    client_gpus: float = 0.0,
    on_round: OnRound | None = None,
) -> Run:
    """Run one configuration to its end.

    Parameters
    ----------
    values : mapping
        Flat run config with ``clients``; ``resume`` goes on with the run in ``run-dir``.
    engine : str
        ``"local"`` or ``"ray"``.
    workers : int, optional
        Clients at once under Ray; by default one per core.
    client_gpus : float
        Share of a GPU per client under Ray.
    on_round : callable, optional
        Called with each round's line as it comes.

    Returns
    -------
    Run

    Raises
    ------
    ConfigError, DataError
        Before anything starts.
    RunError
        If the run's folder is taken, the run in it cannot be resumed, or the run did not
        complete; the message names the folder.
    """
    from flower_fgl.client_apps.runtime.session import choose_device
    from flower_fgl.simulation.local import check_run, run_local

    config = check_run(values)
    if engine == "ray" and config.device.startswith("cuda") and not client_gpus:
        raise ConfigError(
            f'device = "{config.device}" under Ray needs a share of a GPU for every '
            "client: add --client-gpus 1, or 0.25 to let four share one."
        )
    if engine == "local":
        choose_device(config.device)  # before a folder is made
    folder = Path(config.run_dir).resolve() if config.resume else _claim(config)
    values = {**drop_removed(values), "run-dir": str(folder)}
    for key in ("data-dir", "dataset"):
        path = str(values.get(key, ""))
        if path and (key == "data-dir" or is_file(path)):
            values[key] = str(Path(path).expanduser().resolve())
    with hold(folder):
        if config.resume:
            with hold(folder, is_server=True, timeout=LET_GO_SECONDS):
                rewind(folder, config)
        with _record_failures(folder):
            if engine == "local":
                return run_local(values, on_round=on_round)
            return _run_ray(values, config, folder, workers, client_gpus, on_round)


def _claim(config: RunConfig) -> Path:
    """Make the run's folder, so that no other run can take it."""
    try:
        if config.run_dir:
            folder = Path(config.run_dir).resolve()
            if folder.exists() and any(folder.iterdir()):
                raise RunError(
                    f"The run folder {folder} is not empty. Give another run-dir, or "
                    "leave it unset for a new folder in output-dir."
                )
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        while True:
            base = Path(config.output_dir).resolve()
            folder = default_folder(base, config.method, config.dataset, config.seed)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
            if base.exists() and not base.is_dir():
                raise NotADirectoryError(20, "it is a file", str(base))
    except OSError as error:
        raise RunError(
            f"Cannot make the run folder {error.filename}: {error.strerror}. Set "
            "output-dir to a folder that can be written."
        ) from error


@contextlib.contextmanager
def _record_failures(folder: Path) -> Iterator[None]:
    """Let the folder say how its run ended, and errors name the folder."""
    try:
        yield
    except KeyboardInterrupt:
        # the server half may have failed meanwhile, because of what was stopped first
        _settle(folder, "interrupted", over=("running", "failed"))
        if _drop_if_empty(folder):
            raise
        raise KeyboardInterrupt(str(folder)) from None
    except FglError as error:
        _settle(folder, "failed", error=str(error))
        if _drop_if_empty(folder):
            raise
        raise RunError(f"{error}\nRun folder: {folder}") from error


def _settle(
    folder: Path, status: str, *, error: str = "", over: Sequence[str] = ("running",)
) -> None:
    """Correct the summary of a run that was ended before it could do so itself."""
    if not (folder / "summary.json").exists():
        return
    summary = dict(Run.load(folder).summary)
    if summary.get("status") in over:
        summary.pop("error", None)
        summary |= {"status": status} | ({"error": error} if error else {})
        RunWriter(folder).write_summary(summary)


def _drop_if_empty(folder: Path) -> bool:
    """Remove a folder in which nothing was written."""
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def _run_ray(
    values: Mapping[str, Scalar],
    config: RunConfig,
    folder: Path,
    workers: int | None,
    client_gpus: float,
    on_round: OnRound | None,
) -> Run:
    """Run in Flower's simulation, in a private Flower home."""
    from flower_fgl.simulation.flower_simulation import launch, write_app_folder

    states = "" if config.state_dir else str(folder / "state")
    if states:  # of a run that was killed: its checkpoint has what is needed
        shutil.rmtree(states, ignore_errors=True)
    values = {**values, "state-dir": str(Path(states or config.state_dir).resolve())}
    home = Path(tempfile.mkdtemp(prefix="flower-fgl-"))
    watch = _RunMonitor(folder, on_round)
    flower_status, log_tail = "finished:completed", ""
    try:
        app_dir = write_app_folder(home / "flower-fgl", config=pyproject_table(METHODS))
        result = launch(
            app_dir,
            run_config=values,
            num_clients=config.clients,
            home=home,
            client_cpus=config.threads,
            client_gpus=client_gpus,
            workers=workers,
            on_tick=watch,
            log_file=home / "flower.log",
            environment=_absolute_folders(),
        )
        flower_status, log_tail = result.flower_status, result.log_tail
        watch.read_rounds()
    except _OverdueError:
        log.warning(
            "Flower was still busy %g s after the run had ended (a client that never "
            "answered?): its processes were ended.",
            GRACE_SECONDS,
        )
    finally:
        if (folder / "summary.json").exists() and (home / "flower.log").exists():
            shutil.copy(home / "flower.log", folder / "flower.log")
        shutil.rmtree(home, ignore_errors=True)
    run = _verify_result(folder, flower_status, log_tail)
    if states:
        shutil.rmtree(states, ignore_errors=True)
    return run


def _absolute_folders() -> dict[str, str]:
    """Return the data folders of this environment for processes that run elsewhere."""
    names = ("FLOWER_FGL_DATA", "FLOWER_FGL_CACHE")
    return {n: str(Path(os.environ[n]).resolve()) for n in names if os.environ.get(n)}


def _verify_result(folder: Path, flower_status: str, log_tail: str) -> Run:
    """Return the run if both its folder and Flower call it complete.

    Flower alone cannot be trusted: it says ``completed`` when every client failed, or
    when the server half left by ``sys.exit``.
    """
    if not (folder / "summary.json").exists():
        raise RunError(
            f"The run wrote nothing; Flower says {flower_status}. Its log ends:\n"
            f"{log_tail}"
        )
    _settle(folder, "failed", error=f"Flower says {flower_status}")
    run = Run.load(folder)
    if run.status == "completed" and flower_status == "finished:completed":
        return run
    reason = run.summary.get("error") or f"Its log ends:\n{log_tail}"
    raise RunError(f"The run {run.status} (Flower says {flower_status}). {reason}")


class _OverdueError(Exception):
    """The server half has ended, Flower has not."""


class _RunMonitor:
    """Follow the folder of a run in other processes, about five times a second."""

    def __init__(self, folder: Path, on_round: OnRound | None) -> None:
        self._folder = folder
        self._on_round = on_round
        rounds = folder / "rounds.jsonl"  # there if the run is resumed
        self._offset = rounds.stat().st_size if rounds.exists() else 0
        self._next_look = 0.0
        self._ended_at: float | None = None

    def __call__(self) -> None:
        self.read_rounds()
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + SUMMARY_SECONDS
        if self._ended_at is None and self._has_ended():
            self._ended_at = now
        if self._ended_at is not None and now > self._ended_at + GRACE_SECONDS:
            raise _OverdueError

    def read_rounds(self) -> None:
        """Hand on the lines that were added to ``rounds.jsonl``."""
        path = self._folder / "rounds.jsonl"
        if self._on_round is None or not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._on_round(json.loads(line))

    def _has_ended(self) -> bool:
        try:
            summary = json.loads((self._folder / "summary.json").read_text("utf-8"))
        except (OSError, ValueError):
            return False
        return summary.get("status") in ("completed", "failed", "interrupted")
