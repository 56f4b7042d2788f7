"""Datasets in the layouts of torch-geometric and OGB, with small files of each layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from flower_fgl import simulate
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.settings import AUROC_DATASETS, DATASETS, UNSUPPORTED
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.sources import library_loaders
from flower_fgl.datasets.sources import load as load_module
from flower_fgl.datasets.sources.load import SOURCES, load
from flower_fgl.datasets.sources.raw_paths import Layout
from flower_fgl.lab.report.numbers import cost_until
from flower_fgl.lab.tables.cells import make_cell
from flower_fgl.lab.tables.compare import main_metric
from flower_fgl.lab.tables.results_table import ResultsTable
from flower_fgl.lab.tables.table_formats import format_table
from flower_fgl.lab.tune.trials import _outcome
from flower_fgl.methods import parse_config
from flower_fgl.runs.summary import score_text, summarise
from tests.support import raw_writers as raw
from tests.support.real_sets import skip_unless_whole

Writer = Callable[[Path], None]


def geom_gcn(place: str, name: str, *, lists_indices: bool = False) -> Writer:
    return lambda data: raw.write_geom_gcn(
        data / place, name, lists_indices=lists_indices
    )


def heterophilous(name: str) -> Writer:
    place = f"HeterophilousGraphDataset/{name}/raw"
    return lambda data: raw.write_heterophilous(data / place, name)


def rozemberczki(place: str) -> Writer:
    return lambda data: raw.write_rozemberczki(data / place)


LAYOUTS: dict[str, Writer] = {
    "actor": geom_gcn("Actor/raw", "film", lists_indices=True),
    "chameleon": geom_gcn("WikipediaNetwork/chameleon/geom_gcn/raw", "chameleon"),
    "texas": geom_gcn("WebKB/texas/raw", "texas"),
    "roman-empire": heterophilous("roman_empire"),
    "squirrel-filtered": heterophilous("squirrel_filtered"),
    "airports-brazil": lambda data: raw.write_airports(
        data / "Airports/brazil/raw", "brazil"
    ),
    "twitch-pt": rozemberczki("Twitch/PT/raw/PT.npz"),
    "lastfm-asia": rozemberczki("LastFMAsia/raw/lastfm_asia.npz"),
    "deezer-europe": rozemberczki("DeezerEurope/raw/deezer_europe.npz"),
    "facebook-page-page": rozemberczki("FacebookPagePage/raw/facebook.npz"),
    "wiki-cs": lambda data: raw.write_wiki_cs(data / "WikiCS/raw"),
}
SPLIT = ("actor", "chameleon", "texas", "roman-empire", "squirrel-filtered", "wiki-cs")


def read(name: str, data: Path, tmp_path: Path) -> NodeDataset | GraphDataset:
    return load(
        name,
        data_dir=data,
        cache_dir=tmp_path / "cache",
        check=False,
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_read(name: str, tmp_path: Path) -> None:
    LAYOUTS[name](tmp_path / "data")
    dataset = read(name, tmp_path / "data", tmp_path)
    assert isinstance(dataset, NodeDataset)
    found = {(u, v) for u, v in dataset.edge_index.T.tolist() if u < v}
    assert found == raw.SIMPLE
    assert dataset.y.tolist() == raw.LABELS.tolist()
    if name in ("actor", "chameleon", "texas"):
        words = raw.bag_of_words(8)
        words[:, 7] = 1
        assert torch.equal(dataset.x, torch.from_numpy(words))
    elif name == "airports-brazil":
        assert torch.equal(dataset.x, torch.eye(raw.NUM_NODES))
    else:
        assert torch.equal(dataset.x, torch.from_numpy(raw.features()))
    assert bool(dataset.masks) == (name in SPLIT)
    for mask, role in (("train", "tr"), ("val", "va"), ("test", "te")):
        if name in SPLIT:  # the first one of several
            nodes = dataset.masks[mask].nonzero().flatten().tolist()
            assert nodes == raw.ROLES[role]


class StopError(Exception):
    """Ends the constructor of a library's loader before it reads files."""


