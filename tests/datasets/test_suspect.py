"""Notes on suspect data: when a run logs them, for whom, and with which advice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from torch_geometric.data import Data

from flower_fgl import register, simulate, to_npz
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.client_app import DispatchingClientApp
from flower_fgl.client_apps.runtime.session import Session
from flower_fgl.core import extensions
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph, OutsideEdges, Scaling
from flower_fgl.datasets.suspect import suspect_data
from flower_fgl.lab.experiments.jobs import Job, run_jobs
from flower_fgl.server_app import run_server
from flower_fgl.simulation import run as run_module
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.local_grid import LocalGrid, task_identity
from flower_fgl.simulation.run import run_one
from tests.support.owners import run_owners

SHORT: dict[str, Any] = {"hidden_channels": 8, "rounds": 1, "local_epochs": 1}
ADVICE = 'run with feature-norm = "columns"'


def graph(seed: int, largest: float = 5000.0, nodes: int = 40) -> Data:
    """Draw a graph whose first column reaches a value."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(nodes, 2, generator=draw)
    x[0, 0] = largest
    edges = torch.randint(nodes, (2, 3 * nodes), generator=draw)
    return Data(x=x, edge_index=edges, y=torch.arange(nodes) % 2)


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own cache, and its own registered datasets."""
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "cache"))
    registered = {"methods": {}, "backbones": {}, "datasets": {}}
    monkeypatch.setattr(extensions, "_registered", registered)


@pytest.fixture
def owners(tmp_path: Path) -> Callable[..., Path]:
    def write(number: int, largest: float = 5000.0) -> Path:
        folder = tmp_path / f"owners-{number}-{largest:g}"
        folder.mkdir()
        for k in range(number):
            to_npz(graph(k, largest), folder / f"bank{k}.npz")
        return folder

    return write


def notes_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings on suspect data, and forget them."""
    name = "flower_fgl.datasets.suspect"
    found = [r for r in caplog.records if r.name == name]
    caplog.clear()
    assert all(record.levelno == logging.WARNING for record in found)
    return [record.getMessage() for record in found]


# ------------------------------------------------------------------------- runs
def test_every_run_warns_once_of_each_owner_also_from_the_cache(
    owners: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SHORT, "rounds": 3, "output_dir": str(tmp_path)}
    place = str(owners(2))
    for _ in range(2):
        simulate("fedavg", owners=place, **settings)
        one, other = notes_in(caplog)
        assert one.startswith("bank0: Not scaled: column 0 (")
        assert "to 5e+03)" in one
        assert ADVICE in one
        assert other.startswith("bank1: Not scaled: column 0 (")
    simulate("fedavg", owners=place, feature_norm="columns", **settings)
    assert notes_in(caplog) == []


def test_graphs_in_memory_and_partitions_of_own_data_are_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SHORT, "output_dir": str(tmp_path)}
    simulate("fedavg", [graph(0), graph(1, largest=1.0)], **settings)
    (note,) = notes_in(caplog)
    assert note.startswith("client-0000: Not scaled: ")
    whole = graph(2)
    whole.x[:, 0] = 5000.0 + torch.arange(40.0)
    for data in (whole, str(to_npz(whole, tmp_path / "whole.npz"))):
        simulate("fedavg", data, clients=3, partition="uniform", **settings)
        note, rest = notes_in(caplog)
        assert note.startswith("client 0: Not scaled: ")
        assert rest == "There are such notes on 2 more clients."
    register(dataset=whole, name="own-incomes")
    simulate("fedavg", "own-incomes", clients=2, partition="uniform", **settings)
    assert len(notes_in(caplog)) == 2


def test_classes_of_other_clients_are_not_called_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SHORT, "output_dir": str(tmp_path)}
    graphs = [graph(k, largest=1.0, nodes=60) for k in range(6)]
    for k, one in enumerate(graphs):  # one class in 30 each, all 30 together
        one.y = 5 * k + torch.arange(60) % 5 if k else torch.arange(60) // 30
    simulate("fedavg", graphs, **settings)
    assert notes_in(caplog) == []
    names = [f"c{number}" for number in range(30)]
    to_npz(graphs[0], tmp_path / "few.npz", class_names=names)
    simulate("fedavg", owners=str(tmp_path / "few.npz"), **settings)
    (note,) = notes_in(caplog)
    assert note.startswith("few: 28 of 30 classes have no item in this graph.")


