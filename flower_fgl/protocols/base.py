"""Payloads: what crosses the wire, checked at both ends.

A payload is a frozen dataclass that turns into named records of a Flower message and back.
Arrays travel as ``.npy`` bytes, the form Flower itself uses; nothing is ever pickled.
"""

from __future__ import annotations

import functools
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from numpy.lib import format as npy
from torch import Tensor

from flower_fgl.core.errors import PayloadError

__all__ = [
    "CONFIG",
    "DESCRIBE",
    "INFO",
    "METRICS",
    "RESUME",
    "Empty",
    "Payload",
    "check_size",
    "check_tensor",
    "read_loss",
    "read_scores",
    "read_tensors",
    "record_bytes",
    "write_scores",
    "write_tensors",
]

CONFIG = "config"
"""Record with which the server tells a client about the round (a ConfigRecord)."""
METRICS = "metrics"
"""Record with loss, scores and seconds of a reply (a MetricRecord)."""
INFO = "info"
"""Record with which a client describes itself (a ConfigRecord)."""
DESCRIBE = "describe"
"""Action of the query exchange before round 1."""
RESUME = "resume"
"""Action of the query exchange with which a run goes on from a checkpoint."""
MEGABYTE = 1_000_000
NUMPY = "numpy.ndarray"
SCORES = ("num_nodes", "accuracy", "macro_f1", "macro_recall")
"""What is sent of every score column."""
EXTRA_SCORES = ("auroc",)
"""What is sent of a score column where it is asked for and defined."""

Shapes = Mapping[str, tuple[int, ...]]


class Payload(ABC):
    """One direction of a method's exchange.

    Subclasses are frozen dataclasses and state the formula of their bytes.
    """

    records: ClassVar[tuple[str, ...]]
    """Names of the records that the payload writes."""

    @abstractmethod
    def to_record(self) -> RecordDict:
        """Pack into named records of a message."""

    @classmethod
    @abstractmethod
    def from_record(cls, content: RecordDict, spec: Any) -> Self:
        """Unpack from a message and check against what was agreed.

        Parameters
        ----------
        content : RecordDict
            Content of the message; records of other names are left alone.
        spec : object
            What both halves agreed on, e.g. the shapes of the weights.

        Raises
        ------
        PayloadError
            If a record or entry is missing or too many, or has the wrong shape, type
            or a non-finite number.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the numbers it carries, by the stated formula."""

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Leave out what is made of too few nodes; a payload of classes overrides it.

        By default payloads inside this one leave out theirs.

        Parameters
        ----------
        shared : Tensor of shape (C,), bool
            Classes with at least ``min-class-count`` training nodes at the client.
        min_count : int
            ``min-class-count``: what stands for fewer nodes is left out as well.
        """
        if not is_dataclass(self):
            return self
        inner = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {
            name: part.withhold(shared, min_count)
            for name, part in inner.items()
            if isinstance(part, Payload)
        }
        return replace(self, **changed) if changed else self

    def in_range(self) -> Self:
        """Put numbers that noise was added to back where they can be.

        Made of the noisy numbers alone, so that it tells no more than they do.
        """
        return self


class Empty(Payload):
    """Nothing: 0 bytes."""

    records = ()

    def to_record(self) -> RecordDict:
        """Return no records."""
        return RecordDict()

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Expect nothing."""
        return cls()

    @property
    def num_bytes(self) -> int:
        """0."""
        return 0


