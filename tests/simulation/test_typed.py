"""Runs on typed graphs whose owners share kinds and relations, or only some of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from flower_fgl import METHODS, simulate, to_npz
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.describe import describe
from flower_fgl.core.agreement import Told, differing_schemas
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.core.schema import Schema
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.transforms.subgraph import induced_graph
from flower_fgl.datasets.transforms.typed import agreed_graph
from flower_fgl.methods import parse_config
from flower_fgl.protocols.describe import Description
from flower_fgl.strategies.fedavg import FedAvg
from tests.support.owners import run_owners
from tests.support.short_runs import SMALL, of_file
from tests.support.typed_graphs import (
    OWNS,
    PAYS,
    USED,
    client_of,
    typed_bank,
    typed_owners,
    typed_tables,
    write_tables,
)

SIZES: dict[str, Any] = {
    "rounds": 2,
    "hidden_channels": 8,
    "dropout": 0.0,
    "model": "rgcn",
}
SAME = sorted(name for name in METHODS if METHODS[name].reads_messages)
PARTS = sorted(name for name in METHODS if METHODS[name].shares_parts)


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write three owners with the same kinds and relations."""
    return typed_owners(
        tmp_path_factory.mktemp("alike") / "own", *map(typed_bank, range(3))
    )


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write three owners, of which one has devices, and one keeps its own to itself."""
    return typed_owners(
        tmp_path_factory.mktemp("unlike") / "own",
        typed_bank(0),
        typed_bank(1, has_device=True),
        typed_bank(2, has_device=True, private={USED}),
    )


@pytest.mark.parametrize("method", SAME)
def test_methods_that_say_so_train_on_equal_schemas(
    method: str, alike: str, tmp_path: Path
) -> None:
    run = simulate(method, owners=alike, output_dir=str(tmp_path), **SIZES)
    assert len(run.rounds) >= 2
    assert run.summary["best"]["test"]["num_nodes"] == 24


@pytest.mark.parametrize("align", ["name", "private"])
@pytest.mark.parametrize("method", PARTS)
def test_methods_that_say_so_train_on_different_schemas(
    method: str, align: str, unlike: str, tmp_path: Path
) -> None:
    if (method, align) == ("fedhgn", "name"):
        with pytest.raises(RunError, match='set schema-align = "private"'):
            simulate(
                method,
                owners=unlike,
                schema_align=align,
                output_dir=str(tmp_path),
                **SIZES,
            )
        return
    run = simulate(
        method, owners=unlike, schema_align=align, output_dir=str(tmp_path), **SIZES
    )
    assert len(run.rounds) >= 2
    assert run.summary["best"]["test"]["num_nodes"] == 24


@pytest.mark.parametrize("model", ["rgcn", "typed-graphsage", "typed-gine"])
def test_relations_tell_what_nodes_do_not(
    model: str, alike: str, tmp_path: Path
) -> None:
    values = SIZES | {"model": model, "rounds": 15, "lr": 0.02}
    run = simulate("fedavg", owners=alike, output_dir=str(tmp_path), **values)
    assert run.summary["best"]["test"]["accuracy"] > 0.9


def test_different_schemas_are_refused_by_default(tmp_path: Path) -> None:
    banks = typed_bank(3), typed_bank(4), typed_bank(5, has_device=True)
    folder = typed_owners(tmp_path / "own", *banks)
    with pytest.raises(
        DataError, match=r'bank2: its kinds .* Set schema-align = "name"'
    ):
        simulate("fedavg", owners=folder, output_dir=str(tmp_path), **SIZES)


def test_private_relations_need_another_alignment(unlike: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="keeps relations private"):
        simulate("fedavg", owners=unlike, output_dir=str(tmp_path), **SIZES)


def test_an_untyped_model_is_refused(alike: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'Set model = "rgcn", or types = "ignore"'):
        simulate("fedavg", owners=alike, output_dir=str(tmp_path), rounds=1)


def test_a_plain_graph_is_refused_for_a_typed_model(tmp_path: Path) -> None:
    data = Data(torch.eye(6), torch.tensor([[0, 1], [2, 3]]), y=torch.arange(6) % 2)
    path = to_npz(data, tmp_path / "plain.npz")
    with pytest.raises(DataError, match="has one kind of nodes and edges"):
        simulate("fedavg", dataset=str(path), output_dir=str(tmp_path), **SIZES)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"schema_align": "name", "secure_aggregation": True}, "cannot sum"),
        (
            {"schema_align": "name", "aggregation": "median"},
            "over the owners that have it",
        ),
        ({"schema_align": "private", "evaluate": "both"}, "different parts of a model"),
        ({"setting": "few-shot"}, "reads typed graphs: set setting"),
        ({"stacked": "true", "node_embedding": True}, "node-embedding"),
        ({"types": "ignore"}, "leaves one kind of nodes and edges"),
    ],
)
def test_settings_that_contradict_typed_graphs_are_refused(
    values: dict[str, Any], text: str, alike: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        simulate("fedavg", owners=alike, output_dir=str(tmp_path), **SIZES, **values)


@pytest.mark.parametrize("method", sorted({*SAME} - {*PARTS}))
@pytest.mark.parametrize(
    "values", [{"schema_align": "name"}, {"node_embedding": True}], ids=str
)
def test_parts_of_one_client_alone_need_a_method_that_shares_parts(
    method: str, values: dict[str, Any], alike: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="needs the same weights at all clients"):
        simulate(method, owners=alike, output_dir=str(tmp_path), **SIZES, **values)


def described(graph: ClientGraph, align: str) -> Description:
    """Return what a client tells of its graph."""
    return describe(
        ClientData.build(graph, torch.device("cpu")),
        replace(parse_config({"clients": 3}), schema_align=align),
        place=(0, 3),
        model="rgcn",
        name="owner",
    )


def test_names_leave_an_owner_only_where_the_setting_says_so() -> None:
    graph = client_of(typed_bank(2, has_device=True, private={USED}))
    texts = {
        a: repr(described(graph, a).to_record()) for a in ("same", "name", "private")
    }
    names = ("card", "person", "shop", "pays", "owns")
    assert all(name in texts["name"] for name in names)
    assert "used" not in texts["name"]
    for align in ("same", "private"):
        assert not any(name in texts[align] for name in (*names, "used", "device"))
    private = described(graph, "private")
    assert (private.num_features, private.feature_names) == (0, ())
    for align in texts:
        found = described(graph, align)
        assert Description.from_record(found.to_record()) == found


def test_owners_in_another_order_agree_with_hashed_names() -> None:
    graph = client_of(typed_bank(0))
    ordered = agreed_graph(graph, "same", None)
    assert (
        described(ordered, "same").schema
        == described(
            agreed_graph(client_of(typed_bank(1)), "same", None), "same"
        ).schema
    )
    assert ordered.schema is not None
    assert ordered.schema.node_types == ("card", "person", "shop")
    assert ordered.feature_names[0] == "card.a"
    kind = ordered.graph.node_type
    assert kind is not None
    torch.testing.assert_close(
        ordered.graph.x[kind == 0][:, :3], graph.graph.x[graph.graph.y >= 0][:, 2:5]
    )


def test_private_relations_follow_the_agreed_ones() -> None:
    plain, own = (
        client_of(typed_bank(0)),
        typed_bank(2, has_device=True, private={USED}),
    )
    agreed = plain.schema.ordered() if plain.schema else None
    with pytest.raises(DataError, match="did not agree"):
        agreed_graph(client_of(own), "name", agreed)  # the kind device is told
    told = described(client_of(own), "name").told
    assert told is not None
    assert (told.node_types, told.relations) == (
        ("card", "device", "person", "shop"),
        (PAYS, OWNS),
    )
    found = agreed_graph(client_of(own), "name", told).schema
    assert found is not None
    assert found.relations == (PAYS, OWNS, ("card", "used.own", "device"))


def test_server_averages_a_relation_over_those_that_have_it(
    unlike: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads: list[dict[int, Mapping[str, Tensor]]] = []
    averaged: list[Mapping[str, Tensor]] = []
    aggregate = FedAvg.aggregate

    def watch(self: Any, server_round: int, found: Any) -> None:
        uploads.append({pid: dict(u.payload.tensors) for pid, u in found.items()})
        aggregate(self, server_round, found)
        averaged.append(dict(self.weights.tensors))

    monkeypatch.setattr(FedAvg, "aggregate", watch)
    values = SIZES | {"rounds": 1}
    simulate(
        "fedavg", owners=unlike, schema_align="name", output_dir=str(tmp_path), **values
    )
    used = "encoder.relations.1.0.weight"  # pays, used, owns in the order of names
    (sent,), (mean,) = uploads, averaged
    assert [pid for pid, tensors in sent.items() if used in tensors] == [1]
    torch.testing.assert_close(mean[used], sent[1][used])
    pays = "encoder.relations.0.0.weight"
    torch.testing.assert_close(
        mean[pays], sum(24 * tensors[pays] for tensors in sent.values()) / 72
    )
    assert not any("relations.3" in name for name in mean)


def test_private_schemas_upload_only_what_no_schema_names(
    unlike: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[Mapping[str, Any]] = []
    aggregate = FedAvg.aggregate

    def watch(self: Any, server_round: int, found: Any) -> None:
        shapes.extend(
            {n: t.shape for n, t in u.payload.tensors.items()} for u in found.values()
        )
        aggregate(self, server_round, found)

    monkeypatch.setattr(FedAvg, "aggregate", watch)
    simulate(
        "fedavg",
        owners=unlike,
        schema_align="private",
        output_dir=str(tmp_path),
        **SIZES,
    )
    assert all(one == shapes[0] for one in shapes)
    kinds = {name.split(".")[1] for name in shapes[0] if name.startswith("encoder")}
    assert kinds == {"roots", "bases"}


@pytest.mark.parametrize("align", ["same", "name", "private"])
def test_a_deployment_gives_the_numbers_of_a_simulation(
    align: str, alike: str, unlike: str, tmp_path: Path
) -> None:
    folder = alike if align == "same" else unlike
    values = SIZES | {"schema_align": align, "model": "rgcn"}
    values = of_file(SMALL) | values
    simulated = simulate("fedavg", owners=folder, output_dir=str(tmp_path), **values)
    nodes = [{"graph": str(path)} for path in sorted(Path(folder).glob("*.npz"))]
    deployed = run_owners(nodes, tmp_path / "deployed", **values)

    def numbers(run: Any) -> list[Any]:
        return [
            (row["failures"], row["loss"], *_some_scores(row["metrics"]["local"]))
            for row in run.rounds
        ]

    assert len(numbers(deployed)) == 2
    assert numbers(deployed) == numbers(simulated)


def test_shared_names_of_features_change_no_number(alike: str, tmp_path: Path) -> None:
    # the files list the kinds in another order than by name
    nodes = [{"graph": str(path)} for path in sorted(Path(alike).glob("*.npz"))]
    losses = [
        [
            row["loss"]
            for row in run_owners(
                nodes, tmp_path / str(shared), share_feature_names=shared, **SIZES
            ).rounds
        ]
        for shared in (False, True)
    ]
    assert losses[0] == losses[1]


def _some_scores(columns: Mapping[str, Mapping[str, float]]) -> tuple[float, float]:
    """Return scores that both engines give."""
    return columns["val"]["accuracy"], columns["test"]["macro_f1"]


def test_an_owner_with_other_kinds_is_left_out(alike: str, tmp_path: Path) -> None:
    other = typed_owners(tmp_path / "other", typed_bank(7, has_device=True))
    paths = [*sorted(Path(alike).glob("*.npz")), Path(other) / "bank0.npz"]
    nodes = [
        {"graph": str(path), "name": f"bank-{number}"}
        for number, path in enumerate(paths)
    ]
    run = run_owners(nodes, tmp_path / "run", **SIZES)
    assert run.status == "completed"
    (refused,) = run.summary["refused"]
    assert refused["name"] == "bank-3"
    assert 'Set schema-align = "name"' in refused["reason"]


@pytest.mark.parametrize("align", ["same", "name", "private"])
def test_an_owner_without_a_node_to_predict_is_refused(
    align: str, tmp_path: Path
) -> None:
    bank = typed_bank(3)
    assert bank.schema is not None
    assert bank.node_type is not None
    cards = bank.node_type == bank.schema.node_types.index("card")
    rest = (~cards).nonzero().flatten()
    part = induced_graph(bank, rest, masks={n: m[rest] for n, m in bank.masks.items()})
    other = replace(
        bank,
        x=part.x,
        edge_index=part.edge_index,
        y=part.y,
        masks=dict(part.masks),
        messages=part.messages,
        node_type=part.node_type,
    )
    folder = typed_owners(tmp_path / "own", typed_bank(0), typed_bank(1), other)
    values = SIZES | {"schema_align": align}
    with pytest.raises(DataError, match=r'bank2: bank2 has no node of the kind "card"'):
        simulate("fedavg", owners=folder, output_dir=str(tmp_path), **values)
    nodes = [{"graph": str(path)} for path in sorted(Path(folder).glob("*.npz"))]
    run = run_owners(nodes, tmp_path / "run", **values)
    (refused,) = run.summary["refused"]
    assert refused["name"] == "bank2"
    assert refused["reason"].startswith("its graph file cannot be used")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shop": "Shop"}, 'its kind "Shop" is spelled "shop" by most clients.'),
        (
            {"card": "atm", "shop": "city", "person": "guard"},
            "it predicts another kind of nodes, or another relation, than most clients.",
        ),
    ],
)
def test_an_owner_with_kinds_of_its_own_names_is_left_out(
    changes: dict[str, str], reason: str, tmp_path: Path
) -> None:
    for number in range(3):
        tables = typed_tables(number)
        if number == 2:
            for old, new in changes.items():
                tables[f"nodes/{new}.csv"] = tables.pop(f"nodes/{old}.csv")
                text = tables["relations.csv"].replace(f",{old}", f",{new}")
                tables["relations.csv"] = text
        write_tables(tmp_path / "own" / f"bank{number}", tables)
    values = SIZES | {"schema_align": "name"}
    with pytest.raises(DataError, match=f"bank2: {re.escape(reason)}"):
        simulate(
            "fedavg", owners=str(tmp_path / "own"), output_dir=str(tmp_path), **values
        )
    nodes = [{"graph": str(path)} for path in sorted((tmp_path / "own").iterdir())]
    run = run_owners(nodes, tmp_path / "run", **values)
    (refused,) = run.summary["refused"]
    assert refused["name"] == "bank2"
    assert refused["reason"].startswith(reason)


def test_an_owner_with_many_relations_of_its_own_is_left_out() -> None:
    schema = Schema("card", (("card", 3), ("shop", 2)), (PAYS,))
    alone = tuple(("card", f"r{number}", "shop") for number in range(101))
    many = replace(schema, relations=(PAYS, *alone))
    told = {"a": Told(schema), "b": Told(schema), "c": Told(many)}
    reasons = differing_schemas(told, "name")
    assert list(reasons) == ["c"]
    assert "101 kinds of nodes or relations that no other client has" in reasons["c"]
    fewer = replace(schema, relations=(PAYS, *alone[1:]))
    assert not differing_schemas(told | {"c": Told(fewer)}, "name")
