"""Client half of FedGCN: FedAvg on a graph that sums of neighbours complete.

Yao et al., "FedGCN: Convergence-Communication Tradeoffs in Federated Training of Graph
Convolutional Networks", NeurIPS 2023.
"""

from __future__ import annotations

import logging

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
from flower_fgl.client_apps.base import Fit, once
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client as AnyClient
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.secure_aggregation import pack_masked
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.client_apps.runtime.state import StateStore
from flower_fgl.client_apps.runtime.upload_privacy import privatize
from flower_fgl.core.errors import PayloadError
from flower_fgl.methods.fedgcn import FedGCNSettings
from flower_fgl.protocols.base import Empty
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fedgcn import (
    BOUNDARY,
    COMPLETE,
    SUMS,
    Boundary,
    CompletedSums,
    ListedNodes,
    NeighbourSums,
)

log = logging.getLogger(__name__)

__all__ = ["FedGCNClientApp"]

Client = AnyClient[FedGCNSettings]

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

    def __init__(self, session: Session | None = None) -> None:
        super().__init__(session)
        self.query(BOUNDARY)(self._boundary)
        self.query(SUMS)(self._sums)
        self.query(COMPLETE)(self._complete)

    def open(self, message: Message, context: Context) -> tuple[Client, StateStore]:
        """Load graph, settings and state of a client; sums complete the graph."""
        client, store = super().open(message, context)
        client.data = completed_data(client)
        return client, store

    def fit(self, client: Client, server_round: int, download: Weights) -> Fit:
        """Train as FedAvg does, on the completed graph."""
        hops, is_kept = client.config.method_config.hops, KEPT in client.state.values
        if hops and not is_kept and len(edges_of(client).own):
            log.warning(
                "Client %d has no sums of its neighbours at other clients, because its "
                "state was lost. It trains on its own edges.",
                client.partition_id,
            )
        return super().fit(client, server_round, download)

    def _boundary(self, message: Message, context: Context) -> Message:
        """Name the nodes with neighbours at other clients, and these neighbours."""
        client, store, _ = self.open_once(message, context, last=once)
        edges = edges_of(client)
        own, own_edges = torch.unique(edges.own, return_counts=True)
        is_listed = torch.isin(own, listed_of(client))
        order = edges.ids[own].argsort()
        outside_edges = torch.bincount(edges.other, minlength=len(edges.outside))
        reply = Boundary(
            edges.ids[own][order],
            is_listed[order].to(torch.uint8),
            edges.outside,
            own_edges[order].to(torch.int32),
            outside_edges.to(torch.int32),
        )
        self.keep(client, store, context, is_state_new=False)
        return Message(reply.to_record(), reply_to=message)

    def _sums(self, message: Message, context: Context) -> Message:
        """Send the own part of the sums of all listed nodes that the client knows."""
        client, store, _ = self.open_once(message, context, last=once)
        edges = edges_of(client)
        ids = ListedNodes.from_record(message.content).ids
        own, other = listed_of(client), torch.isin(edges.outside, ids)
        # other nodes of this client are no reason to refuse: that would confirm them
        if not bool(torch.isin(edges.ids[own], ids).all()):
            raise PayloadError("the server's list lacks nodes that this client listed")
        places = other.nonzero().squeeze(1)
        named = torch.cat([edges.ids[own], edges.outside[places]])
        sums = partial_sums(client.data.graph.graph.x, edges, own, places)
        total = degrees(edges)[own].float()
        order = named.argsort()
        part = NeighbourSums(
            torch.searchsorted(ids, named[order]).to(torch.int32),
            sums[order],
            F.pad(total, (0, len(places)))[order],
            len(ids),
        )
        client.state.set_group(KEPT, {"other": places})
        protected = privatize(client, part)
        content = protected.to_record()
        if client.config.secure_aggregation:
            content = pack_masked(
                self.session,
                client,
                context,
                0,
                message.content,
                protected,
                records=ListedNodes.records,
                depends_on_download=False,  # a list with one more node changes no sum
            )
        self.keep(client, store, context)
        return Message(content, reply_to=message)

    def _complete(self, message: Message, context: Context) -> Message:
        """Store the sums of the own nodes and of their outside neighbours."""
        client, store, _ = self.open_once(message, context, last=once)
        none = torch.zeros(0, dtype=torch.int64)
        places = client.state.group(KEPT).get("other", none)
        own, hops = listed_of(client), client.config.method_config.hops
        num_other = len(places) if hops == 2 else 0
        spec = (len(own) + num_other, client.data.graph.num_features, num_other)
        found = CompletedSums.from_record(message.content, spec)
        kept = {"other": places, "sums": found.sums, "degrees": found.degrees}
        client.state.set_hashed_group(KEPT, kept)
        self.keep(client, store, context)
        return Message(Empty().to_record(), reply_to=message)


def edges_of(client: Client) -> OwnedEdges:
    """Return all edges of the client's nodes, on the CPU, sorted once per graph."""
    outside, edges = client.data.graph.outside, client.data.graph.graph.edge_index
    if outside is None:
        raise PayloadError(
            "this client does not know its edges to nodes of other clients"
        )

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
    """Return the client's data on the completed graph, unchanged before there are sums.

    Outside neighbours have no label and are in no set that is evaluated.
    """
    data, token = client.data, client.state.values.get(KEPT)
    if token is None:
        return data
    kept = data.memo.get((KEPT,))
    if kept is None or kept[0] != token:
        found = client.state.group(KEPT)
        graph = summed_graph(
            data.graph.graph.x,
            edges_of(client),
            listed_of(client),
            found["other"],
            found["sums"],
            found["degrees"],
            hops=client.config.method_config.hops,
        )
        parts = (graph.x, graph.edge_index, graph.weight)
        moved = SummedGraph(*(tensor.to(client.device) for tensor in parts))
        data.memo[KEPT,] = kept = (token, moved)
    return data.with_inputs([kept[1]])
