"""Coverage of conformal sets at every client, over several draws.

For each draw the graph is partitioned, split and trained anew. The table has one row for
each setting: the mean coverage over the draws of the client farthest from the target, of
those with enough calibration items in every draw; how far it may lie from the target by
chance (95 %), if all items are exchangeable; the mean over all clients; and the mean number
of classes in a set, or the width of intervals. ``local`` is each client's own model with
its own threshold, ``global`` the aggregated model with a common one.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flower_fgl import simulate

LEAST = 200
"""Calibration items from which a client counts."""
PARTITIONS = ("uniform", "metis", "louvain")
SCORES = ("lac", "aps", "raps", "daps")
HALVED = ("daps", "scaled")
"""Scores of which half of the items choose something else than the threshold."""


def cases(scores: list[str], *, has_numbers: bool) -> Iterator[dict[str, Any]]:
    """Yield the settings of each row."""
    if has_numbers:
        yield from ({}, {"conformal_score": "scaled"})
        return
    for score in scores:
        yield {"partition": "metis", "conformal_score": score}
    for score in (one for one in ("aps", "daps") if one in scores):
        for partition in PARTITIONS:
            if partition != "metis":
                yield {"partition": partition, "conformal_score": score}
        for partition in ("metis", "louvain"):
            row = {"partition": partition, "conformal_score": score}
            yield row | {"setting": "inductive"}


def allowed(
    sizes: dict[int, list[tuple[int, int]]], coverage: float, *, is_common: bool
) -> float:
    """Return how far the farthest client's mean coverage lies from the target by chance.

    ``sizes`` has the numbers (n, m) of calibration and test items of each client and draw.
    The coverage of all items is Beta(k, n + 1 − k) with k = ⌈(n + 1)·coverage⌉, one for all
    clients if the threshold ``is_common``, and that of m test items is binomial.
    """
    generator = np.random.default_rng(0)
    draws = max(map(len, sizes.values()))
    means = np.zeros((len(sizes), 4000))
    for draw in range(draws):
        pairs = [each[draw] for each in sizes.values() if draw < len(each)]
        pooled, common = sum(n for n, _ in pairs), None
        if is_common:
            common = _beta(generator, pooled, coverage)
        for row, each in zip(means, sizes.values(), strict=True):
            if draw < len(each):
                n, m = each[draw]
                p = _beta(generator, n, coverage) if common is None else common
                row += generator.binomial(m, p) / m / len(each)
    return float(np.quantile(np.abs(means - coverage).max(axis=0), 0.95))


def _beta(generator: Any, n: int, coverage: float) -> Any:
    """Draw the coverage of thresholds from n scores."""
    k = math.ceil((n + 1) * coverage - 1e-9)
    return generator.beta(k, n + 1 - k, 4000)


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
    parser.add_argument("--scores", nargs="+", default=list(SCORES), choices=SCORES)
    parser.add_argument(
        "--numbers", action="store_true", help="intervals, of the synthetic graph"
    )
    parser.add_argument(
        "--experiment", type=Path, help="settings of owners that predict numbers"
    )
    parser.add_argument("--reuse", action="store_true", help="only the cost of reuse")
    arguments = parser.parse_args()
    if arguments.reuse:
        show_reuse(arguments.draws)
        return
    more: dict[str, Any] = {"dataset": arguments.dataset, "split": arguments.split}
    more["clients"] = arguments.clients
    if arguments.dataset == "synthetic":
        more["synthetic"] = {"nodes": arguments.nodes}
    if arguments.numbers:
        more["target_kind"] = "numbers"
    if arguments.experiment:
        config = tomllib.loads(arguments.experiment.read_text())["config"]
        more = {name.replace("-", "_"): value for name, value in config.items()}
        more |= {"evaluate_every": arguments.rounds, "split": arguments.split}
    more["rounds"] = arguments.rounds
    print(
        "| partition | setting | score | model | clients | farthest | by chance | mean | "
        "size |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    has_numbers = arguments.numbers or bool(arguments.experiment)
    for case in cases(arguments.scores, has_numbers=has_numbers):
        score = case.get("conformal_score", "residual")
        halves = 1 + (score in HALVED)
        for calibration, scope in (("owner", "local"), ("shared", "global")):
            if halves == 2 and calibration == "shared":
                continue
            found: dict[int, list[float]] = defaultdict(list)
            numbers: dict[int, list[tuple[int, int]]] = defaultdict(list)
            sizes: dict[int, list[float]] = defaultdict(list)
            for draw in range(arguments.draws):
                with tempfile.TemporaryDirectory() as folder:
                    run = simulate(
                        "fedavg", seed=draw, partition_seed=draw, run_dir=folder + "/run",
                        coverage=arguments.coverage, calibration=calibration,
                        checkpoint_every=0, **more, **case,
                    )  # fmt: skip
                    classes = len(run.summary.get("class_names", []))
                    for client, size, scores in rows_of(run, scope):
                        if size >= LEAST:
                            found[client].append(scores["coverage"])
                            pair = int(size / halves), int(scores["num_nodes"])
                            numbers[client].append(pair)
                            share = scores.get("set_share", math.nan) * classes
                            sizes[client].append(scores.get("interval", share))
            for client, each in list(found.items()):
                if len(each) < arguments.draws:  # too few items in some draws
                    del found[client], numbers[client], sizes[client]
            means = [float(np.mean(each)) for each in found.values()]
            size_of_sets = np.mean(np.concatenate([*sizes.values()]))
            farthest = max(means, key=lambda value: abs(value - arguments.coverage))
            chance = allowed(
                numbers, arguments.coverage, is_common=calibration == "shared"
            )
            print(
                f"| {case.get('partition', '')} | {case.get('setting', 'transductive')} | "
                f"{score} | {scope} | {len(means)} | {farthest:.3f} | "
                f"± {chance:.3f} | {np.mean(means):.3f} | {size_of_sets:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
