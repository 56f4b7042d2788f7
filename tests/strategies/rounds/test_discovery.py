"""One node that answers badly, or not at all, before round 1."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flower_fgl import Run
from flower_fgl.core.errors import RunError
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.methods import parse_config
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.rounds.discovery import _each_reason_once, describe_nodes
from tests.strategies.rounds.faulty_nodes import Plan, faulty, places_of
from tests.strategies.rounds.test_rejoining import Nodes, run_with
from tests.support.owners import owner_graphs, run_owners
from tests.support.short_runs import comparable

DESCRIBE = "query.describe"


def nothing(grid: Nodes, number: int) -> None:
    return


def describing(pid: int, fault: str, times: int = 1000) -> Plan:
    """Plan a fault of one node's first answers to the describe message."""

    def plan(node: int, kind: str, number: int) -> str:
        return fault if (node, kind) == (pid, DESCRIBE) and number <= times else ""

    return plan


def run(folder: Path, plan: Plan, **settings: Any) -> Run:
    settings = {"method": "fedavg", "join_timeout": 60.0, "rounds": 2, **settings}
    return run_with(folder, nothing, grid_type=faulty(plan), **settings)


@pytest.mark.parametrize("fault", ["garbage", "raise"])
def test_one_bad_description_does_not_end_a_run_of_partition_ids(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = time.monotonic()
    done = run(tmp_path / "run", describing(1, fault), min_replies=2)
    assert time.monotonic() - clock < 30  # less than join-timeout
    assert done.status == "completed"
    assert [row["replies"] for row in done.rounds] == [2, 2]
    assert [c["partition_id"] for c in done.clients if "num_train" in c] == [0, 2]
    (refused,) = done.summary["refused"]
    assert refused["name"].startswith("node ")
    assert ("malformed" if fault == "garbage" else "bug") in refused["reason"]
    assert f"{refused['name']} does not take part" in caplog.text


def test_nodes_are_described_in_order_and_a_dead_worker_is_named_by_its_client() -> (
    None
):
    asked = []

    def client(message: Message, context: Context) -> Message:
        asked.append(context.node_config["partition-id"])
        raise RuntimeError("the actor died" if asked[-1] == 5 else "no room")

    class WorkerGrid(LocalGrid):
        """A grid whose name says that its clients are in worker processes."""

    with task_identity(5):
        grid = WorkerGrid(client, 8)
        nodes = grid.get_node_ids()
        with pytest.raises(RunError, match=r"that ran client 5 died"):
            describe_nodes(grid, nodes, parse_config({}))
        assert asked == list(range(8))
        assert list(describe_nodes(grid, nodes[:5], parse_config({}))) == nodes[:5]


def lying(*pids: int, **changes: Any) -> type[Nodes]:
    """Return a grid on which clients change entries of their descriptions."""

    class Liar(Nodes):
        def _handle(self, key: str, sent: Message, content: RecordDict) -> Message:
            reply = super()._handle(key, sent, content)
            context = self.contexts[sent.metadata.dst_node_id]
            is_liar = int(context.node_config["partition-id"]) in pids
            if sent.metadata.message_type == DESCRIBE and is_liar:
                info: Any = reply.content["info"]
                reply.content["info"] = ConfigRecord({**info, **changes})
            return reply

    return Liar


def run_lying(folder: Path, grid: type[Nodes], **settings: Any) -> Run:
    settings = {"method": "fedavg", "join_timeout": 1.0, "rounds": 1, **settings}
    return run_with(folder, nothing, grid_type=grid, **settings)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num-features": 5}, "its feature width differs .*: 5 instead of 8"),
        ({"class-names": ["a", "b", "c"]}, "its list of class names differs"),
        ({"partition-sha256": "0" * 64}, "its partition differs"),
        (
            {"num-partitions": 900},
            "its number of partitions differs .*: 900 instead of 3",
        ),
        ({"model": "gat"}, 'its model is "gat", the run has "gcn"'),
    ],
)
@pytest.mark.parametrize("clients", [0, 3])
def test_a_client_that_differs_from_most_others_does_not_end_the_run(
    changes: dict[str, Any], reason: str, clients: int, tmp_path: Path
) -> None:
    done = run_lying(tmp_path, lying(0, **changes), clients=clients)
    assert [row["replies"] for row in done.rounds] == [2]
    (refused,) = done.summary["refused"]
    assert re.search(reason, refused["reason"])
    assert re.fullmatch(r"node \d+ \(partition 0\)", refused["name"])


