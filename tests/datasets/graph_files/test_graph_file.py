from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flower_fgl.core.errors import DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph, NodeDataset
from flower_fgl.datasets.graph_files.graph_file import (
    KNOWN,
    load_graph_file,
    save_client_graph,
)
from flower_fgl.datasets.graph_files.validate import validate_node_dataset
from flower_fgl.datasets.transforms.canonical import (
    compact_features,
    csr_tensor,
    undirected_simple,
)

Arrays = dict[str, Any]
Change = Callable[[Arrays], object]


def arrays() -> Arrays:
    """Return a path of four nodes with one unknown label and one unused class of three."""
    return {
        "x": np.arange(8, dtype=np.float32).reshape(4, 2),
        "edge_index": np.array([[0, 1, 2], [1, 2, 3]]),
        "y": np.array([0, 2, -1, 0]),
        "class_names": np.array(["ant", "bee", "cow"]),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.npz"


def client(*, is_sparse: bool = False) -> ClientGraph:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((6, 7), generator=generator)
    edge_index = undirected_simple(torch.tensor([[0, 1, 3], [1, 2, 4]]), 6)
    masks = {
        name: torch.arange(6) % 3 == i
        for i, name in enumerate(("train", "val", "test"))
    }
    if is_sparse:
        x = csr_tensor(scipy.sparse.csr_matrix(x.numpy() * (x.numpy() > 1)))
    graph = Graph(x, edge_index, torch.tensor([0, 1, 2, -1, 1, 0]), masks)
    unseen = Graph(
        x, torch.empty((2, 0), dtype=torch.int64), graph.y, {"unseen": masks["test"]}
    )
    return ClientGraph(
        3,
        graph,
        Target.classes(("a", "b", "ö c")),
        torch.tensor([1, 5, 6, 9, 20, 21]),
        (graph, unseen),
    )


def assert_same_graph(one: Graph, other: Graph) -> None:
    assert one.x.layout == other.x.layout
    assert one.x.dtype == other.x.dtype
    assert torch.equal(one.x.to_dense(), other.x.to_dense())
    assert torch.equal(one.edge_index, other.edge_index)
    assert torch.equal(one.y, other.y)
    assert list(one.masks) == list(other.masks)
    for name in one.masks:
        assert torch.equal(one.masks[name], other.masks[name])


# .npz


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_documentation_lists_every_array(name):
    page = Path(__file__).parents[3] / "docs" / "graph-files.md"
    assert f"`{name}`" in page.read_text("utf-8")


def test_a_file_of_plain_arrays_is_read(path):
    np.savez(path, **arrays())
    owned = load_graph_file(path)
    assert owned.dataset.name == "mine"
    assert torch.equal(owned.dataset.x, torch.from_numpy(arrays()["x"]))
    both = [[0, 1], [1, 0], [1, 2], [2, 1], [2, 3], [3, 2]]
    assert owned.dataset.edge_index.T.tolist() == both
    assert owned.dataset.y.tolist() == [0, 2, -1, 0]
    assert owned.dataset.class_names == ("ant", "bee", "cow")
    assert owned.node_ids.tolist() == [0, 1, 2, 3]
    assert not owned.dataset.masks
    assert not owned.evaluation


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_client_graph_is_restored_exactly_from_its_file(is_sparse, path):
    before = client(is_sparse=is_sparse)
    save_client_graph(path, before)
    after = load_graph_file(path).client_graph(3)
    assert (after.partition_id, after.class_names) == (3, before.class_names)
    assert torch.equal(after.node_ids, before.node_ids)
    assert_same_graph(after.graph, before.graph)
    for one, other in zip(after.evaluation, before.evaluation, strict=True):
        assert_same_graph(one, other)


@given(
    x=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 6), st.integers(1, 5)),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    data=st.data(),
)
@settings(max_examples=50, deadline=None)
def test_any_finite_client_graph_is_restored_from_its_file(tmp_path_factory, x, data):
    nodes = len(x)
    node = st.integers(0, nodes - 1)
    edges = data.draw(st.lists(st.tuples(node, node), max_size=12))
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T
    y = torch.tensor(
        data.draw(st.lists(st.integers(-1, 1), min_size=nodes, max_size=nodes))
    )
    train = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=nodes, max_size=nodes))
    )
    masks = {"train": train, "val": ~train, "test": torch.zeros_like(train)}
    simple = undirected_simple(edge_index.contiguous(), nodes)
    graph = Graph(torch.from_numpy(x), simple, y, masks)
    path = tmp_path_factory.mktemp("any") / "client.npz"
    save_client_graph(
        path, ClientGraph(0, graph, Target.classes(("a", "b")), torch.arange(nodes))
    )
    assert_same_graph(load_graph_file(path).client_graph(0).graph, graph)


