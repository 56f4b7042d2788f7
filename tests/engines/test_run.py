"""``flower-fgl run``: the local engine's numbers under Ray, the true exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flower_fgl import Run
from flower_fgl.cli.main import app
from flower_fgl.cli.run import RunOptions, run_all
from flower_fgl.core.atomic import hold
from flower_fgl.core.config import DATASET_DEFAULTS, pyproject_table
from flower_fgl.core.errors import ConfigError, DataError, RunError
from flower_fgl.methods import METHODS
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.writer import RunWriter
from flower_fgl.simulation.flower.flower_simulation import launch, write_app_folder
from flower_fgl.simulation.local import run_local
from flower_fgl.simulation.run import run_one

pytestmark = pytest.mark.xdist_group("processes")

SLOW = pytest.mark.slow
PROGRAM = [sys.executable, "-m", "flower_fgl"]
QUICK = [
    "--clients", "3", "--rounds", "2", "--set", "synthetic.nodes=120",
    "--set", "synthetic.blocks=6", "--set", "hidden-channels=8",
]  # fmt: skip


def quick(**changes: int) -> list[str]:
    """Return ``QUICK`` with other values of options or settings."""
    words = list(QUICK)
    for key, value in changes.items():
        place = words.index(f"--{key}")
        words[place + 1] = str(value)
    return words


def numbers(run: Run) -> str:
    """Return all that a run computed; places may differ in time and process only."""
    rounds = [
        {key: row.get(key) for key in ("round", "loss", "metrics", "replies", "status")}
        for row in run.rounds
    ]
    clients = [
        {k: row[k] for k in ("round", "partition_id", "loss", "metrics") if k in row}
        for row in run.clients
    ]
    return json.dumps([rounds, clients, run.summary["best"]], sort_keys=True)


def environment(**extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return {**clean, **extra}


def invoke(*arguments: str) -> str:
    """Run a command in this process, return what it printed."""
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return str(result.output)


def flower_fgl(
    *arguments: str, timeout: float = 200, **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**extra),
    )


def run_folder(output: str) -> Path:
    lines = [line for line in output.splitlines() if line.startswith("Run folder: ")]
    return Path(lines[-1].removeprefix("Run folder: "))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        # weights; the tests of links, edges and several labels run FedAvg in Ray, too
        pytest.param("fedavg", [], marks=pytest.mark.slow),
        pytest.param("fedpg", [], marks=pytest.mark.engines),  # prototypes
        # one scale for the numbers of all clients
        pytest.param(
            "fedavg", ["rounds=2", "target-kind=numbers"], marks=pytest.mark.slow
        ),
        pytest.param(
            "opfgl",  # one round
            [
                "rounds=1",
                "local-epochs=5",
                "opfgl.server-steps=20",
                "min-class-count=2",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ray_gives_the_numbers_of_the_local_engine(
    method: str, settings: list[str], tmp_path: Path
) -> None:
    pairs = [word for setting in settings for word in ("--set", setting)]
    options = [*QUICK[:2], *QUICK[4:]] if settings else QUICK  # without its rounds
    done = flower_fgl(
        "run", "--engine", "ray", "--method", method, *options, *pairs,
        "--set", f"output-dir={tmp_path}/ray",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ray = Run.load(run_folder(done.stdout))
    assert ray.summary["engine"] == "ray"
    again = {k: v for k, v in flatten_config(ray.config) if k != "run-dir"}
    assert numbers(run_local(again)) == numbers(ray)
    kept = {"config.toml", "rounds.jsonl", "clients.jsonl", "summary.json"}
    assert kept <= {path.name for path in ray.path.iterdir()}
    log = (ray.path / "flower.log").read_text()
    for line in (f"of {ray.config['rounds']}: loss", *ray.table().splitlines()):
        assert line in log


@pytest.mark.engines
@pytest.mark.timeout(300)
def test_nodes_that_host_clients_give_the_numbers_of_the_local_engine(
    tmp_path: Path,
) -> None:
    done = flower_fgl(
        "run", "--engine", "ray", *quick(clients=12), "--set", "clients-per-node=6",
        "--set", "stacked=true", "--set", f"output-dir={tmp_path}/ray",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ray = Run.load(run_folder(done.stdout))
    again = {k: v for k, v in flatten_config(ray.config) if k != "run-dir"}
    assert numbers(run_local(again)) == numbers(ray)


PAIRS = """
from flower_fgl.simulation.run import run_one
from tests.engines.test_run import numbers
if __name__ == "__main__":
    places = [("local", 1), ("ray", 1)], [("local", 1), ("local", 2), ("ray", 1)]
    for setting, engines in zip(("link", "edge"), places):
        values = {values} | {{"setting": setting}}
        runs = [
            run_one(values, engine=engine, workers=workers)
            for engine, workers in engines
        ]
        assert {{run.status for run in runs}} == {{"completed"}}
        kinds = {{numbers(run) for run in runs}}
        scores = runs[0].summary["best"]["test"]
        print(setting, len(kinds), sorted({{"auroc", "auprc"}} & set(scores)))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_links_and_edges_have_the_same_numbers_in_all_engines(tmp_path: Path) -> None:
    words = [word for word in QUICK if "=" in word]
    values: dict[str, Any] = {
        "method": "fedavg",
        "clients": 2,
        "rounds": 2,
        "output-dir": str(tmp_path / "runs"),
        **{key: int(value) for key, value in (word.split("=") for word in words)},
    }
    script = tmp_path / "compare_engines.py"
    script.write_text(PAIRS.format(values=values))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=root,
        env=environment(PYTHONPATH=str(root), RAY_ADDRESS="local"),
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    for setting in ("link", "edge"):
        line = f"{setting} 1 ['auprc', 'auroc']"
        assert line in done.stdout.splitlines(), done.stderr[-3000:]


