from __future__ import annotations

import builtins
import importlib
import inspect
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch

from flower_fgl.core.atomic import cache_folder, data_folder
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.settings import DATASETS
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.sources import library_loaders, raw_readers
from flower_fgl.datasets.sources.load import SOURCES, find_source, load
from flower_fgl.methods import parse_config
from tests.support import raw_writers as raw

LOAD = "flower_fgl.datasets.sources.load"

# statistics of the published datasets without self-loops and duplicates
REAL_NODE_SETS = {
    "cora": (2708, 5278, 1433, 7),
    "citeseer": (3327, 4552, 3703, 6),
    "pubmed": (19717, 44324, 500, 3),
    "computers": (13752, 245861, 767, 10),
    "photo": (7650, 119081, 745, 8),
    "cs": (18333, 81894, 6805, 15),
    "physics": (34493, 247962, 8415, 5),
    "dblp": (17716, 52867, 1639, 4),
}
# graphs, mean nodes, mean directed edges, features, graphs per class
REAL_GRAPH_SETS = {
    "mutag": (188, 17.93, 39.59, 7, (63, 125)),
    "proteins": (1113, 39.06, 145.63, 3, (663, 450)),
    "nci1": (4110, 29.87, 64.6, 37, (2053, 2057)),
    "imdb-binary": (1000, 19.77, 193.06, 0, (500, 500)),
    "collab": (5000, 74.49, 4914.43, 0, (2600, 775, 1625)),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network in tests")

    def ask(prompt: object = "") -> str:
        raise AssertionError(f"a loader asked: {prompt}")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(builtins, "input", ask)


def load_small(name: str, data: Path, cache_dir: Path) -> NodeDataset | GraphDataset:
    return load(name, data_dir=data, cache_dir=cache_dir, check=False)


def pairs(dataset: NodeDataset | GraphDataset) -> set[tuple[int, int]]:
    return {(u, v) for u, v in dataset.edge_index.T.tolist() if u < v}


def assert_small_graph(dataset: NodeDataset | GraphDataset) -> None:
    assert pairs(dataset) == raw.SIMPLE
    both = [*raw.SIMPLE, *((v, u) for u, v in raw.SIMPLE)]
    assert dataset.edge_index.T.tolist() == [list(pair) for pair in sorted(both)]


def assert_roles(dataset: NodeDataset) -> None:
    for mask, role in (("train", "tr"), ("val", "va"), ("test", "te")):
        assert dataset.masks[mask].nonzero().flatten().tolist() == raw.ROLES[role]


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(p), p.lstat().st_mtime_ns) for p in folder.rglob("*"))


# the table


def test_settings_and_sources_list_the_same_datasets():
    assert list(SOURCES) == list(DATASETS)


