"""Scores and losses of a crafted model are no exact oracle of an owner's labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict

from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.label_scores import THRESHOLDS
from flower_fgl.core.metrics import Scores
from flower_fgl.protocols.base import INFO, read_tensors, write_tensors
from flower_fgl.simulation.local import run_config_of
from tests.support.owners import run_owners
from tests.support.recorded import Node, record

CLASSES = ("flu", "cold", "well")
COUNTS = (7, 30, 23)
"""Training nodes of each class."""
PERSON = 200
"""A test node, in class 1, that alone has the first feature."""


def write_graph(path: Path) -> None:
    """Write a graph of 60 training, 60 validation and 1,200 test nodes without edges."""
    y = np.concatenate(
        [np.repeat(np.arange(3), COUNTS), np.arange(60) % 3, np.arange(1200) % 3]
    )
    x = np.zeros((1320, 8), np.float32)
    x[:, 1] = np.linspace(0.1, 1, 1320)
    x[PERSON, 0] = 1
    assert y[PERSON] == (PERSON - 120) % 3
    place = np.arange(1320)
    np.savez(
        path,
        x=x,
        edges=np.zeros((0, 2), np.int64),
        y=y,
        class_names=np.array(CLASSES),
        train_mask=place < 60,
        val_mask=(place >= 60) & (place < 120),
        test_mask=place >= 120,
    )


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    folder = tmp_path / "graphs"
    folder.mkdir()
    nodes = []
    for name in ("ash", "birch", "cedar"):
        write_graph(folder / f"{name}.npz")
        nodes.append({"graph": str(folder / f"{name}.npz")})
    return nodes


def crafted(
    sent: Message, record_name: str, feature: int, to: tuple[float, ...], size: float
) -> Message:
    """Replace the weights of a message: the logits are ``to``, for an infinite one 0.

    The infinite one grows by ``size`` times a feature.
    """
    old = sent.content.array_records[record_name]
    shapes = {name: tuple(array.shape) for name, array in old.items()}
    made = {n: torch.zeros(shape) for n, shape in shapes.items()}
    matrices = [n for n, shape in shapes.items() if len(shape) == 2]
    vectors = [n for n, shape in shapes.items() if shape == (3,)]
    first, last = matrices[0], matrices[-1]
    made[first][0, feature] = 1.0
    target = next((i for i, value in enumerate(to) if value == np.inf), None)
    made[vectors[-1]][:] = torch.tensor([0 if v == np.inf else v for v in to])
    if target is not None:
        made[last][target, 0] = size
    sent.content[record_name] = write_tensors(made)
    assert read_tensors(sent.content, record_name, shapes).keys() == made.keys()
    return sent


EXACT: dict[str, Any] = {
    "lr": 1e-30,
    "weight_decay": 0.0,
    "dropout": 0.0,
    "feature_norm": "none",
    "rounds": 3,
    "local_epochs": 1,
}


def test_a_crafted_loss_no_longer_gives_the_class_counts(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {**EXACT, "share_class_counts": False}
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **settings)
    bias = (0.0, -1.0, -1000.0)
    message = crafted(sent["train"][0], "weights", 1, bias, 0)

    def loss(**floors: Any) -> float | None:
        node = {**nodes[0], **{k.replace("_", "-"): v for k, v in floors.items()}}
        metrics = Node(node, values).ask(message)["metrics"]
        found = metrics.get("loss")
        assert found is None or isinstance(found, float)
        return found

    def decoded(value: float) -> tuple[int, int, int]:
        base = float(torch.tensor(bias).logsumexp(0))
        total = round((value - base) * 60, 1)  # n_1 + 1000 · n_2
        second, first = divmod(round(total), 1000)
        return 60 - first - second, first, second

    exact = loss()
    assert exact is not None
    assert decoded(exact) == COUNTS
    rounded = loss(scores="rounded")
    assert rounded == 10.0
    assert decoded(rounded) != COUNTS
    assert loss(share_class_counts=False) is None
    assert loss(share_class_counts=False, scores="rounded") is None
    assert loss(scores="none") is None


def test_three_evaluations_no_longer_give_the_label_of_one_person(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {**EXACT, "evaluate": "global"}
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **settings)

    def scores(**floors: Any) -> list[dict[str, float]]:
        node = {**nodes[0], **{k.replace("_", "-"): v for k, v in floors.items()}}
        victim, found = Node(node, values), []
        for guess in range(3):
            to = [0.0] * 3
            to[guess] = np.inf
            to[(guess + 1) % 3] = 1.0
            message = crafted(sent["evaluate"][guess], "global", 0, tuple(to), 1e4)
            metrics = dict(victim.ask(message)["metrics"])
            found.append({k: v for k, v in metrics.items() if "/test/" in k})
        return found

    name = "global/test/accuracy"
    accuracy = [one[name] for one in scores()]
    # every model calls everybody else one class, a third of the 1,200
    gains = [round(1200 * (value - 1 / 3)) for value in accuracy]
    label = (PERSON - 120) % 3
    assert gains.index(max(gains)) == label
    assert gains.count(max(gains)) == 1
    hidden = scores(scores="rounded")
    for key in hidden[0]:
        assert len({one[key] for one in hidden}) == 1, key
        assert key.endswith("num_nodes") or hidden[0][key] == round(hidden[0][key], 2)
    assert scores(scores="none") == [{}] * 3
    assert scores(min_scored_nodes=1201) == [{}] * 3
    assert name in scores(min_scored_nodes=1200)[0]


def test_the_threshold_is_no_probability_of_a_node(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {**EXACT, "evaluate": "global", "positive_class": "flu"}
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **settings)
    message = crafted(sent["evaluate"][0], "global", 1, (np.inf, 0.0, 0.0), 1.0)
    metrics = Node(nodes[0], values).ask(message)["metrics"]
    threshold = metrics["global/test/threshold"]
    assert threshold in THRESHOLDS
    # before, the logit of the threshold gave the feature of a validation node
    x = torch.tensor(np.load(nodes[0]["graph"])["x"][:, 1]).double()
    odds = torch.tensor(float(threshold)).logit() + np.log(2)
    assert float((x - odds).abs().min()) > 1e-6


def test_a_rare_positive_class_is_refused_without_its_count(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"positive_class": "flu", "rounds": 1}
    for least in (1, 7):
        run = run_owners(
            nodes, tmp_path / str(least), **settings, min_class_count=least
        )
        assert "refused" not in run.summary
    with pytest.raises(
        Exception, match=r"(?s)positive-class = flu.*= 8 items"
    ) as error:
        run_owners(nodes, tmp_path / "8", **settings, min_class_count=8)
    assert "7" not in str(error.value).replace("17", "")
    run = run_owners(
        nodes,
        tmp_path / "well",
        **{**settings, "positive_class": "well"},
        min_class_count=8,
    )
    assert "refused" not in run.summary


@pytest.mark.parametrize(
    ("floor", "most"),
    [
        ({}, 7),
        ({"min-class-count": 5, "scores": "rounded"}, 59),
        ({"scores": "none"}, 59),
        ({"share-class-counts": False}, 59),
        ({"min-scored-nodes": 9}, 59),
    ],
)
def test_refusals_do_not_count_the_members_of_a_class(
    floor: dict[str, Any], most: int, nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    # the server searches for the largest min-class-count that the node accepts
    values = run_config_of(
        method="fedavg",
        dataset="synthetic",
        clients=3,
        seed=0,
        settings={"positive_class": "flu", "share_class_counts": False},
    )

    def accepts(least: int) -> bool:
        node = Node({**nodes[0], **floor}, {**values, "min-class-count": least})
        reply = node.send(RecordDict(), "query.describe")
        return "unfit" not in reply[INFO]

    found = max(least for least in (5, 6, 7, 8, 30, 59) if accepts(least))
    assert found == most


@pytest.mark.parametrize("evaluate", ["local", "global", "both"])
def test_a_run_with_owners_that_send_no_scores_is_whole(
    evaluate: str,
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings: dict[str, Any] = {"evaluate": evaluate, "rounds": 3}
    some = [{**nodes[0], "scores": "none"}, *nodes[1:]]
    run = run_owners(some, tmp_path / "some", **settings)
    assert run.status == "completed"
    assert run.best is not None
    assert "Clients 0 sent no scores" in caplog.text
    for row in run.clients:
        if row["round"] and row["partition_id"] == 0:
            assert not row.get("metrics")
    caplog.clear()
    run = run_owners(
        [{**n, "scores": "none"} for n in nodes], tmp_path / "no", **settings
    )
    assert run.status == "completed"
    assert "No client sent validation scores" in caplog.text
    assert run.best is None
    assert run.summary["rounds"] == 3
    assert (run.path / "model.safetensors").exists()
    run.table()


def test_sets_with_few_items_are_left_out_of_the_scores(
    nodes: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_owners(nodes, tmp_path / "all", rounds=2)
    assert "sent" not in caplog.text
    nodes = [{**node, "min-scored-nodes": 61} for node in nodes]
    run = run_owners(nodes, tmp_path / "run", rounds=2)
    assert run.status == "completed"
    assert run.summary["selection"] == "last"
    assert "No client sent validation scores" in caplog.text
    for row in run.rounds:
        assert row["metrics"]["local"].keys() == {"test"}


def packed(node: dict[str, Any], *args: Any, **kwargs: Any) -> MetricRecord:
    context = Context(0, 0, node, RecordDict(), {})
    return Session().pack_metrics(context, *args, **kwargs)


def test_numbers_without_a_floor_stay_as_they_are() -> None:
    found = Scores(7, 0.123456, 0.2, 0.3, auroc=0.987654, threshold=0.004)
    scores = {"local": {"val": found}}
    plain = packed({}, scores, {}, loss=0.123456, terms={"a": 0.5})
    assert plain["loss"] == 0.123456
    assert plain["terms/a"] == 0.5
    assert plain["local/val/accuracy"] == 0.123456
    rounded = packed({"scores": "rounded"}, scores, {}, loss=0.16, terms={"a": 1})
    assert rounded["loss"] == 0.2
    assert "terms/a" not in rounded
    assert rounded["local/val/num_nodes"] == 7
    assert rounded["local/val/accuracy"] == 0.12
    assert rounded["local/val/auroc"] == 0.99
    assert rounded["local/val/threshold"] == 0.004
    assert packed({"scores": "rounded"}, {}, {}, loss=-1e9)["loss"] == -10.0
