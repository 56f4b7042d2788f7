"""What ``check-graph`` says of what leaves an owner's machine, and of typed graphs."""

from collections.abc import Mapping, Sequence

import torch

from flower_fgl.core.config import RunConfig
from flower_fgl.core.node_settings import NodeSettings
from flower_fgl.core.options import Scalar
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.protocols.base import INFO, config_record
from flower_fgl.protocols.describe import Description

__all__ = ["describe_leaving", "items_of", "learned_by_server", "list_parts"]
__all__ += ["said_once"]


def items_of(config: RunConfig) -> str:
    """Return what is trained and scored: ``graphs``, ``edges`` or ``nodes``."""
    if config.classifies_graphs:
        return "graphs"
    return "edges" if config.has_pairs else "nodes"


def learned_by_server(description: Description) -> dict[str, object]:
    """Return exactly the fields that the server receives, by their name in the message."""
    return dict(config_record(description.to_record(), INFO))


def describe_leaving(
    description: Description,
    settings: Mapping[str, Scalar],
    node: NodeSettings = NodeSettings(),  # noqa: B008 - frozen
) -> list[str]:
    """Say in an owner's words what leaves its machine, and what does not."""
    config = parse_config(settings)
    lines = ["What leaves this machine before round 1, once:"]
    lines += [f"  {text}" for text in said_once(description, config).values()]
    if config.predicts_numbers and config.target_scale == "shared":
        lines.append(
            f"  the number of training {items_of(config)} with each target, and mean and "
            'standard deviation of its values (target-scale = "given" or "own" sends none)'
        )
    method = METHODS[config.method]
    lines += [f"  {text}" for text in method.sent_before]
    rest = ", except for what is sent once" if method.sent_before else ""
    lines.append(f"What leaves it in every round with method = {config.method}:")
    if method.uploads:
        items = items_of(config)
        what = f"numbers that are computed from the training {items}, see the row of "
        what += f"{method.name} in docs/security.md"
        if method.robust:
            what = f"the weights of a model that was trained on all training {items}"
        lines.append(f"  {what} ({method.payload} bytes)")
        lines += [f"  {text}" for text in _kept_parts(description, config)]
        lines.append(f"  {_protection(config)}")
    loss = "" if node.hides_loss else "the training loss, and "
    rounded = ", rounded" if node.scores == "rounded" else ""
    scored = f"{loss}the scores on the validation and test {items_of(config)}{rounded}"
    if node.scores == "none":
        scored = "no loss and no scores (scores = none)"
    lines += [
        f"  {scored}",
        f"What stays here{rest}: every single node, edge, feature and label, the ids of "
        "the nodes, and the predictions.",
        "What can be concluded from uploads: docs/security.md.",
    ]
    return lines


def said_once(description: Description, config: RunConfig) -> dict[str, str]:
    """Say in words what each field of a description, or group of fields, reveals."""
    items = items_of(config)
    size = "pairs of nodes to predict" if config.has_pairs else items
    if config.classifies_edges:
        used = description.num_train + description.num_val + description.num_test
        is_cut = (
            description.num_nodes < used
        )  # by time: the test has a graph of its own
        size = "labelled edges before the test" if is_cut else "labelled edges"
    whole = "the set" if config.classifies_graphs else "the graph"
    has_classes = description.target.has_classes
    kind = "the classes" if has_classes else f"these {description.target_kind}"
    counts = zip(description.target.names, description.class_counts, strict=False)
    per_class = ", ".join(f"{name}: {count}" for name, count in counts)
    counted = f"the number of training {items} of each class"
    counted = (
        f"{counted}: {per_class} (share-class-counts = false sends none)"
        if config.share_class_counts
        else f"not {counted} (share-class-counts = false)"
    )
    hashed = "a hash of the feature names, not the names (share-feature-names = false)"
    if not description.features_sha256:
        hashed = "that the features have no names"
    names = ", ".join(description.feature_names)
    scaled = {"none": "are not scaled", "rows": "are scaled by node"}
    said = {
        "name": f"the owner's name: {description.name}",
        "num-nodes num-edges": f"the size of {whole}: {description.num_nodes:,} {size}, "
        f"{description.num_edges:,} edges",
        "num-train num-val num-test": f"how many {items} are used for what: "
        f"{description.num_train:,} for training, {description.num_val:,} for validation, "
        f"{description.num_test:,} for testing",
        "num-features": f"the number of features: {description.num_features:,}",
        "feature-names features-sha256": f"the names of the features: {names}"
        if names
        else hashed,
        "scale": f"that the features {scaled.get(description.scale, 'are standardized')}",
        "class-names": f"the names of {kind}, as text, to the server and to all other "
        f"owners: {', '.join(description.target.names)}",
        "class-counts": counted
        if has_classes
        else f"not the number of {items} with each of them",
        "model partition-id num-partitions partition-sha256": "the owner's number and "
        "its model, as the server assigned them",
        "public-key": "a public key, if the run uses secure aggregation; it is no secret",
        "target-kind": ""
        if has_classes
        else f"that {description.target_kind} are predicted",
        "target-units": "their units: "
        + ", ".join(unit or "none" for unit in description.target_units)
        if description.target_units
        else "",
        "prepared-sha256": "a hash of the recipe and vocabulary of flower-fgl prepare, "
        f"which owners compare: {description.prepared}"
        if description.prepared
        else "",
        "num-edge-features": f"the number of features of edges: {edge_features}"
        if (edge_features := description.num_edge_features)
        else "",
        "num-entries": "the number of known training labels or numbers of all targets: "
        f"{description.num_entries:,}"
        if description.num_entries
        else "",
    }
    said |= _said_of_schema(description, config)
    return {key: text for key, text in said.items() if text}


