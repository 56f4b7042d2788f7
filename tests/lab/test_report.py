from __future__ import annotations

import base64
import json
import math
import os
import re
import shutil
import statistics
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from flower_fgl.core.errors import RunError
from flower_fgl.core.metrics import Scores, pool
from flower_fgl.core.score_names import ScoreScale
from flower_fgl.lab import plots
from flower_fgl.lab.plots.clients import client_spread
from flower_fgl.lab.report import page as report
from flower_fgl.lab.report.figures import draw_run
from flower_fgl.lab.report.groups import (
    find_sweeps,
    has_one_objective,
    lines_of,
    looks_of,
    over_seeds,
)
from flower_fgl.lab.report.page import (
    _read_settings,
    show_bytes,
    show_seconds,
    write_report,
)
from flower_fgl.lab.results import Run
from flower_fgl.methods import METHODS
from flower_fgl.runs.summary import summarise
from flower_fgl.runs.writer import RunWriter

CLASSES = ["alpha", "beta", "gamma"]
HOSTILE = ["<script>alert(1)</script>", "$\\frac{", "_hidden\x00\nsecond line"]
COUNTS = [[5, 0, 2], [1, 7, 0], [0, 0, 0]]


def make(
    folder: Path,
    *,
    method: str = "fedavg",
    seed: int = 0,
    val: tuple[float, ...] = (0.5, 0.7931, 0.6),
    status: str = "completed",
    class_names: list[str] | None = None,
    error: str | None = None,
    drop: list[dict[str, Any]] | None = None,
    settings: dict[str, Any] | None = None,
    auroc: float = math.nan,
    columns: tuple[str, ...] = (),
    numbers: dict[str, float] | None = None,
    metric: str = "accuracy",
) -> Run:
    """Write a run of three clients; the last client has no test nodes."""
    config = {"method": method, "dataset": "cora", "seed": seed, "lr": 0.0125}
    writer = RunWriter.create(
        folder,
        config={**config, **(settings or {})},
        sources={"lr": "user", "seed": "default"},
    )
    writer.append_clients(
        {
            "round": 0,
            "partition_id": pid,
            "num_nodes": 40 + pid,
            "class_counts": counts,
            "trains": sum(counts) > 0,
        }
        for pid, counts in reversed(list(enumerate(COUNTS)))
    )
    rows = []
    for server_round, accuracy in enumerate(val, start=1):
        scores = [
            Scores(10, accuracy, accuracy, accuracy, auroc),
            Scores(30, accuracy / 2, accuracy / 3, accuracy / 4),
            Scores(0, math.nan, math.nan, math.nan),
        ]
        pooled = pool(scores)
        rows.append(
            {
                "round": server_round,
                "phase": "train",
                "status": "ok",
                "replies": 3,
                "failures": (drop or []) if server_round == 2 else [],
                "loss": 1 / server_round,
                "numbers": numbers or {},
                "metrics": {
                    "local": {
                        "val": pooled,
                        "test": pooled,
                        **dict.fromkeys(columns, pooled),
                    }
                },
                "seconds": {"send": 0.001, "clients": 0.04, "total": 0.042},
                "bytes": {
                    "up": {"weights": 123_000, "metrics": 450},
                    "down": {"weights": 123_000},
                },
            }
        )
        writer.append_round(rows[-1])
        writer.append_clients(
            {
                "round": server_round,
                "partition_id": pid,
                "metrics": {"local": {"test": entry.as_dict()}},
            }
            for pid, entry in enumerate(scores)
        )
    if status != "running":
        writer.write_summary(
            summarise(
                rows,
                method=method,
                dataset="cora",
                clients=3,
                seed=seed,
                engine="local",
                partition_sha256="3f2a" * 16,
                evaluate="local",
                status=status,
                class_names=class_names or CLASSES,
                error=error,
                metric=metric,
            )
        )
    return Run.load(folder)


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.narrow: list[str] = []
        self.text = ""
        self.is_style = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.is_style = tag == "style"
        self.narrow += [v or "" for key, v in attrs if key == "srcset"]
        self.links += [v or "" for key, v in attrs if key in ("src", "href", "action")]

    def handle_endtag(self, tag: str) -> None:
        self.is_style = False

    def handle_data(self, data: str) -> None:
        if not self.is_style:
            self.text += data + "\n"

    def words(self) -> str:
        return re.sub(r"\s+", " ", self.text)


def svg(link: str) -> str:
    """Decode an image and check that it is well-formed."""
    data = base64.b64decode(link.removeprefix("data:image/svg+xml;base64,"))
    ElementTree.fromstring(data)
    return data.decode()


def test_the_report_of_one_run_shows_its_numbers(tmp_path: Path) -> None:
    run = make(tmp_path / "one")
    path = write_report([run], None)
    assert path == run.path / "report.html"
    words = Page(path).words()
    # pooled: (10·0.7931 + 30·0.39655)/40; plain mean: (0.7931 + 0.39655)/2
    assert "49.6 % test accuracy, round 2" in words
    assert "59.5 % mean of the clients' test accuracies" in words
    assert "best validation round 2 49.6" in words
    assert "last round 3 37.5" in words
    assert "370 kB sent to the server; 369 kB to the clients" in words
    assert "metrics to server 1.35 kB 450 B" in words
    assert "clients 120 ms 40 ms" in words
    assert (
        "lr 0.0125 user Settings that have their default setting value seed 0" in words
    )
    assert "3f2a" * 16 in words
    command = f"flower-fgl run {run.path / 'config.toml'} --clients 3 --engine local"
    assert command in words
    assert "Failures" not in words


@pytest.mark.thorough
@pytest.mark.pictures
def test_the_report_is_one_file_without_scripts_or_network(tmp_path: Path) -> None:
    page = Page(write_report([make(tmp_path / "one")], None))
    assert not {"script", "link", "iframe", "object", "a", "form"} & set(page.tags)
    assert len(page.links) == 6  # curves, cost, clients, labels, bytes, seconds
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert not any("<script" in svg(link) for link in page.links)


@pytest.mark.parametrize("count", [1, 2])
def test_the_distance_of_the_clients_encoders_is_drawn(
    tmp_path: Path, count: int
) -> None:
    runs = [
        make(tmp_path / str(n), seed=n, numbers={"distance": 0.5}) for n in range(count)
    ]
    other = [make(tmp_path / "local", method="local")] if count > 1 else []
    page = Page(write_report([*runs, *other], tmp_path / "page.html"))
    assert "Parameter discrepancy" in page.words()
    assert (
        "Parameter discrepancy"
        not in Page(write_report([make(tmp_path / "without")], None)).words()
    )


def test_a_number_by_round_is_drawn_from_zero_for_each_run() -> None:
    one = replace(curve("a"), distance_rounds=[1, 2], distance=[3.0, 4.0])
    other = replace(curve("b"), distance_rounds=[2], distance=[1.0])
    figure = plots.by_round([one, other])
    (panel,) = figure.axes
    assert [list(line.get_ydata()) for line in panel.lines] == [[3.0, 4.0], [1.0]]
    assert panel.get_ylim()[0] == 0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


@pytest.mark.pictures
def test_names_of_many_runs_leave_room_for_the_curves() -> None:
    one = replace(curve("a"), distance_rounds=[1, 2], distance=[0.4, 0.6])
    curves = [replace(one, label=f"run {k}") for k in range(60)]
    plots.to_svg(plots.by_round(curves))  # fails on a warning