def files_of_library(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths that torch-geometric's loader reads below the data folder."""
    made: list[Any] = []

    def stop(self: Any, root: str, *_: Any, **__: Any) -> None:
        self.root = root
        made.append(self)
        raise StopError

    datasets = library_loaders._import_quietly("torch_geometric.datasets")
    arguments = dict(layout.arguments)
    loader = str(arguments.pop("loader", ""))
    if layout.reader.endswith(":tu_graphs"):
        loader = "TUDataset"
    monkeypatch.setattr("torch_geometric.data.InMemoryDataset.__init__", stop)
    place = Path("/data") / layout.folder
    with pytest.raises(StopError):
        getattr(datasets, loader)(
            str(place if layout.leaf == "." else place.parent), **arguments
        )
    dataset = made[0]
    names = dataset.raw_file_names
    names = [names] if isinstance(names, str) else names
    return {f"{Path(dataset.raw_dir).relative_to('/data')}/{name}" for name in names}


BY_PYG = [
    pytest.param(layout, id=f"{name}-{layout.folder}")
    for name, source in SOURCES.items()
    for layout in source.layouts
    if layout.reader.endswith((":pyg_nodes", ":tu_graphs"))
    and layout.folder != "CoraFull"  # our own short form, copied to CoraFull/cora
]


@pytest.mark.parametrize("layout", BY_PYG)
def test_our_files_are_those_that_torch_geometric_reads(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {f"{layout.folder}/{file}" for file in layout.files}
    if layout.reader.endswith(":tu_graphs"):  # PyG's list leaves out the classes
        ours = {file for file in ours if not file.endswith("_graph_labels.txt")}
    assert files_of_library(layout, monkeypatch) == ours


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("ogb")])
def test_our_table_of_ogb_is_that_of_the_library(name: str) -> None:
    source, kind = SOURCES[name], "node" if name.startswith("ogbn") else "graph"
    (layout,) = source.layouts
    title = str(layout.arguments["name"])
    folder = Path(str(library_loaders._import_ogb().__file__)).parent
    table = pd.read_csv(folder / f"{kind}proppred" / "master.csv", index_col=0)
    row = table[title]
    assert layout.url == row["url"]
    assert f"RELEASE_v{row['version']}.txt" in layout.files
    classes = source.statistics.classes or -1  # numbers have none
    assert classes == int(row["num classes"])
    assert (source.statistics.targets or 1) == int(row["num tasks"])
    is_binary = row["binary"] == "True"
    suffix = "npz" if is_binary else "csv.gz"
    if kind == "graph":
        assert layout.arguments["split"] == row["split"]
        has_atoms = "raw/node-feat.csv.gz" in layout.files
        assert has_atoms == (row["has_node_attr"] == "True")
    assert all(f.endswith(suffix) for f in layout.files if f.startswith("raw/"))


@pytest.mark.parametrize(
    ("name", "nodes", "edges", "train"),
    [("texas", 183, 279, 87), ("wisconsin", 251, 450, 120)],
)
def test_real_web_pages_have_their_published_size(
    name: str, nodes: int, edges: int, train: int, real_data: Path, tmp_path: Path
) -> None:
    skip_unless_whole(name, real_data)
    dataset = load(name, data_dir=real_data, cache_dir=tmp_path)
    assert isinstance(dataset, NodeDataset)
    assert dataset.x.shape == (nodes, 1703)
    assert dataset.edge_index.shape == (2, 2 * edges)
    assert int(dataset.masks["train"].sum()) == train