@pytest.mark.slow
def test_wrong_settings_end_a_simulation_with_their_message_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = launch(
        write_app_folder(tmp_path / "flower-fgl", config=pyproject_table(METHODS)),
        run_config={"lr": -1.0, "output-dir": str(tmp_path / "runs")},
        num_clients=2,
        home=tmp_path / "home",
        log_file=tmp_path / "log",
    )
    assert result.flower_status == "finished:failed"
    log = (tmp_path / "log").read_text()
    assert "lr must be > 0, got -1.0" in log
    assert "Traceback" not in log.partition("\n--- ")[0]  # before Ray's own logs
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_error_of_all_clients_is_one_line_in_each_process_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    data = tmp_path / "no data"
    result = launch(
        write_app_folder(tmp_path / "flower-fgl", config=pyproject_table(METHODS)),
        run_config={
            "dataset": "cora",
            "data-dir": str(data),
            "clients": 6,
            "join-timeout": 5,
            "output-dir": str(tmp_path / "runs"),
        },
        num_clients=6,
        home=tmp_path / "home",
        log_file=tmp_path / "log",
    )
    assert result.flower_status == "finished:failed"
    # what Flower shows, and then a part per log file of its processes
    shown, *parts = (tmp_path / "log").read_text().split("\n--- ")
    line = f"data-dir must name a folder, got {data}, which does not exist."
    actors = [part for part in parts if ":actor_name:ClientAppActor" in part]
    assert actors
    for part in actors:
        assert part.count(line) == part.count("ERROR") == 1  # for six clients
    assert (
        len([text for text in shown.splitlines() if "ERROR" in text and line in text])
        == 1
    )
    assert not [part for part in (shown, *parts) if "Traceback" in part]


#: What a user's code can do wrong inside the app, and what the command must say.
BREAKAGES = {
    "a client dies every round": (
        "import flower_fgl.client_apps.fedavg as m\n"
        "def fit(*a): raise RuntimeError('client is out of order')\n"
        "m.FedAvgClientApp.fit = fit\n",
        "client is out of order",
    ),
    "the server half raises": (
        "import flower_fgl.strategies.fedavg as m\n"
        "def aggregate(*a): raise RuntimeError('server is out of order')\n"
        "m.FedAvg.aggregate = aggregate\n",
        "server is out of order",
    ),
    "the server half leaves by sys.exit": (
        "import sys, flower_fgl.strategies.fedavg as m\n"
        "m.FedAvg.aggregate = lambda *a: sys.exit(3)\n",
        "failed",
    ),
    "a worker process dies": (
        "import os, flower_fgl.client_apps.fedavg as m\n"
        "m.FedAvgClientApp.fit = lambda *a: os._exit(7)\n",
        "worker process",
    ),
}


