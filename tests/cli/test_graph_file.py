"""The ``check-graph`` and ``predict`` commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.leaving import learned_by_server, said_once
from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.flower_internals import parse_config_args
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.methods import parse_config
from flower_fgl.runs.model_file import save_model
from tests.client_apps.runtime.test_owners import saved
from tests.runs.test_model_file import CARD, a_model
from tests.support.owners import owner_graphs, run_owners


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    save_client_graph(tmp_path / "ash.npz", owner_graphs()[0])
    return tmp_path / "ash.npz"


def test_the_check_prints_exactly_what_the_server_gets(
    graph: Path, tmp_path: Path
) -> None:
    nodes = saved(tmp_path / "graphs", owner_graphs())
    for share in (True, False):
        run = run_owners(nodes, tmp_path / f"run-{share}", share_class_counts=share)
        got = next(c for c in run.clients if c["name"] == "ash")
        report = inspect_graph(graph, {})
        assert report.problems == []
        assert report.description is not None
        counts = report.description.class_counts if share else ()
        said = learned_by_server(replace(report.description, class_counts=counts))
        for key, value in said.items():
            # the server assigns partition IDs and backbone; the key is random
            if key not in ("partition-id", "num-partitions", "model", "public-key"):
                assert got[key.replace("-", "_")] == value


def test_a_note_on_a_missing_split_fits_the_kind_of_file(
    graph: Path, tmp_path: Path
) -> None:
    with np.load(graph) as file:
        arrays = {key: file[key] for key in file if not key.endswith("_mask")}
    np.savez(tmp_path / "bare.npz", **arrays)
    rows = "".join(f"q{i},{'ab'[i % 2]},{i}\n" for i in range(9))
    (tmp_path / "nodes.csv").write_text(f"id,label,age\n{rows}")
    (tmp_path / "edges.csv").write_text("source,target\nq1,q2\n")
    for path, remedy in (
        (tmp_path / "bare.npz", "Add train_mask, val_mask and test_mask to the file"),
        (tmp_path, "Add a column split to nodes.csv (train, val, test or empty)"),
    ):
        (note,) = (n for n in inspect_graph(path, {}).notes if "no split" in n)
        assert remedy in note


def test_a_good_file_is_said_to_be_good(graph: Path) -> None:
    result = invoke("check-graph", graph)
    assert result.exit_code == 0
    assert "can be used" in result.output
    assert "class-counts = []   (share-class-counts = false)" in result.output
    assert "name = ash" in result.output


def test_all_problems_of_an_npz_file_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(
        path,
        x=np.array([[1.0, np.nan], [1, 1]]),
        y=np.array([0, 7]),
        edges=np.array([[0, 5]]),
        class_names=np.array(["a", "b"]),
        train_mask=np.array([1, 0]),
        node_ids=np.array([2, 1]),
    )
    report = inspect_graph(path, {})
    words = ["NaN", "outside [-1, 2)", "edges name nodes", "train_mask must be bool"]
    assert len(report.problems) == len(words)
    for word in words:
        assert sum(word in problem for problem in report.problems) == 1
    assert report.description is None
    result = invoke("check-graph", path)
    assert result.exit_code == 1
    assert "Number of problems: 4" in result.output


def test_all_problems_of_a_csv_folder_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text(
        "id,label,split,age,size\nn1,flu,train,old,1\nn2,pox,tset,3,inf\n"
    )
    (tmp_path / "edges.csv").write_text("source,target\nn1,n9\n")
    (tmp_path / "classes.csv").write_text("name\nflu\n")
    words = ['class "pox"', 'got "old"', "finite number", '"n9"', 'got "tset"']
    problems = inspect_graph(tmp_path, {}).problems
    assert len(problems) == len(words)
    for word in words:
        assert sum(word in problem for problem in problems) == 1


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"class_names": None}, "class_names is missing"),
        ({"x": None}, "expected features"),
        ({"y": None}, "y is missing"),
        ({"edges": None}, "expected either edge_index"),
        ({"node_ids": np.array([1, 1, 2])}, "node id 1"),
        ({"val_mask": np.array([True, True])}, "val_mask must be bool of shape (3,)"),
        ({"train_mask": np.ones(3, bool), "val_mask": np.ones(3, bool)}, "both masks"),
        ({"evaluation_1_x": np.ones((1, 2))}, "numbered 0"),
        ({"odd": np.ones(1)}, 'unknown array "odd"'),
        ({"train_mask": np.ones(3, bool)}, "holds no split"),
    ],
)
def test_one_problem_is_named_once(
    change: dict[str, np.ndarray | None], word: str, tmp_path: Path
) -> None:
    arrays: dict[str, np.ndarray | None] = {
        "x": np.ones((3, 2)), "y": np.array([0, 1, -1]),
        "edges": np.array([[0, 1]]), "class_names": np.array(["a", "b"]),
    }  # fmt: skip
    kept = {k: v for k, v in {**arrays, **change}.items() if v is not None}
    np.savez(tmp_path / "g.npz", **kept)
    (problem,) = inspect_graph(tmp_path / "g.npz", {}).problems
    assert word in problem


def test_what_is_worth_a_look_is_noted(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "g.npz",
        x=np.full((3, 2), 5000.0), y=np.array([0, 1, -1]),
        edges=np.array([[0, 1]]), class_names=np.array(["a", "b"]),
        train_mask=np.array([True, False, False]),
        val_mask=np.zeros(3, bool), test_mask=np.zeros(3, bool),
    )  # fmt: skip
    notes = " ".join(inspect_graph(tmp_path / "g.npz", {}).notes)
    assert "no labelled validation nodes" in notes
    assert "a (1), b (0)" in notes
    assert "1 of 3 nodes have no neighbour" in notes
    assert "5e+03" in notes


def test_columns_that_are_not_scaled_are_named(tmp_path: Path) -> None:
    x = np.stack([np.arange(4) * 1000.0, np.ones(4), np.full(4, -300.0)], axis=1)
    arrays = {
        "y": np.array([0, 1, 0, 1]), "edges": np.array([[0, 1]]),
        "class_names": np.array(["a", "b"]),
        "train_mask": np.array([True, True, False, False]),
        "val_mask": np.zeros(4, bool), "test_mask": np.arange(4) > 1,
    }  # fmt: skip
    names = np.array(["income", "ones", "debt"])
    np.savez(tmp_path / "named.npz", x=x, feature_names=names, **arrays)
    np.savez(tmp_path / "plain.npz", x=x, **arrays)
    csr = {"x_indptr": np.array([0, 1, 1, 2, 2]), "x_indices": np.array([1, 0]),
           "x_data": np.array([7.0, -200.0]), "x_shape": np.array([4, 2])}  # fmt: skip
    np.savez(tmp_path / "sparse.npz", **csr, **arrays)
    for name, text in (
        ("named", "Not scaled: income (0 to 3e+03), debt (-300 to -300). "),
        ("plain", "Not scaled: column 0 (0 to 3e+03), column 2 (-300 to -300). "),
        ("sparse", "Not scaled: column 0 (-200 to 0). "),
    ):
        notes = " ".join(inspect_graph(tmp_path / f"{name}.npz", {}).notes)
        assert text in notes
    scaled = inspect_graph(tmp_path / "named.npz", {"feature-norm": "columns"}).notes
    assert "Not scaled" not in " ".join(scaled)


def test_an_owner_with_a_single_class_is_told_so(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "g.npz",
        x=np.ones((20, 2)), y=np.zeros(20, int),
        edges=np.array([[0, 1]]), class_names=np.array(["flu", "cold"]),
    )  # fmt: skip
    notes = " ".join(inspect_graph(tmp_path / "g.npz", {}).notes)
    assert "All 4 training nodes belong to the class flu" in notes


def test_the_check_says_in_words_what_leaves_and_what_stays(graph: Path) -> None:
    text = invoke("check-graph", graph).output
    for line in (
        "What leaves this machine before round 1, once:",
        "the owner's name: ash",
        "the names of the classes, as text, to the server and to all other owners: flu, "
        "cold, well",
        "flu: ",
        "What leaves it in every round with method = fedavg:",
        "the weights of a model that was trained on all training nodes",
        "neither masked (secure-aggregation) nor noised",
        "What stays here: every single node, edge, feature and label",
    ):
        assert line in text
    settings = ["share-class-counts=False", "upload-clip=2.0", "upload-noise=0.5"]
    pairs = [part for pair in settings for part in ("--set", pair)]
    text = invoke("check-graph", graph, *pairs, "--set", "method=fedproto").output
    assert "not the number of training nodes of each class" in text
    assert "flu: " not in text
    assert "clipped to the length 2, noised by 0.5 times that length" in text
    assert "see the row of fedproto in docs/security.md" in text


def test_the_check_names_what_a_method_sends_once(graph: Path) -> None:
    text = invoke("check-graph", graph, "--set", "method=fedsage+").output
    once = text.partition("What leaves it in every round")[0]
    assert "embeddings of single nodes" in once
    assert "What stays here, except for what is sent once: every single node" in text


def test_every_field_of_the_description_is_said_in_words(graph: Path) -> None:
    found = inspect_graph(graph, {}).description
    assert found is not None
    said = said_once(found, parse_config({}))
    fields = {field for group in said for field in group.split()}
    assert fields == set(learned_by_server(found))


@pytest.mark.parametrize("is_scored", [True, False])
def test_an_owner_without_training_nodes_is_told_so(
    is_scored: bool, tmp_path: Path
) -> None:
    np.savez(
        tmp_path / "g.npz",
        x=np.ones((3, 2)), y=np.array([0, 1, -1]),
        edges=np.array([[0, 1]]), class_names=np.array(["a", "b"]),
        train_mask=np.zeros(3, bool), val_mask=np.zeros(3, bool),
        test_mask=np.array([is_scored, False, False]),
    )  # fmt: skip
    result = invoke("check-graph", tmp_path / "g.npz")
    assert result.exit_code == 0
    can = "cannot train and can only be" if is_scored else "can neither train nor be"
    assert f"no labelled training nodes: this owner {can}" in result.output


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, " With share-class-counts the server learns these counts."),
        ({"share-class-counts": False}, ""),
        ({"min-class-count": 5}, ""),
        (
            {"min-class-count": 3},
            " With share-class-counts the server learns only counts of at least "
            "min-class-count = 3.",
        ),
    ],
)
def test_small_counts_are_said_to_be_told_only_where_they_are(
    settings: dict[str, bool | int], sentence: str, tmp_path: Path
) -> None:
    np.savez(
        tmp_path / "g.npz",
        x=np.ones((6, 2)), y=np.array([0, 1, 1, 1, 0, 1]),
        edges=np.array([[0, 1]]), class_names=np.array(["a", "b"]),
        train_mask=np.array([True, True, True, True, False, False]),
        val_mask=np.arange(6) == 4, test_mask=np.arange(6) == 5,
    )  # fmt: skip
    notes = inspect_graph(tmp_path / "g.npz", settings).notes
    listed = "Classes with fewer than 5 training nodes: a (1), b (3)."
    assert listed + sentence in notes


def test_a_file_without_a_split_says_that_one_is_drawn(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "g.npz",
        x=np.ones((40, 2)), y=np.arange(40) % 2,
        edges=np.array([[0, 1]]), class_names=np.array(["a", "b"]),
    )  # fmt: skip
    report = inspect_graph(tmp_path / "g.npz", {})
    assert "20/40/40" in " ".join(report.notes)
    assert report.description is not None
    assert report.description.num_train == 8


def test_predict_writes_the_table_and_says_which_model_it_was(
    graph: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    save_model(tmp_path / "m", a_model().state_dict(), CARD)
    out = tmp_path / "p.csv"
    result = invoke(
        "predict", "--model", tmp_path / "m", "--graph", graph, "--output", out
    )
    assert result.exit_code == 0, result.output
    assert "fedavg, gcn, round 4, of ash" in result.output
    assert out.read_text().startswith("node,predicted,p:flu,p:cold,p:well\n")


def test_check_graph_checks_the_node_config_before_the_node_starts(graph: Path) -> None:
    result = invoke("check-graph", graph, "--node-config", "min-clas-count=5")
    assert 'Did you mean "min-class-count"?' in str(result.exception)
    result = invoke("check-graph", graph, "--node-config", "min-class-count=]")
    assert isinstance(result.exception, ConfigError)
    assert "invalid format" in str(result.exception)
    dropped = "min-class-count = 5 upload-noise = 2.0"
    result = invoke("check-graph", graph, "--node-config", dropped)
    assert f"this part of --node-config: {dropped}. The" in str(result.exception)
    assert "can be used" not in result.output
    floors = f'graph="{graph}" min-class-count=5 upload-noise=1.0'
    result = invoke("check-graph", graph, "--node-config", floors)
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "min-class-count = 1, but its node config demands at least 5" in text
    assert "upload-noise = 0, but its node config demands at least 1" in text
    strong = ["--set", "min-class-count=5", "--set", "upload-clip=1", "--set"]
    result = invoke(
        "check-graph", graph, "--node-config", floors, *strong, "upload-noise=1"
    )
    assert "refuses" not in result.output


def test_a_file_with_one_graph_is_no_set_of_graphs(graph: Path) -> None:
    result = invoke("check-graph", graph, "--set", "setting=graph")
    assert result.exit_code == 1
    assert 'holds one graph, but setting = "graph" needs a set' in result.output
    assert "partition" not in result.output.partition("Problem")[2]
    result = invoke("run", "--dataset", graph, "--set", "setting=graph")
    assert result.exit_code == 1
    said = str(result.exception)
    assert 'holds one graph, but setting = "graph" needs a set' in said
    assert "partition" not in said


def test_a_dataset_in_another_format_is_no_unknown_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("g.graphml").write_text("<graphml/>")
    result = invoke("run", "--dataset", "g.graphml")
    assert result.exit_code == 1
    assert "g.graphml is no graph file" in str(result.exception)
    assert "cora" not in str(result.exception)
    assert "a GraphML file" in invoke("check-graph", "g.graphml").output


def marked(tmp_path: Path, cells: dict[str, list[object]], **settings: str) -> str:
    """Return the notes on a table with some columns of twelve cells."""
    rows = [
        ",".join(map(str, (f"n{i}", "ab"[i % 2], *row)))
        for i, row in enumerate(zip(*cells.values(), strict=True))
    ]
    header = ",".join(["id", "label", *cells])
    (tmp_path / "nodes.csv").write_text("\n".join([header, *rows]))
    edges = [f"n{i},n{i + 1}" for i in range(11)]
    (tmp_path / "edges.csv").write_text("\n".join(["source,target", *edges]))
    report = inspect_graph(
        tmp_path, {k.replace("_", "-"): v for k, v in settings.items()}
    )
    assert report.problems == []
    return " ".join(report.notes)


@pytest.mark.parametrize("norm", ["none", "columns"])
def test_numbers_that_stand_for_unknown_are_noted(tmp_path: Path, norm: str) -> None:
    ages = [30, -1, 41, 28, 0, -1, 55, 62, 19, 33, 47, 50]
    degrees = [-3, 4, -12.5, 8, -999, 1, 2, 3, 9, 7, 5, 6]
    notes = marked(tmp_path, {"age": ages, "degrees": degrees}, feature_norm=norm)
    assert (
        "seems to mean unknown: age (-1 at 2 nodes), degrees (-999 at 1 nodes)" in notes
    )


def test_codes_and_ordinary_negative_numbers_are_not_noted(tmp_path: Path) -> None:
    cells: dict[str, list[object]] = {
        "sign": [-1, 1] * 6,
        "code": [-1, 0, 1] * 4,
        "change": [-1, -2, 5, 3.5] * 3,
        "height": [-999, -998, -120, 4] * 3,
        "constant": [-1] * 12,
    }
    assert "seems to mean unknown" not in marked(tmp_path, cells)


def test_classes_without_items_are_noted(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "g.npz",
        x=np.ones((6, 2)),
        y=np.array([0, 1000, 2000, 0, 1000, 2000]),
        edges=np.array([[0, 1]]),
        class_names=np.arange(2001).astype(str),
    )
    notes = " ".join(inspect_graph(tmp_path / "g.npz", {}).notes)
    assert "1,998 of 2,001 classes have no item in this graph" in notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('state-dir="states"', "state-dir must be an absolute path, got 'states'"),
        ('peers="peers.toml"', "peers must be an absolute path"),
        ('model-dir="C:\\temp"', "model-dir holds a control character"),
        ('model-dir="FILE/models"', "its model-dir is not writable"),
        ('state-dir="FILE/states"', "its state-dir is not writable"),
        ("partition-id=3 num-partitions=2", "partition-id must be below"),
    ],
)
def test_check_graph_refuses_the_node_config_that_the_node_refuses(
    text: str,
    words: str,
    graph: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    text = f'graph="{graph}" {text}'.replace("FILE", str(tmp_path / "file"))
    result = invoke("check-graph", graph, "--node-config", text)
    assert result.exit_code == 1
    node = parse_config_args([text])
    others = saved(tmp_path / "others", owner_graphs())[1:]
    run = run_owners([node, *others], tmp_path / "run", rounds=1)
    (refused,) = run.summary["refused"]
    assert words in refused["reason"]
    assert str(result.exception).startswith(refused["reason"])
    assert f"This node takes no part in the run: {refused['reason']}" in caplog.text


def test_check_graph_reads_the_graph_that_the_node_will_read(
    graph: Path, tmp_path: Path
) -> None:
    config = f'graph="{tmp_path / "absent.npz"}"'
    result = invoke("check-graph", graph, "--node-config", config)
    assert result.exit_code == 1
    assert "The graph of the node config cannot be used" in str(result.exception)
    assert "absent.npz" in str(result.exception)
    other = tmp_path / "other.npz"
    other.write_bytes(graph.read_bytes())
    result = invoke("check-graph", graph, "--node-config", f'graph="{other}"')
    assert "another graph than the one checked here" in result.output
    result = invoke("check-graph", graph, "--node-config", "min-class-count=2")
    assert "the node config names no graph" in result.output


def test_check_graph_refuses_a_node_config_whose_graph_holds_another_kind(
    graph: Path, tmp_path: Path
) -> None:
    (tmp_path / "nodes.csv").write_text("id,target,x\na,0.5,1\nb,1.5,2\n")
    (tmp_path / "edges.csv").write_text("source,target\na,b\n")
    node = ("--node-config", f'graph="{tmp_path}"')
    for options in ((), ("--set", "min-class-count=7")):
        result = invoke("check-graph", graph, *options, *node)
        assert result.exit_code == 1
        assert "The graph of the node config cannot be used" in str(result.exception)
        assert "numbers, but this run predicts classes" in str(result.exception)
    config = (
        f'graph="{graph}" model-dir="{tmp_path / "m"}" state-dir="{tmp_path / "s"}"'
    )
    result = invoke("check-graph", graph, "--node-config", config)
    assert result.exit_code == 0
    assert "node config" not in result.output
    assert not {path.name for path in tmp_path.iterdir()} & {"m", "s"}