@pytest.mark.thorough
@pytest.mark.pictures
def test_hostile_names_are_shown_and_never_run(tmp_path: Path) -> None:
    evil = '<img src=x onerror="alert(1)">'
    run = make(
        tmp_path / "<b>one",
        class_names=HOSTILE,
        error=f"Client 1: {evil}",
        status="failed",
        drop=[{"partition_id": 1, "reason": f"ValueError: {evil}"}],
        settings={"data-dir": evil},
    )
    path = write_report([run], None)
    assert "onerror" in path.read_text()
    assert evil not in path.read_text()
    page = Page(path)
    assert len(page.links) == 6
    assert "script" not in page.tags
    words = page.words()
    assert f"ValueError: {evil} 1 1 2" in words
    assert f"data-dir {evil}" in words
    heat_map = svg(page.links[3])
    assert "<script" not in heat_map
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in heat_map


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("running", "The run is still active or was killed"),
        ("failed", "The run failed in round 3. All 3 clients failed"),
        ("interrupted", "The run was stopped in round 3"),
    ],
)
def test_an_unfinished_run_is_shown_with_its_status_on_top(
    tmp_path: Path, status: str, says: str
) -> None:
    error = "All 3 clients failed" if status == "failed" else None
    run = make(tmp_path / "one", status=status, error=error)
    words = Page(write_report([run], None)).words()
    assert f"fedavg on cora {status}" in words
    assert says in words
    assert words.index(says) < words.index("Results")
    assert "best validation round 2 49.6" in words


@pytest.mark.thorough
@pytest.mark.pictures
def test_a_killed_run_shows_its_class_names_if_the_clients_told_them(
    tmp_path: Path,
) -> None:
    run = make(tmp_path / "one", status="running")
    numbered = svg(Page(write_report([run], None)).links[3])
    assert "<!-- alpha -->" not in numbered
    assert "<!-- class 0 -->" in numbered
    described = [{**row, "class_names": CLASSES} for row in run.clients]
    named = svg(Page(write_report([replace(run, clients=described)], None)).links[3])
    assert "<!-- alpha -->" in named


def test_a_run_killed_before_its_first_round_is_shown(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "x", config={"method": "local"}, sources={})
    page = Page(write_report([Run.load(writer.folder)], None))
    assert "No round has been evaluated." in page.words()
    assert page.links == []


def test_a_failed_round_and_its_lost_replies_are_listed(tmp_path: Path) -> None:
    drop = [{"partition_id": pid, "reason": "timeout"} for pid in (2, 0)]
    folder = make(tmp_path / "one", drop=drop).path
    writer = RunWriter(folder)
    writer.append_round({"round": 4, "phase": "train", "status": "failed"})
    words = Page(write_report([Run.load(folder)], None)).words()
    assert "Too few replies remained in round 4" in words
    assert "timeout 2 0, 2 2" in words


def test_a_run_without_validation_nodes_says_how_it_was_selected(
    tmp_path: Path,
) -> None:
    run = make(tmp_path / "one", val=(math.nan, math.nan))
    words = Page(write_report([run], None)).words()
    assert "There is no validation accuracy, so the last round is shown" in words
    assert not re.search(r"\bnan\b", words, flags=re.IGNORECASE)


def test_a_run_over_graphs_speaks_of_graphs_and_shows_auroc(tmp_path: Path) -> None:
    run = make(tmp_path / "one", settings={"setting": "graph"}, auroc=0.875)
    words = Page(write_report([run], None)).words()
    # graphs are counted, never their nodes
    assert "nodes" not in words
    assert "over the graphs of all clients" in words
    assert "Number of training graphs by class" in words
    assert "recall per client AUROC" in words
    assert "best validation round 2 49.6 39.7 34.7 59.5 87.5" in words
    twins = [run, make(tmp_path / "two", settings={"setting": "graph"}, auroc=0.5)]
    words = Page(write_report(twins, None)).words()
    assert "over the graphs of all clients" in words
    assert "test F1 test AUROC up" in words
    mixed = [run, make(tmp_path / "three")]
    words = Page(write_report(mixed, None)).words()
    assert "over the nodes or graphs of all clients" in words


def test_a_run_with_unseen_nodes_shows_each_column_as_a_row(tmp_path: Path) -> None:
    run = make(tmp_path / "a", columns=("new_client", "missing", "unseen"))
    page = Page(write_report([run]))
    assert "Node sets" in page.text
    names = [page.text.index(f"\n{name}") for name in ("unseen", "missing")]
    assert names == sorted(names)
    assert "new client" in page.text
    assert "graph of a client that did not participate" in page.text
    assert "Node sets" not in Page(write_report([make(tmp_path / "b")])).text


def test_each_setting_has_a_picture_of_its_own(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / setting, columns=columns, settings={"setting": setting})
        for setting, columns in (
            ("closed-set", ("unseen", "missing", "new_client")),
            ("open-set", ("unseen", "missing")),
        )
    ]
    folder = tmp_path / "pictures"
    page = Page(write_report(runs, pictures=folder))
    drawn = {
        setting: folder / f"columns-{setting}.svg"
        for setting in ("closed-set", "open-set")
    }
    assert all(path.is_file() for path in drawn.values())
    first, second = page.text.split("Node sets: ")[1:]
    assert first.startswith("closed-set")
    assert "a client that did not participate" in first
    assert "a client that did not participate" not in second


def test_own_columns_stand_in_the_tables_of_several_runs(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"{s}", seed=s, val=(0.5 + s / 10,), columns=("test_masked",))
        for s in (0, 1)
    ]
    page = Page(write_report(runs))
    assert (
        page.text.count("own classes") == 3
    )  # both tables and the section on node sets
    assert "with predictions restricted to each client's own classes" in page.text
    # 50 and 60 % on 10 nodes, half of it on 30: 31.25 and 37.5 %
    assert page.text.count("34.4 ± 4.4") >= 3
    assert "own classes" in runs[0].table()
    assert "own classes" not in make(tmp_path / "c").table()


@pytest.mark.thorough
@pytest.mark.pictures
def test_several_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / "a", val=(0.5, 0.8)),
        make(tmp_path / "b", method="fedprox", settings={"fedprox.mu": 0.1}),
        make(tmp_path / "c", method="local", status="running"),
    ]
    path = write_report(runs, None)
    assert path == tmp_path / "comparison.html"
    page = Page(path)
    words = page.words()
    assert "3 runs compared" in words
    assert "fedavg cora 3 0 completed 2 50.0 50.0 40.0 247 kB 246 kB 84 ms" in words
    assert "fedprox cora 3 0 completed 2 49.6 49.6" in words
    assert "local cora ? 0 running 2 49.6 49.6" in words
    assert "local: running. The run is still active or was killed" in words
    assert "fedprox.mu – 0.1 –" in words
    assert len(page.links) == 5  # curves, cost, clients, bytes, seconds
    assert "Over seeds" not in words
    assert "Training losses are not drawn" in words


def test_runs_that_differ_in_their_seeds_only_are_averaged(tmp_path: Path) -> None:
    elsewhere = {"data-dir": "/data", "threads": 2, "checkpoint-every": 5}
    runs = [
        make(tmp_path / "a", seed=0, val=(0.8,)),
        make(tmp_path / "b", seed=1, val=(0.72,), settings=elsewhere),
        make(tmp_path / "c", seed=2, val=(0.1,), status="failed"),
        make(tmp_path / "d", seed=3, val=(0.2,), settings={"lr": 1.0}),
    ]
    words = Page(write_report(runs, None)).words()
    # pooled 0.5 and 0.45: mean 47.5, standard deviation 5/√2 = 3.5
    assert "fedavg on cora 3 0, 1 47.5 ± 3.5 47.5 ± 3.5" in words
    assert "fedavg · seed 2" in words


