"""What check-graph says of the kinds of nodes and relations of a typed graph."""

from __future__ import annotations

import torch

from flower_fgl.core.config import RunConfig
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.protocols.describe import Description

__all__ = ["kept_parts", "list_parts", "said_of_schema"]


def list_parts(client: ClientGraph) -> list[str]:
    """List kinds and relations with their numbers; empty for a plain graph."""
    schema = client.schema
    if schema is None:
        return []
    # the inductive setting hides nodes of the training graph
    graph = max((client.graph, *client.evaluation), key=lambda g: g.num_nodes)
    assert graph.messages is not None
    assert graph.messages.relation is not None
    edges = torch.bincount(graph.messages.relation, minlength=len(schema.relations))
    lines = ["Kinds of nodes:", *_kinds(graph, schema, client.target), "Relations:"]
    for (source, name, target), number in zip(
        schema.relations, edges.tolist(), strict=True
    ):
        kept = (source, name, target) in schema.private
        end = ", private: neither its name nor its weights leave" if kept else ""
        if (source, name, target) == schema.predicted:
            known = torch.cat([one.y for one in client.graphs if one.pairs is not None])
            is_link = graph.pair_x is None
            found = int((known == 1).sum()) if is_link else len(known)
            end = f" in the largest training graph; {found:,} "
            end += "links" if is_link else "edges with a known label"
            end += " to predict"
        lines.append(f"  {source} -{name}-> {target}: {_count(number, 'edge')}{end}")
    return lines


def _kinds(graph: Graph, schema: Schema, target: Target) -> list[str]:
    """Describe each kind of nodes."""
    assert graph.node_type is not None
    assert graph.messages is not None
    nodes = torch.bincount(graph.node_type, minlength=len(schema.widths))
    is_alone = torch.ones(graph.num_nodes, dtype=torch.bool)
    is_alone[graph.messages.index.flatten()] = False
    alone = torch.bincount(graph.node_type[is_alone], minlength=len(schema.widths))
    lines = []
    for place, (kind, width) in enumerate(schema.widths):
        parts = [_count(int(nodes[place]), "node")]
        if kind == schema.target and not schema.predicted:
            known = int((graph.y >= 0).sum())
            what = "number" if target.has_numbers else "label"
            parts[0] += f" to predict, {known:,} with a known {what}"
        parts.append(
            f"{width:,} feature{'s' * (width > 1)}" if width else "no features"
        )
        if alone[place]:
            parts.append(f"{int(alone[place]):,} without an edge")
        lines.append(f"  {kind}: {', '.join(parts)}")
    return lines


def _count(number: int, noun: str) -> str:
    """Return a number of things: ``1 node``, ``2 nodes``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def said_of_schema(description: Description, config: RunConfig) -> dict[str, str]:
    """Say in words what a description reveals of a typed graph; empty for a plain one."""
    if not description.schema:
        return {}
    size = (
        f"{description.num_nodes:,} nodes to predict, {description.num_edges:,} edges"
    )
    said = {"num-nodes num-edges": f"the size of the graph: {size} of all relations"}
    said = {} if config.has_pairs else said
    told = description.told
    if told is None:
        return said | {
            "schema": "that there are several kinds of nodes, and neither their names nor "
            'their number (schema-align = "private")',
            "num-features": "not the number of features",
            "feature-names features-sha256": "neither names of features nor their hash",
        }
    if config.schema_align == "same":
        return said | {
            "schema": "hashes of the names of kinds and relations, and the number of "
            "features of each kind; anybody who guesses a name can compare its hash "
            '(schema-align = "same")',
        }
    kinds = ", ".join(f"{kind} ({width})" for kind, width in told.widths)
    relations = ", ".join(f"{a} -{name}-> {b}" for a, name, b in told.relations)
    return said | {
        "schema": "the names of kinds with the number of their features, to the server and "
        f"to all other owners: {kinds}; and of relations that are not private: {relations} "
        '(schema-align = "name")',
        "num-features": "not the number of all features together",
        "feature-names features-sha256": "not the names of the features",
        "type-features": "a hash of the names of the features of each kind, and of its "
        "recipe if flower-fgl prepare made the graph",
    }


def kept_parts(description: Description, config: RunConfig) -> list[str]:
    """Say which weights of a model of typed graphs stay at their owner."""
    if not description.schema or config.schema_align == "same":
        return []
    if config.schema_align == "name":
        return ["of kinds and relations that this owner has, without private relations"]
    return [
        "without those that belong to one kind or relation: only what is common to all"
    ]
