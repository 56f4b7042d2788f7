"""Measure what one or more malicious clients do to a run, for each aggregation rule.

    python benchmarks/poisoning.py                         # synthetic, 1 of 10, 5 seeds
    python benchmarks/poisoning.py --attackers 2 --krum-attackers 2
    python benchmarks/poisoning.py --dataset cora --seeds 3 --rounds 40

Runs FedAvg in the local engine. The malicious clients train like the others and then
replace their uploads. With θ their trained weights and w the global ones they send

    huge      w + 10⁶·(θ − w)
    flip      w − 10·(θ − w), a step in the wrong direction
    noise     w + N(0, 1) for every weight
    hidden    w − (θ − w), a wrong step that is no longer than a right one

The table shows the pooled test accuracy of the global model over the honest clients, in the
last round: mean and standard deviation over the seeds. Each run is also written as a JSON
line to ``--output`` as soon as it is done; repeated with that file, the command continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message

from flower_fgl import Run
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import MemoryStates
from flower_fgl.core.seeds import torch_generator
from flower_fgl.protocols.base import read_tensors, write_tensors
from flower_fgl.server_app import run_server
from flower_fgl.simulation.local import check_run, run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity

ATTACKS = ("none", "huge", "flip", "noise", "hidden")
RULES = ("mean", "median", "trimmed-mean", "krum", "norm-clip")
FACTORS = {"huge": 1e6, "flip": -10.0, "hidden": -1.0}


class PoisoningApp(DispatchingClientApp):
    """The app's ClientApp, whose first clients are malicious.

    Parameters
    ----------
    session : Session
        Settings and states of the clients.
    attack : str
        One of ``ATTACKS``.
    attackers : int
        Number of malicious clients, those with the smallest partition-ids.
    """

    def __init__(self, session: Session, attack: str, attackers: int) -> None:
        super().__init__(session)
        self.attack = attack
        self.attackers = attackers

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle a message; replace the weights of a malicious client's upload."""
        start = {}
        pid = int(context.node_config["partition-id"])
        is_training = message.metadata.message_type == "train"
        if is_training:
            start = read_tensors(message.content, "weights")
            number = int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]
        reply = super().__call__(message, context)
        if is_training and pid < self.attackers and self.attack != "none":
            trained = read_tensors(reply.content, "weights")
            generator = torch_generator(0, number, pid, "poison")
            factor = FACTORS.get(self.attack, 0.0)
            reply.content["weights"] = write_tensors(
                {
                    name: w + torch.randn(w.shape, generator=generator)
                    if self.attack == "noise"
                    else w + factor * (trained[name] - w)
                    for name, w in start.items()
                }
            )
        return reply


def run_poisoned(attack: str, attackers: int, folder: Path, **settings: Any) -> Run:
    """Run a method in this process with malicious clients.

    Parameters
    ----------
    attack : str
        One of ``ATTACKS``.
    attackers : int
        Number of malicious clients.
    folder : Path
        Run folder to create.
    **settings
        As in :func:`flower_fgl.simulate`.
    """
    chosen = {"method": "fedavg", "dataset": "synthetic", "clients": 10, "seed": 0}
    chosen |= {key: settings.pop(key) for key in chosen if key in settings}
    values = run_config_of(**chosen, settings={**settings, "run_dir": str(folder)})  # type: ignore[arg-type]
    config = check_run(values)
    session = Session(memory=MemoryStates())
    session.add_config(values, config)
    with task_identity(7):
        grid = LocalGrid(
            PoisoningApp(session, attack, attackers), config.clients, values, 7
        )
        return Run.load(run_server(grid, values, engine="local"))


def honest_accuracy(run: Run, attackers: int) -> float:
    """Return the global model's test accuracy in the last round over honest clients."""
    last = run.rounds[-1]["round"]
    scores = [
        row["metrics"]["global"]["test"]
        for row in run.clients
        if row["round"] == last
        and row["partition_id"] >= attackers
        and "metrics" in row
    ]
    nodes = sum(score["num_nodes"] for score in scores)
    return float(sum(s["accuracy"] * s["num_nodes"] for s in scores) / nodes)


def one_run(given: argparse.Namespace, rule: str, attack: str, seed: int) -> float:
    """Return the accuracy of one run; partition, split and model follow the seed."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_poisoned(
            attack, given.attackers, Path(folder) / "run",
            dataset=given.dataset, clients=given.clients, seed=seed,
            partition_seed=seed, rounds=given.rounds, evaluate="global",
            evaluate_every=given.rounds, aggregation=rule,
            krum_attackers=given.krum_attackers,
        )  # fmt: skip
        return honest_accuracy(run, given.attackers)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="synthetic")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--attackers", type=int, default=1)
    parser.add_argument("--krum-attackers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file for one JSON line per run")
    given = parser.parse_args(arguments)
    print(
        f"{given.dataset}, {given.attackers} of {given.clients} clients malicious, "
        f"{given.rounds} rounds, {given.seeds} seeds (partition, split and model)\n"
    )
    print(f"| aggregation | {' | '.join(ATTACKS)} |", "|---|" + "---|" * 5, sep="\n")
    known: dict[str, float] = {}
    if given.output and given.output.exists():
        for line in given.output.read_text().splitlines():
            row = json.loads(line)
            known[row["case"]] = row["accuracy"]
    for rule in RULES:
        cells = []
        for attack in ATTACKS:
            found = []
            for seed in range(given.seeds):
                case = (
                    f"{given.dataset} {given.attackers}/{given.clients} f="
                    f"{given.krum_attackers} r={given.rounds} {rule} {attack} {seed}"
                )
                if case not in known:
                    known[case] = one_run(given, rule, attack, seed)
                    if given.output:
                        row = {"case": case, "accuracy": known[case]}
                        with given.output.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                found.append(known[case])
            mean = 100 * statistics.mean(found)
            spread = 100 * statistics.stdev(found) if len(found) > 1 else 0.0
            cells.append(f"{mean:.1f} ± {spread:.1f}")
        print(f"| `{rule}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