def test_runs_of_several_seeds_are_one_line_with_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[plots.Curve]] = []
    convergence = plots.convergence
    monkeypatch.setattr(
        plots,
        "convergence",
        lambda curves, **more: drawn.append(curves) or convergence(curves, **more),
    )
    monkeypatch.setattr(report, "to_data_uri", lambda figure: "")
    monkeypatch.setattr(report, "draw_narrow", lambda _: {})
    runs = [
        make(
            tmp_path / f"{method}-modelgcn-seed{seed}",
            method=method,
            seed=seed,
            val=val,
        )
        for method, val in (("fedavg", (0.5, 0.7)), ("local", (0.2, 0.4)))
        for seed in range(4)
    ]
    runs.append(make(tmp_path / "fedprox-seed0", method="fedprox", val=(0.9, 0.1)))
    runs[0] = make(tmp_path / "fedavg-modelgcn-seed9", seed=9, val=(0.9, 0.6, 0.3))
    words = Page(write_report(runs, tmp_path)).words()
    assert "Each line is the mean of runs that differ only in their seeds" in words
    (curves,) = drawn
    assert [curve.label for curve in curves] == [
        "fedavg",
        "local",
        "fedprox · seed 0",
    ]
    assert curves[0].rounds == [1, 2]  # rounds that all runs have
    for number, alone in ((0, (0.9, 0.5, 0.5, 0.5)), (1, (0.6, 0.7, 0.7, 0.7))):
        # pooled over 10 nodes of this accuracy, and 30 of half of it
        pooled = [0.625 * value for value in alone]
        assert curves[0].val[number] == pytest.approx(statistics.mean(pooled))
        spread = statistics.stdev(pooled)
        assert curves[0].val_spread[number] == pytest.approx(spread)
        assert curves[0].test_spread[number] == pytest.approx(spread)
    assert curves[2].val_spread == ()  # one run
    assert curves[0].bytes == pytest.approx([246_450, 492_900])
    assert curves[0].seconds == pytest.approx([0.042, 0.084])
    # the same folder names for two datasets
    others = [
        make(tmp_path / "y" / run.path.name, seed=seed)
        for seed, run in enumerate(runs[:4])
    ]
    for run in others:
        run.summary["dataset"] = "citeseer"
    write_report(runs + others, tmp_path)
    names = [(curve.label, curve.panel) for curve in drawn[1]]
    assert len(set(names)) == len(names) == 4
    assert {("fedavg", "cora"), ("fedavg", "citeseer")} < set(names)


def test_the_seeds_of_partitions_are_named_where_they_differ(tmp_path: Path) -> None:
    for seeds, expected in (
        ((0, 0), "3 partitions 4, 5 "),
        ((0, 1), "3 0, 1; partitions"),
    ):
        runs = [
            make(
                tmp_path / f"{seeds}{k}", seed=seed, settings={"partition-seed": k + 4}
            )
            for k, seed in enumerate(seeds)
        ]
        page = write_report(runs, None)
        assert f"fedavg on cora {expected}" in Page(page).words()
        # phones leave out the clients and the seeds, in the head and in the rows
        text = page.read_text("utf-8")
        head, body = text[text.index("<h2>Over seeds") :].split("</thead>", 1)
        rows = body.split("</tbody>", 1)[0]
        assert head.count('detail">') == rows.count('detail">') == 2


def test_an_aggregated_and_a_fine_tuned_model_have_rows_of_their_own(
    tmp_path: Path,
) -> None:
    runs = [make(tmp_path / f"{seed}", seed=seed) for seed in (0, 1)]
    for run, accuracy in zip(runs, (0.5, 0.7), strict=True):
        entry = {"test": {"accuracy": accuracy}}
        run.summary["global"] = {"best": entry}
        run.summary["finetuned"] = {"test": {"accuracy": accuracy / 2}}
    words = Page(write_report(runs, None, against="fedavg")).words()
    assert "fedavg on cora, aggregated model 3 0, 1 – 60.0 ± 14.1 – –" in words
    assert "fedavg on cora, after fine-tuning 3 0, 1 – 30.0 ± 7.1 – –" in words


def test_two_runs_of_one_draw_count_once_in_a_mean(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / name, seed=seed, val=(score,))
        for name, seed, score in (("a", 0, 0.2), ("b", 0, 0.8), ("c", 1, 0.6))
    ]
    (row,) = over_seeds(runs)
    assert row["seeds"] == "0, 1"
    scores = [run.best["test"]["accuracy"] for run in runs[1:] if run.best]
    assert row["test_accuracy"] == ScoreScale().show_mean(scores, 1)
    assert over_seeds(runs[:2]) == []
    words = Page(write_report(runs, tmp_path / "x.html")).words()
    assert "fedavg · seed 0 (a)" in words


def test_what_is_significantly_better_than_a_method_is_marked(tmp_path: Path) -> None:
    values = {"fedavg": (0.4, 0.42, 0.41, 0.4, 0.4)}
    values["fedprox"] = (0.8, 0.81, 0.82, 0.81, 0.8)
    values["local"] = (0.3, 0.9, 0.4, 0.3, 0.9)
    runs = [
        make(tmp_path / f"{method}-{seed}", method=method, seed=seed, val=(accuracy,))
        for method, accuracies in values.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    words = Page(write_report(runs, None, against="fedavg")).words()
    assert re.search(r"fedprox on cora 3 0, 1, 2, 3, 4 \S+ ± \S+ \S+ ± \S+ ●", words)
    assert words.count("●") == 2  # the second one is in the legend
    assert "significantly above that of fedavg" in words
    assert re.search(r"● .* \+25\.12, better \(p = \S+\)", words)
    assert re.search(r"\+9\.62, undecided \(p = \S+; \d+\.\d would be found\)", words)
    assert (
        "not testable: 2 pairs"
        in Page(write_report([*runs[:2], *runs[5:7]], None, against="fedavg")).words()
    )
    plain = Page(write_report(runs, None)).words()
    assert "●" not in plain
    assert "would be found" not in plain
    others = [make(tmp_path / f"x{k}", seed=k, settings={"lr": 1.0}) for k in (7, 8)]
    choose = (
        r"got 2 groups\. Name one of the rows fedavg, lr=0\.\d+; fedavg, lr=1\.0, or"
    )
    with pytest.raises(RunError, match=choose):
        write_report([*runs, *others], None, against="fedavg")
    words = Page(write_report([*runs, *others], None, against="fedavg, lr=1.0")).words()
    assert "that of fedavg, lr=1.0" in words
    for wrong, there in ((runs[5:], "fedprox, local"), (runs[:1], "none")):
        few = f'"fedavg" is no row, or a method, with .* two seeds.* such runs: {there}'
        with pytest.raises(RunError, match=few):
            write_report(wrong, None, against="fedavg")


def test_fine_tuned_rows_are_compared_after_fine_tuning(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"{method}-{seed}", method=method, seed=seed, val=(accuracy,))
        for method, low in (("fedavg", 0.6), ("local", 0.7))
        for seed, accuracy in enumerate((low, low + 0.01, low, low, low))
    ]
    for run in runs[:5]:
        entry = run.summary["best"]["test"]
        tuned = entry["accuracy"] + (0.11 if run is runs[0] else 0.1)
        run.summary["finetuned"] = {"round": 2, "test": {**entry, "accuracy": tuned}}
    words = Page(write_report(runs, None, against="local")).words()
    assert re.search(r"fedavg on cora, after fine-tuning [^●]*●", words)
    assert not re.search(r"fedavg on cora 3 [\d, ]+ \S+ ± \S+ \S+ ± \S+ [●≈]", words)
    assert "Compared are the rows after fine-tuning" in words


