"""Links between kinds of nodes: negatives, what is hidden, agreement and predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from flower_fgl import METHODS, simulate
from flower_fgl.client_apps.runtime.training import LinkTrainingSet
from flower_fgl.core.agreement import Told, differing_schemas
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.schema import Schema, Triple
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph, NodeDataset
from flower_fgl.datasets.splits.links import link_client
from flower_fgl.datasets.transforms.typed import NodeTable, TypedTarget, typed_dataset
from flower_fgl.methods import parse_config
from flower_fgl.nn import GraphInput
from flower_fgl.nn.link import draw_negatives, pair_codes, pair_sides
from flower_fgl.simulation.prediction import predict_graph
from tests.support.owners import run_owners
from tests.support.typed_graphs import (
    OWNS,
    PAYS,
    USED,
    client_of,
    typed_bank,
    typed_owners,
    typed_tables,
    write_tables,
)

SIZES: dict[str, Any] = {
    "setting": "link",
    "model": "rgcn",
    "hidden_channels": 8,
    "rounds": 2,
}
ABLE = [
    (name, align)
    for name, row in sorted(METHODS.items())
    for align, is_able in (("same", row.reads_messages), ("name", row.shares_parts))
    if row.predicts_links and is_able
]
LIKES, LIKED = ("user", "likes", "item"), ("item", "liked", "user")
KNOWS = ("user", "knows", "user")


def random_market(seed: int, *, has_reverse: bool = False) -> NodeDataset:
    """Return users and items with random features and random likes."""
    generator = torch.Generator().manual_seed(seed)
    tables = {
        kind: NodeTable(torch.randn(number, 4, generator=generator), tuple("abcd"))
        for kind, number in (("user", 150), ("item", 100), ("shop", 30))
    }

    def edges(one: int, other: int, number: int) -> Tensor:
        place = torch.randperm(one * other, generator=generator)[:number]
        return torch.stack([place // other, place % other])

    likes = edges(150, 100, 900)
    relations: dict[Triple, Tensor] = {
        LIKES: likes,
        ("item", "at", "shop"): edges(100, 30, 200),
        KNOWS: edges(150, 150, 400),
    }
    if has_reverse:
        relations[LIKED] = likes.flip(0)
    wanted = TypedTarget(torch.full((150,), -1), Target.classes(("",)))
    return typed_dataset("market", tables, relations, "user", wanted)


def task_of(dataset: NodeDataset, relation: str) -> ClientGraph:
    """Return the link prediction task of a graph."""
    client = client_of(dataset)
    assert client.schema is not None
    schema = client.schema.to_predict(relation, "graph")
    config = parse_config({"setting": "link", "model": "rgcn"})
    return link_client(replace(client, schema=schema), config)


def kinds_of(graph: Graph, pairs: Tensor) -> list[set[int]]:
    """Return the kinds at both ends of pairs (2, P)."""
    assert graph.node_type is not None
    return [set(row.tolist()) for row in graph.node_type[pairs]]


@pytest.mark.parametrize(("relation", "kinds"), [("likes", (0, 1)), ("knows", (0, 0))])
def test_negatives_join_the_kinds_of_the_relation(
    relation: str, kinds: tuple[int, int]
) -> None:
    client = task_of(random_market(0), relation)
    graph = client.graph
    assert graph.pairs is not None
    assert graph.messages is not None
    negatives = graph.pairs[:, graph.y == 0]
    number = {"likes": 900, "knows": 400}[relation]
    held = int(0.05 * number) + int(0.1 * number)
    assert abs(negatives.shape[1] - held) <= 2  # 5 % and 10 % of the edges
    assert kinds_of(graph, negatives) == [{kinds[0]}, {kinds[1]}]
    inputs = GraphInput(graph.x, graph.edge_index).with_pairs(graph.pairs)
    training = LinkTrainingSet.of(graph, inputs)
    drawn = training.epoch(torch.Generator().manual_seed(1))
    fresh = drawn.pairs[:, drawn.labels == 0]
    assert fresh.shape[1] == int(graph.masks["train"].sum())
    assert kinds_of(graph, fresh) == [{kinds[0]}, {kinds[1]}]
    known = pair_codes(graph.pairs[:, graph.masks["train"]], graph.num_nodes)
    assert not torch.isin(pair_codes(fresh, graph.num_nodes), known).any()


def test_every_free_pair_of_two_kinds_is_drawn_once() -> None:
    node_type = torch.tensor([0, 1, 2, 0, 1, 1])
    edges = torch.tensor([[0, 3], [1, 4]])
    side = pair_sides(edges, 6, node_type)
    assert side is not None
    assert side.tolist() == [0, 1, -1, 0, 1, 1]
    drawn = draw_negatives(
        pair_codes(edges, 6), 6, 99, torch.Generator().manual_seed(0), side
    )
    found = {tuple(pair) for pair in drawn.T.tolist()}
    assert found == {(0, 4), (0, 5), (1, 3), (3, 5)}
    assert drawn.shape[1] == 4
    one = torch.tensor([[0], [3]])  # of one kind: only its nodes
    side = pair_sides(one, 6, torch.tensor([0, 1, 1, 0, 0, 1]))
    assert side is not None
    drawn = draw_negatives(
        pair_codes(one, 6), 6, 99, torch.Generator().manual_seed(0), side
    )
    assert {tuple(pair) for pair in drawn.T.tolist()} == {(0, 4), (3, 4)}


@pytest.mark.parametrize("has_reverse", [False, True])
@pytest.mark.parametrize("model", ["rgcn", "typed-graphsage"])
def test_random_links_between_two_kinds_score_as_noise(
    model: str, has_reverse: bool, tmp_path: Path
) -> None:
    folder = typed_owners(
        tmp_path / "own",
        *(random_market(seed, has_reverse=has_reverse) for seed in range(3)),
    )
    run = simulate(
        "fedavg",
        owners=folder,
        output_dir=str(tmp_path),
        target_relation="likes",
        **SIZES | {"model": model, "rounds": 15, "lr": 0.02},
    )
    # 540 test pairs: one standard error is about 0.025
    aurocs = [row["metrics"]["local"]["test"]["auroc"] for row in run.rounds]
    assert abs(np.mean(aurocs[-5:]) - 0.5) < 0.06


def test_held_out_edges_leave_the_relation_and_its_reverse_only() -> None:
    dataset = random_market(0, has_reverse=True)
    client = task_of(dataset, "likes")
    graph, whole = client.graph, dataset.messages
    assert graph.messages is not None
    assert graph.messages.relation is not None
    assert graph.pairs is not None
    assert whole is not None
    assert whole.relation is not None
    is_held = (graph.masks["val"] | graph.masks["test"]) & (graph.y == 1)
    held = pair_codes(graph.pairs[:, is_held], graph.num_nodes)
    codes = pair_codes(graph.messages.index, graph.num_nodes)
    assert client.schema is not None
    for number, triple in enumerate(client.schema.relations):
        of = graph.messages.relation == number
        before = int((whole.relation == number).sum())
        hidden = {LIKES, LIKED}
        assert int(of.sum()) == before - len(held) * (triple in hidden)
        if triple in hidden:
            assert not torch.isin(codes[of], held).any()
    undirected = pair_codes(graph.edge_index, graph.num_nodes)
    is_loop = graph.messages.index[0] == graph.messages.index[1]
    assert torch.equal(torch.unique(undirected), torch.unique(codes[~is_loop]))


def test_a_relation_that_contains_the_predicted_one_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tables = {
        "user": NodeTable(torch.empty(6, 0)),
        "item": NodeTable(torch.empty(9, 0)),
    }
    every = torch.cartesian_prod(torch.arange(6), torch.arange(9)).T
    chosen = every[:, ::3]
    wanted = TypedTarget(torch.full((6,), -1), Target.classes(("",)))
    seen = typed_dataset(
        "s",
        tables,
        {LIKES: chosen, ("user", "saw", "item"): every[:, :53]},
        "user",
        wanted,
    )
    task_of(seen, "likes")
    assert (
        "The pairs of the relation saw are a part of those of likes, or" in caplog.text
    )


def test_features_that_follow_degrees_are_refused() -> None:
    dataset = random_market(0)
    assert dataset.messages is not None
    likes = dataset.messages.index[:, dataset.messages.relation == 0]
    degree = torch.bincount(likes[0], minlength=dataset.num_nodes)[:150].float()
    x = dataset.x.clone()
    x[:150, :4] = degree[:, None]
    with pytest.raises(DataError, match='"user" nodes are a function of their degrees'):
        task_of(replace(dataset, x=x), "likes")
    task_of(replace(dataset, x=x), "knows")


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write three owners; one has devices, and one keeps who used them to itself."""
    return typed_owners(
        tmp_path_factory.mktemp("banks") / "own",
        typed_bank(0),
        typed_bank(1, has_device=True),
        typed_bank(2, has_device=True, private={USED}),
    )


