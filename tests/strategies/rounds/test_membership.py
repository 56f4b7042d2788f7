"""Clients that join during a run (``min-clients``)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flower_fgl import METHODS, Run
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.describe import Description, Rejection
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.candidates import Candidates, match_known_client
from flower_fgl.strategies.rounds.rejoining import admit_new_client
from tests.client_apps.runtime.test_owners import saved
from tests.strategies.rounds.test_rejoining import Nodes, comes_back, node_of, run_with
from tests.support.clients import federation_of
from tests.support.owners import in_own_order, owner_graphs
from tests.support.short_runs import comparable, shortened

LATE: dict[str, Any] = {"min_clients": 2, "join_timeout": 0.2}
"""Start with two clients of three."""
After = Callable[[Nodes, int], None]
takes_late = [name for name, row in METHODS.items() if row.takes_late_clients]


def nothing(grid: Nodes, number: int) -> None:
    return


def starts(after_round: int, **node_config: Any) -> After:
    """Start a node after a round."""

    def after(grid: Nodes, number: int) -> None:
        if number == after_round:
            grid.start(**node_config)

    return after


def third(**more: Any) -> dict[str, Any]:
    return {"partition-id": 2, "num-partitions": 3, **more}


def owners(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return two data owners and a late one, first by name, with its own class order."""
    graphs = owner_graphs()
    graphs[2] = in_own_order(graphs[2], ("well", "flu", "cold"))
    *early, late = saved(folder, graphs)
    models = str(folder.parent / "models")
    return early, {**late, "name": "a-hospital", "model-dir": models}


def joined(run: Run) -> list[dict[str, Any]]:
    """Return the descriptions of clients that joined late."""
    return [row for row in run.clients if row["round"] and "num_train" in row]


def scored(run: Run, number: int) -> list[int]:
    """Return the clients scored in a round."""
    rows = [row for row in run.clients if row["round"] == number]
    return [row["partition_id"] for row in rows if "metrics" in row]


