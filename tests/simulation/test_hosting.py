"""Nodes that host several clients (``clients-per-node``), in one process."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from flower_fgl import Run, simulate
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.flower_internals import ErrorCode
from flower_fgl.methods import parse_config
from flower_fgl.protocols.parcels import PARCEL, Parcel
from flower_fgl.runs.state_files import LinkedStates
from flower_fgl.server_app import run_server
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.strategies.rounds.hosting import HostedGrid
from flower_fgl.strategies.rounds.messenger import send_receive
from tests.engines.test_run import numbers
from tests.support.short_runs import SMALL, comparable, shortened

K = 12
Settings = dict[str, Any]
App = Callable[[Message, Context], Message]


def hosted_values(folder: Path, nodes: int, method: str, **settings: Any) -> Settings:
    settings = {**SMALL, "rounds": 3, **settings}
    settings |= {"clients_per_node": -(-K // nodes), "run_dir": str(folder)}
    dataset = settings.pop("dataset", "synthetic")
    seed = settings.pop("seed", 0)
    return run_config_of(
        method=method, dataset=dataset, clients=K, seed=seed, settings=settings
    )


@contextmanager
def stage(
    values: Settings, nodes: int, wrap: Callable[[App], App] = lambda app: app
) -> Iterator[LocalGrid]:
    """Yield a grid of nodes without clients of their own."""
    dispatcher = Dispatcher(Session())
    app = wrap(lambda message, context: dispatcher(message, context))
    with task_identity(7):
        yield LocalGrid(app, nodes, values, run_id=7)


def hosted(
    folder: Path,
    nodes: int,
    method: str = "fedavg",
    *,
    wrap: Callable[[App], App] = lambda app: app,
    on_round: Any = None,
    **settings: Any,
) -> Run:
    values = hosted_values(folder, nodes, method, **settings)
    states = settings.get("state_dir")
    with stage(values, nodes, wrap) as grid:
        keeper = LinkedStates(Path(states)) if states else None
        run_server(grid, values, engine="ray", states=keeper, on_round=on_round)
    return Run.load(folder)


def expected(method: str, tmp_path: Path, **settings: Any) -> Run:
    settings = {**SMALL, "rounds": 3, **settings, "output_dir": str(tmp_path / "own")}
    return simulate(method, clients=K, **settings)


@pytest.mark.parametrize("has_files", [True, False], ids=["files", "context"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {}),
        ("fedavg", {"participation": 0.5, "evaluate": "both"}),
        ("fedavg", {"secure_aggregation": True}),
        ("fedavg", {"upload_clip": 1.0}),
        ("fedavg", {"stacked": "false", "batch_size": 8}),
        pytest.param("fedpg", {}, marks=pytest.mark.thorough),
        pytest.param("fedsage+", {}, marks=pytest.mark.thorough),
        pytest.param("adpfedgnn", {}, marks=pytest.mark.thorough),
    ],
)
def test_two_nodes_give_the_numbers_of_the_local_engine(
    method: str, settings: Settings, has_files: bool, tmp_path: Path
) -> None:
    settings = shortened(method, settings)
    own = expected(method, tmp_path, **settings)
    if has_files:
        settings = {**settings, "state_dir": str(tmp_path / "states")}
    run = hosted(tmp_path / "run", 2, method, **settings)
    assert comparable(run) == comparable(own)  # bytes, too


def test_other_numbers_of_nodes_give_them_up_to_rounding(tmp_path: Path) -> None:
    own = expected("fedavg", tmp_path)
    run = hosted(tmp_path / "run", 3)
    for row, other in zip(run.rounds, own.rounds, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["bytes"] == other["bytes"]
    assert len(run.clients) == len(own.clients)


def test_one_message_carries_those_of_all_clients_of_a_node(tmp_path: Path) -> None:
    seen: list[str] = []

    def count(app: App) -> App:
        def counted(message: Message, context: Context) -> Message:
            seen.append(message.metadata.message_type)
            return app(message, context)

        return counted

    hosted(tmp_path / "run", 4, wrap=count)
    assert seen == ["query.hosts"] * 4 + ["query.describe"] * 4 + ["train"] * 12


def test_an_interrupted_run_resumes_with_the_numbers_of_a_whole_one(
    tmp_path: Path,
) -> None:
    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    settings = {"rounds": 5, "checkpoint_every": 2, "participation": 0.5}
    whole = hosted(tmp_path / "whole", 2, state_dir=str(tmp_path / "a"), **settings)
    settings |= {"state_dir": str(tmp_path / "b")}
    with pytest.raises(KeyboardInterrupt):
        hosted(tmp_path / "run", 2, on_round=stop, **settings)
    run = hosted(tmp_path / "run", 2, resume=True, **settings)
    assert [row["round"] for row in run.rounds] == [1, 2, 3, 4, 5]
    assert numbers(run) == numbers(whole)


@pytest.mark.parametrize("is_stacked", [True, False])
def test_a_client_fails_alone(
    is_stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_once = FedAvgClientApp.open_once

    def failing(self: Any, message: Message, context: Context, **options: Any) -> Any:
        if context.node_config["partition-id"] == 5:
            raise RunError("no power")
        return open_once(self, message, context, **options)

    monkeypatch.setattr(FedAvgClientApp, "open_once", failing)
    run = hosted(tmp_path / "run", 2, stacked="auto" if is_stacked else "false")
    for row in run.rounds:
        assert row["replies"] == K - 1
        # it is asked for its score, too
        assert row["failures"] == 2 * [{"partition_id": 5, "reason": "no power"}]


def is_second_training(message: Message) -> bool:
    about = message.metadata
    return (about.message_type, about.group_id) == ("train", "2")


def lose(app: App) -> App:
    """Let the node of the even clients answer the second round by Flower's error."""

    def losing(message: Message, context: Context) -> Message:
        is_lost = context.node_config["partition-id"] == 0
        if is_lost and is_second_training(message):
            return Message(
                Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=message
            )
        return app(message, context)

    return losing


