"""What check-graph says of typed graphs, and the floor on their names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.leaving import describe_leaving, learned_by_server, said_once
from flower_fgl.core.node_settings import broken_floors, parse_node_config
from flower_fgl.core.options import Scalar
from flower_fgl.methods import METHODS, parse_config
from tests.support.guides import ROOT
from tests.support.owners import run_owners
from tests.support.typed_graphs import airline, typed_tables, write_tables

NAMES = ("card", "shop", "person", "device", "pays", "owns")


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Write a typed folder with a private relation, one of which has no edge."""
    tables = typed_tables(0, has_device=True)
    listed = tables["relations.csv"].replace("target", "target,private")
    tables["relations.csv"] = listed.replace("used,card,device", "used,card,device,yes")
    tables["edges/owns.csv"] = "source,target\nperson-0,card-0\nperson-0,card-1\n"
    return write_tables(tmp_path / "bank", tables)


def test_kinds_and_relations_are_listed_with_their_numbers(graph: Path) -> None:
    report = inspect_graph(graph, {"model": "rgcn", "schema-align": "name"})
    assert report.problems == []
    pays = len((graph / "edges/pays.csv").read_text().splitlines()) - 1
    assert report.parts == [
        "Kinds of nodes:",
        "  card: 40 nodes to predict, 40 with a known label, 3 features",
        "  device: 5 nodes, no features",
        "  person: 10 nodes, 1 feature, 9 without an edge",
        *report.parts[4:5],
        "Relations:",
        f"  card -pays-> shop: {pays} edges",
        "  person -owns-> card: 2 edges",
        "  card -used-> device: 40 edges, private: neither its name nor its weights leave",
    ]
    assert report.parts[4].startswith("  shop: 8 nodes, 2 features")


@pytest.mark.parametrize("align", ["same", "name", "private"])
def test_what_leaves_is_said_and_names_only_with_name(align: str, graph: Path) -> None:
    if align == "same":
        write_tables(
            graph, {"relations.csv": typed_tables(0, has_device=True)["relations.csv"]}
        )
    settings: dict[str, Scalar] = {"model": "rgcn", "schema-align": align}
    found = inspect_graph(graph, settings).description
    assert found is not None
    said = said_once(found, parse_config(settings))
    fields = {field for group in said for field in group.split()}
    told = set(learned_by_server(found))
    assert told <= fields
    assert fields - told <= {"num-features", "feature-names", "features-sha256"}
    text = "\n".join(describe_leaving(found, settings))
    named = {name for name in NAMES if name in text}
    assert named == ({*NAMES} if align == "name" else set())
    assert "-used->" not in text
    assert f'(schema-align = "{align}")' in text
    kept = {
        "same": "trained on all training nodes",
        "name": "of kinds and relations that this owner has, without private relations",
        "private": "without those that belong to one kind or relation",
    }
    assert kept[align] in text
    assert "40 nodes to predict" in text


def test_the_guide_shows_a_folder_and_what_is_printed_of_it(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "typed-graphs.md").read_text(encoding="utf-8")
    names = ("relations", "nodes/card", "nodes/shop", "nodes/person")
    names += ("edges/pays", "edges/owns")
    texts = re.findall(r"```csv\n(.*?)```", guide, re.DOTALL)
    tables = {f"{n}.csv": text for n, text in zip(names, texts, strict=True)}
    folder = write_tables(tmp_path / "bank-a", tables)
    report = inspect_graph(folder, {"model": "rgcn", "schema-align": "name"})
    assert report.problems == []
    assert "\n".join(report.parts) in guide


def test_private_relations_are_a_problem_with_same(graph: Path) -> None:
    (problem,) = inspect_graph(graph, {"model": "rgcn"}).problems
    assert 'Set schema-align = "name", or "private"' in problem


def test_a_node_refuses_a_run_that_tells_names() -> None:
    node = parse_node_config({"share-type-names": False})

    def broken(align: str) -> list[str]:
        run = parse_config({"model": "rgcn", "schema-align": align}).flat()
        return broken_floors(node, run, uploads=True, known_methods=METHODS)

    assert broken("same") == broken("private") == []
    assert broken("name") == [
        'schema-align = name, but its node config demands "same" or "private"'
    ]


def test_a_node_refuses_a_run_that_shows_its_coefficients() -> None:
    node = parse_node_config({"share-coefficients": False})

    def broken(**values: str) -> list[str]:
        run = parse_config({"model": "rgcn", **values}).flat()
        return broken_floors(node, run, uploads=True, known_methods=METHODS)

    peers = {"method": "fedhgn", "fedhgn.alignment": "peers"}
    assert broken() == broken(method="fedhgn") == []
    assert broken(**peers) == [
        'fedhgn.alignment = peers, but its node config demands "none"'
    ]


def test_an_owner_with_that_floor_stays_out_of_such_a_run(tmp_path: Path) -> None:
    nodes: list[dict[str, Scalar]] = [
        {"graph": str(write_tables(tmp_path / f"bank{n}", typed_tables(n)))}
        for n in range(3)
    ]
    nodes[2]["share-type-names"] = False
    values = {"model": "rgcn", "hidden_channels": 8, "rounds": 1}
    run = run_owners(nodes, tmp_path / "run", schema_align="name", **values)
    assert {row["partition_id"] for row in run.clients} == {0, 1}
    assert "schema-align = name, but its node config demands" in str(run.summary)


@pytest.mark.parametrize(
    ("setting", "due"),
    [("link", "160 links"), ("edge", "190 edges with a known label")],
)
def test_a_predicted_relation_is_said(setting: str, due: str, tmp_path: Path) -> None:
    tables = airline(0, has_time=True)
    folder = write_tables(tmp_path / "air", tables)
    settings: dict[str, Scalar] = {
        "model": "rgcn",
        "setting": setting,
        "target-relation": "flies",
    }
    report = inspect_graph(folder, settings)
    assert not report.problems
    pairs = {
        tuple(sorted(map(int, line.split(",")[:2])))
        for line in tables["edges/flies.csv"].splitlines()[1:]
    }
    if setting == "link":
        due = f"{sum(a != b for a, b in pairs)} links"
    (line,) = [part for part in report.parts if "-flies->" in part]
    assert f"; {due} to predict" in line
    assert "  airport: 30 nodes, 2 features" in report.parts
    assert report.description is not None
    said = said_once(report.description, parse_config(settings))
    what = "labelled edges before the test" if setting == "edge" else "pairs of nodes"
    assert what in said["num-nodes num-edges"]
