"""Reader of the arrays in an ``.npz`` file that trusts no size the file claims.

Every claimed size is compared with the size of the file before memory is allocated.
Headers are matched with a pattern and never evaluated.
"""

import math
import os
import re
import struct
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from flower_fgl.core.errors import DataError, clip, show_path
from flower_fgl.core.held_kind import BROKEN_ARCHIVE
from flower_fgl.core.options import nearest
from flower_fgl.datasets.graph_files.own_split import is_split_name

__all__ = ["EVALUATION", "Array", "integers", "no_file", "read_arrays"]

Array = np.ndarray[Any, np.dtype[Any]]

INT64_MAX = np.iinfo(np.int64).max
PLAIN_BYTES = 256 << 20
"""Uncompressed bytes that any archive may hold."""
LARGEST_RATIO = 100
"""Uncompressed bytes per byte of the file above ``PLAIN_BYTES``."""
LONGEST_HEADER = 1024
"""Characters of an ``.npy`` header; those of plain arrays have at most 200."""
LARGEST_AXIS = 10**12
MOST_AXES = 4
PLAIN = "biufcUS"
"""Kinds of dtypes that are read; ``npz.py`` checks which kind each array must have."""
LAST_CODE, SURROGATES = 0x10FFFF, 0xD800
CHUNK = 1 << 20
IS_ENCRYPTED = 0x1
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Compression of ``numpy.savez`` and ``numpy.savez_compressed``."""
ENTRY = (
    r"'descr'\s*:\s*'(?P<descr>[<>|=]?[A-Za-z]\d{0,9})'"
    r"|'fortran_order'\s*:\s*(?P<fortran>True|False)"
    r"|'shape'\s*:\s*\((?P<shape>(?:\d{1,19},\s*)*(?:\d{1,19})?)\)"
)
HEADER = re.compile(rf"\{{(?:\s*(?:{ENTRY})\s*,?){{3}}\s*\}}\s*", re.ASCII)
"""Three entries of an ``.npy`` header in any order."""
EVALUATION = re.compile(r"evaluation_(0|[1-9][0-9]{0,5})_(\w+)")
"""Name of an array of an evaluation graph: its number, and the array's own name."""


def integers(arrays: Mapping[str, Array], key: str, where: str) -> Array:
    """Return one array of integers as int64, in its original shape."""
    if key not in arrays:
        raise DataError(f"{where}: array {key} is missing. Add it to the file.")
    array: Array = arrays[key]
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{where}: {key} must hold integers, got {array.dtype}.")
    if array.dtype.kind == "u" and array.size and int(array.max()) > INT64_MAX:
        raise DataError(
            f"{where}: {key} holds {array.max()}, which does not fit int64. Save it as "
            "signed integers."
        )
    return array.astype(np.int64, copy=False)


def read_arrays(
    path: Path, known: Collection[str] | None, nested: Collection[str] = ()
) -> dict[str, Array]:
    """Read all arrays of an ``.npz`` file, without unpickling.

    ``known`` are the names that it may have, ``None`` for any, and ``nested`` those that
    may follow ``evaluation_<number>_``. Booleans are 0 or 1, and text can be encoded as
    UTF-8. A DataError says that the file is missing, damaged or of another format,
    contains pickled objects or an unknown name, or claims sizes that it does not have.
    """
    where = show_path(path)
    if not os.path.isfile(path):  # Path.is_file raises an error for long names
        raise no_file(path)
    try:
        with open(path, "rb") as stream:
            _check_magic(stream, where)
            with zipfile.ZipFile(stream) as archive:
                members = archive.infolist()
                _check_members(members, os.fstat(stream.fileno()).st_size, where)
                names = [member.filename.removesuffix(".npy") for member in members]
                _check_names(names, known, nested, where)
                return {
                    name: _read_array(archive, member, where)
                    for name, member in zip(names, members, strict=True)
                }
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(
            f"{where} does not fit into the memory of this machine. Use a machine with "
            "more memory, or save sparse features as x_indptr, x_indices, x_data and "
            "x_shape."
        ) from error
    except BROKEN_ARCHIVE as error:
        raise _broken(where, str(error)) from error


