"""From a data owner's file and settings to what the owner's client works on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.seeds import numpy_generator
from flower_fgl.datasets.build import FILE_SPLIT, in_setting
from flower_fgl.datasets.client_graph import ClientGraph, NodeDataset
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile, load_graph_file
from flower_fgl.datasets.splits.few_shot import draw_few_shot
from flower_fgl.datasets.splits.split import SplitFractions, parse_split, split_nodes
from flower_fgl.datasets.transforms.normalize_features import scale_client
from flower_fgl.datasets.transforms.sparsity import Sparsity

__all__ = ["client_from_file", "client_from_owned"]


def client_from_file(path: Path, config: RunConfig) -> ClientGraph:
    """Read a data owner's own graph.

    Parameters
    ----------
    path : Path
        An ``.npz`` file or a CSV folder.
    config : RunConfig
        ``split`` is used where the file brings none, or if it is not ``default``;
        ``setting`` is applied unless the file brings evaluation graphs of its own.

    Returns
    -------
    ClientGraph
        In the owner's own class order, as client 0: :meth:`ClientGraph.renumbered` gives
        it what was agreed.

    Raises
    ------
    ConfigError
        If ``setting`` is ``"graph"``.
    DataError
        If the file is missing or malformed.

    Notes
    -----
    1. A split that the file does not bring is a function of the file and
       ``partition-seed`` only, not of the client's number, which depends on who else
       takes part: a test node of one run must not train the next.
    """
    return client_from_owned(load_graph_file(path.expanduser()), config)


def client_from_owned(owned: LocalGraphFile, config: RunConfig) -> ClientGraph:
    """Split an owner's graph as the settings say, see :func:`client_from_file`.

    Parameters
    ----------
    owned : LocalGraphFile
        The file, read.
    config : RunConfig
        ``split``, ``setting`` and ``partition-seed``.

    Returns
    -------
    ClientGraph

    Raises
    ------
    ConfigError
        If ``setting`` is ``"graph"``, or something is to be taken away from the graph.
    DataError
        If there is no split where one must be, one of other ``shots``, or evaluation
        graphs of another setting.
    """
    if config.classifies_graphs:
        raise ConfigError(
            "A graph file holds one graph, whose nodes are classified: it needs setting = "
            '"transductive" or another, got setting = "graph".'
        )
    if Sparsity.of(config):
        raise ConfigError(
            "An owner's own graph is used as it is, but feature-sparsity, "
            "edge-sparsity or label-sparsity asks to take something away. Set them to "
            "0, or let the app cut the data set itself (partition-id=... instead of "
            "graph=... in the SuperNode's --node-config)."
        )
    _refuse_other_setting(owned, config)
    masks = dict(owned.dataset.masks)
    asked = config.split
    if asked == "default":
        asked = "public" if masks else FILE_SPLIT
    fractions = parse_split(asked)
    if fractions is not None:
        masks = _split_owned(owned.dataset, fractions, config)
    elif config.setting == "few-shot" and "train" in masks:
        _refuse_other_shots(owned.dataset, masks, config.shots)
    client = owned.client_graph(0, masks)
    if not client.evaluation:
        client = in_setting(client, config)
    if client.scaling is None:
        is_dense = client.graph.x.layout == torch.strided
        return scale_client(client, config.scale_of_features(is_dense=is_dense))
    if config.feature_norm not in ("default", client.scaling.kind):
        raise DataError(
            "The features of this file were scaled when it was exported, with "
            f'feature-norm = "{client.scaling.kind}", but this run asks for '
            f'"{config.feature_norm}". Export it with feature-norm = "none", or set '
            'feature-norm = "default".'
        )
    return client


def _refuse_other_setting(owned: LocalGraphFile, config: RunConfig) -> None:
    """Refuse evaluation graphs that are not those of the setting.

    Any go with ``"transductive"`` and ``"few-shot"``, where they are columns besides.
    """
    held = {name for graph in owned.evaluation for name in graph.masks}
    export = (
        "Give a file that was exported in that setting (flower-fgl export), or set "
        'setting = "transductive".'
    )
    if config.has_unseen and "unseen" not in held:
        raise DataError(
            f'setting = "{config.setting}" scores nodes outside the client\'s graph, '
            f"which this file does not hold. {export}"
        )
    exported = "closed-set" if "new_client" in held else "open-set"
    if config.has_unseen and exported != config.setting:
        raise DataError(
            f'setting = "{config.setting}", but the graphs to be scored on in this file '
            f'are those of setting = "{exported}". {export}'
        )
    if config.setting == "inductive" and held and not held & {"val", "test"}:
        raise DataError(
            'setting = "inductive" hides validation and test nodes from training, but '
            "this file holds graphs to be scored on of another setting "
            f"({', '.join(sorted(held))}). {export}"
        )


def _refuse_other_shots(
    dataset: NodeDataset, masks: Mapping[str, Tensor], shots: int
) -> None:
    """Refuse a split that the file brings if a class has not 0 or ``shots`` nodes."""
    labels = dataset.y[masks["train"]]
    counts = torch.bincount(labels[labels >= 0], minlength=dataset.num_classes)
    other = ((counts > 0) & (counts != shots)).nonzero().flatten().tolist()
    if other:
        raise DataError(
            f"This file's own split has {int(counts[other[0]])} training nodes of class "
            f"{dataset.class_names[other[0]]}, but shots = {shots}. Give a file that was "
            f"exported with shots = {shots}, or one without a split: its nodes are drawn."
        )


def _split_owned(
    dataset: NodeDataset, fractions: SplitFractions, config: RunConfig
) -> dict[str, Tensor]:
    """Split an owner's graph that brings no split, as client 0 of a partition."""
    if config.setting == "few-shot":
        return draw_few_shot(
            dataset.y,
            dataset.num_classes,
            config.shots,
            has_networks=False,
            seed=config.partition_seed,
            partition_id=0,
        )
    generator = numpy_generator(config.partition_seed, 0, 0, "split")
    return split_nodes(dataset.y, fractions, generator=generator)
