"""Real SuperNodes on a real SuperLink."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

from flower_fgl import Run, simulate
from flower_fgl.core.flower_internals import recorddict_from_proto
from flower_fgl.core.node_settings import node_config_text
from flower_fgl.datasets.graph_files.csv_tables import hash_ids
from flower_fgl.protocols.base import read_tensors
from flower_fgl.protocols.fedgcn import BOUNDARY
from flower_fgl.protocols.fedsageplus import JUDGE
from flower_fgl.runs.model_file import read_card
from flower_fgl.simulation.local import run_config_of
from tests.client_apps.runtime.test_owners import NAMES, saved
from tests.engines.test_run import numbers
from tests.strategies.test_fedgcn import write_csv
from tests.support.flower_deployment import deployment, wait_until, workers_of
from tests.support.owners import CLASSES, in_own_order, owner_graphs, run_owners
from tests.support.recorded import Node
from tests.support.short_runs import SMALL

pytestmark = pytest.mark.xdist_group("supernodes")

RECORDER = """
from pathlib import Path
from uuid import uuid4

from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.core.flower_internals import recorddict_to_proto


class Recorder(DispatchingClientApp):
    def __call__(self, message, context):
        sent = recorddict_to_proto(message.content).SerializeToString()
        reply = super().__call__(message, context)
        owner = Path(context.node_config["graph"]).name
        place = Path(__file__).parent / f"{message.metadata.message_type}-{owner}-{uuid4()}"
        place.mkdir()
        (place / "sent").write_bytes(sent)
        if reply.has_content():
            got = recorddict_to_proto(reply.content).SerializeToString()
            (place / "reply").write_bytes(got)
        return reply


app = Recorder()
"""
"""The app's ClientApp, which writes down what a SuperNode receives and sends."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "idle",
    [
        pytest.param(0, marks=pytest.mark.engines),
        pytest.param(600, marks=pytest.mark.slow),
    ],
)
def test_two_supernodes_give_the_numbers_of_the_local_engine(
    tmp_path: Path, idle: int
) -> None:
    # without a worker every message starts a process: fewer of them
    quick = {"evaluate": "both"} if idle else {"evaluate": "local", "rounds": 2}
    settings: dict[str, Any] = {**SMALL, **quick}
    expected = simulate("fedprox", clients=2, output_dir=str(tmp_path), **settings)
    values = {k: v for k, v in expected.config.items() if not isinstance(v, dict)}
    values |= {f"synthetic.{k}": v for k, v in expected.config["synthetic"].items()}
    values |= {f"fedprox.{k}": v for k, v in expected.config["fedprox"].items()}
    folder = tmp_path / "deployed"
    values["run-dir"] = str(folder)
    node = f"num-partitions=2 worker-idle={idle}"
    nodes = [f"partition-id={i} {node}" for i in range(2)]
    with deployment(tmp_path / "deployment", nodes) as stage:
        run_id = stage.submit(values)
        assert stage.wait_for_end(run_id) == "finished:completed", stage.logs()
        log = stage.log(run_id)
        supernodes = [process.pid for process in stage.nodes]
        workers = [len(workers_of(pid)) for pid in supernodes]
        assert workers == ([1, 1] if idle else [0, 0])
        for setting in ("link", "edge") if idle else ():
            pairs = {**values, "setting": setting, "run-dir": str(tmp_path / setting)}
            pairs |= {"weight-decay": 0.0}
            assert stage.run(pairs) == "finished:completed", stage.logs()
    wait_until(lambda: not [one for pid in supernodes for one in workers_of(pid)], 10)
    assert "handled without a worker" not in stage.logs()
    run = Run.load(folder)
    assert run.status == "completed"
    assert run.summary["engine"] == "deployment"
    assert numbers(run) == numbers(expected)
    for setting in ("link", "edge") if idle else ():
        again = simulate(
            "fedprox", clients=2, output_dir=str(tmp_path), setting=setting,
            weight_decay=0.0, **settings,
        )  # fmt: skip
        assert numbers(Run.load(tmp_path / setting)) == numbers(again)
    # the log has a line per round, the table of the results and the run folder
    for line in ("Round 1 of 2: loss", *run.table().splitlines()):
        assert line in log


