"""Natural owners: listing, agreement on features and classes, and bad input."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.targets import Target
from flower_fgl.core.unused_settings import reject_unused_settings
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.owners import (
    absolute_owners,
    build_owners,
    list_owners,
    owner_contents,
)
from flower_fgl.datasets.store import open_store
from flower_fgl.datasets.transforms.normalize_features import scale_client
from flower_fgl.methods import parse_config
from tests.support.owners import CLASSES, in_own_order, owner_graphs

NAMES = tuple(f"f{number}" for number in range(8))


@pytest.fixture(scope="module")
def graphs() -> list[Any]:
    return [replace(graph, feature_names=NAMES) for graph in owner_graphs()]


def save(folder: Path, graphs: list[Any], names: str = "cde") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, graph in zip(names, graphs, strict=False):
        save_client_graph(folder / f"{name}.npz", graph)
    return folder


def config_of(owners: object, **settings: Any) -> Any:
    values = {key.replace("_", "-"): value for key, value in settings.items()}
    return parse_config({"owners": str(owners), **values})


def test_a_folder_has_one_owner_per_graph_file_sorted_by_name(
    graphs: list[Any], tmp_path: Path
) -> None:
    folder = save(tmp_path / "all", graphs, "zab")
    (folder / "notes.txt").write_text("not a graph")
    (folder / "edges_between.csv").write_text("0,1\n")
    owners = list_owners(config_of(folder))
    assert [owner.name for owner in owners] == ["a", "b", "z"]
    store = open_store(config_of(folder), 3)
    assert [store.load(k).name for k in range(3)] == ["a", "b", "z"]
    assert torch.equal(store.load(2).graph.edge_index, graphs[0].graph.edge_index)


def test_columns_and_classes_are_found_by_name(
    graphs: list[Any], tmp_path: Path
) -> None:
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    turned = replace(
        graphs[1],
        graph=replace(graphs[1].graph, x=graphs[1].graph.x[:, order]),
        feature_names=tuple(NAMES[column] for column in order),
    )
    lacking = in_own_order(turned, ("cold", "flu"))  # has no node of "well"
    folder = save(tmp_path / "all", [graphs[0], lacking, graphs[2]])
    clients, _, edges = build_owners(config_of(folder))
    assert {client.class_names for client in clients} == {CLASSES}
    assert {client.feature_names for client in clients} == {NAMES}
    assert torch.equal(clients[1].graph.x, graphs[1].graph.x)
    assert torch.equal(clients[1].graph.y, graphs[1].graph.y)
    assert edges == sum(graph.num_edges for graph in graphs)


def test_the_hash_covers_names_and_splits(graphs: list[Any], tmp_path: Path) -> None:
    folder = save(tmp_path / "all", graphs)
    other = save(tmp_path / "other", graphs, "cdf")
    hashes = [
        build_owners(config_of(place, split="20/40/40", partition_seed=seed))[1]
        for place, seed in ((folder, 0), (folder, 0), (folder, 1), (other, 0))
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_the_split_of_an_owner_does_not_depend_on_the_others(
    graphs: list[Any], tmp_path: Path
) -> None:
    alone = save(tmp_path / "alone", graphs[1:2], "d")
    both = save(tmp_path / "both", graphs)
    split = {"split": "20/40/40", "partition_seed": 3}
    one = build_owners(config_of(alone, **split))[0][0]
    same = build_owners(config_of(both, **split))[0][1]
    for name in ("train", "val", "test"):
        assert torch.equal(one.graph.masks[name], same.graph.masks[name])


@pytest.mark.parametrize(
    ("key", "value"), [("dataset", "cora"), ("partition", "louvain")]
)
def test_a_dataset_or_a_partition_beside_owners_is_refused(
    key: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f'{key} = "{value}" is not possible'):
        config_of(tmp_path, **{key: value})
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match=f"{key} has no effect"):
        reject_unused_settings([key], [config])


def test_alignment_without_owners_is_refused() -> None:
    with pytest.raises(ConfigError, match="set owners too"):
        parse_config({"feature-align": "project"})


def test_a_method_that_shares_its_first_layer_is_refused_by_name(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"moon cannot leave the first layer.*fedper"):
        config_of(tmp_path, method="moon", feature_align="project")
    with pytest.raises(ConfigError, match=r"moon cannot leave the head"):
        config_of("tu:A,tu:B", method="moon", setting="graph")
    with pytest.raises(ConfigError, match="no complete global model"):
        config_of(tmp_path, feature_align="project", evaluate="both")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no graph file"):
        list_owners(config_of(tmp_path))


def test_the_folder_of_one_owner_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id\n")
    with pytest.raises(DataError, match="graph of one owner"):
        list_owners(config_of(tmp_path))


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither in the working folder"):
        list_owners(config_of(tmp_path / "none.npz"))
    with pytest.raises(ConfigError, match='Unknown dataset "corra"'):
        list_owners(config_of("cora,corra"))


def test_two_owners_of_one_name_are_refused(graphs: list[Any], tmp_path: Path) -> None:
    folder = save(tmp_path / "all", graphs)
    (folder / "c").mkdir()
    (folder / "c" / "nodes.csv").write_text("id\n")
    with pytest.raises(DataError, match='Two owners have the name "c"'):
        list_owners(config_of(folder))
    with pytest.raises(DataError, match='Two owners have the name "cora"'):
        list_owners(config_of("cora,cora"))


def test_all_unusable_owners_are_named_at_once(
    graphs: list[Any], tmp_path: Path
) -> None:
    folder = save(tmp_path / "all", graphs)
    (folder / "broken.npz").write_bytes(b"no archive")
    with np.load(folder / "d.npz") as file:
        arrays = dict(file)
    edges = "edge_index" if "edge_index" in arrays else "edges"
    arrays[edges] = arrays[edges].copy()
    arrays[edges].flat[0] = 10**6  # an end that is no node
    np.savez(folder / "d.npz", **arrays)
    with pytest.raises(DataError, match="2 of 4 owners cannot be used") as found:
        open_store(config_of(folder), 4)
    assert "broken: " in str(found.value)
    assert "\nd: " in str(found.value)
    assert "1000000" in str(found.value)


def test_other_widths_are_refused_with_advice(
    graphs: list[Any], tmp_path: Path
) -> None:
    narrow = replace(
        graphs[1],
        graph=replace(graphs[1].graph, x=graphs[1].graph.x[:, :5]),
        feature_names=NAMES[:5],
    )
    folder = save(tmp_path / "all", [graphs[0], narrow, graphs[2]])
    with pytest.raises(DataError, match=r"c: 8, d: 5, e: 8.*feature-align = .project"):
        build_owners(config_of(folder))
    clients = build_owners(config_of(folder, feature_align="project"))[0]
    assert [client.num_features for client in clients] == [8, 5, 8]


def test_other_features_of_the_same_width_are_refused(
    graphs: list[Any], tmp_path: Path
) -> None:
    other = replace(graphs[1], feature_names=("age", *NAMES[1:]))
    folder = save(tmp_path / "all", [graphs[0], other, graphs[2]])
    with pytest.raises(DataError, match=r"d: its features differ .*missing: f0.*age"):
        build_owners(config_of(folder))


def test_the_number_of_clients_is_the_number_of_owners(
    graphs: list[Any], tmp_path: Path
) -> None:
    folder = save(tmp_path / "all", graphs)
    with pytest.raises(ConfigError, match=r"owners holds 3 graphs.*4 clients"):
        open_store(config_of(folder), 4)


def test_a_relative_path_is_looked_up_in_the_data_folder(
    graphs: list[Any], tmp_path: Path
) -> None:
    save(tmp_path / "data" / "trees", graphs)
    config = config_of("trees", data_dir=str(tmp_path / "data"))
    assert len(list_owners(config)) == 3
    whole = str((tmp_path / "data" / "trees").resolve())
    assert absolute_owners(config.owners, config) == whole
    several = f"cora,{Path('trees') / 'c.npz'}"
    assert absolute_owners(several, config) == f"cora,{whole}/c.npz"
    assert [o.name for o in list_owners(config_of(f"{whole}/d.npz,{whole}/c.npz"))] == [
        "d",
        "c",
    ]


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_a_client_of_the_store_knows_how_its_file_was_normalized(
    graphs: list[Any], kind: str, tmp_path: Path
) -> None:
    save(tmp_path, [scale_client(graph, kind) for graph in graphs])
    settings = config_of(tmp_path, split="20/40/40")
    client = open_store(settings, len(graphs)).load(0)
    assert client.scale == client_from_file(tmp_path / "c.npz", settings).scale == kind


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_features_normalized_at_export_are_not_normalized_again(
    graphs: list[Any], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "client.npz"
    scaled = scale_client(graphs[0], kind)
    save_client_graph(path, scaled)
    client = client_from_file(path, parse_config({"setting": "inductive"}))
    assert client.scale == kind
    assert client.num_items < scaled.num_items
    rows = torch.searchsorted(scaled.node_ids, client.node_ids)
    torch.testing.assert_close(client.graph.x, scaled.graph.x[rows])
    with pytest.raises(DataError, match="normalized at export"):
        client_from_file(
            path, parse_config({"setting": "inductive", "feature-norm": "none"})
        )


def write_edges(folder: Path, columns: str) -> None:
    """Write an owner of 40 nodes; its edges have one feature of each letter."""
    folder.mkdir(parents=True)
    nodes = "".join(f"n{k},{k % 3}\n" for k in range(40))
    (folder / "nodes.csv").write_text("id,x\n" + nodes)
    values = {"a": "1", "h": "2", "w": "3"}
    row = ",".join(values[letter] for letter in columns)
    edges = "".join(f"n{k},n{(k + 1) % 40},{'pq'[k % 2]},{row}\n" for k in range(40))
    header = ",".join(["source,target,label", *columns])
    (folder / "edges.csv").write_text(header + "\n" + edges)


def test_features_of_edges_are_matched_by_name_where_those_of_nodes_differ(
    tmp_path: Path,
) -> None:
    for name, columns in (("one", "ah"), ("two", "ha"), ("three", "hw")):
        write_edges(tmp_path / name, columns)
    settings = {"setting": "edge", "feature_align": "project"}
    both = f"{tmp_path / 'one'},{tmp_path / 'two'}"
    for client in build_owners(config_of(both, **settings))[0]:
        assert client.feature_names[-2:] == ("edge: a", "edge: h")
        assert (client.graph.pair_x == torch.tensor([1.0, 2.0])).all()
    with pytest.raises(DataError, match=r"three: its features of edges.*edge: a"):
        build_owners(config_of(f"{both},{tmp_path / 'three'}", **settings))


def test_a_renamed_table_is_another_content(tmp_path: Path) -> None:
    write_edges(tmp_path / "o" / "one", "ah")
    write_edges(tmp_path / "o" / "two", "ah")
    classes = tmp_path / "o" / "one" / "edge_classes.csv"
    classes.write_text("name\np\nq\nr\n")
    config = config_of(tmp_path / "o", setting="edge")
    before = owner_contents(config)
    assert owner_contents(config) == before
    classes.rename(classes.with_name("edge_classes_old.csv"))
    assert owner_contents(config) != before


def test_a_dataset_of_another_version_is_another_content(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flower_fgl.datasets import owners

    config = config_of("synthetic,cora", feature_align="project")
    before = owner_contents(config)
    find = owners.find_source
    monkeypatch.setattr(
        owners, "find_source", lambda name: replace(find(name), version="2")
    )
    assert owner_contents(config) != before


def spelled(graphs: list[Any], *names: tuple[str, ...]) -> list[Any]:
    """Give the classes of each owner these names."""
    return [
        replace(g, target=Target.classes(n)) for g, n in zip(graphs, names, strict=True)
    ]


def test_owners_that_spell_a_class_differently_are_refused(
    graphs: list[Any], tmp_path: Path
) -> None:
    usual = ("fraud", "fine", "odd")
    folder = save(
        tmp_path / "one", spelled(graphs, usual, usual, ("Fraud", *usual[1:]))
    )
    with pytest.raises(DataError) as error:
        build_owners(config_of(folder))
    assert "1 of 3 owners cannot be used. e: it spells a class" in str(error.value)
    assert 'a class "Fraud", and c spells it "fraud"' in str(error.value)
    numbers = spelled(
        graphs, ("0", "1", "2"), ("0.0", "1.0", "2.0"), ("False", "True", "x")
    )
    folder = save(tmp_path / "all", numbers)
    with pytest.raises(DataError, match="3 of 3 owners cannot be used"):
        open_store(config_of(folder), 3)
    local = config_of(folder, class_align="local")
    assert len({client.class_names for client in build_owners(local)[0]}) == 3


def test_owners_without_a_common_class_are_refused_and_one_is_named(
    graphs: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    english, german = ("fraud", "fine", "odd"), ("Betrug", "normal", "seltsam")
    folder = save(tmp_path / "two", spelled(graphs, english, english, german))
    assert len(build_owners(config_of(folder))[0]) == 3
    assert (
        "Data owner e has no class in common with another owner (Betrug, "
        in caplog.text
    )
    assert "Owner c" not in caplog.text
    folder = save(tmp_path / "all", spelled(graphs, english, ("a", "b", "c"), german))
    with pytest.raises(
        DataError, match=r"No two data owners have a class in common \(c: fr"
    ):
        build_owners(config_of(folder))
    local = config_of(folder, class_align="local")
    assert len(build_owners(local)[0]) == 3
    bare = [replace(g, graph=replace(g.graph, masks={})) for g in graphs]
    folder = save(tmp_path / "few", spelled(bare, english, ("a", "b", "c"), german))
    assert len(build_owners(config_of(folder, setting="few-shot"))[0]) == 3


def test_a_later_run_warns_of_what_the_first_one_did(
    graphs: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    english, german = ("fraud", "fine", "odd"), ("Betrug", "normal", "seltsam")
    folder = save(tmp_path / "two", spelled(graphs, english, english, german))
    for is_later in (False, True, True):
        caplog.clear()
        store = open_store(config_of(folder), 3)
        if is_later:  # than the process that built the store
            os.utime(store.folder / "index.json", (0, 0))
        store.log_notes()
        assert caplog.text.count("Data owner e has no class in common") == 1


def test_a_store_of_files_that_were_not_checked_is_built_again(
    graphs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flower_fgl.datasets import owners, store

    names = spelled(graphs, ("0", "1", "2"), ("0.0", "1.0", "2.0"), ("0", "1", "2"))
    folder = save(tmp_path / "all", names)
    with monkeypatch.context() as old:
        old.setattr(store, "READER", store.READER - 1)
        old.setattr(owners, "odd_spellings", lambda lists, **_: {})
        assert open_store(config_of(folder), 3).index.num_clients == 3
    with pytest.raises(DataError, match=r'a class "0\.0"'):
        open_store(config_of(folder), 3)


@pytest.mark.parametrize("setting", ["transductive", "inductive", "link"])
def test_all_edges_of_the_owners_are_counted(
    graphs: list[Any], tmp_path: Path, setting: str
) -> None:
    held = sum(graph.num_edges for graph in graphs)
    folder = save(tmp_path / "all", graphs)
    assert build_owners(config_of(folder, setting=setting))[2] == held
