"""Seeded generator of malformed graph files, and the readers that must refuse them.

A mutation changes a good graph file at one level: the zip archive, the header of one
``.npy`` member, the arrays, the tables of a CSV folder, or the path. Mutant ``i`` of a seed
depends only on the seed and on ``i``.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import struct
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console

from flower_fgl.cli import arguments, graph_commands
from flower_fgl.client_apps.runtime.data import file_stamps
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile, load_graph_file
from flower_fgl.datasets.graph_files.validate import validate_node_dataset
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.methods import parse_config

__all__ = ["BENIGN", "MUST_REFUSE", "MUTATIONS", "Mutant", "Outcome", "mutants", "read"]

Arrays = dict[str, Any]

BENIGN = {
    "zip: deflated": "numpy.savez_compressed writes it",
    "zip: comment": "an archive may have a comment",
    "zip: odd date": "dates are not read",
    "npy: version 2 or 3": "NumPy writes them for long or non-latin-1 headers",
    "npy: big-endian": "the same numbers",
    "npy: Fortran order": "the same numbers",
    "npy: spaces": "NumPy pads headers with spaces",
    "array: float16": "exact in float32",
    "array: float64": "rounded to float32, as documented",
    "array: small integers": "the same numbers",
    "csv: byte order mark": "spreadsheets write it",
    "csv: CRLF": "spreadsheets write it",
    "csv: blank rows": "ignored, as documented",
    "csv: spaces": "ignored around text, as documented",
    "csv: all quoted": "the same cells",
    "csv: self-loop and duplicate edge": "dropped, as documented",
    "path: control characters": "a file may have any name; the owner's name is separate",
    "path: not UTF-8": "a file may have any name; the owner's name is separate",
}
"""Mutations that must be accepted with the original graph, each with the reason."""


@dataclass(frozen=True)
class Mutant:
    """One malformed graph file.

    Parameters
    ----------
    number : int
        Number of the mutant.
    mutation : str
        ``level: name``.
    path : Path
        File or folder, or a path at which there is none.
    """

    number: int
    mutation: str
    path: Path

    @property
    def level(self) -> str:
        """``zip``, ``npy``, ``array``, ``csv`` or ``path``."""
        return self.mutation.split(":")[0]


# good files


def good_arrays(rng: random.Random, *, is_sparse: bool | None = None) -> Arrays:
    """Return the arrays of a good file: dense or sparse, with or without extras."""
    nodes, width = rng.randint(4, 12), rng.randint(2, 6)
    numbers = np.random.default_rng(rng.getrandbits(32))
    x = numbers.integers(-4, 5, (nodes, width)).astype(np.float32)
    arrays: Arrays = {
        "x": x,
        "edge_index": numbers.integers(0, nodes, (2, 2 * nodes)),
        "y": np.arange(nodes) % 3,
        "class_names": np.array(["ant", "bee", "cow"]),
        "node_ids": np.arange(nodes) * 3 + 1,
    }
    group = np.arange(nodes) % 3
    for i, name in enumerate(("train", "val", "test")):
        arrays[f"{name}_mask"] = group == i
    if rng.random() < 0.5 if is_sparse is None else is_sparse:
        arrays |= as_csr(arrays.pop("x"))
    if rng.random() < 0.5:
        arrays["feature_scale"] = np.array("columns")
        arrays["feature_mean"] = numbers.random(width)
        arrays["feature_std"] = 1 + numbers.random(width)
    if rng.random() < 0.3:
        arrays |= {
            "evaluation_0_x": x,
            "evaluation_0_edge_index": np.zeros((2, 0), np.int64),
            "evaluation_0_y": arrays["y"],
            "evaluation_0_unseen_mask": group == 1,
        }
    return arrays


def as_csr(x: np.ndarray) -> Arrays:
    """Return the arrays of sparse features."""
    row, column = x.nonzero()
    return {
        "x_indptr": np.concatenate(
            [[0], np.cumsum(np.bincount(row, minlength=len(x)))]
        ),
        "x_indices": column,
        "x_data": x[row, column],
        "x_shape": np.array(x.shape),
    }


def npy(array: np.ndarray, header: bytes | None = None, version: int = 1) -> bytes:
    """Return an ``.npy`` file, by default as NumPy writes it."""
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    if header is None and version == 1:
        return file.getvalue()
    data = np.asfortranarray(array).T.tobytes() if version < 0 else array.tobytes()
    given = (npy_header(array) if header is None else header) + b"\n"
    size = "<H" if abs(version) == 1 else "<I"
    return (
        b"\x93NUMPY" + bytes([abs(version), 0]) + struct.pack(size, len(given)) + given
    ) + data


def npy_header(array: np.ndarray, **changes: str) -> bytes:
    """Return the text of a header, with changed entries."""
    entries = {
        "descr": repr(np.lib.format.dtype_to_descr(array.dtype)),
        "fortran_order": "False",
        "shape": repr(array.shape),
    } | changes
    return ("{" + ", ".join(f"'{k}': {v}" for k, v in entries.items()) + ", }").encode(
        "latin-1"
    )


def dated(name: str, method: int = zipfile.ZIP_STORED) -> zipfile.ZipInfo:
    """Return a member's entry that does not depend on the time."""
    entry = zipfile.ZipInfo(name)  # of 1980
    entry.compress_type = method
    return entry


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as out:
        for name, data in members.items():
            out.writestr(dated(name), data, method)
    return file.getvalue()


