"""``Payload``, the base class of all message contents, and readers of records.

A payload is a frozen dataclass that converts to named records of a Flower message and back;
the receiver checks it. Arrays are sent as ``.npy`` bytes, Flower's own format, never as
pickles.
"""

import functools
import io
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.lib import format as npy
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.core.flower_internals import (
    NUMPY,
    plain_array,
    plain_metrics,
    plain_record,
    recorddict_to_proto,
)
from flower_fgl.core.metrics import AnyScores
from flower_fgl.core.score_names import DIAGRAM, EXTRA_SCORES

__all__ = ["CONFIG", "DESCRIBE", "INFO", "LARGEST", "MAX_NAME", "METRICS", "RESUME"]
__all__ += ["Empty", "Payload", "ReplyMetrics", "TensorPayload", "check_size"]
__all__ += ["check_tensor", "pack_bits", "read_metrics", "read_payload"]
__all__ += ["read_tensors", "record_bytes", "unpack_bits"]
__all__ += ["write_metrics", "write_scores", "write_tensors"]

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
LARGEST = 1e15
"""Largest accepted real number in a message. Sums, means and squared distances of smaller
ones stay far below the largest float32, 3.4e38, so that no accepted upload makes the
server's state infinite."""
MEGABYTE = 1_000_000
DTYPES = frozenset(
    np.dtype(t).str for t in ("bool", "uint8", "int32", "int64", "float32", "float64")
)
"""Types of arrays that are written and read."""
HEADER = re.compile(
    rb"\{'descr': '([<>|][a-z]\d)', 'fortran_order': False, "
    rb"'shape': \(([0-9, ]{0,100})\), \} *\n"
)
MAX_HEADER, MAX_DIMENSIONS = 256, 8
MAX_METRICS, MAX_NAME = 256, 64
"""Largest number of metrics in a reply, and of characters in a part of their names."""
STATELESS = "stateless"
"""Metric of a data owner's reply after round 1 that trained without an earlier state."""
SCORES = ("num_nodes", "accuracy", "macro_f1", "macro_recall")
"""Metrics sent for every score column."""
PRESENT = "present"
"""Bitmap of the parts of a payload that are sent."""
NUMBERS = "n"
"""Metric that scores of numbers have, and no others."""
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
            Records with other names are ignored.
        spec : object
            Expected content, known to both sides, e.g. the shapes of the weights.

        Raises
        ------
        PayloadError
            If a record or entry is missing or unexpected, or has the wrong shape or
            type or a non-finite number.
        """

    @classmethod
    def read_alike(
        cls, contents: Mapping[int, RecordDict], spec: Any
    ) -> dict[int, Self]:
        """Read many messages of one specification, by partition-id, if that is faster.

        Messages that :meth:`from_record` would refuse are left out, and any others may
        be: :meth:`from_record` reads them.
        """
        return {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload by the stated formula: all that it sends.

        Names, headers, and bitmaps ``present`` of what is sent do not count.
        """
        return sum(map(_plain_bytes, self.to_record().values()))

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


