"""Contract of whole runs of a method: in the local engine, in each setting, and in Ray."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from flwr.app import ArrayRecord, Message
from torch import Tensor

from flower_fgl.client_apps.base import FglClientApp, Fit
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.runtime.session import Opened
from flower_fgl.core.errors import ConfigError, FglError, RunError
from flower_fgl.core.model_spec import TYPED
from flower_fgl.lab.results import Run
from flower_fgl.lab.simulate import resume, simulate
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.run import RunFolder
from flower_fgl.simulation.local import run_config_of, run_local
from flower_fgl.testing.case import (
    Contract,
    MethodCase,
    applies_to,
    comparable,
    timeless,
    write_tiny,
)
from flower_fgl.testing.exchanges import has_rounds
from flower_fgl.testing.pretended_gpu import gpu

__all__ = ["RayContract", "RunContract", "SettingContract", "trained_weights"]

COLUMNS = {
    "few-shot": ("test_masked",),
    "open-set": ("unseen", "missing"),
    "closed-set": ("unseen", "missing", "new_client"),
}
"""Node sets that each setting scores besides the test nodes."""

REFERENCE = pytest.StashKey[dict[str, Run]]()
FREE = ("query.describe", "query.resume")
"""Exchanges that reveal no upload and no score; the describe query repeats itself."""
Reference = Callable[[MethodCase], Run]

classifies_graphs = applies_to(
    lambda case: case.row.graphs, "the method classifies nodes only"
)


class RunContract(Contract):
    """Whole runs: they complete, repeat, resume, and train every term of the loss."""

    @pytest.fixture
    def reference_run(
        self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Reference:
        """Return the run of a method that others are compared with; each runs once."""
        runs = request.session.stash.setdefault(REFERENCE, {})

        def run_once(case: MethodCase) -> Run:
            if case.name not in runs:
                folder = str(tmp_path_factory.mktemp("reference"))
                settings = case.settings(output_dir=folder)
                runs[case.name] = simulate(**repeated(case, settings))
            return runs[case.name]

        return run_once

    def test_rounds_run_and_give_scores(
        self, case: MethodCase, reference_run: Reference
    ) -> None:
        run = reference_run(case)
        assert run.status == "completed"
        trained = [row["round"] for row in run.rounds if row["phase"] == "train"]
        assert trained == [1, 2][: run.config["rounds"]]
        assert [row["failures"] for row in run.rounds] == [[]] * len(run.rounds)
        assert run.best is not None
        assert 0 <= run.best["test"]["accuracy"] <= 1
        assert run.summary["partition_sha256"]

    def test_the_same_seed_gives_the_same_run(
        self, case: MethodCase, short: dict[str, Any], reference_run: Reference
    ) -> None:
        first = reference_run(case)
        torch.manual_seed(2)
        settings = repeated(case, short)
        second = simulate(**settings)
        assert comparable(first) == comparable(second), (
            "the run draws from a generator that the seed does not determine"
        )
        other = simulate(**{**settings, "seed": 5})
        assert comparable(other) != comparable(first)

    @has_rounds
    def test_a_resumed_run_equals_the_run_that_was_not_interrupted(
        self, case: MethodCase, short: dict[str, Any], tmp_path: Path
    ) -> None:
        # a client that is not sampled keeps its state of earlier rounds
        settings = {**short, "rounds": 5, "checkpoint_every": 2, "participation": 0.6}
        whole = simulate(**settings)
        torch.manual_seed(3)

        def stop(row: Any) -> None:
            # before the checkpoint of round 4, while states are already of that round
            if row["round"] == 4:
                raise KeyboardInterrupt

        folder = tmp_path / "stopped"
        with pytest.raises(KeyboardInterrupt):
            simulate(**settings, run_dir=str(folder), on_round=stop)
        rounds: list[int] = []
        resumed = resume(folder, on_round=lambda row: rounds.append(row["round"]))
        # a phase after the last round has a number of its own
        assert [number for number in rounds if number <= 5] == [3, 4, 5]
        assert comparable(resumed) == comparable(whole)
        assert timeless(resumed.summary) == timeless(whole.summary)
        models = [sorted(run.path.glob("model.*")) for run in (resumed, whole)]
        one, other = ([path.read_bytes() for path in paths] for paths in models)
        assert one == other
        assert not (folder / "checkpoint").exists()

    @has_rounds
    def test_a_run_with_rounds_added_equals_a_longer_run(
        self, case: MethodCase, short: dict[str, Any]
    ) -> None:
        settings = {**short, "participation": 0.6, "keep_checkpoint": True}
        ended = simulate(**{**settings, "rounds": 2})
        if case.row.plans_rounds:
            with pytest.raises(RunError, match="cannot get more rounds"):
                resume(ended.path, rounds=3)
            assert Run.load(ended.path).status == "completed"
            return
        longer = resume(ended.path, rounds=3)
        whole = simulate(**{**settings, "rounds": 3})
        assert comparable(longer) == comparable(whole)
        assert timeless(longer.summary) == timeless(whole.summary)

    def test_no_message_of_a_run_is_answered_twice(
        self,
        case: MethodCase,
        short: dict[str, Any],
        reference_run: Reference,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        plain = reference_run(case)
        original = Dispatcher.__call__
        replayed: set[str] = set()

        def call(app: Any, message: Message, context: Any) -> Message:
            reply = original(app, message, context)
            kind = message.metadata.message_type
            if kind not in FREE:
                replayed.add(kind)
                for _ in range(2):
                    with pytest.raises(FglError, match="answers every round once"):
                        original(app, message, context)
            return reply

        monkeypatch.setattr(Dispatcher, "__call__", call)
        attacked = simulate(**repeated(case, short))
        assert "train" in replayed
        assert sum(attacked.summary["failures"].values()) == 0
        # the refused copies change nothing
        assert comparable(attacked) == comparable(plain)

    def test_tensors_are_freed_when_they_are_no_longer_used(
        self, case: MethodCase, short: dict[str, Any]
    ) -> None:
        """Objects that refer to each other keep theirs until Python's collector runs.

        It counts objects, not bytes, and may leave those of hundreds of rounds.
        """
        gc.collect()
        gc.disable()
        try:
            simulate(**short)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [o for o in gc.garbage if isinstance(o, Tensor | ArrayRecord)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not left

    def test_a_method_classifies_graphs_or_rejects_them(
        self, case: MethodCase, short: dict[str, Any], tmp_path: Path
    ) -> None:
        settings = {**_of_graphs(short, tmp_path), "seed": 4}
        if not case.row.graphs:
            with pytest.raises(ConfigError, match="classifies nodes only"):
                simulate(**settings)
            return
        first, second = (simulate(**settings) for _ in range(2))
        assert first.summary["selection"] == "last"
        assert first.best is not None
        assert first.best["test"]["num_nodes"] == 6
        assert 0 <= first.best["test"]["auroc"] <= 1
        assert comparable(first) == comparable(second)

    def test_a_network_with_a_width_of_its_own_runs_or_is_rejected(
        self, case: MethodCase, short: dict[str, Any]
    ) -> None:
        # hidden-channels is then not the width of the embeddings
        model = f"{next(iter(case.row.models), 'gcn')}:2x12"
        try:
            simulate(**{**short, "model": model})
        except ConfigError:
            return  # rejected before the run
        except RunError as error:
            pytest.fail(
                f"{error} Build payloads from the network's own hidden_channels, or set "
                "shares_embeddings=True in the row, which rejects such networks."
            )

    @classifies_graphs
    def test_clients_train_on_batches_of_graphs(
        self, case: MethodCase, short: dict[str, Any], tmp_path: Path
    ) -> None:
        settings = {**_of_graphs(short, tmp_path), "batch_size": 3}
        run = simulate(**settings)
        count = run.config["rounds"]
        trained = [row for row in run.rounds if row["phase"] == "train"]
        assert [row["status"] for row in trained] == ["ok"] * count
        assert [row.get("failures", []) for row in trained] == [[]] * count

    @applies_to(
        lambda case: case.row.samples_neighbors, "the method samples no neighbors"
    )
    def test_sampled_neighbors_change_the_training(
        self, case: MethodCase, short: dict[str, Any]
    ) -> None:
        few, again, whole = (
            simulate(**{**short, "batch_size": 8, "num_neighbors": numbers})
            for numbers in ("1,1", "1,1", "")
        )
        assert few.status == "completed"
        assert comparable(few) == comparable(again)
        assert comparable(few) != comparable(whole)

    def test_tensors_stay_on_the_device(
        self, case: MethodCase, short: dict[str, Any]
    ) -> None:
        # a GPU, real or pretended, refuses operations that mix devices
        with gpu():
            run = simulate(**short, device="cuda")
        assert run.status == "completed"
        assert not run.summary["failures"]

    def test_a_term_of_the_loss_has_a_gradient(
        self,
        case: MethodCase,
        weight: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # The run is repeated with twice the weight: both draw the same random numbers, so
        # different weights of the model mean a gradient that is not zero.
        once, twice = (
            trained_weights(
                {
                    **case.with_weight(weight, factor * case.weights[weight]),
                    "output_dir": str(tmp_path),
                },
                monkeypatch,
            )
            for factor in (1, 2)
        )
        assert once.keys() == twice.keys()
        most = max(
            float((value - twice[key][part]).abs().max())
            for key, state in once.items()
            for part, value in state.items()
            if value.is_floating_point() and value.numel()
        )
        # rounding alone leaves less than 1e-6 of weights near 1
        assert most > 1e-5, f"{weight} does not change what the clients train"


class SettingContract(Contract):
    """A run in each setting of the data.

    A method that needs edges between clients (``Method.needs_cross_edges``) runs in the
    settings that have them and refuses the others.
    """

    @pytest.mark.parametrize("setting", sorted(COLUMNS))
    def test_a_method_runs_in_every_setting(
        self, case: MethodCase, setting: str, short: dict[str, Any]
    ) -> None:
        # enough nodes of each class
        graph = {"nodes": 400, "classes": 4, "features": 8, "block_skew": 0.3}
        values = {"synthetic": graph, "setting": setting, "evaluate": "local"}
        if case.row.needs_cross_edges and setting != "few-shot":
            with pytest.raises(ConfigError, match="sums over the edges between"):
                simulate(**{**short, **values})
            return
        is_typed = bool(case.row.models) and {*case.row.models} <= {*TYPED}
        if is_typed and setting not in ("transductive", "inductive"):
            with pytest.raises(ConfigError, match="reads typed graphs"):
                simulate(**{**short, **values})
            return
        run = simulate(**{**short, **values})
        assert run.best is not None
        assert ("new_client" in run.best) == (setting == "closed-set")
        for column in ("test", *COLUMNS[setting]):
            assert run.best[column]["num_nodes"] > 0
            assert 0 <= run.best[column]["accuracy"] <= 1
        assert all(row["failures"] == [] for row in run.rounds)


def repeated(case: MethodCase, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that is repeated: some clients rest in each round."""
    share = 1.0 if case.row.is_one_shot else 0.6
    return {**settings, "seed": 4, "participation": share}


