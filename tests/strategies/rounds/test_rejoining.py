from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict

from flower_fgl import METHODS, Run
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.server_app import run_server
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, _sent_back, task_identity
from tests.client_apps.runtime.test_owners import saved
from tests.support.owners import in_own_order, owner_graphs
from tests.support.short_runs import SMALL, shortened


class Nodes(LocalGrid):
    """SuperNodes that can be killed and restarted."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [
            self._handle(key, *self._pending.pop(key))
            for key in message_ids
            if key in self._pending
        ]

    def _handle(self, message_id: str, sent: Message, content: RecordDict) -> Message:
        if sent.metadata.dst_node_id in self.contexts:
            item = self._arrived(message_id, sent, content)
            (reply,) = self._handle_each([item])
            return _sent_back(item[0], reply)
        message = Message(content, 1, sent.metadata.message_type)
        message.metadata.__dict__["_message_id"] = message_id
        return Message(Error(5, "Node Unavailable"), reply_to=message)

    def kill(self, node: int) -> Context:
        return self.contexts.pop(node)

    def start(self, **node_config: Any) -> int:
        """Start a node without a state."""
        former = next(iter(self.contexts.values()))
        node = secrets.randbits(62) + 2
        self.contexts[node] = Context(
            run_id=former.run_id,
            node_id=node,
            node_config=node_config,
            state=RecordDict(),
            run_config=former.run_config,
        )
        return node


def run_with(
    folder: Path,
    after: Callable[[Nodes, int], None],
    nodes: list[dict[str, Any]] | None = None,
    *,
    present: int = 3,
    engine: str = "local",
    grid_type: type[Nodes] = Nodes,
    **settings: Any,
) -> Run:
    """Run three clients with states in Flower's contexts; call ``after`` each round.

    Only the first ``present`` of them are connected from the start.
    """
    settings = {**SMALL, "rounds": 4, "run_dir": str(folder), **settings}
    method = settings.pop("method", "fedproto")
    clients = settings.pop("clients", 3)
    values = run_config_of(
        method=method, dataset="synthetic", clients=clients, seed=0, settings=settings
    )
    run_id = 9 + bool(settings.get("resume"))  # Flower gives every run its own id
    with task_identity(run_id):
        grid = grid_type(
            DispatchingClientApp(Session()), max(3, clients), values, run_id
        )
        for context, node in zip(grid.contexts.values(), nodes or [], strict=False):
            context.node_config = {"model-dir": str(folder.parent / "models"), **node}
        for late in list(grid.contexts)[present:]:
            grid.kill(late)
        run_server(
            grid,
            values,
            engine=engine,
            on_round=lambda row: after(grid, row["round"]),
        )
    return Run.load(folder)


def node_of(grid: Nodes, partition_id: int) -> int:
    """Return the node that holds a partition, or the nth data owner."""
    owned = [n for n, c in grid.contexts.items() if "graph" in c.node_config]
    if owned:
        return owned[partition_id]
    return next(
        node
        for node, context in grid.contexts.items()
        if context.node_config["partition-id"] == partition_id
    )


def comes_back(grid: Nodes, number: int) -> None:
    if number == 1:
        grid.kill(node_of(grid, 1))
    if number == 2:
        grid.start(**{"partition-id": 1, "num-partitions": 3})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method", sorted(n for n, m in METHODS.items() if not m.is_one_shot)
)
def test_a_killed_node_reconnects_and_trains_again(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = {**shortened(method, {}), "participation": 1.0}
    run = run_with(tmp_path / "run", comes_back, method=method, **settings)
    rounds = [row for row in run.rounds if row["phase"] == "train"]
    assert [row["replies"] for row in rounds] == [3, 2, 3, 3]
    assert "Node Unavailable" in rounds[1]["failures"][0]["reason"]
    assert not rounds[2]["failures"]
    assert "Client 1 reconnected as node" in caplog.text


def forgets(grid: Nodes, number: int) -> None:
    """A SuperNode with a key loses its state but keeps its node id."""
    if number == 2:
        grid.contexts[node_of(grid, 1)].state = RecordDict()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method", sorted(n for n, m in METHODS.items() if not m.is_one_shot)
)
def test_a_node_that_lost_its_state_fails_at_most_once(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**shortened(method, {}), "participation": 1.0}
    run = run_with(tmp_path / "run", forgets, method=method, **settings)
    rounds = [row for row in run.rounds if row["phase"] == "train"]
    assert [row["replies"] for row in rounds] == [3, 3, 2 + (method != "fedlog"), 3]
    assert not rounds[3]["failures"]
    assert ("mended graphs" in caplog.text) == (method == "fedsage+")


def test_a_reconnected_client_continues_from_its_state_dir(tmp_path: Path) -> None:
    def nothing(grid: Nodes, number: int) -> None:
        return

    def restarts(grid: Nodes, number: int) -> None:
        if number == 2:
            place = grid.kill(node_of(grid, 1)).node_config
            grid.start(**place)

    kept = {"state_dir": str(tmp_path / "a")}
    whole = run_with(tmp_path / "whole", nothing, **kept)
    kept = {"state_dir": str(tmp_path / "b")}
    run = run_with(tmp_path / "run", restarts, **kept)
    assert [row["metrics"] for row in run.rounds] == [
        row["metrics"] for row in whole.rounds
    ]


@pytest.mark.parametrize("way", ["new node", "same node", "kept", "late"])
def test_an_owner_that_lost_its_state_is_named(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a key a restarted SuperNode keeps its node id."""
    nodes = saved(tmp_path / "graphs", owner_graphs())
    if way == "kept":
        nodes[1]["state-dir"] = str(tmp_path / "states")

    def after(grid: Nodes, number: int) -> None:
        if number == 2 and way == "same node":
            forgets(grid, 2)
        elif number == 2 and way == "late":
            grid.start(**late)
        elif number == 2:
            grid.start(**grid.kill(node_of(grid, 1)).node_config)

    late = {**nodes[2], "model-dir": str(tmp_path / "models")}
    more: dict[str, Any] = {"present": 3}
    if way == "late":
        more = {"present": 2, "min_clients": 2, "join_timeout": 0.2}
    run = run_with(tmp_path / "run", after, nodes[: more["present"]], **more)
    assert run.rounds[-1]["replies"] == 3
    is_lost = way.endswith("node")
    lines = re.findall(r"Client (\d) no longer has its state", caplog.text)
    assert lines == ["1"] * is_lost
    # each node says once what it does not keep
    without = {"kept": 2, "late": 3, "new node": 4, "same node": 3}
    assert caplog.text.count("This node has no state-dir") == without[way]


