"""Features are aligned by name, or refused: among data owners, and in predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scipy.sparse
import torch
from typer.testing import CliRunner

from flower_fgl import Run
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.leaving import learned_by_server
from flower_fgl.cli.main import app
from flower_fgl.core.agreement import hash_names
from flower_fgl.core.errors import DataError, PayloadError, RunError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph, Scaling
from flower_fgl.datasets.graph_files.graph_file import (
    load_graph_file,
    save_client_graph,
)
from flower_fgl.datasets.transforms.canonical import csr_tensor, scipy_csr
from flower_fgl.datasets.transforms.normalize_features import order_columns
from flower_fgl.protocols.base import INFO
from flower_fgl.protocols.describe import ClassAgreement, Description
from flower_fgl.runs.model_file import read_card
from flower_fgl.simulation.prediction import predict_graph
from flower_fgl.strategies.rounds.candidates import agree_features
from tests.client_apps.runtime.test_owners import saved, without_names
from tests.support.owners import owner_graphs, run_owners

NAMES = ("age", "height", "weight", "pulse", "sugar", "salt", "iron", "zinc")


def swapped(client: ClientGraph, names: tuple[str, ...]) -> ClientGraph:
    """Return the same data with its columns in another order."""
    return order_columns(client, names)


@pytest.fixture
def graphs() -> list[ClientGraph]:
    return [replace(graph, feature_names=NAMES) for graph in owner_graphs()]


def model_of(folder: Path, owner: str) -> Path:
    (path,) = folder.with_name(f"{folder.name}-models").glob(f"*-{owner}-*")
    return path


def test_names_travel_and_columns_are_aligned(
    graphs: list[ClientGraph], tmp_path: Path
) -> None:
    own = [graphs[0], swapped(graphs[1], NAMES[::-1]), graphs[2]]
    assert not torch.equal(own[1].graph.x, graphs[1].graph.x)
    settings = {"share_feature_names": True, "evaluate": "both"}
    same = run_owners(saved(tmp_path / "same", graphs), tmp_path / "a", **settings)
    mixed = run_owners(saved(tmp_path / "own", own), tmp_path / "b", **settings)
    assert without_names(mixed) == without_names(same)
    assert "refused" not in mixed.summary
    # the models know the order in which they were trained
    for folder in (tmp_path / "b", model_of(tmp_path / "b", "birch")):
        card = read_card(folder)
        assert card is not None
        assert card.feature_names == NAMES


def test_by_default_only_a_hash_travels_and_another_order_is_refused(
    graphs: list[ClientGraph], tmp_path: Path
) -> None:
    own = [graphs[0], swapped(graphs[1], NAMES[::-1]), graphs[2]]
    run = run_owners(saved(tmp_path / "own", own), tmp_path / "run", evaluate="both")
    (refusal,) = run.summary["refused"]
    assert refusal["name"] == "birch"
    assert "another hash" in refusal["reason"]
    described = [client for client in run.clients if client["round"] == 0]
    assert [client["feature_names"] for client in described] == [[], []]
    assert {client["features_sha256"] for client in described} == {hash_names(NAMES)}
    card = read_card(tmp_path / "run")
    assert card is not None
    assert (card.feature_names, card.features_sha256) == ((), hash_names(NAMES))


def test_other_names_are_refused_by_name(
    graphs: list[ClientGraph], tmp_path: Path
) -> None:
    graphs[2] = replace(graphs[2], feature_names=(*NAMES[:-1], "copper"))
    nodes = saved(tmp_path / "own", graphs)
    run = run_owners(nodes, tmp_path / "run", share_feature_names=True)
    (refusal,) = run.summary["refused"]
    assert refusal["name"] == "cedar"
    assert "missing: zinc; not expected: copper" in refusal["reason"]


def test_an_owner_may_forbid_that_names_travel(
    graphs: list[ClientGraph], tmp_path: Path
) -> None:
    nodes = saved(tmp_path / "own", graphs)
    nodes[0]["share-feature-names"] = False
    run = run_owners(nodes, tmp_path / "run", share_feature_names=True)
    assert "share-feature-names = true" in run.summary["refused"][0]["reason"]


def test_files_without_names_stay_usable_with_a_warning(
    graphs: list[ClientGraph], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs[1] = replace(graphs[1], feature_names=())
    run = run_owners(saved(tmp_path / "own", graphs), tmp_path / "run")
    assert "refused" not in run.summary
    found = [r.message for r in caplog.records if "order of their columns" in r.message]
    assert found == [
        "The graphs of birch have no names of their features: the order of their columns "
        "is not checked."
    ]


def test_two_owners_with_different_features_have_no_majority() -> None:
    def of(names: tuple[str, ...], *, shared: bool) -> Description:
        about = Description(0, 1, 9, 9, 4, 2, 2, len(names), ("a",), (), "gcn")
        shown = names if shared else ()
        return replace(about, feature_names=shown, features_sha256=hash_names(names))

    one, other = of(("a", "b"), shared=True), of(("b", "c"), shared=True)
    with pytest.raises(RunError, match="missing: a; not expected: c"):
        agree_features({"x": one, "y": other})
    assert agree_features({"x": one, "y": of(("b", "a"), shared=True)}) == one
    with pytest.raises(RunError, match="another hash"):
        agree_features(
            {"x": of(("a", "b"), shared=False), "y": of(("b", "a"), shared=False)}
        )


def swap_and_predict(
    graph: ClientGraph, model: Path, tmp_path: Path, names: tuple[str, ...]
) -> Any:
    path = tmp_path / "new.npz"
    save_client_graph(path, swapped(graph, names))
    return predict_graph(model, path)


def trained(graphs: list[ClientGraph], tmp_path: Path, **settings: Any) -> Run:
    return run_owners(
        saved(tmp_path / "graphs", graphs),
        tmp_path / "run",
        evaluate="both",
        **settings,
    )


def test_predict_puts_swapped_columns_into_the_models_order(
    graphs: list[ClientGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(graphs, tmp_path)
    other = (NAMES[1], NAMES[0], *NAMES[2:])
    model = model_of(tmp_path / "run", "ash")
    plain = swap_and_predict(graphs[0], model, tmp_path, NAMES)
    assert plain.note == ""
    aligned = swap_and_predict(graphs[0], model, tmp_path, other)
    assert torch.equal(aligned.values, plain.values)
    assert "put into the model's order" in aligned.note
    # without names nobody can tell, and the two columns are taken for each other
    path = tmp_path / "nameless.npz"
    save_client_graph(path, replace(swapped(graphs[0], other), feature_names=()))
    unchecked = predict_graph(model, path)
    assert not torch.equal(unchecked.values, plain.values)
    assert "order of the columns is not checked" in unchecked.note
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app,
        ["predict", "--model", f"{model}", "--graph", f"{path}", "--output", "out.csv"],
        env={"COLUMNS": "300"},
    )
    assert done.exit_code == 0, done.output
    assert "is not checked" in " ".join(done.output.split())
    # other names
    named = replace(graphs[0], feature_names=(*NAMES[:-1], "copper"))
    save_client_graph(path, named)
    with pytest.raises(DataError, match="missing: zinc; not expected: copper"):
        predict_graph(model, path)


def test_predict_refuses_swapped_columns_if_the_model_has_only_their_hash(
    graphs: list[ClientGraph], tmp_path: Path
) -> None:
    trained(graphs, tmp_path)
    model = tmp_path / "run"
    assert swap_and_predict(graphs[0], model, tmp_path, NAMES).note == ""
    with pytest.raises(DataError, match="only their hash"):
        swap_and_predict(graphs[0], model, tmp_path, NAMES[::-1])


def test_csv_headers_are_the_names(tmp_path: Path) -> None:
    folder = tmp_path / "csv"
    folder.mkdir()
    (folder / "nodes.csv").write_text(
        "id,zinc,label,age,split\na,1,x,2,train\nb,3,y,4,test\nc,5,x,6,val\n"
    )
    (folder / "edges.csv").write_text("source,target\na,b\n")
    dataset = load_graph_file(folder).dataset
    assert dataset.feature_names == ("zinc", "age")
    assert dataset.x[0].tolist() == [1.0, 2.0]
    assert load_graph_file(folder, needs_labels=False).dataset.feature_names == (
        "zinc",
        "age",
    )


def test_names_survive_a_graph_file_and_bad_ones_are_refused(
    graphs: list[ClientGraph], tmp_path: Path
) -> None:
    path = tmp_path / "a.npz"
    save_client_graph(path, graphs[0])
    assert load_graph_file(path).client_graph(0).feature_names == NAMES
    for names in (NAMES[:-1], (*NAMES[:-1], "age"), (*NAMES[:-1], ""), ("x\ny",) * 8):
        save_client_graph(path, replace(graphs[0], feature_names=names))
        with pytest.raises(DataError, match="feature"):
            load_graph_file(path)


def test_columns_of_sparse_features_and_statistics_move_together() -> None:
    graph = replace(owner_graphs()[0], feature_names=NAMES)
    mean = torch.arange(8, dtype=torch.float64)
    graph = replace(graph, scaling=Scaling("columns", (mean, mean + 1)))
    order = [3, 1, 2, 0, 7, 5, 6, 4]
    names = tuple(NAMES[i] for i in order)
    moved = order_columns(graph, names)
    assert torch.equal(moved.graph.x, graph.graph.x[:, order])
    assert moved.scaling is not None
    assert moved.scaling.statistics is not None
    assert moved.scaling.statistics[0].tolist() == [float(i) for i in order]
    sparse = csr_tensor(scipy.sparse.csr_matrix(graph.graph.x.numpy()))
    thin = replace(graph, graph=replace(graph.graph, x=sparse))
    found = order_columns(thin, names).graph.x
    assert found.layout == torch.sparse_csr
    assert torch.equal(
        torch.from_numpy(scipy_csr(found).toarray()), graph.graph.x[:, order]
    )


def test_statistics_of_edges_move_with_their_columns() -> None:
    pairs = torch.tensor([[0], [1]])
    graph = Graph(
        torch.tensor([[1.0], [2.0]]), pairs, torch.tensor([0]), {}, pairs=pairs,
        pair_x=torch.tensor([[5.0, 7.0]]),
    )  # fmt: skip
    ones, numbers = torch.ones(1).double(), torch.tensor([3.0, 4.0]).double()
    client = ClientGraph(
        0, graph, Target.classes("a"), torch.arange(2),
        feature_names=("x", "edge: a", "edge: b"),
        scaling=Scaling("columns", (ones, ones), (numbers, numbers + 2)),
    )  # fmt: skip
    moved = order_columns(client, ("x", "edge: b", "edge: a"))
    assert moved.graph.pair_x is not None
    assert moved.graph.pair_x.tolist() == [[7, 5]]
    assert moved.scaling is not None
    assert moved.scaling.edge_statistics is not None
    assert [t.tolist() for t in moved.scaling.edge_statistics] == [[4, 3], [6, 5]]


def test_a_description_with_false_names_is_malformed() -> None:
    about = Description(
        0, 1, 9, 9, 4, 2, 2, 2, ("a",), (), "gcn",
        feature_names=("x", "y"), features_sha256=hash_names(("x", "y")),
    )  # fmt: skip
    assert Description.from_record(about.to_record()) == about
    changes: list[tuple[str, Any]] = [
        ("feature-names", ["x"]),
        ("feature-names", ["x", "x"]),
        ("feature-names", ["x", "y\n"]),
        ("feature-names", ["x", "y" * 301]),
        ("feature-names", ["y", "x"]),
        ("feature-names", [1, 2]),
        ("features-sha256", "00"),
    ]
    for key, value in changes:
        record = about.to_record()
        record.config_records[INFO][key] = value
        with pytest.raises(PayloadError, match=r"feature"):
            Description.from_record(record)
    agreed = ClassAgreement(0, 2, ("a",), ("x", "y"))
    assert ClassAgreement.from_record(agreed.to_record()) == agreed


def test_check_graph_shows_what_the_server_learns_of_the_names(
    graphs: list[ClientGraph], tmp_path: Path
) -> None:
    path = tmp_path / "a.npz"
    save_client_graph(path, graphs[0])
    for shared in (False, True):
        report = inspect_graph(path, {"share-feature-names": shared})
        assert report.description is not None
        learned = learned_by_server(report.description)
        assert learned["feature-names"] == (list(NAMES) if shared else [])
        assert learned["features-sha256"] == hash_names(NAMES)
