"""Conversion of published partitions (OpenFGL, FedGB) into graph files.

Both store one ``torch_geometric.data.Data`` per client, in a folder such as
``distrib/subgraph_fl_louvain_1_Cora_client_10``:

``data_0.pt``, ``data_1.pt``, …
    ``x``, ``edge_index``, ``y``, and optionally ``global_map`` (number of each node in the
    whole graph: a dict, list, array or tensor) and ``num_global_classes``. A client
    without edges has an empty ``edge_index`` of any shape.
``node_cls/train_0.pt``, ``val_0.pt``, ``test_0.pt``, …
    The split, boolean masks of shape (N,); also in ``node_cls/default_split/``, or in
    ``node_cls/split_0.2-0.4-0.4/`` for a split that the user chose.

A folder of a FedGB dataset also holds ``fedgb_manifest.json``, and the clients in the
folder below ``distrib/`` that its ``processed_partition`` names. In a homogeneous dataset
of FedGB, attributes ``node_type`` and ``edge_type`` have no meaning. Clients of one of the
level ``hetero_subgraph`` have these, their names ``hetero_node_types`` and
``hetero_edge_types`` (triples), and ``target_node_type``; ``y`` is -1 for other nodes, and
``x`` is padded with zeros to one width.
"""

import importlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import ClientGraph, NodeDataset
from flower_fgl.datasets.graph_files.write import save_client_graph
from flower_fgl.datasets.pyg_data import ONE_GRAPH, GivenNames, node_dataset
from flower_fgl.datasets.pyg_read import own_masks, read_index
from flower_fgl.datasets.pyg_typed import TypeNames
from flower_fgl.datasets.splits.split import SPLITS

__all__ = ["convert_partition"]

CLIENT = re.compile(r"data_(0|[1-9][0-9]*)\.pt")
TASK = "node_cls"
HOMOGENEOUS, TYPED = "homo_subgraph", "hetero_subgraph"
"""Levels of FedGB."""
TYPES: tuple[str, ...] = ("node_type", "edge_type", "target_node_type")
TYPES += ("hetero_node_types", "hetero_edge_types")
"""Attributes of a typed graph."""
log = logging.getLogger(__name__)


def convert_partition(source: Path, target: Path) -> list[Path]:
    """Convert a partition of OpenFGL or FedGB into one graph file per client.

    ``source`` is a folder with ``data_0.pt``, or of a FedGB dataset; ``target`` that of the
    written ``client-<k>.npz``, a value of the setting ``owners``. Classes are named by
    their numbers; nodes are sorted by their number in the whole graph.

    Notes
    -----
    1. Files are read with ``torch.load(weights_only=True)``: only tensors, numbers and
       the containers of torch-geometric are accepted, and no code of a file runs.
    2. Nodes of a typed graph are numbered kind by kind. Columns of padding are kept, and a
       warning names the kinds: no file says which columns these are.
    """
    folder, level = _find_folder(source)
    numbers = sorted(
        int(match[1]) for path in folder.iterdir() if (match := CLIENT.match(path.name))
    )
    if numbers != list(range(len(numbers))):
        raise DataError(
            f"{folder}: the clients' files must be data_0.pt to data_{len(numbers) - 1}.pt "
            f"without a gap, got the numbers {numbers}. Copy the folder again."
        )
    if level == TYPED:
        datasets = _read_typed(folder, numbers)
        return _save(target, [dataset.client() for dataset in datasets])
    found = [_read_client(folder, k, level == HOMOGENEOUS) for k in numbers]
    widths = sorted({int(graph.x.shape[1]) for graph, _, _ in found})
    if len(widths) > 1:
        raise DataError(
            f"{folder}: the clients have different numbers of features, {widths}. Convert "
            "datasets of equal width only."
        )
    names = _class_names(max(most for _, _, most in found))
    clients = []
    for k, (graph, ids, _) in enumerate(found):
        dataset = node_dataset(graph, str(folder / f"data_{k}.pt"), names)
        if graph.edge_attr is None:  # then both directions are listed
            dataset = replace(dataset, messages=None)
        clients.append(dataset.client(partition_id=k, node_ids=ids))
    return _save(target, clients)


def _class_names(number: int, types: TypeNames = ONE_GRAPH) -> GivenNames:
    """Return the names of all classes, their numbers."""
    names = [str(c) for c in range(number)]
    return GivenNames(names, declared=names, types=types)


