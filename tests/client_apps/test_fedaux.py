"""FedAux: what a client uploads, and what stays with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.fedaux import DIRECTION
from flower_fgl.client_apps.fedaux import FedAuxClientApp
from flower_fgl.client_apps.fedpub import MASK
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.methods import parse_config
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.personal_mix import FedAux
from tests.client_apps.test_fedpg import C, N, make_client


def trained(client: Client, rounds: int = 1) -> tuple[dict[str, Tensor], Weights]:
    """Train from the same download in every round; return it and the last upload."""
    app = FedAuxClientApp()
    start = state_of(app.build(client))
    for server_round in range(1, rounds + 1):
        result = app.fit(client, server_round, Weights(start))
    assert isinstance(result.upload, Weights)
    return start, result.upload


@pytest.mark.parametrize("mask", [False, True])
def test_weights_and_direction_train(mask: bool) -> None:
    start, upload = trained(make_client("fedaux", mask=mask))
    assert start.keys() == upload.tensors.keys()
    same = [n for n, t in upload.tensors.items() if torch.equal(t, start[n])]
    assert same == []


def test_a_mask_multiplies_the_weights_and_stays_with_the_client() -> None:
    client, app = make_client("fedaux", mask=True), FedAuxClientApp()
    start = Weights(state_of(app.build(client)))
    for server_round in (1, 2):
        result = app.fit(client, server_round, start)
        masks = client.state.group(MASK)
        assert result.model is not None
        for name, weight in result.upload.tensors.items():  # type: ignore[attr-defined]
            found = result.model.state_dict()[name]
            assert torch.equal(found, weight * masks[name])
            if name == DIRECTION:  # the server compares directions, which have no mask
                assert torch.equal(masks[name], torch.ones_like(weight))
        moved = (masks["classifier.weight"] - 1).abs().max()
        # Adam moves an entry by at most about lr in a step, from the stored mask
        assert moved > 0.005 * server_round * client.config.local_epochs


def test_labels_of_other_nodes_change_no_upload() -> None:
    y = torch.randint(0, C, (N,), generator=torch.Generator().manual_seed(3))
    other = y.clone()
    other[1::2] = (y[1::2] + 1) % C  # even nodes train
    found = [
        trained(make_client("fedaux", y=labels))[1].tensors for labels in (y, other)
    ]
    assert all(torch.equal(t, found[1][name]) for name, t in found[0].items())


def test_the_server_mixes_by_the_cosines_of_the_directions() -> None:
    # cosines .6, 0 and .8, weights 1, 2 and 4
    directions = torch.tensor([[2.0, 0.0], [0.6, 0.8], [0.0, 5.0]])
    expected = {1.0: [1.8704, 2.3886, 2.7464], 10.0: [1.0181, 2.2187, 3.7615]}
    for alpha, values in expected.items():
        server = FedAux(parse_config({"method": "fedaux", "fedaux.alpha": alpha}))
        server.shapes = {DIRECTION: (2,), "w": (1,)}
        server.weights, server.personal = Weights({}), {}
        server.aggregate(
            1,
            {
                pid: Upload(Weights({DIRECTION: a, "w": torch.tensor([2.0**pid])}), 1)
                for pid, a in enumerate(directions)
            },
        )
        for pid, value in enumerate(values):
            mixed = server.download(2, pid).tensors["w"].item()
            assert mixed == pytest.approx(value, abs=1e-4)
        norm = server.loop.log.numbers["direction_norm"]
        assert norm == pytest.approx((2 + 1 + 5) / 3)
