"""Trackers: report a run to TensorBoard, MLflow, Weights & Biases, or code of the user.

A tracker gets the settings when the run starts, the row of each round, and the summary at
the end. One that fails is named in one warning and then left out: it never ends a run.
docs/run-folder.md says where each tracker reports to.
"""

import importlib.util
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.settings import TRACKERS, listed_names
from flower_fgl.runs.files import CONFIG_FILE, MODEL, SUMMARY, Row, flatten_config
from flower_fgl.runs.writer import replace_file

__all__ = ["MLflowTracker", "TensorBoardTracker", "Tracker", "TrackerGroup"]
__all__ += ["WandbTracker", "open_trackers", "scalars_of"]

log = logging.getLogger(__name__)
IDS = "trackers.json"
"""File of the run folder with the run's ID at each tracker, for a run that resumes."""
MLFLOW_BATCH = 100
"""Parameters that MLflow takes at once; it takes 1,000 metrics."""
MLFLOW_TEXT = 500
"""Characters of a parameter's value that every MLflow server accepts."""


class Tracker:
    """Callbacks of a run; override those that are needed.

    All are called in the process of the server half, one after the other.
    """

    def on_start(self, folder: Path, config: Row, first_round: int) -> None:
        """Begin, or continue, a run in its folder, with all its settings.

        ``first_round`` is the next round: 1, or more if the run resumes.
        """

    def on_round(self, row: Row) -> None:
        """Report a round: its row of ``rounds.jsonl``; :func:`scalars_of` flattens it."""

    def on_end(self, summary: Row) -> None:
        """End the run; the ``status`` of its ``summary.json`` says how."""


class TrackerGroup(Tracker):
    """Several trackers; one that fails is named in a warning, and is not called again."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._active = list(trackers)

    def on_start(self, folder: Path, config: Row, first_round: int) -> None:
        """Call ``on_start`` of each tracker."""
        self._call(lambda tracker: tracker.on_start(folder, config, first_round))

    def on_round(self, row: Row) -> None:
        """Call ``on_round`` of each tracker."""
        self._call(lambda tracker: tracker.on_round(row))

    def on_end(self, summary: Row) -> None:
        """Call ``on_end`` of each tracker."""
        self._call(lambda tracker: tracker.on_end(summary))

    def _call(self, report: Callable[[Tracker], None]) -> None:
        """Report to each tracker; leave those out that fail."""
        for tracker in tuple(self._active):
            try:
                report(tracker)
            except Exception as error:
                self._active.remove(tracker)
                log.warning(
                    "%s failed and gets no more of this run, which continues: %r",
                    type(tracker).__name__,
                    error,
                )


class TensorBoardTracker(Tracker):
    """Write event files to ``tensorboard/`` in the run folder."""

    package = "tensorboard"

    def on_start(self, folder: Path, config: Row, first_round: int) -> None:
        """Open the event file; later rounds in files of before are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=first_round if first_round > 1 else None,
        )
        text = "\n".join(f"    {k} = {v}" for k, v in flatten_config(config))
        self._writer.add_text("settings", text)

    def on_round(self, row: Row) -> None:
        """Write the numbers of a round."""
        for name, value in scalars_of(row):
            self._writer.add_scalar(name, value, row["round"])
        self._writer.flush()

    def on_end(self, summary: Row) -> None:
        """Close the event file."""
        self._writer.close()