def write_tensors(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Pack tensors into an ArrayRecord.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Any device; bfloat16 is not supported.

    Returns
    -------
    ArrayRecord

    Notes
    -----
    1. ``Array(ndarray)`` goes through ``np.save`` on a BytesIO, which copies piece by
       piece; header and bytes joined give the same string several times faster.
    """
    record = ArrayRecord()
    for name, tensor in tensors.items():
        array = tensor.detach().cpu().contiguous().numpy()
        header = _npy_header(array.dtype.str, array.shape)
        record[name] = Array(
            str(array.dtype),
            tuple(array.shape),
            NUMPY,
            b"".join((header, array.reshape(-1).view(np.uint8).data)),
        )
    return record


@functools.lru_cache(maxsize=1024)
def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the .npy header of a C-ordered array."""
    stream = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(stream, header)
    return stream.getvalue()


@functools.lru_cache(maxsize=1024)
def _parse_npy_header(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read a .npy header; evaluating it takes 50 µs, and few different ones come."""
    stream = io.BytesIO(header)
    if npy.read_magic(stream) != (1, 0):
        raise ValueError("not version 1.0 of the .npy format")
    shape, is_fortran, dtype = npy.read_array_header_1_0(stream)
    if dtype.hasobject or is_fortran:
        raise ValueError(f"dtype {dtype}, Fortran order {is_fortran}")
    return shape, dtype


def _read_array(name: str, array: Array) -> Tensor:
    """Read ``.npy`` bytes without pickle; the tensor owns its memory."""
    if array.stype != NUMPY:
        raise PayloadError(f'"{name}" is stored as {array.stype}, expected {NUMPY}.')
    try:
        # magic string and version (8 bytes), length of the header (2), header
        start = 10 + int.from_bytes(array.data[8:10], "little")
        shape, dtype = _parse_npy_header(array.data[:start])
        flat = np.frombuffer(array.data, dtype=dtype, offset=start)
        return torch.from_numpy(flat.reshape(shape).copy())
    except (ValueError, TypeError) as error:
        raise PayloadError(f'"{name}" holds no plain array: {error}.') from error


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``tensor`` if it is what was agreed.

    Parameters
    ----------
    name : str
        Name for the message.
    tensor : Tensor
        What came.
    shape : tuple of int, optional
        Expected shape.
    dtype : torch.dtype
        Expected type; floating types must also be finite.

    Raises
    ------
    PayloadError
        Naming what was expected and what came.
    """
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise PayloadError(
            f'"{name}" must have shape {tuple(shape)}, got {tuple(tensor.shape)}.'
        )
    if tensor.dtype != dtype:
        raise PayloadError(f'"{name}" must be {dtype}, got {tensor.dtype}.')
    # a sum is finite unless an entry is not, or the entries are near overflow
    if tensor.is_floating_point() and not math.isfinite(float(tensor.sum())):
        bad = int((~tensor.isfinite()).sum())
        if bad:
            raise PayloadError(f'"{name}" has {bad} non-finite numbers.')
    return tensor


def read_tensors(
    content: RecordDict,
    record: str,
    shapes: Shapes | None = None,
    *,
    is_checked: bool = True,
) -> dict[str, Tensor]:
    """Unpack an ArrayRecord of tensors.

    Parameters
    ----------
    content : RecordDict
        Content of the message.
    record : str
        Name of the record.
    shapes : mapping of str to tuple of int, optional
        Exactly the entries expected, with their shapes.
    is_checked : bool
        Whether the numbers must be float32 and finite: so for what others send, not for
        a client's own memory.

    Returns
    -------
    dict of str to Tensor
        In the order of ``shapes``.

    Raises
    ------
    PayloadError
        If the record is missing, or an entry is missing, unexpected or malformed.
    """
    arrays = content.array_records.get(record)
    if arrays is None:
        raise PayloadError(
            f'The message has no array record "{record}", only {sorted(content)}.'
        )
    names = list(arrays) if shapes is None else list(shapes)
    if set(names) != set(arrays):
        odd = sorted(set(names) ^ set(arrays))
        raise PayloadError(
            f'Record "{record}" must have exactly the entries {names}; '
            f"missing or unexpected: {odd}."
        )
    tensors = {name: _read_array(f"{record}/{name}", arrays[name]) for name in names}
    if is_checked:
        for name, tensor in tensors.items():
            shape = None if shapes is None else shapes[name]
            check_tensor(f"{record}/{name}", tensor, shape=shape)
    return tensors


def record_bytes(content: RecordDict) -> dict[str, int]:
    """Count the bytes of every record of a message.

    Returns
    -------
    dict of str to int
        Bytes by record name, names and headers included.
    """
    return {name: _count_bytes(name, record) for name, record in content.items()}


def _count_bytes(name: str, record: Any) -> int:
    """Count a record's bytes; Flower's count fails where a text or list in it is empty."""
    try:
        return int(record.count_bytes())
    except (ValueError, IndexError):
        return int(recorddict_to_proto(RecordDict({name: record})).ByteSize())


def write_scores(
    scores: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, float]:
    """Flatten ``{mode: {column: {metric: value}}}`` for a MetricRecord.

    NaN marks a metric without nodes; Flower's records hold it as it is.
    """
    return {
        f"{mode}/{column}/{metric}": float(value)
        for mode, columns in scores.items()
        for column, metrics in columns.items()
        for metric, value in metrics.items()
    }


def read_scores(metrics: MetricRecord) -> dict[str, dict[str, dict[str, float]]]:
    """Undo :func:`write_scores`, ignoring other entries.

    Raises
    ------
    PayloadError
        If a column lacks a metric, counts no whole number of nodes, or holds a score
        outside [0, 1] (NaN stands for no node, and only for that).
    """
    out: dict[str, dict[str, dict[str, float]]] = {}
    for key, value in metrics.items():
        if key.count("/") == 2 and isinstance(value, int | float):
            mode, column, metric = key.split("/")
            out.setdefault(mode, {}).setdefault(column, {})[metric] = float(value)
    for mode, columns in out.items():
        for column, values in columns.items():
            _check_scores(f"{mode}/{column}", values)
    return out


def _check_scores(where: str, values: Mapping[str, float]) -> None:
    """Refuse scores that no evaluation can give."""
    extra = [name for name in EXTRA_SCORES if name in values]
    odd = sorted(set(values) ^ {*SCORES, *extra})
    if odd:
        raise PayloadError(f'"{where}": missing or unexpected scores {odd}.')
    count = values["num_nodes"]
    if not (count >= 0 and count == int(count)):
        raise PayloadError(f'"{where}/num_nodes" must be a count, got {count}.')
    for name in (*SCORES[1:], *extra):
        value = values[name]
        if not (0 <= value <= 1 if count else math.isnan(value)):
            raise PayloadError(
                f'"{where}/{name}" must lie in [0, 1], got {value} for {count:g} nodes.'
            )


def read_loss(metrics: MetricRecord) -> float:
    """Return the training loss of a reply.

    Raises
    ------
    PayloadError
        If it is missing or not finite.
    """
    loss = metrics.get("loss")
    if not isinstance(loss, int | float) or not math.isfinite(loss):
        raise PayloadError(f'"loss" must be a finite number, got {loss!r}.')
    return float(loss)


def check_size(content: RecordDict, max_mb: float) -> None:
    """Refuse a message that is too large, before anything of it is read.

    Parameters
    ----------
    content : RecordDict
        What came.
    max_mb : float
        ``max-message-mb``, in units of 10⁶ bytes.

    Raises
    ------
    PayloadError
        Naming both sizes.
    """
    size = sum(record_bytes(content).values())
    if size > max_mb * MEGABYTE:
        raise PayloadError(
            f"a message of {size / MEGABYTE:.3g} MB came, more than max-message-mb = "
            f"{max_mb:g} allows"
        )
