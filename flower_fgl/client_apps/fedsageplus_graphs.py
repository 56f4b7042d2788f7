"""A client's graphs with hidden nodes and with generated nodes, cached per process."""

from __future__ import annotations

import torch

from flower_fgl.algorithms.fedsageplus import (
    HiddenNodes,
    MendedGraph,
    NeighbourGenerator,
    group_means,
    hide_nodes,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData

__all__ = ["impaired_of", "judged_features", "keep_mended", "mended_data"]

HIDDEN_SHARE = 0.5
"""Share of the validation nodes that are hidden to train the generator."""


def impaired_of(client: Client) -> HiddenNodes:
    """Return the client's training graph with hidden nodes, the same in every round."""
    return client.cached(("impaired", client.config.seed), lambda: _impaired(client))


def _impaired(client: Client) -> HiddenNodes:
    """Hide a share of the nodes of the client's training graph."""
    data = client.data
    size = data.inputs[0].num_nodes
    eligible = data.graph.graph.masks["val"].nonzero().squeeze(1)
    eligible = eligible if len(eligible) else torch.arange(size)
    order = torch.randperm(len(eligible), generator=client.generator(0, "hide"))
    is_hidden = torch.zeros(size, dtype=torch.bool)
    num_hidden = int(HIDDEN_SHARE * len(eligible))
    is_hidden[eligible[order[:num_hidden]]] = True
    return hide_nodes(data.inputs[0], is_hidden.to(client.device))


def judged_features(client: Client) -> torch.Tensor:
    """Return the rows with which a client compares what others generate.

    They are the features of its training graph. With ``min-class-count`` above 1 they are
    the means of groups of at least so many nodes: the gradient reveals each row that it
    was computed from.
    """
    x, least = client.data.inputs[0].x, client.config.min_class_count
    if least == 1:
        return x
    return client.cached(("judged", least), lambda: group_means(x, least))


def keep_mended(client: Client, network: NeighbourGenerator) -> None:
    """Generate the missing neighbours of each of the client's graphs and store them."""
    kept = {}
    for place, inputs in enumerate(client.data.inputs):
        generator = client.generator(place, "mending")
        owner, x = network.mend(inputs, generator)
        kept[f"{place}/owner"], kept[f"{place}/x"] = owner, x
    client.state.set_hashed_group("mended", kept)


def mended_data(client: Client) -> ClientData:
    """Return the client's data with mended graphs, or unchanged before there are any.

    Generated nodes have no label and are not in any set that is evaluated.
    """
    data, token = client.data, client.state.values.get("mended")
    if token is None:
        return data
    kept = data.memo.get(("mended",))
    if kept is None or kept[0] != token:
        found = client.state.group("mended")
        made = [
            MendedGraph(
                inputs,
                found[f"{place}/owner"].to(client.device),
                found[f"{place}/x"].to(client.device),
            )
            for place, inputs in enumerate(data.inputs)
        ]
        data.memo["mended",] = kept = (token, made)
    return data.with_inputs(kept[1])
