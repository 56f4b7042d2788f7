"""Checks of the guides' commands against the programs themselves."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import typer
from flwr.common.config import parse_config_args
from typer.testing import CliRunner

from flower_fgl import METHODS
from flower_fgl.cli.arguments import read_options
from flower_fgl.cli.main import app
from flower_fgl.core.config import RunConfig, pyproject_table
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.node_settings import read_node_config
from flower_fgl.core.options import kebab
from flower_fgl.lab.experiments.experiment_file import Experiment, read_experiment
from flower_fgl.runs.files import flatten_config
from tests.support.guides import PLACEHOLDER, ROOT, Block, Command
from tests.support.short_runs import SHORT

NODES = {
    "flower-superlink": ("flwr.superlink.cli.flower_superlink", "superlink"),
    "flower-supernode": ("flwr.supernode.cli.flower_supernode", "supernode"),
}
INPUTS = {"check-graph": ["graph"], "report": ["runs"], "predict": ["model", "graph"]}
"""Commands that are executed if these files exist, because an earlier one wrote them."""
TINY = {"rounds": 2, "local-epochs": 1, "hidden-channels": 8}
"""What a guide's run is reduced to."""


def check_command(command: Command) -> None:
    """Check that a command and its options exist; execute it if that takes a moment.

    Raises
    ------
    AssertionError
        Naming the guide, the line, and what does not exist.
    """
    program, *words = command.words or ("",)
    if program == "python" and words[:2] == ["-m", "flower_fgl"]:
        program, words = "flower-fgl", words[2:]
    if program == "flower-fgl":
        _check_own(words, command.block)
    elif program == "flwr":
        _check_flwr(words, command.block)
    elif program in NODES:
        _check_node(program, words, command.block)
    elif program == "python" and words and words[0].endswith(".py"):
        _check_script(words, command.block)


def tiny(method: str) -> dict[str, int]:
    """Return settings that make a run of the method short."""
    return {**TINY, "rounds": 1} if METHODS[method].is_one_shot else TINY


@cache
def _known_keys(methods: tuple[str, ...]) -> frozenset[str]:
    """Return every key of the run config with the present table of methods."""
    return frozenset(key for key, _ in flatten_config(pyproject_table(METHODS)))


def _check_config(values: Mapping[str, Any], place: str) -> None:
    """Check keys, and values unless one of them is a placeholder."""
    unknown = sorted(set(values) - _known_keys(tuple(METHODS)))
    assert not unknown, f"{place}: unknown settings {unknown}"
    if PLACEHOLDER not in str(values):
        try:
            RunConfig.parse(values, METHODS)
        except Exception as error:
            raise AssertionError(f"{place}: {error}") from error


_program = cache(typer.main.get_command)


def _parse(command: Any, words: list[str], place: str) -> tuple[str, dict[str, Any]]:
    """Parse words with a typer program; return the command's name and its parameters."""
    name = ""
    while hasattr(command, "commands"):
        name, *words = words or [""]
        assert name in command.commands, f"{place}: unknown command {name}"
        command = command.commands[name]
    try:
        return name, dict(command.make_context(name, words).params)
    except Exception as error:  # click's, of which typer may have a copy
        raise AssertionError(f"{place}: {name} {words}: {error}") from error


def _check_own(words: list[str], block: Block) -> None:
    """Check a command of flower-fgl."""
    name, given = _parse(_program(app), words, block.place)
    texts = {}
    if name in ("run", "partition", "export"):
        keys = ("method", "dataset", "clients", "rounds", "seed")
        texts = {key: str(given[key]) for key in keys if given.get(key) is not None}
        texts |= {"partition": given["rule"]} if given.get("rule") else {}
    try:
        options: dict[str, Any] = read_options(texts, given.get("settings") or [])
    except ConfigError as error:
        raise AssertionError(f"{block.place}: {error}") from error
    if given.get("experiment") is None:
        for run in Experiment("guide").with_options(options).runs():
            _check_config(run.settings, block.place)
    else:
        _check_experiment(
            Path(given["experiment"]), given["case"], options, block.place
        )
    is_grid = any(isinstance(value, list) for value in options.values())
    if block.reason is None and not is_grid and _is_cheap(name, given, options):
        _execute(name, words, options, block.place)


