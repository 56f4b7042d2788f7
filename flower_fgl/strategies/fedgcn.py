"""FedGCN's server half: sums over the edges between clients, then FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.methods.fedgcn import FedGCNSettings
from flower_fgl.protocols.base import Empty, Payload
from flower_fgl.protocols.fedgcn import (
    BOUNDARY,
    COMPLETE,
    SUMS,
    Boundary,
    CompletedSums,
    ListedNodes,
    NeighbourSums,
)
from flower_fgl.protocols.private_ids import BLIND, CODES, MULTIPLY, Points
from flower_fgl.strategies.fedavg import FedAvg

__all__ = ["FedGCN", "check_boundaries", "positions"]

Kind = TypeVar("Kind", bound=Payload)


class FedGCN(FedAvg):
    """Form the sums of neighbours once, then average the clients' models.

    Notes
    -----
    1. The exchange is recorded as round 0, phase ``sums``. Every client must take part in
       all of it: without one client, the sums of its neighbours would be wrong.
    2. The paper encrypts the sums homomorphically. Here ``secure-aggregation = true``
       masks them; by default the server sees each client's part.
    3. Rows of the sums are normalised by the degrees of the whole graph. The published
       code cuts subgraphs, whose outermost nodes have too small degrees.
    """

    config: RunConfig[FedGCNSettings]

    def prepare(self) -> None:
        """Build the initial model; form the sums unless the run is resumed."""
        super().prepare()
        if self.config.method_config.hops and not self.is_resumed:
            with self.phase(SUMS, 0, min_replies=0):
                self.complete_graphs()

    def complete_graphs(self) -> None:
        """Collect the borders, sum over the clients, return the rows that each needs."""
        clients = self.federation.clients
        is_guessable = self.config.method_config.ids == "guessable"
        if self.federation.is_owned and len(clients) > 1 and not is_guessable:
            self.exchange_codes()
        asked = dict.fromkeys(clients, Empty())
        sizes = {pid: client.num_nodes for pid, client in clients.items()}
        borders = self.ask_all(0, BOUNDARY, asked, Boundary, sizes)
        ids = check_boundaries(borders)
        self.log(listed_nodes=len(ids))
        self.log(left_out=sum(int((b.is_listed == 0).sum()) for b in borders.values()))
        sums = torch.zeros(0, self.federation.num_features, dtype=torch.float64)
        degrees = torch.zeros(0, dtype=torch.float64)
        if len(ids):
            sums, degrees = self.sum_parts(ids)
        rows: dict[int, Payload] = {
            pid: self.rows_of(border, ids, sums, degrees)
            for pid, border in borders.items()
            if len(border.own)
        }
        self.ask_all(0, COMPLETE, rows, Empty)

    def exchange_codes(self) -> None:
        """Pass each owner's points around all others; return them with all secrets."""
        clients = list(self.federation.clients)
        sets = self.ask_all(0, BLIND, dict.fromkeys(clients, Empty()), Points)
        for step in range(1, len(clients)):
            # owner k has the points of the owner that is ``step`` places before it
            source = {
                clients[(k + step) % len(clients)]: pid for k, pid in enumerate(clients)
            }
            sent = {pid: sets[source[pid]] for pid in clients}
            size = {pid: {"m": len(sent[pid].points)} for pid in clients}
            found = self.ask_all(step - 1, MULTIPLY, sent, Points, size)
            sets = {source[pid]: found[pid] for pid in clients}
        self.ask_all(0, CODES, sets, Empty)

    def sum_parts(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Sum the clients' parts to sums (B, d) and degrees (B,), float64.

        With ``secure-aggregation`` they are masked.
        """
        spec = (len(ids), self.federation.num_features)
        asked: dict[int, Payload] = dict.fromkeys(
            self.federation.clients, ListedNodes(ids)
        )
        if self.secure is not None:
            with self.loop.log.failing():
                found = self.secure.sum_query(0, SUMS, asked, NeighbourSums, spec)
            self.require([] if self.loop.log.reason else asked, asked)
            return found["sums"], found["degrees"]
        specs = dict.fromkeys(asked, spec)
        parts = self.ask_all(0, SUMS, asked, NeighbourSums, specs, brings_upload=True)
        sums = torch.zeros(spec, dtype=torch.float64)
        degrees = torch.zeros(spec[0], dtype=torch.float64)
        for part in parts.values():
            sums.index_add_(0, part.rows.long(), part.sums.double())
            degrees.index_add_(0, part.rows.long(), part.degrees.double())
        return sums, degrees

    def rows_of(
        self, border: Boundary, ids: Tensor, sums: Tensor, degrees: Tensor
    ) -> CompletedSums:
        """Select the rows of a client: its own nodes', with 2 hops its neighbours' too."""
        own, outside = positions(border.own, ids), positions(border.outside, ids)
        if self.config.method_config.hops == 1:
            outside = outside[:0]
        rows = torch.cat([own, outside])
        return CompletedSums(sums[rows].float(), degrees[outside].float())

    def ask_all(
        self,
        number: int,
        action: str,
        payloads: Mapping[int, Payload],
        kind: type[Kind],
        specs: Mapping[int, Any] = MappingProxyType({}),
        *,
        brings_upload: bool = False,
    ) -> dict[int, Kind]:
        """Run a query exchange; raise a RunError if a client's reply is missing."""
        found = self.messenger.query(
            number, action, payloads, kind, specs.get, brings_upload=brings_upload
        )
        self.require(found, payloads)
        return found

    def require(
        self, found: Mapping[int, object] | list[int], asked: Mapping[int, object]
    ) -> None:
        """Raise an error that names the clients that are missing."""
        missing = sorted(set(asked) - set(found))
        if missing:
            reasons = {failure.reason for failure in self.loop.log.failures}
            reasons |= {self.loop.log.reason} - {"", None}
            raise RunError(
                f"fedgcn sums over all clients before round 1, but the clients {missing} "
                f"did not take part: {'; '.join(sorted(reasons))}"
            )


def positions(wanted: Tensor, ids: Tensor) -> Tensor:
    """Return the positions of ``wanted`` identifiers in ``ids``, both ascending."""
    kept = wanted[torch.isin(wanted, ids)]
    return torch.searchsorted(ids, kept)


def check_boundaries(borders: Mapping[int, Boundary]) -> Tensor:
    """Check that both owners list the edges between clients; return the nodes with a sum.

    They are identifiers (B,), ascending. A RunError says that two clients own one node, a
    client names a neighbour that no client owns, or the owner of a node counts more or
    fewer edges to it than the other clients do.
    """
    own = torch.cat([border.own for border in borders.values()])
    owned, counts = torch.unique(own, return_counts=True)
    if bool((counts > 1).any()):
        twice = owned[counts > 1]
        holders = _holders(borders, twice, "own")
        raise RunError(
            f"{len(twice)} nodes have two owners among the clients {holders}. Every node "
            "needs its own id in the whole federation."
        )
    named = torch.unique(torch.cat([border.outside for border in borders.values()]))
    lost = named[~torch.isin(named, owned)]
    if len(lost):
        raise RunError(
            f"The clients {_holders(borders, lost, 'outside')} have edges to {len(lost)} "
            "nodes of other clients that no client owns, or whose owner does not list "
            "the edge. Both owners must list an edge, with the same two ids; leave out "
            "edges to nodes outside the federation. If a node config has id-key, all "
            "owners need the same key file."
        )
    lost = owned[~torch.isin(owned, named)]
    if len(lost):
        raise RunError(
            f"{len(lost)} nodes of the clients {_holders(borders, lost, 'own')} have an "
            "edge to another client that the other client does not list. Both owners must "
            "list an edge, with the same two ids."
        )
    both, kinds = torch.zeros(2, len(owned), dtype=torch.int64), ("own", "outside")
    for border in borders.values():
        for row, kind in enumerate(kinds):
            place = torch.searchsorted(owned, getattr(border, kind))
            both[row].index_add_(0, place, getattr(border, f"{kind}_edges").long())
    unequal = owned[both[0] != both[1]]
    if len(unequal):
        found = [pid for kind in kinds for pid in _holders(borders, unequal, kind)]
        raise RunError(
            f"{len(unequal)} nodes have edges among the clients {sorted(set(found))} that "
            "only one of the two owners lists. Both owners must list an edge, with the "
            "same two ids."
        )
    parts = [border.own[border.is_listed.bool()] for border in borders.values()]
    return torch.cat(parts).sort().values


def _holders(borders: Mapping[int, Boundary], ids: Tensor, kind: str) -> list[int]:
    """Return the clients whose ``own`` or ``outside`` nodes include some of ``ids``."""
    return [
        pid
        for pid, border in borders.items()
        if bool(torch.isin(getattr(border, kind), ids).any())
    ]
