"""Pairs of nodes to score: those of a table, or the best partners of every node."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError, clip, show_path
from flower_fgl.core.schema import Schema
from flower_fgl.datasets.transforms.canonical import undirected_simple
from flower_fgl.nn import Backbone, GraphInput
from flower_fgl.nn.link import DotDecoder, pair_sides
from flower_fgl.simulation.prediction.read import table_cells

__all__ = ["PairNodes", "best_partners", "decode_pairs", "link_score", "read_pairs"]

ENDS = ("source", "target")
PAIRS_AT_ONCE = 1 << 18
"""Pairs that are decoded at once: with embeddings of width 64 they take 64 MiB each."""
SCORES_AT_ONCE = 1 << 24
"""Scores of candidates that are held at once."""


class PairNodes(NamedTuple):
    """Nodes that a model may pair, and pairs that are known to be links.

    ``rows`` are the nodes that may be sources, and those that may be targets, by number.
    ``known`` (2, 2E) are both directions of all links, sorted. ``side`` (N,) is that of
    :func:`~flower_fgl.nn.link.pair_sides`.
    """

    rows: tuple[Tensor, Tensor]
    known: Tensor
    side: Tensor | None
    is_typed: bool = False

    @classmethod
    def of(cls, graph: GraphInput, schema: Schema | None) -> PairNodes:
        """Return the pairs of a graph; ``schema`` numbers its kinds and relations."""
        number, relations = graph.num_nodes, graph.relations
        if schema is None or schema.predicted is None or relations is None:
            every = torch.arange(number)
            side = pair_sides(graph.edge_index, number)
            return cls((every, every), graph.edge_index, side)
        place = schema.relations.index(schema.predicted)
        known = relations.index[:, relations.relation == place]
        kinds = [schema.node_types.index(kind) for kind in schema.predicted[::2]]
        one, other = ((relations.node_type == k).nonzero().flatten() for k in kinds)
        side = torch.full((number,), -1)
        side[one] = torch.arange(len(one)) if kinds[0] == kinds[1] else 0
        if kinds[0] != kinds[1]:
            side[other] = 1
        return cls((one, other), undirected_simple(known, number), side, is_typed=True)


def read_pairs(pairs: Any, ids: Any, graph: Path | str, nodes: PairNodes) -> Tensor:
    """Return pairs of nodes (2, P), int64, by the numbers of their nodes.

    ``pairs`` is a CSV table with the columns ``source`` and ``target``, a data frame, or an
    array of shape (P, 2); ``ids`` (N,) are the owner's identifiers of the nodes of
    ``graph``. Raises a DataError if the table is malformed or empty, an identifier is
    unknown, or both are equal.
    """
    if isinstance(pairs, str | os.PathLike):
        where = show_path(Path(pairs))
        rows: Iterable[tuple[str, Any]] = table_cells(Path(pairs), ENDS, more=False)
    else:
        where = "the pairs"
        rows = _rows_of_object(pairs)
    numbers = [
        dict(zip(map(str, ids[own.numpy()].tolist()), own.tolist(), strict=True))
        for own in nodes.rows
    ]
    found: list[int] = []
    for place, row in rows:
        ends = [of.get(str(name), -1) for of, name in zip(numbers, row, strict=True)]
        if -1 in ends:
            column = ends.index(-1)
            kind = f" the kind of a {ENDS[column]} in" if nodes.is_typed else ""
            raise DataError(
                f'{place}: {ENDS[column]} "{clip(str(row[column]))}" is no node of{kind} '
                f"{graph}. Correct it, or remove the pair."
            )
        if ends[0] == ends[1]:
            raise DataError(
                f'{place}: source and target are both "{clip(str(row[0]))}". A pair needs '
                "two nodes: remove it."
            )
        found += ends
    if not found:
        raise DataError(f"{where}: there is no pair. Give one line per pair.")
    return torch.tensor(found).view(-1, 2).t().contiguous()


def _rows_of_object(pairs: Any) -> Iterable[tuple[str, Any]]:
    """Yield the place and the two identifiers of each pair."""
    if set(ENDS) <= set(getattr(pairs, "columns", ())):
        pairs = pairs[list(ENDS)]
    values = np.asarray(pairs)
    if values.ndim != 2 or values.shape[1] != 2:
        raise DataError(
            "Expected pairs as the path of a CSV table, or as an array of shape (P, 2) or "
            f"a data frame with the columns source and target, got shape {values.shape}."
        )
    return ((f"pair {k}", row) for k, row in enumerate(values.tolist()))


def decode_pairs(
    model: Backbone,
    graph: GraphInput,
    pairs: Tensor,
    pair_x: Tensor | None = None,
    *,
    h: Tensor | None = None,
) -> Tensor:
    """Return the logits (P, C) of pairs (2, P) of nodes, some pairs at a time.

    ``h`` is the output (N, p) of the model's head, if it is known.
    """
    h = model.head(model.embed(graph), graph) if h is None else h
    parts = [
        model.decode(
            h,
            graph.with_pairs(
                pairs[:, first : first + PAIRS_AT_ONCE],
                None if pair_x is None else pair_x[first : first + PAIRS_AT_ONCE],
            ),
        )
        for first in range(0, max(pairs.shape[1], 1), PAIRS_AT_ONCE)
    ]
    return torch.cat(parts)


def best_partners(
    model: Backbone, graph: GraphInput, number: int, of: PairNodes
) -> tuple[Tensor, Tensor, str]:
    """Find the nodes that score highest with each source, among those without a link to it.

    Returns pairs (2, P) of each node with at most ``number`` partners, best first, which in
    a bipartite graph are on the other side; the logit (P,) of each pair; and a note if the
    graph is bipartite.
    """
    num_nodes, side = graph.num_nodes, of.side
    h = model.head(model.embed(graph), graph)
    sources, targets = of.rows
    place, column = torch.full((2, num_nodes), -1)
    column[targets], embedded = torch.arange(len(targets)), h[targets]
    first_edge = torch.searchsorted(
        of.known[0].contiguous(), torch.arange(num_nodes + 1)
    )
    found = []
    for nodes in torch.split(sources, max(1, SCORES_AT_ONCE // max(len(targets), 1))):
        if isinstance(model.decoder, DotDecoder):
            score = h[nodes] @ embedded.t()
        else:
            ends = nodes.repeat_interleave(len(targets)), targets.repeat(len(nodes))
            logits = decode_pairs(model, graph, torch.stack(ends), h=h)
            score = link_score(logits).view(len(nodes), -1)
        place[nodes] = torch.arange(len(nodes))
        edges = of.known[:, first_edge[nodes[0]] : first_edge[nodes[-1] + 1]]
        for one, other in ((nodes, nodes), edges):
            row, at = place[one], column[other]
            is_pair = (row >= 0) & (at >= 0)
            score[row[is_pair], at[is_pair]] = -torch.inf
        place[nodes] = -1
        if side is not None:
            is_none = side[nodes][:, None] == side[targets]
            score.masked_fill_(is_none, -torch.inf)
        best, partner = score.topk(min(number, len(targets)), dim=1)
        partner = targets[partner]
        pairs = torch.stack([nodes[:, None].expand_as(partner), partner])
        found.append(pairs[:, best > -torch.inf])
    pairs = torch.cat(found, dim=1)
    score = link_score(decode_pairs(model, graph, pairs, h=h))
    order = score.argsort(descending=True, stable=True)
    order = order[pairs[0, order].argsort(stable=True)]
    note = "The graph is bipartite: only nodes of different sides are paired."
    has_sides = side is not None and not of.is_typed
    return pairs[:, order], score[order], note * has_sides


def link_score(logits: Tensor) -> Tensor:
    """Return the score of pairs from the logits (P, 2) of ``no link`` and ``link``."""
    return logits[:, 1] - logits[:, 0]
