"""Files and paths that a reader must refuse with one error, without allocating for them."""

from __future__ import annotations

import os
import random
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.core.errors import DataError, PayloadError, clip, show_path
from flower_fgl.datasets.graph_files import archive
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.protocols.describe import Description
from tests.fuzz import malformed_graphs as forge

GOOD: dict[str, Any] = {
    "x": np.arange(8, dtype=np.float32).reshape(4, 2),
    "edge_index": np.array([[0, 1, 2], [1, 2, 3]]),
    "y": np.array([0, 2, -1, 0]),
    "class_names": np.array(["ant", "bee", "cow"]),
}
SPARSE = {key: value for key, value in GOOD.items() if key != "x"} | forge.as_csr(
    GOOD["x"]
)
UNSIGNED = np.array([0, 2, 2**64 - 1, 0], np.uint64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.npz"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (GOOD | {"y": UNSIGNED}, "y holds 18446744073709551615, which does not fit"),
        (GOOD | {"node_ids": np.sort(UNSIGNED)}, "node_ids holds 18446744073709551615"),
        (
            SPARSE | {"x_shape": np.array([4, 2**60])},
            "1,152,921,504,606,846,976 features",
        ),
        (SPARSE | {"x_shape": np.array([2**60, 2])}, "x_indptr must have"),
        (SPARSE | {"x_shape": np.array([-4, 2])}, "neither of them 0"),
        (
            GOOD | {"train_mask": np.full(4, 2, np.uint8).view(bool)},
            "neither 0 nor 1",
        ),
        (
            GOOD | {"class_names": forge.codes([[97], [98], [0xD800]])},
            "not valid Unicode",
        ),
        (
            GOOD | {"class_names": forge.codes([[97], [98], [0x110000]])},
            "not valid Unicode",
        ),
        (
            GOOD | {"class_names": np.array(["a", "b", "c\nd"])},
            r'class "c\\nd" must be',
        ),
        (GOOD | {"class_names": np.array(["a", "b", "c" * 301])}, "at most 300"),
        (
            GOOD | {"class_names": np.arange(10_001).astype(str)},
            "10,001 classes, the limit is 10,000",
        ),
        (GOOD | {"evaluation_00_x": np.zeros(2)}, "unknown array"),
        (GOOD | {f"evaluation_{'9' * 5000}_x": np.zeros(2)}, "unknown array"),
        (GOOD | {"feature_mean": np.zeros(2)}, "feature_scale must be"),
    ],
)
def test_arrays_are_refused(arrays: dict[str, Any], message: str, path: Path) -> None:
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message) as info:
        load_graph_file(path)
    assert len(str(info.value)) < 1000
    assert len(inspect_graph(path, {}).problems) == 1


@pytest.mark.parametrize("std", [np.nan, np.inf, 0.0, -1.0])
def test_feature_statistics_must_be_finite_and_positive(std: float, path: Path) -> None:
    statistics = {"feature_scale": np.array("columns"), "feature_mean": np.zeros(2)}
    np.savez(path, **GOOD, **statistics, feature_std=np.array([1.0, std]))
    with pytest.raises(DataError, match="feature_std finite and above 0"):
        load_graph_file(path)
    np.savez(path, **GOOD, **statistics, feature_std=np.ones(2))
    assert load_graph_file(path).scaling is not None


@pytest.mark.parametrize("name", forge.HEADERS)
def test_headers_are_matched_and_never_evaluated(name: str, path: Path) -> None:
    header = forge.HEADERS[name](GOOD["x"])
    members = {f"{key}.npy": forge.npy(value) for key, value in GOOD.items()}
    members["x.npy"] = forge.npy(GOOD["x"], header)
    path.write_bytes(forge.archive(members))
    if name in ("spaces",):
        load_graph_file(path)
        return
    with pytest.raises(DataError) as info:
        load_graph_file(path)
    assert len(str(info.value)) < 500


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (forge.ZIP["encrypted"], "is encrypted"),
        (forge.ZIP["unknown method"], "compressed by another method"),
        (forge.ZIP["zip64 claim"], "claim"),
        (forge.ZIP["duplicate member"], "contains an array twice"),
        (forge.ZIP["newer version"], "not an .npz file"),
        (forge.ZIP["patched data"], "not an .npz file"),
    ],
)
def test_archives_are_refused(
    make: Callable[[random.Random, bytes], bytes], message: str, path: Path
) -> None:
    path.write_bytes(make(random.Random(0), forge.npz(GOOD)))
    with pytest.raises(DataError, match=message):
        load_graph_file(path)