def test_the_table_of_datasets_imports_no_heavy_library():
    code = (
        "import sys; from flower_fgl.datasets.sources.registry import SOURCES; "
        "heavy = {'torch', 'torch_geometric', 'ogb', 'scipy', 'pandas', 'numpy'}; "
        "print(len(SOURCES), sorted(heavy & set(sys.modules)))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == f"{len(SOURCES)} []"


def test_the_datasets_command_imports_no_torch():
    code = (
        "import sys; sys.argv = ['flower-fgl', 'datasets']\n"
        "from flower_fgl.cli.main import main\n"
        "try:\n    main()\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "ogbn-arxiv" in process.stdout


@pytest.mark.parametrize("name", [*SOURCES, "tu:ENZYMES"])
def test_every_layout_names_a_reader_and_its_arguments(name):
    for layout in find_source(name).layouts:
        reader = resolve_name(layout.reader)
        inspect.signature(reader).bind(Path(), **layout.arguments)


def test_default_splits_are_percentages_or_public():
    assert SOURCES["ogbn-papers100m"].split == "public"
    for name, source in SOURCES.items():
        if source.split != "public":
            assert sum(int(part) for part in source.split.split("/")) == 100, name
    assert SOURCES["cora"].split == "20/40/40"
    assert SOURCES["ogbn-arxiv"].split == SOURCES["flickr"].split == "60/20/20"
    assert SOURCES["mutag"].split == "90/0/10"


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(
        ConfigError, match=r'Unknown dataset "coar".*Did you mean "cora"'
    ):
        find_source("coar")


@pytest.mark.parametrize("name", ["tu:", "tu:../etc", "tu:A B"])
def test_a_tu_name_cannot_leave_its_folder(name):
    with pytest.raises(ConfigError, match="Unknown dataset"):
        find_source(name)


def test_any_tu_set_is_a_source():
    source = find_source("tu:ENZYMES")
    assert (source.task, source.split) == ("graph", "90/0/10")
    assert source.layouts[0].folder == "TU/ENZYMES"


def test_synthetic_needs_no_files(cache_dir):
    dataset = load("synthetic", data_dir=None, cache_dir=cache_dir)
    assert dataset.num_nodes == 2000
    assert not cache_dir.exists()


# real data


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    # physics is of the source of cs, and large
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n == "physics"))
        for n in REAL_NODE_SETS
    ],
)
def test_a_real_graph_has_its_published_size(name, real_data, cache_dir):
    nodes, edges, features, classes = REAL_NODE_SETS[name]
    dataset = load(name, data_dir=real_data, cache_dir=cache_dir)
    assert dataset.x.shape == (nodes, features)
    assert dataset.edge_index.shape == (2, 2 * edges)
    assert dataset.y.unique().tolist() == list(range(classes))
    assert dataset.class_names == tuple(str(c) for c in range(classes))
    is_sparse = name not in ("computers", "photo")
    assert (dataset.x.layout == torch.sparse_csr) == is_sparse
    row, col = dataset.edge_index
    assert bool(((row * nodes + col).diff() > 0).all())
    assert not bool((row == col).any())


@pytest.mark.parametrize(("name", "train"), [("cora", 140), ("citeseer", 120)])
def test_planetoid_keeps_its_public_split(name, train, real_data, cache_dir):
    dataset = load(name, data_dir=real_data, cache_dir=cache_dir)
    sizes = {mask: int(nodes.sum()) for mask, nodes in dataset.masks.items()}
    assert sizes == {"train": train, "val": 500, "test": 1000}


@pytest.mark.thorough
@pytest.mark.parametrize("name", REAL_GRAPH_SETS)
def test_a_real_set_of_graphs_has_its_published_size(name, real_data, cache_dir):
    graphs, nodes, entries, features, classes = REAL_GRAPH_SETS[name]
    dataset = load(name, data_dir=real_data, cache_dir=cache_dir)
    assert dataset.num_graphs == graphs
    assert dataset.batch.numel() / graphs == pytest.approx(nodes, abs=0.005)
    assert dataset.edge_index.shape[1] / graphs == pytest.approx(entries, abs=0.05)
    assert dataset.x.shape == (dataset.batch.numel(), features)
    assert tuple(dataset.y.bincount().tolist()) == classes


def test_a_second_load_reads_the_same_dataset_from_the_cache(real_data, cache_dir):
    first = load("cora", data_dir=real_data, cache_dir=cache_dir)
    made = tree(cache_dir)
    second = load("cora", data_dir=real_data, cache_dir=cache_dir)
    files = [entry for entry in made if not entry[0].endswith("lock")]
    assert [e for e in tree(cache_dir) if not e[0].endswith("lock")] == files
    assert torch.equal(first.edge_index, second.edge_index)
    assert torch.equal(first.x.to_dense(), second.x.to_dense())
    assert torch.equal(first.y, second.y)


def test_the_data_folder_is_only_read(real_data, cache_dir):
    before = tree(real_data / "TU" / "MUTAG")
    load("mutag", data_dir=real_data, cache_dir=cache_dir)
    assert tree(real_data / "TU" / "MUTAG") == before
    links = [path for path in cache_dir.rglob("MUTAG_*.txt") if path.is_symlink()]
    assert len(links) == 5


def test_the_partial_few_shot_folder_keeps_the_nodes_that_have_features(
    real_data, cache_dir, caplog
):
    with caplog.at_level(logging.WARNING):
        dataset = load("amazon-clothing", data_dir=real_data, cache_dir=cache_dir)
    assert "Kept the 9360 of 24919 nodes" in caplog.text
    assert dataset.x.shape == (9360, 9034)
    assert dataset.num_classes == 20
    assert dataset.class_names[:3] == ("2", "9", "11")
    assert int(dataset.y.min()) == 0


