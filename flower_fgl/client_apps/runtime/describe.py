"""What a client tells the server about itself, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context, Message

from flower_fgl.client_apps.runtime.data import ClientData, node_place
from flower_fgl.core.options import Scalar
from flower_fgl.protocols.describe import AGREEMENT, ClassAgreement, Description

__all__ = ["agreed_place", "describe", "enough", "owner_name", "read_agreement"]


def read_agreement(message: Message) -> ClassAgreement | None:
    """Return what the server settled with owners of graphs, if the message tells.

    Raises
    ------
    PayloadError
        If it is malformed.
    """
    if AGREEMENT not in message.content:
        return None
    return ClassAgreement.from_record(message.content)


def agreed_place(agreement: ClassAgreement | None, context: Context) -> tuple[int, int]:
    """Return a client's number and how many there are.

    Returns
    -------
    tuple of two int
        What was agreed with an owner, else what the node config says; -1 and 0 for an
        owner whom the server has not numbered yet.

    Raises
    ------
    RunError
        If the node config is malformed.
    """
    if agreement is not None:
        return agreement.partition_id, agreement.num_partitions
    return node_place(context.node_config)


def owner_name(node: Mapping[str, Scalar]) -> str:
    """Return what logs call the owner of a node.

    Parameters
    ----------
    node : mapping of str to bool, int, float or str
        Node config: ``name``, else the name of the file ``graph`` without its ending.

    Returns
    -------
    str
        Empty for a partition of a data set.
    """
    return str(node.get("name", Path(str(node.get("graph", ""))).stem))


def enough(counts: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Return class counts with 0 for what is below ``min-class-count``."""
    return tuple(count if count >= least else 0 for count in counts)


def describe(
    data: ClientData,
    *,
    place: tuple[int, int],
    model: str,
    name: str,
    share_class_counts: bool,
    min_class_count: int = 1,
    public_key: bytes = b"",
) -> Description:
    """Sum a client's graph up in the counts that the server may know.

    Parameters
    ----------
    data : ClientData
        Its graph, split.
    place : tuple of two int
        Its number and how many clients there are; -1 and 0 where the server decides.
    model : str
        Backbone it builds; empty where that depends on its number.
    name : str
        Its owner's name.
    share_class_counts : bool
        Whether the training nodes of every class are told.
    min_class_count : int
        Classes with fewer are told as having none.
    public_key : bytes
        With secure aggregation the key to which shares are sealed.

    Returns
    -------
    Description
    """
    graph = data.graph
    counts = tuple(graph.class_counts("train").tolist()) if share_class_counts else ()
    counts = enough(counts, min_class_count)
    return Description(
        partition_id=place[0],
        num_partitions=place[1],
        num_nodes=graph.num_items,
        num_edges=graph.num_edges,
        num_train=int(data.training.index.numel()),
        num_val=data.sizes.get("val", 0),
        num_test=data.sizes.get("test", 0),
        num_features=graph.num_features,
        class_names=graph.class_names,
        class_counts=counts,
        model=model,
        partition_sha256=data.partition_sha256,
        public_key=public_key,
        name=name,
        scale=graph.scale,
    )
