"""Class probabilities of a graph's nodes, predicted by the model of a run."""

from __future__ import annotations

import csv
import io
import os
import re
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.core.feature_names import (
    column_order,
    differing_names,
    differing_recipes,
    hash_names,
)
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import NodeDataset, Scaling
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile, load_graph_file
from flower_fgl.datasets.graph_files.npz import try_node_dataset
from flower_fgl.datasets.graph_files.problems import ErrorCollector
from flower_fgl.datasets.transforms.columns import select_columns
from flower_fgl.datasets.transforms.messages import joint_names
from flower_fgl.datasets.transforms.normalize_features import (
    can_standardize,
    column_statistics,
    normalise_rows,
    scale_features,
)
from flower_fgl.nn import GraphInput
from flower_fgl.runs.model_file import ModelCard, SavedModel, load_model
from flower_fgl.runs.writer import replace_file

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Prediction", "other_task", "predict_graph", "write_csv"]

FORMULA = tuple("=+-@\t＝＋－＠")
"""Starts of a cell that a spreadsheet evaluates; some do so for the wide forms, too."""
NUMBER = r"[+-]?[0-9]+(\.[0-9]+)?"


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """Class probabilities of every node of a graph.

    Parameters
    ----------
    nodes : tuple of str
        Length N: node ids of the file, or node numbers if the file has no ids.
    probabilities : Tensor of shape (N, C), float32
        Each row sums to 1; of several labels per node, each is a probability of its own.
    card : ModelCard
        Description of the model.
    note : str
        What was not checked, or was changed, and how features were standardized without
        statistics in the model file; empty if the features fit as they are.
    """

    nodes: tuple[str, ...]
    probabilities: Tensor
    card: ModelCard
    note: str = ""

    @property
    def classes(self) -> list[str]:
        """Most probable class of each node, by name.

        Of several labels per node, those with a probability of at least 0.5, separated by
        semicolons.
        """
        names = self.card.class_names
        if self.card.multi_label:
            likely = (self.probabilities >= 0.5).tolist()
            return ["; ".join(compress(names, row)) for row in likely]
        return [names[k] for k in self.probabilities.argmax(dim=1).tolist()]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per node.

        Returns
        -------
        pandas.DataFrame of N rows
            Indexed by ``node``: ``predicted``, and ``p:<class>`` for each class.
        """
        import pandas as pd

        names = [f"p:{name}" for name in self.card.class_names]
        frame = pd.DataFrame(self.probabilities.numpy(), columns=names)
        frame.insert(0, "predicted", self.classes)
        frame.index = pd.Index(self.nodes, name="node")
        return frame

    def __repr__(self) -> str:
        note = f"\n{self.note}" if self.note else ""
        return (
            f"Class probabilities of {len(self.nodes):,} nodes, "
            f"{len(self.card.class_names)} classes ({self.card.method}, "
            f"{self.card.model}, round {self.card.round}){note}"
        )


def predict_graph(model: Path, graph: Path | str | Any) -> Prediction:
    """Predict class probabilities for the nodes of a graph.

    Parameters
    ----------
    model : Path
        Folder with a ``model.safetensors``: a data owner's model folder or a run folder.
    graph : Path, str or torch_geometric.data.Data
        An ``.npz`` file or a CSV folder, whose labels are optional and not used; or an
        object with ``x`` (N, d) and ``edge_index`` (2, M).

    Raises
    ------
    RunError
        If the model cannot be read.
    DataError
        If the graph cannot be read or does not fit the model.
    """
    saved = load_model(model)
    owned, where = _read(graph)
    if task := other_task(saved.card):
        raise DataError(
            f"The model {task}, but predict classifies the nodes of one graph, {where}. "
            "Use a model trained on nodes."
        )
    if differing_recipes(owned.prepared, saved.card.prepared):
        raise DataError(
            f"{where} was prepared with another recipe or vocabulary than the training "
            f"data (hash {owned.prepared[:8]} instead of {saved.card.prepared[:8]}). Run "
            "flower-fgl prepare --no-labels with the recipe of the training."
        )
    dataset, note = _match_columns(_undo_scaling(owned, saved, where), saved, where)
    dataset, how = _match_model(dataset, saved, owned.scaling, where)
    note = " ".join(part for part in (note, how) if part)
    inputs = GraphInput(dataset.x, dataset.edge_index)
    if dataset.messages is not None:
        inputs = inputs.with_messages(dataset.messages.index, dataset.messages.x)
    with torch.inference_mode():
        logits = saved.model(inputs)
    nodes = owned.names or tuple(map(str, owned.node_ids.tolist()))
    is_free = saved.card.multi_label
    probabilities = logits.sigmoid() if is_free else logits.softmax(dim=1)
    return Prediction(nodes, probabilities, saved.card, note)


def other_task(card: ModelCard) -> str:
    """Return what a model does instead of classifying nodes, empty if it does that."""
    if card.link:
        if card.link.startswith("edge:"):
            return 'classifies edges (setting = "edge")'
        return 'predicts links (setting = "link")'
    return 'classifies whole graphs (setting = "graph")' * card.classifies_graphs


def _read(graph: Path | str | Any) -> tuple[LocalGraphFile, Path | str]:
    """Return the graph of a file or of an object, and its name for messages."""
    if isinstance(graph, str | os.PathLike):
        return load_graph_file(graph, needs_labels=False), Path(graph)
    where = f"the {type(graph).__name__}"
    x, edge_index = (getattr(graph, name, None) for name in ("x", "edge_index"))
    if not (isinstance(x, Tensor) and isinstance(edge_index, Tensor)):
        raise DataError(
            "Expected the path of a graph file, or an object with the tensors x (N, d) "
            f"and edge_index (2, M), got {where}. Pass one of these."
        )
    if x.layout != torch.strided:
        raise DataError(
            f"x of {where} must be dense, got {x.layout}. Use x.to_dense()."
        )
    found = {
        "x": x,
        "edge_index": edge_index,
        "edge_attr": getattr(graph, "edge_attr", None),
    }
    dataset = try_node_dataset(
        {k: t.detach().cpu().numpy() for k, t in found.items() if t is not None},
        where,
        Target.classes(("",)),
        ErrorCollector(),
        has_labels=False,
    )
    assert dataset is not None  # the collector raises the first error
    return LocalGraphFile(dataset, torch.arange(dataset.num_nodes)), where


def _undo_scaling(
    owned: LocalGraphFile, saved: SavedModel, path: Path | str
) -> NodeDataset:
    """Undo the feature scaling of an exported file; row scaling cannot be undone.

    A file that was standardized with its owner's statistics stays as it is if the clients
    of the run used such statistics.
    """
    dataset, scaling = owned.dataset, owned.scaling
    fitting = {"rows": "rows", "columns": "own"}
    if scaling is None or fitting[scaling.kind] == saved.card.scaling:
        return dataset
    if scaling.statistics is None:
        raise DataError(
            f"The features in {path} were divided by their row sums during export, but "
            "the model expects the original values. Export the file with feature-norm = "
            '"none".'
        )
    mean, std = scaling.statistics
    return replace(dataset, x=scale_features(dataset.x, -mean / std, 1 / std))


def _match_columns(
    dataset: NodeDataset, saved: SavedModel, path: Path | str
) -> tuple[NodeDataset, str]:
    """Put the columns into the model's order, by name; refuse other features."""
    names, card, messages = dataset.feature_names, saved.card, dataset.messages
    width = int(card.messages.partition(":")[2] or 0)
    if width and (messages is None or messages.x.shape[1] != width):
        got = 0 if messages is None else messages.x.shape[1]
        raise DataError(
            f"{path} does not fit the model: expected {width} features of edges as in "
            f"training, got {got}. Provide the same columns of edges.csv, or of edge_attr."
        )
    if width and messages is not None:
        names = joint_names(names, dataset.num_features, messages.feature_names, width)
    if not names or not card.features_sha256:
        which = "the model" if names else path
        return dataset, (
            f"{which} has no names of the features: the order of the columns is not "
            "checked."
        )
    if hash_names(names) == card.features_sha256:
        return dataset, ""
    if not card.feature_names:
        raise DataError(
            f"{path} does not fit the model: the names of its features, or their order, "
            "differ from those in training. The model holds only their hash. Provide the "
            "same columns in the same order, or train with share-feature-names = true."
        )
    order = column_order(names, card.feature_names)
    if order is None:
        raise DataError(
            f"{path} does not fit the model: its features differ from those in training "
            f"({differing_names(names, card.feature_names)})."
        )
    own = dataset.num_features
    aligned = replace(
        dataset,
        x=select_columns(dataset.x, order[:own]),
        messages=messages and messages.in_order([i - own for i in order[own:]]),
        feature_names=card.feature_names[:own],
    )
    return aligned, f"The columns of {path} were put into the model's order, by name."


