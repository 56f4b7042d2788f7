"""Floors on an owner's split: no run replaces it, and no two runs differ by one node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.cli.main import app
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core.errors import FglError, RunError
from flower_fgl.core.node_settings import parse_node_config
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.base import CONFIG, INFO
from flower_fgl.protocols.describe import AGREEMENT
from flower_fgl.protocols.prototypes import CountedTable, LocalPrototypes
from flower_fgl.simulation.local import run_config_of
from tests.support.owners import run_owners
from tests.support.recorded import Node, record

FEW = "20/40/40"
"""Split with 6 training nodes in a class of 30."""
MORE = "24/38/38"
"""Split with the same 6 and one more."""
EXACT: dict[str, Any] = {
    "method": "fedproto",
    "rounds": 1,
    "lr": 1e-30,
    "weight_decay": 0.0,
    "dropout": 0.0,
    "min_class_count": 5,
}
"""A run whose networks are those that the server draws from the run's seed."""


def write_graph(path: Path, seed: int, *, has_split: bool) -> None:
    """Write a graph of 60 nodes in two classes; every third node is in no set."""
    generator = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        "x": generator.normal(size=(60, 8)).astype(np.float32),
        "edges": generator.integers(0, 60, size=(90, 2)),
        "y": np.arange(60) % 2,
        "class_names": np.array(["flu", "well"]),
    }
    arrays["edges"] = arrays["edges"][arrays["edges"][:, 0] != arrays["edges"][:, 1]]
    if has_split:
        part = np.arange(60) // 2 % 3
        for number, name in enumerate(("train", "val")):
            arrays[f"{name}_mask"] = (part == number) & (np.arange(60) < 50)
        arrays["test_mask"] = np.arange(60) >= 50
    np.savez(path, **arrays)


def owners(folder: Path, *, has_split: bool) -> list[dict[str, Any]]:
    folder.mkdir()
    nodes = []
    for number, name in enumerate(("ash", "birch", "cedar")):
        write_graph(folder / f"{name}.npz", number, has_split=has_split)
        nodes.append({"graph": str(folder / f"{name}.npz")})
    return nodes


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    return owners(tmp_path / "graphs", has_split=True)


@pytest.fixture
def plain(tmp_path: Path) -> list[dict[str, Any]]:
    return owners(tmp_path / "plain", has_split=False)


def sums(content: RecordDict) -> tuple[Tensor, Tensor]:
    """Return the sums of embeddings (C, p) and the numbers of nodes (C,) of an upload."""
    found = LocalPrototypes.from_record(content, CountedTable((2, 1, 8), 60))
    counts = found.counts[:, 0].double()
    return found.values[:, 0].double() * counts[:, None], counts


def embeddings(victim: Node, sent: Message) -> Tensor:
    """Return the embeddings of all nodes by the network that the server knows."""
    client, _ = Session().open(sent, victim.context)
    model = RecordingBackbone(client.build_model(initialise=True)).eval()
    with torch.no_grad():
        return model.embed(client.data.inputs[0])


