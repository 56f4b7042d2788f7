"""A full disk ends a run with one line, and leaves every older file as it was.

``RLIMIT_FSIZE`` is a real limit of the operating system: writes beyond it fail as on a full
disk, with "File too large". One slow test fills a small tmpfs, where it can be mounted.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flower_fgl import resume, simulate
from flower_fgl.client_apps.runtime.state import ClientState, FileStates, MemoryStates
from flower_fgl.core.errors import RunError
from flower_fgl.lab.results import Run
from flower_fgl.methods import parse_config
from flower_fgl.runs.checkpoints import Checkpoints, Snapshot, newest_checkpoint
from flower_fgl.runs.state_files import link_file
from flower_fgl.runs.writer import RunWriter
from tests.support.short_runs import timeless

CLIENTS = [{"partition_id": 0, "num_partitions": 1}]
KIB = 1024


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Limit the size of every file that this process writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def stored(numbers: int, context: Any) -> MemoryStates:
    states = MemoryStates()
    state = ClientState()
    state.set_group("model", {"w": torch.randn(numbers)})
    states.save(context, 0, state)
    return states


@pytest.mark.parametrize(
    ("server", "client", "values"),
    [(100_000, 10, 10), (10, 100_000, 10), (10, 10, 100_000)],
    ids=["server.safetensors", "client state", "manifest"],
)
def test_a_checkpoint_on_a_full_disk_leaves_the_previous_one(
    server: int, client: int, values: int, tmp_path: Path
) -> None:
    context = SimpleNamespace(run_id=5)
    states = stored(client, context)
    config = parse_config({"clients": 1, "checkpoint-every": 1})
    keeper = Checkpoints(
        tmp_path, config=config, engine="local", run_id=5, states=states
    )
    snapshot = Snapshot({"w": torch.randn(server)}, {"list": [0] * values})
    keeper.save(1, snapshot, CLIENTS)
    before = files(tmp_path)
    with largest_file(64 * KIB), pytest.raises(RunError) as info:
        keeper.save(2, snapshot, CLIENTS)
    text = str(info.value)
    assert text.startswith(f"Cannot write {tmp_path / 'checkpoint' / 'round-000002'}: ")
    assert "File too large. Free some space" in text
    assert "\n" not in text
    assert files(tmp_path) == before
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == [
        "round-000001"
    ]
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.server_round == 1
    keeper.save(2, snapshot, CLIENTS)  # there is space again
    assert newest_checkpoint(tmp_path).server_round == 2  # type: ignore[union-attr]


def test_model_summary_and_rounds_stay_as_they_were(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", config={}, sources={})
    writer.write_model({"w": torch.zeros(9)})
    writer.append_round({"round": 1})
    before = files(writer.folder)
    with largest_file(16 * KIB):
        with pytest.raises(RunError, match=r"model\.safetensors: File too large"):
            writer.write_model({"w": torch.zeros(9_000)})
        with pytest.raises(RunError, match=r"summary\.json: File too large"):
            writer.write_summary({"status": "running", "text": "x" * 20_000})
        with pytest.raises(RunError, match=r"rounds\.jsonl: File too large"):
            writer.append_round({"round": 2, "text": "x" * 20_000})
        with pytest.raises(RunError, match=r"config\.toml: File too large"):
            writer.write_settings({"method": "x" * 20_000}, {})
    assert files(writer.folder) == before


def test_the_state_of_a_client_stays_as_it_was(tmp_path: Path) -> None:
    store, context = FileStates(tmp_path / "state"), SimpleNamespace(run_id=5)
    state = ClientState()
    state.set_group("model", {"w": torch.zeros(9)})
    store.save(context, 0, state)  # type: ignore[arg-type]
    before = files(tmp_path)
    large = ClientState()
    large.set_group("model", {"w": torch.zeros(9_000)})
    with (
        largest_file(16 * KIB),
        pytest.raises(RunError, match=r"Cannot write client state .*File too large"),
    ):
        store.save(context, 0, large)  # type: ignore[arg-type]
    assert files(tmp_path) == before


def test_a_copy_instead_of_a_link_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")  # a file system without hard links

    (tmp_path / "a").write_bytes(bytes(20_000))
    monkeypatch.setattr(os, "link", refuse)
    with largest_file(16 * KIB), pytest.raises(OSError, match="File too large"):
        link_file(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]
    link_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == bytes(20_000)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600


SETTINGS: dict[str, Any] = {
    "clients": 3,
    "rounds": 4,
    "local_epochs": 1,
    "checkpoint_every": 1,
    "hidden_channels": 64,
    "synthetic": {"nodes": 120, "features": 64},
}


def test_a_run_on_a_full_disk_can_resume_with_the_same_numbers(tmp_path: Path) -> None:
    whole = simulate("fedavg", run_dir=str(tmp_path / "whole"), **SETTINGS)
    folder = tmp_path / "run"
    with contextlib.ExitStack() as limits:

        def fill(row: Any) -> None:
            if row["round"] == 2:
                limits.enter_context(largest_file(12 * KIB))

        with pytest.raises(RunError) as info:
            simulate("fedavg", run_dir=str(folder), on_round=fill, **SETTINGS)
    error = str(info.value)
    assert error.startswith(f"Cannot write {folder / 'checkpoint' / 'round-000002'}")
    assert "\n" not in error
    assert Run.load(folder).status == "failed"
    assert [p.name for p in (folder / "checkpoint").iterdir()] == ["round-000001"]
    assert not list(folder.rglob("*.tmp"))
    assert timeless(resume(folder).summary) == timeless(whole.summary)


@pytest.mark.slow
def test_a_full_file_system_gives_one_line(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no permission to mount a tmpfs")
    try:
        command = [sys.executable, "-m", "flower_fgl", "run", "--engine", "local"]
        command += ["--clients", "10", "--rounds", "3", "--quiet"]
        command += ["--set", f"run-dir={disk}/run", "--set", "checkpoint-every=1"]
        command += ["--set", "hidden-channels=256"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        assert len(errors) == 1
        assert "round-000002: No space left on device" in errors[0]
        assert newest_checkpoint(disk / "run").server_round == 1  # type: ignore[union-attr]
        assert not list(disk.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