def test_edges_may_be_rows(path):
    values = arrays()
    values["edges"] = values.pop("edge_index").T
    np.savez(path, **values)
    assert load_graph_file(path).dataset.edge_index.shape == (2, 6)


def test_self_loops_duplicates_and_one_way_edges_are_fixed_and_logged(path, caplog):
    values = arrays()
    values["edge_index"] = np.array([[0, 1, 1, 2, 2, 3], [1, 0, 2, 2, 3, 3]])
    values["edge_index"] = np.hstack([values["edge_index"], [[0], [1]]])
    np.savez(path, **values)
    with caplog.at_level(logging.INFO):
        dataset = load_graph_file(path).dataset
    assert dataset.edge_index.shape == (2, 6)
    # (2, 2), (3, 3) are self-loops; (0, 1) is duplicate; (1, 2) and (2, 3) are one-way
    assert "3 edges; dropped 2 self-loops and 1 duplicate entries" in caplog.text
    assert "added the other direction of 2 edges" in caplog.text


def test_a_clean_file_logs_nothing(path, caplog):
    save_client_graph(path, client())
    with caplog.at_level(logging.INFO):
        load_graph_file(path)
    assert not caplog.records


def test_a_graph_may_have_no_edges(path):
    np.savez(path, **(arrays() | {"edge_index": np.empty((2, 0), dtype=np.int64)}))
    assert load_graph_file(path).dataset.edge_index.shape == (2, 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_features_of_other_precision_become_float32(dtype, path):
    np.savez(path, **(arrays() | {"x": arrays()["x"].astype(dtype)}))
    assert torch.equal(load_graph_file(path).dataset.x, torch.from_numpy(arrays()["x"]))


def set_to(key: str, value: object) -> Change:
    def change(values: Arrays) -> None:
        values[key] = value

    return change


def without(key: str) -> Change:
    return lambda values: values.pop(key)


def sparse(**changes: object) -> Change:
    def change(values: Arrays) -> None:
        matrix = scipy.sparse.csr_matrix(values.pop("x"))
        values |= {
            "x_indptr": matrix.indptr,
            "x_indices": matrix.indices,
            "x_data": matrix.data,
            "x_shape": np.array(matrix.shape),
        }
        for key, value in changes.items():
            values[key] = value

    return change


NAN = np.array([[0, 1], [2, np.nan], [4, 5], [6, 7]], dtype=np.float32)
HUGE = np.full((4, 2), 1e300)
BAD_FILES = {
    "features of integers": (set_to("x", np.zeros((4, 2), int)), "must be floats"),
    "NaN feature": (
        set_to("x", NAN),
        r"mine\.npz: 1 feature values are NaN or infinite, the first at node 1, column 1",
    ),
    "feature beyond float32": (set_to("x", HUGE), "8 feature values are NaN or inf"),
    "flat features": (set_to("x", np.zeros(4)), r"x must be \(nodes, features\)"),
    "no features": (set_to("x", np.zeros((4, 0))), r"x must be \(nodes, features\)"),
    "no nodes": (set_to("x", np.zeros((0, 2))), "neither of them 0"),
    "x missing": (without("x"), "got neither"),
    "x twice": (
        lambda values: (x := values["x"], sparse()(values), set_to("x", x)(values)),
        "got both",
    ),
    "CSR incomplete": (
        lambda values: (sparse()(values), values.pop("x_shape")),
        "lack x_shape",
    ),
    "CSR of integers": (sparse(x_data=np.arange(7)), "must be floats"),
    "CSR column out of range": (
        sparse(x_indices=np.arange(7)),
        "not a valid CSR matrix",
    ),
    "CSR rows too few": (sparse(x_shape=np.array([9, 2])), "not a valid CSR matrix"),
    "CSR entry twice": (
        sparse(
            x_indptr=np.array([0, 2, 2, 2, 2]),
            x_indices=np.array([1, 1]),
            x_data=np.ones(2),
        ),
        "an entry is duplicate",
    ),
    "CSR infinite": (
        sparse(x_data=np.array([1, 2, 3, np.inf, 5, 6, 7])),
        "first at node 2, column 0",
    ),
    "labels of floats": (set_to("y", np.zeros(4)), "y must hold integers"),
    "labels out of range": (
        set_to("y", np.array([0, 3, 0, 5])),
        r"2 labels are outside \[-1, 3\), the first is y\[1\] = 3.*Number them 0 to 2, or",
    ),
    "labels below -1": (set_to("y", np.array([0, -2, 0, 0])), r"y\[1\] = -2"),
    "too few labels": (set_to("y", np.zeros(3, int)), r"one label per row.*\(4,\)"),
    "labels missing": (without("y"), "array y is missing"),
    "edges of floats": (set_to("edge_index", np.zeros((2, 1))), "must hold integers"),
    "dangling edge": (
        set_to("edge_index", np.array([[0], [4]])),
        "edges name nodes 0 to 4, but x has the rows 0 to 3",
    ),
    "negative edge": (set_to("edge_index", np.array([[-1], [0]])), "nodes -1 to 0"),
    "edges as rows": (
        set_to("edge_index", np.zeros((3, 2), int)),
        r"must be \(2, M\).*Rename it to edges",
    ),
    "edges as columns": (
        lambda values: values.update(edges=values.pop("edge_index")),
        r"edges must be \(M, 2\)",
    ),
    "no edges named": (without("edge_index"), "got neither"),
    "edges named twice": (set_to("edges", np.zeros((1, 2), int)), "got both"),
    "class names missing": (without("class_names"), "class_names is missing"),
    "class names of numbers": (set_to("class_names", np.arange(3)), "list of text"),
    "class named twice": (
        set_to("class_names", np.array(["a", "b", "a"])),
        "names a class twice",
    ),
    "mask of integers": (
        set_to("train_mask", np.array([0, 1, 0, 1])),
        r"train_mask must be bool of shape \(4,\), got int64 of .* Its values are 0 and 1: "
        r"convert it, train_mask = train_mask != 0",
    ),
    "mask of floats": (
        set_to("train_mask", np.ones(4)),
        r"train_mask = train_mask != 0",
    ),
    "mask of old PyG": (
        set_to("val_mask", np.ones(4, "u1")),
        r"val_mask = val_mask != 0",
    ),
    "mask of big-endian integers": (
        set_to("val_mask", np.ones(4, ">i4")),
        "values are 0",
    ),
    "index in place of a mask": (
        set_to("test_mask", np.array([3, 0])),
        r"got int64 of shape \(2,\)\. It seems to list the numbers of nodes\. Convert it: "
        r"mask = numpy\.zeros\(4, dtype=bool\); mask\[test_mask\] = True",
    ),
    "mask of shares": (
        set_to("test_mask", np.full(4, 0.5)),
        "Save True or False for each",
    ),
    "mask of text": (
        set_to("test_mask", np.array(["True"] * 4)),
        'test_mask must be bool, got <U4.*test_mask == "True"',
    ),
    "mask too short": (
        set_to("val_mask", np.ones(3, bool)),
        r"val_mask must be bool of shape \(4,\), got bool of shape \(3,\)",
    ),
    "types of edges": (
        set_to("edge_type", np.zeros(4, int)),
        r"edge_type is given, but node_types, .*node_type is missing. A typed graph has",
    ),
    "weights of edges": (
        set_to("edge_weight", np.ones(4)),
        "weights of edges are not read",
    ),
    "types of nodes": (
        set_to("node_type", np.zeros(4, int)),
        r"node_type is given, but .*edge_type is missing. A typed graph has",
    ),
    "ids too few": (set_to("node_ids", np.arange(3)), r"node_ids must have shape"),
    "ids twice": (
        set_to("node_ids", np.array([1, 4, 4, 7])),
        "node id 4 occurs 2 times",
    ),
    "ids unsorted": (set_to("node_ids", np.array([4, 1, 2, 3])), "must ascend"),
    "unknown array": (
        set_to("weights", np.ones(3)),
        'unknown array "weights". .*Known',
    ),
    "evaluation unnumbered": (
        lambda values: values.update(
            {f"evaluation_1_{k}": v for k, v in arrays().items()}
        ),
        'unknown array "evaluation_1_class_names"',
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_gives_one_error_that_names_file_and_fault(case, path):
    change, message = BAD_FILES[case]
    values = arrays()
    change(values)
    np.savez(path, **values)
    with pytest.raises(DataError, match=message) as info:
        load_graph_file(path)
    assert str(path) in str(info.value)


def test_evaluation_graphs_are_numbered_from_zero(path):
    values = arrays()
    values |= {f"evaluation_1_{k}": values[k] for k in ("x", "edge_index", "y")}
    np.savez(path, **values)
    with pytest.raises(DataError, match=r"numbered 0, 1, …, got \[1\]"):
        load_graph_file(path)


def test_evaluation_graphs_have_the_features_of_the_graph(path):
    values = arrays()
    values |= {f"evaluation_0_{k}": values[k] for k in ("edge_index", "y")}
    np.savez(path, **values, evaluation_0_x=np.zeros((4, 3)))
    with pytest.raises(DataError, match="expected 2 features as in the graph itself"):
        load_graph_file(path)


OTHER_FORMATS = {
    "g.graphml": (b"<?xml version='1.0'?>", "a GraphML file.*networkx.read_graphml"),
    "g.GEXF": (b"<gexf/>", "a GEXF file.*networkx.read_gexf"),
    "g.npz": (b"<graphml/>", "an XML file, such as GraphML.*nodes.csv and edges.csv"),
    "g.json": (b'{"nodes": []}', "a JSON file"),
    "graph": (b"PAR1....", "a Parquet file"),
    "g.mat": (b"MATLAB 5.0", "a MATLAB file"),
    "g.pkl": (
        b"\x80\x05.",
        "a pickle.*with flower_fgl.to_npz. Pickled objects are rej",
    ),
    "h.npz": (b"\x80\x05.", "a pickle.*Pickled objects are rejected"),
    "k.npz": (b"hello", "not an .npz file.*Pickled objects are rejected"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_a_file_of_another_format_is_named_with_a_way_to_convert_it(name, tmp_path):
    content, message = OTHER_FORMATS[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as info:
        load_graph_file(tmp_path / name)
    assert "A graph is an .npz file" in str(info.value)
    is_pickle = content.startswith((b"\x80", b"hello"))
    assert ("Pickled" in str(info.value)) == is_pickle


def test_a_spreadsheet_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "g.xlsx", "w") as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
    with pytest.raises(DataError, match="an Excel file"):
        load_graph_file(tmp_path / "g.xlsx")


@pytest.mark.parametrize("name", ["g.pt", "g.npz"])
def test_a_file_of_torch_is_named(name, tmp_path):
    torch.save({"x": torch.ones(2)}, tmp_path / name)
    with pytest.raises(DataError, match=r"flower_fgl\.to_npz\. Pickled objects"):
        load_graph_file(tmp_path / name)


class Trap:
    """A pickle that records whether it was loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("opened",)


def test_pickled_objects_are_rejected_without_loading(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = np.array([Trap(), "b", "c"], dtype=object)
    np.savez(path, **(arrays() | {"class_names": names}))
    with pytest.raises(
        DataError, match=r'array "class_names" is pickled.*Pickled objects are'
    ):
        load_graph_file(path)
    assert not (tmp_path / "opened").exists()


def test_a_pickle_instead_of_an_npz_file_is_rejected_without_loading(
    path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    np.array([Trap()], dtype=object).dump(path)
    with pytest.raises(DataError, match="Pickled objects are rejected"):
        load_graph_file(path)
    assert not (tmp_path / "opened").exists()


def test_a_text_file_is_no_npz_file(path):
    path.write_text("id,label\n1,2\n")
    with pytest.raises(DataError, match=r"mine\.npz is not an \.npz file"):
        load_graph_file(path)


def test_an_empty_file_is_rejected(path):
    path.write_bytes(b"")
    with pytest.raises(
        DataError, match=r"mine\.npz is empty, truncated or not an \.npz"
    ):
        load_graph_file(path)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9, 0.99])
def test_a_truncated_file_is_rejected(share, path):
    wide = np.random.default_rng(0).random((4, 5000))
    np.savez_compressed(path, **(arrays() | {"x": wide}))
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"empty, truncated or not an \.npz"):
        load_graph_file(path)


def test_a_flipped_bit_is_noticed(path):
    np.savez(path, **arrays())
    content = bytearray(path.read_bytes())
    place = content.find(arrays()["x"].tobytes())
    content[place + 5] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="truncated or not"):
        load_graph_file(path)


def test_a_single_array_is_no_graph(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="holds a single array"):
        load_graph_file(path)


def test_a_missing_file_is_an_error_with_its_path(path):
    with pytest.raises(DataError, match=r"No graph file at .*mine\.npz"):
        load_graph_file(path)


def test_a_file_without_a_split_needs_masks(path):
    np.savez(path, **arrays())
    owned = load_graph_file(path)
    with pytest.raises(DataError, match=r"no split.*train_mask"):
        owned.client_graph(0)
    masks = dict.fromkeys(("train", "val", "test"), torch.ones(4, dtype=torch.bool))
    assert owned.client_graph(2, masks).class_counts().tolist() == [2, 0, 1]


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    save_client_graph(path, client())
    before = path.read_bytes()

    def full(file: Any, **_: object) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        save_client_graph(path, client(is_sparse=True))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_mask_that_graph_files_do_not_support_is_rejected(path):
    graph = client().graph
    masks = {**graph.masks, "holdout": graph.masks["test"]}
    odd = ClientGraph(
        0,
        Graph(graph.x, graph.edge_index, graph.y, masks),
        Target.classes("abc"),
        torch.arange(6),
    )
    with pytest.raises(DataError, match="masks holdout cannot be stored"):
        save_client_graph(path, odd)
    assert not path.exists()


# CSV

NODES = """id,label,split,age,height
p1,bee,train,1,0.5
p2,ant,val,2,1e-3
p 3,,,3,-2
p4,bee,test,4,7
"""
EDGES = "source,target\np1,p2\np2,p 3\np2,p1\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "edges.csv").write_text(EDGES)
    return tmp_path


def test_a_folder_of_tables_is_read(folder):
    owned = load_graph_file(folder)
    dataset = owned.dataset
    assert (
        dataset.x.tolist()
        == torch.tensor([[1, 0.5], [2, 1e-3], [3, -2], [4, 7]]).tolist()
    )
    assert dataset.class_names == ("ant", "bee")
    assert dataset.y.tolist() == [1, 0, -1, 1]
    assert dataset.edge_index.T.tolist() == [[0, 1], [1, 0], [1, 2], [2, 1]]
    assert dataset.masks["train"].tolist() == [True, False, False, False]
    assert dataset.masks["val"].tolist() == [False, True, False, False]
    assert dataset.masks["test"].tolist() == [False, False, False, True]
    assert owned.node_ids.tolist() == [0, 1, 2, 3]


def test_ids_and_labels_stay_text(folder):
    nodes = "id,label,f\n01,10,1\n1,9,2\n1.0,10,3\nNA,9,4\n"
    (folder / "nodes.csv").write_text(nodes)
    (folder / "edges.csv").write_text("source,target\n01,1\n1.0,NA\n")
    dataset = load_graph_file(folder).dataset
    assert dataset.edge_index.T.tolist() == [[0, 1], [1, 0], [2, 3], [3, 2]]
    assert dataset.class_names == ("9", "10")  # numeric names sort as numbers
    assert not dataset.masks


def test_a_table_from_a_spreadsheet_is_read(folder):
    text = NODES.replace("\n", "\r\n").replace("bee", '"bee, honey"')
    (folder / "nodes.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load_graph_file(folder).dataset.class_names == ("ant", "bee, honey")


def test_blank_lines_and_spaces_around_text_of_a_table_are_ignored(folder):
    whole = load_graph_file(folder)
    lines = (
        NODES.replace("bee,train", " bee , train").replace("p2", "p2 ").split("\n", 2)
    )
    (folder / "nodes.csv").write_text("\n\n".join(lines) + " \n,,,,\n\n")
    (folder / "edges.csv").write_text("source,target\n\np1, p2\n p2 ,p 3\n,\n\n")
    (folder / "classes.csv").write_text("name\nant \nbee\n\n")
    blank = load_graph_file(folder)
    assert blank.names == whole.names
    assert blank.dataset.class_names == ("ant", "bee")
    assert torch.equal(blank.dataset.x, whole.dataset.x)
    assert torch.equal(blank.dataset.y, whole.dataset.y)
    assert torch.equal(blank.dataset.edge_index, whole.dataset.edge_index)
    assert torch.equal(blank.dataset.masks["train"], whole.dataset.masks["train"])


def test_whole_numbers_of_any_size_are_numbers(folder):
    (folder / "nodes.csv").write_text(NODES.replace("3,-2", f"3,{10**30}"))
    assert (
        load_graph_file(folder).dataset.x[2].tolist()
        == torch.tensor([3, 1e30]).tolist()
    )


def test_an_empty_split_column_is_no_split(folder):
    empty = NODES.replace("train", "").replace("val", " ").replace("test", "")
    (folder / "nodes.csv").write_text(empty)
    assert not load_graph_file(folder).dataset.masks


def test_the_federation_may_have_more_classes_than_the_owner(folder):
    (folder / "classes.csv").write_text("name\nbee\ncow\nant\n")
    dataset = load_graph_file(folder).dataset
    assert dataset.class_names == ("bee", "cow", "ant")
    assert dataset.y.tolist() == [0, 2, -1, 0]


def test_a_folder_may_hold_no_edges(folder):
    (folder / "edges.csv").write_text("source,target\n")
    assert load_graph_file(folder).dataset.edge_index.shape == (2, 0)


BAD_TABLES = {
    "text in a feature": (
        "nodes.csv",
        NODES.replace("3,-2", "three,-2"),
        r'nodes\.csv, line 4, column "age": expected a number, got "three"',
    ),
    "empty feature": (
        "nodes.csv",
        NODES.replace("3,-2", "3,"),
        r'line 4, column "height": expected a number, got ""',
    ),
    "text in a feature below a blank line": (
        "nodes.csv",
        NODES.replace("\n", "\n\n").replace("3,-2", "three,-2"),
        r'nodes\.csv, line 7, column "age": expected a number, got "three"',
    ),
    "id twice below a blank line": (
        "nodes.csv",
        NODES.replace("\np4", "\n\np1"),
        r'nodes\.csv, line 6: id "p1" is already taken',
    ),
    "dangling edge below a blank line": (
        "edges.csv",
        EDGES + "\np1,p9\n",
        r'edges\.csv, line 6: target "p9" is not an id in nodes\.csv',
    ),
    "NaN feature": (
        "nodes.csv",
        NODES.replace("3,-2", "3,nan"),
        r'line 4, column "height": expected a',
    ),
    "infinite feature": (
        "nodes.csv",
        NODES.replace("3,-2", "3,inf"),
        r'line 4, column "height": expected a finite number, got inf',
    ),
    "no feature": ("nodes.csv", "id,label\na,b\n", "no feature column"),
    "id twice": (
        "nodes.csv",
        NODES.replace("p4", "p1"),
        r'nodes\.csv, line 5: id "p1" is already taken',
    ),
    "empty id": ("nodes.csv", NODES.replace("p4", ""), "line 5: the id is empty"),
    "id column missing": ("nodes.csv", NODES.replace("id,", "key,"), "id, label and"),
    "column twice": (
        "nodes.csv",
        NODES.replace("height", "age"),
        "each once; got id, label, split, age, age",
    ),
    "no header": ("nodes.csv", "", "got none"),
    "no nodes": ("nodes.csv", "id,label,f\n", "holds no nodes"),
    "row too long": ("nodes.csv", NODES + "p5,bee,train,1,2,3\n", "not a CSV table"),
    "every row too long": ("nodes.csv", "id,label,f\na,b,1,2\n", "not a CSV table"),
    "row too short": (
        "nodes.csv",
        NODES + "p5\n",
        r'line 6, column "age": expected a number, got ""',
    ),
    "not UTF-8": ("nodes.csv", NODES.replace("bee", "b\xe9e"), "in UTF-8"),
    "unknown split": (
        "nodes.csv",
        NODES.replace("test", "eval"),
        r'line 5: split must be train, val, test or empty, got "eval"',
    ),
    "no label at all": ("nodes.csv", "id,label,f\np1,,1\n", "no node has a label"),
    "dangling edge": (
        "edges.csv",
        EDGES + "p1,p9\n",
        r'edges\.csv, line 5: target "p9" is not an id in nodes\.csv',
    ),
    "date in a feature": (
        "nodes.csv",
        NODES.replace("3,-2", "2020-01-17,-2"),
        r'got "2020-01-17". Write dates as numbers.*flower-fgl prepare, kind "date"',
    ),
    "date with points in a feature": (
        "nodes.csv",
        NODES.replace("3,-2", "17.1.2020,-2"),
        r'got "17.1.2020". Write dates as numbers',
    ),
    "word in a feature": (
        "nodes.csv",
        NODES.replace("3,-2", "three,-2"),
        'one column of 0 and 1 for each.*flower-fgl prepare, kind "category"',
    ),
    "decimal comma": (
        "nodes.csv",
        NODES.replace("3,-2", '"3,5",-2'),
        'got "3,5". Write decimals with a point',
    ),
    "thousands": (
        "nodes.csv",
        NODES.replace("3,-2", '"3,000,000",-2'),
        "Write decimals with a point, and thousands without a separator",
    ),
    "percent": (
        "nodes.csv",
        NODES.replace("3,-2", "3 %,-2"),
        'got "3 %". Write the number alone',
    ),
    "empty cell with a remedy": (
        "nodes.csv",
        NODES.replace("3,-2", "3,"),
        'Fill empty cells in one way at all owners.*flower-fgl prepare, missing = "median"',
    ),
    "NaN with a remedy": (
        "nodes.csv",
        NODES.replace("3,-2", "3,nan"),
        "got nan. Fill empty cells in one way",
    ),
    "account of another owner": (
        "edges.csv",
        EDGES + "p1,p9\n",
        'outside.csv, which fedgcn reads.*flower-fgl prepare, foreign = "flag"',
    ),
    "no column label": (
        "nodes.csv",
        NODES.replace("label", "kind"),
        'with setting = "link" or "edge" the column may be missing',
    ),
    "edge from nowhere": (
        "edges.csv",
        EDGES + ",p1\n",
        'line 5: source "" is not an id',
    ),
    "edge times": (
        "edges.csv",
        "source,target,time\np1,p2,3\n",
        "Remove time, or rename .* with a column label, the",
    ),
    "edge types and features": (
        "edges.csv",
        "source,target,type,amount\np1,p2,a,3\n",
        'column "type": expected a number, got "a"',
    ),
    "ends under other names": (
        "edges.csv",
        "from,to\np1,p2\n",
        "the columns must be source, target and features, each once; got from, to",
    ),
    "classes with a description": (
        "classes.csv",
        "name,text\nant,small\nbee,small\ncow,large\n",
        r"classes\.csv: expected the columns name and no others\. Remove text, which "
        r"would not be read\.$",
    ),
    "class not listed": (
        "classes.csv",
        "name\nant\ncow\n",
        r'nodes\.csv, line 2: class "bee" is not in classes\.csv',
    ),
    "class listed twice": ("classes.csv", "name\nant\nbee\nant\n", "each class once"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_a_bad_table_gives_one_error_that_names_the_place(case, folder):
    name, text, message = BAD_TABLES[case]
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=message) as info:
        load_graph_file(folder)
    assert str(folder) in str(info.value)


@pytest.mark.parametrize("name", ["nodes.csv", "edges.csv"])
def test_a_missing_table_is_named(name, folder):
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        load_graph_file(folder)


# canonical form


@given(
    data=st.data(),
    nodes=st.integers(1, 12),
)
@settings(max_examples=100, deadline=None)
def test_undirected_simple_agrees_with_sets(data, nodes):
    node = st.integers(0, nodes - 1)
    edges = data.draw(st.lists(st.tuples(node, node), max_size=30))
    given_edges = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    expected = {(u, v) for u, v in edges if u != v}
    expected |= {(v, u) for u, v in expected}
    out = undirected_simple(given_edges, nodes)
    assert out.T.tolist() == [list(pair) for pair in sorted(expected)]


def test_sparse_features_are_those_below_a_share_of_15_percent_and_wide():
    wide = torch.zeros((10, 64))
    wide.view(-1)[:95] = 1  # 95 of 640 entries: below 15 %
    assert compact_features(wide).layout == torch.sparse_csr
    assert torch.equal(compact_features(wide).to_dense(), wide)
    wide.view(-1)[95] = 1  # 96 of 640
    assert compact_features(wide).layout == torch.strided
    assert compact_features(torch.zeros((10, 63))).layout == torch.strided
    as_csr = csr_tensor(scipy.sparse.csr_matrix(wide.numpy()))
    assert compact_features(as_csr).layout == torch.strided
    assert compact_features(wide.to(torch.float64)).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros((6, 6), dtype=torch.float64)}, "features must be float32"),
        ({"y": torch.full((6,), 2)}, r"labels are outside \[-1, 2\)"),
        ({"y": torch.zeros(6)}, "labels must be int64 with one dimension"),
        ({"edge_index": torch.tensor([[0], [6]])}, "edges name nodes 0 to 6"),
        ({"edge_index": torch.tensor([[0, 1], [1, 0], [0, 0]])}, r"shape \(2, 2E\)"),
        ({"edge_index": torch.tensor([[0], [1]])}, "both directions"),
        ({"edge_index": torch.tensor([[1, 0], [0, 1]])}, "sorted"),
        ({"edge_index": torch.tensor([[0], [0]])}, "without self-loops"),
        (
            {"edge_index": torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]])},
            "self-loops or duplicates",
        ),
        ({"masks": {"train": torch.zeros(5, dtype=torch.bool)}}, "train_mask must"),
        ({"network": torch.zeros(5, dtype=torch.int64)}, "one number per node"),
    ],
)
def test_an_invalid_dataset_is_rejected(change, message, toy):
    validate_node_dataset(toy)
    fields = {"name": "toy", "target": toy.target}
    fields |= {"x": toy.x, "edge_index": toy.edge_index, "y": toy.y}
    with pytest.raises(DataError, match=message):
        validate_node_dataset(NodeDataset(**(fields | change)))


@pytest.mark.parametrize(("mark", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_table_with_other_separators_is_named(folder, mark, name):
    (folder / "nodes.csv").write_text(NODES.replace(",", mark))
    message = f"are separated by {name}. Separate the columns with commas"
    with pytest.raises(DataError, match=message):
        load_graph_file(folder)
