"""``flower-fgl run`` with lists: values, rows, runs side by side, failures."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import active_children, spawn
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flower_fgl import Run, register
from flower_fgl.cli.arguments import read_options, read_values
from flower_fgl.cli.main import app
from flower_fgl.cli.progress import GridProgress
from flower_fgl.core import extensions
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.lab.experiments import jobs as jobs_module
from flower_fgl.lab.experiments.experiment_file import Experiment
from flower_fgl.lab.experiments.jobs import Job, run_jobs
from flower_fgl.simulation.local import run_local
from tests.engines.test_run import environment, marked
from tests.support.flower_deployment import wait_until
from tests.support.short_runs import comparable
from tests.support.thread_workers import use_threads

TINY = {
    "clients": 2, "rounds": 2, "hidden-channels": 8, "synthetic.nodes": 80,
    "synthetic.blocks": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "values"),
    [
        ("seed", "0..3", [0, 1, 2, 3]),
        ("seed", "0..1, 7", [0, 1, 7]),
        ("lr", "0.1,1e-2", [0.1, 0.01]),
        ("method", "local,fedavg", ["local", "fedavg"]),
        ("secure-aggregation", "True,false", [True, False]),
        ("fedprox.mu", "[0.1, 1.0]", [0.1, 1.0]),
        ("model", "gcn,gin", ["gcn,gin"]),
        ("model", '["gcn,gin", "gcn"]', ["gcn,gin", "gcn"]),
        ("num-neighbors", "10,5", ["10,5"]),
        ("num-neighbors", "10", ["10"]),
        ("output-dir", "2026-11-27", ["2026-11-27"]),
        ("run-dir", "12:30:00", ["12:30:00"]),
        ("output-dir", "2026-11-27T12:30:00", ["2026-11-27T12:30:00"]),
        ("output-dir", "7", ["7"]),
        ("target", "true", ["true"]),
        ("output-dir", "a,b", ["a,b"]),
        ("track", "mlflow,wandb", ["mlflow,wandb"]),
        ("owners", "tu:MUTAG,tu:NCI1", ["tu:MUTAG,tu:NCI1"]),
        ("dataset", '"./a,b.npz"', ["./a,b.npz"]),
        ("dataset", "../a..b.npz", ["../a..b.npz"]),
    ],
)
def test_a_text_holds_one_value_or_several(
    key: str, text: str, values: list[Any]
) -> None:
    assert read_values(key, text) == values


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("seed", "3..0", "from the smaller to the larger"),
        ("seed", "0..99999", "at most 10,000 values"),
        ("lr", "0..1", "lr is no whole number"),
        ("lr", "0.1..0.3", "lr is no whole number"),
        ("seed", "0...4", "0...4 is no range. A range of whole numbers is a..b"),
        ("lr", "0.1,,1", "empty value"),
        ("seed", "0..2,1", "seed lists 1 twice"),
        ("lr", "[]", "expects a value, a list"),
        ("lr", "[[0.1]]", "expects a value, a list"),
    ],
)
def test_a_malformed_list_is_refused(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_values(key, text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "1", "--seed", "2"], "--seed is given 2 times.*--seed A,B"),
        (["--jobs", "2", "--jobs", "3"], r"--jobs is given 2 times: give it once\.$"),
        (["--set", "lr=0.1", "--set", "lr=0.2"], r"lr=… is given twice.*lr=0\.1,0\.2"),
        (["--seed", "1", "--set", "seed=2"], "set the same key"),
        (
            ["--seed", "0,1", "--set", "run-dir=x"],
            "run-dir = x is the folder of one run",
        ),
        (["--jobs", "2"], "there is only one run"),
        (["--seed", "0,1", "--jobs", "2", "--workers", "2"], "gives each run one proc"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: list[str], message: str, tmp_path: Path
) -> None:
    place = ["--set", f"output-dir={tmp_path / 'runs'}"]
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["run", *words, *place], catch_exceptions=False)
    assert not (tmp_path / "runs").exists()


def test_one_value_is_no_grid() -> None:
    assert read_options({"seed": "3"}, ["lr=0.1,1.0"]) == {"seed": 3, "lr": [0.1, 1.0]}


def test_a_grid_value_without_effect_makes_no_second_run() -> None:
    grid = {"method": ["fedavg", "fedprox"], "fedprox.mu": [0.1, 1.0], "seed": [0, 1]}
    runs = Experiment("x", grid=grid).runs()
    assert [run.name for run in runs] == [
        "fedavg-seed0", "fedavg-seed1", "fedprox-mu0.1-seed0", "fedprox-mu0.1-seed1",
        "fedprox-mu1.0-seed0", "fedprox-mu1.0-seed1",
    ]  # fmt: skip
    labels = list(dict.fromkeys(run.label for run in runs))
    assert labels == ["fedavg", "fedprox, mu=0.1", "fedprox, mu=1.0"]


def test_an_option_with_several_values_becomes_part_of_a_files_grid() -> None:
    file = Experiment(
        "x", config={"lr": 0.5}, cases=[{"name": "a", "method": "local"}],
        grid={"dropout": [0.0]},
    )  # fmt: skip
    runs = file.with_options({"lr": [0.1, 1.0], "rounds": 3}).runs()
    assert [run.label for run in runs] == [
        "a, dropout=0.0, lr=0.1", "a, dropout=0.0, lr=1.0",
    ]  # fmt: skip
    assert [run.settings["lr"] for run in runs] == [0.1, 1.0]


class Clock:
    """Seconds that a test sets."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def plain_console() -> Console:
    return Console(width=80, record=True, force_terminal=False, file=io.StringIO())