def _save(target: Path, clients: Sequence[ClientGraph]) -> list[Path]:
    """Write the files of all clients."""
    width = len(str(len(clients) - 1))
    paths = [target / f"client-{k:0{width}d}.npz" for k in range(len(clients))]
    if others := sorted({*target.glob("*.npz")} - {*paths}):
        raise DataError(
            f"{target} holds {others[0].name}, which is not one of these {len(paths)} "
            "clients. Choose another folder, or remove it."
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, client in zip(paths, clients, strict=True):
            save_client_graph(path, client)
    except OSError as error:
        raise DataError(f"Cannot write to {target}: {error}.") from error
    return paths


def _find_folder(source: Path) -> tuple[Path, str]:
    """Return the folder of the clients' files, and the level in a manifest, if any."""
    if not source.is_dir():
        what = "is a file" if source.exists() else "does not exist"
        raise DataError(
            f"{source} {what}. Give the folder of a partition, which holds data_0.pt."
        )
    manifest = source / "fedgb_manifest.json"
    named, level = _read_manifest(manifest) if manifest.is_file() else ("", "")
    if (source / "data_0.pt").is_file():
        folder = source
    else:
        found = sorted(path.parent for path in source.glob("distrib/*/data_0.pt"))
        found = [path for path in found if path.name == named] or found
        if len(found) != 1:
            listed = f": {', '.join(path.name for path in found)}" if found else ""
            raise DataError(
                f"{source} holds no data_0.pt, and {len(found)} partitions below distrib"
                f"{listed}. Give the folder of one partition."
            )
        folder = found[0]
    if folder.name.startswith("graph_fl"):
        raise DataError(
            f"{folder} holds sets of graphs. Only partitions of one graph, for node "
            "classification, can be converted."
        )
    return folder, level


def _read_manifest(path: Path) -> tuple[str, str]:
    """Reject a FedGB dataset of another task; return its partition, and its level."""
    try:
        manifest = json.loads(path.read_text("utf-8"))
        level, task = str(manifest["level"]), str(manifest["task"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error!r}. Download it again.") from error
    if level not in (HOMOGENEOUS, TYPED) or task != TASK:
        raise DataError(
            f'{path.parent} is a dataset of level "{level}" and task "{task}". Only the '
            f'levels "{HOMOGENEOUS}" and "{TYPED}" with task "{TASK}" can be converted: '
            "one graph per client, one class per node."
        )
    return str(manifest.get("processed_partition", "")), level


def _read_typed(folder: Path, numbers: Sequence[int]) -> list[NodeDataset]:
    """Read the typed graphs of all clients with their splits."""
    loaded = [_load(folder / f"data_{number}.pt") for number in numbers]
    most, padded, found = 0, dict[str, int](), []
    for number, data in zip(numbers, loaded, strict=True):
        where = str(folder / f"data_{number}.pt")
        if missing := [key for key in TYPES if getattr(data, key, None) is None]:
            raise DataError(
                f"{where}: {', '.join(missing)} is missing, by which a typed graph names "
                "its kinds and relations. Owners agree on them by name."
            )
        most = max(most, _num_classes(data))
    for number, data in zip(numbers, loaded, strict=True):
        name, kinds = str(folder / f"data_{number}.pt"), list(data.hetero_node_types)
        found_masks = _read_masks(folder, number, len(data.x))
        masks = (found_masks or own_masks(data, name)).items()
        plain = type(data)(
            x=data.x,
            edge_index=data.edge_index,
            y=data.y.flatten(),
            **{key: getattr(data, key) for key in TYPES},
            **{f"{part}_mask": mask for part, mask in masks},
        )
        width = int(data.x.shape[1])
        types = TypeNames(widths=dict.fromkeys(kinds, width), is_single=False)
        dataset = node_dataset(plain, name, _class_names(most, types))
        for kind, columns in dataset.schema.blocks() if dataset.schema else ():
            used = (dataset.x.to_dense()[:, columns] != 0).any(dim=0).nonzero()
            last = int(used.max()) + 1 if used.numel() else 0
            padded[kind] = max(padded.get(kind, 0), last)
        found.append(dataset)
    if kinds := [f"{kind} ({used})" for kind, used in padded.items() if used < width]:
        log.warning(
            "%s: x has %d columns, but the last ones are 0 at all clients for the kinds %s "
            "(used columns). They may be padding to one width, and are kept.",
            folder,
            width,
            ", ".join(kinds),
        )
    return found


def _read_client(
    folder: Path, number: int, is_homogeneous: bool
) -> tuple[Any, Tensor, int]:
    """Return a client's graph with its split, nodes by ascending number in the whole graph.

    These numbers follow, and the client's number of classes.
    """
    path = folder / f"data_{number}.pt"
    data = _load(path)
    parts: list[Any] = [getattr(data, key, None) for key in ("x", "edge_index", "y")]
    x, edge_index, y = parts
    if not all(isinstance(part, Tensor) for part in parts):
        raise DataError(
            f"{path}: expected a graph with the tensors x, edge_index and y, got "
            f"{type(data).__name__}. Only homogeneous graphs can be converted."
        )
    types = getattr(data, "node_type", None)
    if isinstance(types, Tensor):
        types = types.flatten().tolist()
    if not is_homogeneous and types is not None and len(set(map(str, types))) > 1:
        raise DataError(
            f"{path}: the graph has several types of nodes. Only graphs with one type can "
            "be converted."
        )
    count = len(x)
    if len(y.flatten()) != count:
        raise DataError(
            f"{path}: y must hold one class number per node, shape ({count},), got shape "
            f"{tuple(y.shape)}."
        )
    if edge_index.numel() == 0:
        edge_index = edge_index.new_zeros((2, 0))
    edges = read_index(edge_index, str(path), (count, count))
    ids, order = _global_ids(data, count).sort()
    place = torch.empty_like(order)
    place[order] = torch.arange(count)
    masks = _read_masks(folder, number, count) or own_masks(data, str(path))
    graph = type(data)(
        x=x[order],
        edge_index=place[edges],
        y=y.flatten()[order],
        edge_attr=getattr(data, "edge_attr", None),
        **{f"{name}_mask": mask[order] for name, mask in masks.items()},
    )
    return graph, ids, _num_classes(data)


def _num_classes(data: Any) -> int:
    """Return the declared number of classes, or more if a label is larger."""
    try:
        declared = int(getattr(data, "num_global_classes", 0) or 0)
    except (TypeError, ValueError):
        declared = 0
    if data.y.is_floating_point():  # is refused with the remedy
        return declared
    return max(declared, 1 + int(data.y.max()) if len(data.y) else 0)


def _global_ids(data: Any, count: int) -> Tensor:
    """Return the number of each node in the whole graph; 0..N-1 if it is not given."""
    table = getattr(data, "global_map", None)
    try:
        if isinstance(table, Mapping):
            numbers = {int(key): int(value) for key, value in table.items()}
            if not all(i in numbers for i in range(count)):
                # numbers of the whole graph first
                numbers = {value: key for key, value in numbers.items()}
            ids = torch.tensor([numbers.get(i, -1) for i in range(count)])
        else:
            ids = torch.as_tensor(table).reshape(-1).to(torch.int64)
    except (TypeError, ValueError, RuntimeError):  # not numbers
        return torch.arange(count)
    if len(ids) != count:
        return torch.arange(count)
    ordered = ids.sort().values
    is_valid = bool((ordered.diff() > 0).all()) and bool((ids >= 0).all())
    return ids if is_valid else torch.arange(count)


def _read_masks(folder: Path, number: int, count: int) -> dict[str, Tensor]:
    """Return the masks of a client's split; empty if the partition has none."""
    for place in _split_folders(folder):
        paths = {name: place / f"{name}_{number}.pt" for name in SPLITS}
        if not all(path.is_file() for path in paths.values()):
            continue
        masks = {name: _load(path) for name, path in paths.items()}
        for name, mask in masks.items():
            if not isinstance(mask, Tensor) or mask.shape != (count,):
                shape = tuple(getattr(mask, "shape", ()))
                raise DataError(
                    f"{paths[name]}: expected a mask of {count} booleans, one for each "
                    f"node of data_{number}.pt, got {type(mask).__name__} {shape or ''}. "
                    "Numbers of nodes cannot be read."
                )
        return {name: mask.to(torch.bool) for name, mask in masks.items()}
    return {}


def _split_folders(folder: Path) -> list[Path]:
    """Return the folders that may hold the split, the published one first."""
    places = [folder / TASK / "default_split", folder / TASK]
    chosen = sorted(path.parent for path in (folder / TASK).glob("split_*/train_0.pt"))
    is_published = any((place / "train_0.pt").is_file() for place in places)
    if len(chosen) > 1 and not is_published:
        names = ", ".join(path.name for path in chosen)
        raise DataError(
            f"{folder / TASK} holds several splits: {names}. Keep one of these folders, "
            'or rename one to "default_split".'
        )
    return places + chosen


def _load(path: Path) -> Any:
    """Read a file of tensors; no code in it runs."""
    data = importlib.import_module("torch_geometric.data.data")
    storage = importlib.import_module("torch_geometric.data.storage")
    allowed: list[Any] = [data.Data, data.DataEdgeAttr, data.DataTensorAttr]
    # numbers and arrays of numpy, which a global_map may hold
    kinds = ("int64", "int32", "float64", "float32")
    allowed += [storage.GlobalStorage, np.ndarray, np.dtype]
    allowed += [type(np.dtype(kind)) for kind in kinds]
    core = "_core" if hasattr(np, "_core") else "core"  # "core" before numpy 2
    module = importlib.import_module(f"numpy.{core}.multiarray")
    allowed += [
        (getattr(module, function), f"numpy.{name}.multiarray.{function}")
        for function in ("scalar", "_reconstruct")
        for name in ("_core", "core")
    ]
    # the context removes all of its entries, also those of torch-geometric itself
    known = torch.serialization.get_safe_globals()
    allowed = [entry for entry in allowed if entry not in known]
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}. Copy it again.") from error
    except Exception as error:  # torch refuses the objects with an UnpicklingError
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f" It holds an object of {found[1]}." if found else ""
        raise DataError(
            f"{path} holds more than tensors and numbers, which is not read: it could run "
            f"any code.{what} Only partitions of one homogeneous graph can be converted."
        ) from error
