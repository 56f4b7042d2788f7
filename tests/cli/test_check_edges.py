"""``check-graph`` on files whose edges have classes, times and features."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.leaving import describe_leaving, learned_by_server, said_once
from flower_fgl.cli.main import app
from flower_fgl.methods import parse_config

EDGE = {"setting": "edge"}


def write(folder: Path, *, time: bool = True, label: str = "") -> Path:
    nodes = [f"n{i},{i}" for i in range(10)]
    (folder / "nodes.csv").write_text("\n".join(["id,age", *nodes]) + "\n")
    lines = ["source,target,label,amount" + (",time" if time else "")]
    for place in range(30):
        name = label or ("odd" if place % 4 == 0 else "plain")
        row = f"n{place % 10},n{place * 3 % 7},{name},{1000 + place}"
        lines.append(row + (f",{place}" if time else ""))
    (folder / "edges.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_the_check_says_what_a_split_by_time_means(tmp_path: Path) -> None:
    report = inspect_graph(write(tmp_path), EDGE)
    assert report.problems == []
    notes = " ".join(report.notes)
    assert "30 of 30 edges have a class (plain, odd)" not in notes  # classes are sorted
    assert "(odd, plain), and features (amount), and times from 0 to 29" in notes
    assert "messages pass over training edges only" in notes
    assert "edge: amount (1e+03 to 1.02e+03)" in notes
    assert report.description is not None
    sizes = report.description
    assert (sizes.num_train, sizes.num_val, sizes.num_test) == (18, 6, 6)
    leaves = learned_by_server(sizes)
    assert leaves["num-edge-features"] == 1
    said = said_once(sizes, parse_config(EDGE))
    assert {word for key in said for word in key.split()} == set(leaves)
    assert said["class-counts"].startswith("the number of training edges of each class")
    # 18 of training and 6 of validation
    assert "trained on all training edges (" in " ".join(describe_leaving(sizes, EDGE))
    size = "the size of the graph: 24 labelled edges before the test, "
    assert said["num-nodes num-edges"].startswith(size)


def test_the_check_says_that_a_random_split_is_transductive(tmp_path: Path) -> None:
    report = inspect_graph(write(tmp_path, time=False), EDGE)
    notes = " ".join(report.notes)
    assert "those of validation and test included. Add a column time" in notes
    assert report.description is not None
    said = said_once(report.description, parse_config(EDGE))
    assert "graph: 30 labelled edges, " in said["num-nodes num-edges"]


def test_other_settings_say_that_they_do_not_read_classes_of_edges(
    tmp_path: Path,
) -> None:
    path = write(tmp_path)
    assert "label" in " ".join(inspect_graph(path, {}).problems)
    nodes = [f"n{i},{i},{'ab'[i % 2]}" for i in range(10)]
    (path / "nodes.csv").write_text("\n".join(["id,age,label", *nodes]) + "\n")
    report = inspect_graph(path, {})
    assert report.problems == []
    assert 'Only a run with setting = "edge" reads them.' in " ".join(report.notes)


def test_the_check_warns_of_a_single_class_and_of_few_edges(tmp_path: Path) -> None:
    notes = " ".join(inspect_graph(write(tmp_path, label="plain"), EDGE).notes)
    assert "All 18 training edges belong to the class plain" in notes
    (tmp_path / "edges.csv").write_text(
        "source,target,label\nn1,n2,a\nn2,n3,b\nn1,n3,a\n"
    )
    notes = " ".join(inspect_graph(tmp_path, EDGE).notes)
    assert "A split needs at least 10 edges with a class." in notes
    assert "There are no labelled training edges" in notes


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ("source,target\nn1,n2\n", "Add a column label to edges.csv"),
        ("source,target,stars\nn1,n2,5\n", "To predict numbers, add a column target:NAME"),
        ("source,target,stars,time\nn1,n2,5,1\n", "or target:NAME, a number of each"),
        ("source,target,label,time\nn1,n2,a,3\nn1,n2,a,2\n", "time 2 goes backwards"),
        ("source,target,label,time\nn1,n9,a,1\nn1,n2,a,x\n", 'time must be a number'),
        ("source,target,label\nn1,x9,a\n", 'target "x9" is not an id'),
    ],
)  # fmt: skip
def test_problems_are_printed(edges: str, message: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "edges.csv").write_text(edges)
    result = CliRunner().invoke(
        app, ["check-graph", str(tmp_path), "--set", "setting=edge"]
    )
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize("has_sides", [True, False])
def test_the_check_says_where_negatives_of_a_bipartite_graph_lie(
    tmp_path: Path, has_sides: bool
) -> None:
    nodes = [f"n{i},{i}" for i in range(20)]
    (tmp_path / "nodes.csv").write_text("\n".join(["id,age", *nodes]))
    edges = [f"n{i},n{10 + (i + k) % 10}" for i in range(10) for k in range(4)]
    edges += [] if has_sides else ["n0,n1"]
    (tmp_path / "edges.csv").write_text("\n".join(["source,target", *edges]))
    report = inspect_graph(tmp_path, {"setting": "link"})
    assert report.problems == []
    text = "The graph is bipartite: its nodes have two sides"
    assert (text in " ".join(report.notes)) == has_sides
