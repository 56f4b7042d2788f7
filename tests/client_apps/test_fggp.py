from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)

from flower_fgl.algorithms.prototypes.graph_views import (
    edge_loss,
    nearest_neighbours,
    union_pairs,
)
from flower_fgl.client_apps.fedavg import FedAvgClientApp
from flower_fgl.client_apps.fggp import FGGPClientApp, TwoViews
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.training import state_of
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.methods import parse_config
from flower_fgl.protocols.base import Empty
from flower_fgl.protocols.fedavg import Weights
from flower_fgl.protocols.weights import ModelAndPrototypes
from tests.client_apps.test_fedpg import WIDTH, C, N, make_client

EDGELESS = torch.empty(2, 0, dtype=torch.int64)


def initial(client: Client) -> Weights:
    return Weights(state_of(client.build_model(initialise=True)))


def views_of(client: Client) -> tuple[TwoViews, Any]:
    """Return a model that has embedded the first view, and the terms of the second."""
    model = TwoViews(client.build_model(initialise=True))
    terms = FGGPClientApp().second_view(Group(client, 1), model)
    model.eval()
    model(client.data.training.inputs)
    return model, terms


def test_the_terms_are_weighted() -> None:
    weights = ("view_weight", "edge_weight", "contrast_weight")
    parts = []
    for name in weights:
        settings = {**dict.fromkeys(weights, 0.0), name: 1.0}
        _, terms = views_of(make_client("fggp", **settings))
        parts.append(float(terms().detach()))
    assert min(parts) > 0
    factors = {"view_weight": 0.5, "edge_weight": 2.0, "contrast_weight": 3.0}
    _, terms = views_of(make_client("fggp", **factors))
    expected = 0.5 * parts[0] + 2 * parts[1] + 3 * parts[2]
    assert float(terms().detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["view_weight", "edge_weight", "contrast_weight"])
def test_every_term_trains_the_encoder(name: str) -> None:
    settings = {
        "view_weight": 0.0,
        "edge_weight": 0.0,
        "contrast_weight": 0.0,
        name: 1.0,
    }
    model, terms = views_of(make_client("fggp", **settings))
    terms().backward()
    grads = [p.grad for p in model.backbone.encoder.parameters() if p.grad is not None]
    assert sum(float(g.abs().sum()) for g in grads) > 0


def test_the_edge_term_uses_the_union_graph() -> None:
    client = make_client("fggp", view_weight=0.0, contrast_weight=0.0)
    model, terms = views_of(client)
    inputs, h = client.data.training.inputs, model.embedding.detach()
    pairs = union_pairs(N, inputs.edge_index, nearest_neighbours(h, 3))
    assert pairs.shape[1] > inputs.edge_index.shape[1] / 2
    real, client_of = torch.ones(1, N).bool(), torch.zeros_like(pairs[0])
    expected = edge_loss(h[None], pairs, client_of, real)
    assert float(terms().detach()) == pytest.approx(float(expected))


def test_the_second_view_equals_the_first_if_all_edges_have_weight_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "flower_fgl.algorithms.prototypes.graph_views.nearest_neighbours",
        lambda *_: EDGELESS,
    )
    monkeypatch.setattr(
        "flower_fgl.algorithms.prototypes.graph_views.resample_edges",
        lambda scores, noise, tau: scores * 0 + 1,
    )
    client = make_client("fggp", edge_weight=0.0, contrast_weight=0.0)
    model, terms = views_of(client)
    data = client.data.training
    expected = F.cross_entropy(model.logits[data.index], data.labels)
    torch.testing.assert_close(terms().sum(), expected, rtol=1e-4, atol=1e-5)


def test_edges_are_redrawn_in_each_step_and_reproducible() -> None:
    client = make_client("fggp", edge_weight=0.0, contrast_weight=0.0)
    _, terms = views_of(client)
    _, again = views_of(client)
    first = [float(terms().detach()) for _ in range(3)]
    assert len(set(first)) == 3
    assert [float(again().detach()) for _ in range(3)] == first


def test_prototypes_average_all_nodes_by_predicted_class() -> None:
    client = make_client("fggp")
    fit = FGGPClientApp().fit(client, 1, initial(client))
    sent = fit.upload
    assert isinstance(sent, ModelAndPrototypes)
    model = client.build_model().eval()
    model.load_state_dict(dict(sent.tensors))
    data = client.data.training
    with torch.no_grad():
        h, share = model.embed(data.inputs), model(data.inputs).softmax(dim=1)
    known = dict(zip(data.index.tolist(), data.labels.tolist(), strict=True))
    for c in range(C):
        total, weights = torch.zeros(WIDTH), 0.0
        for node in range(N):
            if known.get(node, int(share[node].argmax())) == c:
                weight = 1.0 if node in known else float(share[node].max())
                total, weights = total + weight * h[node], weights + weight
        assert bool(sent.prototypes.present[c, 0]) == (weights > 0)
        if weights:
            torch.testing.assert_close(sent.prototypes.values[c, 0], total / weights)
    assert sent.num_bytes == 4 * (
        sum(t.numel() for t in sent.tensors.values())
        + int(sent.prototypes.present.sum()) * WIDTH
    )


def test_no_upload_depends_on_validation_and_test_labels() -> None:
    graph = make_client("fggp").data.graph.graph
    flipped = torch.where(graph.masks["train"], graph.y, (graph.y + 1) % C)
    sent = []
    for y in (graph.y, flipped):
        client = make_client("fggp", y=y)
        sent.append(FGGPClientApp().fit(client, 1, initial(client)).upload.to_record())
    for name in ("weights", "prototypes"):
        assert sent[0][name] == sent[1][name]


@pytest.mark.parametrize("model", ["gat", "gcnii", "gin", "graphsage", "mlp", "sign"])
def test_backbones_take_the_second_view(model: str) -> None:
    client = make_client("fggp")
    values = {"method": "fggp", "hidden-channels": WIDTH, "model": model}
    client.config = parse_config(values)  # type: ignore[arg-type]
    fit = FGGPClientApp().fit(client, 1, initial(client))
    assert math.isfinite(fit.loss)


@pytest.mark.parametrize("neighbors", [1, 99])
def test_a_client_with_one_class_and_isolated_nodes_trains(neighbors: int) -> None:
    y = torch.full((N,), 1)
    client = make_client("fggp", y=y, edge_index=EDGELESS, neighbors=neighbors)
    fit = FGGPClientApp().fit(client, 1, initial(client))
    assert math.isfinite(fit.loss)


def test_zero_embeddings_without_any_edge_train() -> None:
    client = make_client("fggp", edge_index=EDGELESS)
    dead = {name: torch.zeros_like(t) for name, t in initial(client).tensors.items()}
    fit = FGGPClientApp().fit(client, 1, Weights(dead))
    assert math.isfinite(fit.loss)


def test_fine_tuning_equals_fedavg() -> None:
    client, other = (make_client(m, finetune_epochs=2) for m in ("fggp", "fedavg"))
    ours = FGGPClientApp().finetune(client, 9, initial(client))
    theirs = FedAvgClientApp().finetune(other, 9, initial(other))
    assert isinstance(ours.upload, Empty)
    assert ours.model is not None
    assert theirs.model is not None
    for name, tensor in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], tensor)
