"""Partitions of OpenFGL and FedGB become graph files; none of their code runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.cli.main import app
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.published_partition import convert_partition

NAME = "subgraph_fl_louvain_1_Cora_client_2"


def client(number: int, **changes: Any) -> Data:
    """Return a client of 20 nodes; its nodes have descending global numbers."""
    generator = torch.Generator().manual_seed(number)
    data = Data(
        x=torch.rand((20, 3), generator=generator),
        edge_index=torch.randint(0, 20, (2, 30), generator=generator),
        y=torch.arange(20) % 2,
    )
    first = 100 * number + 19
    data.global_map = {i: first - i for i in range(20)}
    data.num_global_classes = 3
    for key, value in changes.items():
        data[key] = value
    return data


def masks(_: int) -> dict[str, torch.Tensor]:
    place = torch.arange(20) % 5
    return {"train": place < 2, "val": place == 2, "test": place > 2}


def write(
    folder: Path,
    make: Callable[[int], Any] = client,
    *,
    split: str = "node_cls",
    count: int = 2,
) -> Path:
    """Write the layout of both libraries."""
    (folder / split).mkdir(parents=True)
    for number in range(count):
        torch.save(make(number), folder / f"data_{number}.pt")
        for name, mask in masks(number).items():
            torch.save(mask, folder / split / f"{name}_{number}.pt")
    return folder


@pytest.mark.parametrize(
    "split", ["node_cls", "node_cls/default_split", "node_cls/split_0.4-0.2-0.4"]
)
def test_each_client_becomes_a_graph_file(split: str, tmp_path: Path) -> None:
    source = write(tmp_path / "distrib" / NAME, split=split)
    paths = convert_partition(source, tmp_path / "graphs")
    assert [path.name for path in paths] == ["client-0.npz", "client-1.npz"]
    for number, path in enumerate(paths):
        owned, given = load_graph_file(path), client(number)
        dataset = owned.dataset
        order = list(range(19, -1, -1))  # by global number
        assert owned.node_ids.tolist() == [100 * number + i for i in range(20)]
        assert torch.equal(dataset.x, given.x[order])
        assert dataset.y.tolist() == given.y[order].tolist()
        expected = {
            (19 - int(u), 19 - int(v)) for u, v in given.edge_index.T.tolist() if u != v
        }
        expected |= {(v, u) for u, v in expected}
        assert {(u, v) for u, v in dataset.edge_index.T.tolist()} == expected
        assert dataset.class_names == ("0", "1", "2")
        for name, mask in masks(number).items():
            assert torch.equal(dataset.masks[name], mask[order])


def test_features_of_edges_stay_beside_their_edges(tmp_path: Path) -> None:
    def make(number: int) -> Data:
        return client(number, edge_attr=torch.arange(30))

    paths = convert_partition(write(tmp_path / NAME, make), tmp_path / "graphs")
    messages = load_graph_file(paths[0]).dataset.messages
    assert messages is not None
    assert torch.equal(messages.index, 19 - client(0).edge_index)
    assert messages.x.flatten().tolist() == list(range(30))
    wrong = write(tmp_path / "b" / NAME, lambda k: client(k, edge_attr=torch.ones(3)))
    with pytest.raises(DataError, match="one entry for each of the 30 edges"):
        convert_partition(wrong, tmp_path / "graphs")


def test_the_folder_of_a_fedgb_dataset_is_accepted(tmp_path: Path) -> None:
    write(tmp_path / "AML" / "distrib" / NAME)
    manifest = {"level": "homo_subgraph", "task": "node_cls", "num_clients": 2}
    (tmp_path / "AML" / "fedgb_manifest.json").write_text(json.dumps(manifest))
    result = CliRunner().invoke(
        app, ["import-partition", str(tmp_path / "AML"), str(tmp_path / "graphs")]
    )
    assert result.exit_code == 0, result.output
    assert "client-1.npz" in result.output


def test_the_manifest_of_fedgb_names_the_partition(tmp_path: Path) -> None:
    source = tmp_path / "Cora-Louvain-2-Subgraph"
    write(source / "distrib" / "another_partition", count=1)
    write(source / "distrib" / NAME)
    manifest = {"level": "homo_subgraph", "task": "node_cls"}
    path = source / "fedgb_manifest.json"
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="2 partitions below distrib"):
        convert_partition(source, tmp_path / "graphs")
    path.write_text(json.dumps({**manifest, "processed_partition": NAME}))
    assert len(convert_partition(source, tmp_path / "graphs")) == 2


def test_the_graph_files_are_owners_of_a_run(tmp_path: Path) -> None:
    convert_partition(write(tmp_path / NAME), tmp_path / "graphs")
    run = simulate(
        "fedavg",
        owners=str(tmp_path / "graphs"),
        rounds=1,
        local_epochs=1,
        hidden_channels=4,
        output_dir=str(tmp_path / "runs"),
    )
    assert run.status == "completed"
    assert run.best is not None
    assert run.best["test"]["num_nodes"] == 16


def test_a_split_is_not_chosen_by_chance(tmp_path: Path) -> None:
    source = write(tmp_path / NAME, split="node_cls/split_0.4-0.2-0.4")
    others = source / "node_cls" / "split_0.2-0.4-0.4"
    others.mkdir()
    for name, mask in masks(0).items():
        torch.save(~mask, others / f"{name}_0.pt")
    with pytest.raises(DataError, match=r"several splits: split_0\.2-0\.4-0\.4, split"):
        convert_partition(source, tmp_path / "graphs")
    (source / "node_cls" / "split_0.4-0.2-0.4").rename(
        others.with_name("default_split")
    )
    paths = convert_partition(source, tmp_path / "graphs")
    found = load_graph_file(paths[0]).dataset.masks["train"]
    assert torch.equal(found, masks(0)["train"].flip(0))


def test_a_split_inside_the_graph_is_kept_if_there_is_no_other(tmp_path: Path) -> None:
    split = {f"{part}_mask": mask for part, mask in masks(0).items()}
    folder = write(tmp_path / "own", lambda k: client(k, **split), split="other")
    (path, _) = convert_partition(folder, tmp_path / "graphs")
    found = load_graph_file(path).dataset.masks
    for part, mask in masks(0).items():
        assert torch.equal(found[part], mask.flip(0))  # sorted by global number


def test_numbers_to_predict_are_refused_in_words(tmp_path: Path) -> None:
    y = torch.full((20,), torch.nan)
    odd = {"y": y, "num_global_classes": "none"}
    folder = write(tmp_path / "own", lambda k: client(k, **odd))
    with pytest.raises(DataError, match=r"must hold class numbers .* with NaN"):
        convert_partition(folder, tmp_path / "graphs")


def test_a_client_without_edges_is_kept(tmp_path: Path) -> None:
    # OpenFGL makes the edges by torch.tensor(list of pairs).T, of shape (0,) and float32
    # for an empty list; its newer versions reshape that to (2, 0)
    def make(number: int) -> Data:
        return client(number, edge_index=torch.zeros((2, 0) if number else (0,)))

    for path in convert_partition(write(tmp_path / NAME, make), tmp_path / "graphs"):
        assert load_graph_file(path).dataset.edge_index.shape == (2, 0)


@pytest.mark.parametrize(
    "numbers",
    [
        torch.arange(60, 40, -1),  # written by FedGB's script for public datasets
        list(range(60, 40, -1)),
        np.arange(60, 40, -1),
        {60 - i: i for i in range(20)},  # numbers of the whole graph first
    ],
    ids=["tensor", "list", "array", "reversed"],
)
def test_global_numbers_may_have_every_form_that_fedgb_reads(
    numbers: Any, tmp_path: Path
) -> None:
    def make(number: int) -> Data:
        return client(number, global_map=numbers)

    paths = convert_partition(write(tmp_path / NAME, make), tmp_path / "graphs")
    owned = load_graph_file(paths[0])
    assert owned.node_ids.tolist() == list(range(41, 61))
    assert torch.equal(owned.dataset.x, client(0).x.flip(0))


@pytest.mark.parametrize(
    "numbers",
    [
        torch.tensor(20),
        torch.zeros(20, 2, dtype=torch.int64),
        [(i, i) for i in range(20)],
        ["a"] * 20,
        "a" * 20,
        {"a": 1},
        [1, 2],
    ],
    ids=["scalar", "matrix", "pairs", "strings", "text", "names", "short"],
)
def test_a_map_that_is_no_list_of_numbers_is_left_out(
    numbers: Any, tmp_path: Path
) -> None:
    def make(number: int) -> Data:
        return client(number, global_map=numbers)

    paths = convert_partition(write(tmp_path / NAME, make), tmp_path / "graphs")
    assert load_graph_file(paths[0]).node_ids.tolist() == list(range(20))


def test_numbers_of_numpy_and_missing_extras_are_accepted(tmp_path: Path) -> None:
    def make(number: int) -> Data:
        if number:
            numbers = {i: np.int64(40 - i) for i in range(20)}
            return client(1, global_map=numbers, num_global_classes=np.int64(2))
        data = client(0)
        del data.global_map, data.num_global_classes
        return data

    paths = convert_partition(write(tmp_path / NAME, make), tmp_path / "graphs")
    assert load_graph_file(paths[0]).node_ids.tolist() == list(range(20))
    assert load_graph_file(paths[1]).node_ids.tolist() == list(range(21, 41))


class Harmful:
    """Object that would run a command when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def test_the_code_of_a_file_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    source = write(tmp_path / NAME, lambda number: Harmful(mark))
    with pytest.raises(DataError, match="more than tensors and numbers"):
        convert_partition(source, tmp_path / "graphs")
    source = write(tmp_path / "b" / NAME, lambda n: client(n, extra=Harmful(mark)))
    with pytest.raises(DataError, match="more than tensors and numbers"):
        convert_partition(source, tmp_path / "graphs")
    assert not mark.exists()
    assert not (tmp_path / "graphs").exists()