def test_the_owners_of_fine_tuned_runs_are_scored_after_it(tmp_path: Path) -> None:
    owners = {"owners": "a.npz,b.npz,c.npz"}
    runs = [
        make(tmp_path / f"{seed}", seed=seed, settings=owners, val=(0.5, 0.4))
        for seed in (0, 1)
    ]
    said = "of each owner in percent, in the best validation round"
    assert f"{said}." in Page(write_report(runs, None)).words()
    for run in runs:
        run.summary["finetuned"] = {**run.summary["best"], "round": 2}
    words = Page(write_report(runs, None)).words()
    assert f"{said}, or after fine-tuning where runs have it." in words
    assert "owner fedavg 0 40.0 1 20.0" in words
    assert "in the best validation round, or after fine-tuning" in words
    one = Page(write_report(runs[:1], None)).words()
    assert "31.2 % test accuracy, after fine-tuning" in one


def test_ties_are_adjusted_for_the_rows_of_the_page(tmp_path: Path) -> None:
    noise = (0.0, 0.018, -0.012, 0.014, -0.017, 0.009)  # one row alone is tied
    runs = [
        make(
            tmp_path / f"{row}-{seed}",
            seed=seed,
            settings={"lr": 0.1 * (row + 1)},
            val=(0.7 + (0.001 if row == 0 else (-1) ** row * shift),),
        )
        for row in range(6)
        for seed, shift in enumerate(noise)
    ]
    assert over_seeds(runs[:12])[1]["rank"] == "tied"
    assert not any(group["rank"] == "tied" for group in over_seeds(runs))


def test_methods_are_compared_on_the_same_clients_only(tmp_path: Path) -> None:
    values = {
        ("fedavg", "metis"): (0.4, 0.42, 0.41, 0.4, 0.4),
        ("fedprox", "metis"): (0.4, 0.42, 0.41, 0.42, 0.4),
        ("fedavg", "louvain"): (0.8, 0.82, 0.81, 0.8, 0.8),
        # far above fedavg with metis, but not with louvain
        ("fedprox", "louvain"): (0.8, 0.82, 0.81, 0.82, 0.8),
        # no fedavg to compare with
        ("fedprox", "label-dirichlet"): (0.9, 0.91, 0.92, 0.91, 0.9),
    }
    runs = [
        make(
            tmp_path / f"{method}-{partition}-{seed}",
            method=method,
            seed=seed,
            val=(accuracy,),
            settings={"partition": partition},
        )
        for (method, partition), accuracies in values.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    words = Page(write_report(runs, None, against="fedavg")).words()
    assert words.count("●") == 1  # in the legend
    for run in runs[15:20]:  # fedprox with louvain
        run.summary["best"]["test"]["accuracy"] += 0.1
    words = Page(write_report(runs, None, against="fedavg")).words()
    assert words.count("●") == 2


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a"), make(tmp_path / "b")]
    words = Page(write_report(runs, tmp_path)).words()
    assert "fedavg (a) cora" in words
    assert "fedavg (b) cora" in words
    twins = [make(tmp_path / "x" / "a"), make(tmp_path / "y" / "a")]
    words = Page(write_report(twins, tmp_path)).words()
    assert "1: fedavg (a) cora" in words
    assert "2: fedavg (a) cora" in words
    cases = [make(tmp_path / name) for name in ("fedavg-seed0", "fedavg_reset-seed0")]
    words = Page(write_report(cases, tmp_path)).words()
    assert "fedavg (fedavg_reset-seed0) cora" in words


def test_the_place_of_the_report_can_be_chosen(tmp_path: Path) -> None:
    run = make(tmp_path / "one")
    assert write_report([run], tmp_path / "x.html") == tmp_path / "x.html"
    assert write_report([run], tmp_path) == tmp_path / "report.html"
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot write"):
        write_report([run], tmp_path / "file" / "x.html")
    with pytest.raises(RunError, match="at least one run folder"):
        write_report([], None)


def test_a_copy_of_the_package_without_template_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copy(Path(report.__file__), tmp_path / "report.py")
    monkeypatch.setattr(report, "__file__", os.fspath(copy))
    run = make(tmp_path / "one")
    with pytest.raises(RunError, match=r"flower-fgl report .*one"):
        write_report([run], None)


def test_the_reproducing_command_is_safe_to_paste(tmp_path: Path) -> None:
    run = make(tmp_path / "my run; rm x")
    words = Page(write_report([run], None)).words()
    assert f"flower-fgl run '{run.path / 'config.toml'}' --clients 3" in words


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.79306, "79.3"), (0, "0.0"), (1, "100.0"), (None, "–")],
)
def test_fractions_are_shown_in_percent(value: float | None, text: str) -> None:
    assert ScoreScale().show(value, 1) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (12_345_678, "12.3 MB"),
        (2e9, "2 GB"),
    ],
)
def test_bytes_are_shown_in_decimal_units(value: float, text: str) -> None:
    assert show_bytes(value).replace("\u00a0", " ") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0604, "60.4 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (6.647, "6.65 s"),
        (1234.4, "1234 s"),
        (None, "–"),
    ],
)
def test_seconds_are_shown_in_a_fitting_unit(value: float | None, text: str) -> None:
    assert show_seconds(value).replace("\u00a0", " ") == text


def texts(figure: Figure) -> list[str]:
    """Return the texts in and around the first panel of a drawn figure."""
    figure.canvas.draw()
    panel = figure.axes[0]
    inside = [text.get_text() for text in panel.texts]
    ticks = [*panel.get_xticklabels(), *panel.get_yticklabels()]
    return inside + [tick.get_text() for tick in ticks]


def test_the_heat_map_has_a_row_per_class_and_a_column_per_client() -> None:
    figure = plots.label_heat_map(np.array(COUNTS), CLASSES)
    shown = texts(figure)
    assert shown == ["5", "1", "7", "2", "0", "1", "2", *CLASSES]
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (3, 3)
    assert image.filled(0).T.tolist() == COUNTS
    bar = figure.axes[1]  # a cell without nodes has no colour of the bar
    assert bar.get_ylim() == (1, 7)


def test_long_names_of_owners_differ_below_the_columns() -> None:
    names = [f"university-hospital-of-the-northern-region-{k}" for k in range(14)]
    for figure in (
        plots.client_bars(names, [0.5] * 14, None),
        plots.label_heat_map(np.ones((14, 3), dtype=int), CLASSES, names),
    ):
        ticks = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
        assert len(set(ticks)) == 14
        assert all(
            len(text) <= 20 and text.endswith(f"-{k}") for k, text in enumerate(ticks)
        )
        figure.draw_without_rendering()
        assert figure.axes[0].get_position().height > 0.4  # of the figure


def test_the_mixtures_have_a_row_and_a_column_per_client() -> None:
    weights = [[0.5, 0.5, 0.0], [0.25, 0.75, 0.0], [0.0, 0.0, 1.0]]
    figure = plots.mixture_heat_map(weights, [0, 2, "ash"])
    shown = [f"{value:.2f}" for row in weights for value in row]
    assert texts(figure) == [*shown, "0", "2", "ash", "0", "2", "ash"]
    image = figure.axes[0].images[0]
    assert image.get_array().tolist() == weights
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    many = plots.mixture_heat_map(np.full((50, 50), 0.02), range(50))
    assert not many.axes[0].texts