class TensorPayload(Payload):
    """Base of payloads of tensors, float32 by default: one record per field.

    ``records`` names the records in the order of the fields. A field holds tensors by
    name, one tensor, ``None`` for an empty record, or another payload. The ``spec`` of
    :meth:`from_record` has for each record the shapes of its tensors, the shape of its
    only tensor, ``None``, or the ``spec`` of the payload; one mapping stands for all
    records.
    """

    entries: ClassVar[Mapping[str, str]] = {}
    """Name of the tensor in each record of a single tensor, if not the record's name."""
    parts: ClassVar[Mapping[str, type[Payload]]] = {}
    """Payload of each record that has one."""
    types: ClassVar[Mapping[str, torch.dtype]] = {}
    """Type of the tensors in each record of another type than float32."""

    def _values(self) -> dict[str, Any]:
        """Return a payload, or tensors by name, for each record."""
        values = (getattr(self, f.name) for f in fields(cast(Any, self)))
        return {
            record: {self.entries.get(record, record): value}
            if isinstance(value, Tensor)
            else value or {}
            for record, value in zip(self.records, values, strict=True)
        }

    def to_record(self) -> RecordDict:
        """Pack each field into its record."""
        content: dict[str, Any] = {}
        for record, value in self._values().items():
            is_payload = isinstance(value, Payload)
            content |= (
                value.to_record() if is_payload else {record: write_tensors(value)}
            )
        return RecordDict(content)

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any) -> Self:
        """Unpack; names and shapes must be exactly those of ``spec``."""
        shapes = spec if isinstance(spec, tuple) else (spec,) * len(cls.records)
        pairs = zip(cls.records, shapes, strict=True)
        return cls(*(cls._read(content, record, one) for record, one in pairs))

    @classmethod
    def _read(cls, content: RecordDict, record: str, shapes: Any) -> Any:
        """Read the field of a record."""
        if record in cls.parts:
            return cls.parts[record].from_record(content, shapes)
        dtype = cls.types.get(record, torch.float32)
        if isinstance(shapes, Mapping):
            return read_tensors(content, record, shapes, dtype=dtype)
        entry = cls.entries.get(record, record)
        table = {} if shapes is None else {entry: shapes}
        return read_tensors(content, record, table, dtype=dtype).get(entry)


def write_tensors(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Pack tensors, on any device, into an ArrayRecord; bfloat16 is not supported.

    Notes
    -----
    1. ``Array(ndarray)`` calls ``np.save`` on a BytesIO, which copies in pieces. Joining
       header and bytes gives the same string several times faster.
    """
    arrays = {}
    for name, tensor in tensors.items():
        array = tensor.detach().cpu().contiguous().numpy()
        header = npy_header(array.dtype.str, array.shape)
        data = b"".join((header, array.reshape(-1).view(np.uint8).data))
        arrays[name] = plain_array(dtype_name(array.dtype), array.shape, data)
    return plain_record(arrays)


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a type, ``str(dtype)``, which takes longer."""
    return str(dtype)


Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)


def find_record(content: RecordDict, name: str, kind: type[Record]) -> Record | None:
    """Return a record of a message, ``None`` if it is missing or of another kind.

    Flower's ``content.metric_records``, and those of other kinds, copy the table of records
    at every access, into an object that refers to itself and to the message: its memory is
    then freed by Python's collector of cycles only.
    """
    record = content.get(name)
    return record if isinstance(record, kind) else None


def config_record(content: RecordDict, name: str) -> ConfigRecord:
    """Return a record of settings; a message without it raises a PayloadError."""
    record = find_record(content, name, ConfigRecord)
    if record is None:
        raise PayloadError(f'The message has no config record "{name}".')
    return record


def round_settings(content: RecordDict) -> ConfigRecord:
    """Return the record ``config`` of a message to a client."""
    return config_record(content, CONFIG)


@functools.lru_cache(maxsize=1024)
def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the .npy header of a C-ordered array."""
    if dtype not in DTYPES or len(shape) > MAX_DIMENSIONS:
        raise PayloadError(
            f"Arrays in messages have the types {', '.join(sorted(DTYPES))} and at most "
            f"{MAX_DIMENSIONS} dimensions, got {dtype} of shape {shape}."
        )
    stream = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(stream, header)
    return stream.getvalue()


@functools.lru_cache(maxsize=1024)
def _parse_npy_header(header: bytes) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read type and shape; a header that ``npy_header`` would not write is refused."""
    found = HEADER.fullmatch(header[10:])
    if found is not None:
        shape = tuple(int(part) for part in found[2].split(b",") if part.strip())
        dtype = found[1].decode()
        if npy_header(dtype, shape) == header:
            return shape, np.dtype(dtype)
    raise PayloadError("its header is not the one that this library writes")


