from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.prototypes.attention import NeighbourScorer
from flower_fgl.client_apps.fedpg import FedPGClientApp, open_scorer
from flower_fgl.client_apps.fedproto import FedProtoClientApp, class_distance
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.stacked.group import Group, Rows
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.datasets.transforms.canonical import undirected_simple
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.prototypes import (
    LocalPrototypes,
    Prototypes,
    no_prototypes,
)

N, C, WIDTH = 30, 3, 8


def make_client(
    method: str = "fedpg",
    *,
    y: Tensor | None = None,
    edge_index: Tensor | None = None,
    train: list[int] | None = None,
    **settings: Any,
) -> Client:
    """Make a client with a random graph, half of whose nodes are training nodes."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(N, 6, generator=draw)
    upper = torch.rand(N, N, generator=draw).triu(1) > 0.8
    if edge_index is None:
        edge_index = (upper | upper.T).nonzero().T.contiguous()
    labels = torch.randint(0, C, (N,), generator=draw) if y is None else y
    masks = {
        name: torch.zeros(N, dtype=torch.bool) for name in ("train", "val", "test")
    }
    masks["train"][list(range(0, N, 2)) if train is None else train] = True
    masks["val"][1::4] = True
    masks["test"][3::4] = True
    graph = ClientGraph(
        0, Graph(x, edge_index, labels, masks), Target.classes("abc"), torch.arange(N)
    )
    config = parse_config(
        {
            "method": method,
            "hidden-channels": WIDTH,
            "model": "gcn",
            **{f"{method}.{key.replace('_', '-')}": v for key, v in settings.items()},
        }
    )
    device = torch.device("cpu")
    data = ClientData.build(graph, device)
    return Client(config, 0, 1, data, ClientState(), device)


def answer(upload: LocalPrototypes) -> Prototypes:
    """Return a download that differs from the upload."""
    return Prototypes(upload.values.flip(-1), upload.counts > 0)


def two_rounds(client: Client, app: Any) -> list[LocalPrototypes]:
    """Train for two rounds as the message handler does, and return the uploads."""
    spec = app.download_spec(client)
    download, uploads = no_prototypes(spec), []
    for server_round in (1, 2):
        fit = app.fit(client, server_round, download)
        client.state.set_group("model", dict(fit.model.state_dict()))
        uploads.append(fit.upload)
        download = answer(fit.upload)
    return uploads


@pytest.mark.parametrize("method", ["fedpg", "fedproto"])
def test_no_upload_depends_on_validation_and_test_labels(method: str) -> None:
    app = METHODS[method].load_client_app()()
    client = make_client(method)
    graph = client.data.graph.graph
    flipped = torch.where(graph.masks["train"], graph.y, (graph.y + 1) % C)
    assert not torch.equal(flipped, graph.y)
    first = two_rounds(client, app)
    second = two_rounds(make_client(method, y=flipped), app)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.counts, b.counts)


def test_an_upload_has_a_prototype_for_each_class_and_hop() -> None:
    upload = two_rounds(make_client(), FedPGClientApp())[0]
    assert upload.values.shape == (C, 3, WIDTH)
    assert upload.counts.shape == (C, 3)
    # every node has a class, so hop 0 counts all of them
    assert int(upload.counts[:, 0].sum()) == N
    norms = upload.values[upload.counts > 0].norm(dim=-1)
    assert bool((norms <= 1 + 1e-6).all())  # means of unit vectors


def test_without_pseudo_labels_only_training_nodes_are_counted() -> None:
    client = make_client(annotation="train")
    upload = two_rounds(client, FedPGClientApp())[1]
    assert torch.equal(upload.counts[:, 0], client.data.graph.class_counts())


def penalty_of(**settings: Any) -> tuple[RecordingBackbone, Any, Client]:
    app, client = FedPGClientApp(), make_client(**settings)
    download = answer(two_rounds(client, app)[1])
    scorer = (
        open_scorer(Group(client)) if client.config.method_config.attention else None
    )
    model = RecordingBackbone(app.personal_model(client, download), scorer)
    return model, app.penalty(Group(client, 3), model, scorer, [download]), client


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"proto_loss": "node-mse"},
        {"neighbor_filter": "any", "hop_mode": "within"},
        {"proto_reduction": "mean", "attention": False},
    ],
)
def test_the_prototype_term_has_a_gradient(settings: dict[str, Any]) -> None:
    model, penalty, client = penalty_of(**settings)
    model.eval()
    model.embed(client.data.inputs[0])
    loss = penalty()
    loss.backward()
    assert float(loss.detach()) > 0
    grads = [p.grad for p in model.backbone.encoder.parameters() if p.grad is not None]
    assert sum(float(g.abs().sum()) for g in grads) > 0
    assert all(p.grad is None for p in model.backbone.classifier.parameters())
    if not settings:
        assert model.extra.weight.grad.abs().sum() > 0


def test_the_prototype_term_is_proportional_to_its_weight() -> None:
    values = []
    for mu in (0.5, 1.0):
        model, _, client = penalty_of(mu=0.25)
        other = make_client(mu=mu)
        app = FedPGClientApp()
        other.state = client.state
        download = answer(LocalPrototypes(torch.ones(C, 3, WIDTH), torch.ones(C, 3)))
        model.eval()
        model.embed(client.data.inputs[0])
        term = app.penalty(Group(other, 3), model, model.extra, [download])
        values.append(float(term().detach()))
    assert values[1] == pytest.approx(2 * values[0])


def test_mu_grows_during_its_warm_up() -> None:
    app, client = FedPGClientApp(), make_client(mu_warmup=10)
    download = answer(two_rounds(client, app)[1])
    model = RecordingBackbone(app.personal_model(client, download))
    model.eval()
    model.embed(client.data.inputs[0])
    values = [
        float(app.penalty(Group(client, number), model, None, [download])().detach())
        for number in (5, 10, 20)
    ]
    assert values[0] == pytest.approx(values[1] / 2)
    assert values[1] == pytest.approx(values[2])


def test_attention_is_trained_and_kept() -> None:
    client = make_client()
    fresh = open_scorer(Group(client)).state_dict()
    two_rounds(client, FedPGClientApp())
    kept = client.state.group("scorer")
    assert set(kept) == set(fresh)
    assert kept["weight"].abs().sum() > 0  # it starts at zero
    assert torch.equal(
        open_scorer(Group(client)).state_dict()["weight"], kept["weight"]
    )


@pytest.mark.parametrize("scorer", ["additive", "mlp"])
def test_weight_decay_does_not_switch_the_attention_off(scorer: str) -> None:
    client, app = make_client(scorer=scorer), FedPGClientApp()
    # strong enough to show within 30 rounds; with decay the deviation is below 0.002
    client.config = replace(client.config, weight_decay=0.05)
    download = no_prototypes(app.download_spec(client))
    deviations = []
    for server_round in range(1, 31):
        fit = app.fit(client, server_round, download)
        client.state.set_group("model", dict(fit.model.state_dict()))
        client.state.values["round"] = server_round
        deviations.append(fit.terms["attention-deviation"])
        download = answer(fit.upload)
    assert deviations[0] == 0  # round 1 has no prototype term
    assert deviations[-1] > 0.02
    assert make_client(attention=False).config.method_config.attention is False


def test_without_attention_no_deviation_is_logged() -> None:
    client, app = make_client(attention=False), FedPGClientApp()
    fit = app.fit(client, 1, no_prototypes(app.download_spec(client)))
    assert fit.terms == {}


def test_a_client_with_the_attention_of_an_earlier_version_keeps_it() -> None:
    client = make_client(scorer="mlp")
    two_rounds(client, FedPGClientApp())
    other = make_client()
    other.state = client.state
    scorer = open_scorer(Group(other))
    assert isinstance(scorer, NeighbourScorer)
    kept = client.state.group("scorer")
    assert torch.equal(scorer.out.weight, kept["out.weight"])
    two_rounds(other, FedPGClientApp())


@pytest.mark.parametrize("init", ["shared", "own"])
def test_clients_start_from_shared_or_own_weights(init: str) -> None:
    app, models = FedPGClientApp(), []
    for partition_id in (0, 1):
        alone = make_client(init=init)
        client = replace(alone, partition_id=partition_id, num_partitions=2)
        model = app.personal_model(client, no_prototypes(app.download_spec(client)))
        again = app.personal_model(client, no_prototypes(app.download_spec(client)))
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q)
        models.append(model)
    weights = [model.encoder.state_dict() for model in models]
    is_same = all(
        torch.equal(weights[0][name], weights[1][name]) for name in weights[0]
    )
    assert is_same == (init == "shared")


def test_scores_from_the_logits_of_the_training_equal_those_of_another_pass() -> None:
    client, app = make_client(), FedPGClientApp()
    fit = app.fit(client, 1, no_prototypes(app.download_spec(client)))
    assert fit.logits is not None
    known, passed = client.evaluate(fit.model, fit.logits), client.evaluate(fit.model)
    assert known == passed
    assert known["val"].num_nodes > 0
    # the given logits are used, not computed again
    wrong = client.evaluate(fit.model, -fit.logits)
    assert wrong["val"] != passed["val"]


def test_rings_are_computed_once() -> None:
    client = make_client()
    two_rounds(client, FedPGClientApp())
    (key,) = (key for key in client.data.memo if key[0] == "rings")
    before = client.data.memo[key]
    FedPGClientApp().fit(client, 3, no_prototypes((C, 3, WIDTH)))
    assert client.data.memo[key] is before


def test_a_class_with_one_node_and_an_empty_class_give_finite_prototypes() -> None:
    y = torch.zeros(N, dtype=torch.int64)
    y[0] = 1
    client = make_client(y=y, annotation="train")
    for upload in two_rounds(client, FedPGClientApp()):
        assert upload.counts[1].tolist() == [1, 0, 0]
        assert upload.counts[2].tolist() == [0, 0, 0]
        assert bool(upload.values.isfinite().all())


def test_a_client_without_edges_sends_hop_zero_only() -> None:
    client = make_client(edge_index=torch.empty(2, 0, dtype=torch.int64))
    for upload in two_rounds(client, FedPGClientApp()):
        assert not upload.counts[:, 1:].any()
        assert int(upload.counts[:, 0].sum()) == N


def test_hops_without_any_neighbour_are_left_out() -> None:
    line = torch.tensor([[0, 1], [1, 0]])
    client = make_client(edge_index=line, hops=6)
    for upload in two_rounds(client, FedPGClientApp()):
        assert upload.counts.shape == (C, 7)
        assert not upload.counts[:, 2:].any()


def test_noise_changes_the_upload_and_not_the_training() -> None:
    clean, noisy = make_client(), make_client(noise_dims=0.25)
    a = FedPGClientApp().fit(clean, 1, no_prototypes((C, 3, WIDTH)))
    b = FedPGClientApp().fit(noisy, 1, no_prototypes((C, 3, WIDTH)))
    changed = (a.upload.values != b.upload.values).sum(-1)[a.upload.counts > 0]
    assert bool((changed == 2).all())  # a quarter of 8 dimensions
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.equal(p, q)
    # the server knows the seed: noise drawn from it would hide nothing
    again = FedPGClientApp().fit(
        make_client(noise_dims=0.25), 1, no_prototypes((C, 3, WIDTH))
    )
    assert not torch.equal(again.upload.values, b.upload.values)


@pytest.mark.parametrize("least", [1, 2])
def test_attention_of_few_nodes_is_not_reported(least: int) -> None:
    client = make_client(attention=True)
    client.config = replace(client.config, min_class_count=least)
    fit = FedPGClientApp().fit(client, 1, no_prototypes((C, 3, WIDTH)))
    assert ("attention-deviation" in fit.terms) == (least == 1)


@pytest.mark.parametrize("method", ["fedpg", "fedproto"])
def test_with_prototype_weight_0_training_equals_local_training(
    method: str, small: dict[str, Any]
) -> None:
    key = {"fedpg": "mu", "fedproto": "proto_weight"}[method]
    run = simulate(method, **small, **{method: {key: 0}}, model="gcn")
    alone = simulate("local", **small, model="gcn")
    assert [row["metrics"] for row in run.rounds] == [
        row["metrics"] for row in alone.rounds
    ]


def test_class_distance_sums_the_means_of_the_classes() -> None:
    f = torch.tensor([[1.0, 1.0], [3.0, 3.0], [2.0, 0.0]], requires_grad=True)
    labels = torch.tensor([0, 0, 1])
    rows = Rows.of_one(torch.arange(3), labels)
    target = torch.zeros(1, 2, 2)
    both = torch.tensor([[True, True]])
    # class 0: (1 + 9) / 2 = 5; class 1: (4 + 0) / 2 = 2
    assert float(class_distance(f, rows, target, both).detach()) == pytest.approx(7)
    only = torch.tensor([[False, True]])
    assert float(class_distance(f, rows, target, only).detach()) == pytest.approx(2)
    class_distance(f, rows, target, both).backward()
    assert f.grad.abs().sum() > 0


def test_fedproto_uploads_the_means_of_the_training_nodes() -> None:
    client = make_client("fedproto")
    fit = FedProtoClientApp().fit(client, 1, no_prototypes((C, 1, WIDTH)))
    fit.model.eval()
    with torch.no_grad():
        f = fit.model.embed(client.data.inputs[0])
    data = client.data.training
    for c in range(C):
        mine = data.index[data.labels == c]
        assert int(fit.upload.counts[c, 0]) == len(mine)
        torch.testing.assert_close(fit.upload.values[c, 0], f[mine].mean(0))


@pytest.mark.parametrize("attention", [False, True])
def test_no_prototype_is_nearly_one_hub(attention: bool) -> None:
    """Every node of class 0 hangs on node 0; other classes have random neighbours."""
    hub = torch.stack([torch.zeros(9, dtype=torch.int64), torch.arange(1, 10)])
    draw = torch.Generator().manual_seed(1)
    others = torch.randint(10, N, (2, 60), generator=draw)
    edge_index = undirected_simple(torch.cat([hub, others], dim=1), N)
    y = torch.tensor([0] * 10 + [1] * 10 + [2] * 10)
    uploads = {}
    for least in (1, 4):
        client = make_client(
            y=y,
            edge_index=edge_index,
            train=list(range(N)),
            attention=attention,
            annotation="train",
        )
        client.config = replace(client.config, min_class_count=least)
        uploads[least] = two_rounds(client, FedPGClientApp())[0]
    # ten centres, ten distinct neighbours, but one of them has the weight 9/10
    assert uploads[1].counts[0].tolist() == [10, 10, 9]
    assert uploads[4].counts[0, 1] == 0
    assert not uploads[4].values[0, 1].any()
    assert uploads[4].counts[0, 0] == 10  # the class mean
    kept = uploads[4].counts > 0
    assert int(kept.sum()) >= 5
    assert torch.equal(uploads[4].values[kept], uploads[1].values[kept])
