"""Payloads of FedGCN's exchanges before round 1.

Yao et al., "FedGCN: Convergence-Communication Tradeoffs in Federated Training of Graph
Convolutional Networks", NeurIPS 2023.

Letters: d features, B nodes with a sum, b own and h outside nodes of one client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Payload, check_tensor, read_tensors, write_tensors
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload

__all__ = ["BOUNDARY", "COMPLETE", "SUMS"]
__all__ += ["Boundary", "CompletedSums", "ListedNodes", "NeighbourSums"]

BOUNDARY = "boundary"
"""Query action: name the nodes with neighbours at other clients, and these neighbours."""
SUMS = "sums"
"""Query action: send the own part of the sum of every listed node."""
COMPLETE = "complete"
"""Query action: receive the sums of the own nodes and of their outside neighbours."""


class _Tensors(Payload):
    """Payload whose fields are the tensors of one record."""

    name: ClassVar[str]
    types: ClassVar[Mapping[str, torch.dtype]]

    def to_record(self) -> RecordDict:
        """Pack into one record."""
        fields = {name: getattr(self, name) for name in self.types}
        return RecordDict({self.name: write_tensors(fields)})

    @classmethod
    def unpack(cls, content: RecordDict) -> dict[str, Tensor]:
        """Return the fields, of the right names and types."""
        found = read_tensors(content, cls.name, is_checked=False)
        if found.keys() != cls.types.keys():
            raise PayloadError(
                f'Record "{cls.name}" must hold {list(cls.types)}, got {sorted(found)}.'
            )
        for name, tensor in found.items():
            check_tensor(f"{cls.name}/{name}", tensor, dtype=cls.types[name])
        return found

    @property
    def num_bytes(self) -> int:
        """Sum of the bytes of all fields."""
        return sum(getattr(self, name).nbytes for name in self.types)


def _check_ids(name: str, ids: Tensor, most: int | None = None) -> None:
    """Reject node identifiers that are not one-dimensional, distinct and sorted."""
    if ids.dim() != 1 or not bool((ids.diff() > 0).all()):
        raise PayloadError(f'"{name}" must be strictly ascending, of one dimension.')
    if most is not None and len(ids) > most:
        raise PayloadError(
            f'"{name}" names {len(ids)} nodes, but the client described {most}.'
        )


@dataclass(frozen=True)
class Boundary(_Tensors):
    """Nodes at the border of a client: 12·(b + h) + b bytes.

    Parameters
    ----------
    own : Tensor of shape (b,), int64
        Identifiers of the client's nodes with an outside neighbour, ascending.
    is_listed : Tensor of shape (b,), uint8
        1 if the sum of the node may be formed, 0 if the owner leaves it out.
    outside : Tensor of shape (h,), int64
        Identifiers of their outside neighbours, ascending.
    own_edges : Tensor of shape (b,), int32
        Number of edges of each of ``own`` to nodes of other clients, at least 1.
    outside_edges : Tensor of shape (h,), int32
        Number of edges of each of ``outside`` to nodes of this client, at least 1.
    """

    own: Tensor
    is_listed: Tensor
    outside: Tensor
    own_edges: Tensor
    outside_edges: Tensor
    name: ClassVar[str] = "boundary"
    records: ClassVar[tuple[str, ...]] = ("boundary",)
    types: ClassVar[Mapping[str, torch.dtype]] = {
        "own": torch.int64,
        "is_listed": torch.uint8,
        "outside": torch.int64,
        "own_edges": torch.int32,
        "outside_edges": torch.int32,
    }

    @classmethod
    def from_record(cls, content: RecordDict, spec: int) -> Self:
        """Unpack; ``spec`` is the number of nodes that the client described."""
        found = cls.unpack(content)
        _check_ids("boundary/own", found["own"], spec)
        _check_ids("boundary/outside", found["outside"])
        flags = found["is_listed"]
        if flags.shape != found["own"].shape or bool((flags > 1).any()):
            raise PayloadError('"boundary/is_listed" must hold 0 or 1 for each node.')
        for name in ("own", "outside"):
            edges = found[f"{name}_edges"]
            if edges.shape != found[name].shape or bool((edges < 1).any()):
                raise PayloadError(
                    f'"boundary/{name}_edges" must hold at least 1 for each node.'
                )
        return cls(**found)


@dataclass(frozen=True)
class ListedNodes(_Tensors):
    """All nodes with a sum, the same list for every client: 8·B bytes.

    Parameters
    ----------
    ids : Tensor of shape (B,), int64
        Identifiers, ascending.
    """

    ids: Tensor
    name: ClassVar[str] = "listed"
    records: ClassVar[tuple[str, ...]] = ("listed",)
    types: ClassVar[Mapping[str, torch.dtype]] = {"ids": torch.int64}

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack."""
        found = cls.unpack(content)
        _check_ids("listed/ids", found["ids"])
        return cls(**found)


@dataclass(frozen=True)
class NeighbourSums(AdditivePayload, _Tensors):
    """A client's part of the sums: 4·r·(d + 2) bytes for the r rows that it knows.

    With secure aggregation the upload has 8·(B·d + B + 1) bytes: all rows, zero where the
    client knows nothing, the degrees, and a check entry.

    Parameters
    ----------
    rows : Tensor of shape (r,), int32
        Positions in the list of nodes, ascending.
    sums : Tensor of shape (r, d), float32
        c_k(v).
    degrees : Tensor of shape (r,), float32
        d̃_v of the client's own nodes, 0 for others.
    num_listed : int
        B; not sent.
    """

    rows: Tensor
    sums: Tensor
    degrees: Tensor
    num_listed: int
    public_summands = frozenset()
    name: ClassVar[str] = "sums"
    records: ClassVar[tuple[str, ...]] = ("sums",)
    types: ClassVar[Mapping[str, torch.dtype]] = {
        "rows": torch.int32,
        "sums": torch.float32,
        "degrees": torch.float32,
    }

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[int, int]) -> Self:
        """Unpack; ``spec`` = (B, d)."""
        num_listed, width = spec
        found = cls.unpack(content)
        rows = found["rows"]
        _check_ids("sums/rows", rows, num_listed)
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < num_listed:
            raise PayloadError(f'"sums/rows" must lie in [0, {num_listed}).')
        check_tensor("sums/sums", found["sums"], shape=(len(rows), width))
        check_tensor("sums/degrees", found["degrees"], shape=(len(rows),))
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
class CompletedSums(_Tensors):
    """The sums of one client's nodes and neighbours: 4·(n·d + h) bytes.

    Parameters
    ----------
    sums : Tensor of shape (n, d), float32
        Sums of the client's listed nodes, with 2 hops then of the h listed outside nodes.
    degrees : Tensor of shape (h,), float32
        d̃ of these outside nodes; empty with 1 hop.
    """

    sums: Tensor
    degrees: Tensor
    name: ClassVar[str] = "completed"
    records: ClassVar[tuple[str, ...]] = ("completed",)
    types: ClassVar[Mapping[str, torch.dtype]] = {
        "sums": torch.float32,
        "degrees": torch.float32,
    }

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[int, int, int]) -> Self:
        """Unpack; ``spec`` = (n, d, h)."""
        number, width, outside = spec
        found = cls.unpack(content)
        check_tensor("completed/sums", found["sums"], shape=(number, width))
        check_tensor("completed/degrees", found["degrees"], shape=(outside,))
        return cls(**found)
