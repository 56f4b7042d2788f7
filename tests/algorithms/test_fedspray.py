"""FedSpray's proxies, reliable nodes and encoder loss, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from flower_fgl.algorithms.fedspray import (
    NodeProxies,
    SprayEncoder,
    combine_proxies,
    encoder_loss,
    node_proxies,
    reliable_nodes,
)
from flower_fgl.client_apps.fedspray import FedSprayClientApp
from flower_fgl.nn import GraphInput
from flower_fgl.protocols.fedavg import Weights
from tests.support.random_clients import random_client

SOFT = torch.tensor([[0.75, 0.25], [0.4, 0.6], [0.5, 0.5]])
TRAIN = torch.tensor([2])


def test_proxies_of_nodes_are_mixtures_or_learned() -> None:
    classes = torch.tensor([[0.0, 4.0], [8.0, 0.0]])
    found = node_proxies(SOFT, classes, TRAIN, torch.tensor([[5.0, 6.0]]))
    expected = torch.tensor([[2.0, 3.0], [4.8, 1.6], [5.0, 6.0]])
    torch.testing.assert_close(found, expected)


def test_reliable_nodes_are_confident_or_labelled() -> None:
    assert reliable_nodes(SOFT, TRAIN, confidence=0.7).tolist() == [0, 2]
    assert reliable_nodes(SOFT, TRAIN, confidence=1.0).tolist() == [2]


def test_class_proxies_are_weighted_by_shares() -> None:
    # class 0 has shares 1/2 and 1: (½ (1, 0) + (0, 3)) / 1.5
    values = torch.tensor(
        [[[1.0, 0.0], [2.0, 2.0], [0.0, 0.0]], [[0.0, 3.0], [0.0, 0.0], [0.0, 0.0]]]
    )
    counts = torch.tensor([[1, 1, 0], [3, 0, 0]])
    old = torch.full((3, 2), 9.0)
    found = combine_proxies(old, values, counts, torch.tensor([2, 3]))
    expected = torch.tensor([[0.3333, 2.0], [2.0, 2.0], [9.0, 9.0]])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_encoder_loss_by_hand() -> None:
    # CE = log 2; KL of (e, 1)/(e + 1) to equal shares
    alone, equal = torch.zeros(1, 2), torch.zeros(1, 2)
    share = math.e / (math.e + 1)
    kept = share * math.log(2 * share) + (1 - share) * math.log(2 * (1 - share))
    found = encoder_loss(alone, equal, torch.tensor([0]), torch.tensor([[1.0, 0.0]]))
    assert found.item() == pytest.approx(math.log(2) + kept, rel=1e-5)


def test_the_loss_reaches_encoder_classifiers_and_proxies() -> None:
    torch.manual_seed(0)
    none = torch.zeros(2, 0, dtype=torch.int64)
    graph = GraphInput(torch.randn(4, 5), none)
    encoder, proxies = SprayEncoder(5, 3, 6), NodeProxies(2, 6)
    assert encoder.proxies[2].tolist() == [pytest.approx(0.02)] * 6
    assert sum(p.numel() for p in encoder.parameters()) == 6 * 6 + 2 * 7 * 3
    hidden = encoder.hidden(graph)[:2]
    network = torch.randn(2, 3, requires_grad=True)
    loss = encoder_loss(
        encoder.alone(hidden),
        encoder.with_proxy(hidden + proxies.values),
        torch.tensor([0, 2]),
        network.detach(),
    )
    loss.backward()
    for parameter in (*encoder.parameters(), *proxies.parameters()):
        assert parameter.grad is not None
        assert parameter.grad.any()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_proxies_train_with_adam_and_stay_over_the_rounds(optimizer: str) -> None:
    client = random_client("fedspray", settings={"optimizer": optimizer, "lr": 0.1})
    app = FedSprayClientApp()
    encoder = app.build_encoder(client)
    download = Weights(dict(encoder.state_dict()))
    for server_round in range(1, 4):
        app.fit(client, server_round, download)
        (values,) = client.state.group("proxies").values()
        # about .02 in each of three epochs of a round; SGD would move them by 1e-4
        assert float((values - 0.1).abs().max()) > 0.015 * 3 * server_round
