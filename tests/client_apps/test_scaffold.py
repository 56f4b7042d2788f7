from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.client_apps.feddc import FedDCClientApp
from flower_fgl.client_apps.runtime.training import load_state, state_of
from flower_fgl.client_apps.scaffold import ScaffoldClientApp, control_term, new_control
from flower_fgl.core.errors import ConfigError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.weights import ControlledWeights
from tests.support.random_clients import random_client


def test_the_gradient_of_the_term_is_the_correction() -> None:
    y = [
        torch.tensor([1.0, 2.0], requires_grad=True),
        torch.ones(1, requires_grad=True),
    ]
    changes = [torch.tensor([0.5, -1.0]), torch.tensor([2.0])]
    value = control_term(y, changes)
    value.backward()
    assert value.item() == pytest.approx(0.5 - 2.0 + 2.0)
    for parameter, change in zip(y, changes, strict=True):
        assert torch.equal(parameter.grad, change)  # type: ignore[arg-type]


def test_the_new_control_is_the_mean_gradient_of_plain_steps() -> None:
    # loss y²/2 from x = 1 with η = .1, c = .3, c_i = .2: steps of gradient y + .1
    y, gradients = 1.0, []
    for _ in range(3):
        gradients.append(y)
        y -= 0.1 * (y - 0.2 + 0.3)
    own, common, x = (torch.tensor([v]) for v in (0.2, 0.3, 1.0))
    found = new_control(own, common, x, torch.tensor([y]), steps=3, lr=0.1)
    assert found.item() == pytest.approx(sum(gradients) / 3)
    assert new_control(own, common, x, x, steps=0, lr=0.1) is own


PLAIN: dict[str, Any] = {
    "optimizer": "sgd", "lr": 0.1, "weight-decay": 0.0, "dropout": 0.0,
    "local-epochs": 1,
}  # fmt: skip


def start(client: Any, level: float) -> ControlledWeights:
    """Return a download with random weights and a constant control variate."""
    draw = torch.Generator().manual_seed(0)
    shapes = client.state_shapes()
    weights = {n: torch.randn(s, generator=draw) / 3 for n, s in shapes.items()}
    return ControlledWeights(
        weights, {n: torch.full(s, level) for n, s in shapes.items()}
    )


def gradient_at(client: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    model, data = client.build_model(), client.data.training
    load_state(model, weights)
    F.cross_entropy(model(data.inputs)[data.index], data.labels).backward()  # type: ignore[no-untyped-call]
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_after_one_step_c_i_is_the_gradient_whatever_c_was() -> None:
    client = random_client("scaffold", settings=PLAIN)
    download = start(client, 0.2)
    fit = ScaffoldClientApp().fit(client, 1, download)
    expected = gradient_at(client, dict(download.tensors))
    kept = client.state.group("control")
    for name, slope in expected.items():
        torch.testing.assert_close(kept[name], slope, atol=1e-5, rtol=1e-4)
        # the step went along the gradient minus c_i = 0 plus c
        moved = (download.tensors[name] - fit.upload.tensors[name]) / 0.1
        torch.testing.assert_close(moved, slope + 0.2, atol=1e-5, rtol=1e-4)
        assert torch.equal(fit.upload.descriptor[name], kept[name])
    # a second round starts from this c_i
    again = ScaffoldClientApp().fit(client, 2, download)
    for name, slope in expected.items():
        moved = (download.tensors[name] - again.upload.tensors[name]) / 0.1
        torch.testing.assert_close(
            moved, torch.full_like(slope, 0.2), atol=1e-5, rtol=0
        )


def test_the_change_is_divided_by_the_steps_of_all_batches() -> None:
    settings = {**PLAIN, "batch-size": 4, "local-epochs": 2}
    client = random_client("scaffold", settings=settings)  # 15 training nodes
    download = start(client, 0.0)
    fit = ScaffoldClientApp().fit(client, 1, download)
    for name, tensor in client.state.group("control").items():
        total = download.tensors[name] - fit.upload.tensors[name]
        torch.testing.assert_close(tensor, total / (8 * 0.1))


def test_the_drift_of_feddc_adds_up_and_travels_with_the_weights() -> None:
    client, app = random_client("feddc", settings=PLAIN), FedDCClientApp()
    drift: dict[str, Tensor] = {}
    for server_round in (1, 2):
        download = start(client, 0.0)
        fit = app.fit(client, server_round, download)
        trained = state_of(fit.model)
        for name, tensor in trained.items():
            change = tensor - download.tensors[name]
            drift[name] = change + drift.get(name, 0)
            torch.testing.assert_close(fit.upload.tensors[name], tensor + drift[name])
            torch.testing.assert_close(fit.upload.descriptor[name], change)
        if server_round == 1:  # without drift the loss is the cross-entropy alone
            for name, slope in gradient_at(client, dict(download.tensors)).items():
                torch.testing.assert_close(
                    fit.upload.descriptor[name], -0.1 * slope, atol=1e-6, rtol=1e-4
                )


@pytest.mark.parametrize("method", ["scaffold", "feddc"])
def test_a_method_that_counts_steps_refuses_to_keep_an_earlier_one(method: str) -> None:
    with pytest.raises(ConfigError, match="check-every must be 0, got 5"):
        parse_config({"method": method, "check-every": 5})
