"""What ``flower-fgl check-graph`` does: problems of an owner's file, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.describe import describe, enough, owner_name
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError
from flower_fgl.core.options import Scalar
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.graph_files.graph_file import inspect_graph_file
from flower_fgl.datasets.owned import client_from_owned
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import INFO
from flower_fgl.protocols.describe import Description

__all__ = ["GraphReport", "inspect_graph", "learned_by_server"]

FEW = 5
"""Training nodes of a class below which its count says much about single persons."""


@dataclass(frozen=True)
class GraphReport:
    """What a check found.

    Parameters
    ----------
    problems : list of str
        Why the file cannot be used, each with what to do; empty if it can.
    notes : list of str
        What works but is worth a look.
    description : Description or None
        What the server would learn, class counts included; ``None`` after a problem.
    """

    problems: list[str]
    notes: list[str] = field(default_factory=list)
    description: Description | None = None


def inspect_graph(path: Path, settings: Mapping[str, Scalar]) -> GraphReport:
    """Look for all problems of an owner's graph file.

    Parameters
    ----------
    path : Path
        An ``.npz`` file or a CSV folder.
    settings : mapping of str to bool, int, float or str
        Run config of the planned run; ``split``, ``setting`` and who may know the
        class counts matter.

    Returns
    -------
    GraphReport

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
        return GraphReport([f"{path}: {error}"])
    description = describe(
        data,
        place=(-1, 0),
        model="",
        name=owner_name({"graph": str(path)}),
        share_class_counts=True,
    )
    notes = _notes(graph, description, config)
    if not owned.dataset.masks and config.split == "default":
        drawn = (
            f"{config.shots} training and 15 test nodes"
            if config.setting == "few-shot"
            else "20/40/40 percent"
        )
        notes.append(
            f"The file brings no split: one will be drawn, {drawn} of each class. Bring "
            "your own to keep it under control."
        )
    counts = enough(description.class_counts, config.min_class_count)
    return GraphReport([], notes, replace(description, class_counts=counts))


def _notes(
    graph: ClientGraph, description: Description, config: RunConfig
) -> list[str]:
    """Say what a person would want to know before training on it."""
    notes = []
    if not description.num_train:
        is_scored = description.num_val or description.num_test
        can = "cannot train, only" if is_scored else "can neither train nor"
        notes.append(
            f"There are no labelled training nodes: this owner {can} be scored."
        )
    for what, number in (
        ("validation", description.num_val),
        ("test", description.num_test),
    ):
        if not number:
            notes.append(f"There are no labelled {what} nodes.")
    notes += _few(description, config)
    whole = graph.graph
    touched = torch.zeros(whole.num_nodes, dtype=torch.bool)
    touched[whole.edge_index[0]] = True
    alone = whole.num_nodes - int(touched.sum())
    if alone:
        notes.append(f"{alone:,} of {whole.num_nodes:,} nodes have no neighbour.")
    if whole.x.layout == torch.strided:
        largest = float(whole.x.abs().max())
        if largest > 100:
            notes.append(
                f"The largest feature is {largest:.3g}. Bring features to one scale, the "
                "same at all owners, or training will be slow."
            )
    return notes


def _few(description: Description, config: RunConfig) -> list[str]:
    """Name the small classes, and say which of their counts the server learns."""
    counts = dict(zip(description.class_names, description.class_counts, strict=True))
    few = {name: count for name, count in counts.items() if count < FEW}
    if not few:
        return []
    listed = ", ".join(f"{name} ({count})" for name, count in few.items())
    text = f"Classes with fewer than {FEW} training nodes: {listed}."
    sent = enough(tuple(few.values()), config.min_class_count)
    if config.share_class_counts and sent == tuple(few.values()):
        text += " With share-class-counts the server learns these numbers."
    elif config.share_class_counts and any(sent):
        text += (
            " With share-class-counts the server learns those of at least "
            f"min-class-count = {config.min_class_count}."
        )
    return [text]


def learned_by_server(
    description: Description, *, with_counts: bool
) -> dict[str, object]:
    """Return exactly the fields that the server gets.

    Parameters
    ----------
    description : Description
        Of :func:`check_graph`.
    with_counts : bool
        Whether ``share-class-counts`` is on.

    Returns
    -------
    dict of str to object
        By the name in the message.
    """
    if not with_counts:
        description = replace(description, class_counts=())
    return dict(description.to_record().config_records[INFO])
