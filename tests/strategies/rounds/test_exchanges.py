"""The exchange before round 1 in which clients agree on one scale of numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord

from flower_fgl import Run, resume, simulate
from flower_fgl.client_apps.runtime import target_scaling
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.core.settings import read_given
from flower_fgl.core.target_scale import Moments, moments
from flower_fgl.protocols.exchanges import (
    SCALE,
    STATISTICS,
    AgreedScale,
    TargetStatistics,
)
from flower_fgl.runs.saved_model import load_model
from tests.strategies.rounds.test_rejoining import Nodes, run_with
from tests.support.number_targets import number_files
from tests.support.owners import run_owners
from tests.support.recorded import Node, record
from tests.support.short_runs import comparable, timeless

NUMBERS: dict[str, Any] = {"target_kind": "numbers", "rounds": 2, "weight_decay": 0.0}
FILE = {"split": "60/20/20", **NUMBERS}


def downloads(run: Run) -> set[str]:
    """Return the names of the records that the clients received."""
    return {name for row in run.rounds for name in row["bytes"]["down"]}


def scale_of(run: Run) -> dict[str, Any]:
    """Return the scale in the summary of a run."""
    found: dict[str, Any] = run.summary["target"]["scale"]
    return found


def test_statistics_leave_once_and_the_scale_is_that_of_all_training_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}
    original = target_scaling.target_statistics

    def kept(data: ClientData, config: RunConfig) -> TargetStatistics:
        seen[data.place[0]] = data.training.labels
        return original(data, config)

    monkeypatch.setattr(target_scaling, "target_statistics", kept)
    run = run_owners(number_files(tmp_path), tmp_path / "run", **FILE)
    assert [row["phase"] for row in run.rounds] == ["targets", "train", "train"]
    assert STATISTICS in run.rounds[0]["bytes"]["up"]
    assert all(STATISTICS not in row["bytes"]["up"] for row in run.rounds[1:])
    assert all(SCALE in row["bytes"]["down"] for row in run.rounds[1:])
    values = torch.cat(list(seen.values()))
    assert len(seen) == 3
    everything = moments(values)
    found = scale_of(run)
    assert found["kind"] == "shared"
    assert found["mean"] == pytest.approx([m.mean for m in everything])
    assert found["std"] == pytest.approx([m.spread for m in everything])
    assert run.summary["target"]["names"] == ["logP", "logS"]
    assert run.summary["target"]["units"] == ["mol/L", "mol/L"]
    json.dumps(run.summary["target"], allow_nan=False)
    assert "class_names" not in run.summary


def test_a_shift_of_all_numbers_changes_no_loss_and_moves_the_scale(
    tmp_path: Path,
) -> None:
    runs = [
        run_owners(
            number_files(tmp_path / str(shift), shift=shift),
            tmp_path / f"run-{shift}",
            **FILE,
        )
        for shift in (0.0, 1e6)
    ]
    losses = [[row["loss"] for row in run.rounds[1:]] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    means = [np.array(scale_of(run)["mean"]) for run in runs]
    np.testing.assert_allclose(means[1] - means[0], 1e6, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "mean", "std", "card"),
    [
        ({"target_scale": "own"}, None, None, "lost"),
        ({"target_scale": "none"}, [0.0, 0.0], [1.0, 1.0], "none"),
        (
            {  # in another order than the names of the run, logP and logS
                "target_scale": "given",
                "target_mean": "logS=3.5, logP=3",
                "target_std": "logP=2,logS=1",
            },
            [3.0, 3.5],
            [2.0, 1.0],
            "kept",
        ),
    ],
)
def test_other_scales_exchange_nothing(
    settings: dict[str, str], mean: Any, std: Any, card: str, tmp_path: Path
) -> None:
    run = run_owners(number_files(tmp_path), tmp_path / "run", **FILE, **settings)
    assert [row["phase"] for row in run.rounds] == ["train", "train"]
    assert SCALE not in downloads(run)
    assert scale_of(run) == {
        "kind": settings["target_scale"],
        "mean": mean,
        "std": std,
    }
    saved = load_model(run.path)
    assert saved.card.target_scale == card
    if mean is None:
        assert saved.target_scale is None
    else:
        assert saved.target_scale is not None
        assert saved.target_scale.mean.tolist() == mean


def test_the_model_file_holds_the_scale_to_the_last_bit(tmp_path: Path) -> None:
    run = run_owners(number_files(tmp_path), tmp_path / "run", **FILE)
    saved = load_model(run.path)
    assert saved.card.target_scale == "kept"
    assert saved.card.target_kind == "numbers"
    assert saved.card.target_units == ("mol/L", "mol/L")
    assert saved.target_scale is not None
    assert saved.target_scale.mean.tolist() == scale_of(run)["mean"]
    owners = [load_model(path) for path in (tmp_path / "run-models").iterdir()]
    assert len(owners) == 3
    for own in owners:
        assert own.target_scale is not None
        assert torch.equal(own.target_scale.std, saved.target_scale.std)


def test_owners_keep_their_own_scale_in_their_models(tmp_path: Path) -> None:
    files = number_files(tmp_path, factors=(1.0, 10.0, 100.0))
    run_owners(files, tmp_path / "run", **FILE, target_scale="own")
    stds = []
    for path in (tmp_path / "run-models").iterdir():
        saved = load_model(path)
        assert saved.card.target_scale == "kept"
        assert saved.target_scale is not None
        stds.append(float(saved.target_scale.std[0]))
    small, middle, large = sorted(stds)
    assert middle / small == pytest.approx(10, rel=0.3)
    assert large / middle == pytest.approx(10, rel=0.3)


def test_an_owner_in_another_unit_is_named_and_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = number_files(tmp_path, factors=(1.0, 1.0, 1.0, 1000.0))
    run = run_owners(files, tmp_path / "run", **FILE)
    assert 'owner d: the values of "logS" differ from those of most' in caplog.text
    assert "Its values do not count in the scale." in caplog.text
    rest = run_owners(files[:3], tmp_path / "rest", **FILE)
    assert scale_of(run)["mean"] == scale_of(rest)["mean"]
    assert run.rounds[-1]["replies"] == 4  # it still trains


def test_an_owner_that_sends_nonsense_takes_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = target_scaling.target_statistics

    def nonsense(data: ClientData, config: RunConfig) -> TargetStatistics:
        if data.place[0] == 1:
            return TargetStatistics((Moments(9, math.nan, 1.0),) * 2)
        return original(data, config)

    monkeypatch.setattr(target_scaling, "target_statistics", nonsense)
    run = run_owners(number_files(tmp_path), tmp_path / "run", **FILE)
    (refusal,) = run.summary["refused"]
    assert refusal["name"] == "b"
    assert refusal["reason"].startswith("its statistics of the targets are malformed")
    assert [row["replies"] for row in run.rounds[1:]] == [2, 2]
    assert len([row for row in run.clients if row["round"] == 0]) == 2


def test_an_owner_that_fails_to_answer_still_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = target_scaling.target_statistics

    def fails(data: ClientData, config: RunConfig) -> TargetStatistics:
        if data.place[0] == 1:
            raise ValueError("no")
        return original(data, config)

    monkeypatch.setattr(target_scaling, "target_statistics", fails)
    run = run_owners(number_files(tmp_path), tmp_path / "run", **FILE)
    assert [row["replies"] for row in run.rounds[1:]] == [3, 3]
    (failure,) = run.rounds[0]["failures"]
    assert failure["partition_id"] == 1


def test_values_of_too_few_items_are_not_sent(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No owner has min-target-count = 99"):
        run_owners(
            number_files(tmp_path), tmp_path / "run", **FILE, min_target_count=99
        )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"secure_aggregation": True},
            "secure-aggregation = true hides single uploads, but target-scale = "
            '"shared" sends each owner\'s mean and spread. Set target-scale = "given" or '
            '"own".',
        ),
        (
            {"share_target_statistics": False},
            'share-target-statistics = false, but target-scale = "shared" sends each '
            'owner\'s mean and spread. Set target-scale = "given" or "own".',
        ),
        (
            {"target_scale": "given", "target_mean": 1.5},
            'With target-scale = "given", target-std must be a finite number as in "-3.1", '
            "or one for each of several targets with its name as in "
            '"weight=1000,length=3", got "".',
        ),
        (
            {"target_scale": "given", "target_mean": "1,2", "target_std": "3,4"},
            'With target-scale = "given", target-mean must be a finite number as in '
            '"-3.1", or one for each of several targets with its name as in '
            '"weight=1000,length=3", got "1,2".',
        ),
        (
            {"target_scale": "given", "target_mean": 1.5, "target_std": 0},
            "target-std must be above 0, got 0.",
        ),
        (
            {"target_scale": "given", "target_mean": "a=1,b=2", "target_std": 1},
            "target-mean has numbers of a, b, but target-std has a number without a name. "
            "Give one of each for every target.",
        ),
        (
            {"target_kind": "classes", "loss": "huber"},
            'loss = "huber" is for numbers, but the targets are classes.',
        ),
        (
            {"target_kind": "auto", "loss": "huber"},
            'loss = "huber" is for numbers, but the targets are classes. Set target-kind = '
            '"numbers" if the data owners hold them.',
        ),
        (
            {"target_kind": "classes", "weight_by": "entries"},
            'weight-by = "entries" is for labels and numbers, but the targets are '
            "classes.",
        ),
    ],
)
def test_settings_that_contradict_the_target_are_refused(
    settings: dict[str, Any], text: str, small: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate("fedavg", **{**small, **NUMBERS, **settings})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("mean", "std"),
    [(1.5, 2), ("logP=1.5", "logP=2"), ("logP=1,logs=2", "logP=1,logs=2")],
)
def test_a_given_scale_has_one_number_for_each_target(
    mean: Any, std: Any, tmp_path: Path
) -> None:
    given = {"target_scale": "given", "target_mean": mean, "target_std": std}
    with pytest.raises(RunError) as caught:
        run_owners(number_files(tmp_path), tmp_path / "run", **FILE, **given)
    assert str(caught.value) == (
        "target-mean and target-std must have one number for each target, with its name: "
        f"logP=…,logS=…. Got target-mean = {mean}."
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("-3.1", {"": -3.1}),
        ("a=1", {"a": 1.0}),
        (" b = 2, a=-1e3", {"b": 2.0, "a": -1000.0}),
        ('"a,b=3",p=q=2', {"a,b": 3.0, "p=q": 2.0}),
        *(
            (odd, None)
            for odd in ("", "1,2", "a=1,2", "a=1,a=2", "a=inf", "a=", "a=1\nb=2")
        ),
    ],
)
def test_numbers_of_targets_are_read_by_name(text: str, found: Any) -> None:
    if found is None:
        with pytest.raises(ValueError):  # noqa: PT011 - the rules name the setting
            read_given(text)
    else:
        assert read_given(text) == found


@pytest.mark.parametrize(
    ("floor", "demand"),
    [
        (
            {"share-target-statistics": False},
            'target-scale = shared, but its node config demands "given", "own" or "none"',
        ),
        (
            {"min-target-count": 9},
            "min-target-count = 5, but its node config demands at least 9",
        ),
    ],
)
def test_an_owner_limits_the_statistics_of_its_targets(
    floor: dict[str, Any], demand: str, tmp_path: Path
) -> None:
    nodes = number_files(tmp_path)
    nodes[1] |= floor
    run = run_owners(nodes, tmp_path / "run", **FILE)
    (refusal,) = run.summary["refused"]
    assert demand in refusal["reason"]
    own = run_owners(nodes, tmp_path / "own", **FILE, target_scale="own")
    assert "refused" not in own.summary
    # losses of crafted models tell mean and spread
    sent = {row["partition_id"] for row in own.clients if row.get("loss") is not None}
    hides = "share-target-statistics" in floor
    assert sent == ({0, 2} if hides else {0, 1, 2})


def test_a_client_answers_once_and_only_where_statistics_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = number_files(tmp_path)
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **FILE)
    (query,) = sent["query.targets"]
    victim = Node(nodes[0], values)
    victim.ask(query)
    victim.refuses(query, "answered")
    victim.refuses(query, "its rounds are 0 to 0", server_round=1)
    values["target-scale"] = "own"
    Node(nodes[0], values).refuses(query, "does not combine statistics")


def test_training_needs_the_scale_of_all_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = number_files(tmp_path)
    sent, values = record(monkeypatch, nodes, tmp_path / "run", **FILE)
    message = sent["train"][0]
    right = message.content[SCALE]
    victim = Node(nodes[0], values)
    del message.content[SCALE]
    victim.refuses(message, "lacks the scale of the targets")
    short = AgreedScale((1.0,), (1.0,)).to_record()[SCALE]
    assert isinstance(short, ConfigRecord)
    message.content[SCALE] = short
    victim.refuses(message, '"mean" must be 2 finite numbers')
    message.content[SCALE] = right
    victim.ask(message)


def test_owners_that_join_later_get_the_scale_and_send_nothing(tmp_path: Path) -> None:
    nodes = number_files(tmp_path, factors=(1.0, 1.0, 4.0))
    late = {**nodes[2], "model-dir": str(tmp_path / "models")}

    def after(grid: Nodes, number: int) -> None:
        if number == 2:
            grid.start(**late)

    more = {"present": 2, "min_clients": 2, "join_timeout": 0.2, "rounds": 4}
    run = run_with(
        tmp_path / "run", after, nodes[:2], method="fedavg", **{**FILE, **more}
    )
    assert [row["replies"] for row in run.rounds[1:]] == [2, 2, 3, 3]
    assert sum(STATISTICS in row["bytes"]["up"] for row in run.rounds) == 1
    without = run_owners(nodes[:2], tmp_path / "two", **FILE)
    assert scale_of(run) == scale_of(without)


def test_a_resumed_run_keeps_its_scale_and_asks_for_nothing(
    small: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**small, **NUMBERS, "rounds": 4, "checkpoint_every": 1}
    folder = tmp_path / "stopped"

    def stop(row: Mapping[str, Any]) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(**settings, run_dir=str(folder), on_round=stop)
    resumed, whole = resume(folder), simulate(**settings)
    assert comparable(resumed) == comparable(whole)
    assert timeless(resumed.summary) == timeless(whole.summary)
    assert [row["phase"] for row in resumed.rounds].count("targets") == 1


def test_numbers_of_edges_are_standardised_and_learnt(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    edges = np.unique(draw.integers(0, 90, (500, 2)), axis=0)
    edges = edges[edges[:, 0] != edges[:, 1]]
    features = draw.normal(size=(len(edges), 3)).astype(np.float32)
    values = np.stack([3 * features[:, 0] + 5, 100 * features[:, 1]], axis=1)
    values[draw.random(values.shape) < 0.2] = np.nan
    np.savez(
        tmp_path / "g.npz",
        x=draw.normal(size=(90, 4)).astype(np.float32),
        edges=edges,
        edge_attr=features,
        edge_target=values,
        edge_target_names=np.array(["small", "large"]),
    )
    run = simulate(
        "fedavg", str(tmp_path / "g.npz"), setting="edge", partition="uniform",
        target_kind="numbers", clients=2, rounds=8, local_epochs=5, weight_decay=0.0,
        output_dir=str(tmp_path / "runs"),
    )  # fmt: skip
    assert scale_of(run)["std"] == pytest.approx([3, 100], rel=0.2)
    first, last = (run.rounds[k]["metrics"]["local"]["test"]["nrmse"] for k in (1, -1))
    assert last < 0.6 * first


def test_classes_exchange_no_statistics(small: dict[str, Any]) -> None:
    run = simulate("fedavg", **small)
    assert {row["phase"] for row in run.rounds} == {"train"}
    assert downloads(run) == {"config", "weights"}
    assert "target" not in run.summary


def test_weights_by_entries_count_known_numbers(tmp_path: Path) -> None:
    run = run_owners(
        number_files(tmp_path), tmp_path / "run", **FILE, weight_by="entries"
    )
    for line in run.clients:
        if line["round"] == 0:
            assert line["num_train"] < line["num_entries"] <= 2 * line["num_train"]
            rows = [
                row
                for row in run.clients
                if row["round"] == 1 and row["partition_id"] == line["partition_id"]
            ]
            assert rows[0]["num_examples"] == line["num_entries"]


def test_robust_aggregation_takes_medians(tmp_path: Path) -> None:
    files = number_files(tmp_path, factors=(1.0, 1.0, 5.0))
    plain = scale_of(run_owners(files, tmp_path / "plain", **FILE))
    robust = scale_of(
        run_owners(files, tmp_path / "robust", **FILE, aggregation="median")
    )
    assert max(robust["mean"]) < 4 < min(plain["mean"])


def test_an_owner_without_validation_items_takes_part(tmp_path: Path) -> None:
    nodes = number_files(tmp_path)
    path = Path(nodes[2]["graph"])
    arrays = dict(np.load(path))
    parts = np.arange(len(arrays["x"])) % 3
    arrays |= {"train_mask": parts < 2, "val_mask": parts > 2, "test_mask": parts == 2}
    np.savez(path, **arrays)
    run = run_owners(nodes, tmp_path / "run", **NUMBERS)
    assert [row["failures"] for row in run.rounds] == [[], [], []]
    scored = [row for row in run.clients if row.get("partition_id") == 2]
    assert [row["metrics"]["local"]["val"]["num_nodes"] for row in scored[-2:]] == [
        0,
        0,
    ]
    assert all(row["metrics"]["local"]["test"]["rmse"] > 0 for row in scored[-2:])


def test_an_owner_that_spells_a_target_otherwise_is_left_out(tmp_path: Path) -> None:
    nodes = number_files(tmp_path)
    other = number_files(tmp_path / "other", names=("LogS", "logP"))
    run = run_owners([*nodes[:2], other[2]], tmp_path / "run", min_clients=2, **FILE)
    assert run.summary["target"]["names"] == ["logP", "logS"]
    with pytest.raises(DataError, match='it spells a target "LogS", and a spells it'):
        simulate(
            "fedavg",
            owners=",".join(
                [*(node["graph"] for node in nodes[:2]), other[2]["graph"]]
            ),
            output_dir=str(tmp_path / "runs"),
            **NUMBERS,
        )
