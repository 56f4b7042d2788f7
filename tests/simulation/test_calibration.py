"""Calibrated models: what owners and runs store, what is scored, what predict writes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from flower_fgl import Run, simulate
from flower_fgl.algorithms.calibration import TEMPERATURES
from flower_fgl.algorithms.calibration import calibrated as mapped
from flower_fgl.cli.main import app
from flower_fgl.core.calibration import Calibration
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.methods import METHODS
from flower_fgl.nn import GraphInput
from flower_fgl.runs.model_file import ModelCard, read_card, save_model
from flower_fgl.runs.saved_model import load_model
from flower_fgl.simulation.prediction import predict_graph
from flower_fgl.simulation.prediction.explain import _target
from tests.simulation.test_edges import write_bank
from tests.support.number_targets import number_files
from tests.support.owners import owner_graphs, run_owners
from tests.support.short_runs import SMALL, shortened

OWNER: dict[str, Any] = {"calibration": "owner", "conformal_score": "lac"}
COVERAGE = 0.7


def owned(folder: Path, graphs: list[ClientGraph]) -> list[dict[str, Any]]:
    """Write the graphs of owners; return their node configs."""
    nodes = []
    for number, graph in enumerate(graphs):
        path = folder / f"{number}.npz"
        save_client_graph(path, graph)
        nodes.append({"graph": str(path), "name": f"owner{number}"})
    return nodes


def model_of(run: Run, name: str) -> Path:
    (found,) = run.path.with_name(f"{run.path.name}-models").glob(f"*-{name}-*")
    return found


def by_hand(p: np.ndarray, y: np.ndarray, coverage: float) -> float:
    """Return the threshold of 1 − p of the true classes."""
    scores = sorted(1 - p[row, label] for row, label in enumerate(y))
    return scores[math.ceil((len(y) + 1) * coverage - 1e-9) - 1]


def test_an_owners_model_is_calibrated_with_its_validation_nodes(
    tmp_path: Path,
) -> None:
    graphs = owner_graphs()
    run = run_owners(
        owned(tmp_path, graphs), tmp_path / "run", coverage=COVERAGE, **OWNER
    )
    folder, client = model_of(run, "owner0"), graphs[0]
    saved = load_model(folder)
    found = saved.card.calibration
    assert found is not None
    graph = client.graph
    logits = saved.model(GraphInput(graph.x, graph.edge_index)).detach().double()
    val, test = (graph.masks[n] & (graph.y >= 0) for n in ("val", "test"))
    losses = [
        torch.nn.functional.cross_entropy(logits[val] / t, graph.y[val])
        for t in TEMPERATURES
    ]
    temperature = TEMPERATURES[int(torch.stack(losses).argmin())]
    p = (logits / temperature).softmax(1).numpy()
    limit = by_hand(p[val], graph.y[val].numpy(), COVERAGE)
    assert (found.items, found.temperature) == (int(val.sum()), temperature)
    assert found.thresholds == pytest.approx([limit])

    # the run has the scores of these sets, and predict writes them
    frame = predict_graph(folder, tmp_path / "0.npz").to_frame()
    names = client.class_names
    np.testing.assert_allclose(frame[[f"p:{n}" for n in names]], p, atol=1e-6)
    in_set = 1 - p <= found.thresholds[0]
    sets = [
        "; ".join(n for n, i in zip(names, row, strict=True) if i) for row in in_set
    ]
    assert frame["set"].tolist() == sets
    scores = next(
        row["metrics"]["local"]["test"]
        for row in run.clients
        if row["partition_id"] == 0 and row["round"] == saved.card.round
    )
    held = np.take_along_axis(in_set[test], graph.y[test].numpy()[:, None], 1)
    assert scores["coverage"] == pytest.approx(held.mean())
    assert scores["set_share"] == pytest.approx(in_set[test].mean())
    truth = np.eye(3)[graph.y[test]]
    assert scores["brier_calibrated"] == pytest.approx(
        ((p[test] - truth) ** 2).sum(1).mean() / 2
    )
    raw = logits.softmax(1).numpy()[test]
    assert scores["brier"] == pytest.approx(((raw - truth) ** 2).sum(1).mean() / 2)
    # the aggregated model stays as it is
    assert predict_graph(run.path, tmp_path / "0.npz").card.calibration is None


def test_calibration_changes_nothing_else_in_a_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "clients": 3}
    plain = simulate("fedavg", run_dir=str(tmp_path / "a"), **settings)
    found = simulate("fedavg", run_dir=str(tmp_path / "b"), **settings, **OWNER)
    for one, two in zip(plain.rounds, found.rounds, strict=True):
        for column, scores in one["metrics"]["local"].items():
            assert scores.items() <= two["metrics"]["local"][column].items()
    states = (load_model(run.path).model.state_dict() for run in (plain, found))
    one, two = states
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_owners_with_few_or_no_validation_nodes_have_no_sets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = owner_graphs()
    for number, kept in ((0, 4), (1, 0)):
        graph = graphs[number].graph
        val = graph.masks["val"].clone()
        val[(val & (graph.y >= 0)).nonzero().flatten()[kept:]] = False
        masks = {**graph.masks, "val": val}
        graphs[number] = replace(graphs[number], graph=replace(graph, masks=masks))
    run = run_owners(owned(tmp_path, graphs), tmp_path / "run", rounds=1, **OWNER)
    assert (
        "coverage = 0.9 needs 9 validation items, which these do not have: owner0, owner1."
        in caplog.text
    )
    cards = [read_card(model_of(run, f"owner{k}")) for k in range(3)]
    found = [card.calibration for card in cards if card is not None]
    assert [one and one.items for one in found[:2]] == [4, 0]
    assert [one and one.coverage for one in found] == [0.0, 0.0, 0.9]
    rows = [row for row in run.clients if "metrics" in row]
    test = {row["partition_id"]: row["metrics"]["local"]["test"] for row in rows}
    assert "ece_calibrated" in test[0]
    assert "coverage" not in test[0]
    assert "ece_calibrated" not in test[1]
    assert "ece" in test[1]
    assert "coverage" in test[2]
    few = predict_graph(model_of(run, "owner0"), tmp_path / "0.npz")
    assert "calibrated with 4 validation items, too few" in few.note
    assert "set" not in few.to_frame()


def test_an_owners_numbers_get_bounds(tmp_path: Path) -> None:
    nodes = number_files(tmp_path / "files")
    run = run_owners(
        [{**node, "name": f"owner{k}"} for k, node in enumerate(nodes)],
        tmp_path / "run", target_kind="numbers", calibration="owner", coverage=0.8,
    )  # fmt: skip
    folder = model_of(run, "owner1")
    card = read_card(folder)
    assert card is not None
    assert card.calibration is not None
    half = np.array(card.calibration.thresholds)
    frame = predict_graph(folder, nodes[1]["graph"]).to_frame()
    for place, name in enumerate(card.class_names):
        lower, middle, upper = (
            frame[f"{kind}:{name}"] for kind in ("lower", "predicted", "upper")
        )
        np.testing.assert_allclose(upper - middle, half[place])
        np.testing.assert_allclose(middle - lower, half[place])
    scores = next(
        row["metrics"]["local"]["test"]
        for row in run.clients
        if row["partition_id"] == 1 and row["round"] == card.round
    )
    assert 0.5 <= scores["coverage"] <= 1
    std = run.summary["target"]["scale"]["std"]
    assert scores["interval"] == pytest.approx(np.mean(2 * half / std))
    assert "coverage" in repr(run)


def test_an_owners_numbers_get_bounds_of_local_width(tmp_path: Path) -> None:
    nodes = number_files(tmp_path / "files", names=("logS",))
    run = run_owners(
        [{**node, "name": f"owner{k}"} for k, node in enumerate(nodes)],
        tmp_path / "run", target_kind="numbers", calibration="owner", coverage=0.6,
        conformal_score="scaled", split="40/40/20",
    )  # fmt: skip
    folder = model_of(run, "owner1")
    card = read_card(folder)
    assert card is not None
    found = card.calibration
    assert found is not None
    assert found.score == "scaled"
    frame = predict_graph(folder, nodes[1]["graph"]).to_frame()
    half = np.interp(frame["predicted"], *found.knots[0]) * found.thresholds[0]
    np.testing.assert_allclose(frame["upper"] - frame["predicted"], half)
    np.testing.assert_allclose(frame["predicted"] - frame["lower"], half)
    scores = next(
        row["metrics"]["local"]["test"]
        for row in run.clients
        if row["partition_id"] == 1 and row["round"] == card.round
    )
    assert {"coverage", "interval"} <= scores.keys()


def test_sets_of_diffused_scores_are_those_of_a_loop(tmp_path: Path) -> None:
    graphs = owner_graphs()
    run = run_owners(
        owned(tmp_path, graphs), tmp_path / "run", coverage=0.6, calibration="owner",
        conformal_score="daps",
    )  # fmt: skip
    folder, client = model_of(run, "owner0"), graphs[0]
    saved = load_model(folder)
    found = saved.card.calibration
    assert found is not None
    assert found.score == "daps"
    scores = next(
        row["metrics"]["local"]["test"]
        for row in run.clients
        if row["partition_id"] == 0 and row["round"] == saved.card.round
    )
    assert {"coverage", "set_share"} <= scores.keys()
    # the owner calibrates anew with known nodes, and predict writes the sets of a loop
    known = tmp_path / "known.csv"
    known_nodes(client, known)
    calibrated(
        "--model", folder, "--graph", tmp_path / "0.npz", "--labels", known,
        "--output", tmp_path / "new", "--coverage", 0.6, "--score", "daps",
    )  # fmt: skip
    card = read_card(tmp_path / "new")
    assert card is not None
    found = card.calibration
    assert found is not None
    prediction = predict_graph(tmp_path / "new", tmp_path / "0.npz")
    p = prediction.values.double().numpy()
    u = torch.rand(
        len(p), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    own = np.zeros_like(p)
    for node, row in enumerate(p):
        for label, value in enumerate(row):
            own[node, label] = row[row > value].sum() + float(u[node]) * value
    edges, weight = client.graph.edge_index.numpy(), found.diffusion
    for node in range(len(p)):
        around = edges[0][edges[1] == node]
        mean = own[around].mean(axis=0) if len(around) else own[node]
        scores_of = (1 - weight) * own[node] + weight * mean
        is_in = scores_of <= found.thresholds[0]
        names = zip(client.class_names, is_in, strict=True)
        expected = "; ".join(name for name, is_held in names if is_held)
        assert prediction.to_frame()["set"][node] == expected
    assert "daps" in prediction.calibrated


def test_edges_and_links_get_sets(tmp_path: Path) -> None:
    for number in range(2):
        write_bank(tmp_path / "banks" / f"b{number}", number)
    nodes = [
        {"graph": str(tmp_path / "banks" / f"b{k}"), "name": f"owner{k}"}
        for k in range(2)
    ]
    run = run_owners(nodes, tmp_path / "edges", setting="edge", coverage=0.7, **OWNER)
    found = predict_graph(model_of(run, "owner0"), nodes[0]["graph"]).to_frame()
    names = [name[2:] for name in found if name.startswith("p:")]
    assert set(found["set"]) <= {"", *names, "; ".join(names)}
    assert len(set(found["set"])) > 1
    run = run_owners(nodes, tmp_path / "links", setting="link", coverage=0.7, **OWNER)
    folder = model_of(run, "owner0")
    card = read_card(folder)
    assert card is not None
    assert card.calibration is not None
    pairs = [(0, 1), (2, 3), (4, 9)]
    frame = predict_graph(folder, nodes[0]["graph"], pairs=pairs).to_frame()
    p = 1 / (1 + np.exp(-frame["score"]))
    limit = card.calibration.thresholds[0]
    for own, text in zip(p, frame["set"], strict=True):
        is_in = [own <= limit, 1 - own <= limit]
        named = zip(("no link", "link"), is_in, strict=True)
        assert text == "; ".join(name for name, is_held in named if is_held)
    test = run.clients[-1]["metrics"]["local"]["test"]
    assert {"ece", "ece_calibrated", "coverage"} <= test.keys()


def test_randomized_sets_are_the_same_in_each_call(tmp_path: Path) -> None:
    graphs = owner_graphs()
    run = run_owners(
        owned(tmp_path, graphs), tmp_path / "run", rounds=1, calibration="owner"
    )
    frames = [
        predict_graph(model_of(run, "owner0"), tmp_path / "0.npz").to_frame()
        for _ in range(2)
    ]
    pd.testing.assert_frame_equal(*frames)


@pytest.mark.parametrize(
    ("kind", "names", "calibration"),
    [
        ("classes", ("a", "b"), Calibration("owner", 9, 1.0, 0.9, "lac", (0.1, 0.2))),
        ("classes", ("a", "b"), Calibration("owner", 9, 1.0, 0.9, "residual", (0.1,))),
        ("numbers", ("a", "b"), Calibration("owner", 9, 1.0, 0.9, "residual", (0.1,))),
        ("labels", ("a", "b"), Calibration("owner", 9, 1.0, 0.9, "lac", (0.1,))),
        ("labels", ("a", "b"), Calibration("owner", 9, 1.0, 0.9, "label", (0.1,))),
    ],
)
def test_a_calibration_of_another_target_is_refused(
    kind: Any, names: tuple[str, ...], calibration: Calibration, tmp_path: Path
) -> None:
    card = ModelCard(
        "fedavg", "gcn", 3, 4, 2, names, False, "none", 1, target_kind=kind,
        target_scale="none" if kind == "numbers" else "", calibration=calibration,
    )  # fmt: skip
    save_model(tmp_path, {"x": torch.zeros(1)}, card)
    with pytest.raises(RunError, match="calibration does not fit the target"):
        read_card(tmp_path)


def test_an_isotonic_model_predicts_what_the_run_scored(tmp_path: Path) -> None:
    graphs = owner_graphs()
    run = run_owners(
        owned(tmp_path, graphs), tmp_path / "run", calibrator="isotonic", coverage=0.5,
        **OWNER,
    )  # fmt: skip
    folder, graph = model_of(run, "owner0"), graphs[0].graph
    card = read_card(folder)
    assert card is not None
    assert card.calibration is not None
    assert len(card.calibration.knots) == 3
    found = predict_graph(folder, tmp_path / "0.npz")
    assert "isotonic" in found.calibrated
    test = (graph.masks["test"] & (graph.y >= 0)).numpy()
    truth = np.eye(3)[graph.y[test]]
    expected = ((found.values.numpy()[test] - truth) ** 2).sum(1).mean() / 2
    scores = next(
        row["metrics"]["local"]["test"]
        for row in run.clients
        if row["partition_id"] == 0 and row["round"] == card.round
    )
    assert scores["brier_calibrated"] == pytest.approx(expected)


# ---------------------------------------------------------------- all owners together
SHARED: dict[str, Any] = {"calibration": "shared", "coverage": COVERAGE}


def sums_by_hand(run: Run, graphs: list[ClientGraph]) -> tuple[float, float, int]:
    """Return temperature, LAC threshold and number of all owners' validation nodes."""
    model = load_model(run.path).model
    logits, labels = [], []
    for client in graphs:
        graph = client.graph
        val = graph.masks["val"] & (graph.y >= 0)
        out = model(GraphInput(graph.x, graph.edge_index)).detach().double()
        logits.append(out[val])
        labels.append(graph.y[val])
    out, y = torch.cat(logits), torch.cat(labels)
    losses = [torch.nn.functional.cross_entropy(out / t, y) for t in TEMPERATURES]
    temperature = TEMPERATURES[int(torch.stack(losses).argmin())]
    p = (out / temperature).softmax(1).numpy()
    return temperature, by_hand(p, y.numpy(), COVERAGE), len(y)


