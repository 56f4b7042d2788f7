"""Help, lists and argument errors load no tensor library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

#: Forks a process for each command: importing the command line takes most of the time.
pytestmark = pytest.mark.thorough  # they share one run of all commands

PROGRAM = """
import json, os, sys

from flower_fgl.cli.main import main

HEAVY = ("torch", "torch_geometric", "ray", "matplotlib")


def run(number, arguments):
    out = os.open(f"{number}.out", os.O_CREAT | os.O_WRONLY)
    err = os.open(f"{number}.err", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.argv = ["flower-fgl", *arguments.split()]
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    loaded = [name for name in HEAVY if name in sys.modules]
    with open(f"{number}.json", "w") as file:
        json.dump([code, loaded], file)
    os._exit(0)


assert not set(HEAVY) & set(sys.modules)
for number, arguments in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        run(number, arguments)
    os.waitpid(child, 0)
"""
COMMANDS = (
    "run",
    "methods",
    "settings",
    "datasets",
    "partition",
    "export",
    "check-graph",
    "import-partition",
    "predict",
    "report",
    "embeddings",
    "compare",
    "reach",
    "new",
    "table",
    "new-app",
    "certificates",
    "rehearse",
)
LISTS = (
    "--help",
    "--version",
    "methods",
    "settings",
    "settings fedpg",
    "settings lr",
    "datasets",
)
HELP = (*LISTS, *(f"{command} --help" for command in COMMANDS))
USAGE_ERRORS = (
    "nosuch",
    "run --nosuch",
    "partition --nosuch",
    "export --nosuch",
    "export",
    "report",
)
USER_ERRORS = {
    "settings nosuch": 'Unknown setting or method "nosuch"',
    "run --method nosuch": 'Unknown method "nosuch"',
    "run --dataset nosuch": "nosuch",
    "run --rounds x": "rounds must be of type int",
    "run --set nosuch=1": "nosuch",
    "run --set lr": "--set expects key=value",
    "run --set lr=x": "lr must be of type float",
    "run --set model=nosuch": 'Unknown model "nosuch"',
    "run --rounds 0": "rounds must be >= 1",
    "run --clients 0": "clients must be at least 1, got 0",
    "run --clients -3": "clients must be at least 1, got -3",
    "run --engine nosuch": 'engine must be "auto", "local" or "ray"',
    "run --track nosuch": 'Unknown tracker "nosuch"',
    "run --case first": "--case",
    "run --draws 2 --seed 1": "--draws sets seed and partition-seed of every draw",
    "run missing.toml": "missing.toml",
    "run garbled.toml": "garbled.toml is not valid TOML",
    "run unknown-setting.toml": "nosuch",
    "run unknown-value.toml": "nosuch",
    "run --resume nofolder": "nofolder",
    "partition --dataset nosuch": "nosuch",
    "partition --rule nosuch": "nosuch",
    "partition --clients 0": "--clients must be at least 1, got 0",
    "export out --dataset nosuch": "nosuch",
    "export out --set nosuch=1": "nosuch",
    "check-graph nofile.npz --set nosuch=1": "nosuch",
    "report nofolder": "nofolder",
    "report nofolder --client 0": "nofolder",
    "embeddings nofolder --out picture.png --client 0": "nofolder",
    "compare nofolder other": "nofolder",
    "reach 0.8 nofolder": "nofolder",
    "new fedavg": 'There is a method "fedavg" already: it comes from flower-fgl',
    "certificates keys a/b": "cannot be the name of an owner",
    "rehearse new g.npz --dataset cora": "Leave them out, or name no graphs",
}


Results = dict[str, tuple[int, list[str], str]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Exit status, heavy modules that were loaded, and errors of each command."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "garbled.toml").write_text("[config")
    (folder / "unknown-setting.toml").write_text("[config]\nnosuch = 1\n")
    (folder / "unknown-value.toml").write_text(
        '[[case]]\nname = "a"\nmodel = "nosuch"\n[grid]\nseed = [0, 1]\n'
    )
    commands = [*HELP, *USAGE_ERRORS, *USER_ERRORS]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return {
        command: (
            *json.loads((folder / f"{number}.json").read_text()),
            (folder / f"{number}.err").read_text(),
        )
        for number, command in enumerate(commands)
    }


@pytest.mark.parametrize("arguments", HELP)
def test_help_and_lists_load_no_tensor_library(
    arguments: str, results: Results
) -> None:
    code, loaded, errors = results[arguments]
    assert (code, errors) == (0, "")
    assert not {"torch", "torch_geometric"} & {*loaded}


@pytest.mark.parametrize("arguments", USAGE_ERRORS)
def test_usage_errors_load_no_tensor_library(arguments: str, results: Results) -> None:
    code, loaded, errors = results[arguments]
    assert code == 2
    assert "Usage: flower-fgl" in errors
    assert not {"torch", "torch_geometric"} & {*loaded}


@pytest.mark.parametrize("arguments", USER_ERRORS)
def test_argument_errors_load_no_tensor_library(
    arguments: str, results: Results
) -> None:
    code, loaded, errors = results[arguments]
    assert code == 1
    assert errors.startswith("Error: ")
    assert USER_ERRORS[arguments] in errors
    assert not {"torch", "torch_geometric"} & {*loaded}


def test_a_plain_run_loads_neither_pyg_nor_the_compiler_nor_pandas(
    tmp_path: Path,
) -> None:
    """Each of them takes about as long to import as torch, or a third of that."""
    program = (
        "import sys; from flower_fgl.cli.main import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "print('loaded', *{n.partition('.')[0] for n in sys.modules},"
        " *[n for n in sys.modules if n == 'torch._dynamo'])"
    )
    run = ["run", "--rounds", "1", "--quiet", "--set", "batch-size=8"]
    for method in ("fedavg", "fedpg"):
        done = subprocess.run(
            [sys.executable, "-c", program, *run, "--method", method],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        loaded = set(done.stdout.splitlines()[-1].split())
        assert "torch" in loaded
        heavy = {"torch_geometric", "torch._dynamo", "pandas", "sympy", "jinja2"}
        assert not heavy & loaded


def test_an_interrupt_while_torch_is_loaded_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flower_fgl.cli.main import report_how_to_resume

    monkeypatch.setitem(sys.modules, "flower_fgl.runs.checkpoints", None)
    with pytest.raises(typer.Exit) as stop, report_how_to_resume():
        raise KeyboardInterrupt
    assert stop.value.exit_code == 130
