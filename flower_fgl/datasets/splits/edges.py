"""Split the labelled edges of one client, at random or by time, and build its task.

At random, all edges between two nodes are in one part, in both directions, and messages
pass over all edges of the client's graph: their existence is known in training, their
classes are not. By time, training edges come before validation edges, and these before
test edges. Messages pass over earlier edges only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import Schema
from flower_fgl.core.seeds import numpy_generator
from flower_fgl.core.targets import EDGE_SPLIT, MIN_EDGES, Target, read_time_cuts
from flower_fgl.datasets.client_graph import (
    ClientGraph,
    EdgeTable,
    Graph,
    MessageEdges,
    NodeDataset,
)
from flower_fgl.datasets.splits.links import shows_predicted
from flower_fgl.datasets.splits.split import (
    SPLITS,
    edge_keys,
    keyed_split,
    shares_of,
    split_nodes,
)
from flower_fgl.datasets.transforms.canonical import undirected_simple
from flower_fgl.datasets.transforms.messages import joint_names
from flower_fgl.nn.link import pair_codes

__all__ = ["earlier_messages", "edge_client", "require_pairs", "with_edge_classes"]


def split_edges(
    pairs: Tensor,
    y: Tensor,
    num_nodes: int,
    fractions: Sequence[Fraction],
    *,
    generator: np.random.Generator,
) -> dict[str, Tensor]:
    """Split labelled edges (2, M) at random, all edges between two nodes together.

    Pairs of nodes are split class by class, see
    :func:`~flower_fgl.datasets.splits.split.split_nodes`; the class of a pair is the rarest
    one among its edges. The masks (M,) cover the edges of known class.
    """
    known = y >= 0
    _, group = torch.unique(pair_codes(pairs, num_nodes), return_inverse=True)
    by_count = torch.bincount(y[known]).argsort(descending=True, stable=True)
    rank = torch.empty_like(by_count)
    rank[by_count] = torch.arange(len(by_count))
    rarest = torch.full((int(group.max()) + 1 if len(group) else 0,), -1)
    rarest.scatter_reduce_(0, group[known], rank[y[known]], "amax")
    masks = split_nodes(rarest, fractions, generator=generator)
    return {name: mask[group] & known for name, mask in masks.items()}


def split_by_time(
    time: Tensor,
    y: Tensor,
    fractions: Sequence[Fraction],
    *,
    cuts: tuple[float, float] | None = None,
) -> dict[str, Tensor]:
    """Split labelled edges by time (M,): training, validation, test.

    ``cuts`` are the first times of validation and test; by default those of the edges at
    the places ⌊r_train · M'⌋ and ⌊(r_train + r_val) · M'⌋ of the M' labelled edges in order
    of time. Edges of one time are in one mask. With ``cuts`` a mask may be empty.
    """
    known = y >= 0
    ordered = time[known].sort().values
    if cuts is None:
        places = [
            int(share * len(ordered)) for share in (fractions[0], 1 - fractions[2])
        ]
        val_from, test_from = (float(ordered[place]) for place in places)
        if val_from == float(ordered[0]):
            raise DataError(
                "A split by time puts edges of one time into one part, so that no edge is "
                f"left for training: of {len(ordered)} labelled edges, the first "
                f"{int((ordered == val_from).sum())} have the time {val_from:.15g}. Give "
                "finer times, set time-cuts, or remove the times to split at random."
            )
    else:
        val_from, test_from = cuts
    return {
        "train": known & (time < val_from),
        "val": known & (time >= val_from) & (time < test_from),
        "test": known & (time >= test_from),
    }


def check_edge_times(time: Tensor, masks: Mapping[str, Tensor]) -> None:
    """Reject an owner's split in which an edge is no later than those of earlier parts."""
    latest, of = -float("inf"), ""
    for name in SPLITS:
        held = time[masks[name]]
        if len(held) and float(held.min()) <= latest:
            raise DataError(
                f"The split of the edges goes backwards in time: an edge of {name} has "
                f"the time {float(held.min()):.15g}, but an edge of {of} {latest:.15g}. "
                "Training must come before validation, and validation before test: correct "
                "the split, or remove it, or remove the times."
            )
        if len(held):
            latest, of = float(held.max()), name


