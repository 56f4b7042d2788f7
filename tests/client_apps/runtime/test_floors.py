"""Floors of a data owner's node config: a weaker run is refused by that owner."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import RecordDict
from hypothesis import given
from hypothesis import strategies as st

from flower_fgl import METHODS, simulate
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.flower_internals import parse_config_args
from flower_fgl.core.node_settings import (
    NodeSettings,
    broken_floors,
    node_config_text,
    parse_node_config,
    read_node_config,
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


# ------------------------------------------------------------ text that Flower drops
DROPPED = {
    "min-class-count = 5 upload-noise = 2.0": "min-class-count = 5 upload-noise = 2.0.",
    'graph="/a" min-class-count =5': "min-class-count =5.",
    "min-class-count= 5 upload-noise=2.0": "min-class-count= 5.",
    "min-class-count:5": "min-class-count:5.",
    'graph="/a"b': 'graph="/a"b.',
    'graph="/a': 'graph="/a.',
    "min-class-count=5#upload-noise=2.0": "min-class-count=5#upload-noise=2.0.",
    "#min-class-count=5 upload-noise=2.0": "#min-class-count=5.",
    "upload-noise=2.0 min-class-count={}": "min-class-count={}.",
    "min-class-count=5 and upload-noise=2.0": "and.",
}


def test_flower_drops_text_in_silence() -> None:
    assert parse_config_args(["min-class-count = 5 upload-noise = 2.0"]) == {}
    assert parse_config_args(['graph="/a"b']) == {"graph": "/a"}


@pytest.mark.parametrize("text", sorted(DROPPED))
def test_text_that_flower_drops_is_refused_and_quoted(text: str) -> None:
    quoted = re.escape(f"does not read this part of --node-config: {DROPPED[text]} The")
    with pytest.raises(ConfigError, match=quoted):
        read_node_config(text)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        (
            "graph=\"/a b.npz\"  min-class-count=5\nname='o#1'",
            {"graph": "/a b.npz", "min-class-count": 5, "name": "o#1"},
        ),
        (
            "share-class-counts=false upload-clip=1e-3",
            {"share-class-counts": False, "upload-clip": 0.001},
        ),
    ],
)
def test_text_that_flower_reads_is_accepted(text: str, values: dict[str, Any]) -> None:
    assert read_node_config(text) == values == parse_config_args([text])


@pytest.mark.parametrize(
    "text", ["min-class-count=]", "graph=/a.npz", "name=1 name=2", "a=1,b=2", "no.toml"]
)
def test_text_that_flower_cannot_read_is_one_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^Flower cannot read --node-config"):
        read_node_config(text)


def test_a_node_config_may_be_a_toml_file(tmp_path: Path) -> None:
    (path := tmp_path / "node.toml").write_text("min-class-count = 5  # at least\n")
    assert read_node_config(str(path)) == {"min-class-count": 5}


@given(text=st.text())
def test_a_written_node_config_is_what_flower_reads(text: str) -> None:
    values = {"graph": text, "worker-idle": 600, "share-class-counts": False}
    assert parse_config_args([node_config_text(values)]) == values


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (
            {"min-class-count": 2, "share-class-counts": True, "upload-clip": 1.0},
            "min-class-count = 2, share-class-counts = true, upload-clip = 1.0. Floors in "
            "force: min-class-count = 2, upload-clip = 1.0.",
        ),
        # what Flower makes of 'min-class-count = 2'
        (parse_config_args(["min-class-count = 2"]), "Floors in force: none."),
    ],
)
def test_the_first_line_of_a_node_names_its_floors(
    own: dict[str, Any],
    line: str,
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    nodes[0] |= own
    with caplog.at_level("INFO"):
        run_owners(nodes, tmp_path / "run", upload_clip=0.5, min_class_count=2)
    found = [text for text in caplog.messages if text.startswith("Node config of")]
    assert len(found) == 3  # once per node and run, not per message
    assert found[0].startswith("Node config of ash: ")
    assert f'graph = "{nodes[0]["graph"]}"' in found[0]
    assert found[0].endswith(line)


def test_a_node_with_a_partition_names_its_floors_too(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    found = []
    for program in ("pytest", "/bin/flwr-clientapp"):  # a simulation, a SuperNode
        monkeypatch.setattr(sys, "argv", [program])
        with caplog.at_level("INFO"):
            simulate(clients=2, run_dir=str(tmp_path / Path(program).name), **SMALL)
        found += [text for text in caplog.messages if "Floors" in text]
    assert found == [
        f"Node config of client {k}: partition-id = {k}, num-partitions = 2. Floors in "
        "force: none."
        for k in range(2)
    ]
