"""Kinds of nodes and relations in an ``.npz`` graph file, see docs/graph-files.md."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError, clip
from flower_fgl.core.schema import Schema, has_name
from flower_fgl.datasets.client_graph import Graph, MessageEdges, NodeDataset
from flower_fgl.datasets.graph_files.archive import Array, integers

__all__ = ["NO_EDGE_FEATURES", "SCHEMA_KEYS", "TYPE_KEYS", "read_schema"]
__all__ += ["schema_arrays"]
__all__ += ["chosen_relation", "type_arrays", "with_types"]

log = logging.getLogger(__name__)

NO_EDGE_FEATURES = (
    "models of typed graphs read no features of edges. Make each edge a node of a kind of "
    'its own to use them; setting = "edge" reads those of the relation with labels.'
)

TYPE_KEYS = ("node_type", "edge_type")
"""Arrays of each typed graph of a file."""
SCHEMA_KEYS = (
    *("node_types", "node_type_widths", "relations", "target_type"),
    *("private_relations", "target_relation"),
)
"""Arrays that all graphs of a file share."""


def read_schema(
    arrays: Mapping[str, Array], where: str, *, is_set: bool = False
) -> Schema | None:
    """Return the schema of a file; ``None`` without any of its arrays."""
    needed = (*SCHEMA_KEYS[: 3 if is_set else 4], *TYPE_KEYS)
    held = [key for key in (*SCHEMA_KEYS, *TYPE_KEYS) if key in arrays]
    if not held:
        return None
    if missing := [key for key in needed if key not in arrays]:
        raise DataError(
            f"{where}: {held[0]} is given, but {', '.join(missing)} is missing. A typed "
            f"graph has {', '.join(needed)}; remove all of them if all nodes and edges are "
            "alike."
        )
    types, relations = (np.atleast_1d(arrays[k]) for k in ("node_types", "relations"))
    target = arrays.get("target_type", np.array(""))
    widths = integers(arrays, "node_type_widths", where)
    private = arrays.get("private_relations", np.zeros(len(relations), dtype=bool))
    for key, array, shape in (
        ("node_types", types, (len(types),)),
        ("relations", relations, (len(relations), 3)),
        ("target_type", target, ()),
    ):
        if array.dtype.kind != "U" or array.shape != shape:
            raise DataError(
                f"{where}: {key} must be text of shape {shape}, got {array.dtype} of shape "
                f"{array.shape}."
            )
    if widths.shape != types.shape or (widths < 0).any():
        raise DataError(
            f"{where}: node_type_widths must be {len(types)} numbers of columns, one for "
            "each of node_types."
        )
    if private.dtype != np.bool_ or private.shape != (len(relations),):
        raise DataError(f"{where}: private_relations must be {len(relations)} bools.")
    triples = tuple((str(a), str(name), str(b)) for a, name, b in relations)
    pairs = zip(types.tolist(), widths.tolist(), strict=True)
    own = frozenset(t for t, kept in zip(triples, private, strict=True) if kept)
    predicted = None
    if "target_relation" in arrays:
        found = arrays["target_relation"]
        predicted = next((one for one in triples if list(one) == found.tolist()), None)
        if predicted is None:
            raise DataError(
                f"{where}: target_relation must be one of relations, three texts, got "
                f"{clip(str(found.tolist()))}."
            )
    schema = Schema(str(target), tuple(pairs), triples, own, predicted)
    schema.check(where)
    if not (schema.target or is_set):
        raise DataError(
            f"{where}: target_type is empty. Set it to the kind of the nodes to predict, "
            f"one of {', '.join(schema.node_types)}."
        )
    return schema


def with_types(
    dataset: NodeDataset, arrays: Mapping[str, Array], schema: Schema, where: str
) -> NodeDataset:
    """Return a graph of a file with kinds and relations; repeated edges are merged."""
    kinds = torch.from_numpy(integers(arrays, "node_type", where))
    relation = torch.from_numpy(integers(arrays, "edge_type", where))
    messages = dataset.messages
    assert messages is not None
    for key, found, number, most in (
        ("node_type", kinds, dataset.num_nodes, len(schema.widths)),
        ("edge_type", relation, messages.index.shape[1], len(schema.relations)),
    ):
        what = "nodes" if key == "node_type" else "edges"
        if found.shape != (number,):
            raise DataError(
                f"{where}: {key} has {found.numel()} entries for {number} {what}."
            )
        if number and not 0 <= int(found.min()) <= int(found.max()) < most:
            names = "node_types" if key == "node_type" else "relations"
            raise DataError(
                f"{where}: {key} holds {int(found.max())}, but there are only {most} "
                f"{names}, numbered from 0."
            )
    if dataset.num_features != schema.num_features:
        raise DataError(
            f"{where}: node_type_widths add up to {schema.num_features} columns, but x "
            f"has {dataset.num_features}."
        )
    _check_ends(messages.index, kinds, relation, schema, where)
    _check_blocks(dataset.x, kinds, schema, where)
    known = dataset.y >= 0  # of no node in a set of graphs
    if schema.target:
        known &= kinds != schema.node_types.index(schema.target)
    wrong = int(known.sum())
    if wrong:
        raise DataError(
            f"{where}: {wrong} nodes of other kinds than {schema.target} have a class. Set "
            "their y to -1."
        )
    table = dataset.edges
    if table is not None:
        if schema.predicted is None:
            raise DataError(
                f"{where}: edges have labels or numbers, but target_relation is missing, "
                "which names their relation. Add it."
            )
        of_relation = relation == schema.relations.index(schema.predicted)
        if wrong := int(((table.y >= 0) & ~of_relation).sum()):
            raise DataError(
                f"{where}: {wrong} edges of other relations than "
                f"{':'.join(schema.predicted)} have a label or number. Set it to -1 (NaN)."
            )
        table = table.select(of_relation)
    elif messages.x.shape[1]:
        log.warning("%s: edge_attr will not be read: %s", where, NO_EDGE_FEATURES)
    number = max(dataset.num_nodes, 1)
    code = (relation * number + messages.index[0]) * number + messages.index[1]
    code = torch.unique(code)
    index = torch.stack([code // number % number, code % number])
    edges = MessageEdges(index, torch.empty(len(code), 0), relation=code // number**2)
    return replace(dataset, node_type=kinds, schema=schema, messages=edges, edges=table)


def chosen_relation(arrays: Mapping[str, Array], name: str) -> dict[str, Array]:
    """Return ``target_relation`` of a file that lacks it, by name; else nothing."""
    listed = arrays.get("relations", np.empty((0, 3))).tolist()
    found = [one for one in listed if has_name(tuple(one), name)]
    if "target_relation" in arrays or len(found) != 1:
        return {}
    return {"target_relation": np.array(found[0])}


def _check_ends(
    index: Tensor, kinds: Tensor, relation: Tensor, schema: Schema, where: str
) -> None:
    """Reject edges between other kinds than their relation says."""
    places = {kind: number for number, kind in enumerate(schema.node_types)}
    due = torch.tensor(
        [[places[a], places[b]] for a, _, b in schema.relations] or [[0, 0]]
    ).T
    wrong = (kinds[index] != due[:, relation]).any(dim=0).nonzero().flatten()
    if len(wrong):
        edge = int(wrong[0])
        source, name, target = schema.relations[int(relation[edge])]
        ends = [schema.node_types[k] for k in kinds[index[:, edge]].tolist()]
        raise DataError(
            f"{where}: edge {edge} of the relation {source} -{name}-> {target} joins nodes "
            f"of the kinds {' and '.join(ends)}."
        )


def _check_blocks(x: Tensor, kinds: Tensor, schema: Schema, where: str) -> None:
    """Reject features outside the columns of the kind of their node."""
    sizes = torch.tensor([width for _, width in schema.widths])
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    if x.layout == torch.sparse_csr:
        counts = x.crow_indices().diff()
        rows = torch.repeat_interleave(torch.arange(len(x)), counts)
        columns, used = x.col_indices(), x.values() != 0
        rows, columns = rows[used], columns[used]
    else:
        rows, columns = x.nonzero().T
    wrong = (owner[columns] != kinds[rows]).nonzero().flatten()
    if len(wrong):
        row, column = int(rows[wrong[0]]), int(columns[wrong[0]])
        raise DataError(
            f"{where}: node {row} is of the kind {schema.node_types[int(kinds[row])]}, but "
            f"has a value in column {column}, which belongs to "
            f"{schema.node_types[int(owner[column])]}."
        )


def type_arrays(graph: Graph) -> dict[str, Any]:
    """Return the arrays of a typed graph that :func:`with_types` reads; else none."""
    if graph.node_type is None or graph.messages is None:
        return {}
    assert graph.messages.relation is not None
    return {
        "node_type": graph.node_type.numpy(),
        "edge_type": graph.messages.relation.numpy(),
    }


def schema_arrays(schema: Schema | None) -> dict[str, Any]:
    """Return the arrays that :func:`read_schema` reads; none for a plain graph."""
    if schema is None:
        return {}
    arrays = {
        "node_types": np.array(schema.node_types, dtype=np.str_),
        "node_type_widths": np.array(
            [width for _, width in schema.widths], dtype=np.int64
        ),
        "relations": np.array(schema.relations, dtype=np.str_).reshape(-1, 3),
        "target_type": np.array(schema.target),
    }
    if schema.private:
        kept = [triple in schema.private for triple in schema.relations]
        arrays["private_relations"] = np.array(kept)
    if schema.predicted:
        arrays["target_relation"] = np.array(schema.predicted)
    return arrays
