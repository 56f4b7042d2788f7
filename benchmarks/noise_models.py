"""Compare the two models of trust for noise: every client adds all of it, or a share.

    python benchmarks/noise_models.py
    python benchmarks/noise_models.py --clients 10 --noise 5 --releases 20

For each number of clients it runs one round of FedAvg without noise, with local noise and
with distributed noise, under secure aggregation and with the same ε, and measures the noise
on the aggregated weights. ε is that of all releases and needs ``dp-accounting``.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from flower_fgl import simulate
from flower_fgl.protocols.differential_privacy import epsilon, pld_epsilon
from flower_fgl.protocols.secure_aggregation.keys import threshold

DELTA = 1e-5
TRUST = {"none": "-", "local": "nobody", "distributed": "t clients"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--noise", type=float, default=5.0)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--releases", type=int, default=20)
    return parser.parse_args()


def weights(options: argparse.Namespace, clients: int, kind: str) -> Any:
    """Run one round; return the aggregated weights."""
    noise = {} if kind == "none" else {"upload_noise_model": kind}
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(
            clients=clients,
            rounds=1,
            partition="uniform",
            synthetic={"nodes": 100 * clients},
            output_dir=folder,
            weight_by="equal",
            secure_aggregation=True,
            upload_clip=options.clip,
            upload_noise=options.noise if noise else 0.0,
            **noise,
        )
        state = load_file(found.path / "model.safetensors")
        return torch.cat([t.flatten() for _, t in sorted(state.items())])


def main() -> None:
    options = arguments()
    z, clip, releases = options.noise, options.clip, options.releases
    table = Table(
        "clients", "t", "noise", "trusted", "ε exact", "ε PLD", "noise of the mean",
        "measured",
        title=f"FedAvg, z = {z:g}, S = {clip:g}, {releases} uploads, δ = {DELTA:g}",
    )  # fmt: skip
    exact, bound = epsilon(z, releases, DELTA), pld_epsilon(z, releases, DELTA)
    for clients in options.clients:
        need = threshold(clients, 0.67)
        wanted = {
            "none": 0.0,
            "local": z * clip / math.sqrt(clients),
            "distributed": z * clip * math.sqrt(clients / need) / clients,
        }
        clean = weights(options, clients, "none")
        for kind, spread in wanted.items():
            change = weights(options, clients, kind) - clean
            private = kind != "none"
            table.add_row(
                str(clients), str(need), kind, TRUST[kind],
                f"{exact:.3f}" if private else "∞", f"{bound:.3f}" if private else "∞",
                f"{spread:.4f}", f"{float(change.std()):.4f}",
            )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