def _match_model(
    dataset: NodeDataset, saved: SavedModel, scaling: Scaling | None, path: Path | str
) -> tuple[NodeDataset, str]:
    """Check that the graph fits the model; scale its features, and say what was assumed."""
    card = saved.card
    if dataset.num_features != card.num_features:
        raise DataError(
            f"{path} does not fit the model: expected {card.num_features} features as in "
            f"training, got {dataset.num_features}. Provide the same features in the same "
            "order."
        )
    if card.scaling == "lost":
        raise DataError(
            "Each client scaled its features in its own way or with its own statistics for "
            "training, and this model file does not hold these. Use the model that a data "
            "owner's SuperNode saved."
        )
    if card.scaling == "rows":
        return replace(dataset, x=normalise_rows(dataset.x)), ""
    is_own = card.scaling == "own"
    if scaling is not None if is_own else saved.scaling is None:
        return dataset, ""
    if dataset.x.layout != torch.strided:
        if not can_standardize(dataset.x):
            raise DataError(
                f"{path} holds sparse features, but the model expects dense, standardised "
                "ones. Save the features as a dense array x."
            )
        dataset = replace(dataset, x=dataset.x.to_dense())
    found, note = saved.scaling, ""
    if found is None:
        found, note = _own_statistics(dataset, path)
    return replace(dataset, x=scale_features(dataset.x, *found)), note


