"""Readers of sets of typed graphs: tables, archives and graphs of PyG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.client_graph import GraphDataset
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.graph_files.graph_set import inspect_graph_set, load_graph_set
from flower_fgl.datasets.pyg_data import graph_dataset, store_set
from tests.support.typed_graphs import write_tables
from tests.support.typed_sets import BOND, HAS, molecules, set_tables


def assert_same_graphs(dataset: GraphDataset, graphs: list[HeteroData]) -> None:
    """Compare each graph of a set with the one that it was made of."""
    schema, messages = dataset.schema, dataset.messages
    assert schema is not None
    assert messages is not None
    assert messages.relation is not None
    assert dataset.node_type is not None
    blocks = dict(schema.blocks())
    for k, graph in enumerate(graphs):
        nodes = (dataset.batch == k).nonzero().flatten()
        first = {}
        for kind in graph.node_types:
            of_kind = dataset.node_type[nodes] == schema.node_types.index(kind)
            own = nodes[of_kind]
            first[kind] = int(own[0])
            assert len(own) == graph[kind].num_nodes
            if "x" in graph[kind]:
                torch.testing.assert_close(
                    dataset.x[own][:, blocks[kind]], graph[kind].x
                )
        is_own = dataset.batch[messages.index[0]] == k
        found = {
            (int(r), int(a), int(b))
            for r, (a, b) in zip(
                messages.relation[is_own], messages.index[:, is_own].T, strict=True
            )
        }
        expected = {
            (schema.relations.index(triple), first[triple[0]] + a, first[triple[2]] + b)
            for triple in graph.edge_types
            for a, b in graph[triple].edge_index.T.tolist()
        }
        assert found == expected


def test_tables_archives_and_graphs_of_pyg_are_read_alike(tmp_path: Path) -> None:
    graphs = molecules(12)
    folder = write_tables(tmp_path / "tables", set_tables(graphs))
    of_tables = load_graph_set(folder)
    of_archive = load_graph_set(store_set(graphs, tmp_path))
    for owned in (of_tables, of_archive):
        assert_same_graphs(owned.dataset, graphs)
        assert owned.dataset.y.tolist() == [k % 2 for k in range(12)]
        assert owned.dataset.schema is not None
        assert owned.dataset.schema.target == ""
    assert of_tables.ids == tuple(f"m{k}" for k in range(12))
    assert of_tables.dataset.class_names == ("safe", "toxic")
    assert of_tables.dataset.feature_names == ("atom.mass", "atom.charge")


def test_lines_of_a_graph_need_not_be_adjacent(tmp_path: Path) -> None:
    graphs = molecules(9)
    tables = set_tables(graphs)
    for name in ("nodes/atom.csv", "edges/bond.csv", "edges/has.csv"):
        header, *rows = tables[name].splitlines()
        # atoms of one graph keep their order
        rows.sort(key=lambda row: int(row.split(",")[1]), reverse="edges" in name)
        tables[name] = "\n".join([header, *rows, ""])
    assert_same_graphs(load_graph_set(write_tables(tmp_path, tables)).dataset, graphs)


def numbered(graphs: list[HeteroData]) -> list[Data]:
    """Return molecules with numbers of kinds and relations."""
    out = []
    for graph in graphs:
        x, kinds = graph["atom"].x, [0] * graph["atom"].num_nodes
        edges, relations = [graph[BOND].edge_index], [0] * graph[BOND].num_edges
        if HAS in graph.edge_types:
            ring = len(kinds)
            x, kinds = torch.cat([x, torch.zeros(1, 2)]), [*kinds, 1]
            edges.append(graph[HAS].edge_index + torch.tensor([[ring], [0]]))
            relations += [1, 1]
        data = Data(x=x, edge_index=torch.cat(edges, dim=1), y=graph.y)
        data.node_type, data.edge_type = torch.tensor(kinds), torch.tensor(relations)
        data.node_type_names, data.edge_type_names = ["atom", "ring"], [BOND, HAS]
        data.type_widths = {"ring": 0}
        out.append(data)
    return out


def test_graphs_with_numbers_of_kinds_are_read_as_those_with_names() -> None:
    graphs = molecules(10)
    assert_same_graphs(graph_dataset(numbered(graphs), "set"), graphs)
    assert_same_graphs(graph_dataset(graphs, "set"), graphs)


def test_relations_are_those_of_all_graphs(tmp_path: Path) -> None:
    graphs = molecules(4)
    dataset = graph_dataset(graphs, "set")
    assert dataset.schema is not None
    assert dataset.schema.relations == (BOND, HAS)
    assert dataset.schema.widths == (("atom", 2), ("ring", 0))


def changed(name: str, old: str, new: str) -> dict[str, str]:
    tables = set_tables(molecules(6))
    assert old in tables[name]
    return tables | {name: tables[name].replace(old, new, 1)}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (changed("nodes/ring.csv", "m1,0", "m9,0"), 'ring.csv, line 2: graph "m9" is not'),
        (
            changed("edges/has.csv", "m1,0,0", "m1,1,0"),
            'line 2: source "1" is not an id of a node of graph "m1" in ring.csv',
        ),
        (
            changed("edges/has.csv", "m1,0,0", "m1,0,77"),
            'target "77" is not an id of a node of graph "m1" in atom.csv',
        ),
        (
            changed("nodes/atom.csv", "m0,1,", "m0,0,"),
            'the id "0" of a node of graph "m0" is already taken',
        ),
        (
            changed("relations.csv", "has,ring", "has,rings"),
            'line 3: the kind "rings" has no table',
        ),
        (
            changed("nodes/ring.csv", "graph,id", "graph,id,label"),
            'column "label" is about graphs',
        ),
        (
            changed("nodes/ring.csv", "graph,id", "id,other"),
            "ring.csv: the columns must be graph, id",
        ),
        (
            changed("graphs.csv", "m5,toxic", "m5,toxic\nm6,safe"),
            'graph "m6" has no node',
        ),
        (
            {k: v for k, v in set_tables(molecules(6)).items() if k != "edges/has.csv"},
            "edges/has.csv is missing. Provide it with the columns graph, source, target.",
        ),
        (set_tables(molecules(6)) | {"edges/old.csv": "graph,source,target\n"},
         "edges/old.csv is not in relations.csv"),
        (set_tables(molecules(6)) | {"nodes.csv": "graph,id,x\n"}, "but also nodes.csv"),
    ],
)  # fmt: skip
def test_faults_of_tables_are_named(
    tables: dict[str, str], message: str, tmp_path: Path
) -> None:
    _, problems = inspect_graph_set(write_tables(tmp_path / "own", tables))
    assert len(problems) == 1
    assert message in problems[0]


def test_columns_of_edges_and_repeats_are_noted(tmp_path: Path) -> None:
    tables = changed("edges/has.csv", "source,target", "source,target,length")
    tables["edges/has.csv"] += "m1,0,0,3\n"
    notes = load_graph_set(write_tables(tmp_path, tables)).notes
    assert any("edges/has.csv: length will not be read" in note for note in notes)
    assert any("edges/has.csv: 1 lines repeat an edge" in note for note in notes)


def test_a_set_is_no_single_typed_graph(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "own", set_tables(molecules(6)))
    with pytest.raises(DataError, match="holds a set of 6 graphs: set setting"):
        load_graph_file(folder)


def stored(tmp_path: Path, **changes: Any) -> Path:
    """Write a set as an archive with other arrays; ``None`` removes one."""
    path = store_set(molecules(6), tmp_path)
    with np.load(path) as held:
        arrays = {k: a for k, a in (dict(held) | changes).items() if a is not None}
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relations": None}, "node_types is given, but relations is missing"),
        ({"target_type": np.array("atom")}, "target_type cannot be used in a set"),
        ({"node_type": np.array([0, 1])}, "node_type has 2 entries for"),
        ({"node_type_widths": np.array([3, 0])}, "add up to 3 columns, but x has 2"),
    ],
)
def test_faults_of_archives_are_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, problems = inspect_graph_set(stored(tmp_path, **changes))
    assert len(problems) == 1
    assert message in problems[0]


def test_edges_between_graphs_are_refused(tmp_path: Path) -> None:
    with np.load(store_set(molecules(6), tmp_path)) as held:
        edges, relation = held["edge_index"].copy(), held["edge_type"]
        atoms = (held["node_type"] == 0).nonzero()[0]
    edges[:, int((relation == 0).nonzero()[0][0])] = atoms[[0, -1]]
    _, problems = inspect_graph_set(stored(tmp_path, edge_index=edges))
    assert "an edge joins nodes of two graphs" in problems[0]


def test_faults_of_graphs_of_pyg_are_named() -> None:
    graphs = molecules(4)
    graphs[2]["atom"].x = torch.zeros(graphs[2]["atom"].num_nodes, 5)
    with pytest.raises(
        DataError, match='graph 2 of set: nodes of the kind "atom" have 5'
    ):
        graph_dataset(graphs, "set")
    graphs = molecules(4)
    del graphs[3]._global_store["y"]
    with pytest.raises(DataError, match="graphs 0 and 3 differ in their attributes"):
        graph_dataset(graphs, "set")
    with pytest.raises(DataError, match="Data, or of HeteroData"):
        graph_dataset([*molecules(2), *numbered(molecules(2))], "set")
    other = numbered(molecules(4))
    other[1].node_type_names = ["ring", "atom"]
    with pytest.raises(DataError, match="node_type_names of graphs 0 and 1 differ"):
        graph_dataset(other, "set")


def test_unread_attributes_are_named(caplog: pytest.LogCaptureFixture) -> None:
    graphs = molecules(4)
    graphs[1]["atom"].y = torch.zeros(graphs[1]["atom"].num_nodes)
    graphs[1][BOND].edge_attr = torch.zeros(graphs[1][BOND].num_edges, 1)
    graph_dataset(graphs, "set")
    assert "(atom, bond, atom).edge_attr, atom.y" in caplog.text


def test_a_union_of_pyg_has_the_same_sizes() -> None:
    graphs = [graph for graph in molecules(9) if HAS in graph.edge_types]
    union, found = Batch.from_data_list(graphs), graph_dataset(graphs, "set")
    assert found.x.shape[0] == union.num_nodes
    assert found.messages is not None
    assert found.messages.index.shape[1] == union.num_edges
