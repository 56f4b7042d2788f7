"""Partitions of the edges of a typed graph, of which clients share some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_fgl import simulate, to_npz
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.datasets.build import build_clients
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.partition.label_skew import (
    deal_edges,
    deal_relations,
    share_out,
)
from flower_fgl.methods import parse_config
from tests.support.typed_graphs import hetero, typed_bank

RULES = ("random-edges", "random-edge-types")
RUN: dict[str, Any] = {"rounds": 1, "hidden_channels": 4, "clients": 3}


def shared(number: int, clients: int = 3, seed: int = 0) -> list[list[int]]:
    """Return the items of each client if they are not shuffled."""
    generator = np.random.default_rng(seed)
    parts = share_out(np.arange(number), clients, generator=generator)
    return [part.tolist() for part in parts]


def test_pieces_are_those_of_the_protocol() -> None:
    # E = 12, K = 3: s = 2; [6, 7] go to m = 2 clients each, [8 … 11] to all
    parts = shared(12)
    assert [part[:2] for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(part[-4:] == [8, 9, 10, 11] for part in parts)
    assert [sum(item in part for part in parts) for item in (6, 7)] == [2, 2]
    assert {len(part) for part in parts} <= {6, 7, 8}
    parts = shared(10)  # s = 2, no remainder
    assert all(part[-2:] == [8, 9] for part in parts)
    assert shared(4) == [[0, 3], [1, 3], [2, 3]]  # R = K + 1


@given(st.integers(3, 8), st.integers(1, 60), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_each_item_is_held_as_often_as_the_protocol_says(
    clients: int, more: int, seed: int
) -> None:
    number = clients + 1 + more
    size = number // (clients + 2)
    held = np.bincount(np.concatenate(shared(number, clients, seed)))
    counts = [clients * size, size, number - (clients + 1) * size]
    own, some, every = np.split(held, np.cumsum(counts)[:-1])
    assert (own == 1).all()
    assert ((some >= 2) & (some < clients)).all()
    assert (every == clients).all()


def test_whole_relations_stay_together() -> None:
    relations = np.random.default_rng(0).integers(0, 9, 200)
    parts = deal_relations(relations, 3, seed=5)
    for part in parts:
        held = np.unique(relations[part])
        assert len(part) == np.isin(relations, held).sum()
    assert len(np.unique(np.concatenate(parts))) == 200
    again = deal_relations(relations, 3, seed=5)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    other = deal_relations(relations, 3, seed=6)
    assert any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def test_too_few_edges_or_relations_are_an_error() -> None:
    with pytest.raises(DataError, match=r"at least 5 edges for 3 clients, but .* 4"):
        deal_edges(4, 3, seed=0)
    with pytest.raises(DataError, match=r"more relations than the 3 clients, but .* 3"):
        deal_relations(np.array([0, 1, 2, 2]), 3, seed=0)


def built(path: Path, **values: Any) -> list[ClientGraph]:
    """Return the clients of a typed graph file."""
    given = {"dataset": str(path), "clients": 3, "partition": "random-edges"} | values
    if "types" not in given:
        given["model"] = "rgcn"
    return build_clients(parse_config(given), 3)[0]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a graph with a relation to three kinds of nodes."""
    return to_npz(hetero(typed_bank(0)), tmp_path_factory.mktemp("bank") / "bank.npz")


def test_a_client_holds_its_edges_and_their_ends(bank: Path) -> None:
    clients = built(bank)
    whole = typed_bank(0)
    assert whole.messages is not None
    listed = set(map(tuple, whole.messages.index.T.tolist()))
    for client in clients:
        messages = client.graph.messages
        assert messages is not None
        assert messages.relation is not None
        ends = client.node_ids[messages.index]
        assert set(map(tuple, ends.T.tolist())) <= listed
        assert torch.equal(torch.unique(ends), client.node_ids)
        kinds = client.graph.node_type
        assert kinds is not None
        # relation 0 is from cards (1) to shops (0), 1 from persons (2) to cards
        of = torch.tensor([[1, 2], [0, 1]])[:, messages.relation]
        assert torch.equal(kinds[messages.index], of)
        assert client.graph.edge_index.shape[1] == 2 * messages.index.shape[1]


