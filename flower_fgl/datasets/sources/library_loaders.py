"""Readers that call the dataset loaders of torch-geometric and OGB.

Each takes a root folder in the layout that the library's loader expects, and may write
there. Graphs get their canonical form before the loader writes them.
"""

import contextlib
import importlib
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.settings import NUMBER_DATASETS, TARGETS
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import MessageEdges
from flower_fgl.datasets.graph_files.archive import Array, read_arrays
from flower_fgl.datasets.graph_files.own_split import PARTS
from flower_fgl.datasets.sources.raw_readers import Raw, read_targets
from flower_fgl.datasets.transforms.canonical import (
    compact_features,
    csr_tensor,
    undirected_simple,
)
from flower_fgl.datasets.transforms.typed import NodeTable, TypedTarget, typed_dataset
from flower_fgl.nn.sparse import quiet_csr

__all__ = ["filtered_nodes", "ogb_graphs", "ogb_nodes", "pyg_nodes", "tu_graphs"]


OGB_PARTS = {"train": "train", "val": "valid", "test": "test"}
"""Parts of a split, and their names at OGB."""


def pyg_nodes(root: Path, *, loader: str, **settings: str | bool) -> Raw:
    """Read a node dataset of the class ``loader`` of ``torch_geometric.datasets``.

    ``settings`` are further arguments of the class, e.g. ``name="Cora"``. Of a dataset with
    several published splits this reads the first one.
    """
    make = getattr(_import_quietly("torch_geometric.datasets"), loader)
    with quiet_csr():  # also removes a warning filter that Planetoid leaves behind
        data = make(str(root), pre_transform=_finish, **settings)[0]
    held = {s: data[f"{s}_mask"] for s in PARTS if f"{s}_mask" in data}
    first = {s: m if m.dim() == 1 else m[:, 0] for s, m in held.items()}
    return Raw.of(
        data.x,
        data.edge_index,
        data.y,
        entries=data.entries,
        masks={split: mask.contiguous() for split, mask in first.items()},
    )


def filtered_nodes(root: Path, *, name: str) -> Raw:
    """Read Chameleon or Squirrel without duplicate nodes (Platonov et al., ICLR 2023).

    The split is the first of the ten published ones. ``NAME/raw/NAME.npz`` has the
    layout of torch-geometric's ``HeterophilousGraphDataset``, which does not know these
    two. The file is downloaded if it is missing.
    """
    path = root / name / "raw" / f"{name}.npz"
    if not path.is_file():
        loader = _import_quietly("torch_geometric.datasets").HeterophilousGraphDataset
        download = _import_quietly("torch_geometric.data").download_url
        download(f"{loader.url}/{name}.npz", str(path.parent), log=False)
    keys = ("node_features", "node_labels", "edges", *(f"{s}_masks" for s in PARTS))
    arrays = read_arrays(path, keys)
    x, y, edges, *masks = (torch.from_numpy(arrays[key]) for key in keys)
    return Raw.of(
        compact_features(x),
        undirected_simple(edges.T.to(torch.int64).contiguous(), len(y)),
        y.to(torch.int64),
        entries=len(edges),
        masks={s: mask[0].to(torch.bool) for s, mask in zip(PARTS, masks, strict=True)},
    )


def tu_graphs(root: Path, *, name: str) -> Raw:
    """Read a TU graph classification dataset by its name at TU Dortmund.

    Features are the one-hot node labels, as in papers. Without node labels they are the
    node attributes; without both they have width 0. Features of edges are the attributes
    and one-hot labels of edges. A DataError says that the graphs have no classes.

    torch-geometric drops graphs without edges at the end of the dataset. This reader keeps
    them, using the file that assigns each node to its graph.
    """
    datasets = _import_quietly("torch_geometric.datasets")
    files = root / name / "raw" / name
    try:
        graphs = datasets.TUDataset(str(root), name, use_node_attr=True)
    except Exception:  # of any kind, if a file is not as expected
        _check_tu_files(files)
        raise
    data = graphs._data  # all graphs concatenated; node numbers restart at 0 in each
    indicator = np.loadtxt(f"{files}_graph_indicator.txt", dtype=np.int64, ndmin=1)
    batch = torch.from_numpy(indicator - 1)
    if data.y is None or data.y.is_floating_point():
        raise DataError(
            f"{name}: expected one class per graph, but the graphs have no classes. "
            "Choose a TU dataset for classification."
        )
    x = data.x if data.x is not None else torch.empty((batch.numel(), 0))
    if graphs.num_node_labels:
        x = x[:, graphs.num_node_attributes :]
    num_nodes = batch.bincount(minlength=data.y.numel())
    first_node = num_nodes.cumsum(0) - num_nodes
    num_entries = graphs.slices["edge_index"].diff()
    offset = first_node[: num_entries.numel()].repeat_interleave(num_entries)
    if bool((data.edge_index < 0).any()):
        _check_tu_files(files)
    edges, messages = data.edge_index + offset, None
    if data.edge_attr is not None:
        messages = MessageEdges(edges, data.edge_attr.to(torch.float32).contiguous())
    return Raw.of(
        x=x.to(torch.float32).contiguous(),
        edge_index=undirected_simple(edges, batch.numel()),
        messages=messages,
        batch=batch,
        y=data.y.flatten(),
    )


