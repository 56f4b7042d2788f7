"""Tables of cells: marks, tests, notes, formats, and cells that make no table."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.lab.tables.cells import Cell
from flower_fgl.lab.tables.compare import unequal_settings
from flower_fgl.lab.tables.results_table import ResultsTable
from flower_fgl.lab.tables.statistics import adjust_holm, paired_test
from flower_fgl.lab.tables.table_formats import format_table
from tests.support.written_cells import make_draw, make_row

LOCAL = [0.70, 0.72, 0.69, 0.70, 0.71, 0.70]
GOOD = [0.80, 0.81, 0.79, 0.80, 0.80, 0.81]
NEAR = [0.801, 0.809, 0.791, 0.80, 0.80, 0.809]
WIDE = [0.90, 0.62, 0.85, 0.64, 0.92, 0.60]


def rows(**scores: list[float]) -> list[Cell]:
    return [
        make_row(name, values, order=order)
        for order, (name, values) in enumerate(scores.items())
    ]


def lines_of(text: str) -> dict[str, list[str]]:
    """Return the cells of a Markdown table by the name of the row."""
    found = [
        line.strip("|").split("|") for line in text.splitlines() if line[:1] == "|"
    ]
    return {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in found}


def test_the_best_row_and_those_tied_with_it_are_marked() -> None:
    table = ResultsTable(rows(local=LOCAL, good=GOOD, near=NEAR, wide=WIDE))
    cells = lines_of(format_table(table, layout="overview"))
    assert cells["good"] == ["**80.17 ± 0.75 ↑**"]
    assert cells["near"] == ["80.17 ± 0.67 ≈ ↑"]
    assert cells["wide"] == ["75.50 ± 15.02"]  # neither tied nor different
    assert cells["local"] == ["70.33 ± 1.03"]


def test_tests_are_those_of_compare_adjusted_within_the_table() -> None:
    table = ResultsTable(rows(local=LOCAL, good=GOOD, near=NEAR, wide=WIDE))
    block = table.blocks[0]
    lines = {line.name: line for line in block.lines}
    # against local: good, near, wide; against the best, good: near, wide
    pairs = [("good", "local"), ("near", "local"), ("wide", "local")]
    pairs += [("near", "good"), ("wide", "good")]
    scores = {"local": LOCAL, "good": GOOD, "near": NEAR, "wide": WIDE}
    tests = [paired_test(scores[a], scores[b]) for a, b in pairs]
    differ = adjust_holm([test.p for test in tests])
    equal = adjust_holm([test.p_equivalent for test in tests])
    assert table.num_tests == 5
    for (one, other), test, p, p_equal in zip(pairs, tests, differ, equal, strict=True):
        found = table.versus(lines[one], lines[other])
        assert found is not None
        assert found.difference == pytest.approx(test.difference)
        assert (found.p, found.p_equivalent) == pytest.approx((p, p_equal))
    back = table.versus(lines["local"], lines["good"])
    assert back is not None
    assert back.difference == pytest.approx(-tests[0].difference)
    assert back.interval[0] == pytest.approx(-tests[0].interval[1])


def test_every_verdict_stands_beside_its_numbers() -> None:
    table = ResultsTable(rows(local=LOCAL, good=GOOD, near=NEAR, wide=WIDE))
    cells = lines_of(format_table(table))
    assert cells[""][-2:] == ["against local", "against the best"]
    assert re.fullmatch(r"\+9\.83, better \(p = .*\)", cells["good"][-2])
    assert cells["good"][-1] == cells["local"][-2] == ""
    assert re.fullmatch(r"−9\.83, worse \(p = .*\)", cells["local"][-1])
    assert re.fullmatch(r"[+−]0\.00, tied \(p = .*\)", cells["near"][-1])
    undecided = r"−4\.67, undecided \(p = .*; \d+\.\d would be found\)"
    assert re.fullmatch(undecided, cells["wide"][-1])


def test_fewer_than_five_draws_are_not_testable() -> None:
    table = ResultsTable(rows(local=LOCAL[:4], good=GOOD[:4]))
    text = format_table(table)
    assert "+9.75, not testable: 4 pairs, 5 are needed" in text
    assert table.num_tests == 0
    overview = format_table(table, layout="overview")
    assert "≈" not in lines_of(overview)["local"][0]
    assert "Not testable: 4 pairs, 5 are needed (all comparisons)." in overview


def test_what_is_not_testable_is_named_or_counted() -> None:
    same = {f"r{k}": LOCAL for k in range(4)}
    text = format_table(ResultsTable(rows(local=LOCAL, good=GOOD, **same)))
    listed = "r0 on cora; r1 on cora; r2 on cora and 1 more"
    assert f"Not testable: all differences are equal ({listed})." in text
    few = {name: scores[:3] for name, scores in same.items()}
    text = format_table(ResultsTable(rows(local=LOCAL[:3], good=GOOD[:3], **few)))
    assert "Not testable: 3 pairs, 5 are needed (all comparisons)." in text


@pytest.mark.parametrize("gain", [0.1, round(1 / 1126, 6)])
def test_rows_without_spread_are_not_testable(gain: float) -> None:
    # a cell rounds to six digits, so that equal gains differ in the last one
    scores = [round(k / 1126, 6) for k in (800, 811, 790, 805, 809, 799)]
    better = [round(k / 1126, 6) for k in (801, 812, 791, 806, 810, 800)]
    if gain == 0.1:
        scores, better = [0.5] * 6, [0.6] * 6
    table = ResultsTable(rows(local=scores, good=better))
    assert "not testable: all differences are equal" in format_table(table)


def test_a_row_that_lacks_a_score_in_some_draws_says_so() -> None:
    cells = rows(local=LOCAL, good=GOOD)
    bare = replace(cells[1].draws[2], scores={"own": {"test": {"macro_f1": 0.5}}})
    draws = [*cells[1].draws[:2], bare, *cells[1].draws[3:]]
    text = format_table(ResultsTable([cells[0], replace(cells[1], draws=draws)]))
    assert "good on cora has no accuracy in 1 of 6 draws: it has no mean." in text
    assert lines_of(text)["good"][0] == "–"


def test_two_rows_with_one_label_are_refused() -> None:
    with pytest.raises(
        ConfigError, match='Rows "local" and "good" have the same label'
    ):
        ResultsTable(rows(local=LOCAL, good=GOOD), labels={"good": "x", "local": "x"})


def test_a_row_is_best_by_its_global_model_too() -> None:
    low = [v - 0.3 for v in GOOD]
    row = make_row("fedavg", low, has_global=True, order=1)
    draws = [
        replace(draw, scores={**draw.scores, "global": {"test": {"accuracy": high}}})
        for draw, high in zip(row.draws, GOOD, strict=True)
    ]
    cells = [make_row("local", LOCAL), replace(row, draws=draws)]
    found = lines_of(format_table(ResultsTable(cells), layout="summary"))
    assert (found["fedavg"][1], found["local"][1]) == ("1 of 1", "0 of 1")


def test_own_and_global_model_are_lines_of_one_table() -> None:
    cells = [make_row("fedavg", GOOD, has_global=True), make_row("local", LOCAL)]
    found = lines_of(format_table(ResultsTable(cells)))
    assert found["fedavg"][0] == "**80.17 ± 0.75 ↑**"
    assert found["fedavg, global model"][0] == "70.17 ± 0.75"
    titles = found[""]
    assert titles[:3] == ["test accuracy", "macro-F1", "worst client"]
    assert found["local"][2] == "25.00 ± 0.00"
    assert found["fedavg, global model"][2] == "–"
    assert found["local"][3:6] == ["1 kB", "3 kB", "1.5 s"]


def test_an_overview_says_what_no_arrow_means() -> None:
    table = ResultsTable(rows(local=LOCAL, wide=WIDE))
    meaning = " No arrow: tied with local, or undecided. "
    assert meaning in format_table(table, layout="overview")
    assert meaning not in format_table(
        table, layout="full"
    )  # its last columns say more


def test_published_values_stand_beside_the_row_they_belong_to() -> None:
    cells = rows(local=LOCAL, good=GOOD)
    cells[1] = replace(cells[1], published={"accuracy": 86.5, "macro_f1": 61.25})
    found = lines_of(format_table(ResultsTable(cells)))
    assert found[""][:4] == ["test accuracy", "published", "macro-F1", "published"]
    assert [found["good"][k] for k in (1, 3)] == ["86.5", "61.25"]
    assert [found["local"][k] for k in (1, 3)] == ["", ""]
    macro = ResultsTable(cells, metric="macro_f1")
    found = lines_of(format_table(macro, layout="overview"))
    assert found["good"] == ["**40.08 ± 0.38 ↑**", "61.25"]


def test_auroc_and_auprc_are_shown_where_runs_have_them() -> None:
    cell = make_row("local", LOCAL)
    scores = {"test": {"accuracy": 0.9, "auroc": 0.8, "auprc": 0.3}}
    draws = [make_draw(k, 0.9, scores={"own": scores}) for k in range(2)]
    found = lines_of(format_table(ResultsTable([replace(cell, draws=draws)])))
    assert found[""][:3] == ["test accuracy", "AUROC", "AUPRC"]
    assert found["local"][1:3] == ["80.00 ± 0.00", "30.00 ± 0.00"]
    assert "AUROC" not in format_table(ResultsTable([cell]))


def test_small_node_sets_are_pooled_over_the_draws() -> None:
    # 4 of 10 nodes and 40 of 50; the third draw has no such node
    sets = [{"accuracy": 0.4, "num_nodes": 10}, {"accuracy": 0.8, "num_nodes": 50}]
    sets.append({"num_nodes": 0})
    draws = [
        make_draw(k, 0.9, scores={"own": {"test": {"accuracy": 0.9}, "missing": found}})
        for k, found in enumerate(sets)
    ]
    cell = replace(make_row("local", LOCAL), draws=draws)
    assert cell.pooled("own", "missing") == (44 / 60, 60)
    assert cell.pooled("own", "unseen") is None
    text = format_table(ResultsTable([cell]))
    found = lines_of(text)
    assert found[""][1] == "missing, pooled"
    # Wilson by hand: centre (p + z²/2n) / (1 + z²/n), p = 44/60
    assert found["local"][1] == "73.3 of 60 (61.0–82.9)"
    assert "accuracy over the nodes of all draws together" in text
    assert "pooled" not in format_table(ResultsTable([make_row("local", LOCAL)]))


def test_the_global_model_scores_the_new_client_once() -> None:
    """All clients score the same 20 nodes with it, and 20 each with their own models."""
    new = {"accuracy": 0.4, "num_nodes": 60}
    found = {"test": {"accuracy": 0.9}, "new_client": new}
    models = {"own": found, "global": found}
    draws = [make_draw(k, 0.9, scores=models) for k in range(2)]
    cell = make_row("fedavg", LOCAL)
    cell = replace(cell, draws=draws, place={**cell.place, "clients": 3})
    assert cell.pooled("own", "new_client") == (0.4, 120)
    assert cell.pooled("global", "new_client") == (0.4, 40)
    text = format_table(ResultsTable([cell]))
    # Wilson by hand: (0.4 + 1.92073/40) / (1 + 3.84146/40) ± …
    assert lines_of(text)["fedavg, global model"][2] == "40.0 of 40 (26.3–55.4)"
    assert "once for each client's own model" in text


@pytest.mark.parametrize(
    ("key", "value", "title"),
    [
        ("split-by", "id", "split-by"),
        ("synthetic.feature-noise", 5.0, "synthetic.feature-noise"),
    ],
)
def test_rows_on_other_test_nodes_are_not_compared(
    key: str, value: str | float, title: str
) -> None:
    before = "auto" if key == "split-by" else 1.0
    cells = [
        make_row("local", LOCAL),  # from before split-by was kept
        make_row("good", GOOD, settings={key: before}, experiment="y"),
        make_row("near", NEAR, settings={key: value}, experiment="z"),
    ]
    if key != "split-by":
        cells[0] = make_row("local", LOCAL, settings={key: before})
    blocks = ResultsTable(cells).blocks
    assert [[line.name for line in b.lines] for b in blocks] == [
        ["local", "good"],
        ["near"],
    ]
    assert [b.name for b in blocks] == [f"cora, {title} {v}" for v in (before, value)]


def test_an_overview_has_a_column_per_dataset_and_a_dash_for_what_is_missing() -> None:
    cells = [
        *rows(local=LOCAL, good=GOOD),
        make_row("local", LOCAL, dataset="citeseer"),
        make_row("local", LOCAL, dataset="citeseer", experiment="y"),
    ]
    cells[3] = replace(cells[3], place={**cells[3].place, "clients": 20})
    labels = {"local": "Local", "cora": "Cora"}
    table = ResultsTable(cells, labels=labels)
    found = lines_of(format_table(table, layout="overview"))
    assert found[""] == [
        "Cora, 10 clients", "citeseer, 10 clients", "citeseer, 20 clients",
    ]  # fmt: skip
    assert found["good"][1:] == ["–", "–"]
    assert found["Local"][1] == "70.33 ± 1.03"  # alone: no best one, no test


def test_bytes_and_seconds_have_an_overview_without_marks() -> None:
    cells = [make_row("fedavg", GOOD, has_global=True), make_row("local", LOCAL)]
    table = ResultsTable(cells, metric="bytes")
    text = format_table(table, layout="overview")
    assert lines_of(text)["fedavg"] == ["4 kB"]
    assert "global model" not in text
    assert "Bold" not in text
    table = ResultsTable(cells, metric="seconds")
    assert lines_of(format_table(table, layout="overview"))["local"] == ["1.5 s"]


def test_a_summary_counts_verdicts_and_sorts_by_rank() -> None:
    cells = [
        make_row(name, values, dataset=dataset, order=order)
        for dataset in ("cora", "citeseer")
        for order, (name, values) in enumerate(
            {"local": LOCAL, "wide": WIDE, "near": NEAR, "good": GOOD}.items()
        )
    ]
    cells[-1] = make_row("good", [v + 0.05 for v in GOOD], dataset="citeseer", order=3)
    text = format_table(ResultsTable(cells), layout="summary", notes="marks")
    assert (
        "- Best: highest mean. Tied: a difference of 1 point can be excluded. Above, "
        "below: significantly above or below local. Paired t-tests" in text
    )
    assert not set("≈↑↓*") & set(text)
    text = format_table(ResultsTable(cells), layout="summary", notes="none")
    found = lines_of(text)
    assert found[""] == [
        "average rank", "best or tied", "above local", "tied with local", "undecided",
        "below local", "upload", "download", "time",
    ]  # fmt: skip
    # means: good 80.17 and 85.17, near 80.17 (a shade more) and 80.17, wide, local
    assert list(found)[2:] == ["good", "near", "wide", "local"]
    assert found["good"][1:6] == ["2 of 2", "2", "0", "0", "0"]
    assert found["near"][1:6] == ["1 of 2", "2", "0", "0", "0"]
    assert found["wide"][1:6] == ["0 of 2", "0", "0", "2", "0"]
    assert found["local"][0:6] == ["4.00", "0 of 2", "", "", "", ""]
    assert found["local"][6:] == ["1 kB", "3 kB", "1.5 s"]


def test_ranks_need_five_datasets_and_leave_out_untuned_rows() -> None:
    tuning = {"budget": 12, "draws": [6], "metric": "validation accuracy"}
    tuning |= {"experiment": "x", "study": "abc", "trials": 12, "settings": ["lr"]}
    names = ("a", "b", "c", "d", "e")
    cells = [
        make_row(row, [v - gap for v in GOOD], dataset=name, tuning=own)
        for name in names
        for row, gap, own in (
            ("good", 0.0, tuning), ("poor", 0.2, tuning), ("fair", 0.1, tuning),
            ("good, default", 0.05, {}),
        )
    ]  # fmt: skip
    ranks, missing = ResultsTable(cells).ranks()
    assert ranks is not None
    assert ranks.average == {"good": 1.0, "fair": 2.0, "poor": 3.0}
    assert not missing
    text = format_table(ResultsTable(cells), layout="overview")
    assert "- Average ranks over 5 datasets: good 1.00, fair 2.00, poor 3.00. " in text
    assert "best of 12 trials per row by validation accuracy on draw 6" in text
    ranks, missing = ResultsTable(cells[:-2]).ranks()
    assert missing == ["fair"]
    few = ResultsTable(cells[:16])
    assert "Average ranks" not in format_table(few, layout="overview")
    assert ResultsTable(cells[:4]).ranks() == (None, [])


def test_runs_that_share_a_partition_are_one_replicate() -> None:
    crossed = [(partition, seed) for partition in range(6) for seed in range(2)]

    def row(name: str, means: list[float]) -> Cell:
        draws = [
            make_draw(seed, means[p] + 0.05 * seed, partition_seed=p, partition=f"p{p}")
            for p, seed in crossed
        ]
        return replace(make_row(name, LOCAL), draws=draws)

    table = ResultsTable([row("local", LOCAL), row("good", GOOD)])
    local, good = table.blocks[0].lines
    found, single = table.versus(good, local), paired_test(GOOD, LOCAL)
    assert found is not None
    assert found.n == 6
    assert (found.difference, found.p) == pytest.approx((single.difference, single.p))
    text = "± is the standard deviation over 12 runs with 6 partitions and splits"
    assert table.facts()[0].startswith(text)


@pytest.mark.parametrize(
    ("seed", "partition", "what"),
    [
        (0, 1, "partition and split"),
        (
            1,
            0,
            "the initial model, on one partition and split: tests say nothing about "
            "other partitions",
        ),
        (1, 1, "partition, split and initial model"),
    ],
)
def test_the_notes_say_what_the_draws_vary(
    seed: int, partition: int, what: str
) -> None:
    cell = make_row("local", LOCAL)
    draws = [
        replace(d, seed=seed * d.seed, partition_seed=partition * d.seed)
        for d in cell.draws
    ]
    note = ResultsTable([replace(cell, draws=draws)]).facts()[0]
    assert note == f"± is the standard deviation over 6 draws of {what}."


def test_failed_trials_are_named() -> None:
    tuning = {"budget": 12, "draws": [6], "metric": "validation accuracy"}
    tuning |= {"experiment": "x", "study": "abc", "trials": 12, "settings": ["lr"]}
    cells = [
        make_row("local", LOCAL, tuning={**tuning, "failed": 0}),
        make_row("good", GOOD, tuning={**tuning, "failed": 11}),
    ]
    assert "failed trials: 11 of 12 (good)" in ResultsTable(cells).warnings()


def test_a_row_that_is_only_named_default_is_ranked() -> None:
    cells = [
        make_row(row, [v - gap for v in GOOD], dataset=name)
        for name in ("a", "b", "c", "d", "e")
        for row, gap in (("good", 0.0), ("poor", 0.2), ("plain, default", 0.1))
    ]
    ranks, missing = ResultsTable(cells).ranks()
    assert ranks is not None
    assert ranks.average == {"good": 1.0, "plain, default": 2.0, "poor": 3.0}
    assert not missing


def test_two_partitions_of_a_dataset_are_one_replicate_of_the_ranks() -> None:
    cells = [
        replace(
            cell := make_row(row, [v - gap for v in GOOD], dataset=name),
            place={**cell.place, "partition": partition},
        )
        for name in ("a", "b", "c")
        for partition in ("metis", "louvain")
        for row, gap in (("good", 0.0), ("poor", 0.2), ("fair", 0.1))
    ]
    table = ResultsTable(cells)
    ranks, _ = table.ranks()
    assert len(table.blocks) == 6
    assert ranks is not None
    assert ranks.num_blocks == 3
    assert "3 datasets, at least 3 rows on 5 datasets are needed" in ranks.why_not


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (
            {"weight-decay": 0.0},
            "weight decay: weight-decay is 0.0005 (local), 0 (good)",
        ),
        (
            {"model": "gat"},
            "backbone: model is gcn (local), gat (good) "
            "(--set model=gcn makes them equal)",
        ),
        ({"lr": 0.1}, "optimizer: lr is 0.01 (local), 0.1 (good)"),
        ({"link-k": 50}, "evaluation: link-k is 10 (local), 50 (good)"),
        (
            {"participation": 0.5},
            "training: participation is 1 (local), 0.5 (good)",
        ),
        (
            {"target-scale": "own"},
            "evaluation: target-scale is shared (local), own (good)",
        ),
        (
            {"initial-model": "run"},
            'training: initial-model is "" (local), run (good)',
        ),
        (
            {"aggregation": "krum"},
            "training: aggregation is mean (local), krum (good)",
        ),
        (
            {"upload-noise": 1.0},
            "protection: upload-noise is 0 (local), 1 (good)",
        ),
    ],
)
def test_unequal_defaults_are_a_warning(
    settings: dict[str, object], warning: str
) -> None:
    defaults = {"link-k": 10, "participation": 1.0, "initial-model": ""}
    defaults |= {"target-scale": "shared", "aggregation": "mean", "upload-noise": 0.0}
    cells = [
        make_row("local", LOCAL, settings=defaults),
        make_row("good", GOOD, settings=defaults | settings),
    ]
    for format in ("markdown", "html"):
        assert f"Warning: {warning}." in html.unescape(
            format_table(ResultsTable(cells), format=format)
        )
    assert not ResultsTable(rows(local=LOCAL, good=GOOD)).warnings()


def test_a_setting_that_was_tuned_or_is_in_the_name_is_no_unequal_default() -> None:
    tuned = {"lr": 0.1}
    cells = [
        make_row("local", LOCAL, tuning={"settings": ["lr"], "trials": 4}),
        make_row(
            "good", GOOD, settings=tuned, tuning={"settings": ["lr"], "trials": 4}
        ),
        make_row("near, lr=1.0", NEAR, settings={"lr": 1.0}),
    ]
    assert ResultsTable(cells).warnings() == [
        "tuning budget: trials are 4 (local; good); 0 (near, lr=1.0)"
    ]


def test_unequal_code_and_devices_are_named() -> None:
    cells = rows(local=LOCAL, good=GOOD)
    cells[1] = replace(cells[1], source_sha256="c" * 64, device="cuda:0 H100")
    code, device = ResultsTable(cells).warnings()
    assert code.startswith("code versions: rows were measured with source bbbbbbbbbbbb")
    assert "source cccccccccccc" in code
    assert device.startswith("devices: seconds were measured on cpu")
    cells[1] = replace(rows(good=GOOD)[0], versions={"torch": "2.15.0"})
    (versions,) = ResultsTable(cells).warnings()
    assert versions.endswith("torch 2.13.0 (local); torch 2.15.0 (good)")


def test_unequal_code_of_another_package_is_named() -> None:
    cells = rows(local=LOCAL, good=GOOD, near=NEAR)
    cells[1] = replace(cells[1], extensions={"mine 1.0": "d" * 64})
    table = ResultsTable(cells)
    assert table.warnings() == []  # the other rows do not use the package
    assert "; mine 1.0 source dddddddddddd." in table.facts()[-1]
    cells[2] = replace(cells[2], extensions={"mine 1.0": "e" * 64})
    (text,) = ResultsTable(cells).warnings()
    assert "2 versions of mine: mine 1.0 source dddddddddddd (good)" in text


def test_draws_that_share_their_partition_are_named() -> None:
    cells = rows(local=LOCAL, good=GOOD)
    for k, cell in enumerate(cells):
        draws = [replace(draw, partition="same") for draw in cell.draws[:2]]
        cells[k] = replace(cell, draws=[*draws, *cell.draws[2:]])
    assert ResultsTable(cells).warnings() == [
        "partition: partition seeds 0 and 1 give the same partition"
    ]


def test_unequal_draws_and_partitions_are_refused() -> None:
    cells = rows(local=LOCAL, good=GOOD[:4])
    with pytest.raises(
        RunError, match=r'cora have unequal draws: "good" lacks draw 4, draw 5\. Run'
    ):
        ResultsTable(cells)
    assert ResultsTable(cells, draws=4).blocks
    with pytest.raises(ConfigError, match="--draws 7 is too many: the rows have 6"):
        ResultsTable(cells, draws=7)
    cells = rows(local=LOCAL, good=GOOD)
    draws = [*cells[1].draws[:-1], make_draw(5, 0.8, partition="another")]
    cells[1] = replace(cells[1], draws=draws)
    with pytest.raises(RunError, match="different partitions in draw 5, so that"):
        ResultsTable(cells)


def test_two_cells_of_one_row_are_refused() -> None:
    cells = [make_row("local", LOCAL), make_row("local", LOCAL, experiment="y")]
    with pytest.raises(
        RunError, match=r'Row "local" on cora comes twice, from x-cora and y\. Pass one'
    ):
        ResultsTable(cells)
    with pytest.raises(RunError, match="from two copies of experiment x-cora"):
        ResultsTable([cells[0], make_row("local", LOCAL)])


def test_the_notes_name_rows_that_are_scored_after_fine_tuning() -> None:
    cells = [make_row("local", LOCAL), make_row("fedavg", LOCAL)]
    assert not any("fine-tuning" in text for text in ResultsTable(cells).facts())
    draws = [
        replace(draw, best_round={"own": draw.rounds + 1}) for draw in cells[1].draws
    ]
    table = ResultsTable([cells[0], replace(cells[1], draws=draws)])
    facts = table.facts()
    said = (
        "Scores of fedavg are taken after the fine-tuning or second step that follows"
    )
    place = next(k for k, text in enumerate(facts) if text.startswith(said))
    assert facts[place - 1] == "Scores are those of the round best on validation nodes."


def test_rows_without_one_row_of_local_are_told_why_they_are_not_compared() -> None:
    rows = ["local, lr=1.0", "local, lr=2.0", "fedavg"]
    cells = [make_row(row, LOCAL) for row in rows]
    said = "several rows are of this method: local, lr=1.0; local, lr=2.0. Name one"
    assert any(said in text for text in ResultsTable(cells).facts())
    for table in (
        ResultsTable(cells, against="fedavg"),
        ResultsTable([make_row("local", LOCAL), *cells]),
    ):
        assert not any(said in text for text in table.facts())


def test_the_notes_explain_undecided_comparisons() -> None:
    noisy = [value + (-1) ** k * 0.1 for k, value in enumerate(LOCAL)]
    said = (
        "Undecided: neither a difference nor a tie is shown; a difference of the size"
    )
    for rows, is_said in (((LOCAL, noisy), True), ((LOCAL, LOCAL), False)):
        cells = [make_row(f"{k}", row) for k, row in enumerate(rows)]
        table = ResultsTable(cells, against="0")
        assert (said in format_table(table, layout="full")) is is_said
        assert said not in format_table(table, layout="overview")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "tset"}, 'No row has scores of "tset"'),
        ({"metric": "acuracy"}, 'No row has a score "acuracy" of "test"'),
        ({"against": "loacl"}, 'No row or method "loacl" to compare with'),
        ({"against": "local", "metric": "bytes"}, "Costs are not compared"),
        ({"against": "fedavg"}, "Several rows.* fedavg, a; fedavg, b. Name one"),
        ({"against": "fedavg, a, global model"}, "is one of several models of a row"),
    ],
)
def test_a_score_or_row_that_no_cell_has_is_refused(
    options: dict[str, str], message: str
) -> None:
    cells = rows(**{"local": LOCAL, "good": GOOD, "fedavg, b": NEAR})
    cells.append(make_row("fedavg, a", NEAR, has_global=True))
    with pytest.raises(ConfigError, match=message):
        ResultsTable(cells, **options)


def test_unknown_formats_and_layouts_are_refused() -> None:
    table = ResultsTable(rows(local=LOCAL))
    with pytest.raises(ConfigError, match='Unknown format "pdf"'):
        format_table(table, format="pdf")
    with pytest.raises(ConfigError, match='Unknown layout "wide"'):
        format_table(table, layout="wide")
    with pytest.raises(RunError, match="at least one cell"):
        ResultsTable([])


def test_latex_keeps_characters_that_its_font_or_a_line_break_would_change() -> None:
    cells = [make_row("local", LOCAL), make_row("[a] b<c>|d ρλΔ ≤ 1", GOOD)]
    text = format_table(ResultsTable(cells), format="latex")
    name = (
        r"{[}a] b\textless{}c\textgreater{}\textbar{}d $\rho$$\lambda$$\Delta$ $\leq$ 1"
    )
    assert f"{name} &" in text


def test_latex_is_escaped_and_bold() -> None:
    cells = [make_row("local", LOCAL), make_row("50 %_x & y", GOOD)]
    text = format_table(ResultsTable(cells), format="latex")
    assert r"50 \%\_x \& y & \textbf{80.17 $\pm$ 0.75 $\uparrow$}" in text
    assert text.count(r"\begin{tabular}{l") == text.count(r"\end{tabular}") == 1
    body = re.sub(r"\$[^$]*\$", "", text)
    assert body.isascii()


@pytest.mark.parametrize("layout", ["", "full", "overview", "summary"])
def test_latex_fits_a_page_and_has_no_words_in_number_cells(layout: str) -> None:
    cells = [
        make_row(row, values, dataset=dataset, order=order)
        for dataset in ("cora", "citeseer")
        for order, (row, values) in enumerate(
            {"local": LOCAL, "good": GOOD, "wide": WIDE}.items()
        )
    ]
    text = format_table(ResultsTable(cells), layout=layout, format="latex")
    assert text.startswith(r"% Needs \usepackage{booktabs} and \usepackage{graphicx}.")
    labels = re.findall(r"\\label\{(.*)\}", text)
    caption = layout == "full"
    name = "tab:x-cora-x-citeseer"
    assert labels == ([f"{name}-cora", f"{name}-citeseer"] if caption else [name])
    assert text.count(r"\caption{") == len(labels)  # else it names the section
    limits = text.count(r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}")
    assert limits == len(labels)
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "&" in line]
    for line in (line for line in rows if not line.startswith(" &")):
        for cell in line.removesuffix(r"\\").split("&")[1:]:
            plain = re.sub(r"\\textbf|\$[^$]*\$|\b(kB|s)\b", "", cell)
            assert not re.search("[a-z]{2}", plain), line
    assert len(rows) >= 4


def test_html_is_escaped() -> None:
    cells = [make_row("local", LOCAL), make_row("<script>", GOOD)]
    text = format_table(ResultsTable(cells), format="html")
    assert "<script>" not in text
    cells = re.findall(r"<t[hd]>(.*)</t[hd]>", text)
    assert cells[cells.index("&lt;script&gt;") + 1] == "<b>80.17 ± 0.75 ↑</b>"


def test_names_in_markdown_stay_text() -> None:
    cells = [make_row("local", LOCAL), make_row("*a* | <b> `[c]`", GOOD)]
    text = format_table(ResultsTable(cells))
    name = r"\*a\* \| \<b\> \`\[c\]\`"
    assert f"| {name} | **80.17 ± 0.75 ↑** |" in text


def test_csv_has_no_layouts() -> None:
    table = ResultsTable([make_row("local", LOCAL)])
    with pytest.raises(ConfigError, match='layout = "summary" has no effect'):
        format_table(table, format="csv", layout="summary")


def test_csv_holds_the_numbers_in_full() -> None:
    cells = [make_row("fedavg", GOOD, has_global=True), make_row("local", LOCAL)]
    text = format_table(ResultsTable(cells), format="csv")
    found = list(csv.DictReader(io.StringIO(text)))
    assert [(row["row"], row["model"]) for row in found] == [
        ("fedavg", "own"), ("fedavg", "global"), ("local", "own"),
    ]  # fmt: skip
    assert float(found[0]["test_accuracy_mean"]) == pytest.approx(sum(GOOD) / 6)
    assert float(found[0]["bytes_up_mean"]) == 1000
    assert float(found[0]["minus_control"]) == pytest.approx(
        sum(GOOD) / 6 - sum(LOCAL) / 6
    )
    assert 0 < float(found[0]["p_control"]) < 0.05
    versus = ResultsTable(cells)
    (block,) = versus.blocks
    test = versus.versus(block.lines[0], block.control)
    assert 0 < test.detectable == float(found[0]["detectable_control"])
    assert found[2]["p_control"] == ""
    assert not math.isnan(float(found[2]["p_best"]))


def test_published_values_of_csv_are_fractions() -> None:
    cell = make_row("local", LOCAL, published={"accuracy": 70.26})
    text = format_table(ResultsTable([cell]), format="csv")
    (found,) = csv.DictReader(io.StringIO(text))
    assert found["published"] == "0.7026"


def test_gains_of_owners_are_paired_by_draw() -> None:
    lacking = {"good": 0, "local": 3}
    cells = []
    for row, gain in (("local", 0.0), ("good", 0.1)):
        cell = make_row(row, LOCAL[:4])
        draws = [
            replace(
                draw,
                owners={
                    "own": {
                        name: {"accuracy": (0.5, 0.2, 0.6, 0.3)[k] + gain}
                        for name in ("a", "b")
                        if name == "b" or k != lacking[row]
                    }
                },
            )
            for k, draw in enumerate(cell.draws)
        ]
        cells.append(replace(cell, draws=draws))
    text = format_table(ResultsTable(cells), layout="owners")
    # a is scored by both in draws 1 and 2; each gain is 10 points in every draw
    found = [line for line in text.splitlines() if line.startswith("| good")][-1]
    assert found == "| good | +10.00 ± 0.00 | +10.00 ± 0.00 | +10.00 | 2 of 2 |"
    assert "| good | 46.67 ± 20.82 (3 of 4) | 50.00 ± 18.26 |" in text
    for k, cell in enumerate(cells):  # the same draws of both owners
        draws = [replace(draw, owners=cell.draws[1].owners) for draw in cell.draws]
        cells[k] = replace(cell, draws=draws)
    text = format_table(ResultsTable(cells), layout="owners")
    assert "| +10.00 ± 0.00 | +10.00 ± 0.00 | +10.00 ± 0.00 | 2 of 2 |" in text


def test_the_detectable_difference_is_that_of_the_adjusted_tests() -> None:
    """At it, a test among m finds a difference with a probability of 80 %."""
    rows = [make_row("local", LOCAL), make_row("good", GOOD)]
    found = []
    for number in (0, 20):
        more = [
            make_row(f"m{k}", [v - 0.1 - 0.01 * k for v in GOOD]) for k in range(number)
        ]
        table = ResultsTable([*rows, *more])
        local, good, *_ = table.blocks[0].lines
        versus = table.versus(local, good)
        assert versus is not None
        found.append(versus.detectable)
        count = table.num_tests
    assert found[0] < found[1]
    spread = float(np.std(np.subtract(LOCAL, GOOD), ddof=1))
    draws = np.random.default_rng(0).normal(found[1], spread, (20_000, len(LOCAL)))
    power = (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05 / count).mean()
    assert power == pytest.approx(0.8, abs=0.015)


def test_a_row_with_another_method_or_model_on_other_data_is_a_warning() -> None:
    cora = [make_row("local", LOCAL), make_row("ours", GOOD, method="fedavg")]
    other = [
        make_row("local", LOCAL, dataset="pubmed"),
        make_row("ours", GOOD, dataset="pubmed", method="fedprox"),
    ]
    assert not ResultsTable(cora).warnings()
    said = "the method of row ours is fedavg (cora); fedprox (pubmed)"
    assert ResultsTable([*cora, *other]).warnings() == [said]
    draws = [
        replace(draw, scores={"global": draw.scores["own"]}) for draw in other[0].draws
    ]
    mixed = [*cora[:1], replace(other[0], draws=draws)]
    said = "the model of row local is own model (cora); global model (pubmed)"
    assert ResultsTable(mixed).warnings() == [said]


def test_a_setting_whose_name_ends_like_another_is_compared() -> None:
    rows = {"a, server-lr=0.1": {"lr": 0.1}, "b": {"lr": 0.01}}
    assert unequal_settings(rows) == [
        "optimizer: lr is 0.1 (a, server-lr=0.1), 0.01 (b)"
    ]
    assert not unequal_settings({"a, lr=0.1": {"lr": 0.1}, "b": {"lr": 0.01}})