def test_clients_of_secure_aggregation_reconnect_with_a_new_key(
    tmp_path: Path,
) -> None:
    run = run_with(
        tmp_path / "run",
        comes_back,
        method="fedavg",
        secure_aggregation=True,
        rounds=5,
    )
    assert run.rounds[-1]["replies"] == 3
    assert run.rounds[-1]["status"] == "ok"


def test_a_killed_data_owner_is_matched_by_name_and_graph(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = owner_graphs()
    graphs[1] = in_own_order(graphs[1], ("cold", "flu"))
    nodes = saved(tmp_path / "graphs", graphs)

    def after(grid: Nodes, number: int) -> None:
        if number == 1:
            place = grid.kill(node_of(grid, 1)).node_config
            grid.start(**place)

    caplog.set_level("INFO")
    run = run_with(tmp_path / "run", after, nodes)
    assert [row["replies"] for row in run.rounds] == [3, 3, 3, 3]
    assert "Client 1 reconnected" in caplog.text


def test_a_data_owner_that_returns_with_another_graph_is_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs())

    def after(grid: Nodes, number: int) -> None:
        if number == 1:
            place = grid.kill(node_of(grid, 1)).node_config
            grid.start(**{**place, "graph": nodes[2]["graph"], "name": "birch"})

    run = run_with(tmp_path / "run", after, nodes)
    assert [row["replies"] for row in run.rounds] == [3, 2, 2, 2]
    assert "birch has another graph than the client of that name" in caplog.text


def test_without_min_clients_a_late_node_is_rejected_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs())
    late = tmp_path / "graphs" / "late.npz"
    late.write_bytes(Path(nodes[0]["graph"]).read_bytes())

    def after(grid: Nodes, number: int) -> None:
        if number == 1:
            grid.start(graph=str(late), **{"model-dir": str(tmp_path / "m")})

    run = run_with(tmp_path / "run", after, nodes)
    assert [row["replies"] for row in run.rounds] == [3, 3, 3, 3]
    assert caplog.text.count("late was not among the clients when the run began") == 1


def test_late_owners_of_one_name_are_rejected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs())
    places = []
    for number in (1, 2):
        place = tmp_path / str(number) / "late.npz"
        place.parent.mkdir()
        place.write_bytes(Path(nodes[number]["graph"]).read_bytes())
        places.append(str(place))

    def after(grid: Nodes, number: int) -> None:
        if number == 1:
            for place in places:
                grid.start(graph=place, **{"model-dir": str(tmp_path / "m")})

    late = {"clients": 3, "min_clients": 1, "join_timeout": 0.2}
    run = run_with(tmp_path / "run", after, nodes[:1], present=1, **late)
    assert [row["replies"] for row in run.rounds] == [1, 1, 1, 1]
    assert caplog.text.count('2 owners have the name "late"') == 2


def test_a_duplicate_node_waits_until_the_former_node_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    former: list[int] = []

    def after(grid: Nodes, number: int) -> None:
        if number == 1:
            former.append(node_of(grid, 2))
            grid.start(**{"partition-id": 2, "num-partitions": 3})
        if number == 3:
            assert "Client 2 reconnected" not in caplog.text
            grid.kill(former[0])

    caplog.set_level("INFO")
    run = run_with(tmp_path / "run", after, rounds=5)
    assert [row["replies"] for row in run.rounds] == [3, 3, 3, 3, 3]
    assert "Client 2 reconnected" in caplog.text
