"""Predictions for typed graphs by models of the server and of data owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from flower_fgl import Run, simulate, to_npz
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import TypedModel
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.transforms.normalize_features import normalise_rows
from flower_fgl.datasets.transforms.typed import agreed_graph
from flower_fgl.runs.saved_model import load_model
from flower_fgl.simulation.prediction import predict_graph
from tests.support.owners import run_owners
from tests.support.typed_graphs import (
    client_of,
    hetero,
    typed_bank,
    typed_tables,
    write_tables,
)

TYPED: dict[str, Any] = {"model": "rgcn", "hidden_channels": 8, "rounds": 2}


@pytest.fixture(scope="module")
def tables() -> list[dict[str, str]]:
    """Return the tables of three owners, of which the second has devices."""
    return [typed_tables(number, has_device=number == 1) for number in range(3)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train on three owners with equal kinds and relations."""
    folder = tmp_path_factory.mktemp("same")
    for number in range(3):
        write_tables(folder / "own" / f"bank{number}", typed_tables(number))
    return simulate(
        "fedavg",
        owners=str(folder / "own"),
        output_dir=str(folder),
        **{**TYPED, "rounds": 8, "lr": 0.05},
    )


def without(tables: Mapping[str, str], *words: str) -> dict[str, str]:
    """Return tables without those named, and without these lines of relations.csv."""
    kept = {
        name: text
        for name, text in tables.items()
        if not any(name.endswith(f"/{word}.csv") for word in words)
    }
    lines = kept["relations.csv"].splitlines()
    kept["relations.csv"] = "\n".join(
        line for line in lines if not {*words} & {*line.split(",")}
    )
    return kept


def test_the_aggregated_model_predicts_what_it_evaluates(
    run: Run, tmp_path: Path
) -> None:
    folder = write_tables(tmp_path / "new", typed_tables(7))
    found = run.predict(folder)
    saved = load_model(run.path)
    typed = TypedModel.from_text(saved.card.messages)
    assert typed is not None
    assert typed.schema.is_hashed
    client = agreed_graph(client_of(load_graph_file(folder).dataset), "same", None)
    data = ClientData.build(client, torch.device("cpu"))
    with torch.inference_mode():
        due = saved.model(data.inputs[0]).softmax(1)[client.graph.y >= 0]
    assert found["node"].tolist() == [f"card-{place}" for place in range(40)]
    values = torch.tensor(found[["p:bad", "p:good"]].to_numpy())
    torch.testing.assert_close(values, due, check_dtype=False, rtol=0, atol=1e-7)
    lines = typed_tables(7)["nodes/card.csv"].splitlines()
    labels = {line.split(",")[0]: line.split(",")[4] for line in lines}
    is_right = found["predicted"] == found["node"].map(labels)
    assert is_right.mean() > 0.9


def test_labels_and_the_order_of_tables_and_lines_change_no_score(
    run: Run, tmp_path: Path
) -> None:
    tables = typed_tables(7)
    due = run.predict(write_tables(tmp_path / "as-is", tables))
    other = {}
    for name, text in tables.items():
        header, *lines = text.splitlines()
        if name == "nodes/card.csv":
            header, lines = "id,a,b,c", [line.rsplit(",", 2)[0] for line in lines]
        other[name] = "\n".join([header, *lines[::-1]])
    found = run.predict(write_tables(tmp_path / "turned", other))
    pd.testing.assert_frame_equal(
        found.sort_values("node", ignore_index=True),
        due.sort_values("node", ignore_index=True),
        atol=1e-6,
        rtol=0,
    )


def test_a_graph_may_lack_kinds_and_relations(run: Run, tmp_path: Path) -> None:
    tables = without(typed_tables(7), "person", "owns")
    prediction = predict_graph(run.path, write_tables(tmp_path / "less", tables))
    assert len(prediction) == 40
    assert "order of the columns is not checked" in prediction.note
    whole = predict_graph(run.path, write_tables(tmp_path / "all", typed_tables(7)))
    assert whole.note == ""
    assert not torch.equal(prediction.values, whole.values)