def edge_client(
    client: ClientGraph, config: RunConfig, ids: Sequence[str] = ()
) -> ClientGraph:
    """Turn the graph of a client with ``edges`` into the task of classifying these edges.

    ``ids`` (N,) are the identifiers of its nodes, which only ``split-by = "id"`` reads.
    With times, messages of ``graph`` pass over edges before the first validation edge; the
    test edges are in an evaluation graph, with the edges before the first test edge. A
    client with fewer than ``MIN_EDGES`` labelled edges, and no split of its own, has no
    items.
    """
    table = client.edges
    if table is None:
        if config.predicts_numbers:
            raise DataError(
                'setting = "edge" predicts numbers of edges, but the edges of this graph '
                "have none. Add a column target:NAME to edges.csv; in an .npz file "
                "edge_target and edge_target_names; in a PyG graph edge_label."
            )
        raise DataError(
            'setting = "edge" classifies edges, but the edges of this graph have no '
            "classes. Add a column label to edges.csv; in an .npz file edge_label and "
            "edge_class_names. To predict numbers, add a column target:NAME (edge_target "
            "and edge_target_names)."
        )
    masks = _masks(table, client, config, ids)
    labelled = torch.stack([masks[name] for name in SPLITS]).any(dim=0)
    names = joint_names(
        client.feature_names, client.num_features, table.feature_names, table.x.shape[1]
    )
    whole, schema = client.graph, client.schema

    def graph_of(later: Tensor | None, chosen: Tensor, scored: Sequence[str]) -> Graph:
        none = torch.zeros_like(masks["train"])
        edge_index, sent = whole.edge_index, torch.ones_like(none)
        if later is not None and table.time is not None:
            first = table.time[later].min() if bool(later.any()) else torch.inf
            sent = table.time < first
            before = table.pairs[:, sent].contiguous()
            edge_index = undirected_simple(before, whole.num_nodes)
        messages = whole.messages
        if schema is not None and messages is not None:
            if later is not None:
                shown = earlier_messages(whole, schema, table.pairs[:, sent])
                messages = messages.select(shown)
                edge_index = undirected_simple(messages.index, whole.num_nodes)
        elif config.reads_messages:
            messages = MessageEdges(table.pairs, table.x).select(sent)
            messages = messages if config.reads_edge_features else messages.in_order([])
        return Graph(
            whole.x,
            edge_index,
            table.y[chosen],
            {n: (masks[n] if n in scored else none)[chosen] for n in SPLITS},
            pairs=table.pairs[:, chosen].contiguous(),
            pair_x=table.x[chosen],
            targets=None if table.targets is None else table.targets[chosen],
            messages=messages,
            node_type=whole.node_type,
        )

    evaluation: tuple[Graph, ...] = ()
    if table.time is None:
        graph = graph_of(None, labelled, SPLITS)
    else:
        check_edge_times(table.time, masks)
        held_out = masks["val"] | masks["test"]
        graph = graph_of(held_out, masks["train"] | masks["val"], ("train", "val"))
        test = graph_of(masks["test"], masks["test"], ("test",))
        # a store's file holds no tensor twice
        own_mask = {"test": test.masks["test"]}
        kinds = None if test.node_type is None else test.node_type.clone()
        evaluation = (replace(test, x=test.x.clone(), masks=own_mask, node_type=kinds),)
    return replace(
        client,
        graph=graph,
        evaluation=evaluation,
        target=table.target,
        feature_names=names,
        edges=None,
    )


