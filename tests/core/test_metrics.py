from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics.functional import classification as reference

from flower_fgl.core.metrics import Scores, auprc, auroc, pool, score, score_areas
from flower_fgl.core.score_names import SCORE_NAMES
from flower_fgl.runs.summary import summarise

Case = tuple[Tensor, Tensor, Tensor, int]


@st.composite
def cases(draw: st.DrawFn, min_nodes: int = 1) -> Case:
    """Logits, labels (some unknown), a mask and the number of classes."""
    num_classes = draw(st.integers(2, 6))
    num_nodes = draw(st.integers(min_nodes, 30))
    labels = st.integers(-1, num_classes - 1)
    y = torch.tensor(draw(st.lists(labels, min_size=num_nodes, max_size=num_nodes)))
    flags = st.lists(st.booleans(), min_size=num_nodes, max_size=num_nodes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    # a narrow choice of predicted classes makes absent classes likely
    logits = torch.randn(num_nodes, num_classes, generator=generator)
    logits[:, draw(st.integers(1, num_classes)) :] -= 10
    return logits, y, torch.tensor(draw(flags)), num_classes


@settings(deadline=None)
@given(cases())
def test_the_three_scores_equal_those_of_torchmetrics(case: Case) -> None:
    logits, y, mask, num_classes = case
    ours = score(*case)
    chosen = mask & (y >= 0)
    assert ours.num_nodes == int(chosen.sum())
    if not ours.num_nodes:
        assert all(math.isnan(getattr(ours, name)) for name in SCORE_NAMES)
        return
    for name, function, average in (
        ("accuracy", reference.multiclass_accuracy, "micro"),
        ("macro_f1", reference.multiclass_f1_score, "macro"),
        ("macro_recall", reference.multiclass_recall, "macro"),
    ):
        theirs = function(logits[chosen], y[chosen], num_classes, average=average)
        assert getattr(ours, name) == pytest.approx(float(theirs), abs=1e-6), name


def test_auprc_of_two_classes_is_that_of_class_one() -> None:
    margin = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.2, 9.0])
    y = torch.tensor([0, 0, 1, 1, 0, -1])
    logits = torch.stack([-margin, margin], dim=1)
    mask = torch.ones(6, dtype=torch.bool)
    # class 1 ranks first and third: precision 1 and 2/3, each over half of the class
    assert auprc(logits, y, mask, 2) == pytest.approx((1 + 2 / 3) / 2)
    # class 0 ranks first, second and fourth by the reversed score
    area = (1 + 1 + 3 / 4) / 3
    assert auprc(logits.flip(1), 1 - y, mask & (y >= 0), 2) == pytest.approx(area)


@settings(deadline=None, max_examples=30)
@given(cases())
def test_auprc_equals_that_of_scikit_learn(case: Case) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    logits, y, mask, num_classes = case
    chosen = mask & (y >= 0)
    labels = y[chosen]
    probabilities = logits[chosen].double().softmax(1)
    classes = range(num_classes) if num_classes > 2 else [1]
    areas = [
        metrics.average_precision_score((labels == c).numpy(), probabilities[:, c])
        for c in classes
        if (labels == c).any() and (labels != c).any()
    ]
    found = auprc(*case)
    if areas:
        assert found == pytest.approx(sum(areas) / len(areas), abs=1e-6)
    else:
        assert math.isnan(found)


def test_areas_are_added_to_the_other_scores() -> None:
    logits = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 3
    mask = torch.ones(40, dtype=torch.bool)
    plain = score(logits, y, mask, 3)
    found = score_areas(plain, logits, y, mask, 3)
    areas = {"auroc": auroc(logits, y, mask, 3), "auprc": auprc(logits, y, mask, 3)}
    assert found.as_dict() == {**plain.as_dict(), **areas}
    assert found.selected("auroc") == areas["auroc"]
    assert found.selected("accuracy") == plain.accuracy


