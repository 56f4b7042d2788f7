"""Measure FedPG's cost: seconds per round against Local, bytes against FedAvg.

    python benchmarks/fedpg_cost.py                      # Physics, 10 clients, GAMLP
    python benchmarks/fedpg_cost.py --methods local fedpg fedpg-equal-weights
    python benchmarks/fedpg_cost.py --dataset synthetic --clients 4

The runs alternate round by round in one process, with the local engine and one thread, so
that other load on the machine affects all of them. The table shows for the rounds after
the warm-up the median seconds, the median ratio to Local's round of the same turn, and the
same for the seconds of CPU time, which depend less on other load. ``fedpg-equal-weights``
is FedPG without attention, ``fedpg-mlp`` with the attention of ``fedpg.scorer = "mlp"``.

Bytes are measured on the messages of the last round, as the mean over clients, next to the
documented formula: 4·M·(p + 1) up and 4·M·p down for the M prototypes that a client sent in
that round, and 4·P in each direction for the P parameters of FedAvg.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from flower_fgl.core.config import RunConfig
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import METHODS as ROWS
from flower_fgl.nn import build_model
from flower_fgl.protocols.prototypes import LocalPrototypes
from flower_fgl.simulation.run import run_one

METHODS = ("local", "fedavg", "fedproto", "fedpg-equal-weights", "fedpg")
VARIANTS: dict[str, dict[str, Any]] = {
    "fedpg-equal-weights": {"method": "fedpg", "fedpg.attention": False},
    "fedpg-mlp": {"method": "fedpg", "fedpg.scorer": "mlp"},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="physics")
    parser.add_argument("--model", default="gamlp")
    parser.add_argument("--partition", default="metis")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20, help="measured rounds")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    return parser.parse_args()


def settings(options: argparse.Namespace, method: str) -> dict[str, Any]:
    return {
        "method": method,
        "dataset": options.dataset,
        "model": options.model,
        "partition": options.partition,
        "clients": options.clients,
        "rounds": options.warm_up + options.rounds,
        "local-epochs": 3,
        "threads": 1,
        "seed": 0,
    } | VARIANTS.get(method, {})


def count_parameters(options: argparse.Namespace) -> tuple[int, int]:
    """Return P of the backbone and the embedding width p."""
    config = RunConfig.parse(settings(options, "fedavg"), ROWS)
    graph = open_store(config, options.clients).load(0)
    model = build_model(
        options.model,
        in_channels=graph.num_features,
        hidden_channels=config.hidden_channels,
        num_outputs=graph.num_classes,
        num_layers=config.num_layers,
        dropout=config.dropout,
        readout=False,
        initialise=False,
    )
    return sum(p.numel() for p in model.parameters()), config.hidden_channels


class Turns:
    """Let several threads run one round each, in turn."""

    def __init__(self, number: int) -> None:
        self.waiting = list(range(number))
        self.changed = threading.Condition()

    def wait(self, me: int) -> None:
        """Wait until it is this thread's turn."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting[0] == me)

    def pass_on(self, me: int, *, is_done: bool = False) -> None:
        """Let the next thread run."""
        with self.changed:
            self.waiting.remove(me)
            if not is_done:
                self.waiting.append(me)
            self.changed.notify_all()


@dataclass
class Measured:
    """What one run took."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    present: float = 0.0
    error: BaseException | None = None


def measure(
    options: argparse.Namespace, method: str, me: int, turns: Turns, out: Measured
) -> None:
    """Run one method, one round per turn, and store what each round took."""
    clock = [0.0, 0.0]

    def begin() -> None:
        turns.wait(me)
        PRESENT.clear()
        clock[:] = time.perf_counter(), time.process_time()

    def on_round(_: Any) -> None:
        out.wall.append(time.perf_counter() - clock[0])
        out.cpu.append(time.process_time() - clock[1])
        out.present = sum(PRESENT) / options.clients
        turns.pass_on(me)
        begin()  # also after the last round: no run ends before the others' last rounds

    begin()
    try:
        with tempfile.TemporaryDirectory() as folder:
            values = {**settings(options, method), "output-dir": folder}
            run = run_one(values, engine="local", workers=None, on_round=on_round)
            last = run.rounds[-1]["bytes"]
        out.sent = {
            way: sum(v for k, v in payloads.items() if k not in ("metrics", "config"))
            / options.clients
            for way, payloads in last.items()
        }
    except BaseException as error:  # raised again in the main thread
        out.error = error
    finally:
        turns.pass_on(me, is_done=True)


PRESENT: list[int] = []
"""Prototypes in each upload of the present round."""


def count_prototypes() -> None:
    """Make uploads add the number of their prototypes to ``PRESENT``."""
    pack = LocalPrototypes.to_record

    def counting(upload: LocalPrototypes) -> Any:
        PRESENT.append(int((upload.counts > 0).sum()))
        return pack(upload)

    LocalPrototypes.to_record = counting  # type: ignore[method-assign]


def ratio(times: list[float], base: list[float]) -> float:
    """Return the median over the turns of a round's time over Local's."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def main() -> None:
    options = arguments()
    methods = list(dict.fromkeys(["local", *options.methods]))
    count_prototypes()
    turns = Turns(len(methods))
    measured = {method: Measured() for method in methods}
    threads = [
        threading.Thread(target=measure, args=(options, method, me, turns, out))
        for me, (method, out) in enumerate(measured.items())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in measured.values():
        if out.error is not None:
            raise out.error
    parameters, width = count_parameters(options)
    base = measured["local"]
    average = sum(measured["fedavg"].sent.values()) if "fedavg" in measured else 0.0
    table = Table(
        "method", "s/round", "ratio", "CPU s", "ratio", "up: formula", "measured",
        "down: formula", "measured", "share of FedAvg",
        title=f"{options.dataset}, {options.clients} clients, {options.model}, "
        f"{parameters} parameters, {options.rounds} rounds",
    )  # fmt: skip
    for method, out in measured.items():
        if method == "fedavg":
            up = down = 4.0 * parameters
        else:
            up, down = 4 * out.present * (width + 1), 4 * out.present * width
        wall, cpu = out.wall[options.warm_up :], out.cpu[options.warm_up :]
        share = f"{sum(out.sent.values()) / average:.5f}" if average else ""
        table.add_row(
            method,
            f"{statistics.median(wall):.3f}",
            f"{ratio(wall, base.wall[options.warm_up :]):.2f}",
            f"{statistics.median(cpu):.3f}",
            f"{ratio(cpu, base.cpu[options.warm_up :]):.2f}",
            f"{up:.0f}", f"{out.sent.get('up', 0):.0f}",
            f"{down:.0f}", f"{out.sent.get('down', 0):.0f}",
            share,
        )  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
