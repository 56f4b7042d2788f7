from __future__ import annotations

import torch

from flower_fgl.algorithms.fednh import PROTOTYPES
from flower_fgl.methods import parse_config
from flower_fgl.protocols.prototypes import LocalPrototypes
from flower_fgl.protocols.weights import ModelAndMeans
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fednh import FedNH
from tests.support.clients import federation_of


def test_the_body_is_averaged_and_an_unowned_prototype_stays() -> None:
    values = {"method": "fednh", "hidden-channels": 4, "fednh.rho": 0.5}
    strategy = FedNH(parse_config(values))
    strategy.federation = federation_of([2, 2])
    strategy.prepare()
    before = strategy.download(1, 0).tensors[PROTOTYPES].clone()
    shapes, table = strategy.upload_spec(0)
    assert PROTOTYPES not in shapes
    assert table.table == (2, 1, 4)
    ups = {}
    for pid, level in enumerate((1.0, 3.0)):
        means = LocalPrototypes(
            torch.stack([before[1], torch.zeros(4)])[:, None], torch.tensor([[2], [0]])
        )
        tensors = {name: torch.full(shape, level) for name, shape in shapes.items()}
        ups[pid] = Upload(ModelAndMeans(tensors, means), 1.0)
    strategy.aggregate(1, ups)
    sent = strategy.download(2, 0).tensors
    assert list(sent) == list(strategy.shapes)
    assert all((sent[name] == 2.0).all() for name in shapes)
    assert torch.equal(sent[PROTOTYPES][1], before[1])
    # half way between two orthogonal unit vectors
    expected = (before[0] + before[1]) / 2**0.5
    torch.testing.assert_close(sent[PROTOTYPES][0], expected)
