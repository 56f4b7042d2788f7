"""Sets of graphs: degree features, their split, and the graphs of each client."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError
from flower_fgl.core.options import Scalar
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    Graph,
    GraphDataset,
)
from flower_fgl.datasets.graph_files.graph_set import OwnedSet
from flower_fgl.datasets.graph_files.set_csv import inchikeys
from flower_fgl.datasets.partition.partition import IntArray
from flower_fgl.datasets.splits.split import (
    PUBLIC,
    SPLITS,
    draw_split,
    shares_of,
)
from flower_fgl.datasets.transforms.canonical import SPARSE_WIDTH
from flower_fgl.datasets.transforms.messages import (
    choose_messages,
    expect_target,
    finish_messages,
)
from flower_fgl.datasets.transforms.normalize_features import scale_owned
from flower_fgl.nn.graph_union import GraphBatch, select_rows
from flower_fgl.nn.sparse import narrow_csr

__all__ = [
    "MAY_LEAK",
    "SET_SPLIT",
    "UNUSED_SPLIT",
    "PartKeys",
    "client_from_set",
    "cut_graph_clients",
    "degree_names",
    "leaks",
    "part_keys",
    "replaces_split",
    "split_keys",
    "split_rule",
    "split_set",
    "with_degrees",
]


SET_SPLIT = "80/10/10"
"""Default split of an owner's set of graphs."""
MAY_LEAK = "may test an item that another owner trains on"
UNUSED_SPLIT = (
    f'The split in this file is not used. split = "{PUBLIC}" uses it; it {MAY_LEAK}.'
)
"""Note on a set with a split that a drawn one replaces."""


def node_degrees(dataset: GraphDataset) -> Tensor:
    """Count the neighbours of each node, (N,), int64."""
    return torch.bincount(dataset.edge_index[0], minlength=dataset.batch.numel())


def degree_features(degrees: Tensor, largest: int) -> Tensor:
    """Encode degrees (N,) one-hot, float32; the last of largest + 2 columns is for others.

    The result is sparse CSR if there are at least 64 columns, strided otherwise.
    """
    column = degrees.clamp(max=largest + 1)
    width = largest + 2
    if width < SPARSE_WIDTH:
        return F.one_hot(column, width).float()
    # one entry per row; the clamp keeps it in range
    count = len(column)
    return narrow_csr(
        torch.arange(count + 1), column, torch.ones(count), (count, width)
    )


def degree_names(largest: int) -> tuple[str, ...]:
    """Return the names of the columns of :func:`with_degrees`."""
    return (*(f"degree={k}" for k in range(largest + 1)), f"degree>{largest}")


def with_degrees(dataset: GraphDataset, largest: int) -> GraphDataset:
    """Replace the features by one-hot degrees, and one column for those above a number."""
    if dataset.schema is not None:
        raise DataError(
            f'{dataset.name} has kinds of nodes: graph-features = "degree" is for graphs '
            "of one kind. Remove it; a kind needs no features."
        )
    x = degree_features(node_degrees(dataset), largest)
    return replace(dataset, x=x, feature_names=degree_names(largest))


def cut_graph_clients(
    dataset: GraphDataset,
    parts: Sequence[IntArray],
    masks: Sequence[Mapping[str, Tensor]],
) -> list[ClientGraph]:
    """Build each client's training graphs and separate evaluation graphs.

    ``graph`` of a client is the union of its training graphs; ``evaluation`` holds the
    unions of the validation and of the test graphs, so training cannot see an evaluation
    graph.

    A dataset without node features gets one-hot degrees, up to the maximum over the
    training graphs of all clients: no validation or test graph affects it.
    """
    numbers = [torch.from_numpy(part) for part in parts]
    if dataset.num_features == 0 and dataset.schema is None:
        x = _training_degree_features(dataset, numbers, masks)
        dataset = replace(dataset, x=x)
    union = GraphBatch(dataset.edge_index, dataset.batch, dataset.num_graphs)
    listed = None
    if dataset.messages is not None:
        index = dataset.messages.index
        listed = GraphBatch.trusted(index, dataset.batch, dataset.num_graphs)
    clients = []
    for partition_id, (graphs, mask) in enumerate(zip(numbers, masks, strict=True)):
        train, *evaluation = (
            _select(dataset, union, listed, graphs[mask[name]], name) for name in SPLITS
        )
        # a client's file holds no tensor twice
        none = torch.zeros(train.num_items, dtype=torch.bool)
        train = replace(train, masks={**train.masks, "val": none, "test": none.clone()})
        client = dataset.client_of(
            train,
            partition_id=partition_id,
            node_ids=graphs[mask["train"]],
            evaluation=tuple(evaluation),
        )
        clients.append(client)
    return clients


