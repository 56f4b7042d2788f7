"""``flower-fgl new`` writes a package with a method that runs."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flower_fgl import register, simulate
from flower_fgl.cli.main import app
from flower_fgl.cli.new import write_package
from flower_fgl.core import extensions
from flower_fgl.core.errors import ConfigError
from flower_fgl.testing import SMALL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a package into a folder of the path; forget its modules afterwards."""
    write_package("mean-shift2", tmp_path / "package")
    monkeypatch.syspath_prepend(tmp_path / "package")
    empty: dict[str, Any] = {"methods": {}, "backbones": {}, "datasets": {}}
    monkeypatch.setattr(extensions, "_registered", empty)
    yield tmp_path / "package"
    for name in [n for n in sys.modules if n.partition(".")[0] == "mean_shift2"]:
        del sys.modules[name]


def test_the_package_has_the_names_of_the_method(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] == "mean-shift2"
    entries = project["entry-points"]["flower_fgl.methods"]
    assert entries == {"mean-shift2": "mean_shift2:METHOD"}
    texts = {str(p.relative_to(folder)): p.read_text("utf-8") for p in files(folder)}
    assert "class MeanShift2(FedAvg)" in texts["mean_shift2/strategy.py"]
    for text in [*texts, *texts.values()]:
        assert "my-method" not in text
        assert "my_method" not in text
        assert "MyMethod" not in text
    for name, text in texts.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_method_runs(folder: Path, tmp_path: Path) -> None:
    row = importlib.import_module("mean_shift2").METHOD
    register(method=row)
    small = {**SMALL, "clients": 3, "output_dir": str(tmp_path / "runs")}
    run = simulate("mean-shift2", **small)
    assert run.status == "completed"
    other = simulate("mean-shift2", **small, **{"mean-shift2": {"penalty_weight": 0.5}})
    assert other.last != run.last


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["new", *words])


def test_the_command_says_what_to_do_next(tmp_path: Path) -> None:
    target = tmp_path / "there"
    done = invoke("my-method", "--folder", str(target))
    assert done.exit_code == 0, done.output
    written = {str(path) for path in files(target)}
    listed = {line.strip() for line in done.output.splitlines()} & written
    assert listed == written
    assert f"cd {target}" in done.output
    assert "flower-fgl run --method my-method" in done.output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fedavg", "comes from flower-fgl. Choose another name"),
        ("My_Method", "lower-case letters, digits and single - .* Got 'My_Method'"),
        ("a--b", "Got 'a--b'"),
        ("fedx+", "Got 'fedx\\+'"),
        ("synthetic", "not be synthetic"),
        ("lr", '"lr" is a setting of every run'),
        ("json", "would be called json, but this is the name of another module"),
        ("class", "a word of Python"),
        ("tests", "would be called tests"),
    ],
)
def test_names_that_cannot_be_used_are_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_package(name, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_folders_with_content_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    for folder in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ConfigError, match=r"exists already.*--folder"):
            write_package("my-method", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ConfigError, match=r"Cannot write .*mine\.txt"):
        write_package("my-method", tmp_path / "mine.txt" / "below")
