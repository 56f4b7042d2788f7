"""Payloads of FedAvg and related methods: weights, alone or with a description.

Those of many clients are packed and read together, byte for byte as those of each.
"""

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from flower_fgl.core import flower_internals
from flower_fgl.protocols.base import (
    Shapes,
    TensorPayload,
    dtype_name,
    is_in_range,
    npy_header,
)
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload

__all__ = [
    "DescribedWeights",
    "StackedPayload",
    "Weights",
    "read_alike",
    "write_stacked",
]

FLOAT, FLOAT_NAME = np.dtype("<f4"), "float32"


def write_stacked(tensors: Mapping[str, Tensor], num_clients: int) -> list[ArrayRecord]:
    """Pack stacked tensors (K, ...) as ``write_tensors`` packs those of each client."""
    parts = []
    for name, tensor in tensors.items():
        # client by client, because a transposed matrix then stays in the cache
        rows = [row.contiguous().numpy() for row in tensor.detach().cpu().unbind()]
        kind, shape = rows[0].dtype, rows[0].shape
        header = npy_header(kind.str, shape)
        parts.append((name, dtype_name(kind), shape, header, rows))
    return [
        flower_internals.plain_record(
            {
                name: flower_internals.plain_array(
                    dtype, shape, b"".join((header, rows[place].data))
                )
                for name, dtype, shape, header, rows in parts
            }
        )
        for place in range(num_clients)
    ]


def read_alike(
    contents: Mapping[int, RecordDict], record: str, shapes: Shapes
) -> dict[int, dict[str, Tensor]]:
    """Read one ArrayRecord of every client, if it is exactly as expected, by partition-id.

    The float32 entries, in the order of ``shapes``, are rows of one array for all clients.
    Clients whose record :func:`~flower_fgl.protocols.base.read_tensors` would refuse are
    left out.
    """
    if not shapes:
        return {}
    expected = {}
    for name, shape in shapes.items():
        header = npy_header(FLOAT.str, tuple(shape))
        length = len(header) + FLOAT.itemsize * math.prod(shape)
        expected[name] = tuple(shape), header, length
    found: dict[int, ArrayRecord] = {}
    for pid, content in contents.items():
        # a record that raises an error here is refused when it is read alone
        with contextlib.suppress(Exception):
            arrays = content[record]
            if isinstance(arrays, ArrayRecord) and _is_as_expected(arrays, expected):
                found[pid] = arrays
    good = np.ones(len(found), dtype=bool)
    stacks = {}
    for name, (shape, header, _) in expected.items():
        stack = np.empty((len(found), *shape), dtype=FLOAT)
        rows = stack.reshape(len(found), math.prod(shape))
        for row, arrays in zip(rows, found.values(), strict=True):
            row[:] = np.frombuffer(arrays[name].data, FLOAT, offset=len(header))
        tensor = torch.from_numpy(stack)
        stacks[name] = tensor.unbind()
        if not is_in_range(tensor):
            good &= [is_in_range(row) for row in stacks[name]]
    entries = zip(*stacks.values(), strict=True)
    return {
        pid: dict(zip(shapes, row, strict=True))
        for pid, row, is_good in zip(found, entries, good, strict=True)
        if is_good
    }


def _is_as_expected(
    arrays: ArrayRecord, expected: Mapping[str, tuple[tuple[int, ...], bytes, int]]
) -> bool:
    """Return whether entries have the expected shapes, headers and lengths."""
    if arrays.keys() != expected.keys():
        return False
    for name, array in arrays.items():
        shape, header, length = expected[name]
        if (
            type(array.data) is not bytes
            or len(array.data) != length
            or not array.data.startswith(header)
            or array.stype != flower_internals.NUMPY
            or array.dtype != FLOAT_NAME
            or tuple(array.shape) != shape
        ):
            return False
    return True


class StackedPayload(TensorPayload):
    """Payload of which those of many clients are packed and read at once."""

    @classmethod
    def read_alike(
        cls, contents: Mapping[int, RecordDict], spec: Any
    ) -> dict[int, Self]:
        """Read each tensor of many clients into one array, see :func:`read_alike`."""
        plain: Any = TensorPayload.from_record
        own: Any = cls.from_record
        if cls.parts or own.__func__ is not plain.__func__:  # with checks of their own
            return {}
        specs = spec if isinstance(spec, tuple) else (spec,) * len(cls.records)
        columns: list[dict[int, Any]] = []
        for record, shapes in zip(cls.records, specs, strict=True):
            is_one = not isinstance(shapes, Mapping)
            entry = cls.entries.get(record, record)
            found = read_alike(contents, record, {entry: shapes} if is_one else shapes)
            columns.append({p: t[entry] if is_one else t for p, t in found.items()})
        common = [pid for pid in columns[0] if all(pid in column for column in columns)]
        return {pid: cls(*(column[pid] for column in columns)) for pid in common}

    @classmethod
    def stacked_records(cls, num_clients: int, *fields: Any) -> list[RecordDict]:
        """Pack stacked fields (K, ...) as :meth:`to_record` packs those of a client."""
        records = {
            record: write_stacked(tensors, num_clients)
            for record, tensors in cls(*fields)._values().items()
        }
        return [
            flower_internals.plain_content(dict(zip(records, row, strict=True)))
            for row in zip(*records.values(), strict=True)
        ]


@dataclass(frozen=True)
class DescribedWeights(StackedPayload):
    """Weights of a client and its description: 4·(P + v) bytes for v numbers.

    ``tensors`` holds θ_i, the P weights, and ``descriptor`` the v numbers, both by name.
    """

    tensors: Mapping[str, Tensor]
    descriptor: Mapping[str, Tensor]
    records = ("weights", "descriptor")


@dataclass(frozen=True)
class Weights(StackedPayload, AdditivePayload):
    """All weights of a model, by parameter name: 4·P bytes for its P parameters.

    With secure aggregation the upload has 8·(P + 2) bytes: the weights times the client's
    weight in the average, this weight, and a check entry.
    """

    tensors: Mapping[str, Tensor]
    records: ClassVar[tuple[str, ...]] = ("weights",)
    public_summands = frozenset({"weight"})

    def summands(self, weight: float) -> dict[str, Tensor]:
        """Return n_k·θ_k and n_k; the mean is the quotient of their sums."""
        scaled = {f"weights/{n}": weight * t.double() for n, t in self.tensors.items()}
        return {"weight": torch.tensor(weight, dtype=torch.float64), **scaled}

    @classmethod
    def summand_shapes(cls, spec: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of :meth:`summands`."""
        return {"weight": (), **{f"weights/{n}": shape for n, shape in spec.items()}}
