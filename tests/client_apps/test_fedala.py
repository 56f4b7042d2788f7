from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.client_apps.fedala import (
    MAX_PASSES,
    FedALAClientApp,
    blend,
    blend_step,
    is_learned,
    last_layers,
    sample_rows,
)
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import load_state, state_of
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.model_spec import TYPED
from flower_fgl.nn import MODELS, build_model
from flower_fgl.protocols.fedavg import Weights
from tests.client_apps.test_fedpg import make_client


def states(client: Client) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return an old and a received state that differ in every entry."""
    received = state_of(client.build_model(initialise=True))
    draw = torch.Generator().manual_seed(1)
    old = {
        name: t + 0.5 * torch.randn(t.shape, generator=draw)
        for name, t in received.items()
    }
    return old, received


def learn(
    client: Client, old: dict[str, torch.Tensor], received: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the whole state after the blend."""
    client.state.set_group("model", old)
    is_first = not client.state.group("blend")
    group, downloads = Group(client, 2), [Weights(received)]
    (layers,) = FedALAClientApp().learn(group, downloads, is_first=is_first)
    return received | layers


def test_the_blend_and_a_step_of_it_by_hand() -> None:
    old, received = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 1.0, 1.0])
    weights = torch.tensor([0.5, 1.0, 0.0])
    assert blend(old, received, weights).tolist() == [2.0, 1.0, 0.0]
    # 0.5 − 0.1·0.4·2 = 0.42; 1 − 0.1·(−3)·(−1) = 0.7; 0 − 0.1·2·1 < 0
    gradient = torch.tensor([0.4, -3.0, 2.0])
    out = blend_step(weights, gradient, old, received, lr=0.1)
    torch.testing.assert_close(out, torch.tensor([0.42, 0.7, 0.0]))


def test_the_gradient_in_the_step_equals_that_of_the_weights() -> None:
    old, received = torch.randn(4), torch.randn(4)
    weights = torch.full((4,), 0.5, requires_grad=True)
    target = blend(old, received, weights)
    target.retain_grad()
    target.pow(3).sum().backward()  # type: ignore[no-untyped-call]
    assert target.grad is not None
    assert weights.grad is not None
    out = blend_step(weights.detach(), target.grad, old, received, lr=1e-3)
    torch.testing.assert_close(out, weights.detach() - 1e-3 * weights.grad)


@pytest.mark.parametrize("model", sorted({*MODELS} - {"gine", *TYPED}))
def test_the_last_layer_of_every_backbone_is_its_classifier(model: str) -> None:
    built = build_model(
        model,
        in_channels=5,
        hidden_channels=4,
        num_outputs=3,
        num_layers=2,
        dropout=0.0,
    )
    names = [name for name, _ in built.named_parameters()]
    classifier = [name for name in names if name.startswith("classifier.")]
    assert last_layers(names, 1) == classifier
    assert last_layers(names, 99) == names


def test_layers_are_parts_of_the_encoder() -> None:
    names = [
        "encoder.input.w",
        "encoder.convs.0.w",
        "encoder.convs.1.a.w",
        "encoder.convs.1.b",
    ]
    assert last_layers([*names, "classifier.lin.w"], 2) == [
        *names[2:],
        "classifier.lin.w",
    ]


def test_the_blend_weights_take_one_step_on_the_sampled_nodes() -> None:
    client = make_client("fedala")
    old, received = states(client)
    names = [name for name in old if name.startswith("classifier")]
    start = {name: torch.full_like(old[name], 0.5) for name in names}
    client.state.set_group("blend", start)  # W exists, so learning takes one pass
    out = learn(client, old, received)
    model = client.build_model().eval()
    load_state(model, received)
    load_state(model, {n: blend(old[n], received[n], start[n]) for n in names})
    rows = sample_rows(Group(client, 2), share=0.8)
    F.cross_entropy(rows.pick(model(client.data.inputs[0])), rows.labels).backward()
    for name, parameter in model.named_parameters():
        if name not in names:
            assert torch.equal(out[name], received[name])
            continue
        assert parameter.grad is not None
        moved = start[name] - parameter.grad * (received[name] - old[name])
        expected = moved.clamp(0, 1)
        torch.testing.assert_close(client.state.group("blend")[name], expected)
        torch.testing.assert_close(
            out[name], blend(old[name], received[name], expected)
        )
        assert not torch.equal(expected, start[name])


def test_learning_the_blend_lowers_its_loss() -> None:
    client = make_client("fedala", layers=9, sample=100.0)
    old, received = states(client)
    model, data = client.build_model().eval(), client.data.training

    def loss(state: dict[str, torch.Tensor]) -> float:
        load_state(model, state)
        with torch.no_grad():
            return float(F.cross_entropy(model(data.inputs)[data.index], data.labels))

    out = learn(client, old, received)
    assert loss(out) < min(loss(old), loss(received))


def test_the_blend_weights_are_learned_to_convergence_first_and_then_once_a_round() -> (
    None
):
    assert not is_learned([], is_first=True)
    assert not is_learned([], is_first=False)
    assert is_learned([1.0], is_first=False)
    assert not is_learned([1.0] * 10, is_first=True)
    assert is_learned([9.0] + [1.0] * 10, is_first=True)
    # the standard deviation of five zeros and five ones is 0.527
    assert not is_learned([0.0, 1.0] * 10, is_first=True)
    assert is_learned([0.0, 1.0] * (MAX_PASSES // 2), is_first=True)


def test_equal_models_leave_the_blend_weights_unchanged() -> None:
    client = make_client("fedala")
    _, received = states(client)
    out = learn(client, received, received)
    for name, tensor in received.items():
        assert torch.equal(out[name], tensor)
    assert all(bool((w == 1).all()) for w in client.state.group("blend").values())


def test_the_first_round_equals_fedavg() -> None:
    client, other = make_client("fedala"), make_client("fedavg")
    download = Weights(states(client)[1])
    ours = FedALAClientApp().fit(client, 1, download).upload.tensors
    theirs = FedAvgClientApp().fit(other, 1, download).upload.tensors
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor)
    assert client.state.group("blend") == {}


@pytest.mark.parametrize(("share", "number"), [(0.8, 12), (1.0, 15), (0.01, 1)])
def test_a_share_of_the_training_nodes_is_drawn(share: float, number: int) -> None:
    client = make_client("fedala")
    rows = sample_rows(Group(client, 1), share=share)
    index, labels = rows.index, rows.labels
    assert len(index) == number
    assert set(index.tolist()) <= set(client.data.training.index.tolist())
    assert torch.equal(labels, client.data.labels[0][index])


def test_a_client_with_one_class_and_no_edges_trains() -> None:
    y = torch.zeros(30, dtype=torch.int64)
    client = make_client("fedala", y=y, edge_index=torch.empty(2, 0, dtype=torch.int64))
    old, received = states(client)
    client.state.set_group("model", old)
    fit = FedALAClientApp().fit(client, 2, Weights(received))
    assert math.isfinite(fit.loss)
