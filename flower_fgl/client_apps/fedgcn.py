"""Client half of FedGCN: FedAvg on a graph that sums of neighbours complete."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from flwr.app import Context, Message
from torch import Tensor

from flower_fgl.algorithms.fedgcn import (
    OwnedEdges,
    SummedGraph,
    degrees,
    listed_nodes,
    partial_sums,
    summed_graph,
)
from flower_fgl.client_apps.base import once
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.protection import privatize
from flower_fgl.client_apps.runtime.session import Opened, Session
from flower_fgl.client_apps.runtime.state import StateStore
from flower_fgl.client_apps.stacked.group import Group, GroupClientApp, GroupFit
from flower_fgl.core.errors import PayloadError
from flower_fgl.methods.fedgcn import FedGCNSettings
from flower_fgl.nn import GraphInput
from flower_fgl.protocols import fedgcn, private_ids
from flower_fgl.protocols.base import Empty, Payload
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.secure_aggregation.keys import draw_secret

log = logging.getLogger(__name__)

__all__ = ["FedGCNClientApp"]

Client = AnyClient[FedGCNSettings]

SECRET, CODE = "secret", "id codes"
"""Groups of the client's state: its secret during the exchange, then the codes."""
KEPT = "sums"
"""Group of the client's state that holds the sums, and value with their hash."""


class FedGCNClientApp(FedAvgClientApp):
    """Exchange sums of neighbours once, then train as FedAvg.

    Notes
    -----
    1. A client names only its own nodes at the border and their outside neighbours, by
       identifiers, with their numbers of edges between clients. It sends no label.
    2. A client that lost its state trains on its own edges only; its log says so.
    3. A saved model is a plain GCN: it predicts from a graph without the sums.
    """

    stacked = True
    fit = GroupClientApp.fit

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        self.answer_once(private_ids.BLIND, self._blind, last=once)
        self.answer_once(private_ids.MULTIPLY, self._multiply, last=others)
        self.answer_once(private_ids.CODES, self._codes, last=once)
        self.answer_once(fedgcn.BOUNDARY, self._boundary, last=once, is_state_new=False)
        self.answer_once(
            fedgcn.SUMS,
            self._sums,
            last=once,
            masked=fedgcn.ListedNodes.records,
            depends_on_download=False,  # a list with one more node changes no sum
        )
        self.answer_once(fedgcn.COMPLETE, self._complete, last=once)

    def open(self, message: Message, context: Context) -> tuple[Client, StateStore]:
        """Load graph, settings and state of a client; sums complete the graph."""
        client, store = super().open(message, context)
        client.data = completed_data(client)
        return client, store

    def fit_group(self, group: Group, downloads: Sequence[Weights]) -> GroupFit:
        """Train as FedAvg does, on the completed graphs."""
        for client in group.clients:
            warn_without_sums(client)
        return super().fit_group(group, downloads)

    def _blind(self, opened: Opened) -> Payload:
        """Draw the own secret; send the ids at the border, multiplied by it."""
        client = opened.client
        border, secret = border_of(client), draw_secret()
        points = private_ids.multiply(
            private_ids.hashed_points(torch.cat([border.own, border.outside])), secret
        )
        # the order of the nodes would tell something about them
        order = torch.from_numpy(np.lexsort(points.numpy().T))
        secrets = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
        client.state.set_group(SECRET, {"secret": secrets, "order": order})
        return private_ids.Points(points[order])

    def _multiply(self, opened: Opened) -> Payload:
        """Multiply the points of another owner by the own secret, once for each."""
        client = opened.client
        points = private_ids.Points.from_record(opened.message.content).points
        product = private_ids.multiply(
            points, secret_of(client)["secret"].numpy().tobytes()
        )
        return private_ids.Points(product)

    def _codes(self, opened: Opened) -> Payload:
        """Keep the codes of the own ids, and forget the secret."""
        client = opened.client
        order = secret_of(client)["order"]
        points = private_ids.Points.from_record(
            opened.message.content, {"m": len(order)}
        ).points
        codes = torch.empty_like(order)
        codes[order] = private_ids.codes_of(points)
        border = border_of(client)
        number = len(border.own)
        client.state.set_group(SECRET, {})
        client.state.set_group(
            CODE, {"own": codes[:number].clone(), "outside": codes[number:].clone()}
        )
        return Empty()

    def _boundary(self, opened: Opened) -> Payload:
        """Name the nodes with neighbours at other clients, and these neighbours."""
        client = opened.client
        edges, sent = edges_of(client), sent_border(client)
        own, own_edges = torch.unique(edges.own, return_counts=True)
        is_listed = torch.isin(own, listed_of(client))
        outside_edges = torch.bincount(edges.other, minlength=len(edges.outside))
        order, order_outside = sent.own.argsort(), sent.outside.argsort()
        return fedgcn.Boundary(
            sent.own[order],
            is_listed[order].to(torch.uint8),
            sent.outside[order_outside],
            own_edges[order].to(torch.int32),
            outside_edges[order_outside].to(torch.int32),
        )

    def _sums(self, opened: Opened) -> Payload:
        """Send the own part of the sums of all listed nodes that the client knows."""
        client = opened.client
        edges = edges_of(client)
        ids = fedgcn.ListedNodes.from_record(opened.message.content).ids
        own, own_ids, sent = listed_of(client), listed_ids(client), sent_border(client)
        other = torch.isin(sent.outside, ids)
        # other nodes of this client are no reason to refuse: that would confirm them
        if not bool(torch.isin(own_ids, ids).all()):
            raise PayloadError("the server's list lacks nodes that this client listed")
        places = other.nonzero().squeeze(1)
        named = torch.cat([own_ids, sent.outside[places]])
        sums = partial_sums(client.data.graph.graph.x, edges, own, places)
        total = degrees(edges)[own].float()
        order = named.argsort()
        part = fedgcn.NeighbourSums(
            torch.searchsorted(ids, named[order]).to(torch.int32),
            sums[order],
            F.pad(total, (0, len(places)))[order],
            len(ids),
        )
        client.state.set_group(KEPT, {"other": places})
        return privatize(client, part)

    def _complete(self, opened: Opened) -> Payload:
        """Store the sums of the own nodes and of their outside neighbours."""
        client = opened.client
        none = torch.zeros(0, dtype=torch.int64)
        places = client.state.group(KEPT).get("other", none)
        own, hops = listed_of(client), client.config.method_config.hops
        num_other = len(places) if hops == 2 else 0
        sizes = {"n": len(own) + num_other, "h": num_other}
        sizes["d"] = client.data.graph.num_features
        found = fedgcn.CompletedSums.from_record(opened.message.content, sizes)
        # rows come ascending by what was sent; codes have another order in each run
        order = listed_ids(client).argsort()
        order_other = sent_border(client).outside[places[:num_other]].argsort()
        sums, degrees = torch.empty_like(found.sums), torch.empty_like(found.degrees)
        sums[torch.cat([order, len(own) + order_other])] = found.sums
        degrees[order_other] = found.degrees
        kept = {"other": places, "sums": sums, "degrees": degrees}
        client.state.set_hashed_group(KEPT, kept)
        return Empty()


