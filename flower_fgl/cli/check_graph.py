"""The ``check-graph`` command: problems of a graph file, and what leaves its owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from flower_fgl.cli.check_numbers import number_notes
from flower_fgl.cli.check_set import each_class, read_set
from flower_fgl.cli.check_typed import kept_parts, list_parts, said_of_schema
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.data_floors import broken_by_data
from flower_fgl.client_apps.runtime.describe import (
    check_description,
    describe,
    enough,
    owner_name,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError, PayloadError
from flower_fgl.core.node_settings import NodeSettings
from flower_fgl.core.options import Scalar
from flower_fgl.core.targets import MIN_EDGES
from flower_fgl.datasets.client_graph import ClientGraph, EdgeTable
from flower_fgl.datasets.graph_files.graph_file import inspect_graph_file
from flower_fgl.datasets.graph_files.problems import show_path
from flower_fgl.datasets.owned import client_from_owned
from flower_fgl.datasets.splits.split import PUBLIC
from flower_fgl.datasets.suspect import suspect_data
from flower_fgl.datasets.transforms.typed import agreed_graph
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.nn.link import graph_sides
from flower_fgl.protocols.base import INFO
from flower_fgl.protocols.describe import Description

__all__ = ["GraphReport", "describe_leaving", "inspect_graph", "learned_by_server"]
__all__ += ["said_once"]

SMALL_CLASS = 5
"""Classes with fewer training nodes may reveal information about individuals."""


@dataclass(frozen=True)
class GraphReport:
    """Result of checking a graph file.

    ``problems`` are reasons why the file cannot be used, ``notes`` what deserves
    attention. ``description`` is what the server would learn, class counts included;
    ``None`` after a problem. ``parts`` list kinds and relations of a typed graph.
    """

    problems: list[str]
    notes: list[str] = field(default_factory=list)
    description: Description | None = None
    parts: list[str] = field(default_factory=list)


def inspect_graph(
    path: Path,
    settings: Mapping[str, Scalar],
    node: NodeSettings = NodeSettings(),  # noqa: B008 - frozen
) -> GraphReport:
    """Find all problems of a data owner's graph file, for a run and a node config."""
    config = parse_config(settings)
    try:
        read = read_set if config.classifies_graphs else _read_graph
        graph, problems, noted = read(path, config)
        if graph is None:
            return GraphReport(problems)
        parts = list_parts(graph)
        graph = agreed_graph(graph, config.schema_align, None)
        data = ClientData.build(graph, torch.device("cpu"))
    except DataError as error:
        return GraphReport([f"{show_path(path)}: {error}"])
    description = describe(
        data,
        place=(-1, 0),
        model="",
        name=owner_name({"graph": str(path)}),
        share_class_counts=True,
        share_feature_names=config.share_feature_names,
        counts_entries=config.weight_by == "entries",
        schema_align=config.schema_align,
    )
    try:
        check_description(description)
    except PayloadError as error:
        return GraphReport([f"{show_path(path)}: the server would refuse it: {error}"])
    notes = [
        f"this node refuses a run with these settings: {text}."
        for text in broken_by_data(node, config, data)
    ]
    notes += [*noted, *_notes(graph, description, config)]
    is_drawn = "partition-seed" in dict(graph.drawn_from)
    if is_drawn and not graph.replaces_split and not node.state_dir:
        notes.append(
            "The run chooses the split. Two runs whose splits differ by one item can "
            "reveal that item. Write the split into the file, or set state-dir in the node "
            "config: the SuperNode then keeps the split of its first run."
        )
    counts = enough(description.class_counts, config.min_class_count)
    description = replace(description, class_counts=counts)
    return GraphReport([], notes, description, parts)