def _read_array(name: str, array: Array) -> Tensor:
    """Read ``.npy`` bytes without pickle into a tensor that owns its memory."""
    if array.stype != NUMPY:
        raise PayloadError(f'"{name}" is stored as {array.stype}, expected {NUMPY}.')
    try:
        # layout: magic string and version (8 bytes), header length (2), header, data
        start = 10 + int.from_bytes(array.data[8:10], "little")
        if start > MAX_HEADER:
            raise PayloadError(f"its header has {start} bytes, at most {MAX_HEADER}")
        shape, dtype = _parse_npy_header(array.data[:start])
        size, expected = len(array.data) - start, dtype.itemsize * math.prod(shape)
        if size != expected:
            raise PayloadError(f"{size} bytes for {dtype} of shape {shape}")
        if array.dtype != dtype_name(dtype) or tuple(array.shape) != shape:
            raise PayloadError(
                f"declared as {array.dtype} of shape {array.shape}, holds {dtype} of "
                f"shape {shape}"
            )
        flat = np.frombuffer(array.data, dtype=dtype, offset=start)
        return torch.from_numpy(flat.reshape(shape).copy())
    except (ValueError, TypeError, OverflowError) as error:
        raise PayloadError(f'"{name}" holds no plain array: {error}.') from error


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``tensor`` if it has the expected shape and type, else raise a PayloadError.

    Floating-point numbers must also be finite, and at most ``LARGEST`` in absolute value.
    """
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise PayloadError(
            f'"{name}" must have shape {tuple(shape)}, got {tuple(tensor.shape)}.'
        )
    if tensor.dtype != dtype:
        raise PayloadError(f'"{name}" must be {dtype}, got {tensor.dtype}.')
    if tensor.is_floating_point() and not is_in_range(tensor):
        bad = int((~tensor.isfinite()).sum())
        raise PayloadError(
            f'"{name}" has {bad} non-finite numbers.'
            if bad
            else f'"{name}" has a number of size {float(tensor.abs().max()):.2g}, expected '
            f"at most {LARGEST:.0e}. Training diverged: use a smaller learning rate."
        )
    return tensor


def is_in_range(tensor: Tensor) -> bool:
    """Return whether all numbers are finite and at most ``LARGEST`` in size."""
    if not tensor.numel():
        return True
    low, high = (float(end) for end in tensor.aminmax())  # NaN if any number is
    return low >= -LARGEST and high <= LARGEST


def read_tensors(
    content: RecordDict,
    record: str,
    shapes: Shapes | None = None,
    *,
    is_checked: bool = True,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Unpack an ArrayRecord of tensors, in the order of ``shapes``, by default any.

    With ``is_checked`` the numbers must be of the ``dtype`` and finite; without it, it is
    for a client's own state and for payloads with their own checks. A PayloadError says
    that the record is missing, or an entry is missing, unexpected or malformed.
    """
    arrays = find_record(content, record, ArrayRecord)
    if arrays is None:
        raise PayloadError(
            f'The message has no array record "{record}", only {sorted(content)}.'
        )
    names = list(arrays) if shapes is None else list(shapes)
    if arrays.keys() != set(names):
        odd = sorted(set(names) ^ set(arrays))
        raise PayloadError(
            f'Record "{record}" must have exactly the entries {names}; '
            f"missing or unexpected: {odd}."
        )
    tensors = {name: _read_array(f"{record}/{name}", arrays[name]) for name in names}
    if is_checked:
        for name, tensor in tensors.items():
            shape = None if shapes is None else shapes[name]
            check_tensor(f"{record}/{name}", tensor, shape=shape, dtype=dtype)
    return tensors


def _plain_bytes(record: Any) -> int:
    """Count the bytes of arrays, numbers and texts, without names and headers."""
    if isinstance(record, ArrayRecord):
        return sum(
            np.dtype(array.dtype).itemsize * math.prod(array.shape)
            for name, array in record.items()
            if name != PRESENT
        )
    parts = (v if isinstance(v, list) else [v] for v in record.values())
    texts = [x.encode() if isinstance(x, str) else x for part in parts for x in part]
    return sum(len(x) if isinstance(x, bytes) else 8 for x in texts)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a mask of P entries into ⌈P/8⌉ bytes, uint8, padded with zeros."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))


