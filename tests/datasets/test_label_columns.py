"""Columns that determine the label are noted; real features are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor

from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.core.targets import Target
from flower_fgl.datasets.build import build_clients, load_dataset
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.suspect import label_columns, suspect_data
from flower_fgl.datasets.transforms.canonical import csr_tensor
from flower_fgl.methods import parse_config
from tests.support.real_sets import skip_unless_whole

DRAW = torch.Generator().manual_seed(0)
NO_EDGES = torch.empty(2, 0, dtype=torch.int64)


@pytest.fixture(autouse=True)
def draw() -> torch.Generator:
    return DRAW.manual_seed(0)


def client(x: Tensor, y: Tensor, num_classes: int = 0) -> ClientGraph:
    names = tuple(f"class {c}" for c in range(num_classes or int(y.max()) + 1))
    return ClientGraph(
        0, Graph(x, NO_EDGES, y, {}), Target.classes(names), torch.arange(len(y))
    )


def among_noise(column: Tensor) -> Tensor:
    """Return a column between random ones: two measured, one of zeros and ones."""
    noise = torch.randn(len(column), 3, generator=DRAW)
    noise[:, 2] = (noise[:, 2] > 0).float()
    return torch.cat([noise[:, :2], column[:, None].float(), noise[:, 2:]], dim=1)


def rare(num_items: int = 3000, share: float = 0.02) -> Tensor:
    return (torch.rand(num_items, generator=DRAW) < share).long()


def of_classes(num_classes: int, num_items: int = 3000) -> Tensor:
    return torch.randint(num_classes, (num_items,), generator=DRAW)


def test_a_copy_of_the_label_is_found() -> None:
    y = rare()
    for column in (y, 1 - y, 5 * y - 3):
        assert label_columns(client(among_noise(column), y)) == {2: [0, 1]}


def test_a_copy_with_few_errors_is_found() -> None:
    y = rare(share=0.1)
    column, wrong = y.clone(), torch.arange(0, 3000, 1500)
    column[wrong] = 1 - column[wrong]
    assert label_columns(client(among_noise(column), y)) == {2: [0, 1]}
    wrong = torch.arange(0, 3000, 200)
    column[wrong] = 1 - column[wrong]  # 15 errors for 300 items of the class
    assert label_columns(client(among_noise(column), y)) == {}


def test_a_threshold_that_separates_the_classes_is_found() -> None:
    y = rare()
    column = torch.rand(3000, generator=DRAW) + 2 * y
    assert label_columns(client(among_noise(column), y)) == {2: [0, 1]}
    overlapping = torch.rand(3000, generator=DRAW) + 0.9 * y
    assert label_columns(client(among_noise(overlapping), y)) == {}


@pytest.mark.parametrize("num_classes", [3, 7, 40])
def test_codes_of_classes_are_found_in_any_order(num_classes: int) -> None:
    y = of_classes(num_classes)
    code = torch.randperm(num_classes, generator=DRAW)[y] * 10
    every = list(range(num_classes))
    assert label_columns(client(among_noise(code), y)) == {2: every}


def test_a_column_that_marks_one_class_is_found() -> None:
    y = of_classes(5)
    assert label_columns(client(among_noise(y == 3), y)) == {2: [3]}


def test_a_code_of_which_each_value_belongs_to_one_class_is_found() -> None:
    y = rare(share=0.3)
    status = torch.randint(3, (3000,), generator=DRAW) * 2 + y  # 1, 3, 5 for one class
    assert label_columns(client(among_noise(status), y)) == {2: [0, 1]}
    status[:1500] = 0
    assert label_columns(client(among_noise(status), y)) == {}


def test_a_flag_that_only_makes_a_rare_class_likely_is_a_feature() -> None:
    y = rare(share=0.01)
    flag = y.bool() | (torch.rand(3000, generator=DRAW) < 0.01)
    assert label_columns(client(among_noise(flag), y)) == {}


def test_few_items_are_no_evidence() -> None:
    y = torch.tensor([0, 1] * 9)
    assert label_columns(client(among_noise(y), y)) == {}
    y = torch.tensor([0, 1] * 15)
    assert label_columns(client(among_noise(y), y)) == {2: [0, 1]}
    # among many random columns some tell a few items apart
    y = torch.tensor([0] * 15 + [1] * 15)
    x = torch.randn(30, 200_000, generator=DRAW)
    x[:, 7] = y + torch.rand(30, generator=DRAW) / 2
    assert label_columns(client(x, y)) == {}
    assert label_columns(client(x[:, 6:8], y)) == {1: [0, 1]}


def test_a_different_value_for_each_item_tells_nothing() -> None:
    y = of_classes(4)
    assert label_columns(client(among_noise(torch.arange(3000)), y)) == {}


def test_unknown_labels_are_left_out() -> None:
    y = rare(share=0.5)
    column = y.clone()
    y[::2] = -1
    column[::2] = 1
    assert label_columns(client(among_noise(column), y, 3)) == {2: [0, 1]}


def test_sparse_columns_are_found() -> None:
    y = of_classes(4)
    dense = torch.zeros(3000, 100)
    dense[:, 10] = (y == 2).float()
    dense[:, 20] = y.float()
    dense[torch.arange(3000), torch.arange(3000) % 10] = 1
    x = csr_tensor(scipy.sparse.csr_matrix(dense.numpy()))
    expected = {10: [2], 20: [0, 1, 2, 3]}
    assert label_columns(client(x, y)) == label_columns(client(dense, y)) == expected


def test_a_large_class_is_sampled_and_a_rare_one_is_not() -> None:
    y = rare(400_000, 0.0005)
    assert label_columns(client(among_noise(y), y)) == {2: [0, 1]}


def test_only_edges_to_classify_have_columns_of_labels() -> None:
    y = rare()
    nodes = client(torch.ones(4, 1), y)
    pairs = torch.zeros(2, 3000, dtype=torch.int64)
    links = replace(nodes, graph=replace(nodes.graph, pairs=pairs))
    assert label_columns(links) == {}
    pair_x = among_noise(y)
    edges = replace(
        links,
        graph=replace(links.graph, pair_x=pair_x),
        feature_names=("age", "edge: a", "edge: b", "edge: isFraud", "edge: c"),
    )
    assert label_columns(edges) == {2: [0, 1]}
    assert "by themselves: edge: isFraud (class 0, class 1);" in suspect_data(edges)[-1]
    unnamed = replace(edges, feature_names=())
    assert "by themselves: edge: column 2 (class" in suspect_data(unnamed)[-1]
    several = replace(nodes.graph, targets=torch.ones(3000, 2, dtype=torch.int8))
    assert label_columns(replace(nodes, graph=several)) == {}


@pytest.mark.parametrize(
    "name",
    [
        *("cora", "citeseer", "pubmed"),
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("computers", "photo", "cs", "physics", "dblp")
        ),
    ],
)
def test_features_of_published_graphs_are_not_noted(name: str, real_data: Path) -> None:
    skip_unless_whole(name, real_data)
    config = parse_config({"dataset": name, "data-dir": str(real_data)})
    data = load_dataset(config)
    whole = client(data.x, data.y, len(data.class_names))
    clients, _, _ = build_clients(config, 10)
    assert [label_columns(graph) for graph in (whole, *clients)] == [{}] * 11


def test_the_check_names_the_column_and_the_remedy(tmp_path: Path) -> None:
    y = np.arange(60) % 3 == 0
    rows = [f"n{i},{'fraud' if f else 'ok'},{i % 7},{int(f)}" for i, f in enumerate(y)]
    (tmp_path / "nodes.csv").write_text("\n".join(["id,label,age,isFraud", *rows]))
    (tmp_path / "edges.csv").write_text("source,target\nn0,n1\n")
    notes = [n for n in inspect_graph(tmp_path, {}).notes if "determine" in n]
    assert notes == [
        "Columns that determine the label by themselves: isFraud (fraud, ok); the classes "
        "that they tell from the others are in parentheses. Leave out a column that is a "
        "copy of the label, was made from it, or is known only after it: all scores would "
        "be too high."
    ]


def test_features_with_the_name_of_a_split_are_noted() -> None:
    y = of_classes(3, 60)
    graph = client(torch.randn(60, 2, generator=DRAW), y)
    named = replace(graph, feature_names=("age", "train_mask"))
    assert suspect_data(named) == [
        "Features with the name of a split: train_mask. If they hold the split, leave "
        "them out, and store it as train_mask, val_mask and test_mask."
    ]
    assert suspect_data(replace(graph, feature_names=("age", "valid"))) == []
