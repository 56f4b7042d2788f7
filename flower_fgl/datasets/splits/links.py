"""Split the edges of one client for link prediction, and draw pairs without an edge.

An undirected edge is one item. Validation and test edges are removed, in both directions,
before anything else sees the graph: neither the propagation operators nor the degree
features of training contain them.

Notes
-----
1. In a bipartite graph, e.g. of users and items, about half of all pairs or more join two
   nodes of one side, which never have an edge. A model that only recognizes the sides would
   reject these negatives. There, negatives join nodes of different sides. The sides of two
   connected components cannot be matched: any pair between components may be a negative.
2. In a typed graph links of one relation are predicted: negatives join nodes of its two
   kinds. Held-out edges leave that relation, and any other that lists exactly its edges,
   e.g. backwards. Other relations between the same nodes stay.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.schema import Schema
from flower_fgl.core.seeds import torch_generator
from flower_fgl.core.targets import LINK_CLASSES, LINK_SPLIT, MIN_EDGES, Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph, MessageEdges
from flower_fgl.datasets.splits.split import SPLITS, edge_keys, keyed_split, shares_of
from flower_fgl.datasets.transforms.canonical import undirected_simple
from flower_fgl.datasets.transforms.normalize_features import select_columns
from flower_fgl.nn.graph_union import select_rows
from flower_fgl.nn.link import draw_negatives, pair_codes, pair_sides

__all__ = [
    "degree_features",
    "degree_names",
    "link_client",
    "links_sha256",
    "shows_predicted",
]

log = logging.getLogger(__name__)

NUM_DEGREES = 16
"""Columns of the degree features: degrees 0, 1, 2 to 3, 4 to 7, … by powers of two."""
NARROW = 64
"""Widest features that are compared with the degrees."""


def split_links(
    edge_index: Tensor,
    num_nodes: int,
    fractions: Sequence[Fraction],
    *,
    generator: torch.Generator,
    parts: Mapping[str, Tensor] | None = None,
    node_type: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Split the edges of a graph, and draw negatives for validation and test.

    Of the E shuffled undirected edges ⌊r_val · E⌋ are for validation, ⌊r_test · E⌋ for
    testing, at least one each, and the rest for training; or ``parts``, masks (E,) of the
    sorted edges, say so. Validation and test have as many negatives as edges: distinct
    pairs of nodes without an edge in the whole graph, of different sides, see
    :func:`~flower_fgl.nn.link.pair_sides`.

    Returns both directions of the T training edges, (2, 2T), sorted; the pairs (2, P) in
    the order training edges, validation edges and negatives, test edges and negatives;
    their y (P,), 1 for an edge, 0 for a negative; and their masks (P,).
    """
    edges = edge_index[:, edge_index[0] < edge_index[1]]
    number = edges.shape[1]
    if number < MIN_EDGES:
        raise DataError(
            f"The graph has {number} undirected edges. Link prediction needs at least "
            f"{MIN_EDGES}, to train, validate and test: use fewer clients, another "
            "partition, or leave this graph out."
        )
    if parts is None:
        sizes = [max(1, int(share * number)) if share else 0 for share in fractions[1:]]
        shuffled = edges[:, torch.randperm(number, generator=generator)]
        val, test, train = torch.split(shuffled, [*sizes, number - sum(sizes)], dim=1)
    else:
        train, val, test = (edges[:, parts[name]] for name in SPLITS)
        sizes = [val.shape[1], test.shape[1]]
    side = pair_sides(edges, num_nodes, node_type)
    negatives = draw_negatives(
        pair_codes(edges, num_nodes), num_nodes, sum(sizes), generator, side
    )
    if negatives.shape[1] < sum(sizes):
        nodes = "nodes" if side is None else "nodes of different sides"
        raise DataError(
            f"The graph has {negatives.shape[1]} pairs of {nodes} without an edge, but "
            f"validation and test need {sum(sizes)} negatives. Link prediction needs a "
            "graph that is not almost complete."
        )
    train = train[:, pair_codes(train, num_nodes).argsort()]
    of_val, of_test = torch.split(negatives, sizes, dim=1)
    groups = (train, val, of_val, test, of_test)
    counts = torch.tensor([part.shape[1] for part in groups])
    y = torch.tensor([1, 1, 0, 1, 0]).repeat_interleave(counts)
    split = torch.tensor([0, 1, 1, 2, 2]).repeat_interleave(counts)
    masks = {name: split == place for place, name in enumerate(SPLITS)}
    both = torch.cat([train, train.flip(0)], dim=1)
    order = (both[0] * num_nodes + both[1]).argsort()
    return both[:, order].contiguous(), torch.cat(groups, dim=1), y, masks


