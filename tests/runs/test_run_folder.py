from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from flower_fgl import simulate
from flower_fgl.core.errors import RunError
from flower_fgl.core.metrics import Scores, pool
from flower_fgl.lab.experiments.experiment_file import read_experiment
from flower_fgl.lab.results import Run
from flower_fgl.lab.simulate import resume
from flower_fgl.methods import parse_config
from flower_fgl.runs import checkpoints
from flower_fgl.runs.files import settings_toml
from flower_fgl.runs.summary import summarise
from flower_fgl.runs.writer import RunWriter, default_folder, replace_file

CONFIG = {
    "method": "fedprox",
    "dataset": "cora",
    "seed": 3,
    "lr": 0.01,
    "evaluate": "local",
    "share-class-counts": True,
    "data-dir": 'C:\\data "x"\n# user',
    "state-dir": "\u2028rounds = 1  # user\u2028",
    "fedprox.mu": 0.1,
    "synthetic.nodes": 2000,
    "fedsage+.hops": 2,
}
SOURCES = {"method": "user", "lr": "data set", "fedprox.mu": "default"}
SOURCES["fedsage+.hops"] = "method"


def make(tmp_path: Path) -> RunWriter:
    return RunWriter.create(tmp_path / "runs" / "one", config=CONFIG, sources=SOURCES)


def row(server_round: int, val: float = 0.5, **more: Any) -> dict[str, Any]:
    scores = pool([Scores(10, val, val / 2, val / 3)])
    return {
        "round": server_round,
        "phase": "train",
        "status": "ok",
        "replies": 2,
        "failures": [],
        "loss": 0.5,
        "metrics": {"local": {"val": scores, "test": scores}},
        "seconds": {"total": 0.1},
        "bytes": {"up": {"weights": 8}, "down": {"weights": 8}},
        **more,
    }


def summary_of(rows: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return summarise(
        rows,
        method="fedprox",
        dataset="cora",
        clients=2,
        seed=3,
        engine="local",
        partition_sha256="ab" * 32,
        evaluate="local",
        status=status,
    )


@pytest.mark.parametrize(
    ("name", "keep", "message"),
    [
        ("rounds.jsonl", -9, "rounds.jsonl is damaged: its last line is cut off"),
        ("clients.jsonl", -9, "clients.jsonl is damaged: its last line is cut off"),
        (
            "rounds.jsonl",
            0,
            "rounds.jsonl is damaged: it lacks round 1 of 2 and 1 more",
        ),
    ],
)
def test_logs_that_are_cut_off_damage_a_complete_run(
    name: str, keep: int, message: str, tmp_path: Path
) -> None:
    for status in ("completed", "interrupted"):
        writer = make(tmp_path / status)
        for entry in (rows := [row(1, 0.4), row(2, 0.6)]):
            writer.append_round(entry)
            writer.append_clients([{"round": entry["round"], "partition_id": 0}])
        writer.write_summary(summary_of(rows, status))
        file = writer.folder / name
        file.write_text(file.read_text()[:keep])
    assert Run.load(writer.folder).status == "interrupted"
    with pytest.raises(RunError, match=message):
        Run.load(tmp_path / "completed" / "runs" / "one")


def test_a_finished_run_reads_back_as_it_was_written(tmp_path: Path) -> None:
    writer = make(tmp_path)
    rows = [row(1, 0.4), row(2, 0.6), row(3, 0.5)]
    held = {"round": 0, "partition_id": 1, "class_counts": [3, 4]}
    writer.append_clients([held, {**held, "partition_id": 0}])
    for entry in rows:
        writer.append_round(entry)
        writer.append_clients([{"round": entry["round"], "partition_id": 0}])
    writer.write_summary(summary_of(rows, "completed"))
    run = Run.load(writer.folder)
    assert run.path == writer.folder
    assert run.rounds == rows
    assert [(r["round"], r["partition_id"]) for r in run.clients] == [
        (0, 1),
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
    ]
    assert run.summary == summary_of(rows, "completed")
    assert run.status == "completed"
    assert run.best is not None
    assert run.last is not None
    assert (run.best["round"], run.last["round"]) == (2, 3)


def test_the_config_file_is_toml_with_tables_and_remembers_sources(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path).folder
    config = tomllib.loads((folder / "config.toml").read_text())
    tables = {"fedprox": {"mu": 0.1}, "synthetic": {"nodes": 2000}}
    tables["fedsage+"] = {"hops": 2}
    general = {key: value for key, value in CONFIG.items() if "." not in key}
    assert config == {**general, **tables}
    run = Run.load(folder)
    assert run.config == config
    assert run.sources == SOURCES


def test_nested_tables_and_dotted_keys_give_the_same_file(tmp_path: Path) -> None:
    dotted = {"method": "fedprox", "fedprox.mu": 0.1, "unset": None}
    nested = {"method": "fedprox", "fedprox": {"mu": 0.1}}
    texts = [
        (RunWriter.create(tmp_path / name, config=config, sources=SOURCES).folder)
        .joinpath("config.toml")
        .read_text()
        for name, config in (("a", dotted), ("b", nested))
    ]
    assert texts[0] == texts[1]


def test_the_settings_do_not_lead_back_to_the_same_folder(tmp_path: Path) -> None:
    config = {"run-dir": str(tmp_path / "one"), "method": "local"}
    RunWriter.create(tmp_path / "one", config=config, sources={"run-dir": "user"})
    assert Run.load(tmp_path / "one").config == {"run-dir": "", "method": "local"}


@pytest.mark.parametrize(
    ("place", "kept"), [("two/states", False), ("two-states", True)]
)
def test_a_state_dir_is_left_out_only_if_it_lies_in_the_folder(
    place: str, *, kept: bool, tmp_path: Path
) -> None:
    config = {"state-dir": str(tmp_path / place)}
    RunWriter.create(tmp_path / "two", config=config, sources={})
    assert Run.load(tmp_path / "two").config == (config if kept else {"state-dir": ""})


scalars = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text()
)
keys = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)