def _check_tu_files(files: Path) -> None:
    """Raise an error if numbers of a TU dataset start at 0, or a label is no class.

    ``files`` is the path without ``_A.txt`` etc.
    """
    paths = [Path(f"{files}_{part}.txt") for part in ("graph_indicator", "A")]
    tables = {
        p.name: np.loadtxt(p, np.int64, delimiter=",", ndmin=1)
        for p in paths
        if p.exists()
    }
    if low := [name for name, table in tables.items() if table.min(initial=1) < 1]:
        raise DataError(
            f"{' and '.join(low)}: graphs and nodes of a TU dataset are numbered from 1, "
            "but these numbers start below 1. Add 1 to each number if they start at 0."
        )
    labels = Path(f"{files}_graph_labels.txt")
    lines = labels.read_text("utf-8").splitlines() if labels.exists() else []
    for place, line in enumerate(lines, start=1):
        if not re.fullmatch(r"\s*[+-]?[0-9]*\s*", line):
            raise DataError(
                f"{labels.name}, line {place}: expected the class of a graph as a whole "
                f'number, got "{line[:80]}". Number the classes 0, 1, …; numbers to '
                "predict are not supported."
            )


def ogb_nodes(root: Path, *, name: str) -> Raw:
    """Read a node classification dataset by its name at OGB.

    Notes
    -----
    1. OGB's loader reads its processed file with ``torch.load``, which since torch 2.6
       accepts only listed classes. The classes of ``torch_geometric.data.Data`` are
       listed during the call.
    2. OGB's loader prompts on the terminal before it replaces another release. This
       reader raises a DataError instead, so no worker waits for input. The loader also
       prompts before it downloads more than 1 GB; ``raw_paths.py`` disables such
       downloads.
    3. Nodes without features get the mean attributes of their edges, as in OGB's own
       examples.
    """
    folder = _ogb_folder(root, name, "nodeproppred")
    loader = _import_quietly("ogb.nodeproppred").PygNodePropPredDataset
    with _ogb_surroundings():
        dataset = loader(name, root=str(root), pre_transform=_finish)
        split = dataset.get_idx_split()
    data = dataset[0]
    masks = {p: _mask(split[own], len(data.y)) for p, own in OGB_PARTS.items()}
    return Raw.of(
        data.x,
        data.edge_index,
        data.y,
        entries=data.entries,
        names=None if data.y.dim() == 2 else _ogb_class_names(folder),
        masks=masks,
    )


