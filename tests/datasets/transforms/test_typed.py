"""Typed graphs from tables, and the same graph in another schema."""

from __future__ import annotations

import re

import pytest
import torch

from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.transforms.subgraph import induced_graph
from flower_fgl.datasets.transforms.typed import (
    NodeTable,
    TypedTarget,
    in_schema,
    typed_dataset,
    without_types,
)

OWNS, PAYS = ("person", "owns", "card"), ("card", "pays", "shop")


def bank() -> NodeDataset:
    """Return 2 persons, 3 cards and 1 shop; cards are predicted."""
    tables = {
        "person": NodeTable(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), ("age", "income")),
        "card": NodeTable(torch.arange(6.0).reshape(3, 2) + 5, ("k", "l")),
        "shop": NodeTable(torch.empty(1, 0)),
    }
    relations = {
        OWNS: torch.tensor([[0, 0, 1, 0], [0, 1, 2, 1]]),
        PAYS: torch.tensor([[0, 2], [0, 0]]),
    }
    wanted = TypedTarget(
        torch.tensor([0, 1, -1]),
        Target.classes(("good", "bad")),
        {"train": torch.tensor([True, False, False])},
    )
    return typed_dataset("bank", tables, relations, "card", wanted)


def test_tables_become_blocks_of_one_graph() -> None:
    graph = bank()
    assert graph.node_type is not None
    assert graph.node_type.tolist() == [0, 0, 1, 1, 1, 2]
    assert graph.y.tolist() == [-1, -1, 0, 1, -1, -1]
    assert graph.masks["train"].tolist() == [False, False, True, False, False, False]
    assert graph.x[0].tolist() == [1, 2, 0, 0]
    assert graph.x[2].tolist() == [0, 0, 5, 6]
    assert graph.x[5].tolist() == [0, 0, 0, 0]
    assert graph.messages is not None
    assert graph.messages.relation is not None
    found = list(
        zip(
            graph.messages.relation.tolist(),
            *graph.messages.index.tolist(),
            strict=True,
        )
    )
    assert found == [(0, 0, 2), (0, 0, 3), (0, 1, 4), (1, 2, 5), (1, 4, 5)]
    assert graph.edge_index.shape == (2, 10)


def test_induced_part_keeps_kinds_and_relations() -> None:
    part = induced_graph(bank(), torch.tensor([0, 2, 4, 5]))
    assert part.node_type is not None
    assert part.node_type.tolist() == [0, 1, 1, 2]
    assert part.messages is not None
    assert part.messages.relation is not None
    assert part.messages.relation.tolist() == [0, 1, 1]
    assert part.messages.index.tolist() == [[0, 1, 2], [1, 3, 3]]


def test_another_schema_moves_columns_kinds_and_relations() -> None:
    dataset = bank()
    assert dataset.schema is not None
    agreed = Schema(
        "card",
        (("card", 2), ("device", 1), ("person", 2), ("shop", 0)),
        (("a", "x", "b"), PAYS, OWNS),
    )
    part = in_schema(induced_graph(dataset, torch.arange(6)), dataset.schema, agreed)
    assert part.x[0].tolist() == [0, 0, 0, 1, 2]
    assert part.x[2].tolist() == [5, 6, 0, 0, 0]
    assert part.node_type is not None
    assert part.node_type.tolist() == [2, 2, 0, 0, 0, 3]
    assert part.messages is not None
    assert part.messages.relation is not None
    assert part.messages.relation.tolist() == [2, 2, 2, 1, 1]


def test_kinds_of_one_width_may_be_ignored() -> None:
    dataset = bank()
    with pytest.raises(DataError, match=re.escape("the kinds of nodes have")):
        without_types(dataset)


@pytest.mark.parametrize(
    ("widths", "relations", "text"),
    [
        ((("a", 1), ("A", 1)), (), 'the kinds "a" and "A" differ only by case'),
        ((("a", 1),), (("a", "r", "b"),), 'the relation "r" has the kind "b"'),
        ((("a", 1), ("a", 1)), (), "listed twice"),
        ((("a/b", 1),), (), "is no name of a kind"),
        ((("b", 1),), (), 'the kind to predict, "a", is no kind'),
        (
            (("a", 1),),
            tuple(("a", f"r{i}", "a") for i in range(1001)),
            "1,001 relations",
        ),
    ],
)
def test_malformed_schemas_are_refused(widths, relations, text) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match=re.escape(text)):
        Schema("a", widths, relations).check("f")


def test_edge_to_a_missing_node_is_refused() -> None:
    wanted = TypedTarget(torch.tensor([0]), Target.classes(("a",)))
    with pytest.raises(
        DataError, match="names node 3 of the kind a, which has 1 nodes"
    ):
        typed_dataset(
            "f",
            {"a": NodeTable(torch.ones(1, 1))},
            {("a", "r", "a"): torch.tensor([[0], [3]])},
            "a",
            wanted,
        )