@pytest.mark.parametrize("name", ["chameleon-filtered", "squirrel-filtered"])
def test_the_real_filtered_graphs_have_their_published_size(
    name: str, real_data: Path, tmp_path: Path
) -> None:
    file = f"{name.replace('-', '_')}.npz"
    found = real_data / "owners" / "heterophilous" / "raw" / file
    if not found.is_file():
        pytest.skip(f"FLOWER_FGL_DATA does not contain {file}")
    place = tmp_path / "data" / "HeterophilousGraphDataset" / file[:-4] / "raw" / file
    place.parent.mkdir(parents=True)
    place.symlink_to(found)
    dataset = load(name, data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")
    assert isinstance(dataset, NodeDataset)
    # the published shares of each of the ten splits
    shares = [float(mask.float().mean()) for mask in dataset.masks.values()]
    assert shares == pytest.approx([0.47, 0.32, 0.21], abs=0.02)


def test_the_filtered_graphs_are_the_only_file_without_a_library_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(url: str, folder: str, **_: object) -> None:
        assert url.endswith("/main/data/chameleon_filtered.npz")
        raw.write_heterophilous(Path(folder), "chameleon_filtered")

    monkeypatch.setattr("torch_geometric.data.download_url", write)
    monkeypatch.setattr("flower_fgl.datasets.sources.load._probe", lambda url: None)
    dataset = load("chameleon-filtered", data_dir=None, cache_dir=tmp_path, check=False)
    assert dataset.num_classes == 3


def test_atoms_are_one_hot_and_the_split_is_the_published_one(tmp_path: Path) -> None:
    raw.write_ogb_graphs(tmp_path / "data" / "ogbg_molhiv", "scaffold")
    dataset = read("ogbg-molhiv", tmp_path / "data", tmp_path)
    assert isinstance(dataset, GraphDataset)
    assert dataset.batch.tolist() == [0] * 7 + [1] * 4 + [2]
    assert dataset.y.tolist() == [0, 1, 0]
    found = {(u, v) for u, v in dataset.edge_index.T.tolist() if u < v}
    assert found == raw.SIMPLE
    masks = {name: mask.tolist() for name, mask in dataset.masks.items()}
    assert masks == {
        "train": [True, False, False],
        "val": [False, True, False],
        "test": [False, False, True],
    }
    # a linear layer on the features is OGB's encoder of atoms
    library_loaders._import_ogb()  # first, so that OGB asks no server for its version
    encoders = import_module("ogb.graphproppred.mol_encoder")
    torch.manual_seed(0)
    encoder = encoders.AtomEncoder(4)
    weight = torch.cat([table.weight for table in encoder.atom_embedding_list])
    expected = encoder(torch.from_numpy(raw.atoms()))
    torch.testing.assert_close(dataset.x.to_dense() @ weight, expected)


def test_ogb_graphs_without_features_have_width_zero(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "ogbg_ppa"
    raw.write_ogb_graphs(folder, "species", has_atoms=False)
    assert read("ogbg-ppa", tmp_path / "data", tmp_path).x.shape == (12, 0)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0, 1], [1, 0], [0, 0]], "got 2 labels"),
        ([[0.5], [1.5], [2.5]], "float"),
    ],
)
def test_ogb_graphs_need_one_class_each(
    labels: object, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "ogbg_molbace"
    raw.write_ogb_graphs(folder, "scaffold", labels=labels)
    with pytest.raises(DataError, match=f"one class per graph.*{message}"):
        read("ogbg-molbace", tmp_path / "data", tmp_path)


def test_ogb_graphs_of_another_release_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "ogbg_molbbbp"
    raw.write_ogb_graphs(folder, "scaffold")
    (folder / "RELEASE_v1.txt").rename(folder / "RELEASE_v9.txt")
    with pytest.raises(DataError, match=r"missing.*RELEASE_v1\.txt"):
        read("ogbg-molbbbp", tmp_path / "data", tmp_path)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_dataset_without_single_classes_is_refused_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"dataset": name})
    assert f'"{name}" is not supported: {UNSUPPORTED[name]}' in str(error.value)


def test_unsupported_and_ranked_datasets_are_not_and_are_datasets() -> None:
    assert not {*UNSUPPORTED} & {*DATASETS}
    assert {*DATASETS} >= AUROC_DATASETS
    assert all(SOURCES[name].statistics.classes == 2 for name in AUROC_DATASETS)


def test_the_public_split_of_graphs_reaches_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = [[i % 2] for i in range(12)]
    folder = tmp_path / "data" / "ogbg_molhiv"
    raw.write_ogb_graphs(folder, "scaffold", labels=labels)
    raw._write_gz(folder / "raw" / "num-node-list.csv.gz", [[1]] * 12)
    raw._write_gz(folder / "raw" / "num-edge-list.csv.gz", [[0]] * 12)
    raw._write_gz(folder / "raw" / "edge.csv.gz", [[0, 0]])
    for part, graphs in (("train", range(6)), ("valid", range(6, 8)), ("test", [11])):
        table = [[g] for g in graphs]
        raw._write_gz(folder / "split" / "scaffold" / f"{part}.csv.gz", table)
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load_module, "_check_statistics", lambda *_: None)
    config = parse_config(
        {
            "dataset": "ogbg-molhiv",
            "setting": "graph",
            "partition": "uniform",
            "data-dir": str(tmp_path / "data"),
            "clients": 2,
        }
    )
    clients, _, _ = build_clients(config, 2)
    trained = sorted(i for client in clients for i in client.node_ids.tolist())
    assert trained == list(range(6))
    sizes = [sum(len(c.evaluation[i].y) for c in clients) for i in (0, 1)]
    assert sizes == [2, 1]