# published layouts, with small files


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("cora-full", "CitationFull/cora/raw/cora.npz"),
        ("cora-full", "CoraFull/cora/raw/cora.npz"),
        ("cora-full", "CoraFull/raw/cora.npz"),
        ("cora-ml", "CitationFull/cora_ml/raw/cora_ml.npz"),
        ("citeseer-full", "CitationFull/citeseer/raw/citeseer.npz"),
        ("dblp", "CitationFull/dblp/raw/dblp.npz"),
        ("photo", "Amazon/Photo/raw/amazon_electronics_photo.npz"),
        ("cs", "Coauthor/CS/raw/ms_academic_cs.npz"),
    ],
)
def test_npz_graphs_are_read_from_where_pyg_puts_them(name, path, data, cache_dir):
    raw.write_npz_graph(data / path)
    dataset = load_small(name, data, cache_dir)
    assert_small_graph(dataset)
    assert dataset.x.layout == torch.sparse_csr
    assert torch.equal(dataset.x.to_dense(), torch.from_numpy(raw.bag_of_words()))
    assert dataset.y.tolist() == raw.LABELS.tolist()


@pytest.mark.parametrize(
    ("name", "folder"), [("flickr", "Flickr"), ("reddit2", "Reddit2")]
)
def test_graph_saint_files_are_read_with_their_roles(name, folder, data, cache_dir):
    raw.write_saint(data / folder / "raw")
    dataset = load_small(name, data, cache_dir)
    assert_small_graph(dataset)
    assert_roles(dataset)
    assert torch.equal(dataset.x, torch.from_numpy(raw.features()))
    assert dataset.y.tolist() == raw.LABELS.tolist()


def test_reddit_is_read_with_its_node_types(data, cache_dir):
    raw.write_reddit(data / "Reddit" / "raw")
    dataset = load_small("reddit", data, cache_dir)
    assert_small_graph(dataset)
    assert_roles(dataset)
    assert torch.equal(dataset.x, torch.from_numpy(raw.features()))


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products"])
def test_ogb_text_gives_the_same_dataset_twice(name, data, cache_dir, capsys):
    raw.write_ogb(data / name.replace("-", "_"), class_column="category")
    allowed = set(torch.serialization.get_safe_globals())
    for _ in range(2):  # from the raw files, then from what OGB's loader has written
        dataset = load_small(name, data, cache_dir)
        assert_small_graph(dataset)
        assert_roles(dataset)
        assert torch.equal(dataset.x, torch.from_numpy(raw.features()))
        assert dataset.class_names == ("cs.A", "cs.B", "cs.C")
    assert capsys.readouterr().out == ""
    now = set(torch.serialization.get_safe_globals())
    assert not {c.__name__ for c in now - allowed} & {"GlobalStorage", "DataEdgeAttr"}


def test_ogb_classes_without_a_mapping_are_numbered(data, cache_dir):
    raw.write_ogb(data / "ogbn_arxiv")
    assert load_small("ogbn-arxiv", data, cache_dir).class_names == ("0", "1", "2")


def test_papers100m_marks_papers_without_a_class(data, cache_dir):
    raw.write_papers100m(data / "ogbn_papers100M")
    dataset = load_small("ogbn-papers100m", data, cache_dir)
    assert_small_graph(dataset)
    assert dataset.y.tolist() == [*raw.LABELS[:11], -1]
    assert dataset.masks["test"].nonzero().flatten().tolist() == [5, 6, 9, 10]


def test_importing_ogb_starts_no_thread_and_keeps_outdated_importable():
    ogb = library_loaders._import_ogb()
    assert ogb.version.check_outdated is None
    assert sys.modules.get("outdated", "absent") is not None
    names = [thread.name for thread in threading.enumerate()]
    assert not any("check" in name for name in names)


