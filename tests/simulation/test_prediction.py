"""Predictions for nodes, edges, links and graphs equal the scores of the run."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch_geometric.data import Data
from typer.testing import CliRunner

from flower_fgl import Run, simulate
from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.target_scale import TargetScale
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import parse_config
from flower_fgl.nn import GraphInput, build_model
from flower_fgl.runs.model_file import ModelCard, read_card, save_model
from flower_fgl.runs.saved_model import load_model
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.prediction import pairs as pairs_module
from flower_fgl.simulation.prediction import predict, predict_graph, write_table
from flower_fgl.simulation.prediction.table import Prediction
from tests.runs.test_model_file import CARD
from tests.simulation.test_edges import write_bank
from tests.support.owners import run_owners
from tests.support.short_runs import SMALL
from tests.support.tiny_graphs import write_tiny

NODES: dict[str, Any] = {**SMALL, "clients": 2, "evaluate": "global"}
LINKS: dict[str, Any] = {
    "synthetic": {"nodes": 200, "classes": 3, "features": 8, "blocks": 6},
    "setting": "link", "clients": 2, "rounds": 2, "hidden_channels": 8,
    "evaluate": "global",
}  # fmt: skip


def clients_of(settings: dict[str, Any]) -> list[ClientGraph]:
    others = {k: v for k, v in settings.items() if k != "clients"}
    dataset = others.pop("dataset", "synthetic")
    number = settings["clients"]
    values = run_config_of(
        method="fedavg", dataset=dataset, clients=number, seed=0, settings=others
    )
    store = open_store(parse_config(values), number)
    return [store.load(k) for k in range(number)]


def command(run: Run, graph: Path, *more: object) -> list[dict[str, str]]:
    """Return the rows that the predict command writes."""
    out = graph.parent / "out.csv"
    words = ["predict", "--model", run.path, "--graph", graph, "--output", out, *more]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.exception
    with out.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def score_of(run: Run, name: str) -> Any:
    """Return a test score of the saved model, over all clients."""
    assert run.best is not None
    return pytest.approx(run.best["test"][name], abs=1e-7)


# ------------------------------------------------------------ equal to the run's scores
def test_predictions_for_nodes_have_the_accuracy_of_the_run(tmp_path: Path) -> None:
    run = simulate("fedavg", output_dir=str(tmp_path / "runs"), **NODES)
    right = total = 0
    for client in clients_of(NODES):
        path = tmp_path / f"{client.partition_id}.npz"
        save_client_graph(path, client)
        rows = command(run, path)
        assert [int(row["node"]) for row in rows] == client.node_ids.tolist()
        for place in client.graph.masks["test"].nonzero().flatten().tolist():
            name = client.class_names[int(client.graph.y[place])]
            right += rows[place]["predicted"] == name
            total += 1
    assert right / total == score_of(run, "accuracy")


@pytest.mark.parametrize("decoder", ["dot", "mlp"])
def test_scores_of_pairs_have_the_auroc_of_the_run(
    decoder: str, tmp_path: Path
) -> None:
    settings = {**LINKS, "link_decoder": decoder}
    run = simulate("fedavg", output_dir=str(tmp_path / "runs"), **settings)
    areas, sizes = [], []
    for client in clients_of(settings):
        graph = client.graph
        assert graph.pairs is not None
        path = tmp_path / f"{client.partition_id}.npz"
        bare = Graph(graph.x, graph.edge_index, torch.full((graph.num_nodes,), -1), {})
        save_client_graph(
            path, replace(client, graph=bare, target=Target.classes(("none",)))
        )
        chosen = graph.pairs[:, graph.masks["test"]]
        ends = client.node_ids[chosen].t().tolist()
        table = pd.DataFrame(ends, columns=["source", "target"])
        table.to_csv(tmp_path / "pairs.csv", index=False)
        rows = command(run, path, "--pairs", tmp_path / "pairs.csv")
        assert [[int(r["source"]), int(r["target"])] for r in rows] == ends
        found = run.predict(path, pairs=table)["score"].to_numpy()
        y = graph.y[graph.masks["test"]].numpy()
        np.testing.assert_allclose([float(r["score"]) for r in rows], found, rtol=1e-5)
        areas.append(float(roc_auc_score(y, found)))
        sizes.append(len(y))
    assert np.average(areas, weights=sizes) == score_of(run, "auroc")


@pytest.mark.parametrize("has_time", [True, False])
@pytest.mark.parametrize("model", ["gcn", "gine"])
def test_predictions_for_edges_have_the_accuracy_of_the_run(
    model: str, has_time: bool, tmp_path: Path
) -> None:
    for number in range(2):
        write_bank(tmp_path / "banks" / f"b{number}", number, time=has_time)
    settings = {"setting": "edge", "rounds": 3, "hidden_channels": 8, "model": model}
    run = simulate(
        "fedavg", owners=str(tmp_path / "banks"), output_dir=str(tmp_path / "runs"),
        evaluate="global", **settings,
    )  # fmt: skip
    right = total = 0
    for number in range(2):
        folder = tmp_path / "banks" / f"b{number}"
        config = parse_config({"setting": "edge", "model": model})
        client = client_from_file(folder, config)
        test = (client.evaluation or (client.graph,))[0]
        mask = test.masks["test"]
        rows = command(run, folder, *(("--from", 96) if has_time else ()))
        with (folder / "edges.csv").open() as file:
            true = list(csv.DictReader(file))
        true = true[96:] if has_time else true
        assert len(true) == len(rows)
        for row, said, is_test in zip(true, rows, mask.tolist(), strict=True):
            assert (row["source"], row["target"]) == (said["source"], said["target"])
            assert row.get("time") == said.get("time")
            right += is_test and row["label"] == said["predicted"]
        total += int(mask.sum())
    assert right / total == score_of(run, "accuracy")


def test_a_data_owners_model_of_edges_scales_as_in_training(tmp_path: Path) -> None:
    nodes = []
    for name in ("ash", "oak"):
        write_bank(tmp_path / "banks" / name, len(name) + len(nodes))
        graph = str(tmp_path / "banks" / name)
        nodes.append({"graph": graph, "name": name, "model-dir": str(tmp_path / "m")})
    run = run_owners(
        nodes, tmp_path / "run", setting="edge", feature_norm="columns", rounds=3
    )
    for number, name in enumerate(("ash", "oak")):
        (model,) = (tmp_path / "m").glob(f"*-{name}-*")
        card = read_card(model)
        assert card is not None
        assert card.scaling == "kept"
        found = predict_graph(model, nodes[number]["graph"], from_time=96)
        edges = pd.read_csv(Path(nodes[number]["graph"]) / "edges.csv")[96:]
        scored = next(
            row["metrics"]["local"]["test"]["accuracy"]
            for row in run.clients
            if row["partition_id"] == number and row["round"] == card.round
        )
        right = [a == b for a, b in zip(found.predicted, edges["label"], strict=True)]
        assert np.mean(right) == pytest.approx(scored, abs=1e-7)
        # the global model has no statistics: those of the file are used
        whole = predict_graph(run.path, nodes[number]["graph"], from_time=96)
        assert "of its 30 nodes are used" in whole.note


@pytest.fixture
def tiny(tmp_path: Path) -> dict[str, Any]:
    write_tiny(tmp_path / "data")
    return {
        "dataset": "tu:TINY", "data_dir": str(tmp_path / "data"), "clients": 3,
        "setting": "graph", "partition": "uniform", "model": "gin", "rounds": 2,
        "hidden_channels": 16, "evaluate": "global",
    }  # fmt: skip


def as_list(graph: Graph) -> list[Data]:
    """Return the graphs of a union as PyG objects, with edges in one direction."""
    assert graph.batch is not None
    out = []
    for number in range(graph.num_items):
        nodes = (graph.batch == number).nonzero().flatten()
        row, col = graph.edge_index - nodes[0]
        chosen = (graph.batch[graph.edge_index[0]] == number) & (row < col)
        ends = torch.stack([row, col])[:, chosen]
        x = graph.x.to_dense()[nodes]
        out.append(Data(x=x, edge_index=ends))
    return out


def arrays_of(graph: Graph) -> dict[str, Any]:
    """Return a set of graphs as the arrays of a file."""
    assert graph.batch is not None
    return {
        "x": graph.x.to_dense().numpy(),
        "edge_index": graph.edge_index.numpy(),
        "graph_of_node": graph.batch.numpy(),
    }


@pytest.mark.parametrize("readout", ["default", "mean"])
def test_predictions_for_graphs_have_the_accuracy_of_the_run(
    readout: str, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny |= {"readout": readout}
    run = simulate("fedavg", output_dir=str(tmp_path / "runs"), **tiny)
    assert run.model().pooling == {"default": "sum", "mean": "mean"}[readout]
    path, frames = tmp_path / "set.npz", []
    for size in (1 << 16, 7):  # a graph has about 6 nodes
        monkeypatch.setattr(predict, "NODES_AT_ONCE", size)
        right = total = 0
        for client in clients_of(tiny):
            test = next(g for g in client.evaluation if "test" in g.masks)
            ids = [f"m{k}" for k in range(test.num_items)]
            np.savez(path, graph_ids=np.array(ids), **arrays_of(test))
            rows = command(run, path)
            assert [row["graph"] for row in rows] == ids
            frame = run.predict(as_list(test))
            assert frame["graph"].tolist() == [name[1:] for name in ids]
            assert frame["predicted"].tolist() == [row["predicted"] for row in rows]
            names = [client.class_names[k] for k in test.y.tolist()]
            right += int((frame["predicted"] == names).sum())
            total += len(names)
            frames.append(frame)
        assert right / total == score_of(run, "accuracy")
    for one, other in zip(frames[:3], frames[3:], strict=True):
        pd.testing.assert_frame_equal(one, other, rtol=1e-5)


def write_rings(folder: Path, seed: int) -> None:
    """Write 40 rings whose class depends on the features of their edges."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    graphs, nodes, edges = [], [], []
    for k in range(40):
        size, part = 3 + k % 4, ("train", "train", "val", "test")[k // 2 % 4]
        graphs.append((f"g{k}", "ab"[k % 2], part))
        nodes += [(f"g{k}", n, draw.normal()) for n in range(size)]
        kind = k % 2 + 0.5 * draw.normal(size=size)
        edges += [(f"g{k}", n, (n + 1) % size, kind[n]) for n in range(size)]
    for name, rows, columns in (
        ("graphs", graphs, ["id", "label", "split"]),
        ("nodes", nodes, ["graph", "id", "charge"]),
        ("edges", edges, ["graph", "source", "target", "kind"]),
    ):
        table = pd.DataFrame(rows, columns=columns)
        table.to_csv(folder / f"{name}.csv", index=False)


@pytest.mark.parametrize("size", [1 << 16, 9])
def test_predictions_for_sets_with_features_of_edges_have_the_accuracy_of_the_run(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        write_rings(tmp_path / "owners" / f"o{number}", number)
    run = simulate(
        "fedavg", owners=str(tmp_path / "owners"), output_dir=str(tmp_path / "runs"),
        setting="graph", model="gine", split="public", rounds=3, hidden_channels=8,
        evaluate="global",
    )  # fmt: skip
    monkeypatch.setattr(predict, "NODES_AT_ONCE", size)
    right = []
    for number in range(2):
        folder = tmp_path / "owners" / f"o{number}"
        frame = run.predict(folder)
        true = pd.read_csv(folder / "graphs.csv")
        assert frame["graph"].tolist() == true["id"].tolist()
        right += (frame["predicted"] == true["label"])[true["split"] == "test"].tolist()
    assert 0 < len(right) < 80
    assert np.mean(right) == score_of(run, "accuracy")


def test_a_set_without_features_is_predicted_by_its_degrees(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    union = clients_of({**tiny, "clients": 1})[0].graph
    path = tmp_path / "owners" / "a.npz"
    path.parent.mkdir()
    names = np.array(["ring", "star"])
    np.savez(path, y=union.y.numpy(), class_names=names, **arrays_of(union))
    settings = {k: tiny[k] for k in ("setting", "model", "rounds", "hidden_channels")}
    run = simulate(
        "fedavg", owners=str(path.parent), output_dir=str(tmp_path / "runs"),
        graph_features="degree", max_degree=3, **settings,
    )  # fmt: skip
    found = predict_graph(run.path, path)
    assert found.note == ""
    degree = torch.bincount(union.edge_index[0], minlength=len(union.x)).clamp(max=4)
    x = torch.nn.functional.one_hot(degree, 5).float()
    inputs = GraphInput(x, union.edge_index, batch=union.batch)
    with torch.inference_mode():
        expected = run.model()(inputs).softmax(dim=1)
    torch.testing.assert_close(found.values, expected)


def test_a_set_and_one_graph_are_told_apart(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    graphs = simulate("fedavg", output_dir=str(tmp_path / "runs"), **tiny)
    nodes = simulate("fedavg", output_dir=str(tmp_path / "runs"), **NODES)
    client = clients_of(NODES)[0]
    save_client_graph(tmp_path / "one.npz", client)
    with pytest.raises(
        DataError, match=r"one\.npz holds one graph, but setting = .graph"
    ):
        graphs.predict(tmp_path / "one.npz")
    test = clients_of(tiny)[0].evaluation[1]
    np.savez(tmp_path / "set.npz", **arrays_of(test))
    with pytest.raises(
        DataError, match="holds a set of graphs, but the model predicts no"
    ):
        nodes.predict(tmp_path / "set.npz")
    with pytest.raises(
        DataError, match="expected the path of a set of graphs, or a list"
    ):
        graphs.predict(ring())


# ---------------------------------------------------------------------------- links
def link_run(tmp_path: Path, **changes: Any) -> Run:
    return simulate("fedavg", output_dir=str(tmp_path / "runs"), **{**LINKS, **changes})


def ring(size: int = 12) -> Data:
    draw = torch.Generator().manual_seed(0)
    step = torch.arange(size)
    edges = torch.stack([step, (step + 1) % size])
    return Data(x=torch.randn(size, 8, generator=draw), edge_index=edges)


def all_scores(run: Run, graph: Data) -> Tensor:
    """Return the score of every pair, by a plain loop."""
    size = len(graph.x)
    pairs = [(u, v) for u in range(size) for v in range(size) if u != v]
    frame = run.predict(graph, pairs=pairs)
    out = torch.full((size, size), -torch.inf)
    for u, v, score in frame[["source", "target", "score"]].itertuples(index=False):
        out[u, v] = score
    return out


@pytest.mark.parametrize("decoder", ["dot", "mlp"])
@pytest.mark.parametrize("size", [12, 11])
def test_the_best_partners_are_those_of_a_loop_over_all_pairs(
    decoder: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = link_run(tmp_path, link_decoder=decoder)
    graph = ring(size)
    scores = all_scores(run, graph)
    for u in range(size):
        scores[u, [(u + 1) % size, (u - 1) % size]] = -torch.inf
    monkeypatch.setattr(pairs_module, "SCORES_AT_ONCE", 5 * size)
    monkeypatch.setattr(pairs_module, "PAIRS_AT_ONCE", 17)
    frame = run.predict(graph, top_k=3)
    best, partner = scores.topk(3, dim=1)
    assert frame["source"].tolist() == [u for u in range(size) for _ in range(3)]
    assert frame["target"].tolist() == partner.flatten().tolist()
    np.testing.assert_allclose(frame["score"], best.flatten(), rtol=1e-5)


def test_partners_in_a_bipartite_graph_are_on_the_other_side(tmp_path: Path) -> None:
    run = link_run(tmp_path)
    draw = torch.Generator().manual_seed(1)
    user = torch.arange(80) % 20
    item = torch.randint(20, 30, (80,), generator=draw)
    edges = torch.stack([user, item])
    graph = Data(x=torch.randn(30, 8, generator=draw), edge_index=edges)
    found = predict_graph(run.path, graph, top_k=30)
    assert "different sides" in found.note
    frame = found.to_frame()
    assert ((frame["source"] < 20) != (frame["target"] < 20)).all()
    joined = set(zip(user.tolist(), item.tolist(), strict=True))
    known = {*joined, *((b, a) for a, b in joined)}
    given = set(zip(frame["source"], frame["target"], strict=True))
    assert not known & given
    assert len(given) == len(frame) == 2 * 20 * 10 - len(known)


def test_degrees_are_counted_over_the_edges_of_the_graph(tmp_path: Path) -> None:
    run = link_run(tmp_path, link_features="degree")
    one, other = ring(), ring()
    other.x = torch.zeros(12, 3)  # not read
    pairs = [(0, 5), (3, 7)]
    pd.testing.assert_frame_equal(
        run.predict(one, pairs=pairs), run.predict(other, pairs=pairs)
    )


def test_pairs_that_are_edges_are_noted(tmp_path: Path) -> None:
    run = link_run(tmp_path)
    found = predict_graph(run.path, ring(), pairs=[(1, 0), (2, 9)])
    assert "1 of 2 pairs are edges" in found.note


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {},
            ConfigError,
            r"^The model predicts links: give the pairs .*with --pairs\.$",
        ),
        ({"pairs": [(0, 1)], "top_k": 2}, ConfigError, "not both"),
        ({"top_k": 0}, ConfigError, "at least 1, got 0"),
        (
            {"pairs": [(0, 1)], "only_unknown": True},
            ConfigError,
            "--only-unknown is for",
        ),
        ({"pairs": [(0, 99)]}, DataError, 'pair 0: target "99" is no node of'),
        ({"pairs": [(0, 1), (4, 4)]}, DataError, 'pair 1: .* are both "4"'),
        ({"pairs": [0, 1]}, DataError, r"shape \(2,\)"),
        ({"pairs": np.zeros((0, 2))}, DataError, "there is no pair"),
    ],
)
def test_pairs_that_cannot_be_scored_give_one_clear_error(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    run = link_run(tmp_path)
    with pytest.raises(error, match=message):
        run.predict(ring(), **options)


def test_a_table_of_pairs_names_its_line(tmp_path: Path) -> None:
    run = link_run(tmp_path)
    path = tmp_path / "pairs.csv"
    path.write_text("source,target\n0,1\n\n0,x\n")
    with pytest.raises(DataError, match=r'pairs\.csv, line 4: target "x" is no node'):
        run.predict(ring(), pairs=path)
    path.write_text("source,target,weight\n0,1,2\n")
    with pytest.raises(DataError, match="Remove weight, which would not be read"):
        run.predict(ring(), pairs=path)


def test_options_of_other_tasks_are_refused(tmp_path: Path) -> None:
    run = simulate("fedavg", output_dir=str(tmp_path / "runs"), **NODES)
    for options, name, task in (
        ({"pairs": [(0, 1)]}, "--pairs", "links"),
        ({"top_k": 3}, "--top-k", "links"),
        ({"only_unknown": True}, "--only-unknown", "edges"),
        ({"from_time": 1.0}, "--from", "edges"),
    ):
        message = (
            f"The model predicts nodes: {name} is for a model that predicts {task}"
        )
        with pytest.raises(ConfigError, match=message):
            run.predict(ring(), **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------- edges
@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("banks")
    for number in range(2):
        write_bank(folder / "banks" / f"b{number}", number)
    run = simulate(
        "fedavg", owners=str(folder / "banks"), output_dir=str(folder / "runs"),
        setting="edge", rounds=2, hidden_channels=8,
    )  # fmt: skip
    return run, folder / "banks" / "b0"


def rewrite(bank: Path, folder: Path, change: Any) -> Path:
    """Write a bank whose table of edges is changed."""
    folder.mkdir()
    (folder / "nodes.csv").write_text((bank / "nodes.csv").read_text())
    change(pd.read_csv(bank / "edges.csv")).to_csv(folder / "edges.csv", index=False)
    return folder


def test_edges_need_no_labels_and_only_unknown_ones_can_be_chosen(
    banks: tuple[Run, Path], tmp_path: Path
) -> None:
    run, bank = banks
    whole = run.predict(bank)
    bare = rewrite(bank, tmp_path / "bare", lambda edges: edges.drop(columns="label"))
    pd.testing.assert_frame_equal(run.predict(bare), whole)

    def hide_last(edges: pd.DataFrame) -> pd.DataFrame:
        label = edges["label"].where(edges.index < 100, "")
        return edges.assign(label=label.where(edges.index != 110, "unknown"))

    partly = rewrite(bank, tmp_path / "partly", hide_last)
    found = predict_graph(run.path, partly, only_unknown=True)
    assert found.items["time"].tolist() == list(range(100, 120))
    assert "over the 100 edges before the time 100 of" in found.note
    later = predict_graph(run.path, bank, from_time=100)
    assert torch.equal(found.values, later.values)
    assert not torch.equal(found.values, torch.tensor(whole.iloc[100:, 4:].to_numpy()))


def test_later_edges_change_nothing_unless_all_are_predicted(
    banks: tuple[Run, Path], tmp_path: Path
) -> None:
    run, bank = banks
    assert "later edges were read" in predict_graph(run.path, bank).note
    ends = rewrite(bank, tmp_path / "cut", lambda edges: edges[edges["time"] < 110])
    one = run.predict(bank, from_time=100)
    other = run.predict(ends, from_time=100)
    pd.testing.assert_frame_equal(one[:10], other)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda e: e.drop(columns="time"), {"from_time": 3}, "have none. Add a column"),
        (
            lambda e: e,
            {"only_unknown": True},
            "no edge to predict: 120 edges, of which 0",
        ),
        (lambda e: e, {"from_time": 500}, "no edge to predict"),
        (
            lambda e: e.drop(columns="amount"),
            {},
            "features of edges|missing: edge: amount",
        ),
        (lambda e: e.assign(more=1), {}, "features of edges|not expected: edge: more"),
    ],
)
def test_edges_that_cannot_be_predicted_give_one_clear_error(
    change: Any,
    options: dict[str, Any],
    message: str,
    banks: tuple[Run, Path],
    tmp_path: Path,
) -> None:
    run, bank = banks
    with pytest.raises(DataError, match=message):
        run.predict(rewrite(bank, tmp_path / "other", change), **options)


def test_features_of_edges_reach_the_messages_in_the_order_of_their_names(
    banks: tuple[Run, Path], tmp_path: Path
) -> None:
    _, bank = banks

    def describe(edges: pd.DataFrame) -> pd.DataFrame:
        edges = edges.drop(columns=["label", "time"])
        return edges.assign(day=np.arange(len(edges)) % 7)

    rewrite(bank, tmp_path / "a", describe)
    swapped = ["source", "target", "day", "amount"]
    other = rewrite(bank, tmp_path / "b", lambda e: describe(e)[swapped])
    node = {"graph": str(tmp_path / "a"), "name": "a", "model-dir": str(tmp_path / "m")}
    run_owners([node], tmp_path / "run", setting="link", model="gine", rounds=1)
    (model,) = (tmp_path / "m").iterdir()
    one = predict_graph(model, tmp_path / "a", pairs=[(0, 1), (4, 9)])
    two = predict_graph(model, other, pairs=[(0, 1), (4, 9)])
    assert torch.equal(one.values, two.values)
    assert "put into the model's order" in two.note
    without = rewrite(bank, tmp_path / "c", lambda e: describe(e)[swapped[:3]])
    with pytest.raises(DataError, match="missing: edge: amount"):
        predict_graph(model, without, pairs=[(0, 1)])


def test_an_object_with_edges_is_predicted_as_its_file(
    banks: tuple[Run, Path],
) -> None:
    run, bank = banks
    nodes, edges = (pd.read_csv(bank / f"{name}.csv") for name in ("nodes", "edges"))
    data = Data(
        x=torch.tensor(nodes[["risk", "one"]].to_numpy(), dtype=torch.float32),
        edge_index=torch.tensor(edges[["source", "target"]].to_numpy()).t(),
        edge_attr=torch.tensor(edges[["amount"]].to_numpy(), dtype=torch.float32),
        edge_time=torch.tensor(edges["time"].to_numpy()),
    )
    found = run.predict(data, from_time=60)
    expected = run.predict(bank, from_time=60)
    pd.testing.assert_frame_equal(found.iloc[:, 3:], expected.iloc[:, 3:])
    known = torch.tensor((edges["time"] < 100).to_numpy())
    real = torch.where(known, 1.0, torch.nan)
    for label in (known.long() - 1, real):
        for key in ("edge_label", "edge_y"):
            data[key] = label
            some = run.predict(data, only_unknown=True)
            assert some["time"].tolist() == list(range(100, 120))
            del data[key]


# ---------------------------------------------------------------------------- tables
def test_names_with_semicolons_stay_apart_in_a_set() -> None:
    names = ("a", "b", "a; b", 'say "a"')
    card = ModelCard("fedavg", "gcn", 2, 2, 2, names, False, "none", 1)
    values = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.7, 0.1]])
    sets = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).bool()
    found = Prediction({"node": np.arange(2)}, values, card, sets=sets)
    frame = found.to_frame()
    assert frame["set"].tolist() == ["a; b", '"a; b"; "say ""a"""']
    assert frame["predicted"].tolist() == ["a", "a; b"]
    several = Prediction(found.items, values, replace(card, target_kind="labels"))
    assert several.predicted == ["a", '"a; b"']