@pytest.mark.parametrize("has_split", [False, True])
def test_nested_splits_of_two_runs_no_longer_give_one_node(
    has_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = owners(tmp_path / "graphs", has_split=has_split)
    open_nodes = [{**node, "own-split": False} for node in nodes]
    sent, values = record(monkeypatch, open_nodes, tmp_path / "run", **EXACT, split=FEW)

    def uploads(node: Mapping[str, Any], split: str, run_id: int) -> RecordDict:
        victim = Node(node, {**values, "split": split}, run_id=run_id)
        return victim.ask(sent["train"][0])

    home = {"state-dir": str(tmp_path / "states"), "min-class-count": 5}
    # the attack: the difference of two prototypes is the embedding of one person
    weak = {**nodes[0], **home, "own-split": False}
    few, counts = sums(uploads(weak, FEW, 7))
    more, larger = sums(uploads(weak, MORE, 8))
    assert (larger - counts).tolist() == [1, 1]
    victim = Node(weak, {**values, "split": FEW})
    everyone = embeddings(victim, sent["train"][0]).double()
    for found in more - few:
        assert float((everyone - found).norm(dim=1).min()) < 1e-4
    # the same two runs at an owner with the default floors
    strong = {**nodes[0], **home}
    if not has_split:
        uploads(strong, FEW, 9)
    with pytest.raises(RunError, match=r"ash refuses the run: .*split = "):
        uploads(strong, MORE, 10)


def test_a_run_does_not_replace_the_split_of_a_file(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = run_owners(nodes, tmp_path / "run")
    assert [row["num_train"] for row in run.clients[:3]] == [18] * 3
    public = run_owners(nodes, tmp_path / "public", split="public")
    assert public.best == run.best
    with pytest.raises(RunError, match=r"(?s)ash refuses the run.*own-split = false"):
        run_owners(nodes, tmp_path / "other", split=FEW)
    nodes[0]["own-split"] = False
    run = run_owners(nodes, tmp_path / "one", split=FEW, min_replies=1)
    assert {one["name"] for one in run.summary["refused"]} == {"birch", "cedar"}
    assert run.clients[0]["num_train"] == 12


def test_the_split_of_a_file_counts_for_every_message(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = {"fedavg": {"finetune_epochs": 1}, "evaluate": "both"}
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **tuned)
    home = {**nodes[0], "state-dir": str(tmp_path / "states")}
    victim = Node(home, values)
    victim.ask(sent["query.describe"][0])
    victim.context.run_config["split"] = MORE
    words = "the split in its graph file counts"
    for kind in ("train", "train.finetune", "evaluate"):
        victim.refuses(sent[kind][0], words)
    point: dict[str, Any] = {"run-id": "6", "server-round": 1, "is-restored": False}
    agreed = sent["train"][0].content[AGREEMENT]
    resume = RecordDict({CONFIG: ConfigRecord(point), AGREEMENT: agreed})
    with pytest.raises(RunError, match=words):
        victim.send(resume, "query.resume")
    reply = victim.ask(sent["query.describe"][0])
    assert words in str(reply[INFO]["unfit"])
    victim.context.run_config["split"] = "default"
    victim.ask(sent["train"][0])


def test_a_split_of_edges_is_the_owners_too(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    path = tmp_path / "ash.npz"
    edges = np.stack([np.arange(60), (np.arange(60) + 1) % 60], axis=1)
    label = generator.integers(0, 2, 60)
    np.savez(
        path,
        x=generator.normal(size=(60, 4)).astype(np.float32),
        edges=edges,
        y=np.zeros(60, int),
        class_names=np.array(["a"]),
        edge_label=label,
        edge_class_names=np.array(["good", "bad"]),
        edge_train_mask=np.arange(60) < 20,
        edge_val_mask=(np.arange(60) >= 20) & (np.arange(60) < 40),
        edge_test_mask=np.arange(60) >= 40,
    )
    nodes = [{"graph": str(path), "name": name} for name in ("ash", "birch")]
    settings: dict[str, Any] = {"setting": "edge", "rounds": 1}
    run = run_owners(nodes, tmp_path / "run", **settings)
    assert run.clients[0]["num_train"] == 20
    with pytest.raises(RunError, match="the split in its graph file counts"):
        run_owners(nodes, tmp_path / "other", split="50/20/30", **settings)


def test_the_first_split_is_remembered_with_all_that_determines_it(
    plain: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, values = record(monkeypatch, plain, tmp_path / "run")
    home = {**plain[0], "state-dir": str(tmp_path / "states")}
    (describe,), train = sent["query.describe"], sent["train"][0]

    def node(run_id: int, **changes: Any) -> Node:
        changed = {key.replace("_", "-"): value for key, value in changes.items()}
        return Node(home, {**values, **changed}, run_id=run_id)

    folder = tmp_path / "states"
    # a description alone has no upload, and binds no later run
    node(1, partition_seed=7).ask(describe)
    assert not list(folder.glob("split-*.json"))
    node(2).ask(train)
    (path,) = folder.glob("split-*.json")
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == {
        "setting": "transductive",
        "split": FEW,
        "partition-seed": 42,
    }
    node(3, split="20.0/40/40").ask(train)  # the same
    others: list[dict[str, Any]] = [
        {"split": MORE},
        {"partition_seed": 43},
        {"setting": "inductive"},
        {"setting": "few-shot"},
    ]
    for number, changes in enumerate(others):
        other = node(4 + number, **changes)
        other.refuses(train, rf"ash refuses the run: .*deletes {path.name} in its")
        assert path.name in str(other.ask(describe)[INFO]["unfit"])
    # another owner with the same folder has its own file
    second = {**plain[1], "state-dir": str(folder)}
    Node(second, {**values, "partition-seed": 43}, run_id=20).ask(train)
    assert len(list(folder.glob("split-*.json"))) == 2
    path.write_text("{")
    node(21).refuses(train, "the record of its split, .* is damaged")
    path.unlink()
    node(22, split=MORE).ask(train)
    node(23).refuses(train, f"the owner's first run drew it from .*{MORE}")


def test_the_setting_is_remembered_with_an_own_split_too(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, values = record(monkeypatch, nodes, tmp_path / "run")
    train, home = sent["train"][0], {**nodes[0], "state-dir": str(tmp_path / "states")}
    Node(home, values, run_id=1).ask(train)
    (path,) = (tmp_path / "states").glob("split-*.json")
    assert json.loads(path.read_text()) == {"setting": "transductive"}
    Node(home, {**values, "partition-seed": 43}, run_id=2).ask(train)
    hidden = {**values, "setting": "inductive"}
    Node(home, hidden, run_id=3).refuses(train, "the owner's first run drew it from")
    free = {**home, "own-split": False}
    Node(free, hidden, run_id=4).ask(train)


def test_the_numbers_of_many_splits_do_not_give_the_sizes_of_classes(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    # num_train of a few-shot split is the sum of min(shots, members) over all classes
    home = {**plain[0], "state-dir": str(tmp_path / "states")}
    hidden = {"share_class_counts": False, "setting": "few-shot"}
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=3, seed=0, settings=hidden
    )

    def numbers(node: Mapping[str, Any]) -> list[int]:
        found = []
        for number, shots in enumerate((2, 3, 4)):
            one = Node(node, {**values, "shots": shots}, run_id=number + 1)
            reply = one.send(RecordDict(), "query.describe")[INFO]
            found += [] if "unfit" in reply else [int(str(reply["num-train"]))]
        return found

    assert numbers(home) == [4, 6, 8]
    assert not list((tmp_path / "states").glob("split-*"))
    assert numbers({**home, "share-class-counts": False}) == [4]
    assert len(list((tmp_path / "states").glob("split-*.json"))) == 1


def test_shots_determine_a_few_shot_split(
    plain: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, values = record(monkeypatch, plain, tmp_path / "run", setting="few-shot")
    home = {**plain[0], "state-dir": str(tmp_path / "states")}
    Node(home, values, run_id=1).ask(sent["train"][0])
    more = Node(home, {**values, "shots": 4}, run_id=2)
    more.refuses(sent["train"][0], "it draws the split from .*shots = 4, .*shots = 3")


def test_check_graph_says_whose_split_counts(
    nodes: list[dict[str, Any]], plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    def notes(node: Mapping[str, Any], config: str, *settings: str) -> str:
        command = ["check-graph", node["graph"], "--node-config", config]
        command += [part for pair in settings for part in ("--set", pair)]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    refused = "this node refuses a run with these settings: "
    assert f"{refused}split = {FEW}, but" in notes(nodes[0], "", f"split={FEW}")
    assert refused not in notes(nodes[0], "own-split=false", f"split={FEW}")
    assert f"{refused}too few training" in notes(nodes[0], "min-train-nodes=19")
    assert refused not in notes(nodes[0], "min-train-nodes=18")
    advice = "Write the split into the file, or set state-dir in the node config"
    assert advice in notes(plain[0], "")
    assert advice not in notes(plain[0], f'state-dir="{tmp_path}"')
    assert advice not in notes(nodes[0], "")
    sent = "the training loss, and the scores on the validation and test nodes"
    assert f"{sent} What" in notes(nodes[0], "")
    assert f"{sent}, rounded What" in notes(nodes[0], 'scores="rounded"')
    assert "no loss and no scores" in notes(nodes[0], 'scores="none"')
    assert sent not in notes(nodes[0], "share-class-counts=false")


def test_a_user_may_replace_the_split_of_own_files_in_a_simulation(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder = str(Path(nodes[0]["graph"]).parent)
    settings: dict[str, Any] = {"hidden_channels": 8, "rounds": 1, "seed": 0}
    settings |= {"owners": folder, "output_dir": str(tmp_path / "runs")}
    assert simulate("fedavg", **settings).clients[0]["num_train"] == 18
    assert simulate("fedavg", split=FEW, **settings).clients[0]["num_train"] == 12


def test_a_split_with_few_training_nodes_is_refused(
    plain: list[dict[str, Any]], tmp_path: Path
) -> None:
    tiny = "4/4/92"  # one training node of each class
    run = run_owners(plain, tmp_path / "before", split=tiny)
    assert run.clients[0]["num_train"] == 2
    plain[0]["min-train-nodes"] = 3
    run = run_owners(plain, tmp_path / "now", split=tiny, min_replies=1)
    (refusal,) = run.summary["refused"]
    assert refusal["name"] == "ash"
    assert "demands min-train-nodes = 3" in refusal["reason"]
    assert run_owners(plain, tmp_path / "more", split=FEW).status == "completed"


def test_an_owner_lists_the_methods_and_settings_that_it_consents_to(
    nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    nodes[1] |= {"methods": "fedavg, fedpg", "settings": "transductive"}
    assert "refused" not in run_owners(nodes, tmp_path / "run").summary
    for number, changes in enumerate([{"method": "fedprox"}, {"setting": "inductive"}]):
        settings: dict[str, Any] = {**changes, "min_replies": 1}
        run = run_owners(nodes, tmp_path / str(number), **settings)
        (refusal,) = run.summary["refused"]
        assert refusal["name"] == "birch"
        assert f"{next(iter(changes))} = " in refusal["reason"]
        assert "demands one of" in refusal["reason"]
    nodes[1]["methods"] = "fedavg,fedgp"
    run = run_owners(nodes, tmp_path / "wrong", min_replies=1)
    assert 'Did you mean "fedpg"?' in run.summary["refused"][0]["reason"]
    with pytest.raises(FglError, match='Did you mean "transductive"'):
        parse_node_config({"settings": "transductiv"})