def test_without_a_majority_the_run_ends_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"disagree on the feature width: 5 on clients"):
        run_lying(tmp_path, lying(0, 1, **{"num-features": 5}), clients=4, present=4)


def test_a_claim_of_another_clients_partition_costs_these_two_only(
    tmp_path: Path,
) -> None:
    twins = lying(4, **{"partition-id": 1})
    done = run_lying(tmp_path / "five", twins, clients=5, present=5)
    assert [row["replies"] for row in done.rounds] == [3]
    for refused in done.summary["refused"]:
        assert "2 nodes have partition-id = " in refused["reason"]
    assert len(done.summary["refused"]) == 2
    with pytest.raises(RunError, match=r"Several nodes hold the same partition: \[1\]"):
        run_lying(tmp_path / "three", lying(2, **{"partition-id": 1}))


def test_an_owners_claim_of_anothers_partition_costs_these_two_only(
    tmp_path: Path,
) -> None:
    nodes = []
    for number, graph in enumerate(owner_graphs(5)):
        path = tmp_path / f"o{number}.npz"
        save_client_graph(path, graph)
        claim = 1 if number == 4 else number
        nodes.append(
            {
                "graph": str(path),
                "name": f"o{number}",
                "partition-id": claim,
                "num-partitions": 5,
            }
        )
    done = run_owners(nodes, tmp_path / "five", rounds=1)
    assert [row["replies"] for row in done.rounds] == [3]
    names = sorted(refused["name"] for refused in done.summary["refused"])
    assert names == ["o1", "o4"]
    with pytest.raises(RunError, match=r"Several nodes hold the same partition: \[1\]"):
        run_owners([nodes[k] for k in (0, 1, 4)], tmp_path / "three", rounds=1)


def test_an_owner_that_the_run_leaves_out_is_turned_away_by_its_name(
    tmp_path: Path,
) -> None:
    nodes = []
    for name, graph in zip(("ash", "birch", "cedar"), owner_graphs(), strict=True):
        save_client_graph(tmp_path / f"{name}.npz", graph)
        nodes.append({"graph": str(tmp_path / f"{name}.npz"), "name": name})
    done = run_owners(nodes, tmp_path / "run", without_owners="birch")
    (refused,) = done.summary["refused"]
    assert refused == {"name": "birch", "reason": "without-owners leaves it out"}
    never = run_owners([nodes[0], nodes[2]], tmp_path / "never")
    assert comparable(done) == comparable(never)


def test_a_bad_description_leaves_too_few_for_min_replies(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="min-replies = 3"):
        run(tmp_path / "run", describing(1, "garbage"), min_replies=3)


def test_a_bad_description_leaves_too_few_for_min_clients(tmp_path: Path) -> None:
    plan = describing(1, "garbage")
    with pytest.raises(
        RunError, match=r"Only 2 of 3 .*min-clients = 3.*node \d+: .*malformed"
    ):
        run(tmp_path / "run", plan, min_clients=3, join_timeout=0.3)
    done = run(tmp_path / "two", plan, min_clients=2, join_timeout=0.3)
    assert [row["replies"] for row in done.rounds] == [2, 2]


