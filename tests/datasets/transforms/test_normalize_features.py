from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets import build
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import ClientGraph, Graph, Scaling
from flower_fgl.datasets.graph_files.graph_file import (
    load_graph_file,
    save_client_graph,
)
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.store import open_store
from flower_fgl.datasets.transforms.normalize_features import (
    normalise_rows,
    scale_client,
)
from flower_fgl.methods import parse_config
from tests.support.sparse import sparse


def config(**values: Any) -> RunConfig:
    settings = {key.replace("_", "-"): value for key, value in values.items()}
    return parse_config({"synthetic.nodes": 200, **settings})


def client_of(x: Tensor, train: list[bool], batch: Tensor | None = None) -> ClientGraph:
    """Make a client without edges, and a test graph of features [[7, 6], [9, 5]]."""
    mask, nothing = torch.tensor(train), torch.empty(2, 0, dtype=torch.int64)
    items = torch.zeros(len(train), dtype=torch.int64)
    graph = Graph(x, nothing, items, {"train": mask}, batch)
    two = torch.ones(2, dtype=torch.bool)
    seen = torch.tensor([[7.0, 6.0], [9.0, 5.0]])
    test = Graph(seen, nothing, torch.zeros(2, dtype=torch.int64), {"test": two})
    return ClientGraph(
        0, graph, Target.classes(("a",)), torch.arange(len(train)), (test,)
    )


def mean_of(client: ClientGraph) -> list[float]:
    assert client.scaling is not None
    assert client.scaling.statistics is not None
    return client.scaling.statistics[0].tolist()


FEATURES = torch.tensor([[1.0, 5.0], [3.0, 5.0], [5.0, 5.0], [100.0, 0.0]])
TRAIN = [True, True, True, False]


def test_columns_are_standardised_by_the_training_nodes_only() -> None:
    client = scale_client(client_of(FEATURES, TRAIN), "columns")
    # training values 1, 3, 5: mean 3, variance 8/3; the second feature is 5 on all
    scale = (8 / 3) ** 0.5
    expected = [[-2 / scale, 0], [0, 0], [2 / scale, 0], [97 / scale, -5]]
    torch.testing.assert_close(client.graph.x, torch.tensor(expected))
    torch.testing.assert_close(
        client.evaluation[0].x, torch.tensor([[4 / scale, 1], [6 / scale, 0]])
    )
    assert client.graph.x.dtype == torch.float32
    assert FEATURES[0, 0] == 1
    assert mean_of(client) == [3, 5]


def edges_of(amounts: list[float], train: list[bool]) -> Graph:
    """Make a graph whose items are edges from node 0 to node 1 with an amount."""
    zeros = torch.zeros(len(amounts), dtype=torch.int64)
    return Graph(
        FEATURES[:2], torch.empty(2, 0, dtype=torch.int64), zeros,
        {"train": torch.tensor(train)},
        pairs=torch.stack([zeros, zeros + 1]), pair_x=torch.tensor(amounts)[:, None],
    )  # fmt: skip


def test_features_of_edges_are_standardised_by_the_training_edges_only() -> None:
    graph = edges_of([100.0, 300.0, 900.0], [True, True, False])
    test = edges_of([500.0], [False])
    client = ClientGraph(0, graph, Target.classes(("a",)), torch.arange(2), (test,))
    scaled = scale_client(client, "columns")
    # training amounts 100 and 300: mean 200, standard deviation 100
    assert scaled.graph.pair_x is not None
    assert scaled.graph.pair_x.flatten().tolist() == [-1, 1, 7]
    assert scaled.evaluation[0].pair_x is not None
    assert scaled.evaluation[0].pair_x.tolist() == [[3]]
    assert scaled.scale == "columns"
    assert scaled.scaling is not None
    assert scaled.scaling.edge_statistics is not None
    assert [t.tolist() for t in scaled.scaling.edge_statistics] == [[200], [100]]
    for how in ("rows", "none"):
        assert scale_client(client, how).graph.pair_x is graph.pair_x
    # nodes that an export has scaled stay as they are
    exported = replace(
        client, scaling=Scaling("columns", (torch.ones(2).double(),) * 2)
    )
    again = scale_client(exported, "columns")
    assert again.graph.x is graph.x
    assert again.graph.pair_x is not None
    assert torch.equal(again.graph.pair_x, scaled.graph.pair_x)


def test_without_training_edges_their_features_are_unchanged() -> None:
    graph = edges_of([100.0, 300.0], [False, False])
    client = ClientGraph(0, graph, Target.classes(("a",)), torch.arange(2))
    assert scale_client(client, "columns").graph.pair_x is graph.pair_x


def test_graph_datasets_are_standardised_by_the_nodes_of_training_graphs() -> None:
    batch = torch.tensor([0, 0, 0, 1])
    client = scale_client(client_of(FEATURES, [True, False], batch), "columns")
    assert mean_of(client) == [3, 5]


def test_sparse_features_are_not_standardised() -> None:
    with pytest.raises(DataError, match='set feature-norm = "rows" or "none"'):
        scale_client(client_of(sparse(FEATURES), TRAIN), "columns")


def test_features_without_training_nodes_are_unchanged_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        client = scale_client(client_of(FEATURES, [False] * 4), "columns")
    assert torch.equal(client.graph.x, FEATURES)
    assert client.scaling is None
    assert "without training nodes keeps its features unstandardized" in caplog.text


