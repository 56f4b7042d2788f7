"""The launcher against real SuperLinks: how runs end, and that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from flower_fgl.core.errors import RunError
from flower_fgl.simulation.flower import flower_simulation as launcher
from flower_fgl.simulation.flower.flower_simulation import (
    LaunchResult,
    launch,
    write_app_folder,
)
from flower_fgl.simulation.flower.superlink import (
    PROGRAMS,
    FlowerHome,
    flower_environment,
    tail,
)
from tests.support.flower_apps import TinyApp, write_tiny_app

pytestmark = pytest.mark.xdist_group("supernodes")

PROCESSES = Path(launcher.__file__).with_name("supervisor.py")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A folder for Flower homes; whatever a failed test leaves there is ended."""
    yield tmp_path / "home"
    for process in processes_of(tmp_path / "home"):
        process.kill()


@pytest.fixture
def waiting_app(tmp_path: Path) -> TinyApp:
    return write_tiny_app(tmp_path, "time.sleep(600)")


def processes_of(home: Path) -> list[psutil.Process]:
    """Return all processes, of whatever parent, whose Flower home lies in ``home``."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FLWR_HOME", "").startswith(str(home)):
                # A SuperExec hides its environment, so look at children as well.
                found |= {process, *process.children(recursive=True)}
    return [p for p in found if is_running(p)]


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def named(home: Path, program: str) -> list[psutil.Process]:
    """Return the processes in ``home`` that run ``program``."""
    found = []
    for process in processes_of(home):
        with contextlib.suppress(psutil.Error):
            if program in [Path(word).name for word in process.cmdline()[:2]]:
                found.append(process)
    return found


def raylets_of(home: Path) -> list[psutil.Process]:
    return named(home, "raylet")


@contextlib.contextmanager
def process_of(command: list[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Start a process; it is dead when the block ends, even by a failed check."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def start(app: TinyApp, home: Path, **options: object) -> LaunchResult:
    arguments = {"run_config": {}, "num_clients": 2, "environment": app.environment}
    return launch(app.folder, home=home, **(arguments | options))


@pytest.mark.engines
def test_a_run_completes_and_leaves_no_trace(tmp_path, home, monkeypatch):
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # the virtual environment not active
    app = write_tiny_app(
        tmp_path,
        """
        import json
        answers = ask_clients(grid, 3)
        Path(context.run_config["out"]).write_text(json.dumps({
            "partitions": sorted(a["partition-id"] for a in answers),
            "workers": len({a["pid"] for a in answers}),
            "threads": {a["threads"] for a in answers}.pop(),
            "config": dict(context.run_config),
            "telemetry": os.environ["FLWR_TELEMETRY_ENABLED"],
            "folder": os.getcwd(),
        }))
        print("the last words")
        """,
        'answer["pid"] = os.getpid(); answer["threads"] = os.environ["OMP_NUM_THREADS"]'
        "; time.sleep(0.3)",
        config={"out": "", "lr": 0.1, "part": {"alpha": 1.0, "name": "a"}},
    )
    before = dict(os.environ)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ticks = []
    out = tmp_path / "out put.json"
    result = start(
        app,
        home,
        num_clients=3,
        run_config={"out": str(out), "part.alpha": 2.5, "part.name": 'a "b"'},
        workers=1,
        on_tick=lambda: ticks.append(time.monotonic()),
        log_file=tmp_path / "run.log",
    )

    assert result.flower_status == "finished:completed"
    assert isinstance(result.run_id, int)
    assert "the last words" in result.log_tail.splitlines()
    assert "\x1b" not in result.log_tail
    assert "the last words" in (tmp_path / "run.log").read_text()
    assert json.loads(out.read_text()) == {
        "partitions": [0, 1, 2],
        "workers": 1,
        "threads": "1",
        "config": {
            "out": str(out),
            "lr": 0.1,
            "part.alpha": 2.5,
            "part.name": 'a "b"',
        },
        "telemetry": "0",
        "folder": os.getcwd(),
    }
    seconds = ticks[-1] - ticks[0]
    assert 2 * seconds < len(ticks) < 6 * seconds
    assert processes_of(home) == []
    assert list(home.iterdir()) == []
    assert {k: v for k, v in os.environ.items() if k in before} == {
        k: v for k, v in before.items() if k != "OMP_NUM_THREADS"
    }


@pytest.fixture(scope="module")
def two_at_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, LaunchResult], Path]:
    """Two launches at the same time in one home; their results, and the folder."""
    folder = tmp_path_factory.mktemp("two")
    note = 'Path(context.run_config["out"]).write_text(os.environ["FLWR_HOME"])\n'
    apps = {
        "raises": write_tiny_app(
            folder / "raises",
            note + 'ask_clients(grid, 2)\nraise RuntimeError("all is lost")',
            'print("a client in distress", file=sys.stderr, flush=True)',
            config={"out": ""},
        ),
        "leaves": write_tiny_app(
            folder / "leaves", note + "sys.exit(3)", config={"out": ""}
        ),
    }
    with ThreadPoolExecutor(2) as pool:
        started = {
            name: pool.submit(
                start,
                app,
                folder / "home",
                workers=1,
                run_config={"out": str(folder / name / "home.txt")},
                log_file=folder / name / "log",
            )
            for name, app in apps.items()
        }
        results = {name: future.result() for name, future in started.items()}
    assert processes_of(folder / "home") == []
    return results, folder


@pytest.mark.slow
def test_two_launches_at_once_keep_apart(two_at_once):
    results, folder = two_at_once
    assert results["raises"].run_id != results["leaves"].run_id
    homes = {(folder / name / "home.txt").read_text() for name in results}
    assert len(homes) == 2
    assert "all is lost" not in results["leaves"].log_tail


@pytest.mark.slow
def test_a_server_app_that_raises_is_a_failed_run(two_at_once):
    result = two_at_once[0]["raises"]
    assert result.flower_status == "finished:failed"
    assert "RuntimeError: all is lost" in result.log_tail
    reason = result.log_tail.splitlines()[-1]
    assert reason == "Simulation failed with exception: all is lost"


@pytest.mark.slow
def test_the_log_of_a_failed_run_holds_what_workers_said(two_at_once):
    assert "a client in distress" in (two_at_once[1] / "raises" / "log").read_text()


@pytest.mark.slow
def test_flower_calls_a_server_app_that_left_by_sys_exit_completed(two_at_once):
    # Not our judgement: whoever calls must look at what the app wrote.
    assert two_at_once[0]["leaves"].flower_status == "finished:completed"


@pytest.mark.engines
def test_an_exception_in_mid_run_leaves_no_process_behind(waiting_app, home, tmp_path):
    namesake = tmp_path / "flower-superlink"
    namesake.write_text("import time; time.sleep(600)")
    foreign = subprocess.Popen([sys.executable, str(namesake)])

    def interrupt() -> None:
        if raylets_of(home):
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            start(waiting_app, home, on_tick=interrupt)
        assert processes_of(home) == []
        assert list(home.iterdir()) == []
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_an_exception_while_starting_leaves_no_process_behind(waiting_app, home):
    def interrupt() -> None:
        assert not named(home, "flower-superlink"), "here it comes"

    with pytest.raises(AssertionError, match="here it comes"):
        start(waiting_app, home, on_tick=interrupt)
    assert processes_of(home) == []


@pytest.mark.engines
@pytest.mark.parametrize(
    "signals",
    [[signal.SIGTERM], [signal.SIGKILL], [signal.SIGINT, signal.SIGINT]],
    ids=["SIGTERM", "SIGKILL", "two Ctrl-C"],
)
def test_a_killed_launcher_leaves_no_process_behind(waiting_app, home, signals):
    program = (
        "import signal; from pathlib import Path\n"
        "from flower_fgl.simulation.flower.flower_simulation import launch\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # if ignored\n"
        f"launch(Path({str(waiting_app.folder)!r}), run_config={{}}, num_clients=1,"
        f" home=Path({str(home)!r}), environment={dict(waiting_app.environment)!r})"
    )
    with process_of(
        [sys.executable, "-c", program], stderr=PIPE, text=True
    ) as launched:
        assert eventually(lambda: named(home, "flwr-simulation"), 90)
        for number in signals:
            launched.send_signal(number)
            time.sleep(0.2)
        _, error = launched.communicate(timeout=20)
    assert ("KeyboardInterrupt" in error) == (signals != [signal.SIGKILL])
    assert eventually(lambda: not processes_of(home), 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "culprit"),
    [("flower-superlink", "SuperLink"), ("flwr-simulation", "run's process")],
)
def test_a_program_killed_in_mid_run_is_a_failed_run(
    waiting_app, home, program, culprit
):
    def kill() -> None:
        if raylets_of(home):
            for process in named(home, program):
                process.kill()

    result = start(waiting_app, home, on_tick=kill)
    assert result.flower_status == "failed"
    assert f"The {culprit} was killed" in result.log_tail.splitlines()[-1]
    assert processes_of(home) == []


@pytest.mark.engines
@pytest.mark.timeout(60)  # half of what a run may stay pending
def test_a_run_that_nobody_takes_up_gets_a_second_super_link(waiting_app, home):
    """Kill the first SuperExec: Flower never restarts it, the run stays pending."""
    killed = []

    def kill_first() -> None:
        if killed and named(home, "flwr-simulation"):
            raise KeyboardInterrupt("taken up")
        for process in [] if killed else named(home, "flower-superexec"):
            process.kill()
            killed.append(process)

    with pytest.raises(KeyboardInterrupt, match="taken up"):
        start(waiting_app, home, on_tick=kill_first)
    assert processes_of(home) == []


@pytest.mark.engines
def test_a_run_that_stays_pending_twice_is_an_error(waiting_app, home):
    def suspend() -> None:
        for process in named(home, "flower-superexec"):
            process.suspend()

    with pytest.raises(
        RunError, match=r"in two attempts: it stayed pending for 1 seconds"
    ):
        start(waiting_app, home, on_tick=suspend, pending_timeout=1.0)
    assert processes_of(home) == []


@pytest.mark.engines
def test_a_key_that_the_app_does_not_know_is_refused_with_flowers_reason(
    waiting_app, home
):
    with pytest.raises(RunError, match=r"rejected the run: \[code: 15\] Invalid run"):
        start(waiting_app, home, run_config={"unheard-of": 1})
    assert processes_of(home) == []


def test_a_super_link_that_does_not_start_is_an_error(waiting_app, home):
    environment = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "never", "PYTHONHOME": "/none"}
    with pytest.raises(RunError, match="the SuperLink did not start"):
        start(waiting_app, home, environment=environment)


def test_more_cpus_than_there_are_is_an_error_before_anything_starts(waiting_app, home):
    cpus = len(os.sched_getaffinity(0))
    with pytest.raises(RunError, match=f"1 clients .* need {cpus + 1} CPUs.*{cpus}"):
        start(waiting_app, home, client_cpus=cpus + 1)
    with pytest.raises(RunError, match=f"need {cpus + 1} CPUs"):
        start(waiting_app, home, workers=cpus + 1)
    assert not home.exists()


def test_more_gpus_than_there_are_is_an_error_before_anything_starts(
    waiting_app, home, monkeypatch
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(RunError, match=r"0\.25 GPUs each .* than the 0 GPUs"):
        start(waiting_app, home, client_gpus=0.25)
    assert not home.exists()


@pytest.mark.parametrize(
    ("share", "gpus", "workers"), [(0.25, 1, 4), (0.1, 1, 10), (0.4, 2, 4), (2.0, 5, 2)]
)
def test_the_gpus_limit_how_many_clients_work_at_once(
    monkeypatch, share, gpus, workers
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    sizes = launcher._federation_config(100, 2, share, None, is_cluster=False)
    assert f"init-args-num-cpus={2 * workers}" in sizes.split()


def test_no_more_workers_start_than_there_are_clients(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    sizes = launcher._federation_config(3, 4, 0.0, None, is_cluster=False)
    assert "init-args-num-cpus=12" in sizes.split()


def test_a_ray_cluster_sets_its_own_workers():
    sizes = launcher._federation_config(3, 4, 0.0, None, is_cluster=True)
    assert "init-args-num-cpus" not in sizes
    with pytest.raises(RunError, match="leave out workers"):
        launcher._federation_config(3, 4, 0.0, 2, is_cluster=True)


def test_the_environment_is_private_and_keeps_what_the_user_set(monkeypatch):
    for name in ("FLWR_HOME", "RAY_TMPDIR"):
        monkeypatch.setenv(name, "/theirs")
    monkeypatch.setenv("RAY_max_direct_call_object_size", "7")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    got = flower_environment(Path("/h"), Path("/r"), {"MINE": "1"})
    assert (got["FLWR_HOME"], got["RAY_TMPDIR"], got["MINE"]) == ("/h", "/r", "1")
    assert got["RAY_ADDRESS"] == "local"
    assert got["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "1"
    assert got["RAY_max_direct_call_object_size"] == "7"
    assert got["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert got["no_proxy"] == "127.0.0.1,localhost"
    assert got["PATH"].startswith(f"{PROGRAMS}{os.pathsep}")


def test_a_ray_cluster_of_the_users_is_joined(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    got = flower_environment(Path("/h"), Path("/r"), {})
    assert got["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert "RAY_TMPDIR" not in got


def test_rays_files_lie_below_the_users_choice(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert FlowerHome(tmp_path, {}).ray_folder.parent == tmp_path


def test_launches_with_two_versions_of_flower_share_no_database(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **__: started.append(command)
    )
    homes = [FlowerHome(tmp_path, {}) for _ in range(2)]
    for one in homes:
        one._start()
    assert homes[0].folder != homes[1].folder
    superlinks = [command for command in started if "--simulation" in command]
    assert len(superlinks) == 2
    assert not any("--database" in command for command in superlinks)


@pytest.mark.engines
def test_a_foreign_super_link_on_the_port_is_not_ours(tmp_path):
    """Flower asks whatever answers on the port; we look whose port it is."""
    with FlowerHome(tmp_path, {}) as first, FlowerHome(tmp_path, {}) as second:
        assert first.port != second.port
        assert eventually(lambda: first.is_ready)
        second.port = first.port
        assert eventually(lambda: second.find("flower-superlink"))
        assert not second.is_ready


def test_the_keeper_ends_daemons_and_the_deaf(tmp_path):
    """A grandchild that left session and parent, and one that ignores SIGTERM."""
    (tmp_path / "scratch").mkdir()
    daemon = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(600)"
    deaf = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.run([sys.executable, '-c', {daemon!r}])\n"
        f"pathlib.Path({str(tmp_path / 'ready')!r}).touch()\n"
        "time.sleep(600)"
    )
    command = [sys.executable, "-P", str(PROCESSES), str(tmp_path / "scratch")]
    with process_of(
        [*command, sys.executable, "-c", deaf],
        stdin=PIPE,
        env={**os.environ, "FLWR_HOME": str(tmp_path)},
    ) as keeper:
        assert eventually((tmp_path / "ready").exists)
        assert len(processes_of(tmp_path)) == 3
        keeper.send_signal(signal.SIGINT)  # a Ctrl-C is the launcher's business
        keeper.stdin.close()
        assert keeper.wait(timeout=10) == 0
    assert processes_of(tmp_path) == []
    assert not (tmp_path / "scratch").exists()


def test_a_run_is_killed_before_what_it_needs(tmp_path):
    """It cannot write what it thinks of the end of its workers."""
    run = tmp_path / "flwr-simulation"
    run.write_text(
        "import pathlib, signal, subprocess, sys, time\n"
        "def says(*_):\n"
        "    pathlib.Path(sys.argv[1]).write_text(open(sys.argv[1]).read() + 'asked')\n"
        "    time.sleep(600)\n"
        "signal.signal(signal.SIGTERM, says)\n"
        "if sys.argv[2:]:\n"
        "    subprocess.Popen([sys.executable, *sys.argv[2:]])\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(600)\n"
    )
    worker = tmp_path / "worker"
    worker.write_text(run.read_text())
    notes = [tmp_path / "of-run", tmp_path / "of-worker"]
    keep = [sys.executable, "-P", str(PROCESSES), ""]
    command = [sys.executable, str(run), str(notes[0]), str(worker), str(notes[1])]
    with process_of(
        [*keep, *command],
        stdin=PIPE,
        env={**os.environ, "FLWR_HOME": str(tmp_path)},
    ) as keeper:
        assert eventually(lambda: all(note.exists() for note in notes))
        keeper.stdin.close()
        assert keeper.wait(timeout=10) == 0
    assert [note.read_text() for note in notes] == ["", "asked"]
    assert processes_of(tmp_path) == []


@pytest.mark.thorough
def test_a_written_app_is_one_that_flower_builds(tmp_path):
    config = {"rounds": 3, "fedpg": {"alpha": 0.5}, "name": 'a "b"', "flag": True}
    folder = write_app_folder(tmp_path / "flower-fgl", config=config)
    flwr = Path(sys.executable).with_name("flwr")
    environment = {**os.environ, "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environment["FLWR_TELEMETRY_ENABLED"] = "0"
    subprocess.run(
        [str(flwr), "build", "--app", str(folder)],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
    )
    (fab,) = tmp_path.glob("flower-fgl.flower-fgl.*.fab")
    with zipfile.ZipFile(fab) as bundle:
        assert not [name for name in bundle.namelist() if name.endswith(".py")]
        app = tomllib.loads(bundle.read("pyproject.toml").decode())["tool"]["flwr"]
    assert app["app"]["config"] == config
    assert app["app"]["components"] == {
        "serverapp": "flower_fgl.server_app:app",
        "clientapp": "flower_fgl.client_app:app",
    }


def test_the_tail_of_a_log_is_plain_and_short(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(f"\x1b[92mline {i}\x1b[0m" for i in range(100)))
    assert tail(log, 2) == "line 98\nline 99"
    assert tail(tmp_path / "none") == ""
