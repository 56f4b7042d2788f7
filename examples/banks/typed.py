"""Find transfers that launder money in typed graphs, with devices that rings share.

python examples/banks/typed.py [FOLDER] [--rounds 30] [--draws 10]

Each bank has tables of customers, accounts, devices and transfers, with transfers and
accounts of other banks that it sees. Bank-c keeps to itself which device an account used.
The transfers of days 21 to 50 train, days 51 to 65 validate; those after are new, and each
bank ranks them with its model. docs/banks.md shows the results.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
from federation import train
from generate import FEATURES, LIMIT, World, features, make_world, names_of, write_table
from run import check_files, precision_at, write_alerts
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import average_precision_score
from transfers import CUTS, OWN, WARM_UP, name_of, write_transfers
from transfers import SETTINGS as PLAIN

from flower_fgl import simulate
from flower_fgl.simulation.prediction import predict_graph

SETTINGS: dict[str, Any] = {
    "model": "rgcn",
    "schema_align": "name",
    "positive_class": "odd",
    "precision_k": 10,
    "local_epochs": 3,
    "hidden_channels": 32,
    "lr": 0.03,
    "weight_decay": 0.0,
    "dropout": 0.2,
}
ALERTS = 10
"""New transfers of a bank that its analysts can look at."""
PRIVATE = "bank-c"
"""Bank that keeps the relation ``used`` to itself."""
RELATIONS = {
    "owns": ("customer", "account"),
    "used": ("account", "device"),
    "from": ("transfer", "account"),
    "to": ("transfer", "account"),
}
COLUMNS = {
    "customer": ("age_years", "is_business"),
    "account": (*FEATURES[:OWN], "is_own"),
    "device": ("log_accounts",),
    "transfer": ("log_amount", "just_below_limit", "at_night"),
}
SCORES = ("auprc", "precision")
ROWS = ("trees", "plain graph, fedavg", "typed graph, local", "typed graph, fedavg")


def draw_devices(world: World, seed: int) -> Any:
    """Return the device of each account; two of three rings share one, at any bank."""
    rng = np.random.default_rng([seed, 2])
    size = len(world.bank)
    device = rng.integers(0, size, size)
    odd = world.is_odd
    ring = np.arange(size)  # accounts of one ring are joined by odd transfers
    for _ in range(size):
        least = np.minimum(ring[world.source[odd]], ring[world.target[odd]])
        before = ring.copy()
        np.minimum.at(ring, world.source[odd], least)
        np.minimum.at(ring, world.target[odd], least)
        if (before == ring).all():
            break
    for first in np.unique(ring[world.is_laundering]):
        if rng.random() < 2 / 3:
            device[ring == first] = device[first]
    return device


class Bank:
    """What one bank knows: accounts and transfers that it sees, in order of time.

    Parameters
    ----------
    world : World
        All accounts and transfers.
    device : ndarray of int
        Device of each account.
    number : int
        The bank.
    """

    def __init__(self, world: World, device: Any, number: int) -> None:
        self.name, names = name_of(number), names_of(world)
        own = world.bank == number
        seen = np.flatnonzero(own[world.source] | own[world.target])
        self.transfers = seen[np.argsort(world.hour[seen], kind="stable")]
        self.hour = world.hour[self.transfers]
        self.is_odd = world.is_odd[self.transfers]
        early = self.transfers[self.hour < WARM_UP]
        parts = (world.source, world.target, world.amount, world.hour)
        size = len(names)
        x = features(
            size, *(part[early] for part in parts), np.zeros(size), np.zeros(size, bool)
        )
        self.ends = np.stack([world.source, world.target])[:, self.transfers]
        self.accounts, amount = np.unique(self.ends), world.amount[self.transfers]
        self.own = self.accounts[own[self.accounts]]
        self.device = device
        used = np.bincount(device[self.own], minlength=size)
        self.x = {
            "customer": world.x[:, OWN:],
            "account": np.column_stack([x[:, :OWN], own]),
            "device": np.log1p(used)[:, None],
            "transfer": np.column_stack(
                [
                    np.log1p(amount) / 5 - 1.3,
                    (amount >= 0.8 * LIMIT) & (amount < LIMIT),
                    (self.hour % 24 < 6) | (self.hour % 24 > 22),
                ]
            ).astype(float),
        }
        self.names = names

    def flat(self) -> Any:
        """Return the columns of each transfer and of both accounts, for trees."""
        known = np.zeros((len(self.names), 3))  # of own accounts only
        known[self.own] = np.hstack(
            [self.x["customer"][self.own], self.x["device"][self.device[self.own]]]
        )
        both = np.hstack([self.x["account"], known])
        return np.hstack([self.x["transfer"], *(both[end] for end in self.ends)])

    def write(self, folder: Path, *, is_new: bool) -> None:
        """Write the tables; new transfers are those after the last cut."""
        shown = self.hour < (np.inf if is_new else CUTS[1])
        (folder / "nodes").mkdir(parents=True)
        (folder / "edges").mkdir()
        account = [self.names[a] for a in self.accounts]
        devices = np.unique(self.device[self.own])
        place = np.flatnonzero(shown)
        ids = {
            "customer": ([f"C-{self.names[a]}" for a in self.own], self.own),
            "account": (account, self.accounts),
            "device": ([f"D-{d}" for d in devices], devices),
            "transfer": ([f"T-{self.transfers[t]}" for t in place], place),
        }
        for kind, (names, rows) in ids.items():
            lines = [
                [name, *(f"{value:.5f}" for value in self.x[kind][row])]
                for name, row in zip(names, rows, strict=True)
            ]
            header = ["id", *COLUMNS[kind]]
            if kind == "transfer":
                header += ["label", "split"]
                lines = [
                    line + self._label(t) for line, t in zip(lines, place, strict=True)
                ]
            write_table(folder / "nodes" / f"{kind}.csv", header, lines)
        transfer = ids["transfer"][0]
        edges = {
            "owns": [(f"C-{self.names[a]}", self.names[a]) for a in self.own],
            "used": [(self.names[a], f"D-{self.device[a]}") for a in self.own],
        }
        for name, end in zip(("from", "to"), self.ends, strict=True):
            ends = [self.names[a] for a in end[shown]]
            edges[name] = list(zip(transfer, ends, strict=True))
        for name, lines in edges.items():
            write_table(folder / "edges" / f"{name}.csv", ("source", "target"), lines)
        write_table(folder / "classes.csv", ("name",), (["normal"], ["odd"]))
        write_table(
            folder / "relations.csv",
            ("relation", "source", "target", "private"),
            (
                [name, *ends, "yes" if (name, self.name) == ("used", PRIVATE) else ""]
                for name, ends in RELATIONS.items()
            ),
        )

    def _label(self, transfer: int) -> list[str]:
        """Return label and part of a transfer; early and new ones have none."""
        hour = self.hour[transfer]
        if hour < WARM_UP or hour >= CUTS[1]:
            return ["", ""]
        label = "odd" if self.is_odd[transfer] else "normal"
        return [label, "train" if hour < CUTS[0] else "val"]

    def score(self, suspicion: Any) -> dict[str, float]:
        """Return AUPRC and precision of the alerts on the new transfers."""
        is_odd = self.is_odd[self.hour >= CUTS[1]]
        return {
            "auprc": float(average_precision_score(is_odd, suspicion)),
            "precision": precision_at(suspicion, is_odd, ALERTS),
            "share": float(is_odd.mean()),
        }


def trees(bank: Bank, seed: int) -> Any:
    """Return the suspicion of new transfers by boosted trees on the same columns."""
    x = bank.flat()
    is_train = (bank.hour >= WARM_UP) & (bank.hour < CUTS[0])
    model = HistGradientBoostingClassifier(
        max_iter=50, early_stopping=False, random_state=seed
    )
    model.fit(x[is_train], bank.is_odd[is_train])
    return model.predict_proba(x[bank.hour >= CUTS[1]])[:, 1]


def typed_rows(
    folder: Path, banks: list[Bank], seed: int, rounds: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Train on the typed tables, and rank each bank's new transfers."""
    graphs = {bank.name: folder / "banks" / bank.name for bank in banks}
    found = {}
    for method in ("local", "fedavg"):
        place = folder / "runs" / method
        train(method, graphs, place, rounds=rounds, seed=seed, **SETTINGS)
        row = f"typed graph, {method}"
        found[row] = {}
        for bank in banks:
            (saved,) = place.with_name(f"{method}-models").glob(f"*-{bank.name}-*")
            shown = predict_graph(saved, folder / "new" / bank.name).to_frame()
            values = dict(zip(shown["node"], shown["p:odd"].tolist(), strict=True))
            new = [f"T-{t}" for t in bank.transfers[bank.hour >= CUTS[1]]]
            suspicion = np.array([values[name] for name in new])
            found[row][bank.name] = bank.score(suspicion)
            top = np.argsort(-suspicion, kind="stable")[:ALERTS]
            alerts = [(new[i], float(suspicion[i])) for i in top]
            write_alerts(folder / "alerts" / method, bank.name, alerts)
    return found


