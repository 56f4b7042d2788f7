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

import torch
from torch import Tensor

from flower_fgl.datasets.canonical import compact_features, undirected_simple
from flower_fgl.datasets.raw_layouts import RawGraphs, RawNodes
from flower_fgl.errors import DataError

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
        with warnings.catch_warnings():  # Planetoid's reader leaves a filter behind
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
    """

    def read(root: Path) -> RawGraphs:
        datasets = _import_quietly("torch_geometric.datasets")
        graphs = datasets.TUDataset(str(root), name, use_node_attr=True)
        union = _import_quietly("torch_geometric.data").Batch.from_data_list(
            [graphs[i] for i in range(len(graphs))]
        )
        if union.y is None or union.y.is_floating_point():
            raise DataError(f"{name}: its graphs have no classes to learn.")
        x = union.x if union.x is not None else torch.empty((union.num_nodes, 0))
        if graphs.num_node_labels:
            x = x[:, graphs.num_node_attributes :]
        return RawGraphs(
            x=x.to(torch.float32).contiguous(),
            edge_index=undirected_simple(union.edge_index, union.num_nodes),
            batch=union.batch,
            y=union.y.flatten(),
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
        storage = importlib.import_module("torch_geometric.data.storage")
        classes = importlib.import_module("torch_geometric.data.data")
        allowed = [
            classes.DataEdgeAttr,
            classes.DataTensorAttr,
            storage.GlobalStorage,
        ]
        with (
            contextlib.redirect_stdout(sys.stderr),  # progress, not output of a program
            torch.serialization.safe_globals(allowed),
        ):
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
