"""Typed graphs of PyG: ``HeteroData``, and ``Data`` with kinds of nodes and edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import ToUndirected

from flower_fgl import register, simulate, to_npz
from flower_fgl.core import extensions
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.pyg_data import (
    GivenNames,
    node_dataset,
    nodes_to_score,
    store_graphs,
)
from flower_fgl.datasets.pyg_typed import TypeNames
from flower_fgl.datasets.transforms.typed import agreed_graph
from tests.support.typed_graphs import (
    OWNS,
    PAYS,
    USED,
    client_of,
    hetero,
    typed_bank,
)

RUN: dict[str, Any] = {"rounds": 1, "hidden_channels": 4, "dropout": 0.0}
TYPED = RUN | {"model": "rgcn"}
KINDS = ["shop", "card", "person"]


def numbered(**changes: Any) -> Data:
    """Two shops, three cards and a person, their kinds mixed, and five edges."""
    fields = {
        "x": torch.tensor([[1.0, 0], [2, 1], [3, 1], [4, 0], [5, 1], [6, 0]]),
        "node_type": torch.tensor([0, 1, 1, 0, 1, 2]),
        "y": torch.tensor([-1, 0, 1, -1, 0, -1]),
        "edge_index": torch.tensor([[1, 2, 4, 5, 5], [0, 3, 3, 1, 2]]),
        "edge_type": torch.tensor([0, 0, 0, 1, 1]),
        "node_type_names": KINDS,
        "edge_type_names": [PAYS, OWNS],
    }
    return Data(**{k: v for k, v in {**fields, **changes}.items() if v is not None})


def same(one: NodeDataset, other: NodeDataset) -> bool:
    """Return whether two typed graphs are equal."""
    assert one.messages is not None
    assert other.messages is not None
    assert one.messages.relation is not None
    assert other.messages.relation is not None
    assert one.node_type is not None
    assert other.node_type is not None
    pairs = [
        (one.x, other.x),
        (one.y, other.y),
        (one.edge_index, other.edge_index),
        (one.messages.index, other.messages.index),
        (one.messages.relation, other.messages.relation),
        (one.node_type, other.node_type),
        *((mask, other.masks[name]) for name, mask in one.masks.items()),
    ]
    is_equal = all(torch.equal(a, b) for a, b in pairs)
    return is_equal and one.schema == other.schema and one.target == other.target


def test_a_hetero_data_is_the_graph_of_its_tables(tmp_path: Path) -> None:
    bank = typed_bank(0, has_device=True)
    names = {"shop": ["s", "t"], "card": ["a", "b", "c"], "person": ["age"]}
    path = to_npz(
        hetero(bank),
        tmp_path / "bank.npz",
        class_names=("good", "bad"),
        feature_names=names,
        private_relations=[USED],
    )
    found = load_graph_file(path).dataset
    assert same(found, typed_bank(0, has_device=True, private={USED}))
    assert found.feature_names == bank.feature_names


def test_a_numbered_data_is_the_same_graph_kind_by_kind() -> None:
    found = node_dataset(numbered(), "g")
    assert found.schema is not None
    assert found.schema.widths == (("shop", 2), ("card", 2), ("person", 2))
    assert found.schema.relations == (PAYS, OWNS)
    assert found.schema.target == "card"
    assert found.y.tolist() == [-1, -1, 0, 1, 0, -1]
    assert found.x.sum(dim=1).tolist() == [1, 4, 3, 4, 6, 6]
    assert found.messages is not None
    assert found.messages.index.tolist() == [[2, 3, 4, 5, 5], [0, 1, 1, 2, 3]]
    data = HeteroData()
    for place, kind in enumerate(KINDS):
        data[kind].x = numbered().x[numbered().node_type == place]
    data["card"].y = torch.tensor([0, 1, 0])
    data[PAYS].edge_index = torch.tensor([[0, 1, 2], [0, 1, 1]])
    data[OWNS].edge_index = torch.tensor([[0, 0], [0, 1]])
    assert same(node_dataset(data, "g"), found)


def test_other_libraries_names_of_kinds_are_read() -> None:
    data = numbered(node_type_names=None, edge_type_names=None)
    data.hetero_node_types, data.hetero_edge_types = KINDS, [PAYS, OWNS]
    data.target_node_type = "card"
    expected = node_dataset(numbered(), "g")
    assert same(node_dataset(data, "g"), expected)
    homogeneous = hetero(typed_bank(0)).to_homogeneous()
    homogeneous.y = typed_bank(0).y
    found = node_dataset(homogeneous, "g").schema
    assert found is not None
    assert found.relations == (PAYS, OWNS)


def test_numbers_are_names_in_a_simulation_of_one_graph_only(tmp_path: Path) -> None:
    data = numbered(node_type_names=None, edge_type_names=None)
    found = node_dataset(data, "g").schema
    assert found is not None
    assert found.node_types == ("0", "1", "2")
    assert found.relations == (("1", "0", "0"), ("2", "1", "1"))
    with pytest.raises(
        DataError, match="node_type has no names, by which owners agree"
    ):
        to_npz(data, tmp_path / "a.npz")
    with pytest.raises(DataError, match="graph 0 of the list: node_type has no names"):
        store_graphs([data, data], tmp_path)


def test_a_name_that_joins_several_pairs_of_kinds_is_a_relation_for_each() -> None:
    names = ["pays", "owns", "sold"]
    data = numbered(edge_type=torch.tensor([0, 0, 1, 1, 1]), edge_type_names=names)
    found = node_dataset(data, "g").schema
    assert found is not None
    of_one = {one[1:] for one in found.relations if one[0] == "card"}
    assert of_one == {("pays", "shop"), ("owns", "shop")}
    assert OWNS in found.relations
    assert len(found.relations) == 3


def test_one_kind_of_nodes_may_have_several_relations() -> None:
    data = numbered(node_type=None, node_type_names=None, y=torch.arange(6) % 2)
    data.edge_type_names = ["calls", "mails"]
    found = node_dataset(data, "g").schema
    assert found is not None
    assert found.relations == (("node", "calls", "node"), ("node", "mails", "node"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"edge_type": torch.tensor([0, 0, 0, 1])},
            "edge_type has 4 entries for 5 edges",
        ),
        (
            {"edge_type": torch.tensor([0, 0, 0, 1, 9])},
            "edge_type holds 9, but there are only 2 edge_type_names",
        ),
        ({"node_type": torch.tensor([0, 1, 1, 0, 1, -1])}, "node_type holds -1"),
        ({"node_type": torch.rand(6)}, "node_type must hold integers"),
        (
            {"edge_type_names": [PAYS, ("card", "owns", "card")]},
            "edge 3 is of the relation card -owns-> card, but joins nodes of the kinds "
            "person and card",
        ),
        ({"edge_type_names": [PAYS, ("a", "b")]}, "triples"),
        ({"edge_type_names": [PAYS, ("acount", "owns", "card")]}, 'kind "acount"'),
        ({"edge_type_names": [PAYS, PAYS]}, "joins nodes of the kinds person and card"),
        ({"edge_type": None}, "2 edge_type_names, but no edge_type"),
        (
            {"y": torch.tensor([0, 0, 1, -1, 0, -1])},
            "nodes of 2 kinds have y: shop, ca",
        ),
        (
            {"y": torch.tensor([0, 0, 1, -1, 0, -1]), "target_node": "card"},
            "1 nodes of other kinds than card have a class",
        ),
        ({"target_node": "acount"}, '"acount" is no kind of nodes'),
        (
            {f"{n}_mask": torch.arange(6) == k for k, n in enumerate(("train", "val"))}
            | {"test_mask": torch.arange(6) == 2},
            "1 nodes of other kinds than card are in train_mask",
        ),
        (
            {f"{n}_mask": torch.zeros(7).bool() for n in ("train", "val", "test")},
            r"train_mask must be bool of shape \(6,\), got bool of shape \(7,\)",
        ),
        (
            {"node_type_names": [1, 2, 3]},
            "node_type_names must be a list of texts, got 1",
        ),
        ({"type_widths": {"card": 1}}, "other values than 0 in later ones"),
        ({"type_widths": {"car": 1}}, 'the kind "car"'),
        ({"type_widths": {"card": 3}}, "gives .* 3 columns, but x has 2"),
    ],
)
def test_a_numbered_data_that_does_not_fit_is_an_error(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        node_dataset(numbered(**changes), "g")


def test_a_hetero_data_that_does_not_fit_is_an_error() -> None:
    data = hetero(typed_bank(0))
    data["shop"].y = torch.zeros(8, dtype=torch.int64)
    with pytest.raises(
        DataError, match=r"nodes of 2 kinds have y: shop, card\. Set tar"
    ):
        node_dataset(data, "g")
    given = GivenNames(types=TypeNames(target="person"))
    with pytest.raises(DataError, match=r'"person", .* no y. Kinds with y: shop, card'):
        node_dataset(data, "g", given)
    target = GivenNames(types=TypeNames(target="shop"))
    for part in ("train", "val", "test"):
        data["shop"][f"{part}_mask"] = torch.zeros(3, dtype=torch.bool)
    with pytest.raises(DataError, match=r"bool of shape \(8,\), got .* \(3,\)"):
        node_dataset(data, "g", target)
    for part in ("train", "val", "test"):
        del data["shop"][f"{part}_mask"]
    shops = node_dataset(data, "g", target)
    assert (shops.y >= 0).sum() == 8
    with pytest.raises(DataError, match="must be a mapping from kinds"):
        node_dataset(data, "g", GivenNames(features=["a"]))
    data["card", "pays", "bank"].edge_index = torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(DataError, match=r'no nodes of the kind "bank"'):
        node_dataset(data, "g")
    data["bank"].name = "none"
    with pytest.raises(DataError, match="g: bank: expected features x, or num_nodes"):
        node_dataset(data, "g")
    data["bank"].num_nodes = 1
    data["card", "pays", "bank"].edge_index[1] = 1
    with pytest.raises(
        DataError, match="card pays bank: edge_index names nodes 0 to 1"
    ):
        node_dataset(data, "g", GivenNames(types=TypeNames(target="card")))


def test_padded_columns_are_named_and_can_be_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = numbered().x.clone()
    x[numbered().node_type == 0, 1] = 0
    found = node_dataset(numbered(x=x, type_widths={"shop": 1, "person": 1}), "g")
    assert found.schema is not None
    assert found.schema.widths == (("shop", 1), ("card", 2), ("person", 1))
    assert not caplog.records
    found = node_dataset(numbered(x=x), "g")
    assert found.num_features == 6
    assert "the last 1 columns of x are 0 for all nodes of the kind shop" in caplog.text


def test_attributes_of_a_typed_graph_that_nothing_reads_are_named_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    data = hetero(typed_bank(0))
    data["shop"].year = torch.arange(8)
    data[PAYS].edge_attr = torch.ones(data[PAYS].num_edges, 1)
    data.source = "bank"
    store_graphs([data, data], tmp_path)
    lines = [r.getMessage() for r in caplog.records if "not read" in r.getMessage()]
    assert len(lines) == 1
    assert ": (card, pays, shop).edge_attr, shop.year, source." in lines[0]
    caplog.clear()
    node_dataset(numbered(edge_attr=torch.ones(5, 1)), "g")
    assert "g: not read: edge_attr." in caplog.text


def test_kinds_without_features_nodes_and_edges_are_kept() -> None:
    data = hetero(typed_bank(0))
    data["device"].num_nodes = 0
    data[USED].edge_index = torch.empty(2, 0)
    found = node_dataset(data, "g")
    assert found.schema is not None
    assert ("device", 0) in found.schema.widths
    assert USED in found.schema.relations


def test_reverse_relations_of_pyg_become_relations_of_their_own() -> None:
    data = ToUndirected()(hetero(typed_bank(0)))
    found = node_dataset(data, "g")
    assert found.schema is not None
    assert ("shop", "rev_pays", "card") in found.schema.relations
    assert found.messages is not None
    assert torch.equal(found.edge_index, typed_bank(0).edge_index)


def test_simulate_reads_typed_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def test_nodes(dataset: Any, **settings: Any) -> int:
        run = simulate("fedavg", dataset, output_dir=str(tmp_path), **settings)
        return int((run.best or {})["test"]["num_nodes"])

    banks = [hetero(typed_bank(seed)) for seed in range(2)]
    assert test_nodes(banks, **TYPED) == 16
    assert test_nodes(banks, setting="inductive", **TYPED) == 16
    alone = {"clients": 2, "partition": "uniform", "split": "60/20/20"}
    assert test_nodes(banks[0], **alone, **TYPED) > 5
    plain = banks[0].to_homogeneous()
    plain.y = typed_bank(0).y
    with pytest.raises(DataError, match=r'Set model = "rgcn", or types = "ignore"'):
        test_nodes(plain, **alone, **RUN)
    assert test_nodes(plain, types="ignore", **alone, **RUN) > 5
    del plain._node_type_names, plain._edge_type_names
    assert test_nodes([plain, plain], types="ignore", **RUN) == 16
    banks[0]["shop"].y = torch.zeros(8, dtype=torch.int64)
    assert test_nodes(banks[0], target_node="card", **alone, **TYPED) > 5
    empty: dict[str, Any] = {"methods": {}, "backbones": {}, "datasets": {}}
    monkeypatch.setattr(extensions, "_registered", empty)
    register(dataset=banks[0], name="typed-bank", target_node="card")
    assert test_nodes("typed-bank", clients=2, partition="uniform", **TYPED) == 8


@pytest.mark.parametrize("setting", ["transductive", "edge"])
def test_only_what_is_predicted_decides_between_classes_and_numbers(
    tmp_path: Path, setting: str
) -> None:
    bank = hetero(typed_bank(0, has_device=True))
    if setting == "edge":
        del bank["card"].y
        bank[PAYS].edge_label = torch.arange(bank[PAYS].num_edges) % 2
        bank[OWNS].edge_label = torch.rand(bank[OWNS].num_edges)
        wanted = {"target_relation": "pays", "setting": setting}
    else:
        bank["shop"].y = torch.rand(8)
        wanted = {"target_node": "card"}
    alone = {"clients": 2, "partition": "uniform", "output_dir": str(tmp_path)}
    run = simulate("fedavg", bank, **wanted, **alone, **TYPED)
    assert "accuracy" in (run.best or {})["test"]
    if setting == "edge":
        bank[PAYS].edge_label = torch.rand(bank[PAYS].num_edges)
    else:
        bank["card"].y = torch.rand(40)
    run = simulate("fedavg", bank, **wanted, **alone, **TYPED)
    assert "rmse" in (run.best or {})["test"]


def test_a_target_that_the_graph_does_not_have_is_an_error(tmp_path: Path) -> None:
    path = to_npz(hetero(typed_bank(0)), tmp_path / "bank.npz")
    wanted: dict[str, Any] = {"target_node": "shop", "clients": 2}
    with pytest.raises(
        DataError, match=r'target-node = "shop", but .* labels of "card"'
    ):
        simulate("fedavg", str(path), **wanted, **TYPED)
    with pytest.raises(DataError, match="the graph has one kind of nodes"):
        simulate("fedavg", **wanted, **RUN)


def test_nodes_to_score_need_no_labels_and_keep_their_numbers() -> None:
    data = numbered()
    del data.y
    dataset, numbers = nodes_to_score(data, "g")
    assert numbers.tolist() == [0, 3, 1, 2, 4, 5]
    assert (dataset.y == -1).all()
    _, numbers = nodes_to_score(hetero(typed_bank(0)), "g")
    assert numbers.tolist() == [*range(8), *range(40), *range(10)]


def test_the_order_of_kinds_and_relations_does_not_matter() -> None:
    data, other = hetero(typed_bank(0)), HeteroData()
    for kind in reversed(data.node_types):
        other[kind].update(data[kind])
    for triple in reversed(data.edge_types):
        other[triple].edge_index = data[triple].edge_index.flip(1)
    one, two = (
        agreed_graph(client_of(node_dataset(graph, "g")), "same", None)
        for graph in (data, other)
    )
    assert one.schema == two.schema
    # the nodes keep their numbers, kind by kind; the columns are those of the kind
    kinds, others = one.graph.node_type, two.graph.node_type
    assert kinds is not None
    assert others is not None
    for number in range(3):
        assert torch.equal(one.graph.x[kinds == number], two.graph.x[others == number])
        assert torch.equal(one.graph.y[kinds == number], two.graph.y[others == number])


def test_codes_of_edges_that_pyg_adds_up_are_not_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # within one kind, ToUndirected gives the code 4040 to an edge of 2020 both ways
    data = HeteroData()
    data["paper"].x = torch.ones(2, 1)
    data["paper"].y = torch.tensor([0, 1])
    cites = data["paper", "cites", "paper"]
    cites.edge_index = torch.tensor([[0, 1], [1, 0]])
    cites.edge_attr = torch.tensor([2020, 2020])
    changed = ToUndirected()(data)
    assert changed["paper", "cites", "paper"].edge_attr.tolist() == [4040, 4040]
    found = node_dataset(changed, "g")
    assert found.messages is not None
    assert found.messages.x.shape == (2, 0)
    assert "not read: (paper, cites, paper).edge_attr" in caplog.text
