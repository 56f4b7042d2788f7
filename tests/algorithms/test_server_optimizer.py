"""Server optimizers against hand numbers and against Flower's own strategies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi
from torch import Tensor

from flower_fgl.algorithms.server_optimizer import server_step
from flower_fgl.simulation.local_grid import task_identity

CONSTANTS: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}


def step(kind: str, start: float, mean: float, moments: Any, **changes: Any) -> Any:
    made, kept = server_step(
        kind,
        {"w": torch.tensor(start)},
        {"w": torch.tensor(mean)},
        moments,
        **CONSTANTS | changes,
    )
    return float(made["w"]), kept


def test_two_steps_of_each_rule_by_hand() -> None:
    # Δ = 1, then Δ = −0.5; v starts at τ² = 1e-6
    after, moments = step("momentum", 0.0, 1.0, {}, lr=1.0)
    assert after == pytest.approx(1.0)
    after, _ = step("momentum", 1.0, 0.5, moments, lr=1.0)
    assert after == pytest.approx(1.0 + 0.9 * 1.0 - 0.5)

    after, moments = step("adam", 0.0, 1.0, {})
    v = 0.99 * 1e-6 + 0.01
    assert after == pytest.approx(0.1 * 0.1 / (v**0.5 + 1e-3))
    after, _ = step("adam", 1.0, 0.5, moments)
    m, v = 0.9 * 0.1 - 0.1 * 0.5, 0.99 * v + 0.01 * 0.25
    assert after == pytest.approx(1.0 + 0.1 * m / (v**0.5 + 1e-3))

    after, moments = step("yogi", 0.0, 1.0, {})
    v = 1e-6 + 0.01  # v < Δ²: it grows
    assert after == pytest.approx(0.1 * 0.1 / (v**0.5 + 1e-3))
    assert float(moments["v/w"]) == pytest.approx(v)
    small = {"m/w": torch.tensor(0.0), "v/w": torch.tensor(1.0)}
    _, moments = step("yogi", 1.0, 0.5, small)
    assert float(moments["v/w"]) == pytest.approx(1.0 - 0.01 * 0.25)

    after, moments = step("adagrad", 0.0, 1.0, {})
    v = 1e-6 + 1.0
    assert after == pytest.approx(0.1 * 1.0 / (v**0.5 + 1e-3))
    after, _ = step("adagrad", 1.0, 0.5, moments)
    assert after == pytest.approx(1.0 - 0.1 * 0.5 / ((v + 0.25) ** 0.5 + 1e-3))


def test_plain_momentum_of_zero_is_the_mean() -> None:
    after, _ = step("momentum", 0.25, 0.75, {}, lr=1.0, beta1=0.0)
    assert after == 0.75


def of_flower(strategy: Any, rounds: list[list[dict[str, Tensor]]]) -> dict[str, Any]:
    """Pass the uploads of some rounds through a strategy of Flower."""
    state = {name: torch.zeros_like(t) for name, t in rounds[0][0].items()}
    for number, uploads in enumerate(rounds, start=1):
        record = ArrayRecord(state)
        strategy.current_arrays = (
            record
            if isinstance(strategy, FedAvgM)
            else {k: v.numpy() for k, v in record.items()}
        )
        replies = []
        for upload in uploads:
            content = RecordDict({"arrays": ArrayRecord(upload)})
            content["metrics"] = MetricRecord({"num-examples": 1})
            request = Message(
                RecordDict({"config": ConfigRecord()}),
                dst_node_id=1,
                message_type="train",
            )
            replies.append(Message(content, reply_to=request))
        record, _ = strategy.aggregate_train(number, replies)
        state = {k: torch.from_numpy(v.numpy()).float() for k, v in record.items()}
    return state


@pytest.mark.parametrize(
    ("kind", "strategy", "constants"),
    [
        ("momentum", FedAvgM(server_learning_rate=0.5, server_momentum=0.9),
         {"lr": 0.5, "beta1": 0.9}),
        ("adam", FedAdam(eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3), {"lr": 0.1}),
        ("yogi", FedYogi(eta=0.01, beta_1=0.9, beta_2=0.99, tau=1e-3), {"lr": 0.01}),
        ("adagrad", FedAdagrad(eta=0.1, tau=1e-3), {"lr": 0.1}),
    ],
)  # fmt: skip
def test_a_rule_takes_flowers_steps_with_flowers_constants(
    kind: str, strategy: Any, constants: dict[str, float]
) -> None:
    rng = np.random.default_rng(0)
    rounds = [
        [
            {
                name: torch.from_numpy(rng.normal(size=shape).astype(np.float32))
                for name, shape in (("a", (3, 2)), ("b", (4,)))
            }
            for _ in range(3)
        ]
        for _ in range(4)
    ]
    with task_identity(1):
        expected = of_flower(strategy, rounds)
    state: dict[str, Tensor] = {n: torch.zeros_like(t) for n, t in rounds[0][0].items()}
    moments: dict[str, Tensor] = {}
    for number, uploads in enumerate(rounds, start=1):
        mean = {n: torch.stack([u[n] for u in uploads]).mean(0) for n in state}
        correction = 1.0
        if kind == "adam":  # with the next round's number
            correction = (1 - 0.99 ** (number + 1)) ** 0.5 / (1 - 0.9 ** (number + 1))
        state, moments = server_step(
            kind,
            state,
            mean,
            moments,
            **CONSTANTS | constants,
            correction=correction,
            starts_at_zero=True,
        )
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