@pytest.fixture
def minesweeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a graph of two classes in the layout of Minesweeper."""
    import numpy as np

    rng = np.random.default_rng(0)
    y = (rng.random(80) < 0.3).astype(int)
    place = np.tile(np.arange(80) % 3, (10, 1))
    folder = tmp_path / "data" / "HeterophilousGraphDataset" / "minesweeper" / "raw"
    folder.mkdir(parents=True)
    np.savez(
        folder / "minesweeper.npz",
        node_features=(rng.random((80, 7)) + y[:, None]).astype("float32"),
        node_labels=y,
        edges=rng.integers(0, 80, (160, 2)),
        train_masks=place == 0,
        val_masks=place == 1,
        test_masks=place == 2,
    )
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load_module, "_check_statistics", lambda *_: None)
    return tmp_path / "data"


def test_rare_classes_are_scored_and_selected_by_auroc(
    minesweeper: Path, tmp_path: Path
) -> None:
    run = simulate(
        "fedavg",
        "minesweeper",
        clients=2,
        rounds=4,
        hidden_channels=4,
        data_dir=str(minesweeper),
        output_dir=str(tmp_path / "runs"),
    )
    areas = [row["metrics"]["local"]["val"]["auroc"] for row in run.rounds]
    assert run.best is not None
    assert run.best["val"]["auroc"] == max(areas)
    assert run.summary["metric"] == "auroc"
    assert main_metric(run) == "auroc"
    assert _outcome(run, 1.0).score == max(areas)
    pooled = run.best["test"]
    own = [
        row["metrics"]["local"]["test"]
        for row in run.clients
        if row["round"] == run.best["round"]
    ]
    for name in ("auroc", "auprc"):  # of each client, and pooled by its nodes
        total = sum(scores[name] * scores["num_nodes"] for scores in own)
        assert pooled[name] == pytest.approx(total / pooled["num_nodes"])
    tests = [row["metrics"]["local"]["test"]["auroc"] for row in run.rounds]
    assert [row["metric"] for row in run.rounds] == ["auroc"] * 4
    assert f"test AUROC {100 * tests[0]:.1f} %" in score_text(run.rounds[0])
    cost = cost_until(run, max(tests))
    assert (cost.server_round, cost.best) == (1 + tests.index(max(tests)), max(tests))
    with pytest.raises(
        ConfigError, match=r'no score "mrr" of "test"\. Known: accuracy, auprc'
    ):
        cost_until(run, 0.5, metric="mrr")
    table = ResultsTable([make_cell([run], experiment="x", row="fedavg")])
    assert table.metric == "auroc"
    scores = table.cells[0].draws[0].scores["own"]
    assert scores["val"]["auroc"] == pytest.approx(max(areas), abs=1e-6)
    lowest = min(entry["auroc"] for entry in own)
    assert scores["test"]["worst_auroc"] == pytest.approx(lowest, abs=1e-6)
    shown = format_table(table)
    titles = ("test AUROC", "accuracy", "macro-F1", "AUPRC", "worst client")
    assert re.search(r" \| ".join(titles), shown)


def test_accuracy_selects_by_default() -> None:
    rows = [
        {
            "round": number,
            "phase": "train",
            "status": "ok",
            "metrics": {"local": {"val": {"num_nodes": 5, **scores}}},
        }
        for number, scores in enumerate(
            ({"accuracy": 0.9, "auroc": 0.6}, {"accuracy": 0.8, "auroc": 0.7}), start=1
        )
    ]
    header = dict.fromkeys(
        ("method", "dataset", "clients", "seed", "engine", "partition_sha256"), None
    )
    for metric, best in (("accuracy", 1), ("auroc", 2)):
        found = summarise(
            rows, evaluate=None, status="completed", metric=metric, **header
        )
        assert found["best"]["round"] == best
        assert ("metric" in found) == (metric == "auroc")