def _read_graph(
    path: Path, config: RunConfig
) -> tuple[ClientGraph | None, list[str], list[str]]:
    """Return the client of one graph, the problems of its file, and notes on it."""
    owned, problems = inspect_graph_file(
        path,
        needs_labels=not config.has_pairs,
        target_node=config.target_node,
        target_relation=config.target_relation,
    )
    if owned is None:
        return None, problems, []
    notes = [*owned.notes]
    if owned.dataset.edges is not None:
        notes += _edge_notes(owned.dataset.edges, config)
    has_own_split = bool(owned.dataset.masks) or config.has_pairs
    if not has_own_split and config.split == "default":
        split = (
            f"{config.shots} training and 15 test nodes of each class"
            if config.setting == "few-shot"
            else f"20/40/40 percent of {each_class(owned.dataset.target)}"
        )
        parts = "train_mask, val_mask and test_mask to the file"
        if path.is_dir():
            schema = owned.dataset.schema
            table = "nodes.csv" if schema is None else f"nodes/{schema.target}.csv"
            parts = f"a column split to {table} (train, val, test or empty)"
        notes.append(
            "The file contains no split. A random one will be drawn: "
            f"{split}. Add {parts} to choose the split yourself."
        )
    return client_from_owned(owned, config), [], notes


def _notes(
    graph: ClientGraph, description: Description, config: RunConfig
) -> list[str]:
    """Return notes on missing items, small classes, isolated nodes and large features."""
    notes, items = [], _items(config)
    if not description.num_train:
        is_scored = description.num_val or description.num_test
        can = "cannot train and can only" if is_scored else "can neither train nor"
        notes.append(
            f"There are no labelled training {items}: this owner {can} be evaluated."
        )
    for split, number in (
        ("validation", description.num_val),
        ("test", description.num_test),
    ):
        if not number:
            notes.append(f"There are no labelled {split} {items}.")
    whole = graph.graph
    if config.predicts_links:
        assert whole.pairs is not None
        edges = whole.pairs[:, whole.y == 1]
        if graph.schema is None and graph_sides(edges, whole.num_nodes)[1]:
            notes.append(
                "The graph is bipartite: its nodes have two sides, and every edge joins "
                "both. Negatives join both sides too."
            )
    elif graph.target.has_numbers:
        notes += number_notes(graph, items)
    elif graph.target.has_classes:
        notes += _small_classes(description, config)
        notes += _single_class(graph, items)
    has_neighbor = torch.zeros(whole.num_nodes, dtype=torch.bool)
    has_neighbor[whole.edge_index[0]] = True
    isolated = whole.num_nodes - int(has_neighbor.sum())
    if isolated:
        notes.append(f"{isolated:,} of {whole.num_nodes:,} nodes have no neighbour.")
    is_guessable = getattr(config.method_config, "ids", "") == "guessable"
    if graph.outside is not None and is_guessable:
        notes.append(
            "Identifiers of nodes at the border leave this machine: those of an .npz file "
            "as they are, ids of outside.csv as hashes, which anybody who guesses ids can "
            "compare. Remove fedgcn.ids = guessable, or set id-key in the node config."
        )
    return notes + suspect_data(graph)


def _items(config: RunConfig) -> str:
    """Return what is trained and scored: ``graphs``, ``edges`` or ``nodes``."""
    if config.classifies_graphs:
        return "graphs"
    return "edges" if config.has_pairs else "nodes"


def _edge_notes(edges: EdgeTable, config: RunConfig) -> list[str]:
    """Return notes on the classes, times and features of edges."""
    known = int((edges.y >= 0).sum())
    has = "value" if edges.target.has_numbers else "class"
    text = (
        f"{known:,} of {edges.num_edges:,} edges have a {has} "
        f"({', '.join(edges.class_names)})"
    )
    if edges.feature_names:
        text += f", and features ({', '.join(edges.feature_names)})"
    time = edges.time
    if time is not None and len(time):
        text += f", and times from {float(time[0]):.15g} to {float(time[-1]):.15g}"
    if not config.classifies_edges:
        return [f'{text}. Only a run with setting = "edge" reads them.']
    if edges.masks and config.split in ("default", PUBLIC):
        return [f"{text}. The file contains their split."]
    if known < MIN_EDGES:
        return [f"{text}. A split needs at least {MIN_EDGES} edges with a {has}."]
    if time is None:
        return [
            f"{text}. A random split will be drawn, all edges between two nodes together. "
            "In training, messages pass over all edges, those of validation and test "
            "included. Add a column time to train on earlier edges only."
        ]
    return [
        f"{text}. The split follows time: messages pass over training edges only, and for "
        "the test over edges before its first one. Features of nodes must not be computed "
        "from later edges, which nothing here can check."
    ]