def npz(arrays: Arrays, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return an ``.npz`` file."""
    return archive({f"{k}.npy": npy(np.asarray(v)) for k, v in arrays.items()}, method)


# zip level

CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"


def places(data: bytes, mark: bytes) -> list[int]:
    """Return all offsets of a signature."""
    found, at = [], data.find(mark)
    while at >= 0:
        found.append(at)
        at = data.find(mark, at + 1)
    return found


def patch(
    rng: random.Random,
    data: bytes,
    offset: int,
    size: str,
    value: int,
    *,
    both: int = -1,
) -> bytes:
    """Change one field of a random entry of the central directory, or of its header too."""
    out = bytearray(data)
    i = rng.randrange(len(places(data, CENTRAL)))
    struct.pack_into(size, out, places(data, CENTRAL)[i] + offset, value)
    if both >= 0:
        struct.pack_into(size, out, places(data, LOCAL)[i] + both, value)
    return bytes(out)


def zip_truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def zip_flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def zip_duplicate(rng: random.Random, data: bytes) -> bytes:
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as out:
        name = rng.choice(out.namelist())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the duplicate is the point
            out.writestr(dated(name), npy(np.zeros(2)))
    return file.getvalue()


ODD_MEMBERS = [
    "x",
    "y.txt",
    "../x.npy",
    "/x.npy",
    "x.npy.npy",
    "a" * 60_000 + ".npy",
    ".npy",
    "evaluation_" + "9" * 5000 + "_x.npy",
    "evaluation_²_x.npy",
    "\u202ex.npy",
    "evaluation_00_x.npy",
    "x\n\x1b[31m.npy",
    "x.npy/",
    "evaluation_٣_x.npy",
]


def zip_renamed(rng: random.Random, data: bytes) -> bytes:
    name = rng.choice(ODD_MEMBERS)
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as out:
        out.writestr(dated(name), npy(np.zeros((3, 2))))
    return file.getvalue()


def zip_bad_utf8_name(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(patch(rng, data, 8, "<H", 0x800, both=6))
    for mark, offset in ((CENTRAL, 46), (LOCAL, 30)):
        for at in places(bytes(out), mark):
            out[at + offset] = 0xFF
    return bytes(out)


@cache
def bomb(kind: str) -> bytes:
    """Return an archive that expands to far more than its size."""
    file = io.BytesIO()
    count = 300 << 20
    header = npy(np.zeros(0, np.float32), npy_header(
        np.zeros(0, np.float32), shape=f"({count // 40}, 10)"
    ))  # fmt: skip
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        with out.open(dated("x.npy", zipfile.ZIP_DEFLATED), "w") as member:
            member.write(header)
            block = bytes(1 << 20)
            for _ in range(count >> 20):
                member.write(block)
        for key, value in good_arrays(random.Random(0)).items():
            if not key.startswith("x"):
                out.writestr(dated(f"{key}.npy"), npy(np.asarray(value)))
    data = file.getvalue()
    if kind == "claim":  # claims the size, but holds nothing of it
        return data[:100] + data[-2000:]
    return data


def zip64_claim(rng: random.Random, data: bytes) -> bytes:
    """Claim 2⁶⁰ bytes for a member, through the zip64 extra field."""
    at = places(data, CENTRAL)[-1]
    head = bytearray(data[at : at + 46])
    length = struct.unpack_from("<H", head, 28)[0]
    name = data[at + 46 : at + 46 + length]
    struct.pack_into("<II", head, 20, 0xFFFFFFFF, 0xFFFFFFFF)
    huge = rng.choice([2**60, 2**63 - 1, 2**64 - 1])
    extra = struct.pack("<HHQQ", 1, 16, huge, huge)
    struct.pack_into("<H", head, 30, len(extra))
    rest = data[at + 46 + length :]
    out = bytearray(data[:at] + bytes(head) + name + extra + rest)
    end = places(bytes(out), END)[-1]
    size = struct.unpack_from("<I", out, end + 12)[0]
    struct.pack_into("<I", out, end + 12, size + len(extra))
    return bytes(out)


def end_record(rng: random.Random, data: bytes) -> bytes:
    """Change a field of the end record."""
    out = bytearray(data)
    size, offset = rng.choice([("<H", 8), ("<H", 10), ("<I", 12), ("<I", 16)])
    top = 2 ** (8 * struct.calcsize(size)) - 1
    struct.pack_into(size, out, places(data, END)[-1] + offset, rng.choice(
        [0, 1, top, rng.randint(0, top)]
    ))  # fmt: skip
    return bytes(out)


ZIP: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "truncated": zip_truncated,
    "flipped bits": zip_flipped,
    "empty": lambda _, __: b"",
    "random bytes": lambda rng, _: rng.randbytes(rng.randint(1, 3000)),
    "random bytes with magic": lambda rng, _: LOCAL + rng.randbytes(2000),
    "encrypted": lambda rng, d: patch(rng, d, 8, "<H", 1, both=6),
    "strongly encrypted": lambda rng, d: patch(rng, d, 8, "<H", 0x41, both=6),
    "patched data": lambda rng, d: patch(rng, d, 8, "<H", 0x20, both=6),
    "unknown method": lambda rng, d: patch(
        rng, d, 10, "<H", rng.choice([1, 6, 9, 12, 14, 93, 95, 99, 65535]), both=8
    ),
    "wrong method": lambda rng, d: patch(rng, d, 10, "<H", 8, both=8),
    "newer version": lambda rng, d: patch(
        rng, d, 6, "<H", rng.choice([64, 99, 255]), both=4
    ),
    "size": lambda rng, d: patch(
        rng, d, 24, "<I", rng.choice([0, 1, 90, 2**20, 2**31, 2**32 - 2])
    ),
    "compressed size": lambda rng, d: patch(
        rng, d, 20, "<I", rng.choice([0, 1, 90, 2**20, 2**31, 2**32 - 2])
    ),
    "both sizes": lambda rng, d: patch(
        rng, patch(rng, d, 20, "<I", 2**32 - 2), 24, "<I", 2**32 - 2
    ),
    "checksum": lambda rng, d: patch(rng, d, 16, "<I", rng.getrandbits(32)),
    "offset": lambda rng, d: patch(
        rng, d, 42, "<I", rng.choice([1, 50, len(d), 2**31, 2**32 - 2])
    ),
    "name length": lambda rng, d: patch(
        rng, d, 28, "<H", rng.choice([0, 1, 500, 65535])
    ),
    "extra length": lambda rng, d: patch(
        rng, d, 30, "<H", rng.choice([1, 3, 500, 65535])
    ),
    "end record": end_record,
    "zip64 claim": zip64_claim,
    "duplicate member": zip_duplicate,
    "other member": zip_renamed,
    "name not UTF-8": zip_bad_utf8_name,
    "bomb": lambda rng, _: bomb(rng.choice(["real", "claim"])),
    "junk before": lambda rng, d: rng.randbytes(rng.randint(1, 500)) + d,
    "junk after": lambda rng, d: d + rng.randbytes(rng.randint(1, 500)),
    "odd date": lambda rng, d: patch(rng, d, 14, "<H", 0, both=12),
    "comment": lambda _, d: d[:-2] + b"\x05\x00hello",
}
RECOMPRESSED = {
    "deflated": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}

# npy level

HEADERS: dict[str, Callable[[np.ndarray], bytes]] = {
    "empty header": lambda a: b"",
    "cut header": lambda a: npy_header(a)[:-9],
    "open quote": lambda a: npy_header(a, descr="'<f4"),
    "open bracket": lambda a: npy_header(a, shape="((4, 2)"),
    "long header": lambda a: npy_header(a) + b" " * 9000,
    "very long header": lambda a: npy_header(a, descr="'" + "<" * 50_000 + "'"),
    "nested header": lambda a: npy_header(a, shape="(" * 5000 + ")" * 5000),
    "nested list": lambda a: npy_header(a, shape="[" * 150 + "]" * 150),
    "minus signs": lambda a: npy_header(a, shape="-" * 9000 + "1"),
    "shape of 10²³": lambda a: npy_header(a, shape=f"({10**23},)"),
    "shape of 5,000 digits": lambda a: npy_header(a, shape="(" + "9" * 5000 + ",)"),
    "shape of 2⁶²": lambda a: npy_header(a, shape=f"({2**62}, 4)"),
    "shape of 2⁴⁰ and 0": lambda a: npy_header(a, shape=f"({2**40}, 0)"),
    "shape of 0 and 2⁴⁰": lambda a: npy_header(a, shape=f"(0, {2**40})"),
    "shape of 100 axes": lambda a: npy_header(a, shape="(" + "1, " * 100 + ")"),
    "negative shape": lambda a: npy_header(a, shape="(-4, -2)"),
    "shape of booleans": lambda a: npy_header(a, shape="(True, True)"),
    "shape of floats": lambda a: npy_header(a, shape="(4.0, 2)"),
    "shape a number": lambda a: npy_header(a, shape="4"),
    "shape larger": lambda a: npy_header(a, shape="(1000, 1000)"),
    "shape smaller": lambda a: npy_header(a, shape="(1,)"),
    "no shape": lambda a: b"{'descr': '<f4', 'fortran_order': False}",
    "objects": lambda a: npy_header(a, descr="'|O'"),
    "text of width 0": lambda a: npy_header(a, descr="'<U0'", shape=f"({2**40},)"),
    "text of width 10¹¹": lambda a: npy_header(a, descr="'<U99999999999'"),
    "structured": lambda a: npy_header(a, descr="[('a', '<f4')]"),
    "subarray": lambda a: npy_header(a, descr="('<f4', (2,))"),
    "deep subarray": lambda a: npy_header(a, descr="'1000000000f4'"),
    "two types": lambda a: npy_header(a, descr="'<f4,<f4'"),
    "unknown type": lambda a: npy_header(a, descr="'<q9'"),
    "void": lambda a: npy_header(a, descr="'|V1'"),
    "type a number": lambda a: npy_header(a, descr="4"),
    "Fortran a number": lambda a: npy_header(a, fortran_order="1"),
    "extra key": lambda a: npy_header(a, other="1"),
    "call": lambda a: npy_header(a, shape="__import__('os').getcwd()"),
    "comprehension": lambda a: npy_header(a, shape="tuple(i for i in (1,))"),
    "not latin-1": lambda a: npy_header(a, descr="'\xff\xfe'"),
    "NUL bytes": lambda a: npy_header(a) + bytes(20),
    "spaces": lambda a: npy_header(a) + b" " * 20,
}


def npy_mutation(rng: random.Random, name: str) -> bytes:
    """Return an ``.npz`` file with one mutated member."""
    is_layout = name in ("Fortran order", "big-endian")
    arrays = good_arrays(rng, is_sparse=False if is_layout else None)
    key = "x" if is_layout else rng.choice(sorted(arrays))
    array = np.asarray(arrays[key])
    members = {f"{k}.npy": npy(np.asarray(v)) for k, v in arrays.items()}
    good = members[f"{key}.npy"]
    if name in HEADERS:
        data = npy(array, HEADERS[name](array))
    elif name == "version 2 or 3":
        data = npy(array, version=rng.choice([2, 3]))
    elif name == "unknown version":
        data = (
            good[:6]
            + bytes([rng.choice([0, 4, 9, 255]), rng.choice([0, 7])])
            + good[8:]
        )
    elif name == "magic":
        data = rng.randbytes(6) + good[6:]
    elif name == "header length":
        data = good[:8] + struct.pack("<H", rng.choice([0, 5, 60_000])) + good[10:]
    elif name == "header length 2³¹":
        data = good[:6] + b"\x02\x00" + struct.pack("<I", 2**31) + good[10:]
    elif name == "cut":
        data = good[: rng.randrange(len(good))]
    elif name == "longer":
        data = good + rng.randbytes(rng.randint(1, 50))
    elif name == "flipped header":
        out = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            out[rng.randrange(10, 80)] = rng.randrange(256)
        data = bytes(out)
    elif name == "Fortran order":
        data = npy(np.asfortranarray(array))
    else:
        assert name == "big-endian"
        data = npy(array.astype(array.dtype.newbyteorder(">")))
    members[f"{key}.npy"] = data
    return archive(members)


NPY = [
    *HEADERS, "version 2 or 3", "unknown version", "magic", "header length",
    "header length 2³¹", "cut", "longer", "flipped header", "Fortran order", "big-endian",
]  # fmt: skip

# array level

BAD_TEXT = [
    "a\ud800b",
    "\udfff",
    "x" * 400,
    "tab\there",
    "line\nbreak",
    "\x1b[31m",
    "\x00a",
]


def codes(rows: list[list[int]]) -> np.ndarray:
    """Return text of any code points, those that Python cannot hold included."""
    width = max(map(len, rows))
    padded = [row + [0] * (width - len(row)) for row in rows]
    return np.array(padded, np.uint32).reshape(-1).view(f"<U{width}")


def of(a: Arrays, key: str) -> Any:
    return np.array(a[key])


def changed(key: str, make: Callable[[random.Random, Any, Arrays], Any]) -> Any:
    """Return a mutation of one array; it applies if the file has the array."""

    def mutate(rng: random.Random, a: Arrays) -> None:
        a[key] = make(rng, np.array(a[key]), a)

    mutate.key = key  # type: ignore[attr-defined]
    return mutate


def put(array: Any, value: Any, dtype: Any = None) -> Any:
    """Return a copy with one entry replaced."""
    out = np.array(array if dtype is None else array.astype(dtype))
    if out.size:
        out.reshape(-1)[out.size // 2] = value
    return out


def extra(**arrays: Any) -> Any:
    return lambda rng, a: a.update(arrays)


def bool_bytes(rng: random.Random, v: Any, _: Arrays) -> Any:
    return put(v.view(np.uint8), rng.choice([2, 3, 255])).view(np.bool_)


ARRAY: dict[str, Callable[[random.Random, Arrays], object]] = {
    "uint64 labels of 2⁶⁴ - 1": changed(
        "y", lambda r, v, a: put(v, 2**64 - 1, np.uint64)
    ),
    "uint64 labels of 2⁶³": changed("y", lambda r, v, a: put(v, 2**63, np.uint64)),
    "uint64 edges of 2⁶⁴ - 1": changed(
        "edge_index", lambda r, v, a: put(v, 2**64 - 1, np.uint64)
    ),
    "uint64 ids of 2⁶⁴ - 1": changed(
        "node_ids", lambda r, v, a: np.sort(put(v, 2**64 - 1, np.uint64))
    ),
    "uint64 columns of 2⁶⁴ - 1": changed(
        "x_indices", lambda r, v, a: put(v, 2**64 - 1, np.uint64)
    ),
    "uint64 rows of 2⁶⁴ - 1": changed(
        "x_indptr", lambda r, v, a: put(v, 2**64 - 1, np.uint64)
    ),
    "labels out of range": changed(
        "y", lambda r, v, a: put(v, r.choice([3, -2, 2**62, -(2**63)]))
    ),
    "labels of another type": changed(
        "y", lambda r, v, a: v.astype(r.choice([float, bool, str, "S4", complex]))
    ),
    "labels of another shape": changed(
        "y", lambda r, v, a: r.choice([v[:-1], v[None], v[:, None], v[0], v[:0]])
    ),
    "labels of dates": changed("y", lambda r, v, a: v.astype("M8[s]")),
    "features not finite": changed(
        "x", lambda r, v, a: put(v, r.choice([np.nan, np.inf, -np.inf]))
    ),
    "features of 10³⁰⁰": changed("x", lambda r, v, a: put(v, 1e300, np.float64)),
    "long doubles of 10⁴⁰⁰⁰": changed(
        "x", lambda r, v, a: put(v, np.longdouble("1e4000"), np.longdouble)
    ),
    "features of another type": changed(
        "x", lambda r, v, a: v.astype(r.choice([int, bool, complex, str, "S4"]))
    ),
    "features of another shape": changed(
        "x", lambda r, v, a: r.choice([v[0], v[None], v[:, :0], v[:0], v[0, 0]])
    ),
    "fewer rows": changed("x", lambda r, v, a: v[:-1]),
    "edges out of range": changed(
        "edge_index",
        lambda r, v, a: put(v, r.choice([-1, 99, 2**40, 2**63 - 1, -(2**63)])),
    ),
    "edges of another shape": changed(
        "edge_index", lambda r, v, a: r.choice([v[0], v[:1], v[None], v[0, 0]])
    ),
    "edges of another type": changed(
        "edge_index", lambda r, v, a: v.astype(r.choice([float, bool, str]))
    ),
    "edges twice": lambda r, a: a.update(edges=of(a, "edge_index").T),
    "class names twice": changed("class_names", lambda r, v, a: v[[0, 1, 1]]),
    "class names of another type": changed(
        "class_names",
        lambda r, v, a: r.choice([v.astype("S4"), np.arange(3), v[None], v[:0], v[0]]),
    ),
    "class name with bad text": changed(
        "class_names",
        lambda r, v, a: codes([[97], [98], [ord(c) for c in r.choice(BAD_TEXT)]]),
    ),
    "class name beyond Unicode": changed(
        "class_names",
        lambda r, v, a: codes([[97], [98], [r.choice([0x110000, 2**31, 2**32 - 1])]]),
    ),
    "a million class names": changed(
        "class_names", lambda r, v, a: np.arange(1_000_000).astype(str)
    ),
    "fewer class names": changed("class_names", lambda r, v, a: v[:2]),
    "mask of bytes above 1": changed("train_mask", bool_bytes),
    "mask of another type": changed(
        "val_mask", lambda r, v, a: v.astype(r.choice([int, float, "S1", str]))
    ),
    "mask of another shape": changed(
        "test_mask", lambda r, v, a: r.choice([v[1:], v[None], v[0], v[:0]])
    ),
    "masks share a node": changed("val_mask", lambda r, v, a: v | of(a, "train_mask")),
    "ids twice": changed("node_ids", lambda r, v, a: put(v, v[0])),
    "ids descend": changed("node_ids", lambda r, v, a: v[::-1]),
    "ids of another kind": changed(
        "node_ids", lambda r, v, a: r.choice([v * 1.5, v[1:], v[None], v.astype(str)])
    ),
    "unknown scale": changed(
        "feature_scale",
        lambda r, v, a: r.choice(
            [np.array("cells"), np.array(["columns"]), np.array(3), np.array(b"rows")]
        ),
    ),
    "scale of surrogates": changed(
        "feature_scale", lambda r, v, a: codes([[0xD800, 97]])[0:1].reshape(())
    ),
    "mean not finite": changed(
        "feature_mean", lambda r, v, a: put(v, r.choice([np.nan, np.inf]))
    ),
    "std not positive": changed(
        "feature_std",
        lambda r, v, a: put(v, r.choice([np.nan, np.inf, 0.0, -1.0, -0.0])),
    ),
    "statistics of another shape": changed(
        "feature_std", lambda r, v, a: r.choice([v[1:], v[None], v[0]])
    ),
    "statistics without scale": lambda r, a: (
        a.update(feature_mean=np.zeros(2), feature_std=np.ones(2))
        or a.pop("feature_scale", None)
    ),
    "scale without statistics": changed(
        "feature_scale", lambda r, v, a: a.pop("feature_mean") is None or v
    ),
    "CSR of 2⁶⁰ columns": changed(
        "x_shape", lambda r, v, a: np.array([v[0], r.choice([2**60, 2**31, 2**62])])
    ),
    "CSR of 2⁶⁰ rows": changed(
        "x_shape", lambda r, v, a: np.array([r.choice([2**60, 2**31, 2**62]), v[1]])
    ),
    "CSR of another shape": changed(
        "x_shape",
        lambda r, v, a: r.choice(
            [-v, v[:1], v[0], np.array([*v, 3]), v * 0, v * 1.5, v[None], v + 1]
        ),
    ),
    "CSR of uint64 shape": changed(
        "x_shape", lambda r, v, a: np.array([v[0], 2**64 - 1], np.uint64)
    ),
    "CSR rows not ascending": changed(
        "x_indptr", lambda r, v, a: put(v, r.choice([-1, 10**6, 2**62]))
    ),
    "CSR starts at 1": changed("x_indptr", lambda r, v, a: np.array([1, *v[1:]])),
    "CSR pointers of another shape": changed(
        "x_indptr", lambda r, v, a: r.choice([v[:-1], v[None], v[0], v[:0], v * 1.0])
    ),
    "CSR columns out of range": changed(
        "x_indices", lambda r, v, a: put(v, r.choice([-1, 99, 2**62, -(2**63)]))
    ),
    "CSR entries twice": changed("x_indices", lambda r, v, a: v * 0),
    "CSR columns of another shape": changed(
        "x_indices", lambda r, v, a: r.choice([v[1:], v[None], v[0]])
    ),
    "CSR data of another shape": changed(
        "x_data", lambda r, v, a: r.choice([v[1:], v[None], v[0], v.astype(int)])
    ),
    "CSR data not finite": changed(
        "x_data", lambda r, v, a: put(v, r.choice([np.nan, np.inf]))
    ),
    "evaluation with a gap": extra(evaluation_7_x=np.zeros((2, 2), np.float32)),
    "evaluation number of 5,000 digits": extra(
        **{"evaluation_" + "9" * 5000 + "_x": np.zeros((2, 2))}
    ),
    "evaluation twice": extra(
        evaluation_00_x=np.zeros((2, 2)), evaluation_0_x=np.ones((2, 2))
    ),
    "evaluation labels wrap": changed(
        "evaluation_0_y", lambda r, v, a: put(v, 2**64 - 1, np.uint64)
    ),
    "evaluation features": changed(
        "evaluation_0_x",
        lambda r, v, a: r.choice([v[:, :1], v[1:], v[0], put(v, np.nan)]),
    ),
    "evaluation mask": changed(
        "evaluation_0_unseen_mask", lambda r, v, a: r.choice([v[1:], v * 2, v[None]])
    ),
    "unknown array": lambda r, a: a.update(
        {r.choice(["odd", "x ", "X", "y_mask", "a" * 3000, "\x1b[2J"]): np.zeros(2)}
    ),
    "missing array": lambda r, a: a.pop(r.choice(["y", "edge_index", "class_names"])),
    "pickled": changed("class_names", lambda r, v, a: v.astype(object)),
    "float16": changed("x", lambda r, v, a: v.astype(np.float16)),
    "float64": changed("x", lambda r, v, a: v.astype(np.float64)),
    "small integers": changed("edge_index", lambda r, v, a: v.astype(np.uint8)),
}


def array_mutation(rng: random.Random, name: str) -> bytes:
    """Return an ``.npz`` file with changed arrays."""
    mutate = ARRAY[name]
    key = getattr(mutate, "key", "y")
    is_sparse = key.startswith("x_") if key.startswith("x") else None
    arrays = good_arrays(rng, is_sparse=is_sparse)
    while key not in arrays:
        arrays = good_arrays(rng, is_sparse=is_sparse)
    mutate(rng, arrays)
    return npz(arrays)


# csv level

GOOD_CSV = {
    "nodes.csv": "id,label,split,age,height\np1,bee,train,1,0.5\np2,ant,val,2,1e-3\n"
    "p3,,,3,-2\np4,bee,test,4,7\n",
    "edges.csv": "source,target\np1,p2\np2,p3\np2,p4\n",
    "classes.csv": "name\nant\nbee\n",
}
NUMBERS = [
    "9" * 5000, "1" + "0" * 5000, "0." + "1" * 200_000, "1e400", "-1e400", "nan", "inf",
    "Infinity", "1_000", "0x10", "１２", "٣", "", "1,5", "--1", "1e", "e5", "None", "½",
    "1 2", "9" * 300, "$1", "1%", "\x00", "1\x00", "0b1", "1j", "#N/A", "True",
]  # fmt: skip
IDS = ["", "p1", "a" * 100_000, "x\ny", "x\x1b[31m", "p\x00", "a" * 140_000]
NAMES = ["9" * 5000, "a" * 400, "x\ty", '"x\ny"', "b\x1b[2Je", "٣" * 5000, "b\x00"]


def replaced(table: str, old: str, new: Callable[[random.Random], str]) -> Any:
    def mutate(rng: random.Random, t: dict[str, bytes]) -> None:
        t[table] = t[table].replace(old.encode(), new(rng).encode(), 1)

    return mutate


def rewritten(table: str, make: Callable[[random.Random, bytes], bytes]) -> Any:
    def mutate(rng: random.Random, t: dict[str, bytes]) -> None:
        t[table] = make(rng, t[table])

    return mutate


def any_table(make: Callable[[random.Random, bytes], bytes]) -> Any:
    def mutate(rng: random.Random, t: dict[str, bytes]) -> None:
        table = rng.choice(sorted(t))
        t[table] = make(rng, t[table])

    return mutate


def every_table(make: Callable[[bytes], bytes]) -> Any:
    def mutate(_: random.Random, t: dict[str, bytes]) -> None:
        t.update({name: make(data) for name, data in t.items()})

    return mutate


def flipped_text(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def odd_characters(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    odd = rng.choice(
        [b'"', b"'", b",", b";", b"\n", b"\r", b"\x00", b"\\", b"\xc2\xa0"]
    )
    return data[:at] + odd + data[at:]


CSV: dict[str, Callable[[random.Random, dict[str, bytes]], object]] = {
    "UTF-16": any_table(lambda r, d: d.decode().encode("utf-16")),
    "UTF-32": any_table(lambda r, d: d.decode().encode("utf-32")),
    "latin-1": any_table(lambda r, d: d.replace(b"e", b"\xe9", 2)),
    "lone surrogate": replaced("nodes.csv", "ant", lambda r: "ant"),
    "random bytes": any_table(lambda r, d: r.randbytes(r.randint(1, 2000))),
    "empty": any_table(lambda r, d: b""),
    "truncated": any_table(lambda r, d: d[: r.randrange(len(d))]),
    "flipped bytes": any_table(flipped_text),
    "odd characters": any_table(odd_characters),
    "zip archive": any_table(lambda r, d: npz({"x": np.zeros(3)})),
    "one column missing": replaced(
        "nodes.csv",
        "id,label,",
        lambda r: r.choice(["id,", "label,", ",", "ID,label,"]),
    ),
    "column twice": replaced(
        "nodes.csv",
        "age,height",
        lambda r: r.choice(["age,age", "id,age", "label,age"]),
    ),
    "column without a name": replaced(
        "nodes.csv", "age,height", lambda r: r.choice([",height", "age,", ","])
    ),
    "column with a bad name": replaced(
        "nodes.csv",
        "height",
        lambda r: r.choice(['"he\night"', "h\x1b[31m", "h" * 9000]),
    ),
    "no features": lambda r, t: t.update(
        {"nodes.csv": b"id,label,split\np1,bee,train\np2,ant,val\np3,,\np4,bee,test\n"}
    ),
    "no header": rewritten("nodes.csv", lambda r, d: d.split(b"\n", 1)[1]),
    "no nodes": rewritten("nodes.csv", lambda r, d: d.split(b"\n")[0] + b"\n"),
    "bad number": replaced("nodes.csv", "1e-3", lambda r: r.choice(NUMBERS)),
    "bad id": replaced("nodes.csv", "p3", lambda r: r.choice(IDS)),
    "bad class": replaced("nodes.csv", "ant", lambda r: r.choice(NAMES)),
    "bad listed class": replaced("classes.csv", "ant", lambda r: r.choice(NAMES)),
    "bad split": replaced(
        "nodes.csv", "train", lambda r: r.choice(["Train", "1", "x\ny"])
    ),
    "open quote": replaced(
        "nodes.csv", "p2", lambda r: r.choice(['"p2', 'p"2', '"p2""', '""p2"'])
    ),
    "quote at the end": any_table(lambda r, d: d + b'"'),
    "long row": any_table(lambda r, d: d + b"a" + b"," * r.choice([7, 5000]) + b"\n"),
    "long field": replaced("nodes.csv", "bee", lambda r: "b" * 200_000),
    "unknown id": replaced(
        "edges.csv", "p4", lambda r: r.choice(["p9", "", "9" * 5000])
    ),
    "edge weights without a name": rewritten(
        "edges.csv", lambda r, d: b"source,target\n" + d[14:].replace(b"\n", b",1\n")
    ),
    "class not listed": rewritten("classes.csv", lambda r, d: b"name\nant\ncow\n"),
    "class listed twice": rewritten("classes.csv", lambda r, d: d + b"ant\n"),
    "no class": rewritten("classes.csv", lambda r, d: b"name\n"),
    "table missing": lambda r, t: t.pop(r.choice(["nodes.csv", "edges.csv"])),
    "byte order mark": every_table(lambda d: b"\xef\xbb\xbf" + d),
    "CRLF": every_table(lambda d: d.replace(b"\n", b"\r\n")),
    "blank rows": rewritten("nodes.csv", lambda r, d: d.replace(b"\n", b"\n\n,,,,\n")),
    "spaces": rewritten("nodes.csv", lambda r, d: d.replace(b"ant", b" ant ")),
    "all quoted": every_table(
        lambda d: b"\n".join(
            b",".join(b'"' + c + b'"' for c in line.split(b",")) if line else b""
            for line in d.split(b"\n")
        )
    ),
    "self-loop and duplicate edge": rewritten(
        "edges.csv", lambda r, d: d + b"p1,p1\np2,p1\n"
    ),
}
CSV["lone surrogate"] = rewritten(
    "nodes.csv",
    lambda r, d: d.replace(b"ant", r.choice([b"\xed\xa0\x80", b"\xed\xbf\xbf"])),
)
FILES = ["a folder", "a broken link", "a link to itself", "a device", "a pipe"]


def csv_folder(folder: Path, tables: dict[str, bytes]) -> Path:
    """Write a CSV folder."""
    folder.mkdir()
    for name, data in tables.items():
        (folder / name).write_bytes(data)
    return folder


# path level


def path_mutation(rng: random.Random, name: str, folder: Path) -> Path:
    """Return a path: of a good file with an odd name, or of none."""
    data = npz(good_arrays(rng))
    odd = {
        "control characters": "a\nb\x1b[31m\t.npz",
        "not UTF-8": os.fsdecode(b"caf\xe9.npz"),
    }
    if name in odd:
        path = folder / odd[name]
        path.write_bytes(data)
        return path
    if name == "below a file":
        (folder / "g.npz").write_bytes(data)
        return folder / "g.npz" / "x.npz"
    if name == "folder named like a file":
        (folder / "g.npz").mkdir()
        return folder / "g.npz"
    if name == "loop of links":
        (folder / "a.npz").symlink_to(folder / "b.npz")
        (folder / "b.npz").symlink_to(folder / "a.npz")
        return folder / "a.npz"
    if name == "pipe":
        os.mkfifo(folder / "pipe.npz")
        return folder / "pipe.npz"
    return {
        "long name": folder / ("a" * 300 + ".npz"),
        "long path": folder / "/".join(["a" * 200] * 40),
        "NUL": folder / "a\x00b.npz",
        "no such user": Path("~no-such-user-here/g.npz"),
        "device": Path("/dev/null"),
        "empty": Path(),
        "lone surrogate": folder / "a\ud83d.npz",
    }[name]


PATH = [
    "control characters", "not UTF-8", "below a file", "folder named like a file",
    "loop of links", "pipe", "long name", "long path", "NUL", "no such user", "device",
    "empty", "lone surrogate",
]  # fmt: skip

# all levels

MUTATIONS = [
    *(f"zip: {name}" for name in [*ZIP, *RECOMPRESSED]),
    *(f"npy: {name}" for name in NPY),
    *(f"array: {name}" for name in ARRAY),
    *(f"csv: {name}" for name in CSV),
    *(f"csv: nodes.csv is {name}" for name in FILES),
    *(f"path: {name}" for name in PATH),
]
CHANCE = {
    "zip: truncated",
    "zip: flipped bits",
    "zip: junk after",
    "zip: extra length",
    "zip: name length",
    "zip: random bytes",
    "zip: end record",
    "zip: compressed size",
    "npy: flipped header",
    "npy: shape smaller",
    "csv: truncated",
    "csv: flipped bytes",
    "csv: odd characters",
    "csv: random bytes",
    "csv: open quote",
    "csv: quote at the end",
    "csv: bad number",
    "csv: bad id",
    "csv: bad listed class",
    "csv: latin-1",
    "csv: empty",
    "csv: long row",
    "array: CSR entries twice",
    "array: uint64 columns of 2⁶⁴ - 1",
    "array: CSR columns of another shape",
    "array: CSR columns out of range",
    "array: CSR data of another shape",
    "array: CSR data not finite",
}
"""Mutations that chance can leave without effect, e.g. one of a comment or a spare byte."""
MUST_REFUSE = frozenset(MUTATIONS) - CHANCE - BENIGN.keys()
"""Mutations of which no mutant may be accepted."""


def write_mutant(number: int, mutation: str, rng: random.Random, folder: Path) -> Path:
    """Write one mutant to an empty folder and return its path."""
    level, name = mutation.split(": ", 1)
    if level == "path":
        return path_mutation(rng, name, folder)
    if level == "csv":
        tables = {key: text.encode() for key, text in GOOD_CSV.items()}
        if name.startswith("nodes.csv is "):
            path = csv_folder(folder / "graph", tables)
            replace_by(path / "nodes.csv", name.removeprefix("nodes.csv is "))
            return path
        CSV[name](rng, tables)
        return csv_folder(folder / "graph", tables)
    if level == "zip":
        arrays = good_arrays(rng)
        if name in RECOMPRESSED:
            data = npz(arrays, RECOMPRESSED[name])
        else:
            method = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
            method = zipfile.ZIP_STORED if name == "wrong method" else method
            data = ZIP[name](rng, npz(arrays, method))
    else:
        data = (npy_mutation if level == "npy" else array_mutation)(rng, name)
    path = folder / "graph.npz"
    path.write_bytes(data)
    return path


def replace_by(path: Path, kind: str) -> None:
    """Replace a file by something that is no regular file."""
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        target = {"a broken link": "nowhere", "a link to itself": path.name}
        path.symlink_to(target.get(kind, "/dev/zero"))


def mutants(folder: Path, *, seed: int, number: int) -> Iterator[Mutant]:
    """Yield mutants one by one; each is deleted before the next is written.

    Parameters
    ----------
    folder : Path
        Existing empty folder.
    seed : int
        Seed; mutant ``i`` depends on the seed and ``i`` only.
    number : int
        Number of mutants. Each mutation occurs before one occurs again.
    """
    for i in range(number):
        cycle, at = divmod(i, len(MUTATIONS))
        order = random.Random(f"{seed} order {cycle}").sample(MUTATIONS, len(MUTATIONS))
        scratch = folder / f"{i:06d}"
        scratch.mkdir()
        rng = random.Random(f"{seed} mutant {i}")
        path = write_mutant(i, order[at], rng, scratch)
        yield Mutant(i, order[at], path)
        shutil.rmtree(scratch)


# what an accepted graph must satisfy


def broken_promise(owned: LocalGraphFile) -> str:
    """Return what an accepted graph violates; empty if nothing."""
    dataset = owned.dataset
    try:
        validate_node_dataset(dataset)
        for i, graph in enumerate(owned.evaluation):
            other = NodeDataset(
                f"evaluation {i}", graph.x, graph.edge_index, graph.y,
                dataset.target, graph.masks,
            )  # fmt: skip
            validate_node_dataset(other)
            if other.num_features != dataset.num_features:
                return "an evaluation graph has other features"
    except ValueError as error:
        return str(error)
    if dataset.x.shape[0] != dataset.num_nodes:
        return "features of another number of nodes"
    for graph in (dataset, *owned.evaluation):
        for mask in graph.masks.values():
            if int(mask.view(torch.uint8).max()) > 1:
                return "a mask holds a byte above 1"
    names = dataset.class_names
    if len(set(names)) < len(names) or not 1 <= len(names) <= 10_000:
        return "class names repeat, or are too many"
    texts = (*names, *owned.names)
    if any(len(t) > 300 or not t.isprintable() for t in texts):
        return "a name is too long or not printable"
    ids = owned.node_ids
    if ids.shape != (dataset.num_nodes,) or bool((ids.diff() <= 0).any()):
        return "node ids do not ascend"
    if owned.names and len(set(owned.names)) < dataset.num_nodes:
        return "node names repeat"
    if owned.scaling is not None and owned.scaling.statistics is not None:
        mean, std = owned.scaling.statistics
        if not (bool(mean.isfinite().all()) and bool(std.isfinite().all())):
            return "feature statistics are not finite"
        if bool((std <= 0).any()) or mean.shape != (dataset.num_features,):
            return "a standard deviation is not positive, or of another shape"
    return ""


# readers

LONGEST_ERROR = 2000
"""Characters of one error message."""


@dataclass
class Outcome:
    """What the readers did with one file.

    Parameters
    ----------
    is_accepted : bool
        Whether check-graph called the file usable.
    tracebacks : list of str
        Exceptions that are not errors for users, by reader.
    wrong : str
        Why the file was accepted wrongly, or handled inconsistently; empty if it was not.
    seconds : float
        Seconds of all readers.
    """

    is_accepted: bool = False
    tracebacks: list[str] = field(default_factory=list)
    wrong: str = ""
    seconds: float = 0.0


def read(mutant: Mutant) -> Outcome:
    """Read one file with every reader."""
    out = Outcome()
    start = time.perf_counter()
    config = parse_config({})
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        readers = {
            "check-graph": lambda: _check(mutant.path),
            "SuperNode": lambda: client_from_file(mutant.path, config),
            "predict": lambda: load_graph_file(mutant.path, needs_labels=False),
            "load": lambda: load_graph_file(mutant.path),
            "stamps": lambda: file_stamps({"graph": str(mutant.path)}),
        }
        for name, reader in readers.items():
            try:
                found[name] = reader()
            except DataError as error:
                text = str(error)
                if len(text) > LONGEST_ERROR or len(text.splitlines()) > 1:
                    out.tracebacks.append(
                        f"{name}: the error has {len(text)} characters"
                    )
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                out.tracebacks.append(
                    f"{name}: {type(error).__name__}: {str(error)[:80]} "
                    f"({Path(frame.filename).name}:{frame.lineno})"
                )
    out.seconds = time.perf_counter() - start
    out.is_accepted = bool(found.get("check-graph"))
    if mutant.mutation in BENIGN:
        if "load" not in found:
            out.wrong = f"refused, but {BENIGN[mutant.mutation]}"
    elif out.is_accepted and mutant.mutation in MUST_REFUSE:
        out.wrong = "accepted"
    if "load" in found and not out.wrong:
        out.wrong = broken_promise(found["load"])
    if out.is_accepted and "SuperNode" not in found and not out.tracebacks:
        out.wrong = out.wrong or "check-graph accepts what the SuperNode refuses"
    return out


def _check(path: Path) -> bool:
    """Run the command ``check-graph``; return whether it accepted the file."""
    file = io.TextIOWrapper(io.BytesIO(), "utf-8")  # strict, like a terminal
    real = arguments.console
    arguments.console = Console(file=file)
    try:
        graph_commands.check_graph(path, [], node_config="", drop_unreadable=None)
    except typer.Exit as end:
        return end.exit_code == 0
    finally:
        arguments.console = real
    return True