class MLflowTracker(Tracker):
    """Report to an MLflow server, or to files beside the run folder."""

    package = "mlflow"
    _ENDS: Mapping[str, str] = {"completed": "FINISHED", "interrupted": "KILLED"}

    def on_start(self, folder: Path, config: Row, first_round: int) -> None:
        """Create the run with its settings as parameters, or find it again."""
        beside = folder.resolve().parent
        server = os.environ.get("MLFLOW_TRACKING_URI", "")
        self._artifacts = None if server else (beside / "mlartifacts").as_uri()
        address = server or f"sqlite:///{(beside / 'mlflow.db').as_posix()}"
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._folder = folder
        self._client = MlflowClient(tracking_uri=address)
        self._id = read_ids(folder).get("mlflow", "") if first_round > 1 else ""
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "flower-fgl")
        tags = {"flower-fgl.run-folder": str(folder.resolve())}
        run = self._client.create_run(
            self._experiment(name), run_name=folder.name, tags=tags
        )
        self._id = run.info.run_id
        write_id(folder, "mlflow", self._id)
        params = [
            Param(_mlflow_name(key), str(value)[:MLFLOW_TEXT])
            for key, value in flatten_config(config)
        ]
        for begin in range(0, len(params), MLFLOW_BATCH):
            part = params[begin : begin + MLFLOW_BATCH]
            self._client.log_batch(self._id, params=part)

    def _experiment(self, name: str) -> str:
        """Return the ID of the experiment; create it if it is new."""
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, self._artifacts))
            except MlflowException:  # a run beside this one has created it
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def on_round(self, row: Row) -> None:
        """Send the numbers of a round."""
        self._send(scalars_of(row), int(row["round"]))

    def on_end(self, summary: Row) -> None:
        """Send the best scores, the settings, the summary and the model."""
        if best := summary.get("best"):
            self._send(list(_numbers("best", best)), int(best["round"]))
        for name in (CONFIG_FILE, SUMMARY, MODEL):
            if (self._folder / name).exists():
                self._client.log_artifact(self._id, str(self._folder / name))
        status = self._ENDS.get(str(summary["status"]), "FAILED")
        self._client.set_terminated(self._id, status)

    def _send(self, values: Sequence[tuple[str, float]], step: int) -> None:
        """Send numbers of one round."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(_mlflow_name(k), v, now, step) for k, v in values]
        self._client.log_batch(self._id, metrics=metrics)


class WandbTracker(Tracker):
    """Report to Weights & Biases, or to files in the run folder."""

    package = "wandb"

    def on_start(self, folder: Path, config: Row, first_round: int) -> None:
        """Begin the run with its settings as configuration, or continue it."""
        import wandb

        own = read_ids(folder).get("wandb") if first_round > 1 else None
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "flower-fgl"),
            name=folder.name,
            id=own,
            resume="allow" if own else None,
            dir=str(folder),
            config=dict(flatten_config(config)),
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        write_id(folder, "wandb", str(self._run.id))

    def on_round(self, row: Row) -> None:
        """Send the numbers of a round."""
        self._run.log(dict(scalars_of(row)), step=int(row["round"]))

    def on_end(self, summary: Row) -> None:
        """Send the summary and end the run."""
        self._run.summary.update(dict(_numbers("best", summary.get("best") or {})))
        self._run.finish(exit_code=int(summary["status"] != "completed"))


KINDS: Mapping[str, type[TensorBoardTracker | MLflowTracker | WandbTracker]] = {
    "tensorboard": TensorBoardTracker,
    "mlflow": MLflowTracker,
    "wandb": WandbTracker,
}
assert set(KINDS) == set(TRACKERS)


def open_trackers(names: str) -> list[Tracker]:
    """Return the trackers of the setting ``track``, before anything is written.

    Raises a ConfigError if a name is unknown, or its package is not installed.
    """
    kinds = [KINDS[name] for name in dict.fromkeys(listed_names(names))]
    for kind in kinds:
        if importlib.util.find_spec(kind.package) is None:
            raise ConfigError(
                f"track = {kind.package} needs the package {kind.package}, which is not "
                f"installed. Install it: pip install 'flower-fgl[{kind.package}]'"
            )
    return [kind() for kind in kinds]


def scalars_of(row: Row) -> list[tuple[str, float]]:
    """Return the numbers of a row of ``rounds.jsonl`` by name.

    Names are ``loss``, ``local/test/accuracy``, ``seconds/total``, ``bytes/up/weights``,
    …; those of another phase than training begin with its name. Values that are missing or
    not finite are left out.
    """
    phase = row.get("phase", "train")
    parts: dict[str, Any] = {"loss": row.get("loss"), **(row.get("metrics") or {})}
    parts |= {key: row.get(key) for key in ("replies", "numbers", "seconds", "bytes")}
    parts["failures"] = len(row.get("failures") or ())
    return list(_numbers("" if phase == "train" else str(phase), parts))


def _numbers(prefix: str, entries: Row) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of nested mappings, with names joined by slashes."""
    for key, value in entries.items():
        name = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _numbers(name, value)
        elif type(value) in (int, float) and math.isfinite(value):
            yield name, float(value)


def _mlflow_name(name: str) -> str:
    """Return a name with the characters that MLflow accepts."""
    return re.sub(r"[^\w .:/-]", "_", name, flags=re.ASCII)


def read_ids(folder: Path) -> dict[str, str]:
    """Return the IDs that a run has at trackers."""
    path = folder / IDS
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def write_id(folder: Path, tracker: str, own: str) -> None:
    """Store the ID that a run has at a tracker."""
    ids = {**read_ids(folder), tracker: own}
    replace_file(folder / IDS, json.dumps(ids).encode())