@pytest.mark.parametrize("align", ["same", "name"])
def test_a_deployment_gives_the_numbers_of_a_simulation(
    align: str, banks: str, tmp_path: Path
) -> None:
    folder = banks
    if align == "same":
        folder = typed_owners(tmp_path / "own", *map(typed_bank, range(3)))
    values = SIZES | {"schema_align": align, "target_relation": "pays"}
    simulated = simulate("fedavg", owners=folder, output_dir=str(tmp_path), **values)
    nodes = [{"graph": str(path)} for path in sorted(Path(folder).glob("*.npz"))]
    deployed = run_owners(nodes, tmp_path / "run", **values)

    def numbers(run: Any) -> list[Any]:
        return [
            (row["loss"], row["metrics"]["local"]["test"]["auroc"])
            for row in run.rounds
        ]

    assert len(numbers(deployed)) == 2
    assert numbers(deployed) == numbers(simulated)


@pytest.mark.parametrize(("method", "align"), ABLE)
def test_all_methods_for_links_train_on_typed_graphs(
    method: str, align: str, banks: str, tmp_path: Path
) -> None:
    folder = banks
    if align == "same":
        folder = typed_owners(tmp_path / "own", *map(typed_bank, range(3)))
    values = SIZES | {"schema_align": align, "target_relation": "pays"}
    run = simulate(method, owners=folder, output_dir=str(tmp_path), **values)
    assert run.summary["best"]["test"]["num_nodes"] == 52