def link_client(
    client: ClientGraph, config: RunConfig, ids: Sequence[str] = ()
) -> ClientGraph:
    """Turn a client's graph into its link prediction task.

    ``ids`` (N,) are the identifiers of its nodes, which only ``split-by = "id"`` reads. Its
    edges are the training edges, its items pairs of nodes. A graph with fewer than
    ``MIN_EDGES`` edges has no pairs: such a client neither trains nor is scored.
    """
    fractions = shares_of(config, LINK_SPLIT)
    if fractions is None:
        raise ConfigError(
            f'setting = "link" draws its own split: split = "{config.split}" is not '
            f'possible. Use percentages of the edges, e.g. "{LINK_SPLIT}".'
        )
    graph, schema = client.graph, client.schema
    messages, edge_index = graph.messages, graph.edge_index
    if schema is not None:
        edge_index = undirected_simple(_predicted_edges(graph, schema), graph.num_nodes)
    if edge_index.shape[1] < 2 * MIN_EDGES:
        none = torch.zeros(0, dtype=torch.bool)
        pairs, y = edge_index[:, :0], torch.zeros(0, dtype=torch.int64)
        masks = dict.fromkeys(SPLITS, none)
    else:
        generator = torch_generator(
            config.partition_seed, 0, client.partition_id, "links"
        )
        parts = None
        if config.split_by == "id":
            edges = edge_index[:, edge_index[0] < edge_index[1]]
            known = torch.ones(edges.shape[1], dtype=torch.bool)
            keys, seed = edge_keys(edges, ids), config.partition_seed
            parts = keyed_split(keys, known, fractions, seed=seed)
        edge_index, pairs, y, masks = split_links(
            edge_index,
            graph.num_nodes,
            fractions,
            generator=generator,
            parts=parts,
            node_type=graph.node_type,
        )
    x, names, scaling = graph.x, client.feature_names, client.scaling
    if schema is not None:
        _check_degrees(graph, schema)
    elif config.link_features == "degree" or not client.num_features:
        x, names = degree_features(edge_index, graph.num_nodes), degree_names()
        scaling = None
    elif follow_degrees(x, graph.edge_index):
        raise DataError(
            "The features are a function of the nodes' degrees, counted over all edges: "
            "they would show validation and test edges to the training. Set "
            'link-features = "degree", which counts training edges only.'
        )
    if messages is not None and pairs.numel():
        # an owner may list a held-out pair several times, and in both directions
        held_out = pair_codes(pairs[:, masks["val"] | masks["test"]], graph.num_nodes)
        codes = pair_codes(messages.index, graph.num_nodes)
        is_hidden = torch.isin(codes, held_out)
        if schema is not None:
            is_hidden &= shows_predicted(messages, graph.num_nodes, schema)
        messages = messages.select(~is_hidden)
    if schema is not None and messages is not None:
        edge_index = undirected_simple(messages.index, graph.num_nodes)
    return replace(
        client,
        graph=replace(
            graph,
            x=x,
            edge_index=edge_index,
            y=y,
            masks=masks,
            pairs=pairs,
            targets=None,
            messages=messages,
        ),
        target=Target.classes(LINK_CLASSES),
        feature_names=names,
        scaling=scaling,
    )


def _predicted_edges(graph: Graph, schema: Schema) -> Tensor:
    """Return the edges (2, E) of the relation whose links are predicted."""
    assert graph.messages is not None
    assert schema.predicted is not None
    number = schema.relations.index(schema.predicted)
    return graph.messages.index[:, graph.messages.relation == number]


