from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from flower_fgl.core.errors import PayloadError
from flower_fgl.methods import parse_config
from flower_fgl.protocols.weights import ReliableWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedtad import FedTAD
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.support.clients import federation_of


def strategy_of(**settings: Any) -> FedTAD:
    own = {f"fedtad.{key.replace('_', '-')}": value for key, value in settings.items()}
    config = parse_config({"method": "fedtad", "hidden-channels": 4, **own})
    strategy = FedTAD(config)
    strategy.federation = federation_of([1, 3])
    strategy.loop.log = RoundLog(1)
    strategy.prepare()
    return strategy


def uploads_for(strategy: FedTAD, reliability: list[list[float]]) -> dict[int, Upload]:
    generator = torch.Generator().manual_seed(1)
    return {
        pid: Upload(
            ReliableWeights(
                {
                    name: torch.randn(shape, generator=generator)
                    for name, shape in strategy.shapes.items()
                },
                {"reliability": torch.tensor(row)},
            ),
            1.0,
        )
        for pid, row in enumerate(reliability)
    }


def test_without_server_epochs_the_model_is_the_mean() -> None:
    strategy = strategy_of(server_epochs=0)
    ups = uploads_for(strategy, [[1.0, 2.0], [3.0, 0.0]])
    strategy.aggregate(1, ups)
    for name, found in strategy.download(2, 0).tensors.items():
        states = [up.payload.tensors[name] for up in ups.values()]
        torch.testing.assert_close(found, sum(states) / 2)


def test_the_model_learns_from_the_reliable_client() -> None:
    # only client 1 is reliable: with a fixed generator the distance to its outputs falls
    found = []
    for epochs in (1, 20):
        strategy = strategy_of(
            server_epochs=epochs, generator_steps=0, server_lr=0.01, nodes=20
        )
        ups = uploads_for(strategy, [[0.0, 0.0], [1.0, 1.0]])
        strategy.aggregate(1, ups)
        found.append(strategy.loop.log.numbers["discrepancy"])
    assert found[1] < 0.5 * found[0]


def test_the_generator_makes_the_models_disagree() -> None:
    found = []
    for steps in (0, 5):
        strategy = strategy_of(
            server_epochs=4, generator_steps=steps, server_lr=0.01, model_steps=0
        )
        before = strategy.generator.layers[0].weight.detach().clone()
        strategy.aggregate(1, uploads_for(strategy, [[1.0, 1.0], [1.0, 1.0]]))
        after = strategy.generator.layers[0].weight
        found.append(float((after - before).detach().abs().max()))
    assert found[0] == 0
    assert found[1] > 1e-3


def test_no_reliable_client_leaves_the_mean_to_weight_decay() -> None:
    strategy = strategy_of(model_steps=1, server_epochs=1)
    ups = uploads_for(strategy, [[0.0, 0.0], [0.0, 0.0]])
    strategy.aggregate(1, ups)
    for name, found in strategy.download(2, 0).tensors.items():
        states = [up.payload.tensors[name] for up in ups.values()]
        # one Adam step of 0.001
        torch.testing.assert_close(found, sum(states) / 2, atol=1.1e-3, rtol=0)


def test_rare_classes_are_withheld() -> None:
    payload = ReliableWeights(
        {"w": torch.ones(2)}, {"reliability": torch.tensor([-1.0, 2.0, 3.0])}
    )
    kept = payload.withhold(torch.tensor([True, False, True]), 5)
    assert kept.descriptor["reliability"].tolist() == [-1, 0, 3]
    assert kept.in_range().descriptor["reliability"].tolist() == [0, 0, 3]
    assert payload.num_bytes == 4 * (2 + 3)


def test_a_failed_distillation_leaves_generator_and_moments_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = strategy_of(server_epochs=1, nodes=20)
    ups = uploads_for(strategy, [[1.0, 2.0], [3.0, 0.0]])
    strategy.aggregate(1, ups)
    before = deepcopy(strategy.server_state())
    distil = FedTAD.distil

    def ruin(self: FedTAD, *arguments: Any) -> None:
        distil(self, *arguments)
        for parameter in self.generator.parameters():
            parameter.data.fill_(torch.nan)

    with monkeypatch.context() as context:
        context.setattr(FedTAD, "distil", ruin)
        with pytest.raises(PayloadError, match=r'"generator".*not finite'):
            strategy._keep_finite(lambda: strategy.aggregate(2, ups))
    after = strategy.server_state()
    assert set(after.tensors) == set(before.tensors)
    for name, tensor in before.tensors.items():
        assert torch.equal(after.tensors[name], tensor), name
    strategy._keep_finite(lambda: strategy.aggregate(2, ups))
