"""An interrupted run resumes with the numbers of an uninterrupted one."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from rich.console import Console
from typer.testing import CliRunner

from flower_fgl import Run, resume, simulate
from flower_fgl.cli.main import app
from flower_fgl.cli.run import RunOptions, run_all
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.core.atomic import hold
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.runs.files import MODEL
from flower_fgl.runs.model_file import read_card
from flower_fgl.server_app import _record_stop, run_server
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from tests.support.short_runs import SMALL, comparable, timeless

Settings = dict[str, Any]


def stop_at(server_round: int) -> Callable[[Mapping[str, Any]], None]:
    """Interrupt a run once the round's line is written, before its checkpoint."""

    def stop(row: Mapping[str, Any]) -> None:
        if row["round"] == server_round:
            raise KeyboardInterrupt

    return stop


def interrupted(folder: Path, server_round: int, settings: Settings) -> Path:
    with pytest.raises(KeyboardInterrupt):
        simulate(**settings, run_dir=str(folder), on_round=stop_at(server_round))
    return folder


@pytest.fixture
def settings(small: Settings) -> Settings:
    return {**small, "rounds": 5, "checkpoint_every": 2}


@pytest.fixture
def stopped(settings: Settings, tmp_path: Path) -> Path:
    """A run of five rounds, broken off in round 4, its checkpoint of round 2."""
    return interrupted(tmp_path / "stopped", 4, settings)


def assert_same(run: Run, whole: Run) -> None:
    assert comparable(run) == comparable(whole)
    assert timeless(run.summary) == timeless(whole.summary)


def test_an_interrupted_run_is_readable_and_keeps_its_checkpoint(stopped: Path) -> None:
    assert Run.load(stopped).status == "interrupted"
    assert [p.name for p in (stopped / "checkpoint").iterdir()] == ["round-000002"]


@pytest.mark.parametrize(
    ("is_stopped", "reason", "status", "error"),
    [
        (False, SystemExit(3), "failed", r"server half called sys\.exit\(3\)"),
        (True, SystemExit(0), "interrupted", r"Flower stopped the .*\(SystemExit\)"),
        (False, GeneratorExit(), "interrupted", r"Flower .*\(GeneratorExit\)"),
    ],
)
def test_only_exceptions_of_flower_count_as_a_stop(
    is_stopped: bool,
    reason: BaseException,
    status: str,
    error: str,
    settings: Settings,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "left"

    def leave(row: Mapping[str, Any]) -> None:
        if is_stopped:  # Flower's exit handlers run before it ends the process
            _record_stop(folder)
        raise reason

    with pytest.raises(type(reason)):
        simulate(**settings, run_dir=str(folder), on_round=leave)
    run = Run.load(folder)
    assert run.status == status
    assert re.search(error, run.summary["error"])


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_stop_while_messages_are_sent_is_no_failure(
    is_stopped: bool, settings: Settings, tmp_path: Path
) -> None:
    """`flwr stop` deletes the objects that the ServerApp is sending."""
    folder = tmp_path / "left"

    class Stopped(LocalGrid):
        has_failed = False

        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            sent = list(messages)
            if sent[0].metadata.message_type == "train":
                self.has_failed = True
                raise ObjectPushError("a" * 64, 7, "session")
            return super().push_messages(sent)

        def get_node_ids(self) -> list[int]:
            if is_stopped and self.has_failed:
                _record_stop(folder)
                raise SystemExit(0)  # as the handler of the signal does
            return super().get_node_ids()

    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=2, seed=0,
        settings={**SMALL, "run_dir": str(folder)},
    )  # fmt: skip
    with task_identity(7):
        grid = Stopped(DispatchingClientApp(), 2, values, run_id=7)
        with pytest.raises(SystemExit if is_stopped else ObjectPushError):
            run_server(grid, values, engine="deployment")
    summary = Run.load(folder).summary
    expected = "Flower stopped the ServerApp" if is_stopped else "ObjectPushError"
    assert summary["status"] == ("interrupted" if is_stopped else "failed")
    assert summary["error"].startswith(expected)


def test_a_run_may_be_interrupted_again_and_again(
    settings: Settings, stopped: Path
) -> None:
    for server_round in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            resume(stopped, on_round=stop_at(server_round))
    assert_same(resume(stopped), simulate(**settings))


