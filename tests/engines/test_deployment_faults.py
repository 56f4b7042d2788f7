"""What goes wrong on real SuperNodes and a real SuperLink, and what the run makes of it."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from flower_fgl import Run, simulate
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.simulation.local import run_config_of
from tests.engines.test_run import numbers
from tests.support.flower_deployment import deployment, family_of
from tests.support.owners import owner_graphs
from tests.support.short_runs import SMALL

pytestmark = pytest.mark.xdist_group("processes")

FAULTY = '''
"""The app's ClientApp, but for what a node config's `faults` says of a round."""

import time

import torch

from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.protocols.base import write_tensors
from flwr.app import Array, ArrayRecord


def garbage(content):
    name = next(iter(content["weights"]))
    content["weights"][name] = Array("float32", (1,), "numpy.ndarray", b"\\\\x80garbage")


def huge(content):
    content["weights"] = write_tensors({"w": torch.zeros(2_000_000)})


def other(content):
    del content["weights"]
    content["prototypes"] = write_tensors({"values": torch.zeros(3, 1, 8)})


def silent(content):
    time.sleep(75)


class Faulty(DispatchingClientApp):
    def __call__(self, message, context):
        faults = context.node_config.pop("faults", "")
        try:
            reply = super().__call__(message, context)
        finally:
            context.node_config["faults"] = faults  # the SuperNode keeps the context
        if message.metadata.message_type == "train":
            number = int(message.content["config"]["server-round"])
            for fault in str(faults).split():
                when, _, name = fault.partition(":")
                if int(when) == number:
                    globals()[name](reply.content)
        return reply


app = Faulty()
'''


def flat(run: Run) -> dict[str, Any]:
    """Return the run config that repeats a run."""
    values = {k: v for k, v in run.config.items() if not isinstance(v, dict)}
    values |= {f"synthetic.{k}": v for k, v in run.config["synthetic"].items()}
    values |= {f"fedavg.{k}": v for k, v in run.config["fedavg"].items()}
    return values


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_outlives_nodes_that_lie_die_and_say_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 6, "evaluate_every": 6}
    calm = simulate("fedavg", clients=3, output_dir=str(tmp_path), **settings)
    folder = tmp_path / "deployed"
    values = {**flat(calm), "run-dir": str(folder)}
    values |= {"round-timeout": 60.0, "max-message-mb": 5.0}
    nodes = [
        f'partition-id={i} num-partitions=3 state-dir="{tmp_path}/owner-{i}"'
        for i in range(3)
    ]
    nodes[2] += ' faults="1:garbage 2:huge 3:silent 5:other"'
    with deployment(tmp_path / "stage", nodes, client_module=FAULTY) as stage:
        run_id = stage.submit(values)
        stage.wait_for_round(folder, 1)
        time.sleep(1)  # into round 2
        stage.kill(stage.nodes[1])
        stage.nodes[1] = stage.start_node(nodes[1])
        stage.wait_for_round(folder, 2)
        late = stage.start_node("partition-id=3 num-partitions=4")
        assert stage.wait_for_end(run_id) == "finished:completed", stage.logs()
        for one in (late, stage.nodes[2]):  # then two nodes hold partition 1
            one.terminate()
            one.wait(timeout=60)
        stage.start_node("partition-id=1 num-partitions=3")
        twins = tmp_path / "twins"
        assert stage.run({**values, "run-dir": str(twins)}) == "finished:failed"
    run = Run.load(folder)
    failures = {
        (row["round"], failure["partition_id"]): failure["reason"]
        for row in run.rounds
        for failure in row["failures"]
    }
    for where, reason in (
        ((1, 2), "holds no plain array"),
        ((2, 1), "no reply within 60 s|Node Unavailable"),  # whichever is first
        ((2, 2), "more than max-message-mb = 5"),
        ((3, 2), "no reply within 60 s"),
        ((5, 2), r"unexpected records \['prototypes'\]"),
    ):
        assert re.search(reason, failures.pop(where))
    assert not failures
    # client 1 is back in round 3; client 2 is not asked in round 4, after its silence; the
    # late joiner never takes part
    assert [row["replies"] for row in run.rounds] == [2, 1, 2, 2, 2, 3]
    assert sum(run.summary["failures"].values()) == 5
    assert "same partition: [1]" in Run.load(twins).summary["error"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_superlink_that_was_restarted_takes_the_run_up_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 4, "checkpoint_every": 1}
    calm = simulate("fedavg", clients=2, output_dir=str(tmp_path), **settings)
    folder = tmp_path / "deployed"
    values = {**flat(calm), "run-dir": str(folder)}
    nodes = [
        f'partition-id={i} num-partitions=2 state-dir="{tmp_path}/owner-{i}"'
        for i in range(2)
    ]
    with deployment(tmp_path / "stage", nodes, keeps_state=True) as stage:
        run_id = stage.submit(values)
        stage.wait_for_round(folder, 2)
        time.sleep(1)  # into round 3
        stage.kill(stage.superlink)
        assert Run.load(folder).status == "running"
        stage.start_superlink()
        # the nodes were left alone: they connect again by themselves
        status = stage.run({**values, "resume": True}, seconds=300)
        assert status == "finished:completed", stage.logs()
        assert stage.wait_for_end(run_id, 120) == "finished:failed"
    assert numbers(Run.load(folder)) == numbers(calm)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_run_whose_superlink_was_killed_says_so_and_resumes(
    tmp_path: Path, is_reaped: bool
) -> None:
    """Only the SuperLink dies; Flower notices that only if its parent reaps it."""
    settings: dict[str, Any] = {**SMALL, "rounds": 4, "checkpoint_every": 1}
    calm = simulate("fedavg", clients=2, output_dir=str(tmp_path), **settings)
    folder = tmp_path / "deployed"
    values = {**flat(calm), "run-dir": str(folder)}
    nodes = [
        f'partition-id={i} num-partitions=2 state-dir="{tmp_path}/owner-{i}"'
        for i in range(2)
    ]
    with deployment(tmp_path / "stage", nodes, keeps_state=True) as stage:
        stage.submit(values)
        stage.wait_for_round(folder, 2)
        family = family_of(stage.superlink)
        stage.superlink.kill()
        clock = time.monotonic()
        if is_reaped:
            stage.superlink.wait(timeout=20)
        while Run.load(folder).status == "running":
            assert time.monotonic() - clock < 120, stage.logs()
            time.sleep(0.5)
        assert Run.load(folder).status in ("failed", "interrupted")
        error = Run.load(folder).summary["error"]
        assert re.search("SuperLink at .* could not be reached|SuperLink ended", error)
        stage.superlink.wait(timeout=20)
        for process in family:  # a SuperExec that noticed nothing
            if process.is_running():
                process.kill()
        stage.start_superlink()
        status = stage.run({**values, "resume": True}, seconds=300)
        assert status == "finished:completed", stage.logs()
    assert numbers(Run.load(folder)) == numbers(calm)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_owner_that_comes_late_joins_and_trains(tmp_path: Path) -> None:
    folder, rounds = tmp_path / "deployed", 5
    (tmp_path / "graphs").mkdir()
    nodes = []
    for name, graph in zip(("b", "c", "a-late"), owner_graphs(), strict=True):
        save_client_graph(tmp_path / "graphs" / f"{name}.npz", graph)
        place = f'model-dir="{tmp_path}/models-{name}"'
        nodes.append(f'graph="{tmp_path}/graphs/{name}.npz" {place}')
    settings = {**SMALL, "rounds": rounds, "min_clients": 2, "join_timeout": 12.0}
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=3, seed=0, settings=settings
    )
    with deployment(tmp_path / "stage", nodes[:2]) as stage:
        run_id = stage.submit({**values, "run-dir": str(folder)})
        stage.wait_for_round(folder, 1)
        stage.start_node(nodes[2])
        assert stage.wait_for_end(run_id) == "finished:completed", stage.logs()
    run = Run.load(folder)
    (late,) = (row for row in run.clients if row["round"] and "num_train" in row)
    first = late["round"]
    assert (late["name"], late["partition_id"]) == ("a-late", 2)
    assert [r["replies"] for r in run.rounds] == [2] * (first - 1) + [3] * (
        rounds + 1 - first
    )
    assert not any(row["failures"] for row in run.rounds)
    assert list((tmp_path / "models-a-late").glob("*-a-late-*/model.safetensors"))