@pytest.mark.thorough
@pytest.mark.parametrize("method", sorted(takes_late))
def test_a_client_that_joins_in_round_2_trains_and_is_scored(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = {"rounds": 3, "participation": 1.0, **LATE}
    run = run_with(
        tmp_path / "run",
        starts(1, **third()),
        present=2,
        method=method,
        **shortened(method, settings),
    )
    assert run.status == "completed"
    replies = {row["round"]: row["replies"] for row in run.rounds}
    # a phase after the last round has a number of its own
    assert [replies[number] for number in (1, 2, 3)] == [2, 3, 3]
    assert not any(row["failures"] for row in run.rounds)
    assert [scored(run, number) for number in (1, 2, 3)] == [[0, 1], *[[0, 1, 2]] * 2]
    assert [(row["round"], row["partition_id"]) for row in joined(run)] == [(2, 2)]
    assert "The run starts with 2 of 3 clients" in caplog.text
    assert "Client 2 joins in round 2." in caplog.text
    assert run.summary["clients"] == 3


@pytest.mark.parametrize("method", sorted(METHODS.keys() - set(takes_late)))
def test_methods_that_need_all_clients_at_the_start_reject_min_clients(
    method: str,
) -> None:
    with pytest.raises(ConfigError, match=r"before round 1.*join later: .*fedavg"):
        parse_config({"method": method, "min-clients": 2})


def test_min_clients_changes_nothing_if_all_clients_are_connected(
    tmp_path: Path,
) -> None:
    plain = run_with(tmp_path / "plain", nothing)
    run = run_with(tmp_path / "run", nothing, **LATE)
    assert comparable(run) == comparable(plain)


def test_fewer_clients_than_min_clients_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Only 1 of 3 clients .* but min-clients = 2"):
        run_with(tmp_path / "run", nothing, present=1, **LATE)


def test_num_partitions_limits_the_number_of_clients(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", starts(1, **third()), present=2, clients=0, **LATE)
    assert [row["replies"] for row in run.rounds] == [2, 3, 3, 3]
    assert run.config["clients"] == 3
    with pytest.raises(RunError, match="min-clients = 4, but the run has 3 clients"):
        run_with(tmp_path / "more", nothing, clients=0, **{**LATE, "min_clients": 4})


def test_a_late_data_owner_gets_the_free_partition_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, late = owners(tmp_path / "graphs")
    caplog.set_level("INFO")
    run = run_with(tmp_path / "run", starts(2, **late), nodes, present=2, **LATE)
    assert [row["replies"] for row in run.rounds] == [2, 2, 3, 3]
    assert 'Client 2 is data owner "a-hospital" (node' in caplog.text
    assert "and joins in round 3." in caplog.text
    (about,) = joined(run)
    first = next(row for row in run.clients if row["partition_id"] == 0)
    assert about["class_names"] == first["class_names"] == ["flu", "cold", "well"]
    assert sum(about["class_counts"]) == about["num_train"]
    assert {about["num_partitions"], first["num_partitions"]} == {3}
    assert scored(run, 3) == [0, 1, 2]


def test_late_data_owners_get_the_backbone_of_their_partition_id(
    tmp_path: Path,
) -> None:
    nodes, late = owners(tmp_path / "graphs")
    more = {"model": "gcn,gin,mlp", **LATE}
    run = run_with(tmp_path / "run", starts(1, **late), nodes, present=2, **more)
    models = [row["model"] for row in run.clients if "num_train" in row]
    assert models == ["gcn", "gin", "mlp"]
    assert run.rounds[-1]["replies"] == 3


def test_a_data_owner_that_fixed_its_file_joins(tmp_path: Path) -> None:
    nodes, late = owners(tmp_path / "graphs")
    broken = {**late, "graph": str(tmp_path / "graphs" / "broken.npz")}
    Path(broken["graph"]).write_bytes(b"PK")

    def after(grid: Nodes, number: int) -> None:
        if number == 1:
            grid.kill(node_of(grid, 2))
            grid.start(**late)

    run = run_with(tmp_path / "run", after, [*nodes, broken], **LATE)
    assert [row["replies"] for row in run.rounds] == [2, 3, 3, 3]
    assert [one["name"] for one in run.summary["refused"]] == ["a-hospital"]


def test_a_rejected_data_owner_with_a_key_is_queried_again_after_a_restart(
    tmp_path: Path,
) -> None:
    nodes, late = owners(tmp_path / "graphs")
    broken = {**late, "graph": str(tmp_path / "graphs" / "broken.npz")}
    Path(broken["graph"]).write_bytes(b"PK")
    away: list[Any] = []

    def after(grid: Nodes, number: int) -> None:
        if number == 1:
            node = node_of(grid, 2)
            away.append((node, grid.kill(node)))
        if number == 2:
            node, context = away.pop()
            context.node_config = late
            grid.contexts[node] = context

    run = run_with(tmp_path / "run", after, [*nodes, broken], **LATE)
    assert [row["replies"] for row in run.rounds] == [2, 2, 3, 3]


def test_a_client_that_joined_late_can_reconnect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, late = owners(tmp_path / "graphs")
    late |= {"partition-id": 0, "num-partitions": 3}  # a number that is taken

    def after(grid: Nodes, number: int) -> None:
        if number == 1:
            grid.start(**late)
        if number == 2:
            grid.kill(node_of(grid, 2))
            grid.start(**late)

    caplog.set_level("INFO")
    run = run_with(tmp_path / "run", after, nodes, present=2, **LATE)
    assert [row["replies"] for row in run.rounds] == [2, 3, 3, 3]
    assert "Client 2 reconnected" in caplog.text
    assert len(joined(run)) == 1


def test_a_reconnected_client_does_not_count_as_new(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", comes_back, present=2, **LATE)
    assert [row["replies"] for row in run.rounds] == [2, 1, 2, 2]
    assert not joined(run)


def test_no_client_joins_without_a_free_partition_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, late = owners(tmp_path / "graphs")

    def after(grid: Nodes, number: int) -> None:
        if number <= 2:
            grid.start(**{**late, "name": f"late-{number}"})

    run = run_with(tmp_path / "run", after, nodes, present=2, **LATE)
    assert [row["replies"] for row in run.rounds] == [2, 3, 3, 3]
    assert "late-2 was not among the clients" in caplog.text
    assert "all 3 partition-ids are taken" in caplog.text


FEDERATION = federation_of([4, 5])
ALICE = replace(
    FEDERATION.clients[0], partition_sha256="", name="alice", num_partitions=3
)
OWNERS = Federation({0: ALICE}, {0: 10})
BOB = replace(ALICE, name="bob", partition_id=-1, num_partitions=0, model="")


def config(**values: Any) -> RunConfig:
    settings = {"clients": 3, "min-clients": 1, **values}
    return parse_config(settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_features": 4}, "4 features, the graphs of the other clients have 3"),
        (
            {"num_edge_features": 2},
            "have 2 features, those of the other clients have 0",
        ),
        ({"class_names": ("b", "flu")}, r"no client had .* \(flu\)\. .* cannot change"),
        ({"partition_sha256": "5e"}, "clients of this run hold graphs of their own"),
    ],
)
def test_a_data_owner_that_does_not_fit_cannot_join(
    changes: dict[str, Any], words: str
) -> None:
    answer = admit_new_client(OWNERS, replace(BOB, **changes), config())
    assert isinstance(answer, str)
    assert "bob" in answer
    assert re.search(words, answer)


def test_a_late_data_owner_keeps_its_partition_id_if_it_is_free() -> None:
    for own, given in ((-1, 1), (0, 1), (2, 2), (7, 1)):
        found = admit_new_client(OWNERS, replace(BOB, partition_id=own), config())
        assert not isinstance(found, str)
        assert (found.partition_id, found.num_partitions) == (given, 3)
        assert found.model == "gcn"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition_sha256": "5f"}, "another partition"),
        ({"num_partitions": 4}, "another number of partitions"),
        ({"num_features": 4}, "another feature width"),
        ({"class_names": ("a", "c")}, "another list of class names"),
        ({"partition_sha256": ""}, "clients of this run hold partitions of a dataset"),
    ],
)
def test_a_node_of_another_partition_cannot_join(
    changes: dict[str, Any], words: str
) -> None:
    held = replace(ALICE, name="", partition_sha256="5e")
    federation = Federation({0: held}, {0: 10})
    candidate = replace(held, partition_id=2)
    assert admit_new_client(federation, candidate, config()) == candidate
    answer = admit_new_client(federation, replace(candidate, **changes), config())
    assert isinstance(answer, str)
    assert words in answer


