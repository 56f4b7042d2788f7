"""Graphs and registered objects in runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam
from torch import Tensor
from torch_geometric.data import Data

import flower_fgl
from flower_fgl import METHODS, register, simulate, to_npz
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.core.errors import ConfigError, DataError, PayloadError, RunError
from flower_fgl.datasets.sources.registry import SOURCES, Source, Statistics
from flower_fgl.methods import Method, parse_config
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.nn import build_model
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.simulation.register import pack_registered, refuse_registered
from flower_fgl.strategies.fedavg import FedAvg
from tests.support.owners import run_owners
from tests.support.short_runs import SMALL, comparable

RUN: dict[str, Any] = {"rounds": 2, "hidden_channels": 8}


@pytest.fixture
def short(tmp_path: Path) -> dict[str, Any]:
    return {**RUN, "output_dir": str(tmp_path / "runs")}


def graph(nodes: int = 60, classes: int = 3, seed: int = 0) -> Data:
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(nodes) % classes
    x = torch.randn(nodes, 5, generator=draw) + y[:, None]
    edges = torch.randint(nodes, (2, 4 * nodes), generator=draw)
    return Data(x=x, edge_index=edges, y=y)


class Halved(FedAvgClientApp):
    """FedAvg under another name."""


def row(name: str = "mine", **values: Any) -> Method:
    fields: dict[str, Any] = {
        "strategy": FedAvg,
        "client_app": Halved,
        "settings": FedAvgSettings,
        "paper": "none",
    }
    return Method(name, **{**fields, **values})


@pytest.mark.parametrize("half", ["strategy", "client_app"])
def test_a_half_that_flower_knows_but_this_package_does_not_is_refused(
    half: str, short: dict[str, Any]
) -> None:
    foreign = {"strategy": FedAdam, "client_app": ClientApp}[half]
    register(method=row(**{half: foreign}))
    known = {"strategy": "FglStrategy", "client_app": "FglClientApp"}[half]
    with pytest.raises((ConfigError, RunError), match=f"no subclass of .*{known}"):
        simulate("mine", clients=3, **short)


def test_a_graph_runs_as_its_graph_file_does(
    short: dict[str, Any], tmp_path: Path
) -> None:
    path = to_npz(graph(), tmp_path / "mine.npz")
    one = simulate("fedavg", graph(), clients=3, **short)
    file = Path(one.summary["dataset"])
    assert str(one).startswith(f"fedavg on {file.name}, 3 clients")
    other = simulate("fedavg", path, clients=3, **short)
    assert one.status == "completed"
    assert comparable(one) == comparable(other)


def test_a_list_gives_each_client_its_graph_as_a_deployment_does(
    short: dict[str, Any], tmp_path: Path
) -> None:
    graphs = [graph(60), graph(50, seed=1), graph(40, 2, seed=2)]
    run = simulate("fedavg", graphs, **short)
    nodes = [
        {"graph": str(to_npz(g, tmp_path / f"owner-{k}.npz"))}
        for k, g in enumerate(graphs)
    ]
    deployed = run_owners(nodes, tmp_path / "deployed", **RUN)
    assert run.summary["clients"] == 3
    assert [c["num_nodes"] for c in run.clients[:3]] == [60, 50, 40]
    for one, other in zip(run.rounds, deployed.rounds, strict=True):
        assert one["loss"] == other["loss"]
        for column in ("val", "test"):
            # a run over owners reports more scores: the AUROC
            ours = one["metrics"]["local"][column]
            theirs = other["metrics"]["local"][column]
            assert {name: ours[name] for name in theirs} == theirs


def test_a_list_of_graphs_refuses_what_has_no_effect(short: dict[str, Any]) -> None:
    graphs = [graph(60), graph(50, seed=1)]
    with pytest.raises(ConfigError, match="2 clients, got clients = 3"):
        simulate("fedavg", graphs, clients=3, **short)
    with pytest.raises(ConfigError, match="partition has no effect"):
        simulate("fedavg", graphs, partition="louvain", **short)


def test_a_registered_method_of_classes_runs(short: dict[str, Any]) -> None:
    register(method=row())
    small = {**SMALL, **short}
    mine = simulate("mine", clients=3, mine={"finetune_epochs": 0}, **small)
    ours = simulate("fedavg", clients=3, **small)
    assert mine.summary["method"] == "mine"
    assert comparable(mine) == comparable(ours)
    assert "mine" in METHODS


@pytest.mark.parametrize(
    "name", ["train_mask val_mask test_mask", "train_idx valid_idx test_idx"]
)
def test_a_registered_dataset_has_its_own_split(name: str) -> None:
    data = graph()
    for place, key in enumerate(name.split()):
        nodes = torch.arange(60) % 3 == place
        data[key] = nodes if key.endswith("_mask") else nodes.nonzero().flatten()
    register(dataset=data, name="my-data")
    assert SOURCES["my-data"].split == "public"
    register(dataset=graph(), name="my-data")
    assert SOURCES["my-data"].split == "20/40/40"


def test_a_registered_dataset_follows_its_content(short: dict[str, Any]) -> None:
    seen = []
    for seed in (0, 1):
        register(dataset=graph(seed=seed), name="my-data")
        run = simulate("fedavg", "my-data", clients=3, **short)
        direct = simulate("fedavg", graph(seed=seed), clients=3, **short)
        assert comparable(run) == comparable(direct)
        seen.append(comparable(run))
    assert seen[0] != seen[1]


def graphs_of_two_sizes() -> list[Data]:
    return [
        Data(
            x=torch.eye(n),
            edge_index=torch.tensor([[0, 1], [1, 2]]),
            y=torch.tensor([k % 2]),
        )
        for k, n in enumerate([4] * 30)
    ]


def test_a_loader_may_return_graphs_to_classify(short: dict[str, Any]) -> None:
    source = Source(
        "Pairs", "graph", "60/0/40", Statistics(), loader=graphs_of_two_sizes
    )
    register(dataset=source, name="pairs")
    settings = {"setting": "graph", "partition": "uniform", "model": "gin"}
    run = simulate("fedavg", "pairs", clients=2, **settings, **short)
    assert run.status == "completed"
    with pytest.raises(ConfigError, match="graph classification"):
        simulate("fedavg", "pairs", clients=2, **short)


class Tied(torch.nn.Module):
    """Multiplies by one matrix twice."""

    def __init__(self, in_channels: int, hidden_channels: int, **_: Any) -> None:
        super().__init__()
        self.first = torch.nn.Linear(in_channels, hidden_channels)
        self.second, self.third = (
            torch.nn.Linear(hidden_channels, hidden_channels) for _ in range(2)
        )
        self.third.weight = self.second.weight

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)).relu())


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddc"])
def test_tied_weights_are_trained_and_stay_equal(
    method: str, short: dict[str, Any]
) -> None:
    register(backbone=Tied, name="tied")
    run = simulate(method, "synthetic", clients=2, model="tied", **short)
    state = run.model().state_dict()
    second, third = (state[f"encoder.{name}.weight"] for name in ("second", "third"))
    assert torch.equal(second, third)
    with torch.random.fork_rng():
        sizes = {"in_channels": 8, "num_layers": 2, "dropout": 0.0}
        start = build_model("tied", hidden_channels=8, num_outputs=3, **sizes)
    assert len([*start.parameters()]) == len(state) - 1


def test_a_download_that_does_not_fit_names_the_package_of_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(backbone=torch.nn.Linear, name="net")
    app = FedAvgClientApp()
    monkeypatch.setattr(app, "download_spec", lambda client: {"b": (1,)})
    content = Weights({"a": torch.ones(1)}).to_record()
    config = SimpleNamespace(method="fedavg")
    for model, message in (
        (
            "net:2x8",
            "net comes from flower_fgl.register in this process: the server and",
        ),
        ("gcn", r"unexpected: \['a', 'b'\]\.$"),
    ):
        client: Any = SimpleNamespace(model_name=model, config=config)
        with pytest.raises(PayloadError, match=f"download is malformed.*{message}"):
            app.read_download(client, content)


def broken() -> Any:
    raise OSError("no such disk")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loader": broken}, "OSError: no such disk"),
        ({"loader": graphs_of_two_sizes}, "its loader returns graphs"),
        ({"loader": "no_such_module:read"}, "No module named"),
        (
            {"loader": graph, "statistics": Statistics(nodes=61)},
            "published 61 nodes, found 60",
        ),
    ],
)
def test_a_loader_that_does_not_fit_is_an_error(
    values: dict[str, Any], message: str, short: dict[str, Any]
) -> None:
    fields = {"statistics": Statistics(), **values}
    register(dataset=Source("Odd", "node", "20/40/40", **fields), name="odd")
    with pytest.raises(DataError, match=message):
        simulate("fedavg", "odd", clients=3, **short)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of method, backbone and dataset, got 0"),
        ({"method": row("fedavg")}, "exists already: it comes from flower-fgl"),
        ({"method": row("My Method")}, "must start with a letter"),
        ({"method": row(), "name": "other"}, 'called "mine", not "other"'),
        ({"method": Halved}, "needs a flower_fgl.methods.Method, got ABCMeta"),
        ({"backbone": torch.nn.Linear}, "needs a name"),
        ({"backbone": torch.nn.Linear, "name": "gcn"}, "exists already"),
        ({"dataset": [1], "name": "d"}, "needs a torch_geometric.data.Data"),
        ({"dataset": graph(), "name": "cora"}, "exists already"),
        ({"dataset": graph(), "name": "synthetic"}, "synthetic"),
    ],
)
def test_register_explains_what_it_cannot_use(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        register(**values)


def test_public_names_are_listed_and_exist() -> None:
    for name in flower_fgl.__all__:
        assert name in dir(flower_fgl)
        assert getattr(flower_fgl, name) is not None
    assert {"register", "to_npz", "simulate"} <= set(flower_fgl.__all__)


def test_new_processes_refuse_what_only_this_one_knows() -> None:
    register(method=row())
    register(backbone=torch.nn.Linear, name="net")
    for values in ({"method": "mine"}, {"model": "net:2x8"}):
        with pytest.raises(ConfigError, match="flower-fgl new NAME"):
            refuse_registered(parse_config({"clients": 3, **values}))
    refuse_registered(parse_config({"clients": 3}))


PROGRAM = """
import json, sys, threading

