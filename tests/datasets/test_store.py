from __future__ import annotations

import hashlib
import logging
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from safetensors.torch import load

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets import store
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.transforms.canonical import csr_tensor
from flower_fgl.methods import parse_config
from tests.support.owners import owner_graphs


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(**values: Any) -> RunConfig:
    settings = {"synthetic.nodes": 90, "synthetic.classes": 3, "synthetic.blocks": 6}
    return parse_config({**settings, **values})


def assert_same(a: ClientGraph, b: ClientGraph) -> None:
    assert a.class_names == b.class_names
    assert torch.equal(a.node_ids, b.node_ids)
    for left, right in zip(
        [a.graph, *a.evaluation], [b.graph, *b.evaluation], strict=True
    ):
        assert torch.equal(left.x.to_dense(), right.x.to_dense())
        assert left.x.layout == right.x.layout
        assert torch.equal(left.edge_index, right.edge_index)
        assert torch.equal(left.y, right.y)
        assert left.masks.keys() == right.masks.keys()
        for name, mask in left.masks.items():
            assert torch.equal(mask, right.masks[name])


@pytest.mark.parametrize("setting", ["transductive", "inductive"])
def test_the_store_restores_the_built_clients(setting: str) -> None:
    settings = config(setting=setting)
    clients, sha256, edges = store.build_clients(settings, 3)
    opened = store.open_store(settings, 3)
    assert opened.index.partition_sha256 == sha256
    assert opened.index.num_edges == edges
    for client in clients:
        assert_same(opened.load(client.partition_id), client)


def test_tensors_of_a_store_have_one_order() -> None:
    opened = store.open_store(config(), 3)
    orders = {tuple(opened.load(0).graph.masks) for _ in range(20)}
    assert orders == {("test", "train", "val")}


def test_sparse_features_stay_sparse(own_cache: Path) -> None:
    x = csr_tensor(scipy.sparse.csr_matrix(np.eye(6)))
    masks = {
        name: torch.zeros(6, dtype=torch.bool) for name in ("train", "val", "test")
    }
    graph = Graph(x, torch.empty(2, 0, dtype=torch.int64), torch.zeros(6).long(), masks)
    client = ClientGraph(0, graph, Target.classes(("a",)), torch.arange(6))
    tensors = load(store.pack_client(client))
    assert_same(store.unpack_client(tensors, 0, client.target), client)


def test_a_store_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = store.build_clients
    monkeypatch.setattr(
        store, "build_clients", lambda *a: calls.append(a) or original(*a)
    )
    for _ in range(3):
        store.open_store(config(), 3).load(1)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"partition-seed": 1},
        {"split": "40/30/30"},
        {"setting": "inductive"},
        {"partition": "uniform"},
        {"synthetic.degree": 3.0},
    ],
)
def test_every_data_setting_has_its_own_store(values: dict[str, Any]) -> None:
    base = store.open_store(config(), 3).folder
    assert store.open_store(config(**values), 3).folder != base
    assert store.open_store(config(), 2).folder != base


def test_a_store_depends_on_alpha() -> None:
    names = {
        store._folder_name(config(partition="dirichlet", **{"dirichlet-alpha": a}), 3)
        for a in (0.1, 0.9)
    }
    assert len(names) == 2


