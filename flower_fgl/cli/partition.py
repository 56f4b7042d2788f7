"""What the data commands show: client sizes, label skew, exported graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.score_names import SETTING_COLUMNS
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.partition.summary import PartitionSummary
from flower_fgl.datasets.splits.split import SPLITS
from flower_fgl.datasets.store import ClientStore, open_store
from flower_fgl.runs.plots import label_heat_map

__all__ = ["PartitionReport", "describe_clients", "export_clients", "write_heat_map"]


@dataclass(frozen=True)
class PartitionReport:
    """What a partition looks like.

    Parameters
    ----------
    rows : list of list of str
        For each client: number, nodes (or graphs), those that train, validate, test and
        are in ``columns``, classes, and the exponential of the entropy of its labels.
    counts : Tensor of shape (K, C), int64
        Labelled nodes (or graphs) by client and class.
    class_names : tuple of str
        Length C.
    summary : str
        Totals, share of edges kept, and the partition's hash.
    items : {"nodes", "graphs"}
        What is counted.
    columns : tuple of str
        Titles of the node sets that only the setting scores.
    """

    rows: list[list[str]]
    counts: Tensor
    class_names: tuple[str, ...]
    summary: str
    items: str = "nodes"
    columns: tuple[str, ...] = ()


def _clients(store: ClientStore) -> Iterator[ClientGraph]:
    return (store.load(pid) for pid in range(store.index.num_clients))


def _held(client: ClientGraph) -> list[Graph]:
    """Return the graphs that make up a client's own nodes: not what it has not seen."""
    return [g for g in (client.graph, *client.evaluation) if set(SPLITS) & set(g.masks)]


def _sizes(client: ClientGraph, names: Iterable[str]) -> list[int]:
    graphs = [client.graph, *client.evaluation]
    return [
        max(int(g.masks[name].sum()) for g in graphs if name in g.masks)
        for name in names
    ]


def describe_clients(config: RunConfig) -> PartitionReport:
    """Cut the data set of a configuration and describe the pieces.

    Parameters
    ----------
    config : RunConfig
        Data settings and ``clients``.

    Returns
    -------
    PartitionReport

    Raises
    ------
    DataError
        If the data are missing or cannot be cut so.
    """
    store = open_store(config, config.clients)
    counts, sizes, masked, edges = [], [], [], 0
    names: tuple[str, ...] = ()
    own: list[str] = []
    for client in _clients(store):
        names = client.class_names
        found = {name for graph in client.evaluation for name in graph.masks}
        own = [column for column in SETTING_COLUMNS if column in found]
        graphs = _held(client)
        labels = torch.cat([graph.y for graph in graphs])
        counts.append(torch.bincount(labels[labels >= 0], minlength=len(names)))
        sizes.append(len(labels))
        masked.append(_sizes(client, (*SPLITS, *own)))
        edges += sum(graph.edge_index.shape[1] // 2 for graph in graphs)
    total = store.index.num_edges
    pieces = PartitionSummary(
        torch.stack(counts).numpy(), np.array(sizes), edges / total if total else 1.0
    )
    rows = [
        [str(pid), str(size), *map(str, masked[pid]), str(present), f"{effective:.2f}"]
        for pid, (size, present, effective) in enumerate(
            zip(
                sizes,
                pieces.num_classes_present,
                pieces.exp_label_entropy,
                strict=True,
            )
        )
    ]
    kept = (
        f"{edges:,} of {total:,} edges kept ({pieces.share_edges_kept:.1%})"
        if total
        else ""
    )
    items = "graphs" if config.classifies_graphs else "nodes"
    summary = (
        f"{len(rows)} clients, {sum(sizes):,} {items}, {kept or 'no edges'}, "
        f"partition {store.index.partition_sha256}"
    )
    columns = tuple(SETTING_COLUMNS[column] for column in own)
    return PartitionReport(rows, torch.stack(counts), names, summary, items, columns)


def write_heat_map(report: PartitionReport, path: Path) -> None:
    """Draw class by client as a PNG.

    Raises
    ------
    DataError
        If the file cannot be written.
    """
    figure = label_heat_map(
        report.counts.numpy(), report.class_names, items=report.items
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"Cannot write {path}: {why}.") from error


def export_clients(config: RunConfig, folder: Path) -> list[Path]:
    """Write every client's graph as ``client-<k>.npz``.

    Parameters
    ----------
    config : RunConfig
        Data settings and ``clients``.
    folder : Path
        Made if it is not there.

    Returns
    -------
    list of Path

    Raises
    ------
    ConfigError
        If ``setting`` is ``"graph"``: an owner's file holds one graph.
    DataError
        If the data cannot be cut so, or the folder not be written, or if it holds graphs
        of more clients already.
    """
    if config.classifies_graphs:
        raise ConfigError(
            "export writes graphs whose nodes are classified; a graph file has no form "
            'for a set of graphs (setting = "graph"). Choose a data set of task "node" '
            "(flower-fgl datasets)."
        )
    store = open_store(config, config.clients)
    number = store.index.num_clients
    width = len(str(number - 1))
    paths = [folder / f"client-{k:0{width}d}.npz" for k in range(number)]
    if others := sorted({*folder.glob("client-*.npz")} - {*paths}):
        raise DataError(
            f"{folder} holds {others[0].name} of another export, which is none of these "
            f"{number} clients. Name another folder, or remove it."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, client in zip(paths, _clients(store), strict=True):
            save_client_graph(path, client)
    except OSError as error:
        raise DataError(f"Cannot write to {folder}: {error}.") from error
    return paths