def _protection(config: RunConfig) -> str:
    """Say how uploads are protected."""
    measures = []
    if config.secure_aggregation:
        measures.append("masked, so that the server only sees the sum over owners")
    if config.upload_clip:
        measures.append(f"clipped to the length {config.upload_clip:g}")
    if config.upload_noise:
        measures.append(f"noised by {config.upload_noise:g} times that length")
    if not measures:
        return (
            "as it is: neither masked (secure-aggregation) nor noised (upload-clip, "
            "upload-noise)"
        )
    return ", ".join(measures)


def list_parts(client: ClientGraph) -> list[str]:
    """List kinds and relations with their numbers; empty for a plain graph."""
    schema = client.schema
    if schema is None:
        return []
    # the inductive setting hides nodes of the training graph; a set has other graphs
    graph = max(client.graphs, key=lambda g: g.num_nodes)
    graphs = (graph,) if graph.batch is None else client.graphs
    edges = torch.zeros(len(schema.relations), dtype=torch.int64)
    for one in graphs:
        assert one.messages is not None
        assert one.messages.relation is not None
        edges += torch.bincount(one.messages.relation, minlength=len(edges))
    lines = ["Kinds of nodes:", *_kinds(graphs, schema, client.target), "Relations:"]
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


def _kinds(graphs: Sequence[Graph], schema: Schema, target: Target) -> list[str]:
    """Describe each kind of nodes of a graph, or of all graphs of a set."""
    nodes, alone = torch.zeros((2, len(schema.widths)), dtype=torch.int64)
    for graph in graphs:
        assert graph.node_type is not None
        assert graph.messages is not None
        nodes += torch.bincount(graph.node_type, minlength=len(nodes))
        is_alone = torch.ones(graph.num_nodes, dtype=torch.bool)
        is_alone[graph.messages.index.flatten()] = False
        alone += torch.bincount(graph.node_type[is_alone], minlength=len(nodes))
    is_set, lines = graphs[0].batch is not None, []
    for place, (kind, width) in enumerate(schema.widths):
        parts = [_count(int(nodes[place]), "node")]
        if is_set and schema.target in ("", kind):
            parts[0] += ", pooled"
        elif kind == schema.target and not schema.predicted:
            known = int((graphs[0].y >= 0).sum())
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


def _said_of_schema(description: Description, config: RunConfig) -> dict[str, str]:
    """Say in words what a description reveals of a typed graph; empty for a plain one."""
    if not description.schema:
        return {}
    size = (
        f"{description.num_nodes:,} nodes to predict, {description.num_edges:,} edges"
    )
    said = {"num-nodes num-edges": f"the size of the graph: {size} of all relations"}
    said = {} if config.has_pairs or config.classifies_graphs else said
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


def _kept_parts(description: Description, config: RunConfig) -> list[str]:
    """Say which weights of a model of typed graphs stay at their owner."""
    if not description.schema or config.schema_align == "same":
        return []
    if config.schema_align == "name":
        return ["of kinds and relations that this owner has, without private relations"]
    return [
        "without those that belong to one kind or relation: only what is common to all"
    ]