def test_settings_that_do_not_affect_data_share_a_store() -> None:
    base = store.open_store(config(), 3).folder
    assert store.open_store(config(seed=5, lr=0.1, rounds=3), 3).folder == base


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_file_is_rebuilt_with_a_warning(
    damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened = store.open_store(config(), 3)
    before = opened.load(1)
    path = opened.folder / "client-000001.safetensors"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        end = len(data) - 1
        path.write_bytes(
            data[: end // 2]
            if damage == "truncated"
            else data[:end] + bytes([data[end] ^ 1])
        )
    with caplog.at_level(logging.WARNING):
        assert_same(opened.load(1), before)
    assert "rebuilt" in caplog.text


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Map every file into memory, as if it were large."""
    monkeypatch.setattr(store, "MAPPED_FROM", 0)


def file_of(opened: store.ClientStore) -> Path:
    return opened.folder / "client-000001.safetensors"


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_file_is_mapped_and_a_small_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = store.open_store(config(), 3)
    small = opened.load(1)
    assert str(file_of(opened)) not in mapped_files()
    monkeypatch.setattr(store, "MAPPED_FROM", file_of(opened).stat().st_size)
    large = opened.load(1)
    assert str(file_of(opened)) in mapped_files()
    assert_same(large, small)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_only_the_used_part_of_a_mapped_file_is_read() -> None:
    opened = store.open_store(config(**{"synthetic.features": 40_000}), 3)
    assert file_of(opened).stat().st_size > store.MAPPED_FROM
    client = opened.load(1)
    client.class_counts("train")
    assert client.graph.x.nbytes > 4 << 20
    pages = resident_bytes(file_of(opened))
    assert pages < client.graph.x.nbytes / 2
    client.graph.x.sum()
    assert resident_bytes(file_of(opened)) >= client.graph.x.nbytes


def resident_bytes(path: Path) -> int:
    """Return the bytes of a mapped file that this process holds in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    total, is_inside = 0, False
    for line in lines:
        if not line.split()[0].endswith(":"):
            is_inside = line.endswith(str(path))
        elif is_inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_the_hash_of_an_unchanged_mapped_file_is_computed_once(
    mapped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda *a: calls.append(a) or original(*a)
    )
    for _ in range(3):
        store.open_store(config(), 3).load(1)
    assert len(calls) == 1


def test_a_change_of_a_mapped_graph_does_not_reach_the_file(mapped: None) -> None:
    opened = store.open_store(config(), 3)
    data = file_of(opened).read_bytes()
    opened.load(1).graph.x.zero_()
    assert file_of(opened).read_bytes() == data
    assert opened.load(1).graph.x.abs().sum() > 0


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_a_damaged_mapped_file_is_rebuilt(
    mapped: None, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    opened = store.open_store(config(), 3)
    path = file_of(opened)
    before, data = opened.load(1), path.read_bytes()
    path.unlink()  # the mapped file stays as it is
    if damage != "gone":
        end = len(data) - 1
        flipped = data[:end] + bytes([data[end] ^ 1])
        path.write_bytes(data[: end // 2] if damage == "truncated" else flipped)
    with caplog.at_level(logging.WARNING):
        assert_same(opened.load(1), before)
    assert "rebuilt" in caplog.text
    assert path.read_bytes() == data


def test_a_mapped_graph_survives_the_rebuild_of_its_store(mapped: None) -> None:
    opened = store.open_store(config(), 3)
    client = opened.load(1)
    kept = client.graph.x.clone()
    store._write_store(opened.folder, opened.config, 3)
    assert torch.equal(client.graph.x, kept)


@pytest.mark.parametrize("damage", ["{", "", "wrong hash", "shorter"])
def test_a_damaged_index_is_rebuilt(damage: str) -> None:
    opened = store.open_store(config(), 3)
    path = opened.folder / store.INDEX
    text = path.read_text()
    changed = {
        "wrong hash": text.replace(opened.index.files[1], opened.index.files[0]),
        "shorter": text[:-20],
    }
    path.write_text(changed.get(damage, damage))
    again = store.open_store(config(), 3)
    assert again.index == opened.index
    assert_same(again.load(1), opened.load(1))


def test_a_store_damaged_twice_is_read_from_the_new_index() -> None:
    opened = store.open_store(config(), 3)
    before = opened.load(1)
    (opened.folder / "client-000001.safetensors").write_bytes(b"")
    (opened.folder / store.INDEX).write_text("gone")
    assert_same(opened.load(1), before)


def test_leftovers_of_a_killed_process_are_removed() -> None:
    folder = store.open_store(config(), 3).folder
    left = folder.with_name(f"{folder.name}.tmp-killed")
    left.mkdir()
    (folder / store.INDEX).unlink()
    store.open_store(config(), 3)
    assert not left.exists()


def test_a_folder_named_like_a_dataset_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base = store.open_store(config(), 3).folder
    (tmp_path / "synthetic").mkdir()
    monkeypatch.chdir(tmp_path)
    assert store.open_store(config(), 3).folder == base


def test_an_unwritable_cache_is_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="FLOWER_FGL_CACHE"):
        store.open_store(config(), 3)


def _open(number: int) -> tuple[int, int]:
    """Open a client's graph in a fresh process; count the builds."""
    builds = 0
    original = store.build_clients

    def counted(*args: Any) -> Any:
        nonlocal builds
        builds += 1
        return original(*args)

    store.build_clients = counted
    graph = store.open_store(config(), 3).load(number % 3)
    return builds, graph.graph.num_nodes


@pytest.mark.thorough
def test_50_workers_starting_at_once_compute_once() -> None:
    context = multiprocessing.get_context("fork")
    with context.Pool(50) as pool:
        results = pool.map(_open, range(50), chunksize=1)
    assert sum(builds for builds, _ in results) == 1
    assert {nodes for _, nodes in results} <= set(range(20, 41))


def test_the_hash_of_a_file_follows_its_labels_and_split(tmp_path: Path) -> None:
    """Runs before and after another file of one name are not paired; features may vary."""
    path = tmp_path / "graph.npz"
    save_client_graph(path, owner_graphs()[0])
    settings = {"dataset": str(path), "clients": 2, "split": "public"}
    with np.load(path) as file:
        arrays = dict(file)
    hashes = []
    for name, change in {
        "x": lambda x: x + 1,
        "test_mask": lambda mask: mask & (np.arange(len(mask)) % 2 == 0),
        "y": lambda y: np.where(y == 0, 1, y),
    }.items():
        for values in (arrays[name], change(arrays[name])):
            np.savez(path, **{**arrays, name: values})
            hashes.append(store.build_clients(parse_config(settings), 2)[1])
    features, split, labels = hashes[:2], hashes[2:4], hashes[4:]
    assert features[0] == features[1] == split[0] == labels[0]
    assert len({features[0], split[1], labels[1]}) == 3
