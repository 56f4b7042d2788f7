"""Tests of O-pFGL's client half on two triangles joined by an edge."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.opfgl.labels import (
    adjacency_operator,
)
from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.client_apps.opfgl import (
    GlobalTraining,
    OPFGLClientApp,
    distillation_weights,
    knowledge_of,
    local_statistics,
    variant_of,
)
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import ClientData
from flower_fgl.client_apps.runtime.state import ClientState
from flower_fgl.client_apps.stacked.group import Group
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph, NodeDataset
from flower_fgl.methods import parse_config
from flower_fgl.methods.opfgl import VARIANTS
from flower_fgl.nn import Backbone
from flower_fgl.nn.gcn_gradient import GCNGradient

TRAIN, VAL = [0, 1, 3, 4], [2]


def client_of(
    toy: NodeDataset,
    *,
    y: Tensor | None = None,
    val: list[int] = VAL,
    partition_id: int = 0,
    **method_config: Any,
) -> Client:
    masks = {
        name: torch.zeros(6, dtype=torch.bool) for name in ("train", "val", "test")
    }
    masks["train"][TRAIN] = True
    masks["val"][val] = True
    masks["test"][5] = True
    graph = Graph(toy.x, toy.edge_index, toy.y if y is None else y, masks)
    data = ClientGraph(0, graph, toy.target, torch.arange(6))
    general = {
        k: method_config.pop(k) for k in ("setting", "model") if k in method_config
    }
    settings = {"local-epochs": 40, "check-every": 10, "min-class-count": 1}
    settings |= {"opfgl.lr-global": 0.01}
    settings |= {"opfgl.lr-personal": 0.01, "opfgl.reliable-degree": 0}
    settings |= {
        f"opfgl.{key.replace('_', '-')}": v for key, v in method_config.items()
    }
    config = parse_config({"method": "opfgl", **settings, **general})
    device = torch.device("cpu")
    built = ClientData.build(data, device)
    return Client(config, partition_id, 3, built, ClientState(), device)


@pytest.fixture
def graph() -> PseudoGraph:
    links = torch.tensor([[0.0, 0.3], [0.3, 0.0]])
    features = torch.eye(6)[[1, 4]]
    return PseudoGraph(features, torch.tensor([0, 1]), links)


def test_the_statistics_match_a_loop_over_training_nodes(
    toy: NodeDataset,
) -> None:
    client = client_of(toy, variant="nd-ft-dist")
    stats = local_statistics(client)
    edges = set(map(tuple, toy.edge_index.T.tolist()))
    degree = [1 + sum((u, v) in edges for u in range(6)) for v in range(6)]
    rows: dict[int, list[Tensor]] = {0: [], 1: []}
    for v in TRAIN:
        hop = torch.zeros(6)
        for u in range(6):
            if u == v or (u, v) in edges:
                hop += toy.x[u] / math.sqrt(degree[u] * degree[v])
        rows[int(toy.y[v])].append(torch.cat([toy.x[v], hop]))
    for c, members in rows.items():
        table = torch.stack(members)
        torch.testing.assert_close(stats.mean[c], table.mean(dim=0))
        torch.testing.assert_close(stats.variance[c], table.var(dim=0))
    assert stats.count.tolist() == stats.labelled_count.tolist() == [2, 2]


def test_a_class_whose_neighbours_are_one_hub_is_not_uploaded() -> None:
    """The means of hops 0 and 1 of five leaves give their hub's features."""
    hub, leaves = 0, torch.arange(1, 9)
    pairs = torch.stack([torch.full_like(leaves, hub), leaves])
    x = torch.rand(9, 30, generator=torch.Generator().manual_seed(0)).round()
    y = torch.tensor([1] + [0] * 8)
    masks = {
        name: torch.zeros(9, dtype=torch.bool) for name in ("train", "val", "test")
    }
    masks["train"][1:6] = True
    graph = Graph(x, torch.cat([pairs, pairs.flip(0)], dim=1), y, masks)
    built = ClientData.build(
        ClientGraph(0, graph, Target.classes(("a", "b")), torch.arange(9)),
        torch.device("cpu"),
    )
    found = []
    for least in (1, 5):
        settings = {"method": "opfgl", "min-class-count": least, "opfgl.depth": 1}
        config = parse_config({**settings, "opfgl.variant": "nd-ft-dist"})
        client = Client(config, 0, 3, built, ClientState(), torch.device("cpu"))
        found.append(local_statistics(client))
    mean = found[0].mean[0]
    # a leaf has d̃ = 2, the hub d̃ = 9
    guess = (mean[30:] - mean[:30] / 2) * math.sqrt(2 * 9)
    torch.testing.assert_close(guess, x[hub])
    assert not found[1].count.any()
    assert not found[1].mean.any()


def test_the_depth_determines_the_width_of_the_statistics(toy: NodeDataset) -> None:
    for depth in (0, 1, 3):
        stats = local_statistics(client_of(toy, depth=depth))
        assert stats.mean.shape == (2, 6 * (depth + 1))


