"""Split of labelled edges: shares, times, leakage, bad input, hash."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.seeds import numpy_generator
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, EdgeTable, Graph
from flower_fgl.datasets.splits.edges import (
    edge_client,
    require_pairs,
    split_by_time,
    split_edges,
)
from flower_fgl.datasets.splits.links import links_sha256
from flower_fgl.datasets.transforms.canonical import undirected_simple
from flower_fgl.methods import parse_config
from flower_fgl.nn.link import pair_codes

SHARES = (Fraction(60, 100), Fraction(20, 100), Fraction(20, 100))
NODES = 40


def table_of(number: int = 300, *, times: bool = False, **fields: Any) -> EdgeTable:
    draw = torch.Generator().manual_seed(0)
    table = EdgeTable(
        torch.randint(NODES, (2, number), generator=draw),
        (torch.rand(number, generator=draw) < 0.2).long(),
        Target.classes(("normal", "odd")),
        torch.rand(number, 2, generator=draw),
        ("amount", "fee"),
        torch.arange(number).double() if times else None,
    )
    return replace(table, **fields)


def client_of(table: EdgeTable | None) -> ClientGraph:
    draw = torch.Generator().manual_seed(1)
    pairs = torch.zeros(2, 0, dtype=torch.int64) if table is None else table.pairs
    none = torch.zeros(NODES, dtype=torch.bool)
    graph = Graph(
        torch.randn(NODES, 3, generator=draw),
        undirected_simple(pairs, NODES),
        torch.full((NODES,), -1),
        dict.fromkeys(("train", "val", "test"), none),
    )
    names = ("a", "b", "c")
    ids = torch.arange(NODES)
    return ClientGraph(
        0, graph, Target.classes(("",)), ids, feature_names=names, edges=table
    )


def config_of(**values: Any) -> Any:
    return parse_config(
        {"setting": "edge", **{k.replace("_", "-"): v for k, v in values.items()}}
    )


def codes(pairs: Tensor) -> set[int]:
    return set(pair_codes(pairs, NODES).tolist())


def test_all_edges_between_two_nodes_are_in_one_part() -> None:
    table = table_of()
    y = table.y.clone()
    y[:7] = -1
    masks = split_edges(
        table.pairs, y, NODES, SHARES, generator=numpy_generator(0, 0, 0, "edge split")
    )
    assert torch.equal(sum(mask.long() for mask in masks.values()), (y >= 0).long())
    parts = [codes(table.pairs[:, mask]) for mask in masks.values()]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert all(len(part) > 20 for part in parts)
    # the pairs are split class by class, so that each part has its share of rare edges
    for mask, share in zip(masks.values(), SHARES, strict=True):
        odd = int((y[mask] == 1).sum()) / int((y == 1).sum())
        assert abs(odd - float(share)) < 0.1


def test_the_split_is_seeded_and_hashed() -> None:
    client = client_of(table_of())
    made = [edge_client(client, config_of(partition_seed=s)) for s in (0, 0, 1)]
    hashes = [links_sha256("partition", [one]) for one in made]
    assert hashes[0] == hashes[1] != hashes[2]
    timed = edge_client(client_of(table_of(times=True)), config_of())
    later = replace(timed, evaluation=(replace(timed.evaluation[0], masks={}),))
    assert links_sha256("p", [timed]) != links_sha256("p", [later])


def test_at_random_messages_pass_over_all_edges_and_features_follow() -> None:
    table = table_of()
    client = edge_client(client_of(table), config_of())
    graph = client.graph
    assert torch.equal(graph.edge_index, undirected_simple(table.pairs, NODES))
    assert torch.equal(graph.pairs, table.pairs)
    assert torch.equal(graph.pair_x, table.x)
    assert client.class_names == ("normal", "odd")
    assert client.feature_names == ("a", "b", "c", "edge: amount", "edge: fee")
    assert not client.evaluation
    assert client.edges is None


def test_a_split_by_time_by_hand() -> None:
    time = torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    y = torch.zeros(10, dtype=torch.int64)
    masks = split_by_time(time, y, SHARES)
    assert {n: time[mask].tolist() for n, mask in masks.items()} == {
        "train": [0, 1, 2, 3, 4, 5],
        "val": [6, 7],
        "test": [8, 9],
    }
    # an unknown class counts for no share, and edges of one time stay together: of the 9
    # labelled edges 1 2 3 3 3 3 7 8 9, validation begins with number 5 and test with 7
    y[0] = -1
    tied = torch.tensor([0.0, 1, 2, 3, 3, 3, 3, 7, 8, 9])
    masks = split_by_time(tied, y, SHARES)
    assert {n: tied[mask].tolist() for n, mask in masks.items()} == {
        "train": [1, 2],
        "val": [3, 3, 3, 3, 7],
        "test": [8, 9],
    }
    masks = split_by_time(time, torch.zeros(10), SHARES, cuts=(2, 2.5))
    assert [int(mask.sum()) for mask in masks.values()] == [2, 1, 7]


@pytest.fixture(scope="module")
def timed() -> ClientGraph:
    y = table_of(times=True).y.clone()
    y[::9] = -1
    return edge_client(client_of(table_of(times=True, y=y)), config_of())


def test_no_later_edge_is_in_the_graph_of_a_part(timed: ClientGraph) -> None:
    table = table_of(times=True)
    (test,) = timed.evaluation
    for graph, later in ((timed.graph, "val"), (test, "test")):
        held = graph.pairs[:, graph.masks[later]]
        rows = graph.pair_x[
            graph.masks[later]
        ]  # the features of each edge are different
        of = (table.x[:, None] == rows).all(dim=2).any(dim=1)
        assert int(of.sum()) == held.shape[1] > 20
        start = int(of.nonzero()[0, 0])
        earlier = table.pairs[:, :start]
        expected = undirected_simple(earlier.contiguous(), NODES)
        assert torch.equal(graph.edge_index, expected)
        directed = set(map(tuple, graph.edge_index.T.tolist()))
        new = codes(held) - codes(earlier)
        assert new
        for code in new:
            u, v = divmod(code, NODES)
            assert (u, v) not in directed
            assert (v, u) not in directed
    assert timed.graph.edge_index.shape[1] < test.edge_index.shape[1]


def test_the_training_graph_holds_no_test_edge_nor_its_class_or_features(
    timed: ClientGraph,
) -> None:
    graph, (test,) = timed.graph, timed.evaluation
    assert set(test.masks) == {"test"}
    assert bool(test.masks["test"].all())
    assert not bool(graph.masks["test"].any())
    assert bool((graph.masks["train"] ^ graph.masks["val"]).all())
    rows = set(map(tuple, graph.pair_x.tolist()))
    assert not rows & set(map(tuple, test.pair_x.tolist()))
    assert graph.y.numel() + test.y.numel() == int((table_of().y[:300] >= 0).sum()) - 34
    assert int((graph.y < 0).sum()) == int((test.y < 0).sum()) == 0


def test_common_times_of_all_owners() -> None:
    table = table_of(times=True)
    made = edge_client(client_of(table), config_of(time_cuts="100,250"))
    sizes = [int(made.graph.masks[n].sum()) for n in ("train", "val")]
    assert [*sizes, made.evaluation[0].num_items] == [100, 150, 50]
    # an owner may have no edge of a period: it trains only
    made = edge_client(client_of(table), config_of(time_cuts="400,500"))
    assert int(made.graph.masks["train"].sum()) == 300
    assert made.evaluation[0].num_items == 0
    with pytest.raises(DataError, match="the edges of this graph have none"):
        edge_client(client_of(table_of()), config_of(time_cuts="100,250"))


@pytest.mark.parametrize("cuts", ["500,400", "5", "a,b", "1,inf", "1,2,3", "3,3"])
def test_times_that_are_no_two_ascending_numbers_are_refused(cuts: str) -> None:
    with pytest.raises(ConfigError, match="time-cuts must be two numbers"):
        config_of(time_cuts=cuts)


def test_edges_of_a_single_time_are_refused() -> None:
    same = client_of(table_of(20, times=True, time=torch.full((20,), 3.0)))
    with pytest.raises(DataError, match="the first 20 have the time 3"):
        edge_client(same, config_of())


def own_split(*sizes: int) -> dict[str, Tensor]:
    part = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return {n: part == i for i, n in enumerate(("train", "val", "test"))}


def test_an_owners_split_is_used_and_must_follow_time() -> None:
    masks = own_split(3, 2, 1)
    table = table_of(6, times=True, masks=masks)
    made = edge_client(client_of(table), config_of())
    assert [int(made.graph.masks[n].sum()) for n in ("train", "val")] == [3, 2]
    wrong = {**masks, "train": masks["test"], "test": masks["train"]}
    with pytest.raises(
        DataError, match="goes backwards in time: an edge of val has the"
    ):
        edge_client(client_of(replace(table, masks=wrong)), config_of())
    with pytest.raises(DataError, match="the edges of this graph have no split"):
        edge_client(client_of(table_of()), config_of(split="public"))


def test_a_graph_with_three_labelled_edges_has_no_items() -> None:
    for times in (False, True):
        alone = edge_client(client_of(table_of(3, times=times)), config_of())
        assert sum(int(mask.sum()) for mask in alone.graph.masks.values()) == 0
        with pytest.raises(
            DataError, match=r"No client has a labelled edge.*at least 10"
        ):
            require_pairs([alone], config_of())


def test_a_graph_without_classes_of_edges_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"no classes. Add a column label to edges\.csv"
    ):
        edge_client(client_of(None), config_of())


def test_settings_that_do_not_go_with_edges_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fedproto cannot classify edges.*fedavg"):
        config_of(method="fedproto")
    with pytest.raises(ConfigError, match="num-neighbors is not possible"):
        config_of(num_neighbors="10,5", batch_size=16)
    with pytest.raises(ConfigError, match='partition = "dirichlet" is not for'):
        config_of(partition="dirichlet")
    with pytest.raises(ConfigError, match="class-weights is not for"):
        parse_config({"setting": "link", "class-weights": "balanced"})
    with pytest.raises(ConfigError, match=r"opfgl does not read class-weights.*fedavg"):
        parse_config({"method": "opfgl", "class-weights": "balanced"})