def test_a_late_owner_may_have_classes_of_its_own_if_heads_are_local() -> None:
    held = replace(ALICE, name="one", partition_sha256="5e")
    candidate = replace(held, name="two", class_names=("a", "c"), partition_id=2)
    federation = Federation({0: held}, {0: 10})
    owners = {"owners": "tu:MUTAG,tu:NCI1,tu:ENZYMES", "setting": "graph"}
    local = config(**owners, method="fedper", model="gin")
    assert admit_new_client(federation, candidate, local) == replace(
        candidate, model="gin"
    )


def test_data_owners_of_the_same_name_are_matched_by_number_and_graph() -> None:
    same_name = replace(ALICE, partition_id=1)
    both = {0: ALICE, 1: same_name}
    known = match_known_client(both, replace(ALICE, partition_id=1))
    assert isinstance(known, tuple)
    assert known[0] == 1
    other = replace(ALICE, partition_id=2, num_nodes=99)
    assert match_known_client(both, other) is None
    assert "another graph" in str(
        match_known_client(both, replace(other, partition_id=-1))
    )


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedavg", "fedpg", "fggp", "fedsem"])
def test_a_resumed_run_with_a_late_client_gives_the_same_numbers(
    method: str, tmp_path: Path
) -> None:
    early, late = owners(tmp_path / "graphs")

    def kept(folder: Path, *nodes: dict[str, Any]) -> list[dict[str, Any]]:
        names = (Path(node["graph"]).stem for node in nodes)
        places = (str(folder / name) for name in names)
        return [{**n, "state-dir": p} for n, p in zip(nodes, places, strict=True)]

    def run(name: str, after: After, nodes: list[dict[str, Any]], **more: Any) -> Run:
        settings = {"rounds": 4, "method": method, "checkpoint_every": 1, **LATE}
        return run_with(
            tmp_path / name,
            after,
            nodes,
            present=len(nodes),
            engine="deployment",
            **settings,
            **more,
        )

    *two, one = kept(tmp_path / "a", *early, late)
    whole = run("whole", starts(1, **one), two)
    *two, one = kept(tmp_path / "b", *early, late)

    def after(grid: Nodes, number: int) -> None:
        starts(1, **one)(grid, number)
        if number == 3:  # its checkpoint is of round 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("killed", after, two)
    # connected from the start, the late data owner would be client 0 by its name
    resumed = run("killed", nothing, [one, *two], resume=True)
    assert comparable(resumed) == comparable(whole)


