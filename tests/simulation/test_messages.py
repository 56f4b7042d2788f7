"""Runs whose backbone reads edges with direction and features."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_fgl import METHODS, simulate
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.datasets.build import build_clients
from flower_fgl.nn import build_model
from flower_fgl.simulation.prediction import predict_graph
from flower_fgl.testing.pretended_gpu import gpu
from tests.datasets.test_messages import COLUMNS, arrays, config, owners
from tests.support.methods import OF_PLAIN_GRAPHS

SIZES: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "hidden_channels": 8}
ABLE = [name for name in OF_PLAIN_GRAPHS if METHODS[name].reads_messages]
DIRECTED: dict[str, Any] = {"model": "graphsage", "edge_direction": "separate"}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Write the graphs of three owners, with the columns of one in another order."""
    (tmp_path / "own").mkdir()
    return owners(tmp_path / "own", COLUMNS, COLUMNS[::-1], COLUMNS)


@pytest.mark.parametrize("method", ABLE)
@pytest.mark.parametrize("values", [{"model": "gine"}, DIRECTED], ids=["gine", "sage"])
def test_methods_that_say_so_train_on_edges(
    method: str, values: dict[str, Any], folder: str, tmp_path: Path
) -> None:
    run = simulate(method, owners=folder, output_dir=str(tmp_path), **SIZES, **values)
    assert len(run.rounds) >= 2
    for setting in ("link",) if METHODS[method].predicts_links else ():
        simulate(
            method, owners=folder, output_dir=str(tmp_path), setting=setting, **SIZES,
            **values,
        )  # fmt: skip


def test_a_method_with_a_network_of_its_own_is_refused(tmp_path: Path) -> None:
    message = r"fedpg does not pass messages along edges .* methods do: .*fedavg,"
    with pytest.raises(ConfigError, match=message):
        simulate("fedpg", model="gine", output_dir=str(tmp_path))
    with pytest.raises(
        ConfigError, match='edge-direction = "separate" is not possible'
    ):
        simulate("fedpg", **DIRECTED, output_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model": "gine"},
            'model = "gine" reads all neighbours: remove num-neighbors',
        ),
        (DIRECTED, 'edge-direction = "separate" reads all neighbours'),
    ],
)
def test_samples_of_neighbors_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    small = {"batch_size": 5, "num_neighbors": "5,5"}
    with pytest.raises(ConfigError, match=message):
        simulate("fedavg", output_dir=str(tmp_path), **small, **values)


@pytest.mark.parametrize("model", ["graphsage,mlp", "mlp,graphsage"])
def test_one_of_several_backbones_that_cannot_read_samples_is_enough(
    model: str, tmp_path: Path
) -> None:
    values = DIRECTED | {"model": model, "batch_size": 5, "num_neighbors": "5,5"}
    with pytest.raises(ConfigError, match='edge-direction = "separate" reads all'):
        simulate("local", output_dir=str(tmp_path), **values)


def test_the_stacked_engine_is_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads edges with direction or features"):
        simulate(
            "fedavg",
            owners=folder,
            stacked="true",
            model="gine",
            output_dir=str(tmp_path),
        )


def test_directions_matter_and_both_ways_are_the_default(
    folder: str, tmp_path: Path
) -> None:
    def losses(**values: Any) -> list[float]:
        run = simulate(
            "fedavg", owners=folder, output_dir=str(tmp_path), **SIZES, **values
        )
        return [c["loss"] for c in run.clients if c["round"]]

    found = {d: losses(model="gine", edge_direction=d) for d in
             ("default", "both", "separate", "forward")}  # fmt: skip
    assert found["default"] == found["both"]
    assert len({tuple(values) for values in found.values()}) == 3
    plain = losses(model="graphsage")
    assert losses(model="graphsage", edge_direction="both") == plain
    assert losses(**DIRECTED) != plain


def test_backbones_that_read_other_parts_of_the_edges_share_no_partition(
    folder: str, tmp_path: Path
) -> None:
    # messages of directed GraphSAGE have no columns, those of GINE have two
    for values in (DIRECTED, {"model": "gine"}, DIRECTED):
        simulate("fedavg", owners=folder, output_dir=str(tmp_path), **SIZES, **values)


WORKERS = """
from flower_fgl import simulate
runs = [
    simulate("fedavg", output_dir={out!r}, workers=workers, **{values!r})
    for workers in (1, 2)
]
one, two = ([c.get("loss") for c in run.clients] for run in runs)
assert one == two and any(loss is not None for loss in one), (one, two)
assert runs[0].final == runs[1].final
"""


@pytest.mark.thorough
def test_worker_processes_give_the_same_numbers(folder: str, tmp_path: Path) -> None:
    values = {"owners": folder, "model": "gine", "edge_direction": "separate", **SIZES}
    # in a process of its own, which ends Ray
    script = WORKERS.format(out=str(tmp_path), values=values)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_a_model_predicts_by_the_names_of_the_columns(
    folder: str, tmp_path: Path
) -> None:
    run = simulate(
        "fedavg", owners=folder, model="gine", output_dir=str(tmp_path / "runs"),
        share_feature_names=True, **SIZES,
    )  # fmt: skip
    first = predict_graph(run.path, Path(folder) / "b.npz")
    turned = tmp_path / "b.npz"
    np.savez(turned, **arrays(1, COLUMNS))
    second = predict_graph(run.path, turned)
    torch.testing.assert_close(first.values, second.values)
    without = arrays(1)
    del without["edge_attr"], without["edge_attr_names"]
    np.savez(turned, **without)
    with pytest.raises(DataError, match="missing: edge: amount, edge: age"):
        predict_graph(run.path, turned)


def test_owners_with_other_columns_keep_the_layers_that_read_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "own").mkdir()
    folder = owners(tmp_path / "own", COLUMNS, ("age",), COLUMNS)
    run = simulate(
        "fedavg", owners=folder, model="gine", feature_align="project",
        output_dir=str(tmp_path / "runs"), **SIZES,
    )  # fmt: skip
    assert len(run.rounds) >= 2


def test_batches_of_graphs_read_their_own_edges(real_data: Path) -> None:
    values = {"dataset": "mutag", "setting": "graph", "partition": "uniform"}
    settings = config(**values, **{"data-dir": str(real_data), "hidden-channels": 8})
    clients, _, _ = build_clients(settings, 2)
    data = ClientData.build(clients[0], torch.device("cpu"))
    model = build_model(
        "gine", in_channels=7, hidden_channels=8, num_outputs=2, num_layers=2,
        dropout=0.0, readout=True, messages="both:4",
    )  # fmt: skip
    index = torch.tensor([5, 0, 17])
    part = data.training.inputs.select(index)
    torch.testing.assert_close(model(part), model(data.training.inputs)[index])


@pytest.mark.parametrize(
    "values",
    [
        {"model": "gine"},
        {"model": "gine", "edge_direction": "separate", "setting": "link"},
        {"model": "gcn", "edge_direction": "separate"},
        {"model": "gine", "dataset": "mutag", "setting": "graph", "batch_size": 16},
    ],
    ids=["nodes", "links", "gcn", "batches of graphs"],
)
def test_edges_stay_on_the_device(
    values: dict[str, Any], folder: str, real_data: Path, tmp_path: Path
) -> None:
    data: dict[str, Any] = {"owners": folder}
    if "dataset" in values:
        data = {"data_dir": str(real_data), "partition": "uniform", "clients": 2}
    with gpu():
        run = simulate(
            "fedavg", device="cuda", output_dir=str(tmp_path), **SIZES, **data, **values
        )
    assert run.status == "completed"
    assert not run.summary["failures"]
