"""The ``check-graph`` command: problems of a graph file, and what the server learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.describe import (
    check_description,
    describe,
    enough,
    owner_name,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError, PayloadError
from flower_fgl.core.options import Scalar
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.graph_files.graph_file import inspect_graph_file
from flower_fgl.datasets.graph_files.problems import show_path
from flower_fgl.datasets.owned import client_from_owned
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import INFO
from flower_fgl.protocols.describe import Description

__all__ = ["GraphReport", "inspect_graph", "learned_by_server"]

SMALL_CLASS = 5
"""Classes with fewer training nodes may reveal information about individuals."""


@dataclass(frozen=True)
class GraphReport:
    """Result of checking a graph file.

    Parameters
    ----------
    problems : list of str
        Reasons why the file cannot be used, each with a remedy; empty if it can.
    notes : list of str
        Properties that do not prevent use but deserve attention.
    description : Description or None
        What the server would learn, class counts included; ``None`` after a problem.
    """

    problems: list[str]
    notes: list[str] = field(default_factory=list)
    description: Description | None = None


def inspect_graph(path: Path, settings: Mapping[str, Scalar]) -> GraphReport:
    """Find all problems of a data owner's graph file.

    Parameters
    ----------
    path : Path
        An ``.npz`` file or a CSV folder.
    settings : mapping of str to bool, int, float or str
        Run config of the planned run. ``split``, ``setting``, ``shots``,
        ``share-class-counts`` and ``min-class-count`` matter.

    Raises
    ------
    ConfigError
        If a setting is wrong.
    """
    config = parse_config(settings)
    owned, problems = inspect_graph_file(path)
    if owned is None:
        return GraphReport(problems)
    try:
        graph = client_from_owned(owned, config)
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
    )
    try:
        check_description(description)
    except PayloadError as error:
        return GraphReport([f"{show_path(path)}: the server would refuse it: {error}"])
    notes = _notes(graph, description, config)
    if not owned.dataset.masks and config.split == "default":
        split = (
            f"{config.shots} training and 15 test nodes"
            if config.setting == "few-shot"
            else "20/40/40 percent"
        )
        notes.append(
            "The file contains no split. A random one will be drawn: "
            f"{split} of each class. Add masks to the file to choose the split yourself."
        )
    counts = enough(description.class_counts, config.min_class_count)
    return GraphReport([], notes, replace(description, class_counts=counts))


def _notes(
    graph: ClientGraph, description: Description, config: RunConfig
) -> list[str]:
    """Return notes on missing nodes, small classes, isolated nodes and large features."""
    notes = []
    if not description.num_train:
        is_scored = description.num_val or description.num_test
        can = "cannot train and can only" if is_scored else "can neither train nor"
        notes.append(
            f"There are no labelled training nodes: this owner {can} be evaluated."
        )
    for split, number in (
        ("validation", description.num_val),
        ("test", description.num_test),
    ):
        if not number:
            notes.append(f"There are no labelled {split} nodes.")
    notes += _small_classes(description, config)
    whole = graph.graph
    has_neighbor = torch.zeros(whole.num_nodes, dtype=torch.bool)
    has_neighbor[whole.edge_index[0]] = True
    isolated = whole.num_nodes - int(has_neighbor.sum())
    if isolated:
        notes.append(f"{isolated:,} of {whole.num_nodes:,} nodes have no neighbour.")
    if whole.x.layout == torch.strided:
        largest = float(whole.x.abs().max())
        if largest > 100:
            notes.append(
                f"The largest absolute feature value is {largest:.3g}. Scale the features "
                "in the same way at all owners, or training will converge slowly."
            )
    return notes


def _small_classes(description: Description, config: RunConfig) -> list[str]:
    """Return a note that lists small classes and the counts that the server learns."""
    counts = dict(zip(description.class_names, description.class_counts, strict=True))
    small = {name: count for name, count in counts.items() if count < SMALL_CLASS}
    if not small:
        return []
    listed = ", ".join(f"{name} ({count})" for name, count in small.items())
    text = f"Classes with fewer than {SMALL_CLASS} training nodes: {listed}."
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
    """Return exactly the fields that the server receives.

    Parameters
    ----------
    description : Description
        Description in the report of :func:`inspect_graph`.
    with_counts : bool
        Whether ``share-class-counts`` is on.

    Returns
    -------
    dict of str to object
        Values by field name of the message.
    """
    if not with_counts:
        description = replace(description, class_counts=())
    return dict(description.to_record().config_records[INFO])