@pytest.mark.parametrize("is_secure", [False, True])
def test_the_global_model_is_calibrated_by_sums(
    is_secure: bool, tmp_path: Path
) -> None:
    graphs = owner_graphs()
    run = run_owners(
        owned(tmp_path, graphs), tmp_path / "run", conformal_score="lac",
        secure_aggregation=is_secure, **SHARED,
    )  # fmt: skip
    card = read_card(run.path)
    assert card is not None
    found = card.calibration
    assert found is not None
    temperature, limit, number = sums_by_hand(run, graphs)
    assert (found.source, found.items) == ("shared", number)
    assert found.temperature == temperature
    assert 0 <= found.thresholds[0] - limit < 1 / 512 + 1e-6
    # each owner is scored with it, and predict writes the same sets
    row = run.rounds[-1]
    assert row["phase"] == "calibration"
    assert row["status"] == "ok"
    assert np.sum(row["reliability"]["after"][0]) == pytest.approx(number)
    for pid, client in enumerate(graphs):
        frame = predict_graph(run.path, tmp_path / f"{pid}.npz").to_frame()
        y = client.graph.y
        test = (client.graph.masks["test"] & (y >= 0)).numpy()
        names = client.class_names
        held = [
            names[int(y[k])] in frame["set"][k].split("; ")
            for k in test.nonzero()[0].tolist()
        ]
        scores = next(
            one["metrics"]["global"]["test"]
            for one in run.clients
            if one["partition_id"] == pid and one["round"] == row["round"]
        )
        assert scores["coverage"] == pytest.approx(np.mean(held))
        assert {"ece", "ece_calibrated", "brier", "set_share"} <= scores.keys()
    assert run.summary["calibrated"]["test"]["coverage"] > 0
    assert "calibrated" in repr(run)


