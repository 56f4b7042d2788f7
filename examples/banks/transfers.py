"""Find transfers that launder money, across banks that share no transfers.

python examples/banks/transfers.py [FOLDER] [--rounds 30] [--draws 5]

Classifies the transfers of the synthetic banks instead of their accounts. Every bank lists
the transfers that it sees, with those to and from other banks. They are split by time:
the first 20 days only describe the accounts, days 21 to 50 train, the next 15 validate, and
the rest test. "pooled" trains one model on all transfers, which no bank would allow: the
upper bound.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from generate import (
    FEATURES,
    LIMIT,
    MEAN,
    SCALE,
    World,
    features,
    make_world,
    names_of,
    write_table,
)

from flower_fgl import Run, simulate
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.core.label_scores import score_positive_class
from flower_fgl.core.metrics import Scores, pool
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.methods import parse_config
from flower_fgl.runs.saved_model import load_model

WARM_UP = 20 * 24
"""Hours whose transfers have no label: the features of accounts follow from them. Features
that included a training transfer would tell its class, but not that of a later one."""
CUTS = (50 * 24, 65 * 24)
"""Hours at which validation and test begin, at all banks."""
ROWS = {
    "local": ("local", "none"),
    "local, balanced": ("local", "balanced"),
    "fedavg": ("fedavg", "none"),
    "fedavg, balanced": ("fedavg", "balanced"),
    "pooled": ("pooled", "none"),
}
"""Rows of the table: method and class weights. ``pooled`` is one model of all transfers."""
SETTINGS: dict[str, Any] = {
    "setting": "edge",
    "time_cuts": f"{CUTS[0]},{CUTS[1]}",
    "positive_class": "odd",
    "precision_k": 10,
    "model": "graphsage",
    "local_epochs": 3,
    "hidden_channels": 32,
    "lr": 0.01,
    "weight_decay": 0.0,
    "dropout": 0.2,
}
SCORES = ("auprc", "precision_at_k", "threshold_precision", "threshold_recall")
OWN = len(FEATURES) - 2
"""Features that follow from transfers; the last two are known of own accounts only."""


def write_transfers(folder: Path, world: World, bank: int | None) -> None:
    """Write a bank's accounts and transfers, in order of time.

    Parameters
    ----------
    folder : Path
        New folder.
    world : World
        All accounts and transfers.
    bank : int, optional
        The bank; ``None`` if it has the accounts and transfers of all banks.

    Notes
    -----
    1. Features of accounts are computed from the transfers that the bank sees in the first
       ``WARM_UP`` hours. Of accounts at other banks it knows nothing else.
    """
    folder.mkdir(parents=True)
    names = names_of(world)
    is_own = np.ones(len(names), bool) if bank is None else world.bank == bank
    seen = np.flatnonzero(is_own[world.source] | is_own[world.target])
    seen = seen[np.argsort(world.hour[seen], kind="stable")]
    early = seen[world.hour[seen] < WARM_UP]
    label = np.where(world.is_odd, "odd", "normal")
    label[early] = ""
    size = len(names)
    x = features(
        size,
        *(
            part[early]
            for part in (world.source, world.target, world.amount, world.hour)
        ),
        np.zeros(size),
        np.zeros(size, dtype=bool),
    )
    x[:, OWN:] = np.where(is_own[:, None], world.x[:, OWN:], 0)
    accounts = np.unique([world.source[seen], world.target[seen]])
    write_table(
        folder / "nodes.csv",
        ("id", *FEATURES, "is_own"),
        (
            [names[a], *(f"{value:.5f}" for value in x[a]), int(is_own[a])]
            for a in accounts
        ),
    )
    write_table(folder / "edge_classes.csv", ("name",), (["normal"], ["odd"]))
    amount = (np.log1p(world.amount) / 5 - MEAN[2]) / SCALE[2]
    near = (world.amount >= 0.8 * LIMIT) & (world.amount < LIMIT)
    write_table(
        folder / "edges.csv",
        ("source", "target", "label", "time", "log_amount", "just_below_limit"),
        (
            [
                *(names[world.source[t]], names[world.target[t]]),
                label[t],
                *(f"{world.hour[t]:.4f}", f"{amount[t]:.5f}", int(near[t])),
            ]
            for t in seen
        ),
    )


def name_of(bank: int) -> str:
    """Return the name of a bank's folder."""
    return f"bank-{'abcdefgh'[bank]}"