def test_a_lost_node_is_a_failure_of_each_of_its_clients(tmp_path: Path) -> None:
    run = hosted(tmp_path / "run", 2, wrap=lose, rounds=4)
    # silent clients are asked again two rounds later
    assert [row["replies"] for row in run.rounds] == [K, K // 2, K // 2, K]
    failed = run.rounds[1]["failures"]
    assert [one["partition_id"] for one in failed] == [0, 2, 4, 6, 8, 10]
    assert {one["reason"] for one in failed} == {"Node Unavailable"}


def foreign(content: RecordDict) -> RecordDict:
    """Name a client that the node does not host, and not the first one."""
    parcel = Parcel.from_record(content)
    (_, *rest), *others = parcel.letters
    return Parcel(parcel.records, [(99, *rest), *others]).to_record()


def repeated(content: RecordDict) -> RecordDict:
    parcel = Parcel.from_record(content)
    first, (place, kind, group, _, error), *others = parcel.letters
    again = (place, kind, group, first[3], error)
    return Parcel(parcel.records, [first, again, *others]).to_record()


def misshapen(content: RecordDict) -> RecordDict:
    index: Any = content[PARCEL]
    index["records"] = [b"\xff\xff", *index["records"][1:]]
    return content


@pytest.mark.parametrize(
    ("change", "failed", "reason"),
    [
        (foreign, [0], "its node sent no reply of it"),
        (repeated, [0, 2, 4, 6, 8, 10], "two clients of its node sent one record"),
        (misshapen, [0, 2, 4, 6, 8, 10], ""),
    ],
)
def test_what_a_node_sends_concerns_its_own_clients_only(
    change: Callable[[RecordDict], RecordDict],
    failed: list[int],
    reason: str,
    tmp_path: Path,
) -> None:
    def tamper(app: App) -> App:
        def tampered(message: Message, context: Context) -> Message:
            reply = app(message, context)
            is_first = context.node_config["partition-id"] == 0
            if is_first and is_second_training(message):
                return Message(change(reply.content), reply_to=message)
            return reply

        return tampered

    run = hosted(tmp_path / "run", 2, wrap=tamper)
    assert run.status == "completed"
    assert not run.rounds[0]["failures"]
    found = run.rounds[1]["failures"]
    assert [one["partition_id"] for one in found] == failed
    assert all(reason in one["reason"] for one in found)


def test_replies_above_the_limit_of_each_client_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="max-message-mb"):
        hosted(tmp_path / "run", 2, max_message_mb=0.0003)


