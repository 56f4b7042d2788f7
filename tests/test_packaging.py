"""What a FAB and a wheel hold."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what the packages are built from into a folder of the right name."""
    folder = tmp_path_factory.mktemp("src") / "flower-fgl"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "flower_fgl", folder / "flower_fgl", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "notes.md").write_text("a stray file")
    return folder


def modules() -> set[str]:
    files = (ROOT / "flower_fgl").rglob("*.py")
    return {str(path.relative_to(ROOT)) for path in files}


@pytest.mark.thorough
def test_a_fab_holds_the_package_and_nothing_stray(
    checkout: Path, tmp_path: Path
) -> None:
    home = {"FLWR_HOME": str(tmp_path / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(
        [str(PROGRAMS / "flwr"), "build", "--app", str(checkout)],
        cwd=tmp_path,
        env={**os.environ, **home, "FLWR_DISABLE_UPDATE_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (fab,) = tmp_path.glob("*.fab")
    names = set(zipfile.ZipFile(fab).namelist())
    assert {n for n in names if n.endswith(".py")} == modules()
    assert "pyproject.toml" in names
    assert "notes.md" not in names
    assert fab.stat().st_size < 10 * 2**20


def test_a_wheel_brings_one_importable_name_and_its_template(
    checkout: Path, tmp_path: Path
) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            "wheel",
            "-d",
            str(tmp_path),
        ],
        cwd=checkout,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"flower_fgl"}
    assert {n for n in names if n.endswith(".py")} == modules()
    assert "flower_fgl/lab/report/report.html.j2" in names
    assert "flower_fgl/py.typed" in names
    assert "flower_fgl/cli/templates/method/pyproject.toml.txt" in names


@pytest.mark.thorough
def test_import_datasets_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("WHOSE = 'Hugging Face'\n")
    code = "import flower_fgl.client_app, datasets; print(datasets.WHOSE)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "Hugging Face", done.stderr


def test_dependencies_are_capped_where_they_must_be() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    dependencies = project["project"]["dependencies"]
    assert "flwr[simulation]>=1.41,<1.43" in dependencies
    assert "ray>=2.55,<2.60" in dependencies  # 2.60 no longer hides GPUs from workers
    assert "torch>=2.6,<2.14" in dependencies
    assert "dependency-groups" not in project


@pytest.mark.xdist_group("a-group")
def test_a_group_of_tests_runs_on_one_worker(request: pytest.FixtureRequest) -> None:
    # xdist reads the group from the end of the name; with pytest 9.2 it is lost
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("one process")
    assert request.node.nodeid.endswith("@a-group")


@pytest.mark.thorough
def test_every_third_party_import_is_declared() -> None:
    import ast
    import re
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    declared = {
        re.split(r"[\[<>=~]", entry)[0].replace("-", "_").lower()
        for entry in [
            *project["project"]["dependencies"],
            *(
                entry
                for extra in (
                    "testing",
                    "privacy",
                    "tensorboard",
                    "mlflow",
                    "wandb",
                    "tune",
                    "ranks",
                    "tables",
                    "chemistry",
                )
                for entry in project["project"]["optional-dependencies"][extra]
            ),
        ]
    }
    other_names = {
        "community": "python_louvain",
        "google": "protobuf",
        "grpc": "grpcio",
        "sklearn": "scikit_learn",
    }
    found = set()
    for path in (ROOT / "flower_fgl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    # mypy, which alone imports it, brings typing_extensions
    found -= set(sys.stdlib_module_names) | {"flower_fgl", "typing_extensions"}
    assert {other_names.get(name, name) for name in found} <= declared
