"""Run FedAvg of OpenFGL on the files of ``flower-fgl export``.

    pip install openfgl-lib==1.1.0 munkres
    python benchmarks/peers/openfgl_library.py FOLDER --rounds 10

OpenFGL trains, sends and scores as it does by itself, with its defaults (a GCN of width 64,
three epochs); only its datasets and splits are replaced by those of the files.
``compare.py`` measures this script where the library is installed.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import torch
from clients import load_clients
from torch_geometric.data import Batch, Data

SPLITS = ("train", "val", "test")


def write_splits(clients: list[Data], first: list[int], folder: Path) -> None:
    """Write each client's masks, and their nodes' numbers in the union, as OpenFGL does."""
    folder.mkdir(parents=True)
    for k, (data, start) in enumerate(zip(clients, first, strict=True)):
        for name in SPLITS:
            mask = data[f"{name}_mask"]
            torch.save(mask, folder / f"{name}_{k}.pt")
            nodes = (start + mask.nonzero().flatten()).tolist()
            (folder / f"glb_{name}_{k}.pkl").write_bytes(pickle.dumps(nodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    del sys.argv[1:]  # OpenFGL reads the command line when it is imported
    from openfgl import config
    from openfgl.flcore import trainer

    torch.set_num_threads(1)
    clients, classes = load_clients(options.folder)
    first = [0, *accumulate(data.num_nodes for data in clients)][:-1]
    whole = Batch.from_data_list(clients)
    for data in (*clients, whole):
        data.num_global_classes = classes
    config.args.dataset, config.args.num_clients = ["Cora"], len(clients)
    config.args.model, config.args.metrics = ["gcn"], ["accuracy"]
    config.args.num_rounds, config.args.use_cuda = options.rounds, False
    with tempfile.TemporaryDirectory() as folder:
        write_splits(clients, first, Path(folder, "node_cls", "default_split"))
        found = SimpleNamespace(
            local_data=clients, global_data=whole, processed_dir=folder
        )
        trainer.FGLDataset = lambda args: found
        trainer.FGLTrainer(config.args).train()


if __name__ == "__main__":
    main()