def ogb_graphs(root: Path, *, name: str, split: str) -> Raw:
    """Read a graph classification dataset by its name at OGB and its published split.

    Features of molecules are the nine attributes of an atom, each one-hot, of width
    174. Without node features they have width 0. Features of edges are the three
    attributes of a bond, one-hot, of width 13. A DataError says that the files belong
    to another release than the one the installed ``ogb`` reads, the labels are no
    classes, or an attribute is out of range.

    Notes
    -----
    1. A linear layer on the one-hot attributes computes the same as OGB's ``AtomEncoder``
       and ``BondEncoder``, the sum of an embedding per attribute.
    2. The tables are read at once, instead of graph by graph as by OGB's loader, which
       only downloads them.
    """
    folder = _ogb_folder(root, name, "graphproppred")
    if not (folder / "raw").is_dir():
        loader = _import_quietly("ogb.graphproppred").PygGraphPropPredDataset
        with _ogb_surroundings():
            loader(name, root=str(root))

    def table(part: str) -> Tensor:
        return torch.from_numpy(_ogb_table(folder, part))

    num_nodes, num_edges = table("raw/num-node-list"), table("raw/num-edge-list")
    y, targets = table("raw/graph-label"), None
    if name in TARGETS and y.shape[1] > 1:
        y, targets = read_targets(y, name), _ogb_targets(folder, y.shape[1])
    elif name in NUMBER_DATASETS:
        y, targets = y.to(torch.float64), _ogb_targets(folder, y.shape[1])
    elif y.shape[1] != 1 or y.is_floating_point():
        raise DataError(
            f"{name}: expected one class per graph, got {y.shape[1]} labels of type "
            f"{y.dtype}. Choose a dataset that flower-fgl datasets lists."
        )
    batch = torch.arange(len(num_nodes)).repeat_interleave(num_nodes[:, 0])
    first_node = num_nodes[:, 0].cumsum(0) - num_nodes[:, 0]
    edges = table("raw/edge") + first_node.repeat_interleave(num_edges[:, 0])[:, None]
    x, messages = torch.empty((len(batch), 0)), None
    if (folder / "raw" / "node-feat.csv.gz").is_file():
        x = _one_hot(table("raw/node-feat"), "atom", name)
    if "-mol" in name and (folder / "raw" / "edge-feat.csv.gz").is_file():
        of_bonds = _one_hot(table("raw/edge-feat"), "bond", name).to_dense()
        messages = MessageEdges(edges.T.contiguous(), of_bonds)
    return Raw.of(
        x=x,
        edge_index=undirected_simple(edges.T.contiguous(), len(batch)),
        messages=messages,
        batch=batch,
        y=y[:, 0] if targets is None else y,
        masks=_ogb_split(folder, split, len(y)),
        names=targets,
    )


def ogb_typed(root: Path, *, name: str, kind: str) -> Raw:
    """Read a typed graph by its name at OGB, whose nodes of one kind have classes.

    Reverse relations are not listed, and the years of papers are not used.
    """
    import pandas as pd

    folder = _ogb_folder(root, name, "nodeproppred")
    sizes = pd.read_csv(folder / "raw" / "num-node-dict.csv.gz").iloc[0]
    tables = {}
    for own, size in sizes.items():
        place, x = f"raw/node-feat/{own}/node-feat", torch.empty(int(size), 0)
        if (folder / f"{place}.csv.gz").is_file():
            x = torch.from_numpy(_ogb_table(folder, place).astype(np.float32))
        tables[str(own)] = NodeTable(x)
    relations = {}
    for triple in sorted(map(tuple, _ogb_table(folder, "raw/triplet-type-list"))):
        edges = _ogb_table(folder, f"raw/relations/{'___'.join(triple)}/edge")
        relations[triple] = torch.from_numpy(edges.T.astype(np.int64))
    y = torch.from_numpy(_ogb_table(folder, f"raw/node-label/{kind}/node-label")[:, 0])
    names = _ogb_class_names(folder) or tuple(map(str, range(int(y.max()) + 1)))
    masks = _ogb_split(folder, f"time/{kind}", len(y))
    wanted = TypedTarget(y.to(torch.int64), Target.classes(names), masks)
    found = typed_dataset(name, tables, relations, kind, wanted)
    return Raw(found, sum(edges.shape[1] for edges in relations.values()))


def _ogb_table(folder: Path, part: str) -> Array:
    """Read a table of OGB, which has no header."""
    import pandas as pd  # takes a second to import

    frame = pd.read_csv(folder / f"{part}.csv.gz", header=None)
    table: Array = frame.to_numpy(copy=True)
    return table


def _ogb_split(folder: Path, split: str, number: int) -> dict[str, Tensor]:
    """Read the masks of a published split of some nodes or graphs."""
    numbers = {
        p: _ogb_table(folder, f"split/{split}/{o}") for p, o in OGB_PARTS.items()
    }
    return {p: _mask(torch.from_numpy(n[:, 0]), number) for p, n in numbers.items()}


def _ogb_targets(folder: Path, count: int) -> tuple[str, ...]:
    """Return the names of the targets of molecules, or their numbers."""
    import pandas as pd

    path = folder / "mapping" / "mol.csv.gz"
    if path.is_file():
        columns = pd.read_csv(path, nrows=0).columns
        names = tuple(c for c in columns if c.lower() not in ("smiles", "mol_id"))
        if len(names) == count:
            return names
    return tuple(map(str, range(count)))


