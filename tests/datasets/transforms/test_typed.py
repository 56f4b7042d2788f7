"""Typed graphs from tables, and the same graph in another schema."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch_geometric.transforms import ToUndirected

from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.pyg_data import node_dataset
from flower_fgl.datasets.transforms.normalize_features import own_columns, scale_client
from flower_fgl.datasets.transforms.subgraph import induced_graph, inductive_graphs
from flower_fgl.datasets.transforms.typed import (
    NodeTable,
    TypedTarget,
    agreed_graph,
    in_schema,
    typed_dataset,
    without_types,
)
from tests.support.typed_graphs import client_of, hetero, typed_bank

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


def test_columns_are_standardized_over_the_nodes_of_their_kind() -> None:
    raw = client_of(typed_bank(0))
    scaled = scale_client(raw, "columns")
    kinds, schema = raw.graph.node_type, raw.schema
    assert kinds is not None
    assert schema is not None
    for number, (kind, columns) in enumerate(schema.blocks()):
        is_own = kinds == number
        seen = is_own & raw.graph.masks["train"] if kind == schema.target else is_own
        block = raw.graph.x[seen][:, columns].double()
        due = (raw.graph.x[is_own][:, columns] - block.mean(0)) / block.std(
            0, correction=0
        )
        torch.testing.assert_close(scaled.graph.x[is_own][:, columns], due.float())
        assert not scaled.graph.x[~is_own][:, columns].any()


def test_statistics_move_with_the_columns() -> None:
    scaled = scale_client(client_of(typed_bank(0)), "columns")
    other = Schema("card", (*(scaled.schema or Schema("", ())).widths, ("zoo", 2)))
    agreed = replace(other, relations=(OWNS, PAYS)).ordered()
    raw = agreed_graph(client_of(typed_bank(0)), "name", agreed)
    for align, schema in (("same", None), ("name", agreed)):
        moved = agreed_graph(scaled, align, schema)
        assert moved.scaling is not None
        assert moved.scaling.statistics is not None
        mean, std = moved.scaling.statistics
        own = own_columns(moved.graph.node_type, moved.schema)
        assert own is not None
        restored = torch.where(own, moved.graph.x.double() * std + mean, 0.0)
        due = (
            raw
            if align == "name"
            else agreed_graph(client_of(typed_bank(0)), align, None)
        )
        torch.testing.assert_close(restored.float(), due.graph.x)


def test_training_graphs_hide_nodes_to_predict_along_all_relations() -> None:
    data = ToUndirected()(hetero(typed_bank(0)))  # adds rev_pays and rev_owns
    whole = client_of(node_dataset(data, "g"))
    assert whole.schema is not None
    target = whole.schema.node_types.index("card")
    (train, val, test), nodes = inductive_graphs(whole.graph, target)
    hidden = whole.graph.masks["val"] | whole.graph.masks["test"]
    assert not hidden[nodes].any()
    assert (whole.graph.node_type != target).sum() == 18
    for graph, number in ((train, 24), (val, 8), (test, 8)):
        assert graph.node_type is not None
        assert graph.messages is not None
        assert graph.messages.relation is not None
        assert (graph.node_type == target).sum() == number
        assert (graph.node_type != target).sum() == 18
        assert len(torch.unique(graph.messages.relation)) == 4
        (mask,) = [m for m in graph.masks.values() if m.any()]
        assert int(mask.sum()) == number
        assert bool((graph.node_type[mask] == target).all())


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
