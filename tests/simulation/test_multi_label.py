"""Runs that learn all labels of a dataset at once, ``target = "all"``."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.cli.main import app
from flower_fgl.cli.partition import describe_clients
from flower_fgl.client_apps.dispatch import FEWEST_STACKED
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar
from flower_fgl.datasets.sources import load as load_module
from flower_fgl.datasets.store import open_store
from flower_fgl.lab.report.page import write_report
from flower_fgl.lab.results import Run
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.simulation.prediction import predict_graph, write_table
from tests.engines.test_run import environment
from tests.support import raw_writers as raw
from tests.support.methods import OF_PLAIN_GRAPHS

ABLE = [name for name in OF_PLAIN_GRAPHS if METHODS[name].multi_label]
NUM_NODES, NUM_LABELS = 150, 4
NUM_GRAPHS = 24
UNKNOWN = 2
"""Graphs without any label."""


def node_labels() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.random((NUM_NODES, NUM_LABELS)) < 0.4).astype(int)


def write_yelp(folder: Path) -> None:
    """Write a ring of nodes whose features show their labels."""
    folder.mkdir(parents=True)
    labels, nodes = node_labels(), np.arange(NUM_NODES)
    ends = (nodes, (nodes + 1) % NUM_NODES)
    adj = scipy.sparse.csr_matrix((np.ones(NUM_NODES), ends), (NUM_NODES, NUM_NODES))
    np.savez(
        folder / "adj_full.npz",
        data=adj.data,
        indices=adj.indices,
        indptr=adj.indptr,
        shape=np.array(adj.shape),
    )
    noise = np.random.default_rng(1).normal(0, 0.1, labels.shape)
    np.save(folder / "feats.npy", labels + noise)
    class_map = {str(i): row for i, row in enumerate(labels.tolist())}
    (folder / "class_map.json").write_text(json.dumps(class_map))
    roles = {role: nodes[k::3].tolist() for k, role in enumerate(("tr", "va", "te"))}
    (folder / "role.json").write_text(json.dumps(roles))


def write_tox21(folder: Path) -> None:
    """Write graphs of one atom, with unknown labels."""
    rng = np.random.default_rng(2)
    labels = (rng.random((NUM_GRAPHS, 3)) < 0.5).astype(float)
    labels[rng.random(labels.shape) < 0.2] = np.nan
    labels[:UNKNOWN] = np.nan
    raw.write_ogb_graphs(folder, "scaffold", labels=labels, targets=("a", "b", "c"))
    raw._write_gz(folder / "raw" / "num-node-list.csv.gz", [[1]] * NUM_GRAPHS)
    raw._write_gz(folder / "raw" / "num-edge-list.csv.gz", [[0]] * NUM_GRAPHS)
    raw._write_gz(folder / "raw" / "edge.csv.gz", [[0, 0]])
    atoms = np.tile(raw.atoms(), (2, 1))
    raw._write_gz(folder / "raw" / "node-feat.csv.gz", atoms)
    parts = {"train": range(12), "valid": range(12, 18), "test": range(18, 24)}
    for part, numbers in parts.items():
        path = folder / "split" / "scaffold" / f"{part}.csv.gz"
        raw._write_gz(path, [[number] for number in numbers])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("labels")
    write_yelp(data / "Yelp" / "raw")
    write_tox21(data / "ogbg_moltox21")
    return data


@pytest.fixture
def settings(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(files / "cache"))
    monkeypatch.setattr(load_module, "_check_statistics", lambda *_: None)
    return {
        "dataset": "yelp",
        "target": "all",
        "data_dir": str(files),
        "output_dir": str(tmp_path / "runs"),
        "clients": 2,
        "partition": "uniform",
        "split": "public",
        "hidden_channels": 16,
    }


def flat(settings: dict[str, Any], **values: Scalar) -> dict[str, Scalar]:
    return {key.replace("_", "-"): v for key, v in {**settings, **values}.items()}


def test_the_labels_of_each_client_are_those_of_the_files(
    settings: dict[str, Any],
) -> None:
    store = open_store(parse_config(flat(settings)), 2)
    assert list(store.index.clients[0]["target"]["names"]) == ["0", "1", "2", "3"]
    labels, seen = node_labels(), []
    for partition_id in range(2):
        client = store.load(partition_id)
        nodes = client.node_ids.tolist()
        assert client.graph.targets is not None
        assert client.graph.targets.tolist() == labels[nodes].tolist()
        counts = labels[nodes][client.graph.masks["train"].numpy()].sum(axis=0)
        assert client.class_counts("train").tolist() == counts.tolist()
        seen += nodes
    assert sorted(seen) == list(range(NUM_NODES))


def test_an_item_that_loses_its_label_loses_all_of_them(
    settings: dict[str, Any],
) -> None:
    config = parse_config(flat(settings, label_sparsity=0.5))
    client = open_store(config, 2).load(0)
    data = ClientData.build(client, torch.device("cpu"))
    lost = client.graph.y < 0
    trained = set(data.training.index.tolist())
    assert len(trained) - int(lost.sum()) in (0, 1)  # half of them, rounded up
    assert not trained & set(lost.nonzero().flatten().tolist())
    assert torch.equal(data.labels[0].isnan().all(dim=1), lost)
    assert torch.equal(data.labels[0].isnan().any(dim=1), lost)


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_labels_that_the_features_show_are_learned(
    setting: str, settings: dict[str, Any]
) -> None:
    run = simulate(
        "fedavg",
        **settings,
        setting=setting,
        model="mlp",
        rounds=10,
        local_epochs=5,
        lr=0.05,
        dropout=0.0,
    )
    test = run.rounds[-1]["metrics"]["local"]["test"]
    assert test["micro_f1"] > 0.95
    assert test["auprc"] > 0.95
    assert test["accuracy"] > 0.95
    assert run.summary["metric"] == "auroc"
    assert not run.config["positive-class"]


@pytest.mark.parametrize("name", ABLE)
def test_every_able_method_trains_on_all_labels(
    name: str, settings: dict[str, Any]
) -> None:
    run = simulate(name, **settings, rounds=2)
    assert run.best is not None
    assert {"micro_f1", "auroc", "auprc"} <= run.best["test"].keys()
    losses = [row["loss"] for row in run.rounds if row["phase"] == "train"]
    assert all(0 < loss < 5 for loss in losses)


def test_molecules_with_unknown_labels_are_learned(settings: dict[str, Any]) -> None:
    given = {**settings, "dataset": "ogbg-moltox21", "setting": "graph"}
    run = simulate("fedavg", **given, rounds=2, check_every=1)
    assert run.best is not None
    assert run.summary["class_names"] == ["a", "b", "c"]
    store = open_store(parse_config(flat(given)), 2)
    trained = [int(store.load(k).graph.masks["train"].sum()) for k in range(2)]
    assert sum(trained) == 12 - UNKNOWN
    assert run.best["test"]["num_nodes"] == 6


@pytest.mark.parametrize("checks", [{}, {"check_every": 1, "patience": 1}])
def test_many_owners_with_several_labels_train_one_by_one(
    checks: dict[str, Any], settings: dict[str, Any]
) -> None:
    y = torch.from_numpy(node_labels())
    owner = Data(x=y.float(), edge_index=torch.zeros(2, 0, dtype=torch.long), y=y)
    # so many small graphs of one class each would be stacked
    given = {"output_dir": settings["output_dir"], "target_kind": "labels", "rounds": 2}
    owners = [owner] * FEWEST_STACKED
    run = simulate("fedavg", owners, **given, **checks)
    assert [row["failures"] for row in run.rounds] == [[], []]
    with pytest.raises(ConfigError, match="it predicts labels"):
        simulate("fedavg", owners, **given, stacked="true")


def test_an_owner_gets_a_set_of_labels_and_all_owners_together_none(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    command = ["export", str(tmp_path / "graphs"), "--dataset", "yelp"]
    command += ["--clients", "2", "--rule", "uniform"]
    command += ["--set", f"data-dir={settings['data_dir']}", "--set", "target=all"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.exception
    wanted = {**settings, "coverage": 0.5, "rounds": 2, "keep_client_models": True}
    run = simulate("fedavg", **wanted, calibration="owner")
    assert run.best is not None
    assert 0.2 < run.best["test"]["coverage"] <= 1
    (folder,) = (run.path / "clients").glob("0-*")
    found = predict_graph(folder, tmp_path / "graphs" / "client-0.npz")
    calibration = found.card.calibration
    assert calibration is not None
    assert calibration.score == "label"
    held = 1 - found.values.numpy() <= np.array(calibration.thresholds)
    names = np.array(found.card.class_names)
    assert found.to_frame()["set"].tolist() == ["; ".join(names[row]) for row in held]
    run = simulate("fedavg", **wanted, calibration="shared")
    shared = predict_graph(run.path, tmp_path / "graphs" / "client-0.npz")
    assert shared.sets is None
    assert 'several labels get them with calibration = "owner"' in shared.note


PROGRAM = """
import json, sys
from flower_fgl.simulation.run import run_one
from tests.engines.test_run import numbers
if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    places = [("local", 1), ("local", 2), ("ray", 1)]
    runs = [run_one(values, engine=e, workers=w) for e, w in places]
    kinds = {numbers(run) for run in runs}
    print(len(kinds), "micro_f1" in runs[-1].summary["best"]["test"])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.xdist_group("processes")
