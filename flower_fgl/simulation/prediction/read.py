"""Read a graph or a set of graphs whose items a model predicts."""

import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from flower_fgl.core.agreement import differing_recipes, whole_recipe
from flower_fgl.core.errors import DataError, show_path
from flower_fgl.core.held_kind import BROKEN_ARCHIVE, GRAPHS
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.graph_files.csv_rows import csv_cells, csv_rows
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile, load_graph_file
from flower_fgl.datasets.graph_files.graph_set import OwnedSet, load_graph_set
from flower_fgl.datasets.pyg_data import (
    graphs_to_score,
    is_graph,
    nodes_to_score,
    plain_to_score,
)
from flower_fgl.datasets.pyg_read import EDGE_LABELS
from flower_fgl.datasets.pyg_typed import TypeNames, is_typed
from flower_fgl.datasets.transforms.typed import without_types
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.simulation.prediction.table import schema_of, task_of

__all__ = ["has_column", "read_graph", "read_set", "table_cells", "without_kinds"]

Owned = TypeVar("Owned", LocalGraphFile, OwnedSet)


def read_graph(
    graph: Path | str | Any, card: ModelCard
) -> tuple[LocalGraphFile, Path | str]:
    """Return the graph of a file or of an object, and its name for messages.

    A DataError says that it is no graph for the model, or was prepared in another way.
    """
    task = task_of(card)
    is_edges = task == "edges"
    schema = schema_of(card)
    relation = ":".join((schema and schema.predicted) or ())
    if isinstance(graph, str | os.PathLike):
        if _is_set(Path(os.path.expanduser(graph))):
            raise DataError(
                f"{graph} holds a set of graphs, but the model predicts {task}. Give a "
                "file with one graph, or use a model of whole graphs."
            )
        owned = load_graph_file(
            graph,
            needs_labels=False,
            scores_edges=is_edges,
            target_kind=card.target_kind,
            target_relation=relation,
        )
        _require_edges(owned.dataset, relation * is_edges, Path(graph))
        _check_recipe(owned.prepared, card, Path(graph))
        return owned, Path(graph)
    where = f"the {type(graph).__name__}"
    has_numbers = card.target.has_numbers
    if is_graph(graph) and is_typed(graph, TypeNames()):
        dataset, numbers = nodes_to_score(
            graph, where, relation * is_edges, has_numbers=has_numbers
        )
        _require_edges(dataset, relation * is_edges, where)
        return LocalGraphFile(dataset, numbers), where
    keys = ["x", "edge_index"]
    if any(getattr(graph, key, None) is None for key in keys):
        raise DataError(
            "Expected the path of a graph file, or an object with the tensors x (N, d) "
            f"and edge_index (2, M), got {where}. Pass one of these."
        )
    keys += ["edge_attr"] if is_edges or card.messages else []
    keys += ["edge_time", *EDGE_LABELS] if is_edges else []
    from torch_geometric.data import Data

    data = Data(**{key: getattr(graph, key, None) for key in keys})
    plain = plain_to_score(data, where, scores_edges=is_edges, has_numbers=has_numbers)
    return LocalGraphFile(plain, torch.arange(plain.num_nodes)), where


def _require_edges(dataset: NodeDataset, relation: str, graph: Path | str) -> None:
    """Reject a typed graph without edges of the relation that a model predicts."""
    if relation and dataset.edges is None:
        raise DataError(
            f"{graph} lists no edges of the relation that the model predicts. Add them, or "
            "correct the name of the relation."
        )


def read_set(graph: Path | str | Any, card: ModelCard) -> tuple[OwnedSet, Path | str]:
    """Return the set of graphs of a file or of a list, as :func:`read_graph` does."""
    if isinstance(graph, str | os.PathLike):
        owned = load_graph_set(graph, needs_labels=False)
        _check_recipe(owned.prepared, card, Path(graph))
        return without_kinds(owned, card), Path(graph)
    where = f"the {type(graph).__name__}"
    if not isinstance(graph, list | tuple):
        raise DataError(
            "The model predicts graphs: expected the path of a set of graphs, or a list of "
            f"torch_geometric.data.Data or HeteroData, got {where}. Pass one of these."
        )
    dataset = graphs_to_score(graph, where)
    owned = OwnedSet(dataset, tuple(map(str, range(len(graph)))))
    return without_kinds(owned, card), where


def _check_recipe(prepared: str, card: ModelCard, where: Path | str) -> None:
    """Reject a graph that ``flower-fgl prepare`` made in another way than in training."""
    prepared = whole_recipe(prepared)
    if differing_recipes(prepared, card.prepared):
        raise DataError(
            f"{where} was prepared with another recipe or vocabulary than the training "
            f"data (hash {prepared[:8]} instead of {card.prepared[:8]}). Run "
            "flower-fgl prepare --no-labels with the recipe of the training."
        )


def without_kinds(owned: Owned, card: ModelCard) -> Owned:
    """Drop the kinds of nodes and edges if a model does not read them."""
    if owned.dataset.schema is None or card.is_typed:
        return owned
    return replace(owned, dataset=without_types(owned.dataset))


def table_cells(
    path: Path, columns: Sequence[str], *, more: bool = True
) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of each row of a CSV table, for messages, and some of its cells.

    Without ``more`` the table has no other columns.
    """
    for line, cells in csv_cells(Path(os.path.expanduser(path)), columns, more=more):
        yield f"{show_path(path)}, line {line}", cells


def has_column(path: Path, name: str) -> bool:
    """Return whether the header of a CSV table has a column."""
    _, header = next(csv_rows(Path(os.path.expanduser(path)), ()))
    return name in header


def _is_set(path: Path) -> bool:
    """Return whether a file or folder holds a set of graphs."""
    try:
        if not os.path.isfile(path):
            return os.path.exists(path / GRAPHS)
        with zipfile.ZipFile(path) as archive:
            return "graph_of_node.npy" in archive.namelist()
    except BROKEN_ARCHIVE:
        return False  # the reader of graphs names the error
