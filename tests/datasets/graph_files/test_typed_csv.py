"""Typed graphs as folders of CSV tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from flower_fgl.client_apps.runtime.data import file_stamps
from flower_fgl.core.errors import DataError
from flower_fgl.core.schema import Schema
from flower_fgl.datasets.graph_files.graph_file import (
    inspect_graph_file,
    load_graph_file,
)
from flower_fgl.datasets.graph_files.graph_set import load_graph_set
from flower_fgl.datasets.owned import client_from_file
from flower_fgl.datasets.owners import build_owners, list_owners, owner_contents
from flower_fgl.methods import parse_config
from tests.support.typed_graphs import (
    OWNS,
    PAYS,
    typed_bank,
    typed_tables,
    write_tables,
)

SMALL = {
    "relations.csv": "relation,source,target\npays,card,shop\nowns,person,card\n",
    "nodes/card.csv": "id,limit,label,split\nc1,1,good,train\nc2,2,bad,val\nc3,3,,test\n",
    "nodes/shop.csv": "id,size,far\ns1,5,0\ns2,6,1\n",
    "nodes/person.csv": "id\np1\nc1\n",
    "edges/pays.csv": "source,target\nc1,s1\nc1,s1\nc3,s2\n",
    "edges/owns.csv": "source,target\nc1,c1\n",
}


def written(folder: Path, changes: Mapping[str, str | None]) -> Path:
    """Write the small graph with other tables; ``None`` leaves one out."""
    tables = {**SMALL, **changes}
    return write_tables(folder, {k: v for k, v in tables.items() if v is not None})


def test_tables_become_one_graph(tmp_path: Path) -> None:
    owned = load_graph_file(written(tmp_path / "bank", {}))
    dataset = owned.dataset
    assert dataset.schema == Schema(
        "card", (("card", 1), ("person", 0), ("shop", 2)), (PAYS, OWNS)
    )
    assert owned.names == ("c1", "c2", "c3", "p1", "c1", "s1", "s2")
    assert dataset.feature_names == ("card.limit", "shop.size", "shop.far")
    assert dataset.class_names == ("bad", "good")
    assert dataset.y.tolist() == [1, 0, -1, -1, -1, -1, -1]
    assert dataset.masks["test"].nonzero().flatten().tolist() == [2]
    assert dataset.node_type is not None
    assert dataset.node_type.tolist() == [0, 0, 0, 1, 1, 2, 2]
    messages = dataset.messages
    assert messages is not None
    assert messages.relation is not None
    # c1 of person owns c1 of card: the ids of a kind are its own
    assert messages.index.tolist() == [[0, 2, 4], [5, 6, 0]]
    assert messages.relation.tolist() == [0, 0, 1]
    assert dataset.x.tolist() == [
        *([1, 0, 0], [2, 0, 0], [3, 0, 0], [0, 0, 0], [0, 0, 0]),
        *([0, 5, 0], [0, 6, 1]),
    ]
    (note,) = owned.notes
    assert note.startswith("edges/pays.csv: 1 lines repeat an edge")


def test_tables_and_arrays_hold_the_same_graph(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "bank", typed_tables(0, has_device=True))
    found, due = load_graph_file(folder).dataset, typed_bank(0, has_device=True)
    assert found.schema is not None
    assert due.schema is not None
    assert found.schema.ordered() == due.schema.ordered()
    assert found.schema.target == "card"
    torch.testing.assert_close(
        found.x[found.y >= 0][:, :3], due.x[due.y >= 0][:, 2:5], atol=1e-6, rtol=0
    )
    assert found.edge_index.shape == due.edge_index.shape


def test_a_table_without_a_meaning_is_noted(tmp_path: Path) -> None:
    bank = written(tmp_path / "bank", {"class.csv": "name\ngood\n"})
    plain = {"nodes.csv": "id,label,x\na,u,1\nb,v,2\n"}
    plain |= {"edges.csv": "source,target\na,b\n", "class.csv": ""}
    for folder in (bank, write_tables(tmp_path / "plain", plain)):
        note = load_graph_file(folder).notes[0]
        assert note.startswith(
            'class.csv will not be read. Did you mean "classes.csv"?'
        )
    graphs = "id,label\na,u\n", "graph,id,x\na,1,1\n", "graph,source,target\n"
    names = "graphs.csv", "nodes.csv", "edges.csv"
    tables = {**dict(zip(names, graphs, strict=True)), "Target.CSV": ""}
    owned = load_graph_set(write_tables(tmp_path / "set", tables))
    assert 'Did you mean "targets.csv"' in owned.notes[0]


def test_a_relation_may_name_its_file_and_be_private(tmp_path: Path) -> None:
    listed = (
        "relation,source,target,file,private\npays,card,shop,,\n"
        "owns,person,card,,yes\npays,person,shop,edges/person-pays.csv,\n"
    )
    changes = {
        "relations.csv": listed,
        "edges/person-pays.csv": "source,target\n",
    }
    schema = load_graph_file(written(tmp_path / "bank", changes)).dataset.schema
    assert schema is not None
    assert schema.relations == (PAYS, OWNS, ("person", "pays", "shop"))
    assert schema.private == {OWNS}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"nodes/shop.csv": "id,size,label\ns1,5,big\ns2,6,big\n"},
            "nodes/card.csv and nodes/shop.csv both have a column label. Set target-node",
        ),
        (
            {"nodes/card.csv": "id\nc1\nc3\n"},
            "no table in nodes/ has a column label or target",
        ),
        (
            {
                "relations.csv": "relation,source,target\npays,card,shop\nowns,pers,card\n"
            },
            'relations.csv, line 3: the kind "pers" has no table nodes/pers.csv. Kinds: '
            "card, person, shop.",
        ),
        (
            {"edges/owns.csv": "source,target\np1,c1\np1,c9\n"},
            'edges/owns.csv, line 3: target "c9" is not an id in nodes/card.csv',
        ),
        (
            {"edges/pays.csv": "source,target\np1,s1\n"},
            'edges/pays.csv, line 2: source "p1" is not an id in nodes/card.csv',
        ),
        (
            {"edges/old.csv": "source,target\n"},
            "edges/old.csv is not in relations.csv. List it, or remove it.",
        ),
        (
            {"nodes/atm.csv": "id\na1\n"},
            'nodes/atm.csv: no line of relations.csv has the kind "atm"',
        ),
        ({"nodes/notes.txt": "x"}, "notes.txt is no table NAME.csv"),
        (
            {"edges/pays.csv": None},
            "edges/pays.csv is missing. Provide it with the columns source, target",
        ),
        (
            {"nodes/shop.csv": "id,size\n"},
            "nodes/shop.csv holds no nodes. Add one line per node.",
        ),
        (
            {"nodes/shop.csv": "id,size\ns1,1\ns1,2\n"},
            'nodes/shop.csv, line 3: id "s1" is already taken',
        ),
        (
            {"nodes/shop.csv": "id,size\ns1,1\ns2,big\n"},
            'nodes/shop.csv, line 3, column "size": expected a number, got "big"',
        ),
        (
            {"nodes/shop.csv": "id,size,split\ns1,1,train\ns2,1,\n"},
            "the column split holds a split, but only nodes of the kind card are",
        ),
        (
            {
                "relations.csv": "relation,source,target\npays,card,shop\n"
                "owns,person,card\npays,person,shop\n"
            },
            "line 4: the edges of person -pays-> shop would be read from edges/pays.csv, "
            "as those of line 2. Give each relation a table of its own",
        ),
        (
            {
                "relations.csv": "relation,source,target\npays,card,shop\n"
                "owns,person,card\npays,card,shop\n"
            },
            "line 4: the relation card -pays-> shop is already listed in line 2",
        ),
        (
            {
                "relations.csv": "relation,source,target,file\n"
                "pays,card,shop,../pays.csv\nowns,person,card,\n"
            },
            'line 2: file must name a table in edges/, e.g. edges/pays.csv, got "../pays',
        ),
        (
            {
                "relations.csv": "relation,source,target,private\npays,card,shop,no\n"
                "owns,person,card,\n"
            },
            'line 2: private must be yes, or empty for a relation that is told, got "no"',
        ),
        (
            {"relations.csv": "relation,source,target,weight\npays,card,shop,1\n"},
            "the column weight is not known. Known: relation, source, target, file",
        ),
        (
            {"relations.csv": "relation,source,target\n.pays,card,shop\n"},
            'line 2: ".pays" is no name of a relation',
        ),
        ({"relations.csv": "relation,source,target\n"}, "lists no relation"),
        ({"relations.csv": "relation,source\n"}, "must be relation, source, target"),
        (
            {"nodes.csv": "id,label\n"},
            "has relations.csv, by which it is a typed graph, but also nodes.csv",
        ),
        (
            {"nodes/Shop.csv": "id\ns1\n"},
            'the kinds "Shop" and "shop" differ only by case',
        ),
        ({"nodes/my card.csv": "id\ns1\n"}, "'my card' is no name of a kind"),
        ({"classes.csv": "name\ngood\n"}, 'class "bad" is not in classes.csv'),
    ],
)
def test_what_does_not_fit_is_named(
    changes: dict[str, str | None], text: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "bank", changes)
    with pytest.raises(DataError, match=re.escape(text)):
        load_graph_file(folder)
    owned, problems = inspect_graph_file(folder)
    assert owned is None
    assert any(text in problem for problem in problems)


def test_all_faulty_tables_are_reported_at_once(tmp_path: Path) -> None:
    changes = {
        "nodes/shop.csv": "id,size\ns1,big\ns2,1\n",
        "nodes/person.csv": "id\np1\np1\n",
        "edges/pays.csv": "source,target\nc1,s9\n",
    }
    _, problems = inspect_graph_file(written(tmp_path / "bank", changes))
    assert [re.search(r"(\w+)\.csv, line", text)[1] for text in problems] == [  # type: ignore[index]
        *("person", "shop", "pays")
    ]


@pytest.mark.parametrize("folder", ["nodes", "edges"])
def test_a_missing_folder_is_named(folder: str, tmp_path: Path) -> None:
    left_out = {name: None for name in SMALL if name.startswith(folder)}
    with pytest.raises(DataError, match=f"{folder} is missing. A typed graph has one"):
        load_graph_file(written(tmp_path / "bank", left_out))


def test_ten_thousand_relations_are_refused_before_any_is_read(tmp_path: Path) -> None:
    lines = "".join(f"r{number},card,shop\n" for number in range(10_000))
    changes = {"relations.csv": f"relation,source,target\n{lines}"}
    with pytest.raises(DataError, match="10,000 relations, expected at most 1,000"):
        load_graph_file(written(tmp_path / "bank", changes))


def test_the_kind_to_predict_is_chosen_among_tables_with_labels(tmp_path: Path) -> None:
    shop = "id,size,target:sales,split\ns1,5,1.5,train\ns2,6,,\n"
    folder = written(tmp_path / "bank", {"nodes/shop.csv": shop})
    owned = load_graph_file(folder, target_node="shop")
    assert owned.dataset.target.names == ("sales",)
    assert owned.dataset.targets is not None
    assert owned.dataset.targets[-2].tolist() == [1.5]
    assert owned.dataset.y.tolist() == [-1] * 5 + [0, -1]
    assert owned.dataset.feature_names == ("card.limit", "shop.size")
    assert owned.notes[0] == (
        "nodes/card.csv: label, split will not be read: nodes of the kind shop are "
        "predicted."
    )
    with pytest.raises(
        DataError, match=r"no table nodes/atm\.csv\. Kinds: card, person"
    ):
        load_graph_file(folder, target_node="atm")
    with pytest.raises(DataError, match=r"nodes/person.csv has no column label"):
        load_graph_file(folder, target_node="person")


def test_labels_may_be_missing_if_they_are_not_needed(tmp_path: Path) -> None:
    card = {"nodes/card.csv": "id,limit\nc1,1\nc2,2\nc3,3\n"}
    folder = written(tmp_path / "bank", card)
    owned = load_graph_file(folder, needs_labels=False, target_node="card")
    assert owned.dataset.schema is not None
    assert owned.dataset.schema.target == "card"
    assert owned.dataset.masks == {}
    assert set(owned.dataset.y.tolist()) == {-1}
    both = written(tmp_path / "both", {"nodes/shop.csv": "id,label\ns1,a\ns2,b\n"})
    assert load_graph_file(both, needs_labels=False).dataset.num_features == 1


@pytest.fixture
def owners(tmp_path: Path) -> Path:
    """Write three typed folders."""
    for number in range(3):
        write_tables(tmp_path / "own" / f"bank{number}", typed_tables(number))
    return tmp_path / "own"


def test_a_folder_of_typed_folders_has_one_owner_each(owners: Path) -> None:
    config = parse_config({"owners": str(owners), "model": "rgcn"})
    assert [owner.name for owner in list_owners(config)] == ["bank0", "bank1", "bank2"]
    clients, _, _ = build_owners(config)
    assert [client.class_counts("train").tolist() for client in clients] == [
        [12, 12]
    ] * 3
    one = parse_config({"owners": str(owners / "bank0"), "model": "rgcn"})
    with pytest.raises(DataError, match="is the graph of one owner"):
        list_owners(one)


def test_a_change_of_any_table_is_seen(owners: Path) -> None:
    config = parse_config({"owners": str(owners), "model": "rgcn"})

    def seen() -> tuple[object, object]:
        stamps = file_stamps({"graph": str(owners / "bank1")})
        return owner_contents(config), stamps

    before = seen()
    assert seen() == before
    for table in ("nodes/shop.csv", "edges/pays.csv", "relations.csv"):
        path = owners / "bank1" / table
        path.write_text(path.read_text() + "\n")
        now = seen()
        assert now[0] != before[0]
        assert now[1] != before[1]
        before = now


def test_target_node_reaches_the_client_of_a_folder(owners: Path) -> None:
    settings = {"model": "rgcn", "target-node": "shop"}
    with pytest.raises(DataError, match=r"nodes/shop.csv has no column label"):
        client_from_file(owners / "bank0", parse_config(settings))
    client = client_from_file(
        owners / "bank0", parse_config(settings | {"target-node": "card"})
    )
    assert client.schema is not None
    assert client.schema.target == "card"