class Border(NamedTuple):
    """Identifiers of the client's nodes at its border, and of the outside neighbours.

    ``own`` are those of ``unique(edges.own)``, ``outside`` those of ``edges.outside``.
    """

    own: Tensor
    outside: Tensor


def warn_without_sums(client: Client) -> None:
    """Log a warning if a client with neighbours at other clients has lost their sums."""
    hops, is_kept = client.config.method_config.hops, KEPT in client.state.values
    if hops and not is_kept and len(edges_of(client).own):
        log.warning(
            "Client %d has no sums of its neighbours at other clients, because its "
            "state was lost. It trains on its own edges.",
            client.partition_id,
        )


def border_of(client: Client) -> Border:
    """Return the identifiers as the client knows them."""
    edges = edges_of(client)
    return Border(edges.ids[torch.unique(edges.own)], edges.outside)


def sent_border(client: Client) -> Border:
    """Return what the client sends for its identifiers: their codes, if they have some."""
    found = client.state.group(CODE)
    return Border(found["own"], found["outside"]) if found else border_of(client)


def listed_ids(client: Client) -> Tensor:
    """Return what the client sends for the nodes of :func:`listed_of`."""
    nodes = torch.unique(edges_of(client).own)
    return sent_border(client).own[torch.searchsorted(nodes, listed_of(client))]


def secret_of(client: Client) -> dict[str, Tensor]:
    """Return the client's secret and the order of its points; PayloadError if none."""
    found = client.state.group(SECRET)
    if not found:
        raise PayloadError("this client has no secret: it was not asked to draw one")
    return found


def others(client: Client) -> int:
    """Return the last number of an exchange with one message for each other client."""
    return client.num_partitions - 2


def edges_of(client: Client) -> OwnedEdges:
    """Return all edges of the client's nodes, on the CPU, sorted once per graph."""
    outside, edges = client.data.graph.outside, client.data.graph.graph.edge_index
    assert outside is not None  # the method's row demands these edges

    def sorted_edges() -> OwnedEdges:
        ids, place = torch.unique(outside.other, return_inverse=True)
        return OwnedEdges(edges, outside.own, place, ids, outside.ids)

    return client.cached(("owned edges",), sorted_edges)


def listed_of(client: Client) -> Tensor:
    """Return the own nodes whose sums are formed, ascending by identifier."""
    edges, settings = edges_of(client), client.config.method_config
    nodes = listed_nodes(edges, min_outside=settings.min_outside, hops=settings.hops)
    return nodes[edges.ids[nodes].argsort()]


def completed_data(client: Client) -> ClientData:
    """Return the client's data on the completed graph, unchanged before there are sums."""

    def build(found: dict[str, Tensor]) -> list[GraphInput]:
        graph = summed_graph(
            client.data.graph.graph.x,
            edges_of(client),
            listed_of(client),
            found["other"],
            found["sums"],
            found["degrees"],
            hops=client.config.method_config.hops,
        )
        parts = (graph.x, graph.edge_index, graph.weight)
        return [SummedGraph(*(tensor.to(client.device) for tensor in parts))]

    return client.data_on(KEPT, build)