@pytest.mark.thorough
@pytest.mark.pictures
def test_the_page_shows_the_last_mixtures(tmp_path: Path) -> None:
    run = make(tmp_path / "one")
    assert "mixture" not in draw_run(run)
    rows = (run.path / "rounds.jsonl").read_text().splitlines()
    for place, own in ((0, 1.0), (1, 0.75)):
        row = json.loads(rows[place])
        weights = [[own, 1 - own], [0.0, 1.0]]
        row["mixture"] = {"clients": [0, 1], "weights": weights}
        row["numbers"] = {"self_weight": (own + 1) / 2, "partners": 1.4}
        rows[place] = json.dumps(row)
    (run.path / "rounds.jsonl").write_text("\n".join(rows) + "\n")
    found = Run.load(run.path)
    image = draw_run(found)["mixture"].axes[0].images[0].get_array()
    assert image.tolist() == [[0.75, 0.25], [0.0, 1.0]]
    words = Page(write_report([found], None)).words()
    assert "mean weight of 0.875, and 1.4 clients share" in words


def test_pictures_of_graphs_say_so() -> None:
    figure = plots.label_heat_map(np.array(COUNTS), CLASSES, items="graphs")
    assert figure.axes[1].get_ylabel() == "graphs"
    bars = plots.client_bars([0], [0.5], 0.5, items="graphs")
    legend = bars.axes[0].get_legend().get_texts()[0].get_text()
    assert legend == "all clients' test graphs: 50.0 %"


def test_a_heat_map_of_no_nodes_at_all_is_drawn(tmp_path: Path) -> None:
    figure = plots.label_heat_map(np.zeros((2, 3), dtype=int), CLASSES)
    figure.savefig(tmp_path / "heat.png")
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


def test_many_clients_and_classes_do_not_crowd_the_axes() -> None:
    figure = plots.label_heat_map(
        np.ones((1000, 172), dtype=int), [f"class {c}" for c in range(172)]
    )
    panel = figure.axes[0]
    assert len(panel.texts) == 0
    assert len(panel.get_xticks()) <= 25
    assert len(panel.get_yticks()) <= 60
    few = plots.client_bars(range(50), [0.5] * 50, 0.5).axes[0]
    assert [tick.get_text() for tick in few.get_xticklabels()] == [
        str(k) for k in range(50)
    ]


@pytest.mark.pictures
def test_names_that_no_font_has_are_drawn_without_a_warning() -> None:
    figure = plots.label_heat_map(np.array(COUNTS), ["日本", "\ue000", "ok"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plots.to_svg(figure).startswith(b"<?xml")


@pytest.mark.pictures
def test_the_same_figure_is_the_same_file() -> None:
    first, second = (plots.to_svg(plots.convergence([curve("a")])) for _ in range(2))
    assert first == second


def test_client_bars_mark_who_has_no_test_nodes() -> None:
    figure = plots.client_bars([0, 3, 7], [0.25, math.nan, 1.0], 0.4)
    panel = figure.axes[0]
    assert [bar.get_height() for bar in panel.patches] == [0.25, 0.0, 1.0]
    assert texts(figure)[:6] == ["25", "none", "100", "0", "3", "7"]
    (line,) = panel.lines
    assert list(line.get_ydata()) == [0.4, 0.4]
    assert "40.0 %" in panel.get_legend().get_texts()[0].get_text()


def test_stacked_bars_end_at_their_totals() -> None:
    parts = {"weights": [3.0, 1.0], "_metrics": [0.5, 0.25]}
    figure = plots.stacked_bars(["up", "down"], parts, "MB")
    panel = figure.axes[0]
    ends = [bar.get_x() + bar.get_width() for bar in panel.patches]
    assert ends == [3.0, 1.0, 3.5, 1.25]
    assert texts(figure)[:2] == ["3.5 MB", "1.25 MB"]
    legend = [text.get_text().strip() for text in figure.legends[0].get_texts()]
    assert legend == ["weights", "_metrics"]


def test_the_entries_of_a_legend_read_by_rows() -> None:
    parts = {f"part {number}": [1.0] for number in range(8)}
    figure = plots.stacked_bars(["all"], parts, "s")
    figure.draw_without_rendering()
    boxes = [
        (entry.get_window_extent(), entry.get_text())
        for entry in figure.legends[0].get_texts()
    ]
    assert len({round(box.y0) for box, _ in boxes}) == 2
    shown = sorted(boxes, key=lambda entry: (-round(entry[0].y0), entry[0].x0))
    assert [name for _, name in shown] == list(parts)


def curve(label: str) -> plots.Curve:
    return plots.Curve(
        label, [2, 4], [0.1, 0.3], [0.2, math.nan], [1, 2, 4], [3, 2, 1], 4
    )


def test_one_run_has_validation_and_test_in_one_panel() -> None:
    accuracy, loss = plots.convergence([curve("")]).axes
    assert [list(line.get_ydata())[:1] for line in accuracy.lines[:2]] == [[0.1], [0.2]]
    assert list(accuracy.lines[2].get_xdata()) == [4, 4]
    assert list(loss.lines[0].get_ydata()) == [3, 2, 1]
    assert accuracy.get_xlabel() == loss.get_xlabel() == "round"


@pytest.mark.pictures
def test_several_runs_have_a_panel_for_each_quantity() -> None:
    figure = plots.convergence([curve("a"), curve("$\\frac{$")])
    firsts = [[line.get_ydata()[0] for line in panel.lines] for panel in figure.axes]
    assert firsts == [[0.1, 0.1], [0.2, 0.2], [3, 3]]
    colours = {line.get_color() for line in figure.axes[0].lines}
    assert len(colours) == 2
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a", "$\\frac{$"]
    assert plots.to_svg(figure)


def test_without_validation_nodes_no_empty_axis_is_drawn() -> None:
    few = replace(curve("a"), val=[math.nan, math.nan])
    alone = plots.convergence([few]).axes[0]
    assert [list(line.get_ydata())[:1] for line in alone.lines[:1]] == [[0.2]]
    names = [text.get_text().strip() for text in alone.get_legend().get_texts()]
    assert names == ["test", "selected: round 4"]
    first, *_ = plots.convergence([few, few]).axes
    assert list(first.get_yticks()) == []
    assert first.texts[0].get_text() == "no validation data"
    assert not plots.convergence([few, curve("b")]).axes[0].texts


@pytest.mark.thorough
@pytest.mark.pictures
@pytest.mark.parametrize("missing", ["val", "test", "loss"])
def test_a_line_with_markers_but_without_numbers_is_drawn(missing: str) -> None:
    look = plots.variant_look(0, 1)
    assert "markevery" in look
    full = curve("a")
    nothing = [math.nan] * len(getattr(full, missing))
    empty = replace(full, look=look, **{missing: nothing})
    assert plots.to_svg(plots.convergence([empty, curve("b")]))
    column = replace(empty, columns={"unseen": [math.nan, math.nan]})
    assert plots.to_svg(plots.column_curves([column, column]))
    far = replace(empty, distance_rounds=[1, 2], distance=[math.nan, math.nan])
    assert plots.to_svg(plots.by_round([far]))


def test_the_columns_of_one_run_share_a_panel_and_are_told_apart() -> None:
    columns = {"test": [0.1, 0.3], "missing": [0.0, 0.0]}
    (panel,) = plots.column_curves([replace(curve(""), columns=columns)]).axes
    drawn = [list(line.get_ydata()) for line in panel.lines[:2]]
    assert drawn == [[0.1, 0.3], [0.0, 0.0]]
    assert len({line.get_linestyle() for line in panel.lines[:2]}) == 2
    assert list(panel.lines[2].get_xdata()) == [4, 4]


def test_several_runs_have_a_panel_for_each_column() -> None:
    one = replace(curve("a"), columns={"test": [0.1, 0.3], "unseen": [0.2, 0.4]})
    other = replace(curve("b"), columns={"test": [0.5, 0.6]})
    figure = plots.column_curves([one, other])
    assert [panel.get_title(loc="left") for panel in figure.axes] == ["test", "unseen"]
    values = [list(line.get_ydata()) for line in figure.axes[1].lines]
    assert values[0] == [0.2, 0.4]
    assert all(math.isnan(value) for value in values[1])  # the line keeps its colour
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a", "b"]


def test_a_column_without_a_number_is_named_as_empty() -> None:
    empty = {"seen graph": [0.1, 0.3], "missing": [math.nan, math.nan]}
    one = replace(curve("a"), columns=empty)
    alone = plots.column_curves([one])
    assert "missing (no nodes)" in [t.get_text() for t in alone.legends[0].get_texts()]
    figure = plots.column_curves([one, replace(one, label="b")])
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles == ["seen graph", "missing (no nodes)"]


def test_the_spread_of_clients_has_a_row_of_dots_per_run() -> None:
    figure = plots.client_spread(
        ["a", "b"], [[0.5, math.nan, 0.7], []], [0.6, None], plots.PALETTE, ["", ""]
    )
    panel = figure.axes[0]
    dots = np.ma.filled(panel.collections[0].get_offsets(), math.nan)
    assert dots[:, 0].tolist()[::2] == [0.5, 0.7]
    assert len(panel.collections[1].get_offsets()) == 0
    assert list(panel.lines[0].get_xdata()) == [0.6, 0.6]
    assert texts(figure)[-2:] == ["a", "b"]


@pytest.mark.pictures
def test_drawing_leaves_matplotlib_as_it_was() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    plots.to_svg(plots.convergence([curve("")]))
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, (1, "B")), (999, (1, "B")), (1e3, (1e3, "kB")), (5e12, (1e12, "TB"))],
)
def test_units_of_bytes_fit_the_largest(
    number: float, expected: tuple[float, str]
) -> None:
    assert plots.scale_bytes(number) == expected


