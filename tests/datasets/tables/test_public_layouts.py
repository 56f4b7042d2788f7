"""The recipes of ``examples/recipes`` on small files in the layouts of public data."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile, load_graph_file
from flower_fgl.datasets.tables.prepare import prepare_graph, propose_vocabulary
from tests.datasets.tables import layouts
from tests.support.guides import ROOT

WRITERS: dict[str, Callable[[Path], list[Path]]] = {
    "elliptic": layouts.elliptic,
    "ibm-aml": layouts.ibm_aml,
    "paysim": layouts.paysim,
    "dgraph-fin": layouts.dgraph_fin,
    "neo4j": layouts.neo4j,
}
RECIPES = ROOT / "examples" / "recipes"


def prepared(name: str, folder: Path, output: str = "graph") -> LocalGraphFile:
    """Return the graph that a recipe makes of its layout."""
    tables = WRITERS[name](folder)
    recipe = Path(shutil.copy(RECIPES / f"{name}.toml", folder))
    if "vocabulary =" in recipe.read_text():
        propose_vocabulary(recipe, tables, folder / f"{name}-vocabulary.toml")
    prepare_graph(recipe, tables, folder / output)
    has_labels = name not in ("ibm-aml", "paysim")
    return load_graph_file(folder / output, needs_labels=has_labels)


def test_every_recipe_has_a_layout() -> None:
    assert {path.stem for path in RECIPES.glob("*.toml")} == set(WRITERS)


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_and_an_archive_hold_the_same_graph(name: str, tmp_path: Path) -> None:
    folder = prepared(name, tmp_path)
    tables = WRITERS[name](tmp_path)
    prepare_graph(tmp_path / f"{name}.toml", tables, tmp_path / "graph.npz")
    archive = load_graph_file(
        tmp_path / "graph.npz", needs_labels=folder.dataset.class_names != ("",)
    )
    assert folder.prepared == archive.prepared != ""
    one, other = folder.dataset, archive.dataset
    assert torch.equal(one.x, other.x)
    assert torch.equal(one.edge_index, other.edge_index)
    assert torch.equal(one.y, other.y)
    assert (one.class_names, one.feature_names) == (
        other.class_names,
        other.feature_names,
    )
    assert {k: v.tolist() for k, v in one.masks.items()} == {
        k: v.tolist() for k, v in other.masks.items()
    }
    if one.edges is not None and other.edges is not None:
        assert torch.equal(one.edges.x, other.edges.x)
        assert torch.equal(one.edges.y, other.edges.y)
    assert (one.edges is None) == (other.edges is None)


@pytest.mark.parametrize("name", WRITERS)
def test_without_labels_the_nodes_have_the_same_features(
    name: str, tmp_path: Path
) -> None:
    whole = prepared(name, tmp_path)
    tables = [
        path
        for path in WRITERS[name](tmp_path)
        if path.name != "elliptic_txs_classes.csv"
    ]
    prepare_graph(tmp_path / f"{name}.toml", tables, tmp_path / "new", has_labels=False)
    new = load_graph_file(tmp_path / "new", needs_labels=False)
    assert torch.equal(new.dataset.x, whole.dataset.x)
    assert new.dataset.feature_names == whole.dataset.feature_names
    assert new.prepared == whole.prepared
    assert new.dataset.masks == {}
    if whole.dataset.edges is None:
        assert new.dataset.edges is None
        return
    assert new.dataset.edges is not None
    assert new.dataset.edges.y.tolist() == [-1] * whole.dataset.edges.num_edges
    assert new.dataset.edges.time is not None
    assert whole.dataset.edges.time is not None
    assert torch.equal(new.dataset.edges.time, whole.dataset.edges.time)
    assert torch.equal(new.dataset.edges.x, whole.dataset.edges.x)


def test_elliptic_has_its_classes_and_a_split_by_time(tmp_path: Path) -> None:
    graph = prepared("elliptic", tmp_path)
    data = graph.dataset
    assert data.x.shape == (8, 165)
    assert data.x[1, 2].item() == pytest.approx(3 / 7 - 9)
    assert data.class_names == ("illicit", "licit")
    assert data.y.tolist() == [-1, 0, 1, 0, 1, 1, 0, -1]
    found = {
        part: mask.nonzero().flatten().tolist() for part, mask in data.masks.items()
    }
    assert found == {"train": [0, 1, 2, 3], "val": [4, 5], "test": [6, 7]}
    assert graph.names[0] == "230425980"
    assert data.edge_index.shape[1] // 2 == 7


def test_ibm_transactions_are_sorted_and_banks_tell_accounts_apart(
    tmp_path: Path,
) -> None:
    graph = prepared("ibm-aml", tmp_path)
    edges = graph.dataset.edges
    assert edges is not None
    assert graph.names == (
        "010:8000EBD30",
        "03208:8000F4580",
        "10:8000EBD30",
        "001:8000F5340",
    )
    assert edges.class_names == ("licit", "laundering")
    assert edges.y.tolist() == [1, 0, 0, 0]  # 00:06 is before 00:20
    assert edges.time is not None
    assert edges.time.diff().tolist() == [840, 85_200, 129_540]  # seconds
    paid = edges.x[:, edges.feature_names.index("Amount Paid")]
    logs = torch.tensor([math.log1p(v) for v in (3000.5, 3697.34, 0.01, 0.02)])
    expected = (logs - logs.mean()) / logs.std(correction=0)
    torch.testing.assert_close(paid, expected, atol=1e-4, rtol=1e-4)
    is_euro = edges.x[:, edges.feature_names.index("Payment Currency=Euro")]
    assert is_euro.tolist() == [0, 0, 0, 1]
    assert graph.dataset.x.tolist() == [[1.0]] * 4
    assert graph.dataset.feature_names == ("constant",)


def test_paysim_keeps_steps_and_leaves_out_what_tells_the_class(tmp_path: Path) -> None:
    edges = prepared("paysim", tmp_path).dataset.edges
    assert edges is not None
    assert edges.y.tolist() == [0, 1, 1, 0]
    assert edges.class_names == ("genuine", "fraud")
    assert edges.time is not None
    assert edges.time.tolist() == [1, 1, 2, 743]
    assert edges.feature_names[:4] == (
        "type=CASH_OUT",
        "type=PAYMENT",
        "type=TRANSFER",
        "type=(other)",
    )
    assert not {"newbalanceOrig", "isFlaggedFraud"} & set(edges.feature_names)


def test_dgraph_reads_index_masks_background_users_and_missing_values(
    tmp_path: Path,
) -> None:
    data = prepared("dgraph-fin", tmp_path).dataset
    assert data.y.tolist() == [0, 1, -1, -1, 0, 1]
    assert data.class_names == ("normal", "fraud")
    found = {
        part: mask.nonzero().flatten().tolist() for part, mask in data.masks.items()
    }
    assert found == {"train": [0, 1], "val": [4], "test": [5]}
    assert data.feature_names[:2] == ("x0", "x0 missing")
    assert data.x[:, 1].tolist() == [1, 0, 0, 0, 0, 0]
    # x0 is 17/3 · (1, 2, 3, 4, 5) without the first user: its median is that of the fourth
    assert data.x[0, 0] == data.x[3, 0]
    assert data.edge_index.shape[1] // 2 == 4


def test_neo4j_labels_and_quoted_names_are_read(tmp_path: Path) -> None:
    graph = prepared("neo4j", tmp_path)
    assert graph.names == ("a1", "a2", "a3", "a4")
    assert graph.dataset.class_names == ("Company", "Person", "Person;Client")
    assert graph.dataset.y.tolist() == [1, 0, 2, 1]
    assert graph.dataset.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