@settings(deadline=None)
@given(cases())
def test_counting_absent_classes_as_zero_divides_by_all_classes(case: Case) -> None:
    logits, y, mask, num_classes = case
    chosen = mask & (y >= 0)
    ignored, zero = score(*case), score(*case, absent_classes="zero")
    present = {*logits[chosen].argmax(-1).tolist(), *y[chosen].tolist()}
    assert ignored.num_nodes == zero.num_nodes
    if present:
        share = len(present) / num_classes
        assert zero.accuracy == ignored.accuracy
        assert zero.macro_f1 == pytest.approx(ignored.macro_f1 * share)
        assert zero.macro_recall == pytest.approx(ignored.macro_recall * share)


def test_a_hand_counted_example() -> None:
    # predictions 0 0 1 1, labels 0 1 1 1: recall 1/1 and 2/3, precision 1/2 and 2/2,
    # F1 2·(1·.5)/1.5 = 2/3 and 2·(2/3·1)/(5/3) = 4/5; class 2 is absent
    logits = torch.eye(3)[[0, 0, 1, 1, 2]]
    y = torch.tensor([0, 1, 1, 1, -1])
    scores = score(logits, y, torch.ones(5, dtype=torch.bool), 3)
    assert scores.num_nodes == 4
    assert scores.accuracy == 3 / 4
    assert scores.macro_recall == pytest.approx((1 + 2 / 3) / 2)
    assert scores.macro_f1 == pytest.approx((2 / 3 + 4 / 5) / 2)


def test_scores_are_computed_in_float64() -> None:
    predicted = torch.nn.functional.one_hot(torch.tensor([0, 0, 1]), 2).float()
    made = score(predicted, torch.tensor([0, 1, 1]), torch.ones(3, dtype=torch.bool), 2)
    assert made.macro_f1 == pytest.approx(2 / 3, abs=1e-15)


def test_unknown_labels_and_unmasked_nodes_change_nothing() -> None:
    logits = torch.eye(2)[[0, 1, 0, 1]]
    y = torch.tensor([0, 1, -1, 0])
    mask = torch.tensor([True, True, True, False])
    assert score(logits, y, mask, 2) == Scores(2, 1.0, 1.0, 1.0)


def test_auroc_of_two_classes_is_the_share_of_ordered_pairs() -> None:
    margin = torch.tensor([0.1, 0.4, 0.35, 0.8, 9.0])
    y = torch.tensor([0, 0, 1, 1, -1])
    logits = torch.stack([-margin, margin], dim=1)
    mask = torch.ones(5, dtype=torch.bool)
    # of the 4 pairs only (0.35, 0.4) is out of order
    assert auroc(logits, y, mask, 2) == pytest.approx(3 / 4)


@pytest.mark.parametrize("sizes", [(10, 11), (11, 11), (27, 54)])
def test_auroc_is_at_most_one(sizes: tuple[int, int]) -> None:
    # a float32 sum may exceed 1, which a server would reject
    y = torch.tensor([0] * sizes[0] + [1] * sizes[1])
    draw = torch.Generator().manual_seed(0)
    logits = torch.rand(len(y), 2, generator=draw) + 9 * torch.eye(2)[y]
    mask = torch.ones(len(y), dtype=torch.bool)
    assert auroc(logits, y, mask, 2) <= 1.0
    assert auroc(logits, y, mask, 2) == pytest.approx(1.0)


@settings(deadline=None)
@given(cases(min_nodes=2))
def test_auroc_averages_one_against_rest_over_the_classes_that_have_both(
    case: Case,
) -> None:
    logits, y, mask, num_classes = case
    chosen = mask & (y >= 0)
    chances = logits[chosen].double().softmax(-1)
    areas = []
    for label in range(num_classes):
        inside, outside = (
            chances[member, label]
            for member in (y[chosen] == label, y[chosen] != label)
        )
        if inside.numel() and outside.numel():
            order = (inside[:, None] - outside[None, :]).sign()
            areas.append(float(((order + 1) / 2).mean()))
    value = auroc(*case)
    if areas:
        assert value == pytest.approx(sum(areas) / len(areas), abs=1e-6)
    else:
        assert math.isnan(value)


