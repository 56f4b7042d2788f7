"""The ``partition`` and ``export`` commands: client sizes, label skew, graph files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError, refuse
from flower_fgl.core.score_names import SETTING_COLUMNS
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.graph_files.write import save_client_graph
from flower_fgl.datasets.partition.assign import exp_label_entropy
from flower_fgl.datasets.splits.split import SPLITS
from flower_fgl.datasets.store import ClientStore, open_store
from flower_fgl.lab.plots import label_heat_map, save_figure
from flower_fgl.runs.writer import writing

__all__ = ["PartitionReport", "describe_clients", "export_clients", "write_heat_map"]


@dataclass(frozen=True)
class PartitionReport:
    """Description of a partition.

    A row holds a client's partition-id, number of items, numbers in the training,
    validation and test sets and in ``columns``, number of classes, and the exponential
    of its label entropy. ``counts``, (K, C), holds labelled items by client and class.
    """

    rows: list[list[str]]
    counts: Tensor
    names: tuple[str, ...]
    summary: str
    items: str = "nodes"
    columns: tuple[str, ...] = ()


def _clients(store: ClientStore) -> Iterator[ClientGraph]:
    return (store.load(pid) for pid in range(store.index.num_clients))


def describe_clients(config: RunConfig) -> PartitionReport:
    """Partition the dataset of a configuration and describe each client."""
    store = open_store(config, config.clients)
    counts, sizes, masked, edges = [], [], [], 0
    names: tuple[str, ...] = ()
    own: list[str] = []
    for client in _clients(store):
        names = client.target.names
        found = {name for graph in client.evaluation for name in graph.masks}
        own = [column for column in SETTING_COLUMNS if column in found]
        every = [client.graph, *client.evaluation]
        # without those of unseen nodes
        graphs = [graph for graph in every if set(SPLITS) & set(graph.masks)]
        found_here = [graph.class_counts(len(names)) for graph in graphs]
        counts.append(torch.stack(found_here).sum(dim=0))
        sizes.append(sum(graph.num_items for graph in graphs))
        masked.append(
            [
                max(int(g.masks[name].sum()) for g in every if name in g.masks)
                for name in (*SPLITS, *own)
            ]
        )
        per_graph = [graph.edge_index.shape[1] // 2 for graph in graphs]
        # with times, a later graph holds the edges of the earlier ones
        edges += max(per_graph) if config.classifies_edges else sum(per_graph)
    total = store.index.num_edges
    by_class = torch.stack(counts).numpy()
    present, effective = (by_class > 0).sum(axis=1), exp_label_entropy(by_class)
    rows = [
        [*map(str, (pid, size, *masked[pid], present[pid])), f"{effective[pid]:.2f}"]
        for pid, size in enumerate(sizes)
    ]
    kept = "no edges"
    if total:
        kept = f"{edges:,} of {total:,} edges kept ({edges / total:.1%})"
    items = "graphs" if config.classifies_graphs else "nodes"
    items = "pairs" if config.has_pairs else items
    summary = (
        f"{len(rows)} clients, {sum(sizes):,} {items}, {kept}, "
        f"partition {store.index.partition_sha256}"
    )
    columns = tuple(SETTING_COLUMNS[column] for column in own)
    return PartitionReport(rows, torch.stack(counts), names, summary, items, columns)


def write_heat_map(report: PartitionReport, path: Path) -> None:
    """Write a heat map of classes by client, as PNG if ``path`` has no suffix."""
    counts = report.counts.numpy()
    figure = label_heat_map(counts, report.names, items=report.items)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=150, bbox_inches="tight")


def export_clients(config: RunConfig, folder: Path) -> list[Path]:
    """Write every client's graph as ``client-<k>.npz``, and return the files."""
    refuse(
        {
            'export writes whole graphs, but setting = "link" splits their edges. Export '
            'with setting = "transductive"; a run with setting = "link" splits them '
            "itself.": config.predicts_links,
            'export does not write the classes of edges (setting = "edge"). Give each '
            "SuperNode its owner's own file.": config.classifies_edges,
        }
    )
    store = open_store(config, config.clients)
    number = store.index.num_clients
    width = len(str(number - 1))
    paths = [folder / f"client-{k:0{width}d}.npz" for k in range(number)]
    if others := sorted({*folder.glob("client-*.npz")} - {*paths}):
        raise DataError(
            f"{folder} holds {others[0].name} of another export, which is not one of "
            f"these {number} clients. Choose another folder, or remove it."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, client in zip(paths, _clients(store), strict=True):
            save_client_graph(path, client)
    except OSError as error:
        raise DataError(f"Cannot write to {folder}: {error}.") from error
    return paths
