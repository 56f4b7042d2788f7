"""Coverage of conformal sets at every client, over several draws.

For each draw the graph is partitioned, split and trained anew. The table has one row for
each setting: the mean coverage over the draws of the client farthest from the target, of
those with enough calibration items; the mean over all clients; and the mean number of
classes in a set. ``local`` is each client's own model with its own threshold, ``global``
the aggregated model with a common one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from flower_fgl import simulate

LEAST = 200
"""Calibration items from which a client counts."""
PARTITIONS = ("uniform", "metis", "louvain")


def cases(dataset: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of each row."""
    for score in ("lac", "aps", "raps"):
        yield {"partition": "metis", "conformal_score": score}
    for partition in PARTITIONS:
        if partition != "metis":
            yield {"partition": partition, "conformal_score": "aps"}
    for partition in ("metis", "louvain"):
        yield {"partition": partition, "conformal_score": "aps", "setting": "inductive"}


def rows_of(run: Any, scope: str) -> list[tuple[int, int, dict[str, float]]]:
    """Return client, calibration items and test scores, of the best validation round."""
    sizes = {
        row["partition_id"]: row["num_val"] for row in run.clients if "num_val" in row
    }
    chosen = run.best if scope == "local" else run.summary["calibrated"]
    return [
        (row["partition_id"], sizes[row["partition_id"]], row["metrics"][scope]["test"])
        for row in run.clients
        if row["round"] == chosen["round"] and row.get("metrics", {}).get(scope)
    ]


def show_reuse(draws: int) -> None:
    """Print what it costs that the validation nodes also choose a client's round."""
    differences, sizes = [], []
    for draw in range(draws):
        with tempfile.TemporaryDirectory() as folder:
            run = simulate(
                "fedavg", seed=draw, partition_seed=draw, run_dir=folder + "/run",
                clients=5, rounds=40, calibration="owner", conformal_score="lac",
                checkpoint_every=0, split="40/10/50", synthetic={"nodes": 6000},
            )  # fmt: skip
        rounds: dict[int, list[tuple[float, int, float]]] = defaultdict(list)
        for row in run.clients:
            if scores := (row.get("metrics") or {}).get("local"):
                val = scores["val"]
                sizes.append(val["num_nodes"])
                one = val["accuracy"], row["round"], scores["test"]["coverage"]
                rounds[row["partition_id"]].append(one)
        for each in rounds.values():
            later = [covered for _, number, covered in each if number > 5]
            differences.append(max(each)[2] - np.mean(later))
    error = np.std(differences) / len(differences) ** 0.5
    print(
        f"{min(sizes)} to {max(sizes)} validation nodes: coverage in the best round minus "
        f"that in all rounds: {np.mean(differences):+.4f}, standard error {error:.4f}"
    )


def main() -> None:
    """Run all settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument(
        "--nodes", type=int, default=6000, help="of the synthetic graph"
    )
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--split", default="40/30/30")
    parser.add_argument("--reuse", action="store_true", help="only the cost of reuse")
    arguments = parser.parse_args()
    if arguments.reuse:
        show_reuse(arguments.draws)
        return
    more: dict[str, Any] = {"dataset": arguments.dataset, "split": arguments.split}
    if arguments.dataset == "synthetic":
        more["synthetic"] = {"nodes": arguments.nodes}
    print(
        "| partition | setting | score | model | clients | farthest | mean | in set |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for case in cases(arguments.dataset):
        for calibration, scope in (("owner", "local"), ("shared", "global")):
            found: dict[int, list[float]] = defaultdict(list)
            sizes: list[float] = []
            for draw in range(arguments.draws):
                with tempfile.TemporaryDirectory() as folder:
                    run = simulate(
                        "fedavg", seed=draw, partition_seed=draw, run_dir=folder + "/run",
                        clients=arguments.clients, rounds=arguments.rounds,
                        coverage=arguments.coverage, calibration=calibration,
                        checkpoint_every=0, **more, **case,
                    )  # fmt: skip
                    classes = len(run.summary["class_names"])
                    for client, size, scores in rows_of(run, scope):
                        if size >= LEAST:
                            found[client].append(scores["coverage"])
                            sizes.append(scores["set_share"] * classes)
            means = [float(np.mean(each)) for each in found.values()]
            farthest = max(means, key=lambda value: abs(value - arguments.coverage))
            print(
                f"| {case['partition']} | {case.get('setting', 'transductive')} | "
                f"{case['conformal_score']} | {scope} | {len(means)} | {farthest:.3f} | "
                f"{np.mean(means):.3f} | {np.mean(sizes):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
