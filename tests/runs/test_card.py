"""The card of a model says what the run shows, and nothing that an owner withholds."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from statsmodels.stats.proportion import proportion_confint

from flower_fgl import Run, simulate
from flower_fgl.methods import parse_config
from flower_fgl.runs.card import CARD, _scores, run_card, wilson, write_card
from flower_fgl.runs.writer import write_lines
from tests.simulation.test_calibration import model_of, owned
from tests.support.number_targets import number_files
from tests.support.owners import owner_graphs, run_owners
from tests.support.short_runs import SMALL


def card_of(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.path / "card.json").read_text())
    return found


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (7, 9), (81, 100), (3, 3)])
def test_intervals_are_those_of_wilson(hits: int, n: int) -> None:
    expected = proportion_confint(hits, n, method="wilson")
    assert wilson(hits / n, n) == pytest.approx(expected, abs=1e-7)


def test_the_card_holds_the_scores_of_owners_and_what_they_tell(tmp_path: Path) -> None:
    nodes = owned(tmp_path, owner_graphs())
    nodes[0]["about"] = "visits of 2023 | <b>"
    nodes[1]["scores"] = "none"
    run = run_owners(
        nodes, tmp_path / "run", calibration="shared", coverage=0.7,
        min_class_count=2, share_class_counts=False,
    )  # fmt: skip
    card = card_of(run)
    assert [row["about"] for row in card["Owners"]] == [nodes[0]["about"], "", ""]
    assert {row["training items by class"] for row in card["Owners"]} == {"not shared"}
    assert run.best is not None
    best = run.best["round"]
    scores = {
        row["partition_id"]: row["metrics"]["local"]["test"]
        for row in run.clients
        if row["round"] == best and row.get("metrics")
    }
    own = {r["owner"]: r for r in card["Scores of owners"] if r["model"] == "own model"}
    assert own["owner0"]["accuracy"] == round(scores[0]["accuracy"], 4)
    low, high = own["owner0"]["accuracy 95 %"]
    assert low < own["owner0"]["accuracy"] < high
    assert "accuracy" not in own.get("owner1", {})
    assert {row["model"] for row in card["Scores of owners"]} == {
        "own model",
        "calibrated",
    }
    assert (
        "1 owners have no test score: it is not known how they fare." in card["Limits"]
    )
    assert card["Calibration"]["calibrated"] == "yes"
    assert card["Privacy"]["min-class-count"] == 2
    assert card["Versions"]["flwr"] == run.environment["versions"]["flwr"]
    text = (run.path / "card.md").read_text()
    assert "visits of 2023 \\| \\<b\\>" in text
    assert "<b>" not in text.replace("\\<b\\>", "")


def test_the_card_states_epsilon_and_what_it_assumes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "upload_clip": 1.0, "upload_noise": 2.0}
    run = simulate(
        "fedavg",
        clients=3,
        run_dir=str(tmp_path / "run"),
        evaluate="global",
        **settings,
    )
    assert "own models" not in " ".join(card_of(run)["Limits"])
    privacy = card_of(run)["Privacy"]
    assert (
        privacy["ε of any client"] == f"{run.summary['upload_privacy']['epsilon']:.4g}"
    )
    assert privacy["uploads counted"] == run.summary["upload_privacy"]["uploads"]
    assert "not scores" in privacy["assumptions on ε"]
    assert not any("no ε" in text for text in card_of(run)["Limits"])


def test_the_card_has_scores_of_both_models_and_the_worst_owner_of_one(
    tmp_path: Path,
) -> None:
    run = simulate(
        "fedavg", clients=3, run_dir=str(tmp_path / "run"), evaluate="both",
        calibration="shared", **SMALL,
    )  # fmt: skip
    card = card_of(run)
    of: dict[str, list[float]] = {"own model": [], "global model": [], "calibrated": []}
    for row in card["Scores of owners"]:
        of[row["model"]].append(row["accuracy"])
    assert [len(values) for values in of.values()] == [3, 3, 3]
    best = run.summary["global"]["best"]
    for row in run.clients:
        if row["round"] == best["round"] and row.get("metrics"):
            found = row["metrics"]["global"]["test"]["accuracy"]
            assert round(found, 4) in of["global model"]
    assert not any("own models, not of" in text for text in card["Limits"])
    (worst,) = [text for text in card["Limits"] if "worst owner is" in text]
    assert f"accuracy {min(of['own model']):.4g}," in worst


def test_an_owners_own_card_is_private_and_names_its_floors(tmp_path: Path) -> None:
    nodes = owned(tmp_path, owner_graphs())
    nodes[0]["min-class-count"] = 2
    run = run_owners(nodes, tmp_path / "run", min_class_count=2, calibration="owner")
    of_run = card_of(run)
    assert of_run["Calibration"]["calibrated"] == "the owners' own models only"
    limits = " ".join(of_run["Limits"])
    assert "not of the aggregated model that this card describes" in limits
    assert "not calibrated: only the owners' own models are" in limits
    assert "no sets or intervals" not in limits
    folder = model_of(run, "owner0")
    card = json.loads((folder / "card.json").read_text())
    assert card["Privacy"]["floors of the node"] == {"min-class-count": 2}
    assert card["Model"]["owner"] == "owner0"
    assert card["Data"]["train"] == run.clients[0]["num_train"]
    assert [row["model"] for row in card["Scores"]] == ["own, val", "own, test"]
    assert card["Calibration"]["calibrated"] == "yes"
    assert "aggregated" not in " ".join(card["Limits"])
    for name in CARD:
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600


def test_a_run_of_numbers_and_one_without_a_model_have_a_card(tmp_path: Path) -> None:
    nodes = number_files(tmp_path / "files")
    run = run_owners(nodes, tmp_path / "a", target_kind="numbers")
    rows = card_of(run)["Scores of owners"]
    assert all("rmse" in row and "accuracy" not in row for row in rows)
    assert "mae 95 %" not in rows[0]  # numbers of one item are not independent
    one = number_files(tmp_path / "one", names=("logS",))
    run = run_owners(
        one, tmp_path / "c", target_kind="numbers", calibration="owner", coverage=0.8
    )
    card = card_of(run)
    assert "training items by class" not in card["Owners"][0]
    assert card["Model"]["predicts"] == "1 number"
    row = card["Scores of owners"][0]
    assert run.best is not None
    client = next(
        line
        for line in run.clients
        if line["round"] == run.best["round"] and line["partition_id"] == 0
    )
    test = client["metrics"]["local"]["test"]
    (n,) = test["targets"]["num_values"]
    half = 1.96 * math.sqrt((test["rmse"] ** 2 - test["mae"] ** 2) / n)
    expected = [test["mae"] - half, test["mae"] + half]
    assert row["mae 95 %"] == pytest.approx(expected, abs=1e-3)
    assert row["coverage 95 %"] == pytest.approx(wilson(test["coverage"], n), abs=1e-4)
    run = simulate("local", clients=3, run_dir=str(tmp_path / "b"), **SMALL)
    card = card_of(run)
    assert card["Model"]["model"] == "none saved: each owner keeps its own"
    assert any("worst owner is" in text for text in card["Limits"])


def test_labels_of_one_item_are_not_counted_as_items() -> None:
    """48 items of 8 labels are neither 48 nor 384 independent ones."""
    scores = {"accuracy": 0.54, "micro_f1": 0.3, "num_nodes": 48}
    assert _scores("", scores) == {"items": 48, "accuracy": 0.54}
    assert "accuracy 95 %" in _scores("", {"accuracy": 0.54, "num_nodes": 48})


def test_values_that_are_not_finite_become_null(tmp_path: Path) -> None:
    write_card(tmp_path, {"Calibration": {"thresholds": [1.0, float("inf")]}})
    found = json.loads((tmp_path / "card.json").read_text())
    assert found["Calibration"]["thresholds"] == [1.0, None]


def test_the_card_names_owners_of_one_name_and_those_that_join_later(
    tmp_path: Path,
) -> None:
    about: dict[str, Any] = {"num_nodes": 200, "num_edges": 9, "num_train": 9}
    about |= {"num_val": 9, "num_test": 100, "class_counts": [5, 4], "name": "graph"}
    scores = {0: 0.9, 1: 0.2, 2: 0.7}
    rows: list[dict[str, Any]] = [
        {"round": joined, "partition_id": pid, **about}
        for pid, joined in {0: 0, 1: 0, 2: 3}.items()
    ]
    rows[2]["name"] = "late"

    def scored(mode: str, value: float) -> dict[str, Any]:
        test = {"num_nodes": 100, "accuracy": value}
        return {"metrics": {mode: {"test": test}}}

    for number, mode in ((6, "local"), (7, "local"), (7, "global")):
        rows += [
            {"round": number, "partition_id": pid}
            | scored(mode, value if mode == "local" else 0.5)
            for pid, value in scores.items()
        ]
    (tmp_path / "clients.jsonl").write_bytes(write_lines(rows))
    summary = {"best": {"round": 6}, "finetuned": {"round": 7}}
    summary["calibrated"] = {"round": 7}
    config = parse_config({"evaluate": "global", "calibration": "shared"})
    card = run_card(config, summary, None, tmp_path)
    names = ["graph (0)", "graph (1)", "late"]
    assert [row["owner"] for row in card["Owners"]] == names
    found = [(r["owner"], r["model"], r["accuracy"]) for r in card["Scores of owners"]]
    assert found == [
        *zip(names, ["own model"] * 3, scores.values(), strict=True),
        *zip(names, ["calibrated"] * 3, [0.5] * 3, strict=True),
    ]
    worst = "The worst owner is graph (1): accuracy 0.2, the mean over owners is 0.6."
    assert worst in card["Limits"]
    assert not any("no test score" in text for text in card["Limits"])