def test_numbers_of_all_owners_get_common_bounds(tmp_path: Path) -> None:
    nodes = number_files(tmp_path / "files")
    run = run_owners(nodes, tmp_path / "run", target_kind="numbers", **SHARED)
    card = read_card(run.path)
    assert card is not None
    assert card.calibration is not None
    assert len(card.calibration.thresholds) == 2
    frame = predict_graph(run.path, nodes[0]["graph"]).to_frame()
    assert (frame["lower:logS"] < frame["upper:logS"]).all()
    assert 0 < run.summary["calibrated"]["test"]["coverage"] <= 1


def test_an_owner_that_withholds_numbers_adds_nothing_to_the_sums(
    tmp_path: Path,
) -> None:
    graphs = owner_graphs()
    nodes = owned(tmp_path, graphs)
    nodes[0]["scores"] = "rounded"
    run = run_owners(nodes, tmp_path / "run", **SHARED)
    card = read_card(run.path)
    assert card is not None
    assert card.calibration is not None
    sizes = [
        int((graph.graph.masks["val"] & (graph.graph.y >= 0)).sum()) for graph in graphs
    ]
    assert card.calibration.items == sum(sizes[1:])
    run = run_owners(nodes, tmp_path / "own", rounds=1, **OWNER)
    with_diagrams = {r["partition_id"] for r in run.clients if "reliability" in r}
    assert with_diagrams == {1, 2}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"method": "local"}, "has no global model"),
        ({"upload_clip": 1.0, "upload_noise": 1.0}, "have no noise"),
        ({"calibrator": "isotonic"}, "need the items themselves"),
        ({"conformal_score": "daps"}, '"daps" needs the items themselves'),
        ({"coverage": 1.0}, "> 0 and < 1, got 1"),
        ({"coverage": 0.0}, "> 0 and < 1, got 0"),
    ],
)
def test_settings_that_cannot_be_calibrated_are_refused(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        run_owners([], tmp_path / "run", **{**SHARED, **settings})


@pytest.mark.parametrize(
    "settings",
    [{"setting": "link"}, {"setting": "edge"}, {"setting": "graph"}, {"model": "rgcn"}],
)
def test_diffused_scores_of_other_items_than_nodes_are_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    wanted = {"calibration": "owner", "conformal_score": "daps"}
    with pytest.raises(ConfigError, match="neighbouring nodes of one kind"):
        run_owners([], tmp_path / "run", **{**wanted, **settings})


def test_scaled_intervals_of_classes_are_refused(tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"calibration": "owner", "conformal_score": "scaled"}
    with pytest.raises(ConfigError, match='"scaled" scales intervals of numbers'):
        run_owners([], tmp_path / "run", **wanted)


# ------------------------------------------------------------- with items known later
def calibrated(*words: object) -> None:
    """Run the command ``calibrate``."""
    done = CliRunner().invoke(app, ["calibrate", *map(str, words)])
    if done.exception is not None:
        raise done.exception


@pytest.mark.parametrize("kind", ["classes", "labels"])
def test_the_class_to_explain_is_the_predicted_one(kind: Any) -> None:
    flat, steep = ((0.0, 1.0), (0.0, 0.2)), ((0.0, 0.4), (0.0, 0.9))
    found = Calibration("owner", 9, temperature=2.0, knots=(flat, steep, steep))
    card = ModelCard(
        "fedavg", "gcn", 3, 4, 2, ("a", "b", "c"), False, "none", 1, target_kind=kind,
        calibration=found,
    )  # fmt: skip
    logits = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    is_free = kind == "labels"
    right = mapped(logits, found, is_free=is_free).argmax(dim=1).tolist()
    scores = logits.div(2).sigmoid() if is_free else logits.div(2).softmax(dim=1)
    chosen = [_target(card, row, "") for row in scores]
    assert chosen == [(number, "abc"[number]) for number in right]
    assert scores.argmax(dim=1).tolist() != right


def known_nodes(client: ClientGraph, path: Path, part: str = "val") -> None:
    """Write the nodes of a part of the split with their classes."""
    graph = client.graph
    chosen = (graph.masks[part] & (graph.y >= 0)).nonzero().flatten().tolist()
    rows = [
        (int(client.node_ids[k]), client.class_names[int(graph.y[k])]) for k in chosen
    ]
    pd.DataFrame(rows, columns=["node", "label"]).to_csv(path, index=False)


def test_the_command_gives_the_calibration_of_the_run(tmp_path: Path) -> None:
    graphs = owner_graphs()
    run = run_owners(
        owned(tmp_path, graphs), tmp_path / "run", coverage=COVERAGE, **OWNER
    )
    model, known = model_of(run, "owner0"), tmp_path / "known.csv"
    known_nodes(graphs[0], known)
    calibrated(
        "--model", model, "--graph", tmp_path / "0.npz", "--labels", known,
        "--output", tmp_path / "new", "--coverage", COVERAGE, "--score", "lac",
    )  # fmt: skip
    calibrated(
        "--model", model, "--graph", tmp_path / "0.npz", "--labels", known,
        "--output", tmp_path / "map", "--coverage", 0.5, "--isotonic",
    )  # fmt: skip
    mapped = read_card(tmp_path / "map")
    assert mapped is not None
    assert mapped.calibration is not None
    assert len(mapped.calibration.knots) == 3
    before, after = (read_card(folder) for folder in (model, tmp_path / "new"))
    assert before is not None
    assert before.calibration is not None
    assert after is not None
    assert after.calibration is not None
    limits = [one.thresholds for one in (before.calibration, after.calibration)]
    assert limits[0] == pytest.approx(limits[1], abs=1e-5)
    plain = replace(before.calibration, thresholds=())
    assert replace(after.calibration, thresholds=()) == plain
    assert replace(after, calibration=before.calibration) == before
    frames = [
        predict_graph(folder, tmp_path / "0.npz").to_frame()
        for folder in (model, tmp_path / "new")
    ]
    # the limit is the score of a node, whose own class is in its set or not by rounding
    scores = 1 - frames[0].filter(like="p:")
    certain = ((scores - limits[0][0]).abs() > 1e-5).all(axis=1)
    assert certain.sum() >= len(certain) - 1
    pd.testing.assert_frame_equal(*(frame[certain] for frame in frames), rtol=1e-4)


def test_the_command_calibrates_links_edges_and_numbers(tmp_path: Path) -> None:
    write_bank(tmp_path / "bank", 0)
    bank, known, out = tmp_path / "bank", tmp_path / "known.csv", tmp_path / "out"
    words = ["--graph", bank, "--labels", known, "--output", out, "--coverage", 0.7]
    settings: dict[str, Any] = {"rounds": 1}
    node = [{"graph": str(bank)}]
    run = run_owners(node, tmp_path / "l", setting="link", **settings)
    pairs = [(0, 1, 1), (2, 3, 0), (4, 9, "link"), (5, 7, "no link"), (6, 8, 0)]
    table = pd.DataFrame(pairs, columns=["source", "target", "label"])
    table.to_csv(known, index=False)
    calibrated("--model", run.path, *words)
    ends = table[["source", "target"]]
    score = predict_graph(run.path, bank, pairs=ends).values[:, 0].double()
    y = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0])
    losses = [
        torch.nn.functional.binary_cross_entropy_with_logits(score / t, y.double())
        for t in TEMPERATURES
    ]
    card = read_card(out)
    assert card is not None
    assert card.calibration is not None
    best = TEMPERATURES[int(torch.stack(losses).argmin())]
    assert card.calibration.temperature == best
    table[:0].to_csv(known, index=False)
    with pytest.raises(DataError, match=r"known\.csv has no labelled items"):
        calibrated("--model", run.path, *words)
    run = run_owners(node, tmp_path / "e", setting="edge", **settings)
    edges = pd.read_csv(bank / "edges.csv")
    twice = edges.duplicated(["source", "target"], keep=False)
    assert twice.any()
    edges = edges[["source", "target", "time", "label"]]
    edges.drop(columns="time").to_csv(known, index=False)
    with pytest.raises(DataError, match=r"has 2 edges .* Add the column time"):
        calibrated("--model", run.path, *words)
    edges.assign(time=edges["time"] + 0.0)[twice].to_csv(known, index=False)
    calibrated("--model", run.path, *words)
    frame = predict_graph(out, bank).to_frame()
    assert "set" in frame
    names = [name[2:] for name in frame.filter(like="p:")]
    truth = torch.tensor([names.index(c) for c in edges["label"][twice]])
    card = read_card(out)
    assert card is not None
    assert card.calibration is not None
    bare = predict_graph(run.path, bank).to_frame().filter(like="p:")[twice]
    p = torch.tensor(bare.to_numpy(), dtype=torch.float64).log()
    losses = [torch.nn.functional.cross_entropy(p / t, truth) for t in TEMPERATURES]
    best = TEMPERATURES[int(torch.stack(losses).argmin())]
    assert card.calibration.temperature == best
    (nodes, *_) = number_files(tmp_path / "files")
    run = run_owners([nodes], tmp_path / "n", target_kind="numbers", **settings)
    rows = [(k, 0.5 * k, "" if k % 2 else 1.0) for k in range(10)]
    pd.DataFrame(rows, columns=["node", "logS", "logP"]).to_csv(known, index=False)
    calibrated("--model", run.path, *words[2:], "--graph", nodes["graph"])
    frame = predict_graph(out, nodes["graph"]).to_frame()
    errors = sorted(abs(frame["predicted:logS"][:10] - 0.5 * np.arange(10)))
    half = frame["upper:logS"] - frame["predicted:logS"]
    np.testing.assert_allclose(half, errors[7])  # ⌈11·0.7⌉ = 8th smallest


