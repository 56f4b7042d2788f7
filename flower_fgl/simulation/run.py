"""Run one configuration in a run folder, in this process or with Ray."""

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flower_fgl.client_apps.runtime.session import choose_device
from flower_fgl.core.atomic import hold
from flower_fgl.core.config import RunConfig, pyproject_table
from flower_fgl.core.errors import (
    ConfigError,
    FglError,
    RunError,
    report_lack_of_memory,
)
from flower_fgl.core.options import Scalar
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import METHODS, drop_removed
from flower_fgl.runs.checkpoints import LET_GO_SECONDS, rewind
from flower_fgl.runs.files import ENDED, ROUNDS, SUMMARY, OnRound, status_of
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.writer import RunWriter, default_folder, require_empty
from flower_fgl.server_app import warn_of_many_clients
from flower_fgl.simulation.flower.flower_simulation import (
    LaunchResult,
    launch,
    write_app_folder,
)
from flower_fgl.simulation.local import (
    absolute_paths,
    check_run,
    check_workers,
    count_owners,
    run_local,
)
from flower_fgl.simulation.memory import require_memory
from flower_fgl.simulation.resources import (
    check_client_gpus,
    fitting_workers,
    on_cluster,
)

__all__ = ["OnRound", "run_one"]

log = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""Seconds that Flower may take to end after the ServerApp wrote the final summary."""
SUMMARY_SECONDS = 1.0
"""Seconds between two reads of the summary of a run in other processes."""


@report_lack_of_memory()
def run_one(
    values: Mapping[str, Scalar],
    *,
    engine: str,
    workers: int | None = None,
    client_gpus: float = 0.0,
    on_round: OnRound | None = None,
) -> RunFolder:
    """Run one configuration until it completes.

    ``values`` is a flat run config with ``clients``. ``engine`` is ``local``, ``ray``
    (Flower's simulation) or ``auto``: the local engine, and Flower's simulation if
    ``RAY_ADDRESS`` names a cluster. Without ``workers`` Flower's simulation starts one
    worker process per core, ``local`` none, ``auto`` as many as save time. A RunError
    names the folder; so does the argument of the KeyboardInterrupt after Ctrl-C.
    """
    if workers is not None:
        check_workers(workers)
    check_client_gpus(client_gpus)
    values = count_owners(values)
    config = check_run(values)
    has_cluster = on_cluster(os.environ)
    is_auto = engine == "auto"
    if is_auto:
        engine = "ray" if has_cluster and workers is None else "local"
    if engine == "local" and (workers or client_gpus):
        if workers is None or not has_cluster:
            workers = fitting_workers(config.threads, client_gpus, workers)
    elif engine == "local" and not is_auto:
        workers = 1
    uses_ray = engine == "ray" or (workers or 1) > 1
    if uses_ray and config.device.startswith("cuda") and not client_gpus:
        raise ConfigError(
            f'device = "{config.device}" with Ray needs a GPU share for every worker: '
            "add --client-gpus 1, or 0.25 to let four workers share a GPU."
        )
    if not uses_ray:
        choose_device(config.device)  # reports a missing device before a folder is made
    if engine == "ray":
        fitting = 1
        if not has_cluster:
            fitting = fitting_workers(config.threads, client_gpus, workers)
        require_memory(config, engine="ray", workers=fitting, is_cluster=has_cluster)
        warn_of_many_clients(config, config.num_nodes)
        # the local engine logs them itself
        open_store(config, config.clients).log_notes()
    folder = (
        Path(config.run_dir).resolve() if config.resume else _create_run_folder(config)
    )
    values = {**drop_removed(absolute_paths(values)), "run-dir": str(folder)}
    with hold(folder):
        if config.resume:
            with hold(folder, is_server=True, timeout=LET_GO_SECONDS):
                rewind(folder, config)
        with _record_failures(folder):
            if engine == "local":
                return run_local(
                    values, workers=workers, client_gpus=client_gpus, on_round=on_round
                )
            return _run_ray(values, config, folder, workers, client_gpus, on_round)


def _create_run_folder(config: RunConfig) -> Path:
    """Create the run folder, so that no other run can use it."""
    try:
        if config.run_dir:
            folder = Path(config.run_dir).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            require_empty(folder)
            return folder
        while True:
            base = Path(config.output_dir).resolve()
            folder = default_folder(base, config.method, config.data_name, config.seed)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder
            if base.exists() and not base.is_dir():
                raise NotADirectoryError(20, "it is a file", str(base))
    except OSError as error:
        raise RunError(
            f"Cannot create the run folder {error.filename}: {error.strerror}. Set "
            "output-dir to a writable folder."
        ) from error


@contextlib.contextmanager
def _record_failures(folder: Path) -> Iterator[None]:
    """Record in the run folder how the run ended, and add the folder to errors."""
    try:
        yield
    except KeyboardInterrupt:
        # the ServerApp may have failed because its clients were stopped first
        _correct_status(folder, "interrupted", over=("running", "failed"))
        if _drop_if_empty(folder):
            raise
        raise KeyboardInterrupt(str(folder)) from None
    except Exception as error:
        # others are faults of this program or of another package, and keep their type
        is_named = isinstance(error, FglError)
        text = str(error) if is_named else f"{type(error).__name__}: {error}"
        with contextlib.suppress(RunError):  # e.g. on a full disk
            _correct_status(folder, "failed", error=text)
        if _drop_if_empty(folder) or not is_named:
            raise
        raise RunError(f"{error}\nRun folder: {folder}") from error


def _correct_status(
    folder: Path, status: str, *, error: str = "", over: Sequence[str] = ("running",)
) -> None:
    """Set the final status of a run whose ServerApp could not write it."""
    if not (folder / SUMMARY).exists():
        return
    summary = dict(RunFolder.load(folder).summary)
    if summary.get("status") in over:
        summary.pop("error", None)
        summary |= {"status": status} | ({"error": error} if error else {})
        RunWriter(folder).write_summary(summary)


def _drop_if_empty(folder: Path) -> bool:
    """Remove the folder if it is empty; return whether it is gone."""
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
) -> RunFolder:
    """Run with Flower's simulation, in a private Flower home."""
    from flower_fgl.simulation.register import refuse_registered

    refuse_registered(config)
    states = "" if config.state_dir else str(folder / "state")
    if states:  # remains of a killed run; its checkpoint holds the states to resume
        shutil.rmtree(states, ignore_errors=True)
    values = {**values, "state-dir": str(Path(states or config.state_dir).resolve())}
    home = Path(tempfile.mkdtemp(prefix="flower-fgl-"))
    watch = _RunMonitor(folder, on_round)
    result = LaunchResult(None, "finished:completed", "")
    try:
        app_dir = write_app_folder(home / "flower-fgl", config=pyproject_table(METHODS))
        result = launch(
            app_dir,
            run_config=values,
            num_clients=config.num_nodes,
            home=home,
            client_cpus=config.threads,
            client_gpus=client_gpus,
            workers=workers,
            on_tick=watch,
            log_file=home / "flower.log",
            environment=_absolute_folders(),
        )
        watch.read_rounds()
    except _OverdueError:
        log.warning(
            "Flower was still busy %g s after the run had ended, perhaps waiting for a "
            "client that never answered. Its processes were stopped.",
            GRACE_SECONDS,
        )
    finally:
        if (folder / SUMMARY).exists() and (home / "flower.log").exists():
            shutil.copy(home / "flower.log", folder / "flower.log")
        shutil.rmtree(home, ignore_errors=True)
    run = _verify_result(folder, result)
    if states:
        shutil.rmtree(states, ignore_errors=True)
    return run


def _absolute_folders() -> dict[str, str]:
    """Return the data folders of the environment as absolute paths."""
    names = ("FLOWER_FGL_DATA", "FLOWER_FGL_CACHE")
    return {
        name: str(Path(os.path.expanduser(os.environ[name])).resolve())
        for name in names
        if os.environ.get(name)
    }


def _verify_result(folder: Path, result: LaunchResult) -> RunFolder:
    """Return the run if its folder and Flower both report that it completed."""
    flower_status = result.flower_status
    # Flower also reports ``completed`` if every client failed or the ServerApp called
    # ``sys.exit``
    if not (folder / SUMMARY).exists():
        raise RunError(
            f"The run wrote nothing; Flower reports {flower_status}. End of its log:\n"
            f"{result.log_tail}"
        )
    error = result.reason or f"Flower reports {flower_status}."
    if (folder / "checkpoint").is_dir():
        error += f" Resume it: flower-fgl run --resume {folder}"
    _correct_status(folder, "failed", error=error)
    run = RunFolder.load(folder)
    if run.status == "completed" and flower_status == "finished:completed":
        return run
    reason = run.summary.get("error") or f"End of its log:\n{result.log_tail}"
    ended = "was interrupted" if run.status == "interrupted" else run.status
    raise RunError(f"The run {ended} (Flower reports {flower_status}). {reason}")


class _OverdueError(Exception):
    """The ServerApp has ended, but Flower's processes have not."""


class _RunMonitor:
    """Watch the folder of a run in other processes, about five times a second."""

    def __init__(self, folder: Path, on_round: OnRound | None) -> None:
        self._folder = folder
        self._on_round = on_round
        rounds = folder / ROUNDS  # exists if the run resumes
        self._offset = rounds.stat().st_size if rounds.exists() else 0
        self._next_check = 0.0
        self._ended_at: float | None = None

    def __call__(self) -> None:
        self.read_rounds()
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + SUMMARY_SECONDS
        if self._ended_at is None and status_of(self._folder) in ENDED:
            self._ended_at = now
        if self._ended_at is not None and now > self._ended_at + GRACE_SECONDS:
            raise _OverdueError

    def read_rounds(self) -> None:
        """Call ``on_round`` with each row that was added to ``rounds.jsonl``."""
        path = self._folder / ROUNDS
        if self._on_round is None or not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._on_round(json.loads(line))
