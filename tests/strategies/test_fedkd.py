"""FedKD's server half: a plain mean, sent in the factors of the round."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms.fedkd import compress
from flower_fgl.methods import parse_config
from flower_fgl.protocols.weights import FactoredWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedkd import FedKD
from flower_fgl.strategies.rounds.round_log import RoundLog
from tests.support.clients import federation_of

WIDTH = 8
MATRIX = "encoder.1.lin.weight"
"""The square matrix of the student's second layer."""


def strategy_of(**settings: Any) -> FedKD:
    own = {f"fedkd.{key.replace('_', '-')}": value for key, value in settings.items()}
    config = parse_config(
        {
            "method": "fedkd",
            "hidden-channels": WIDTH,
            "num-layers": 3,
            "rounds": 4,
            **own,
        }
    )
    strategy = FedKD(config)
    strategy.federation = federation_of([1, 3])
    strategy.loop.log = RoundLog(1)
    strategy.prepare()
    return strategy


def random_state(strategy: FedKD, generator: torch.Generator) -> dict[str, Tensor]:
    return {n: torch.randn(s, generator=generator) for n, s in strategy.shapes.items()}


def test_clients_with_more_nodes_do_not_count_more(generator: torch.Generator) -> None:
    strategy = strategy_of(energy_start=1.0, energy_end=1.0)  # whole matrices
    one, other = (random_state(strategy, generator) for _ in range(2))
    uploads = {
        0: Upload(FactoredWeights(one), 1.0),
        1: Upload(FactoredWeights(other), 3.0),
    }
    strategy.aggregate(1, uploads)
    sent = strategy.download(2, 0).tensors
    assert set(sent) == set(strategy.shapes)
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, (one[name] + other[name]) / 2)


def test_each_download_keeps_the_energy_of_its_round(
    generator: torch.Generator,
) -> None:
    strategy = strategy_of(energy_start=0.95, energy_end=0.98)
    # shares of the squared singular values of the mean: .97, .02, .01
    singular = torch.zeros(WIDTH)
    singular[:3] = torch.tensor([0.97, 0.02, 0.01]).sqrt()
    change = random_state(strategy, generator)
    mean = {**random_state(strategy, generator), MATRIX: singular.diag()}
    uploads = {
        pid: Upload(
            FactoredWeights({n: t + sign * change[n] for n, t in mean.items()}), 1.0
        )
        for pid, sign in enumerate((1, -1))
    }
    strategy.aggregate(1, uploads)
    # round 2 keeps .95 + 2/4 · .03 = .965 < .97, round 4 keeps .98 < .97 + .02
    for server_round, energy, rank in ((2, 0.965, 1), (4, 0.98, 2)):
        sent = strategy.download(server_round, 0)
        assert strategy.download(server_round, 1) is sent
        assert len(sent.factors[f"{MATRIX}/s"]) == rank
        kept = torch.where(torch.arange(WIDTH) < rank, singular, 0.0).diag()
        torch.testing.assert_close(sent.tensors[MATRIX], kept, atol=1e-5, rtol=0)
        expected = FactoredWeights(compress(mean, energy))
        assert set(sent.factors) == set(expected.factors)
        assert sent.num_bytes == expected.num_bytes
        for name, tensor in expected.tensors.items():
            torch.testing.assert_close(sent.tensors[name], tensor, atol=1e-5, rtol=0)
