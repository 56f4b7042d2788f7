"""Read the files of ``flower-fgl export`` without flower-fgl."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch_geometric.data import Data


def load_client(path: Path) -> Data:
    """Return the graph of one file, with dense features."""
    with np.load(path) as file:
        if "x" in file.files:
            x = file["x"]
        else:
            parts = (file["x_data"], file["x_indices"], file["x_indptr"])
            x = csr_matrix(parts, shape=file["x_shape"]).toarray()
        names = ("y", "edge_index", "train_mask", "val_mask", "test_mask")
        arrays = {name: torch.from_numpy(file[name]) for name in names}
    return Data(x=torch.from_numpy(x).float(), **arrays)


def load_clients(folder: Path) -> tuple[list[Data], int]:
    """Return the graphs of all files, in the order of their numbers, and the classes."""
    paths = sorted(folder.glob("*.npz"), key=lambda path: int(path.stem.split("-")[1]))
    clients = [load_client(path) for path in paths]
    return clients, 1 + max(int(data.y.max()) for data in clients)
