"""Load a data set by its name.

``source_table.py`` lists what there is, ``raw_paths.py`` says where the files lie, and
``staging.py`` finds them. They are read by the stock loaders of torch-geometric and OGB
(``stock.py``) where those exist, else by ``raw_layouts.py``. What was published about a
set is checked whenever it is loaded.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

import platformdirs

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.options import nearest
from flower_fgl.core.settings import SyntheticSettings
from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.graph_files.validate import (
    validate_graph_dataset,
    validate_node_dataset,
)
from flower_fgl.datasets.sources import raw_paths
from flower_fgl.datasets.sources.download import obtain
from flower_fgl.datasets.sources.raw_readers import Raw, RawGraphs, RawNodes
from flower_fgl.datasets.sources.registry import (
    GRAPH_SPLIT,
    MORRIS,
    SOURCES,
    Source,
    Statistics,
)
from flower_fgl.datasets.sources.synthetic import synthetic_dataset

__all__ = [
    "SOURCES",
    "Source",
    "Statistics",
    "cache_folder",
    "data_folder",
    "find_source",
    "load",
]


def find_source(name: str) -> Source:
    """Look a data set up by its name.

    Parameters
    ----------
    name : str
        A key of ``SOURCES``, or ``tu:NAME`` for any set of TU Dortmund.

    Returns
    -------
    Source

    Raises
    ------
    ConfigError
        If there is none; the message names the nearest.
    """
    if name in SOURCES:
        return SOURCES[name]
    if match := re.fullmatch(r"tu:([A-Za-z0-9_-]+)", name):
        title = f"{match[1]}, {MORRIS}"
        return Source(title, "graph", GRAPH_SPLIT, Statistics(), raw_paths.tu(match[1]))
    raise ConfigError(
        f'Unknown data set "{name}". {nearest(name, SOURCES)} Or tu:NAME for a set of '
        "TU Dortmund, or the path of a graph file."
    )


def data_folder(data_dir: str | None = None) -> Path | None:
    """Resolve the folder of raw data.

    Parameters
    ----------
    data_dir : str, optional
        The setting ``data-dir``; empty or ``None``: ``FLOWER_FGL_DATA``.

    Returns
    -------
    Path or None
        Absolute; ``None`` if neither is set.

    Raises
    ------
    DataError
        If it is not a folder.
    """
    text = data_dir or os.environ.get("FLOWER_FGL_DATA")
    if not text:
        return None
    folder = Path(text).expanduser().resolve()
    if not folder.is_dir():
        origin = "data-dir" if data_dir else "FLOWER_FGL_DATA"
        raise DataError(f"{origin} must name a folder of raw data; {folder} is none.")
    return folder


def cache_folder() -> Path:
    """Resolve the folder for downloads and processed files.

    Returns
    -------
    Path
        ``FLOWER_FGL_CACHE``, or the user's cache folder; it need not exist yet.
    """
    text = os.environ.get("FLOWER_FGL_CACHE")
    if text:
        return Path(text).expanduser().resolve()
    return Path(platformdirs.user_cache_dir("flower-fgl"))


def load(
    name: str,
    *,
    data_dir: Path | None,
    cache_dir: Path,
    allow_download: bool = True,
    check: bool = True,
) -> NodeDataset | GraphDataset:
    """Load a data set, whole.

    Parameters
    ----------
    name : str
        As :func:`find_source` takes it; ``synthetic`` has its default settings.
    data_dir : Path or None
        Folder of raw data; it is only read.
    cache_dir : Path
        Folder for downloads and processed files.
    allow_download : bool
        Whether a set that is nowhere on disk is fetched from where it is published.
    check : bool
        Whether the published statistics must hold; not for cut-down files in tests.

    Returns
    -------
    NodeDataset or GraphDataset
        Undirected and simple; float32 features, sparse CSR where less than 10 % of at
        least 64 columns are set.

    Raises
    ------
    ConfigError
        If there is no such data set.
    DataError
        If it is missing, damaged, or not what was published.
    """
    source = find_source(name)
    if not source.layouts:
        return synthetic_dataset(SyntheticSettings())
    raw, layout = obtain(
        name,
        source.layouts,
        data_dir=data_dir,
        cache_dir=cache_dir,
        allow_download=allow_download,
    )
    dataset = _dataset(name, raw)
    if check and not layout.is_partial:
        _check_statistics(name, source.statistics, _measure(dataset, raw))
    return dataset


def _dataset(name: str, raw: Raw) -> NodeDataset | GraphDataset:
    """Give what a reader handed over its name and class names, and check it."""
    num_classes = int(raw.y.max()) + 1 if raw.y.numel() else 0
    class_names = tuple(str(c) for c in range(num_classes))
    if isinstance(raw, RawGraphs):
        graphs = GraphDataset(
            name, raw.x, raw.edge_index, raw.batch, raw.y, class_names
        )
        validate_graph_dataset(graphs)
        return graphs
    nodes = NodeDataset(
        name=name,
        x=raw.x,
        edge_index=raw.edge_index,
        y=raw.y,
        class_names=raw.class_names or class_names,
        masks=raw.masks,
        network=raw.network,
    )
    validate_node_dataset(nodes)
    return nodes


def _measure(dataset: NodeDataset | GraphDataset, raw: Raw) -> Statistics:
    """Count what is published."""
    graphs = None
    if isinstance(dataset, GraphDataset):
        graphs = dataset.num_graphs
    elif dataset.network is not None:
        graphs = int((dataset.network.bincount() > 0).sum())
    return Statistics(
        nodes=int(dataset.x.shape[0]),
        edges=dataset.edge_index.shape[1] // 2,
        features=dataset.num_features,
        classes=dataset.num_classes,
        entries=raw.entries if isinstance(raw, RawNodes) else None,
        graphs=graphs,
    )


def _check_statistics(name: str, published: Statistics, found: Statistics) -> None:
    """Compare, and name both figures of all that differ."""
    wrong = []
    for field in fields(Statistics):
        expected, actual = getattr(published, field.name), getattr(found, field.name)
        if expected is not None and expected != actual:
            wrong.append(f"{expected:,} {field.name} are published, {actual:,} found")
    if wrong:
        raise DataError(
            f'The files of "{name}" are not the published ones: {"; ".join(wrong)}. '
            "Fetch them again, or load your own graph from a graph file."
        )
