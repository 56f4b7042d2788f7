"""The store: each client's graph in a file of its own, made once per machine.

The first process that needs a partition computes it under a file lock and writes one
safetensors file per client; every later one opens only the file of its client. Files carry
a SHA-256 in the index; one that does not match is rebuilt, and the log says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from flower_fgl.config import RunConfig
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.canonical import quiet_csr
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.partition import GRAPH_RULES, NODE_RULES, partition_key
from flower_fgl.datasets.sources import cache_folder, data_folder
from flower_fgl.errors import DataError

__all__ = ["ClientStore", "StoreIndex", "open_store"]

log = logging.getLogger(__name__)
FORMAT = 1
INDEX = "index.json"


@dataclass(frozen=True)
class StoreIndex:
    """What the store knows without opening a client's file.

    Parameters
    ----------
    partition_sha256 : str
        Hash of the partition.
    files : list of str
        SHA-256 of each client's file.
    class_names : list of str
        Length C.
    num_edges : int
        Undirected edges of the whole graph, those between clients included.
    """

    partition_sha256: str
    files: list[str]
    class_names: list[str]
    num_edges: int

    @property
    def num_clients(self) -> int:
        """Number of clients K."""
        return len(self.files)


@dataclass(frozen=True)
class ClientStore:
    """One partitioned data set on disk.

    Parameters
    ----------
    folder : Path
        Where its files are.
    config : RunConfig
        What it was made from, for rebuilding.
    index : StoreIndex
        Its table of contents.
    """

    folder: Path
    config: RunConfig
    index: StoreIndex

    def load(self, partition_id: int) -> ClientGraph:
        """Open one client's graph.

        Parameters
        ----------
        partition_id : int
            Client, 0..K-1.

        Returns
        -------
        ClientGraph

        Raises
        ------
        DataError
            If there is no such client.
        """
        if not 0 <= partition_id < self.index.num_clients:
            raise DataError(
                f"partition-id must be in 0..{self.index.num_clients - 1}, "
                f"got {partition_id}."
            )
        data = self._read(partition_id)
        if data is None:
            log.warning(
                "Stored graph of client %s in %s is damaged or gone: rebuilt.",
                partition_id,
                self.folder,
            )
            with FileLock(_lock_file(self.folder)):
                data = self._read(partition_id)
                if data is None:
                    _write_store(self.folder, self.config, self.index.num_clients)
                    data = self._read(partition_id)
        if data is None:
            raise DataError(
                f"{self.folder} cannot be read back after writing. Check the disk."
            )
        return _unpack(data, partition_id, tuple(self.index.class_names))

    def _read(self, partition_id: int) -> bytes | None:
        """Read a client's file, ``None`` if it is not what the index says."""
        try:
            data = (self.folder / _file_name(partition_id)).read_bytes()
        except OSError:
            return None
        digest = hashlib.sha256(data).hexdigest()
        return data if digest == self.index.files[partition_id] else None


def open_store(config: RunConfig, num_clients: int) -> ClientStore:
    """Find the store of a configuration, or make it.

    Parameters
    ----------
    config : RunConfig
        Its data settings are read: data set, folder, partition, split, setting.
    num_clients : int
        Number of clients K.

    Returns
    -------
    ClientStore

    Raises
    ------
    DataError
        If the data are missing or cannot be partitioned so, or the cache folder cannot
        be written.
    """
    folder = cache_folder() / "clients" / _folder_name(config, num_clients)
    index = _read_index(folder)
    if index is None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(_lock_file(folder)):
                index = _read_index(folder)
                if index is None:
                    index = _write_store(folder, config, num_clients)
        except OSError as error:
            raise DataError(
                f"Cannot write the partition to {folder}: {error}. Free some space, or "
                "set FLOWER_FGL_CACHE to another folder."
            ) from error
    return ClientStore(folder, config, index)


def _lock_file(folder: Path) -> str:
    return str(folder) + ".lock"


def _file_name(partition_id: int) -> str:
    return f"client-{partition_id:06d}.safetensors"


def _folder_name(config: RunConfig, num_clients: int) -> str:
    """Name a folder after everything that its content depends on."""
    key = {
        "format": FORMAT,
        "data_dir": str(data_folder(config.data_dir)),
        "partition": partition_key(
            config.partition,
            num_clients,
            seed=config.partition_seed,
            alpha=config.dirichlet_alpha,
            rules=GRAPH_RULES if config.classifies_graphs else NODE_RULES,
        ),
        "split": config.split,
        "setting": config.setting,
        "seed": config.partition_seed,
        "dataset": config.dataset,
    }
    if config.dataset == "synthetic":
        key["synthetic"] = asdict(config.synthetic)
    path = Path(config.dataset)
    if path.exists():
        files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
        key["content"] = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in path.stem)
    return f"{name}-{config.partition}-{num_clients}-{digest[:16]}"


def _read_index(folder: Path) -> StoreIndex | None:
    try:
        return StoreIndex(**json.loads((folder / INDEX).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write_store(folder: Path, config: RunConfig, num_clients: int) -> StoreIndex:
    """Write all clients beside the target, then move the folder into place."""
    clients, sha256, num_edges = build_clients(config, num_clients)
    scratch = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        hashes = []
        for client in clients:
            data = _pack(client)
            (scratch / _file_name(client.partition_id)).write_bytes(data)
            hashes.append(hashlib.sha256(data).hexdigest())
        index = StoreIndex(sha256, hashes, list(clients[0].class_names), num_edges)
        (scratch / INDEX).write_text(json.dumps(asdict(index)), "utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return index


def _pack(client: ClientGraph) -> bytes:
    tensors: dict[str, Tensor] = {"node_ids": client.node_ids}
    for number, graph in enumerate((client.graph, *client.evaluation)):
        tensors |= {f"{number}/{k}": v for k, v in _graph_tensors(graph).items()}
    return save_safetensors({k: v.contiguous() for k, v in tensors.items()})


def _graph_tensors(graph: Graph) -> dict[str, Tensor]:
    tensors = {"edge_index": graph.edge_index, "y": graph.y}
    if graph.batch is not None:
        tensors["batch"] = graph.batch
    if graph.x.layout == torch.sparse_csr:
        tensors["x/indptr"] = graph.x.crow_indices()
        tensors["x/indices"] = graph.x.col_indices()
        tensors["x/values"] = graph.x.values()
        tensors["x/shape"] = torch.tensor(graph.x.shape)
    else:
        tensors["x"] = graph.x
    return tensors | {f"mask/{name}": mask for name, mask in graph.masks.items()}


def _unpack(
    data: bytes, partition_id: int, class_names: tuple[str, ...]
) -> ClientGraph:
    tensors = load_safetensors(data)
    node_ids = tensors.pop("node_ids")
    groups: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        groups.setdefault(int(number), {})[name] = tensor
    graphs = [_read_graph(groups[number]) for number in sorted(groups)]
    return ClientGraph(
        partition_id, graphs[0], class_names, node_ids, tuple(graphs[1:])
    )


def _read_graph(tensors: Mapping[str, Tensor]) -> Graph:
    masks = {
        key.partition("/")[2]: mask
        for key, mask in tensors.items()
        if key.startswith("mask/")
    }
    x: Any = tensors.get("x")
    if x is None:
        with quiet_csr():
            x = torch.sparse_csr_tensor(
                tensors["x/indptr"],
                tensors["x/indices"],
                tensors["x/values"],
                size=tuple(tensors["x/shape"].tolist()),
                check_invariants=False,  # the file's hash is right
            )
    return Graph(x, tensors["edge_index"], tensors["y"], masks, tensors.get("batch"))
