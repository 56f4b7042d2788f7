"""Rows of installed packages and of ``register``."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flower_fgl.core import extensions
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import Table, described, known_names, register_row
from flower_fgl.runs.environment import (
    describe_environment,
    hash_source,
    mixed_versions,
)
from tests.support.fake_packages import METHOD_ROW, fake_package


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder on the path, and forget its packages afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("_registered", "_refused"):
        empty: dict[str, Any] = {"methods": {}, "backbones": {}, "datasets": {}}
        monkeypatch.setattr(extensions, name, empty)
    extensions.installed.cache_clear()
    before = set(sys.modules)
    yield tmp_path
    extensions.installed.cache_clear()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def number_table(own: dict[str, int] | None = None) -> Table[int]:
    def read(name: str, row: Any) -> int:
        if not isinstance(row, int):
            raise ConfigError(f"expected int, got {type(row).__name__}")
        return row

    return Table("methods", own or {"ours": 1}, read)


def test_an_installed_row_is_imported_when_the_table_is_first_read(
    folder: Path,
) -> None:
    fake_package(folder, "their-pkg", "ROW = 7\n", {"theirs": "ROW"})
    table = number_table()
    assert known_names("methods") == {"theirs"}
    assert table["ours"] == 1
    assert "their_pkg" not in sys.modules
    assert dict(table) == {"ours": 1, "theirs": 7}
    assert "theirs" in table
    assert len(table) == 2
    assert table.get("none") is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("OTHER = 1\n", "no attribute 'ROW'"),
        ("ROW = 'text'\n", "expected int, got str"),
    ],
)
def test_a_broken_package_gives_one_warning_and_an_error_when_it_is_used(
    folder: Path, caplog: pytest.LogCaptureFixture, code: str, reason: str
) -> None:
    fake_package(folder, "broken-pkg", code, {"theirs": "ROW"})
    table = number_table()
    with caplog.at_level(logging.WARNING):
        assert list(table) == ["ours"]
        assert list(table) == ["ours"]
    (record,) = caplog.records
    where = (
        "package broken-pkg (entry point flower_fgl.methods: theirs = broken_pkg:ROW"
    )
    assert where in record.message
    assert reason in record.message
    assert "theirs" not in table
    with pytest.raises(ConfigError, match="broken-pkg"):
        table["theirs"]


def test_an_error_is_not_preceded_by_a_warning_of_the_same_text(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_package(folder, "broken-pkg", "1 / 0\n", {"theirs": "ROW"})
    table = number_table()
    assert "theirs" not in table
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        table["theirs"]
    assert not caplog.records


def test_a_name_of_ours_is_kept_and_both_packages_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_package(folder, "their-pkg", "ROW = 7\n", {"ours": "ROW"})
    table = number_table()
    assert dict(table) == {"ours": 1}
    (record,) = caplog.records
    assert "flower-fgl and package their-pkg" in record.message


def test_a_name_of_two_packages_is_refused_and_both_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_package(folder, "one-pkg", "ROW = 7\n", {"same": "ROW"})
    fake_package(folder, "two-pkg", "ROW = 8\n", {"same": "ROW"})
    table = number_table()
    assert dict(table) == {"ours": 1}
    (record,) = caplog.records
    assert "package one-pkg" in record.message
    assert "package two-pkg" in record.message
    with pytest.raises(ConfigError, match=r"one-pkg.*two-pkg"):
        table["same"]


@pytest.mark.parametrize("name", ["synthetic", "My-Method", "a.b", "2fast", "a_b"])
def test_names_that_settings_cannot_hold_are_refused(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    fake_package(folder, "their-pkg", "ROW = 7\n", {name: "ROW"})
    assert dict(number_table()) == {"ours": 1}
    assert "must start with a letter" in caplog.text
    with pytest.raises(ConfigError, match="must start with a letter"):
        register_row("methods", name, 3, {})


def test_a_registered_row_may_be_replaced_but_hides_no_other(folder: Path) -> None:
    fake_package(folder, "their-pkg", "ROW = 7\n", {"theirs": "ROW"})
    table = number_table()
    for row in (3, 4):
        register_row("methods", "mine", row, table.own)
        assert table["mine"] == row
    assert dict(table) == {"ours": 1, "mine": 4, "theirs": 7}
    with pytest.raises(ConfigError, match="it comes from flower-fgl"):
        register_row("methods", "ours", 3, table.own)
    with pytest.raises(ConfigError, match="it comes from package their-pkg"):
        register_row("methods", "theirs", 3, table.own)


def test_a_row_is_described_with_the_package_it_comes_from(folder: Path) -> None:
    fake_package(folder, "their-pkg", "ROW = 7\n", {"theirs": "ROW"})
    assert described("methods", "ours") == '"ours"'
    assert described("methods", "theirs") == (
        '"theirs" of package their-pkg (entry point flower_fgl.methods: theirs = '
        "their_pkg:ROW)"
    )


def test_an_environment_holds_the_code_of_a_row_of_another_package(
    folder: Path,
) -> None:
    fake_package(folder, "their-pkg", "ROW = 7\n", {"theirs": "ROW"})
    rows: list[tuple[extensions.Kind, str]] = [
        ("methods", "theirs"),
        ("backbones", "gcn"),
    ]
    first = describe_environment("local", "cpu", rows)
    assert list(first["extensions"]) == ["their-pkg 1.0"]
    (folder / "their_pkg.py").write_text("ROW = 8\n", encoding="utf-8")
    hash_source.cache_clear()
    second = describe_environment("local", "cpu", rows)
    (text,) = mixed_versions(
        {"one": first, "two": second, "other": {**first, "extensions": {}}}
    )
    assert text.startswith(
        "the runs were made with 2 versions of their-pkg: their-pkg 1.0"
    )
    assert "extensions" not in describe_environment("local", "cpu", rows[1:])


def test_a_module_may_read_the_table_while_it_is_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = number_table()
    monkeypatch.setattr(extensions, "for_the_test", table, raising=False)
    code = (
        "from flower_fgl.core import extensions\nROW = len(extensions.for_the_test)\n"
    )
    fake_package(folder, "curious-pkg", code, {"theirs": "ROW"})
    assert table["theirs"] == 1


def test_a_row_that_imports_torch_is_used_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys, types\nsys.modules['torch'] = types.ModuleType('t')\nROW = 7\n"
    fake_package(folder, "slow-pkg", code, {"theirs": "ROW"})
    monkeypatch.delitem(sys.modules, "torch")
    assert number_table()["theirs"] == 7
    (record,) = caplog.records
    assert "package slow-pkg" in record.message
    assert "imports torch" in record.message


PROGRAM = """
import json, logging, sys