def _of_graphs(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of a run that classifies small graphs."""
    write_tiny(folder / "data")
    graphs = {
        "dataset": "tu:TINY",
        "data_dir": str(folder / "data"),
        "setting": "graph",
        "partition": "uniform",
        "model": "gin",
    }
    return {**{k: v for k, v in settings.items() if k != "synthetic"}, **graphs}


def trained_weights(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Run a method; return the weights that each client trained in each round."""
    found: dict[tuple[int, int], dict[str, Tensor]] = {}
    original = FglClientApp.pack_fit

    def pack_fit(self: Any, opened: Opened, result: Fit, *args: Any) -> Any:
        if result.model is not None:
            weights = result.model.state_dict()
            found[opened.server_round, opened.client.partition_id] = {
                name: tensor.detach().clone() for name, tensor in weights.items()
            }
        return original(self, opened, result, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FglClientApp, "pack_fit", pack_fit)
        run = simulate(stacked="false", **settings)
    assert run.status == "completed"
    assert not any(row["failures"] for row in run.rounds)
    assert found
    return found


SECONDS = 600
"""Limit of a run; it takes half a minute on an idle machine."""


class RayContract(Contract):
    """A run in Ray, half a minute. It needs about 2 GB of memory."""

    def test_ray_gives_the_numbers_of_the_local_engine(
        self, case: MethodCase, tmp_path: Path
    ) -> None:
        settings = case.settings()
        config = run_config_of(
            method=settings.pop("method"),
            dataset="synthetic",
            clients=settings.pop("clients"),
            seed=0,
            settings={**settings, "run_dir": str(tmp_path / "ray")},
        )
        file = tmp_path / "run.toml"
        file.write_text(tomli_w.dumps({"config": config}), encoding="utf-8")
        words = [sys.executable, "-m", "flower_fgl", "run", str(file)]
        done = subprocess.run(
            [*words, "--engine", "ray", "--quiet"],
            # a Ray cluster elsewhere has not this package
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        ray = RunFolder.load(tmp_path / "ray")
        assert ray.summary["engine"] == "ray"
        again = {k: v for k, v in flatten_config(ray.config) if k != "run-dir"}
        local = run_local({**again, "output-dir": str(tmp_path / "local")})
        assert _numbers(local) == _numbers(ray)


def _numbers(run: RunFolder) -> str:
    """Return what a run computed; two engines may differ in time and process only."""
    kept = ("round", "partition_id", "loss", "metrics", "replies", "status")
    rows = [*run.rounds, *run.clients]
    chosen = [{key: row[key] for key in kept if key in row} for row in rows]
    return json.dumps([chosen, run.summary["best"]], sort_keys=True)
