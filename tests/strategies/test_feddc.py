from __future__ import annotations

import torch

from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import DescribedWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.scaffold import FedDC
from tests.support.clients import federation_of


def test_weights_count_by_size_and_changes_equally() -> None:
    strategy = FedDC(parse_config({"method": "feddc", "hidden-channels": 4}))
    strategy.federation = federation_of([1, 3])
    strategy.prepare()
    assert not any(t.any() for t in strategy.download(1, 0).control.values())
    shapes = strategy.shapes

    def upload(corrected: float, change: float, size: float) -> Upload:
        parts = [
            {name: torch.full(shape, level) for name, shape in shapes.items()}
            for level in (corrected, change)
        ]
        return Upload(DescribedWeights(*parts), size)

    strategy.aggregate(1, {0: upload(4.0, 1.0, 1), 1: upload(8.0, 2.0, 3)})
    sent = strategy.download(2, 0)
    assert all((t == 7.0).all() for t in sent.tensors.values())
    assert all((t == 1.5).all() for t in sent.control.values())
    restored = FedDC(strategy.config)
    restored.federation = strategy.federation
    restored.prepare()
    restored.load_server_state(strategy.server_state())
    for name, tensor in restored.download(2, 0).control.items():
        assert torch.equal(tensor, sent.control[name])