def _check_experiment(
    file: Path, cases: list[str] | None, options: dict[str, Any], place: str
) -> None:
    """Check the settings of an experiment file, if a guide or the repository has it."""
    path = next((p for p in (file, ROOT / file) if p.exists()), None)
    if path is None:
        assert file.parts[0] != "experiments", f"{place}: no file {file}"
        return
    experiment = read_experiment(path).with_options(options)
    if experiment.draws:  # the others differ in their seeds
        experiment = experiment.with_draws(1)
    for run in experiment.with_cases(cases).runs() if cases else experiment.runs():
        _check_config(run.settings, place)


def _is_cheap(name: str, given: dict[str, Any], options: dict[str, Any]) -> bool:
    """Say whether a command can be executed in a moment."""
    if name in ("methods", "settings", "datasets", "new-app", "certificates"):
        return True
    if name in ("run", "partition", "export"):
        is_stored = given.get("experiment") or given.get("resume")
        is_synthetic = options.get("dataset", "synthetic") == "synthetic"
        return is_synthetic and not is_stored and PLACEHOLDER not in str(options)
    paths: list[Any] = []
    for key in INPUTS.get(name, []):
        paths += given[key] if isinstance(given[key], tuple | list) else [given[key]]
    return bool(paths) and all(Path(path).exists() for path in paths)


def _execute(name: str, words: list[str], options: dict[str, Any], place: str) -> None:
    """Execute a command in the working folder; a run is a tiny one in this process."""
    if name == "run":
        words = ["run", "--engine", "local", "--quiet"]
        method = options.get("method", "fedavg")
        own = SHORT.get(method, {}).get(method, {})
        short = {f"{method}.{kebab(key)}": value for key, value in own.items()}
        for key, value in (options | short | tiny(method)).items():
            words += ["--set", f"{key}={json.dumps(value)}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{place}: {words}: {result.output}{result.exception}"


def _check_flwr(words: list[str], block: Block) -> None:
    """Check a command of Flower's client, and the run config in it."""
    from flwr.cli.app import app as flwr

    name, given = _parse(_program(flwr), words, block.place)
    if name == "run":
        texts = given["run_config_overrides"] or []
        _check_config(parse_config_args(list(texts)), block.place)


@cache
def _node_parser(program: str) -> Any:
    """Return Flower's own parser of a SuperLink or SuperNode."""
    module, name = NODES[program]
    parser = getattr(importlib.import_module(module), f"_parse_args_run_{name}")()
    parser.allow_abbrev = False
    return parser


def _check_node(program: str, words: list[str], block: Block) -> None:
    """Check the command of a SuperLink or SuperNode, and the node config in it."""
    try:
        given = _node_parser(program).parse_args(words)
    except SystemExit as error:
        raise AssertionError(f"{block.place}: {program} refuses {words}") from error
    if getattr(given, "node_config", None):
        unknown = set(read_node_config(given.node_config)) - _node_config_keys()
        assert not unknown, f"{block.place}: {unknown} are not in the guide's table"


@cache
def _node_config_keys() -> frozenset[str]:
    """Return the keys in the deployment guide's table; the client half reads each."""
    text = (ROOT / "docs" / "deployment.md").read_text("utf-8")
    table = text.partition("Keys of `--node-config`:")[2].split("\n\n")[1]
    cells = "".join(re.findall(r"^\|[^|]*", table, re.MULTILINE))
    keys = set(re.findall(r"`([a-z-]+)`", cells))
    sources = (ROOT / "flower_fgl" / "client_apps").rglob("*.py")
    code = "".join(path.read_text("utf-8") for path in sources)
    assert keys, "the deployment guide has no table of node config keys"
    unread = {key for key in keys if f'"{key}"' not in code}
    assert not unread, f"no client half reads {unread}"
    return frozenset(keys)


def _check_script(words: list[str], block: Block) -> None:
    """Check that a script of the repository exists and knows its options."""
    path = ROOT / words[0]
    assert path.exists(), f"{block.place}: no script {words[0]}"
    text = path.read_text("utf-8")
    for word in words[1:]:
        option = word.partition("=")[0]
        if "BooleanOptionalAction" in text:
            option = option.replace("--no-", "--")
        is_known = not option.startswith("--") or f'"{option}"' in text
        assert is_known, f"{block.place}: {words[0]} has no {option}"
