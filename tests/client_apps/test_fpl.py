"""FPL's client half."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.fpl import FPLClientApp
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import load_state, state_of
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.fggp import ModelAndPrototypes
from flower_fgl.protocols.prototypes import Prototypes, no_prototypes
from tests.client_apps.test_fedpg import make_client


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
