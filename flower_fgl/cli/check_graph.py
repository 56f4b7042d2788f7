"""The ``check-graph`` command: problems of a graph file, and notes on its content."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from flower_fgl.cli.leaving import items_of, list_parts
from flower_fgl.client_apps.runtime.data import ClientData, broken_by_data, owner_name
from flower_fgl.client_apps.runtime.describe import check_description, describe, enough
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError, PayloadError, show_path
from flower_fgl.core.held_kind import with_held_kind
from flower_fgl.core.node_settings import NodeSettings
from flower_fgl.core.options import Scalar
from flower_fgl.core.target_scale import moments
from flower_fgl.core.targets import MIN_EDGES, Target
from flower_fgl.datasets.build import reading_options
from flower_fgl.datasets.client_graph import ClientGraph, EdgeTable, GraphDataset
from flower_fgl.datasets.graph_files.graph_file import inspect_graph_file
from flower_fgl.datasets.graph_files.graph_set import OwnedSet, inspect_graph_set
from flower_fgl.datasets.owned import client_from_owned
from flower_fgl.datasets.splits.graph_sets import (
    MAY_LEAK,
    SET_SPLIT,
    UNUSED_SPLIT,
    client_from_set,
    leaks,
    part_keys,
    split_keys,
    split_rule,
    split_set,
)
from flower_fgl.datasets.splits.split import PUBLIC
from flower_fgl.datasets.suspect import suspect_data
from flower_fgl.datasets.transforms.typed import agreed_graph
from flower_fgl.methods import parse_config
from flower_fgl.nn.link import graph_sides
from flower_fgl.protocols.describe import Description

__all__ = ["GraphReport", "inspect_graph"]

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
    config = parse_config(with_held_kind(settings, [path]))
    try:
        read = _read_set if config.classifies_graphs else _read_graph
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
        replace(config, share_class_counts=True, min_class_count=1),
        place=(-1, 0),
        model="",
        name=owner_name({"graph": str(path)}),
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
    owned, problems = inspect_graph_file(path, **reading_options(config))
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
            else f"20/40/40 percent of {_each_class(owned.dataset.target)}"
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
    notes, items = [], items_of(config)
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
        notes += _number_notes(graph, items)
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


def _edge_notes(edges: EdgeTable, config: RunConfig) -> list[str]:
    """Return notes on the classes, times and features of edges."""
    known = int((edges.y >= 0).sum())
    has = "value" if edges.target.has_numbers else "class"
    text = (
        f"{known:,} of {edges.num_edges:,} edges have a {has} "
        f"({', '.join(edges.target.names)})"
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
    name = graph.target.names[present[0]]
    return [
        f"All {int(counts.sum()):,} training {items} belong to the class {name}. This "
        "owner cannot learn by itself to tell classes apart, and a model that always "
        f"predicts {name} looks perfect here. Check the labels, or the split."
    ]


def _small_classes(description: Description, config: RunConfig) -> list[str]:
    """Return a note that lists small classes and the counts that the server learns."""
    counts = dict(zip(description.target.names, description.class_counts, strict=True))
    small = {name: count for name, count in counts.items() if count < SMALL_CLASS}
    if not small:
        return []
    listed = ", ".join(f"{name} ({count})" for name, count in small.items())
    text = (
        f"Classes with fewer than {SMALL_CLASS} training {items_of(config)}: {listed}."
    )
    sent = enough(tuple(small.values()), config.min_class_count)
    if config.share_class_counts and sent == tuple(small.values()):
        text += " With share-class-counts the server learns these counts."
    elif config.share_class_counts and any(sent):
        text += (
            " With share-class-counts the server learns only counts of at least "
            f"min-class-count = {config.min_class_count}."
        )
    return [text]


FEW = 5
"""Training values below which a target's mean and spread say little."""
FAR = 10.0
"""Standard deviations from the mean beyond which a value is named."""


def _number_notes(graph: ClientGraph, items: str) -> list[str]:
    """Return notes on unknown, few, equal and far values of each target.

    ``items`` are ``nodes``, ``edges`` or ``graphs``.
    """
    # those for evaluation hold nodes of the first again, but other graphs of a set
    parts = graph.graphs if items == "graphs" else (graph.graph,)
    held = [part.targets for part in parts if part.targets is not None]
    values, masks = torch.cat(held), graph.graph.masks
    training = moments(held[0][masks["train"]])
    notes = []
    for place, found in enumerate(moments(values)):
        name, number = graph.target.names[place], len(values)
        if found.count < number:
            share = 1 - found.count / number
            notes.append(f'"{name}" is unknown for {share:.1%} of the {items}.')
        if training[place].count < FEW:
            notes.append(
                f'"{name}" has {training[place].count} training values, fewer than {FEW}.'
            )
        if found.count and not found.m2:
            notes.append(f'All {found.count} known values of "{name}" are equal.')
        known = values[:, place][~values[:, place].isnan()]
        for which, end in (("smallest", torch.min), ("largest", torch.max)):
            rest = known[known != end(known)] if found.count else known
            (others,) = moments(rest[:, None])
            if others.m2 and abs(float(end(known)) - others.mean) > FAR * others.spread:
                # a marker of unknown values is often repeated
                notes.append(
                    f'The {which} value of "{name}" ({len(known) - len(rest)} times) is '
                    f"more than {FAR:.0f} standard deviations from the mean of the others. "
                    "Check the unit; if it marks an unknown value, leave it out (NaN, an "
                    "empty cell)."
                )
    return notes