def test_a_masked_sum_is_that_of_the_uploads(tmp_path: Path) -> None:
    folder = typed_owners(tmp_path / "own", *map(typed_bank, range(3)))
    values = SIZES | {"target_relation": "pays"}
    nodes = [{"graph": str(path)} for path in sorted(Path(folder).glob("*.npz"))]
    losses = [
        [
            row["loss"]
            for row in run_owners(
                nodes, tmp_path / str(is_secure), secure_aggregation=is_secure, **values
            ).rounds
        ]
        for is_secure in (False, True)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_the_model_of_an_owner_scores_links_by_its_own_names(
    banks: str, tmp_path: Path
) -> None:
    paths = sorted(Path(banks).glob("*.npz"))
    values = SIZES | {"schema_align": "name", "target_relation": "card:pays:shop"}
    run_owners([{"graph": str(p)} for p in paths], tmp_path / "run", **values)
    (model,) = (tmp_path / "run-models").glob("*-bank2-*")
    found = predict_graph(model, paths[2], top_k=2)
    dataset = typed_bank(2, has_device=True, private={USED})
    assert dataset.schema is not None
    assert dataset.node_type is not None
    kinds = dataset.node_type.numpy()
    card, shop = (dataset.schema.node_types.index(k) for k in ("card", "shop"))
    assert len(found.values) == 80
    assert set(kinds[found.items["source"]]) == {card}
    assert set(kinds[found.items["target"]]) == {shop}


def test_a_partition_of_one_typed_graph_predicts_links(tmp_path: Path) -> None:
    run = simulate(
        "fedavg",
        dataset="synthetic",
        clients=3,
        target_relation="near",
        output_dir=str(tmp_path),
        **SIZES,
    )
    assert run.summary["best"]["test"]["auroc"] > 0.45
    with pytest.raises(
        DataError, match=r"it has 2 relations\. Set target-relation .* item:in:group"
    ):
        simulate("fedavg", dataset="synthetic", output_dir=str(tmp_path), **SIZES)


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"target_relation": "buys"}, DataError, 'no relation has the name "buys"'),
        ({"target_relation": "used"}, DataError, "bank0: .* no relation has the name"),
        (
            {"schema_align": "private", "target_relation": "pays"},
            ConfigError,
            'schema-align = "private" tells none',
        ),
        (
            {"link_features": "degree", "target_relation": "pays"},
            ConfigError,
            'link-features = "degree" is for plain graphs',
        ),
    ],
)
def test_what_does_not_fit_is_named(
    values: dict[str, Any],
    error: type[Exception],
    text: str,
    banks: str,
    tmp_path: Path,
) -> None:
    values = SIZES | {"schema_align": "name"} | values
    with pytest.raises(error, match=text):
        simulate("fedavg", owners=banks, output_dir=str(tmp_path), **values)