@pytest.mark.engines
@pytest.mark.timeout(400)
def test_supernodes_that_host_clients_give_the_numbers_of_the_local_engine(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 2}
    expected = simulate("fedavg", clients=12, output_dir=str(tmp_path), **settings)
    values = run_config_of(
        method="fedavg",
        dataset="synthetic",
        clients=12,
        seed=0,
        settings={**settings, "clients_per_node": 6, "run_dir": str(tmp_path / "run")},
    )
    states = tmp_path / "states"
    nodes = [
        # one keeps states in files, and one in memory
        f'partition-id=0 num-partitions=2 worker-idle=600 state-dir="{states}"',
        "partition-id=1 num-partitions=2",
    ]
    with deployment(tmp_path / "deployment", nodes) as stage:
        assert stage.run(values) == "finished:completed", stage.logs()
    assert "handled without a worker" not in stage.logs()
    run = Run.load(tmp_path / "run")
    assert run.summary["engine"] == "deployment"
    assert numbers(run) == numbers(expected)
    assert len(list(states.glob("*.safetensors"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("idle", [0, 600])
def test_errors_of_a_deployment_are_one_message(tmp_path: Path, idle: int) -> None:
    folder = tmp_path / "deployment"
    node = f"num-partitions=2 worker-idle={idle}"
    nodes = [f"partition-id={i} {node}" for i in range(2)]
    values: dict[str, Any] = {"method": "fedprox", "clients": 2, "rounds": 2}
    with deployment(folder, nodes) as stage:
        wrong = stage.submit({**values, "lr": -1.0, "run-dir": str(tmp_path / "no")})
        assert stage.wait_for_end(wrong) == "finished:failed"
        refusal = stage.log(wrong)
        # the server has no data, so only the clients can find that a file is missing
        own = {"dataset": str(tmp_path / "absent.npz"), "run-dir": str(tmp_path / "2")}
        absent = stage.submit({**values, **own})
        assert stage.wait_for_end(absent) == "finished:failed"
        unread = stage.log(absent)
    assert "lr must be > 0, got -1.0" in refusal
    assert "Traceback" not in refusal
    # an error in a client is in the log of its SuperNode and of the run
    nodes_logs = list(folder.glob("flower-supernode-*.log"))
    assert len(nodes_logs) == 2
    for text in [unread, *(log.read_text() for log in nodes_logs)]:
        assert "absent.npz" in text
        assert "Traceback" not in text


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_killed_deployment_goes_on_and_gets_more_rounds_with_the_same_numbers(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {**SMALL, "rounds": 3, "checkpoint_every": 1}
    expected = simulate("fedavg", clients=2, output_dir=str(tmp_path), **settings)
    values = {k: v for k, v in expected.config.items() if not isinstance(v, dict)}
    values |= {f"synthetic.{k}": v for k, v in expected.config["synthetic"].items()}
    folder = tmp_path / "deployed"
    values["run-dir"] = str(folder)
    nodes = [
        f'partition-id={i} num-partitions=2 state-dir="{tmp_path}/owner-{i}"'
        for i in range(2)
    ]
    with deployment(tmp_path / "first", nodes) as stage:
        stage.submit(values)
        end = time.monotonic() + 150
        lines = folder / "rounds.jsonl"
        while not lines.exists() or lines.read_bytes().count(b"\n") < 2:
            assert time.monotonic() < end, stage.logs()
            time.sleep(0.1)
        time.sleep(1)  # into round 3
    assert Run.load(folder).status == "running"  # all killed
    with deployment(tmp_path / "second", nodes) as stage:
        values |= {"resume": True, "keep-checkpoint": True}
        status = stage.run(values, seconds=200)
        assert status == "finished:completed", stage.logs()
        run = Run.load(folder)
        assert run.status == "completed"
        assert numbers(run) == numbers(expected)
        status = stage.run({**values, "rounds": 4}, seconds=200)
        assert status == "finished:completed", stage.logs()
    longer = simulate(
        "fedavg", clients=2, output_dir=str(tmp_path), **{**settings, "rounds": 4}
    )
    assert numbers(Run.load(folder)) == numbers(longer)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_owners_on_supernodes_agree_on_classes_and_leave_one_out_that_does_not_fit(
    tmp_path: Path,
) -> None:
    graphs = owner_graphs()
    own = [
        graphs[0],
        in_own_order(graphs[1], ("cold", "flu")),
        in_own_order(graphs[2], ("well", "flu", "cold")),
    ]
    nodes = saved(tmp_path / "graphs", own)
    expected = run_owners(nodes, tmp_path / "expected")
    (tmp_path / "graphs" / "oak.npz").write_bytes(b"no archive")
    values = {k: v for k, v in expected.config.items() if not isinstance(v, dict)}
    values |= {f"fedavg.{k}": v for k, v in expected.config["fedavg"].items()}
    values |= {"run-dir": str(tmp_path / "deployed"), "clients": 4}
    values["join-timeout"] = 120.0
    files = [node["graph"] for node in nodes] + [str(tmp_path / "graphs" / "oak.npz")]
    configs = [f'graph="{file}"' for file in files]
    with deployment(tmp_path / "deployment", configs) as stage:
        status = stage.run(values, seconds=400)
        assert status == "finished:completed", stage.logs()
        stopped = {**values, "rounds": 50, "run-dir": str(tmp_path / "stopped")}
        assert stage.stop_run_in_round(stopped) == "finished:stopped"
    assert Run.load(tmp_path / "stopped").rounds
    run = Run.load(tmp_path / "deployed")
    assert run.summary["class_names"] == list(CLASSES)
    assert [one["name"] for one in run.summary["refused"]] == ["oak"]
    assert numbers(run) == numbers(expected)
    # without model-dir, models are where the SuperNodes were started
    kept = sorted((tmp_path / "deployment" / "models").iterdir())
    assert sorted({f.name.split("-")[1] for f in kept}) == list(NAMES)
    card = read_card(next(f for f in kept if "-cedar-" in f.name))
    assert card is not None
    assert card.class_names == CLASSES


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_limits_of_owners_hold_on_supernodes(tmp_path: Path) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs())
    settings = {"rounds": 2, "evaluate": "both"}
    expected = run_owners(nodes, tmp_path / "expected", **settings)
    values = {k: v for k, v in expected.config.items() if not isinstance(v, dict)}
    values |= {f"fedavg.{k}": v for k, v in expected.config["fedavg"].items()}
    values |= {"run-dir": str(tmp_path / "deployed"), "join-timeout": 120.0}
    configs = [
        f'graph="{node["graph"]}" scores="rounded" worker-idle=60' for node in nodes
    ]
    with deployment(tmp_path / "deployment", configs) as stage:
        assert stage.run(values) == "finished:completed", stage.logs()
        other = {"split": "30/30/40", "run-dir": str(tmp_path / "other")}
        run_id = stage.submit({**values, **other})
        assert stage.wait_for_end(run_id) == "finished:failed", stage.logs()
        log = " ".join(stage.log(run_id).split())
    for name in NAMES:
        assert f"{name} refuses the run: the run has split = 30/30/40" in log
    assert not Run.load(tmp_path / "other").rounds
    rows = {(r["round"], r["partition_id"]): r for r in expected.clients if r["round"]}
    run = Run.load(tmp_path / "deployed")
    found = [row for row in run.clients if row["round"]]
    assert len(found) == len(rows)
    for row in found:
        exact = rows[row["round"], row["partition_id"]]
        assert row["loss"] == round(exact["loss"], 1)
        for mode, columns in exact["metrics"].items():
            for column, scores in columns.items():
                mine = row["metrics"][mode][column]
                assert mine == {
                    key: value if value is None else round(value, 2)
                    for key, value in scores.items()
                }


def on_the_wire(folder: Path, kind: str, part: str) -> list[RecordDict]:
    """Return what the nodes of a recorded deployment received or sent."""
    files = sorted(folder.glob(f"{kind}-*/{part}"))
    read = ProtoRecordDict.FromString
    return [recorddict_from_proto(read(file.read_bytes())) for file in files]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sums_identifiers_and_judges_keep_to_the_limits_on_supernodes(
    tmp_path: Path,
) -> None:
    (key := tmp_path / "id.key").write_text("5" * 64)
    nodes = []
    for name, client in zip("abcd", owner_graphs(4, "fedgcn"), strict=True):
        assert client.outside is not None
        write_csv(folder := tmp_path / "files" / name, client, client.outside)
        home = {"state-dir": str(tmp_path / "states"), "id-key": str(key)}
        nodes.append({"graph": str(folder), "worker-idle": 60, **home})

    def values(name: str, method: str, **settings: Any) -> dict[str, Any]:
        shared = {**SMALL, "rounds": 1, "join_timeout": 120.0, "evaluate": "local"}
        given = {**shared, "run_dir": str(tmp_path / name), **settings}
        return run_config_of(
            method=method, dataset="synthetic", clients=4, seed=0, settings=given
        )

    few: dict[str, Any] = {"fedsage+": {"gen_rounds": 2, "peers": 1}}
    grouped = values("c", "fedsage+", min_class_count=5, **few)
    stage_folder = tmp_path / "stage"
    configs = [node_config_text(node) for node in nodes]
    with deployment(stage_folder, configs, client_module=RECORDER) as stage:
        masked: dict[str, Any] = {"secure_aggregation": True}
        plan = [
            ("completed", values("a", "fedavg", **masked)),
            # the same model, summed over three of the four clients
            ("failed", values("b", "fedavg", **masked, participation=0.75)),
            ("completed", grouped),
            ("completed", values("d", "fedgcn")),
        ]
        logs = []
        for status, run in plan:
            run_id = stage.submit(run)
            ended = stage.wait_for_end(run_id)
            assert ended == f"finished:{status}", stage.log(run_id)
            logs.append(" ".join(stage.log(run_id).split()))
    assert "answered an equal download under another roster" in logs[1]
    # identifiers: none is the hash of a guess
    guesses = torch.from_numpy(hash_ids([f"node {i}" for i in range(300)]))
    borders = on_the_wire(stage_folder, f"query.{BOUNDARY}", "reply")
    assert len(borders) == 4
    for content in borders:
        found = read_tensors(content, BOUNDARY, is_checked=False)
        assert len(found["own"])
        sent_ids = torch.cat([found["own"], found["outside"]])
        assert not torch.isin(sent_ids, guesses).any()
    # judges: the gradients of groups of nodes, as in one process, not of single nodes
    kind = f"query.{JUDGE}-a"
    shown = on_the_wire(stage_folder, kind, "sent")
    judged = on_the_wire(stage_folder, kind, "reply")
    assert shown
    for sent, reply in zip(shown, judged, strict=True):
        for least in (5, 1):
            alone = {k: v for k, v in nodes[0].items() if k == "graph"}
            node = Node(alone, {**grouped, "min-class-count": least})
            same = node.send(sent, f"query.{JUDGE}")
            assert (same["gradient"] == reply["gradient"]) == (least == 5)
