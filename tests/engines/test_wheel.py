"""The deployment guide's commands, from a wheel without the checkout."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flower_fgl import Run
from flower_fgl.datasets.graph_files.write import save_client_graph
from flower_fgl.simulation.flower.superlink import free_port
from tests.support.guides import blocks
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
        lines = (folder / "owners" / owner / "predictions.csv").read_text()
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


GUIDE = ROOT / "docs" / "deployment.md"
OWNERS = ("hospital-a", "hospital-b", "hospital-c")
EXAMPLE = "8392972644326502998"
"""Number of a run in the guide."""


class Terminal:
    """Types the guide's commands; only paths, ports and numbers of runs are replaced."""

    def __init__(self, commands: Commands) -> None:
        self.folder = commands.folder
        path = f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**commands.environment, "PATH": path}
        self.variables = next(
            block.text
            for block in blocks(GUIDE, "bash")
            if "export FLWR_" in block.text
        )
        self.running: list[psutil.Popen] = []
        ports = {port: str(free_port()) for port in ("18000", "18443")}
        self.words = {
            **ports,
            "rounds=20": "rounds=2",
            "/data/": f"{self.folder}/data/",
            "/absolute/": f"{self.folder}/",
        }

    def block(self, start: str, language: str = "bash") -> str:
        """Return the one block that begins with a text, with the replacements."""
        found = [b.text for b in blocks(GUIDE, language) if b.text.startswith(start)]
        assert len(found) == 1, f"{len(found)} blocks begin with {start}"
        return self.replaced(found[0])

    def replaced(self, text: str) -> str:
        """Replace what depends on the machine."""
        for word, by in self.words.items():
            text = text.replace(word, by)
        return text

    def type(self, text: str, timeout: float = 300) -> str:
        """Run commands in a new shell; return what they printed."""
        done = subprocess.run(
            ["bash", "-e", "-c", f"{self.variables}\n{text}"],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def run(self, command: str) -> str:
        """Run ``flwr run``, again if Flower failed it as its machine stalled for 60 s."""
        said = self.type(command)
        return said if "completed" in said else self.type(command)

    def leave_running(self, text: str, log: str) -> None:
        """Start a command whose program goes on."""
        with (self.folder / f"{log}.log").open("wb") as output:
            self.running.append(
                psutil.Popen(
                    ["bash", "-c", f"{self.variables}\nexec {text}"],
                    cwd=self.folder,
                    env=self.environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def wait_for(self, log: str, text: str) -> None:
        """Wait until a program has logged a text."""
        end = time.monotonic() + 90
        while text not in (said := (self.folder / f"{log}.log").read_text()):
            assert time.monotonic() < end, said
            time.sleep(0.3)

    def close(self) -> None:
        """End the programs that are running, and their children."""
        for process in self.running:
            with contextlib.suppress(psutil.Error):
                for each in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.Error):
                        each.kill()
                process.wait(20)
        self.running = []

    def start_owners(self, command: str) -> None:
        """Start the SuperNode of the guide, and those of the two other owners."""
        for owner in OWNERS:
            text = command.replace("hospital-a", owner).replace(
                "18101", str(free_port())
            )
            self.leave_running(text, owner)

    def number_of_newest_run(self) -> str:
        """Return the number that ``flwr list`` prints first."""
        (number, *_) = re.findall(r"\b\d{17,20}\b", self.type("flwr list federation"))
        return str(number)


@pytest.fixture
def terminal(commands: Commands) -> Iterator[Terminal]:
    made = Terminal(commands)
    yield made
    made.close()


def as_lines(text: str) -> list[str]:
    """Return the commands of a block one by one, without comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [" ".join(line.partition(" #")[0].split()) for line in lines if line.strip()]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_deployment_guide_works_as_it_is_typed(terminal: Terminal) -> None:
    folder, home = terminal.folder, terminal.folder / "flwr-home"
    terminal.variables = terminal.variables.replace("$PWD/.flwr-home", str(home))
    home.mkdir()

    # section 2: prepare a graph
    said = terminal.type(terminal.block("flower-fgl export graphs"))
    assert "graphs/client-0.npz can be used." in said
    (folder / "data").mkdir()
    for owner, file in zip(OWNERS, sorted(folder.glob("graphs/*.npz")), strict=True):
        shutil.copy(file, folder / "data" / f"{owner}.npz")

    # sections 3 to 5: without TLS
    terminal.leave_running(terminal.block("flower-superlink --insecure"), "link")
    terminal.wait_for("link", "Uvicorn running")
    terminal.start_owners(terminal.block("flower-supernode --insecure"))
    said = terminal.type(
        terminal.block("flower-fgl check-graph graphs/client-0.npz --node")
    )
    assert "its node config demands at least 5" in said
    terminal.type(terminal.block("flower-fgl new-app"))
    plain, secure = (
        terminal.replaced(block.text)
        for block in blocks(GUIDE, "toml")
        if "[superlink.federation]" in block.text
    )
    (home / "config.toml").write_text(plain)
    run, listed, log, stop = as_lines(terminal.block("flwr run federation-app"))
    said = terminal.run(run)
    for text in (
        'data owner "hospital-c"',
        "Round 2 of 2: ",
        "on own graphs",
        "Run folder",
    ):
        assert text in said
    number = terminal.number_of_newest_run()
    assert "finished" in terminal.type(listed)
    assert "Round 2 of 2: " in terminal.type(log.replace(EXAMPLE, number) + " --show")
    terminal.type(run.replace("rounds=2", "rounds=50").removesuffix(" --stream"))
    second = terminal.number_of_newest_run()
    assert second != number
    assert "successfully stopped" in terminal.type(stop.replace(EXAMPLE, second))
    terminal.close()

    # section 6: with TLS and registered keys
    terminal.type(terminal.block("flower-fgl certificates"))
    terminal.leave_running(terminal.block("flower-superlink --ssl"), "secure-link")
    terminal.wait_for("secure-link", "Uvicorn running")
    (home / "config.toml").write_text(secure)
    register, node = as_lines(terminal.block("flwr supernode register"))
    for owner in OWNERS:
        said = terminal.type(register.replace("hospital-a", owner))
        assert "registered successfully" in said
    terminal.start_owners(node)
    said = terminal.run(run)
    assert "Round 2 of 2: " in said

    # section 7: predictions
    number = terminal.number_of_newest_run()
    newest = re.findall(r"Run folder: (\S+)", said)[-1]
    shutil.copy(folder / "data" / "hospital-b.npz", folder / "new.npz")
    first, second = as_lines(terminal.block("flower-fgl predict"))
    terminal.type(first.replace(EXAMPLE, number))
    assert len((folder / "predictions.csv").read_text().splitlines()) > 100
    second = second.replace("runs/<a run>", newest).replace("new-patients/", "new.npz")
    assert "aggregated" in terminal.type(second)