TABLES = "Export its nodes and edges as tables, nodes.csv and edges.csv"
LOAD = "If you trust it, load it in Python, and write the graph with flower_fgl.to_npz"
FORMATS = {
    ".graphml": ("a GraphML file", f"{TABLES}, e.g. with networkx.read_graphml"),
    ".gexf": ("a GEXF file", f"{TABLES}, e.g. with networkx.read_gexf"),
    ".gml": ("a GML file", f"{TABLES}, e.g. with networkx.read_gml"),
    ".pt": ("a file of torch.save", LOAD),
    ".pth": ("a file of torch.save", LOAD),
    ".pkl": ("a pickle", LOAD),
    ".pickle": ("a pickle", LOAD),
    ".json": ("a JSON file", TABLES),
    ".parquet": ("a Parquet file", TABLES),
    ".xlsx": ("an Excel file", TABLES),
    ".h5": ("an HDF5 file", TABLES),
    ".mat": ("a MATLAB file", TABLES),
}
"""Other formats by the ending of the file: what they are, and how to convert them."""
STARTS = {
    b"<": ("an XML file, such as GraphML or GEXF", f"{TABLES}, e.g. with networkx"),
    b"\x80": FORMATS[".pkl"],
    b"{": FORMATS[".json"],
    b"[": FORMATS[".json"],
    b"PAR1": FORMATS[".parquet"],
    b"\x89HDF": FORMATS[".h5"],
    b"MATLAB": FORMATS[".mat"],
}
"""The same by the first bytes of the file."""


def no_file(path: Path) -> DataError:
    """Return the error for a path without a graph file."""
    return DataError(
        f"No graph file at {show_path(path)}. Provide an .npz file, or a folder with "
        "nodes.csv and edges.csv."
    )


def _broken(where: str, reason: str) -> DataError:
    """Return the error for a file that is no intact archive."""
    return DataError(
        f"{where} is empty, truncated or not an .npz file ({clip(reason)}). Write it "
        "again, with numpy.savez."
    )


def _other_format(path: str, start: bytes) -> DataError:
    """Return the error for a file of another format, by its ending or its first bytes."""
    ending = os.path.splitext(path)[1].lower()
    found = FORMATS.get(ending) or next(
        (what for first, what in STARTS.items() if start.startswith(first)), None
    )
    kind, how = found or ("not an .npz file", TABLES)
    return DataError(
        f"{path} is {kind}. A graph is an .npz file that holds only arrays of numbers and "
        f"text, or a folder with nodes.csv and edges.csv. {how}."
        + (
            " Pickled objects are rejected, because reading them can run any code."
            if how == LOAD or not found
            else ""
        )
    )


def _check_magic(stream: IO[bytes], where: str) -> None:
    """Reject files that do not start as a zip archive."""
    magic = stream.read(6)
    stream.seek(0)
    if magic == b"\x93NUMPY":
        raise DataError(
            f"{where} holds a single array; expected an .npz file. Write it with "
            "numpy.savez."
        )
    if not magic:
        raise _broken(where, "no bytes")
    if not magic.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        raise _other_format(where, magic)


def _check_members(members: list[zipfile.ZipInfo], num_bytes: int, where: str) -> None:
    """Reject encrypted members, and sizes beyond those of the file."""
    for member in members:
        name = clip(member.filename)
        if not member.filename.endswith(".npy"):
            # torch.save writes a zip archive, too
            is_torch = name.endswith("/data.pkl")
            if is_torch or os.path.splitext(where)[1].lower() in FORMATS:
                raise _other_format(where, b"\x80")
            raise DataError(
                f'{where}: member "{name}" is not an array. Write the file again, with '
                "numpy.savez."
            )
        is_encrypted = member.flag_bits & IS_ENCRYPTED
        if is_encrypted or member.compress_type not in METHODS:
            kind = "encrypted" if is_encrypted else "compressed by another method"
            raise DataError(
                f'{where}: member "{name}" is {kind}. Write the file again, with '
                "numpy.savez or numpy.savez_compressed."
            )
        is_stored = member.compress_type == zipfile.ZIP_STORED
        if is_stored and member.compress_size != member.file_size:
            raise _broken(where, f'member "{name}" claims two different sizes')
    if sum(member.compress_size for member in members) > num_bytes:
        raise _broken(where, "members claim more bytes than the file has")
    total = sum(member.file_size for member in members)
    if total > max(PLAIN_BYTES, LARGEST_RATIO * num_bytes):
        raise DataError(
            f"{where} has {num_bytes:,} bytes, but claims to contain {total:,}: more than "
            f"{LARGEST_RATIO} times as many. Write it again with numpy.savez, which does "
            "not compress, or save sparse features as x_indptr, x_indices, x_data and "
            "x_shape."
        )