def _training_degree_features(
    dataset: GraphDataset,
    graphs: Sequence[Tensor],
    masks: Sequence[Mapping[str, Tensor]],
) -> Tensor:
    """Encode degrees by the largest degree of a training graph."""
    is_train = torch.zeros(dataset.num_graphs, dtype=torch.bool)
    for numbers, mask in zip(graphs, masks, strict=True):
        is_train[numbers[mask["train"]]] = True
    degrees = node_degrees(dataset)
    seen = degrees[is_train[dataset.batch]]
    return degree_features(degrees, int(seen.max()) if seen.numel() else 0)


def _select(
    dataset: GraphDataset,
    union: GraphBatch,
    listed: GraphBatch | None,
    graphs: Tensor,
    name: str,
) -> Graph:
    """Return the union of some graphs, which are all in the mask of that name.

    ``union`` holds the undirected edges, ``listed`` those with direction and features.
    """
    part = union.select(graphs)
    messages = dataset.messages
    if messages is not None and listed is not None:
        sent = listed.select(graphs)
        messages = messages.select(sent.edges)
        of_edges = messages.x.to(torch.float32)
        messages = replace(messages, index=sent.edge_index, x=of_edges)
    return Graph(
        select_rows(dataset.x, part.nodes),
        part.edge_index,
        dataset.y[graphs],
        {name: torch.ones(len(graphs), dtype=torch.bool)},
        part.batch,
        targets=None if dataset.targets is None else dataset.targets[graphs],
        messages=messages,
        node_type=None if dataset.node_type is None else dataset.node_type[part.nodes],
    )


log = logging.getLogger(__name__)


def client_from_set(
    owned: OwnedSet, config: RunConfig, *, is_published: bool = False
) -> ClientGraph:
    """Split an owner's set of graphs, and build client 0 from it.

    Graphs whose label is unknown are left out. ``is_published`` says that the set is a
    benchmark, see :func:`choose_messages`.
    """
    dataset = expect_target(owned.dataset, config, owned.dataset.name)
    owned = replace(owned, dataset=dataset)
    dataset = choose_messages(dataset, config, is_published=is_published)
    if config.graph_features == "degree":
        dataset = with_degrees(dataset, config.max_degree)
        owned = replace(owned, scaling=None)
    if not dataset.num_features and dataset.schema is None:
        raise DataError(
            f"The nodes of {dataset.name} have no features. Add columns to nodes.csv (x in "
            'an .npz file), or set graph-features = "degree", which counts the neighbours '
            "of each node."
        )
    masks, drawn_from = split_set(owned, config)
    for name, what in (("train", "training"), ("test", "test")):
        if not bool(masks[name].any()):
            log.warning(
                '%s has no %s graphs under split-by = "%s" (%s graphs).',
                *(dataset.name, what, split_rule(owned, config), dataset.num_graphs),
            )
    if warning := leaks(part_keys(owned, config, masks)):
        log.warning("%s: %s", dataset.name, warning)
    client = cut_graph_clients(dataset, [np.arange(dataset.num_graphs)], [masks])[0]
    client = replace(
        client,
        scaling=owned.scaling,
        drawn_from=drawn_from,
        replaces_split=replaces_split(dataset, drawn_from),
        prepared=owned.prepared,
    )
    return scale_owned(finish_messages(client, config), config)


class PartKeys(NamedTuple):
    """Identifiers of the training graphs of a set, and of those that are scored."""

    train: frozenset[str] = frozenset()
    scored: Sequence[str] = ()
    rule: str = "id"