def test_ogb_files_of_another_release_are_rejected_without_a_prompt(
    data, cache_dir, monkeypatch
):
    raw.write_ogb(data / "ogbn_arxiv")
    monkeypatch.setattr(library_loaders, "_ogb_version", lambda *_: "2")
    with pytest.raises(DataError, match=r"expected RELEASE_v2\.txt"):
        load_small("ogbn-arxiv", data, cache_dir)


@pytest.mark.parametrize("folder", ["FewShot/dblp", "FewShot"])
def test_few_shot_tables_are_joined_by_node_number(folder, data, cache_dir):
    raw.write_few_shot(data / folder, "dblp")
    dataset = load_small("dblp-few-shot", data, cache_dir)
    assert_small_graph(dataset)
    assert dataset.x.layout == torch.sparse_csr
    assert torch.equal(dataset.x.to_dense(), 2 * torch.from_numpy(raw.bag_of_words()))
    assert dataset.y.tolist() == raw.LABELS.tolist()
    assert dataset.class_names == ("4", "7", "9")


def test_a_few_shot_folder_without_training_table_keeps_the_nodes_of_the_test_table(
    data, cache_dir, caplog
):
    folder = data / "FewShot" / "Amazon_clothing_partial"
    raw.write_few_shot(folder, "Amazon_clothing", has_train=False)
    dataset = load_small("amazon-clothing", data, cache_dir)
    assert pairs(dataset) == {(0, 1), (1, 2), (2, 3)}  # nodes 3 to 6
    expected = 2 * torch.from_numpy(raw.bag_of_words()[3:7])
    assert torch.equal(dataset.x.to_dense(), expected)
    assert dataset.class_names == ("7",)
    assert "Kept the 4 of 11 nodes" in caplog.text


def test_few_shot_nodes_in_no_table_are_unlabelled(data, cache_dir, caplog):
    folder = data / "FewShot" / "dblp"
    raw.write_few_shot(folder, "dblp")
    with open(folder / "dblp_network", "a") as network:
        network.write("0\t12\n")
    dataset = load_small("dblp-few-shot", data, cache_dir)
    assert dataset.y[12] == -1
    assert not dataset.x.to_dense()[12].any()
    assert "1 of 13 nodes are in neither table" in caplog.text


def test_few_shot_tables_that_share_a_node_are_rejected(data, cache_dir):
    folder = data / "FewShot" / "dblp"
    raw.write_few_shot(folder, "dblp")
    (folder / "dblp_test.mat").write_bytes((folder / "dblp_train.mat").read_bytes())
    with pytest.raises(DataError, match="a node number is repeated"):
        load_small("dblp-few-shot", data, cache_dir)


def test_fold_ppi_is_converted_and_read_as_documented(data, cache_dir, monkeypatch):
    folder = data / "FoldPPI"
    raw.write_g_meta(folder)
    _, _, recipe = (raw_readers.fold_ppi.__doc__ or "").partition("::\n")
    monkeypatch.chdir(folder)
    exec(textwrap.dedent(recipe), {"pickle": pickle, "np": np, "Path": Path})
    dataset = load_small("fold-ppi", data, cache_dir)
    assert_small_graph(dataset)
    assert torch.equal(dataset.x, torch.from_numpy(raw.features()))
    assert dataset.y.tolist() == [*raw.LABELS[:11], -1]
    assert dataset.class_names == ("a.1", "b.1", "c.2")
    assert dataset.network.tolist() == [0] * 7 + [1] * 4 + [2]


def test_fold_ppi_edges_may_not_join_networks(data, cache_dir):
    folder = data / "FoldPPI"
    folder.mkdir(parents=True)
    np.savez(
        folder / "fold_ppi.npz",
        x=raw.features(),
        edge_index=raw.EDGES.T,
        y=raw.LABELS,
        class_names=np.array(["a", "b", "c"]),
        network=np.arange(raw.NUM_NODES),
    )
    with pytest.raises(DataError, match="joins nodes of two networks"):
        load_small("fold-ppi", data, cache_dir)


def test_fold_ppi_as_published_is_not_unpickled(data, cache_dir):
    raw.write_g_meta(data / "FoldPPI")
    with pytest.raises(DataError, match=r"fold_ppi\.npz.*docstring"):
        load_small("fold-ppi", data, cache_dir)


