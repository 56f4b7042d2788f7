"""Build the graph of a data owner's client from the owner's file and settings."""

import hmac
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.options import Scalar
from flower_fgl.core.targets import EDGE_SPLIT, LINK_SPLIT
from flower_fgl.datasets.build import FILE_SPLIT, in_setting, reading_options
from flower_fgl.datasets.client_graph import ClientGraph, NodeDataset, OutsideEdges
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile, load_graph_file
from flower_fgl.datasets.graph_files.graph_set import load_graph_set
from flower_fgl.datasets.splits.graph_sets import client_from_set
from flower_fgl.datasets.splits.split import (
    SPLITS,
    SplitFractions,
    draw_few_shot,
    draw_split,
    shares_of,
)
from flower_fgl.datasets.transforms.messages import (
    choose_messages,
    expect_predicted,
    finish_messages,
)
from flower_fgl.datasets.transforms.normalize_features import scale_owned
from flower_fgl.datasets.transforms.subgraph import Sparsity

__all__ = ["client_from_file", "client_from_owned", "read_owned"]

LEAST_KEY, LARGEST_KEY = 32, 4096
"""Bytes of a file with the owners' secret."""


def client_from_file(path: Path, config: RunConfig, id_key: str = "") -> ClientGraph:
    """Read a data owner's graph file and build client 0, with the owner's class order.

    ``id_key`` is a file with the secret with which identifiers are hashed, see
    :func:`keyed_ids`; empty for none.

    A generated split depends only on the file and ``partition-seed``, not on the client's
    number, which changes with the other participants. Otherwise a test node of one run
    could be a training node of the next.
    """
    if config.classifies_graphs:
        return client_from_set(
            load_graph_set(path, target_kind=config.target_kind), config
        )
    client = client_from_owned(read_owned(path, config), config)
    if client.outside is None or not id_key:
        return client
    return replace(client, outside=keyed_ids(client.outside, read_id_key(id_key)))


def read_owned(path: Path, config: RunConfig) -> LocalGraphFile:
    """Read an owner's graph as the settings need it."""
    return load_graph_file(path, **reading_options(config))


def read_id_key(path: str) -> bytes:
    """Read the secret, 32 to 4,096 bytes, with which owners hash identifiers of nodes."""
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise DataError(f"Cannot read id-key {path}: {error.strerror}.") from error
    if not LEAST_KEY <= len(key) <= LARGEST_KEY:
        raise DataError(
            f"id-key {path} holds {len(key)} bytes, expected {LEAST_KEY} to "
            f"{LARGEST_KEY:,}. One owner makes it, e.g. with openssl rand -hex 32, and "
            "gives it to the other owners, not to the server."
        )
    return key


def keyed_ids(outside: OutsideEdges, key: bytes) -> OutsideEdges:
    """Replace identifiers of nodes by hashes that only holders of a key can compute.

    They are the first 63 bits of the HMAC-SHA-256 of every identifier (8 bytes,
    little-endian).
    """
    ids, place = torch.unique(
        torch.cat([outside.other, outside.ids]), return_inverse=True
    )
    hashes = [
        hmac.digest(key, number.to_bytes(8, "little", signed=True), "sha256")[:8]
        for number in ids.tolist()
    ]
    numbers = np.frombuffer(b"".join(hashes), dtype="<u8") >> np.uint64(1)
    found = torch.from_numpy(numbers.astype(np.int64))[place]
    number = len(outside.other)
    return OutsideEdges(outside.own, found[:number], found[number:])


def client_from_owned(owned: LocalGraphFile, config: RunConfig) -> ClientGraph:
    """Apply the settings to an owner's graph, see :func:`client_from_file`."""
    if Sparsity.of(config):
        raise ConfigError(
            "An owner's graph file is used unchanged, but feature-sparsity, edge-sparsity "
            "or label-sparsity is above 0. Set them to 0, or let the app partition the "
            "dataset itself (partition-id=... instead of graph=... in the SuperNode's "
            "--node-config)."
        )
    if config.split_by == "id" and not owned.has_ids:
        raise DataError(
            'split-by = "id" needs an identifier of each node, the same at every owner, '
            f"but {owned.dataset.name} has none. Add node_ids (ascending integers), use a "
            'folder with nodes.csv, or set split-by = "random".'
        )
    if config.needs_cross_edges and owned.outside is None:
        raise DataError(
            f"{config.method} needs the edges to other owners' nodes, which "
            f"{owned.dataset.name} does not hold. Add outside.csv with the columns source "
            "(a node of this file) and target (a node of another owner), without lines if "
            "there are none; in an .npz file outside_edges and node_ids."
        )
    if not config.needs_cross_edges:
        owned = replace(owned, outside=None)
    owned = replace(owned, dataset=choose_messages(owned.dataset, config))
    if not config.reads_messages:
        later = tuple(replace(graph, messages=None) for graph in owned.evaluation)
        owned = replace(owned, evaluation=later)
    if not config.classifies_edges:
        owned = replace(owned, dataset=replace(owned.dataset, edges=None))
    owned = _expected(owned, config)
    _check_evaluation_graphs(owned, config)
    own, default = _own_split(owned, config)
    masks, shares = own, shares_of(config, default, own)
    if config.has_pairs:  # edges have their own split
        none = torch.zeros(owned.dataset.num_nodes, dtype=torch.bool)
        masks = dict.fromkeys(SPLITS, none)
    elif shares is not None:
        masks = _split_owned(owned, shares, config)
    elif config.setting == "few-shot" and "train" in masks:
        _check_shots(owned.dataset, masks, config.shots)
    client = replace(
        owned.client_graph(0, masks),
        drawn_from=_drawn_from(shares, config),
        replaces_split=shares is not None and bool(own),
    )
    if client.evaluation:
        client = finish_messages(client, config)
    else:
        client = in_setting(client, config, owned.names)
    return scale_owned(client, config)


