"""Runs that predict links: methods, scores, leakage, selection, owners."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from flower_fgl import Run, resume, simulate
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.training import LinkTrainingSet
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.owners import build_owners
from flower_fgl.datasets.splits.links import link_client
from flower_fgl.datasets.store import open_store
from flower_fgl.datasets.transforms.canonical import undirected_simple
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.nn.link import pair_codes
from flower_fgl.runs.saved_model import load_model
from tests.support.short_runs import SMALL, comparable

LINKS: dict[str, Any] = {
    **SMALL,
    "setting": "link",
    "clients": 2,
    "rounds": 3,
    "link_decoder": "mlp",
}
ABLE = sorted(name for name, row in METHODS.items() if row.predicts_links)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    out = str(tmp_path_factory.mktemp("links"))
    return {m: simulate(m, output_dir=out, **LINKS) for m in ABLE}


def client_data(**settings: Any) -> ClientData:
    values = {
        "setting": "link",
        "synthetic.nodes": 120,
        **{k.replace("_", "-"): v for k, v in settings.items()},
    }
    graph = open_store(parse_config(values), 2).load(0)
    return ClientData.build(graph, torch.device("cpu"))


def test_the_methods_that_predict_links() -> None:
    assert ABLE == [
        "fedala", "fedavg", "fedper", "fedprox", "fedrep", "local", "moon",
    ]  # fmt: skip
    for name in METHODS.keys() - set(ABLE):
        with pytest.raises(ConfigError, match="cannot predict links"):
            parse_config({"method": name, "setting": "link"})


@pytest.mark.thorough
@pytest.mark.parametrize("method", ABLE)
def test_every_method_trains_and_scores(method: str, runs: dict[str, Run]) -> None:
    run = runs[method]
    assert run.status == "completed"
    losses = [row["loss"] for row in run.rounds if row["phase"] == "train"]
    # from round 2 on MOON's loss has its contrastive term
    assert losses[-1] < losses[1 if method == "moon" else 0]
    assert run.best is not None
    for name in ("auroc", "auprc", "mrr", "hits", "accuracy", "mean_auroc"):
        assert 0 <= run.best["test"][name] <= 1
    scored = [
        row["metrics"]["local"]["val"] for row in run.rounds if row.get("metrics")
    ]
    best = max(entry["auroc"] for entry in scored)
    assert run.best["val"]["auroc"] == best
    for title in ("test AUROC", "test AUPRC", "test MRR", "test Hits@K"):
        assert title in run.table()


def test_no_operator_of_training_contains_a_held_out_edge() -> None:
    data = client_data()
    graph, inputs = data.graph.graph, data.inputs[0]
    assert graph.pairs is not None
    held = graph.pairs[:, (graph.masks["val"] | graph.masks["test"]) & (graph.y == 1)]
    assert held.shape[1] > 2
    assert data.training.inputs is inputs
    for kind in ("normalised", "mean", "sum"):
        dense = inputs.propagate(torch.eye(inputs.num_nodes), kind)  # type: ignore[arg-type]
        assert float(dense[held[0], held[1]].abs().max()) == 0.0
        assert float(dense[held[1], held[0]].abs().max()) == 0.0
        kept = graph.pairs[:, graph.masks["train"]]
        assert float(dense[kept[0], kept[1]].abs().min()) > 0.0


def test_each_epoch_draws_other_negatives_which_are_no_training_edges() -> None:
    data = client_data()
    training = data.training
    assert isinstance(training, LinkTrainingSet)
    number = len(training.index)
    draws = [training.epoch(torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    drawn = [
        pair_codes(d.pairs[:, d.labels == 0], data.graph.graph.num_nodes) for d in draws
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    for one, codes in zip(draws, drawn, strict=True):
        assert len(torch.unique(codes)) == len(codes) == number
        assert not bool(torch.isin(codes, training.known).any())
        assert torch.equal(one.pairs[:, :number], training.pairs)
        assert int(one.labels.sum()) == number
    # an epoch of an epoch draws again, and keeps the edges
    again = draws[0].epoch(torch.Generator().manual_seed(1))
    assert torch.equal(again.pairs, draws[2].pairs)


def random_purchases(seed: int) -> Data:
    draw = torch.Generator().manual_seed(seed)
    user = torch.randint(200, (1000,), generator=draw)
    item = torch.randint(200, 240, (1000,), generator=draw)
    x = torch.rand(240, 4, generator=draw)
    return Data(x=x, edge_index=torch.stack([user, item]))


def test_random_edges_of_users_and_items_cannot_be_predicted(tmp_path: Path) -> None:
    found = []
    for seed in range(3):
        run = simulate(
            "fedavg", [random_purchases(2 * seed), random_purchases(2 * seed + 1)],
            setting="link", link_decoder="mlp", rounds=8, local_epochs=4, seed=seed,
            link_features="degree", output_dir=str(tmp_path),
        )  # fmt: skip
        assert run.best is not None
        found.append(run.best["test"]["auroc"])
    # with negatives among all pairs it is above 0.85: most join two users
    assert 0.42 < sum(found) / 3 < 0.58


def test_training_negatives_join_the_sides_of_the_training_graph() -> None:
    whole = Graph(
        random_purchases(0).x,
        undirected_simple(random_purchases(0).edge_index, 240),
        torch.zeros(240, dtype=torch.int64),
        {},
    )
    config = parse_config({"setting": "link"})
    client = link_client(
        ClientGraph(0, whole, Target.classes(("a",)), torch.arange(240)), config
    )
    training = ClientData.build(client, torch.device("cpu")).training
    drawn = training.epoch(torch.Generator().manual_seed(0))
    assert isinstance(drawn, LinkTrainingSet)
    negatives = drawn.pairs[:, drawn.labels == 0]
    assert negatives.shape[1] == len(training.index)
    kept = torch.bincount(client.graph.edge_index[0], minlength=240) > 0
    both = negatives[:, kept[negatives].all(dim=0)]
    assert both.shape[1] > 100
    assert bool(((both[0] < 200) != (both[1] < 200)).all())


def test_a_run_is_repeated_and_resumed_with_the_same_numbers(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    again = simulate("fedavg", output_dir=str(tmp_path), **LINKS)
    assert comparable(again) == comparable(runs["fedavg"])
    hashes = {run.summary["partition_sha256"] for run in runs.values()}
    assert len(hashes) == 1
    other = simulate(
        "local", output_dir=str(tmp_path), **{**LINKS, "rounds": 1, "split": "80/10/10"}
    )
    assert other.summary["partition_sha256"] not in hashes

    def interrupt(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    settings = {**LINKS, "checkpoint_every": 2}
    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", run_dir=str(tmp_path / "a"), on_round=interrupt, **settings)
    assert comparable(resume(tmp_path / "a")) == comparable(runs["fedavg"])


def test_batches_and_checks_on_auroc(tmp_path: Path) -> None:
    run = simulate(
        "fedavg", output_dir=str(tmp_path),
        **{**LINKS, "rounds": 2, "batch_size": 50, "check_every": 1, "local_epochs": 2,
           "link_decoder": "dot", "evaluate": "both"},
    )  # fmt: skip
    assert run.status == "completed"
    assert "auprc" in run.summary["global"]["best"]["test"]


def test_the_saved_model_predicts_links(runs: dict[str, Run]) -> None:
    model = load_model(runs["fedavg"].path).model
    data = client_data(
        **{"synthetic.features": 8, "synthetic.blocks": 6, "synthetic.classes": 3}
    )
    assert model(data.inputs[0]).shape == (data.graph.graph.y.numel(), 2)


def test_the_report_shows_the_scores_of_links(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    page = Run.of(runs["fedavg"]).report(tmp_path / "report.html").read_text()
    for text in ("AUPRC", "MRR", "Hits@K", "links"):
        assert text in page


def test_owners_with_too_few_edges_neither_train_nor_are_scored(
    real_data: Path, tmp_path: Path
) -> None:
    source = real_data / "owners" / "lastfm_asia"
    if not source.exists():
        pytest.skip("no owners in the data folder")
    folder = tmp_path / "asia"
    folder.mkdir()
    for number in ("02", "04", "07"):
        shutil.copy(source / f"country_{number}.npz", folder)
    with pytest.raises(DataError, match='link-features = "degree"'):
        build_owners(parse_config({"owners": str(folder), "setting": "link"}))
    run = simulate(
        "fedavg", owners=str(folder), setting="link", link_features="degree",
        rounds=2, hidden_channels=8, output_dir=str(tmp_path),
    )  # fmt: skip
    scores = run.per_owner(metric="auroc")
    assert list(scores) == ["country_02", "country_07"]
    assert "Worst owner country_0" in run.table()


def test_an_owners_tables_need_no_labels(tmp_path: Path) -> None:
    for owner in ("one", "two"):
        folder = tmp_path / "owners" / owner
        folder.mkdir(parents=True)
        nodes = [f"n{i},{i % 3},{i % 5}" for i in range(30)]
        edges = [f"n{i},n{(i + step) % 30}" for i in range(30) for step in (1, 2)]
        (folder / "nodes.csv").write_text("\n".join(["id,a,b", *nodes]))
        (folder / "edges.csv").write_text("\n".join(["source,target", *edges]))
    config = {"owners": str(tmp_path / "owners"), "setting": "link"}
    clients, *_ = build_owners(parse_config(config))
    assert [int(g.graph.masks["train"].sum()) for g in clients] == [51, 51]
    with pytest.raises(DataError, match="must be id, label and features"):
        build_owners(parse_config({**config, "setting": "transductive"}))


def test_a_partitioned_file_needs_labels_for_partitions_by_class_only(
    tmp_path: Path,
) -> None:
    settings = {
        "setting": "link", "clients": 2, "rounds": 1, "hidden_channels": 8,
        "partition": "metis", "output_dir": str(tmp_path / "runs"),
    }  # fmt: skip
    scores = []
    for name, label in (("plain", ""), ("labelled", ",label")):
        folder = tmp_path / name
        folder.mkdir()
        nodes = [f"n{i},{i % 3},{i % 5}" + (",a" if label else "") for i in range(60)]
        edges = [f"n{i},n{(i + step) % 60}" for i in range(60) for step in (1, 2)]
        (folder / "nodes.csv").write_text("\n".join([f"id,a,b{label}", *nodes]))
        (folder / "edges.csv").write_text("\n".join(["source,target", *edges]))
        scores.append(comparable(simulate("local", str(folder), **settings)))
    assert scores[0] == scores[1]
    config = {"dataset": str(tmp_path / "plain"), "setting": "link"}
    with pytest.raises(DataError, match="must be id, label and features"):
        open_store(parse_config({**config, "partition": "dirichlet"}), 2)