def test_what_follows_the_last_round_is_done_again(
    settings: Settings, tmp_path: Path
) -> None:
    tuned = {**settings, "rounds": 4, "fedavg": {"finetune_epochs": 2}}
    folder = interrupted(tmp_path / "tuned", 5, tuned)  # 5: fine-tuning
    run = resume(folder)
    assert_same(run, simulate(**tuned))
    assert run.summary["finetuned"]["round"] == 5


def fail_in(monkeypatch: pytest.MonkeyPatch, *rounds: int) -> None:
    """Let all clients fail in some rounds."""
    from flower_fgl.client_apps.fedavg import FedAvgClientApp

    fit = FedAvgClientApp.fit

    def failing(self: Any, client: Any, server_round: int, download: Any) -> Any:
        if server_round in rounds:
            raise ValueError("down")
        return fit(self, client, server_round, download)

    monkeypatch.setattr(FedAvgClientApp, "fit", failing)


def test_owed_scores_are_remembered(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in(monkeypatch, 2)
    rare = {**settings, "evaluate_every": 2}
    whole = simulate(**rare)
    assert "metrics" in whole.rounds[2]  # round 3 brings what round 2 owed
    assert_same(resume(interrupted(tmp_path / "rare", 4, rare)), whole)


def test_rounds_that_failed_before_the_checkpoint_count(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in(monkeypatch, 2, 3, 4)
    folder = interrupted(tmp_path / "failing", 3, settings)
    with pytest.raises(RunError, match="3 rounds in a row failed"):
        resume(folder)
    assert Run.load(folder).status == "failed"
    monkeypatch.undo()
    assert resume(folder).status == "completed"  # once the fault is repaired


def test_rounds_that_were_scored_before_the_checkpoint_count(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in(monkeypatch, 3)
    rare = {**settings, "evaluate_every": 2, "rounds": 3}
    assert_same(resume(interrupted(tmp_path / "rare", 3, rare)), simulate(**rare))


def test_the_best_model_may_be_older_than_the_checkpoint(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flower_fgl.strategies.rounds.round_log import RoundLog

    def ever_worse(self: RoundLog, metric: str) -> tuple[int, float]:
        return 10, 1 / (self.number + 2)

    monkeypatch.setattr(RoundLog, "validation", ever_worse)
    first = simulate(**{**settings, "rounds": 1})
    run = resume(interrupted(tmp_path / "best", 4, settings))
    model = (run.path / "model.safetensors").read_bytes()
    assert model == (first.path / "model.safetensors").read_bytes()


def test_a_line_cut_off_by_the_kill_is_dropped(
    settings: Settings, stopped: Path
) -> None:
    with (stopped / "rounds.jsonl").open("a") as file:
        file.write('{"round": 5, "pha')
    assert_same(resume(stopped), simulate(**settings))


def test_a_damaged_checkpoint_costs_rounds_not_numbers(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {**settings, "rounds": 7}
    folder = interrupted(tmp_path / "long", 6, long)
    (folder / "checkpoint/round-000004/clients/000001.safetensors").write_bytes(b"x")
    rounds: list[int] = []
    with caplog.at_level(logging.WARNING):
        run = resume(folder, on_round=lambda row: rounds.append(row["round"]))
    assert "round-000004 is damaged" in caplog.text
    assert rounds == [3, 4, 5, 6, 7]
    assert_same(run, simulate(**long))


def test_a_complete_run_is_only_read(settings: Settings) -> None:
    whole = simulate(**settings)
    before = {p.name: p.stat().st_mtime_ns for p in whole.path.iterdir()}
    result = CliRunner().invoke(app, ["run", "--resume", str(whole.path), "--quiet"])
    assert result.exit_code == 0
    assert "complete: there is nothing to resume" in result.output
    assert {p.name: p.stat().st_mtime_ns for p in whole.path.iterdir()} == before


def test_no_rounds_at_all_are_refused_on_the_command_line(settings: Settings) -> None:
    whole = simulate(**settings)
    command = ["run", "--resume", str(whole.path), "--rounds", "0", "--quiet"]
    with pytest.raises(RunError, match=r"got rounds = 0\. Give a larger"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_rounds_are_added_after_the_end(settings: Settings, tmp_path: Path) -> None:
    tuned = {**settings, "rounds": 4, "fedavg": {"finetune_epochs": 2}}
    ended = simulate(**{**tuned, "rounds": 3, "keep_checkpoint": True})
    options = ["run", "--resume", str(ended.path), "--rounds", "4", "--quiet"]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    run, whole = Run.load(ended.path), simulate(**tuned)
    assert_same(run, whole)
    assert run.config["rounds"] == 4
    assert run.summary["finetuned"]["round"] == 5  # that of the shorter run is gone
    model = (run.path / "model.safetensors").read_bytes()
    assert model == (whole.path / "model.safetensors").read_bytes()


def test_rounds_may_be_added_to_an_interrupted_run(
    settings: Settings, stopped: Path
) -> None:
    assert_same(resume(stopped, rounds=6), simulate(**{**settings, "rounds": 6}))


def test_rounds_that_cannot_be_added_are_refused(
    settings: Settings, tmp_path: Path
) -> None:
    ended = simulate(**settings)
    before = {p.name: p.read_bytes() for p in ended.path.iterdir()}
    with pytest.raises(RunError, match="keep-checkpoint = true"):
        resume(ended.path, rounds=8)
    with pytest.raises(RunError, match="has 5 rounds, got rounds = 4"):
        resume(ended.path, rounds=4)
    assert {p.name: p.read_bytes() for p in ended.path.iterdir()} == before
    patient = {**settings, "lr": 0.5, "rounds": 6, "round_patience": 1}
    short = simulate(**patient, keep_checkpoint=True)
    assert short.summary["rounds"] < 6
    with pytest.raises(RunError, match="round-patience"):
        resume(short.path, rounds=8)


def test_a_run_without_a_checkpoint_says_how_to_start_anew(
    settings: Settings, tmp_path: Path
) -> None:
    folder = interrupted(tmp_path / "early", 1, settings)
    with pytest.raises(RunError, match=r"no checkpoint.*early/config\.toml"):
        resume(folder)
    folder = interrupted(tmp_path / "off", 4, {**settings, "checkpoint_every": 0})
    with pytest.raises(RunError, match="checkpoint-every = 0"):
        resume(folder)
    with pytest.raises(RunError, match="not a run folder"):
        resume(tmp_path)


def test_an_edited_configuration_is_refused_and_changes_nothing(stopped: Path) -> None:
    config = stopped / "config.toml"
    config.write_text(re.sub(r"(?m)^lr = .*$", "lr = 0.5", config.read_text()))
    before = {p.name: p.read_bytes() for p in stopped.iterdir() if p.is_file()}
    with pytest.raises(RunError, match=r"lr = 0\.5 \(was 0\.01\)"):
        resume(stopped)
    after = {p.name: p.read_bytes() for p in stopped.iterdir() if p.is_file()}
    assert after == before


def test_other_data_are_refused_by_the_hash_of_the_partition(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flower_fgl.protocols.describe import Description

    record = Description.to_record

    def other(self: Description) -> Any:
        content = record(self)
        content["info"]["partition-sha256"] = "other"
        return content

    monkeypatch.setattr(Description, "to_record", other)
    with pytest.raises(RunError, match=r"client 0: partition_sha256 = 'other'"):
        resume(stopped)
    monkeypatch.undo()
    assert resume(stopped).status == "completed"  # a refusal does no harm


@pytest.mark.parametrize("is_server", [True, False])
def test_two_processes_do_not_resume_the_same_run(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, is_server: bool
) -> None:
    monkeypatch.setattr("flower_fgl.simulation.run.LET_GO_SECONDS", 0.0)
    with (
        hold(stopped, is_server=is_server),
        pytest.raises(RunError, match="another process"),
    ):
        resume(stopped)
    assert Run.load(stopped).status == "interrupted"


@pytest.mark.parametrize(
    "options",
    [
        ["--method", "fedprox"],
        ["--set", "lr=0.1"],
        ["--engine", "local"],
        ["some.toml"],
    ],
)
def test_resume_takes_no_settings(stopped: Path, options: list[str]) -> None:
    result = CliRunner().invoke(app, ["run", "--resume", str(stopped), *options])
    assert isinstance(result.exception, ConfigError)
    assert "--resume keeps the settings" in str(result.exception)


@pytest.mark.thorough
def test_an_interrupted_cell_of_an_experiment_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.toml").write_text(
        "[config]\nclients = 2\nrounds = 5\ncheckpoint-every = 2\nhidden-channels = 8\n"
        "synthetic.nodes = 80\nsynthetic.blocks = 4\n[grid]\nseed = [0, 1]\n"
    )

    def run(place: str, **options: float) -> tuple[list[Run], str]:
        console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
        run_options = RunOptions("local", quiet=True)
        with console.file:
            runs = run_all(
                tmp_path / "tiny.toml",
                {"output-dir": place, **options},
                run_options,
                console,
            )
        return runs, console.export_text()

    whole, _ = run(str(tmp_path / "whole"))
    from flower_fgl.strategies.base import FglStrategy

    run_round = FglStrategy.run_round

    def break_off(self: Any, number: int, **options: Any) -> Any:
        if number == 4 and self.config.seed == 1:
            raise KeyboardInterrupt
        return run_round(self, number, **options)

    monkeypatch.setattr(FglStrategy, "run_round", break_off)
    with pytest.raises(KeyboardInterrupt):
        run(str(tmp_path / "runs"))
    monkeypatch.undo()
    (broken,) = (tmp_path / "runs" / "tiny").glob("*seed1")
    (broken / "mine.txt").touch()
    with pytest.raises(
        RunError, match=r"seed1 was interrupted\. .*lr = 0\.5 \(was 0\.01"
    ):
        run(str(tmp_path / "runs"), seed=1, lr=0.5)
    assert (broken / "mine.txt").exists()
    runs, said = run(str(tmp_path / "runs"))
    assert "seed0: already complete" in said
    assert "seed1: resumes" in said
    for one, other in zip(runs, whole, strict=True):
        assert_same(one, other)


# ------------------------------------------------------------------- deployment
@contextmanager
def deployment(values: Mapping[str, Any], folders: list[Path | None]) -> Iterator[Any]:
    """Nodes that keep their own states, or none; another run each time."""
    run_id = random.getrandbits(60)
    with task_identity(run_id):
        grid = LocalGrid(DispatchingClientApp(), len(folders), values, run_id=run_id)
        for context in grid.contexts.values():
            own = folders[context.node_config["partition-id"]]
            if own is not None:
                context.node_config["state-dir"] = str(own)
                context.node_config["model-dir"] = f"{own}-models"
        yield grid


def deployed(folder: Path, method: str = "fedavg", **more: Any) -> dict[str, Any]:
    settings = {**SMALL, "rounds": 5, "checkpoint_every": 2, "run_dir": str(folder)}
    return run_config_of(
        method=method, dataset="synthetic", clients=3, seed=0,
        settings={**settings, **more},
    )  # fmt: skip


def break_off(values: Mapping[str, Any], folders: list[Path | None]) -> None:
    with deployment(values, folders) as grid, pytest.raises(KeyboardInterrupt):
        run_server(grid, values, engine="deployment", on_round=stop_at(4))


def kept_models(folder: Path) -> set[Path]:
    return set(folder.glob("owner-*-models/*/model.safetensors"))


def test_owners_states_go_back_to_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders: list[Path | None] = [tmp_path / f"owner-{k}" for k in range(3)]
    whole = deployed(tmp_path / "whole", lr=1.0)
    with deployment(whole, folders) as grid:
        run_server(grid, whole, engine="deployment")
    first = kept_models(tmp_path)
    values = deployed(tmp_path / "run", lr=1.0)
    break_off(values, folders)
    before = kept_models(tmp_path)
    assert not (tmp_path / "run/checkpoint/round-000002/clients").exists()
    again = deployed(tmp_path / "run", lr=1.0, resume=True)
    with deployment(again, folders) as grid, caplog.at_level(logging.WARNING):
        run_server(grid, again, engine="deployment")
    assert_same(Run.load(tmp_path / "run"), Run.load(tmp_path / "whole"))
    assert "not be those" not in caplog.text
    rest = kept_models(tmp_path) - before
    for one, other in zip(sorted(first), sorted(rest), strict=True):  # by owner
        assert one.read_bytes() == other.read_bytes()
    rounds = [card.round for path in first if (card := read_card(path.parent))]
    assert min(rounds) <= 2 < max(rounds)  # before the checkpoint, and after it


LOSSES = {
    "fedavg": {},
    "fedlog": {"fedlog.prompt-epochs": 1, "fedlog.prompt-networks": 1},
}
"""Methods whose clients may lose their memory, with what makes them quick."""


@pytest.mark.thorough
@pytest.mark.parametrize("method", LOSSES)
def test_a_client_whose_state_is_of_another_round_is_named_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    folders = [tmp_path / "owner-0", tmp_path / "owner-1", None]
    break_off(deployed(tmp_path / "run", method, **LOSSES[method]), folders)
    shutil.rmtree(tmp_path / "owner-1")
    again = deployed(tmp_path / "run", method, resume=True, **LOSSES[method])
    with deployment(again, folders) as grid, caplog.at_level(logging.WARNING):
        run_server(grid, again, engine="deployment")
    warned = [
        r.getMessage() for r in caplog.records if "will differ from" in r.getMessage()
    ]
    assert [text[:8] for text in warned] == ["Client 1", "Client 2"]
    assert (
        "has no state, but the checkpoint of round 2 expects that of round 2"
        in warned[0]
    )
    run = Run.load(tmp_path / "run")
    assert run.status == "completed"
    assert not any(row["failures"] for row in run.rounds)


def test_a_deployment_is_resumed_where_it_ran(tmp_path: Path) -> None:
    values = deployed(tmp_path / "run")
    break_off(values, [None] * 3)
    with pytest.raises(RunError, match=r"deployment: .*resume=true"):
        resume(tmp_path / "run")


def test_resume_needs_the_folder_of_the_run() -> None:
    values = deployed(Path("x"), run_dir="", resume=True)
    with (
        deployment(values, [None] * 3) as grid,
        pytest.raises(ConfigError, match="run-dir"),
    ):
        run_server(grid, values, engine="deployment")


def test_an_owners_state_folder_must_be_absolute(tmp_path: Path) -> None:
    values = deployed(tmp_path / "run")
    with deployment(values, [Path("states"), None, None]) as grid:
        run = Run.load(run_server(grid, values, engine="deployment"))
    (refused,) = run.summary["refused"]
    assert "absolute path, got 'states'" in refused["reason"]
    assert [row["replies"] for row in run.rounds] == [2] * 5


# ---------------------------------------------------------------- real processes
QUICK = [
    "--clients", "3", "--rounds", "30", "--quiet", "--set", "checkpoint-every=3",
    "--set", "synthetic.nodes=120", "--set", "synthetic.blocks=6",
    "--set", "hidden-channels=8", "--method", "fedpg", "--set", "participation=0.6",
]  # fmt: skip


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "flower_fgl", "run", *arguments]


def kill_when(process: psutil.Popen, folder: Path, lines: int, delay: float) -> None:
    """SIGKILL a process, by its id, once the run has written so many rounds.

    What it started ends by itself soon after; whatever is left is killed.
    """
    end = time.monotonic() + 150
    path = folder / "rounds.jsonl"
    try:
        while not path.exists() or path.read_bytes().count(b"\n") < lines:
            assert process.poll() is None, "the run ended too soon"
            assert time.monotonic() < end, "the run wrote no rounds"
            time.sleep(0.005)
        time.sleep(delay)
    finally:
        started = process.children(recursive=True) if process.is_running() else []
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        _, left = psutil.wait_procs(started, timeout=30)
        for child in left:
            child.kill()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_killed_run_ends_with_the_numbers_of_one_that_was_not(
    engine: str, tmp_path: Path
) -> None:
    draw = random.Random(20 if engine == "ray" else 11)
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    place = ["--engine", engine, "--set", f"output-dir={tmp_path}"]
    place += ["--workers", "2"] if engine == "ray" else []
    folder = tmp_path / "killed"
    arguments = command(*QUICK, *place, "--set", f"run-dir={folder}")
    process = psutil.Popen(
        arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    kill_when(process, folder, draw.randint(7, 25), draw.random() * 0.1)
    assert Run.load(folder).status == "running"
    done = subprocess.run(
        command("--resume", str(folder), "--quiet"),
        capture_output=True, text=True, timeout=200, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = simulate(
        "fedpg", clients=3, rounds=30, checkpoint_every=0, participation=0.6,
        synthetic={"nodes": 120, "blocks": 6}, hidden_channels=8,
        run_dir=str(tmp_path / "whole"),
    )  # fmt: skip
    run = Run.load(folder)
    assert numbers(run) == numbers(whole)
    for key in ("best", "last", "rounds", "status", "partition_sha256", "failures"):
        assert run.summary[key] == whole.summary[key]
    assert not (folder / "state").exists()
    assert not (folder / "checkpoint").exists()


def numbers(run: Run) -> str:
    """Return all numbers but seconds; bytes hold process ids and differ by engine."""
    skipped = ("seconds", "bytes")
    rounds = [{k: v for k, v in row.items() if k not in skipped} for row in run.rounds]
    clients = [
        {k: v for k, v in row.items() if k not in skipped} for row in run.clients
    ]
    return json.dumps([rounds, clients], sort_keys=True)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "moon", "fedala"])
def test_a_run_may_start_from_a_saved_model(
    method: str, settings: Settings, tmp_path: Path
) -> None:
    """With a stateless optimizer and no randomness it continues as a longer run does."""
    plain = {**settings, "method": method, "dropout": 0.0, "optimizer": "sgd"}
    plain |= {"output_dir": str(tmp_path), "lr": 0.05}
    first = simulate(**{**plain, "rounds": 1})
    long = simulate(**{**plain, "rounds": 3})
    more = simulate(**{**plain, "rounds": 2}, initial_model=str(first.path))
    if method in ("fedavg", "fedprox"):  # others remember an earlier model
        mine, right = (
            [{**row, "round": 0, "seconds": {}} for row in rows]
            for rows in (more.rounds, long.rounds[1:])
        )
        assert mine == right
    assert (
        more.rounds[0]["loss"] != simulate(**{**plain, "rounds": 1}).rounds[0]["loss"]
    )


@pytest.mark.parametrize(
    "other", [{}, {"partition_seed": 5}, {"split": "10/40/50"}, {"split_by": "id"}]
)
def test_a_saved_model_of_another_split_is_named(
    other: Settings, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """Its training nodes may be test nodes of the run that starts from it."""
    plain = {**settings, "method": "fedavg"}
    first = simulate(**plain)
    with caplog.at_level(logging.WARNING):
        simulate(**{**plain, **other}, initial_model=str(first.path))
        simulate(**{**plain, **other}, initial_model=str(first.path / MODEL))
    text = "was trained on another partition or split"
    assert caplog.text.count(text) == 2 * bool(other)


def test_a_saved_model_that_does_not_fit_is_refused(
    settings: Settings, tmp_path: Path
) -> None:
    first = simulate(**settings)
    model = {"initial_model": str(first.path)}
    with pytest.raises(RunError, match="does not fit this run: other shapes"):
        simulate(**{**settings, "hidden_channels": 12}, **model)
    synthetic = {**settings["synthetic"], "classes": 4}
    with pytest.raises(RunError, match="other classes"):
        simulate(**{**settings, "synthetic": synthetic}, **model)
    with pytest.raises(ConfigError, match=r"fedproto does not start.*These methods do"):
        simulate(**{**settings, "method": "fedproto"}, **model)
    with pytest.raises(RunError, match="does not exist"):
        simulate(**settings, initial_model=str(tmp_path / "none"))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedproto", "local"])
def test_a_simulation_keeps_the_models_of_its_clients(
    method: str, settings: Settings
) -> None:
    kept = simulate(**{**settings, "method": method}, keep_client_models=True)
    plain = simulate(**{**settings, "method": method})
    assert comparable(kept) == comparable(plain)
    folders = sorted((kept.path / "clients").iterdir())
    assert [f.name for f in folders] == [f"{k}-client-{k}" for k in range(len(folders))]
    assert len(folders) == kept.summary["clients"]
    for folder in folders:
        card = read_card(folder)
        assert card is not None
        assert card.method == method
