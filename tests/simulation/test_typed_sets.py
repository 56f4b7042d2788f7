"""Sets of typed graphs: runs, deployment, exports, predictions, checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from flower_fgl import Run, resume, simulate
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.partition import export_clients
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.graph_files.graph_set import load_graph_set
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.pyg_data import store_set
from flower_fgl.datasets.transforms.typed import agreed_graph
from flower_fgl.methods import parse_config
from flower_fgl.simulation.prediction import explain_item, predict_graph
from tests.datasets.test_store import assert_same
from tests.support.owners import run_owners
from tests.support.short_runs import SMALL, comparable, of_file
from tests.support.typed_graphs import write_tables
from tests.support.typed_sets import molecules, set_owners, set_tables

TYPED: dict[str, Any] = {"setting": "graph", "model": "rgcn", "rounds": 2}


@pytest.fixture
def owners(tmp_path: Path) -> str:
    return set_owners(tmp_path / "owners", 50, 60, 70)


@pytest.mark.parametrize("align", ["same", "name", "private"])
def test_a_run_in_process_equals_the_deployment(align: str, tmp_path: Path) -> None:
    lacking = -1 if align == "same" else 1
    folder = set_owners(tmp_path / "owners", 50, 60, 70, without_rings=lacking)
    values = {**TYPED, "schema_align": align}
    nodes = [{"graph": f"{folder}/own{k}"} for k in range(3)]
    deployed = run_owners(nodes, tmp_path / "run", **values)
    settings = {**of_file(SMALL), **values, "output_dir": str(tmp_path / "runs")}
    local = simulate("fedavg", owners=folder, **settings)
    assert deployed.summary["best"]["test"] == local.summary["best"]["test"]
    sizes = {c["name"]: c["num_nodes"] for c in deployed.clients if "name" in c}
    assert sizes == {"own0": 50, "own1": 60, "own2": 70}


def test_a_set_is_learnt_and_partitioned(tmp_path: Path) -> None:
    settings = {**TYPED, "rounds": 15, "lr": 0.05, "output_dir": str(tmp_path)}
    run = simulate("fedavg", molecules(150), clients=3, hidden_channels=8, **settings)
    assert run.best is not None
    assert run.best["test"]["accuracy"] > 0.7


@pytest.mark.parametrize("kind", ["", "ring"])
def test_an_export_reads_back_equal(kind: str, tmp_path: Path) -> None:
    path = store_set(molecules(60), tmp_path)
    values = {"setting": "graph", "model": "rgcn", "target-node": kind}
    config = parse_config({**values, "dataset": str(path), "clients": 2})
    clients, _, _ = build_clients(config, 2)
    for file, client in zip(
        export_clients(config, tmp_path / "out"), clients, strict=True
    ):
        back = client_from_file(file, parse_config(values))
        assert back.schema == client.schema
        assert back.schema is not None
        assert back.schema.target == kind
        same = replace(back, node_ids=client.node_ids, partition_id=client.partition_id)
        assert_same(same, client)
        for one, other in zip(back.graphs, client.graphs, strict=True):
            assert torch.equal(one.node_type, other.node_type)  # type: ignore[arg-type]
            torch.testing.assert_close(vars(one.messages), vars(other.messages))


def test_an_interrupted_run_resumes_as_if_nothing_happened(
    owners: str, tmp_path: Path
) -> None:
    settings = {**TYPED, "rounds": 3, "checkpoint_every": 1, "owners": owners}
    whole = simulate("fedavg", run_dir=str(tmp_path / "whole"), **settings)

    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    cut = str(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", run_dir=cut, on_round=stop, **settings)
    assert comparable(resume(cut)) == comparable(whole)


def test_uploads_of_sets_are_summed_securely(owners: str, tmp_path: Path) -> None:
    settings = {**TYPED, "owners": owners, "output_dir": str(tmp_path)}
    run = simulate("fedavg", secure_aggregation=True, **settings)
    assert run.status == "completed"
    assert run.best is not None
    assert run.best["test"]["num_nodes"] > 0


@pytest.mark.parametrize("kind", ["", "atom"])
def test_predictions_of_a_set_are_those_of_each_graph(
    kind: str, owners: str, tmp_path: Path
) -> None:
    settings = {**TYPED, "owners": owners, "target_node": kind}
    run = simulate("fedavg", output_dir=str(tmp_path / "runs"), **settings)
    graphs = molecules(7, seed=9)
    folder = write_tables(tmp_path / "new", set_tables(graphs))
    found = run.predict(folder)
    assert found["graph"].tolist() == [f"m{k}" for k in range(7)]
    alone = pd.concat([run.predict([graph]) for graph in graphs], ignore_index=True)
    columns = ["predicted", "p:safe", "p:toxic"]
    pd.testing.assert_frame_equal(found[columns], alone[columns], atol=1e-5)
    without = run.predict(molecules(4, has_rings=False))
    assert len(without) == 4


def test_a_graph_of_a_set_is_explained(owners: str, tmp_path: Path) -> None:
    run = simulate("fedavg", owners=owners, output_dir=str(tmp_path), **TYPED)
    folder = write_tables(tmp_path / "new", set_tables(molecules(5)))
    found = explain_item(run.path, folder, ["m1"])
    row = predict_graph(run.path, folder).to_frame().iloc[1]
    assert found.what == row["predicted"]
    assert found.score == pytest.approx(row[f"p:{found.what}"], abs=1e-5)
    assert set(found.labels) <= {"bond", "has"}
    assert len(found.drawing) == 4  # two bonds, and two atoms of the ring


def test_the_owners_model_predicts_with_its_names(tmp_path: Path) -> None:
    folder = set_owners(tmp_path / "owners", 50, 60, 70, without_rings=2)
    nodes = [{"graph": f"{folder}/own{k}"} for k in range(3)]
    run_owners(nodes, tmp_path / "run", **TYPED, schema_align="name")
    saved = next((tmp_path / "run-models").glob("*own0*"))
    tables = write_tables(tmp_path / "new", set_tables(molecules(6)))
    assert len(predict_graph(saved, tables).to_frame()) == 6


def test_features_are_standardized_by_kind_over_training_graphs(owners: str) -> None:
    values = {"setting": "graph", "model": "rgcn", "feature-norm": "columns"}
    client = client_from_file(Path(f"{owners}/own0"), parse_config(values))
    graph = client.graph
    assert graph.node_type is not None
    of_atoms = graph.x[graph.node_type == 0]
    torch.testing.assert_close(of_atoms.mean(dim=0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(of_atoms.std(dim=0, correction=0), torch.ones(2))


def test_other_models_read_a_set_without_kinds(tmp_path: Path) -> None:
    graphs = molecules(40)
    for graph in graphs:
        if "ring" in graph.node_types:
            graph["ring"].x = torch.ones(1, 2)
    settings = {"setting": "graph", "model": "gin", "rounds": 2, "clients": 2}
    settings |= {"types": "ignore", "output_dir": str(tmp_path)}
    run = simulate("fedavg", graphs, **settings)
    assert len(run.predict(graphs[:5])) == 5


def test_check_graph_counts_kinds_of_all_graphs(owners: str) -> None:
    settings = {"setting": "graph", "model": "rgcn", "target-node": "atom"}
    folder = Path(f"{owners}/own0")
    report = inspect_graph(folder, settings)
    assert report.problems == []
    atoms = len((folder / "nodes/atom.csv").read_text().splitlines()) - 1
    bonds = len((folder / "edges/bond.csv").read_text().splitlines()) - 1
    assert report.parts == [
        "Kinds of nodes:",
        f"  atom: {atoms} nodes, pooled, 2 features",
        "  ring: 33 nodes, no features",
        "Relations:",
        f"  atom -bond-> atom: {bonds} edges",
        "  ring -has-> atom: 66 edges",
    ]


def test_private_relations_of_a_set_stay_local(owners: str, tmp_path: Path) -> None:
    path = Path(f"{owners}/own0/relations.csv")
    lines = path.read_text().splitlines()
    path.write_text(f"{lines[0]},private\n{lines[1]},\n{lines[2]},yes\n")
    client = client_from_file(
        path.parent, parse_config({**_dashed(TYPED), "schema-align": "name"})
    )
    assert client.schema is not None
    assert client.schema.private == {("ring", "has", "atom")}
    assert agreed_graph(client, "name", None) is client
    settings = {**TYPED, "output_dir": str(tmp_path), "owners": owners}
    run = simulate("fedavg", schema_align="name", **settings)
    assert run.status == "completed"
    with pytest.raises(DataError, match="keeps relations private"):
        simulate("fedavg", **settings)


def _dashed(settings: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in settings.items()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "gin"}, 'passes the same messages. Set model = "rgcn"'),
        (
            {"target_node": "rings"},
            'target-node = "rings", whose nodes are pooled, is no',
        ),
        ({"graph_features": "degree"}, "is for graphs of one kind"),
        ({"model": "gin", "types": "ignore"}, "needs features of one width"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str, owners: str, tmp_path: Path
) -> None:
    values = {**TYPED, **settings, "output_dir": str(tmp_path)}
    with pytest.raises(DataError, match=message):
        simulate("fedavg", owners=owners, **values)


def test_learned_vectors_of_nodes_are_refused(owners: str) -> None:
    with pytest.raises(ConfigError, match="a vector for each node of the training"):
        simulate("fedavg", owners=owners, node_embedding=True, **TYPED)


def test_graphs_without_the_pooled_kind_are_counted(
    owners: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = parse_config({**_dashed(TYPED), "target-node": "ring"})
    client_from_file(Path(f"{owners}/own0"), config)
    assert '17 of 50 graphs have no node of the kind "ring"' in caplog.text
    folder = write_tables(
        Path(owners) / "none", set_tables(molecules(9, has_rings=False))
    )
    with pytest.raises(DataError, match='target-node = "ring", whose nodes are pooled'):
        client_from_file(folder, config)


def test_the_pooled_kind_changes_the_model(owners: str, tmp_path: Path) -> None:
    settings = {**TYPED, "owners": owners, "output_dir": str(tmp_path), "rounds": 1}
    runs: list[Run] = [
        simulate("fedavg", target_node=kind, **settings)
        for kind in ("", "atom", "ring")
    ]
    losses = {run.rounds[0]["loss"] for run in runs}
    assert len(losses) == 3
    assert load_graph_set(Path(f"{owners}/own0")).dataset.schema is not None
