"""Payloads of FedGCN's exchanges before round 1.

Letters: d features, B nodes with a sum, b own and h outside nodes of one client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.arrays import (
    ArrayPayload,
    check_ascending,
    read_arrays,
    within,
)
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload

__all__ = ["BOUNDARY", "COMPLETE", "SUMS"]
__all__ += ["Boundary", "CompletedSums", "ListedNodes", "NeighbourSums"]

BOUNDARY = "boundary"
"""Query action: name the nodes with neighbours at other clients, and these neighbours."""
SUMS = "sums"
"""Query action: send the own part of the sum of every listed node."""
COMPLETE = "complete"
"""Query action: receive the sums of the own nodes and of their outside neighbours."""


def _check_number(name: str, ids: Tensor, most: int) -> None:
    """Reject more nodes than a client described."""
    if len(ids) > most:
        raise PayloadError(
            f'"{name}" names {len(ids)} nodes, but the client described {most}.'
        )


@dataclass(frozen=True)
class Boundary(ArrayPayload):
    """Nodes at the border of a client: 12·(b + h) + b bytes.

    ``own`` (b,) are the client's nodes with an outside neighbour, ``outside`` (h,) these
    neighbours, both ascending identifiers. ``is_listed`` (b,) is 1 if the sum of the node
    may be formed. ``own_edges`` and ``outside_edges`` count the edges of each node to the
    other side, at least 1.
    """

    own: Annotated[Tensor, torch.int64, "b", check_ascending]
    is_listed: Annotated[Tensor, torch.uint8, "b", within(0, 1)]
    outside: Annotated[Tensor, torch.int64, "h", check_ascending]
    own_edges: Annotated[Tensor, torch.int32, "b", within(1)]
    outside_edges: Annotated[Tensor, torch.int32, "h", within(1)]
    records = ("boundary",)

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; ``spec`` is the number of nodes that the client described."""
        found = super().from_record(content)
        _check_number("boundary/own", found.own, spec)
        return found


@dataclass(frozen=True)
class ListedNodes(ArrayPayload):
    """Identifiers of all nodes with a sum, ascending, for every client: 8·B bytes."""

    ids: Annotated[Tensor, torch.int64, "B", check_ascending]
    records = ("listed",)


@dataclass(frozen=True)
class NeighbourSums(AdditivePayload, ArrayPayload):
    """A client's part of the sums: 4·r·(d + 2) bytes for the r rows that it knows.

    ``rows`` (r,) are ascending positions in the list of B nodes, ``sums`` (r, d) are
    c_k(v), and ``degrees`` (r,) are d̃_v of the client's own nodes, 0 for others.
    ``num_listed`` is B and not sent. With secure aggregation the upload has 8·(B·d + B +
    1) bytes: all rows, zero where the client knows nothing, the degrees, and a check
    entry.
    """

    rows: Annotated[Tensor, torch.int32, "r"]
    sums: Annotated[Tensor, torch.float32, "r", "d"]
    degrees: Annotated[Tensor, torch.float32, "r"]
    num_listed: int
    public_summands = frozenset()
    records = ("sums",)

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; ``spec`` = (B, d)."""
        num_listed, width = spec
        found = read_arrays(content, "sums", cls.layout, {"d": width})
        rows = found["rows"]
        check_ascending("sums/rows", rows)
        _check_number("sums/rows", rows, num_listed)
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < num_listed:
            raise PayloadError(f'"sums/rows" must lie in [0, {num_listed}).')
        return cls(**found, num_listed=num_listed)

    def summands(self, weight: float) -> dict[str, Tensor]:
        """Return the rows of all listed nodes; ``weight`` does not count."""
        sums = torch.zeros(self.num_listed, self.sums.shape[1], dtype=torch.float64)
        total = torch.zeros(self.num_listed, dtype=torch.float64)
        rows = self.rows.long()
        sums[rows], total[rows] = self.sums.double(), self.degrees.double()
        return {"sums": sums, "degrees": total}

    @classmethod
    def summand_shapes(cls, spec: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of :meth:`summands`; ``spec`` = (B, d)."""
        return {"sums": spec, "degrees": spec[:1]}


@dataclass(frozen=True)
class CompletedSums(ArrayPayload):
    """The sums of one client's nodes and neighbours: 4·(n·d + h) bytes.

    ``sums`` (n, d) are those of the client's listed nodes, with 2 hops then of the h
    listed outside nodes, whose d̃ are ``degrees`` (h,), empty with 1 hop.
    """

    sums: Annotated[Tensor, torch.float32, "n", "d"]
    degrees: Annotated[Tensor, torch.float32, "h"]
    records = ("completed",)
