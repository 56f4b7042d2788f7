"""Worker processes of the local engine."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)

from flower_fgl import Run, simulate
from flower_fgl.client_apps.dispatch import FEWEST_STACKED
from flower_fgl.client_apps.runtime.state import ClientState, read_state
from flower_fgl.client_apps.stacked.grouping import num_stacks
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import write_tensors
from flower_fgl.protocols.parcels import Parcel
from flower_fgl.runs.files import flatten_config
from flower_fgl.simulation import local
from flower_fgl.simulation.local_grid import task_identity
from flower_fgl.simulation.workers import Worker, WorkerStates, host_of
from tests.engines.test_run import environment, numbers
from tests.support.short_runs import SMALL, shortened

pytestmark = pytest.mark.xdist_group("processes")


def test_a_parcel_holds_a_shared_record_once() -> None:
    weights = write_tensors({"w": torch.arange(6.0).reshape(2, 3)})
    with task_identity(1):
        messages = [
            Message(
                RecordDict({"weights": weights, "config": ConfigRecord({"n": k})}),
                dst_node_id=k + 2,
                message_type="train",
                group_id="4",
            )
            for k in range(3)
        ]
        lost = Message(Error(2, "no data"), reply_to=messages[0])
    parcel = Parcel.pack([*enumerate(messages), (3, lost)])
    assert len(parcel.records) == 4
    contents = list(parcel.contents())
    for k, content in enumerate(contents[:3]):
        assert content["config"]["n"] == k
        array = content["weights"]["w"].numpy()
        assert (array == weights["w"].numpy()).all()
    assert contents[0]["weights"] is contents[1]["weights"]  # a broadcast, read once
    assert parcel.letters[0][:3] == (0, "train", "4")
    assert parcel.letters[3][-1] == (2, "no data")


def test_a_parcel_returns_every_kind_of_record() -> None:
    content = RecordDict(
        {
            "weights": write_tensors({"w": torch.rand(2, 3), "b": torch.rand(3)}),
            "no weights": ArrayRecord({}),
            "metrics": MetricRecord({"loss": math.nan, "worker": 3}),
            "no metrics": MetricRecord(),
            "lists": MetricRecord({"a": [1, 2], "b": 0.5}),
            "config": ConfigRecord({"text": "ä", "is": True, "bytes": b"1"}),
        }
    )
    with task_identity(1):
        sent = Message(content, dst_node_id=3, message_type="train")
    parcel = pickle.loads(pickle.dumps(Parcel.pack([(0, sent), (1, sent)])))
    for found in parcel.contents():
        assert list(found) == list(content)
        for name, record in content.items():
            assert type(found[name]) is type(record)
            assert repr(found[name]) == repr(record), name


@pytest.mark.parametrize(
    ("method", "changes", "workers"),
    [
        ("fedavg", {"stacked": "false", "clients": 4}, 4),
        ("fedavg", {"stacked": "false", "threads": 3}, 2),
        ("fedavg", {"stacked": "false", "rounds": 19}, 1),
        ("fedavg", {"stacked": "false", "clients": 1}, 1),
        ("fedavg", {}, 1),  # ten clients that train together
        ("fedavg", {"clients": 3}, 3),
        ("fedavg", {"stacked": "false"}, 6),
        ("fedavg", {"num-neighbors": "5,5", "batch-size": 64}, 6),
    ],
)
def test_workers_are_chosen_for_large_clients_that_train_alone(
    method: str,
    changes: dict[str, Any],
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "num_cpus", lambda: 6)
    values = {"method": method, "clients": 10, "rounds": 20, "device": "cpu"}
    config = parse_config({**values, **changes})
    clients = config.clients
    monkeypatch.setattr(local, "require_memory", lambda *_, **__: None)
    monkeypatch.setattr(local, "open_store", lambda *_: None)
    for nodes, expected in ((2000 * clients, workers), (2000 * clients - 1, 1)):
        size = SimpleNamespace(num_nodes=nodes)
        monkeypatch.setattr(local, "graph_sizes", lambda _, size=size: (size, size))
        assert local.pick_workers(config) == expected


def test_a_run_without_a_number_of_workers_starts_those_that_save_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class StartedError(Exception):
        pass

    def start(*_: Any, workers: int, **__: Any) -> Any:
        raise StartedError(workers)

    monkeypatch.setattr(local, "LARGE_CLIENT", 5)
    monkeypatch.setattr(local, "LONG_RUN", 2)
    monkeypatch.setattr(local, "num_cpus", lambda: 2)
    monkeypatch.setattr("flower_fgl.simulation.workers.start_workers", start)
    settings = {**SMALL, "rounds": 2, "clients": 3, "device": "cpu"}
    with pytest.raises(StartedError, match="2"):
        simulate("fedavg", workers=None, **settings)
    assert simulate("fedavg", **settings).status == "completed"


def test_states_of_stacked_clients_are_pickled_alone() -> None:
    stack = torch.zeros(500, 30, 40)
    state = ClientState({"model/w": stack[7]}, {"round": 3})
    assert len(pickle.dumps(state)) > 1_000_000  # the memory of all clients
    compact = state.compact()
    assert len(pickle.dumps(compact)) < 10_000
    assert torch.equal(compact.tensors["model/w"], stack[7])
    assert compact.values == {"round": 3}


def test_checkpoints_of_workers_hold_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"model/w": torch.ones(2), "secure/seed": torch.ones(2)}
    answer = {4: ClientState(tensors, {"round": 1})}
    host = SimpleNamespace(states=SimpleNamespace(remote=lambda: answer))
    monkeypatch.setattr(ray, "get", lambda call: call)
    WorkerStates([Worker(host, "")], 5).save_states(7, tmp_path)
    assert list(read_state(tmp_path / "000004.safetensors").tensors) == ["model/w"]


@pytest.mark.parametrize(("clients", "most"), [(9, 2), (127, 2), (128, 4), (9999, 16)])
def test_a_stack_is_never_divided_between_few_workers(clients: int, most: int) -> None:
    stacks = num_stacks(clients)
    assert stacks == most
    for workers in range(1, stacks + 1):
        hosts = [{host_of(k, clients, workers) for k in range(s, clients, stacks)}
                 for s in range(stacks)]  # fmt: skip
        assert all(len(found) == 1 for found in hosts)
        assert set.union(*hosts) == set(range(workers))
    many = {host_of(k, clients, stacks + 1) for k in range(clients)}
    assert many == set(range(stacks + 1))


#: Ray leaves its processes' handles open, so it runs in a process of its own. The first
#: run starts Ray and ends it, the others share one.
PROGRAM = """
import json, sys, tempfile
import ray
from flower_fgl.simulation import local
from flower_fgl.simulation.flower.superlink import short_folder

