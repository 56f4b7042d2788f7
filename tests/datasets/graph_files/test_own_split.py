"""An owner's own split under other names: read, or refused, never a feature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.graph_files.own_split import split_names
from flower_fgl.datasets.pyg_data import node_dataset

PARTS = {"train": [0, 1], "val": [2], "test": [3]}


def folder(path: Path, columns: dict[str, list[object]], edges: str = "") -> Path:
    names = ["id", "label", "age", *columns]
    rows = zip("abcd", "xyxy", range(4), *columns.values(), strict=True)
    lines = [",".join(map(str, row)) for row in (names, *rows)]
    (path / "nodes.csv").write_text("\n".join(lines) + "\n")
    (path / "edges.csv").write_text(edges or "source,target\na,b\n")
    return path


def places(masks: Any) -> dict[str, list[int]]:
    return {name: mask.nonzero().flatten().tolist() for name, mask in masks.items()}


@pytest.mark.parametrize(
    "names",
    [
        ("train_mask", "val_mask", "test_mask"),
        ("train", "val", "test"),
        ("is_train", "is_valid", "is_test"),
        ("Training", "Validation", "Testing"),
        ("trainMask", "devMask", "testMask"),
        ("in train set", "in-dev-set", "in_test_set"),
    ],
)
@pytest.mark.parametrize("true", [1, "1.0", "True", "true"])
def test_three_columns_are_the_split_and_no_features(
    names: tuple[str, ...],
    true: object,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    false = {"True": "False", "true": "false"}.get(str(true), "0")
    columns = {
        name: [true if node in PARTS[part] else false for node in range(4)]
        for name, part in zip(names, PARTS, strict=True)
    }
    path = folder(tmp_path, dict(reversed(columns.items())))
    dataset = load_graph_file(path).dataset
    assert dataset.feature_names == ("age",)
    assert places(dataset.masks) == PARTS
    assert any(
        m.endswith("hold the split and are not features.") for m in caplog.messages
    )
    report = inspect_graph(path, {})
    said = f"nodes.csv: the columns {', '.join(names)} hold the split and are not features."
    assert said in report.notes
    assert not any("random one will be drawn" in note for note in report.notes)
    assert report.description is not None
    assert report.description.num_train == 2
    # links have a split of their own: these columns are no features there either
    links = load_graph_file(path, needs_labels=False).dataset
    assert (links.feature_names, links.masks) == (("age",), {})


@pytest.mark.parametrize(
    "names",
    [
        ("Split",),
        ("SPLIT",),
        ("set",),
        ("fold",),
        ("fold_1", "fold_2"),
        ("data_split",),
        ("train_test_split",),
        ("is_train",),
        ("train",),
        ("test",),
        ("valid_mask",),
        ("train_mask", "test_mask"),
        ("train_mask", "val_mask", "valid_mask", "test_mask"),
        ("train_mask", "val_mask", "test_mask", "fold"),
        ("split", "is_train"),
    ],
)
def test_other_columns_of_a_split_are_refused(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    path = folder(tmp_path, {name: ["", "", "", ""] for name in names})
    with pytest.raises(DataError, match=r"nodes\.csv.* a split") as info:
        load_graph_file(path)
    assert f'"{names[-1]}"' in str(info.value)
    assert "If it is a feature, rename" in str(info.value) or names[0] == "split"


def test_beside_a_column_split_words_of_a_text_are_features(tmp_path: Path) -> None:
    words = ["Test", "set", "train", "fold", "dev"]
    columns = {word: [1, 0, 1, 1] for word in words}
    with pytest.raises(
        DataError, match="rename it, or add a column split, whose cells"
    ):
        load_graph_file(folder(tmp_path, dict(columns)))
    for split in (["", "", "", ""], ["train", "train", "val", "test"]):
        dataset = load_graph_file(folder(tmp_path, {**columns, "split": split})).dataset
        assert dataset.feature_names == ("age", *words)
        assert places(dataset.masks) == (PARTS if split[0] else {})


def test_a_column_of_a_part_holds_zeros_and_ones(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "train": [1, 0, 0, 0],
        "val": [0, 1, 0, 0],
        "test": [0, 0, 1, 0.5],
    }
    with pytest.raises(
        DataError, match=r'line 5: column "test" .* got "0\.5"\. If tra'
    ):
        load_graph_file(folder(tmp_path, columns))
    columns["test"] = [0, 1, 1, 0]
    message = (
        '1 lines have 1 in both columns "val" and "test", .* give them other names'
    )
    with pytest.raises(DataError, match=message):
        load_graph_file(folder(tmp_path, columns))


@pytest.mark.parametrize(
    ("word", "part"),
    [("Train", "train"), ("valid", "val"), ("dev", "val"), ("TEST", "test")],
)
def test_a_word_for_a_part_is_an_error_with_the_right_one(
    word: str, part: str, tmp_path: Path
) -> None:
    path = folder(tmp_path, {"split": ["train", word, "val", "test"]})
    message = rf'line 3: split must be .* got "{word}"\. Write {part}\.$'
    with pytest.raises(DataError, match=message):
        load_graph_file(path)


@pytest.mark.parametrize(
    "name",
    ["valid", "val", "is_valid", "dev", "tests", "training_hours", "setting"],
)
def test_other_words_stay_features(name: str, tmp_path: Path) -> None:
    path = folder(tmp_path, {name: [1, 0, 1, 1]})
    assert load_graph_file(path).dataset.feature_names == ("age", name)
    assert split_names([name]) == ({}, [])


def test_columns_of_edges_are_their_split(tmp_path: Path) -> None:
    edges = "source,target,label,{},amount\na,b,odd,1,0,0,5\nb,c,even,0,1,0,6\n"
    path = folder(tmp_path, {}, edges.format("train_mask,valid_mask,test_mask"))
    table = load_graph_file(path, needs_labels=False).dataset.edges
    assert table is not None
    assert table.feature_names == ("amount",)
    assert places(table.masks) == {"train": [0], "val": [1], "test": []}
    notes = inspect_graph(path, {"setting": "edge"}).notes
    assert notes[0].startswith("edges.csv: the columns train_mask, valid_mask, test_m")
    folder(tmp_path, {}, edges.format("is_train,a,b"))
    with pytest.raises(DataError, match=r'edges\.csv: "is_train" looks like a split'):
        load_graph_file(path, needs_labels=False)


@pytest.mark.parametrize(
    "name", ["train_idx", "split", "split_idx", "valid_mask", "Train"]
)
def test_an_array_of_such_a_name_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((2, 1)), **{name: np.arange(2)})
    with pytest.raises(
        DataError, match=f'array "{name}" looks .* Save train_mask, val_m'
    ):
        load_graph_file(path)


def graph(**values: Any) -> Data:
    fields: dict[str, Any] = {
        "x": torch.arange(8.0).reshape(4, 2),
        "edge_index": torch.tensor([[0, 1, 2], [1, 2, 3]]),
        "y": torch.tensor([0, 1, 0, 1]),
    }
    return Data(**fields, **values)


@pytest.mark.parametrize(
    "names",
    [
        ("train_idx", "val_idx", "test_idx"),
        ("train_index", "valid_index", "test_index"),
        ("train_ids", "dev_ids", "test_ids"),
    ],
)
def test_lists_of_nodes_are_the_split_of_a_pyg_graph(names: tuple[str, ...]) -> None:
    values = dict(zip(names, map(torch.tensor, PARTS.values()), strict=True))
    assert places(node_dataset(graph(**values), "g").masks) == PARTS
    arrays = {name: value.numpy() for name, value in values.items()}
    assert places(node_dataset(graph(**arrays), "g").masks) == PARTS
    masks = {
        f"{part}_mask": torch.tensor([node in nodes for node in range(4)])
        for part, nodes in PARTS.items()
    }
    both = graph(**masks, **values)
    assert places(node_dataset(both, "g").masks) == PARTS
    none = graph(**(values | {names[1]: torch.tensor([])}))
    assert places(node_dataset(none, "g").masks) == PARTS | {"val": []}
    both[names[0]] = torch.tensor([0])
    with pytest.raises(DataError, match=f"train_mask and {names[0]} differ"):
        node_dataset(both, "g")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_idx": torch.tensor([0])}, "has train_idx but no val_mask"),
        ({"split_idx": {"train": torch.tensor([0])}}, "split_idx looks like a split"),
        ({"split": torch.tensor([0, 0, 1, 2])}, "split looks like a split"),
        ({"fold": np.array([0, 0, 1, 2])}, r"Set data\.train_mask, data\.val_mask and"),
        (
            {f"{part}_idx": torch.tensor([4]) for part in PARTS},
            r"train_idx must be a mask, .* different numbers from 0 to 3\.",
        ),
        ({f"{part}_idx": torch.tensor([1, 1]) for part in PARTS}, "different numbers"),
        ({f"{part}_idx": torch.tensor([0.5]) for part in PARTS}, "must be a mask"),
        ({f"{part}_idx": ["a"] for part in PARTS}, "train_idx must be a mask"),
        ({f"{part}_idx": torch.zeros(4, 10) for part in PARTS}, "holds 10 splits"),
    ],
)
def test_another_split_of_a_pyg_graph_is_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        node_dataset(graph(**values), "g")


def test_the_split_of_edges_of_a_pyg_graph_may_be_lists() -> None:
    values: dict[str, Any] = {
        f"edge_{name}_idx": torch.tensor([place])
        for place, name in enumerate(("train", "valid", "test"))
    }
    dataset = node_dataset(graph(edge_label=torch.tensor([0, 1, 0]), **values), "g")
    assert dataset.edges is not None
    assert places(dataset.edges.masks) == {"train": [0], "val": [1], "test": [2]}
    assert not dataset.masks
    assert not node_dataset(graph(fold=3, set="a", split="train"), "g").masks
