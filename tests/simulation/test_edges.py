"""Runs that classify edges: methods, leakage, owners, class weights, a positive class."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor
from torch_geometric.data import Data
from typer.testing import CliRunner

from flower_fgl import Run, simulate
from flower_fgl.cli.main import app
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.owners import build_owners
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.runs.saved_model import load_model
from flower_fgl.simulation.local import run_config_of
from tests.support.owners import run_owners
from tests.support.short_runs import SMALL

EDGES: dict[str, Any] = {
    **SMALL,
    "setting": "edge",
    "clients": 2,
    "rounds": 2,
    "positive_class": "different",
    "class_weights": "balanced",
}
ABLE = sorted(name for name, row in METHODS.items() if row.predicts_links)
RARE = ("auroc", "auprc", "precision_at_k", "threshold", "threshold_f1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    out = str(tmp_path_factory.mktemp("edges"))
    return {m: simulate(m, output_dir=out, **EDGES) for m in ABLE}


@pytest.mark.thorough
@pytest.mark.parametrize("method", ABLE)
def test_every_method_trains_and_scores(method: str, runs: dict[str, Run]) -> None:
    run = runs[method]
    assert run.status == "completed"
    losses = [row["loss"] for row in run.rounds if row["phase"] == "train"]
    # from round 2 on MOON's loss has its contrastive term
    assert method == "moon" or losses[-1] < losses[0]
    assert run.best is not None
    for name in (*RARE, "accuracy", "mean_auprc"):
        assert 0 <= run.best["test"][name] <= 1
    assert not {"threshold", "threshold_f1", "mrr", "hits"} & run.best["val"].keys()
    scored = [row["metrics"]["local"]["val"]["auroc"] for row in run.rounds]
    assert run.best["val"]["auroc"] == max(scored)
    _, titles, best, *_ = run.table().splitlines()
    assert titles.split()[-10:] == [
        *("test", "P@K", "test", "threshold", "test", "P@threshold"),
        *("test", "R@threshold", "test", "F1@threshold"),
    ]
    assert len(best) == len(titles)


def test_the_messages_are_those_of_any_weights(runs: dict[str, Run]) -> None:
    run = runs["fedavg"]
    model = load_model(run.path).model
    weights = 4 * sum(t.numel() for t in model.state_dict().values())
    for row in run.rounds:
        # names and shapes come on top of 4P bytes
        assert row["bytes"]["up"].keys() == {"weights", "metrics"}
        assert row["bytes"]["down"].keys() == {"weights", "config"}
        for way in ("up", "down"):
            assert 2 * weights < row["bytes"][way]["weights"] < 2 * (weights + 4000)


def test_the_saved_model_classifies_edges(runs: dict[str, Run]) -> None:
    saved = load_model(runs["fedavg"].path)
    assert saved.card.link == "edge:2x0"
    others = {k: v for k, v in EDGES.items() if k != "clients"}
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=2, seed=0, settings=others
    )
    data = ClientData.build(
        open_store(parse_config(values), 2).load(0), torch.device("cpu")
    )
    out = saved.model(data.inputs[0])
    assert out.shape == (data.graph.graph.y.numel(), 2)


def write_bank(folder: Path, seed: int, *, last: int = 120, **changes: Any) -> None:
    """Write a bank whose transfers are odd where both ends are risky."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    risky = rng.random(30) < 0.4
    rows = [f"{n},{risky[n] + 0.1 * rng.normal():.3f},1" for n in range(30)]
    (folder / "nodes.csv").write_text("\n".join(["id,risk,one", *rows]) + "\n")
    columns = {"label": True, "time": True, "split": ""} | changes
    header = "source,target,label,amount" + (",time" if columns["time"] else "")
    lines = [header + (",split" if columns["split"] else "")]
    for place in range(last):
        u, v = rng.integers(30, size=2)
        odd = bool(risky[u] and risky[v])
        label = ("odd" if odd else "plain") if columns["label"] is True else ""
        label = columns["label"] if isinstance(columns["label"], str) else label
        line = f"{u},{v},{label},{odd + 0.3 * rng.normal():.3f}"
        line += f",{place}" if columns["time"] else ""
        lines.append(line + (f",{columns['split']}" if columns["split"] else ""))
    (folder / "edges.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("banks")
    for number in range(3):
        write_bank(folder / f"b{number}", number)
    return folder


BANKS: dict[str, Any] = {
    "setting": "edge",
    "positive_class": "odd",
    "class_weights": "balanced",
    "hidden_channels": 8,
    "dropout": 0.0,
    "precision_k": 2,
}


@pytest.fixture(scope="module")
def banks(owners: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = str(tmp_path_factory.mktemp("runs"))
    return simulate("fedavg", owners=str(owners), rounds=12, output_dir=out, **BANKS)


def test_banks_learn_which_transfers_are_odd(banks: Run) -> None:
    assert banks.best is not None
    assert banks.best["test"]["auprc"] > 0.9
    assert banks.best["test"]["precision_at_k"] > 0.7
    assert banks.best["test"]["threshold_f1"] > 0.5
    scores = banks.per_owner(metric="auprc")
    assert list(scores) == ["b0", "b1", "b2"]


@pytest.mark.thorough
def test_deployed_owners_give_the_numbers_of_the_setting_owners(
    banks: Run, owners: Path, tmp_path: Path
) -> None:
    nodes = [{"graph": str(owners / f"b{n}")} for n in range(3)]
    run = run_owners(nodes, tmp_path, rounds=12, **BANKS)
    best = [r.summary["best"]["test"] for r in (run, banks)]
    assert best[0] == best[1]


def test_test_transfers_change_nothing_in_training(
    banks: Run, owners: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "banks"
    for number in range(3):
        write_bank(folder / f"b{number}", number)
        table = folder / f"b{number}" / "edges.csv"
        header, *lines = table.read_text().splitlines()
        assert len(lines) == 120
        for place in range(96, 120):  # the test transfers: other ends, class and amount
            *_, time = lines[place].split(",")
            lines[place] = f"{place % 7},{place % 11},plain,9.0,{time}"
        lines[96] = lines[96].replace("plain", "odd")
        table.write_text("\n".join([header, *lines]) + "\n")
    run = simulate(
        "fedavg", owners=str(folder), rounds=12, output_dir=str(tmp_path), **BANKS
    )
    for mine, theirs in zip(run.rounds, banks.rounds, strict=True):
        assert mine["loss"] == theirs["loss"]
        assert mine["metrics"]["local"]["val"] == theirs["metrics"]["local"]["val"]
    test = [r.summary["best"]["test"] for r in (run, banks)]
    assert test[0]["auprc"] != test[1]["auprc"]
    # the threshold comes from validation transfers
    assert test[0]["threshold"] == test[1]["threshold"]


def test_columns_in_another_order_are_the_same_features(
    banks: Run, owners: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "banks"
    for number in range(3):
        write_bank(folder / f"b{number}", number)
    for name in ("nodes", "edges"):
        table = folder / "b1" / f"{name}.csv"
        rows = [line.split(",") for line in table.read_text().splitlines()]
        turned = [[*row[:1], *reversed(row[1:])] for row in rows]
        table.write_text("".join(",".join(row) + "\n" for row in turned))
    (folder / "b1" / "edge_classes.csv").write_text("name\nplain\nodd\n")
    (folder / "b0" / "edge_classes.csv").write_text("name\nodd\nplain\n")
    config = parse_config({"owners": str(folder), "setting": "edge"})
    clients, _, _ = build_owners(config)
    for number, client in enumerate(clients):
        given = parse_config({"owners": str(owners), "setting": "edge"})
        other = build_owners(given)[0][number]
        assert client.feature_names == ("risk", "one", "edge: amount")
        names = [client.class_names[c] for c in client.graph.y]
        assert names == [other.class_names[c] for c in other.graph.y]
        assert torch.equal(client.graph.x, other.graph.x)
        assert torch.equal(client.graph.pair_x, other.graph.pair_x)
        for one, two in zip(client.evaluation, other.evaluation, strict=True):
            assert torch.equal(one.pair_x, two.pair_x)


def test_owners_that_lack_something_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "banks"
    for number in range(2):
        write_bank(folder / f"good{number}", number)
    write_bank(folder / "few", 2, last=3)
    write_bank(folder / "same", 3, label="plain")
    write_bank(folder / "tests", 4, split="test")
    write_bank(folder / "none", 5, label="")
    (folder / "none" / "edge_classes.csv").write_text("name\nodd\nplain\n")
    caplog.set_level(logging.WARNING)
    run = simulate(
        "fedavg", owners=str(folder), rounds=1, output_dir=str(tmp_path), **BANKS
    )
    assert run.status == "completed"
    for text in (
        "Owner few: There are no labelled training edges.",
        "Owner none: There are no labelled test edges.",
        "Owner same: All labelled training edges have the class plain.",
        "Owner tests: There are no labelled validation edges.",
    ):
        assert text in caplog.text
    # scores of a rare class need members and others, accuracy does not
    assert set(run.per_owner(metric="auprc")) <= {"good0", "good1", "tests"}
    assert set(run.per_owner()) == {"good0", "good1", "same", "tests"}


def test_owners_that_cannot_be_used_are_refused_together(tmp_path: Path) -> None:
    folder = tmp_path / "banks"
    write_bank(folder / "good", 0)
    write_bank(folder / "wide", 1)
    edges = folder / "wide" / "edges.csv"
    values = {"owners": str(folder), "setting": "edge"}
    edges.write_text(edges.read_text().replace("amount", "value"))
    with pytest.raises(DataError, match=r"wide: its features differ.*edge: value"):
        build_owners(parse_config(values))
    edges.write_text("source,target,label\n1,2,odd\n")
    with pytest.raises(DataError, match=r"numbers of features \(good: 1, wide: 0\)"):
        build_owners(parse_config(values))
    edges.write_text("source,target\n1,99\n")
    write_bank(folder / "plain", 2)
    (folder / "plain" / "edges.csv").write_text("source,target\n1,2\n")
    with pytest.raises(DataError) as error:
        build_owners(parse_config(values))
    assert "2 of 3 owners cannot be used" in str(error.value)
    assert 'target "99" is not an id in nodes.csv' in str(error.value)
    assert 'plain: setting = "edge" classifies edges, but' in str(error.value)


def test_a_dataset_without_classes_of_edges_is_refused(tmp_path: Path) -> None:
    write_bank(tmp_path / "bank", 0)
    table = tmp_path / "bank" / "edges.csv"
    table.write_text("source,target\n1,2\n")
    with pytest.raises(DataError, match="the edges of this graph have no classes"):
        simulate(
            "fedavg", dataset=str(tmp_path / "bank"), clients=2, rounds=1,
            setting="edge", output_dir=str(tmp_path),
        )  # fmt: skip


def test_a_positive_class_that_no_client_has_is_refused(tmp_path: Path) -> None:
    settings = {**EDGES, "positive_class": "fraud"}
    with pytest.raises(
        RunError, match=r'"fraud" is no class .* one of: same, different'
    ):
        simulate("fedavg", output_dir=str(tmp_path), **settings)
    with pytest.raises(ConfigError, match="precision-k has no effect"):
        simulate("fedavg", output_dir=str(tmp_path), precision_k=5)


WEIGHING = {name for name, row in METHODS.items() if row.weighs_classes}
NODES: dict[str, Any] = {
    **SMALL,
    "clients": 2,
    "rounds": 1,
    "local_epochs": 1,
    "class_weights": "balanced",
    "positive_class": "1",
}


@pytest.mark.thorough
@pytest.mark.parametrize("method", sorted(WEIGHING))
def test_class_weights_and_a_positive_class_in_node_classification(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[Tensor] = []

    def cross_entropy(
        logits: Tensor, y: Tensor, weight: Tensor | None = None
    ) -> Tensor:
        used.extend([] if weight is None else [weight])
        return F.cross_entropy(logits, y, weight)

    # the loss of Client.train with class weights
    monkeypatch.setattr("flower_fgl.client_apps.runtime.client.functional", Loss)
    monkeypatch.setattr(Loss, "cross_entropy", cross_entropy, raising=False)
    run = simulate(method, output_dir=str(tmp_path), **NODES)
    assert run.best is not None
    assert {"auprc", "precision_at_k", "auroc"} <= run.best["test"].keys()
    assert len(used) >= 2  # a step of each client at least
    assert not torch.equal(used[0], used[-1])  # weights of its own labels


def test_the_guide_lists_all_methods_that_weigh_classes() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "links.md").read_text("utf-8")
    listed = guide.partition("weigh classes:")[2].partition("Any other")[0]
    assert re.findall(r"`([a-z0-9+-]+)`", listed) == sorted(WEIGHING)


class Loss:
    """Stands in for ``torch.nn.functional``."""


def test_class_weights_change_the_loss_and_plain_runs_have_no_rare_scores(
    tmp_path: Path,
) -> None:
    given = {**NODES, "output_dir": str(tmp_path), "positive_class": ""}
    weighed = simulate("fedavg", **given)
    plain = simulate("fedavg", **{**given, "class_weights": "none"}, stacked="false")
    assert plain.rounds[0]["loss"] != weighed.rounds[0]["loss"]
    for run in (plain, weighed):
        assert "auprc" not in run.summary["best"]["test"]


def test_without_a_positive_class_there_is_no_threshold(
    tmp_path: Path, runs: dict[str, Run]
) -> None:
    settings = {**EDGES, "positive_class": ""}
    run = simulate("fedavg", output_dir=str(tmp_path), **settings)
    found, other = (r.summary["best"]["test"] for r in (run, runs["fedavg"]))
    assert not {"precision_at_k", "threshold"} & found.keys()
    # with two classes AUPRC is that of the second one, here "different"
    assert found == {name: other[name] for name in found}
    settings["positive_class"] = "same"
    same = simulate("fedavg", output_dir=str(tmp_path), **settings)
    assert same.summary["best"]["test"]["auroc"] == found["auroc"]
    assert same.summary["best"]["test"]["auprc"] > found["auprc"]


@pytest.mark.parametrize("setting", ["link", "edge"])
def test_columns_are_standardised_over_the_ends_of_training_pairs(setting: str) -> None:
    others = {"setting": setting, "feature_norm": "columns", "synthetic.nodes": 150}
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=2, seed=0, settings=others
    )
    graph = open_store(parse_config(values), 2).load(0).graph
    assert graph.pairs is not None
    x = graph.x[graph.pairs[:, graph.masks["train"]].unique()].double()
    torch.testing.assert_close(x.mean(dim=0), torch.zeros(x.shape[1]).double())
    std = x.std(dim=0, correction=0)
    torch.testing.assert_close(std, torch.ones_like(std))


def unscaled(banks: Path, folder: Path) -> Path:
    """Copy banks with amounts in hundredths of a cent, from a high origin."""
    for bank in banks.iterdir():
        shutil.copytree(bank, folder / bank.name)
        table = folder / bank.name / "edges.csv"
        header, *lines = table.read_text().splitlines()
        cells = [line.split(",") for line in lines]
        for cell in cells:
            cell[3] = f"{1e5 + 1e4 * float(cell[3]):.1f}"
        table.write_text("\n".join([header, *map(",".join, cells)]) + "\n")
    return folder


def test_features_of_edges_are_standardised_with_those_of_nodes(
    banks: Run, owners: Path, tmp_path: Path
) -> None:
    raw = unscaled(owners, tmp_path / "raw")
    settings = {**BANKS, "rounds": 12, "output_dir": str(tmp_path)}
    auroc = {}
    for norm in ("none", "columns"):
        run = simulate("fedavg", owners=str(raw), feature_norm=norm, **settings)
        assert run.best is not None
        auroc[norm] = run.best["test"]["auroc"]
    assert banks.best is not None
    assert auroc["columns"] > banks.best["test"]["auroc"] - 0.03
    assert auroc["none"] < auroc["columns"] - 0.1


def test_the_model_of_an_owner_holds_the_statistics_of_its_edges(
    owners: Path, tmp_path: Path
) -> None:
    raw = unscaled(owners, tmp_path / "raw")
    own = {"model-dir": str(tmp_path / "models")}
    nodes = [{"graph": str(raw / f"b{n}"), **own} for n in range(3)]
    settings = {**BANKS, "rounds": 2, "feature_norm": "columns"}
    run = run_owners(nodes, tmp_path / "run", **settings)
    local = simulate("fedavg", owners=str(raw), output_dir=str(tmp_path), **settings)
    assert run.summary["best"]["test"] == local.summary["best"]["test"]
    (folder,) = (tmp_path / "models").glob("*-b0-*")
    saved = load_model(folder)
    assert saved.card.scaling == "kept"
    assert saved.edge_scaling is not None
    client = client_from_file(raw / "b0", parse_config({"setting": "edge"}))
    assert client.graph.pair_x is not None
    amounts = client.graph.pair_x[client.graph.masks["train"]].double()
    torch.testing.assert_close(saved.edge_scaling[0], amounts.mean(dim=0))
    torch.testing.assert_close(saved.edge_scaling[1], amounts.std(0, correction=0))
    assert load_model(run.path).edge_scaling is None


def test_a_pyg_graph_with_classes_of_edges_runs(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    edge_index = torch.randint(30, (2, 150), generator=draw)
    x = torch.randn(30, 4, generator=draw)
    data = Data(x=x, edge_index=edge_index, edge_y=(x[edge_index[0], 0] > 0).long())
    settings = {"setting": "edge", "rounds": 2, "output_dir": str(tmp_path)}
    run = simulate("fedavg", dataset=[data, data], **settings)
    assert run.status == "completed"
    assert run.best is not None
    assert run.best["test"]["num_nodes"] > 0


def test_a_partition_over_edges_counts_pairs() -> None:
    settings = ["--set", "setting=edge", "--set", "synthetic.nodes=151"]
    result = CliRunner().invoke(app, ["partition", "--clients", "2", *settings])
    assert result.exit_code == 0
    assert "pairs" in result.output
    assert "nodes" not in result.output


@pytest.mark.parametrize("align", ["local", "name"])
def test_owners_may_have_classes_of_their_own(align: str, tmp_path: Path) -> None:
    folder = tmp_path / "banks"
    for number in range(2):
        write_bank(folder / f"b{number}", number)
    table = folder / "b1" / "edges.csv"
    table.write_text(table.read_text().replace(",plain,", ",usual,"))
    run = simulate(
        "fedavg", owners=str(folder), rounds=1, class_align=align,
        output_dir=str(tmp_path), **BANKS,
    )  # fmt: skip
    assert run.status == "completed"
    assert set(run.per_owner(metric="auprc")) == {"b0", "b1"}