def _own_statistics(
    dataset: NodeDataset, path: Path | str
) -> tuple[tuple[Tensor, Tensor], str]:
    """Return the graph's own statistics, as each client of the run used its own."""
    number = dataset.num_nodes
    if number < 2:
        raise DataError(
            "Each client standardised its features with the mean and standard deviation "
            f"of its own nodes for training, and {path} has {number} nodes. Use a graph "
            'with more nodes, or train with feature-norm = "none" on features that you '
            "scaled yourself."
        )
    return column_statistics(dataset.x), (
        "Each client standardised its features with the mean and standard deviation of "
        f"its own training nodes. For {path} those of its {number:,} nodes are used, "
        "which are poor for a graph with few nodes."
    )


def write_csv(prediction: Prediction, path: Path) -> None:
    """Write one row per node: ``node``, ``predicted``, and ``p:<class>`` for each class.

    The file is replaced atomically and has mode 0600; a RunError is raised if that
    fails. Other owners choose names of classes, so a text that a spreadsheet would take
    for a formula gets an apostrophe in front.
    """
    names = prediction.card.class_names
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["node", "predicted", *(f"p:{name}" for name in names)])
    for node, predicted, row in zip(
        prediction.nodes,
        prediction.classes,
        prediction.probabilities.tolist(),
        strict=True,
    ):
        shares = (f"{p:.6g}" for p in row)
        writer.writerow([_as_text(node), _as_text(predicted), *shares])
    replace_file(path, text.getvalue().encode(), is_private=True)


def _as_text(cell: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would take for a formula."""
    is_formula = cell.startswith(FORMULA) and not re.fullmatch(NUMBER, cell)
    return f"'{cell}" if is_formula else cell