def _expected(owned: LocalGraphFile, config: RunConfig) -> LocalGraphFile:
    """Return an owner's graph with the target that the run predicts."""
    where = owned.dataset.name
    found = expect_predicted(owned.dataset, config, where)
    assert isinstance(found, NodeDataset)
    is_other = found is not owned.dataset and not config.has_pairs
    if is_other and owned.evaluation:
        raise DataError(
            f"{where} contains evaluation graphs, of which target = {config.target} cannot "
            "choose one number. Set target = all."
        )
    return replace(owned, dataset=found)


def _own_split(
    owned: LocalGraphFile, config: RunConfig
) -> tuple[Mapping[str, Tensor], str]:
    """Return the file's split, and the shares of a graph without one."""
    if config.predicts_links:
        return {}, LINK_SPLIT
    if config.classifies_edges:
        edges = owned.dataset.edges
        return ({} if edges is None else edges.masks), EDGE_SPLIT
    return owned.dataset.masks, FILE_SPLIT


def _drawn_from(
    shares: SplitFractions | None, config: RunConfig
) -> tuple[tuple[str, Scalar], ...]:
    """Return the settings that determine what training sees.

    With the file's own split that is ``setting`` alone: it hides nodes and their edges.
    """
    used: dict[str, Scalar] = {"setting": config.setting}
    if shares is None:
        return tuple(used.items())
    if config.split_by == "id":
        used["split-by"] = config.split_by
    if config.setting == "few-shot":
        used["shots"] = config.shots
    elif config.classifies_edges and config.time_cuts:
        used["time-cuts"] = config.time_cuts.replace(" ", "")
    else:
        used["split"] = "/".join(f"{float(100 * share):g}" for share in shares)
    used["partition-seed"] = config.partition_seed
    return tuple(used.items())


def _check_evaluation_graphs(owned: LocalGraphFile, config: RunConfig) -> None:
    """Reject evaluation graphs that were exported in another setting."""
    if config.predicts_links and owned.evaluation:
        raise DataError(
            'setting = "link" splits the edges of one graph, but this file contains '
            "evaluation graphs. Use a file without them."
        )
    # "transductive" and "few-shot" accept all of them, as additional metric columns.
    held = {name for graph in owned.evaluation for name in graph.masks}
    exported = "closed-set" if "new_client" in held else "open-set"
    for is_wrong, what in (
        (
            config.has_unseen and "unseen" not in held,
            " evaluates nodes outside the client's graph, which this file does not "
            "contain.",
        ),
        (
            config.has_unseen and exported != config.setting,
            ", but the evaluation graphs in this file were exported with setting = "
            f'"{exported}".',
        ),
        (
            config.setting == "inductive" and held and not held & {"val", "test"},
            " hides validation and test nodes from training, but this file contains "
            "evaluation graphs of another setting, with the masks "
            f"{', '.join(sorted(held))}.",
        ),
    ):
        if is_wrong:
            raise DataError(
                f'setting = "{config.setting}"{what} Use a file that was exported in that '
                'setting (flower-fgl export), or set setting = "transductive".'
            )


def _check_shots(dataset: NodeDataset, masks: Mapping[str, Tensor], shots: int) -> None:
    """Reject the file's split unless each class has 0 or ``shots`` training nodes."""
    labels = dataset.y[masks["train"]]
    counts = torch.bincount(labels[labels >= 0], minlength=dataset.target.width)
    other = ((counts > 0) & (counts != shots)).nonzero().flatten().tolist()
    if other:
        raise DataError(
            f"The split in this file has {int(counts[other[0]])} training nodes of class "
            f"{dataset.target.names[other[0]]}, but shots = {shots}. Use a file that was "
            f"exported with shots = {shots}, or a file without a split."
        )


def _split_owned(
    owned: LocalGraphFile, fractions: SplitFractions, config: RunConfig
) -> dict[str, Tensor]:
    """Split an owner's graph as client 0 of a partition."""
    y, seed = owned.dataset.y, config.partition_seed
    if config.setting == "few-shot":
        return draw_few_shot(
            y,
            owned.dataset.target.width,
            config.shots,
            has_networks=False,
            seed=seed,
            partition_id=0,
        )
    keys = map(str, owned.ids.tolist()) if config.split_by == "id" else None
    return draw_split(y, owned.dataset.targets, fractions, seed=seed, keys=keys)