def plain_row(
    folder: Path, world: World, banks: list[Bank], seed: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Train on accounts with transfers as edges, as ``transfers.py`` does."""
    for number, bank in enumerate(banks):
        write_transfers(folder / "plain" / bank.name, world, number)
    run = simulate(
        "fedavg", owners=str(folder / "plain"), rounds=rounds, seed=seed,
        run_dir=str(folder / "runs" / "plain"), **{**PLAIN, "lr": SETTINGS["lr"]},
    )  # fmt: skip
    auprc = run.per_owner(metric="auprc")
    precision = run.per_owner(metric="precision_at_k")
    return {
        name: {"auprc": auprc[name], "precision": precision[name]} for name in auprc
    }


def one_draw(folder: Path, seed: int, rounds: int) -> list[dict[str, Any]]:
    """Generate banks with one seed, train every row, and score new transfers."""
    world = make_world(seed=seed)
    device = draw_devices(world, seed)
    banks = [Bank(world, device, int(b)) for b in np.unique(world.bank)]
    for bank in banks:
        bank.write(folder / "banks" / bank.name, is_new=False)
        bank.write(folder / "new" / bank.name, is_new=True)
    check_files({bank.name: folder / "banks" / bank.name for bank in banks})
    found = {"trees": {bank.name: bank.score(trees(bank, seed)) for bank in banks}}
    found["plain graph, fedavg"] = plain_row(folder, world, banks, seed, rounds)
    found |= typed_rows(folder, banks, seed, rounds)
    rows: list[dict[str, Any]] = []
    for name in ROWS:
        scores = list(found[name].values())
        rows.append(
            {"row": name, "draw": seed}
            | {
                key: statistics.mean(s[key] for s in scores)
                for key in ("auprc", "precision")
            }
        )
        print(f"draw {seed}, {name}: AUPRC {100 * rows[-1]['auprc']:.1f}", flush=True)
    share = statistics.mean(s["share"] for s in found["trees"].values())
    print(f"draw {seed}: {100 * share:.1f} % of the new transfers are odd", flush=True)
    return rows


def table(rows: list[Mapping[str, Any]]) -> str:
    """Return one line per row: mean ± spread over draws, of the mean over banks."""
    lines = [f"| row | AUPRC | precision of {ALERTS} alerts |", "|---|---|---|"]
    for name in ROWS:
        cells = []
        for key in SCORES:
            values = [100 * row[key] for row in rows if row["row"] == name]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.1f} ± {spread:.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tests(rows: list[Mapping[str, Any]]) -> str:
    """Return paired t-tests of FedAvg on typed tables against each row, Holm-adjusted."""
    found = []
    for key in SCORES:
        values = {
            name: np.array([100 * row[key] for row in rows if row["row"] == name])
            for name in ROWS
        }
        for name in ROWS[:-1]:
            gain = values[ROWS[-1]] - values[name]
            test = scipy.stats.ttest_1samp(gain, 0.0)
            found.append((key, name, gain, test.confidence_interval(0.95), test.pvalue))
    order = np.argsort([p for *_, p in found])
    holm = np.empty(len(found))
    holm[order] = np.maximum.accumulate(
        [min(1.0, (len(found) - i) * found[j][-1]) for i, j in enumerate(order)]
    )
    return "\n".join(
        f"| {key} | {name} | {gain.mean():+.1f} | {low:.1f} to {high:.1f} | "
        f"{(gain > 0).sum()} of {len(gain)} | {p:.2g} |"
        for (key, name, gain, (low, high), _), p in zip(found, holm, strict=True)
    )


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("banks-typed"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--draws", type=int, default=10)
    given = parser.parse_args()
    clock = time.monotonic()
    folder = given.folder.resolve()
    if folder.exists():
        sys.exit(f"{folder} exists. Name another folder, or remove it.")
    rows: list[Mapping[str, Any]] = []
    # draws 1 to 3 were looked at while this file was written, so the table leaves them out
    for seed in range(4, given.draws + 4):
        rows += one_draw(folder / f"draw-{seed}", seed, given.rounds)
    print(f"\nNew transfers, in percent, mean over the banks\n{table(rows)}")
    if given.draws > 1:
        print(
            f"\n{ROWS[-1]} against the others\n"
            "| score | against | gain | 95 % interval | higher in | p (Holm) |\n"
            f"|---|---|---|---|---|---|\n{tests(rows)}"
        )
    print(f"\nalerts: {folder}/draw-4/alerts ({time.monotonic() - clock:.0f} s)")


if __name__ == "__main__":
    main()
