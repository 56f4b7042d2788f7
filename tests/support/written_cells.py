"""Cells and run folders with chosen scores, written without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flower_fgl.core.metrics import AnyScores, Scores, pool
from flower_fgl.core.regression import score_numbers
from flower_fgl.lab.results import Run
from flower_fgl.lab.tables.cells import Cell, Draw
from flower_fgl.runs.summary import summarise
from flower_fgl.runs.writer import RunWriter

VERSIONS = {"python": "3.11.7", "flower-fgl": "0.1.0", "torch": "2.13.0"}
ENVIRONMENT = {
    "versions": VERSIONS,
    "commit": "a" * 40,
    "source_sha256": "b" * 64,
    "host": {"cpu": "cpu", "cores": 2, "memory_gb": 4.0, "os": "Linux"},
    "device": "cpu",
}


def make_draw(draw: int, accuracy: float, dataset: str = "cora", **others: Any) -> Draw:
    """Return the results of one run; the global model is ten points lower."""
    test = {"accuracy": accuracy, "macro_f1": accuracy / 2, "worst_accuracy": 0.25}
    scores = {"own": {"val": {"accuracy": 0.5}, "test": test}}
    if others.pop("has_global", False):
        scores["global"] = {"test": {"accuracy": accuracy - 0.1}}
    fields = {
        "seed": draw,
        "partition_seed": draw,
        "partition": f"{dataset}{draw}",
        "rounds": 3,
        "scores": scores,
        "best_round": dict.fromkeys(scores, 2),
        "bytes_up": 1000,
        "bytes_down": 3000,
        "seconds": 1.5,
    }
    return Draw(**{**fields, **others})


def make_row(
    row: str,
    accuracies: Sequence[float],
    *,
    dataset: str = "cora",
    has_global: bool = False,
    settings: dict[str, Any] | None = None,
    **fields: Any,
) -> Cell:
    """Return a cell with these accuracies in draws 0, 1, …"""
    draws = [
        make_draw(draw, value, dataset, has_global=has_global)
        for draw, value in enumerate(accuracies)
    ]
    cell = Cell(
        experiment=f"x-{dataset}",
        title="A table",
        row=row,
        method=row.partition(",")[0],
        place={"dataset": dataset, "partition": "metis", "clients": 10},
        settings={"lr": 0.01, "weight-decay": 5e-4, "model": "gcn", **(settings or {})},
        draws=draws,
        versions=VERSIONS,
        commit="a" * 40,
        source_sha256="b" * 64,
        device="cpu",
    )
    return replace(cell, **fields)


def write_run(
    folder: Path,
    accuracies: Sequence[float],
    *,
    draw: int = 0,
    status: str = "completed",
    environment: dict[str, Any] | None = None,
    scopes: Sequence[str] = ("local",),
    target: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Write a run of one round and return it.

    ``accuracies`` are those of the clients on their ten test nodes; the global model's
    are half as high. With a ``target`` of numbers they are root mean squared errors.
    """
    config = {
        "method": "fedavg",
        "dataset": "cora",
        "clients": len(accuracies),
        "seed": draw,
        "partition-seed": draw,
        "partition": "metis",
        "lr": 0.01,
        "data-dir": "/home/someone/data",
        "output-dir": "/home/someone/runs",
        **settings,
    }
    writer = RunWriter.create(
        folder,
        config=config,
        sources={},
        environment=ENVIRONMENT if environment is None else environment,
    )
    factors = {"local": 1.0, "global": 0.5}
    scores: dict[str, list[AnyScores]] = {
        scope: [Scores(10, factors[scope] * a, a / 2, a / 4) for a in accuracies]
        for scope in scopes
    }
    if target is not None:
        scores = {"local": [scores_of_error(error, target) for error in accuracies]}
    row = {
        "round": 1,
        "phase": "train",
        "status": "ok",
        "bytes": {"up": {"weights": 100}, "down": {"weights": 300}},
        "seconds": {"total": 2.0},
        "metrics": {
            scope: {"val": pool(found), "test": pool(found)}
            for scope, found in scores.items()
        },
    }
    if target is not None:
        row["metric"] = "rmse" if len(target["names"]) == 1 else "nrmse"
    writer.append_clients(
        {
            "round": 1,
            "partition_id": k,
            "metrics": {
                scope: {"test": found[k].as_dict()} for scope, found in scores.items()
            },
        }
        for k in range(len(accuracies))
    )
    writer.append_round(row)
    summary = summarise(
        [row],
        method=str(config["method"]),
        dataset=str(config["dataset"]),
        clients=len(accuracies),
        seed=draw,
        engine="local",
        partition_sha256=f"{Path(str(config['dataset'])).stem}{draw}",
        evaluate="local",
        status=status,
    )
    if target is not None:
        summary["target"] = target
    writer.write_summary(summary)
    return Run.load(folder)


def scores_of_error(error: float, target: dict[str, Any]) -> AnyScores:
    """Return scores of four items whose predictions are off by ``error`` spreads."""
    std = torch.tensor(target["scale"]["std"], dtype=torch.float64)
    values = torch.tensor([[1.0], [2.0], [3.0], [5.0]], dtype=torch.float64) * std
    mask = torch.ones(4, dtype=torch.bool)
    return score_numbers(values + error * std, values, mask, std)