@pytest.mark.parametrize(
    ("node_labels", "attributes", "width"),
    [(True, False, 3), (True, True, 3), (False, True, 2), (False, False, 0)],
)
def test_tu_features_are_labels_else_attributes_else_none(
    node_labels, attributes, width, data, cache_dir
):
    raw.write_tu(data / "TU", "TINY", node_labels=node_labels, attributes=attributes)
    dataset = load_small("tu:TINY", data, cache_dir)
    assert dataset.x.shape[1] == width
    if node_labels:
        assert dataset.x.argmax(dim=1).tolist() == raw.LABELS.tolist()
    elif attributes:
        assert torch.equal(dataset.x, torch.from_numpy(raw.features(2)))
    assert_small_graph(dataset)
    assert dataset.batch.tolist() == [0] * 7 + [1] * 4 + [2]
    assert dataset.y.tolist() == [0, 1, 0]


def test_tu_graphs_without_classes_are_rejected(data, cache_dir):
    raw.write_tu(data / "TU", "TINY")
    values = data / "TU" / "TINY" / "raw" / "TINY_graph_attributes.txt"
    values.write_text("0.5\n1.5\n2.5\n")
    with pytest.raises(DataError, match="no classes"):
        load_small("tu:TINY", data, cache_dir)


@pytest.mark.parametrize(
    "parts", [("graph_indicator",), ("A",), ("graph_indicator", "A")]
)
def test_tu_files_that_number_from_zero_are_named(parts, data, cache_dir):
    raw.write_tu(data / "TU", "TINY")
    for part in parts:
        path = data / "TU" / "TINY" / "raw" / f"TINY_{part}.txt"
        table = np.loadtxt(path, int, delimiter=",") - 1
        np.savetxt(path, table, fmt="%d", delimiter=", ")
    names = " and ".join(f"TINY_{part}.txt" for part in parts)
    with pytest.raises(DataError, match=f"^{names}: .* numbered from 1.* Add 1 to"):
        load_small("tu:TINY", data, cache_dir)


@pytest.mark.parametrize("label", ["0.5", "1.0", "active"])
def test_tu_labels_that_are_no_whole_numbers_are_named(label, data, cache_dir):
    raw.write_tu(data / "TU", "TINY")
    labels = data / "TU" / "TINY" / "raw" / "TINY_graph_labels.txt"
    labels.write_text(f"0\n{label}\n0\n")
    message = f'TINY_graph_labels.txt, line 2: expected the class .*, got "{label}"'
    with pytest.raises(DataError, match=message) as info:
        load_small("tu:TINY", data, cache_dir)
    assert "ownload" not in str(info.value)


def test_collab_from_text_and_from_arrays_is_equal(data, cache_dir, tmp_path):
    raw.write_tu(data / "TU", "COLLAB", node_labels=False)
    raw.write_collab(tmp_path / "other" / "TU" / "COLLAB" / "COLLAB.npz")
    text = load_small("collab", data, cache_dir)
    arrays = load_small("collab", tmp_path / "other", cache_dir)
    for field in ("x", "edge_index", "batch", "y"):
        assert torch.equal(getattr(text, field), getattr(arrays, field))


# errors


def test_an_error_lists_published_and_found_statistics(data, cache_dir):
    raw.write_saint(data / "Flickr" / "raw")
    with pytest.raises(DataError, match=r"published 89,250 nodes, found 12") as info:
        load("flickr", data_dir=data, cache_dir=cache_dir)
    for part in ("500 features", "7 classes", "published 899,756 entries, found 12"):
        assert part in str(info.value)


def test_missing_data_are_an_error_with_folders_and_source(data, cache_dir):
    with pytest.raises(DataError) as info:
        load("cora", data_dir=data, cache_dir=cache_dir)
    message = str(info.value)
    for part in (
        str(data / "Planetoid" / "Cora"),
        str(cache_dir),
        "ind.cora.allx",
        "https://github.com/kimiyoung/planetoid",
        "FLOWER_FGL_DATA",
        "no network in tests",
    ):
        assert part in message