def unpack_bits(name: str, bits: Tensor, size: int) -> Tensor:
    """Undo :func:`pack_bits` for a mask of ``size`` entries; no other bit may be set."""
    check_tensor(name, bits, shape=(-(-size // 8),), dtype=torch.uint8)
    flat = np.unpackbits(bits.numpy())
    if flat[size:].any():
        raise PayloadError(f'"{name}" marks entries beyond the {size} agreed on.')
    return torch.from_numpy(flat[:size].astype(bool))


def record_bytes(content: RecordDict) -> dict[str, int]:
    """Count the bytes of every record of a message, including names and headers."""
    return {name: _count_bytes(name, record) for name, record in content.items()}


def _count_bytes(name: str, record: Any) -> int:
    """Count a record's bytes; Flower's own count fails for empty texts or lists."""
    try:
        return int(record.count_bytes())
    except (ValueError, IndexError, TypeError):
        return int(recorddict_to_proto(RecordDict({name: record})).ByteSize())


def write_scores(
    scores: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, Any]:
    """Flatten ``{mode: {column: {metric: value}}}`` for a MetricRecord.

    NaN marks a metric without nodes; Flower's records can hold NaN. Scores of numbers have
    lists, one value for each target.
    """
    return {
        f"{mode}/{column}/{metric}": value if type(value) is list else float(value)
        for mode, columns in scores.items()
        for column, metrics in columns.items()
        for metric, value in metrics.items()
    }


def write_metrics(
    scores: Mapping[str, Mapping[str, AnyScores]],
    seconds: Mapping[str, float],
    loss: float | None = None,
    terms: Mapping[str, float] | None = None,
) -> MetricRecord:
    """Pack the metrics of a reply, which :func:`read_metrics` reads.

    Of ``terms``, those of the loss and other numbers, the ones that are not finite are
    left out.
    """
    flat = write_scores(
        {
            mode: {column: values.as_record() for column, values in columns.items()}
            for mode, columns in scores.items()
        }
    )
    metrics: dict[str, Any] = {**flat, "worker": os.getpid()}
    metrics |= {f"seconds/{name}": value for name, value in seconds.items()}
    # the server refuses a reply with a number that is not finite
    finite = {n: value for n, value in (terms or {}).items() if math.isfinite(value)}
    metrics |= {f"terms/{name}": value for name, value in finite.items()}
    if loss is not None:
        metrics["loss"] = float(loss)
    return plain_metrics(metrics)


@dataclass(frozen=True)
class ReplyMetrics:
    """The checked metrics of a reply, and the process that handled the message.

    The ``loss`` is NaN if the client's floors withhold it.
    """

    scores: dict[str, dict[str, dict[str, Any]]]
    seconds: dict[str, float]
    terms: dict[str, float]
    worker: int
    loss: float


def read_metrics(metrics: MetricRecord) -> ReplyMetrics:
    """Read the metrics of a reply.

    Raises a PayloadError if there are too many metrics, or one has an unknown or long name,
    is no number, or is out of range. Only the scores of a set without nodes may be NaN.
    Scores of numbers are checked by ``read_number_scores``.
    """
    if len(metrics) > MAX_METRICS:
        raise PayloadError(f"{len(metrics)} metrics, expected at most {MAX_METRICS}")
    worker = metrics.get("worker", 0)
    if not isinstance(worker, int) or worker < 0:
        raise PayloadError(f'"worker" must be the number of a process, got {worker!r}.')
    loss = _read_number("loss", metrics["loss"]) if "loss" in metrics else math.nan
    found = ReplyMetrics({}, {}, {}, worker, loss)
    places = _metric_places(tuple(metrics.keys()))
    for parts, (key, value) in zip(places, metrics.items(), strict=True):
        if len(parts) == 3:
            mode, column, metric = parts
            columns = found.scores.setdefault(mode, {})
            entry = value if isinstance(value, list) else float(value)
            columns.setdefault(column, {})[metric] = entry
        elif isinstance(value, list):
            raise PayloadError(f'"{key}" must be a number, got a list')
        elif len(parts) == 2:
            group = found.seconds if parts[0] == "seconds" else found.terms
            group[parts[1]] = _read_number(key, value)
    if min(found.seconds.values(), default=0.0) < 0:
        raise PayloadError('"seconds" must not be negative')
    for mode, columns in found.scores.items():
        for column, values in columns.items():
            if NUMBERS not in values:  # else the reader knows how many there are
                _check_scores(f"{mode}/{column}", values)
    return found


@functools.lru_cache(maxsize=64)
def _metric_places(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Split the names of metrics, which most replies share, and refuse odd ones."""
    places = []
    for key in names:
        parts = tuple(key.split("/"))
        if not all(0 < len(p) <= MAX_NAME and p.isprintable() for p in parts):
            raise PayloadError(f'"{key}" is no name of a metric')
        is_part = len(parts) == 2 and parts[0] in ("seconds", "terms")
        if not is_part and len(parts) != 3 and key not in ("worker", "loss", STATELESS):
            raise PayloadError(f'unexpected metric "{key}"')
        places.append(parts)
    return tuple(places)


def _read_number(key: str, value: object) -> float:
    """Read a number that is finite and of a plausible size."""
    if isinstance(value, int | float) and LARGEST < abs(value) < math.inf:
        raise PayloadError(
            f'"{key}" is {value!r}: numbers may be at most {LARGEST:.0e} in size. Scale '
            "the features (feature-norm), or use a smaller learning rate."
        )
    if not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise PayloadError(f'"{key}" must be a finite number, got {value!r}.')
    return float(value)


def _check_scores(where: str, values: Mapping[str, Any]) -> None:
    """Reject scores of classes that no evaluation can produce."""
    if "reliability" in values:
        bins = values["reliability"]
        is_good = isinstance(bins, list) and len(bins) == DIAGRAM
        if not is_good or not all(0 <= value <= LARGEST for value in bins):
            raise PayloadError(f'"{where}/reliability" must be {DIAGRAM} sums.')
        values = {name: v for name, v in values.items() if name != "reliability"}
    if list in map(type, values.values()):
        raise PayloadError(f'"{where}": each score must be a number, got a list.')
    # those that a task has and that are defined
    extra = tuple(name for name in EXTRA_SCORES if name in values)
    if odd := values.keys() ^ {*SCORES, *extra}:
        raise PayloadError(f'"{where}": missing or unexpected scores {sorted(odd)}.')
    count = values["num_nodes"]
    if not (0 <= count <= LARGEST and count == int(count)):
        raise PayloadError(f'"{where}/num_nodes" must be a count, got {count}.')
    for name in (*SCORES[1:], *extra):
        value = values[name]
        if not (0 <= value <= 1 if count else math.isnan(value)):
            raise PayloadError(
                f'"{where}/{name}" must lie in [0, 1], got {value} for {count:g} nodes.'
            )


Kind = TypeVar("Kind", bound="Payload")


def read_payload(
    kind: type[Kind],
    content: RecordDict,
    spec: Any = None,
    *,
    beside: Collection[str] = (),
) -> Kind:
    """Read a reply's payload by ``spec``, see :meth:`Payload.from_record`.

    A reply with other records than its own and those ``beside`` it is refused.
    """
    odd = sorted(set(content) - {*kind.records, *beside})
    if odd:
        raise PayloadError(f"The message has unexpected records {odd}.")
    return kind.from_record(content, spec)


def check_size(content: RecordDict, max_mb: float) -> None:
    """Refuse a message above ``max-message-mb`` (10⁶ bytes) before it is read."""
    size = sum(record_bytes(content).values())
    if size > max_mb * MEGABYTE:
        raise PayloadError(
            f"a message of {size / MEGABYTE:.3g} MB arrived, more than max-message-mb = "
            f"{max_mb:g}; raise that setting if the size is correct"
        )
