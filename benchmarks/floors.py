"""Measure what an owner's floors cost: accuracy, or rounds.

    python benchmarks/floors.py scores --draws 10
    python benchmarks/floors.py roster --draws 3
    python benchmarks/floors.py fedsage+ --draws 3

========  ==============================================================================
part      what is compared, on Cora with 10 clients
========  ==============================================================================
scores    the test accuracy of the round that exact scores select, and of the round that
          ``scores = "rounded"`` selects; both from the scores of one run of FedAvg
roster    rounds with a sum, and test accuracy, with and without ``fixed-roster``, if a
          client fails in 1 % of its rounds
fedsage+  test accuracy of FedSage+ with ``min-class-count`` 1 and 5, and ``peers`` = 1
========  ==============================================================================

Draw i has the seeds i of the run and of the partition.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flower_fgl import Run, simulate
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.core.metrics import Scores, pool
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import parse_config
from flower_fgl.simulation.local import run_config_of
from tests.support.owners import run_owners

CLIENTS = 10
FAILS = 0.01
"""Share of the rounds in which a client fails."""


def cora(method: str, draw: int, folder: Path, **settings: Any) -> Run:
    """Run a method on Cora."""
    return simulate(
        method, dataset="cora", clients=CLIENTS, seed=draw, partition_seed=draw,
        output_dir=str(folder), **settings,
    )  # fmt: skip


def test_accuracy(run: Run) -> float:
    """Return the test accuracy of the selected round, in percent."""
    assert run.best is not None
    return 100 * float(run.best["test"]["accuracy"])


def selected(run: Run, convert: Callable[[float], float]) -> tuple[int, float]:
    """Return the selected round and its exact test accuracy, in percent.

    Parameters
    ----------
    run : Run
        Run with the scores of all clients in all rounds.
    convert : callable
        Changes each client's validation accuracy before the selection.
    """
    found: dict[int, dict[str, list[Scores]]] = defaultdict(lambda: defaultdict(list))
    for row in run.clients:
        for column, values in row.get("metrics", {}).get("local", {}).items():
            entry = Scores(**values)
            if column == "val":
                entry = replace(entry, accuracy=convert(entry.accuracy))
            found[row["round"]][column].append(entry)
    share = {
        number: pool(columns["val"])["accuracy"] for number, columns in found.items()
    }
    best = max(share, key=lambda number: (share[number], number))  # the last of equals
    return best, 100 * pool(found[best]["test"])["accuracy"]


def scores(draw: int, folder: Path) -> dict[str, float]:
    """Select a round by exact and by rounded scores."""
    run = cora("fedavg", draw, folder)
    exact, accuracy = selected(run, float)
    assert run.best is not None
    assert exact == run.best["round"], (exact, run.best)
    other, rounded = selected(run, lambda value: round(value, 2))
    return {"exact": accuracy, "rounded": rounded, "another round": exact != other}


def roster(draw: int, folder: Path) -> dict[str, float]:
    """Sum with clients that fail, with and without ``fixed-roster``."""
    values = run_config_of(
        method="fedavg", dataset="cora", clients=CLIENTS, seed=draw,
        settings={"partition_seed": draw},
    )  # fmt: skip
    store = open_store(parse_config(values), CLIENTS)
    for pid in range(CLIENTS):
        save_client_graph(folder / f"{pid}.npz", store.load(pid))
    original = FedAvgClientApp.fit
    out: dict[str, float] = {}

    def fit(app: Any, client: Any, server_round: int, download: Any) -> Any:
        if (
            random.Random(f"{draw} {client.partition_id} {server_round}").random()
            < FAILS
        ):
            raise RuntimeError("fails")
        return original(app, client, server_round, download)

    for name, floor in (("any", {}), ("fixed", {"fixed-roster": True})):
        home: dict[str, Any] = {
            "state-dir": str(folder / name),
            "secure-aggregation": True,
            **floor,
        }
        nodes: list[dict[str, Any]] = [
            {"graph": str(folder / f"{pid}.npz"), "partition-id": pid,
             "num-partitions": CLIENTS, **home}
            for pid in range(CLIENTS)
        ]  # fmt: skip
        with mock.patch.object(FedAvgClientApp, "fit", fit):
            run = run_owners(
                nodes, folder / f"run-{name}", method="fedavg", rounds=100,
                hidden_channels=64, secure_aggregation=True,
            )  # fmt: skip
        lost = [row["round"] for row in run.rounds if row["status"] != "ok"]
        out |= {f"lost rounds, {name}": len(lost), name: test_accuracy(run)}
    return out


def fedsage(draw: int, folder: Path) -> dict[str, float]:
    """Judge by means of single nodes and of groups; one judge for each generator."""
    few: dict[str, Any] = {"fedsage+": {"peers": 1}}
    return {
        f"min-class-count {least}": test_accuracy(
            cora("fedsage+", draw, folder, min_class_count=least, **few)
        )
        for least in (1, 5)
    }


PARTS = {"scores": scores, "roster": roster, "fedsage+": fedsage}


def main() -> None:
    """Print the values of every draw, and their means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--draws", type=int, default=10)
    given = parser.parse_args()
    rows = []
    for draw in range(given.draws):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(PARTS[given.part](draw, Path(folder)))
        print(
            draw, {key: round(value, 2) for key, value in rows[-1].items()}, flush=True
        )
    for key in rows[0]:
        values = [float(row[key]) for row in rows]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"{key}: {statistics.fmean(values):.2f} ± {spread:.2f}")


if __name__ == "__main__":
    main()
