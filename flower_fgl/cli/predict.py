"""What ``flower-fgl predict`` does: class probabilities of a graph's nodes as CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile, load_graph_file
from flower_fgl.datasets.transforms.normalize_features import (
    normalise_rows,
    scale_features,
)
from flower_fgl.nn import GraphInput
from flower_fgl.runs.files import replace_file
from flower_fgl.runs.model_file import ModelCard, SavedModel, load_model

__all__ = ["Prediction", "predict_graph", "write_csv"]


@dataclass(frozen=True, eq=False)
class Prediction:
    """Class probabilities of every node of a graph.

    Parameters
    ----------
    nodes : tuple of str
        Length N: the owner's ids of the nodes, or their numbers where the file has none.
    probabilities : Tensor of shape (N, C), float32
        Rows add up to 1.
    card : ModelCard
        The model that predicted.
    """

    nodes: tuple[str, ...]
    probabilities: Tensor
    card: ModelCard


def predict_graph(model: Path, graph: Path) -> Prediction:
    """Classify the nodes of an owner's graph.

    Parameters
    ----------
    model : Path
        Folder with a ``model.safetensors``: an owner's, or a run folder.
    graph : Path
        An ``.npz`` file or a CSV folder; labels are not read and need not be there.

    Returns
    -------
    Prediction

    Raises
    ------
    RunError
        If the model cannot be read.
    DataError
        If the graph cannot be read or does not fit the model.
    """
    saved = load_model(model)
    owned = load_graph_file(graph.expanduser(), needs_labels=False)
    dataset = _fitting(_as_measured(owned, saved, graph), saved, graph)
    with torch.inference_mode():
        logits = saved.model(GraphInput(dataset.x, dataset.edge_index))
    nodes = owned.names or tuple(map(str, owned.node_ids.tolist()))
    return Prediction(nodes, logits.softmax(dim=1), saved.card)


def _as_measured(owned: LocalGraphFile, saved: SavedModel, path: Path) -> NodeDataset:
    """Take back the scaling of an exported file; of rows that cannot be done."""
    dataset, scaling = owned.dataset, owned.scaling
    if scaling is None or (scaling.kind == "rows" == saved.card.scaling):
        return dataset
    if scaling.statistics is None:
        raise DataError(
            f"The features in {path} were divided by their sums when it was exported, but "
            "the model expects them as they were measured. Export the file with "
            'feature-norm = "none".'
        )
    mean, std = scaling.statistics
    return replace(dataset, x=scale_features(dataset.x, -mean / std, 1 / std))


def _fitting(dataset: NodeDataset, saved: SavedModel, path: Path) -> NodeDataset:
    """Return the graph as the model expects it."""
    card = saved.card
    if card.classifies_graphs:
        raise DataError(
            f'The model classifies whole graphs (setting = "graph"), but {path} holds one '
            "graph, whose nodes would be classified. Use a model trained on nodes."
        )
    if dataset.num_features != card.num_features:
        raise DataError(
            f"{path} does not fit the model: expected {card.num_features} features as in "
            f"training, got {dataset.num_features}. Give the same features in the same "
            "order."
        )
    if card.scaling == "lost":
        raise DataError(
            "The model was trained on features that each client standardised with "
            "statistics of its own, which this file does not hold. Use the model that an "
            "owner of a graph file kept."
        )
    if card.scaling == "rows":
        return replace(dataset, x=normalise_rows(dataset.x))
    if saved.scaling is None:
        return dataset
    if dataset.x.layout != torch.strided:
        raise DataError(
            f"{path} holds sparse features, but the model expects dense ones, "
            "standardised. Save them as x."
        )
    return replace(dataset, x=scale_features(dataset.x, *saved.scaling))


def write_csv(prediction: Prediction, path: Path) -> None:
    """Write one line a node: ``node``, ``predicted``, and ``p:<class>`` for each class.

    Parameters
    ----------
    prediction : Prediction
        What to write.
    path : Path
        File to make or replace, whole or not at all.

    Raises
    ------
    RunError
        If it cannot be written.
    """
    names = prediction.card.class_names
    best = prediction.probabilities.argmax(dim=1).tolist()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["node", "predicted", *(f"p:{name}" for name in names)])
    for node, k, row in zip(
        prediction.nodes, best, prediction.probabilities.tolist(), strict=True
    ):
        writer.writerow([node, names[k], *(f"{p:.6g}" for p in row)])
    replace_file(path, text.getvalue().encode())