def _check_names(
    names: list[str],
    known: Collection[str] | None,
    nested: Collection[str],
    where: str,
) -> None:
    """Reject unknown and repeated array names."""
    for name in names:
        match = EVALUATION.fullmatch(name) if nested else None
        if known is None or name in known or (match and match[2] in nested):
            continue
        if is_split_name(name):
            raise DataError(
                f'{where}: array "{clip(name)}" looks like a split, which cannot be read '
                "in this form. Save train_mask, val_mask and test_mask, bool of shape "
                "(N,); of edges edge_train_mask, edge_val_mask and edge_test_mask."
            )
        if name == "edge_weight":
            raise DataError(
                f'{where}: weights of edges are not read: the array "{name}" would have no '
                "effect. Remove it if they may be ignored; numbers that describe nodes "
                "are columns of x, and those that describe classified edges (edge_label) "
                "are columns of edge_attr."
            )
        hint = (
            " Evaluation graphs have the same ones, with evaluation_0_ before the name."
            if nested
            else ""
        )
        raise DataError(
            f'{where}: unknown array "{clip(name)}". {nearest(name, sorted(known))}{hint}'
        )
    if len(set(names)) < len(names):
        raise DataError(
            f"{where} contains an array twice. Write it again, with numpy.savez."
        )


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str) -> Array:
    """Read one member; its checksum is verified at its end."""
    name = member.filename.removesuffix(".npy")
    with archive.open(member) as file:
        dtype, shape, is_fortran, header_bytes = _read_header(file, name, where)
        count = math.prod(shape)
        claimed = header_bytes + count * dtype.itemsize
        if claimed != member.file_size or not dtype.itemsize:
            raise _broken(
                where,
                f"the header of {name} claims {claimed} bytes, not {member.file_size}",
            )
        raw = np.empty(count * dtype.itemsize, dtype=np.uint8)
        for start in range(0, len(raw), CHUNK):
            data = file.read(min(CHUNK, len(raw) - start))
            if len(data) < min(CHUNK, len(raw) - start):
                raise _broken(where, f"array {name} ends early")
            raw[start : start + len(data)] = np.frombuffer(data, dtype=np.uint8)
    array = raw.view(dtype)
    _check_values(raw, array, name, where)
    if is_fortran:
        return array.reshape(shape[::-1]).T
    return array.reshape(shape)


def _read_header(
    file: IO[bytes], name: str, where: str
) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Return dtype, shape, whether the order is Fortran's, and the bytes of the header."""
    start = file.read(8)
    version = (start[6], start[7]) if len(start) == 8 else None
    if start[:6] != b"\x93NUMPY" or version not in ((1, 0), (2, 0), (3, 0)):
        raise _broken(where, f"{name} is no .npy array")
    size = "<H" if version == (1, 0) else "<I"
    (length,) = struct.unpack(size, file.read(struct.calcsize(size)))
    text = file.read(min(length, LONGEST_HEADER)).decode("latin-1")
    match = HEADER.fullmatch(text) if len(text) == length else None
    if match is None or None in match.groups():
        raise _no_plain_array(name, text, where)
    try:
        dtype = np.dtype(match["descr"])
    except (TypeError, ValueError) as error:
        raise _broken(where, f"{name} has the unknown type {match['descr']}") from error
    if dtype.kind == "O":
        raise _no_plain_array(name, text, where)
    if dtype.kind not in PLAIN or not dtype.itemsize:
        raise _broken(where, f"{name} holds neither numbers nor text, but {dtype}")
    axes = tuple(int(axis) for axis in match["shape"].split(",") if axis.strip())
    if len(axes) > MOST_AXES or max(axes, default=0) > LARGEST_AXIS:
        raise _broken(where, f"{name} has the shape {axes}")
    num_bytes = 8 + struct.calcsize(size) + length
    return dtype, axes, match["fortran"] == "True", num_bytes


def _no_plain_array(name: str, header: str, where: str) -> DataError:
    """Return the error for a header that describes no array of numbers or text."""
    if re.search(r"'descr'\s*:\s*'[<>|=]?O", header):
        return DataError(
            f'{where}: array "{name}" is pickled. Pickled objects are rejected, because '
            "reading them can run any code. Save only numbers and text, with numpy.savez."
        )
    return _broken(where, f"the header of {name} describes no plain array: {header}")


def _check_values(raw: Array, array: Array, name: str, where: str) -> None:
    """Reject booleans that are neither 0 nor 1, and text that is not Unicode."""
    if array.dtype.kind == "b" and raw.size and int(raw.max()) > 1:
        raise DataError(
            f"{where}: array {name} holds a boolean that is neither 0 nor 1. Save it "
            "again, with numpy.savez."
        )
    if array.dtype.kind != "U" or not array.size:
        return
    codes = raw.view(np.dtype("u4").newbyteorder(array.dtype.byteorder))
    if bool((codes > LAST_CODE).any() | ((codes >> 11) == SURROGATES >> 11).any()):
        raise DataError(
            f"{where}: array {name} holds text that is not valid Unicode. Save it again "
            "from text that can be encoded as UTF-8."
        )
