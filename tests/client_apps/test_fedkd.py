"""FedKD's client half."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flower_fgl.client_apps.fedkd import FedKDClientApp
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.core.errors import FglError
from flower_fgl.protocols.weights import FactoredWeights
from tests.support.random_clients import random_client


def test_a_student_that_diverges_is_reported_before_it_is_factored() -> None:
    client = random_client(
        "fedkd", settings={"optimizer": "sgd", "lr": 1e38, "local-epochs": 2}
    )
    app = FedKDClientApp()
    start = FactoredWeights(state_of(app.student(client)))
    with pytest.raises(FglError, match=r"training left .* Try a smaller lr"):
        app.fit(client, 1, start)


def gradient_norm(module: nn.Module) -> float:
    grads = [p.grad.flatten() for p in module.parameters() if p.grad is not None]
    return float(torch.cat(grads).norm())


@pytest.mark.parametrize(("scale", "is_clipped"), [(0.5, False), (30.0, True)])
def test_teacher_student_and_projection_each_have_a_gradient_of_norm_10_at_most(
    scale: float, is_clipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = random_client("fedkd", settings={"local-epochs": 1})
    app = FedKDClientApp()
    start = {n: torch.zeros(shape) for n, shape in app.download_spec(client).items()}
    pair = app.pair(client, FactoredWeights(start))
    with torch.no_grad():
        for parameter in pair.parameters():
            parameter.normal_().mul_(scale)
    monkeypatch.setattr(app, "pair", lambda *_: pair)
    parts = [pair.teacher, pair.student, pair.projection]
    before: list[float] = []
    # hooks of all optimizers precede those of one
    hook = register_optimizer_step_pre_hook(
        lambda *_: before.extend(gradient_norm(part) for part in parts)
    )
    try:
        app.fit(client, 1, FactoredWeights(start))
    finally:
        hook.remove()
    assert [norm > 10 for norm in before] == [is_clipped] * 3  # of one step
    after = [gradient_norm(part) for part in parts]
    assert after == pytest.approx([min(norm, 10.0) for norm in before], rel=1e-4)
