"""TopFGL's encoding, learner, similarity and added edges."""

from __future__ import annotations

import torch

from flower_fgl.algorithms.personal_mix import linear_weights
from flower_fgl.algorithms.topfgl import (
    AugmentedNet,
    TopologyLearner,
    drop_distant,
    edge_statistics,
    likely_edges,
    linear_cka,
    nearest_pairs,
    probe_graph,
    structural_encoding,
)
from flower_fgl.nn import GraphInput, build_model

# a triangle 0-1-2, and 2-3
PAIRS = torch.tensor([[0, 0, 1, 2], [1, 2, 2, 3]])
EDGES = torch.cat([PAIRS, PAIRS.flip(0)], dim=1)


def test_the_degree_and_the_jaccard_part() -> None:
    expected = torch.tensor(
        [[0.625, 0.875], [0.625, 0.875], [0.1667, 0.5], [0.0, 0.0], [0.0, 0.0]]
    )
    found = edge_statistics(EDGES, 5)  # node 4 is isolated
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    # one value on all edges, and no edges
    assert not edge_statistics(EDGES[:, [0, 4]], 5).any()
    assert edge_statistics(EDGES[:, :0], 5).shape == (5, 2)
    assert structural_encoding(GraphInput(torch.zeros(5, 1), EDGES)).shape == (5, 10)


def test_the_number_of_parameters() -> None:
    for classes, expected in ((7, 160), (40, 1875), (70, 5453)):
        learner = TopologyLearner(classes, 128, 0.5)
        assert sum(p.numel() for p in learner.parameters()) == expected


def test_cka_is_invariant_to_scale_and_rotation() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    turned = x @ torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    other = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    found = linear_cka(torch.stack([x, 2 * x, turned, other, torch.ones(3, 2)]))
    first = torch.tensor([1, 1, 1, 0.3162, 0], dtype=torch.float64)
    torch.testing.assert_close(found[0], first, atol=1e-4, rtol=0)
    assert torch.equal(found.diagonal(), torch.ones(5, dtype=torch.float64))
    broken = linear_cka(torch.stack([x, x * torch.inf, turned])).isfinite()
    assert broken.tolist() == [[True, False, True], [False] * 3, [True, False, True]]
    rows = linear_weights(
        linear_cka(torch.stack([x, 2 * x, other])), torch.ones(3).double()
    )
    expected = torch.tensor([[0.4317, 0.4317, 0.1365]] * 2 + [[0.1937, 0.1937, 0.6126]])
    torch.testing.assert_close(rows.float(), expected, atol=1e-4, rtol=0)


def test_the_learners_loss_reaches_the_learner_only() -> None:
    torch.manual_seed(0)
    graph = GraphInput(torch.randn(5, 3), EDGES)
    logits = torch.randn(5, 2, requires_grad=True)
    learner = TopologyLearner(2, 4, 0.0)  # q = 5, so that some channels pass the ReLU
    out = learner(graph.with_features(structural_encoding(graph)), logits)
    torch.nn.functional.cross_entropy(out, torch.tensor([0, 1, 0, 1, 1])).backward()
    assert logits.grad is None
    for parameter in learner.parameters():
        assert parameter.grad is not None
        assert parameter.grad.any()


def test_pairs_of_nearest_points() -> None:
    points = torch.tensor([[0.0], [1.0], [3.0], [3.5]])
    assert nearest_pairs(points, 1).T.tolist() == [[0, 1], [2, 3]]
    assert nearest_pairs(points, 9).shape == (2, 6)
    assert nearest_pairs(points[:1], 3).shape == (2, 0)


def test_new_edges_join_unsure_nodes_of_the_largest_component() -> None:
    # two groups on a line: 0 1 2 and 3 4; k = 1 links 0-1, 1-2 and 3-4
    points = torch.tensor([[0.0], [1.0], [2.1], [9.0], [9.5]])
    everyone = torch.ones(5, dtype=torch.bool)
    none = torch.zeros(2, 0, dtype=torch.int64)
    assert likely_edges(points, everyone, none, number=1).T.tolist() == [[0, 1], [1, 2]]
    present = torch.tensor([[0, 1], [1, 0]])
    assert likely_edges(points, everyone, present, number=1).T.tolist() == [[1, 2]]
    # both ends must be unsure
    unsure = torch.tensor([True, True, False, True, True])
    assert likely_edges(points, unsure, none, number=1).T.tolist() == [[0, 1]]


def test_too_many_edges_lose_the_distant_ones() -> None:
    points = torch.arange(11.0)[:, None] ** 3
    pairs = torch.stack([torch.arange(10), torch.arange(1, 11)])
    noise = torch.full((10,), 0.5)
    assert torch.equal(drop_distant(pairs, points, 10, noise), pairs)
    kept = drop_distant(pairs, points, 9, noise)
    assert torch.equal(kept, pairs[:, :7])  # with equal noise the longest three
    same = drop_distant(pairs, torch.zeros(11, 1), 9, noise)
    assert same.shape == (2, 7)


def test_drawn_edges_follow_their_distance() -> None:
    # of two pairs with distances 1 and 3 the first goes in a quarter of the draws
    points = torch.tensor([[0.0], [1.0], [4.0]])
    pairs = torch.tensor([[0, 1], [1, 2]])
    generator = torch.Generator().manual_seed(0)
    four = torch.cat([pairs, pairs], dim=1)  # 30 % of four pairs is one
    short = 0
    for _ in range(2000):
        kept = drop_distant(four, points, 1, torch.rand(4, generator=generator))
        assert kept.shape[1] == 3
        short += int((kept[0] == 0).sum()) == 1
    assert 0.2 < short / 2000 < 0.3


def test_the_network_reads_added_edges_of_its_own_graph_only() -> None:
    torch.manual_seed(0)
    backbone = build_model(
        "gcn",
        in_channels=3,
        hidden_channels=4,
        num_outputs=2,
        num_layers=2,
        dropout=0.0,
    )
    graph, other = (GraphInput(torch.randn(5, 3), EDGES) for _ in range(2))
    added = torch.tensor([[3], [4]])
    model = AugmentedNet(backbone, graph, added).eval()
    edges = torch.cat([EDGES, added, added.flip(0)], dim=1)
    assert torch.equal(model(graph), backbone(GraphInput(graph.x, edges)))
    assert torch.equal(model(other), backbone(other))
    assert model.fixed() is backbone


def test_the_probe_is_undirected_and_sparse() -> None:
    probe = probe_graph(6, torch.Generator().manual_seed(0))
    assert probe.x.shape == (100, 6)
    one, other = probe.edge_index
    codes = set(zip(one.tolist(), other.tolist(), strict=True))
    assert {(b, a) for a, b in codes} == codes
    assert 0.04 < len(codes) / 9900 < 0.08