def _each_class(target: Target) -> str:
    """Return of what a random split has its shares."""
    return "the items with a known value" if target.has_numbers else "each class"


def _read_set(
    path: Path, config: RunConfig
) -> tuple[ClientGraph | None, list[str], list[str]]:
    """Return the client of a set of graphs, the problems of its file, and notes on it."""
    owned, problems = inspect_graph_set(path, target_kind=config.target_kind)
    if owned is None:
        return None, problems, []
    rule = split_rule(owned, config)
    has_own = bool(owned.dataset.masks)
    is_own = config.split == PUBLIC or (
        config.split == "default" and rule == "random" and has_own
    )
    notes = [*owned.notes, *_sizes(owned)]
    if is_own or rule == "random":
        masks, _ = split_set(owned, config)
        notes += [text for text in (leaks(part_keys(owned, config, masks)),) if text]
    if is_own:
        notes.append(f"The split of this file {MAY_LEAK}.")
        return client_from_set(owned, config), [], notes
    share = SET_SPLIT if config.split == "default" else config.split
    if rule == "random":
        keyed = owned
        notes.append(
            f"A random split will be drawn, {share} percent of "
            f"{_each_class(owned.dataset.target)}, which {MAY_LEAK}. "
            + (
                "Remove split-by to split by identifiers."
                if owned.keys
                else "Name the items in graph_keys (CSV: key), alike at all owners."
            )
        )
    else:  # the identifiers of molecules take long: they are computed once
        keyed = replace(owned, keys=split_keys(owned, rule), smiles=())
        config = replace(config, split_by="id")
        notes += _repeats(keyed)
        notes.append(
            f'The split follows split-by = "{rule}": about {share} percent of the '
            "identifiers, each in the same part at all owners with the same seed."
        )
        if has_own:  # the note is in the report, not in the log
            notes.append(UNUSED_SPLIT)
            keyed = replace(keyed, dataset=replace(owned.dataset, masks={}))
            client = client_from_set(keyed, config)
            return replace(client, replaces_split=True), [], notes
    return client_from_set(keyed, config), [], notes


def _sizes(owned: OwnedSet) -> list[str]:
    """Return notes on the sizes of the graphs, and on known labels."""
    dataset = owned.dataset
    number = dataset.num_graphs
    nodes = torch.bincount(dataset.batch, minlength=number)
    of_edge = dataset.batch[dataset.edge_index[0]]
    edges = torch.bincount(of_edge, minlength=number) // 2
    known = int((dataset.y >= 0).sum())
    return [
        f"{number:,} graphs, {known:,} of them with a known {_known_of(dataset)}. "
        "Smallest, median and largest number of nodes: "
        f"{_three(nodes)}; of edges: {_three(edges)}. "
        f"{int((edges == 0).sum()):,} graphs have no edge."
    ]


def _known_of(dataset: GraphDataset) -> str:
    """Return what is known of the graphs; of several targets, how many of each."""
    target, values = dataset.target, dataset.targets
    if values is None:
        return "label"
    is_known = ~values.isnan() if target.has_numbers else values >= 0
    counts = zip(target.names, is_known.sum(dim=0).tolist(), strict=True)
    return f"value ({', '.join(f'{name}: {count:,}' for name, count in counts)})"


def _three(counts: torch.Tensor) -> str:
    """Return minimum, median and maximum for a note."""
    return f"{int(counts.min()):,}, {int(counts.median()):,}, {int(counts.max()):,}"


def _repeats(owned: OwnedSet) -> list[str]:
    """Return a note on identifiers that several graphs have."""
    counts = Counter(owned.keys)
    repeated = {key for key, count in counts.items() if count > 1}
    if not repeated:
        return []
    y, targets = owned.dataset.y, owned.dataset.targets
    rows = (y[:, None] if targets is None else targets).numpy()
    labels = zip(owned.keys, map(bytes, rows), strict=True)
    pairs = {(key, label) for key, label in labels if key in repeated}
    differing = sum(count > 1 for count in Counter(key for key, _ in pairs).values())
    graphs = sum(counts[key] for key in repeated)
    return [
        f"{len(repeated):,} identifiers stand for several graphs, {graphs:,} in all, which "
        f"are in one part of the split and all count; {differing:,} of these identifiers "
        "have different values."
    ]
