from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors import safe_open

from flower_fgl.client_apps.runtime.state import (
    ANSWERED,
    ClientState,
    ContextStates,
    FileStates,
    MemoryStates,
    StateStore,
    _read_group,
)
from flower_fgl.core.errors import RunError
from flower_fgl.runs.state_files import LinkedStates


@pytest.fixture
def context() -> Context:
    return Context(
        run_id=7, node_id=1, node_config={}, state=RecordDict(), run_config={}
    )


@pytest.fixture(params=["memory", "file", "context"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StateStore:
    return {
        "memory": MemoryStates(),
        "file": FileStates(tmp_path / "states"),
        "context": ContextStates(),
    }[request.param]


def test_a_saved_state_is_loaded_unchanged(place: StateStore, context: Context) -> None:
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


def test_changes_to_a_loaded_state_take_effect_when_saved(
    place: StateStore, context: Context
) -> None:
    place.save(context, 0, ClientState({"model/w": torch.zeros(2)}))
    place.load(context, 0).group("model")["w"] += 1
    assert torch.equal(place.load(context, 0).tensors["model/w"], torch.zeros(2))


def test_set_group_replaces_all_tensors_of_the_group() -> None:
    state = ClientState({"a/x": torch.zeros(1), "ab/x": torch.ones(1)})
    state.set_group("a", {"y": torch.ones(2)})
    assert set(state.tensors) == {"a/y", "ab/x"}
    assert set(state.group("a")) == {"y"}


def test_a_group_is_a_copy_sorted_by_name_in_every_store(
    place: StateStore, context: Context
) -> None:
    layer = torch.nn.Linear(2, 2)
    state = ClientState()
    # two groups hold the weights of one model, which training then changes
    for name in ("model", "last"):
        state.set_group(name, {n: p.detach() for n, p in layer.named_parameters()})
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight += 1
    place.save(context, 0, state)
    for name in ("model", "last"):
        back = place.load(context, 0).group(name)
        assert list(back) == ["bias", "weight"]
        assert torch.equal(back["weight"], before)


@pytest.mark.parametrize("value", [0.5, np.ones(2), torch.eye(2).to_sparse()])
def test_entries_that_are_not_dense_tensors_are_rejected_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="client state mine/x must be a dense tensor"):
        ClientState().set_group("mine", {"x": value})


@pytest.mark.parametrize("value", [[1, 2], torch.ones(1), np.float32(1), None])
def test_values_that_some_store_cannot_keep_are_rejected_by_name(
    place: StateStore, context: Context, value: Any
) -> None:
    with pytest.raises(TypeError, match="client state value seen must be a bool"):
        place.save(context, 0, ClientState({}, {"seen": value}))
    assert place.load(context, 0) == ClientState()


def test_each_run_and_client_has_its_own_state_file(
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


def test_the_error_names_a_damaged_file(tmp_path: Path, context: Context) -> None:
    place = FileStates(tmp_path)
    place.save(context, 0, ClientState({"w": torch.zeros(9)}))
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(RunError, match=path.name):
        place.load(context, 0)


def test_the_error_names_the_setting_of_an_unusable_folder(
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


def test_a_state_may_hold_nan_and_integers(place: StateStore, context: Context) -> None:
    sent = {"nan": torch.tensor([float("nan")]), "count": torch.tensor([1, 2])}
    place.save(context, 0, ClientState(dict(sent)))
    back = place.load(context, 0).tensors
    assert torch.equal(back["count"], sent["count"])
    assert back["nan"].isnan().all()


def train(place: FileStates, context: Context, *rounds: int) -> None:
    for number in rounds:
        state = ClientState({"model/w": torch.full((2,), number)}, {"round": number})
        place.save(context, 0, state)


def next_run(run_id: int) -> Context:
    return Context(
        run_id=run_id, node_id=1, node_config={}, state=RecordDict(), run_config={}
    )


@pytest.mark.parametrize(
    ("rounds", "point", "expected"),
    [
        ((1, 2, 3, 4, 5), 4, 4),
        ((1, 2, 3, 4, 5), 2, 2),  # the previous checkpoint, if the newest is damaged
        ((1, 2, 3, 4), 4, 4),  # killed before the client trained again
        ((1, 7), 6, 1),  # not sampled for several rounds
        ((1, 7), 4, 1),
        ((1, 2, 5, 6, 7), 4, 2),
        ((5,), 4, 0),  # not trained before the checkpoint
        ((), 4, 0),
    ],
)
def test_a_client_rewinds_to_its_state_at_a_checkpoint(
    context: Context, tmp_path: Path, rounds: tuple[int, ...], point: int, expected: int
) -> None:
    place = FileStates(tmp_path, keep_every=2)
    train(place, context, *rounds)
    resumed = next_run(8)
    place.rewind(resumed, 0, context.run_id, point)
    state = place.load(resumed, 0)
    assert state.values.get("round", 0) == expected
    if expected:
        assert torch.equal(state.tensors["model/w"], torch.full((2,), expected))
    place.rewind(resumed, 0, context.run_id, point)  # a repeated query
    assert place.load(resumed, 0).values.get("round", 0) == expected


def test_a_client_that_was_only_evaluated_rewinds_past_its_evaluations(
    context: Context, tmp_path: Path
) -> None:
    place = FileStates(tmp_path, keep_every=2)
    train(place, context, 1, 2, 3)
    for number in (3, 4, 5):  # not sampled in rounds 4 and 5, but evaluated
        claim = ClientState({}, {ANSWERED + "evaluate": number})
        claim.claimed = "evaluate"
        place.note(context, 0, claim)
    resumed = next_run(8)
    place.rewind(resumed, 0, context.run_id, 4)
    state = place.load(resumed, 0)
    assert state.values["round"] == 3
    assert state.values[ANSWERED + "evaluate"] == 4  # so that it answers round 5 again


def test_states_of_the_last_two_checkpoints_are_kept(
    context: Context, tmp_path: Path
) -> None:
    place = FileStates(tmp_path, keep_every=2)
    train(place, context, *range(1, 10))
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [
        "7-000000.at-000006.safetensors",
        "7-000000.at-000008.safetensors",
        "7-000000.safetensors",
    ]


def test_of_two_saves_in_a_round_the_last_one_is_kept(
    context: Context, tmp_path: Path
) -> None:
    place = FileStates(tmp_path, keep_every=2)
    train(place, context, 1, 2)
    place.save(context, 0, ClientState({"model/w": torch.ones(1)}, {"round": 2}))
    train(place, context, 3)
    place.rewind(next_run(8), 0, context.run_id, 2)
    assert torch.equal(place.load(next_run(8), 0).tensors["model/w"], torch.ones(1))


def test_memory_states_are_saved_and_loaded_bit_for_bit(
    context: Context, tmp_path: Path
) -> None:
    place = MemoryStates()
    sent = ClientState({"model/w": torch.randn(3)}, {"round": 2, "name": "gcn"})
    place.save(context, 4, sent)
    place.save(next_run(9), 0, ClientState(values={"of": "another run"}))
    place.save_states(context.run_id, tmp_path / "kept")
    place.save(context, 5, ClientState(values={"round": 3}))
    place.load_states(context.run_id, tmp_path / "kept")
    back = place.load(context, 4)
    assert back.values == sent.values
    assert torch.equal(back.tensors["model/w"], sent.tensors["model/w"])
    assert place.load(context, 5) == ClientState()
    assert place.load(next_run(9), 0).values == {"of": "another run"}


def secret_state(server_round: int) -> ClientState:
    """A state as it is between two messages of secure aggregation."""
    names = ("run-key", "card", "pairs", "seed", "mask-secret", "held", "seen")
    tensors = {f"secure/{name}": torch.full((4,), server_round) for name in names}
    tensors["secure/masked-round"] = torch.tensor(server_round)
    return ClientState(
        {"model/w": torch.full((2,), float(server_round)), **tensors},
        {"round": server_round},
    )


def kept_names(path: Path) -> set[str]:
    return set(safe_open(path, "pt").keys())


KEPT = {"model/w", "secure/masked-round"}


def test_kept_states_hold_no_secrets(tmp_path: Path, context: Context) -> None:
    store = FileStates(tmp_path, keep_every=1)
    for number in range(1, 5):
        store.save(context, 0, secret_state(number))
    copies = sorted(tmp_path.glob("*.at-*.safetensors"))
    assert [path.stem[-1] for path in copies] == ["2", "3"]
    assert all(kept_names(path) == KEPT for path in copies)
    assert "secure/seed" in store.load(context, 0).tensors
    resumed = Context(8, 1, {}, RecordDict(), {})
    store.rewind(resumed, 0, 7, 3)
    state = store.load(resumed, 0)
    assert set(state.tensors) == KEPT
    assert state.values == {"round": 3}
    assert int(state.tensors["secure/masked-round"]) == 3
    # the interrupted run needs its secrets no more
    assert set(store.load(context, 0).tensors) == KEPT
    store.rewind(resumed, 0, 7, 4)
    assert set(store.load(resumed, 0).tensors) == KEPT


def test_checkpoints_hold_no_secrets(tmp_path: Path, context: Context) -> None:
    memory = MemoryStates()
    memory.save(context, 0, secret_state(2))
    memory.save_states(7, tmp_path / "local")
    FileStates(tmp_path / "states").save(context, 0, secret_state(2))
    LinkedStates(tmp_path / "states").save_states(7, tmp_path / "ray")
    for folder in ("local", "ray"):
        (path,) = (tmp_path / folder).glob("*.safetensors")
        assert kept_names(path) == KEPT
    assert "secure/seed" in memory.load(context, 0).tensors


def test_a_state_without_secrets_is_kept_as_a_link(
    tmp_path: Path, context: Context
) -> None:
    store = FileStates(tmp_path, keep_every=1)
    for number in (1, 2):
        store.save(context, 0, ClientState({"w": torch.ones(1)}, {"round": number}))
    (current,) = tmp_path.glob("7-000000.safetensors")
    inode = current.stat().st_ino
    store.save(context, 0, ClientState({"w": torch.ones(1)}, {"round": 3}))
    assert (tmp_path / "7-000000.at-000002.safetensors").stat().st_ino == inode


def test_state_files_and_their_folder_are_private(
    tmp_path: Path, context: Context
) -> None:
    before = os.umask(0)
    try:
        place = FileStates(tmp_path / "made", keep_every=1)
        for number in (1, 2):  # kept with a link, or copied without secrets
            place.save(context, 0, ClientState({}, {"round": number}))
            place.save(context, 1, secret_state(number))
    finally:
        os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    files = list((tmp_path / "made").glob("*.safetensors"))
    assert len(files) == 4  # the newest, and that of the checkpoint
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def hashed_state() -> ClientState:
    state = ClientState({"model/w": torch.randn(2)}, {"round": 1})
    weight = torch.arange(6.0).view(2, 3)
    state.set_hashed_group("prompts", {"0.w": weight, "1/b": torch.tensor(True)})
    return state


def test_a_hashed_group_comes_back_from_every_store(
    place: StateStore, context: Context
) -> None:
    place.save(context, 0, hashed_state())
    back = place.load(context, 0)
    assert back.group("prompts")["0.w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back.group("prompts")["1/b"].item() is True
    assert back.values == hashed_state().values


def test_hashes_tell_apart_names_shapes_dtypes_and_numbers() -> None:
    contents = [
        {"a": torch.zeros(2)},
        {"b": torch.zeros(2)},
        {"a": torch.zeros(1, 2)},
        {"a": torch.zeros(1, dtype=torch.float64)},
        {"a": torch.ones(2)},
        {"a": torch.zeros(2, dtype=torch.bfloat16)},
    ]
    found = set()
    for content in contents:
        state = ClientState()
        state.set_hashed_group("g", content)
        found.add(state.values["g"])
    assert len(found) == len(contents)


def test_a_hash_depends_neither_on_the_order_of_names_nor_on_strides() -> None:
    rows, bias = torch.arange(6.0).view(2, 3), torch.ones(1)
    first, second = ClientState(), ClientState()
    first.set_hashed_group("g", {"rows": rows, "bias": bias})
    second.set_hashed_group("g", {"bias": bias, "rows": rows.t().contiguous().t()})
    assert first.values == second.values
    second.set_hashed_group("g", {"a": rows, "b": rows})  # one memory, two tensors
    assert set(second.group("g")) == {"a", "b"}


def test_a_group_that_is_set_without_a_hash_has_none() -> None:
    state = hashed_state()
    state.set_group("prompts", {"0.w": torch.ones(1)})
    assert "prompts" not in state.values


def test_clients_share_the_file_of_equal_groups_and_no_save_writes_it_again(
    tmp_path: Path, context: Context
) -> None:
    files = FileStates(tmp_path)
    for client in (0, 1):
        files.save(context, client, hashed_state())
    (group,) = (tmp_path / "groups").iterdir()
    before = group.stat()
    files.save(context, 0, files.load(context, 0))
    assert group.stat() == before
    assert kept_names(tmp_path / "7-000000.safetensors") == {"model/w"}
    assert group.stat().st_mode & 0o777 == 0o600
    first, second = (files.load(context, client).tensors for client in (0, 1))
    assert first["prompts/0.w"] is second["prompts/0.w"]


def test_a_state_whose_group_is_missing_is_damaged(
    tmp_path: Path, context: Context
) -> None:
    files = FileStates(tmp_path)
    state = ClientState()
    state.set_hashed_group("g", {"a": torch.rand(1)})
    files.save(context, 0, state)
    (group,) = (tmp_path / "groups").iterdir()
    group.unlink()
    with pytest.raises(RunError, match=r"Cannot read client state .*7-000000"):
        files.load(context, 0)


@pytest.mark.parametrize("size", [0, 100])
def test_a_group_that_a_power_failure_cut_is_written_and_restored(
    size: int, tmp_path: Path, context: Context
) -> None:
    files = FileStates(tmp_path / "states")
    files.save(context, 0, hashed_state())
    (group,) = (tmp_path / "states" / "groups").iterdir()
    (tmp_path / "kept" / "groups").mkdir(parents=True)
    for name in ("7-000000.safetensors", f"groups/{group.name}"):
        copied = name.removeprefix("7-")
        shutil.copy(tmp_path / "states" / name, tmp_path / "kept" / copied)

    os.truncate(group, size)  # a new run has the same group
    files.save(context, 1, hashed_state())
    assert set(files.load(context, 1).group("prompts")) == {"0.w", "1/b"}

    os.truncate(group, size)
    LinkedStates(tmp_path / "states").load_states(7, tmp_path / "kept")
    _read_group.cache_clear()
    assert set(files.load(context, 0).group("prompts")) == {"0.w", "1/b"}


@pytest.mark.parametrize("is_linked", [True, False])
def test_kept_states_have_their_hashed_groups(
    is_linked: bool, tmp_path: Path, context: Context
) -> None:
    """States of each engine come back in the other one."""
    memory, files = MemoryStates(), FileStates(tmp_path / "states")
    store: StateStore = files if is_linked else memory
    for client in (0, 1):
        store.save(context, client, hashed_state())
    linked = LinkedStates(tmp_path / "states")
    (linked if is_linked else memory).save_states(7, tmp_path / "kept")
    assert len([*(tmp_path / "kept" / "groups").iterdir()]) == 1
    LinkedStates(tmp_path / "other").load_states(7, tmp_path / "kept")
    memory.load_states(7, tmp_path / "kept")
    for loaded in (memory, FileStates(tmp_path / "other")):
        for client in (0, 1):
            assert loaded.load(context, client).values == hashed_state().values
            group = loaded.load(context, client).group("prompts")
            assert group["0.w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_clients_stored_as_one_state_share_equal_groups(
    tmp_path: Path, context: Context
) -> None:
    files, together = FileStates(tmp_path), ClientState()
    together.join({3: hashed_state(), 12: hashed_state()})
    files.save(context, 0, together)
    assert len([*(tmp_path / "groups").iterdir()]) == 1
    for state in files.load(context, 0).split().values():
        assert state.values == hashed_state().values
        assert set(state.group("prompts")) == {"0.w", "1/b"}


def test_copies_for_another_process_hold_once_what_clients_share() -> None:
    first, second = hashed_state(), hashed_state()
    for state in (first, second):
        state.set_hashed_group("prompts", {"w": torch.zeros(10_000)})
    assert second.share_group("prompts", first)
    size = len(pickle.dumps([first.compact(), second.compact()]))
    assert 40_000 < size < 50_000
