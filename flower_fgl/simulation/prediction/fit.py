"""Fit the features of a graph to those with which a model was trained."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from flower_fgl.core.agreement import column_order, hash_names
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import (
    GraphDataset,
    MessageEdges,
    NodeDataset,
    Scaling,
)
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile
from flower_fgl.datasets.graph_files.graph_set import OwnedSet
from flower_fgl.datasets.splits import graph_sets, links
from flower_fgl.datasets.splits.edges import earlier_messages
from flower_fgl.datasets.transforms.canonical import undirected_simple
from flower_fgl.datasets.transforms.messages import joint_names
from flower_fgl.datasets.transforms.normalize_features import (
    can_standardize,
    column_statistics,
    kind_statistics,
    normalise_rows,
    own_columns,
    scale_features,
    select_columns,
)
from flower_fgl.nn import GraphInput
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.runs.saved_model import SavedModel
from flower_fgl.simulation.prediction.table import schema_of, task_of
from flower_fgl.simulation.prediction.typed import (
    ModelGraph,
    differing_features,
    in_model_schema,
    unknown_names,
)

__all__ = ["Features", "fit_graph"]


@dataclass(frozen=True, eq=False)
class Features:
    """Features of a graph, or of a set of graphs.

    ``x`` (N, d), strided or sparse CSR, has the normalization ``scaling`` (``None``: raw).
    ``edges`` have the features that the model reads, raw; ``pair_x`` (M, a) are the same
    features as those of edges to classify. ``typed`` are kinds and relations for a model
    that reads these, with the nodes to predict, and ``own`` (N, d) the features that belong
    to the kind of each node. ``notes`` say what was not checked, or was changed or assumed.
    """

    x: Tensor
    names: tuple[str, ...] = ()
    scaling: Scaling | None = None
    edges: MessageEdges | None = None
    pair_x: Tensor | None = None
    typed: ModelGraph | None = None
    own: Tensor | None = None
    notes: tuple[str, ...] = ()

    def noting(self, *texts: str) -> Self:
        """Return the same with more notes."""
        return replace(self, notes=(*self.notes, *texts))

    @property
    def edge_width(self) -> int:
        """Number of features a of the edges."""
        return 0 if self.edges is None else int(self.edges.x.shape[1])

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of the columns of nodes, then of edges; empty if one has none."""
        of_edges = () if self.edges is None else self.edges.feature_names
        return joint_names(self.names, self.x.shape[1], of_edges, self.edge_width)


def _features_of(owned: LocalGraphFile | OwnedSet, card: ModelCard) -> Features:
    """Return the features of a file, with those of its edges if the model reads them."""
    dataset = owned.dataset
    edges = dataset.messages if card.messages or task_of(card) == "edges" else None
    if edges is not None and not _width_of_edges(card) and task_of(card) != "edges":
        edges = edges.in_order([])
    if edges is not None:  # those of a set may be bytes
        edges = replace(edges, x=edges.x.to(torch.float32))
    return Features(dataset.x, dataset.feature_names, owned.scaling, edges)


def _with_node_degrees(
    found: Features, dataset: GraphDataset, card: ModelCard
) -> Features:
    """Replace the features by the nodes' degrees if the model was trained on these."""
    largest = card.num_features - 2
    names = graph_sets.degree_names(largest)
    own = () if found.edges is None else found.edges.feature_names
    is_named = card.features_sha256 == hash_names(
        joint_names(names, card.num_features, own, found.edge_width)
    )
    if not is_named and (card.features_sha256 or dataset.num_features):
        return found
    x = graph_sets.with_degrees(dataset, largest).x
    text = "The nodes have no features: their degrees are used, as in training."
    degrees = replace(found, x=x, names=names, scaling=None)
    return degrees if is_named else degrees.noting(text)


def fit_graph(
    owned: LocalGraphFile | OwnedSet,
    saved: SavedModel,
    where: Path | str,
    sent: Tensor | None = None,
) -> tuple[Features, GraphInput]:
    """Fit a graph to a model: return its features as in training, and the model's input.

    ``sent`` (M,), bool, are the edges to classify over which messages pass, by default all.
    Raises a DataError if the features differ from those in training.
    """
    edge_index, batch = owned.dataset.edge_index, dict[str, Any]()
    if isinstance(owned, OwnedSet):
        batch = {"batch": owned.dataset.batch, "num_graphs": owned.dataset.num_graphs}
    elif sent is not None:
        owned, edge_index = _pass_messages(owned, sent)
    fitted = passed = _fit_features(owned, edge_index, saved, where)
    if sent is not None and fitted.edges is not None:
        passed = replace(fitted, edges=fitted.edges.select(sent))
    graph = GraphInput(fitted.x, edge_index, **batch)
    return fitted, _with_messages(graph, passed, saved.card)