def _single_class(graph: ClientGraph, items: str) -> list[str]:
    """Return a note if all training items belong to one class."""
    counts = graph.class_counts("train")
    present = counts.nonzero().flatten().tolist()
    if len(present) != 1:
        return []
    name = graph.class_names[present[0]]
    return [
        f"All {int(counts.sum()):,} training {items} belong to the class {name}. This "
        "owner cannot learn by itself to tell classes apart, and a model that always "
        f"predicts {name} looks perfect here. Check the labels, or the split."
    ]


def _small_classes(description: Description, config: RunConfig) -> list[str]:
    """Return a note that lists small classes and the counts that the server learns."""
    counts = dict(zip(description.class_names, description.class_counts, strict=True))
    small = {name: count for name, count in counts.items() if count < SMALL_CLASS}
    if not small:
        return []
    listed = ", ".join(f"{name} ({count})" for name, count in small.items())
    text = f"Classes with fewer than {SMALL_CLASS} training {_items(config)}: {listed}."
    sent = enough(tuple(small.values()), config.min_class_count)
    if config.share_class_counts and sent == tuple(small.values()):
        text += " With share-class-counts the server learns these counts."
    elif config.share_class_counts and any(sent):
        text += (
            " With share-class-counts the server learns only counts of at least "
            f"min-class-count = {config.min_class_count}."
        )
    return [text]


def learned_by_server(
    description: Description, *, with_counts: bool
) -> dict[str, object]:
    """Return exactly the fields that the server receives, by their name in the message."""
    if not with_counts:
        description = replace(description, class_counts=())
    return dict(description.to_record().config_records[INFO])


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
            f"  the number of training {_items(config)} with each target, and mean and "
            'standard deviation of its values (target-scale = "given" or "own" sends none)'
        )
    method = METHODS[config.method]
    lines += [f"  {text}" for text in method.sent_before]
    rest = ", except for what is sent once" if method.sent_before else ""
    lines.append(f"What leaves it in every round with method = {config.method}:")
    if method.uploads:
        what = f"numbers that are computed from the training {_items(config)}, see the row "
        what += f"of {method.name} in docs/security.md"
        if method.robust:
            what = "the weights of a model that was trained on all training "
            what += _items(config)
        lines.append(f"  {what} ({method.payload} bytes)")
        lines += [f"  {text}" for text in kept_parts(description, config)]
        lines.append(f"  {_protection(config)}")
    lines += [
        f"  {_scored(node, _items(config))}",
        f"What stays here{rest}: every single node, edge, feature and label, the ids of "
        "the nodes, and the predictions.",
        "What can be concluded from uploads: docs/security.md.",
    ]
    return lines


def said_once(description: Description, config: RunConfig) -> dict[str, str]:
    """Say in words what each field of a description, or group of fields, reveals."""
    items = _items(config)
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
    counts = zip(description.class_names, description.class_counts, strict=False)
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
        f"owners: {', '.join(description.class_names)}",
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
    said |= said_of_schema(description, config)
    return {key: text for key, text in said.items() if text}


def _scored(node: NodeSettings, items: str) -> str:
    """Say which scores and losses a node sends."""
    if node.scores == "none":
        return "no loss and no scores (scores = none)"
    loss = "" if node.hides_loss else "the training loss, and "
    rounded = ", rounded" if node.scores == "rounded" else ""
    return f"{loss}the scores on the validation and test {items}{rounded}"


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