def lines_after(rounds: dict[str, int], events: list[tuple[float, str, int]]) -> str:
    """Print what runs report at some seconds: their start (0), a round, or the end (-1)."""
    now, console = Clock(), plain_console()
    with GridProgress(console, rounds, now=now) as progress:
        for now.seconds, name, number in events:
            if number > 0:
                row = {"phase": "train", "round": number, "loss": 0.5}
                progress.round(name, row)
            else:
                progress.end(name, "") if number else progress.start(name)
    return console.export_text()


def test_the_time_left_does_not_count_the_start_of_a_process() -> None:
    events = [(0.0, "a", 0), (80.0, "a", 1), (81.0, "a", 2), (82.0, "a", 3)]
    assert lines_after({"a": 3, "b": 11}, [*events, (82.0, "a", -1)]) == (
        "a: 0:01:22  loss 0.500  (1 of 2 runs, about 0:00:11 left)\n"
    )


def test_the_time_left_does_not_count_rounds_before_a_run_resumed() -> None:
    events = [(0.0, "a", 0), (1.0, "a", 1), (3.0, "a", 2), (3.0, "a", -1)]
    events += [(3.0, "b", 0), (5.0, "b", 51), (7.0, "b", 52), (7.0, "b", -1)]
    first, second = lines_after({"a": 2, "b": 52, "c": 4}, events).splitlines()
    assert first.endswith("(1 of 3 runs, about 0:01:52 left)")  # 56 rounds of 2 s
    assert second.endswith("(2 of 3 runs, about 0:00:08 left)")


def test_the_rounds_of_a_run_that_ended_before_are_not_left() -> None:
    events = [(0.0, "a", 0), (1.0, "a", 1), (2.0, "a", 2), (2.0, "a", -1)]
    assert "about 0:00:05 left" in lines_after({"a": 100, "b": 5}, events)


NOTEBOOK = """
import torch

class OwnNetwork(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, num_layers, dropout):
        super().__init__()
        self.linear = torch.nn.Linear(in_channels, hidden_channels)

    def forward(self, x, edge_index):
        return self.linear(x).relu()
"""
OWN = {**TINY, "model": "own-network"}


