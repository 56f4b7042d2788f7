"""Experiment files that extend another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_fgl.cli.main import app
from flower_fgl.core.errors import ConfigError
from flower_fgl.lab.experiments.experiment_file import read_experiment, standalone_text

BASE = """
title = "base"
draws = 2
[config]
clients = 3
rounds = 1
synthetic.nodes = 120
[[case]]
name = "a"
method = "local"
[[case]]
name = "b"
method = "fedprox"
fedprox.mu = 0.5
[grid]
synthetic.classes = [3, 4]
lr = [0.1, 0.2]
[tune]
lr = {low = 0.1, high = 1.0, log = true}
weight-decay = [0.0, 0.1]
fedprox.mu = [0.1, 0.5]
"""
OWN = """
extends = "../base.toml"
title = "own"
[config]
rounds = 2
synthetic.block-skew = 0.3
[tune]
lr = {low = 0.5, high = 1.5, step = 0.5}
fedprox.mu = []
[published]
"b, classes=4, lr=0.2" = 61.5
"""
WHOLE = """
title = "own"
draws = 2
[config]
clients = 3
rounds = 2
synthetic.nodes = 120
synthetic.block-skew = 0.3
[[case]]
name = "a"
method = "local"
[[case]]
name = "b"
method = "fedprox"
fedprox.mu = 0.5
[grid]
synthetic.classes = [3, 4]
lr = [0.1, 0.2]
[tune]
lr = {low = 0.5, high = 1.5, step = 0.5}
weight-decay = [0.0, 0.1]
fedprox.mu = []
[published]
"b, classes=4, lr=0.2" = 61.5
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a file that extends another one in the folder above."""
    (tmp_path / "base.toml").write_text(BASE)
    folder = tmp_path / "datasets"
    folder.mkdir()
    (folder / "x.toml").write_text(OWN)
    return folder / "x.toml"


def test_a_file_that_extends_another_is_the_experiment_of_both(
    own: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "x.toml"
    whole.write_text(WHOLE)
    assert read_experiment(own) == read_experiment(whole)
    assert read_experiment(own).runs() == read_experiment(whole).runs()


def test_several_files_may_extend_each_other_in_a_line(own: Path) -> None:
    top = own.with_name("top.toml")
    top.write_text('extends = "x.toml"\n[[case]]\nname = "c"\nmethod = "fedavg"\n')
    text = own.read_text()
    own.write_text(text.partition("[published]")[0].replace("fedprox.mu = []\n", ""))
    found = read_experiment(top)
    assert [case["name"] for case in found.cases] == ["c"]
    assert found.title == "own"
    assert found.config["clients"] == 3
    assert found.config["rounds"] == 2


def test_the_copy_beside_the_runs_needs_no_other_file(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "other" / "x.toml"
    copy.parent.mkdir()
    copy.write_text(standalone_text(own))
    assert read_experiment(copy) == read_experiment(own)
    assert read_experiment(copy).runs() == read_experiment(own).runs()
    monkeypatch.chdir(tmp_path)
    options = ["--engine", "local", "--draws", "1", "--case", "a"]
    done = CliRunner().invoke(app, ["run", str(own), *options])
    assert done.exit_code == 0, done.output
    assert read_experiment(tmp_path / "runs" / "x" / "x.toml").title == "own"


def test_a_file_without_a_base_is_copied_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "base.toml"
    file.write_text(f"# a comment\n{BASE}")
    assert standalone_text(file) == file.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "none.toml"', r"none\.toml, which .*x\.toml extends: No such file"),
        ("extends = 3", r"extends must be the path .* got 3"),
        ('extends = ""', "extends must be the path"),
        ('extends = "x.toml"', r"extend each other: .*x\.toml extends .*x\.toml"),
        ('extends = "back.toml"', r"x\.toml extends .*back\.toml extends .*x\.toml"),
        ('extends = "garbled.toml"', r"garbled\.toml is not valid TOML"),
        ('extends = "paper.toml"', r"paper\.toml, which has \[published-macro-f1\]"),
        ('extends = "."', "Is a directory"),
    ],
)
def test_a_wrong_base_is_named(own: Path, text: str, message: str) -> None:
    own.write_text(f"{text}\n[config]\nrounds = 1\n")
    own.with_name("back.toml").write_text('extends = "x.toml"\n')
    own.with_name("garbled.toml").write_text("[")
    own.with_name("paper.toml").write_text("[published-macro-f1]\nlocal = 50\n")
    with pytest.raises(ConfigError, match=message):
        read_experiment(own)


def test_the_runs_of_a_file_are_complete_after_it_is_split(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "x.toml"
    whole.write_text(WHOLE)
    monkeypatch.chdir(tmp_path)
    options = ["--engine", "local", "--draws", "1", "--case", "a"]
    for file, is_complete in ((whole, False), (own, True)):
        done = CliRunner().invoke(app, ["run", str(file), *options])
        assert done.exit_code == 0, done.output
        assert ("already complete" in done.output) == is_complete
