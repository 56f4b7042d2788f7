from __future__ import annotations

from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict

from flower_fgl.client_apps.state import (
    ClientState,
    ContextStates,
    FileStates,
    MemoryStates,
    StatePlace,
)
from flower_fgl.errors import RunError


@pytest.fixture
def context() -> Context:
    return Context(
        run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={}
    )


@pytest.fixture(params=["memory", "file", "context"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StatePlace:
    return {
        "memory": MemoryStates(),
        "file": FileStates(tmp_path / "states"),
        "context": ContextStates(),
    }[request.param]


def test_a_state_comes_back_whole(place: StatePlace, context: Context) -> None:
    assert place.load(context, 0) == ClientState()
    sent = ClientState(
        {"model/w": torch.randn(3, 2), "optimizer/step/w": torch.tensor(4.0)},
        {"round": 3, "name": "gcn", "is_new": True, "lr": 0.1},
    )
    place.save(context, 0, sent)
    back = place.load(context, 0)
    assert back.values == sent.values
    assert back.tensors.keys() == sent.tensors.keys()
    for name, tensor in sent.tensors.items():
        assert torch.equal(back.tensors[name], tensor)


def test_changing_what_was_loaded_changes_nothing_until_it_is_saved(
    place: StatePlace, context: Context
) -> None:
    place.save(context, 0, ClientState({"model/w": torch.zeros(2)}))
    place.load(context, 0).group("model")["w"] += 1
    assert torch.equal(place.load(context, 0).tensors["model/w"], torch.zeros(2))


def test_groups_are_replaced_whole() -> None:
    state = ClientState({"a/x": torch.zeros(1), "ab/x": torch.ones(1)})
    state.set_group("a", {"y": torch.ones(2)})
    assert set(state.tensors) == {"a/y", "ab/x"}
    assert set(state.group("a")) == {"y"}


def test_states_in_files_are_kept_apart_by_run_and_client(
    tmp_path: Path, context: Context
) -> None:
    place = FileStates(tmp_path)
    place.save(context, 0, ClientState(values={"n": 0}))
    place.save(context, 1, ClientState(values={"n": 1}))
    other = Context(
        run_id=8, node_id=1, node_config={}, state=RecordDict(), run_config={}
    )
    assert place.load(context, 1).values == {"n": 1}
    assert place.load(other, 1) == ClientState()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_damaged_file_is_named(tmp_path: Path, context: Context) -> None:
    place = FileStates(tmp_path)
    place.save(context, 0, ClientState({"w": torch.zeros(9)}))
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(RunError, match=path.name):
        place.load(context, 0)


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, context: Context
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="state-dir"):
        FileStates(tmp_path / "file" / "states").save(context, 0, ClientState())


def test_a_late_worker_does_not_overwrite_newer_state(
    tmp_path: Path, context: Context
) -> None:
    place = FileStates(tmp_path)
    place.save(context, 0, ClientState({"w": torch.ones(1)}, {"round": 3}))
    place.save(context, 0, ClientState({"w": torch.zeros(1)}, {"round": 2}))
    assert place.load(context, 0).values == {"round": 3}
    place.save(context, 0, ClientState({"w": torch.zeros(1)}, {"round": 3}))
    assert torch.equal(place.load(context, 0).tensors["w"], torch.zeros(1))


def test_a_state_may_hold_what_no_payload_may(
    place: StatePlace, context: Context
) -> None:
    sent = {"nan": torch.tensor([float("nan")]), "count": torch.tensor([1, 2])}
    place.save(context, 0, ClientState(dict(sent)))
    back = place.load(context, 0).tensors
    assert torch.equal(back["count"], sent["count"])
    assert back["nan"].isnan().all()