def test_a_private_relation_is_not_predicted(banks: str, tmp_path: Path) -> None:
    paths = sorted(Path(banks).glob("*.npz"))[1:]
    with pytest.raises(DataError, match=r"bank2: .* card:used:device is private"):
        simulate(
            "fedavg",
            owners=",".join(map(str, paths)),
            output_dir=str(tmp_path),
            schema_align="name",
            target_relation="used",
            **SIZES,
        )


def test_a_name_of_two_relations_needs_its_kinds() -> None:
    schema = Schema("a", (("a", 0), ("b", 0)), (("a", "r", "b"), ("b", "r", "a")))
    with pytest.raises(
        DataError, match=r'g: 2 relations have the name "r".*: a:r:b, b'
    ):
        schema.to_predict("r", "g")
    assert schema.to_predict("b:r:a", "g").predicted == ("b", "r", "a")


def test_pairs_are_scored_by_the_ids_of_their_kinds(tmp_path: Path) -> None:
    for number in range(3):  # cards, persons and shops all have the ids 0, 1, …
        tables = typed_tables(number)
        for name, text in tables.items():
            for kind in ("card-", "shop-", "person-"):
                text = text.replace(kind, "")
            tables[name] = text
        write_tables(tmp_path / "own" / f"bank{number}", tables)
    run = simulate(
        "fedavg",
        owners=str(tmp_path / "own"),
        output_dir=str(tmp_path),
        target_relation="pays",
        **SIZES | {"rounds": 10, "lr": 0.02},
    )
    folder = tmp_path / "own" / "bank0"
    lines = (folder / "edges" / "pays.csv").read_text().splitlines()[1:]
    known = {tuple(line.split(",")) for line in lines}
    found = run.predict(folder, top_k=3)
    pairs = list(zip(found["source"], found["target"], strict=True))
    assert {str(one) for one, _ in pairs} == {str(card) for card in range(40)}
    assert {str(other) for _, other in pairs} <= {str(shop) for shop in range(8)}
    assert not known & {(str(a), str(b)) for a, b in pairs}
    assert len(set(pairs)) == len(pairs) == 120
    same = run.predict(folder, pairs=np.array(pairs))
    torch.testing.assert_close(
        torch.tensor(same["score"].to_numpy()),
        torch.tensor(found["score"].to_numpy()),
        check_dtype=False,
    )
    with pytest.raises(
        DataError, match='pair 0: target "9" is no node of the kind of a'
    ):
        run.predict(folder, pairs=[("3", "9")])


def test_pyg_graphs_need_no_labels(tmp_path: Path) -> None:
    data = HeteroData()
    market = random_market(4)
    assert market.messages is not None
    for number, kind in enumerate(("user", "item", "shop")):
        assert market.node_type is not None
        rows = market.node_type == number
        data[kind].x = market.x[rows][:, 4 * number : 4 * number + 4]
    likes = market.messages.index[:, market.messages.relation == 0]
    data[LIKES].edge_index = likes - torch.tensor([[0], [150]])
    shops = market.messages.index[:, market.messages.relation == 1]
    data["item", "at", "shop"].edge_index = shops - torch.tensor([[150], [250]])
    run = simulate(
        "fedavg",
        dataset=data,
        clients=2,
        target_relation="likes",
        partition="uniform",
        output_dir=str(tmp_path),
        **SIZES,
    )
    assert run.summary["best"]["test"]["num_nodes"] > 0
    found = run.predict(data, top_k=1)
    assert len(found) == 150


def test_owners_that_predict_another_relation_are_apart() -> None:
    schema = Schema("card", (("card", 3), ("shop", 2), ("person", 1)), (PAYS, OWNS))
    one, other = schema.to_predict("pays", "a"), schema.to_predict("owns", "b")
    reasons = differing_schemas(
        {"a": Told(one), "b": Told(one), "c": Told(other)}, "name"
    )
    assert list(reasons) == ["c"]
    assert "or another relation" in reasons["c"]
    assert Schema.from_text(other.to_text()) == other
    assert one.hashed() != schema.hashed()
