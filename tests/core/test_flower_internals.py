"""Which parts of Flower the package uses, and that they are where it looks for them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_fgl.core import flower_internals

ROOT = Path(flower_internals.__file__).parents[2]
HOME = Path(flower_internals.__file__)
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
PRIVATE = {
    "flwr.common.config": {"parse_config_args"},
    "flwr.common.constant": {"ErrorCode"},
    "flwr.common.serde": {
        "context_from_proto",
        "context_to_proto",
        "message_from_proto",
        "message_to_proto",
        "recorddict_from_proto",
        "recorddict_to_proto",
    },
    "flwr.proto.message_pb2": {"Context", "Message"},
    "flwr.proto.recorddict_pb2": {"RecordDict"},
    "flwr.supercore.exit": {"add_exit_handler"},
    "flwr.supercore.run": {"Run"},
    "flwr.supercore.task_identity": {"TaskIdentity"},
}


def flower_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import from Flower in a file."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and not node.level:
            module = str(node.module)
            if module.partition(".")[0] == "flwr":
                yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "flwr":
                    yield alias.name, ""


def test_one_module_imports_what_flower_does_not_document() -> None:
    found: dict[str, set[str]] = {}
    for module, name in flower_imports(HOME):
        found.setdefault(module, set()).add(name)
    assert found == PRIVATE


@pytest.mark.thorough
def test_all_other_files_import_documented_names_only() -> None:
    folders = ("flower_fgl", "benchmarks", "examples", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert HOME in files
    for path in files:
        for module, name in flower_imports(path) if path != HOME else ():
            assert module in PUBLIC, f"{path}: {module}"
            assert name in importlib.import_module(module).__all__, f"{path}: {name}"


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, names in PRIVATE.items() for n in sorted(names)]
)
def test_flower_has_the_undocumented_name(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)
