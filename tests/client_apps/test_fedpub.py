from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.algorithms.fedpub import MaskedBackbone, proxy_graph
from flower_fgl.client_apps.fedpub import (
    FedPubClientApp,
    mask_penalty,
    proxy_embedding,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import make_optimizer, state_of
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.nn import GraphInput
from flower_fgl.protocols.fedavg import Weights
from tests.client_apps.runtime.test_client import client_of


@pytest.fixture
def client(toy: NodeDataset) -> Client:
    return client_of(
        toy, method="fed-pub", dropout=0.0, local_epochs=2, hidden_channels=4
    )


def masked(client: Client, value: float = 1.0) -> MaskedBackbone:
    backbone = client.build_model(initialise=True)
    masks = [torch.full_like(w, value) for w in backbone.parameters()]
    return MaskedBackbone(backbone, masks, threshold=1e-3)


def test_the_penalty_of_three_weights_by_hand() -> None:
    # ‖ν‖_1 = 1 + 2 + 3, ‖θ − w‖_2 = √(3² + 4² + 0²): over all tensors together
    masks = [torch.tensor([1.0, -2.0]), torch.tensor([3.0])]
    weights = [torch.tensor([3.0, 5.0]), torch.tensor([1.0])]
    anchors = [torch.tensor([0.0, 1.0]), torch.tensor([1.0])]
    value = mask_penalty(masks, weights, anchors, l1=0.1, l2=0.01)
    assert value.item() == pytest.approx(0.1 * 6 + 0.01 * 5)


def test_both_penalties_carry_a_gradient() -> None:
    mask = torch.tensor([1.0, -2.0], requires_grad=True)
    theta = torch.tensor([3.0, 5.0], requires_grad=True)
    anchor = torch.tensor([0.0, 1.0])
    mask_penalty([mask], [theta], [anchor], l1=0.1, l2=0.01).backward()
    torch.testing.assert_close(mask.grad, torch.tensor([0.1, -0.1]))
    torch.testing.assert_close(theta.grad, 0.01 * torch.tensor([3 / 5, 4 / 5]))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_weight_decay_does_not_change_the_mask(client: Client, optimizer: str) -> None:
    model = masked(client)
    config = replace(client.config, optimizer=optimizer, weight_decay=0.1)
    steps = make_optimizer(model, config)
    before = [weight.detach().clone() for weight in model.backbone.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    steps.step()
    assert all((mask == 1).all() for mask in model.masks)
    for old, new in zip(before, model.backbone.parameters(), strict=True):
        assert not old.any() or not torch.equal(old, new)


def test_the_distance_has_gradient_zero_at_the_start_of_training() -> None:
    theta = torch.ones(2, requires_grad=True)
    mask_penalty([torch.ones(2)], [theta], [torch.ones(2)], l1=0.0, l2=1.0).backward()
    assert torch.equal(theta.grad, torch.zeros(2))  # type: ignore[arg-type]


def test_a_mask_of_ones_does_not_change_the_output(client: Client) -> None:
    model, inputs = masked(client), client.data.inputs[0]
    torch.testing.assert_close(model(inputs), model.backbone(inputs))


def test_the_data_loss_has_a_gradient_for_mask_and_weights(client: Client) -> None:
    model, data = masked(client), client.data.training
    with torch.no_grad():
        for weight in model.backbone.parameters():
            weight.abs_().add_(0.1)  # initial biases are 0: a mask would have no effect
    F.cross_entropy(data.logits(model, data.index), data.labels).backward()
    for parameter in (*model.masks, *model.backbone.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


def test_small_entries_are_pruned_in_evaluation_only(client: Client) -> None:
    model = masked(client)
    with torch.no_grad():
        model.masks[0].fill_(9e-4)
        model.masks[1].fill_(-1e-3)  # not below the threshold
    names = [name for name, _ in model.backbone.named_parameters()]
    weights = dict(model.backbone.named_parameters())
    scored = model.eval().effective()
    assert not scored[names[0]].any()
    torch.testing.assert_close(scored[names[1]], -1e-3 * weights[names[1]])
    trained = model.train().effective()
    torch.testing.assert_close(trained[names[0]], 9e-4 * weights[names[0]])


def test_the_mask_is_kept_and_the_unmasked_weights_are_uploaded(client: Client) -> None:
    app, start = FedPubClientApp(), client.build_model(initialise=True)
    fit = app.fit(client, 1, Weights(state_of(start)))
    mask = client.state.group("mask")
    assert math.isfinite(fit.loss)
    assert fit.model is not None
    assert set(mask) == set(fit.upload.tensors)
    for name, personal in fit.model.state_dict().items():
        sent = fit.upload.tensors[name]
        torch.testing.assert_close(personal, sent * mask[name])
        assert not torch.equal(sent, start.state_dict()[name])
        assert not torch.equal(mask[name], torch.ones_like(mask[name]))
    model = fit.model.eval()
    proxy = GraphInput(*proxy_graph(client.config.seed, client.data.graph.num_features))
    expected = model.embed(proxy).mean(dim=0)
    torch.testing.assert_close(fit.upload.embedding, expected.detach())


def test_the_next_round_continues_with_the_mask(client: Client) -> None:
    app = FedPubClientApp()
    weights = Weights(state_of(client.build_model(initialise=True)))
    app.fit(client, 1, weights)
    client.config = replace(client.config, local_epochs=0)
    before = client.state.group("mask")
    app.fit(client, 2, weights)
    after = client.state.group("mask")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_models_that_differ_embed_the_proxy_graph_differently(client: Client) -> None:
    one, other = (client.build_model(initialise=True) for _ in range(2))
    group = Group(client)
    assert torch.equal(proxy_embedding(group, one), proxy_embedding(group, other))
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert not torch.equal(proxy_embedding(group, one), proxy_embedding(group, other))