@pytest.mark.parametrize(
    ("text", "more", "error"),
    [
        (
            "node,label\n0,flu\n",
            [],
            "1 labelled items; coverage = 0.9 needs at least 9",
        ),
        ("node,label\nghost,flu\n", [], "line 2: the graph has no node ghost"),
        ("node,label\n0,flu\n0,flu\n", [], "line 3: node .* is also in .*, line 2"),
        ("node,label\n{0},plague\n", [], '"plague" is no class of the model'),
        ("node\n0\n", [], "label"),
        ("node,label\n0,flu\n", ["--coverage", 1], "> 0 and < 1"),
        ("node,label\n0,flu\n", ["--coverage", 0], "> 0 and < 1"),
        ("node,label\n0,flu\n", ["--score", "best"], 'Unknown score "best"'),
        ("node,label\n0,flu\n", ["--score", "scaled"], "is for models of numbers"),
        ("node,label\n0,flu\n", ["--output", "MODEL"], "must not be the folder"),
    ],
)
def test_tables_that_cannot_calibrate_are_refused(
    text: str, more: list[Any], error: str, tmp_path: Path
) -> None:
    graphs = owner_graphs()
    run = run_owners(owned(tmp_path, graphs), tmp_path / "run", rounds=1)
    known = tmp_path / "known.csv"
    first = str(int(graphs[0].node_ids[0]))
    known.write_text(text.replace("{0}", first).replace("\n0,", f"\n{first},"))
    more = [run.path if word == "MODEL" else word for word in more]
    words = ["--model", run.path, "--graph", tmp_path / "0.npz", "--labels", known]
    more += [] if "--output" in more else ["--output", tmp_path / "out"]
    with pytest.raises((ConfigError, DataError), match=error):
        calibrated(*words, *more)
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("calibration", ["owner", "shared"])
def test_every_method_is_calibrated_where_it_can_be(
    calibration: str, method: str, tmp_path: Path
) -> None:
    row = METHODS[method]
    if calibration == "shared" and not row.has_global_model:
        pytest.skip("no global model")
    run = simulate(
        method, clients=3, run_dir=str(tmp_path / "run"), calibration=calibration,
        coverage=COVERAGE, **shortened(method, {**SMALL, "rounds": 1}),
    )  # fmt: skip
    entry = run.best if calibration == "owner" else run.summary["calibrated"]
    assert entry is not None
    assert 0.3 < entry["test"]["coverage"] <= 1
    assert not run.summary["failures"]
