"""Typed graphs as ``.npz`` files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.graph_file import (
    load_graph_file,
    save_client_graph,
)
from tests.support.typed_graphs import USED, client_of, typed_bank


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, Any]:
    """Return the arrays of a typed graph."""
    path = tmp_path / "bank.npz"
    save_client_graph(path, client_of(typed_bank(0, has_device=True, private={USED})))
    with np.load(path) as file:
        return dict(file)


def test_a_typed_graph_is_read_as_it_was_written(tmp_path: Path) -> None:
    dataset = typed_bank(0, has_device=True, private={USED})
    save_client_graph(tmp_path / "bank.npz", client_of(dataset))
    read = load_graph_file(tmp_path / "bank.npz").dataset
    assert read.schema == dataset.schema
    assert read.node_type is not None
    assert read.messages is not None
    assert read.messages.relation is not None
    assert dataset.node_type is not None
    assert dataset.messages is not None
    assert dataset.messages.relation is not None
    for found, due in (
        (read.x, dataset.x),
        (read.node_type, dataset.node_type),
        (read.y, dataset.y),
        (read.edge_index, dataset.edge_index),
        (read.messages.index, dataset.messages.index),
        (read.messages.relation, dataset.messages.relation),
        (read.masks["val"], dataset.masks["val"]),
    ):
        torch.testing.assert_close(found, due, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("key", "change", "text"),
    [
        ("node_type", lambda a: a[:-1], "node_type has 62 entries for 63 nodes"),
        ("edge_type", lambda a: a + 9, "there are only 3 relations"),
        (
            "edge_type",
            lambda a: 0 * a,
            "of the relation card -pays-> shop joins nodes of",
        ),
        ("node_type", None, "node_type is missing"),
        ("node_type_widths", lambda a: a + 1, "add up to 10 columns, but x has 6"),
        ("x", lambda a: a + 1.0, "which belongs to"),
        ("y", lambda a: 0 * a, "nodes of other kinds than card have a class"),
        ("target_type", lambda a: np.array("bird"), '"bird", is no kind of nodes'),
        ("relations", lambda a: a[:, :2], "relations must be text of shape (3, 3)"),
        ("relations", lambda a: a[0, 0], "relations must be text of shape (1, 3)"),
    ],
)
def test_what_does_not_fit_is_named(
    key: str, change: Any, text: str, arrays: dict[str, Any], tmp_path: Path
) -> None:
    if change is None:
        del arrays[key]
    else:
        arrays[key] = change(arrays[key])
    path = tmp_path / "changed.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=re.escape(text)):
        load_graph_file(path)


def test_repeated_edges_of_a_relation_are_one(
    arrays: dict[str, Any], tmp_path: Path
) -> None:
    number = arrays["edge_type"].size
    arrays["edge_index"] = np.concatenate([arrays["edge_index"]] * 2, axis=1)
    arrays["edge_type"] = np.concatenate([arrays["edge_type"]] * 2)
    np.savez(tmp_path / "twice.npz", **arrays)
    messages = load_graph_file(tmp_path / "twice.npz").dataset.messages
    assert messages is not None
    assert messages.index.shape[1] == number


def test_features_of_edges_are_not_dropped_in_silence(
    arrays: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrays["edge_attr"] = np.ones((arrays["edge_type"].size, 2))
    np.savez(tmp_path / "bank.npz", **arrays)
    read = load_graph_file(tmp_path / "bank.npz").dataset
    assert read.messages is not None
    assert read.messages.x.shape[1] == 0
    assert "bank.npz: edge_attr will not be read: models of typed" in caplog.text