def test_all_engines_compute_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    open_store(parse_config(flat(settings)), 2)  # the other processes find it
    script = tmp_path / "compare_engines.py"
    script.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    values = flat(settings, method="fedavg", rounds=2)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(values)],
        cwd=root,
        env=environment(PYTHONPATH=str(root), RAY_ADDRESS="local"),
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["1 True"], done.stdout + done.stderr


def test_the_report_and_the_predictions_name_the_labels(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    run = simulate("fedavg", **settings, rounds=2)
    page = tmp_path / "report.html"
    write_report([Run.load(run.path)], page)
    assert "micro-F1" in page.read_text("utf-8")
    command = ["export", str(tmp_path / "graphs"), "--dataset", "yelp"]
    command += ["--clients", "2", "--rule", "uniform"]
    command += ["--set", f"data-dir={settings['data_dir']}"]
    result = CliRunner().invoke(app, [*command, "--set", "target=all"])
    assert result.exit_code == 0, result.exception
    prediction = predict_graph(run.path, tmp_path / "graphs" / "client-0.npz")
    assert prediction.card.multi_label
    assert prediction.values.shape[1] == NUM_LABELS
    assert not torch.allclose(prediction.values.sum(dim=1), torch.ones(len(prediction)))
    likely = [
        "; ".join(str(t) for t in range(NUM_LABELS) if row[t] >= 0.5)
        for row in prediction.values.tolist()
    ]
    assert prediction.predicted == likely
    assert any(";" in text for text in likely)
    write_table(prediction, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["predicted"] for row in rows] == likely


def test_the_partition_command_counts_the_items_with_each_label(
    settings: dict[str, Any],
) -> None:
    config = parse_config(flat(settings))
    report = describe_clients(config)
    assert report.names == ("0", "1", "2", "3")
    assert report.counts.sum(dim=0).tolist() == node_labels().sum(axis=0).tolist()
    assert [row[1] for row in report.rows] == ["75", "75"]


def test_the_documentation_names_the_able_methods() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
    assert f"`{' '.join(ABLE)}` train on all labels" in " ".join(text.split())


REFUSED: list[tuple[dict[str, Scalar], str]] = [
    (
        {"method": "fedproto"},
        "fedproto predicts one class.*several labels: clustered-s",
    ),
    ({"setting": "few-shot"}, 'setting = "few-shot" is for classes, but the targets'),
    ({"partition": "dirichlet"}, 'partition = "dirichlet" reads classes, but the targ'),
    ({"partition": "louvain-label"}, "Use one of metis, louvain, uniform[.] Or"),
    ({"class-weights": "balanced"}, 'class-weights = "balanced" is for classes, but'),
    ({"positive-class": "3"}, 'positive-class = "3" is for classes, but the targets'),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_what_needs_one_class_is_refused(
    wrong: dict[str, Scalar], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_config({"dataset": "yelp", "target": "all", **wrong})
    assert 'hoose one target, e.g. target = "37".' in str(error.value)


@pytest.mark.parametrize("rule", ["random-edges", "random-edge-types"])
@pytest.mark.parametrize("target", ["all", "37"])
def test_rules_of_typed_graphs_are_refused_before_the_data_are_loaded(
    rule: str, target: str
) -> None:
    values = {"dataset": "yelp", "target": target, "partition": rule}
    with pytest.raises(
        ConfigError, match=f'"{rule}" assigns the edges of a typed graph'
    ):
        parse_config(values)