logging.basicConfig(stream=sys.stdout, format="LOG %(message)s")
from flower_fgl.core.errors import ConfigError
from flower_fgl.methods import METHODS, parse_config

found = {}


def attempt(name, **values):
    try:
        config = parse_config({k.replace("__", ".").replace("_", "-"): v
                               for k, v in values.items()})
        found[name] = [config.method, config.model, config.dataset]
    except ConfigError as error:
        found[name] = str(error)


attempt("plain", method="fedavg")
attempt("method", method="their-method", **{"their-method__strength": 2.0})
attempt("setting", method="their-method", **{"their-method__strength": -1.0})
attempt("broken", method="broken-method")
attempt("unknown", method="their-methods")
attempt("model", model="their-net:3x16", dataset="their-data")
attempt("unknown model", model="their-nets")
attempt("unknown dataset", dataset="their-dat")
from flower_fgl.datasets.sources.registry import SOURCES

found["version"] = SOURCES["their-data"].version
found["heavy"] = [n for n in ("torch", "flwr", "their_net_pkg") if n in sys.modules]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a fresh process finds with four packages on its path."""
    folder = tmp_path_factory.mktemp("site")
    code = METHOD_ROW.format(name="their-method")
    fake_package(folder, "their-method-pkg", code, {"their-method": "METHOD"})
    fake_package(folder, "broken-pkg", "import nothing_like_it", {"broken-method": "M"})
    fake_package(
        folder, "their-net-pkg", "import torch", {"their-net": "Net"}, "backbones"
    )
    row = (
        "from flower_fgl.datasets.sources.registry import Source, Statistics\n"
        "ROW = Source('T', 'node', '20/40/40', Statistics(), loader='them:read')\n"
    )
    fake_package(folder, "their-data-pkg", row, {"their-data": "ROW"}, "datasets")
    root = Path(extensions.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    *log, last = done.stdout.splitlines()
    return {**json.loads(last), "log": log}


def test_a_fresh_process_checks_settings_of_other_packages_without_torch(
    found: dict[str, Any],
) -> None:
    assert found["plain"] == ["fedavg", "gcn", "synthetic"]
    assert found["method"] == ["their-method", "gcn", "synthetic"]
    assert found["setting"] == "their-method.strength must be >= 0, got -1.0."
    assert found["model"] == ["fedavg", "their-net:3x16", "their-data"]
    assert found["version"] == "their-data-pkg 1.0"
    assert found["heavy"] == []


def test_errors_name_the_rows_of_other_packages(found: dict[str, Any]) -> None:
    assert "broken-pkg" in found["broken"]
    assert "nothing_like_it" in found["broken"]
    assert 'Did you mean "their-method"?' in found["unknown"]
    assert 'Did you mean "their-net"?' in found["unknown model"]
    assert 'Did you mean "their-data"?' in found["unknown dataset"]
    assert [line for line in found["log"] if "broken-pkg" in line] == found["log"]
