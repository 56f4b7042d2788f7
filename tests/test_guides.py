"""The README and the guides: their code runs, and their commands exist."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import flower_fgl
from flower_fgl import METHODS, simulate
from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.core.settings import DATASETS
from flower_fgl.methods import Method
from flower_fgl.strategies.base import FglStrategy
from tests.support.guide_commands import check_command, tiny
from tests.support.guides import ROOT, Block, blocks, commands, guides

METHOD_GUIDE = ROOT / "docs" / "adding-a-method.md"

every_guide = pytest.mark.parametrize(
    "guide", guides(), ids=lambda path: str(path.relative_to(ROOT))
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------- Python blocks
@pytest.fixture
def importable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let ``folder/flower_fgl/<package>`` extend the packages of flower_fgl."""
    before = set(sys.modules)
    for path in (ROOT / "flower_fgl").glob("*/__init__.py"):
        package = importlib.import_module(f"flower_fgl.{path.parent.name}")
        extended = [*package.__path__, str(folder / "flower_fgl" / path.parent.name)]
        monkeypatch.setattr(package, "__path__", extended)
    yield folder
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if str(folder) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def test_the_example_method_of_the_guide_runs(
    importable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [b for b in blocks(METHOD_GUIDE, "python") if b.reason is None]
    for block in files:
        assert block.file, f"{block.place} has no first line with its file's name"
        path = importable / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, "utf-8")
    rows = [b for b in files if b.file.startswith("flower_fgl/methods/")]
    assert len(rows) == 1
    stem = Path(rows[0].file).stem
    row = importlib.import_module(f"flower_fgl.methods.{stem}").METHOD
    monkeypatch.setitem(METHODS, row.name, row)
    result = runpy.run_path(files[-1].file)["run"]
    trained = [r["round"] for r in result.rounds if r["phase"] == "train"]
    assert trained == [1, 2]
    assert 0 <= result.best["test"]["accuracy"] <= 1


def test_the_method_guide_names_hooks_and_fields_that_exist() -> None:
    text = METHOD_GUIDE.read_text("utf-8")

    def first_cells(header: str) -> set[str]:
        table = text.partition(f"| {header} |")[2].partition("\n\n")[0]
        cells = [line.split("|")[1] for line in table.splitlines()[2:]]
        return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}

    owners = {
        "server hook": FglStrategy,
        "client hook": FglClientApp,
        "FedAvg hook": FedAvgClientApp,
    }
    for header, owner in owners.items():
        names = first_cells(header)
        assert names, f"no table of {header}s"
        assert {n for n in names if not hasattr(owner, n)} == set()
    assert first_cells("field") == {f.name for f in fields(Method)}


def small_simulate(
    method: str = "fedavg", dataset: str = "synthetic", **settings: Any
) -> Any:
    """Run ``simulate`` with a guide's arguments, but shortly and on the synthetic graph."""
    assert dataset in DATASETS, dataset
    settings = {key.replace("_", "-"): value for key, value in settings.items()}
    return simulate(method, "synthetic", **{**settings, **tiny(method)})


@every_guide
def test_python_blocks_run(
    guide: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_fgl, "simulate", small_simulate, raising=False)
    namespace: dict[str, Any] = {}
    for block in blocks(guide, "python"):
        if block.reason is not None or guide == METHOD_GUIDE:
            compile(block.text, block.place, "exec")
            continue
        exec(compile(block.text, block.place, "exec"), namespace)


@every_guide
def test_blocks_that_are_not_executed_say_why(guide: Path) -> None:
    for language in ("python", "bash"):
        for block in blocks(guide, language):
            assert block.reason is None or block.reason.strip(), block.place


@every_guide
def test_toml_blocks_are_toml(guide: Path) -> None:
    for block in blocks(guide, "toml"):
        tomllib.loads(block.text)


@every_guide
def test_files_named_in_the_text_exist(guide: Path) -> None:
    text = guide.read_text("utf-8")
    folders = "flower_fgl|examples|benchmarks|experiments|tests|scripts"
    named = set(re.findall(rf"\b(?:{folders})/[\w./+-]+\.(?:py|toml|j2)\b", text))
    if guide == METHOD_GUIDE:
        named -= {block.file for block in blocks(guide, "python")}
    assert {name for name in named if not (ROOT / name).exists()} == set()


# ----------------------------------------------------------------------------- commands
@every_guide
def test_commands_of_bash_blocks_exist(guide: Path, folder: Path) -> None:
    for block in blocks(guide, "toml"):  # a command may read one
        if block.file:
            Path(block.file).write_text(block.text, "utf-8")
    for block in blocks(guide, "bash"):
        for command in commands(block):
            check_command(command)


def test_the_guides_use_every_program_that_is_checked() -> None:
    bash = [block for guide in guides() for block in blocks(guide, "bash")]
    programs = {
        command.words[0] for b in bash for command in commands(b) if command.words
    }
    checked = {"flower-fgl", "flwr", "flower-superlink", "flower-supernode", "python"}
    assert checked <= programs


@pytest.mark.parametrize(
    "text",
    [
        "flower-fgl runs",
        "flower-fgl run --metod fedavg",
        "flower-fgl run --set roundz=2",
        "flower-fgl run --method fedprox --set fedprox.mu=many",
        "flower-fgl run experiments/none.toml",
        "flower-fgl settings fedabc",
        "flower-fgl predict --model a --graph b",
        "FLWR_HOME=x flwr run . --run-config 'clients=3 method=\"fedabc\"'",
        "flwr run . --streams",
        "flower-superlink --insecure --databases x",
        "flower-supernode --insecure --node-config 'graf=\"a.npz\"'",
        "flower-fgl rehearse folder --ssl",
        "python benchmarks/none.py",
        "python benchmarks/round_path.py --ssl",
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str, folder: Path) -> None:
    block = Block(ROOT / "README.md", 1, "bash", f"{text}\n", None)
    (command,) = commands(block)
    with pytest.raises(AssertionError, match=r"README\.md:1"):
        check_command(command)
