"""A client's description: all that it reports to the server about its graph."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from flower_fgl.client_apps.runtime.data import ClientData, node_place
from flower_fgl.core.agreement import hash_names, whole_recipe
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.options import Scalar
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.graph_files.problems import clip
from flower_fgl.protocols.describe import (
    AGREEMENT,
    HASHED,
    MAX_TEXT,
    PRIVATE,
    ClassAgreement,
    Description,
    Rejection,
)

__all__ = [
    "agreed_place",
    "check_description",
    "client_label",
    "describe",
    "enough",
    "owner_key",
    "owner_name",
    "read_agreement",
    "to_reply",
]


def read_agreement(message: Message) -> ClassAgreement | None:
    """Return the agreement with the data owners, if the message holds one."""
    if AGREEMENT not in message.content:
        return None
    return ClassAgreement.from_record(message.content)


def agreed_place(agreement: ClassAgreement | None, context: Context) -> tuple[int, int]:
    """Return a client's partition-id and the number of partitions: agreed, or its node's.

    They are -1 and 0 for a data owner that the server has not numbered yet.
    """
    # a node with a partition of a dataset has its number from its own node config
    if agreement is not None and "graph" in context.node_config:
        return agreement.partition_id, agreement.num_partitions
    return node_place(context.node_config)


def owner_name(node: Mapping[str, Scalar]) -> str:
    """Return a data owner's name: ``name`` of the node config, else that of ``graph``.

    The name of a file is used without its ending. It is empty for a partition of a
    dataset. Characters that the server refuses, such as line breaks, are escaped.
    """
    path = Path(str(node.get("graph", "")))
    name = path.stem if path.suffix == ".npz" else path.name
    return clip(node.get("name", name), MAX_TEXT)


def owner_key(node: Mapping[str, Scalar]) -> str:
    """Return a name for a node's files that follows from its graph and nothing else.

    Two graphs never have the same key, whatever their owners are named.
    """
    about = f"partition {node.get('partition-id')} of {node.get('num-partitions')}"
    if "graph" in node:
        about = os.path.realpath(os.path.expanduser(str(node["graph"])))
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def check_description(description: Description) -> None:
    """Raise the PayloadError with which the server would refuse a description."""
    Description.from_record(description.to_record())


def to_reply(description: Description) -> RecordDict:
    """Pack a description; a data owner's that the server would refuse is a rejection."""
    try:
        check_description(description)
    except PayloadError as error:
        if not description.is_owned:
            raise
        reason = f"its description is not allowed: {error}"
        return Rejection(description.name, reason).to_record()
    return description.to_record()


def client_label(node: Mapping[str, Scalar]) -> str:
    """Return a data owner's name, or the number of a partition, for messages."""
    return owner_name(node) or f"client {node.get('partition-id', '(no number)')}"


def enough(counts: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Return class counts, 0 for counts below ``min-class-count``."""
    return tuple(count if count >= least else 0 for count in counts)


def describe(
    data: ClientData,
    *,
    place: tuple[int, int],
    model: str,
    name: str,
    share_class_counts: bool,
    share_feature_names: bool = False,
    min_class_count: int = 1,
    counts_entries: bool = False,
    schema_align: str = "same",
    public_key: bytes = b"",
    about: str = "",
) -> Description:
    """Describe a client's graph by counts that may leave the client.

    ``place`` is -1 and 0 if the server assigns the partition-id; ``model`` is empty if it
    depends on that. Without ``share_feature_names`` only a hash of the names is included.
    Classes with fewer than ``min_class_count`` training nodes are reported as 0. With
    ``counts_entries`` the number of known training labels or numbers is included. Peers
    encrypt shares of secure aggregation for this client with its ``public_key``. ``about``
    are the owner's words on its data.
    """
    graph = data.graph
    is_counted = share_class_counts and graph.graph.targets is None  # one class each
    counts = tuple(graph.class_counts("train").tolist()) if is_counted else ()
    counts = enough(counts, min_class_count)
    names = graph.feature_names
    is_joint = graph.schema is None or schema_align == "same"
    names = names if is_joint else ()
    schema, type_features = "", tuple[str, ...]()
    if graph.schema is not None:
        schema, type_features = _told_schema(graph, schema_align)
    return Description(
        partition_id=place[0],
        num_partitions=place[1],
        num_nodes=graph.num_items,
        num_edges=graph.num_edges,
        num_train=int(data.training.index.numel()),
        num_val=data.sizes.get("val", 0),
        num_test=data.sizes.get("test", 0),
        num_features=graph.num_features if is_joint else 0,
        class_names=graph.class_names,
        class_counts=counts,
        model=model,
        partition_sha256=data.partition_sha256,
        public_key=public_key,
        name=name,
        scale=graph.scale,
        feature_names=names if share_feature_names else (),
        features_sha256=hash_names(names),
        num_edge_features=graph.num_edge_features,
        num_entries=data.num_entries if counts_entries else 0,
        prepared=whole_recipe(graph.prepared) if is_joint else "",
        target_kind=graph.target.kind,
        target_units=graph.target.units,
        schema=schema,
        type_features=type_features,
        about=clip(about, MAX_TEXT),
    )


def _told_schema(graph: ClientGraph, align: str) -> tuple[str, tuple[str, ...]]:
    """Return what a client tells of its schema, and the hashes of the features of kinds.

    Private relations, and with ``schema-align = "private"`` all, stay untold.
    """
    from flower_fgl.datasets.transforms.typed import told_parts

    if align == "private":
        return PRIVATE, ()
    if align == "same":
        assert graph.schema is not None
        return f"{HASHED}{graph.schema.hashed().to_text()}", ()
    told = told_parts(graph, align)
    return told.schema.to_text(), told.features