def part_keys(
    owned: OwnedSet, config: RunConfig, masks: Mapping[str, Tensor]
) -> PartKeys:
    """Return the identifiers (skeletons) of both parts; empty if they decide the split."""
    rule = "skeleton" if owned.smiles else "id"
    is_drawn = config.split != PUBLIC and split_rule(owned, config) == rule
    if is_drawn or not (owned.smiles or owned.keys):
        return PartKeys()
    keys = split_keys(owned, rule)
    train, scored = masks["train"], masks["val"] | masks["test"]
    return PartKeys(
        frozenset(itertools.compress(keys, train.tolist())),
        tuple(itertools.compress(keys, scored.tolist())),
        rule,
    )


def leaks(own: PartKeys, holders: Mapping[str, int] | None = None) -> str:
    """Say how many scored graphs have the identifier of a training graph, empty if none.

    With ``holders``, the number of owners that train on each identifier, these are
    training graphs of other owners.
    """
    if holders is None:
        number = sum(key in own.train for key in own.scored)
    else:
        number = sum(holders[key] > (key in own.train) for key in own.scored)
    if not number:
        return ""
    whose = "" if holders is None else " of another owner"
    return (
        f"{number:,} of {len(own.scored):,} validation and test graphs have the identifier "
        f"of a training graph{whose}: scores may be too high. Use the default split, or "
        f'split-by = "{own.rule}".'
    )


def split_rule(owned: OwnedSet, config: RunConfig) -> str:
    """Resolve ``split-by``: ``random``, ``id``, ``inchikey`` or ``skeleton``."""
    if config.split_by != "auto":
        return config.split_by
    if owned.smiles:
        return "skeleton"
    return "id" if owned.keys else "random"


def split_set(
    owned: OwnedSet, config: RunConfig
) -> tuple[dict[str, Tensor], tuple[tuple[str, Scalar], ...]]:
    """Split the graphs of known label; return the settings from which it was drawn, too.

    These are ``setting`` alone for the file's own split.
    """
    dataset, rule = owned.dataset, split_rule(owned, config)
    known = dataset.y >= 0
    fractions = shares_of(config, SET_SPLIT, dataset.masks if rule == "random" else ())
    drawn: dict[str, Scalar] = {"setting": config.setting}
    if fractions is None:
        return _own_split(dataset.masks, known, dataset.name), tuple(drawn.items())
    shares = "/".join(f"{float(100 * share):g}" for share in fractions)
    seed = config.partition_seed
    drawn |= {"split-by": rule, "split": shares, "partition-seed": seed}
    keys = None if rule == "random" else split_keys(owned, rule)
    masks = draw_split(dataset.y, dataset.targets, fractions, seed=seed, keys=keys)
    return masks, tuple(drawn.items())


def replaces_split(
    dataset: GraphDataset, drawn_from: Sequence[tuple[str, Scalar]]
) -> bool:
    """Return whether a drawn split replaces that of the file, of which the log warns."""
    is_replaced = "partition-seed" in dict(drawn_from) and bool(dataset.masks)
    if is_replaced:
        log.warning("%s: %s", dataset.name, UNUSED_SPLIT)
    return is_replaced


def _own_split(
    masks: Mapping[str, Tensor], known: Tensor, name: str
) -> dict[str, Tensor]:
    """Return the split in the file."""
    if missing := [part for part in SPLITS if part not in masks]:
        raise DataError(
            f'split = "{PUBLIC}", but {name} has no split into {", ".join(missing)} '
            "graphs. Add a column split to graphs.csv (in an .npz file train_mask, "
            f'val_mask and test_mask), or give percentages, e.g. "{SET_SPLIT}".'
        )
    return {part: masks[part] & known for part in SPLITS}


def split_keys(owned: OwnedSet, rule: str) -> tuple[str, ...]:
    """Return the identifier of each graph by which a rule other than ``random`` splits."""
    name = owned.dataset.name
    if rule == "id" and not owned.keys:
        raise DataError(
            f'split-by = "id" needs an identifier of each graph, but {name} has none. Add '
            'graph_keys (or graph_ids), or set split-by = "random".'
        )
    if rule == "id":
        return owned.keys
    if not owned.smiles:
        raise DataError(
            f'split-by = "{rule}" needs molecules, but {name} has no column smiles. Use '
            'split-by = "id", with a column key in graphs.csv (graph_keys).'
        )
    return tuple(inchikeys(owned.smiles, name, is_skeleton=rule == "skeleton"))