@pytest.mark.parametrize(
    "name", ["cora", "photo", "flickr", "reddit", "mutag", "ogbn-arxiv"]
)
def test_a_download_without_network_is_one_error_and_leaves_nothing(name, cache_dir):
    with pytest.raises(DataError, match="no network in tests"):
        load(name, data_dir=None, cache_dir=cache_dir)
    assert [path.name for path in (cache_dir / "sources" / name).iterdir()] == ["lock"]


@pytest.mark.parametrize("name", ["ogbn-products", "ogbn-papers100m"])
def test_a_huge_dataset_is_never_downloaded_automatically(name, cache_dir, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("tried to download")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    with pytest.raises(
        DataError, match=r"not downloaded automatically.*snap\.stanford\.edu"
    ):
        load(name, data_dir=None, cache_dir=cache_dir)


@pytest.fixture
def drive(monkeypatch):
    """Simulate a Google Drive with Flickr; set ``broken`` to a file that fails."""
    module = library_loaders._import_quietly("torch_geometric.datasets.flickr")
    state = {"fetched": [], "broken": ""}

    def fetch(_id: str, folder: str, filename: str) -> None:
        if filename == state["broken"]:
            (Path(folder) / filename).write_bytes(b"half")
            raise ConnectionResetError("the line broke")
        state["fetched"].append(filename)
        store = Path(folder).parent / "upstream" / "raw"
        if not store.exists():
            raw.write_saint(store)
        (Path(folder) / filename).write_bytes((store / filename).read_bytes())

    monkeypatch.setattr(module, "download_google_url", fetch)
    monkeypatch.setattr(f"{LOAD}._probe", lambda url: None)
    return state


def test_a_download_is_kept_and_done_once(drive, cache_dir):
    for _ in range(3):
        dataset = load("flickr", data_dir=None, cache_dir=cache_dir, check=False)
        assert_small_graph(dataset)
    assert len(drive["fetched"]) == 4
    assert not list((cache_dir / "sources" / "flickr").glob("partial-*"))


def test_a_broken_download_leaves_nothing_and_can_be_repeated(drive, cache_dir):
    drive["broken"] = "class_map.json"
    with pytest.raises(DataError, match="ConnectionResetError: the line broke"):
        load("flickr", data_dir=None, cache_dir=cache_dir, check=False)
    assert [path.name for path in (cache_dir / "sources" / "flickr").iterdir()] == [
        "lock"
    ]
    drive["broken"] = ""
    assert_small_graph(load("flickr", data_dir=None, cache_dir=cache_dir, check=False))


def test_an_interrupted_load_leaves_no_half_made_stage(data, cache_dir, monkeypatch):
    raw.write_saint(data / "Flickr" / "raw")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(library_loaders, "undirected_simple", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_small("flickr", data, cache_dir)
    assert [path.name for path in (cache_dir / "sources" / "flickr").iterdir()] == [
        "lock"
    ]
    assert_small_graph(load_small("flickr", data, cache_dir))


def test_folders_left_by_a_killed_process_are_deleted(data, cache_dir):
    raw.write_saint(data / "Flickr" / "raw")
    left_over = cache_dir / "sources" / "flickr" / "partial-x" / "raw"
    left_over.mkdir(parents=True)
    load_small("flickr", data, cache_dir)
    assert not left_over.exists()


def test_a_damaged_stage_is_rebuilt_with_a_warning(data, cache_dir, caplog):
    raw.write_saint(data / "Flickr" / "raw")
    load_small("flickr", data, cache_dir)
    [processed] = cache_dir.rglob("data.pt")
    processed.write_bytes(processed.read_bytes()[:100])
    assert_small_graph(load_small("flickr", data, cache_dir))
    assert "will be rebuilt" in caplog.text


def test_changed_raw_files_are_processed_again(data, cache_dir):
    raw.write_saint(data / "Flickr" / "raw")
    load_small("flickr", data, cache_dir)
    np.save(data / "Flickr" / "raw" / "feats.npy", 2 * raw.features())
    dataset = load_small("flickr", data, cache_dir)
    assert torch.equal(dataset.x, 2 * torch.from_numpy(raw.features()))
    assert len(list((cache_dir / "sources" / "flickr").glob("stage-*"))) == 1


def test_damaged_raw_files_are_one_error_with_their_folder(data, cache_dir):
    raw.write_saint(data / "Flickr" / "raw")
    (data / "Flickr" / "raw" / "adj_full.npz").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot be read from .*Flickr") as info:
        load_small("flickr", data, cache_dir)
    assert "download it again" in str(info.value)


def test_nan_features_are_rejected(data, cache_dir):
    raw.write_saint(data / "Flickr" / "raw")
    features = raw.features()
    features[4, 2] = np.nan
    np.save(data / "Flickr" / "raw" / "feats.npy", features)
    with pytest.raises(DataError, match="first at node 4, column 2"):
        load_small("flickr", data, cache_dir)


def test_a_cache_that_cannot_be_written_is_one_error(data, tmp_path):
    raw.write_saint(data / "Flickr" / "raw")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="FLOWER_FGL_CACHE"):
        load_small("flickr", data, tmp_path / "file")


def test_a_full_disk_is_one_error(data, cache_dir, monkeypatch):
    raw.write_saint(data / "Flickr" / "raw")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"{LOAD}._link_files", full)
    with pytest.raises(DataError, match=r"No space left.*Free some disk space"):
        load_small("flickr", data, cache_dir)


