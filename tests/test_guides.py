"""The README and the guides: their code runs, and their commands exist."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import flower_fgl
from flower_fgl import METHODS, simulate
from flower_fgl.cli.main import app, parse_settings
from flower_fgl.client_apps.base import FglClientApp
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.core.config import RunConfig, pyproject_table
from flower_fgl.core.settings import DATASETS
from flower_fgl.methods import Method
from flower_fgl.runs.files import flatten
from flower_fgl.simulation.experiments import Experiment, read_experiment
from flower_fgl.strategies.base import FglStrategy
from tests.conftest import SMALL
from tests.support.guides import PLACEHOLDER, ROOT, Block, blocks, commands, guides

METHOD_GUIDE = ROOT / "docs" / "adding-a-method.md"
TINY = ("rounds=2", "hidden-channels=8", "synthetic.nodes=120", "synthetic.blocks=6")
INPUTS = {"check-graph": ["graph"], "report": ["runs"], "predict": ["model", "graph"]}
"""Commands that are executed if these files exist, because an earlier one wrote them."""

every_guide = pytest.mark.parametrize("guide", guides(), ids=lambda path: path.name)


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
        text = block.text
        if "name" not in {f.name for f in fields(Method)}:  # a row without its name
            text = re.sub(r'^    name=".*",\n', "", text, flags=re.MULTILINE)
        assert block.file, f"{block.place} has no first line with its file's name"
        path = importable / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    rows = [b for b in files if b.file.startswith("flower_fgl/methods/")]
    assert len(rows) == 1
    stem = Path(rows[0].file).stem
    row = importlib.import_module(f"flower_fgl.methods.{stem}").METHOD
    monkeypatch.setitem(METHODS, stem, row)  # type: ignore[arg-type]
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
    assert first_cells("field") | {"name"} == {f.name for f in fields(Method)} | {"name"}


def small_simulate(
    method: str = "fedavg", dataset: str = "synthetic", **settings: Any
) -> Any:
    """Run ``simulate`` with a guide's arguments on a tiny synthetic graph."""
    assert dataset in DATASETS, dataset
    tiny = {**SMALL, "synthetic": {**SMALL["synthetic"], "nodes": 400}}  # type: ignore[dict-item]
    return simulate(method, "synthetic", **{**settings, **tiny})


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
@cache
def known_keys() -> frozenset[str]:
    return frozenset(key for key, _ in flatten(pyproject_table(METHODS)))


def check_config(values: Mapping[str, Any], place: str) -> None:
    """Check keys, and values unless one of them is a placeholder."""
    unknown = sorted(set(values) - known_keys())
    assert not unknown, f"{place}: unknown settings {unknown}"
    if PLACEHOLDER not in "".join(map(str, values.values())):
        RunConfig.parse(values, METHODS)


def parse(command: Any, words: list[str], place: str) -> tuple[str, dict[str, Any]]:
    """Parse words with a typer program; return the command's name and its parameters."""
    name = ""
    while hasattr(command, "commands"):
        assert words, place
        assert words[0] in command.commands, f"{place}: unknown command {words[0]}"
        name, words = words[0], words[1:]
        command = command.commands[name]
    try:
        return name, dict(command.make_context(name, list(words)).params)
    except Exception as error:  # click's, which typer may bring along itself
        raise AssertionError(f"{place}: {name} {words}: {error}") from error


def check_own(words: list[str], block: Block) -> None:
    """Check a command of flower-fgl and execute it if it takes a moment."""
    name, given = parse(typer.main.get_command(app), words, block.place)
    options = parse_settings(given.get("settings") or [])
    for key in ("method", "dataset", "clients", "rounds", "seed"):
        if name in ("run", "partition", "export") and given.get(key) is not None:
            options[key] = given[key]
    if given.get("rule"):
        options["partition"] = given["rule"]
    file = given.get("experiment")
    if file is None:
        check_config(options, block.place)
    else:
        path = next((p for p in (Path(file), ROOT / file) if p.exists()), None)
        is_ours = str(file).startswith("experiments/")
        assert path or not is_ours, f"{block.place}: no file {file}"
        if path is not None:
            check_experiment(read_experiment(path), options, given, block.place)
    if block.reason is None and is_cheap(name, given, options):
        execute(name, words, given, options, block.place)