@pytest.mark.thorough
def test_a_zip_bomb_is_refused_before_memory_is_allocated(path: Path) -> None:
    path.write_bytes(forge.bomb("real"))  # 300 MiB of zeros in 0.3 MiB
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="more than 100 times as many"):
            load_graph_file(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_size_that_only_the_header_claims_allocates_nothing(path: Path) -> None:
    header = forge.npy_header(GOOD["x"], shape="(50000000, 4)")
    path.write_bytes(forge.archive({"x.npy": forge.npy(GOOD["x"], header)}))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="claims 800000"):
            load_graph_file(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_compressed_file_of_zeros_below_the_limit_is_read(path: Path) -> None:
    wide = np.zeros((4, 400_000), np.float32)  # more than 100 times its compressed size
    np.savez_compressed(path, **(GOOD | {"x": wide}))
    assert wide.nbytes > archive.LARGEST_RATIO * path.stat().st_size
    assert load_graph_file(path).dataset.num_features == 400_000


@pytest.mark.parametrize(
    "dtype", ["<f8", ">f8", ">f4", "<f2", np.longdouble, "<f4"], ids=str
)
@pytest.mark.parametrize("order", ["C", "F"])
def test_numbers_are_read_as_numpy_reads_them(
    dtype: Any, order: Any, path: Path
) -> None:
    x = np.asarray(GOOD["x"], dtype=dtype, order=order)
    np.savez(path, **(GOOD | {"x": x}))
    read = archive.read_arrays(path, None)
    with np.load(path) as expected:
        assert set(read) == set(expected.files)
        for name, array in read.items():
            assert array.dtype == expected[name].dtype
            assert np.array_equal(array, expected[name])


# paths


@pytest.mark.parametrize(
    "name",
    [
        "a" * 300 + ".npz",
        "/".join(["b" * 200] * 30),
        "a\x00b.npz",
        "~nobody-here/g.npz",
        "a\ud83d.npz",
    ],
    ids=range(5),
)
def test_paths_without_a_file_give_one_short_line(name: str, tmp_path: Path) -> None:
    path = Path(name) if name.startswith("~") else tmp_path / name
    with pytest.raises(DataError, match="No graph file at") as info:
        load_graph_file(path)
    text = str(info.value)
    assert text.isprintable()
    assert len(text) < 500
    text.encode()


def test_a_file_whose_name_is_not_utf8_can_be_used(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9\n.npz")
    np.savez(path, **GOOD)
    report = inspect_graph(path, {})
    assert report.problems == []
    assert report.description is not None
    assert (
        report.description.name == "caf\\udce9\\n"
    )  # escaped, so the server accepts it


def test_text_for_messages_is_one_short_printable_line() -> None:
    assert clip("a\nb\x1b[2J\ud800") == "a\\nb\\x1b[2J\\ud800"
    assert clip("x" * 100, 10) == "x" * 9 + "…"
    assert len(show_path("/" + "x" * 10_000 + "/g.npz")) == 300


# the server's own check


def test_check_graph_runs_the_check_of_the_server(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(path, **GOOD)
    assert inspect_graph(path, {}).problems == []

    def refuse(content: Any, spec: Any = None) -> Description:
        raise PayloadError(f"not {content['info']['class-names'][0]}.")

    monkeypatch.setattr(Description, "from_record", refuse)
    (problem,) = inspect_graph(path, {}).problems
    assert problem == f"{path}: the server would refuse it: not ant."


# CSV


@pytest.mark.parametrize("number", forge.NUMBERS)
def test_cells_that_are_no_finite_number_are_named(number: str, tmp_path: Path) -> None:
    text = forge.GOOD_CSV["nodes.csv"].replace("1e-3", f'"{number}"')
    tables = {key: t.encode() for key, t in forge.GOOD_CSV.items()}
    folder = forge.csv_folder(tmp_path / "g", tables | {"nodes.csv": text.encode()})
    if number == "True":
        assert load_graph_file(folder).dataset.x[1].tolist() == [2.0, 1.0]
        return
    if len(number) > 131_072:  # the csv module refuses the cell
        message = "field limit"
    else:
        message = r'nodes\.csv, line 3, column "height": expected a (finite )?number'
    with pytest.raises(DataError, match=message) as info:
        load_graph_file(folder)
    assert len(str(info.value)) < 500


def test_labels_of_five_thousand_digits_are_refused(tmp_path: Path) -> None:
    tables = {
        key: t.replace("ant", "9" * 5000).encode() for key, t in forge.GOOD_CSV.items()
    }
    tables |= {"classes.csv": b"name\nbee\n" + b"9" * 5000 + b"\n"}
    folder = forge.csv_folder(tmp_path / "g", tables)
    for _ in range(2):
        with pytest.raises(DataError, match="must be one line of at most 300"):
            load_graph_file(folder)
        (folder / "classes.csv").unlink(missing_ok=True)


@pytest.mark.thorough
def test_twenty_thousand_columns_take_less_than_five_seconds(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).standard_normal((100, 20_000)).round(4)
    lines = ["id,label," + ",".join(f"f{i}" for i in range(20_000))]
    lines += [
        f"n{i},c{i % 3}," + ",".join(map(str, row)) for i, row in enumerate(numbers)
    ]
    (tmp_path / "nodes.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "edges.csv").write_text("source,target\nn0,n1\n")
    start = time.process_time()
    x = load_graph_file(tmp_path).dataset.x
    assert time.process_time() - start < 5
    assert np.array_equal(x.numpy(), numbers.astype(np.float32))


def test_a_lone_surrogate_in_a_table_is_not_utf8(tmp_path: Path) -> None:
    tables = {key: t.encode() for key, t in forge.GOOD_CSV.items()}
    tables["nodes.csv"] = tables["nodes.csv"].replace(b"ant", b"\xed\xa0\x80")
    with pytest.raises(DataError, match="not a CSV table in UTF-8"):
        load_graph_file(forge.csv_folder(tmp_path / "g", tables))


def test_a_device_is_no_table(tmp_path: Path) -> None:
    tables = {key: t.encode() for key, t in forge.GOOD_CSV.items()}
    folder = forge.csv_folder(tmp_path / "g", tables)
    forge.replace_by(folder / "nodes.csv", "a device")
    with pytest.raises(DataError, match=r"nodes\.csv is missing"):
        load_graph_file(folder)


def test_the_method_of_a_member_is_that_of_numpy(path: Path) -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path.write_bytes(forge.npz(GOOD, method))
        load_graph_file(path)
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        path.write_bytes(forge.npz(GOOD, method))
        with pytest.raises(DataError, match="compressed by another method"):
            load_graph_file(path)
