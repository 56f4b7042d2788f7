from __future__ import annotations

import json
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flower_fgl import simulate
from flower_fgl.core.errors import RunError
from flower_fgl.methods import parse_config
from flower_fgl.nn import backbone_shapes, build_model, state_shapes
from flower_fgl.server_app import warn_of_many_clients
from flower_fgl.simulation import local, memory
from flower_fgl.simulation.memory import (
    GIB,
    available_memory,
    estimate_memory,
    require_memory,
)
from flower_fgl.simulation.run import run_one
from tests.support.typed_graphs import typed_bank, typed_owners

ROOT = Path(__file__).parents[2]


def estimate(
    engine: str = "local", workers: int = 1, *, is_cluster: bool = False, **values: Any
) -> dict[str, int]:
    config = parse_config({"clients": 8, "synthetic.nodes": 400, **values})
    return estimate_memory(
        config, engine=engine, workers=workers, is_cluster=is_cluster
    )


# 64 x 64 + 64 weights of layer 1, and 64 x 5 + 5 of layer 2
WEIGHTS = 4 * (64 * 64 + 64 + 64 * 5 + 5)


def test_client_states_are_the_model_and_adams_two_moments() -> None:
    assert estimate()["client states"] == 8 * 3 * WEIGHTS
    assert estimate(**{"optimizer-state": "reset"})["client states"] == (8 * WEIGHTS)
    assert estimate(optimizer="sgd")["client states"] == 8 * WEIGHTS


def test_client_states_of_a_ray_run_are_files() -> None:
    parts = estimate("ray", 2)
    assert "client states" not in parts
    assert parts["uploads"] == 8 * WEIGHTS
    assert parts["worker processes"] == 2 * memory.WORKER + memory.RAY + memory.FLOWER


def test_only_sampled_clients_upload_and_keep_a_state() -> None:
    parts = estimate(participation=0.25, rounds=2)
    assert parts["uploads"] == 2 * WEIGHTS
    assert parts["client states"] == int(8 * 3 * WEIGHTS * (1 - 0.75**2))
    assert estimate(participants=3)["uploads"] == 3 * WEIGHTS


def test_a_method_that_uploads_no_weights_has_no_uploads() -> None:
    assert "uploads" not in estimate(method="local")
    assert "uploads" not in estimate(method="fedproto")


def test_several_backbones_are_counted_by_their_number_of_clients() -> None:
    mixed = estimate(method="local", model="gcn,mlp:2x8")["client states"]
    pure = [
        estimate(method="local", model=model)["client states"]
        for model in ("gcn", "mlp:2x8")
    ]
    assert mixed == sum(pure) // 2


def test_every_worker_process_counts_up_to_one_per_client() -> None:
    assert estimate(workers=1)["worker processes"] == 0
    assert estimate(workers=3)["worker processes"] == (3 * memory.WORKER + memory.RAY)
    assert estimate(workers=50) == estimate(workers=8)


def test_workers_of_a_cluster_use_its_memory() -> None:
    parts = estimate(workers=3, is_cluster=True)
    assert {name for name, size in parts.items() if size} == {"uploads"}


def test_a_training_step_holds_the_layers_of_the_largest_client() -> None:
    values = {"clients": 1, "synthetic.nodes": 1000, "hidden-channels": 32}
    assert estimate(**values)["training"] == 3 * 4 * (32 + 5) * 1000
    assert estimate(**values, **{"batch-size": 10})["training"] == 0
    # 2 % of the nodes reach less than the whole graph
    assert estimate(**values, split="2/49/49")["training"] == 0


def test_a_step_on_a_typed_graph_holds_rows_of_nodes_and_of_messages(
    tmp_path: Path,
) -> None:
    banks = [typed_bank(number) for number in range(2)]
    values: dict[str, Any] = {"owners": typed_owners(tmp_path, *banks), "clients": 2}
    nodes, messages = 40 + 8 + 10, [len(b.messages.index.T) for b in banks]  # type: ignore[union-attr]
    for model, rows in (("rgcn", nodes), ("typed-gine", max(messages))):
        found = estimate(model=model, **values)["training"]
        assert found == 4 * 2 * 64 * (3 * nodes + 2 * rows)