def test_of_many_owners_the_first_ones_are_named_and_the_others_counted(
    owners: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simulate("local", owners=str(owners(6)), output_dir=str(tmp_path), **SHORT)
    *first, last = notes_in(caplog)
    assert [note.partition(":")[0] for note in first] == ["bank0", "bank1", "bank2"]
    assert last == "There are such notes on 3 more owners."


def test_flowers_engine_and_a_grid_warn_as_well(
    owners: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    values = {"owners": str(owners(1)), "rounds": 1, "output-dir": str(tmp_path)}
    monkeypatch.setattr(run_module, "_run_ray", stop)
    with pytest.raises(KeyboardInterrupt):
        run_one(values, engine="ray", workers=1)
    assert len(notes_in(caplog)) == 1

    class Watcher:
        def __init__(self) -> None:
            self.notes: list[tuple[str, str]] = []

        def note(self, name: str, text: str) -> None:
            self.notes.append((name, text))

        def start(self, *_: object) -> None:
            pass

        round = end = start

    jobs = [
        Job(
            name,
            {**values, "clients": 1, "seed": seed, "run-dir": str(tmp_path / name)},
        )
        for seed, name in enumerate("ab")
    ]
    watcher = Watcher()
    assert run_jobs(jobs, watcher, engine="local") == {}
    shown = [name for name, text in watcher.notes if "Not scaled" in text]
    assert shown == ["a"]  # both runs have the same note


def test_benchmarks_are_not_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_fgl.datasets.store.suspect_data", lambda *_: ["a note"])
    settings = {**SHORT, "output_dir": str(tmp_path)}
    simulate("fedavg", "synthetic", clients=2, **settings)
    assert notes_in(caplog) == []
    simulate("fedavg", [graph(0)], **settings)
    assert notes_in(caplog) == ["client-0000: a note"]


def test_a_supernode_logs_its_own_notes_once_and_sends_none(
    owners: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replies: list[RecordDict] = []
    handle = DispatchingClientApp.__call__

    def watched(app: Any, message: Message, context: Any) -> Message:
        reply = handle(app, message, context)
        replies.append(reply.content)
        return reply

    monkeypatch.setattr(DispatchingClientApp, "__call__", watched)
    folder = owners(4)
    nodes = [{"graph": str(folder / f"bank{k}.npz")} for k in range(4)]
    # owners are described again with secure aggregation
    run = run_owners(
        nodes, tmp_path / "run", rounds=2, secure_aggregation=True, feature_norm="none"
    )
    assert run.status == "completed"
    noted = [note.partition(":")[0] for note in notes_in(caplog)]
    assert sorted(noted) == ["bank0", "bank1", "bank2", "bank3"]
    assert len(replies) > 3 * len(nodes)
    sent = "".join(str(dict(r.config_records)) for r in replies)
    assert "bank0" in sent
    assert "Not scaled" not in sent
    assert "5e+03" not in sent


def test_the_first_partition_logs_the_notes_of_all_once(
    owners: Callable[..., Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = run_config_of(
        method="fedavg",
        dataset="synthetic",
        clients=2,
        seed=0,
        settings={
            **SHORT,
            "rounds": 2,
            "owners": str(owners(2)),
            "feature_norm": "none",
            "run_dir": str(tmp_path / "run"),
        },
    )
    with task_identity(7):
        grid = LocalGrid(DispatchingClientApp(Session()), 2, values, 7)
        run_server(grid, values, engine="local")
    noted = [note.partition(":")[0] for note in notes_in(caplog)]
    assert noted == ["bank0", "bank1"]


# ----------------------------------------------------------------------- advice
def client(x: torch.Tensor, **changes: Any) -> ClientGraph:
    nothing = torch.empty(2, 0, dtype=torch.int64)
    held = Graph(x, nothing, torch.zeros(len(x), dtype=torch.int64), {})
    return ClientGraph(0, held, Target.classes(("a",)), torch.arange(len(x)), **changes)


def test_the_advice_is_one_that_the_run_accepts() -> None:
    x = torch.zeros(2, 30)
    x[1, 3] = 700.0
    assert ADVICE in suspect_data(client(x))[0]
    ids = torch.arange(2)
    for refused in (
        client(x.to_sparse_csr()),
        client(x, scaling=Scaling("rows")),
        client(x, outside=OutsideEdges(ids[:0], ids[:0], ids)),
    ):
        (note,) = suspect_data(refused)
        assert note.startswith("Not scaled: column 3 (0 to 700). ")
        assert note.endswith("in the same way at all owners.")


def test_standardised_columns_are_not_noted_for_an_outlier() -> None:
    x = torch.zeros(2, 1)
    x[1] = 700.0
    one = torch.ones(1).double()
    assert suspect_data(client(x, scaling=Scaling("columns", (one, one)))) == []
    nothing = torch.zeros(2, 2, dtype=torch.int64)
    edges = Graph(x, nothing, torch.zeros(2), {}, pairs=nothing, pair_x=x)
    for scaling, named in (
        (None, ["column 0 (", "edge: column 0 ("]),
        (Scaling("columns", (one, one)), ["Not scaled: edge: column 0 ("]),
        (Scaling("columns", (one, one), (one, one)), []),
    ):
        both = ClientGraph(
            0, edges, Target.classes(("a",)), torch.arange(2), scaling=scaling
        )
        notes = " ".join(suspect_data(both))
        assert all(text in notes for text in named)
        assert bool(notes) == bool(named)


@pytest.mark.parametrize("norm", ["none", "columns"])
def test_times_that_float32_does_not_tell_apart_are_noted(
    norm: str, tmp_path: Path
) -> None:
    data = graph(0, largest=1.0)
    data.x = torch.stack([1.7e9 + 7.5 * torch.arange(40.0).double()] * 2, dim=1)
    data.x[:, 1] = 1e5 * torch.arange(40.0)  # amounts over a wide range
    path = to_npz(data, tmp_path / "a.npz", feature_names=["time", "amount"])
    config = {"feature-norm": norm, "split": "40/30/30"}
    (note,) = [n for n in inspect_graph(path, config).notes if "close together" in n]
    assert note.startswith("Large numbers that are close together: time (17000000")
    assert "amount" not in note