def test_reliable_nodes_enter_the_statistics_of_the_full_method_only(
    toy: NodeDataset,
) -> None:
    """One step of propagation: nodes 2 and 5 see only neighbours of one class each."""
    full = client_of(toy, propagation_steps=1, reliable_classes=2)
    # neighbours of node 2 are 0, 1 and 3, of two classes; those of node 5 are 3 and 4
    assert local_statistics(full).count.tolist() == [2, 3]
    assert local_statistics(full).labelled_count.tolist() == [2, 2]
    for variant in ("ft", "ft-imb", "ft-dist", "nd-ft-dist"):
        client = client_of(
            toy, propagation_steps=1, reliable_classes=2, variant=variant
        )
        assert local_statistics(client).count.tolist() == [2, 2]


def test_nothing_is_inferred_in_the_inductive_setting(toy: NodeDataset) -> None:
    client = client_of(
        toy, propagation_steps=1, reliable_classes=2, setting="inductive"
    )
    assert local_statistics(client).count.tolist() == [2, 2]


def test_the_adjacency_is_normalised_without_loops(toy: NodeDataset) -> None:
    matrix = adjacency_operator(toy.edge_index, 6).matrix.to_dense()
    assert not matrix.diagonal().any()
    torch.testing.assert_close(matrix[0, 1], torch.tensor(1 / 2))
    torch.testing.assert_close(matrix[2, 3], torch.tensor(1 / 3))
    torch.testing.assert_close(matrix[0, 2], torch.tensor(1 / math.sqrt(6)))


def test_a_graph_without_edges_has_an_operator_of_zeros() -> None:
    empty = torch.zeros((2, 0), dtype=torch.int64)
    assert not adjacency_operator(empty, 3).matrix.to_dense().any()


def test_the_pseudo_graph_has_its_links_in_both_directions(graph: PseudoGraph) -> None:
    inputs = graph.as_input()
    assert inputs.edge_index.tolist() == [[0, 1], [1, 0]]
    assert inputs.edge_weight is not None
    torch.testing.assert_close(inputs.edge_weight, torch.full((2,), 0.3))


def test_stage_1_is_the_same_on_every_client_without_validation_nodes(
    toy: NodeDataset, graph: PseudoGraph
) -> None:
    app = OPFGLClientApp()
    first, second = (
        app.train_global(Group(client_of(toy, val=[], partition_id=pid), 1), graph)[0]
        for pid in (0, 2)
    )
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    inputs = graph.as_input()
    assert first(inputs).argmax(dim=1).tolist() == [0, 1]


def test_stage_1_is_continued_for_a_client_that_needs_a_later_check(
    toy: NodeDataset, graph: PseudoGraph
) -> None:
    """Dropout draws the same, whatever other clients needed before, or draw meanwhile."""
    client = client_of(toy)
    client = replace(client, config=replace(client.config, dropout=0.5))
    whole, halved = (GlobalTraining(client, graph) for _ in range(2))
    halved.check(0)
    torch.rand(3)
    states = [list(one.check(1)[0].values()) for one in (whole, halved)]
    assert same(*states)
    assert not same(states[0], list(whole.check(0)[0].values()))


def test_stage_1_is_trained_anew_for_another_pseudo_graph(
    toy: NodeDataset, graph: PseudoGraph
) -> None:
    client, app = client_of(toy), OPFGLClientApp()
    other = replace(graph, labels=graph.labels.flip(0))
    first, second, third = (
        [p.detach() for p in app.train_global(Group(client, 1), one)[0].parameters()]
        for one in (graph, other, graph)
    )
    assert same(first, third)
    assert not same(first, second)