def test_the_sizes_of_many_clients_follow_from_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = estimate()["graphs"]
    monkeypatch.setattr(memory, "SAMPLED", 3)
    assert estimate()["graphs"] == pytest.approx(exact, rel=0.02)


def test_a_run_that_does_not_fit_is_refused_before_it_writes_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: GIB // 2)
    values = {
        "clients": 40,
        "rounds": 1,
        "synthetic.nodes": 400,
        "output-dir": str(tmp_path / "runs"),
    }
    message = (
        r"at least 0\.9 GiB .*worker processes 0\.9.* 0\.5 GiB are free\..*workers"
    )
    with pytest.raises(RunError, match=message):
        run_one(values, engine="local", workers=2)
    with pytest.raises(RunError, match=r"at least 1\.2 GiB .*--engine local"):
        run_one(values, engine="ray", workers=1)
    monkeypatch.setattr(memory, "available_memory", lambda: 1)
    with pytest.raises(RunError, match="0 GiB are free"):
        simulate(clients=2, rounds=1, output_dir=str(tmp_path / "runs"))
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("model", ["gcn", "gin", "gcnii", "appnp", "gat", "sgc"])
def test_a_network_is_measured_without_its_memory(model: str) -> None:
    # 60 layers of a million channels would take 240 terabytes
    large = {"model": model, "num-layers": 60, "hidden-channels": 10**6}
    assert estimate(**large)["client states"] > 8 * 3 * 4 * 5 * 10**6
    small = {"in_channels": 5, "hidden_channels": 4, "num_classes": 3, "num_layers": 3}
    made = build_model(model, **small, dropout=0.5)
    assert backbone_shapes(model, **small) == state_shapes(made)


def _too_large(message: str) -> Any:
    def check(*_: object, **__: object) -> None:
        raise RuntimeError(message)

    return check


@pytest.mark.parametrize("start", ["simulate", "run_one"])
def test_a_failed_allocation_is_one_line(
    start: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "[enforce fail] DefaultCPUAllocator: can't allocate memory: 4 TB"
    monkeypatch.setattr(local, "run_server", _too_large(text))
    folder = str(tmp_path / "runs")
    values = {"clients": 2, "rounds": 1, "synthetic.nodes": 200, "output-dir": folder}
    call = partial(run_one, values, engine="local")
    if start == "simulate":
        call = partial(simulate, **values)
    with pytest.raises(RunError, match=r"memory is too small for this run: .* 4 TB"):
        call()
    assert not list(tmp_path.glob("runs/*"))


def test_any_error_at_the_start_leaves_no_empty_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local, "run_server", _too_large("a fault"))
    values = {"clients": 2, "rounds": 1, "synthetic.nodes": 200}
    with pytest.raises(RuntimeError, match=r"^a fault$"):
        run_one({**values, "output-dir": str(tmp_path / "runs")}, engine="local")
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"clients": 300, "partition": "uniform"}, "fewer clients"),
        ({"clients": 1, "synthetic.nodes": 9000}, "among more clients"),
    ],
)
def test_the_advice_fits_the_largest_part(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], advice: str
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    with pytest.raises(RunError, match=advice):
        require_memory(parse_config(values), engine="local")


def test_the_machine_has_memory() -> None:
    assert GIB // 10 < available_memory() < 1 << 50


@pytest.mark.parametrize("where", ["own folder", "container"])
@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_count(
    tmp_path: Path, version: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_swap = type("Swap", (), {"free": 0})
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: no_swap)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    limit, usage, prefix = (
        names if version == 1 else ("memory.max", "memory.current", "")
    )
    controller = "memory" if version == 1 else ""
    top = tmp_path / "sys/fs/cgroup" / controller
    group = top / "jobs/7" if where == "own folder" else top
    group.mkdir(parents=True)
    (group / limit).write_text("1000\n")
    (group / usage).write_text("700\n")
    text = f"{prefix}inactive_file 50\n{prefix}active_file 30\nanon 600\n"
    (group / "memory.stat").write_text(text)
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    number = 4 if version == 1 else 0
    (proc / "cgroup").write_text(f"9:cpu:/x\n{number}:{controller}:/jobs/7\n")
    assert memory._control_group_rooms(tmp_path) == [1000 - 700 + 80]
    (group / limit).write_text("max\n")
    assert memory._control_group_rooms(tmp_path) == []


