"""Data owners with their own graphs: partition-ids, class agreement and rejections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from flower_fgl import Run, server_app, simulate
from flower_fgl.cli.partition import export_clients
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.dispatch import Dispatcher
from flower_fgl.client_apps.runtime.data import file_stamps
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.agreement import agree_classes
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import INFO
from flower_fgl.protocols.describe import Description
from flower_fgl.protocols.secure_aggregation.identities import load_identity
from flower_fgl.runs.model_file import read_card
from flower_fgl.runs.writer import RunWriter
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import task_identity
from flower_fgl.strategies.rounds.candidates import (
    agree_width,
    in_agreed_order,
    number_owners,
)
from tests.support.methods import OF_PLAIN_GRAPHS
from tests.support.owners import CLASSES, in_own_order, owner_graphs, run_owners
from tests.support.short_runs import SMALL, comparable, shortened

NAMES = ("ash", "birch", "cedar")


def saved(folder: Path, graphs: list[ClientGraph]) -> list[dict[str, Any]]:
    """Write graph files and return the node configs of the data owners."""
    folder.mkdir()
    nodes = []
    for name, graph in zip(NAMES, graphs, strict=True):
        save_client_graph(folder / f"{name}.npz", graph)
        nodes.append({"graph": str(folder / f"{name}.npz")})
    return nodes


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    return saved(tmp_path / "graphs", owner_graphs())


def without_names(run: Any) -> str:
    return comparable(replace_clients(run))


def replace_clients(run: Any) -> Any:
    """Remove the descriptions, which hold each data owner's name and class names."""
    return replace(run, clients=[row for row in run.clients if row["round"] > 0])


@pytest.mark.thorough
@pytest.mark.parametrize("method", OF_PLAIN_GRAPHS)
def test_the_class_order_of_data_owners_does_not_change_the_run(
    method: str, tmp_path: Path
) -> None:
    graphs = owner_graphs(method=method)
    own = [
        graphs[0],
        in_own_order(graphs[1], ("cold", "flu")),
        in_own_order(graphs[2], ("well", "flu", "cold")),
    ]
    settings = shortened(method, {"method": method})
    same = run_owners(saved(tmp_path / "same", graphs), tmp_path / "a", **settings)
    mixed = run_owners(saved(tmp_path / "own", own), tmp_path / "b", **settings)
    assert mixed.status == "completed"
    assert mixed.summary["class_names"] == list(CLASSES)
    assert without_names(mixed) == without_names(same)
    counts = {c["name"]: c["class_counts"] for c in mixed.clients[:3]}
    assert counts["birch"][2] == 0
    assert counts == {c["name"]: c["class_counts"] for c in same.clients[:3]}


def test_numbered_and_unnumbered_data_owners_give_the_same_run(
    tmp_path: Path,
) -> None:
    graphs = owner_graphs()
    numbered = [
        {**node, "partition-id": i, "num-partitions": 3}
        for i, node in enumerate(saved(tmp_path / "graphs", graphs))
    ]
    given = run_owners(numbered, tmp_path / "a", clients=0)
    unnumbered = [{"graph": node["graph"]} for node in reversed(numbered)]
    assigned = run_owners(unnumbered, tmp_path / "b")
    assert comparable(assigned) == comparable(given)


@pytest.mark.parametrize("setting", ["closed-set", "open-set", "few-shot"])
def test_exported_graphs_give_the_same_scores_as_the_partitions(
    setting: str, small: dict[str, Any], tmp_path: Path
) -> None:
    synthetic = {"nodes": 400, "classes": 3, "features": 8, "block_skew": 0.3}
    settings = {**small, "synthetic": synthetic, "setting": setting}
    del settings["clients"]
    partitioned = simulate("fedavg", clients=3, **settings)
    data = {"synthetic.nodes": 400, "synthetic.classes": 3, "synthetic.features": 8}
    values = {**data, "synthetic.block-skew": 0.3, "setting": setting, "clients": 3}
    paths = export_clients(parse_config(values), tmp_path / "graphs")
    owned = run_owners(
        [{"graph": str(path)} for path in paths],
        tmp_path / "owned",
        synthetic=synthetic,
        setting=setting,
    )
    assert owned.best == partitioned.best


