"""What a run reads of a dataset: its target, and its edges with direction and features."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError
from flower_fgl.core.options import nearest
from flower_fgl.core.schema import has_name
from flower_fgl.core.settings import ALL_TARGETS
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    EdgeTable,
    GraphDataset,
    NodeDataset,
)
from flower_fgl.datasets.transforms.typed import without_types

__all__ = [
    "EDGE_PREFIX",
    "choose_messages",
    "expect_predicted",
    "expect_target",
    "finish_messages",
    "joint_names",
]


EDGE_PREFIX = "edge: "
"""Begin of the names of the edges' features, which follow those of the nodes' features."""

log = logging.getLogger(__name__)

Dataset = TypeVar("Dataset", bound=NodeDataset | GraphDataset)


def choose_messages(
    dataset: Dataset, config: RunConfig, *, is_published: bool = False
) -> Dataset:
    """Keep the edges with direction and features only if a backbone of the run reads them.

    Unless the dataset ``is_published``, a warning says if no backbone reads features.
    """
    name = dataset.name
    _check_target_node(dataset, config)
    if dataset.schema is not None and config.types == "ignore":
        dataset = without_types(dataset)
    elif dataset.schema is not None or config.reads_types:
        return _typed(dataset, config)
    messages = dataset.messages
    width = 0 if messages is None else messages.x.shape[1]
    if config.reads_edge_features and not width:
        raise DataError(
            f'{name} has no features of edges, which model = "gine" reads. Add columns to '
            'edges.csv, or edge_attr in an .npz file or a PyG graph; or set model = "gin".'
        )
    if config.reads_messages and messages is None:
        raise DataError(
            f"{name} lists undirected edges: edge-direction = "
            f'"{config.edge_direction}" has no meaning. Remove it.'
        )
    is_read = config.reads_edge_features or config.classifies_edges
    if width and not is_read and not is_published:
        log.warning(
            '%s: edge_attr is not used by model %s. Set model = "gine".',
            name,
            config.model,
        )
    if not config.reads_messages:
        return replace(dataset, messages=None)
    if messages is not None and not config.reads_edge_features:
        messages = messages.in_order([])
    return replace(dataset, messages=messages)


def _check_target_node(dataset: Dataset, config: RunConfig) -> None:
    """Reject a graph that predicts another kind of nodes than ``target-node``."""
    wanted, schema = config.target_node, dataset.schema
    if not wanted or (schema is not None and schema.target == wanted):
        return
    if schema is not None and isinstance(dataset, GraphDataset):
        if wanted not in schema.node_types:
            raise DataError(
                f'{dataset.name}: target-node = "{wanted}", whose nodes are pooled, is no '
                f"kind of nodes. Kinds: {', '.join(schema.node_types)}."
            )
        return
    if schema is None:
        raise DataError(
            f'{dataset.name}: target-node = "{wanted}", but the graph has one kind of '
            "nodes. Remove the setting."
        )
    raise DataError(
        f'{dataset.name}: target-node = "{wanted}", but the graph has labels of '
        f'"{schema.target}" nodes. Correct the setting; only a folder of tables and a '
        "HeteroData may hold labels of several kinds."
    )


def _typed(dataset: Dataset, config: RunConfig) -> Dataset:
    """Return a typed graph as the run reads it, and refuse any that does not fit."""
    name = dataset.name
    if dataset.schema is None:
        raise DataError(
            f'{name} has one kind of nodes and edges, but model = "{config.model}" reads '
            "kinds and relations. Use another model, e.g. gcn."
        )
    if not config.reads_types:
        raise DataError(
            f"{name} has {len(dataset.schema.widths)} kinds of nodes and "
            f"{len(dataset.schema.relations)} relations, over which model = "
            f'"{config.model}" passes the same messages. Set model = "rgcn", or types = '
            '"ignore".'
        )
    if dataset.schema.private and config.schema_align == "same":
        raise DataError(
            f'{name} keeps relations private, but schema-align = "same" shares all. Set '
            'schema-align = "name", or "private".'
        )
    if isinstance(dataset, GraphDataset):
        _check_pooled(dataset, config.target_node)
        return replace(
            dataset, schema=replace(dataset.schema, target=config.target_node)
        )
    if not config.has_pairs:
        _require_nodes(dataset, (dataset.schema.target,))
        return replace(dataset, schema=replace(dataset.schema, predicted=None))
    predicted, wanted = dataset.schema.predicted, config.target_relation
    if config.classifies_edges:
        if predicted is None or not has_name(predicted, wanted):
            of = f' of the relation "{wanted}"' if wanted else ""
            raise DataError(
                f'{name}: setting = "edge" predicts the edges of one relation, but no '
                f"edges{of} have labels or numbers, or those of several relations do. Add "
                "a column label to one edges/RELATION.csv, and set target-relation."
            )
        wanted = ":".join(predicted)
    schema = dataset.schema.to_predict(wanted, name)
    _require_nodes(dataset, (schema.predicted or ())[::2])
    return replace(dataset, schema=schema)


def _check_pooled(dataset: GraphDataset, kind: str) -> None:
    """Reject typed graphs without nodes of a kind that is pooled; empty: all are."""
    assert dataset.schema is not None
    assert dataset.node_type is not None
    if not kind:
        return
    _require_nodes(dataset, (kind,))
    of_kind = dataset.node_type == dataset.schema.node_types.index(kind)
    if number := dataset.num_graphs - len(torch.unique(dataset.batch[of_kind])):
        log.warning(
            '%s: %d of %d graphs have no node of the kind "%s", which target-node pools. '
            "Their representation is 0.",
            *(dataset.name, number, dataset.num_graphs, kind),
        )


def _require_nodes(dataset: NodeDataset | GraphDataset, kinds: Sequence[str]) -> None:
    """Reject a typed graph without nodes of a kind that is predicted, or has links."""
    assert dataset.schema is not None
    assert dataset.node_type is not None
    for kind in kinds:
        number = dataset.schema.node_types.index(kind)
        if not bool((dataset.node_type == number).any()):
            raise DataError(
                f'{dataset.name} has no node of the kind "{kind}", which the run predicts. '
                "Leave this graph out, or set another target-node or target-relation."
            )


def finish_messages(client: ClientGraph, config: RunConfig) -> ClientGraph:
    """Add the names of the features of edges to those of nodes, and warn of deaf nodes."""
    messages = client.graph.messages
    if messages is None:
        return client
    width = messages.x.shape[1]
    if any(
        g.messages is None or g.messages.x.shape[1] != width for g in client.evaluation
    ):
        raise DataError(
            f"The evaluation graphs have other features of edges than the graph itself, "
            f"which has {width}. Give all graphs of a file the same columns of edge_attr."
        )
    if config.edge_direction == "forward":
        hears = torch.zeros(client.graph.num_nodes, dtype=torch.bool)
        hears[messages.index[1]] = True
        if deaf := int((~hears).sum()):
            log.warning(
                'With edge-direction = "forward", %d of %d nodes get no message: no edge '
                'ends there. edge-direction = "separate" passes messages both ways.',
                deaf,
                len(hears),
            )
    if client.graph.pair_x is not None:  # already named
        return client
    names = joint_names(
        client.feature_names,
        client.num_features,
        messages.feature_names,
        messages.x.shape[1],
    )
    return replace(client, feature_names=names)


def joint_names(
    of_nodes: tuple[str, ...], width: int, of_edges: tuple[str, ...], edge_width: int
) -> tuple[str, ...]:
    """Return the names of the features of nodes and edges; empty if either lacks some."""
    if len(of_nodes) != width or len(of_edges) != edge_width:
        return ()
    return (*of_nodes, *(f"{EDGE_PREFIX}{name}" for name in of_edges))


Held = TypeVar("Held", bound=NodeDataset | GraphDataset | EdgeTable)


def expect_predicted(
    dataset: NodeDataset | GraphDataset, config: RunConfig, where: str
) -> NodeDataset | GraphDataset:
    """Return a dataset with the target of its nodes, graphs or edges in a run."""
    if not config.has_pairs:
        return expect_target(dataset, config, where)
    if isinstance(dataset, GraphDataset) or config.predicts_links or not dataset.edges:
        return dataset
    edges = expect_target(dataset.edges, config, f"{where}, edges")
    return replace(dataset, edges=edges)


def expect_target(dataset: Held, config: RunConfig, where: str) -> Held:
    """Return a dataset with the target that a run predicts, of several numbers one."""
    target, kind = dataset.target, config.predicts
    if target.kind != kind:
        raise DataError(
            f"{where} holds {target.kind}, but this run predicts {kind}. Set target-kind = "
            f'"{target.kind}" if all owners hold {target.kind}, or save {kind} '
            "(docs/data.md)."
        )
    chosen = config.target
    if not target.has_numbers or chosen in ("", ALL_TARGETS):
        return dataset
    if chosen not in target.names:
        raise DataError(
            f'{where}: target = "{chosen}" is none of its numbers. '
            f"{nearest(chosen, target.names)}"
        )
    place = target.names.index(chosen)
    assert dataset.targets is not None
    values, units = dataset.targets[:, [place]], target.units[place : place + 1]
    return replace(
        dataset,
        target=Target(target.kind, (chosen,), units if any(units) else ()),
        targets=values,
        y=(~values[:, 0].isnan()).to(torch.int64) - 1,
    )
