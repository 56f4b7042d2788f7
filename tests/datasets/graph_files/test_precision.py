"""Whole numbers that become equal as float32 are refused, from every kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch_geometric.data import Data

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files import csv_rows
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.graph_files.validate import check_whole_numbers
from flower_fgl.datasets.pyg_data import GivenNames, node_dataset
from flower_fgl.nn.sparse import quiet_csr

OPENED = [1_700_000_001, 1_600_000_000, 1_700_000_003]
FAULT = "1700000001 .*and 1700000003 .*are one value as float32"


def tables(folder: Path, cells: list[Any], edges: str = "") -> Path:
    lines = [f"n{i},{'ab'[i % 2]},{i / 2},{cell}" for i, cell in enumerate(cells)]
    text = "\n".join(["id,label,age,opened", *lines])
    (folder / "nodes.csv").write_text(text + "\n")
    (folder / "edges.csv").write_text(edges or "source,target\nn0,n1\n")
    return folder


def test_two_numbers_of_a_column_that_become_one_are_named(tmp_path: Path) -> None:
    tables(tmp_path, OPENED)
    with pytest.raises(DataError) as info:
        load_graph_file(tmp_path)
    assert str(info.value) == (
        f'{tmp_path / "nodes.csv"}, column "opened": 1700000001 (line 2) and 1700000003 '
        "(line 4) are one value as float32, which is exact up to 16,777,216. Subtract the "
        "same offset at all owners (from times e.g. the first one), use a coarser unit, "
        "or leave the column out if it is an id."
    )


def test_rows_of_different_blocks_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_rows, "BLOCK_CELLS", 2)
    with pytest.raises(DataError, match=FAULT):
        load_graph_file(tables(tmp_path, OPENED))


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ([1, 16_777_216, 16_777_217], "16777216 .* and 16777217"),
        ([-16_777_217, -16_777_216], "-16777217 .* and -16777216"),
        (["1700000001.0", "1700000003."], FAULT),
        # float64 does not hold these either
        ([12345678901234567, 12345678901234568], "12345678901234567 .*234568 "),
        ([2**53 + 2**40, 2**53], ""),
        ([1_700_000_001, 1_600_000_000, 1_700_000_001], ""),
        ([1_700_000_001, 1_700_000_003, 0.5], ""),  # measured, not counted
        (["1e10", "10000000001"], ""),
        ([16_777_215, 16_777_216, True], ""),
    ],
)
def test_only_different_whole_numbers_are_refused(
    cells: list[Any], fault: str, tmp_path: Path
) -> None:
    path = tables(tmp_path, cells)
    if fault:
        with pytest.raises(DataError, match=fault):
            load_graph_file(path)
        return
    found = load_graph_file(path).dataset.x[:, 1].tolist()
    assert found == [float(np.float32(float(cell))) for cell in cells]


def test_columns_of_edges_are_refused_and_times_are_exact(tmp_path: Path) -> None:
    edges = "source,target,label,time,account\nn0,n1,a,1700000001,{}\n"
    edges += "n1,n0,b,1700000003,1700000003\n"
    path = tables(tmp_path, [1, 2], edges.format(1_700_000_001))
    with pytest.raises(DataError, match=rf'edges\.csv, column "account": {FAULT}'):
        load_graph_file(path, needs_labels=False)
    path = tables(tmp_path, [1, 2], edges.format(1_600_000_000))
    table = load_graph_file(path, needs_labels=False).dataset.edges
    assert table is not None
    assert table.time is not None
    assert table.time.tolist() == [1_700_000_001, 1_700_000_003]
    late = edges.format(5).replace("1700000001", "1700000005")
    with pytest.raises(DataError, match=r"time 1700000003 goes backwards.* 1700000005"):
        load_graph_file(tables(tmp_path, [1, 2], late), needs_labels=False)


def arrays(**values: Any) -> dict[str, Any]:
    names = {"class_names": np.array(["a", "b"])}
    return {"edges": np.array([[0, 1]]), "y": np.array([0, 1, 0]), **names, **values}


def test_features_of_a_graph_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    x = np.stack([np.arange(3.0), OPENED], axis=1)
    np.savez(path, **arrays(x=x))
    with pytest.raises(DataError, match=rf"a\.npz: x, column 1: {FAULT}"):
        load_graph_file(path)
    np.savez(path, **arrays(x=x, feature_names=np.array(["age", "opened"])))
    with pytest.raises(DataError, match=rf'x, column "opened": {FAULT}'):
        load_graph_file(path)
    matrix = scipy.sparse.csr_matrix(x)
    sparse: dict[str, Any] = {
        f"x_{key}": getattr(matrix, key)
        for key in ("indptr", "indices", "data", "shape")
    }
    np.savez(path, **arrays(**sparse))
    with pytest.raises(DataError, match=f"x_data, column 1: {FAULT}"):
        load_graph_file(path)
    x[0, 1] = 0.5
    np.savez(path, **arrays(x=x))
    assert load_graph_file(path).dataset.x[2, 1] == np.float32(1_700_000_003)


def test_features_of_edges_of_a_graph_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    edges = {
        "edges": np.array([[0, 1], [1, 2], [0, 2]]),
        "edge_label": np.array([0, 1, 0]),
        "edge_class_names": np.array(["odd", "even"]),
        "edge_attr": np.array(OPENED)[:, None],
        "edge_attr_names": np.array(["account"]),
    }
    np.savez(path, **arrays(x=np.ones((3, 1)), **edges))
    with pytest.raises(
        DataError, match=rf'a\.npz: edge_attr, column "account": {FAULT}'
    ):
        load_graph_file(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64])
def test_features_of_a_pyg_graph_are_refused(dtype: torch.dtype) -> None:
    column = torch.tensor(OPENED, dtype=dtype)[:, None]
    edge_index = torch.tensor([[0, 1, 0], [1, 2, 2]])
    y = torch.tensor([0, 1, 0])
    with pytest.raises(DataError, match=f"g: x, column 0: {FAULT}"):
        node_dataset(Data(x=column, edge_index=edge_index, y=y), "g")
    with pytest.raises(DataError, match=f'x, column "opened": {FAULT}'):
        node_dataset(
            Data(x=column, edge_index=edge_index, y=y),
            "g",
            GivenNames(features=["opened"]),
        )
    edges = Data(
        x=torch.ones(3, 1), edge_index=edge_index, edge_label=y, edge_attr=column[:, 0]
    )
    with pytest.raises(DataError, match=f"g: edge_attr, column 0: {FAULT}"):
        node_dataset(edges, "g")
    exact = torch.tensor(OPENED[::2] * 2, dtype=torch.float64)[:3] - OPENED[0]
    data = Data(x=exact[:, None], edge_index=edge_index, y=y)
    assert node_dataset(data, "g").x.flatten().tolist() == exact.tolist()


def test_sparse_features_of_a_pyg_graph_are_refused() -> None:
    wide = torch.zeros(3, 100, dtype=torch.float64)
    wide[:, 7] = torch.tensor(OPENED)
    y = torch.tensor([0, 1, 0])
    for layout in (torch.sparse_csr, torch.sparse_coo):
        with quiet_csr():
            x = wide.to_sparse(layout=layout)
        data = Data(x=x, edge_index=torch.tensor([[0], [1]]), y=y)
        with pytest.raises(DataError, match=f"g: x, column 7: {FAULT}"):
            node_dataset(data, "g")


def test_numbers_of_other_types_pass() -> None:
    big = np.array([[2.0**53], [2.0**53 + 2]])  # nothing says that these were counted
    for values in (
        big,
        np.float32(OPENED)[:, None],
        np.array([["a"]]),
        np.array(OPENED),
    ):
        check_whole_numbers(values, "x")
    with pytest.raises(
        DataError, match="18446744073709551614 and 18446744073709551615"
    ):
        check_whole_numbers(np.array([[2**64 - 1], [2**64 - 2]], dtype=np.uint64), "x")