@pytest.mark.slow
def test_simultaneous_processes_process_a_dataset_once(data, cache_dir):
    raw.write_saint(data / "Flickr" / "raw")
    code = (
        "from pathlib import Path; from flower_fgl.datasets.sources.load import load; "
        f"d = load('flickr', data_dir=Path({str(data)!r}), "
        f"cache_dir=Path({str(cache_dir)!r}), check=False); "
        "print(d.edge_index.shape[1])"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    del environment["PYTEST_CURRENT_TEST"]  # silences torch-geometric's "Processing..."
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(4)
    ]
    answers = [worker.communicate(timeout=120) for worker in workers]
    assert [out.strip() for out, _ in answers] == ["18"] * 4
    assert sum("Processing" in err for _, err in answers) == 1


# folders


def test_the_data_folder_is_the_setting_then_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("FLOWER_FGL_DATA", raising=False)
    assert data_folder("") is None
    assert data_folder(None) is None
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setenv("FLOWER_FGL_DATA", str(tmp_path / "a"))
    assert data_folder("") == tmp_path / "a"
    assert data_folder(str(tmp_path / "b")) == tmp_path / "b"


def test_a_data_folder_that_does_not_exist_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWER_FGL_DATA", str(tmp_path / "no"))
    with pytest.raises(DataError, match="FLOWER_FGL_DATA must name a folder"):
        data_folder()
    with pytest.raises(DataError, match="data-dir must name a folder"):
        data_folder(str(tmp_path / "neither"))


