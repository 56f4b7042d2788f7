"""Payloads of FedGCN's exchanges before round 1.

Letters: d features, B nodes with a sum, b own and h outside nodes of one client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.arrays import (
    ArrayPayload,
    Layout,
    check_ascending,
    read_arrays,
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

    own: Tensor
    is_listed: Tensor
    outside: Tensor
    own_edges: Tensor
    outside_edges: Tensor
    records = ("boundary",)
    layout: ClassVar[Layout] = {
        "own": (torch.int64, "b"),
        "is_listed": (torch.uint8, "b"),
        "outside": (torch.int64, "h"),
        "own_edges": (torch.int32, "b"),
        "outside_edges": (torch.int32, "h"),
    }
    ascending = ("own", "outside")

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; ``spec`` is the number of nodes that the client described."""
        found = super().from_record(content)
        _check_number("boundary/own", found.own, spec)
        if bool((found.is_listed > 1).any()):
            raise PayloadError('"boundary/is_listed" must hold 0 or 1 for each node.')
        for name in ("own_edges", "outside_edges"):
            if bool((getattr(found, name) < 1).any()):
                raise PayloadError(
                    f'"boundary/{name}" must hold at least 1 for each node.'
                )
        return found


@dataclass(frozen=True)
class ListedNodes(ArrayPayload):
    """Identifiers of all nodes with a sum, ascending, for every client: 8·B bytes."""

    ids: Tensor
    records = ("listed",)
    layout: ClassVar[Layout] = {"ids": (torch.int64, "B")}
    ascending = ("ids",)


@dataclass(frozen=True)
class NeighbourSums(AdditivePayload, ArrayPayload):
    """A client's part of the sums: 4·r·(d + 2) bytes for the r rows that it knows.

    ``rows`` (r,) are ascending positions in the list of B nodes, ``sums`` (r, d) are
    c_k(v), and ``degrees`` (r,) are d̃_v of the client's own nodes, 0 for others.
    ``num_listed`` is B and not sent. With secure aggregation the upload has 8·(B·d + B +
    1) bytes: all rows, zero where the client knows nothing, the degrees, and a check
    entry.
    """

    rows: Tensor
    sums: Tensor
    degrees: Tensor
    num_listed: int
    public_summands = frozenset()
    records = ("sums",)
    layout: ClassVar[Layout] = {
        "rows": (torch.int32, "r"),
        "sums": (torch.float32, "r", "d"),
        "degrees": (torch.float32, "r"),
    }

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

    sums: Tensor
    degrees: Tensor
    records = ("completed",)
    layout: ClassVar[Layout] = {
        "sums": (torch.float32, "n", "d"),
        "degrees": (torch.float32, "h"),
    }

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; ``spec`` = (n, d, h)."""
        return super().from_record(content, dict(zip("ndh", spec, strict=True)))
