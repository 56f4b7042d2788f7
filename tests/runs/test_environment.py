"""A run says with what and where it was made, and this changes no number."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import flwr
import pytest
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.cli.main import app
from flower_fgl.core.version import VERSION
from flower_fgl.lab.results import Run
from flower_fgl.runs.environment import (
    describe_environment,
    find_commit,
    mixed_versions,
)
from flower_fgl.runs.writer import RunWriter
from tests.support.short_runs import timeless

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40


def test_summary_and_settings_hold_the_environment(tmp_path: Path) -> None:
    run = simulate(
        "fedavg",
        run_dir=str(tmp_path / "run"),
        clients=2,
        rounds=1,
        synthetic={"nodes": 60, "features": 8},
    )
    found = run.summary["environment"]
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["flower-fgl"] == VERSION
    assert found["versions"]["flwr"] == flwr.__version__
    assert {"torch", "torch-geometric"} <= found["versions"].keys()
    assert "ray" not in found["versions"]
    assert found["host"]["cores"] >= 1
    assert found["host"]["memory_gb"] > 0
    assert re.match(r"cpu|cuda:0 ", found["device"])
    started = run.summary["started"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", started)
    text = (run.path / "config.toml").read_text("utf-8")
    assert f"# started: {started}\n" in text
    assert f"flwr {flwr.__version__}" in text
    assert platform.node() not in json.dumps(run.summary)  # no name of the host
    # comments only: the file is still an experiment with the same settings
    assert tomllib.loads(text).keys() == run.config.keys()
    assert run.sources["clients"] == "user"
    place = f"run-dir={tmp_path / 'again'}"
    command = ["run", str(run.path / "config.toml"), "--engine", "local", "--quiet"]
    assert CliRunner().invoke(app, [*command, "--set", place]).exit_code == 0
    again = Run.load(tmp_path / "again")
    assert timeless(again.summary) == timeless(run.summary)


def test_ray_is_named_where_it_is_used() -> None:
    assert "ray" in describe_environment("ray", "cpu")["versions"]


def test_a_new_summary_keeps_start_time_and_environment(tmp_path: Path) -> None:
    environment = describe_environment("local", "cpu")
    writer = RunWriter.create(
        tmp_path / "run", config={}, sources={}, environment=environment
    )
    started = json.loads((tmp_path / "run" / "summary.json").read_text())["started"]
    for one in (writer, RunWriter(tmp_path / "run")):  # the second one resumes
        one.write_summary({"status": "failed"})
        found = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert found == {
            "status": "failed",
            "started": started,
            "environment": environment,
        }


def test_a_run_folder_of_before_has_no_environment(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", config={}, sources={})
    assert "environment" not in Run.load(writer.folder).summary


def checkout(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "package"


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({".git/HEAD": COMMIT + "\n"}, COMMIT),
        (
            {
                ".git/HEAD": "ref: refs/heads/main\n",
                ".git/refs/heads/main": COMMIT + "\n",
                ".git/packed-refs": f"{OTHER} refs/heads/main\n",
            },
            COMMIT,
        ),
        (
            {
                ".git/HEAD": "ref: refs/heads/main\n",
                ".git/packed-refs": f"# pack-refs\n{OTHER} refs/heads/a\n{COMMIT} "
                f"refs/heads/main\n^{OTHER}\n",
            },
            COMMIT,
        ),
        (
            {
                ".git": "gitdir: real/worktrees/one\n",
                "real/worktrees/one/HEAD": "ref: refs/heads/one\n",
                "real/worktrees/one/commondir": "../..\n",
                "real/refs/heads/one": COMMIT + "\n",
            },
            COMMIT,
        ),
        ({}, ""),
        ({".git/HEAD": "rubbish"}, ""),
        ({".git/HEAD": "ref: refs/heads/none"}, ""),
        ({".git/HEAD": "ref: refs/heads/a", ".git/refs/heads/a": "rubbish"}, ""),
        ({".git": "gitdir: nowhere"}, ""),
    ],
)
def test_the_commit_is_read_without_git(
    files: dict[str, str], commit: str, tmp_path: Path
) -> None:
    checkout(tmp_path, files)
    assert find_commit(tmp_path) == commit


def test_the_commit_is_that_of_git() -> None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no checkout")
    told = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert find_commit(root) == told.stdout.strip()


def test_runs_of_several_versions_are_named() -> None:
    versions = {"python": "3.11", "torch": "2.13.0"}
    old = {"versions": versions, "source_sha256": "a" * 64, "commit": COMMIT}
    same = {**old, "versions": {**versions, "python": "3.12", "ray": "2.50"}}
    assert mixed_versions({"one": old, "two": {**same, "commit": OTHER}}) == []
    runs = {f"old-{k}": old for k in range(5)}
    runs["new"] = {**old, "source_sha256": "b" * 64}
    runs["unknown"] = {}
    (text,) = mixed_versions(runs)
    assert text.startswith(
        "the runs were made with 3 versions: torch 2.13.0, source aaaaaaaaaaaa (old-0, "
        "old-1, old-2 and 2 more); torch 2.13.0, source bbbbbbbbbbbb (new); commit unknown "
        "(unknown). Scores may differ"
    )