import torch
from torch import Tensor
from torch_geometric.data import Data

from flower_fgl import register, simulate
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.core.errors import ConfigError
from flower_fgl.methods import Method
from flower_fgl.methods.fedavg import FedAvgSettings
from flower_fgl.strategies.fedavg import FedAvg


class Mine(FedAvgClientApp):
    def fit(self, client, server_round, download):
        result = super().fit(client, server_round, download)
        return type(result)(result.model, result.upload, result.loss + 1000)


class Net(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, num_layers, dropout):
        super().__init__()
        self.map = torch.nn.Linear(in_channels, hidden_channels)

    def forward(self, x, edge_index):
        return torch.relu(self.map(x))


y = torch.arange(60) % 3
draw = torch.Generator().manual_seed(0)
x = torch.randn(60, 5, generator=draw) + y[:, None]
edges = torch.randint(60, (2, 240), generator=draw)
register(method=Method("mine", "none", FedAvg, Mine, settings=FedAvgSettings))
register(backbone=Net, name="net")
register(dataset=Data(x=x, edge_index=edges, y=y), name="data")
values = dict(clients=2, rounds=2, hidden_channels=8, model="net", output_dir=sys.argv[1])
runs = [simulate("mine", "data", workers=n, **values) for n in (1, 2)]
losses = [[row.get("loss") for row in run.clients] for run in runs]

lock = threading.Lock()
register(backbone=lambda **sizes: (lock, Net(**sizes))[1], name="locked")
try:
    simulate("mine", "data", workers=2, **{**values, "model": "locked"})
    refusal = ""
except ConfigError as error:
    refusal = str(error)
print(json.dumps([losses, [run.best for run in runs], refusal]))
"""


@pytest.mark.slow
def test_registered_objects_reach_worker_processes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses, best, refusal = json.loads(done.stdout.splitlines()[-1])
    assert losses[0] == losses[1]
    assert max(loss for loss in losses[1] if loss) > 900
    assert best[0] == best[1]
    assert '"locked", registered in this process, cannot be sent' in refusal
    assert "flower-fgl new NAME" in refusal


class Unsendable:
    """An object whose state cannot be sent, for a reason without text."""

    def __reduce__(self) -> str:
        raise NotImplementedError


def test_what_cannot_be_sent_is_named_without_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = {"backbones": {"mute": Unsendable()}}
    monkeypatch.setattr("flower_fgl.simulation.register.registered", lambda: rows)
    with pytest.raises(ConfigError, match=r'"mute", registered.*NotImplementedError'):
        pack_registered("workers = 1")