def test_auroc_orders_probabilities_that_float32_rounds_to_one() -> None:
    logits = torch.tensor([[0.0, 20.0], [0.0, 21.0]])
    y, mask = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)
    assert auroc(logits, y, mask, 2) == 1


def test_auroc_takes_logits_between_zero_and_one_for_logits() -> None:
    # as probabilities, column 1 would order the nodes the other way round
    logits = torch.tensor([[0.0, 0.2], [0.9, 0.5]])
    mask = torch.ones(2, dtype=torch.bool)
    assert auroc(logits, torch.tensor([1, 0]), mask, 2) == 1.0


def test_pooling_weighs_by_nodes_and_the_plain_mean_does_not() -> None:
    nan = math.nan
    clients = [Scores(30, 0.9, 0.6, 0.3), Scores(10, 0.5, 0.2, 0.1)]
    clients.append(Scores(0, nan, nan, nan))
    pooled = pool(clients)
    assert pooled == pytest.approx(
        {
            "num_nodes": 40,
            "accuracy": 0.8,
            "macro_f1": 0.5,
            "macro_recall": 0.25,
            "mean_accuracy": 0.7,
            "mean_macro_f1": 0.4,
            "mean_macro_recall": 0.2,
        }
    )


def test_a_client_with_one_node_counts() -> None:
    pooled = pool([Scores(1, 1.0, 1.0, 1.0), Scores(3, 0.0, 0.0, 0.0)])
    assert (pooled["num_nodes"], pooled["accuracy"]) == (4, 0.25)


def test_areas_are_pooled_over_the_clients_that_have_one() -> None:
    area = [Scores(2, 0.5, 0.5, 0.5, auroc=a) for a in (0.25, math.nan)]
    pooled = pool([*area, Scores(6, 1.0, 1.0, 1.0, auroc=0.75)])
    assert pooled["auroc"] == (2 * 0.25 + 6 * 0.75) / 8
    assert pooled["mean_auroc"] == 0.5
    assert pooled["num_nodes"] == 10


def test_scores_without_an_area_do_not_speak_of_one() -> None:
    plain = Scores(2, 0.5, 0.5, 0.5)
    assert set(plain.as_dict()) == {"num_nodes", *SCORE_NAMES}
    assert not [key for key in pool([plain]) if "auroc" in key]
    assert Scores(2, 0.5, 0.5, 0.5, auroc=0.0).as_dict()["auroc"] == 0.0


def test_pooling_nobody_gives_no_number() -> None:
    pooled = pool([Scores(0, math.nan, math.nan, math.nan)])
    assert pooled.pop("num_nodes") == 0
    assert len(pooled) == 6
    assert all(math.isnan(value) for value in pooled.values())


@settings(deadline=None)
@given(st.permutations(range(12)))
def test_pooling_does_not_depend_on_the_order_of_clients(order: list[int]) -> None:
    clients = [Scores(n + 1, 1 / (n + 3), 0.1 * n / 7, 0.3) for n in range(12)]
    assert pool([clients[n] for n in order]) == pool(clients)


def row(server_round: int, val: float | None, test: float = 0.5, **more: Any) -> Any:
    columns = {"val": {"accuracy": val}, "test": {"accuracy": test}}
    return {
        "round": server_round,
        "phase": "train",
        "status": "ok",
        "metrics": {"local": columns},
        "seconds": {"send": 0.25, "clients": 1.0, "total": 1.25 + server_round},
        "bytes": {"up": {"weights": 100, "metrics": 7}, "down": {"weights": 90}},
        **more,
    }


def summary_of(rows: list[Any], **more: Any) -> dict[str, Any]:
    header: dict[str, Any] = {
        "method": "fedavg",
        "dataset": "cora",
        "clients": 2,
        "seed": 0,
        "engine": "local",
        "partition_sha256": "ab" * 32,
        "evaluate": "local",
        "status": "completed",
    }
    return summarise(rows, **{**header, **more})