@settings(deadline=None, max_examples=50)
@given(
    config=st.dictionaries(keys, scalars, max_size=5),
    table=st.dictionaries(keys, scalars, max_size=3),
)
def test_any_setting_survives_the_config_file_and_never_feigns_a_source(
    tmp_path_factory: pytest.TempPathFactory,
    config: dict[str, Any],
    table: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("run") / "x"
    flat = {**config, **{f"fed+.{key}": value for key, value in table.items()}}
    sources = dict.fromkeys(list(flat)[::2], "user")
    RunWriter.create(folder, config=flat, sources=sources)
    run = Run.load(folder)
    expected = {**config, **({"fed+": table} if table else {})}
    assert repr(run.config) == repr(expected)  # repr: NaN equals NaN, 1 is not 1.0
    assert run.sources == sources


def test_the_summary_says_running_from_the_start(tmp_path: Path) -> None:
    folder = make(tmp_path).folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "running"
    assert (summary["method"], summary["dataset"], summary["seed"]) == (
        "fedprox",
        "cora",
        3,
    )
    run = Run.load(folder)
    assert (run.status, run.best, run.rounds, run.clients) == ("running", None, [], [])


def test_a_run_killed_in_the_middle_of_a_line_is_read_up_to_there(
    tmp_path: Path,
) -> None:
    writer = make(tmp_path)
    for server_round, val in ((1, 0.7), (2, 0.6), (3, 0.9)):
        writer.append_round(row(server_round, val))
    path = writer.folder / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    run = Run.load(writer.folder)
    assert [entry["round"] for entry in run.rounds] == [1, 2]
    assert run.status == "running"
    assert run.best is not None
    assert run.best["round"] == 1
    assert run.summary["bytes"]["up"] == 16


def test_a_process_killed_without_warning_leaves_a_readable_folder(
    tmp_path: Path,
) -> None:
    script = f"""
import os, signal
from pathlib import Path
from flower_fgl.runs.writer import RunWriter
writer = RunWriter.create(
    Path({str(tmp_path / "killed")!r}), config={{"method": "fedavg"}}, sources={{}}
)
for n in (1, 2):
    writer.append_round({{"round": n, "phase": "train", "status": "ok"}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False)
    assert ended.returncode == -signal.SIGKILL
    run = Run.load(tmp_path / "killed")
    assert [entry["round"] for entry in run.rounds] == [1, 2]
    assert run.summary["rounds"] == 2


def test_what_the_summary_of_a_running_run_knows_is_kept(tmp_path: Path) -> None:
    writer = make(tmp_path)
    writer.write_summary({**summary_of([], "running"), "class_names": ["a", "b"]})
    writer.append_round(row(1))
    run = Run.load(writer.folder)
    assert run.best is not None
    assert run.summary["class_names"] == ["a", "b"]
    assert run.summary["partition_sha256"] == "ab" * 32
    assert run.summary["clients"] == 2


def test_numbers_that_json_lacks_are_written_as_null(tmp_path: Path) -> None:
    writer = make(tmp_path)
    empty = Scores(0, math.nan, math.nan, math.nan)
    rows = [row(1, metrics={"local": {"val": pool([empty])}}, loss=math.inf)]
    writer.append_round(rows[0])
    writer.append_clients([{"round": 1, "partition_id": 0, **empty.as_dict()}])
    writer.write_summary(summary_of(rows, "completed"))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for name in ("rounds.jsonl", "clients.jsonl", "summary.json"):
        json.loads((writer.folder / name).read_text(), parse_constant=refuse)
    run = Run.load(writer.folder)
    assert run.rounds[0]["loss"] is None
    assert run.clients[0]["accuracy"] is None
    assert run.best == {"round": 1, "val": {**pool([empty]), **dict.fromkeys(NAMES)}}
    assert run.summary["selection"] == "last"


NAMES = [name for name in pool([]) if name != "num_nodes"]


def test_the_model_is_written_for_any_layout_of_tensors(tmp_path: Path) -> None:
    writer = make(tmp_path)
    weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
    writer.write_model({"weight": weight, "tied": weight, "turned": weight.T})
    state = load_file(writer.folder / "model.safetensors")
    assert state["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert torch.equal(state["weight"], weight.detach())
    assert torch.equal(state["tied"], weight.detach())


def test_a_folder_that_holds_something_is_refused_and_left_alone(
    tmp_path: Path,
) -> None:
    folder = make(tmp_path).folder
    before = (folder / "config.toml").read_bytes()
    with pytest.raises(RunError, match=r"is not empty\. Set another run-dir"):
        RunWriter.create(folder, config={"method": "local"}, sources={})
    assert (folder / "config.toml").read_bytes() == before


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    RunWriter.create(tmp_path, config=CONFIG, sources=SOURCES)
    assert Run.load(tmp_path).config["method"] == "fedprox"


@pytest.mark.parametrize("folder", ["file", "file/deeper/run"])
def test_a_file_in_the_way_is_an_error_that_names_it(
    tmp_path: Path, folder: str
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match=r"Cannot write .*file.* set output-dir"):
        RunWriter.create(tmp_path / folder, config=CONFIG, sources=SOURCES)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("nodir/p.csv", "nodir does not exist: create it first"),
        ("file/p.csv", "or choose a file in a writable folder"),
        ("file/summary.json", "or set output-dir to a writable folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_an_error_with_advice_that_fits(
    tmp_path: Path, file: str, advice: str
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match=f"Cannot write .*{file}: .*{advice}"):
        replace_file(tmp_path / file, b"")


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("file", ["config.toml", "summary.json"])
def test_a_full_disk_at_the_start_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        if target.name == file:
            full_disk()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RunError, match=r"No space left on device\. Free disk space"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_in_a_later_round_leaves_whole_lines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make(tmp_path)
    writer.append_round(row(1))
    before = (writer.folder / "rounds.jsonl").read_bytes()

    class NearlyFull(io.FileIO):
        room = 20

        def write(self, data: Any) -> int:
            if not self.room:
                full_disk()
            written = super().write(bytes(data)[: self.room])
            self.room = 0
            return written

    def nearly_full(self: Path, mode: str, buffering: int) -> io.FileIO:
        return NearlyFull(self, mode)

    monkeypatch.setattr(Path, "open", nearly_full)
    with pytest.raises(RunError, match=r"Cannot write .*rounds.jsonl: No space left"):
        writer.append_round(row(2))
    monkeypatch.undo()
    assert (writer.folder / "rounds.jsonl").read_bytes() == before
    writer.append_round(row(3))
    assert [entry["round"] for entry in Run.load(writer.folder).rounds] == [1, 3]


def test_a_summary_that_cannot_be_replaced_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = make(tmp_path)
    before = (writer.folder / "summary.json").read_bytes()
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(RunError, match="No space left"):
        writer.write_summary(summary_of([], "completed"))
    with pytest.raises(RunError, match=r"model.safetensors: No space left"):
        writer.write_model({"weight": torch.zeros(2)})
    assert (writer.folder / "summary.json").read_bytes() == before
    left = sorted(path.name for path in writer.folder.iterdir())
    assert left == ["config.toml", "summary.json"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.toml", "lr = "),
        ("config.toml", b"\xff\xfe"),
        ("summary.json", '{"status": '),
        ("summary.json", "[1, 2]\n"),
        ("summary.json", "{}"),
        ("summary.json", '{"status": "completed"}\n'),
        ("rounds.jsonl", '{"round": 1}\n{"rou\n{"round": 3}\n'),
        ("clients.jsonl", "7\n"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str | bytes) -> None:
    folder = make(tmp_path).folder
    data = text.encode() if isinstance(text, str) else text
    (folder / name).write_bytes(data)
    with pytest.raises(RunError, match=re.escape(str(folder / name)) + ".*damaged"):
        Run.load(folder)


def test_the_damaged_line_is_numbered(tmp_path: Path) -> None:
    folder = make(tmp_path).folder
    (folder / "rounds.jsonl").write_text('{"round": 1}\n{"rou\n{"round": 3}\n')
    with pytest.raises(
        RunError, match=r"rounds.jsonl, line 2 is damaged: .*remove its folder"
    ):
        Run.load(folder)


def test_a_folder_that_is_missing_or_no_run_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunError, match=re.escape(f"{folder} is not a run folder")):
            Run.load(folder)
    folder = make(tmp_path).folder
    (folder / "summary.json").unlink()
    with pytest.raises(RunError, match=r"Cannot read .*summary.json: No such file"):
        Run.load(folder)


def test_the_table_shows_the_scores_in_percent(tmp_path: Path) -> None:
    writer = make(tmp_path)
    rows = [row(1, 0.7931), row(2, 0.5), row(3, 0.8, phase="finetune")]
    for entry in rows:
        writer.append_round(entry)
    writer.write_summary(summary_of(rows, "completed"))
    run = Run.load(writer.folder)
    lines = run.table().splitlines()
    assert lines[0] == "fedprox on cora, 2 clients, seed 3, 2 rounds: completed"
    cells = [re.split(r"\s{2,}", line) for line in lines[2:5]]
    assert cells == [
        ["best validation", "1", "79.31", "79.31", "39.66"],
        ["last round", "2", "50.00", "50.00", "25.00"],
        ["finetuned", "3", "80.00", "80.00", "40.00"],
    ]
    assert lines[-1] == f"Run folder: {writer.folder}"
    assert repr(run) == run.table()


def test_the_table_of_a_failed_run_says_why(tmp_path: Path) -> None:
    writer = make(tmp_path)
    why = "All 2 clients failed in round 1: CUDA out of memory"
    writer.write_summary({**summary_of([], "failed"), "error": why})
    table = Run.load(writer.folder).table()
    assert f"error: {why}" in table
    assert "best validation" not in table


def test_default_folders_name_the_run_and_never_collide(tmp_path: Path) -> None:
    first = default_folder(tmp_path, "fedavg", "tu:MUTAG", 7)
    assert re.fullmatch(r"\d{8}-\d{6}-fedavg-tu-MUTAG-7", first.name)
    made = set()
    for _ in range(5):
        folder = default_folder(tmp_path, "fedavg", "/home/me/my graph.npz", 7)
        assert re.fullmatch(r"\d{8}-\d{6}-fedavg-my-graph\.npz-7(-\d)?", folder.name), (
            folder
        )
        folder.mkdir()
        made.add(folder)
    assert len(made) == 5


def test_a_complete_run_without_a_round_of_the_middle_is_refused(
    tmp_path: Path,
) -> None:
    writer = make(tmp_path)
    rows = [row(1, 0.4), row(2, 0.6), row(3, 0.5)]
    for entry in (rows[0], rows[2]):
        writer.append_round(entry)
    writer.write_summary(summary_of(rows, "completed"))
    with pytest.raises(
        RunError, match=r"rounds.jsonl is damaged: it lacks round 2 of 3"
    ):
        Run.load(writer.folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("summary.json", '"completed"', '"weird"', "its status is 'weird', none of"),
        (
            "summary.json",
            '"seed": 3',
            '"seed": 4',
            "mixes two runs: seed is 3 in config",
        ),
        ("summary.json", '"rounds": 2', '"rounds": 2.0', "rounds is 2.0"),
        (
            "summary.json",
            '"seed": 3',
            '"seed": 3, "finetuned": 5',
            '"finetuned" holds no',
        ),
        ("rounds.jsonl", '"round":2', '"round":"x"', "its round is 'x'"),
        ("config.toml", "# end of settings\n", "", r'"# end of settings", is missing'),
    ],
)
def test_files_that_were_changed_or_cut_are_named(
    name: str, old: str, new: str, message: str, tmp_path: Path
) -> None:
    writer = make(tmp_path)
    rows = [row(1, 0.4), row(2, 0.6)]
    for entry in rows:
        writer.append_round(entry)
    writer.write_summary(summary_of(rows, "completed"))
    file = writer.folder / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(RunError, match=message):
        Run.load(writer.folder)


def test_settings_that_were_cut_off_are_not_run_with_defaults(tmp_path: Path) -> None:
    text = settings_toml(dict(parse_config({}).flat()), {})
    file = tmp_path / "config.toml"
    file.write_text(text)
    read_experiment(file)
    file.write_text("".join(text.splitlines(keepends=True)[:20]))
    with pytest.raises(RunError, match=r"config.toml is damaged: its last line"):
        read_experiment(file)


@pytest.mark.parametrize("keep", [0, 1])
def test_a_run_that_lost_rounds_before_its_checkpoint_is_not_resumed(
    keep: int, small: dict[str, Any], tmp_path: Path
) -> None:
    # checkpoints were synced to disk, the rows before them were not
    def stop(entry: Any) -> None:
        if entry["round"] == 3:
            raise KeyboardInterrupt

    folder = tmp_path / "run"
    settings = {**small, "rounds": 4, "checkpoint_every": 2, "run_dir": str(folder)}
    with pytest.raises(KeyboardInterrupt):
        simulate("fedavg", **settings, on_round=stop)
    file = folder / "rounds.jsonl"
    whole = file.read_text()
    file.write_text("".join(whole.splitlines(keepends=True)[:keep]))
    lost = f"lacks round {keep + 1} of 2"
    with pytest.raises(RunError, match=rf"rounds\.jsonl is damaged: it {lost}"):
        resume(folder)
    file.write_text(whole)
    assert resume(folder).status == "completed"


def test_the_rows_are_on_disk_before_a_checkpoint_that_follows_them(
    small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync, replace = checkpoints.sync_path, os.replace

    def sync_path(path: Path) -> None:
        assert path.exists()
        if path.is_file():
            calls.append(path.name)
        sync(path)

    def replace_folder(source: Path, target: Path) -> None:
        if "round-" in Path(target).name:
            calls.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(checkpoints, "sync_path", sync_path)
    monkeypatch.setattr(os, "replace", replace_folder)
    simulate("fedavg", **{**small, "rounds": 2, "checkpoint_every": 1})
    logs = ["rounds.jsonl", "clients.jsonl"]
    assert calls[:6] == [*logs, "round-000001", *logs, "round-000002"]