def test_if_no_description_can_be_used_the_run_fails_at_once(tmp_path: Path) -> None:
    def plan(node: int, kind: str, number: int) -> str:
        return "raise" if kind == DESCRIBE else ""

    clock = time.monotonic()
    with pytest.raises(RunError) as caught:
        run(tmp_path / "run", plan)
    # equal reasons come once, without the marks that Flower puts around them
    names = ", ".join([r"node \d+"] * 3)
    text = str(caught.value).partition("\n")[0]
    assert re.fullmatch(rf"No client can take part\. {names}: bug", text)
    assert time.monotonic() - clock < 30


def test_a_reason_of_many_nodes_names_the_first_ones() -> None:
    pairs = [(f"node {k}", "gone") for k in range(8)] + [("ash", "no file")]
    assert _each_reason_once(pairs) == (
        "node 0, node 1, node 2, node 3, node 4 and 3 more: gone; ash: no file"
    )


@pytest.mark.thorough
def test_a_lost_node_is_asked_again_until_it_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    calm = run(tmp_path / "calm", describing(1, ""))
    done = run(tmp_path / "run", describing(1, "silent", times=2), join_timeout=20.0)
    assert comparable(done) == comparable(calm)
    assert "has not described itself (Node Unavailable)" in caplog.text
    assert "It is asked again for join-timeout = 20 s" in caplog.text
    assert caplog.text.count("has not described itself") == 1
    assert "answers again" in caplog.text


def test_a_node_that_stays_lost_ends_the_run_if_all_must_be_there(
    tmp_path: Path,
) -> None:
    clock = time.monotonic()
    with pytest.raises(
        RunError,
        match=r"Only 2 of 3 clients described .* 1 s: node \d+: Node Unavailable",
    ):
        run(tmp_path / "run", describing(1, "silent"), join_timeout=1.0)
    assert 1 < time.monotonic() - clock < 30


def test_a_lost_node_joins_a_run_that_may_start_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    is_back: list[bool] = []

    def plan(node: int, kind: str, number: int) -> str:
        return "silent" if (node, kind) == (1, DESCRIBE) and not is_back else ""

    def after(grid: Nodes, number: int) -> None:
        if number == 2:
            is_back.append(True)

    done = run_with(
        tmp_path / "run", after, grid_type=faulty(plan), method="fedavg", rounds=4,
        min_clients=2, join_timeout=0.2,
    )  # fmt: skip
    assert [row["replies"] for row in done.rounds] == [2, 2, 3, 3]
    assert "sent no reply in round 1. It is asked again in round 3." in caplog.text


def test_a_bad_node_too_many_does_not_end_the_run(tmp_path: Path) -> None:
    def plan(node: int, kind: str, number: int) -> str:
        return "garbage" if node == 7 else ""

    grid_type = faulty(plan)
    start = grid_type.__init__

    def init(self: Nodes, *given: Any, **more: Any) -> None:
        start(self, *given, **more)
        self.start(**{"partition-id": 7, "num-partitions": 3})

    grid_type.__init__ = init  # type: ignore[method-assign]
    done = run_with(
        tmp_path / "run", nothing, grid_type=grid_type, method="fedavg", rounds=2
    )
    assert [row["replies"] for row in done.rounds] == [3, 3]


def test_a_run_that_left_a_node_out_resumes_without_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "method": "fedavg",
        "rounds": 4,
        "checkpoint_every": 1,
        "engine": "deployment",
    }

    def stop(grid: Nodes, number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    bad = faulty(describing(1, "garbage"))
    places = {name: places_of(tmp_path, name) for name in "ab"}
    whole = run_with(
        tmp_path / "whole", nothing, places["a"], grid_type=bad, **settings
    )
    with pytest.raises(KeyboardInterrupt):
        run_with(tmp_path / "run", stop, places["b"], grid_type=bad, **settings)
    done = run_with(tmp_path / "run", nothing, places["b"], resume=True, **settings)
    assert comparable(done) == comparable(whole)