def check_experiment(
    experiment: Experiment, options: dict[str, Any], given: dict[str, Any], place: str
) -> None:
    experiment = experiment.with_options(options)
    if given["case"]:
        experiment = experiment.with_cases(given["case"])
    check_config(experiment.runs()[0].settings, place)
    for case in experiment.cases:
        unknown = set(case) - known_keys() - {"name"}
        assert not unknown, f"{place}: {unknown}"


def is_cheap(name: str, given: dict[str, Any], options: dict[str, Any]) -> bool:
    if name in ("methods", "settings", "datasets"):
        return True
    if name in ("run", "partition", "export"):
        is_stored = given.get("experiment") or given.get("resume")
        is_small = options.get("dataset", "synthetic") == "synthetic"
        return is_small and not is_stored and PLACEHOLDER not in str(options)
    paths = [given[key] for key in INPUTS.get(name, [])]
    flat = [p for path in paths for p in (path if isinstance(path, tuple | list) else [path])]
    return bool(flat) and all(Path(p).exists() for p in flat)


def execute(
    name: str,
    words: list[str],
    given: dict[str, Any],
    options: dict[str, Any],
    place: str,
) -> None:
    """Execute a command in the working folder; a run is a tiny one in this process."""
    words = list(words)
    if name == "run":
        settings = options | parse_settings(TINY)
        words = ["run", "--engine", "local", "--quiet"]
        for key, value in settings.items():
            words += ["--set", f"{key}={value!r}".replace("True", "true")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{place}: {words}: {result.output}{result.exception}"


@cache
def flower_parser(program: str) -> Any:
    module = importlib.import_module(
        {
            "flower-superlink": "flwr.superlink.cli.flower_superlink",
            "flower-supernode": "flwr.supernode.cli.flower_supernode",
        }[program]
    )
    short = program.removeprefix("flower-")
    parser = getattr(module, f"_parse_args_run_{short}")()
    parser.allow_abbrev = False
    return parser


def check_flower_node(program: str, words: list[str], block: Block) -> None:
    try:
        arguments = flower_parser(program).parse_args(words)
    except SystemExit as error:
        raise AssertionError(f"{block.place}: {program} refuses {words}") from error
    config = getattr(arguments, "node_config", None)
    if config:
        unknown = set(flower_values(config)) - node_config_keys()
        assert not unknown, f"{block.place}: {unknown} are not in the guide's table"


def flower_values(text: str) -> dict[str, Any]:
    from flwr.common.config import parse_config_args

    return dict(parse_config_args([text]))


@cache
def node_config_keys() -> frozenset[str]:
    """Return the keys of the deployment guide's table; the client half reads each."""
    text = (ROOT / "docs" / "deployment.md").read_text("utf-8")
    table = text.partition("Keys of `--node-config`:")[2].split("\n\n")[1]
    keys = set(re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^\|[^|]*", table, re.M))))
    sources = (ROOT / "flower_fgl" / "client_apps").rglob("*.py")
    code = "".join(path.read_text("utf-8") for path in sources)
    assert keys
    assert {key for key in keys if f'"{key}"' not in code} <= {"num-partitions"}
    return frozenset(keys)


def check_flwr(words: list[str], block: Block) -> None:
    from flwr.cli.app import app as flwr

    name, given = parse(typer.main.get_command(flwr), words, block.place)
    if name == "run" and given.get("run_config_overrides"):
        values = flower_values(" ".join(given["run_config_overrides"]))
        check_config(values, block.place)


def check_script(words: list[str], block: Block) -> None:
    path = ROOT / words[0]
    assert path.exists(), f"{block.place}: no script {words[0]}"
    text = path.read_text("utf-8")
    for word in words[1:]:
        if word.startswith("--"):
            option = word.partition("=")[0]
            assert f'"{option}"' in text, f"{block.place}: {words[0]} has no {option}"


CHECKS: dict[str, Callable[[list[str], Block], None]] = {
    "flower-fgl": check_own,
    "flwr": check_flwr,
    **{p: partial(check_flower_node, p) for p in ("flower-superlink", "flower-supernode")},
}


@every_guide
def test_commands_of_bash_blocks_exist(guide: Path, folder: Path) -> None:
    for block in blocks(guide, "toml"):  # a command may read one
        if block.file:
            Path(block.file).write_text(block.text, "utf-8")
    for block in blocks(guide, "bash"):
        for command in commands(block):
            program, *words = command.words or [""]
            if program == "python" and words[:2] == ["-m", "flower_fgl"]:
                check_own(words[2:], block)
            elif program == "python" and words[0].endswith(".py"):
                check_script(words, block)
            elif program in CHECKS:
                CHECKS[program](words, block)