def test_a_relation_without_edges_need_not_be_known(run: Run, tmp_path: Path) -> None:
    tables = typed_tables(7)
    whole = predict_graph(run.path, write_tables(tmp_path / "all", tables))
    tables["relations.csv"] += "likes,card,card\n"
    tables["edges/likes.csv"] = "source,target\n"
    more = predict_graph(run.path, write_tables(tmp_path / "more", tables))
    assert torch.equal(more.values, whole.values)
    assert more.note == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("nodes/shop.csv", ",s,t", ",t,s"), "or their order, differ from those in"),
        (("nodes/shop.csv", ",s,t", ",s,u"), "or their order, differ from those in"),
        (
            ("relations.csv", "pays,", "bays,"),
            "the relation card -bays-> shop, which the",
        ),
    ],
)
def test_other_names_than_in_training_are_refused(
    change: tuple[str, str, str], text: str, run: Run, tmp_path: Path
) -> None:
    name, old, new = change
    tables = typed_tables(7)
    tables[name] = tables[name].replace(old, new)
    tables["edges/bays.csv"] = tables["edges/pays.csv"]
    del tables["edges/pays.csv" if name == "relations.csv" else "edges/bays.csv"]
    with pytest.raises(DataError, match=text):
        predict_graph(run.path, write_tables(tmp_path / "new", tables))


def test_an_unknown_kind_and_a_missing_one_to_predict_are_refused(
    run: Run, tmp_path: Path
) -> None:
    more = write_tables(tmp_path / "more", typed_tables(7, has_device=True))
    with pytest.raises(DataError, match='nodes of the kind "device", which the model'):
        predict_graph(run.path, more)
    tables = {
        "relations.csv": "relation,source,target\nknows,person,person\n",
        "nodes/person.csv": "id,age\np1,1\n",
        "edges/knows.csv": "source,target\n",
    }
    none = write_tables(tmp_path / "none", tables)
    with pytest.raises(DataError, match="no node of the kind that the model predicts"):
        predict_graph(run.path, none)


def test_a_model_of_kinds_refuses_a_plain_graph(run: Run, tmp_path: Path) -> None:
    plain = {"nodes.csv": "id,a,b\n1,2,3\n2,3,4\n", "edges.csv": "source,target\n1,2\n"}
    with pytest.raises(
        DataError, match="has one kind of nodes and edges, but the model"
    ):
        predict_graph(run.path, write_tables(tmp_path / "plain", plain))


def test_a_model_that_ignores_kinds_predicts_all_of_them(tmp_path: Path) -> None:
    tables = [typed_tables(number) for number in range(2)]
    for number, one in enumerate(tables):
        one["nodes/shop.csv"] = one["nodes/shop.csv"].replace(",s,t", ",a,b")
        lines = one["nodes/card.csv"].splitlines()
        one["nodes/card.csv"] = "\n".join(
            ",".join([cells[0], *cells[1:3], *cells[4:]])
            for cells in (line.split(",") for line in lines)
        )
        person = one["nodes/person.csv"].splitlines()
        one["nodes/person.csv"] = "\n".join(
            [f"{person[0]},b", *(f"{line},0" for line in person[1:])]
        )
        write_tables(tmp_path / "own" / f"bank{number}", one)
    run = simulate(
        "fedavg",
        owners=str(tmp_path / "own"),
        types="ignore",
        rounds=1,
        output_dir=str(tmp_path),
    )
    prediction = predict_graph(run.path, tmp_path / "own" / "bank0")
    assert "it predicts nodes of all kinds" in prediction.note
    assert pd.Series(prediction.items["kind"]).value_counts().to_dict() == {
        "card": 40,
        "person": 10,
        "shop": 8,
    }


