"""Load a dataset by its name, and compare it with its published statistics.

``registry.py`` lists the datasets, ``raw_paths.py`` says where their files lie, and
``download.py`` obtains them for the readers.
"""

import re
from dataclasses import fields, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.extensions import owner_of, refusal
from flower_fgl.core.options import nearest
from flower_fgl.core.settings import SyntheticSettings
from flower_fgl.core.targets import CLASSES, TargetKind
from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.graph_files.validate import (
    validate_graph_dataset,
    validate_node_dataset,
)
from flower_fgl.datasets.pyg_data import GivenNames, graph_dataset, node_dataset
from flower_fgl.datasets.sources import raw_paths
from flower_fgl.datasets.sources.download import is_on_disk, obtain
from flower_fgl.datasets.sources.raw_readers import choose_target
from flower_fgl.datasets.sources.registry import (
    GRAPH_SPLIT,
    MORRIS,
    SOURCES,
    TWITCH,
    Source,
    Statistics,
)
from flower_fgl.datasets.sources.synthetic import synthetic_dataset

__all__ = [
    "Source",
    "Statistics",
    "find_source",
    "is_missing",
    "load",
]


def find_source(name: str) -> Source:
    """Look up a dataset by its name.

    This is a key of ``SOURCES``, ``tu:NAME`` for any TU Dortmund dataset, or
    ``twitch:NAME`` for a country of Twitch.

    Raises a ConfigError if the name is unknown; the message suggests the nearest one.
    """
    if name in SOURCES or refusal("datasets", name):
        return SOURCES[name]
    if match := re.fullmatch(r"tu:([A-Za-z0-9_-]+)", name):
        title = f"{match[1]}, {MORRIS}"
        return Source(title, "graph", GRAPH_SPLIT, Statistics(), raw_paths.tu(match[1]))
    if (country := name.removeprefix("twitch:")) != name:
        if country not in TWITCH:
            raise ConfigError(
                f'Unknown country "{country}" of Twitch. {nearest(country, TWITCH)}'
            )
        title = f"Twitch streamers, {country}, Rozemberczki et al., JCN 2021"
        nodes, edges = TWITCH[country]
        statistics = Statistics(nodes, edges, 3170, 2)
        layouts = raw_paths.twitch(country)
        return Source(title, "node", "20/40/40", statistics, layouts)
    raise ConfigError(
        f'Unknown dataset "{name}". {nearest(name, SOURCES)} You can also give tu:NAME '
        "for a TU Dortmund dataset, twitch:NAME for a country of Twitch, or the path of "
        "a graph file."
    )


def is_missing(name: str, *, data_dir: Path | None, cache_dir: Path) -> bool:
    """Return whether :func:`load` must download a dataset; arguments as there."""
    source = find_source(name)
    if source.loader or not source.layouts:
        return False
    return not is_on_disk(name, source.layouts, data_dir=data_dir, cache_dir=cache_dir)


def load(
    name: str,
    *,
    data_dir: Path | None,
    cache_dir: Path,
    allow_download: bool = True,
    check: bool = True,
    target: str = "",
    kind: TargetKind = CLASSES,
) -> NodeDataset | GraphDataset:
    """Load a complete dataset, undirected and simple.

    Features are float32; they are sparse CSR if there are at least 64 columns and less
    than 15 % of the entries are non-zero. A ConfigError says that the name or the target
    is unknown; a DataError that the files are missing or damaged, or differ from the
    published dataset.

    Parameters
    ----------
    name : str
        Name as in :func:`find_source`; ``synthetic`` uses its default settings.
    data_dir, cache_dir : Path or None, Path
        Data folder, only read; folder for downloads and processed files.
    allow_download, check : bool
        Whether to download a dataset that is not on disk, and whether it must match its
        published statistics; tests with reduced files disable that.
    target : str
        Target of a dataset with several, or ``all``, see ``core/settings.py``; empty: the
        first, for a run that does not read classes.
    kind : {"classes", "labels", "numbers"}
        What ``y`` of another package's dataset holds.
    """
    source = find_source(name)
    if source.loader:
        dataset = _call(name, source, kind)
        if check:
            _check_statistics(name, source.statistics, _measure(dataset, dataset))
        return dataset
    if not source.layouts:
        return synthetic_dataset(SyntheticSettings())
    (found, entries), layout = obtain(
        name,
        source.layouts,
        data_dir=data_dir,
        cache_dir=cache_dir,
        allow_download=allow_download,
    )
    dataset = whole = replace(found, name=name)
    if whole.targets is not None:
        dataset = choose_target(whole, target or whole.target.names[0])
    _validate(dataset)
    if check and not layout.is_partial:
        measured = replace(_measure(dataset, whole), entries=entries)
        _check_statistics(name, source.statistics, measured)
    return dataset


def _validate(dataset: NodeDataset | GraphDataset) -> None:
    if isinstance(dataset, GraphDataset):
        validate_graph_dataset(dataset)
    else:
        validate_node_dataset(dataset)


def _call(name: str, source: Source, kind: TargetKind) -> NodeDataset | GraphDataset:
    """Call the loader of another package's dataset, and convert what it returns."""
    loader = source.loader
    try:
        found: Any = (resolve_name(loader) if isinstance(loader, str) else loader)()
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f'The dataset "{name}" of {owner_of("datasets", name)} cannot be loaded: '
            f"{type(error).__name__}: {error}."
        ) from error
    dataset: NodeDataset | GraphDataset
    if isinstance(found, GraphDataset | NodeDataset):
        dataset = replace(found, name=name)
        _validate(dataset)
    elif isinstance(found, list | tuple):
        dataset = graph_dataset(found, name, kind)
    else:
        dataset = node_dataset(found, name, GivenNames.of_kind(kind))
    if isinstance(dataset, GraphDataset) != (source.task == "graph"):
        raise DataError(
            f'The dataset "{name}" is declared with task = "{source.task}", but its '
            f"loader returns {'graphs' if source.task == 'node' else 'one graph'}."
        )
    return dataset


def _measure(
    dataset: NodeDataset | GraphDataset, whole: NodeDataset | GraphDataset
) -> Statistics:
    """Compute the statistics of a loaded dataset; a label has two classes.

    The ``whole`` has graphs without a label too.
    """
    graphs, classes = None, dataset.target.width if dataset.targets is None else 2
    if isinstance(dataset, GraphDataset):
        graphs = len(whole.y)
    elif dataset.network is not None:
        graphs = int((dataset.network.bincount() > 0).sum())
    return Statistics(
        nodes=int(whole.x.shape[0]),
        edges=whole.edge_index.shape[1] // 2,
        features=dataset.num_features,
        classes=None if dataset.target.has_numbers else classes,
        graphs=graphs,
        targets=None if whole.targets is None else whole.targets.shape[1],
    )


def _check_statistics(name: str, published: Statistics, found: Statistics) -> None:
    """Raise an error that lists every published number the dataset does not match."""
    wrong = []
    for field in fields(Statistics):
        expected, actual = getattr(published, field.name), getattr(found, field.name)
        if expected is not None and expected != actual:
            wrong.append(f"published {expected:,} {field.name}, found {actual:,}")
    if wrong:
        raise DataError(
            f'The files of "{name}" differ from the published dataset: '
            f"{'; '.join(wrong)}. Download them again, or load your own graph from a "
            "graph file."
        )
