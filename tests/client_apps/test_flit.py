"""FLIT's client half: its loss, the limits at which it is FedAvg, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.flit import FLITClientApp, WeighedLoss
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import load_state, state_of
from flower_fgl.core.errors import ConfigError
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.testing.case import comparable
from tests.client_apps.test_fedpg import make_client
from tests.client_apps.test_whole_losses import client_of
from tests.datasets.test_messages import COLUMNS
from tests.datasets.test_messages import owners as owners_with_edges
from tests.support.graph_sets import write_set
from tests.support.number_targets import number_files

SHORT: dict[str, Any] = {
    "rounds": 2,
    "local_epochs": 2,
    "lr": 0.01,
    "hidden_channels": 8,
}


def initial(client: Client) -> Weights:
    return Weights(state_of(client.build_model(initialise=True)))


def uploads(method: str, server_round: int, **settings: Any) -> dict[str, Tensor]:
    """Return what a client uploads after a round of plain SGD."""
    client = client_of(method, **settings)
    app = FLITClientApp() if method == "flit" else FedAvgClientApp()
    fit = app.fit(client, server_round, initial(client))
    assert isinstance(fit.upload, Weights)
    return dict(fit.upload.tensors)


@pytest.mark.parametrize("variant", ["flit", "flit+"])
def test_the_first_round_is_that_of_fedavg(variant: str) -> None:
    plain = uploads("fedavg", 1)
    for name, tensor in uploads("flit", 1, variant=variant).items():
        assert torch.equal(tensor, plain[name])


def test_without_power_each_round_is_that_of_fedavg() -> None:
    plain, weighed = uploads("fedavg", 2), uploads("flit", 2)
    for name, tensor in uploads("flit", 2, gamma=0.0).items():
        torch.testing.assert_close(tensor, plain[name], atol=1e-7, rtol=1e-6)
    assert any((t - plain[name]).abs().max() > 1e-4 for name, t in weighed.items())
    virtual = uploads("flit", 2, variant="flit+")
    assert any((t - weighed[name]).abs().max() > 1e-4 for name, t in virtual.items())


def test_the_loss_of_a_step_against_a_loop() -> None:
    # the received network has other losses than the one in training
    client = client_of("flit")
    start = initial(client)
    model = client.receive(start.tensors)
    weighed = WeighedLoss(client, model, 2)
    moved = {n: 1.5 * t + 0.1 for n, t in start.tensors.items()}
    load_state(model, moved)
    data = client.data.training
    model.eval()
    logits = model(data.inputs)[data.index]
    received = client.receive(start.tensors).eval()(data.inputs)[data.index]
    phi, own = [], []
    for row, other, label in zip(logits, received, data.labels.tolist(), strict=True):
        loss, before = -row.log_softmax(0)[label], -other.log_softmax(0)[label]
        own.append(loss)
        phi.append(loss + max(loss - before.detach(), torch.zeros(())))
    d = sum(float(p.detach()) for p in phi) / len(phi)
    terms = [
        (1 - torch.exp(-p / (d + 1e-7)) + 1e-7) ** 0.5 * loss
        for p, loss in zip(phi, own, strict=True)
    ]
    wanted = sum(terms, torch.zeros(())) / len(terms)
    found = weighed(logits, data.labels, data.index)
    torch.testing.assert_close(found, wanted)
    slopes = [
        torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
        for value in (found, wanted)
    ]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    worse = sum(
        float(p.detach()) > float(x.detach()) for p, x in zip(phi, own, strict=True)
    )
    assert 0 < weighed.terms()["worse"] == pytest.approx(worse / len(phi))
    # a second step mixes the two means
    weighed(logits, data.labels, data.index)
    assert weighed.mean.item() == pytest.approx(d, rel=1e-5)
    few = data.index[:2]
    weighed(logits[:2], data.labels[:2], few)
    part = sum(float(p.detach()) for p in phi[:2]) / 2
    assert weighed.mean.item() == pytest.approx(0.8 * d + 0.2 * part, rel=1e-5)


def test_the_numbers_of_a_round_and_what_withholds_them() -> None:
    client = make_client("flit")
    assert FLITClientApp().fit(client, 1, initial(client)).terms == {}
    terms = dict(FLITClientApp().fit(client, 2, initial(client)).terms)
    assert terms.keys() == {"weight", "weight-90", "worse"}
    assert 0 < terms["weight"] < terms["weight-90"] <= 1
    assert 0 <= terms["worse"] <= 1
    model = client.receive(initial(client).tensors)
    weighed = WeighedLoss(client, model, 2)
    assert weighed.terms() == {}
    weighed.omega[: len(weighed.omega)] = torch.nan
    weighed.omega[:10, 0] = torch.arange(1, 11) / 10
    assert weighed.terms()["weight-90"] == pytest.approx(0.9)
    object.__setattr__(client.config, "min_class_count", 2)
    assert weighed.terms().keys() == {"weight", "worse"}  # the quantile is one item's


def test_a_step_without_a_known_number_is_no_step(tmp_path: Path) -> None:
    number_files(tmp_path / "own")
    run = simulate(
        "flit", owners=str(tmp_path / "own"), target_kind="numbers", batch_size=1,
        output_dir=str(tmp_path / "runs"), flit={"variant": "flit+"}, **SHORT,
    )  # fmt: skip
    assert run.status == "completed"
    assert not any(row["failures"] for row in run.rounds)
    assert np.isfinite(run.rounds[-1]["loss"])


@pytest.mark.parametrize("variant", ["flit", "flit+"])
@pytest.mark.parametrize("kind", ["numbers", "labels", "classes"])
def test_graphs_of_all_kinds_of_targets_in_batches(
    kind: str, variant: str, tmp_path: Path
) -> None:
    draw = np.random.default_rng(3)
    for number, name in enumerate("abc"):
        y = draw.normal(size=(40, 2))
        y[draw.random(y.shape) < 0.2] = np.nan
        names = np.array(["logP", "logS"])
        changed: dict[str, dict[str, Any]] = {
            "numbers": {"y": y, "class_names": None, "target_names": names},
            "labels": {
                "y": np.where(np.isnan(y), -1, y > 0).astype(int),
                "class_names": None,
                "label_names": names,
            },
            "classes": {},
        }
        write_set(tmp_path / "own" / f"{name}.npz", 40, number, **changed[kind])
    values: dict[str, Any] = {
        "owners": str(tmp_path / "own"), "setting": "graph", "model": "gin",
        "target_kind": kind, "output_dir": str(tmp_path), "batch_size": 7,
        "flit": {"variant": variant}, **SHORT,
    }  # fmt: skip
    first, second = (simulate("flit", **values) for _ in range(2))
    assert first.status == "completed"
    assert not any(row["failures"] for row in first.rounds)
    assert comparable(first) == comparable(second)
    terms = [row["terms"] for row in first.clients if row.get("round") == 2]
    assert len(terms) == 3
    assert all(0 < found["weight"] < 1 for found in terms)
    plain = simulate("flit", **{**values, "flit": {"variant": variant, "gamma": 0.0}})
    assert comparable(plain) != comparable(first)


def test_messages_along_edges_are_shifted_too(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    owned = owners_with_edges(tmp_path / "own", COLUMNS, COLUMNS)
    run = simulate(
        "flit", owners=owned, model="gine", edge_direction="separate", batch_size=5,
        output_dir=str(tmp_path / "runs"), flit={"variant": "flit+"}, **SHORT,
    )  # fmt: skip
    assert run.status == "completed"
    assert not any(row["failures"] for row in run.rounds)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"setting": "link"}, "flit cannot predict links"),
        ({"setting": "edge"}, "flit cannot classify edges"),
        ({"class_weights": "balanced"}, "flit does not read class-weights"),
        ({"batch_size": 8, "num_neighbors": "2,2"}, "which do not read num-neighbors"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate("flit", clients=3, output_dir=str(tmp_path), **values)