def test_the_cache_folder_can_be_set(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("FLOWER_FGL_CACHE")
    assert cache_folder().name == "flower-fgl"


def test_aifb_has_its_published_size(real_data, cache_dir):
    if not (real_data / "AIFB-hetero").is_dir():
        pytest.skip("AIFB is not in the data folder")
    dataset = load("aifb", data_dir=real_data, cache_dir=cache_dir)
    assert dataset.num_nodes == 7262
    assert len(dataset.schema.node_types) == 7
    assert len(dataset.schema.relations) == 52
    assert dataset.messages.index.shape == (2, 24405)
    split = {part: int(mask.sum()) for part, mask in dataset.masks.items()}
    assert split == {"train": 112, "val": 28, "test": 36}
    # as many persons, edges and relations as in the authors' own clients
    for rule, persons, edges in (
        ("random-edges", (220, 235), (12900, 13110)),
        ("random-edge-types", (220, 237), (8000, 18000)),
    ):
        values = {"dataset": "aifb", "partition": rule, "model": "rgcn"}
        clients, _, _ = build_clients(
            parse_config(values | {"data-dir": str(real_data)}), 3
        )
        for client in clients:
            held = client.graph.messages
            assert persons[0] <= client.num_items <= persons[1]
            assert edges[0] <= held.index.shape[1] <= edges[1]
            assert 22 <= len(held.relation.unique()) <= 52


def test_ogbn_mag_is_read_as_by_its_own_library(data, cache_dir):
    folder = data / "ogbn_mag"
    raw.write_mag(folder)
    dataset = load_small("ogbn-mag", data, cache_dir)
    library_loaders._import_ogb()
    reader = importlib.import_module("ogb.io.read_graph_raw")
    (graph,) = reader.read_csv_heterograph_raw(str(folder / "raw"))
    schema, kinds = dataset.schema, dataset.node_type
    assert set(schema.node_types) == set(graph["num_nodes_dict"])
    start = {}
    for number, kind in enumerate(schema.node_types):
        rows = (kinds == number).nonzero().flatten()
        assert len(rows) == graph["num_nodes_dict"][kind]
        start[kind] = int(rows[0])
    found, messages = graph["edge_index_dict"], dataset.messages
    assert schema.relations == tuple(sorted(found))
    for number, triple in enumerate(schema.relations):
        ends = np.array([[start[triple[0]]], [start[triple[2]]]])
        due = {tuple(pair) for pair in (found[triple] + ends).T.tolist()}
        listed = messages.index[:, messages.relation == number].T.tolist()
        assert {tuple(pair) for pair in listed} == due
        assert len(listed) == len(due)  # a repeat is merged
    papers = slice(start["paper"], start["paper"] + raw.NUM_NODES)
    expected = graph["node_feat_dict"]["paper"]
    np.testing.assert_allclose(dataset.x[papers].numpy(), expected, rtol=1e-6)
    assert schema.widths[schema.node_types.index("paper")] == ("paper", 5)
    assert dataset.y[papers].tolist() == raw.LABELS.tolist()
    assert int((dataset.y >= 0).sum()) == raw.NUM_NODES
    train = (dataset.masks["train"].nonzero().flatten() - start["paper"]).tolist()
    assert train == raw.ROLES["tr"]
    values = {"dataset": "ogbn-mag", "model": "rgcn"}
    assert parse_config(values).reads_types


def test_aifb_is_read_as_documented(data, cache_dir):
    folder = data / "AIFB-hetero"
    folder.mkdir(parents=True)
    mask = np.eye(3, dtype=bool)
    arrays = {
        "node_types": np.array(["group", "person"]),
        "num_nodes": np.array([2, 3]),
        "edge_types": np.array(
            [["group", "o#member", "person"], ["person", "knows", "person"]]
        ),
        "edge_ptr": np.array([0, 2, 5]),
        "edge_src": np.array([0, 1, 0, 1, 0], dtype=np.int16),
        "edge_dst": np.array([2, 0, 1, 2, 1], dtype=np.int16),
        "target_type": np.array("person"),
        "num_classes": np.array(2),
        "y": np.array([1, 0, -1], dtype=np.int16),
        "train_mask": mask[0],
        "val_mask": mask[1],
        "test_mask": np.zeros(3, dtype=bool),
    }
    np.savez(folder / "aifb.npz", **arrays)
    dataset = load_small("aifb", data, cache_dir)
    assert dataset.schema.relations == (
        ("group", "o.member", "person"),
        ("person", "knows", "person"),
    )
    assert dataset.schema.target == "person"
    assert dataset.x.shape == (5, 0)
    assert dataset.y.tolist() == [-1, -1, 1, 0, -1]
    assert dataset.messages.index.tolist() == [[0, 1, 2, 3], [4, 2, 3, 4]]
    assert dataset.messages.relation.tolist() == [0, 0, 1, 1]  # a repeat is merged
    assert dataset.masks["train"].nonzero().tolist() == [[2]]
    np.savez(folder / "aifb.npz", **(arrays | {"edge_ptr": np.array([0, 2])}))
    with pytest.raises(DataError, match="edge_ptr or num_nodes has the wrong length"):
        load_small("aifb", data, cache_dir)
    del arrays["y"]
    np.savez(folder / "aifb.npz", **arrays)
    with pytest.raises(DataError, match="the array y is missing"):
        load_small("aifb", data, cache_dir)
