"""Fit a typed graph to the kinds, relations and features with which a model was trained."""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flower_fgl.core.agreement import differing_names, hash_names
from flower_fgl.core.errors import DataError, first_of
from flower_fgl.core.options import nearest
from flower_fgl.core.schema import Schema, Triple, TypedModel
from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.transforms.messages import joint_names
from flower_fgl.datasets.transforms.typed import OWN, move_columns
from flower_fgl.nn.relations import Relations
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.simulation.prediction.table import task_of

__all__ = ["ModelGraph", "differing_features", "in_model_schema", "unknown_names"]


class ModelGraph(NamedTuple):
    """A graph with kinds, relations and columns as a model numbers them.

    ``rows`` (I,) are the nodes to predict, or all nodes of a set of graphs. ``names`` are
    those of the model's relations in this graph, ``columns`` those of its columns, empty
    if it lacks one.
    """

    x: Tensor
    relations: Relations
    rows: Tensor
    names: Sequence[str]
    columns: Sequence[str]


def in_model_schema(
    dataset: NodeDataset | GraphDataset, card: ModelCard, where: Path | str
) -> tuple[ModelGraph, list[str]]:
    """Find the kinds and relations of a model in a graph, by name.

    The graph may lack some. A relation that the model does not know is left out if the
    graph keeps it private, or has no edge of it. ``card`` describes a model of typed
    graphs; the aggregated model of a run with ``schema-align = "same"`` holds hashes of
    names, with which those of the graph are compared. ``where`` names the graph in
    messages. Also returns sentences on what was not checked, or was left out. A
    DataError says that the model has a vector for each node, or that the graph is not
    typed, lacks the kind to predict, has a kind or relation that the model does not
    know, or other features.
    """
    typed = TypedModel.from_text(card.messages)
    assert typed is not None
    if dataset.schema is None:
        raise DataError(
            f"{where} has one kind of nodes and edges, but the model reads kinds and "
            "relations. Give a typed graph: a folder with relations.csv, or an .npz file "
            "with node_types."
        )
    if typed.num_nodes:
        raise DataError(
            "This model has a learned vector for each node of its training graph, and "
            "cannot score other graphs. Train with node-embedding = false."
        )
    wanted, own = typed.schema, dataset.schema
    named = _told_as(own, wanted)
    kinds = _kinds(own, named, wanted, where)
    assert dataset.node_type is not None
    assert dataset.messages is not None
    assert dataset.messages.relation is not None
    node_type = torch.tensor(kinds)[dataset.node_type]
    rows = torch.arange(len(node_type))
    if isinstance(dataset, NodeDataset):
        target = wanted.node_types.index(wanted.target)
        rows = (node_type == target).nonzero().flatten()
    if not len(rows):
        name = "" if wanted.is_hashed else f' "{wanted.target}"'
        raise DataError(
            f"{where} has no node of the kind{name} that the model predicts. Kinds: "
            f"{', '.join(own.node_types)}."
        )
    held = {*dataset.messages.relation.tolist()}
    relations, left_out = _relations(own, named, wanted, held, where)
    place = torch.tensor(relations or [0])[dataset.messages.relation]
    is_known = place >= 0
    x, columns, notes = _columns(dataset, kinds, wanted, card, where)
    edges = Relations(node_type, dataset.messages.index[:, is_known], place[is_known])
    names = [""] * len(wanted.relations)
    for (_, name, _), number in zip(own.relations, relations, strict=True):
        if number >= 0:
            names[number] = name
    return ModelGraph(x, edges, rows, names, columns), [*left_out, *notes]


def _told_as(own: Schema, wanted: Schema) -> Schema:
    """Return an owner's schema with its names as the model holds them, in its order."""
    is_named = bool({*own.node_types} & {*wanted.node_types})
    return own.hashed() if wanted.is_hashed and not is_named else own


def _kinds(own: Schema, named: Schema, wanted: Schema, where: Path | str) -> list[int]:
    """Return the model's number of each kind of the graph."""
    places = {kind: number for number, kind in enumerate(wanted.node_types)}
    for kind, (name, width) in zip(own.node_types, named.widths, strict=True):
        if name not in places:
            raise DataError(
                f'{where} has nodes of the kind "{kind}", which the model does not know. '
                f"{_known(kind, wanted.node_types, wanted)}Correct the name, or remove "
                "the kind and its relations."
            )
        expected = wanted.widths[places[name]][1]
        if width != expected:
            raise DataError(
                f'{where} does not fit the model: "{kind}" nodes have {width} features, '
                f"expected {expected} as in training. Provide the same columns."
            )
    return [places[name] for name in named.node_types]