def _pass_messages(
    owned: LocalGraphFile, sent: Tensor
) -> tuple[LocalGraphFile, Tensor]:
    """Let messages pass over some edges only; also return these both ways (2, 2E)."""
    dataset = owned.dataset
    assert dataset.edges is not None
    earlier = dataset.edges.pairs[:, sent].contiguous()
    if dataset.schema is not None and dataset.messages is not None:
        shown = earlier_messages(dataset, dataset.schema, earlier)
        passed_on = dataset.messages.select(shown)
        owned = replace(owned, dataset=replace(dataset, messages=passed_on))
    return owned, undirected_simple(earlier, dataset.num_nodes)


def _with_messages(graph: GraphInput, fitted: Features, card: ModelCard) -> GraphInput:
    """Add the edges that the model reads in one direction, with features or by relation."""
    if fitted.typed is not None:
        return graph.with_relations(fitted.typed.relations)
    if not card.messages:
        return graph
    if fitted.edges is None:
        raise DataError(
            "The model reads the direction of edges, but the graph lists undirected ones."
        )
    reads_features = not card.messages.endswith(":0")
    edges = fitted.edges if reads_features else fitted.edges.in_order([])
    return graph.with_messages(edges.index, edges.x)


def _fit_features(
    owned: LocalGraphFile | OwnedSet,
    edge_index: Tensor,
    saved: SavedModel,
    where: Path | str,
) -> Features:
    """Order and scale features as in training, or raise a DataError if they differ."""
    card = saved.card
    if card.is_typed:
        return _scale(_fit_typed(owned, saved, where), saved, where)
    found = _features_of(owned, card)
    if isinstance(owned, OwnedSet):
        found = _with_node_degrees(found, owned.dataset, card)
    elif task_of(card) == "links":
        x = links.degree_features(edge_index, len(found.x))
        degrees = replace(found, x=x, names=links.degree_names(), scaling=None)
        if hash_names(degrees.all_names) == card.features_sha256:
            found = degrees
    edges = owned.dataset.messages
    is_read = task_of(card) == "edges" or _width_of_edges(card)
    if edges is not None and edges.x.shape[1] and not is_read:
        text = f"edge_attr of {where} is not used by model {card.model}."
        found = found.noting(text)
    found = _match_columns(_undo_scaling(found, saved, where), card, where)
    return _scale(found, saved, where)


def _fit_typed(
    owned: LocalGraphFile | OwnedSet, saved: SavedModel, where: Path | str
) -> Features:
    """Fit a typed graph, or a set, to a model that reads kinds and relations."""
    dataset: NodeDataset | GraphDataset = owned.dataset
    own = own_columns(dataset.node_type, dataset.schema)
    given = Features(dataset.x, scaling=owned.scaling, own=own)
    raw = _undo_scaling(given, saved, where)
    typed, notes = in_model_schema(replace(dataset, x=raw.x), saved.card, where)
    own = own_columns(typed.relations.node_type, schema_of(saved.card))
    found = replace(raw, x=typed.x, typed=typed, own=own).noting(*notes)
    table = dataset.edges if isinstance(dataset, NodeDataset) else None
    if task_of(saved.card) == "edges" and table is not None:
        edges = MessageEdges(table.pairs, table.x, table.feature_names)
        found = _match_edges(replace(found, edges=edges), edges, saved.card, where)
    return found


def _match_edges(
    found: Features, edges: MessageEdges, card: ModelCard, where: Path | str
) -> Features:
    """Put the features of edges into the model's order, by name; refuse others."""
    _check_widths(found, card, where)
    held = joint_names((), 0, edges.feature_names, found.edge_width)
    wanted = card.feature_names[card.num_features :]
    if held == wanted:
        return found
    if not held or not wanted:
        return found.noting(
            f"The names of the features of the edges of {where} were not compared with "
            "those in training, only their number."
        )
    order = column_order(held, wanted)
    if order is None:
        raise differing_features(where, "the features of its edges", held, wanted)
    return replace(found, edges=edges.in_order(order))


def _undo_scaling(found: Features, saved: SavedModel, where: Path | str) -> Features:
    """Undo the feature scaling of an exported file; row scaling cannot be undone.

    A file that was standardized with its owner's statistics stays as it is if the clients
    of the run used such statistics.
    """
    scaling = found.scaling
    fitting = {"rows": "rows", "columns": "own"}
    if scaling is None or fitting[scaling.kind] == saved.card.scaling:
        return found
    if scaling.statistics is None:
        raise DataError(
            f"The features in {where} were divided by their row sums during export, but "
            "the model expects the original values. Export the file with feature-norm = "
            '"none".'
        )
    mean, std = scaling.statistics
    x = scale_features(found.x, -mean / std, 1 / std, found.own)
    return replace(found, x=x, scaling=None)


