"""What a client tells the server about itself, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flower_fgl.client_apps.client import ClientData
from flower_fgl.options import Scalar
from flower_fgl.protocols.describe import Description

__all__ = ["describe", "owner_name"]


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


def describe(
    data: ClientData,
    *,
    place: tuple[int, int],
    model: str,
    name: str,
    share_class_counts: bool,
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

    Returns
    -------
    Description
    """
    graph = data.graph
    counts = tuple(graph.class_counts("train").tolist()) if share_class_counts else ()
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
        name=name,
    )
