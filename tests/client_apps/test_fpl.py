from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.algorithms.prototypes.hop_prototypes import class_means
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.fpl import (
    FPLClientApp,
    cluster_contrast,
    consistency,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import load_state, state_of
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.prototypes import Prototypes, no_prototypes
from flower_fgl.protocols.weights import ModelAndPrototypes
from tests.client_apps.test_fedpg import make_client

CLUSTERS = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
CLASSES = torch.tensor([0, 0, 1])


def test_positives_are_summed_inside_the_logarithm() -> None:
    # cosines of (1, 0): 1, 0 and -1; the own class has two clusters
    z = torch.tensor([[1.0, 0.0]])
    found = cluster_contrast(z, torch.tensor([0]), CLUSTERS, CLASSES, tau=1.0)
    assert found.item() == pytest.approx(0.0943, abs=1e-4)
    other = cluster_contrast(z, torch.tensor([1]), CLUSTERS, CLASSES, tau=1.0)
    assert other.item() == pytest.approx(2.4076, abs=1e-4)


def test_the_mean_over_nodes_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(6, 4, generator=generator)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    clusters = torch.randn(5, 4, generator=generator)
    classes = torch.tensor([0, 0, 1, 2, 2])
    losses = []
    for node, label in zip(z, labels, strict=True):
        e = [
            math.exp(float(torch.cosine_similarity(node, row, dim=0)) / 0.5)
            for row in clusters
        ]
        own = sum(v for v, c in zip(e, classes, strict=True) if c == label)
        losses.append(-math.log(own / sum(e)))
    found = cluster_contrast(z, labels, clusters, classes, tau=0.5)
    assert found.item() == pytest.approx(sum(losses) / 6, rel=1e-5)


def test_one_class_alone_has_no_contrast() -> None:
    z = torch.tensor([[1.0, 0.5]], requires_grad=True)
    found = cluster_contrast(z, torch.tensor([0]), CLUSTERS[:2], CLASSES[:2], tau=0.02)
    found.backward()
    assert found.item() == 0
    assert z.grad is not None
    assert not z.grad.any()


def test_the_unbiased_prototype_is_the_mean_of_the_clusters() -> None:
    mean = class_means(CLUSTERS, CLASSES, 3)
    assert mean.tolist() == [[1, 1.5], [-1, 0], [0, 0]]
    z = torch.tensor([[1.0, 0.5], [0.0, 0.0]], requires_grad=True)
    found = consistency(z, torch.tensor([0, 1]), mean)
    assert found.item() == pytest.approx((0 + 1 + 1 + 0) / 4)
    found.backward()
    assert z.grad is not None
    assert z.grad.any()


def first_download(client: Client) -> ModelAndPrototypes:
    """Return the initial model without prototypes."""
    state = state_of(client.build_model(initialise=True))
    _, table = FPLClientApp().download_spec(client)
    return ModelAndPrototypes(state, no_prototypes(table))


def test_the_loss_of_round_1_is_the_cross_entropy() -> None:
    client = make_client("fpl")
    client.config = replace(client.config, local_epochs=1, dropout=0.0)
    download = first_download(client)
    fit = FPLClientApp().fit(client, 1, download)
    model = client.build_model()
    load_state(model, download.tensors)
    data = client.data.training
    with torch.no_grad():
        logits = model.eval()(data.inputs)[data.index]
    assert fit.loss == pytest.approx(float(F.cross_entropy(logits, data.labels)))


def test_only_received_prototypes_change_the_training_of_fedavg() -> None:
    client, other = make_client("fpl"), make_client("fedavg")
    download = first_download(client)
    first = FPLClientApp().fit(client, 1, download)
    plain = FedAvgClientApp().fit(other, 1, Weights(download.tensors))
    assert first.loss == plain.loss
    upload = first.upload
    assert isinstance(upload, ModelAndPrototypes)
    assert isinstance(plain.upload, Weights)
    for name, tensor in plain.upload.tensors.items():
        assert torch.equal(upload.tensors[name], tensor)
    sent = upload.prototypes
    clusters = Prototypes(sent.values.flip(-1), sent.present)
    received = ModelAndPrototypes(download.tensors, clusters)
    later = FPLClientApp().fit(client, 1, received)  # the same draws
    assert later.loss > plain.loss
