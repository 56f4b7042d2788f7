"""Neighbours that enter FedPG's prototypes, of one client or of a stack of clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes.hop_neighbors import Pairs, select_pairs
from flower_fgl.algorithms.prototypes.hop_prototypes import HopAverage
from flower_fgl.algorithms.prototypes.rings import ring_pairs
from flower_fgl.algorithms.prototypes.similar_graphs import similar_pairs
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.methods.fedpg import FedPGSettings

__all__ = ["MOST_STACKED_PAIRS", "average_of"]

Client = AnyClient[FedPGSettings]

MOST_STACKED_PAIRS = 1 << 24
"""Pairs of a stack up to which the neighbours of all clients are drawn at once."""


def rings_of(client: Client) -> list[Pairs]:
    """Return the pairs of each hop, computed once per graph."""
    method_config, inputs = client.config.method_config, client.data.inputs[0]
    key = ("rings", method_config.hops, method_config.hop_mode)
    return client.cached(
        key,
        lambda: ring_pairs(
            inputs.edge_index,
            inputs.num_nodes,
            method_config.hops,
            mode=method_config.hop_mode,
        ),
    )


def average_of(
    group: Group,
    drawn_in: Sequence[int],
    annotation: Tensor,
    embed: Callable[[], Tensor],
    *,
    is_retrained: bool = False,
) -> HopAverage:
    """Return the average over the neighbours that enter the prototypes of a round."""
    settings, memo = group.config.method_config, group.memo
    key = ("average", group.config.seed, *drawn_in)
    # The next training uses the neighbours of the client's last upload, so they are
    # cached; a new process draws the same ones again from the seed.
    kept = memo.get(("average",))
    # Neighbours of graphs depend on the embeddings. The cached ones may come from a copy
    # of the client that was trained only to be evaluated.
    has_graphs = group.inputs.batch is not None
    is_stale = is_retrained and has_graphs
    if kept and not is_stale and kept[0] == key and torch.equal(kept[1], annotation):
        found: HopAverage = kept[2]
        return found
    if has_graphs:
        pairs = similar_pairs(
            embed(),
            annotation,
            hops=settings.hops,
            rho=settings.rho,
            decay=settings.rho_decay,
            limit=settings.neighbor_limit,
            same_class=settings.neighbor_filter == "same-class",
            mode=settings.hop_mode,
            is_ranked=settings.graph_similarity == "quantile",
        )
    else:
        pairs = draw_pairs(group, drawn_in, annotation)
    made = HopAverage(pairs, annotation, group.num_classes)
    memo[("average",)] = (key, annotation, made)
    return made


def draw_pairs(
    group: Group, drawn_in: Sequence[int], annotation: Tensor
) -> list[Pairs]:
    """Draw the neighbours of each client's nodes, numbered by flattened rows."""
    settings, width = group.config.method_config, annotation.shape[-1]
    rounds = zip(group.clients, drawn_in, strict=True)
    generators = [client.generator(number, "neighbours") for client, number in rounds]
    select = partial(
        select_pairs,
        same_class=settings.neighbor_filter == "same-class",
        limit=settings.neighbor_limit,
        mode=settings.hop_mode,
    )
    if group.real is None:
        rings = rings_of(group.clients[0])
        return select(rings, annotation, generator=generators[0])
    key = ("rings", settings.hops, settings.hop_mode)
    if key not in group.memo:
        group.memo[key] = stacked_rings(group, annotation.numel())
    if group.memo[key] is not None:
        return select(group.memo[key], annotation.flatten(), generator=generators)
    parts = zip(group.clients, group.split_rows(annotation), generators, strict=True)
    drawn = [select(rings_of(c), own, generator=one) for c, own, one in parts]
    return shifted(drawn, width)


def stacked_rings(group: Group, num_rows: int) -> list[Pairs] | None:
    """Return the pairs of each hop of all clients; ``None`` if they are too many."""
    settings = group.config.method_config
    rings = ring_pairs(
        group.inputs.edge_index,
        num_rows,
        settings.hops,
        mode=settings.hop_mode,
        most_pairs=MOST_STACKED_PAIRS,
    )
    number = sum(len(pairs.centre) for pairs in rings)
    is_listed = all(pairs.unlisted is None for pairs in rings)
    return rings if is_listed and number <= MOST_STACKED_PAIRS else None


def shifted(parts: Sequence[Sequence[Pairs]], width: int) -> list[Pairs]:
    """Join each hop of all clients; client k has the rows from k · ``width``."""
    return [
        Pairs(
            torch.cat([one.centre + k * width for k, one in enumerate(hop)]),
            torch.cat([one.neighbour + k * width for k, one in enumerate(hop)]),
        )
        for hop in zip(*parts, strict=True)
    ]