def _one_hot(attributes: Tensor, kind: str, name: str) -> Tensor:
    """Encode attributes of atoms, (N, 9), or bonds, (M, 3), one-hot as sparse CSR."""
    sizes = importlib.import_module("ogb.utils.features")
    widths = getattr(sizes, f"get_{kind}_feature_dims")()
    width = torch.tensor(widths)
    fits = attributes.shape[1:] == width.shape
    if not fits or bool(((attributes < 0) | (attributes >= width)).any()):
        raise DataError(
            f"{name}: expected {len(width)} attributes per {kind} below {widths}. "
            "Download the dataset again."
        )
    column = attributes + (width.cumsum(0) - width)
    count, total = len(attributes), int(width.sum())
    start = np.arange(count + 1) * len(width)
    ones = np.ones(column.numel(), dtype=np.float32)
    shape = (count, total)
    return csr_tensor(
        scipy.sparse.csr_matrix((ones, column.flatten().numpy(), start), shape)
    )


def _ogb_folder(root: Path, name: str, kind: str) -> Path:
    """Return a dataset's folder; raise an error if it holds another release."""
    ogb, folder = _import_ogb(), root / name.replace("-", "_")
    version = _ogb_version(Path(str(ogb.__file__)).parent / kind, name)
    if folder.is_dir() and not (folder / f"RELEASE_v{version}.txt").is_file():
        raise DataError(
            f"{name}: expected RELEASE_v{version}.txt, the marker of the release that "
            f"ogb {ogb.__version__} reads, but {folder} lacks it. Download that release."
        )
    return folder


def _finish(data: Any) -> Any:
    """Convert a graph to its canonical form before the loader writes it."""
    data.entries = data.edge_index.shape[1]
    data.num_nodes = int(data.num_nodes)  # a NumPy number in binary OGB sets
    if data.x is None:
        # the mean attributes of the edges that begin at each node
        first, attr = data.edge_index[0], data.edge_attr
        total = torch.zeros(data.num_nodes, attr.shape[1]).index_add_(0, first, attr)
        count = first.bincount(minlength=data.num_nodes).clamp(min=1)
        data.x, data.edge_attr = total / count[:, None], None
    data.edge_index = undirected_simple(data.edge_index, data.num_nodes)
    data.x = compact_features(data.x)
    if data.y.dim() == 2 and data.y.shape[1] > 1:
        data.y = read_targets(data.y, "the dataset")
        return data
    y = data.y.flatten()
    if y.is_floating_point():  # ogbn-papers100M: NaN for nodes without a class
        y = y.nan_to_num(nan=-1)
    data.y = y.to(torch.int64)
    return data


def _mask(nodes: Tensor, num_nodes: int) -> Tensor:
    """Turn node numbers into a boolean mask."""
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[nodes] = True
    return mask


@contextlib.contextmanager
def _ogb_surroundings() -> Iterator[None]:
    """Make OGB's loader work with current torch and pandas; send its output to stderr."""
    storage = importlib.import_module("torch_geometric.data.storage")
    classes = importlib.import_module("torch_geometric.data.data")
    allowed = [classes.DataEdgeAttr, classes.DataTensorAttr, storage.GlobalStorage]
    # the context removes all of its entries, also those of torch-geometric itself
    known = torch.serialization.get_safe_globals()
    allowed = [entry for entry in allowed if entry not in known]
    with (
        contextlib.redirect_stdout(sys.stderr),  # progress messages
        torch.serialization.safe_globals(allowed),
        quiet_csr(),
    ):
        # OGB wraps read-only arrays of pandas 3 in tensors, and only reads them
        warnings.filterwarnings("ignore", message="The given NumPy array is not wri")
        yield


def _ogb_version(package: Path, name: str) -> str:
    """Return the release of a dataset that a sub-package of ``ogb`` reads."""
    import pandas as pd

    table = pd.read_csv(package / "master.csv", index_col=0, keep_default_na=False)
    return str(table.loc["version", name])


def _ogb_class_names(folder: Path) -> tuple[str, ...] | None:
    """Read the class names from ``mapping/labelidx2….csv.gz``, if there are any."""
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
    """Import ``ogb`` without its thread that checks PyPI for a newer version."""
    # ogb starts that thread if it can import `outdated`; without a network, a worker
    # would wait for the thread when it exits.
    if "ogb" in sys.modules:
        return sys.modules["ogb"]
    before = sys.modules.get("outdated")
    sys.modules["outdated"] = None  # type: ignore[assignment]  # makes its import fail
    try:
        return importlib.import_module("ogb")
    finally:
        del sys.modules["outdated"]
        if before is not None:
            sys.modules["outdated"] = before


def _import_quietly(module: str) -> Any:
    """Import a module of torch-geometric without torch's deprecation warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".torch.jit.script. is deprecated")
        return importlib.import_module(module)