def test_a_parquet_file_holds_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    run = simulate("fedavg", output_dir=str(tmp_path / "runs"), **NODES)
    client = clients_of(NODES)[0]
    save_client_graph(tmp_path / "g.npz", client)
    out = tmp_path / "out.parquet"
    words = ["--model", run.path, "--graph", tmp_path / "g.npz", "--output", out]
    done = CliRunner().invoke(app, ["predict", *map(str, words)])
    assert done.exit_code == 0, done.exception
    pd.testing.assert_frame_equal(pd.read_parquet(out), run.predict(tmp_path / "g.npz"))
    assert out.stat().st_mode & 0o777 == 0o600


def test_another_ending_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    words = ["--model", "none", "--graph", "none", "--output", tmp_path / "out.xls"]
    done = CliRunner().invoke(app, ["predict", *map(str, words)])
    assert isinstance(done.exception, ConfigError)
    assert "--output must end in .csv or .parquet, got out.xls" in str(done.exception)


# --------------------------------------------------------------------------- numbers
def numbers_model(folder: Path, names: tuple[str, ...], **changes: Any) -> ModelCard:
    """Save a model of numbers whose outputs are standardized."""
    torch.manual_seed(0)
    model = build_model(
        "gcn", in_channels=8, hidden_channels=8, num_outputs=len(names), num_layers=2,
        dropout=0,
    )  # fmt: skip
    card = replace(CARD, class_names=names, target_kind="numbers", target_scale="kept")
    card = replace(card, **changes)
    scale = TargetScale.of([(100.0 * k - 3, 10.0**k) for k in range(len(names))])
    save_model(folder, model.state_dict(), card, target_scale=scale)
    return card