def test_a_run_does_not_start_workers_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local, "LARGE_CLIENT", 5)
    monkeypatch.setattr(local, "LONG_RUN", 2)
    monkeypatch.setattr(local, "num_cpus", lambda: 2)
    monkeypatch.setattr(memory, "available_memory", lambda: GIB // 2)
    monkeypatch.setattr(
        "flower_fgl.simulation.workers.start_workers",
        lambda *_, **__: pytest.fail("started"),
    )
    values = {"clients": 2, "rounds": 4, "device": "cpu", "output-dir": str(tmp_path)}
    with caplog.at_level(logging.INFO):
        run = run_one(values, engine="auto")
    assert run.status == "completed"
    assert "stays in one process. The run needs at least 0.9 GiB" in caplog.text


@pytest.mark.parametrize(
    ("clients", "values", "expected"),
    [
        (200, {}, ""),
        (1000, {}, "24 to 60 s per round"),
        (1000, {"participation": 0.1}, "2 to 6 s per round"),
        (1000, {"participants": 500}, "12 to 30 s per round"),
    ],
)
def test_flowers_simulation_of_many_clients_says_what_it_costs(
    clients: int,
    values: dict[str, Any],
    expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_many_clients(parse_config({**values, "rounds": 100}), clients)
    assert expected in caplog.text
    assert len(caplog.records) == bool(expected)
    assert ("--engine local --workers N" in caplog.text) == bool(expected)


def test_a_ray_run_of_many_clients_begins_with_this_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "flower_fgl.simulation.run._run_ray", lambda *_: pytest.fail("started")
    )
    values = {"clients": 201, "partition": "uniform", "output-dir": str(tmp_path)}
    with caplog.at_level(logging.WARNING), pytest.raises(pytest.fail.Exception):
        run_one(values, engine="ray", workers=1)
    assert "Flower's simulation of 201 nodes" in caplog.text


MEASURE = """
import json, os, sys, tempfile
import psutil
sys.path.insert(0, "benchmarks")
from round_time import PeakMemory
from flower_fgl.simulation.local import check_run
from flower_fgl.simulation.memory import estimate_memory
from flower_fgl.simulation.run import run_one
import flower_fgl.client_apps.stacked.handling, flower_fgl.server_app

values, engine, workers = json.loads(sys.argv[1])
config = check_run(values)
# with one worker, the engines import what they need before they measure
needed = sum(estimate_memory(config, engine=engine, workers=workers).values())
with tempfile.TemporaryDirectory() as folder:
    if engine == "local":
        small = {"clients": 2, "rounds": 1, "output-dir": folder}
        run_one(small, engine="local", workers=1)
    before = psutil.Process().memory_full_info().pss
    peak = PeakMemory()
    peak.start()
    run_one({**values, "output-dir": folder}, engine=engine, workers=workers)
print(json.dumps([needed, peak.stop() * 2**30 - before]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "workers", "values"),
    [
        ("local", 1, {"clients": 100, "synthetic.features": 8000}),
        ("local", 1, {"clients": 100, "synthetic.features": 8000, "stacked": "false"}),
        (
            "local",
            1,
            {"clients": 1, "synthetic.nodes": 100_000, "hidden-channels": 256},
        ),
        ("local", 2, {"clients": 4}),
        ("ray", 1, {"clients": 4}),
    ],
    ids=["states", "states one by one", "training", "workers", "ray"],
)
def test_the_estimate_is_at_most_the_measured_peak_and_at_least_half(
    engine: str, workers: int, values: dict[str, Any]
) -> None:
    arguments = json.dumps([{"rounds": 2, "device": "cpu", **values}, engine, workers])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    needed, measured = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{needed / GIB:.2f} GiB estimated, {measured / GIB:.2f} GiB measured")
    assert needed <= measured <= 2 * needed