stops, first, *others = json.loads(sys.argv[1])
local.run_local(first, workers=2)


def stop(row):
    if row["round"] == 4:
        raise KeyboardInterrupt


with tempfile.TemporaryDirectory(dir=short_folder()) as scratch:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False,
             _temp_dir=scratch)
    for values in others:
        local.run_local(values, workers=2)
    try:
        local.run_local(stops, on_round=stop)
    except KeyboardInterrupt:
        local.run_local({**stops, "resume": True}, workers=2)
    ray.shutdown()
"""


def config_of(alone: Run, folder: Path) -> dict[str, Any]:
    """Return the flat run config that repeats a run in another folder."""
    values = {k: v for k, v in flatten_config(alone.config) if k != "run-dir"}
    return {**values, "run-dir": str(folder)}


def run_apart(values: list[dict[str, Any]]) -> None:
    """Run the program on run configs."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(values)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(("fedavg", "fedpg"), marks=pytest.mark.engines),
        pytest.param(("opfgl", "fedsage+", "fedlog"), marks=pytest.mark.slow),
    ],
)
def test_workers_give_the_numbers_of_one_process(
    methods: tuple[str, ...], tmp_path: Path
) -> None:
    folder = str(tmp_path / "alone")
    settings = {**SMALL, "rounds": 5, "checkpoint_every": 1}
    alone = {"fedper": simulate("fedper", clients=3, output_dir=folder, **settings)}
    for method in methods:
        settings = shortened(method, SMALL)
        if method == "fedavg":  # two stacks, one in each worker
            settings |= {"clients": FEWEST_STACKED + 1, "hidden_channels": 17}
        settings = {"clients": 4, **settings}
        alone[method] = simulate(method, output_dir=folder, **settings)
    run_apart([config_of(run, tmp_path / m) for m, run in alone.items()])
    # fedper's run stops after round 4 in one process and resumes in two workers
    for method, run in alone.items():
        again = Run.load(tmp_path / method)
        assert again.status == "completed"
        assert numbers(again) == numbers(run), method
