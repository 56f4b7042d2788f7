"""Wrong names suggest the right ones; booleans and home folders are understood."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_fgl.cli.arguments import read_values
from flower_fgl.cli.main import app
from flower_fgl.core.atomic import data_folder
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.core.node_settings import parse_node_config
from flower_fgl.core.options import Scalar, load_toml, nearest
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.lab.experiments.experiment_file import read_experiment
from flower_fgl.lab.results import Run
from flower_fgl.lab.tables.compare import select_runs
from flower_fgl.methods import parse_config
from flower_fgl.runs.saved_model import load_model
from flower_fgl.runs.state_files import state_folder


def message(values: dict[str, Scalar]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(values)
    return str(error.value)


def test_the_hint_stands_before_the_list() -> None:
    assert nearest("fedpox", ["fedprox", "moon"]) == (
        'Did you mean "fedprox"? Known: fedprox, moon.'
    )
    assert nearest("zzz", ["b", "a"]) == "Known: a, b."
    tasks = ["edge", "graph", "inductive", "link"]
    hint = nearest("link-prediction", tasks)
    assert hint.startswith('Did you mean "link"? Known: edge, ')
    for name, known in (
        ("FedPG", "fedpg"),
        ("FED-PUB", "fed-pub"),
        ("FedSage+", "fedsage+"),
    ):
        hint = nearest(name, ["fedpg", "fed-pub", "fedsage+", "fedper"])
        assert hint.startswith(f'Did you mean "{known}"?')
    assert nearest("round", ["round-patience", "rounds"]).startswith(
        'Did you mean "rounds"?'
    )
    assert nearest("gnc", ["gcn", "gin", "sgc"]).startswith('Did you mean "gcn"?')
    widths = ["hidden-channels", "hops"]
    assert nearest("hidden", widths).startswith('Did you mean "hidden-channels"?')
    far = nearest("learning-rate", ["link-features", "lr"])  # nothing alike
    assert far == "Known: link-features, lr."
    with pytest.raises(RunError) as error:
        parse_node_config({"min-clas-count": 2})
    text = str(error.value)
    assert text.index('Did you mean "min-class-count"?') < text.index("Known: ")


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"fedprox.lr": 0.1}, '"fedprox.lr". Did you mean "lr"?'),
        ({"method": "fedpg", "fedprox.alpha": 0.1}, 'Did you mean "fedpg.alpha"?'),
        ({"method": "fedpg", "mu": 0.1}, 'Did you mean "fedpg.mu"?'),
        ({"mu": 0.1}, 'Did you mean "fedpg.mu" (or fedprox.mu, moon.mu)?'),
        ({"fedpox.mu": 0.1}, '"fedpox.…". Did you mean "fedprox"?'),
        ({"config.lr": 0.1}, '"config.lr". Did you mean "lr"?'),
        ({"local_epochs": 2}, 'Did you mean "local-epochs"?'),
        ({"local.lr": 0.1}, "local has no settings of its own"),
        (
            {"method": "fedprox", "fedprox.m": 0.1},
            'Did you mean "fedprox.mu"? Known: f',
        ),
        ({"fedprox": 0.1}, '"fedprox" is a table of settings. Set one of its keys: '),
    ],
)
def test_a_setting_in_a_wrong_table_suggests_the_right_one(
    values: dict[str, Scalar], hint: str
) -> None:
    assert hint in message(values)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[confg]\nlr = 0.1\n", 'unknown table [confg]. Did you mean "config"?'),
        ("[gird]\nlr = [0.1]\n", 'unknown table [gird]. Did you mean "grid"?'),
        ("[fedpox]\nmu = 0.1\n", 'unknown table [fedpox]. Did you mean "fedprox"?'),
        (
            "[config]\n[grids]\nlr = [1]\n",
            'grids in an experiment file. Did you mean "g',
        ),
        ("[config.fedpox]\nmu = 0.1\n", 'Did you mean "fedprox"?'),
    ],
)
def test_a_wrong_table_of_an_experiment_file_suggests_the_right_one(
    text: str, hint: str, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(text)
    result = CliRunner().invoke(app, ["run", str(tmp_path / "a.toml")])
    assert isinstance(result.exception, ConfigError)
    assert hint in str(result.exception)


@pytest.mark.parametrize(
    ("values", "hint"),
    [
        ({"method": "FedPG"}, 'Unknown method "FedPG". Did you mean "fedpg"?'),
        ({"method": "FED-PUB"}, 'Did you mean "fed-pub"?'),
        ({"dataset": "Cora"}, 'Unknown dataset "Cora". Did you mean "cora"?'),
        ({"dataset": "CiteSeer"}, 'Did you mean "citeseer"?'),
        ({"model": "GCN"}, 'Did you mean "gcn"?'),
        ({"round": 5}, 'Unknown setting "round". Did you mean "rounds"?'),
    ],
)
def test_names_as_papers_write_them_suggest_ours(
    values: dict[str, Scalar], hint: str
) -> None:
    assert hint in message(values)


@pytest.mark.parametrize("key", ["method", "dataset", "model"])
def test_an_unknown_row_may_be_an_entry_point_that_pip_has_not_read(key: str) -> None:
    assert message({key: "mine"}).endswith(
        "a new entry point needs a reinstall of the package (pip install -e .)."
    )


@pytest.mark.parametrize("text", ["true", "True", "false", "False"])
def test_python_and_toml_booleans_are_the_same(text: str, tmp_path: Path) -> None:
    expected = text.lower() == "true"
    for value in (text, expected):
        values: dict[str, Scalar] = {"clients": 3, "share-class-counts": value}
        assert parse_config(values).share_class_counts is expected
    assert parse_config({"stacked": text}).stacked == text.lower()
    assert read_values("share-class-counts", text) == [expected]
    assert read_values("share-class-counts", f"[{text}]") == [expected]
    assert (
        parse_node_config({"share-class-counts": text}).share_class_counts is expected
    )
    (tmp_path / "a.toml").write_text(f"[config]\nshare-class-counts = {text}  # x\n")
    (run,) = read_experiment(tmp_path / "a.toml").runs()
    assert run.settings["share-class-counts"] is expected


def test_a_text_that_holds_a_boolean_stays_as_it_is() -> None:
    text = 'title = "a = True"\nvalues = [True, False]'
    assert load_toml(text) == {"title": "a = True", "values": [True, False]}
    with pytest.raises(ConfigError, match="of type bool"):
        parse_config({"share-class-counts": "yes"})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("key", ["output-dir", "run-dir", "state-dir", "data-dir"])
def test_a_tilde_in_a_setting_is_the_home_folder(key: str, home: Path) -> None:
    assert parse_config({key: "~/place"}).flat()[key] == str(home / "place")
    assert parse_config({"dataset": "~/a.npz"}).dataset == str(home / "a.npz")


def test_a_tilde_in_a_node_config_is_the_home_folder(home: Path) -> None:
    keys = ("graph", "model-dir", "state-dir", "identity", "peers")
    found = parse_node_config(dict.fromkeys(keys, "~/x"))
    assert {getattr(found, key.replace("-", "_")) for key in keys} == {str(home / "x")}
    assert state_folder({"state-dir": "~/states"}, "") == str(home / "states")


def test_a_tilde_in_an_option_is_the_home_folder(home: Path) -> None:
    run = CliRunner().invoke
    result = run(app, ["identity", "~/owner.key"])
    assert (home / "owner.key").is_file(), result.output
    for arguments in (
        ["check-graph", "~/none.npz"],
        ["run", "~/none.toml"],
        ["report", "~/none"],
        ["run", "--resume", "~/none"],
    ):
        result = run(app, arguments)
        assert str(home / "none") in f"{result.output}{result.exception}"
    assert not os.path.exists("~")


def test_a_tilde_in_the_python_interface_is_the_home_folder(home: Path) -> None:
    for read in (Run.load, select_runs, lambda text: load_model(Path(text))):
        with pytest.raises(RunError, match=str(home / "none")):
            read("~/none")


def test_a_table_in_place_of_its_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id,label\n")
    with pytest.raises(DataError, match=f'Give the folder, e.g. "{tmp_path}"'):
        load_graph_file(tmp_path / "nodes.csv")
    result = CliRunner().invoke(app, ["run", "--dataset", "nodes.csv"])
    assert "or a folder with nodes.csv and edges.csv" in str(result.exception)


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "a.npz").write_bytes(b"")
    with pytest.raises(DataError, match=r"folder of graph files.*graphs/a\.npz"):
        load_graph_file(tmp_path / "graphs")
    (tmp_path / "nodes.csv").mkdir()
    with pytest.raises(DataError, match=r"nodes\.csv is a folder, but must be a CSV"):
        load_graph_file(tmp_path)


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(
        DataError, match=r"data-dir must name a folder.*which is a file"
    ):
        data_folder(str(tmp_path / "a"))
    with pytest.raises(RunError, match="is a file, but must be a folder"):
        load_model(tmp_path / "a")
    for arguments in (
        ["export", str(tmp_path / "a")],
        ["predict", "--model", "m", "--graph", "g", "--output", str(tmp_path)],
        ["partition", "--out", str(tmp_path)],
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "is a file" in result.output or "is a directory" in result.output


def test_a_csv_table_beside_the_user_names_a_folder_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("1,2\n")
    with pytest.raises(DataError, match=r'Give the folder, e\.g\. "\."\.'):
        load_graph_file("a.csv")


def test_an_unknown_table_of_an_experiment_names_the_one_for_settings(
    tmp_path: Path,
) -> None:
    (tmp_path / "e.toml").write_text('[run]\nmethod = "fedavg"\nclients = 2\n')
    with pytest.raises(ConfigError, match=r"unknown table \[run\].*into \[config\]"):
        read_experiment(tmp_path / "e.toml")