# ------------------------------------------------------------- settings at several values
def test_a_setting_tried_at_several_values_has_a_table(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"{lr}-{seed}", seed=seed, val=(score,), settings={"lr": lr})
        for lr, seed, score in ((1.0, 0, 0.8), (1.0, 1, 0.72), (0.5, 0, 0.4))
    ]
    runs.append(make(tmp_path / "bad", status="failed", settings={"lr": 2.0}))
    runs.append(make(tmp_path / "alone", method="local", settings={"lr": 3.0}))
    words = Page(write_report(runs, None)).words()
    assert "By lr" in words
    # pooled test accuracy is 5/8 of the first client's, macro-F1 a half of it
    assert "runs 0.5 1 fedavg 25.0 / 20.0 47.5 ± 3.5 / 38.0 ± 2.8 Convergence" in words


def test_lines_of_a_sweep_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"{lr}-{rl}", settings={"lr": lr, "fedavg": {"rl": rl}})
        for lr in (1.0, 0.5)
        for rl in (True, False)
    ]
    (sweep,) = find_sweeps(runs)
    assert sweep.key == "lr"
    assert sweep.values == [0.5, 1.0]
    assert list(sweep.lines) == ["fedavg · rl=true", "fedavg · rl=false"]
    assert find_sweeps(runs[:2]) == []  # one value per setting


@pytest.mark.thorough
@pytest.mark.pictures
def test_the_pictures_of_a_report_can_be_had_as_files(tmp_path: Path) -> None:
    runs = [make(tmp_path / f"{lr}", settings={"lr": lr}) for lr in (1.0, 0.5)]
    folder = tmp_path / "new" / "pictures"
    write_report(runs, tmp_path, pictures=folder)
    assert {path.stem for path in folder.glob("*.svg")} >= {"setting-lr", "convergence"}
    for path in folder.iterdir():
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    taken = tmp_path / "file"
    taken.write_text("")
    page = tmp_path / "comparison.html"
    page.write_text("before")
    with pytest.raises(RunError, match=r"Cannot write .*file: File exists\. .*choose"):
        write_report(runs, tmp_path, pictures=taken)
    assert page.read_text() == "before"


def test_scores_by_value_have_a_point_for_each_and_leave_out_what_is_missing() -> None:
    nan = math.nan
    panels = {"Test accuracy": [("a", [0.5, nan, 0.6], [0.1, 0.0, 0.0])]}
    figure = plots.by_value([2, 5, 20], panels, xlabel="k")
    (panel,) = figure.axes
    assert [t.get_text() for t in panel.get_xticklabels()] == ["2", "5", "20"]
    drawn = np.asarray(panel.lines[0].get_ydata(), dtype=float)
    np.testing.assert_array_equal(drawn, [0.5, nan, 0.6])
    assert panel.get_xlabel() == "k"


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, "are only evaluated"), ({"setting": "few-shot"}, "do not participate")],
)
def test_clients_that_train_nothing_are_counted(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    page = Page(write_report([make(tmp_path / "run", settings=settings)], None))
    assert f"3 clients, 1 of which {said} · seed" in page.words()


def test_settings_of_the_synthetic_graph_are_shown_only_for_it(tmp_path: Path) -> None:
    for dataset, shows in (("cora", False), ("synthetic", True)):
        settings = {"dataset": dataset, "synthetic": {"nodes": 900}}
        found = _read_settings(make(tmp_path / dataset, settings=settings))
        assert ("synthetic.nodes" in found) == shows
        assert "lr" in found
    owned = make(tmp_path / "own", settings={**settings, "owners": "trees"})
    assert "synthetic.nodes" not in _read_settings(owned)


def test_with_few_shots_methods_are_marked_by_the_mean_of_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"setting": "few-shot"}
    runs = [
        make(
            tmp_path / f"{method}{seed}",
            method=method,
            seed=seed,
            settings=few,
            val=val,
        )
        for method, val in (("fedavg", (0.5, 0.6)), ("local", (0.3, 0.4)))
        for seed in (0, 1)
    ]
    words = Page(write_report(runs, tmp_path / "r.html", against="local")).words()
    for row in over_seeds(runs, "local"):
        assert row["score"] == "mean_accuracy"
        means = [run.best["test"]["mean_accuracy"] for run in row["runs"] if run.best]
        assert row["main"].tolist() == means
    assert "mean of clients" in words
    plain = [make(tmp_path / f"p{seed}", seed=seed) for seed in (0, 1)]
    assert "mean of clients" not in Page(write_report(plain, None)).words()


# -------------------------------------------------------------- the look of several runs
def test_methods_get_their_colours_in_the_order_of_the_page() -> None:
    names = sorted(METHODS)
    looks = looks_of(names)
    shown = {(look["color"], look["linestyle"]) for look in looks}
    assert len(shown) == len(names)
    # whatever is installed: eight colours, then dashes
    few = looks_of(["local", "fedproto", "fedavg", "fedpg", "my-method"])
    assert [look["color"] for look in few] == list(plots.PALETTE[:5])
    assert looks_of(["my-method", "local"]) == looks_of(["a", "b"])
    assert looks_of(["fedpg"], ["local", "fedpg"]) == looks_of(["local", "fedpg"])[1:]