def test_the_code_in_an_array_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    array = np.array([Harmful(mark)], dtype=object)
    source = write(tmp_path / NAME, lambda n: client(n, extra=array))
    with pytest.raises(DataError, match="more than tensors and numbers"):
        convert_partition(source, tmp_path / "graphs")
    assert not mark.exists()


def test_a_homogeneous_dataset_of_fedgb_may_keep_types_and_names(
    tmp_path: Path,
) -> None:
    def make(number: int) -> Data:
        types = torch.arange(20) % 3
        return client(number, node_type=types, hospitalid=73, client_name="client_73")

    source = write(tmp_path / NAME, make, split="node_cls/default_split")
    with pytest.raises(DataError, match="several types of nodes"):
        convert_partition(source, tmp_path / "graphs")
    manifest = {"level": "homo_subgraph", "task": "node_cls"}
    (source / "fedgb_manifest.json").write_text(json.dumps(manifest))
    assert len(convert_partition(source, tmp_path / "graphs")) == 2


def test_the_classes_that_torch_may_read_stay_the_same(tmp_path: Path) -> None:
    # torch-geometric reads its processed files with these
    before = set(torch.serialization.get_safe_globals())
    convert_partition(write(tmp_path / NAME), tmp_path / "graphs")
    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": torch.rand(20)}, "y must hold class numbers"),
        ({"y": torch.zeros((20, 3), dtype=torch.int64)}, "one class number per node"),
        ({"edge_index": torch.tensor([[0], [20]])}, "names nodes 0 to 20"),
        ({"node_type": torch.arange(20) % 2}, "several types of nodes"),
    ],
)
def test_a_graph_of_another_task_is_refused(
    changes: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    source = write(tmp_path / NAME, lambda number: client(number, **changes))
    with pytest.raises(DataError, match=message):
        convert_partition(source, tmp_path / "graphs")


def test_other_folders_are_refused_with_what_was_expected(tmp_path: Path) -> None:
    out = tmp_path / "graphs"
    (tmp_path / "empty").mkdir()
    cases: dict[Path, str] = {
        tmp_path / "none": "does not exist",
        tmp_path / "empty": "holds no data_0.pt",
        write(tmp_path / "graph_fl_label_skew_1"): "sets of graphs",
        write(tmp_path / "hetero", lambda _: HeteroData()): "one homogeneous graph",
        write(
            tmp_path / "wide", lambda n: client(n, x=torch.ones(20, n + 1))
        ): "differ",
    }
    gap = write(tmp_path / "gap", count=3)
    (gap / "data_1.pt").unlink()
    cases[gap] = "without a gap"
    broken = write(tmp_path / "broken")
    (broken / "data_0.pt").write_bytes(b"PK")
    cases[broken] = "data_0.pt"
    short = write(tmp_path / "short")
    torch.save(torch.ones(3), short / "node_cls" / "val_1.pt")
    cases[short] = "mask of 20 booleans"
    several = tmp_path / "several"
    for name in ("a", "b"):
        write(several / "distrib" / name)
    cases[several] = "2 partitions below distrib: a, b"
    graphs = write(tmp_path / "set")
    manifest = {"level": "graph", "task": "graph_cls"}
    (graphs / "fedgb_manifest.json").write_text(json.dumps(manifest))
    cases[graphs] = 'level "graph" and task "graph_cls"'
    for folder, message in cases.items():
        with pytest.raises(DataError, match=message):
            convert_partition(folder, out)


def test_files_of_another_partition_are_not_mixed_in(tmp_path: Path) -> None:
    convert_partition(write(tmp_path / "a", count=3), tmp_path / "graphs")
    with pytest.raises(DataError, match=r"client-2\.npz, which is not one of these 2"):
        convert_partition(write(tmp_path / "b"), tmp_path / "graphs")


def typed_client(number: int) -> Data:
    """Return 20 stays of 5 patients, padded to 3 columns, with both directions."""
    generator = torch.Generator().manual_seed(number)
    x = torch.rand((25, 3), generator=generator)
    x[20:, 1:] = 0
    holder = torch.randint(20, 25, (20,), generator=generator)
    has = torch.stack([holder, torch.arange(20)])
    data = Data(
        x=x,
        edge_index=torch.cat([has, has.flip(0)], dim=1),
        y=torch.cat([torch.arange(20) % 2, torch.full((5,), -1)]),
    )
    data.node_type = torch.tensor([0] * 20 + [1] * 5)
    data.edge_type = torch.tensor([0] * 20 + [1] * 20)
    data.hetero_node_types = ["stay", "patient"]
    data.hetero_edge_types = [
        ("patient", "has", "stay"),
        ("stay", "rev_has", "patient"),
    ]
    data.target_node_type = "stay"
    data.global_map = {i: i for i in range(25)}
    data.num_global_classes = 3
    return data


def write_typed(folder: Path, make: Callable[[int], Any] = typed_client) -> Path:
    """Write a dataset of FedGB with several kinds of nodes."""
    place = write(folder / "distrib" / NAME, make, split="node_cls/default_split")
    for number in range(2):
        for name, mask in masks(number).items():
            path = place / "node_cls" / "default_split" / f"{name}_{number}.pt"
            torch.save(torch.cat([mask, torch.zeros(5, dtype=torch.bool)]), path)
    manifest = {"level": "hetero_subgraph", "task": "node_cls", "target_node": "stay"}
    manifest["processed_partition"] = NAME
    (folder / "fedgb_manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_typed_dataset_of_fedgb_becomes_typed_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = convert_partition(write_typed(tmp_path / "EICU"), tmp_path / "graphs")
    for number, path in enumerate(paths):
        dataset, given = load_graph_file(path).dataset, typed_client(number)
        schema, messages = dataset.schema, dataset.messages
        assert schema is not None
        assert messages is not None
        assert messages.relation is not None
        assert schema.widths == (("stay", 3), ("patient", 3))
        assert schema.relations == tuple(given.hetero_edge_types)
        assert schema.target == "stay"
        torch.testing.assert_close(dataset.x[:20, :3], given.x[:20])
        torch.testing.assert_close(dataset.x[20:, 3:], given.x[20:])
        assert dataset.y.tolist() == given.y.tolist()
        assert dataset.class_names == ("0", "1", "2")
        listed = given.edge_index[:, :20].T.tolist()
        found = messages.index[:, messages.relation == 0].T.tolist()
        assert sorted(found) == sorted(listed)
        assert dataset.masks["val"].tolist() == [
            *masks(0)["val"].tolist(),
            *[False] * 5,
        ]
    assert "for the kinds patient (1) (used columns)" in caplog.text
    run = simulate(
        "fedavg",
        owners=str(tmp_path / "graphs"),
        output_dir=str(tmp_path),
        model="rgcn",
        reverse_relations=False,
        rounds=1,
    )
    assert run.summary["best"]["test"]["num_nodes"] == 16


@pytest.mark.parametrize("key", ["hetero_edge_types", "target_node_type", "node_type"])
def test_a_typed_dataset_without_names_is_refused(key: str, tmp_path: Path) -> None:
    def make(number: int) -> Data:
        data = typed_client(number)
        del data[key]
        return data

    with pytest.raises(DataError, match=rf"data_0\.pt: {key} is missing"):
        convert_partition(write_typed(tmp_path / "EICU", make), tmp_path / "graphs")


def test_a_client_whose_nodes_all_have_another_class_is_converted(
    tmp_path: Path,
) -> None:
    source = write(tmp_path / NAME, lambda number: client(number, y=torch.arange(20)))
    paths = convert_partition(source, tmp_path / "out")
    assert load_graph_file(paths[0]).dataset.num_classes == 20
