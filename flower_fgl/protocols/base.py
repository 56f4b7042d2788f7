"""``Payload``, the base class of all message contents, and readers of records.

A payload is a frozen dataclass that converts to named records of a Flower message and back;
the receiver checks it. Arrays are sent as ``.npy`` bytes, Flower's own format, never as
pickles.
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
"""ConfigRecord in which the server describes the round to a client."""
METRICS = "metrics"
"""MetricRecord of a reply: loss, scores and seconds."""
INFO = "info"
"""ConfigRecord in which a client describes itself."""
DESCRIBE = "describe"
"""Action of the query message before round 1."""
RESUME = "resume"
"""Action of the query message with which a run resumes from a checkpoint."""
MEGABYTE = 1_000_000
NUMPY = "numpy.ndarray"
SCORES = ("num_nodes", "accuracy", "macro_f1", "macro_recall")
"""Metrics sent for every score column."""
EXTRA_SCORES = ("auroc",)
"""Metrics sent for a score column only if requested and defined."""

Shapes = Mapping[str, tuple[int, ...]]


class Payload(ABC):
    """Content of a method's upload or download.

    Subclasses are frozen dataclasses whose docstrings state the number of bytes.
    """

    records: ClassVar[tuple[str, ...]]
    """Names of the records that the payload writes."""

    @abstractmethod
    def to_record(self) -> RecordDict:
        """Pack into named records of a message."""

    @classmethod
    @abstractmethod
    def from_record(cls, content: RecordDict, spec: Any) -> Self:
        """Unpack from a message and check.

        Parameters
        ----------
        content : RecordDict
            Content of the message; records with other names are ignored.
        spec : object
            Expected content, known to both sides, e.g. the shapes of the weights.

        Raises
        ------
        PayloadError
            If a record or entry is missing or unexpected, or has the wrong shape or
            type or a non-finite number.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the numbers in the payload, by the stated formula."""

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Remove content derived from too few nodes.

        Payloads with content per class override this method. By default it is applied
        to the payloads inside this one.

        Parameters
        ----------
        shared : Tensor of shape (C,), bool
            Classes with at least ``min-class-count`` training nodes on the client.
        min_count : int
            ``min-class-count``; entries that summarise fewer nodes are removed as well.
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
        """Clamp noisy numbers to their valid range.

        This uses only the noisy numbers, so it reveals no more than they do.
        """
        return self


class Empty(Payload):
    """Empty payload: 0 bytes."""

    records = ()

    def to_record(self) -> RecordDict:
        """Return no records."""
        return RecordDict()

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Return an empty payload."""
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
        Tensors on any device; bfloat16 is not supported.

    Notes
    -----
    1. ``Array(ndarray)`` calls ``np.save`` on a BytesIO, which copies in pieces. Joining
       header and bytes gives the same string several times faster.
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
    """Parse a .npy header; cached, since parsing takes 50 µs and few headers differ."""
    stream = io.BytesIO(header)
    if npy.read_magic(stream) != (1, 0):
        raise ValueError("expected version 1.0 of the .npy format")
    shape, is_fortran, dtype = npy.read_array_header_1_0(stream)
    if dtype.hasobject or is_fortran:
        raise ValueError(
            "expected plain numbers in C order, got "
            f"dtype {dtype}, Fortran order {is_fortran}"
        )
    return shape, dtype


def _read_array(name: str, array: Array) -> Tensor:
    """Read ``.npy`` bytes without pickle into a tensor that owns its memory."""
    if array.stype != NUMPY:
        raise PayloadError(f'"{name}" is stored as {array.stype}, expected {NUMPY}.')
    try:
        # layout: magic string and version (8 bytes), header length (2), header, data
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
    """Return ``tensor`` if it has the expected shape and type.

    Parameters
    ----------
    name : str
        Name for error messages.
    tensor : Tensor
        Received tensor.
    shape : tuple of int, optional
        Expected shape.
    dtype : torch.dtype
        Expected type; floating-point numbers must also be finite.

    Raises
    ------
    PayloadError
        If shape or type differ, or a number is not finite.
    """
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise PayloadError(
            f'"{name}" must have shape {tuple(shape)}, got {tuple(tensor.shape)}.'
        )
    if tensor.dtype != dtype:
        raise PayloadError(f'"{name}" must be {dtype}, got {tensor.dtype}.')
    # cheap test first: a non-finite sum needs a non-finite entry, or an overflow
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
        Expected entries with their shapes; by default any.
    is_checked : bool
        Whether the numbers must be float32 and finite. False for a client's own state
        and for payloads with their own checks.

    Returns
    -------
    dict of str to Tensor
        Tensors in the order of ``shapes``.

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
        Bytes by record name, including names and headers.
    """
    return {name: _count_bytes(name, record) for name, record in content.items()}


def _count_bytes(name: str, record: Any) -> int:
    """Count a record's bytes; Flower's own count fails for empty texts or lists."""
    try:
        return int(record.count_bytes())
    except (ValueError, IndexError):
        return int(recorddict_to_proto(RecordDict({name: record})).ByteSize())


def write_scores(
    scores: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> dict[str, float]:
    """Flatten ``{mode: {column: {metric: value}}}`` for a MetricRecord.

    NaN marks a metric without nodes; Flower's records can hold NaN.
    """
    return {
        f"{mode}/{column}/{metric}": float(value)
        for mode, columns in scores.items()
        for column, metrics in columns.items()
        for metric, value in metrics.items()
    }


def read_scores(metrics: MetricRecord) -> dict[str, dict[str, dict[str, float]]]:
    """Invert :func:`write_scores`; other entries are ignored.

    Raises
    ------
    PayloadError
        If a metric is missing or unexpected, the number of nodes is no count, or a
        score lies outside [0, 1]. A score must be NaN exactly if there is no node.
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
    """Reject scores that no evaluation can produce."""
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
    """Reject a message that is too large, before its records are read.

    Parameters
    ----------
    content : RecordDict
        Received message.
    max_mb : float
        ``max-message-mb``, in megabytes (10⁶ bytes).

    Raises
    ------
    PayloadError
        If the message exceeds ``max_mb``.
    """
    size = sum(record_bytes(content).values())
    if size > max_mb * MEGABYTE:
        raise PayloadError(
            f"a message of {size / MEGABYTE:.3g} MB arrived, more than max-message-mb = "
            f"{max_mb:g}; raise that setting if the size is correct"
        )