def test_the_student_starts_from_the_teacher_and_the_first_distillation_is_zero(
    toy: NodeDataset, graph: PseudoGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss of stage 2 is the cross-entropy alone, however large γ is."""
    client = client_of(toy, beta=1e4, gamma_max=1e6)
    app = OPFGLClientApp()
    teacher, _ = app.train_global(Group(client, 1), graph)
    seen = first_loss(app, client, teacher, monkeypatch)
    data = client.data.training
    logits = teacher(data.inputs)[data.index]
    # targets of 1e4 are added up and cancel
    assert seen == pytest.approx(F.cross_entropy(logits, data.labels).item(), rel=1e-5)


def test_steps_without_autograd_train_the_same_networks(
    toy: NodeDataset, graph: PseudoGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for is_written in (True, False):
        if not is_written:
            monkeypatch.setattr(GCNGradient, "suits", lambda *_: False)
        app, group = OPFGLClientApp(), Group(client_of(toy), 1)
        teacher, first = app.train_global(group, graph)
        model, last = app.train_personal(group, teacher)
        weights = [p.detach() for p in model.parameters()]
        found.append([*weights, torch.tensor([*first, *last])])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def first_loss(
    app: OPFGLClientApp,
    client: Client,
    teacher: Backbone,
    monkeypatch: pytest.MonkeyPatch,
) -> float:
    losses: list[float] = []

    def train(group: Any, model: Any, loss_of: Any, **rest: Any) -> Any:
        losses.extend(loss_of(group)(model).tolist())
        return model, losses

    monkeypatch.setattr(Group, "train_to_best", train)
    app.train_personal(Group(client, 1), teacher)
    return losses[0]


def test_distillation_raises_the_first_loss_of_a_fresh_student(
    toy: NodeDataset, graph: PseudoGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for beta in (0.0, 1.0):
        client = client_of(toy, variant="hre-nd-dist", beta=beta, gamma_max=10.0)
        app = OPFGLClientApp()
        teacher, _ = app.train_global(Group(client, 1), graph)
        losses.append(first_loss(app, client, teacher, monkeypatch))
    assert losses[1] > losses[0]


def test_the_node_weights_are_within_their_bounds(toy: NodeDataset) -> None:
    client = client_of(toy, beta=1.0, gamma_min=0.3, gamma_max=0.5)
    gamma = distillation_weights(client, variant_of(client))
    assert gamma is not None
    knowledge = knowledge_of(client)
    expected = (knowledge.soft @ knowledge.factor).clamp(0.3, 0.5)
    torch.testing.assert_close(gamma, expected)
    assert len(gamma) == 6


def test_variants_differ_in_the_node_weights(toy: NodeDataset) -> None:
    found = {}
    for variant in VARIANTS:
        client = client_of(toy, variant=variant, beta=0.7)
        found[variant] = distillation_weights(client, variant_of(client))
    assert found["ft"] is found["ft-imb"] is found["global"] is None
    fixed = found["ft-dist"]
    assert fixed is not None
    torch.testing.assert_close(fixed, torch.full((6,), 0.7))


def weights_after(client: Client, graph: PseudoGraph) -> list[Tensor]:
    app = OPFGLClientApp()
    from flower_fgl.protocols.opfgl import GraphDownload

    fit = app.fit_group(Group(client, 1), [GraphDownload(graph)])
    return [p.detach() for p in fit.model.parameters()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_variants_give_different_models_and_global_gives_that_of_stage_1(
    toy: NodeDataset, graph: PseudoGraph
) -> None:
    unbalanced = replace(toy, y=torch.tensor([0, 0, 0, 0, 1, 1]))
    names = ("nd-ft-dist", "ft", "ft-imb", "ft-dist", "hre-nd-dist", "global")
    made = [
        weights_after(client_of(unbalanced, val=[], variant=name, beta=2.0), graph)
        for name in names
    ]
    for i, first in enumerate(made):
        for second in made[i + 1 :]:
            assert not same(first, second)
    client = client_of(unbalanced, val=[])
    stage_1 = OPFGLClientApp().train_global(Group(client, 1), graph)[0]
    assert same(made[-1], [p.detach() for p in stage_1.parameters()])


def test_labels_of_test_nodes_do_not_affect_training(
    toy: NodeDataset, graph: PseudoGraph
) -> None:
    other = toy.y.clone()
    other[5] = 0
    settings = {"propagation_steps": 1, "reliable_classes": 2}
    first, second = client_of(toy, **settings), client_of(toy, y=other, **settings)
    assert torch.equal(local_statistics(first).mean, local_statistics(second).mean)
    assert same(weights_after(first, graph), weights_after(second, graph))


def test_labels_of_validation_nodes_do_not_affect_the_statistics(
    toy: NodeDataset, graph: PseudoGraph
) -> None:
    other = toy.y.clone()
    other[2] = 1
    first, second = client_of(toy), client_of(toy, y=other)
    assert torch.equal(local_statistics(first).mean, local_statistics(second).mean)
    knowledge = [knowledge_of(client).soft for client in (first, second)]
    assert torch.equal(*knowledge)


def test_backbones_may_differ_in_kind_and_width(
    toy: NodeDataset, graph: PseudoGraph
) -> None:
    models = "gcn:2x16,sgc:2x8,appnp:2x4:k2"
    for pid, width in enumerate((16, 8, 4)):
        client = client_of(toy, partition_id=pid, model=models)
        model, _ = OPFGLClientApp().train_global(Group(client, 1), graph)
        assert model.hidden_channels == width


def test_a_client_without_download_is_evaluated_with_initial_weights(
    toy: NodeDataset, graph: PseudoGraph
) -> None:
    from flower_fgl.protocols.opfgl import GraphDownload

    client, app = client_of(toy), OPFGLClientApp()
    initial = [p.detach() for p in client.build_model(initialise=True).parameters()]
    bare = app.personal_model(client, None)
    assert same([p.detach() for p in bare.parameters()], initial)
    with torch.inference_mode():
        trained = app.personal_model(client, GraphDownload(graph))
    assert not same([p.detach() for p in trained.parameters()], initial)