def break_app(folder: Path, code: str) -> str:
    """Return a PYTHONPATH that runs ``code`` once the module it changes is loaded."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        f"CODE = {code!r}\n"
        "class Later:\n"  # change the module as soon as it has been imported
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name not in CODE or not name.startswith('flower_fgl.') "
        "or name.count('.') != 2:\n"
        "            return None\n"
        "        sys.meta_path.remove(self)\n"
        "        spec = importlib.util.find_spec(name)\n"
        "        run = spec.loader.exec_module\n"
        "        def exec_module(module):\n"
        "            run(module)\n"
        "            exec(CODE, {})\n"
        "        spec.loader.exec_module = exec_module\n"
        "        return spec\n"
        "sys.meta_path.insert(0, Later())\n"
    )
    return str(folder / "site")


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("a client dies every round", ["--engine", "local"]),
        pytest.param(
            "a worker process dies", ["--engine", "local", "--workers", "2"], marks=SLOW
        ),
        *(
            pytest.param(name, ["--engine", "ray", "--workers", "1"], marks=SLOW)
            for name in sorted(BREAKAGES)
        ),
    ],
)
def test_the_exit_status_is_true_when(
    name: str, engine: list[str], tmp_path: Path
) -> None:
    code, words = BREAKAGES[name]
    site = break_app(tmp_path, code)
    done = flower_fgl(
        "run", *QUICK, *engine, "--quiet",
        "--set", f"output-dir={tmp_path}/runs", PYTHONPATH=site,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stderr
    if "dies every round" not in name:  # the local engine logs a client's traceback
        assert "Traceback" not in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert Run.load(folder).status == "failed"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_client_that_never_answers_is_left_behind(tmp_path: Path) -> None:
    code = (
        "import time, flower_fgl.client_apps.fedavg as m\n"
        "original = m.FedAvgClientApp.fit\n"
        "def fit(app, client, number, download):\n"
        "    if client.partition_id == 1 and number == 2: time.sleep(1000)\n"
        "    return original(app, client, number, download)\n"
        "m.FedAvgClientApp.fit = fit\n"
    )
    done = flower_fgl(
        "run", *quick(rounds=3), "--engine", "ray", "--quiet",
        "--set", f"output-dir={tmp_path}/runs", "--set", "round-timeout=10",
        PYTHONPATH=break_app(tmp_path, code),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run.load(run_folder(done.stdout))
    assert run.status == "completed"
    assert any("no reply within 10 s" in f["reason"] for f in run.rounds[1]["failures"])


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "engine", ["local", pytest.param("ray", marks=pytest.mark.slow)]
)
def test_ctrl_c_ends_the_run_and_all_it_started(engine: str, tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    mark = f"FGL_TEST_{os.getpid()}_{engine}"
    process = subprocess.Popen(
        [*PROGRAM, "run", *quick(rounds=100000), "--engine", engine,
         "--set", f"run-dir={tmp_path}/run"],
        env=environment(FGL_MARK=mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while not any((tmp_path / "run" / "checkpoint").glob("*")):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        time.sleep(1)
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=90)
        assert process.returncode == 130
        assert "Interrupted. To resume after round" in said
        assert f"flower-fgl run --resume {tmp_path}/run" in said
        assert bystander.poll() is None
        assert Run.load(tmp_path / "run").status == "interrupted"
        assert marked(mark) == []
    finally:
        for left in (process, bystander):
            left.kill()
            left.wait()
        for found in marked(mark):
            found.kill()


def test_a_server_half_that_fails_of_ctrl_c_leaves_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(values: Any, **_: Any) -> None:
        # what Flower's processes do when the first of them is stopped
        run_local(values, on_round=None)
        folder = Path(values["run-dir"])
        summary = dict(Run.load(folder).summary)
        lost = {**summary, "status": "failed", "error": "StatusCode.UNAVAILABLE"}
        RunWriter(folder).write_summary(lost)
        raise KeyboardInterrupt

    monkeypatch.setattr("flower_fgl.simulation.run.run_local", stopped)
    values = {
        "method": "fedavg", "dataset": "synthetic", "clients": 3, "rounds": 1,
        "synthetic.nodes": 120, "synthetic.blocks": 6, "run-dir": str(tmp_path / "run"),
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run_one(values, engine="local", workers=None)
    run = Run.load(tmp_path / "run")
    assert run.status == "interrupted"
    assert "error" not in run.summary


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that inherited our mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FGL_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return [p for p in found if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.thorough
def test_bad_settings_end_at_once_with_one_line(tmp_path: Path) -> None:
    arguments: list[tuple[list[str], str]] = [
        (["--set", "roundz=3"], "rounds"),
        (["--set", "rounds"], "key=value"),
        (["--set", "rounds=[[1]]"], "expects a value, a list"),
        (["--clients", "0"], "at least 1"),
        (["--engine", "rai"], "ray"),
        (["--engine", "local", "--workers", "0"], "at least 1"),
        (["--engine", "ray", "--set", "device=cuda:0"], "--client-gpus"),
        (["--set", "device=gpu"], 'device must be "auto".*"gpu"'),
        (["--rounds", "3", "--set", "rounds=4"], "--rounds and --set rounds"),
        (["--set", "fedprox.mu=0.1"], "no effect with method = fedavg"),
        (["--set", "dirichlet-alpha=0.1"], 'it needs partition = "dirichlet"'),
        (["--set", "patience=5"], "it needs check-every above 0"),
        (["--dataset", "cora", "--set", "synthetic.nodes=9"], "dataset = cora"),
        ([str(tmp_path)], "is a folder"),
    ]
    for words, hint in arguments:
        with pytest.raises(ConfigError, match=hint):
            CliRunner().invoke(app, ["run", *words], catch_exceptions=False)
    done = flower_fgl(
        "run", "--method", "fedpox", "--set", f"output-dir={tmp_path}/runs"
    )
    assert done.returncode == 1
    assert "fedprox" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    words = ["run", "--engine", "local", *QUICK]
    words += ["--set", f"output-dir={tmp_path}/file"]
    with pytest.raises(RunError, match=f"{tmp_path}/file"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_an_experiment_runs_its_grid_and_goes_on_where_it_stopped(
    tmp_path: Path,
) -> None:
    experiment = tmp_path / "tiny.toml"
    experiment.write_text(
        'title = "Tiny"\n[config]\nclients = 2\nrounds = 2\nhidden-channels = 8\n'
        "synthetic.nodes = 80\nsynthetic.blocks = 4\n"
        '[[case]]\nname = "alone"\nmethod = "local"\n'
        '[[case]]\nname = "together"\nmethod = "fedavg"\nevaluate = "both"\n'
        "[grid]\nseed = [0, 1]\n[published]\nalone = 50.0\n"
        "[published-macro-f1]\nalone = 41.5\n"
    )
    arguments = ["run", str(experiment), "--engine", "local", "--quiet"]
    arguments += ["--set", f"output-dir={tmp_path}/runs"]
    first = invoke(*arguments)
    for word in ("Tiny", "alone", "together", "50.0", "41.5", "±", "global test acc"):
        assert word in first
    folders = sorted(
        p.name for p in (tmp_path / "runs" / "tiny").iterdir() if p.is_dir()
    )
    assert folders == [
        "alone-seed0", "alone-seed1", "together-seed0", "together-seed1",
    ]  # fmt: skip
    summary = tmp_path / "runs" / "tiny" / "together-seed1" / "summary.json"
    summary.write_text(summary.read_text().replace("completed", "failed"))
    second = invoke(*arguments)
    assert second.count("already complete") == 3
    assert second.splitlines()[-8:] == first.splitlines()[-8:]


TINY = "[config]\nclients = 2\nrounds = 1\nsynthetic.nodes = 80\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[grid]\nseed = 3\n", "must be a list"),
        ('[[case]]\nmethod = "local"\n', "name"),
        ('[[case]]\nname = "a b"\n[[case]]\nname = "a/b"\n', "same folder"),
        ('[[case]]\nname = "a"\n[[case]]\nname = "b"\nmethd = "local"\n', "methd"),
        ("[grid\n", "TOML"),
        ("[grid]\nseed = [0, 0]\n", "each grid value only once"),
        ('[[case]]\nname = "a"\n[[case]]\nname = "b"\nlr = -1\n', 'Run "b": lr must'),
        ("[cases]\nlr = 1\n", 'unknown top-level cases .*Did you mean "case"'),
    ],
)
def test_a_wrong_experiment_is_refused_before_anything_starts(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "tiny.toml").write_text(TINY + text)
    with pytest.raises(ConfigError, match=words):
        run_all(
            tmp_path / "tiny.toml",
            {"output-dir": str(tmp_path / "runs")},
            RunOptions("local", quiet=True),
            Console(quiet=True),
        )
    assert not (tmp_path / "runs").exists()


def test_a_changed_experiment_does_not_take_old_results(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY + "[grid]\nseed = [0]\n")
    place = {"output-dir": str(tmp_path / "runs")}
    run_options, console = RunOptions("local", quiet=True), Console(quiet=True)
    run_all(tmp_path / "tiny.toml", place, run_options, console)
    with pytest.raises(RunError, match="rounds"):
        run_all(tmp_path / "tiny.toml", {**place, "rounds": 2}, run_options, console)


def test_a_run_made_before_a_setting_existed_still_counts(tmp_path: Path) -> None:
    prox = 'method = "fedprox"\n[grid]\nseed = [0]\n'
    (tmp_path / "tiny.toml").write_text(TINY + prox)
    place = {"output-dir": str(tmp_path / "runs")}
    run_options, console = RunOptions("local", quiet=True), Console(quiet=True)
    run_all(tmp_path / "tiny.toml", place, run_options, console)
    (written,) = (tmp_path / "runs").rglob("config.toml")
    new = ("edge-sparsity", "mu = ")
    old = [r for r in written.read_text().splitlines() if not r.startswith(new)]
    assert len(old) == len(written.read_text().splitlines()) - 2
    written.write_text("\n".join(old) + "\n")
    before = written.stat().st_mtime_ns
    run_all(tmp_path / "tiny.toml", place, run_options, console)
    assert written.stat().st_mtime_ns == before
    with pytest.raises(RunError, match="edge-sparsity"):
        run_all(
            tmp_path / "tiny.toml",
            {**place, "edge-sparsity": 0.2},
            run_options,
            console,
        )


def test_a_run_made_with_a_setting_since_removed_still_counts(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(
        TINY + 'method = "fedala"\n[grid]\nseed = [0]\n'
    )
    place = {"output-dir": str(tmp_path / "runs")}
    run_options, console = RunOptions("local", quiet=True), Console(quiet=True)
    run_all(tmp_path / "tiny.toml", place, run_options, console)
    (written,) = (tmp_path / "runs").rglob("config.toml")
    text = written.read_text()
    written.write_text(text.replace("[fedala]\n", "[fedala]\nweight-lr = 1.0\n"))
    assert written.read_text() != text
    before = written.stat().st_mtime_ns
    run_all(tmp_path / "tiny.toml", place, run_options, console)
    assert written.stat().st_mtime_ns == before
    written.write_text(text.replace("[fedala]\n", "[fedala]\nweight-lr = 0.5\n"))
    with pytest.raises(ConfigError, match=r"weight-lr is no longer.*1\.0, got 0\.5"):
        run_all(tmp_path / "tiny.toml", place, run_options, console)


def test_a_folder_that_is_no_run_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY + "[grid]\nseed = [0]\n")
    mine = tmp_path / "runs" / "tiny" / "seed0" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("keep")
    with pytest.raises(RunError, match="not a run folder"):
        run_all(
            tmp_path / "tiny.toml",
            {"output-dir": str(tmp_path / "runs")},
            RunOptions("local", quiet=True),
            Console(quiet=True),
        )
    assert mine.read_text() == "keep"


def test_a_run_folder_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (
        hold(tmp_path / "run"),
        pytest.raises(RunError, match="another process"),
        hold(tmp_path / "run"),
    ):
        pass


@pytest.mark.thorough
def test_the_data_commands_show_what_there_is(tmp_path: Path) -> None:
    lists: dict[str, list[str]] = {
        "methods": ["fedavg", "McMahan"],
        "datasets": ["cora", "5,278"],
        "settings": ["dirichlet-alpha", "fedprox.mu"],
    }
    for command, words in lists.items():
        output = invoke(command)
        assert all(word in output for word in words)
    for name, defaults in DATASET_DEFAULTS.items():
        for key, value in defaults.items():
            assert f"{name}: {key} = {value}" in invoke("settings")
    output = invoke("settings", "fedpg")
    assert "fedpg.rho" in output
    assert "gamlp" in output
    assert "fedprox.mu" not in output
    small = ["--clients", "3", "--set", "synthetic.nodes=120"]
    picture = tmp_path / "pictures" / "labels.png"
    assert "edges kept" in invoke("partition", *small, "--out", str(picture))
    bare = picture.with_suffix("")
    assert f"Heat map: {bare}" in invoke("partition", *small, "--out", str(bare))
    for path in (picture, bare):
        assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunError, match=r"Cannot write .*foo.*supported formats"):
        CliRunner().invoke(
            app,
            ["partition", *small, "--out", str(tmp_path / "x.foo")],
            catch_exceptions=False,
        )


def test_an_export_does_not_mix_with_that_of_more_clients(tmp_path: Path) -> None:
    small = ["--set", "synthetic.nodes=120", "--clients"]
    place = str(tmp_path / "graphs")
    for _ in range(2):
        invoke("export", place, *small, "3")
        assert len(list((tmp_path / "graphs").glob("client-*.npz"))) == 3
    before = (tmp_path / "graphs" / "client-0.npz").read_bytes()
    with pytest.raises(DataError, match=r"holds client-2\.npz of another export"):
        CliRunner().invoke(app, ["export", place, *small, "2"], catch_exceptions=False)
    assert (tmp_path / "graphs" / "client-0.npz").read_bytes() == before


def test_an_inductive_partition_counts_all_nodes(tmp_path: Path) -> None:
    small = ["--clients", "3", "--set", "synthetic.nodes=120"]
    output = invoke("partition", *small, "--set", "setting=inductive")
    assert "120 nodes" in output


def test_an_exported_graph_can_be_run_as_ones_own(tmp_path: Path) -> None:
    small = ["--clients", "2", "--set", "synthetic.nodes=160"]
    invoke("export", str(tmp_path / "graphs"), *small)
    graph = tmp_path / "graphs" / "client-0.npz"
    output = invoke(
        "run", "--engine", "local", "--dataset", str(graph), "--clients", "2",
        "--rounds", "2", "--quiet", "--set", f"output-dir={tmp_path}/runs",
    )  # fmt: skip
    assert Run.load(run_folder(output)).status == "completed"


def test_a_graph_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "no.npz")
    place = ["--set", f"output-dir={tmp_path / 'runs'}"]
    for words in (
        ["run", "--engine", "local", "--quiet", "--dataset", missing, *place],
        ["partition", "--dataset", missing],
        ["export", str(tmp_path / "graphs"), "--dataset", missing],
    ):
        with pytest.raises(DataError, match=re.escape(f"No graph file at {missing}")):
            CliRunner().invoke(app, words, catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_in_place_of_a_data_set_needs_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match=r"write \./mine"):
        CliRunner().invoke(app, ["run", "--dataset", "mine"], catch_exceptions=False)


def test_an_empty_experiment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "e.toml").touch()
    with pytest.raises(ConfigError, match="is empty"):
        CliRunner().invoke(
            app, ["run", str(tmp_path / "e.toml")], catch_exceptions=False
        )


def test_a_report_of_a_run_and_of_several_is_written(tmp_path: Path) -> None:
    folders = []
    for method in ("local", "fedavg"):
        output = invoke(
            "run", "--engine", "local", "--method", method, *QUICK, "--quiet",
            "--set", f"output-dir={tmp_path}/runs",
        )  # fmt: skip
        folders.append(str(run_folder(output)))
    invoke("report", folders[0])
    assert (Path(folders[0]) / "report.html").stat().st_size > 10_000
    invoke("report", *folders, "--out", str(tmp_path / "both.html"))
    text = (tmp_path / "both.html").read_text("utf-8")
    assert "fedavg" in text
    assert "local" in text
    invoke("report", str(Path(folders[0]).parent), "--out", str(tmp_path / "all.html"))
    assert "fedavg" in (tmp_path / "all.html").read_text("utf-8")


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=str(tmp_path)):
        CliRunner().invoke(app, ["report", str(tmp_path)], catch_exceptions=False)


def test_any_progress_is_drawn_in_plain_output(tmp_path: Path) -> None:
    printed = invoke(
        "run", "--engine", "local", *QUICK, "--set", f"output-dir={tmp_path}/runs"
    )
    (line,) = [line for line in printed.splitlines() if "0:0" in line]
    assert re.search(r"^run: 0:00:0\d  loss .* val .* test ", line)


def test_progress_says_nothing_of_validation_nodes_that_are_not_there(
    tmp_path: Path,
) -> None:
    words = [word.replace("nodes=120", "nodes=600") for word in quick(clients=2)]
    printed = invoke(
        "run", "--engine", "local", *words,
        "--set", "setting=few-shot", "--set", "shots=3",
        "--set", f"output-dir={tmp_path}",
    )  # fmt: skip
    assert "test" in printed
    assert "nan" not in printed


def test_the_steps_of_a_servers_training_are_shown_above_the_bar(
    tmp_path: Path,
) -> None:
    printed = invoke(
        "run", "--engine", "local", *quick(rounds=1), "--method", "opfgl",
        "--set", "opfgl.server-steps=60", "--set", "local-epochs=5",
        "--set", "min-class-count=2",
        "--set", f"output-dir={tmp_path}",
    )  # fmt: skip
    assert "Pseudo-graph: step 60 of 60, loss" in printed
