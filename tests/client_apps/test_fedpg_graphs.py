"""FedPG's client half for graph classification."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_fgl.client_apps import fedpg
from flower_fgl.client_apps.fedpg import FedPGClientApp, current_rows, open_scorer
from flower_fgl.client_apps.fedproto import labelled_embeddings
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.nn.backbone import RecordingBackbone
from flower_fgl.protocols.prototypes import LocalPrototypes, no_prototypes
from tests.client_apps.test_fedpg import answer, two_rounds

G, TEST, C, WIDTH = 20, 6, 3, 8
CPU = torch.device("cpu")


def union(y: Tensor, seed: int, mask: str) -> Graph:
    """Make random graphs of five nodes; higher classes have more edges."""
    draw = torch.Generator().manual_seed(seed)
    count = len(y)
    share = (0.2 + 0.3 * y.clamp(min=0)).repeat_interleave(5)
    owner = torch.arange(count).repeat_interleave(5)
    upper = torch.rand(5 * count, 5 * count, generator=draw).triu(1)
    linked = (upper > 0) & (upper < share[:, None]) & (owner[:, None] == owner)
    masks = {name: torch.zeros(count, dtype=torch.bool) for name in ("train", "val")}
    masks = masks if mask == "train" else {}
    masks[mask] = torch.ones(count, dtype=torch.bool)
    return Graph(
        torch.rand(5 * count, 4, generator=draw),
        (linked | linked.T).nonzero().T.contiguous(),
        y,
        masks,
        owner,
    )


def make_client(
    method: str = "fedpg",
    *,
    y: Tensor | None = None,
    test_y: Tensor | None = None,
    test_seed: int = 2,
    general: dict[str, Any] | None = None,
    **settings: Any,
) -> Client:
    y = torch.arange(G) % C if y is None else y
    test_y = torch.arange(TEST) % C if test_y is None else test_y
    graph = ClientGraph(
        0,
        union(y, 1, "train"),
        Target.classes("abc"),
        torch.arange(len(y)),
        (union(test_y, test_seed, "test"),),
    )
    config = parse_config(
        {
            "method": method,
            "setting": "graph",
            "partition": "uniform",
            "hidden-channels": WIDTH,
            "model": "gin",
            **(general or {}),
            **{f"{method}.{key.replace('_', '-')}": v for key, v in settings.items()},
        }
    )
    return Client(config, 0, 1, ClientData.build(graph, CPU), ClientState(), CPU)


def same(first: list[LocalPrototypes], second: list[LocalPrototypes]) -> bool:
    return all(
        torch.equal(a.values, b.values) and torch.equal(a.counts, b.counts)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("method", ["fedpg", "fedproto"])
def test_no_upload_depends_on_the_test_graphs_or_their_labels(method: str) -> None:
    app = METHODS[method].load_client_app()()
    first = two_rounds(make_client(method), app)
    flipped = make_client(method, test_y=(torch.arange(TEST) + 1) % C)
    assert same(first, two_rounds(flipped, app))
    assert same(first, two_rounds(make_client(method, test_seed=9), app))
    relabelled = make_client(method, y=(torch.arange(G) + 1) % C)
    assert not same(first, two_rounds(relabelled, app))


def test_an_upload_counts_graphs_by_class_and_hop() -> None:
    for upload in two_rounds(make_client(), FedPGClientApp()):
        assert upload.values.shape == (C, 3, WIDTH)
        assert upload.counts[:, 0].tolist() == [7, 7, 6]
        assert int(upload.counts[:, 1].sum()) > 0
        assert bool((upload.counts[:, 1:] <= upload.counts[:, :1]).all())


def test_graphs_without_label_are_annotated_by_prediction() -> None:
    y = torch.arange(G) % C
    y[:5] = -1
    upload = two_rounds(make_client(y=y), FedPGClientApp())[1]
    assert int(upload.counts[:, 0].sum()) == G
    client = make_client(y=y, annotation="train")
    upload = two_rounds(client, FedPGClientApp())[1]
    assert torch.equal(upload.counts[:, 0], client.data.graph.class_counts())


def test_a_client_with_one_class_uploads_that_class_only() -> None:
    client = make_client(y=torch.full((G,), 1), annotation="train")
    for upload in two_rounds(client, FedPGClientApp()):
        assert upload.counts[1, 0] == G
        assert not upload.counts[[0, 2]].any()
        assert bool(upload.values.isfinite().all())


def test_a_client_with_one_graph_per_class_has_no_neighbours() -> None:
    client = make_client(y=torch.arange(C), annotation="train")
    for upload in two_rounds(client, FedPGClientApp()):
        assert upload.counts.tolist() == [[1, 0, 0]] * C
        assert bool(upload.values.isfinite().all())


def test_hops_without_similar_graphs_are_left_out() -> None:
    # with decay 1 every hop after the first is empty
    client = make_client(hops=6, rho_decay=1.0, graph_similarity="cosine")
    for upload in two_rounds(client, FedPGClientApp()):
        assert upload.counts.shape == (C, 7)
        assert int(upload.counts[:, 1].sum()) > 0
        assert not upload.counts[:, 2:].any()


def test_the_prototype_term_of_graphs_has_a_gradient() -> None:
    app, client = FedPGClientApp(), make_client()
    download = answer(two_rounds(client, app)[1])
    scorer = open_scorer(Group(client))
    model = RecordingBackbone(app.personal_model(client, download), scorer)
    penalty = app.penalty(Group(client, 3), model, scorer, [download])
    assert penalty is not None
    model.train()
    model.embed(client.data.inputs[0])
    loss = penalty()
    loss.backward()
    assert float(loss.detach()) > 0
    assert all(p.grad.abs().sum() > 0 for p in model.backbone.encoder.parameters())
    assert scorer.weight.grad.abs().sum() > 0


def test_a_process_without_cached_neighbours_draws_the_same_ones() -> None:
    app, kept, lost = FedPGClientApp(), make_client(), make_client()
    first = two_rounds(kept, app)
    download = answer(first[0])
    for server_round in (1, 2):
        start = app.download_spec(lost)
        down = download if server_round == 2 else no_prototypes(start)
        fit = app.fit(lost, server_round, down)
        lost.state.set_group("model", dict(fit.model.state_dict()))
        lost.state.values["round"] = server_round
        lost.data.memo.clear()
        assert same([first[server_round - 1]], [fit.upload])


@pytest.mark.parametrize("similarity", [None, "quantile", "cosine"])
def test_similarities_are_ranked_unless_cosines_are_asked_for(
    similarity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = []
    search = fedpg.similar_pairs

    def spy(*arguments: Any, is_ranked: bool, **settings: Any) -> Any:
        ranked.append(is_ranked)
        return search(*arguments, is_ranked=is_ranked, **settings)

    monkeypatch.setattr(fedpg, "similar_pairs", spy)
    settings = {} if similarity is None else {"graph_similarity": similarity}
    two_rounds(make_client(**settings), FedPGClientApp())
    assert ranked
    assert set(ranked) == {similarity != "cosine"}


def test_similar_graphs_are_searched_once_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    original = fedpg.similar_pairs

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(fedpg, "similar_pairs", counting)
    client, app = make_client(), FedPGClientApp()
    download = no_prototypes(app.download_spec(client))
    for server_round in (1, 2, 3):
        fit = app.fit(client, server_round, download)
        client.state.set_group("model", dict(fit.model.state_dict()))
        client.state.values["round"] = server_round
        download = answer(fit.upload)
        assert len(calls) == server_round


def test_a_copy_trained_for_evaluation_does_not_change_the_neighbours() -> None:
    app, uploads = FedPGClientApp(), []
    for is_scored in (False, True):
        client = make_client(rho=0.99, general={"final-local-epochs": 20, "lr": 0.05})
        download = no_prototypes(app.download_spec(client))
        if is_scored:
            copy = replace(client, state=ClientState())
            assert app.refreshed_model(copy, 1, download) is not None
        uploads.append(app.fit(client, 1, download).upload)
    assert (uploads[0].counts[:, 1:] > 0).any()
    assert same(uploads[:1], uploads[1:])


def test_a_batch_replaces_its_graphs_rows_and_carries_the_gradient() -> None:
    client = make_client(general={"batch-size": 4, "dropout": 0.0})
    model = RecordingBackbone(client.build_model(initialise=True))
    whole = model.at_rest(client.data.inputs[0])
    current = current_rows(Group(client), model)
    batch = torch.tensor([5, 2, 11])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    rows = model.embed(client.data.inputs[0].select(batch))
    table = current()
    torch.testing.assert_close(table[batch], rows)
    others = [g for g in range(G) if g not in batch.tolist()]
    torch.testing.assert_close(table[others], whole[others])
    assert not torch.allclose(table[batch], whole[batch])
    (grad,) = torch.autograd.grad(table[others].sum(), rows, retain_graph=True)
    assert not grad.any()
    (grad,) = torch.autograd.grad(table[batch][:, 0].sum(), rows)
    assert grad.any()
    model.embed(client.data.inputs[0].select(torch.tensor([0])))
    torch.testing.assert_close(current()[batch], rows.detach())


def test_embeddings_of_a_batch_of_graphs_match_their_labels() -> None:
    y = torch.arange(G) % C
    y[[0, 3]] = -1
    client = make_client("fedproto", y=y)
    model = RecordingBackbone(client.build_model(initialise=True))
    data = client.data.training
    model.embed(data.inputs)
    embedding, labels = labelled_embeddings(model, data)
    assert embedding.shape == (G - 2, WIDTH)
    assert torch.equal(labels, y[y >= 0])
    model.embed(data.inputs.select(torch.tensor([7, 1, 5])))
    embedding, labels = labelled_embeddings(model, data)
    assert embedding.shape == (3, WIDTH)
    assert torch.equal(labels, y[[7, 1, 5]])