def score_banks(run: Run, folder: Path, world: World) -> dict[str, Scores]:
    """Score a model of all transfers on the transfers that each bank sees.

    Parameters
    ----------
    run : Run
        Its best model is scored.
    folder : Path
        Tables of all transfers.
    world : World
        The accounts, in any order.

    Returns
    -------
    dict of str to Scores
        Test scores by bank; the threshold is that of the bank's validation transfers.
    """
    used = {"setting": "edge", "time-cuts": SETTINGS["time_cuts"]}
    client = client_from_file(folder, parse_config(used))
    data = ClientData.build(client, torch.device("cpu"))
    model = load_model(run.path).model.eval()
    number = {name: place for place, name in enumerate(names_of(world))}
    lines = (folder / "nodes.csv").read_text().splitlines()[1:]
    ids = [line.partition(",")[0] for line in lines]
    bank_of = torch.tensor([int(world.bank[number[name]]) for name in ids])
    found = {}
    for bank in range(int(world.bank.max()) + 1):
        items = {}
        for inputs, y, masks in zip(
            data.inputs, data.labels, data.columns, strict=True
        ):
            assert inputs.pairs is not None
            is_seen = (bank_of[inputs.pairs] == bank).any(dim=0)
            with torch.inference_mode():
                logits = model(inputs)
            for column, mask in masks.items():
                chosen = mask & is_seen
                items[column] = logits[chosen], y[chosen]
        nothing = dict.fromkeys(items, Scores(len(items["test"][1]), 0.0, 0.0, 0.0))
        k, positive = SETTINGS["precision_k"], client.class_names.index("odd")
        scores = score_positive_class(nothing, items, positive, k=k)
        found[name_of(bank)] = scores["test"]
    return found


def train_pooled(
    folder: Path, world: World, seed: int, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Train one model on all transfers; return its test scores, and AUPRC by bank."""
    write_transfers(folder / "all-banks", world, None)
    run = simulate(
        "fedavg", f"{folder / 'all-banks'}/", clients=1, rounds=rounds, seed=seed,
        run_dir=str(folder / "pooled"), **SETTINGS,
    )  # fmt: skip
    banks = score_banks(run, folder / "all-banks", world)
    return pool(list(banks.values())), {n: one.auprc for n, one in banks.items()}


def one_draw(
    folder: Path, seed: int, rounds: int, **sizes: Any
) -> list[dict[str, Any]]:
    """Generate banks with one seed, train every row, and return its test scores."""
    world = make_world(seed=seed, **sizes)
    for bank in np.unique(world.bank):
        write_transfers(folder / "banks" / name_of(bank), world, bank)
    found = []
    for row, (method, weights) in ROWS.items():
        if method == "pooled":
            test, banks = train_pooled(folder, world, seed, rounds)
            found.append(_row(row, seed, test, banks))
            continue
        run = simulate(
            method, owners=str(folder / "banks"), rounds=rounds, seed=seed,
            class_weights=weights, run_dir=str(folder / row.replace(", ", "-")),
            **SETTINGS,
        )  # fmt: skip
        assert run.best is not None
        banks = run.per_owner(metric="auprc")
        found.append(_row(row, seed, run.best["test"], banks))
    late = world.hour >= CUTS[1]
    share = world.is_odd[late].mean()
    print(f"draw {seed}: {100 * share:.1f} % of the test transfers are odd", flush=True)
    return found


def _row(
    row: str, seed: int, test: Mapping[str, float], banks: Mapping[str, float]
) -> dict[str, Any]:
    """Return the scores of a run, and print its AUPRC."""
    scores = {name: test.get(name, 0.0) for name in SCORES}
    print(f"draw {seed}, {row}: AUPRC {100 * scores['auprc']:.1f}", flush=True)
    return {"row": row, "draw": seed, **scores, "banks": dict(banks)}


def bank_table(rows: list[Mapping[str, Any]]) -> str:
    """Return AUPRC with one line per row and one column per bank, mean ± spread."""
    banks = sorted({name for row in rows for name in row["banks"]})
    lines = [f"| method | {' | '.join(banks)} |", "|---" * (len(banks) + 1) + "|"]
    for name in ROWS:
        values = [
            [
                100 * row["banks"][b]
                for row in rows
                if row["row"] == name and b in row["banks"]
            ]
            for b in banks
        ]
        lines.append(f"| {name} | {' | '.join(map(_spread, values))} |")
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    """Return mean ± standard deviation."""
    if not values:
        return "–"
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {spread:.1f}"


def table(rows: list[Mapping[str, Any]]) -> str:
    """Return one line per row and one column per score, mean ± spread over draws."""
    titles = ("AUPRC", "P@K", "P@threshold", "R@threshold")
    lines = [f"| method | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name in ROWS:
        cells = []
        for key in SCORES:
            values = [100 * row[key] for row in rows if row["row"] == name]
            cells.append(_spread(values))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("banks-transfers"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--draws", type=int, default=5)
    given = parser.parse_args()
    folder = given.folder.resolve()
    if folder.exists():
        sys.exit(f"{folder} exists. Name another folder, or remove it.")
    rows: list[Mapping[str, Any]] = []
    # draw 1 was looked at while this file was written, so the table leaves it out
    for seed in range(2, given.draws + 2):
        rows += one_draw(folder / f"draw-{seed}", seed, given.rounds)
    print(f"\nTest transfers, in percent; K = {SETTINGS['precision_k']}")
    print(table(rows))
    print("\nAUPRC of every bank, in percent")
    print(bank_table(rows))


if __name__ == "__main__":
    main()