def test_data_owners_can_use_secure_aggregation(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    plain = run_owners(nodes, tmp_path / "plain")
    secure = run_owners(nodes, tmp_path / "secure", secure_aggregation=True)
    for one, other in zip(plain.rounds, secure.rounds, strict=True):
        assert one["metrics"] == other["metrics"]
        assert other["failures"] == []


def test_data_owners_can_pin_each_other_s_keys(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    keys = [load_identity(tmp_path / f"{number}.key") for number in range(3)]
    pinned = tmp_path / "peers.toml"
    pinned.write_text(
        "".join(f'owner-{i} = "{key.text}"\n' for i, key in enumerate(keys))
    )
    known = [
        {**node, "identity": str(tmp_path / f"{i}.key"), "peers": str(pinned)}
        for i, node in enumerate(nodes)
    ]
    plain = run_owners(nodes, tmp_path / "plain")
    secure = run_owners(known, tmp_path / "secure", secure_aggregation=True)
    for one, other in zip(plain.rounds, secure.rounds, strict=True):
        assert one["metrics"] == other["metrics"]
        assert other["failures"] == []
    # without its identity, the others refuse the third owner, and it is named
    del known[2]["identity"], known[2]["peers"]
    with pytest.raises(
        RunError, match="client 2 has the identity none, which the file"
    ):
        run_owners(known, tmp_path / "unknown", secure_aggregation=True)


def namesakes(folder: Path, *, number: int = 2) -> list[dict[str, Any]]:
    """Return owners whose files have one name, in folders of their own."""
    nodes = []
    for place, graph in enumerate(owner_graphs(number)):
        home = folder / f"d{place}"
        home.mkdir(parents=True)
        save_client_graph(home / "graph.npz", graph)
        nodes.append({"graph": str(home / "graph.npz")})
    return nodes


def test_owners_of_one_name_are_refused(tmp_path: Path) -> None:
    two = namesakes(tmp_path / "two")
    with pytest.raises(RunError, match=r'2 owners have the name "graph"\. .* name='):
        run_owners(two, tmp_path / "a", rounds=1)
    five = namesakes(tmp_path / "five", number=5)
    for number in range(3):
        five[number]["name"] = f"owner-{number}"
    done = run_owners(five, tmp_path / "b", rounds=1)
    assert [row["replies"] for row in done.rounds] == [3]
    refused = done.summary["refused"]
    assert [one["name"] for one in refused] == ["graph", "graph"]
    assert 'name="hospital-a"' in refused[0]["reason"]


def test_owners_of_one_name_with_numbers_are_told_apart(tmp_path: Path) -> None:
    nodes = namesakes(tmp_path / "graphs")
    names = [{**node, "name": f"owner-{i}"} for i, node in enumerate(nodes)]
    for number, node in enumerate(nodes):
        node |= {"partition-id": number, "num-partitions": 2}
    one, other = (
        run_owners(chosen, tmp_path / str(k), rounds=1)
        for k, chosen in enumerate((nodes, names))
    )
    assert list(one.per_owner()) == ["graph (0)", "graph (1)"]
    assert list(one.per_owner().values()) == list(other.per_owner().values())


@pytest.mark.parametrize(
    "names", [("x y", "x-y"), ("Ash", "ash"), ("a" * 250, "a" * 251)]
)
def test_every_owner_predicts_with_its_own_model(
    names: tuple[str, str], tmp_path: Path
) -> None:
    nodes = namesakes(tmp_path / "graphs")
    for node, name in zip(nodes, names, strict=True):
        node |= {"name": name, "model-dir": str(tmp_path / "models")}
    run = run_owners(nodes, tmp_path / "run", rounds=1, method="local")
    folders = list((tmp_path / "models").iterdir())
    cards = [read_card(folder) for folder in folders]
    found = {card.owner: card.validation for card in cards if card is not None}
    assert found == run.per_owner("val")
    assert len({folder.name.casefold() for folder in folders}) == 2


def test_a_data_owner_with_an_unusable_identity_leaves_the_run(
    nodes: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known = [*nodes, {**nodes[0], "name": "oak", "identity": "relative.key"}]
    run_owners(known, tmp_path / "run", secure_aggregation=True, clients=4)
    assert "identity must be an absolute path" in caplog.text


def test_partition_ids_of_rejected_data_owners_stay_free(tmp_path: Path) -> None:
    nodes = [
        {**node, "partition-id": i, "num-partitions": 3}
        for i, node in enumerate(saved(tmp_path / "graphs", owner_graphs()))
    ]
    Path(nodes[1]["graph"]).write_bytes(b"PK")
    # FGGP's downloads have an entry for every partition-id
    run = run_owners(nodes, tmp_path / "run", method="fggp")
    assert [row["replies"] for row in run.rounds] == [2, 2]


def test_the_summary_of_a_stopped_run_names_the_owners_graphs_and_what_to_do(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # after `flwr stop` Flower may end the ServerApp with nothing but its exit handlers
    stop: list[Callable[[], None]] = []
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(
        server_app, "add_exit_handler", lambda handler, **_: stop.append(handler)
    )

    def stop_after_first(row: Mapping[str, Any]) -> None:
        if not found:
            found.append(dict(Run.load(tmp_path / "run").summary))
            stop[0]()
            found.append(dict(Run.load(tmp_path / "run").summary))

    run_owners(nodes, tmp_path / "run", "deployment", stop_after_first)
    running, stopped = found
    assert (running["status"], running["engine"]) == ("running", "deployment")
    assert stopped["status"] == "interrupted"
    assert stopped["dataset"] == "own graphs"
    RunWriter(tmp_path / "run").write_summary(stopped)
    with pytest.raises(RunError, match="the same `flwr run` command without resume"):
        run_owners([], tmp_path / "run", "deployment", resume=True)
    with pytest.raises(ConfigError, match=r"^resume needs run-dir: "):
        run_owners([], Path(), "deployment", resume=True, run_dir="")


def test_data_owners_that_do_not_fit_are_rejected_by_name(
    nodes: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = owner_graphs()
    wide = torch.cat([graphs[1].graph.x, graphs[1].graph.x], dim=1)
    graph = replace(graphs[1], graph=replace(graphs[1].graph, x=wide))
    save_client_graph(Path(nodes[1]["graph"]), graph)
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(b"no archive")
    all_nodes = [*nodes, {"graph": str(damaged), "name": "oak"}]
    run = run_owners(all_nodes, tmp_path / "run")
    assert run.status == "completed"
    assert run.summary["dataset"] == "own graphs"
    assert [c["name"] for c in run.clients if c["round"] == 0] == ["ash", "cedar"]
    refused = {one["name"]: one["reason"] for one in run.summary["refused"]}
    assert "16 features, the graphs of the other clients have 8" in refused["birch"]
    assert "check-graph" in refused["oak"]
    assert str(damaged) not in str(refused)
    assert "damaged.npz is not an .npz file" in caplog.text


def renamed(nodes: list[dict[str, Any]], *names: tuple[str, ...]) -> None:
    """Give the classes of each owner's file these names."""
    for node, graph, own in zip(nodes, owner_graphs(), names, strict=True):
        save_client_graph(
            Path(node["graph"]), replace(graph, target=Target.classes(own))
        )


def test_an_owner_that_spells_classes_differently_is_left_out(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    renamed(nodes, ("0", "1", "2"), ("False", "True", "2.0"), ("0", "1", "2"))
    run = run_owners(nodes, tmp_path / "run")
    (refused,) = run.summary["refused"]
    assert refused["name"] == "birch"
    assert 'it spells a class "False", and "ash" (node ' in refused["reason"]
    assert 'spells it "0"' in refused["reason"]
    assert [c["name"] for c in run.clients if c["round"] == 0] == ["ash", "cedar"]
    renamed(nodes, ("a", "b", "c"), ("A", "B", "C"), (" a", " b", " c"))
    with pytest.raises(RunError, match="3 of 3 data owners spell a class differently"):
        run_owners(nodes, tmp_path / "none")


def test_owners_without_a_common_class_do_not_start_a_run(
    nodes: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    renamed(nodes, ("a", "b", "c"), ("a", "b", "c"), ("x", "y", "z"))
    assert run_owners(nodes, tmp_path / "run").status == "completed"
    assert caplog.text.count("has no class in common with another owner") == 1
    assert 'Data owner "cedar" (node ' in caplog.text
    renamed(nodes, ("a", "b", "c"), ("u", "v", "w"), ("x", "y", "z"))
    with pytest.raises(RunError, match="No two data owners have a class in common"):
        run_owners(nodes, tmp_path / "none")


def test_a_node_whose_labels_are_no_classes_takes_no_part(
    nodes: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, labels in (
        ("marks", ["unknown", "flu"] * 10),
        ("people", [f"patient {i}" for i in range(20)]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        rows = [f"n{i},{label},1\n" for i, label in enumerate(labels)]
        (folder / "nodes.csv").write_text("id,label,x\n" + "".join(rows))
        (folder / "edges.csv").write_text("source,target\n")
    extra = [{"graph": str(tmp_path / name)} for name in ("marks", "people")]
    run = run_owners([*nodes, *extra], tmp_path / "run")
    refused = {one["name"]: one["reason"] for one in run.summary["refused"]}
    assert set(refused) == {"marks", "people"}
    assert "patient" not in str(refused)
    assert "unknown" not in str(refused)
    assert '10 of 20 labelled nodes have the class "unknown"' in caplog.text
    assert "20 labelled nodes have 20 different classes" in caplog.text


def test_a_node_that_fails_without_a_reason_is_rejected_after_join_timeout(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Dispatcher.__call__

    def call(app: Any, message: Any, context: Any) -> Any:
        if context.node_config.get("name") == "gone":
            raise MemoryError
        return original(app, message, context)

    monkeypatch.setattr(Dispatcher, "__call__", call)
    gone = {"graph": "gone.npz", "name": "gone"}
    run = run_owners([*nodes, gone], tmp_path / "run", join_timeout=0.2)
    assert run.status == "completed"
    assert len(run.clients) == 3 * 3
    assert "MemoryError" in run.summary["refused"][0]["reason"]


def test_errors_in_a_graph_file_are_not_sent_to_the_server(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "secret"
    folder.mkdir()
    (folder / "nodes.csv").write_text("id,label,age\nn1,flu,John Doe\n")
    (folder / "edges.csv").write_text("source,target\n")
    run = run_owners([*nodes, {"graph": str(folder)}], tmp_path / "run")
    (refused,) = run.summary["refused"]
    assert refused["name"] == "secret"
    assert "John" not in refused["reason"]


def test_too_few_data_owners_that_fit_end_the_run(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    for node in nodes[:2]:
        Path(node["graph"]).write_bytes(b"")
    with pytest.raises(
        RunError, match="1 data owners can take part, but min-replies = 2"
    ):
        run_owners(nodes, tmp_path / "run", min_replies=2)
    Path(nodes[2]["graph"]).write_bytes(b"")
    with pytest.raises(RunError, match=r"No client can take part.*ash.*cedar"):
        run_owners(nodes, tmp_path / "again")


def test_data_owners_and_partitions_cannot_be_mixed(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    partition = {"partition-id": 2, "num-partitions": 3}
    run = run_owners([*nodes[:2], partition], tmp_path / "run")
    (refused,) = run.summary["refused"]
    assert "its kind of data differs from that of most others" in refused["reason"]
    with pytest.raises(RunError, match="1 nodes hold their own graphs and 1"):
        run_owners([nodes[0], partition], tmp_path / "again")


def test_the_number_of_data_owners_must_be_set(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="Set clients to the number of SuperNodes"):
        run_owners(nodes, tmp_path / "run", clients=0)


def test_data_owners_may_have_different_backbones(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = run_owners(nodes, tmp_path / "run", method="fedproto", model="gcn,gin,mlp")
    assert [c["model"] for c in run.clients[:3]] == ["gcn", "gin", "mlp"]
    assert run.status == "completed"


def test_a_replaced_graph_file_is_read_again(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=1, seed=0, settings=SMALL
    )
    context = Context(1, 1, nodes[0], RecordDict(), values)
    app = DispatchingClientApp(Session())

    def described() -> tuple[Any, ...]:
        with task_identity(1):
            message = Message(RecordDict(), 1, "query.describe")
        info = app(message, context).content.config_records[INFO]
        return info["num-nodes"], info["num-edges"]

    before = described()
    assert described() == before
    Path(nodes[1]["graph"]).replace(nodes[0]["graph"])
    assert described() != before
    assert file_stamps({}) == file_stamps({"graph": str(tmp_path / "none")}) == ()
    (tmp_path / "a.csv").write_text("x")
    (stamp, *_) = file_stamps({"graph": str(tmp_path)})
    assert stamp[:2] == ("a.csv", 1)


def test_the_split_of_a_file_does_not_depend_on_other_clients(
    tmp_path: Path,
) -> None:
    graphs = [replace(g, graph=replace(g.graph, masks={})) for g in owner_graphs()]
    nodes = saved(tmp_path / "graphs", graphs)
    first = run_owners(nodes, tmp_path / "a", method="local")
    numbered = [{**n, "partition-id": 2 - i, "num-partitions": 3}
                for i, n in enumerate(nodes)]  # fmt: skip
    second = run_owners(numbered, tmp_path / "b", method="local")
    sizes = [{c["name"]: (c["num_train"], c["num_val"], c["class_counts"])
              for c in run.clients[:3]} for run in (first, second)]  # fmt: skip
    assert sizes[0] == sizes[1]


# ------------------------------------------------------------------ pure functions
def description(name: str, **changes: Any) -> Description:
    values: dict[str, Any] = {
        "partition_id": -1, "num_partitions": 0, "num_nodes": 10, "num_edges": 9,
        "num_train": 2, "num_val": 4, "num_test": 4, "num_features": 5,
        "class_names": ("a", "b"), "class_counts": (3, 1), "model": "", "name": name,
    }  # fmt: skip
    return Description(**{**values, **changes})


def test_free_partition_ids_are_assigned_in_order_of_names() -> None:
    described = {
        90: description("oak"),
        7: description("ash"),
        55: description("elm", partition_id=1, num_partitions=4),
        8: description("birch"),
    }
    assert number_owners(described) == {55: 1, 7: 0, 8: 2, 90: 3}


def test_the_majority_decides_the_feature_width() -> None:
    assert agree_width({"a": 5, "b": 7, "c": 5}) == 5
    with pytest.raises(RunError, match="a: 5, b: 7"):
        agree_width({"a": 5, "b": 7})


@pytest.mark.parametrize(
    ("lists", "agreed"),
    [
        ([("b", "a"), ("a", "b")], ("b", "a")),
        ([("b",), ("c", "b", "a"), ("a", "b", "c")], ("c", "b", "a")),
        ([("b", "c"), ("b", "a")], ("a", "b", "c")),
        ([("10", "9"), ("2",)], ("2", "9", "10")),
    ],
)
def test_classes_are_agreed_by_name(
    lists: list[tuple[str, ...]], agreed: tuple[str, ...]
) -> None:
    assert agree_classes(lists) == agreed


def test_class_counts_are_reordered_with_their_classes() -> None:
    order = Target.classes("cba")
    agreed = in_agreed_order(description("ash"), order)
    assert agreed.class_names == ("c", "b", "a")
    assert agreed.class_counts == (0, 1, 3)
    hidden = in_agreed_order(description("ash", class_counts=()), order)
    assert hidden.class_counts == ()


def test_labels_are_renumbered_by_name() -> None:
    graph = in_own_order(owner_graphs()[2], ("well", "flu", "cold"))
    agreed = graph.renumbered(5, CLASSES)
    names = ["?" if k < 0 else graph.class_names[k] for k in graph.graph.y.tolist()]
    assert [CLASSES.index(n) if n != "?" else -1 for n in names] == (
        agreed.graph.y.tolist()
    )
    assert agreed.partition_id == 5
    with pytest.raises(DataError, match="federation does not know: well"):
        graph.renumbered(5, ("flu", "cold"))


def test_several_labels_are_renumbered_by_name() -> None:
    targets = torch.tensor([[0, 1], [1, -1], [-1, -1]], dtype=torch.int8)
    y = torch.tensor([0, 0, -1])  # only says which nodes have a known label
    graph = Graph(torch.ones(3, 2), torch.empty(2, 0).long(), y, {}, targets=targets)
    client = ClientGraph(
        0, graph, Target.classes(("toxic", "acid")), torch.arange(3), (graph,)
    )
    agreed = client.renumbered(1, ("acid", "salt", "toxic"))
    for found in (agreed.graph, *agreed.evaluation):
        assert found.targets is not None
        assert found.targets.tolist() == [[1, -1, 0], [-1, -1, 1], [-1, -1, -1]]
        assert found.targets.dtype == torch.int8
        assert found.y.tolist() == [0, 0, -1]
