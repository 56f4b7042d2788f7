"""Measure secure aggregation: CPU seconds and bytes per round compared with plain FedAvg.

    python benchmarks/secure_aggregation.py
    python benchmarks/secure_aggregation.py --clients 10 50 --hidden 256

All K clients run in this process one after the other (local engine), so the CPU seconds
are totals over all clients; one client takes about 1/K of them. Plain and secure runs
alternate, and the fastest round of each counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from flower_fgl import simulate
from flower_fgl.protocols.secure_aggregation.keys import (
    combine,
    draw_secret,
    mask_stream,
    split,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args()


def rounds(options: argparse.Namespace, clients: int, *, is_secure: bool) -> Any:
    """Run one federation; return its rounds after the first, with their CPU seconds."""
    clocks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(
            clients=clients,
            rounds=options.rounds,
            hidden_channels=options.hidden,
            partition="uniform",
            synthetic={"nodes": 100 * clients},
            output_dir=folder,
            secure_aggregation=is_secure,
            stacked="false",  # each client by itself, as on a machine of its own
            on_round=lambda _: clocks.append(time.process_time()),
        )
        spent = [late - early for early, late in pairwise(clocks)]
        return [
            {**row, "cpu": cpu} for row, cpu in zip(run.rounds[1:], spent, strict=True)
        ]


def megabytes(row: Any, way: str, clients: int) -> float:
    """Return the megabytes that one client sends or receives in a round."""
    return sum(row["bytes"][way].values()) / clients / 1e6


def fastest(work: Any, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        work()
        times.append(time.perf_counter() - clock)
    return 1000 * min(times)


def parts(clients: int) -> tuple[float, float, float]:
    """Return milliseconds to share two secrets, rebuild one, and draw a million masks."""
    points = list(range(1, clients + 1))
    need = clients * 2 // 3
    secret = draw_secret()

    def share() -> None:
        split(secret, threshold=need, points=points)
        split(secret, threshold=need, points=points)

    shares = dict(
        zip(points, split(secret, threshold=need, points=points), strict=True)
    )
    some = {x: shares[x] for x in points[:need]}
    return (
        fastest(share),
        fastest(lambda: combine(some)),
        fastest(lambda: mask_stream(secret, 10**6)),
    )


def main() -> None:
    options = arguments()
    table = Table(
        "clients", "plain s", "secure s", "ratio", "up MB", "secure", "ratio",
        "down MB", "secure", "share ms", "rebuild ms", "10⁶ masks ms",
        title=f"FedAvg, GCN 64-{options.hidden}-5, one round, MB per client",
    )  # fmt: skip
    for clients in options.clients:
        found: dict[bool, list[Any]] = {False: [], True: []}
        for _ in range(options.repeats):
            for is_secure in (False, True):
                found[is_secure] += rounds(options, clients, is_secure=is_secure)
        plain, secure = (
            min(row["cpu"] for row in found[kind]) for kind in (False, True)
        )
        size = {
            (kind, way): megabytes(found[kind][0], way, clients)
            for kind in (False, True)
            for way in ("up", "down")
        }
        table.add_row(
            str(clients), f"{plain:.3f}", f"{secure:.3f}", f"{secure / plain:.1f}",
            f"{size[False, 'up']:.4f}", f"{size[True, 'up']:.4f}",
            f"{size[True, 'up'] / size[False, 'up']:.1f}",
            f"{size[False, 'down']:.4f}", f"{size[True, 'down']:.4f}",
            *(f"{ms:.1f}" for ms in parts(clients)),
        )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
