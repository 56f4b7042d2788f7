from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes import graph_views
from flower_fgl.algorithms.prototypes.graph_views import (
    cluster_means,
    confidence_means,
    confident_labels,
    edge_loss,
    edge_scores,
    finch,
    first_neighbour_clusters,
    nearest_neighbours,
    resample_edges,
    union_pairs,
    view_contrast,
)


def dense_loss(embedding: Tensor, pairs: Tensor) -> Tensor:
    """The weighted cross-entropy as it is printed, on the dense matrix."""
    number = len(embedding)
    adjacency = torch.zeros(number, number)
    adjacency[pairs[0], pairs[1]] = 1
    adjacency[pairs[1], pairs[0]] = 1
    pair = ~torch.eye(number, dtype=torch.bool)
    total, edges = int(pair.sum()), float(adjacency.sum())
    return (
        total
        / (2 * (total - edges))
        * F.binary_cross_entropy_with_logits(
            (embedding @ embedding.T)[pair],
            adjacency[pair],
            pos_weight=torch.tensor((total - edges) / edges),
        )
    )


def test_training_nodes_keep_their_class_with_confidence_one() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.8], [0.9, 0.1], [0.6, 0.4]]))
    classes, confidence = confident_labels(logits, torch.tensor([0]), torch.tensor([0]))
    assert classes.tolist() == [0, 0, 0]
    torch.testing.assert_close(confidence, torch.tensor([1.0, 0.9, 0.6]))


def test_prototypes_by_hand() -> None:
    h = torch.tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 5.0]])
    out = confidence_means(
        h, torch.tensor([0, 0, 2]), torch.tensor([1.0, 0.25, 0.3]), 4
    )
    # (1·(1, 0) + 0.25·(3, 4)) / 1.25 = (1.4, 0.8); classes 1 and 3 have no node
    expected = torch.tensor([[1.4, 0.8], [0, 0], [5, 5], [0, 0]])
    torch.testing.assert_close(out, expected)


def test_the_contrast_of_the_views_by_hand() -> None:
    first = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    second = torch.tensor([[3.0, 0.0], [3.0, 4.0]])
    # cosines 1, 0 | 0.6, 0.8: log(1 + e^−2) = 0.126928, log(1 + e^−0.4) = 0.513015
    both = torch.ones(1, 2).bool()
    value = view_contrast(first[None], second[None], both, tau=0.5)
    assert float(value) == pytest.approx((0.126928 + 0.513015) / 2, abs=1e-6)


