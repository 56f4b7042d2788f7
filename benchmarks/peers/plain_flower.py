"""Run FedAvg of a GCN of plain PyG as a plain Flower app, under Flower's simulation.

    python benchmarks/peers/plain_flower.py FOLDER --rounds 10

The app of Flower's quickstart with :class:`bare_pyg.GCN`: its ``FedAvg``, one
``ClientApp``, one virtual SuperNode per ``.npz`` file of ``flower-fgl export``.
``compare.py`` measures it.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

import torch
from bare_pyg import EPOCHS, GCN, HIDDEN, score, train
from clients import load_client
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

FOLDER, SIZES, ROUNDS = "PEER_FOLDER", "PEER_SIZES", "PEER_ROUNDS"
"""Environment variables: what the processes of Ray must know."""
client_app, server_app = ClientApp(), ServerApp()


@functools.cache
def data_of(partition: int) -> Any:
    """Return a client's graph, read once in each process."""
    return load_client(Path(os.environ[FOLDER]) / f"client-{partition}.npz")


def make_model() -> GCN:
    features, classes = map(int, os.environ[SIZES].split())
    return GCN(features, HIDDEN, classes)


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    data = data_of(int(context.node_config["partition-id"]))
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, data, EPOCHS)
    metrics = MetricRecord(
        {"num-examples": int(data.train_mask.sum()), "right": score(model, data)[1]}
    )
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
    strategy.start(
        grid,
        ArrayRecord(make_model().state_dict()),
        num_rounds=int(os.environ[ROUNDS]),
        train_config=ConfigRecord(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    first = load_client(options.folder / "client-0.npz")
    with_all = [load_client(path).y.max() for path in options.folder.glob("*.npz")]
    os.environ |= {
        FOLDER: str(options.folder.resolve()),
        ROUNDS: str(options.rounds),
        SIZES: f"{first.num_features} {1 + int(max(with_all))}",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(with_all),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


if __name__ == "__main__":
    import plain_flower  # Ray's workers find the app in this module

    plain_flower.main()
