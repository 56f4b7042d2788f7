"""PyG graphs as datasets and graph files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import AddSelfLoops, RemoveSelfLoops

from flower_fgl import RunSet, register, simulate, to_npz
from flower_fgl.core.errors import DataError
from flower_fgl.core.targets import TargetKind
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.pyg_data import (
    GivenNames,
    graph_dataset,
    graphs_to_score,
    node_dataset,
    store_graph,
    store_graphs,
)
from flower_fgl.datasets.pyg_read import held_kind


def toy(**values: Any) -> Data:
    fields = {
        "x": torch.arange(12.0).reshape(4, 3),
        "edge_index": torch.tensor([[0, 1, 1, 2, 3], [1, 0, 2, 2, 2]]),
        "y": torch.tensor([0, 1, 1, -1]),
    }
    return Data(**{**fields, **values})


def test_a_graph_file_holds_the_undirected_simple_graph(tmp_path: Path) -> None:
    masks = {
        f"{name}_mask": torch.arange(4) == place
        for place, name in enumerate(("train", "val", "test"))
    }
    path = to_npz(
        toy(**masks, y=torch.tensor([[0], [1], [1], [-1]])),
        tmp_path / "a.npz",
        class_names=["flu", "cold", "well"],
        feature_names=["age", "weight", "height"],
    )
    found = load_graph_file(path).dataset
    assert torch.equal(found.x, toy().x)
    assert found.edge_index.tolist() == [[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]
    assert found.y.tolist() == [0, 1, 1, -1]
    assert found.class_names == ("flu", "cold", "well")
    assert found.feature_names == ("age", "weight", "height")
    assert {n: m.nonzero().flatten().tolist() for n, m in found.masks.items()} == {
        "train": [0],
        "val": [1],
        "test": [2],
    }


def test_a_graph_without_labels_predicts_links(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(0)
    graphs = [
        Data(
            x=torch.rand(30, 4, generator=generator),
            edge_index=torch.randint(0, 30, (2, 90), generator=generator),
        )
        for _ in range(2)
    ]
    short: dict[str, Any] = {"rounds": 1, "hidden_channels": 4}
    run = simulate(
        "fedavg", graphs, setting="link", run_dir=str(tmp_path / "links"), **short
    )
    assert (run.best or {})["test"]["auroc"] is not None
    assert "val AUROC test AUROC" in repr(RunSet([run]))
    with pytest.raises(
        DataError, match=r'empty name.* setting = "link" or "edge" only'
    ):
        simulate("fedavg", graphs, run_dir=str(tmp_path / "classes"), **short)
    assert "link prediction only" not in caplog.text
    to_npz(graphs[0], tmp_path / "graph.npz")
    assert "link prediction only" in caplog.text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": None}, "expected features x"),
        ({"x": torch.ones(4)}, r"got \(4,\)"),
        ({"x": torch.full((4, 3), torch.nan)}, "NaN or infinite"),
        ({"y": torch.ones(4, 2)}, 'target-kind = "labels" or "numbers"'),
        ({"y": torch.tensor([0, 0.5, 1, 1])}, "class numbers"),
        ({"y": torch.tensor([0, 1])}, "each of the 4 nodes, got 2"),
        ({"y": torch.full((4,), -1)}, "no node has a class"),
        ({"edge_index": torch.ones(2)}, "edge_index"),
        ({"edge_index": torch.tensor([[0], [9]])}, "names nodes 0 to 9"),
        (
            {"edge_index": torch.tensor([[0.5, 1.9], [1.0, 2.0]])},
            r"edge_index must hold integers, got torch\.float32",
        ),
        ({"edge_index": torch.ones(2, 3, dtype=torch.bool)}, r"got torch\.bool"),
        ({"edge_index": torch.ones(2, 3) * 1j}, r"edge_index must hold real numbers"),
        ({"x": torch.ones(4, 3) * 1j}, r"x must hold real numbers, got torch\.complex"),
        ({"y": torch.ones(4) * 1j}, r"y must hold real numbers"),
        ({"x": np.ones((4, 3))}, "x must be a torch.Tensor, got ndarray. Convert it"),
        ({"y": [0, 1, 1, 0]}, "y must be a torch.Tensor, got list"),
        ({"edge_index": np.ones((2, 3))}, "edge_index must be a torch.Tensor"),
        ({"edge_attr": [[1.0]] * 5}, "edge_attr must be a torch.Tensor"),
        ({"edge_attr": torch.tensor(1.0)}, r"each of the 5 edges .* got shape \(\)"),
        (
            {"edge_label": torch.arange(5) % 2, "edge_time": np.arange(5)},
            "edge_time must be a torch.Tensor",
        ),
        (
            {
                "edge_label": torch.zeros(5, dtype=torch.int64),
                "edge_attr": torch.ones(5, 1) * 1j,
            },
            "edge_attr must hold real numbers",
        ),
        (
            {"y": torch.tensor([1.0, 2, 1, 2])},
            r"got torch\.float32\. If these are classes, .* data\.y = data\.y\.long\(\)",
        ),
        (
            {"y": torch.tensor([1.0, torch.nan, 1, 2])},
            r"with NaN.*nan_to_num\(-1\)\.long",
        ),
        ({"edge_label": torch.ones(5)}, r"data\.edge_label = data\.edge_label\.long"),
        (
            {"y": torch.tensor([0, 1000, 2000, -1])},
            r"3 different numbers up to 2000 \(0, 1000, 2000, …\).* 2,001 classes, most of "
            r"them without nodes\. Number the classes 0 to 2",
        ),
        ({"y": torch.tensor([0, 1, 2, 10**12])}, "at most 10,000 classes are possible"),
        (
            {"edge_label": torch.tensor([0, 500, 0, 0, 0])},
            "501 classes, most of .* edges",
        ),
        ({"edge_type": torch.tensor([0, 1, 2, 0, 0])}, "edge_type has no names"),
        ({"train_mask": torch.ones(4, dtype=torch.bool)}, "no val_mask"),
        (
            {f"{n}_mask": [True] * 4 for n in ("train", "val", "test")},
            'in both masks "train" and "val"',
        ),
        (
            {
                f"{n}_mask": torch.zeros(4, 10, dtype=torch.bool)
                for n in ("train", "val", "test")
            },
            "holds 10 splits",
        ),
    ],
)
def test_a_graph_that_does_not_fit_is_an_error(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        to_npz(toy(**values), tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "dtype",
    [torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.float8_e4m3fn],
)
def test_features_have_any_type_of_real_numbers(dtype: torch.dtype) -> None:
    whole = torch.arange(12).view(4, 3)
    wide = torch.nn.functional.one_hot(whole[:, 0], 100)  # is stored sparse
    for x in (whole % 8, wide):
        found = node_dataset(toy(x=x.to(dtype)), "the graph").x.to_dense()
        assert torch.equal(found, x.float())
    edges = torch.ones(5, 2).to_sparse()
    messages = node_dataset(toy(edge_attr=edges), "the graph").messages
    assert messages is not None
    assert torch.equal(messages.x, torch.ones(5, 2))


@pytest.mark.parametrize("transform", [RemoveSelfLoops(), AddSelfLoops()])
def test_features_of_removed_or_added_edges_are_an_error(transform: Any) -> None:
    # PyG's transforms change the edges and leave edge_attr as it was
    data = transform(toy(edge_attr=torch.arange(5.0)[:, None]))
    data.edge_label = torch.arange(data.num_edges) % 2
    with pytest.raises(DataError, match="the graph: edge_attr must hold one entry"):
        node_dataset(data, "the graph")


def test_an_empty_edge_index_may_be_of_any_type(tmp_path: Path) -> None:
    path = to_npz(toy(edge_index=torch.empty(2, 0)), tmp_path / "a.npz")
    assert load_graph_file(path).dataset.edge_index.shape == (2, 0)


def test_other_objects_and_names_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="HeteroData, got dict"):
        to_npz({}, tmp_path / "a.npz")
    with pytest.raises(DataError, match="there is no kind of nodes"):
        to_npz(HeteroData(), tmp_path / "a.npz")
    with pytest.raises(DataError, match=r"ends in \.npz"):
        to_npz(toy(), tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"^a\.npz: .*only 1 class names"):
        to_npz(toy(), tmp_path / "a.npz", class_names=["one"])
    with pytest.raises(DataError, match="3 columns, but there are 1"):
        to_npz(toy(), tmp_path / "a.npz", feature_names=["age"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"feature_names": ["age", "age", "height"]}, "a name occurs twice"),
        ({"feature_names": ["age", "", "height"]}, "one line of 1 to 300 .* got ''"),
        ({"feature_names": [1, 2, 3]}, "feature_names must be a list of texts, got 1"),
        ({"feature_names": "abc"}, "feature_names must be a list of texts, got 'abc'"),
        ({"class_names": [1, 2, 3]}, "class_names must be a list of texts, got 1"),
        ({"class_names": ["a", "a"]}, "names a class twice"),
    ],
)
@pytest.mark.parametrize("y", [None, torch.tensor([0, 1, 1, -1])])
def test_names_that_the_reader_refuses_are_not_written(
    y: torch.Tensor | None, names: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        to_npz(toy(y=y), tmp_path / "a.npz", **names)
    assert not list(tmp_path.iterdir())


def test_unused_attributes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    node_dataset(toy(edge_weight=torch.ones(5)), "the graph")
    assert "the graph: not read: edge_weight. " in caplog.text
    assert "those of edges the columns of edge_attr" in caplog.text
    caplog.clear()
    several = toy(pos=torch.ones(4, 2), time=torch.ones(5), sizes=torch.ones(2))
    node_dataset(several, "the graph")
    assert "not read: pos, sizes, time. Features of nodes are the " in caplog.text
    assert "edge_attr" not in caplog.text


def test_attributes_that_are_read_or_say_nothing_are_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    labelled = toy(
        edge_label=torch.arange(5) % 2, edge_attr=torch.ones(5, 2), num_nodes=4,
        edge_time=torch.arange(5), edge_type=torch.ones(5), node_type=torch.zeros(4),
        n_id=torch.arange(4),
    )  # fmt: skip
    node_dataset(labelled, "the graph")
    graph_dataset([toy(y=torch.tensor([k])) for k in range(2)], "graphs")
    assert caplog.text == ""


def test_a_list_of_graphs_names_each_attribute_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    store_graphs(
        [toy(pos=torch.ones(4, 2)), toy(age=1, pos=torch.ones(4, 2))], tmp_path
    )
    assert [r.getMessage() for r in caplog.records] == [
        "the list of graphs: not read: age, pos. Features of nodes are the columns of x."
    ]


def test_the_numbers_of_classes_count_over_a_list_of_graphs(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    one = toy(y=torch.tensor([30, 30, -1, 31]))
    with pytest.raises(DataError, match="32 classes, most of them without nodes"):
        node_dataset(one, "the graph")
    node_dataset(one, "the graph", GivenNames([f"c{i}" for i in range(40)]))
    others = [toy(y=torch.arange(4) + 4 * k) for k in range(8)]
    store_graphs([one, *others], tmp_path)
    assert caplog.text == ""
    store_graphs(
        [toy(y=torch.tensor([1, 2, 2, -1])), toy(y=torch.full((4,), 3))], tmp_path
    )
    assert "y holds the classes 1 to 3. Classes are numbered from 0" in caplog.text


def test_labels_of_small_graphs_are_judged_over_the_list(tmp_path: Path) -> None:
    small = toy(
        x=torch.ones(12, 2), y=torch.arange(12), edge_label=torch.tensor([*range(5)])
    )
    with pytest.raises(DataError, match="the graph, y: 12 labelled nodes have 12 diff"):
        node_dataset(small, "the graph")
    folder = store_graphs([small] * 3, tmp_path)
    for path in folder.iterdir():  # also in their files
        dataset = load_graph_file(path).dataset
        assert (dataset.num_classes, dataset.y.tolist()) == (12, list(range(12)))
    with pytest.raises(DataError, match="graph 0 of the list, y: 12 labelled nodes"):
        store_graphs([small, toy(y=torch.tensor([0, -1, -1, -1]))], tmp_path)


def test_a_split_of_edges_without_classes_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    masks = {
        f"edge_{p}_mask": torch.ones(5, dtype=torch.bool) for p in ("train", "val")
    }
    node_dataset(toy(**masks), "the graph")
    assert "not read: edge_train_mask, edge_val_mask. " in caplog.text


def test_equal_graphs_are_stored_once_and_others_apart(tmp_path: Path) -> None:
    path = store_graph(toy(), tmp_path / "graphs")
    assert store_graph(toy(), tmp_path / "graphs") == path
    assert store_graph(toy(y=torch.tensor([1, 1, 0, 0])), tmp_path / "graphs") != path
    folder = store_graphs([toy(), toy()], tmp_path / "graphs")
    assert [p.name for p in sorted(folder.iterdir())] == [
        "client-0000.npz",
        "client-0001.npz",
    ]
    assert store_graphs([toy(), toy()], tmp_path / "graphs") == folder
    with pytest.raises(DataError, match="graph 1 of the list"):
        store_graphs([toy(), toy(x=None)], tmp_path / "graphs")
    with pytest.raises(DataError, match="is empty"):
        store_graphs([], tmp_path / "graphs")


def test_graphs_with_one_class_each_become_one_union() -> None:
    graphs = [toy(y=torch.tensor([0])), toy(y=torch.tensor([1]))]
    union = graph_dataset(graphs, "pairs")
    assert union.num_graphs == 2
    assert union.batch.tolist() == [0] * 4 + [1] * 4
    assert union.y.tolist() == [0, 1]
    assert union.edge_index.shape == (2, 12)
    # PyG makes a graph without nodes of a SMILES that it cannot read
    nothing = toy(x=torch.zeros(0, 3), edge_index=torch.zeros(2, 0).long())
    nothing.y = torch.tensor([1])
    for unreadable in ([graphs[0], nothing, graphs[1]], [*graphs, nothing]):
        with pytest.raises(
            DataError, match="1 graphs have no nodes, the first is graph"
        ):
            graph_dataset(unreadable, "pairs")
    with pytest.raises(DataError, match="one class for each of the 2 graphs, got 8"):
        graph_dataset([toy(), toy()], "pairs")


def test_graphs_of_a_set_do_not_make_up_for_each_other(tmp_path: Path) -> None:
    graphs = [toy(y=torch.tensor([k]), edge_attr=torch.ones(5, 1)) for k in range(2)]
    graphs[0].edge_attr, graphs[1].edge_attr = torch.ones(4, 1), torch.ones(6, 1)
    labels = [toy(y=torch.tensor([0])), toy()]  # one for each node
    with pytest.raises(DataError, match=r"but \(4,\) in graph 1\. .* one class\."):
        graph_dataset(labels, "pairs")
    with pytest.raises(
        DataError, match=r"graph 0 of pairs: edge_attr must .* the 5 edges, got"
    ):
        graph_dataset(graphs, "pairs")


def test_graphs_to_score_need_no_labels_and_are_checked() -> None:
    graphs = [toy(y=torch.tensor([0])), toy(y=None), toy(train_mask=torch.ones(4))]
    assert graphs_to_score(graphs, "list").y.tolist() == [-1, -1, -1]
    graphs[1].edge_index = torch.tensor([[0], [4]])  # the first node of the third graph
    with pytest.raises(
        DataError, match="graph 1 of list: edge_index names nodes 0 to 4"
    ):
        graphs_to_score(graphs, "list")
    graphs[1] = toy(x=torch.full((4, 3), torch.nan))
    with pytest.raises(DataError, match="12 feature values are NaN or infinite"):
        graphs_to_score(graphs, "list")
    sparse = [toy(x=torch.eye(4).to_sparse()), toy(x=torch.eye(4))]
    assert graphs_to_score(sparse, "list").x.sum() == 8


def test_a_graph_of_a_set_without_edges_may_have_an_empty_index_of_any_type() -> None:
    graphs = [toy(y=torch.tensor([k])) for k in range(2)]
    graphs[1].edge_index = torch.empty(2, 0)
    assert graph_dataset(graphs, "graphs").edge_index.shape == (2, 6)
    assert graphs[1].edge_index.is_floating_point()  # the caller's graph stays


def test_a_split_of_a_graph_in_a_set_is_named(caplog: pytest.LogCaptureFixture) -> None:
    masks = {f"{part}_mask": torch.tensor([True]) for part in ("train", "val", "test")}
    graphs = [toy(y=torch.tensor([k]), **masks) for k in range(2)]
    graph_dataset(graphs, "graphs")
    assert "not read: test_mask, train_mask, val_mask" in caplog.text


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_set_in_which_no_graph_is_labelled_is_an_error(kind: TargetKind) -> None:
    y = torch.tensor([-1 if kind == "classes" else float("nan")])
    with pytest.raises(DataError, match="pairs: no graph has a "):
        graph_dataset([toy(y=y)] * 2, "pairs", kind)


NUMBERS: dict[str, Any] = {"target_kind": "numbers", "rounds": 1, "hidden_channels": 4}


def ring(number: int, **attributes: Any) -> Data:
    """Return a ring of nodes whose features are drawn from the number."""
    generator = torch.Generator().manual_seed(number)
    size = 3 + number % 4
    index = torch.stack([torch.arange(size), (torch.arange(size) + 1) % size])
    x = torch.rand(size, 3, generator=generator)
    return Data(x=x, edge_index=index, **attributes)


def test_simulate_reads_numbers_of_nodes_and_of_edges(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x, pairs = (
        torch.rand(60, 4, generator=generator),
        torch.randint(0, 60, (2, 120), generator=generator),
    )
    y = torch.stack([x[:, 0], x[:, 1]], dim=1)
    data = Data(x=x, edge_index=pairs, y=y, target_names=["a", "b"])
    common = {**NUMBERS, "clients": 2}
    run = simulate("fedavg", data, run_dir=str(tmp_path / "nodes"), **common)
    assert run.summary["target"]["names"] == ["a", "b"]
    edges = Data(
        x=x,
        edge_index=pairs,
        edge_label=torch.rand(120, generator=generator).masked_fill(
            torch.arange(120) % 9 == 0, torch.nan
        ),
        edge_target_names=["rating"],
    )
    run = simulate(
        "fedavg", edges, setting="edge", run_dir=str(tmp_path / "edges"), **common
    )
    assert run.summary["target"]["names"] == ["rating"]
    with pytest.raises(DataError, match=r"a column target:NAME to edges\.csv"):
        simulate("fedavg", data, setting="edge", run_dir=str(tmp_path / "no"), **common)
    name = register(dataset=data, name="two-numbers", target_kind="numbers")
    run = simulate("fedavg", name, run_dir=str(tmp_path / "own"), **common)
    assert run.summary["target"]["kind"] == "numbers"


def test_most_graphs_of_a_list_decide_between_classes_and_numbers() -> None:
    classes, numbers = toy(), toy(y=torch.tensor([0.5, 1, 2, 3]))
    whole, none = toy(y=torch.tensor([4.0, 1, 2, 3])), toy(y=None)
    for graphs, setting, kind in (
        (numbers, "transductive", "numbers"),
        ([classes, classes, numbers], "transductive", "classes"),
        ([classes, numbers], "transductive", "classes"),
        ([numbers, whole, whole, none], "transductive", "numbers"),
        ([whole, whole], "transductive", "classes"),
        ([whole, whole, numbers], "graph", "numbers"),
    ):
        assert held_kind(graphs, setting=setting) == kind
    with pytest.raises(DataError, match="graph 1 of the list: y holds integers"):
        held_kind([numbers, classes, numbers], setting="transductive")
    with pytest.raises(DataError, match="graph 2 of the list: y must hold class numb"):
        simulate("fedavg", [classes, classes, numbers])
    graph = HeteroData({"atom": {"y": torch.rand(3)}, "y": torch.tensor([1])})
    assert held_kind([graph], setting="graph") == "classes"
    graph.y = torch.tensor([0.5])
    assert held_kind([graph], setting="graph") == "numbers"


def test_simulate_partitions_a_list_as_a_set_of_graphs(tmp_path: Path) -> None:
    graphs = [ring(k, y=torch.tensor([float(k), torch.nan])) for k in range(40)]
    graphs[7].y[:] = torch.nan  # a graph without a known value is left out
    run = simulate(
        "fedavg",
        graphs,
        clients=2,
        setting="graph",
        model="gin",
        run_dir=str(tmp_path / "run"),
        **{**NUMBERS, "target": "0"},
    )
    assert sum(row["num_nodes"] for row in run.clients if "num_nodes" in row) == 39
    assert run.predict(graphs[:3]).shape == (3, 2)


def test_a_graph_of_unknown_class_is_left_out_of_a_set(tmp_path: Path) -> None:
    graphs = [ring(k, y=torch.tensor([k % 2])) for k in range(40)]
    graphs[7].y[:] = -1
    values = {**NUMBERS, "target_kind": "auto", "setting": "graph", "model": "gin"}
    run = simulate("fedavg", graphs, clients=2, run_dir=str(tmp_path / "run"), **values)
    assert sum(row["num_nodes"] for row in run.clients if "num_nodes" in row) == 39
    assert run.summary["class_names"] == ["0", "1"]
    graphs[7].y[:] = -2
    with pytest.raises(DataError, match=r"y\[7\] = -2. .* -1 means unknown"):
        graph_dataset(graphs, "the list of graphs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"y": torch.zeros(2)},
            r"y has shape \(1,\) in graph 0, but \(2,\) in graph 1",
        ),
        ({"y": None}, r"graphs 0 and 1 differ in their attributes \(y\)"),
        ({"edge_attr": torch.ones(4, 1)}, r"in their attributes \(edge_attr\)"),
        (
            {"target_units": ["kg"]},
            r"target_units is \['g'\] in graph 0, but \['kg'\] in graph 1",
        ),
        (
            {"x": torch.ones(4, 7)},
            r"x has shape .* in graph 0, but has shape \(4, 7\) in graph 1",
        ),
        (
            {"edge_index": torch.tensor([[0, 4], [1, 2]])},
            "graph 1 of .*: edge_index names nodes 0 to 4, but x has the rows 0 to 3",
        ),
        (
            {"edge_index": torch.zeros(3, 2, dtype=torch.int64)},
            r"graph 1 of .*: expected edge_index of shape \(2, edges\), got \(3, 2\)",
        ),
        ({"y": [0.0]}, "graph 1 of .*: y must be a torch.Tensor, got list"),
    ],
)
def test_graphs_of_a_set_that_differ_are_named(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    graphs = [ring(k, y=torch.zeros(1), target_units=["g"]) for k in range(2)]
    for key, value in change.items():
        graphs[1][key] = value
    with pytest.raises(DataError, match=message):
        simulate(
            "fedavg", graphs, setting="graph", run_dir=str(tmp_path / "run"), **NUMBERS
        )