@pytest.fixture(scope="module")
def side_by_side(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, str]]:
    """Return the folder and the output of a grid of four runs in two processes."""
    monkeypatch = pytest.MonkeyPatch()
    empty: dict[str, Any] = {"methods": {}, "backbones": {}, "datasets": {}}
    monkeypatch.setattr(extensions, "_registered", empty)
    folder = tmp_path_factory.mktemp("grid")
    main: dict[str, Any] = {"__name__": "__main__"}  # other processes cannot import it
    exec(NOTEBOOK, main)
    register(backbone=main["OwnNetwork"], name="own-network")
    words = ["run", "--method", "local,fedavg", "--seed", "0..1", "--jobs", "2"]
    for key, value in {**OWN, "output-dir": str(folder)}.items():
        words += ["--set", f"{key}={value}"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    assert result.exit_code == 0, f"{result.output}{result.exception}"
    (grid,) = folder.iterdir()
    yield grid, result.output
    monkeypatch.undo()


@pytest.mark.thorough
def test_runs_side_by_side_have_the_numbers_of_single_runs(
    side_by_side: tuple[Path, str], tmp_path: Path
) -> None:
    grid, output = side_by_side
    assert (grid / "comparison.html").exists()
    for text in ("local", "fedavg", "4 of 4 runs", "Report: "):
        assert text in output
    for method in ("local", "fedavg"):
        for seed in (0, 1):
            place = {"run-dir": str(tmp_path / f"{method}{seed}")}
            alone = run_local({**OWN, "method": method, "seed": seed, **place})
            beside = Run.load(grid / f"{method}-seed{seed}")
            assert comparable(beside) == comparable(alone)
            models = [run.path / "model.safetensors" for run in (beside, alone)]
            if method == "fedavg":
                assert models[0].read_bytes() == models[1].read_bytes()


def test_a_new_process_does_not_import_the_callers_script() -> None:
    with jobs_module._child_environment():
        prepared = spawn.get_preparation_data("worker")
    assert not [key for key in prepared if key.startswith("init_main")]


class Notes(GridProgress):
    """Notes of the runs, without a console."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self, name: str) -> None:
        pass

    def note(self, name: str, text: str) -> None:
        self.notes.append(text)

    def end(self, name: str, error: str) -> None:
        assert not error


@pytest.mark.parametrize(
    ("needs", "free", "at_once", "why"),
    [
        (
            6.0,
            10.0,
            1,
            "at least 6.0 GiB of memory, and 1 of the runs beside it leave 4.0",
        ),
        (
            4.0,
            10.0,
            2,
            "at least 4.0 GiB of memory, and 2 of the runs beside it leave 2.0",
        ),
        (2.0, 10.0, 3, ""),
        (12.0, 10.0, 1, "at least 12.0 GiB"),  # alone, a run reports it itself
    ],
)
def test_runs_side_by_side_share_the_memory(
    needs: float, free: float, at_once: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, most = [0], [0]

    def run(*_: Any, **__: Any) -> str:
        active[0] += 1
        most[0] = max(most[0], active[0])
        time.sleep(0.05)
        active[0] -= 1
        return ""

    gib = jobs_module.GIB
    sizes = int(needs * gib), int(free * gib)
    use_threads(monkeypatch, run, sizes)
    watcher = Notes()
    jobs = [Job(f"run{k}", {}) for k in range(6)]
    assert jobs_module._run_all(jobs, watcher, run, 3) == {}
    assert most == [at_once]
    assert len(watcher.notes) == bool(why)  # one line, whatever the number of runs
    assert all(why in note for note in watcher.notes)


def test_a_job_knows_what_it_needs_and_a_wrong_one_is_left_to_its_run() -> None:
    needed, free = jobs_module.needed_memory(TINY)
    assert 0 < needed < jobs_module.GIB < free
    assert jobs_module.needed_memory({**TINY, "dataset": "absent.npz"})[0] == 0


class Died:
    """Watcher that kills the process of a run once, and notes what happened."""

    def __init__(self) -> None:
        self.ended: dict[str, str] = {}

    def start(self, name: str) -> None:
        pass

    def round(self, name: str, row: Any) -> None:
        if name == "killed":
            (child,) = active_children()
            os.kill(child.pid, signal.SIGKILL)

    def note(self, name: str, text: str) -> None:
        pass

    def end(self, name: str, error: str) -> None:
        self.ended[name] = error


@pytest.mark.slow
def test_a_process_that_dies_fails_its_run_only(tmp_path: Path) -> None:
    jobs = [
        Job(name, {**TINY, "rounds": rounds, "run-dir": str(tmp_path / name)})
        for name, rounds in (("killed", 2000), ("next", 2))
    ]
    watcher = Died()
    run = partial(jobs_module._run, engine="local", workers=1)
    errors = jobs_module._run_all(jobs, watcher, run, 1)
    assert list(errors) == ["killed"]
    assert "exit status -9" in errors["killed"]
    assert watcher.ended["next"] == ""
    assert Run.load(tmp_path / "next").status == "completed"


def test_a_run_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flower_fgl.simulation import run as engine

    whole = engine.run_one

    def fail_once(values: Any, **options: Any) -> Run:
        if values["seed"] < 2:
            raise RunError("no client replied")
        return whole(values, **options)

    monkeypatch.setattr(engine, "run_one", fail_once)
    words = ["run", "--seed", "0..2", "--engine", "local", "--quiet"]
    for key, value in {**TINY, "output-dir": str(tmp_path)}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    assert result.exit_code == 1
    error = str(result.exception)
    assert "2 of 3 runs failed." in error
    assert error.endswith("\nfedavg-seed0, fedavg-seed1: no client replied")
    (grid,) = tmp_path.iterdir()
    assert Run.load(grid / "fedavg-seed2").status == "completed"


def test_without_a_terminal_every_run_prints_one_plain_line() -> None:
    events = [(0.0, "a", 0), (4.0, "a", 1), (9.0, "a", 2), (10.0, "a", -1)]
    assert lines_after({"a": 2, "b": 2}, events) == (
        "a: 0:00:10  loss 0.500  (1 of 2 runs, about 0:00:10 left)\n"
    )
    assert lines_after({"a": 2}, events) == "a: 0:00:10  loss 0.500\n"


def test_an_error_of_several_runs_is_printed_once() -> None:
    console = plain_console()
    with GridProgress(console, {"a": 2, "b": 2, "c": 2}, quiet=True) as progress:
        for name, error in (("a", "no data"), ("b", "no data"), ("c", "no reply")):
            progress.start(name)
            progress.end(name, error)
    assert console.export_text() == (
        "a: failed. no data\nb: failed as a did.\nc: failed. no reply\n"
    )


def test_a_terminal_shows_a_bar_for_each_active_run() -> None:
    out = io.StringIO()
    console = Console(width=120, force_terminal=True, file=out)
    with GridProgress(console, {"a": 2, "b": 3}) as progress:
        progress.start("a")
        progress.round("a", {"phase": "train", "round": 1, "loss": 0.5})
        progress._bars.refresh()
    assert re.search(r"all runs .*1/5", out.getvalue())
    assert re.search(r"a .*1/2.*loss 0.500", out.getvalue())


def test_missing_data_is_found_once_and_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def offline(layout: Any, home: Path) -> None:
        tries.append(home.name)
        raise OSError("no network")

    monkeypatch.delenv("FLOWER_FGL_DATA", raising=False)
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("flower_fgl.datasets.sources.load._download", offline)
    words = ["run", "--method", "local,fedavg", "--dataset", "cora,synthetic,citeseer"]
    words += ["--set", f"output-dir={tmp_path / 'runs'}", "--set", "rounds=1"]
    done = CliRunner().invoke(app, words)
    error = str(done.exception)
    assert error.count('Dataset "cora" is missing') == 1
    assert error.count('Dataset "citeseer" is missing') == 1
    assert tries == ["cora", "citeseer"]
    assert not list((tmp_path / "runs").rglob("summary.json"))


def test_no_jobs_is_refused() -> None:
    with pytest.raises(ConfigError, match="jobs must be at least 1, got 0"):
        run_jobs([], Died(), side_by_side=0)


def two_toml(folder: Path, cases: dict[str, str], head: str = "") -> Path:
    """Write an experiment file with a method for each case."""
    lines = [head, "[config]", 'dataset = "synthetic"']
    lines += [f"{key} = {value}" for key, value in TINY.items()]
    for name, method in cases.items():
        lines += ["[[case]]", f'name = "{name}"', f'method = "{method}"']
    file = folder / "two.toml"
    file.write_text("\n".join(lines))
    return file


def test_the_page_of_an_experiment_keeps_its_earlier_runs(tmp_path: Path) -> None:
    file = two_toml(tmp_path, {"alone": "local", "together": "fedavg"})
    out = tmp_path / "runs"
    words = ["run", str(file), "--quiet", "--jobs", "1", "--set", f"output-dir={out}"]
    for case in ("together", "alone"):
        result = CliRunner().invoke(app, [*words, "--case", case])
        assert result.exit_code == 0, result.output
    page = (out / "two" / "comparison.html").read_text()
    assert page.index("local") < page.index("fedavg")  # the order of the file
    assert f"Report: {out / 'two' / 'comparison.html'}" in result.output
    (out / "two" / "together" / "summary.json").write_text("{")
    assert CliRunner().invoke(app, [*words, "--case", "alone"]).exit_code == 0


def test_a_run_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    cases = {"alone": "local", "together": "fedavg"}
    file = two_toml(tmp_path, cases, head="draws = 2")
    words = ["run", str(file), "--quiet", "--jobs", "1"]
    words += ["--set", f"output-dir={tmp_path}"]
    assert CliRunner().invoke(app, [*words, "--case", "alone"]).exit_code == 0
    summary = tmp_path / "two" / "alone-draw0" / "summary.json"
    about = json.loads(summary.read_text())
    source = about["environment"]["source_sha256"]
    about["environment"]["source_sha256"] = "a" * 64
    summary.write_text(json.dumps(about))
    sides = [f"{tmp_path / 'two'}:{case}" for case in cases]
    for command in (words, ["compare", *sides]):
        result = CliRunner().invoke(app, command)
        text = " ".join(result.output.split())
        assert "the runs were made with 2 versions: " in text
        assert f"source {'a' * 12} (" in text
        assert f"source {source[:12]} (" in text


def test_runs_of_one_draw_on_changed_data_are_named(tmp_path: Path) -> None:
    file = two_toml(
        tmp_path, {"alone": "local", "together": "fedavg"}, head="draws = 2"
    )
    words = ["run", str(file), "--quiet", "--set", f"output-dir={tmp_path}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "have different data" not in result.output
    summary = tmp_path / "two" / "alone-draw1" / "summary.json"
    about = json.loads(summary.read_text())
    summary.write_text(json.dumps(about | {"partition_sha256": "a" * 64}))
    text = " ".join(CliRunner().invoke(app, words).output.split())
    said = "partition: alone-draw1; together-draw1 have different data in one draw"
    assert said in text
    assert text.count("have different data") == 1


def test_a_refused_grid_leaves_the_copy_of_its_experiment(tmp_path: Path) -> None:
    file = two_toml(tmp_path, {"a": "local"}, head='title = "t"\ndraws = 2')
    out = tmp_path / "runs"
    words = ["run", str(file), "--quiet", "--jobs", "1"]
    words += ["--set", f"output-dir={out}"]
    assert CliRunner().invoke(app, words).exit_code == 0
    copy = (out / "two" / "two.toml").read_text()
    with pytest.raises(RunError, match=r"holds a run with other settings \(lr\)"):
        CliRunner().invoke(app, [*words, "--set", "lr=0.2"], catch_exceptions=False)
    assert (out / "two" / "two.toml").read_text() == copy


@pytest.mark.thorough
@pytest.mark.parametrize(
    "by", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_runs_side_by_side_end_in_mid_round_with_a_killed_command(
    by: signal.Signals, tmp_path: Path
) -> None:
    mark = f"FGL_TEST_{os.getpid()}_{by.name}"
    words = ["--method", "local,fedavg", "--jobs", "2", "--quiet"]
    for key, value in {**TINY, "rounds": 1, "local-epochs": 1_000_000}.items():
        words += ["--set", f"{key}={value}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flower_fgl", "run", *words,
         "--set", f"output-dir={tmp_path}"],
        env=environment(FGL_MARK=mark),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: len([*tmp_path.glob("*/*/summary.json")]) == 2, 60)
        time.sleep(1)
        process.send_signal(by)
        wait_until(lambda: marked(mark) == [], 20)
        runs = [Run.load(file.parent) for file in tmp_path.glob("*/*/summary.json")]
        assert [run.status for run in runs] == ["interrupted"] * 2
    finally:
        process.kill()
        process.wait()
        for found in marked(mark):
            found.kill()


def test_the_page_of_an_experiment_has_its_title_and_the_order_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = {"without": "local", "federated": "fedavg"}
    file = two_toml(tmp_path, cases, head='title = "Two rows"')
    folder = Path("runs/two")

    def page(*words: str) -> tuple[str, list[str]]:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{result.output}{result.exception}"
        text = (folder / "comparison.html").read_text("utf-8")
        (title,) = re.findall("<h1>(.*)</h1>", text)
        return title, re.findall('<td class="key">(.*?)</td>', text)[:2]

    written = page("run", str(file), "--engine", "local", "--quiet")
    assert written == ("Two rows", ["local", "fedavg"])
    assert page("report", str(folder)) == written
    # a folder that its file does not list, or a file that cannot be read
    shutil.copytree(folder / "without", folder / "another")
    assert page("report", str(folder))[0] == "3 runs compared"
    shutil.rmtree(folder / "another")
    (folder / "two.toml").write_text("[")
    assert page("report", str(folder)) == ("2 runs compared", ["fedavg", "local"])