@pytest.mark.parametrize("split", ["60/20/20", "public"])
def test_a_node_of_several_clients_has_one_role(bank: Path, split: str) -> None:
    clients = built(bank, split=split)
    role: dict[int, str] = {}
    for client in clients:
        for name in ("train", "val", "test"):
            for node in client.node_ids[client.graph.masks[name]].tolist():
                assert role.setdefault(node, name) == name
    assert set(role.values()) == {"train", "val", "test"}
    assert sum(len(client.node_ids) for client in clients) > len(role)


def test_a_fifth_of_the_published_training_nodes_becomes_validation(
    tmp_path: Path,
) -> None:
    data = hetero(typed_bank(0))
    data["card"].val_mask[:] = False
    clients = built(to_npz(data, tmp_path / "a.npz"), split="public")
    found = {name: set[int]() for name in ("train", "val")}
    for client in clients:
        for name, nodes in found.items():
            nodes |= set(client.node_ids[client.graph.masks[name]].tolist())
    assert not found["train"] & found["val"]
    assert len(found["val"]) == 5  # of 24 training nodes
    assert len(found["train"]) == 19


def test_without_types_the_clients_are_the_same(tmp_path: Path) -> None:
    data = hetero(typed_bank(0)).to_homogeneous()
    data.y = typed_bank(0).y
    path = to_npz(data, tmp_path / "a.npz")
    for one, other in zip(built(path), built(path, types="ignore"), strict=True):
        assert torch.equal(one.node_ids, other.node_ids)
        assert torch.equal(one.graph.edge_index, other.graph.edge_index)
        assert other.schema is None


@pytest.mark.parametrize("align", ["same", "name"])
@pytest.mark.parametrize("rule", ["random-edges", "metis", "louvain", "dirichlet"])
def test_rules_give_typed_clients_that_train(
    rule: str, align: str, bank: Path, tmp_path: Path
) -> None:
    values = {"model": "rgcn", "partition": rule, "split": "60/20/20"}
    run = simulate(
        "fedavg",
        str(bank),
        schema_align=align,
        output_dir=str(tmp_path),
        **values,
        **RUN,
    )
    assert (run.best or {})["test"]["num_nodes"] > 3


def test_a_client_with_too_few_target_nodes_is_an_error(bank: Path) -> None:
    with pytest.raises(
        DataError, match=r'"uniform" .* [0-4] target nodes \(of the kind'
    ):
        build_clients(
            parse_config(
                {"dataset": str(bank), "partition": "uniform", "model": "rgcn"}
            ),
            10,
        )


@pytest.mark.parametrize("rule", RULES)
def test_rules_for_edges_refuse_what_they_cannot_share(rule: str, bank: Path) -> None:
    values = RUN | {"partition": rule}
    with pytest.raises(ConfigError, match="has one kind of nodes and edges"):
        simulate("fedavg", **values)
    few = values | {"clients": 2, "model": "rgcn"}
    with pytest.raises(ConfigError, match="at least 3 clients, got 2"):
        simulate("fedavg", str(bank), **few)
    with pytest.raises(ConfigError, match='setting = "transductive" or "inductive"'):
        simulate("fedavg", str(bank), setting="link", **values)
    with pytest.raises(ConfigError, match="edge-sparsity"):
        simulate("fedavg", str(bank), edge_sparsity=0.5, **values)


def test_methods_with_edges_between_clients_are_refused(bank: Path) -> None:
    with pytest.raises(ConfigError, match="fedgcn sends what passes along edges"):
        built(bank, method="fedgcn", types="ignore")
