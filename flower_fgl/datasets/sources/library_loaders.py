"""Readers around the stock loaders of torch-geometric and OGB.

Each maker returns a reader that takes a root folder, laid out as the stock loader
expects it, and may write there: the loader's ``processed`` files, and what it
downloads. Graphs are brought to their final form before the loader writes them, so that
is done once.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.sources.raw_readers import RawGraphs, RawNodes
from flower_fgl.datasets.transforms.canonical import (
    compact_features,
    quiet_csr,
    undirected_simple,
)

__all__ = ["ogb_nodes", "pyg_nodes", "tu_graphs"]


def pyg_nodes(loader: str, **settings: str) -> Callable[[Path], RawNodes]:
    """Make the reader of a node data set of ``torch_geometric.datasets``.

    Parameters
    ----------
    loader : str
        Name of the class, e.g. ``"Planetoid"``.
    **settings : str
        What it is called with besides its root, e.g. ``name="Cora"``.

    Returns
    -------
    callable from Path to RawNodes
    """

    def read(root: Path) -> RawNodes:
        make = getattr(_import_quietly("torch_geometric.datasets"), loader)
        with quiet_csr():  # which also undoes a filter that Planetoid's reader leaves
            data = make(str(root), pre_transform=_finish, **settings)[0]
        masks = {
            name: data[f"{name}_mask"]
            for name in ("train", "val", "test")
            if f"{name}_mask" in data
        }
        return RawNodes(data.x, data.edge_index, data.y, data.entries, masks=masks)

    return read


def tu_graphs(name: str) -> Callable[[Path], RawGraphs]:
    """Make the reader of a TU graph classification set.

    Parameters
    ----------
    name : str
        Its name at TU Dortmund, e.g. ``"MUTAG"``.

    Returns
    -------
    callable from Path to RawGraphs
        Features are the one-hot node labels, as papers use them; the node attributes
        where there are no labels; of width 0 where there are neither. It raises
        ``DataError`` if the graphs have no classes.

    Notes
    -----
    1. torch-geometric leaves graphs without edges out if they stand last; here they are
       kept, by the file that gives each node its graph.
    """

    def read(root: Path) -> RawGraphs:
        datasets = _import_quietly("torch_geometric.datasets")
        graphs = datasets.TUDataset(str(root), name, use_node_attr=True)
        data = graphs._data  # all graphs in one; node numbers start anew in each
        indicator = np.loadtxt(
            root / name / "raw" / f"{name}_graph_indicator.txt", dtype=np.int64, ndmin=1
        )
        batch = torch.from_numpy(indicator - 1)
        if data.y is None or data.y.is_floating_point():
            raise DataError(f"{name}: its graphs have no classes to learn.")
        x = data.x if data.x is not None else torch.empty((batch.numel(), 0))
        if graphs.num_node_labels:
            x = x[:, graphs.num_node_attributes :]
        num_nodes = batch.bincount(minlength=data.y.numel())
        first_node = num_nodes.cumsum(0) - num_nodes
        num_entries = graphs.slices["edge_index"].diff()
        offset = first_node[: num_entries.numel()].repeat_interleave(num_entries)
        return RawGraphs(
            x=x.to(torch.float32).contiguous(),
            edge_index=undirected_simple(data.edge_index + offset, batch.numel()),
            batch=batch,
            y=data.y.flatten(),
        )

    return read


def ogb_nodes(name: str) -> Callable[[Path], RawNodes]:
    """Make the reader of a node classification set of OGB.

    Parameters
    ----------
    name : str
        Its name at OGB, e.g. ``"ogbn-arxiv"``.

    Returns
    -------
    callable from Path to RawNodes
        It raises ``DataError`` if the folder is of another release than the installed
        ``ogb`` wants.

    Notes
    -----
    1. OGB's loader reads its own processed file by ``torch.load``, which since torch
       2.6 admits only listed classes: the parts of ``torch_geometric.data.Data`` are
       listed for the time of the call.
    2. OGB's loader asks on the terminal before it replaces another release: that case
       is refused here, so no worker ever waits for an answer. It also asks before it
       fetches more than 1 GB; ``layouts.py`` does not let it come to that.
    """

    def read(root: Path) -> RawNodes:
        ogb = _import_ogb()
        folder = root / name.replace("-", "_")
        version = _ogb_version(Path(str(ogb.__file__)).parent, name)
        if folder.is_dir() and not (folder / f"RELEASE_v{version}.txt").is_file():
            raise DataError(
                f"{name}: expected RELEASE_v{version}.txt, which says that the files "
                f"are of the release ogb {ogb.__version__} reads. Fetch that release."
            )
        loader = _import_quietly("ogb.nodeproppred").PygNodePropPredDataset
        with _ogb_surroundings():
            dataset = loader(name, root=str(root), pre_transform=_finish)
            split = dataset.get_idx_split()
        data = dataset[0]
        masks = {
            ours: _mask(split[theirs], data.y.numel())
            for ours, theirs in (("train", "train"), ("val", "valid"), ("test", "test"))
        }
        return RawNodes(
            data.x,
            data.edge_index,
            data.y,
            data.entries,
            class_names=_ogb_class_names(folder),
            masks=masks,
        )

    return read


def _finish(data: Any) -> Any:
    """Bring a graph to its final form before the loader writes it."""
    data.entries = data.edge_index.shape[1]
    data.num_nodes = int(data.num_nodes)  # a NumPy number in binary OGB sets
    data.edge_index = undirected_simple(data.edge_index, data.num_nodes)
    data.x = compact_features(data.x)
    y = data.y.flatten()
    if y.is_floating_point():  # ogbn-papers100M: NaN where there is no class
        y = y.nan_to_num(nan=-1)
    data.y = y.to(torch.int64)
    return data


def _mask(nodes: Tensor, num_nodes: int) -> Tensor:
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[nodes] = True
    return mask


@contextlib.contextmanager
def _ogb_surroundings() -> Iterator[None]:
    """Let OGB's loader work with today's torch and pandas, and keep its talk apart."""
    storage = importlib.import_module("torch_geometric.data.storage")
    classes = importlib.import_module("torch_geometric.data.data")
    allowed = [classes.DataEdgeAttr, classes.DataTensorAttr, storage.GlobalStorage]
    with (
        contextlib.redirect_stdout(sys.stderr),  # progress, not a program's output
        torch.serialization.safe_globals(allowed),
        quiet_csr(),
    ):
        # it wraps what pandas 3 lends it read-only, and only ever reads that
        warnings.filterwarnings("ignore", message="The given NumPy array is not wri")
        yield


def _ogb_version(package: Path, name: str) -> str:
    """Return the release of a set that the installed ``ogb`` reads."""
    import pandas as pd  # type: ignore[import-untyped]  # a second to import

    table = pd.read_csv(
        package / "nodeproppred" / "master.csv", index_col=0, keep_default_na=False
    )
    return str(table.loc["version", name])


def _ogb_class_names(folder: Path) -> tuple[str, ...] | None:
    """Read ``mapping/labelidx2….csv.gz``: class number, class name."""
    import pandas as pd

    tables = sorted(folder.glob("mapping/labelidx2*.csv.gz"))
    if not tables:
        return None
    table = pd.read_csv(tables[0], keep_default_na=False)
    ordered = table.sort_values(table.columns[0])
    numbers, names = ordered.iloc[:, 0].tolist(), ordered.iloc[:, 1].astype(str)
    is_complete = numbers == list(range(len(table))) and names.is_unique
    return tuple(names) if is_complete else None


def _import_ogb() -> Any:
    """Import ``ogb`` without the thread in which it asks PyPI for a newer version.

    On import ``ogb`` starts that thread if it can import ``outdated``; a worker without
    a network would wait for it at its end.
    """
    if "ogb" in sys.modules:
        return sys.modules["ogb"]
    with _hidden("outdated"):
        return importlib.import_module("ogb")


@contextlib.contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Let ``import module`` fail inside the block."""
    before = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]  # how import is told to fail
    try:
        yield
    finally:
        del sys.modules[module]
        if before is not None:
            sys.modules[module] = before


def _import_quietly(module: str) -> Any:
    """Import torch-geometric, which calls a function that torch has deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".torch.jit.script. is deprecated")
        return importlib.import_module(module)