def _relations(
    own: Schema, named: Schema, wanted: Schema, held: Set[int], where: Path | str
) -> tuple[list[int], list[str]]:
    """Return the model's number of each relation of the graph, -1 to leave it out.

    ``held`` are the numbers of the relations that have an edge.
    """
    places = {triple: number for number, triple in enumerate(wanted.relations)}
    found, left_out = [], []
    for number, (triple, (source, name, target)) in enumerate(
        zip(own.relations, named.relations, strict=True)
    ):
        alone = (source, f"{name[:50]}{OWN}", target)
        is_private = triple in own.private
        names = [(source, name, target), alone]
        names = names[::-1] if is_private else names
        place = next((places[one] for one in names if one in places), -1)
        has_edges = number in held
        if place < 0 and has_edges and not is_private:
            known = [_arrow(one) for one in wanted.relations]
            raise DataError(
                f"{where} has the relation {_arrow(triple)}, which the model does not "
                f"know. {_known(_arrow(triple), known, wanted)}Correct its name, or "
                "remove it."
            )
        left_out += [_arrow(triple)] if place < 0 and has_edges else []
        found.append(place)
    if not left_out:
        return found, []
    return found, [
        f"The model does not know the private relations {first_of(left_out)}: "
        "their edges are left out. The model that the owner's SuperNode saved "
        "knows them."
    ]


def _arrow(triple: Triple) -> str:
    """Return a relation for a message."""
    source, name, target = triple
    return f"{source} -{name}-> {target}"


def _known(name: str, known: Sequence[str], wanted: Schema) -> str:
    """Return the names that a model knows, for a message; nothing of hashes."""
    return "" if wanted.is_hashed else f"{nearest(name, known)} "


def _columns(
    dataset: NodeDataset | GraphDataset,
    kinds: Sequence[int],
    wanted: Schema,
    card: ModelCard,
    where: Path | str,
) -> tuple[Tensor, list[str], list[str]]:
    """Return the features (N, d) in the model's columns, by name where it has names.

    Also returns the names of these columns, and notes.
    """
    assert dataset.schema is not None
    own, blocks = dict(dataset.schema.blocks()), [b for _, b in wanted.blocks()]
    names, expected = dataset.feature_names, card.feature_names
    places, notes = [0] * dataset.num_features, list[str]()
    whole = [""] * wanted.num_features  # names of the model's columns in this graph
    for (kind, columns), number in zip(own.items(), kinds, strict=True):
        block = blocks[number]
        due = [*range(block.start, block.stop)]
        held = names[columns]
        if held and expected:
            if differing_names(held, expected[block]):
                what = f'the features of "{kind}" nodes'
                raise differing_features(where, what, held, expected[block])
            due = [expected.index(name) for name in held]
            if due != [*range(block.start, block.stop)]:
                notes.append(
                    f'The columns of "{kind}" nodes were put into the model\'s order, by '
                    "name."
                )
        for place, column in zip(due, range(columns.start, columns.stop), strict=True):
            places[column] = place
            whole[place] = names[column] if names else ""
    if not expected:
        table = dataset.edges if isinstance(dataset, NodeDataset) else None
        table = table if task_of(card) == "edges" else None
        if table and table.x.shape[1]:  # names of edges follow those of nodes
            of_edges = joint_names((), 0, table.feature_names, table.x.shape[1])
            whole += of_edges or ("",)
        notes += _check_hash(whole, card, where)
    number = wanted.num_features
    return move_columns(dataset.x, places, number), whole[:number], notes


def _check_hash(names: Sequence[str], card: ModelCard, where: Path | str) -> list[str]:
    """Compare the names of all columns with the hash in a model file, if it has one."""
    if not card.features_sha256 or not all(names):
        return [
            f"The names of the features of {where} were not compared with those in "
            "training, only their number: the order of the columns is not checked."
        ] * bool(names)
    if hash_names(names) != card.features_sha256:
        raise unknown_names(where)
    return []


def unknown_names(where: Path | str) -> DataError:
    """Return the error of features whose names do not have the hash of the model's."""
    return DataError(
        f"{where} does not fit the model: the names of its features, or their order, "
        "differ from those in training. The model holds only their hash. Provide the same "
        "columns in the same order, or train with share-feature-names = true."
    )


def differing_features(
    where: Path | str, what: str, held: Sequence[str], wanted: Sequence[str]
) -> DataError:
    """Return the error of features with other names than in training."""
    text = differing_names(held, wanted)
    return DataError(
        f"{where} does not fit the model: {what} differ from those in training ({text})."
    )
