"""Checkpoints are written completely, and damaged ones are reported."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.methods import parse_config
from flower_fgl.runs import checkpoints
from flower_fgl.runs.checkpoints import (
    Checkpoint,
    Checkpoints,
    Snapshot,
    newest_checkpoint,
)
from flower_fgl.runs.state_files import LinkedStates, link_file, state_file

CLIENTS = [{"partition_id": 0, "num_nodes": 7}]


@pytest.fixture
def config() -> RunConfig:
    return parse_config({"clients": 1, "checkpoint-every": 2})


@pytest.fixture
def states(tmp_path: Path) -> LinkedStates:
    (tmp_path / "states").mkdir()
    return LinkedStates(tmp_path / "states")


@pytest.fixture
def keeper(tmp_path: Path, config: RunConfig, states: LinkedStates) -> Checkpoints:
    return Checkpoints(tmp_path, config=config, engine="ray", run_id=5, states=states)


def snapshot(number: float) -> Snapshot:
    return Snapshot({"w": torch.full((3,), number)}, {"round": number})


def test_parts_of_a_snapshot_come_out_as_they_went_in() -> None:
    parts = {
        "a": Snapshot({"x": torch.ones(2), "b/y": torch.zeros(1)}, {"n": 1}),
        "ab": Snapshot({"x": torch.zeros(2)}),
    }
    joined = Snapshot.join(parts)
    assert joined.part("a").tensors.keys() == {"x", "b/y"}
    assert joined.part("a").values == {"n": 1}
    assert torch.equal(joined.part("ab").tensors["x"], torch.zeros(2))
    assert joined.part("c") == Snapshot()


def test_a_checkpoint_comes_back_bit_for_bit(
    keeper: Checkpoints, tmp_path: Path
) -> None:
    tensors = {
        "float": torch.tensor([1.0, float("nan"), -0.0]),
        "bool": torch.tensor([True, False]),
        "count": torch.arange(6).reshape(2, 3),
        "view": torch.randn(4, 4).T[1:],
    }
    values = {"score": 0.1 + 0.2, "nan": float("nan"), "names": ["a", "b"]}
    keeper.save(2, Snapshot(tensors, values), CLIENTS)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert (found.server_round, found.engine, found.run_id) == (2, "ray", 5)
    assert found.clients == CLIENTS
    assert repr(found.snapshot.values) == repr(values)
    assert found.snapshot.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = found.snapshot.tensors[name]
        assert back.dtype == tensor.dtype
        assert (
            back.contiguous().numpy().tobytes() == tensor.contiguous().numpy().tobytes()
        )


def test_the_newest_two_are_kept_and_nothing_half_written(
    keeper: Checkpoints, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint" / ".round-000001.tmp").mkdir(parents=True)
    for number in (2, 4, 6):
        keeper.save(number, snapshot(number), CLIENTS)
    left = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert left == ["round-000004", "round-000006"]
    keeper.remove()
    assert not (tmp_path / "checkpoint").exists()


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "name", ["checkpoint.json", "server.safetensors", "clients/000000.safetensors"]
)
@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    keeper: Checkpoints,
    states: LinkedStates,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: str,
) -> None:
    for number in (2, 4):
        scratch = states.folder / "new"
        scratch.write_bytes(bytes(range(90, 120)) * number)
        scratch.replace(state_file(states.folder, 5, 0))
        keeper.save(number, snapshot(number), CLIENTS)
    path = tmp_path / "checkpoint" / "round-000004" / name
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage != "gone":
        middle = len(data) // 2
        data[middle] ^= 1
        path.write_bytes(data if damage == "flipped" else data[:middle])
    with caplog.at_level(logging.WARNING):
        found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.server_round == 2
    assert "round-000004 is damaged" in caplog.text


def test_without_a_whole_one_all_are_named(keeper: Checkpoints, tmp_path: Path) -> None:
    for number in (2, 4):
        keeper.save(number, snapshot(number), CLIENTS)
        folder = tmp_path / "checkpoint" / f"round-{number:06d}"
        (folder / "server.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"round-000004.*round-000002.*start a new"):
        newest_checkpoint(tmp_path)


def test_a_checkpoint_holds_the_states_of_its_round_only(
    keeper: Checkpoints, states: LinkedStates, tmp_path: Path
) -> None:
    def write(run_id: int, data: bytes) -> None:
        scratch = states.folder / "new"
        scratch.write_bytes(data)
        scratch.replace(state_file(states.folder, run_id, 0))

    write(5, b"round 2")
    write(6, b"of another run")
    keeper.save(2, snapshot(2), CLIENTS)
    write(5, b"round 3")
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert [p.name for p in found.client_folder.iterdir()] == ["000000.safetensors"]
    state_file(states.folder, 9, 1).write_bytes(b"of a client that had none")
    keeper.resumed, keeper.run_id = found, 9
    keeper.restore_states()
    assert state_file(states.folder, 9, 0).read_bytes() == b"round 2"
    assert not state_file(states.folder, 9, 1).exists()
    assert state_file(states.folder, 5, 0).read_bytes() == b"round 3"


def test_files_are_copied_where_they_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    (tmp_path / "a").write_bytes(b"state")
    monkeypatch.setattr("os.link", refuse)
    link_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"state"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_full_disk_leaves_the_checkpoint_before(
    keeper: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.save(2, snapshot(2), CLIENTS)

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(RunError, match=r"No space left.*checkpoint-every = 0"):
        keeper.save(4, snapshot(4), CLIENTS)
    left = [path.name for path in (tmp_path / "checkpoint").iterdir()]
    assert left == ["round-000002"]


def saved(keeper: Checkpoints, tmp_path: Path) -> Checkpoint:
    keeper.save(2, snapshot(2), CLIENTS)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    return found


def test_other_settings_are_refused_by_name(
    keeper: Checkpoints, config: RunConfig, tmp_path: Path
) -> None:
    found = saved(keeper, tmp_path)
    found.check(config)
    found.check(replace(config, checkpoint_every=7, output_dir="x", resume=True))
    found.check(
        replace(config, clients=0)
    )  # 0: all clients, whose number is compared later
    with pytest.raises(RunError, match=r"lr = 0.5 \(was 0.01\)"):
        found.check(replace(config, lr=0.5))
    with pytest.raises(RunError, match=r"clients = 2 \(was 1\)"):
        found.check(replace(config, clients=2))


@pytest.mark.parametrize("name", ["VERSION", "torch.__version__"])
def test_another_version_is_refused_by_name(
    keeper: Checkpoints,
    config: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    found = saved(keeper, tmp_path)
    monkeypatch.setattr(f"{checkpoints.__name__}.{name}", "99.0")
    with pytest.raises(RunError, match=r"99\.0 \(was \d"):
        found.check(config)


def test_a_deployments_checkpoint_is_not_resumed_in_a_simulation(
    keeper: Checkpoints, states: LinkedStates, tmp_path: Path
) -> None:
    keeper.states = None
    keeper.resumed = saved(keeper, tmp_path)
    keeper.restore_states()  # nothing to restore if data owners keep their states
    keeper.states = states
    with pytest.raises(RunError, match="no client states"):
        keeper.restore_states()


def test_a_checkpoint_is_plain_json_and_safetensors(
    keeper: Checkpoints, tmp_path: Path
) -> None:
    folder = saved(keeper, tmp_path).folder
    kinds = {p.suffix for p in folder.rglob("*") if p.is_file()}
    assert kinds == {".json", ".safetensors"}
    content = json.loads((folder / "checkpoint.json").read_text())["content"]
    assert set(content["files"]) == {"server.safetensors"}