def _match_columns(found: Features, card: ModelCard, where: Path | str) -> Features:
    """Put the columns into the model's order, by name; refuse other features."""
    names = found.all_names
    if not names or not card.feature_names:
        _check_widths(found, card, where)
    if not names or not card.features_sha256:
        which = "the model" if names else where
        return found.noting(
            f"{which} has no names of the features: the order of the columns is not "
            "checked."
        )
    if hash_names(names) == card.features_sha256:
        return found
    if not card.feature_names:
        raise unknown_names(where)
    order = column_order(names, card.feature_names)
    if order is None:
        raise differing_features(where, "its features", names, card.feature_names)
    _check_widths(found, card, where)
    width = card.num_features  # the columns of edges follow those of nodes
    out = replace(found, x=select_columns(found.x, order[:width]))
    if found.edges is not None:
        edges = found.edges.in_order([column - width for column in order[width:]])
        out = replace(out, edges=edges)
    return out.noting(
        f"The columns of {where} were put into the model's order, by name."
    )


def _check_widths(found: Features, card: ModelCard, where: Path | str) -> None:
    """Reject another number of features of nodes, or of edges."""
    widths = [("", found.x.shape[1], card.num_features)]
    if found.edges is not None:
        widths.append((" of edges", found.edge_width, _width_of_edges(card)))
    for of, width, expected in widths:
        if width != expected:
            raise DataError(
                f"{where} does not fit the model: expected {expected} features{of} as in "
                f"training, got {width}. Provide the same features in the same order."
            )


def _scale(found: Features, saved: SavedModel, where: Path | str) -> Features:
    """Scale features as in training, and say what was assumed."""
    card = saved.card
    if card.scaling == "lost":
        raise DataError(
            "Each client scaled its features in its own way or with its own statistics for "
            "training, and this model file does not hold these. Use the model that a data "
            "owner's SuperNode saved."
        )
    if card.scaling == "rows" and found.scaling is None:
        found = replace(found, x=normalise_rows(found.x))
    elif card.scaling == "own" and found.scaling is None:
        found = replace(found, x=_dense(found.x, where))
        statistics, text = _own_statistics(found, saved.card, where)
        x = scale_features(found.x, *statistics, own=found.own)
        found = replace(found, x=x).noting(text)
    elif card.scaling == "kept" and saved.scaling is not None:
        x = scale_features(_dense(found.x, where), *saved.scaling, own=found.own)
        found = replace(found, x=x)
    return replace(found, pair_x=_scaled_pairs(found, saved))


def _scaled_pairs(found: Features, saved: SavedModel) -> Tensor | None:
    """Return the features of edges to classify, which messages contain unscaled."""
    if found.edges is None or task_of(saved.card) != "edges":
        return None
    x, statistics = found.edges.x, saved.edge_scaling
    if saved.card.scaling == "own" and x.numel():
        statistics = column_statistics(x)
    return x if statistics is None else scale_features(x, *statistics)


def _width_of_edges(card: ModelCard) -> int:
    """Return the number of features of edges that a model reads."""
    text = card.link if task_of(card) == "edges" else card.messages
    return int(re.split("[x:]", text)[-1] or 0)


def _dense(x: Tensor, where: Path | str) -> Tensor:
    """Return features that can be standardized as a dense tensor."""
    if not can_standardize(x):
        raise DataError(
            f"{where} holds sparse features, but the model expects dense, standardised "
            "ones. Save the features as a dense array x."
        )
    return x if x.layout == torch.strided else x.to_dense()


def _own_statistics(
    found: Features, card: ModelCard, where: Path | str
) -> tuple[tuple[Tensor, Tensor], str]:
    """Return the graph's own statistics, as each client of the run used its own."""
    x, number = found.x, len(found.x)
    if number < 2:
        raise DataError(
            "Each client standardised its features with the mean and standard deviation "
            f"of its own nodes for training, and {where} has {number} nodes. Use a graph "
            'with more nodes, or train with feature-norm = "none" on features that you '
            "scaled yourself."
        )
    statistics = column_statistics(x)
    schema = schema_of(card)
    if found.typed is not None and schema is not None:
        kinds = found.typed.relations.node_type
        everyone = torch.ones(number, dtype=torch.bool)
        statistics = kind_statistics(x, everyone, kinds, schema)
    return statistics, (
        "Each client standardised its features with the mean and standard deviation of "
        f"its own training nodes. For {where} those of its {number:,} nodes are used, "
        "which are poor for a graph with few nodes."
    )
