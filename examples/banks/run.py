"""Find accounts that launder money, across banks that share no account data.

python examples/banks/run.py [FOLDER] [--rounds 50] [--draws 5] [--no-rehearsal]

Generates synthetic banks (``generate.py``), checks their files, shows an owner's privacy
floors at work, trains Local, FedAvg, FedPG and FedGCN and a pooled upper bound, writes
each bank's alerts, tables and pictures, and rehearses a run with SuperNodes and TLS.
docs/banks.md shows the results.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from federation import train
from generate import CLASSES, World, generate
from pictures import draw_patterns, draw_scores
from sklearn.metrics import average_precision_score

from flower_fgl import simulate
from flower_fgl.core.errors import RunError
from flower_fgl.datasets.graph_files.graph_file import inspect_graph_file
from flower_fgl.simulation.prediction import predict_graph

METHODS = {
    "local": ("local", "gcn"),
    "fedavg": ("fedavg", "gcn"),
    "fedpg": ("fedpg", "gcn"),
    "fedgcn": ("fedgcn", "gcn"),
    "pooled": ("pooled", "gcn"),
    "fedavg, SAGE": ("fedavg", "graphsage"),
    "pooled, SAGE": ("pooled", "graphsage"),
}
"""Rows of the tables: method and backbone. ``pooled`` is one model of all accounts."""
ALERTS = 20
"""Accounts of a bank that its analysts can look at."""
SETTINGS: dict[str, Any] = {
    "local_epochs": 3,
    "hidden_channels": 32,
    "lr": 0.03,
    "weight_decay": 0.0,
    "dropout": 0.2,
}
FLOORS: dict[str, dict[str, Any]] = {
    "bank-a": {"share-class-counts": False, "min-class-count": 5},
    "bank-b": {"secure-aggregation": True, "share-class-counts": False},
}
"""What bank-a and bank-b demand of every run."""
STRONG: dict[str, Any] = {
    "share_class_counts": False,
    "min_class_count": 5,
    "secure_aggregation": True,
}
"""Settings of a run that keeps these floors."""


def precision_at(scores: Any, is_positive: Any, number: int) -> float:
    """Return the share of positives among the accounts with the largest scores."""
    top = np.argsort(-scores, kind="stable")[:number]
    return float(is_positive[top].mean())


def read_accounts(folder: Path) -> list[dict[str, str]]:
    """Return the lines of a bank's nodes.csv."""
    with (folder / "nodes.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def suspicion(model: Path, graph: Path) -> dict[str, float]:
    """Return the predicted probability of laundering of every account."""
    found = predict_graph(model, graph).to_frame()
    return dict(zip(found["node"], found[f"p:{CLASSES[1]}"].tolist(), strict=True))


def score_bank(
    name: str, accounts: Sequence[Mapping[str, str]], scores: Mapping[str, float]
) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Return AUPRC and precision at k on a bank's test accounts, and its alerts."""
    test = [account for account in accounts if account["split"] == "test"]
    values = np.array([scores[account["id"]] for account in test])
    is_laundering = np.array([account["label"] == CLASSES[1] for account in test])
    order = np.argsort(-values, kind="stable")[:ALERTS]
    alerts = [(test[i]["id"], float(values[i])) for i in order]
    return {
        "bank": name,  # type: ignore[dict-item]
        "auprc": float(average_precision_score(is_laundering, values)),
        "precision": precision_at(values, is_laundering, ALERTS),
        "share": float(is_laundering.mean()),
    }, alerts


def train_method(
    row: str, folder: Path, banks: Mapping[str, Path], rounds: int, seed: int
) -> dict[str, dict[str, float]]:
    """Train the method of one row; return each bank's suspicion by account."""
    method, model = METHODS[row]
    place = folder / "runs" / row.replace(", ", "-")
    settings = {**SETTINGS, "model": model, "rounds": rounds, "seed": seed}
    pooled = folder / "pooled"
    if method == "pooled":
        # clients=1: one owner of everything, which no bank would allow
        simulate(
            "fedavg", f"{pooled}/", clients=1, run_dir=str(place), **settings
        )  # its partition is the whole graph, its split that of nodes.csv
        return dict.fromkeys(banks, suspicion(place, pooled))
    if method == "fedgcn":
        # keeps all floors: the sums and the weights are masked
        train(method, banks, place, FLOORS, **settings, **STRONG)
        # Two layers of FedGCN are those of the uncut graph, so that the global model
        # scores here on the pooled graph what each bank computes on its completed one
        return dict.fromkeys(banks, suspicion(place, pooled))
    if method == "fedavg":
        train(method, banks, place, FLOORS, **settings, **STRONG)
    else:  # FedPG needs single prototypes, so bank-b would refuse it
        train(method, banks, place, **settings)
    models = place.with_name(f"{place.name}-models")
    found = {}
    for name, graph in banks.items():
        (saved,) = models.glob(f"*-{name}-*")
        found[name] = suspicion(saved, graph)
    return found


def show_floors(folder: Path, banks: Mapping[str, Path]) -> str:
    """Run below and above the banks' floors; return what the refused run said."""
    settings = {**SETTINGS, "model": "gcn", "rounds": 1, "min_replies": len(banks)}
    try:
        train("fedavg", banks, folder / "runs" / "refused", FLOORS, **settings)
    except RunError as error:
        return str(error)
    raise AssertionError("The banks took part in a run below their floors.")


def check_files(banks: Mapping[str, Path]) -> None:
    """Check every bank's tables, as flower-fgl check-graph does."""
    for name, graph in banks.items():
        _, problems = inspect_graph_file(graph)
        if problems:
            sys.exit(f"{name}: {'; '.join(problems)}")
    print(f"checked the tables of {len(banks)} banks: no errors", flush=True)


def rehearse(folder: Path, banks: Mapping[str, Path]) -> None:
    """Run FedGCN once with a SuperLink, a SuperNode per bank, TLS and registered keys."""
    clock = time.monotonic()
    program = str(Path(sys.executable).with_name("flower-fgl"))
    place, graphs = str(folder / "rehearsal"), map(str, banks.values())
    options = ["--tls", "--method", "fedgcn", "--rounds", "2"]
    subprocess.run([program, "rehearse", place, *graphs, *options], check=True)
    print(f"rehearsal: {time.monotonic() - clock:.0f} s", flush=True)


def write_alerts(folder: Path, name: str, alerts: Sequence[tuple[str, float]]) -> None:
    """Write a bank's most suspicious accounts."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("account", "probability"))
        writer.writerows((account, f"{value:.4f}") for account, value in alerts)


def table(rows: Sequence[Mapping[str, Any]], banks: Sequence[str], key: str) -> str:
    """Return one line per method and one column per bank, mean ± spread over draws."""

    def text(values: Sequence[float]) -> str:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"

    lines = [f"| method | {' | '.join(banks)} | all |", "|---" * (len(banks) + 2) + "|"]
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        cells = [text([r[key] for r in own if r["bank"] == bank]) for bank in banks]
        draws = sorted({row["draw"] for row in own})
        means = [
            statistics.mean(r[key] for r in own if r["draw"] == draw) for draw in draws
        ]
        lines.append(f"| {method} | {' | '.join([*cells, text(means)])} |")
    return "\n".join(lines)


def one_draw(folder: Path, seed: int, rounds: int) -> tuple[list[Any], World]:
    """Generate banks with one seed, train all methods, score every bank."""
    world = generate(folder, seed=seed)
    banks = {path.name: path for path in sorted((folder / "banks").iterdir())}
    if seed == 1:
        check_files(banks)
        print(f"a run below the floors: {show_floors(folder, banks)}", flush=True)
    accounts = {name: read_accounts(path) for name, path in banks.items()}
    rows = []
    for method in METHODS:
        clock = time.process_time()
        scores = train_method(method, folder, banks, rounds, seed)
        for name in banks:
            row, alerts = score_bank(name, accounts[name], scores[name])
            rows.append({**row, "method": method, "draw": seed})
            write_alerts(folder / "alerts" / method.replace(", ", "-"), name, alerts)
        mean = statistics.mean(row["auprc"] for row in rows[-len(banks) :])
        print(
            f"draw {seed}, {method}: AUPRC {100 * mean:.1f}, "
            f"{time.process_time() - clock:.0f} s of CPU",
            flush=True,
        )
    return rows, world


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("banks-example"))
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--no-rehearsal", action="store_true")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if folder.exists():
        sys.exit(f"{folder} exists. Name another folder, or remove it.")
    rows, worlds = [], []
    # draw 0 chose the settings above, so the tables leave it out
    for seed in range(1, given.draws + 1):
        found, world = one_draw(folder / f"draw-{seed}", seed, given.rounds)
        rows += found
        worlds.append(world)
    banks = sorted({row["bank"] for row in rows})
    share = statistics.mean(row["share"] for row in rows)
    print(f"\nAUPRC in percent, test accounts; a random order gives {100 * share:.1f}")
    print(table(rows, banks, "auprc"))
    print(f"\nprecision of the {ALERTS} alerts of each bank, in percent")
    print(table(rows, banks, "precision"))
    draw_patterns(worlds[0], folder / "patterns.svg")
    draw_scores(rows, list(METHODS), banks, share, folder / "scores.svg")
    print(f"\nalerts of every bank: {folder}/draw-1/alerts; pictures: {folder}/*.svg")
    if not given.no_rehearsal:
        place = folder / "draw-1" / "banks"
        rehearse(folder, {path.name: path for path in sorted(place.iterdir())})


if __name__ == "__main__":
    main()
