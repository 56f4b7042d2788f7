"""The notebooks of ``examples/`` run from top to bottom, in one kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flower_fgl.datasets.sources.raw_paths import twitch

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
NEEDS_DATA = "twitch-owners"
"""Notebook on files that have no download; without them it is not run."""
every_notebook = pytest.mark.parametrize(
    "notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS]
)


def has_twitch() -> bool:
    """Return whether the data folder has the countries of Twitch."""
    data = Path(os.environ.get("FLOWER_FGL_DATA", "/nowhere"))
    folders = [data / layout.folder for layout in twitch("RU")]
    return any((folder / "musae_RU_edges.csv").is_file() for folder in folders)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder of all notebooks with their outputs, and what went wrong."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("notebooks")
    script = ROOT / "tests" / "support" / "execute_notebooks.py"
    able = [path for path in NOTEBOOKS if path.stem != NEEDS_DATA or has_twitch()]
    words = [sys.executable, str(script), str(folder), *map(str, able)]
    # flower-fgl of this environment is found by the notebooks' shell commands
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    packages = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        words,
        env={**os.environ, "PATH": path, "PYTHONPATH": packages},
        capture_output=True,
        text=True,
        timeout=280,
    )
    return folder, done.stderr


def test_there_is_a_notebook_for_each_task() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "edge-classification",
        "few-shot",
        "graph-classification",
        "link-prediction",
        "node-classification",
        "own-graph-files",
        "twitch-owners",
    ]


@every_notebook
def test_notebooks_are_stored_without_outputs(notebook: Path) -> None:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    for cell in cells:
        assert not cell.get("outputs"), cell["source"]
        assert cell.get("execution_count") is None
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            if not source.startswith("!"):
                compile(source, str(notebook), "exec")


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
@every_notebook
def test_notebooks_run(notebook: Path, executed: tuple[Path, str]) -> None:
    if notebook.stem == NEEDS_DATA and not has_twitch():
        pytest.skip("FLOWER_FGL_DATA does not contain the files of Twitch")
    folder, problems = executed
    assert f"{notebook.name}:" not in problems, problems
    text = (folder / notebook.stem / notebook.name).read_text("utf-8")
    code = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    assert all(cell["execution_count"] for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    shown = [data for output in outputs for data in output.get("data", {}).items()]
    assert any("<table" in "".join(text) for kind, text in shown if kind == "text/html")
    assert any(kind == "image/png" for kind, _ in shown)
    printed = "".join(line for output in outputs for line in output.get("text", ()))
    # PyG imports tqdm.auto, which warns once in a kernel without ipywidgets
    assert "Warning" not in printed.replace("TqdmWarning: IProgress not found", "")
