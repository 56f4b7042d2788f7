"""Sets of graphs of data owners: runs, exports, checks, deployment in one process."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flower_fgl import resume, simulate
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.main import app
from flower_fgl.cli.partition import export_clients
from flower_fgl.core.errors import DataError, RunError
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.graph_files.graph_set import load_graph_set
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.owners import build_owners
from flower_fgl.datasets.splits.graph_sets import split_set
from flower_fgl.methods import parse_config
from flower_fgl.simulation.prediction import predict_graph
from tests.datasets.test_store import assert_same
from tests.support.graph_sets import set_arrays, write_set, write_tables
from tests.support.owners import run_owners
from tests.support.short_runs import SMALL, comparable, of_file

GRAPH: dict[str, Any] = {"setting": "graph", "model": "gin", "rounds": 2}


@pytest.fixture
def owners(tmp_path: Path) -> Path:
    folder = tmp_path / "owners"
    for number, name in enumerate("abc"):
        write_set(folder / f"{name}.npz", 50 + 10 * number, number)
    return folder


def test_owners_run_and_equal_graphs_are_in_one_part(owners: Path) -> None:
    config = parse_config({"setting": "graph", "owners": str(owners)})
    assert not config.has_local_heads  # the classes of files are agreed by name
    clients, _, edges = build_owners(config)
    assert edges == sum(client.num_edges for client in clients)
    parts: dict[str, str] = {}
    for client in clients:
        owned = load_graph_set(owners / f"{client.name}.npz")
        for name, graph in zip(
            ("train", "val", "test"), (client.graph, *client.evaluation), strict=True
        ):
            chosen = client_masks(owners / f"{client.name}.npz")[name]
            assert int(chosen.sum()) == graph.num_items > 0
            for number in chosen.nonzero().flatten().tolist():
                assert parts.setdefault(owned.ids[number], name) == name
    assert len(parts) == 70  # g0 to g69, most of them at all three owners


def test_a_random_split_of_owners_with_the_same_graphs_is_warned_about(
    owners: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"setting": "graph", "owners": str(owners)}
    build_owners(parse_config(values))
    assert not caplog.messages
    config = parse_config({**values, "split-by": "random"})
    build_owners(config)
    ids = {}
    for name in "abc":
        owned = load_graph_set(owners / f"{name}.npz")
        train = split_set(owned, config)[0]["train"].tolist()
        parts = list(zip(owned.ids, train, strict=True))
        ids[name] = {
            is_train: {g for g, t in parts if t == is_train} for is_train in (0, 1)
        }
    for name, text in zip("abc", caplog.messages, strict=True):
        elsewhere = set.union(*(ids[other][1] for other in ids if other != name))
        shared, held = len(ids[name][0] & elsewhere), len(ids[name][0])
        assert shared > 0
        assert text.startswith(
            f"{name}: {shared} of {held} validation and test graphs have the identifier "
            "of a training graph of another owner: scores may be too high"
        )


def client_masks(path: Path) -> dict[str, torch.Tensor]:
    config = parse_config({"setting": "graph"})
    return split_set(load_graph_set(path), config)[0]


def test_a_run_in_process_equals_the_deployment(owners: Path, tmp_path: Path) -> None:
    nodes = [{"graph": str(owners / f"{name}.npz")} for name in "abc"]
    deployed = run_owners(nodes, tmp_path / "run", **GRAPH)
    settings = {**of_file(SMALL), **GRAPH, "output_dir": str(tmp_path / "runs")}
    local = simulate("fedavg", owners=str(owners), **settings)
    assert deployed.summary["best"]["test"] == local.summary["best"]["test"]
    sizes = {c["name"]: c["num_nodes"] for c in deployed.clients if "name" in c}
    assert sizes == {"a": 50, "b": 60, "c": 70}


def test_features_of_edges_that_a_model_does_not_read_are_named(
    owners: Path, tmp_path: Path
) -> None:
    settings = {**of_file(SMALL), **GRAPH, "output_dir": str(tmp_path / "runs")}
    run = simulate("fedavg", owners=str(owners), **settings)
    edges = set_arrays(20)["edges"]
    path = write_set(tmp_path / "new.npz", 20, edge_attr=np.ones((len(edges), 2)))
    note = predict_graph(run.path, path).note
    assert f"edge_attr of {path} is not used by model gin." in note
    assert "edge_attr" not in predict_graph(run.path, owners / "a.npz").note


def test_an_export_reads_back_equal(owners: Path, tmp_path: Path) -> None:
    values = {"setting": "graph", "dataset": str(owners / "c.npz"), "clients": 3}
    config = parse_config(values)
    clients, _, _ = build_clients(config, 3)
    paths = export_clients(config, tmp_path / "out")
    for path, client in zip(paths, clients, strict=True):
        back = client_from_file(path, parse_config({"setting": "graph"}))
        assert back.feature_names == client.feature_names
        same = replace(back, node_ids=client.node_ids, partition_id=client.partition_id)
        assert_same(same, client)
    settings = {**of_file(SMALL), **GRAPH, "output_dir": str(tmp_path / "runs")}
    one = simulate("fedavg", dataset=values["dataset"], clients=3, **settings)
    other = simulate("fedavg", owners=str(tmp_path / "out"), **settings)
    assert one.summary["best"]["test"] == other.summary["best"]["test"]


def test_numbers_with_holes_train_alike_in_process_and_deployed(
    tmp_path: Path,
) -> None:
    names = {"class_names": None, "target_names": np.array(["mass", "charge"])}
    for number, name in enumerate("abc"):
        sizes = np.bincount(set_arrays(60, number)["graph_of_node"])
        y = np.stack([sizes * 1.5, sizes**2.0], axis=1)
        y[number::7, 0] = np.nan
        write_set(tmp_path / "owners" / f"{name}.npz", 60, number, y=y, **names)
    nodes = [{"graph": str(tmp_path / "owners" / f"{name}.npz")} for name in "abc"]
    numbers = {**GRAPH, "target_kind": "numbers"}
    deployed = run_owners(nodes, tmp_path / "run", **numbers)
    settings = {**of_file(SMALL), **numbers, "output_dir": str(tmp_path / "runs")}
    local = simulate("fedavg", owners=str(tmp_path / "owners"), **settings)
    assert deployed.summary["best"]["test"] == local.summary["best"]["test"]
    assert local.summary["best"]["test"]["nrmse"] > 0


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_exports_of_labels_and_numbers_read_back_equal(
    kind: str, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    y = np.round(draw.normal(size=(60, 2)), 2)
    y[draw.random((60, 2)) < 0.3] = np.nan
    name, units = "target_names", {"target_units": np.array(["m", ""])}
    if kind == "labels":
        y, name, units = np.where(np.isnan(y), -1, y > 0).astype(int), "label_names", {}
    names = {"class_names": None, name: np.array(["p", "q"]), **units}
    path = write_set(tmp_path / "own.npz", y=y, graph_ids=None, **names)
    values = {"setting": "graph", "target-kind": kind}
    with pytest.raises(DataError, match=f'Set target-kind = "{kind}"'):
        client_from_file(path, parse_config({"setting": "graph"}))
    config = parse_config({**values, "dataset": str(path), "clients": 2})
    clients, _, _ = build_clients(config, 2)
    assert sum(client.num_items for client in clients) < 60  # some know nothing
    for file, client in zip(
        export_clients(config, tmp_path / "out"), clients, strict=True
    ):
        back = client_from_file(file, parse_config(values))
        assert back.target == client.target
        same = replace(back, node_ids=client.node_ids, partition_id=client.partition_id)
        assert_same(same, client)
        for one, other in zip(back.held, client.held, strict=True):
            assert one.targets is not None
            torch.testing.assert_close(one.targets, other.targets, equal_nan=True)


def test_gine_reads_the_edges_of_a_set_and_of_its_export(
    owners: Path, tmp_path: Path
) -> None:
    edge_attr = np.random.default_rng(0).normal(size=(len(set_arrays(80)["edges"]), 2))
    path = write_set(
        owners / "d.npz", 80, edge_attr=edge_attr, edge_attr_names=np.array(["p", "q"])
    )
    values = {"setting": "graph", "dataset": str(path), "clients": 2, "model": "gine"}
    paths = export_clients(parse_config(values), tmp_path / "out")
    assert load_graph_set(paths[0]).dataset.messages is not None
    settings = {**of_file(SMALL), "setting": "graph", "rounds": 2, "model": "gine"}
    settings |= {"output_dir": str(tmp_path / "runs")}
    one = simulate("fedavg", dataset=str(path), clients=2, **settings)
    other = simulate("fedavg", owners=str(tmp_path / "out"), **settings)
    assert one.summary["best"]["test"] == other.summary["best"]["test"]


def test_a_set_is_partitioned_with_its_identifiers(owners: Path) -> None:
    keys = np.array([f"k{number // 4}" for number in range(60)])
    path = write_set(owners / "b.npz", 60, 1, graph_keys=keys)
    config = parse_config({"setting": "graph", "dataset": str(path)})
    clients, _, _ = build_clients(config, 3)
    masks = client_masks(path)
    for name, number in (("train", 0), ("val", 1), ("test", 2)):
        held = sum((c.graph, *c.evaluation)[number].num_items for c in clients)
        assert held == int(masks[name].sum())


def test_an_interrupted_run_resumes_as_if_nothing_happened(
    owners: Path, tmp_path: Path
) -> None:
    settings = {**GRAPH, "rounds": 3, "checkpoint_every": 1, "owners": str(owners)}
    whole = simulate("fedavg", run_dir=str(tmp_path / "whole"), **settings)

    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    cut = str(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", run_dir=cut, on_round=stop, **settings)
    assert comparable(resume(cut)) == comparable(whole)


def test_uploads_of_sets_are_summed_securely(owners: Path, tmp_path: Path) -> None:
    settings = {**GRAPH, "output_dir": str(tmp_path), "secure_aggregation": True}
    run = simulate("fedavg", owners=str(owners), **settings)
    open_run = simulate("fedavg", owners=str(owners), **GRAPH, output_dir=str(tmp_path))
    assert run.best is not None
    assert open_run.best is not None
    assert run.best["test"]["num_nodes"] == open_run.best["test"]["num_nodes"] > 0


def test_floors_of_a_node_count_graphs(owners: Path, tmp_path: Path) -> None:
    nodes: list[dict[str, Any]] = [{"graph": str(owners / f"{n}.npz")} for n in "abc"]
    nodes[0]["min-train-nodes"] = 1000
    run = run_owners(nodes, tmp_path / "run", min_clients=2, **GRAPH)
    assert {c["name"] for c in run.clients if "name" in c} == {"b", "c"}


def test_the_first_split_of_an_owner_is_kept(owners: Path, tmp_path: Path) -> None:
    nodes = [
        {"graph": str(owners / f"{n}.npz"), "state-dir": str(tmp_path / f"state-{n}")}
        for n in "abc"
    ]
    run_owners(nodes, tmp_path / "first", **GRAPH)
    with pytest.raises(RunError, match=r"split-by = id, split = 80/10/10"):
        run_owners(nodes, tmp_path / "second", partition_seed=7, **GRAPH)


def test_nodes_without_features_need_degrees(tmp_path: Path) -> None:
    bare = {"x": None, "feature_names": None}
    path = write_set(tmp_path / "own.npz", 20, **bare)
    config = parse_config({"setting": "graph"})
    with pytest.raises(DataError, match=r'have no features.*graph-features = "degree"'):
        client_from_file(path, config)
    values = {"setting": "graph", "graph-features": "degree", "max-degree": 2}
    client = client_from_file(path, parse_config(values))
    assert client.feature_names == ("degree=0", "degree=1", "degree=2", "degree>2")
    degrees = torch.bincount(
        client.graph.edge_index[0], minlength=client.graph.num_nodes
    )
    assert client.graph.x.argmax(dim=1).tolist() == degrees.clamp(max=3).tolist()


def test_the_split_of_a_file_counts_if_the_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = ["train", "val", "test"] * 4
    rows = [f"g{k},{'xy'[k % 2]},{part}" for k, part in enumerate(parts)]
    folder = write_tables(
        tmp_path / "own",
        graphs="\n".join(["id,label,split", *rows]),
        nodes="\n".join(["graph,id,mass", *(f"g{k},a,{k}" for k in range(12))]),
        edges="graph,source,target",
    )
    drawn = client_from_file(folder, parse_config({"setting": "graph"}))
    assert drawn.replaces_split
    note = 'The split in this file is not used. split = "public" uses it'
    leak = "; it may test an item that another owner trains on."
    assert caplog.text.count(f"own: {note}") == 1
    caplog.clear()
    other = shutil.copytree(folder, tmp_path / "other")
    build_owners(parse_config({"setting": "graph", "owners": f"{folder},{other}"}))
    assert caplog.text.count(note) == 2
    caplog.clear()
    build_clients(parse_config({"setting": "graph", "dataset": str(folder)}), 2)
    assert caplog.text.count(f"own: {note}") == 1
    with pytest.raises(
        RunError, match="set split = public in the run, or the data owner"
    ):
        run_owners([{"graph": str(folder)}] * 2, tmp_path / "run", **GRAPH)
    assert dict(drawn.drawn_from)["split-by"] == "id"
    caplog.clear()
    assert inspect_graph(folder, {"setting": "graph"}).notes.count(f"{note}{leak}") == 1
    assert note not in caplog.text  # it is in the report
    own = client_from_file(
        folder, parse_config({"setting": "graph", "split": "public"})
    )
    assert not own.replaces_split
    assert note not in caplog.text
    assert own.node_ids.tolist() == [0, 3, 6, 9]
    assert dict(own.drawn_from) == {"setting": "graph"}


def test_graphs_of_unknown_label_are_left_out(tmp_path: Path) -> None:
    y = np.array([0, 1] * 10)
    y[:5] = -1
    client = client_from_file(
        write_set(tmp_path / "own.npz", 20, y=y), parse_config({"setting": "graph"})
    )
    assert client.num_items == 15
    assert all(bool((graph.y >= 0).all()) for graph in client.held)


def said(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["check-graph", *map(str, arguments)])
    return " ".join((result.output or str(result.exception)).split())


def test_check_graph_describes_a_set_and_never_goes_in_circles(tmp_path: Path) -> None:
    keys = np.array(["k", "k", *(f"l{number}" for number in range(58))])
    path = write_set(tmp_path / "own.npz", graph_keys=keys)
    text = said(path)
    assert 'holds a set of 60 graphs: set setting = "graph".' in text
    text = said(path, "--set", "setting=graph")
    assert "can be used" in text
    assert "60 graphs, 60 of them with a known label" in text
    assert "1 identifiers stand for several graphs, 2 in all" in text
    assert 'follows split-by = "id": about 80/10/10 percent' in text
    assert "the size of the set: 60 graphs" in text
    text = said(path, "--set", "setting=graph", "--set", "split-by=random")
    assert "may test an item that another owner trains on" in text
    twice = np.array([f"k{number // 2}" for number in range(60)])
    repeated = write_set(tmp_path / "twice.npz", graph_keys=twice)
    text = said(repeated, "--set", "setting=graph", "--set", "split-by=random")
    assert "12 validation and test graphs have the identifier of a training" in text
    assert "identifier of a training" not in said(repeated, "--set", "setting=graph")
    text = said(path, "--set", "setting=graph", "--set", "split-by=skeleton")
    assert 'Use split-by = "id"' in text
    text = said(path, "--set", "setting=graph", "--set", "split=public")
    assert 'split = "public", but own has no split' in text


def test_a_run_on_partitions_needs_no_partition_rule() -> None:
    for values in ({}, {"owners": "folder"}):
        config = parse_config({"setting": "graph", **values})
        assert config.partition == ("metis" if values else "uniform")
    local = parse_config({"setting": "graph", "owners": "tu:MUTAG,proteins"})
    assert local.has_local_heads