@pytest.mark.parametrize("places", [[0, 0], [6], [-1]])
def test_a_node_answers_each_of_its_own_clients_once(
    places: list[int], tmp_path: Path
) -> None:
    values = hosted_values(tmp_path, 2, "fedavg")
    with stage(values, 2) as grid:
        inner = Message(RecordDict({"config": ConfigRecord({"a": 1})}), 9, "train")
        content = Parcel.pack((place, inner) for place in places).to_record()
        node = grid.get_node_ids()[0]
        exchange = send_receive(grid, {0: Message(content, node, "train")}, timeout=9)
    assert "names a client twice, or one of another node" in exchange.failures[0].reason


def test_a_wrong_number_of_nodes_ends_the_run_with_the_right_one(
    tmp_path: Path,
) -> None:
    values = hosted_values(tmp_path / "run", 4, "fedavg")
    with stage(values, 3) as grid, pytest.raises(RunError, match="need 4 nodes, but"):
        run_server(grid, {**values, "join-timeout": 1.0}, engine="ray")


def test_a_node_with_its_own_graph_refuses_to_host(tmp_path: Path) -> None:
    values = hosted_values(tmp_path / "run", 2, "fedavg")
    with stage(values, 2) as grid:
        for context in grid.contexts.values():
            context.node_config = {"graph": str(tmp_path / "g.npz"), "name": "north"}
        with pytest.raises(RunError, match="north holds a graph of its own"):
            run_server(grid, {**values, "join-timeout": 1.0}, engine="deployment")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"secure_aggregation": True}, "takes every client for another party"),
        ({"resume": True}, "so that no run resumes"),
    ],
)
def test_deployments_refuse_what_hosted_clients_cannot_do(
    settings: Settings, reason: str, tmp_path: Path
) -> None:
    values = hosted_values(tmp_path / "run", 2, "fedavg", **settings)
    with stage(values, 2) as grid, pytest.raises(ConfigError, match=reason):
        run_server(grid, values, engine="deployment")
    assert not (tmp_path / "run").exists()


def test_the_number_of_clients_must_be_set() -> None:
    with pytest.raises(ConfigError, match="needs the number of all clients"):
        parse_config({"clients-per-node": 4})
    config = parse_config({"clients-per-node": 4, "clients": 10})
    assert config.num_nodes == 3


class Silent(LocalGrid):
    """Nodes of which some do not answer the first question."""

    asked = 0

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        if not Silent.asked and replies:
            Silent.asked = 1
            lost = Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable")
            return [Message(lost, reply_to=self.first), *replies[1:]]
        return replies

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        ids = super().push_messages(sent)
        if not hasattr(self, "first"):
            self.first = sent[0]
            self.first.metadata.__dict__["_message_id"] = ids[0]
        return ids


def test_a_node_that_sends_no_answer_is_asked_again(tmp_path: Path) -> None:
    values = hosted_values(tmp_path, 2, "fedavg")
    dispatcher = Dispatcher(Session())
    with task_identity(7):
        carrier = Silent(lambda m, c: dispatcher(m, c), 2, values, run_id=7)
        grid = HostedGrid(carrier, 6, math.inf)
        assert grid.get_node_ids() == []
        assert len(grid.get_node_ids()) == 6  # of the other node
        grid._paused = dict.fromkeys(grid._paused, 0.0)
        grid.get_node_ids()
        assert len(set(grid.get_node_ids())) == 12


def test_many_nodes_are_warned_of_and_hosted_clients_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from flower_fgl.server_app import warn_of_many_clients

    caplog.set_level(logging.WARNING)
    many = parse_config({"clients": 1000})
    warn_of_many_clients(many, many.num_nodes)
    assert "clients-per-node = 125, which lets 8 nodes host all clients" in caplog.text
    caplog.clear()
    few = parse_config({"clients": 1000, "clients-per-node": 125})
    warn_of_many_clients(few, few.num_nodes)
    assert not caplog.text