def test_the_best_round_is_chosen_on_validation_and_never_on_test() -> None:
    rows = [row(1, 0.6, 0.1), row(2, 0.7, 0.2), row(3, 0.5, 0.99)]
    summary = summary_of(rows)
    assert summary["best"] == {"round": 2, **rows[1]["metrics"]["local"]}
    assert summary["last"]["round"] == 3
    assert summary["selection"] == "validation"


def test_of_equal_validation_scores_the_later_round_wins() -> None:
    rows = [row(3, 0.4), row(1, 0.7), row(2, 0.7)]
    assert summary_of(rows)["best"]["round"] == 2


def test_failed_unevaluated_and_finetune_rounds_are_never_best_or_last() -> None:
    rows = [
        row(1, 0.5),
        row(2, 0.9, status="failed"),
        row(3, 0.9, metrics=None),
        row(4, 0.95, 0.8, phase="finetune"),
    ]
    summary = summary_of(rows)
    assert summary["best"]["round"] == summary["last"]["round"] == 1
    assert summary["finetuned"]["test"] == {"accuracy": 0.8}
    assert summary["rounds"] == 3


@pytest.mark.parametrize("missing", [None, math.nan])
def test_without_validation_nodes_the_last_round_is_taken_and_said(
    missing: float | None,
) -> None:
    summary = summary_of([row(1, missing, 0.9), row(2, missing, 0.1)])
    assert summary["best"] == summary["last"]
    assert summary["best"]["round"] == 2
    assert summary["selection"] == "last"


def test_a_run_without_evaluation_has_neither_best_nor_last() -> None:
    summary = summary_of([], status="failed", error="All 2 clients failed.")
    assert summary["best"] is None
    assert summary["last"] is None
    assert summary["seconds"]["round_median"] is None
    assert summary["error"] == "All 2 clients failed."


def test_both_kinds_of_evaluation_have_a_best_round_each() -> None:
    def both(server_round: int, local: float, aggregated: float) -> Any:
        metrics = {
            "local": {"val": {"accuracy": local}},
            "global": {"val": {"accuracy": aggregated}},
        }
        return row(server_round, None, metrics=metrics)

    summary = summary_of([both(1, 0.9, 0.1), both(2, 0.8, 0.2), both(3, 0.7, 0.15)])
    assert summary["best"]["round"] == 1
    assert summary["global"]["best"] == {"round": 2, "val": {"accuracy": 0.2}}
    assert summary["global"]["last"]["round"] == 3


def test_a_run_with_aggregated_scores_only_has_them_on_top() -> None:
    rows = [row(1, None, metrics={"global": {"val": {"accuracy": 0.4}}})]
    summary = summary_of(rows, evaluate="global")
    assert summary["best"] == {"round": 1, "val": {"accuracy": 0.4}}
    assert "global" not in summary


def test_bytes_seconds_and_failures_are_added_up() -> None:
    lost = [{"partition_id": 1, "reason": "timeout"}]
    rows = [
        row(1, 0.5, failures=lost),
        row(2, 0.5, status="failed", failures=[*lost, {**lost[0], "reason": "NaN"}]),
        row(3, 0.5, failures=[]),
    ]
    summary = summary_of(rows)
    assert summary["bytes"] == {
        "up": 321,
        "down": 270,
        "by_payload": {"up": {"weights": 300, "metrics": 21}, "down": {"weights": 270}},
    }
    assert summary["seconds"] == {
        "total": 3 * 1.25 + 6,
        "round_median": 3.25,
        "by_phase": {"send": 0.75, "clients": 3.0},
    }
    assert summary["failures"] == {"timeout": 2, "NaN": 1}


@pytest.mark.thorough
def test_neither_the_module_nor_node_scores_load_torchmetrics() -> None:
    code = (
        "import sys\n"
        "from flower_fgl.core.metrics import score\n"
        "assert 'torchmetrics' not in sys.modules\n"
        "import torch\n"
        "y = torch.tensor([0, 1])\n"
        "assert score(torch.eye(2), y, y >= 0, 2).accuracy == 1\n"
        "assert 'torchmetrics' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
