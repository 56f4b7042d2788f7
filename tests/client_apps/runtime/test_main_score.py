"""What selects a model on a client: accuracy, or AUROC where the run is selected by it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.model_store import save_best_model
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.core.metrics import Scores
from flower_fgl.datasets.client_graph import ClientGraph, Graph, NodeDataset
from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.runs.model_file import read_card

NAN = math.nan
SCORES = [
    Scores(9, 0.9, 0.5, 0.5, auroc=0.5),
    Scores(9, 0.6, 0.5, 0.5, auroc=0.8),
    Scores(9, 0.7, 0.5, 0.5, auroc=0.6),
]
"""Accuracy is highest in the first, AUROC in the second."""
SELECTS = pytest.mark.parametrize(
    ("dataset", "best"), [("cora", 0), ("minesweeper", 1)]
)


def client_of(toy: NodeDataset, val: list[int], **settings: Any) -> Client:
    masks = {
        "train": torch.tensor([True, False, False, True, False, False]),
        "val": torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor(val), True),
        "test": torch.zeros(6, dtype=torch.bool),
    }
    graph = Graph(toy.x, toy.edge_index, toy.y, masks)
    device = torch.device("cpu")
    data = ClientData.build(ClientGraph(0, graph, toy.target, torch.arange(6)), device)
    config = parse_config({"model": "gcn", **settings})
    return Client(config, 0, 1, data, ClientState(), device)


@SELECTS
def test_fine_tuning_keeps_the_best_epoch_by_the_main_score(
    dataset: str, best: int, toy: NodeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"dataset": dataset, "fedavg.finetune-epochs": 2}
    client = client_of(toy, [1, 4], **settings)
    seen: list[dict[str, Any]] = []

    def evaluate(model: Any, *_: Any) -> dict[str, Scores]:
        seen.append(state_of(model))
        return {"val": SCORES[len(seen) - 1]}

    monkeypatch.setattr(client, "evaluate", evaluate)
    start = client.build_model(initialise=True).state_dict()
    fit = FedAvgClientApp().finetune(client, 1, Weights(start))
    kept = fit.model.state_dict()
    assert len(seen) == 3  # the received weights, and two epochs
    assert [all(s[k].equal(kept[k]) for k in kept) for s in seen] == [
        k == best for k in range(3)
    ]


@SELECTS
def test_an_owner_stores_the_best_model_by_the_main_score(
    dataset: str, best: int, toy: NodeDataset, tmp_path: Path
) -> None:
    client = client_of(toy, [1, 4], dataset=dataset)
    node = {"model-dir": str(tmp_path), "name": "ash"}
    context = Context(7, 1, node, RecordDict(), {})  # type: ignore[arg-type]
    model = client.build_model(initialise=True)
    for number, scores in enumerate(SCORES):
        save_best_model(client, context, model, {"val": scores}, number)
    (folder,) = tmp_path.glob("7-ash-*")
    card = read_card(folder)
    assert card is not None
    assert card.round == best
    assert card.validation == SCORES[best].selected(client.config.main_score)


def test_validation_nodes_of_one_class_select_no_model_by_auroc(
    toy: NodeDataset, tmp_path: Path
) -> None:
    client = client_of(toy, [4, 5], dataset="minesweeper")
    model = client.build_model(initialise=True)
    assert math.isnan(client.validate(model))
    node = {"model-dir": str(tmp_path), "name": "ash"}
    context = Context(7, 1, node, RecordDict(), {})  # type: ignore[arg-type]
    for number in (1, 2):
        scores = {"val": replace(SCORES[0], auroc=NAN)}
        save_best_model(client, context, model, scores, number)
    (folder,) = tmp_path.glob("7-ash-*")
    card = read_card(folder)
    assert card is not None
    assert (card.round, card.validation) == (2, None)  # the latest, as without any


def test_checks_of_local_training_use_the_main_score(
    toy: NodeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"check-every": 1, "local-epochs": 3, "dataset": "minesweeper"}
    client = client_of(toy, [1, 2, 4, 5], **settings)
    model = client.build_model(initialise=True)
    assert client.validate(model) == client.evaluate(model)["val"].auroc
    counted = iter(SCORES)
    seen: list[dict[str, Any]] = []

    def evaluate(model: Any) -> dict[str, Any]:
        seen.append(state_of(model))
        return {"val": next(counted)}

    monkeypatch.setattr(client, "evaluate", evaluate)
    client.train(model, 1)
    assert all(seen[1][k].equal(v) for k, v in model.state_dict().items())
    assert len(seen) == 3


def test_the_strategy_passes_flower_the_main_score() -> None:
    """``should_stop`` and Flower's log get AUROC where it selects."""
    from flower_fgl.strategies.fedavg import FedAvg

    pooled = {"local": {"val": {"accuracy": 0.9, "auroc": 0.7}, "test": {}}}
    for dataset, expected in (("cora", 0.9), ("minesweeper", 0.7)):
        pooled["local"]["test"] = {"accuracy": 0.5}
        strategy: Any = FedAvg(parse_config({"dataset": dataset}))
        strategy.loop.log = SimpleNamespace(pooled=lambda: pooled)
        found = dict(strategy._pooled_scores())
        assert found["local/val"] == expected
        assert math.isnan(found["local/test"]) == (dataset == "minesweeper")