def shows_predicted(messages: MessageEdges, num_nodes: int, schema: Schema) -> Tensor:
    """Mark the edges (M,) of the predicted relation, and of others with the same pairs.

    A warning names a relation whose pairs are a part of the predicted ones, or contain
    these: it may show held-out edges, but says something else.
    """
    assert messages.relation is not None
    assert schema.predicted is not None
    number = schema.relations.index(schema.predicted)
    shown = messages.relation == number
    codes = pair_codes(messages.index, num_nodes)
    predicted, own = torch.unique(codes[shown]), schema.predicted
    for other, triple in enumerate(schema.relations):
        mask = messages.relation == other
        if (
            {own[0], own[2]} != {triple[0], triple[2]}
            or not mask.any()
            or triple == own
        ):
            continue
        listed = torch.unique(codes[mask])
        common = int(torch.isin(listed, predicted).sum())
        if common == len(listed) == len(predicted):
            shown = shown | mask
        elif common == min(len(listed), len(predicted)):
            log.warning(
                "The pairs of the relation %s are a part of those of %s, or contain them: "
                "they may show its held-out edges. Remove one if it follows from the other",
                triple[1],
                own[1],
            )
    return shown


def _check_degrees(graph: Graph, schema: Schema) -> None:
    """Reject features of a kind that follow the degrees in the predicted relation."""
    assert graph.node_type is not None
    assert schema.predicted is not None
    edges = undirected_simple(_predicted_edges(graph, schema), graph.num_nodes)
    for number, (kind, columns) in enumerate(schema.blocks()):
        if kind not in (schema.predicted[0], schema.predicted[2]):
            continue
        rows = (graph.node_type == number).nonzero().flatten()
        place = torch.full((graph.num_nodes,), -1)
        place[rows] = torch.arange(len(rows))
        ends = place[edges[0]]
        x = select_columns(
            select_rows(graph.x, rows), list(range(columns.start, columns.stop))
        )
        if follow_degrees(x, ends[ends >= 0][None]):
            raise DataError(
                f'The features of "{kind}" nodes are a function of their degrees in the '
                f"relation {schema.predicted[1]}, counted over all edges: they would show "
                "validation and test edges to the training. Remove them."
            )


def degree_features(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return the degree of each node as one of 16 columns, (N, 16), float32.

    Column 0 is degree 0, column k degrees from 2^(k-1) to 2^k - 1, the last one all larger
    ones.
    """
    degree = torch.bincount(edge_index[0], minlength=num_nodes)
    bounds = 2 ** torch.arange(NUM_DEGREES - 1)
    column = torch.bucketize(degree, bounds, right=True)
    return torch.nn.functional.one_hot(column, NUM_DEGREES).to(torch.float32)


def degree_names() -> tuple[str, ...]:
    """Return the names of the columns of :func:`degree_features`."""
    return ("degree 0", *(f"degree from {2**k}" for k in range(NUM_DEGREES - 1)))


def follow_degrees(x: Tensor, edge_index: Tensor) -> bool:
    """Return whether narrow features (N, d) are a function of the nodes' degrees.

    Nodes of one degree always have the same features, there are at least three different
    rows, and as many nodes have the degree of another one: if all degrees differ, any
    features are a function of them. Never for more than 64 columns.
    """
    if x.shape[1] > NARROW or not x.numel():
        return False
    rows = x.to_dense() if x.layout == torch.sparse_csr else x
    degree = torch.bincount(edge_index[0], minlength=len(rows))
    _, kind = torch.unique(rows, dim=0, return_inverse=True)
    both = torch.unique(torch.stack([degree, kind], dim=1), dim=0)
    num_kinds, num_degrees = int(kind.max()) + 1, len(torch.unique(degree))
    repeats = len(rows) - num_degrees
    return 3 <= num_kinds <= repeats and len(both) == num_degrees


def links_sha256(partition: str, clients: Sequence[ClientGraph]) -> str:
    """Hash the SHA-256 of a partition and the split of its clients' links or edges."""
    digest = hashlib.sha256(partition.encode())
    for graph in (g for client in clients for g in client.graphs):
        assert graph.pairs is not None
        features = () if graph.pair_x is None else (graph.pair_x, graph.edge_index)
        if (messages := graph.messages) is not None:
            features = (*features, messages.index, messages.x)
        for tensor in (graph.pairs, graph.y, *graph.masks.values(), *features):
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