@pytest.mark.parametrize("names", [("logS",), ("logS", "=cost")])
def test_numbers_are_in_the_units_of_training(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    units = ("log mol/L", "")[: len(names)]
    numbers_model(tmp_path / "m", names, target_units=units)
    saved = load_model(tmp_path / "m")
    client = clients_of(NODES)[0]
    path = tmp_path / "g.npz"
    save_client_graph(path, client)
    found = predict_graph(tmp_path / "m", path)
    with torch.inference_mode():
        graph = GraphInput(client.graph.x, client.graph.edge_index)
        outputs = saved.model(graph).double()
    mean, std = torch.tensor([[-3.0, 97.0], [1.0, 10.0]]).double()[:, : len(names)]
    assert torch.equal(found.values, mean + std * outputs)
    columns = ["predicted"] if len(names) == 1 else [f"predicted:{n}" for n in names]
    frame = found.to_frame()
    assert list(frame.columns) == ["node", *columns]
    assert np.array_equal(frame[columns].to_numpy(), found.values.numpy())
    assert found.summary.endswith(
        " nodes: logS (log mol/L)" + ", =cost" * (len(names) > 1)
    )
    write_table(found, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, values in zip(rows, found.values.tolist(), strict=True):
        assert [row[c] for c in columns] == [f"{value:.6g}" for value in values]


def test_predictions_of_numbers_have_the_rmse_of_the_run(tmp_path: Path) -> None:
    settings = {**NODES, "target_kind": "numbers"}
    run = simulate("fedavg", output_dir=str(tmp_path / "runs"), **settings)
    errors: list[Tensor] = []
    for client in clients_of(settings):
        path = tmp_path / f"{client.partition_id}.npz"
        save_client_graph(path, client)
        rows = command(run, path)
        predicted = torch.tensor([[float(row["predicted"])] for row in rows])
        assert client.graph.targets is not None
        errors.append((predicted - client.graph.targets)[client.graph.masks["test"]])
    rmse = torch.cat(errors).square().mean().sqrt()
    assert run.best is not None
    assert float(rmse) == pytest.approx(run.best["test"]["rmse"], rel=1e-5)


def test_numbers_that_each_owner_scaled_are_refused(tmp_path: Path) -> None:
    numbers_model(tmp_path / "m", ("logS",), target_scale="lost")
    with pytest.raises(DataError, match="scaled its targets with its own statistics"):
        predict_graph(tmp_path / "m", ring())


def test_only_edges_without_a_number_are_chosen(tmp_path: Path) -> None:
    card = numbers_model(tmp_path / "m", ("amount",))
    model = build_model(
        "gcn", in_channels=8, hidden_channels=8, num_outputs=8, num_layers=2, dropout=0,
        link="edge:1x0",
    )  # fmt: skip
    scale = TargetScale.of([(5.0, 2.0)])
    card = replace(card, link="edge:1x0")
    save_model(tmp_path / "m", model.state_dict(), card, target_scale=scale)
    data = ring(6)
    rows = [
        f"{k}," + ",".join(f"{v:.4f}" for v in x) for k, x in enumerate(data.x.tolist())
    ]
    header = ",".join(f"f{k}" for k in range(8))
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "nodes.csv").write_text("\n".join([f"id,{header}", *rows]))
    edges = ["0,1,3.5", "1,2,", "2,3,-1", "3,4,"]
    text = "\n".join(["source,target,target:amount", *edges])
    (tmp_path / "g" / "edges.csv").write_text(text)
    arrays = {
        "x": data.x.numpy(), "edges": np.array([[0, 1], [1, 2], [2, 3], [3, 4]]),
        "edge_target": np.array([3.5, np.nan, -1, np.nan]),
        "edge_target_names": np.array(["amount"]),
    }  # fmt: skip
    np.savez(tmp_path / "g.npz", **arrays)
    for path in (tmp_path / "g", tmp_path / "g.npz"):
        frame = predict_graph(tmp_path / "m", path, only_unknown=True).to_frame()
        assert frame["source"].astype(int).tolist() == [1, 3]
        assert list(frame.columns) == ["source", "target", "predicted"]
        assert len(predict_graph(tmp_path / "m", path)) == 4
    np.savez(
        tmp_path / "g.npz", **arrays
        | {"edges": np.zeros((0, 2), int), "edge_target": np.zeros(0)},
    )  # fmt: skip
    with pytest.raises(DataError, match="has no edge to predict: 0 edges"):
        predict_graph(tmp_path / "m", tmp_path / "g.npz")
