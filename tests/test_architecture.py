"""The layers of the package: what lies at its root and what loads what."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flower_fgl
from flower_fgl import METHODS

ROOT = Path(flower_fgl.__file__).parent
ENTRIES = [
    "__init__.py",
    "__main__.py",
    "algorithms",
    "cli",
    "client_app.py",
    "client_apps",
    "core",
    "datasets",
    "lab",
    "methods",
    "nn",
    "protocols",
    "py.typed",
    "runs",
    "server_app.py",
    "simulation",
    "strategies",
    "testing",
]
CLIENT_MODULES = {row.client_app.partition(":")[0] for row in METHODS.values()}
SERVER_MODULES = {row.strategy.partition(":")[0] for row in METHODS.values()}


FRESH = """
import json, os, sys
import flwr, torch, torch_geometric.nn

for group in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        for name in group:
            __import__(name)
        print(json.dumps(list(sys.modules)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture(scope="module")
def loaded_by_halves() -> tuple[set[str], set[str]]:
    """Return the names of all modules that a server and a client load."""
    client = ["flower_fgl.client_app", "flower_fgl.client_apps.dispatch"]
    halves = (
        ["flower_fgl.server_app", *sorted(SERVER_MODULES)],
        [*client, *sorted(CLIENT_MODULES)],
    )
    done = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(halves)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    server, client = map(json.loads, done.stdout.splitlines())
    return set(server), set(client)


def below(names: set[str], *packages: str) -> list[str]:
    starts = tuple(f"{package}." for package in packages)
    return sorted(name for name in names if name in packages or name.startswith(starts))


def test_the_package_root_holds_the_fifteen_entries_of_the_layout() -> None:
    found = sorted(p.name for p in ROOT.iterdir() if p.name != "__pycache__")
    assert found == ENTRIES


@pytest.mark.thorough
@pytest.mark.xdist_group("halves")
def test_a_server_loads_no_client_code_and_no_dataset(
    loaded_by_halves: tuple[set[str], set[str]],
) -> None:
    names, _ = loaded_by_halves
    assert not below(names, "flower_fgl.client_apps", "flower_fgl.datasets")
    assert below(names, "flower_fgl.strategies")


def test_the_server_half_imports_no_dataset_and_no_client_half_even_late() -> None:
    files = [ROOT / "server_app.py", *sorted((ROOT / "strategies").rglob("*.py"))]
    forbidden = {"flower_fgl.client_apps", "flower_fgl.datasets"}
    imported: set[str] = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, path
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            found = {".".join(name.split(".")[:2]) for name in names}
            assert not found & forbidden, f"{path}: {names}"
            imported |= found
    assert "flower_fgl.protocols" in imported


@pytest.mark.thorough
@pytest.mark.xdist_group("halves")
def test_a_client_loads_no_strategy(
    loaded_by_halves: tuple[set[str], set[str]],
) -> None:
    _, names = loaded_by_halves
    assert not below(names, "flower_fgl.strategies", "flower_fgl.server_app")
    assert below(names, "flower_fgl.client_apps")


def test_checking_settings_loads_neither_half_of_the_method() -> None:
    code = (
        "from flower_fgl.methods import METHODS, parse_config\n"
        "for name in METHODS:\n"
        "    protected = {'upload-clip': 1.0} if METHODS[name].uploads else {}\n"
        "    parse_config({'method': name, 'clients': 3, **protected})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    names = set(done.stdout.split())
    halves = ("flower_fgl.strategies", "flower_fgl.client_apps", "flower_fgl.protocols")
    assert not below(names, "torch", "torch_geometric", "flwr", *halves)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_one_file_holds_the_settings_and_the_row_of_a_method(name: str) -> None:
    stem = name.replace("-", "").replace("+", "plus")
    text = (ROOT / "methods" / f"{stem}.py").read_text("utf-8")
    defined = {getattr(node, "name", "") for node in ast.parse(text).body}
    settings = METHODS[name].settings
    assert "\nMETHOD = " in text
    assert settings is None or settings.__name__ in defined


@pytest.mark.thorough
def test_no_module_compares_the_name_of_a_method() -> None:
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name == "methods":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare):
                texts = [c.value for c in ast.walk(node) if isinstance(c, ast.Constant)]
                assert not set(texts) & set(METHODS) - {"local"}, path


def test_no_message_is_read_through_a_table_that_keeps_it() -> None:
    """Flower's tables of records by kind refer to themselves and to the message."""
    kept = {"array_records", "config_records", "metric_records"}
    for path in sorted(ROOT.rglob("*.py")):
        if path.parent.name == "testing":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            assert not (isinstance(node, ast.Attribute) and node.attr in kept), path