def test_several_datasets_have_panels_in_which_a_method_has_one_look(
    tmp_path: Path,
) -> None:
    runs = [
        make(tmp_path / f"{method}-{data}{seed}", method=method, seed=seed)
        for data in ("cora", "citeseer")
        for method in ("local", "fedpg")
        for seed in (0, 1)
    ]
    for number, run in enumerate(runs):
        data = "cora" if number < 4 else "citeseer"
        runs[number] = replace(run, summary={**run.summary, "dataset": data})
    lines = lines_of(runs, [""] * 8)
    assert [line.label for line in lines] == [
        f"{method} on {data}"
        for data in ("cora", "citeseer")
        for method in ("local", "fedpg")
    ]
    assert [line.name for line in lines] == ["local", "fedpg"] * 2
    assert lines[0].look == lines[2].look != lines[1].look
    figures = report.comparison_figures(runs)
    titles = [panel.get_title(loc="left") for panel in figures["cost"].axes]
    assert titles == [
        f"Test accuracy by {cost}, {data}"
        for data in ("cora", "citeseer")
        for cost in ("bytes", "seconds")
    ]
    expected = [look["color"] for look in looks_of(["local", "fedpg"])]
    for name in ("convergence", "cost"):
        for panel in figures[name].axes:
            assert [line.get_color() for line in panel.lines] == expected
        (legend,) = figures[name].legends
        assert [text.get_text() for text in legend.get_texts()] == ["local", "fedpg"]
    dots = figures["clients"].axes
    assert [panel.get_title(loc="left") for panel in dots] == ["cora", "citeseer"]


def test_lines_of_one_method_differ_by_marker_or_by_colour() -> None:
    both = looks_of(["fedpg", "fedavg", "fedpg"])
    first, other, second = ((look["color"], look["linestyle"]) for look in both)
    assert first == second != other
    assert both[0].get("marker") != both[2].get("marker")
    alone = looks_of(["fedpg"] * 3)
    assert len({look["color"] for look in alone}) == 3


def test_all_figures_of_a_page_share_the_looks(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"{method}{seed}", method=method, seed=seed)
        for method in ("local", "fedpg")
        for seed in (0, 1)
    ]
    figures = report.comparison_figures(runs)
    expected = [look["color"] for look in looks_of(["local", "fedpg"])]
    for name in ("convergence", "cost"):
        for panel in figures[name].axes:
            assert [line.get_color() for line in panel.lines] == expected
            bands = [to_hex(band.get_facecolor()[0][:3]) for band in panel.collections]
            assert bands == expected
    dots = figures["clients"].axes[0].collections
    assert [to_hex(dot.get_facecolor()[0][:3]) for dot in dots] == expected


def test_shortened_names_stay_different() -> None:
    names = [f"fedpg · server-epochs=10 · personalized=true · mu=0.{k}" for k in (1, 2)]
    names += ["short", "a" * 40 + "x" + "b" * 40, "a" * 40 + "y" + "b" * 40, "short"]
    shown = plots.distinct(names)
    assert len(set(shown)) == 5
    assert shown[2] == shown[5]
    assert max(map(len, shown)) <= 34
    by_end = plots.distinct(names[:2])
    assert by_end[0].endswith("mu=0.1")
    assert plots.distinct(["a", "b"]) == ["a", "b"]
    assert plots.distinct([]) == []


def test_accuracy_is_drawn_by_bytes_and_by_seconds() -> None:
    one = replace(curve("a"), bytes=[1e6, 2e6], seconds=[1.0, 2.0])
    other = replace(curve("b"), bytes=[3e7, 6e7], seconds=[2.0, 4.0])
    by_bytes, by_seconds = plots.by_cost([one, other]).axes
    assert by_bytes.get_xlabel() == "MB sent by all"
    assert [list(line.get_xdata()) for line in by_bytes.lines] == [[1, 2], [30, 60]]
    assert [list(line.get_xdata()) for line in by_seconds.lines] == [[1, 2], [2, 4]]
    assert by_bytes.lines[0].get_ydata()[0] == 0.2  # test accuracy
    assert by_bytes.get_xscale() == "log"  # 60 MB are more than 20 times 2 MB
    assert by_seconds.get_xscale() == "linear"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 1}, True),
        ({"settings": {"lr": 1.0}}, True),
        ({"method": "fedprox"}, False),
        ({"settings": {"fedavg": {"mu": 2.0}}}, False),
        ({"settings": {"setting": "graph"}}, False),
    ],
)
def test_losses_are_drawn_where_runs_have_one_objective(
    tmp_path: Path, change: dict[str, Any], expected: bool
) -> None:
    runs = [make(tmp_path / "a"), make(tmp_path / "b", **change)]
    assert has_one_objective(runs) is expected
    panels = report.comparison_figures(runs)["convergence"].axes
    titles = [panel.get_title(loc="left") for panel in panels]
    assert ("Training loss" in titles) is expected


def test_the_best_method_and_those_tied_with_it_are_highlighted(
    tmp_path: Path,
) -> None:
    jitter = (0.0, 0.002, 0.004, 0.001, 0.003)
    scores = {
        "fedprox": [0.8 + x for x in jitter],
        "fedavg": [0.799 + x for x in reversed(jitter)],  # 0.1 points worse
        "moon": [0.7 + x for x in jitter],
        "local": [0.2, 1.0, 0.9, 0.9, 0.99],  # 0.3 points worse, but widely spread
    }
    runs = [
        make(tmp_path / f"{method}-{seed}", method=method, seed=seed, val=(value,))
        for method, values in scores.items()
        for seed, value in enumerate(values)
    ]
    path = write_report(runs, None)
    marked = re.findall(r'<tr class="best"><td class="text">(\S+) on', path.read_text())
    assert marked == ["fedprox", "fedavg"]
    words = Page(path).words()
    assert re.search(r"fedavg on cora 3 0, 1, 2, 3, 4 \S+ ± \S+ \S+ ± \S+ ≈", words)
    assert "a difference of one point or more can be excluded" in words
    assert len(re.findall(r'class="n main"', path.read_text())) == 1
    few = [run for run in runs if run.summary["seed"] < 3]
    path = write_report(few, None)
    assert path.read_text().count('<tr class="best">') == 1
    assert "can be excluded" not in Page(path).words()


def test_only_rows_of_the_same_data_with_all_their_scores_are_compared(
    tmp_path: Path,
) -> None:
    partitions = [
        {"method": "fedavg", "partition": rule, "score": score}
        for rule, score in (("metis", 0.8), ("dirichlet", 0.9))
    ]
    runs = [
        make(
            tmp_path / f"{place}-{method}-{seed}",
            method=method,
            seed=seed,
            val=(one["score"] - gap,),
            settings={"partition": one["partition"]},
        )
        for place, one in enumerate(partitions)
        for method, gap in (("fedavg", 0.0), ("local", 0.3))
        for seed in range(5)
    ]
    assert [row["rank"] for row in over_seeds(runs)] == ["best", "", "best", ""]
    best = runs[0]
    lost = {**best.summary["best"]["test"], "accuracy": None, "macro_f1": 0.5}
    summary = {**best.summary, "best": {**best.summary["best"], "test": lost}}
    runs[0] = replace(best, summary=summary)
    rows = over_seeds(runs)  # the run without its score is no draw of the row
    assert [row["rank"] for row in rows] == ["", "", "best", ""]
    assert [row["has_other_draws"] for row in rows] == [True, True, False, False]


