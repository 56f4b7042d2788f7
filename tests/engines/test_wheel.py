"""The deployment guide's commands, from a wheel without the checkout."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flower_fgl import Run
from flower_fgl.datasets.graph_files.write import save_client_graph
from tests.support.owners import owner_graphs

pytestmark = pytest.mark.xdist_group("supernodes")

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel without a network; return the folder where it is installed."""
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "flower_fgl", source / "flower_fgl", ignore=ignored)
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source / name)
    wheels, target = (tmp_path_factory.mktemp(name) for name in ("wheels", "site"))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run([*build, "-d", str(wheels)], cwd=source, check=True, timeout=120)
    (wheel,) = wheels.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
    install += ["--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, timeout=120)
    shutil.rmtree(source)
    return target


@pytest.fixture
def commands(installed: Path, tmp_path: Path) -> Iterator[Commands]:
    """Run commands in ``tmp_path``; end whatever they leave behind, by process ID."""
    made = Commands(installed, tmp_path)
    yield made
    for process in made.living():
        with contextlib.suppress(psutil.Error):
            process.kill()


class Commands:
    """Runs ``flower-fgl`` from the wheel, and Flower's programs."""

    def __init__(self, installed: Path, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(installed),
            "PYTHONSAFEPATH": "1",
            "FLWR_HOME": str(folder / "flwr-home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def __call__(self, *words: str, timeout: float = 60) -> str:
        """Run a command; return what it printed."""
        program, *arguments = words
        start = [str(PROGRAMS / program)]
        if program == "flower-fgl":
            start = [sys.executable, "-m", "flower_fgl"]
        done = subprocess.run(
            [*start, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def living(self) -> list[psutil.Process]:
        """Return the processes whose command line names our folder."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(self.folder) in " ".join(process.info["cmdline"] or [])
        ]


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_a_wheel_rehearses_a_deployment_with_tls(
    commands: Commands, installed: Path, tmp_path: Path
) -> None:
    where = subprocess.run(
        [sys.executable, "-c", "import flower_fgl; print(flower_fgl.__file__)"],
        cwd=tmp_path,
        env=commands.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.strip() == str(installed / "flower_fgl" / "__init__.py")
    commands("flower-fgl", "new-app", "federation-app")
    commands("flwr", "build", "--app", "federation-app")
    assert len(list(tmp_path.glob("*.fab"))) == 1
    output = commands(
        "flower-fgl", "rehearse", "rehearsal", "--tls", "--rounds", "2", "--clients", "2",
        "--set", "synthetic.nodes=120", "--set", "synthetic.blocks=6",
        timeout=800,
    )  # fmt: skip
    folder = tmp_path / "rehearsal"
    run = Run.load(folder / "server" / "run")
    assert run.status == "completed"
    assert [row["round"] for row in run.rounds] == [1, 2]
    for line in ("Round 2, train: loss", *run.table().splitlines()):
        assert line in output
    for owner in ("owner-0", "owner-1"):
        lines = (folder / "owners" / owner / "probabilities.csv").read_text()
        assert len(lines.splitlines()) > 40
    assert commands.living() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_owners_rehearse_with_their_own_graphs(
    commands: Commands, tmp_path: Path
) -> None:
    names = ("ash", "oak")
    for name, graph in zip(names, owner_graphs(2), strict=True):
        save_client_graph(tmp_path / f"{name}.npz", graph)
    commands(
        "flower-fgl", "rehearse", "rehearsal", "ash.npz", "oak.npz", "--rounds", "2",
        timeout=800,
    )  # fmt: skip
    run = Run.load(tmp_path / "rehearsal" / "server" / "run")
    assert run.status == "completed"
    assert run.summary["dataset"] == "own graphs"
    assert {row["name"] for row in run.clients if "name" in row} == set(names)
    assert commands.living() == []
