"""Server half of SCAFFOLD."""

from __future__ import annotations

import torch

from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import DescribedWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.scaffold import Scaffold
from tests.support.clients import federation_of


def test_clients_count_equally_and_c_moves_by_the_share_of_the_sampled_ones() -> None:
    settings = {"method": "scaffold", "hidden-channels": 4, "scaffold.server-lr": 0.5}
    strategy = Scaffold(parse_config(settings))
    strategy.federation = federation_of([1, 3, 2, 2])
    strategy.prepare()
    strategy.weights.tensors.update(
        {name: torch.zeros(shape) for name, shape in strategy.shapes.items()}
    )

    def upload(weights: float, change: float, size: float) -> Upload:
        parts = [
            {n: torch.full(s, level) for n, s in strategy.shapes.items()}
            for level in (weights, change)
        ]
        return Upload(DescribedWeights(*parts), size)

    strategy.aggregate(1, {0: upload(4.0, 1.0, 1), 1: upload(8.0, 2.0, 30)})
    sent = strategy.download(2, 0)
    # half of the mean 6; two of four clients: (1 + 2)/4
    assert all((t == 3.0).all() for t in sent.tensors.values())
    assert all((t == 0.75).all() for t in sent.control.values())
