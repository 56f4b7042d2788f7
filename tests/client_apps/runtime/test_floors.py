"""Floors of a data owner's node config: a weaker run is refused by that owner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict

from flower_fgl import METHODS
from flower_fgl.core.errors import RunError
from flower_fgl.core.node_settings import (
    NodeSettings,
    broken_floors,
    parse_node_config,
)
from flower_fgl.core.options import kebab
from flower_fgl.core.settings import GeneralSettings
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import INFO
from flower_fgl.simulation.local import run_config_of
from tests.client_apps.runtime.test_owners import saved
from tests.support.owners import owner_graphs, run_owners
from tests.support.recorded import Node, record
from tests.support.short_runs import SMALL

STRONG: dict[str, Any] = {
    "min_class_count": 3,
    "upload_clip": 0.5,
    "upload_noise": 2.0,
    "share_class_counts": False,
    "secure_aggregation": True,
    "secure_threshold": 0.9,
}
FLOORS: dict[str, Any] = {
    "min-class-count": 2,
    "upload-clip": 1.0,
    "upload-noise": 1.5,
    "share-class-counts": False,
    "secure-aggregation": True,
    "secure-threshold": 0.8,
}
WEAKER: dict[str, dict[str, Any]] = {
    "min-class-count": {"min_class_count": 1},
    "upload-clip": {"upload_clip": 1.5},
    "upload-noise": {"upload_noise": 1.0},
    "share-class-counts": {"share_class_counts": True},
    "secure-aggregation": {"secure_aggregation": False},
    "secure-threshold": {"secure_threshold": 0.7},
}


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    return saved(tmp_path / "graphs", owner_graphs())


def test_a_run_as_strong_as_the_floors_is_accepted(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    nodes = [{**node, **FLOORS} for node in nodes]
    run = run_owners(nodes, tmp_path / "run", **STRONG)
    assert run.status == "completed"
    assert "refused" not in run.summary


@pytest.mark.parametrize("key", sorted(WEAKER))
def test_a_weaker_run_is_refused_by_name_of_owner_and_key(
    key: str, nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    nodes[1] |= FLOORS
    settings = {**STRONG, **WEAKER[key], "min_replies": 1}
    if settings["secure_aggregation"]:  # the other two are too few for a sum
        with pytest.raises(RunError, match=rf"birch refuses the run.*{key} = "):
            run_owners(nodes[1:2] * 3, tmp_path / "run", **settings)
        return
    run = run_owners(nodes, tmp_path / "run", **settings)
    (refusal,) = run.summary["refused"]
    assert refusal["name"] == "birch"
    assert "birch refuses the run" in refusal["reason"]
    assert f"{key} = " in refusal["reason"]
    assert all(row["replies"] == 2 for row in run.rounds)


def test_a_run_without_clipping_is_below_any_upload_clip() -> None:
    run = parse_config({}).flat()
    (text,) = broken_floors(
        NodeSettings(upload_clip=1e9), run, uploads=True, known_methods=METHODS
    )
    assert text.startswith("upload-clip = 0, but its node config demands at most 1e+09")
    # a method without uploads has none to clip
    assert (
        broken_floors(
            NodeSettings(upload_clip=1.0), run, uploads=False, known_methods=METHODS
        )
        == []
    )
    assert not METHODS["local"].uploads


def test_a_share_of_the_noise_is_below_any_floor_of_the_noise() -> None:
    run = {**parse_config({}).flat(), "upload-clip": 1.0, "upload-noise": 5.0}
    node = NodeSettings(upload_noise=2.0)
    assert broken_floors(node, run, uploads=True, known_methods=METHODS) == []
    run["upload-noise-model"] = "distributed"
    (text,) = broken_floors(node, run, uploads=True, known_methods=METHODS)
    assert text.startswith(
        "upload-noise-model = distributed, but its node config demands"
    )


def test_the_server_cannot_lower_a_setting_after_the_describe_query(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strong = {"upload_clip": 0.5, "upload_noise": 2.0}
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **strong)
    floors = {"upload-clip": 1.0, "upload-noise": 1.5}
    victim = Node({**nodes[0], **floors}, values)
    assert "unfit" not in victim.ask(sent["query.describe"][0])[INFO]
    victim.context.run_config["upload-noise"] = 0.5
    for kind in ("train", "evaluate", "query.resume", "query.secure-keys"):
        if kind in sent:
            victim.refuses(sent[kind][0], "upload-noise = 0.5, but its node config")
    reply = victim.ask(sent["query.describe"][0])
    assert "upload-noise = 0.5" in str(reply[INFO]["unfit"])
    victim.context.run_config["upload-noise"] = 2.0
    victim.ask(sent["train"][0])


UNKNOWN = {
    "max-mesage-mb": "max-message-mb",
    "min-class-counts": "min-class-count",
    "upload-nosie": "upload-noise",
    "share-class-count": "share-class-counts",
}


@pytest.mark.parametrize("key", sorted(UNKNOWN))
def test_an_unknown_key_is_an_error_with_the_nearest_known_one(
    key: str, nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    nodes[0][key] = 5
    run = run_owners(nodes, tmp_path / "run")
    (refusal,) = run.summary["refused"]
    assert refusal["name"] == "ash"
    assert f'Unknown key "{key}" in the node config.' in refusal["reason"]
    assert f'Did you mean "{UNKNOWN[key]}"?' in refusal["reason"]


WRONG: list[tuple[str, Any, str]] = [
    ("min-class-count", 0, ">= 1"),
    ("min-class-count", 2.5, "of type int"),
    ("upload-clip", 0, "> 0"),
    ("upload-clip", float("nan"), "finite"),
    ("upload-noise", -1, ">= 0"),
    ("upload-noise", "1", "of type float"),
    ("share-class-counts", 0, "of type bool"),
    ("secure-aggregation", "yes", "of type bool"),
    ("secure-threshold", 0.5, "> 0.5"),
    ("max-releases", 0, ">= 1"),
    ("max-releases", 5, "needs state-dir"),
    ("fixed-roster", True, "needs secure-aggregation = true, and state-dir"),
    ("max-message-mb", True, "of type float"),
    ("max-message-mb", -1, "> 0"),
    ("worker-idle", -1, ">= 0"),
    ("name", 5, "of type str"),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG)
def test_a_wrong_value_has_one_clear_error(key: str, value: Any, expected: str) -> None:
    with pytest.raises(RunError) as caught:
        parse_node_config({"graph": "/data/a.npz", key: value})
    text = str(caught.value)
    assert text.startswith("The node config is wrong: ")
    assert key in text
    assert expected in text


def test_a_partition_may_have_floors_too(tmp_path: Path) -> None:
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=3, seed=0, settings=SMALL
    )
    config = {"partition-id": 1, "num-partitions": 3, "upload-noise": 1.0}
    reply = Node(config, values).send(RecordDict(), "query.describe")
    assert reply[INFO]["name"] == "client 1"
    assert "upload-noise = 0, but" in str(reply[INFO]["unfit"])


def test_every_floor_is_a_setting_of_the_run() -> None:
    own = {kebab(name) for name in vars(GeneralSettings())}
    assert set(FLOORS) | {"max-message-mb"} <= own
