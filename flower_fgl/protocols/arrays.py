"""Payloads that are one array record, whose types and sizes a layout declares."""

import math
from collections.abc import Callable, Mapping
from itertools import filterfalse, zip_longest
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self, get_origin, get_type_hints

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.base import Payload, check_tensor, read_tensors, write_tensors

__all__ = ["ANY", "ArrayPayload", "Field", "Layout", "check_ascending", "read_arrays"]
__all__ += ["within"]

Field = tuple[torch.dtype, *tuple[int | str | tuple[int, ...], ...]]
"""Type of a tensor, and its sizes: numbers, choices of numbers, names, or ``ANY``."""
Layout = Mapping[str, Field]
Check = Callable[[str, Tensor], None]
ANY = "any"
NO_SIZES: Mapping[str, int] = MappingProxyType({})


def read_arrays(
    content: RecordDict,
    record: str,
    layout: Layout,
    sizes: Mapping[str, int] = NO_SIZES,
) -> dict[str, Tensor]:
    """Unpack an ArrayRecord that has exactly the tensors of a layout.

    A name of a size stands for the number in ``sizes``, or for the size of the first
    tensor that has it.
    """
    tensors = read_tensors(content, record, dict.fromkeys(layout, ()), is_checked=False)
    known = dict(sizes)
    for name, (dtype, *expected) in layout.items():
        tensor, shape = tensors[name], []
        found = tensor.shape[: len(expected)]
        for size, own in zip_longest(expected, found, fillvalue=0):
            if size == ANY:
                shape.append(own)
            elif isinstance(size, str):
                shape.append(known.setdefault(size, own))
            else:
                choice = size if isinstance(size, tuple) else (size,)
                shape.append(own if own in choice else choice[0])
        check_tensor(f"{record}/{name}", tensor, shape=tuple(shape), dtype=dtype)
    return tensors


def check_ascending(name: str, ids: Tensor) -> None:
    """Reject identifiers that are not distinct and sorted."""
    if not bool((ids.diff() > 0).all()):
        raise PayloadError(f'"{name}" must be strictly ascending.')


def within(least: int, most: float = math.inf) -> Check:
    """Return a check that refuses numbers below ``least`` or above ``most``."""

    def check(name: str, tensor: Tensor) -> None:
        if bool(((tensor < least) | (tensor > most)).any()):
            raise PayloadError(f'"{name}" must hold numbers from {least} to {most:g}.')

    return check


class ArrayPayload(Payload):
    """Payload whose fields are the tensors of one array record.

    A field states type and sizes, see :data:`Field`, and functions of name and tensor that
    refuse other values: ``ids: Annotated[Tensor, torch.int64, "N", check_ascending]``. A
    field without them is not sent. The ``spec`` of :meth:`from_record` are the known sizes
    by name, see :func:`read_arrays`.
    """

    layout: ClassVar[Layout]
    checks: ClassVar[Mapping[str, list[Check]]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        hints = get_type_hints(cls, include_extras=True).items()
        parts = {n: h.__metadata__ for n, h in hints if get_origin(h) is Annotated}
        cls.layout = {n: (*filterfalse(callable, p),) for n, p in parts.items()}
        cls.checks = {
            n: [check for check in p if callable(check)] for n, p in parts.items()
        }

    def to_record(self) -> RecordDict:
        """Pack into one record."""
        tensors = {name: getattr(self, name) for name in self.layout}
        return RecordDict({self.records[0]: write_tensors(tensors)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack and check names, types, sizes and values."""
        found = read_arrays(content, cls.records[0], cls.layout, spec or NO_SIZES)
        for name, checks in cls.checks.items():
            for check in checks:
                check(f"{cls.records[0]}/{name}", found[name])
        return cls(**found)
