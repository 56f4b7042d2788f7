"""Explanations of predictions: what they name, how faithful it is, what is refused."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from flower_fgl import Run, simulate
from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.runs.model_file import ModelCard, save_model
from flower_fgl.simulation.prediction import explain_item, predict_graph
from tests.simulation.test_edges import write_bank
from tests.simulation.test_prediction import NODES, clients_of
from tests.support.graph_sets import set_arrays, write_set
from tests.support.number_targets import number_files
from tests.support.owners import run_owners
from tests.support.typed_graphs import typed_tables, write_tables


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("explain")
    run = simulate("fedavg", run_dir=str(folder / "run"), **{**NODES, "rounds": 5})
    save_client_graph(folder / "0.npz", clients_of(NODES)[0])
    return run, folder / "0.npz"


def connected(path: Path) -> str:
    """Return a node with several neighbours."""
    with np.load(path) as arrays:
        edges = arrays["edge_index"]
        ids = arrays["node_ids"]
    return str(ids[np.bincount(edges.flatten(), minlength=len(ids)).argmax()])


def test_a_nodes_explanation_starts_from_its_prediction(
    trained: tuple[Run, Path],
) -> None:
    run, path = trained
    node = connected(path)
    found = explain_item(run.path, path, [node])
    frame = predict_graph(run.path, path).to_frame().astype({"node": str})
    row = frame[frame["node"] == node].iloc[0]
    assert found.what == row["predicted"]
    assert found.score == pytest.approx(row[f"p:{row['predicted']}"], abs=1e-5)
    assert found.ends == (node,)
    total = sum(value for _, value, _ in found.features)
    assert len(found.features) == 8  # all that the graph has
    assert total == pytest.approx(found.score - found.baseline, abs=0.02)
    assert 1 <= len(found.edges) <= 10
    assert found.edges == sorted(found.edges, key=lambda edge: -edge[2])
    assert 0 <= found.overlap <= 1
    assert "edges the score drops by" in found.text
    assert explain_item(run.path, path, [node]).text == found.text
    # the edges that are not named may outweigh the named ones: all lead to the score
    every = sum(value for *_, value in found.drawing)
    assert every == pytest.approx(found.score - found.without_edges, abs=0.02)
    named = [*found.edges, *found.lowering]
    assert found.lowering == sorted(found.lowering, key=lambda edge: edge[2])
    lowest = sorted(edge for edge in found.drawing if edge[2] < 0)
    lowest.sort(key=lambda edge: edge[2])
    assert [edge[:3] for edge in found.lowering] == lowest[:3] != []
    one, other, value, _ = found.lowering[0]
    assert f"  {one} - {other}: {value:+.4g} (lowers the score)\n" in found.text
    rest = every - sum(edge[2] for edge in named)
    others = len(found.drawing) - len(named)
    assert f"  the other {others:,} edges together: {rest:+.4g}\n" in found.text
    assert "other 0 features" not in found.text


def test_features_that_are_not_named_are_added_up(tmp_path: Path) -> None:
    run = simulate("fedavg", run_dir=str(tmp_path / "run"), clients=3, rounds=1)
    save_client_graph(tmp_path / "0.npz", clients_of({"clients": 3})[0])
    node = connected(tmp_path / "0.npz")
    found = explain_item(run.path, tmp_path / "0.npz", [node])
    number, rest = found.other_features
    total = sum(value for _, value, _ in found.features) + rest
    assert total == pytest.approx(found.score - found.baseline, abs=0.02)
    assert f"  the other {number} features together: {rest:+.4g}\n" in found.text


def test_what_the_path_misses_is_said(tmp_path: Path) -> None:
    # attention is so steep that the score jumps at weights of edges below 1/100
    settings: dict[str, Any] = {"clients": 3, "rounds": 1, "model": "gat"}
    run = simulate("fedavg", run_dir=str(tmp_path / "run"), **settings)
    save_client_graph(tmp_path / "0.npz", clients_of({"clients": 3})[0])
    node = connected(tmp_path / "0.npz")
    found = explain_item(run.path, tmp_path / "0.npz", [node])
    every = sum(value for *_, value in found.drawing)
    missed = found.score - found.without_edges - every
    assert abs(missed) > 0.1
    assert f"between 50 points of the path: {missed:+.4g}\n" in found.text
    assert found.text.count("not attributed") == 1  # the features add up


@pytest.mark.parametrize("method", ["adafgl", "fediih", "fedlit", "fedlog"])
def test_networks_that_read_edges_past_their_weights_are_refused(
    method: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"clients": 4, "rounds": 1, "keep_client_models": True}
    run = simulate(method, run_dir=str(tmp_path / "run"), **settings)
    save_client_graph(tmp_path / "0.npz", clients_of({"clients": 4})[0])
    model = run.path / "clients" / "0-client-0"
    with pytest.raises(ConfigError, match=f"network of {method} reads edges"):
        explain_item(model, tmp_path / "0.npz", [connected(tmp_path / "0.npz")])


def test_an_edge_counts_that_only_a_smaller_weight_of_it_changes(
    tmp_path: Path,
) -> None:
    x = np.array([[0.0, 0.0], [2.0, 2.0]], dtype=np.float32)
    np.savez(tmp_path / "g.npz", x=x, edges=np.array([[0, 1]]))
    card = ModelCard("fedavg", "graphsage", 2, 2, 2, ("a", "b"), False, "none", 1)
    eye, zero = torch.eye(2), torch.zeros(2, 2)
    state = {
        # relu(1 - 2·w) of the edge's weight w is 0 at w = 1, and 1 without the edge
        "encoder.0.lin_l.weight": -eye, "encoder.0.lin_l.bias": torch.tensor([1.0, 0.0]),
        "encoder.0.lin_r.weight": zero, "classifier.lin_l.weight": zero,
        "classifier.lin_l.bias": torch.zeros(2), "classifier.lin_r.weight": eye,
    }  # fmt: skip
    save_model(tmp_path / "m", state, card)
    found = explain_item(tmp_path / "m", tmp_path / "g.npz", ["0"], target="a")
    assert found.score == pytest.approx(0.5)
    assert found.without_edges == pytest.approx(1 / (1 + np.exp(-1)))
    assert found.edges[0][2] == pytest.approx(0.5 - found.without_edges, abs=0.01)


def test_the_named_edges_carry_more_than_random_ones(tmp_path: Path) -> None:
    # node 0 has no signal; one neighbour has that of the class, nine have nothing
    x = np.zeros((11, 2), dtype=np.float32)
    x[1] = [0.0, 50.0]
    edges = np.array([[0, k] for k in range(1, 11)])
    np.savez(tmp_path / "g.npz", x=x, edges=edges)
    card = ModelCard("fedavg", "gcn", 2, 2, 2, ("no", "yes"), False, "none", 1)
    eye = torch.eye(2)
    state = {
        "encoder.0.bias": torch.zeros(2), "encoder.0.lin.weight": eye,
        "classifier.bias": torch.tensor([1.0, 0.0]), "classifier.lin.weight": eye,
    }  # fmt: skip
    save_model(tmp_path / "m", state, card)
    found = explain_item(tmp_path / "m", tmp_path / "g.npz", ["0"])
    assert found.what == "yes"
    assert found.edges[0][:2] == ("0", "1")
    assert found.edges[0][2] > 10 * abs(found.edges[1][2])
    total = sum(value for _, _, value in found.drawing)
    assert total == pytest.approx(found.score - found.without_edges, abs=0.02)
    assert found.drop > np.mean(found.random_drops)
    assert found.features[0][0] == "feature 1"


def test_another_class_can_be_explained(trained: tuple[Run, Path]) -> None:
    run, path = trained
    node = connected(path)
    frame = predict_graph(run.path, path).to_frame().astype({"node": str})
    row = frame[frame["node"] == node].iloc[0]
    other = next(
        c[2:] for c in frame if c.startswith("p:") and c[2:] != row["predicted"]
    )
    found = explain_item(run.path, path, [node], target=other)
    assert found.score == pytest.approx(row[f"p:{other}"], abs=1e-5)
    with pytest.raises(ConfigError, match='predicts no "nothing"'):
        explain_item(run.path, path, [node], target="nothing")


def test_links_edges_and_numbers_are_explained(tmp_path: Path) -> None:
    for number in range(2):
        write_bank(tmp_path / "banks" / f"b{number}", number)
    banks: dict[str, Any] = {"owners": str(tmp_path / "banks"), "rounds": 2}
    bank = tmp_path / "banks" / "b0"
    run = simulate("fedavg", setting="link", run_dir=str(tmp_path / "l"), **banks)
    found = explain_item(run.path, bank, ["0", "1"])
    score = predict_graph(run.path, bank, pairs=[(0, 1)]).values[0, 0]
    assert found.score == pytest.approx(float(score.sigmoid()), abs=1e-5)
    assert found.what == "link"
    with pytest.raises(DataError, match='Both ends of the pair are "1"'):
        explain_item(run.path, bank, ["1", "1"])
    run = simulate("fedavg", setting="edge", run_dir=str(tmp_path / "e"), **banks)
    frame = predict_graph(run.path, bank).to_frame()
    last = frame.iloc[-1]
    found = explain_item(run.path, bank, [str(last["source"]), str(last["target"])])
    alone = (
        predict_graph(run.path, bank, from_time=last.get("time")).to_frame().iloc[-1]
    )
    assert found.score == pytest.approx(alone[f"p:{found.what}"], abs=1e-5)
    pairs = frame[["source", "target"]].astype(str).agg(" - ".join, axis=1)
    times = pairs.value_counts()
    several, once = times.index[0], times.index[-1]
    found = explain_item(run.path, bank, several.split(" - "))
    assert times[several] > 1 == times[once]
    assert found.item == f"{several} (the last listed of {times[several]} such edges)"
    assert explain_item(run.path, bank, once.split(" - ")).item == once
    nodes = number_files(tmp_path / "files")
    run = run_owners(nodes, tmp_path / "n", target_kind="numbers")
    found = explain_item(run.path, nodes[0]["graph"], ["3"], target="logS")
    frame = predict_graph(run.path, nodes[0]["graph"]).to_frame()
    assert found.score == pytest.approx(frame["predicted:logS"][3], abs=1e-4)


def test_the_command_writes_a_private_page_without_scripts(
    trained: tuple[Run, Path], tmp_path: Path
) -> None:
    run, path = trained
    page = tmp_path / "why.html"
    words = ["explain", "--model", str(run.path), "--graph", str(path)]
    words += ["--item", connected(path), "--output", str(page)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.exception
    text = page.read_text()
    assert "<script" not in text
    assert "data:image/svg+xml" in text
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    done = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "why.pdf")])
    assert "must end in .html" in str(done.exception)


def test_items_that_do_not_exist_are_refused(trained: tuple[Run, Path]) -> None:
    run, path = trained
    with pytest.raises(DataError, match='has no node "ghost"'):
        explain_item(run.path, path, ["ghost"])
    with pytest.raises(ConfigError, match="give --item once, got 2"):
        explain_item(run.path, path, ["0", "1"])


def test_a_graph_of_a_set_is_explained(tmp_path: Path) -> None:
    path = write_set(tmp_path / "a.npz")
    run = run_owners([{"graph": str(path)}], tmp_path / "run", setting="graph")
    frame = predict_graph(run.path, path).to_frame()
    row = frame.iloc[int(np.bincount(set_arrays()["graph_of_node"]).argmax())]
    found = explain_item(run.path, path, [str(row["graph"])])
    assert found.score == pytest.approx(row[f"p:{row['predicted']}"], abs=1e-5)
    assert found.ends == ()
    assert found.edges
    assert {name for name, _, _ in found.features} == {"mass", "charge", "size"}


@pytest.mark.parametrize("direction", ["both", "separate"])
def test_edges_with_features_are_named_and_removed(
    direction: str, tmp_path: Path
) -> None:
    write_bank(tmp_path / "b0", 0)
    run = run_owners(
        [{"graph": str(tmp_path / "b0")}], tmp_path / "run", setting="edge",
        model="gine", edge_direction=direction, rounds=2,
    )  # fmt: skip
    frame = predict_graph(run.path, tmp_path / "b0").to_frame()
    last = frame.iloc[-1]
    pair = [str(last["source"]), str(last["target"])]
    found = explain_item(run.path, tmp_path / "b0", pair)
    alone = predict_graph(run.path, tmp_path / "b0", from_time=last["time"]).to_frame()
    assert found.score == pytest.approx(alone.iloc[-1][f"p:{found.what}"], abs=1e-5)
    total = sum(value for _, _, value in found.drawing)
    assert total == pytest.approx(found.score - found.without_edges, abs=0.02)
    table = pd.read_csv(tmp_path / "b0" / "edges.csv", dtype={"source": str})
    table = table.astype({"target": str})
    # what is removed is what a file without these edges lacks
    gone = set()
    for (one, other, *_), label in zip(found.edges, found.labels, strict=True):
        assert label.startswith("directed, ") == (direction == "separate")
        amount = float(label.rpartition(" = ")[2])
        ways = [(one, other), (other, one)][: 2 - (direction == "separate")]
        own = {
            place
            for place, row in enumerate(table.itertuples())
            if (row.source, row.target) in ways and abs(row.amount - amount) < 1e-3
        }
        assert own
        gone |= own
    (tmp_path / "less").mkdir()
    (tmp_path / "less" / "nodes.csv").write_text(
        (tmp_path / "b0/nodes.csv").read_text()
    )
    table.drop(index=sorted(gone)).to_csv(tmp_path / "less" / "edges.csv", index=False)
    less = predict_graph(run.path, tmp_path / "less", from_time=last["time"]).to_frame()
    left = less.iloc[-1][f"p:{found.what}"]
    assert found.score - found.drop == pytest.approx(left, abs=1e-4)
    assert "amount = " in found.text


@pytest.mark.parametrize("model", ["rgcn", "typed-gine"])
def test_edges_of_relations_are_named_and_removed(model: str, tmp_path: Path) -> None:
    graph = write_tables(tmp_path / "own" / "bank0", typed_tables(7))
    run = simulate(
        "fedavg", owners=str(tmp_path / "own"), model=model, rounds=2,
        run_dir=str(tmp_path / "run"), hidden_channels=8,
    )  # fmt: skip
    frame = predict_graph(run.path, graph).to_frame().astype({"node": str})
    row = frame.iloc[0]
    found = explain_item(run.path, graph, [row["node"]])
    assert found.score == pytest.approx(row[f"p:{found.what}"], abs=1e-5)
    assert found.edges
    assert len(found.labels) == len(found.edges)
    total = sum(value for _, _, value in found.drawing)
    assert total == pytest.approx(found.score - found.without_edges, abs=0.02)
    one, other, *_ = found.edges[0]
    assert f"{one} - {other} [{found.labels[0]}]: " in found.text
    assert set(found.labels) <= {"pays", "owns"}
    # the model has hashes of names only, the graph has them
    names = ["card.a", "card.b", "card.c", "shop.s", "shop.t", "person.age"]
    assert found.features
    assert {name for name, *_ in found.features} <= {*names}
    with pytest.raises(DataError, match='no node of the kind to predict "shop-0"'):
        explain_item(run.path, graph, ["shop-0"])


@pytest.mark.parametrize("model", ["rgcn", "typed-graphsage"])
def test_links_between_kinds_are_explained(model: str, tmp_path: Path) -> None:
    tables = typed_tables(7)
    graph = write_tables(tmp_path / "own" / "bank0", tables)
    run = simulate(
        "fedavg", owners=str(tmp_path / "own"), setting="link", model=model, rounds=2,
        target_relation="pays", run_dir=str(tmp_path / "run"), hidden_channels=8,
    )  # fmt: skip
    pair = ("card-3", "shop-2")
    found = explain_item(run.path, graph, pair)

    def score(graph: Path) -> float:
        logit = predict_graph(run.path, graph, pairs=[pair]).values[0, 0]
        return float(logit.sigmoid())

    assert found.what == "link"
    assert found.ends == pair
    assert found.score == pytest.approx(score(graph), abs=1e-5)
    total = sum(value for _, _, value in found.drawing)
    assert total == pytest.approx(found.score - found.without_edges, abs=0.02)
    assert found.drop > np.mean(found.random_drops)
    assert set(found.labels) == {"pays", "owns"}
    # what is removed is what a file without these edges lacks
    for (one, other, *_), label in zip(found.edges, found.labels, strict=True):
        lines = tables[f"edges/{label}.csv"].splitlines()
        kept = [line for line in lines if line != f"{one},{other}"]
        assert len(kept) < len(lines)
        tables[f"edges/{label}.csv"] = "\n".join([*kept, ""])
    less = write_tables(tmp_path / "less", tables)
    assert found.score - found.drop == pytest.approx(score(less), abs=1e-5)
    with pytest.raises(DataError, match='no node of the kind to predict "card-3"'):
        explain_item(run.path, graph, ("card-2", "card-3"))


def test_a_node_without_edges_has_features_only(tmp_path: Path) -> None:
    np.savez(tmp_path / "g.npz", x=np.eye(3, 2, dtype=np.float32), edges=[[0, 1]])
    card = ModelCard("fedavg", "gcn", 2, 2, 2, ("no", "yes"), False, "none", 1)
    eye = torch.eye(2)
    state = {
        "encoder.0.bias": torch.zeros(2), "encoder.0.lin.weight": eye,
        "classifier.bias": torch.tensor([1.0, 0.0]), "classifier.lin.weight": eye,
    }  # fmt: skip
    save_model(tmp_path / "m", state, card)
    found = explain_item(tmp_path / "m", tmp_path / "g.npz", ["2"])
    assert found.edges == []
    assert found.score == pytest.approx(1 / (1 + np.exp(-1)))
    assert "No edge influences the score." in found.text


@pytest.mark.parametrize("model", ["gat", "gin", "graphsage", "appnp", "sgc", "mlp"])
def test_the_part_of_the_graph_has_the_score_of_the_whole(
    model: str, tmp_path: Path
) -> None:
    settings = {**NODES, "model": model, "clients": 1}
    run = simulate("fedavg", run_dir=str(tmp_path / "run"), **settings)
    save_client_graph(tmp_path / "0.npz", clients_of({**NODES, "clients": 1})[0])
    node = connected(tmp_path / "0.npz")
    found = explain_item(run.path, tmp_path / "0.npz", [node])
    frame = predict_graph(run.path, tmp_path / "0.npz").to_frame().astype({"node": str})
    row = frame[frame["node"] == node].iloc[0]
    assert found.score == pytest.approx(row[f"p:{found.what}"], abs=1e-5)
    assert bool(found.edges) == (model != "mlp")