def test_the_contrast_of_a_single_class_is_zero() -> None:
    first = torch.randn(1, 3, requires_grad=True)
    one, other = first[None], torch.randn(1, 1, 3)
    loss = view_contrast(one, other, torch.ones(1, 1).bool(), tau=0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0


def loss_of_one(h: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Return the edge loss of one client."""
    client, real = torch.zeros_like(pairs[0]), torch.ones(1, len(h)).bool()
    return edge_loss(h[None], pairs, client, real).squeeze(0)


def test_the_edge_loss_by_hand() -> None:
    # scores 0-1: log 3, 0-2: 0, 1-2: 0; edge 0-1: −log(3/4); others: −log(1/2) each
    h = torch.tensor(
        [[math.sqrt(math.log(3)), 0.0], [math.sqrt(math.log(3)), 0.0], [0, 0]]
    )
    expected = 0.5 * (math.log(4 / 3) + math.log(2))
    value = loss_of_one(h, torch.tensor([[0], [1]]))
    assert float(value) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("block", [1, 40, 1 << 22])
def test_the_edge_loss_and_its_gradient_are_those_of_the_dense_matrix(
    block: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setattr(graph_views, "BLOCK", block)
    pairs = union_pairs(11, torch.randint(0, 11, (2, 20), generator=generator))
    ours = torch.randn(11, 3, generator=generator).requires_grad_()
    dense = ours.detach().clone().requires_grad_()
    one, other = loss_of_one(ours, pairs), dense_loss(dense, pairs)
    torch.testing.assert_close(one, other)
    one.backward()  # type: ignore[no-untyped-call]
    other.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.grad, dense.grad)
    assert ours.grad is not None
    assert float(ours.grad.abs().sum()) > 0


@pytest.mark.parametrize(
    ("number", "pairs"), [(1, []), (3, []), (3, [(0, 1), (0, 2), (1, 2)])]
)
def test_the_edge_loss_is_finite_without_edges_or_without_other_pairs(
    number: int, pairs: list[tuple[int, int]]
) -> None:
    h = torch.ones(number, 2, requires_grad=True)
    loss = loss_of_one(h, torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T)
    loss.backward()  # type: ignore[no-untyped-call]
    assert h.grad is not None
    assert bool(h.grad.isfinite().all())
    # softplus(2) = 2.126928, softplus(−2) = 0.126928
    expected = 0 if number == 1 else 0.126928 if pairs else 2.126928
    assert float(loss.detach()) == pytest.approx(expected / 2, abs=1e-5)


@pytest.mark.parametrize("block", [1, 50, 1 << 22])
def test_nearest_neighbours_are_those_of_a_slow_loop(
    block: int, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setattr(graph_views, "BLOCK", block)
    h = torch.randn(15, 4, generator=generator)
    h[3] = 0  # has no neighbour and is no node's neighbour
    found = {tuple(edge) for edge in nearest_neighbours(h, 3).T.tolist()}
    expected = set()
    for u in range(15):
        cosine = {
            v: float(F.cosine_similarity(h[u], h[v], dim=0))
            for v in range(15)
            if v != u
        }
        best = sorted(cosine, key=lambda v, c=cosine: -c[v])[:3]  # type: ignore[misc]
        expected |= {(u, v) for v in best if cosine[v] > 0}
    assert found == expected


@pytest.mark.parametrize("number", [1, 2])
def test_more_neighbours_than_nodes_are_all_others(number: int) -> None:
    edges = nearest_neighbours(torch.ones(number, 2), 3)
    assert edges.shape[1] == number * (number - 1)


def test_a_union_holds_each_pair_once() -> None:
    graph = torch.tensor([[0, 1, 2, 2], [1, 0, 2, 3]])
    more = torch.tensor([[3, 1, 4], [2, 0, 0]])
    assert union_pairs(5, graph, more).T.tolist() == [[0, 1], [0, 4], [2, 3]]
    nothing = torch.empty(2, 0, dtype=torch.int64)
    assert union_pairs(5, nothing, nothing).shape == (2, 0)


def test_edges_are_drawn_with_the_predicted_probability(
    generator: torch.Generator,
) -> None:
    logits = torch.full((20000,), math.log(3.0))
    drawn = resample_edges(logits, torch.rand(20000, generator=generator), tau=0.1)
    # P(weight > 1/2) = σ(log 3) = 3/4, standard deviation 0.003
    assert float((drawn > 0.5).float().mean()) == pytest.approx(0.75, abs=0.02)
    # noise 1/2 has logit 0: σ(log 3 / 0.5) = 9/10
    by_hand = resample_edges(logits[:1], torch.tensor([0.5]), tau=0.5)
    assert by_hand.item() == pytest.approx(0.9, abs=1e-6)
    edge = torch.tensor([0.0, 1.0])
    assert bool(resample_edges(logits[:2], edge, tau=0.5).isfinite().all())


def test_scores_of_edges_are_products(generator: torch.Generator) -> None:
    h = torch.randn(5, 3, generator=generator)
    pairs = torch.tensor([[0, 2], [1, 4]])
    expected = torch.stack([h[0] @ h[1], h[2] @ h[4]])
    torch.testing.assert_close(edge_scores(h, pairs), expected)


def at(*degrees: float) -> Tensor:
    """Points on the unit circle."""
    return torch.tensor(
        [[math.cos(math.radians(d)), math.sin(math.radians(d))] for d in degrees]
    )


def slow_clusters(points: Tensor) -> list[set[int]]:
    """Link pairs by the definition, one after the other."""
    unit = torch.nn.functional.normalize(points, dim=1)
    nearest = []
    for i in range(len(points)):
        others = [j for j in range(len(points)) if j != i]
        nearest.append(max(others, key=lambda j: float(unit[i] @ unit[j])))
    clusters = [{i} for i in range(len(points))]
    for i in range(len(points)):
        for j in range(i):
            if nearest[i] == j or nearest[j] == i or nearest[i] == nearest[j]:
                one = next(c for c in clusters if i in c)
                other = next(c for c in clusters if j in c)
                if one is not other:
                    clusters.remove(other)
                    one |= other
    return clusters


def as_sets(labels: Tensor) -> set[frozenset[int]]:
    return {
        frozenset((labels == c).nonzero().squeeze(1).tolist())
        for c in range(int(labels.max()) + 1)
    }


@pytest.mark.parametrize("seed", range(5))
def test_one_level_follows_the_definition(seed: int) -> None:
    points = torch.randn(23, 4, generator=torch.Generator().manual_seed(seed))
    expected = {frozenset(cluster) for cluster in slow_clusters(points)}
    assert as_sets(first_neighbour_clusters(points)) == expected


def test_levels_by_hand() -> None:
    # nearest: 0-2, 20-22 (18 from 2), 180-183, 200-203: four pairs; their means at 1, 21,
    # 181.5 and 201.5 pair up again; one more level would join all
    points = at(0, 2, 20, 22, 180, 183, 200, 203)
    assert first_neighbour_clusters(points).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert finch(points).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    means = cluster_means(points)
    torch.testing.assert_close(
        means, torch.stack([points[:4].mean(0), points[4:].mean(0)])
    )


@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_points_are_one_cluster(number: int) -> None:
    assert finch(at(*range(0, 10 * number, 10))).tolist() == [0] * number


def test_points_of_zeros_are_clustered_too() -> None:
    assert finch(torch.zeros(4, 3)).tolist() == [0] * 4


def test_each_cluster_has_at_least_two_points() -> None:
    points = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    assert int(torch.bincount(finch(points)).min()) >= 2