def earlier_messages(
    graph: Graph | NodeDataset, schema: Schema, pairs: Tensor
) -> Tensor:
    """Mark the messages (M,) of a typed graph that show no later edge.

    ``pairs`` (2, P) are the earlier edges of the predicted relation. Another relation that
    lists exactly its pairs shows them, too; all others have no times.
    """
    messages, number = graph.messages, graph.num_nodes
    assert messages is not None
    assert messages.relation is not None
    assert schema.predicted is not None
    shown = shows_predicted(messages, number, schema)
    is_own = messages.relation == schema.relations.index(schema.predicted)
    own = messages.index[0] * number + messages.index[1]
    is_known = torch.isin(own, pairs[0] * number + pairs[1])
    codes = pair_codes(messages.index, number)
    is_mirrored = torch.isin(codes, pair_codes(pairs, number))
    return ~shown | torch.where(is_own, is_known, is_mirrored)


def _masks(
    table: EdgeTable, client: ClientGraph, config: RunConfig, ids: Sequence[str]
) -> dict[str, Tensor]:
    """Return the owner's split of the labelled edges, or draw one."""
    known = table.y >= 0
    is_keyed = config.split_by == "id"
    fractions = shares_of(config, EDGE_SPLIT, table.masks)
    if fractions is None:
        if not table.masks:
            raise DataError(
                'split = "public", but the edges of this graph have no split. Add a column '
                "split to edges.csv (edge_train_mask etc. in an .npz file), or give "
                f'percentages, e.g. "{EDGE_SPLIT}".'
            )
        return {name: mask & known for name, mask in table.masks.items()}
    if int(known.sum()) < MIN_EDGES:
        return dict.fromkeys(SPLITS, torch.zeros_like(known))
    if is_keyed and table.time is not None:
        raise DataError(
            'split-by = "id" splits the edges by the ids of their ends, but these edges '
            "have times, by which they are split. Remove split-by."
        )
    if is_keyed:
        keys = edge_keys(table.pairs, ids)
        return keyed_split(keys, known, fractions, seed=config.partition_seed)
    if table.time is not None:
        cuts = read_time_cuts(config.time_cuts)
        return split_by_time(table.time, table.y, fractions, cuts=cuts)
    if config.time_cuts:
        raise DataError(
            f"time-cuts = {config.time_cuts} splits edges by their times, but the edges of "
            "this graph have none. Add a column time, or remove time-cuts."
        )
    generator = numpy_generator(
        config.partition_seed, 0, client.partition_id, "edge split"
    )
    return split_edges(
        table.pairs, table.y, client.graph.num_nodes, fractions, generator=generator
    )


def require_pairs(clients: Sequence[ClientGraph], config: RunConfig) -> None:
    """Raise a ``DataError`` if no client has an edge or a link to train on."""
    if config.predicts_links:
        if not any(client.graph.y.numel() for client in clients):
            most = max(client.num_edges for client in clients)
            raise DataError(
                "No graph has enough edges for link prediction: the largest has "
                f"{most} undirected edges, but a graph needs at least {MIN_EDGES}, to "
                "train, validate and test. Use fewer clients, another partition, or other "
                "graphs."
            )
    elif not any(bool(client.graph.masks["train"].any()) for client in clients):
        raise DataError(
            "No client has a labelled edge for training. A graph needs at least "
            f"{MIN_EDGES} labelled edges to be split: add labels, use fewer clients, or "
            "add a column split to edges.csv."
        )


def with_edge_classes(dataset: NodeDataset) -> NodeDataset:
    """Give edges the classes ``same`` and ``different``, by the classes of their ends."""
    pairs = dataset.edge_index[:, dataset.edge_index[0] < dataset.edge_index[1]]
    one, other = dataset.y[pairs]
    table = EdgeTable(
        pairs,
        (one != other).long(),
        Target.classes(("same", "different")),
        torch.zeros(len(one), 0),
    )
    return replace(dataset, edges=table)
