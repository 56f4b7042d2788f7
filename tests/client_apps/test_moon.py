from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.moon import MoonClientApp, model_contrast, towards_received
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import load_state, state_of
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.fedavg import Weights
from tests.client_apps.test_fedpg import make_client


def initial(client: Client) -> Weights:
    return Weights(state_of(client.build_model(initialise=True)))


def shifted(weights: Weights, by: float) -> Weights:
    return Weights(
        {name: t + by * torch.ones_like(t) for name, t in weights.tensors.items()}
    )


def test_the_contrast_by_hand() -> None:
    # cosines with the received model 1 and 0.6, with the previous one 0 and 0.8:
    # −log(e² / (e² + 1)) = 0.126928, −log(e^1.2 / (e^1.2 + e^1.6)) = 0.913015
    z = torch.tensor([[2.0, 0.0], [3.0, 4.0]])
    received = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    previous = torch.tensor([[0.0, 5.0], [0.0, 1.0]])
    value = model_contrast(z, towards_received(received, previous), tau=0.5)
    assert float(value.mean()) == pytest.approx((0.126928 + 0.913015) / 2, abs=1e-6)


def test_equal_models_give_log_2_and_no_gradient() -> None:
    z = torch.randn(5, 3, requires_grad=True)
    other = torch.randn(5, 3)
    loss = model_contrast(z, towards_received(other, other), tau=0.1).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(math.log(2))
    assert z.grad is not None
    assert float(z.grad.abs().max()) < 1e-6


def test_the_contrast_of_a_zero_embedding_is_finite() -> None:
    z = torch.zeros(2, 3, requires_grad=True)
    towards = towards_received(torch.randn(2, 3), torch.zeros(2, 3))
    loss = model_contrast(z, towards, tau=0.5)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert bool(z.grad.isfinite().all())


def test_the_first_round_equals_fedavg() -> None:
    client, other = make_client("moon"), make_client("fedavg")
    ours = MoonClientApp().fit(client, 1, initial(client))
    theirs = FedAvgClientApp().fit(other, 1, initial(other))
    assert ours.loss == theirs.loss
    for name, tensor in theirs.upload.tensors.items():
        assert torch.equal(ours.upload.tensors[name], tensor)


@pytest.mark.parametrize(("mu", "is_same"), [(0.0, True), (1.0, False)])
def test_from_the_second_round_on_mu_weights_the_contrast(
    mu: float, is_same: bool
) -> None:
    client, other = make_client("moon", mu=mu), make_client("fedavg")
    for app, one in ((MoonClientApp(), client), (FedAvgClientApp(), other)):
        fit = app.fit(one, 1, initial(one))
        one.state.set_group("model", state_of(fit.model))
    # both methods store optimizer moments under different names, so they are removed
    client.state.set_group("optimizer", {})
    other.state.set_group("optimizer", {})
    ours = MoonClientApp().fit(client, 2, initial(client)).upload.tensors
    theirs = FedAvgClientApp().fit(other, 2, initial(other)).upload.tensors
    assert is_same == all(torch.equal(ours[name], t) for name, t in theirs.items())


@pytest.mark.parametrize("nodes", ["all", "train"])
def test_the_term_contrasts_the_received_with_the_previous_model(nodes: str) -> None:
    client = make_client("moon", mu=5.0, tau=0.2, nodes=nodes)
    received = initial(client)
    previous = shifted(received, 0.3)
    model = RecordingBackbone(client.build_model(initialise=True))
    client.state.set_group("model", dict(previous.tensors))
    term = MoonClientApp().penalties(Group(client), model, [Weights({})])
    inputs = client.data.training.inputs
    load_state(model.backbone, previous.tensors)
    z = model.eval().embed(inputs)
    model.backbone.load_state_dict(dict(received.tensors))
    other = model.backbone.embed(inputs).detach()
    rows = client.data.training.index.tolist() if nodes == "train" else range(len(z))
    slow = 0.0
    for row in rows:
        near = math.exp(
            float(F.cosine_similarity(z[row].detach(), other[row], dim=0)) / 0.2
        )
        far = math.exp(1 / 0.2)
        slow -= math.log(near / (near + far)) / len(rows)
    loss = term()
    assert float(loss.detach()) == pytest.approx(5 * slow, rel=1e-4)
    loss.backward()
    grads = [p.grad for p in model.backbone.encoder.parameters() if p.grad is not None]
    assert sum(float(g.abs().sum()) for g in grads) > 0


def test_a_client_with_one_class_and_no_edges_trains() -> None:
    y = torch.zeros(30, dtype=torch.int64)
    client = make_client("moon", y=y, edge_index=torch.empty(2, 0, dtype=torch.int64))
    app = MoonClientApp()
    for server_round in (1, 2):
        fit = app.fit(client, server_round, initial(client))
        client.state.set_group("model", state_of(fit.model))
        assert math.isfinite(fit.loss)