@pytest.mark.parametrize("align", ["name", "private"])
def test_the_model_of_an_owner_knows_its_own_names(
    align: str, tables: list[dict[str, str]], tmp_path: Path
) -> None:
    listed = tables[1]["relations.csv"].replace("target", "target,private")
    own = listed.replace("used,card,device", "used,card,device,yes")
    owners = [tables[0], {**tables[1], "relations.csv": own}, tables[2]]
    folders = [
        write_tables(tmp_path / "own" / f"bank{number}", one)
        for number, one in enumerate(owners)
    ]
    run_owners(
        [{"graph": str(folder)} for folder in folders],
        tmp_path / "run",
        schema_align=align,
        **TYPED,
    )
    models = {
        load_model(path).card.owner: path.parent
        for path in (tmp_path / "run-models").glob("*/model.safetensors")
    }
    assert set(models) == {"bank0", "bank1", "bank2"}
    prediction = predict_graph(models["bank1"], folders[1])
    assert prediction.items["node"].tolist() == [f"card-{p}" for p in range(40)]
    card = prediction.card
    typed = TypedModel.from_text(card.messages)
    assert typed is not None
    assert not typed.schema.is_hashed
    assert "device" in typed.schema.node_types
    # the private relation is read: without its edges the scores differ
    fewer = {**owners[1], "edges/used.csv": "source,target\n"}
    other = predict_graph(models["bank1"], write_tables(tmp_path / "fewer", fewer))
    assert not torch.equal(other.values, prediction.values)
    if align == "name":  # device is a kind of all, used a relation of bank1 alone
        left_out = predict_graph(models["bank0"], folders[1])
        assert "private relations card -used-> device" in left_out.note
    else:
        with pytest.raises(DataError, match=r'kind "device", .* Known: card, person'):
            predict_graph(models["bank0"], folders[1])


def test_a_model_with_a_vector_for_each_node_predicts_no_other_graph(
    tmp_path: Path,
) -> None:
    folders = [
        write_tables(tmp_path / "own" / f"bank{number}", typed_tables(number))
        for number in range(2)
    ]
    run_owners(
        [{"graph": str(folder)} for folder in folders],
        tmp_path / "run",
        schema_align="private",
        node_embedding=True,
        **TYPED,
    )
    model, _ = (tmp_path / "run-models").iterdir()
    with pytest.raises(DataError, match="has a learned vector for each node of its"):
        predict_graph(model, folders[0])


@pytest.mark.parametrize("norm", ["none", "rows", "columns"])
def test_graphs_of_pyg_are_scored_as_their_files(norm: str, tmp_path: Path) -> None:
    banks = [hetero(typed_bank(number)) for number in range(2)]
    run = simulate(
        "fedavg", banks, feature_norm=norm, output_dir=str(tmp_path), **TYPED
    )
    new = typed_bank(7)
    to_npz(hetero(new), tmp_path / "new.npz")
    of_file = run.predict(tmp_path / "new.npz")
    found = run.predict(hetero(new))
    assert found["node"].tolist() == list(range(40))
    assert found.drop(columns="node").equals(of_file.drop(columns="node"))
    numbered = hetero(new).to_homogeneous()
    numbered.type_widths = {"shop": 2, "person": 1}
    mixed = run.predict(numbered)
    assert mixed["node"].tolist() == list(range(8, 48))
    assert new.schema is not None
    kinds, raw = new.node_type, client_of(new)
    assert kinds is not None
    x = raw.graph.x
    if norm == "rows":
        x = normalise_rows(x)
    elif norm == "columns":  # each owner used its own statistics
        x = torch.zeros_like(x)
        for number, (_, columns) in enumerate(new.schema.blocks()):
            block = new.x[kinds == number][:, columns].double()
            scaled = (block - block.mean(0)) / block.std(0, correction=0)
            x[(kinds == number).nonzero(), torch.arange(6)[columns]] = scaled.float()
    due = agreed_graph(replace(raw, graph=replace(raw.graph, x=x)), "same", None)
    data = ClientData.build(due, torch.device("cpu"))
    with torch.inference_mode():
        scores = load_model(run.path).model(data.inputs[0]).softmax(1)[new.y >= 0]
    values = torch.tensor(found[["p:0", "p:1"]].to_numpy())
    torch.testing.assert_close(values, scores, check_dtype=False, rtol=0, atol=1e-6)
