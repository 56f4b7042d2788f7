"""Measure parts of methods against their direct form, and rounds of each method.

    python benchmarks/method_cost.py parts
    python benchmarks/method_cost.py rounds                      # all cases
    python benchmarks/method_cost.py rounds --cases fedlog "fedlog, scored" --turns 3

``parts`` compares both forms of a computation in one process, alternately: FedLoG's pair
layer, ADPFedGNN's mask selection, and few-shot rounds of pFedFSL and F²L
with the whole graph. ``rounds`` measures rounds in the local engine with one
thread; ``benchmarks/commits.py`` compares those of two checkouts. All numbers are CPU
seconds, of which other load on the machine changes less than of wall-clock seconds; the
fastest of all repetitions counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flower_fgl.algorithms.adpfedgnn.masks import local_mask
from flower_fgl.algorithms.fedlog import branches
from flower_fgl.client_apps.f2l import F2LNetwork
from flower_fgl.client_apps.runtime.training import TrainingSet
from flower_fgl.simulation.run import run_one

PUBMED = {"dataset": "pubmed", "setting": "closed-set", "clients": 3, "batch-size": 64,
          "local-epochs": 1, "fedlog.prompt-epochs": 1}  # fmt: skip
LOUVAIN = {"dataset": "cora", "partition": "louvain", "split": "20/40/40", "clients": 5,
           "local-epochs": 3, "model": "graphsage"}  # fmt: skip
FEW_SHOT = {"dataset": "cs", "setting": "few-shot", "shots": 3, "clients": 10,
            "model": "graphsage:linear", "hidden-channels": 128, "dropout": 0.0,
            "participation": 0.5, "local-epochs": 5, "optimizer": "sgd", "lr": 0.1,
            "optimizer-state": "reset"}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "fedlog": {"method": "fedlog", **PUBMED},
    "fedlog, scored": {"method": "fedlog", **PUBMED, "evaluate-every": 1},
    "adpfedgnn": {"method": "adpfedgnn", **LOUVAIN},
    "pfedfsl": {"method": "pfedfsl", **FEW_SHOT},
    "f2l": {"method": "f2l", **FEW_SHOT},
    "fedpano": {"method": "fedpano", **FEW_SHOT},
}
NEVER = 10_000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["parts", "rounds"])
    parser.add_argument("--cases", nargs="+", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="rounds per run")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--turns", type=int, default=2)
    return parser.parse_args()


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def fastest(
    forms: dict[str, Callable[[], object]], repetitions: int = 15
) -> list[float]:
    """Return the least CPU seconds of each form; repetitions alternate."""
    found: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repetitions):
        for name, work in forms.items():
            found[name].append(cpu_seconds(work))
    return [min(values) for values in found.values()]


def pair_layer(nodes: int, prototypes: int, *, is_training: bool) -> list[float]:
    """Time FedLoG's pair layer: once per pair, and at Chebyshev points."""
    torch.manual_seed(0)
    layer, width = branches.PairLayer(64), 64
    h = torch.nn.functional.layer_norm(torch.randn(nodes, width), (width,))
    around, others = (
        torch.randn(nodes, width) * 0.1,
        torch.randn(prototypes, width) * 0.15,
    )
    inputs = [x.requires_grad_(is_training) for x in (h, around, others)]

    def work() -> None:
        with torch.set_grad_enabled(is_training):
            out = layer(*inputs)
        if is_training:
            out.sum().backward()

    def direct() -> None:
        with mock.patch.object(branches, "POINTS", {}):
            work()

    return fastest({"direct": direct, "now": work})


def mask_selection(size: int) -> list[float]:
    """Time ADPFedGNN's selection of half of the weights: sorted, and by a partition."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).abs()

    def sorting() -> Tensor:
        mask = torch.zeros(size, dtype=torch.bool)
        mask[values.topk(size // 2).indices] = True
        return mask

    now = lambda: local_mask(values, share=0.5)  # noqa: E731
    if not torch.equal(sorting(), now()):
        raise RuntimeError("The two forms select different weights.")
    return fastest({"sorted": sorting, "now": now})


@contextmanager
def whole_graph() -> Iterator[None]:
    """Train pFedFSL and F²L on the whole graph, as before."""
    with (
        mock.patch.object(TrainingSet, "part_for", return_value=None),
        mock.patch.object(F2LNetwork, "part", None),
    ):
        yield


def cpu_of_rounds(options: argparse.Namespace, case: str) -> list[float]:
    """Return the CPU seconds of the rounds after the warm-up."""
    values = {
        "threads": 1,
        "seed": 0,
        "evaluate-every": NEVER,
        **CASES[case],
        "rounds": options.warm_up + options.rounds + 1,  # the last one is always scored
    }
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run_one(
            {**values, "output-dir": folder},
            engine="local",
            on_round=lambda row: marks.append(time.process_time()),
        )
    seconds = [after - before for before, after in pairwise(marks)]
    return seconds[-options.rounds - 1 : -1]


def parts(options: argparse.Namespace) -> Table:
    table = Table("part", "before (ms)", "now (ms)", "ratio")
    torch.set_num_threads(1)
    rows: list[tuple[str, list[float]]] = []
    for prototypes in (60, 140):
        for is_training in (True, False):
            kind = "step" if is_training else "prediction"
            name = f"FedLoG pair layer, {kind}, 64 nodes, {prototypes} prototypes"
            rows.append((name, pair_layer(64, prototypes, is_training=is_training)))
    rows.append(("ADPFedGNN mask of 183,424 weights", mask_selection(2 * 1433 * 64)))
    for case in ("pfedfsl", "f2l"):
        before, now = [], []
        for _ in range(options.turns):
            with whole_graph():
                before += cpu_of_rounds(options, case)
            now += cpu_of_rounds(options, case)
        rows.append((f"{case}, round on CS, 3 shots", [min(before), min(now)]))
    for name, (before_s, now_s) in rows:
        ratio = before_s / now_s
        table.add_row(
            name, f"{1e3 * before_s:.2f}", f"{1e3 * now_s:.2f}", f"{ratio:.2f}"
        )
    return table


def rounds(options: argparse.Namespace) -> Table:
    found: dict[str, list[float]] = {case: [] for case in options.cases or CASES}
    for _ in range(options.turns):
        for case in found:
            found[case] += cpu_of_rounds(options, case)
    table = Table("case", "CPU s/round, fastest", "median")
    for case, seconds in found.items():
        middle = sorted(seconds)[len(seconds) // 2]
        table.add_row(case, f"{min(seconds):.3f}", f"{middle:.3f}")
    return table


def main() -> None:
    options = arguments()
    tables = {"parts": parts, "rounds": rounds}
    Console(width=110).print(tables[options.what](options))


if __name__ == "__main__":
    main()