def test_a_run_can_resume_without_clients_that_joined_after_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, late = owners(tmp_path / "graphs")

    def after(grid: Nodes, number: int) -> None:
        starts(2, **late)(grid, number)
        if number == 3:
            raise KeyboardInterrupt

    settings = {"checkpoint_every": 2, "engine": "deployment", **LATE}
    with pytest.raises(KeyboardInterrupt):
        run_with(tmp_path / "run", after, nodes, present=2, **settings)
    run = run_with(
        tmp_path / "run", starts(3, **late), nodes, present=2, resume=True, **settings
    )
    assert [row["replies"] for row in run.rounds] == [2, 2, 2, 3]
    assert [row["round"] for row in joined(run)] == [4]
    assert run.config["clients"] == 3


def test_a_run_that_rejected_a_data_owner_can_resume(tmp_path: Path) -> None:
    nodes, late = owners(tmp_path / "graphs")
    late["graph"] = str(tmp_path / "graphs" / "broken.npz")
    Path(late["graph"]).write_bytes(b"PK")

    def after(grid: Nodes, number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    settings = {"checkpoint_every": 2, "engine": "deployment"}
    with pytest.raises(KeyboardInterrupt):
        run_with(tmp_path / "run", after, [*nodes, late], **settings)
    run = run_with(tmp_path / "run", nothing, [*nodes, late], resume=True, **settings)
    assert [row["replies"] for row in run.rounds] == [2, 2, 2, 2]


def test_a_resumed_run_names_missing_clients(tmp_path: Path) -> None:
    nodes, _ = owners(tmp_path / "graphs")

    def after(grid: Nodes, number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    settings = {"checkpoint_every": 1, "engine": "deployment", **LATE}
    with pytest.raises(KeyboardInterrupt):
        run_with(tmp_path / "run", after, nodes, present=2, **settings)
    with pytest.raises(RunError, match=r'had 2 clients, 1 .* client 1 \("birch"\)'):
        run_with(tmp_path / "run", nothing, nodes, present=1, resume=True, **settings)


def agree_on_schema(
    described: dict[int, Description], config: RunConfig
) -> tuple[dict[int, Description], list[Rejection]]:
    """Return the owners that fit together, and the others."""
    candidates = Candidates(described, [], config)
    candidates.agree_on_schema()
    return candidates.described, candidates.rejected


@pytest.mark.parametrize("invented", [1001, 10_000])
def test_invented_classes_cost_their_owner_only(invented: int) -> None:
    names = tuple(f"x{number}" for number in range(invented))
    liar = replace(BOB, name="mallory", class_names=names, class_counts=())
    honest = {1: BOB, 2: replace(BOB, name="carol")}
    fit, (refused,) = agree_on_schema({**honest, 3: liar}, parse_config({}))
    assert {d.name for d in fit.values()} == {BOB.name, "carol"}
    assert refused.name == "mallory"
    assert f"{invented:,} classes that no other client has" in refused.reason
    few = replace(liar, class_names=names[:1000])
    fit, refused_ = agree_on_schema({**honest, 3: few}, parse_config({}))
    assert len(fit) == 3
    assert not refused_
    # two owners that invent the same names
    twin = replace(liar, name="trent")
    pair = {3: liar, 4: twin}
    fit, _ = agree_on_schema({**honest, **pair}, parse_config({}))
    assert {BOB.name, "carol"} <= {d.name for d in fit.values()}


def test_another_number_of_edge_features_costs_its_owner_only() -> None:
    honest = {1: BOB, 2: replace(BOB, name="carol")}
    other = replace(BOB, name="mallory", num_edge_features=4)
    fit, (refused,) = agree_on_schema({**honest, 3: other}, parse_config({}))
    assert {d.name for d in fit.values()} == {BOB.name, "carol"}
    assert refused.name == "mallory"
    assert "number of edge features differs" in refused.reason
    assert "4 instead of 0" in refused.reason


def test_a_claim_of_many_partitions_costs_its_owner_only() -> None:
    liar = replace(BOB, name="mallory", num_partitions=10_001, partition_id=10_000)
    fit, (refused,) = agree_on_schema(
        {1: BOB, 2: replace(BOB, name="carol"), 3: liar}, parse_config({})
    )
    assert {d.num_partitions for d in fit.values()} == {2}
    assert refused.name == "mallory"
    assert "num-partitions = 10001, this run has at most 10000" in refused.reason
    kept, _ = agree_on_schema({1: BOB, 3: liar}, parse_config({"clients": 20_000}))
    assert kept[3].partition_id == 10_000
    with pytest.raises(RunError, match=r"0 data owners can take part.*10001"):
        agree_on_schema({3: liar}, parse_config({}))