def test_rows_are_divided_by_their_absolute_sum_sparse_or_not() -> None:
    x = torch.tensor([[1.0, -3.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    expected = torch.tensor([[0.25, -0.75, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert torch.equal(normalise_rows(x), expected)
    found = normalise_rows(sparse(x))
    assert found.layout == torch.sparse_csr
    assert torch.equal(found.to_dense(), expected)


def test_rows_of_every_graph_of_a_client_are_divided() -> None:
    client = scale_client(client_of(FEATURES, TRAIN), "rows")
    assert torch.equal(client.graph.x.sum(1), torch.ones(4))
    torch.testing.assert_close(client.evaluation[0].x[1, 0], torch.tensor(9 / 14))
    assert scale_client(client, "none") is client


@pytest.mark.parametrize(
    ("setting", "norm", "expected"),
    [
        ("transductive", "default", "none"),
        ("inductive", "default", "columns"),
        ("closed-set", "default", "rows"),
        ("closed-set", "none", "none"),
        ("transductive", "columns", "columns"),
    ],
)
def test_each_setting_has_the_normalization_of_its_paper(
    setting: str, norm: str, expected: str
) -> None:
    asked = config(setting=setting, feature_norm=norm)
    assert asked.scale_of_features(is_dense=True) == expected


def test_sparse_features_are_not_normalized_in_the_inductive_setting() -> None:
    asked = config(setting="inductive")
    assert asked.scale_of_features(is_dense=False) == "none"


def test_every_client_is_normalized_and_each_normalization_has_its_own_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path))
    raw = open_store(config(), 2).load(1).graph.x
    asked = config(feature_norm="rows")
    scaled = open_store(asked, 2).load(1).graph.x
    torch.testing.assert_close(scaled, normalise_rows(raw))
    assert torch.equal(scaled, build_clients(asked, 2)[0][1].graph.x)


@pytest.mark.parametrize("norm", ["none", "rows", "columns"])
def test_an_exported_file_records_its_normalization(norm: str, tmp_path: Path) -> None:
    asked = config(setting="inductive", feature_norm=norm)
    client = build_clients(asked, 2)[0][0]
    save_client_graph(tmp_path / "g.npz", client)
    again = client_from_file(tmp_path / "g.npz", asked)
    for ours, theirs in zip(client.evaluation, again.evaluation, strict=True):
        assert torch.equal(ours.x, theirs.x)
    assert torch.equal(client.graph.x, again.graph.x)
    if norm == "none":
        assert again.scaling is None
        return
    assert again.scaling is not None
    assert again.scaling.kind == norm
    for other in {"none", "rows", "columns"} - {norm}:
        with pytest.raises(
            DataError, match=f'feature-norm = "{norm}", but this run sets'
        ):
            client_from_file(tmp_path / "g.npz", config(feature_norm=other))


def test_a_file_of_raw_features_is_normalized_by_the_run(tmp_path: Path) -> None:
    client = build_clients(config(), 2)[0][0]
    save_client_graph(tmp_path / "raw.npz", client)
    rows = client_from_file(tmp_path / "raw.npz", config(feature_norm="rows"))
    torch.testing.assert_close(rows.graph.x, normalise_rows(client.graph.x))
    inductive = client_from_file(tmp_path / "raw.npz", config(setting="inductive"))
    assert mean_of(inductive)


def features_with(share: float) -> Tensor:
    """Features of 200 nodes of which a share is not zero."""
    draw = torch.Generator().manual_seed(0)
    x = torch.zeros(200, 64).flatten()
    x[torch.randperm(x.numel(), generator=draw)[: int(share * x.numel())]] = 1.0
    return x.view(200, 64)


@pytest.mark.parametrize(("share", "is_possible"), [(0.12, True), (0.08, False)])
def test_sparse_features_of_which_a_tenth_is_not_zero_can_be_standardised(
    share: float, is_possible: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = features_with(share)
    dataset = replace(build.load_dataset(config()), x=sparse(x))
    monkeypatch.setattr(build, "load_dataset", lambda _: dataset)
    raw = build_clients(config(), 2)[0][0]
    assert raw.graph.x.layout == torch.sparse_csr
    save_client_graph(tmp_path / "raw.npz", raw)
    asked = config(feature_norm="columns")
    if not is_possible:
        with pytest.raises(DataError, match="Expected dense features"):
            build_clients(asked, 2)
        assert build_clients(config(setting="inductive"), 2)[0][0].scaling is None
        return
    dense = replace(raw, graph=replace(raw.graph, x=raw.graph.x.to_dense()))
    expected = scale_client(dense, "columns").graph.x
    for client in (
        build_clients(asked, 2)[0][0],
        client_from_file(tmp_path / "raw.npz", asked),
    ):
        torch.testing.assert_close(client.graph.x, expected)
    inductive = client_from_file(tmp_path / "raw.npz", config(setting="inductive"))
    assert inductive.graph.x.layout == torch.strided
    assert mean_of(inductive)


def test_the_store_keeps_the_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path))
    for norm in ("rows", "columns"):
        asked = config(feature_norm=norm)
        stored, made = open_store(asked, 2).load(0), build_clients(asked, 2)[0][0]
        assert stored.scaling is not None
        assert made.scaling is not None
        assert stored.scaling.kind == made.scaling.kind == norm
        if norm == "columns":
            assert mean_of(stored) == mean_of(made)


def test_incomplete_normalization_statistics_are_rejected(tmp_path: Path) -> None:
    client = scale_client(build_clients(config(), 2)[0][0], "columns")
    save_client_graph(tmp_path / "g.npz", client)
    with np.load(tmp_path / "g.npz") as file:
        arrays = {key: file[key] for key in file if key != "feature_std"}
    np.savez(tmp_path / "half.npz", **arrays)
    with pytest.raises(DataError, match="feature_std of 64 floats each"):
        load_graph_file(tmp_path / "half.npz")
