"""The README and the guides: their code runs, and their commands exist."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import flower_fgl
from flower_fgl import METHODS, simulate
from flower_fgl.cli.new import write_package
from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.core import extensions
from flower_fgl.core.extensions import known_names
from flower_fgl.core.settings import DATASETS
from flower_fgl.methods import Method
from flower_fgl.strategies.base import FglStrategy
from flower_fgl.testing import MethodCase
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
def example(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> Iterator[Path]:
    """Write the package of the method guide, and add its method to METHODS."""
    package = tmp_path_factory.mktemp("package") / "my-method"
    write_package("my-method", package)
    monkeypatch.syspath_prepend(package)
    row = importlib.import_module("my_method").METHOD
    empty: dict[str, Any] = {"methods": {}, "backbones": {}, "datasets": {}}
    monkeypatch.setattr(extensions, "_registered", empty)
    monkeypatch.setitem(METHODS.own, row.name, row)
    yield package
    for name in [n for n in sys.modules if n.partition(".")[0] == "my_method"]:
        del sys.modules[name]


def test_the_method_guide_shows_the_package_that_new_writes(example: Path) -> None:
    shown = {
        block.file: block.text.partition("\n")[2]
        for language in ("toml", "python")
        for block in reversed(blocks(METHOD_GUIDE, language))
    }
    for path in example.rglob("*.*"):
        name = str(path.relative_to(example))
        if path.suffix in (".py", ".toml"):
            assert shown[name] == path.read_text("utf-8"), f"{name} on the page"


def test_the_other_code_of_the_method_guide_runs(example: Path) -> None:
    notebook: dict[str, Any] = {}
    for block in blocks(METHOD_GUIDE, "python"):
        if block.reason is not None:
            continue
        assert block.file, f"{block.place} has no first line with its file's name"
        if block.file == "notebook.py":
            exec(compile(block.text, block.place, "exec"), notebook)
        elif not (example / block.file).exists():
            (example / block.file).write_text(block.text, "utf-8")
    payload = importlib.import_module("my_method.protocol").WeightsAndLoss
    sent = payload({"a": torch.ones(2, 3)}, torch.tensor([0.5]))
    back = payload.from_record(sent.to_record(), ({"a": (2, 3)}, (1,)))
    assert torch.equal(back.tensors["a"], sent.tensors["a"])
    assert back.num_bytes == 28
    assert {"jumping", "SOURCE"} <= set(notebook)


def test_the_dataset_of_the_method_guide_delays_no_command() -> None:
    """A dataset's row that imports torch gets a warning in every command."""
    (block,) = [
        b for b in blocks(METHOD_GUIDE, "python") if b.file == "my_method/data.py"
    ]
    code = f"{block.text}\nimport sys\nprint(SOURCE.title, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "Ring of cliques False\n", done.stderr


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
    assert first_cells("field of the case") == {f.name for f in fields(MethodCase)}


def small_simulate(
    method: str = "fedavg", dataset: Any = "synthetic", **settings: Any
) -> Any:
    """Run ``simulate`` with a guide's arguments, but shortly and on a small graph."""
    if isinstance(dataset, str) and dataset not in known_names("datasets"):
        assert dataset in DATASETS, dataset
        dataset = "synthetic"
    settings = {key.replace("_", "-"): value for key, value in settings.items()}
    return simulate(method, dataset, **{**settings, **tiny(method)})


@pytest.mark.thorough
@every_guide
def test_python_blocks_run(
    guide: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_fgl, "simulate", small_simulate, raising=False)
    empty: dict[str, Any] = {"methods": {}, "backbones": {}, "datasets": {}}
    monkeypatch.setattr(extensions, "_registered", empty)
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
@pytest.mark.thorough
@every_guide
def test_commands_of_bash_blocks_exist(
    guide: Path, folder: Path, request: pytest.FixtureRequest
) -> None:
    if guide == METHOD_GUIDE:
        request.getfixturevalue("example")
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


@pytest.mark.thorough
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