def test_rows_of_other_draws_have_no_best(tmp_path: Path) -> None:
    # fedavg is better in both shared draws, local has the higher mean over its own draws
    scores = {"fedavg": [0.8, 0.82, 0.5, 0.5], "local": [0.7, 0.75]}
    runs = [
        make(tmp_path / f"{method}-{seed}", method=method, seed=seed, val=(value,))
        for method, values in scores.items()
        for seed, value in enumerate(values)
    ]
    path = write_report(runs, None)
    assert '<tr class="best">' not in path.read_text()
    words = Page(path).words()
    assert "Bold: the highest mean" not in words
    assert "No row is marked best among rows on the same data" in words
    shared = [run for run in runs if run.summary["seed"] < 2]
    path = write_report(shared, None)
    marked = re.findall(r'<tr class="best"><td class="text">(\S+) on', path.read_text())
    assert marked == ["fedavg"]
    assert "No row is marked best" not in Page(path).words()


def test_a_page_of_many_runs_folds_what_is_about_single_runs(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"{method}-{lr}-{seed}", method=method, seed=seed, settings=lrs)
        for method in ("fedavg", "fedprox", "local")
        for lr in (0.1, 0.2, 0.4)
        for seed, lrs in (
            (s, {"lr": lr, "run-dir": f"{lr}-{s}", method: {"own": True}})
            for s in range(3)
        )
    ]
    labels = [line.label for line in lines_of(runs, [""] * 27)]
    assert len(set(labels)) == 9
    assert "fedavg · lr=0.1" in labels
    path = write_report(runs, None)
    words = Page(path).words()
    assert "Table of the 27 runs" in words
    assert "Commands of the 27 runs" in words
    assert path.read_text().count("<details>") == 3  # the third: shared settings
    # one row for each run, not a column
    assert "Settings that differ between the runs. method seed lr fedavg" in words
    assert "run-dir" not in words
    assert "local.own true" in words  # among the settings that are shared


@pytest.mark.thorough
@pytest.mark.pictures
def test_a_picture_has_the_colours_of_a_dark_page(tmp_path: Path) -> None:
    page = Page(write_report([make(tmp_path / "one")], None))
    style = "@media (prefers-color-scheme: dark)"
    for link in page.links:
        assert style in svg(link)
    dark = svg(page.links[0]).split(style)[1].split("</style>")[0]
    for light in ("#ffffff", "#1d2733"):  # paper and ink, which the figure uses
        assert f'[style*="fill: {light}"]' in dark
        assert f"fill: {light}" in svg(page.links[0]).split("</style>", 2)[2]


# -------------------------------------------------------------- runs that AUROC selects
RANKED = {"metric": "auroc", "auroc": 0.875, "columns": ("unseen",)}


def titles_of(figure: Figure) -> list[str]:
    return [panel.get_title(loc="left") for panel in figure.axes]


def test_figures_of_a_run_show_the_score_that_selects(tmp_path: Path) -> None:
    drawn = draw_run(make(tmp_path / "one", **RANKED))
    assert titles_of(drawn["convergence"]) == ["AUROC", "Training loss"]
    for line in drawn["convergence"].axes[0].lines[:2]:
        assert list(line.get_ydata()) == [0.875] * 3
    assert set(titles_of(drawn["cost"])) == {
        "Test AUROC by bytes",
        "Test AUROC by seconds",
    }
    assert titles_of(drawn["columns-transductive"]) == ["AUROC"]
    bars = drawn["clients"].axes[0]
    assert bars.get_ylabel() == "test AUROC"
    assert [bar.get_height() for bar in bars.patches] == [0.875, 0, 0]
    assert "87.5 %" in bars.get_legend().get_texts()[0].get_text()


def test_figures_of_several_runs_show_the_score_that_selects(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"{method}{lr}", method=method, settings={"lr": lr}, **RANKED)
        for method in ("local", "fedpg")
        for lr in (0.1, 0.2)
    ]
    drawn = report.comparison_figures(runs)
    assert titles_of(drawn["convergence"])[:2] == ["Validation AUROC", "Test AUROC"]
    assert drawn["clients"].axes[0].get_xlabel() == "test AUROC"
    assert titles_of(drawn["setting-lr"]) == ["Test AUROC", "Test macro-F1"]
    for panel in (drawn["convergence"].axes[1], drawn["cost"].axes[0]):
        assert [line.get_ydata()[0] for line in panel.lines] == [0.875] * 4
    other = make(tmp_path / "accuracy")  # of another kind: accuracy is common
    mixed = report.comparison_figures([runs[0], other])["convergence"]
    assert titles_of(mixed)[:2] == ["Validation accuracy", "Test accuracy"]


def test_the_page_names_and_highlights_the_score_that_selects(tmp_path: Path) -> None:
    words = Page(write_report([make(tmp_path / "one", **RANKED)], None)).words()
    assert "87.5 % test AUROC, round 3" in words
    runs = [
        make(
            tmp_path / f"{method}{seed}",
            method=method,
            seed=seed,
            **{**RANKED, "auroc": auroc},
        )
        for method, auroc in (("local", 0.75), ("fedpg", 0.875))
        for seed in range(2)
    ]
    path = write_report(runs, None, against="local")
    words = Page(path).words()
    assert "in the round with the best validation AUROC." in words
    assert "a test AUROC significantly above that of local" in words
    assert re.findall(r'class="n main">([^<]*)<', path.read_text()) == ["87.5 ± 0.0"]


# ------------------------------------------------------------------------------- phones
@pytest.mark.thorough
@pytest.mark.pictures
def test_each_figure_has_a_narrow_version_for_phones(tmp_path: Path) -> None:
    settings = {"setting": "open-set"}
    run = make(tmp_path / "one", columns=("unseen",), settings=settings)
    page = Page(write_report([run]))
    assert len(page.narrow) == len(page.links) > 3
    sizes = [
        [
            float(ElementTree.fromstring(svg(link)).attrib["width"][:-2])
            for link in links
        ]
        for links in (page.links, page.narrow)
    ]
    assert {round(size, 1) for size in sizes[0]} == {691.2}  # 9.6 inches in points
    assert {round(size, 1) for size in sizes[1]} == {266.4}


def test_a_narrow_figure_has_its_panels_below_each_other() -> None:
    long = [replace(curve(f"fedprox · mu={k} · a long name"), look={}) for k in (1, 2)]
    with plots.narrow_figures():
        figure = plots.convergence(long)
        alone = plots.convergence([curve("")])
    figure.draw_without_rendering()
    tops = [panel.get_position().y0 for panel in figure.axes]
    assert tops == sorted(tops, reverse=True)
    assert len({round(panel.get_position().x0, 3) for panel in figure.axes}) == 1
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert alone.axes[0].get_ylabel() == "accuracy"
    wide = plots.convergence(long)
    wide.draw_without_rendering()
    assert len({round(panel.get_position().y0, 3) for panel in wide.axes}) == 1


def test_the_axis_of_the_clients_scores_says_where_its_ticks_are() -> None:
    figure = client_spread(["a"], [[0.67, 0.7, 0.86]], [0.75], ["blue"], [""])
    figure.canvas.draw()
    (panel,) = figure.axes
    places = panel.get_xticks()
    texts = [label.get_text() for label in panel.get_xticklabels()]
    assert len(texts) > 3
    for place, text in zip(places, texts, strict=True):
        assert float(text.rstrip("%")) == pytest.approx(100 * place, abs=1e-6)
