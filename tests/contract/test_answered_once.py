"""A client answers every round of every exchange once, whatever the server sends."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, RecordDict

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.releases import ReleaseLedger
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.core.errors import FglError, RunError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import CONFIG, INFO
from flower_fgl.protocols.describe import AGREEMENT, ClassAgreement
from flower_fgl.simulation.local_grid import carry
from tests.client_apps.runtime.test_owners import saved
from tests.support.owners import owner_graphs
from tests.support.recorded import Node, record

ONCE = "answers every round once"


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    return saved(tmp_path / "graphs", owner_graphs())


NOISY = {"upload_clip": 0.5, "upload_noise": 2.0}


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_resume_query_does_not_replace_the_models_of_this_run(
    is_restored: bool,
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, values = record(monkeypatch, nodes, tmp_path / "run", rounds=1)
    home = {**nodes[0], "model-dir": str(tmp_path / "models")}
    for run_id, learning_rate in ((7, 1e-4), (8, 0.05)):
        victim = Node(home, {**values, "lr": learning_rate}, run_id=run_id)
        victim.ask(sent["train"][0])
    before, kept = (
        next((tmp_path / "models").glob(f"{run_id}-*")) / "model.safetensors"
        for run_id in (7, 8)
    )
    own = kept.read_bytes()
    assert own != before.read_bytes()
    point = {"run-id": "7", "server-round": 1, "is-restored": is_restored}
    content = RecordDict(
        {CONFIG: ConfigRecord(point), AGREEMENT: sent["train"][0].content[AGREEMENT]}
    )
    if is_restored:
        victim.send(content, "query.resume")
    else:
        with pytest.raises(FglError, match="does not rewind"):
            victim.send(content, "query.resume")
    assert kept.read_bytes() == own


def test_two_owners_with_one_state_dir_never_see_each_others_state(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, values = record(monkeypatch, nodes, tmp_path / "run", evaluate="local")
    shared = {"state-dir": str(tmp_path / "states")}
    ash = Node({**nodes[0], **shared}, values)
    ash.ask(sent["train"][0])
    # the server gives birch the number of ash, in this run and in a resumed one
    birch = Node({**nodes[1], **shared}, values)
    point = {"run-id": "7", "server-round": 1, "is-restored": False}
    resume = RecordDict(
        {CONFIG: ConfigRecord(point), AGREEMENT: sent["train"][0].content[AGREEMENT]}
    )
    resumed = Node({**nodes[1], **shared}, values, run_id=8)
    assert resumed.send(resume, "query.resume")[INFO]["round"] == 0
    store = Session().states(parse_config(values), birch.context)
    for node in (birch, resumed):
        assert store.load(node.context, 0) == ClientState()
    own = Session().states(parse_config(values), ash.context)
    assert own.load(ash.context, 0).group("model")


def test_150_requests_for_one_round_give_one_noised_answer(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **NOISY)
    victim = Node(nodes[0], values)
    answers = 0
    for turn in range(150):
        if turn % 10 == 0:
            victim.restart()  # each message may have its own process
        kind = "train.default" if turn % 2 else "train"
        try:
            victim.ask(sent["train"][0], kind)
            answers += 1
        except FglError:
            pass
    assert answers == 1


@pytest.mark.parametrize("has_folder", [False, True])
def test_rounds_only_go_forward(
    has_folder: bool,
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, values = record(monkeypatch, nodes, tmp_path / "run", evaluate="both")
    more = {"state-dir": str(tmp_path / "states")} if has_folder else {}
    victim = Node({**nodes[0], **more}, values)
    first, second = sent["train"]
    victim.ask(second)
    victim.refuses(first, ONCE)
    victim.refuses(second, ONCE)
    victim.refuses(second, "its rounds are 1 to 2", server_round=3)
    victim.refuses(second, ONCE, server_round=-1)
    # a describe query resets nothing
    victim.ask(sent["query.describe"][0])
    victim.refuses(second, ONCE)
    # scores of a model that the server chose are answered once, too
    victim.ask(sent["evaluate"][1])
    victim.refuses(sent["evaluate"][1], ONCE)
    victim.refuses(sent["evaluate"][0], ONCE, "evaluate.default")
    victim.restart()
    victim.refuses(second, ONCE)
    if has_folder:
        victim.lose_memory()
        victim.refuses(second, ONCE)
        victim.refuses(sent["evaluate"][1], ONCE)


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_later_exchange_gives_no_second_answer_to_an_earlier_one(
    has_folder: bool,
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned = {"fedavg": {"finetune_epochs": 1}}
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **NOISY, **tuned)
    more = {"state-dir": str(tmp_path / "states")} if has_folder else {}
    victim = Node({**nodes[0], **more}, values)
    victim.ask(sent["train.finetune"][0])
    if not has_folder:
        victim.ask(sent["train"][0])
    for _ in range(3):
        victim.refuses(sent["train"][0], "is refused")


def test_an_answer_that_is_an_error_counts_and_is_given_once(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # whether training fails is one bit about the data: the server chooses lr and weights
    sent, values = record(
        monkeypatch, nodes, tmp_path / "run", **NOISY, optimizer="sgd", evaluate="both"
    )
    home = {**nodes[0], "state-dir": str(tmp_path / "states"), "max-releases": 2}
    victim = Node(home, {**values, "lr": 1e30})
    with pytest.raises(FglError, match="non-finite") as caught:
        victim.ask(sent["train"][0])
    assert not re.search(r"\d", str(caught.value))
    victim.refuses(sent["train"][0], ONCE)
    victim.lose_memory()
    victim.refuses(sent["train"][0], ONCE)
    victim.refuses(sent["train"][1], "non-finite")
    victim.refuses(sent["evaluate"][0], "max-releases = 2")


@pytest.mark.thorough
@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("scored", [False, True])
def test_a_resumed_run_repeats_rounds_that_failed_after_the_checkpoint(
    trained: int,
    scored: bool,
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"rounds": 6, "evaluate": "both", "checkpoint_every": 2}
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **settings)
    home = {**nodes[0], "state-dir": str(tmp_path / "states")}
    first = Node(home, values, run_id=7)
    for number in range(trained):
        first.ask(sent["train"][number])
        first.ask(sent["evaluate"][number])

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("flower_fgl.client_apps.fedavg.FedAvgClientApp.fit", fail)
        for number in (2, 3, 4):
            first.refuses(sent["train"][number], "RuntimeError")
            if scored:
                first.ask(sent["evaluate"][number])
    point: dict[str, Any] = {"run-id": "7", "server-round": 2, "is-restored": False}
    agreed = sent["train"][0].content[AGREEMENT]
    resume = RecordDict({CONFIG: ConfigRecord(point), AGREEMENT: agreed})
    resumed = Node(home, values, run_id=8)
    resumed.send(resume, "query.resume")
    for number in (2, 3, 4, 5):
        resumed.ask(sent["train"][number])
        resumed.ask(sent["evaluate"][number])
        resumed.refuses(sent["train"][number], ONCE)


@pytest.mark.parametrize("is_error", [False, True])
def test_a_process_that_ends_later_keeps_the_answers_of_another(
    is_error: bool,
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned = {"fedavg": {"finetune_epochs": 1}}
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **tuned)
    home = {**nodes[0], "state-dir": str(tmp_path / "states")}
    slow, quick = Node(home, values), Node(home, values)
    original = FedAvgClientApp.finetune

    def finetune(app: Any, *args: Any) -> Any:
        if is_error:
            quick.context.run_config["lr"] = 1e30
            quick.context.run_config["optimizer"] = "sgd"
            with pytest.raises(FglError, match="non-finite"):
                quick.ask(sent["train"][0])
        else:
            quick.ask(sent["train"][0])
        return original(app, *args)

    monkeypatch.setattr(FedAvgClientApp, "finetune", finetune)
    slow.ask(sent["train.finetune"][0], server_round=1)
    slow.refuses(sent["train"][0], ONCE)
    quick.refuses(sent["train"][0], ONCE)


def test_an_unexpected_error_tells_the_server_no_values(
    nodes: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent, values = record(monkeypatch, nodes, tmp_path / "run")
    victim = Node(nodes[0], values)
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise ValueError("age = 47")

        patch.setattr("flower_fgl.client_apps.fedavg.FedAvgClientApp.fit", fail)
        with pytest.raises(RunError, match=r"^ValueError\. The log of") as caught:
            victim.ask(sent["train"][0])
    assert "47" not in str(caught.value)
    assert "age = 47" in caplog.text
    victim.refuses(sent["train"][0], ONCE)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "kind", "number"),
    [("fedlog", "train.pretrain", 1), ("fedavg", "train", 0)],
)
def test_an_exchange_has_only_its_own_rounds(
    method: str,
    kind: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs(method=method))
    sent, values = record(monkeypatch, nodes, tmp_path / "run", method=method)
    victim = Node(nodes[0], values)
    victim.refuses(sent[kind][0], "its rounds are", server_round=number)
    victim.ask(sent[kind][0])
    victim.refuses(sent[kind][0], ONCE)


@pytest.mark.thorough
def test_only_the_describe_query_needs_no_agreement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs(method="fedsage+"))
    sent, values = record(monkeypatch, nodes, tmp_path / "run", method="fedsage+")
    victim = Node({**nodes[0], "state-dir": str(tmp_path / "states")}, values)
    for kind, (message, *_) in sent.items():
        if kind == "query.describe":
            victim.ask(message)
            continue
        content = carry(message.content)
        del content[AGREEMENT]
        with pytest.raises(FglError, match="lacks the agreement"):
            victim.send(content, kind)


def test_another_partition_id_gives_a_data_owner_no_second_state(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, values = record(monkeypatch, nodes, tmp_path / "run")
    victim = Node({**nodes[0], "state-dir": str(tmp_path / "states")}, values)
    victim.ask(sent["train"][0])
    again = sent["train"][0]
    agreed = ClassAgreement.from_record(again.content)
    other = ClassAgreement(2, agreed.num_partitions, agreed.names)
    again.content[AGREEMENT] = other.to_record()[AGREEMENT]
    victim.refuses(again, "in this run it is 0")


def test_a_client_rewinds_only_before_its_first_answer_of_a_run(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, values = record(
        monkeypatch, nodes, tmp_path / "run", rounds=3, checkpoint_every=1
    )
    home = {**nodes[0], "state-dir": str(tmp_path / "states")}
    victim = Node(home, values, run_id=7)
    for message in sent["train"]:
        victim.ask(message)
    point: dict[str, Any] = {"run-id": "7", "server-round": 1, "is-restored": False}
    resume = sent["train"][0].content
    resume = RecordDict({CONFIG: ConfigRecord(point), AGREEMENT: resume[AGREEMENT]})
    with pytest.raises(FglError, match="does not rewind"):
        victim.send(resume, "query.resume")
    victim.refuses(sent["train"][1], ONCE)
    # a resumed run has its own id: the client goes back to the checkpoint, once
    point["server-round"] = 2
    resume[CONFIG] = ConfigRecord(point)
    resumed = Node(home, values, run_id=8)
    assert resumed.send(resume, "query.resume")[INFO]["round"] == 2
    resumed.refuses(sent["train"][1], ONCE)
    resumed.ask(sent["train"][2])
    with pytest.raises(FglError, match="does not rewind"):
        resumed.send(resume, "query.resume")


def test_max_releases_counts_all_runs_and_survives_a_crash(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, values = record(monkeypatch, nodes, tmp_path / "run")
    home = {**nodes[0], "state-dir": str(tmp_path / "states"), "max-releases": 3}
    first = Node(home, values, run_id=7)
    for message in sent["train"]:
        first.ask(message)
    # a new run starts with an empty state, but not with an empty count
    second = Node(home, values, run_id=8)
    with monkeypatch.context() as patch:

        def crash(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr("flower_fgl.client_apps.runtime.state.FileStates.save", crash)
        with pytest.raises(KeyboardInterrupt):
            second.ask(sent["train"][0])
    # the reply was counted before the crash, so no free answer is left
    second.lose_memory()
    second.refuses(sent["train"][0], "max-releases = 3")
    third = Node(home, values, run_id=9)
    reply = third.ask(sent["query.describe"][0])
    assert "max-releases = 3" in str(reply[INFO]["unfit"])
    assert reply[INFO]["name"] == "ash"


def test_a_full_disk_leaves_the_counter_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ReleaseLedger(tmp_path / "made" / "states", "x", 5)
    ledger.add()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunError, match="No space left"):
            ledger.add()
    assert ledger.count() == 1
    found = {path.suffix for path in ledger.folder.iterdir()}
    assert found == {".json", ".lock"}
    assert ledger.path.stat().st_mode & 0o777 == 0o600
    for folder in (ledger.folder, ledger.folder.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_damaged_count_is_no_count_of_zero(tmp_path: Path) -> None:
    ledger = ReleaseLedger(tmp_path, "x", 5)
    for text in ("", "{}", '{"releases": -1}', '{"releases": true}', "[]"):
        ledger.path.write_text(text)
        with pytest.raises(RunError, match=r"restore or delete the file"):
            ledger.add()
    ledger.path.unlink()
    for _ in range(5):
        ledger.add()
    with pytest.raises(RunError, match="max-releases = 5"):
        ledger.add()


def test_an_owner_that_shares_no_feature_names_names_none_in_an_error(
    nodes: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, values = record(monkeypatch, nodes, tmp_path / "run")
    victim = Node({**nodes[0], "share-feature-names": False}, values)
    for kind in ("query.describe", "train"):
        content = carry(sent["train"][0].content)
        agreed = replace(ClassAgreement.from_record(content), feature_names=("zzz",))
        content[AGREEMENT] = agreed.to_record()[AGREEMENT]
        text = ""
        try:
            text = str(victim.send(content, kind)[INFO]["unfit"])
        except FglError as error:
            text = str(error)
        assert "the agreement names features, but share-feature-names is false" in text
        assert "not expected" not in text
