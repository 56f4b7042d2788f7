from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from flower_fgl.algorithms.prototypes import attention, hop_prototypes
from flower_fgl.algorithms.prototypes.attention import (
    AdditiveScorer,
    NeighbourScorer,
    Scorer,
    UnitRows,
    deviations_from_uniform,
    segment_softmax,
)
from flower_fgl.algorithms.prototypes.hop_neighbors import (
    Pairs,
    ring_pairs,
    select_pairs,
)
from flower_fgl.algorithms.prototypes.hop_prototypes import (
    HopAverage,
    add_noise,
    class_means,
    node_distance,
    prototype_distance,
)

N, C, P, L = 24, 3, 5, 2


@pytest.fixture
def graph(generator: torch.Generator) -> Tensor:
    upper = torch.rand(N, N, generator=generator).triu(1) > 0.7
    return (upper | upper.T).nonzero().T.contiguous()


@pytest.fixture
def annotation(generator: torch.Generator) -> Tensor:
    return torch.randint(-1, C, (N,), generator=generator)


@pytest.fixture
def embedding(generator: torch.Generator) -> Tensor:
    return F.normalize(torch.randn(N, P, generator=generator), dim=-1)


@pytest.fixture(params=[AdditiveScorer, NeighbourScorer])
def scorer(request: pytest.FixtureRequest, generator: torch.Generator) -> Scorer:
    """Attention that is not uniform."""
    made: Scorer = request.param(P)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return made


def chosen(edge_index: Tensor, annotation: Tensor) -> list[Pairs]:
    return select_pairs(
        ring_pairs(edge_index, len(annotation), L),
        annotation,
        same_class=True,
        limit=99,
        generator=torch.Generator().manual_seed(0),
    )


def slow_score(scorer: Scorer, f_u: Tensor, f_v: Tensor, mean: Tensor) -> Tensor:
    """The score of one neighbour u of centre v."""
    if isinstance(scorer, NeighbourScorer):
        hidden = scorer.hidden(torch.cat([f_u, f_v, mean]))
        return scorer.out(F.leaky_relu(hidden, 0.2))[0]
    s = scorer.weight
    return F.leaky_relu(s[0] @ f_u + s[1] @ f_v + s[2] @ mean, 0.2)


def slow_prototypes(
    hops: list[Pairs], annotation: Tensor, x: Tensor, scorer: Scorer | None
) -> tuple[Tensor, Tensor]:
    """Eq. (2★) with loops over classes, hops, centres and neighbours."""
    f = F.normalize(x, dim=-1)
    out, counts = torch.zeros(C, L + 1, P), torch.zeros(C, L + 1, dtype=torch.int64)
    for c in range(C):
        for h, pairs in enumerate(hops):
            for v in (annotation == c).nonzero().squeeze(1).tolist():
                around = pairs.neighbour[pairs.centre == v].tolist()
                if not around:
                    continue
                counts[c, h] += 1
                scores = [torch.zeros(())] * len(around)
                if scorer is not None and h:
                    mean = sum(f[u] for u in around) / len(around)
                    scores = [slow_score(scorer, f[u], f[v], mean) for u in around]
                total = sum(score.exp() for score in scores)
                for u, score in zip(around, scores, strict=True):
                    out[c, h] += score.exp() / total * f[u]
    return out / counts.clamp(min=1)[..., None], counts


@pytest.mark.parametrize("attention", [False, True])
def test_prototypes_are_those_of_a_slow_loop(
    graph: Tensor,
    annotation: Tensor,
    embedding: Tensor,
    scorer: Scorer,
    attention: bool,
) -> None:
    hops = chosen(graph, annotation)
    used = scorer if attention else None
    average = HopAverage(hops, annotation, C)
    want, counts = slow_prototypes(hops, annotation, embedding, used)
    assert torch.equal(average.counts, counts)
    assert int((counts[:, 1:] > 0).sum()) >= 3
    torch.testing.assert_close(average(embedding, used), want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("block", [1, 5, 4096])
def test_attention_has_the_gradient_of_the_slow_loop(
    graph: Tensor,
    annotation: Tensor,
    embedding: Tensor,
    scorer: Scorer,
    monkeypatch: pytest.MonkeyPatch,
    block: int,
) -> None:
    monkeypatch.setattr(attention, "BLOCK", block)
    hops = chosen(graph, annotation)
    average = HopAverage(hops, annotation, C)
    factor = torch.linspace(-1, 1, C * (L + 1) * P).view(C, L + 1, P)
    grads = []
    for is_slow in (False, True):
        f = (3 * embedding).requires_grad_()
        scorer.zero_grad()
        if is_slow:
            made, _ = slow_prototypes(hops, annotation, f, scorer)
        else:
            made = average(f, scorer)
        (made * factor).sum().backward()
        grads.append([f.grad, *(p.grad.clone() for p in scorer.parameters())])
    for fast, slow in zip(*grads, strict=True):
        assert slow.abs().sum() > 0
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-4)


def test_attention_passes_a_numerical_check_of_its_gradient(
    graph: Tensor, annotation: Tensor, embedding: Tensor, scorer: Scorer
) -> None:
    average = HopAverage(chosen(graph, annotation), annotation, C)
    scorer.double()

    def weights(f: Tensor) -> Tensor:
        if isinstance(scorer, NeighbourScorer):
            return scorer.scores(f, torch.cat([f.flip(0), f]), average.around)
        return scorer(UnitRows(f), average.around, L)

    f = (3 * embedding.double()).requires_grad_()
    assert torch.autograd.gradcheck(weights, (f,))


@pytest.mark.parametrize("most", [30.0, 0.0, 1e9])
def test_scores_far_apart_give_the_same_weights(
    graph: Tensor,
    annotation: Tensor,
    embedding: Tensor,
    most: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "MOST_SCORE", most)
    scorer = AdditiveScorer(P)
    size = 20 if most == 1e9 else 500
    scorer.weight.data[0] = size * torch.linspace(-1, 1, P)
    hops = chosen(graph, annotation)
    average = HopAverage(hops, annotation, C)
    made = average(embedding, scorer)
    want, _ = slow_prototypes(hops, annotation, embedding.double(), scorer.double())
    torch.testing.assert_close(made, want.float(), atol=1e-5, rtol=1e-4)


def test_products_of_unit_rows_are_those_of_normalised_rows(
    generator: torch.Generator,
) -> None:
    table = torch.randn(4, N, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, P, generator=generator, dtype=torch.float64)
    rows = torch.randn(N, P, generator=generator, dtype=torch.float64)
    rows[3] = 0
    unit = F.normalize(rows, dim=1)
    torch.testing.assert_close(UnitRows(rows).sum(table), table @ unit)
    torch.testing.assert_close(UnitRows(rows).project(weight), weight @ unit.T)
    leaves = [t.requires_grad_() for t in (rows[4:].clone(), table[:, 4:], weight)]

    def products(x: Tensor, t: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return UnitRows(x).sum(t), UnitRows(x).project(w)

    assert torch.autograd.gradcheck(products, leaves)


def test_the_deviation_from_uniform_is_that_of_the_definition() -> None:
    # node 0 has three neighbours, node 2 one
    pairs = Pairs(torch.tensor([0, 0, 0, 2]), torch.tensor([1, 2, 3, 0]))
    weight = torch.tensor([0.5, 0.3, 0.2, 1.0])
    # |1.5 − 1| + |0.9 − 1| + |0.6 − 1| = 1.0, over three pairs
    one = torch.zeros(4, dtype=torch.int64)
    found = deviations_from_uniform(weight, pairs, one, 1)
    torch.testing.assert_close(found, torch.tensor([1 / 3]))
    # the pairs of node 0 are of client 1, that of node 2 is of client 0
    client = torch.tensor([1, 1, 1, 0])
    found = deviations_from_uniform(weight, pairs, client, 3)
    torch.testing.assert_close(found, torch.tensor([0, 1 / 3, 0]))
    none = torch.empty(0, dtype=torch.int64)
    empty = deviations_from_uniform(torch.empty(0), Pairs(none, none), none, 1)
    assert empty.tolist() == [0]


def test_a_table_with_many_rows_is_sparse_and_equal(
    graph: Tensor,
    annotation: Tensor,
    embedding: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    for most in (64, 0):
        monkeypatch.setattr(hop_prototypes, "MOST_DENSE_ROWS", most)
        average = HopAverage(chosen(graph, annotation), annotation, C)
        f = (3 * embedding).requires_grad_()
        out = average(f)
        (out * torch.linspace(-1, 1, P)).sum().backward()
        made.append((out.detach(), f.grad, average.num_bytes))
    (dense, to_dense, bytes_dense), (sparse, to_sparse, bytes_sparse) = made
    torch.testing.assert_close(dense, sparse)
    torch.testing.assert_close(to_dense, to_sparse)
    assert bytes_dense > bytes_sparse > 0


def test_attention_sums_to_one_over_each_neighbourhood(
    graph: Tensor, annotation: Tensor, embedding: Tensor, scorer: Scorer
) -> None:
    hops = chosen(graph, annotation)
    average = HopAverage(hops, annotation, C)
    weights = average.weights(UnitRows(embedding), scorer)
    parts = weights.split([len(pairs.centre) for pairs in hops[1:]])
    for h, weight in zip((1, 2), parts, strict=True):
        assert weight.shape == hops[h].centre.shape
        total = torch.zeros(N).index_add(0, hops[h].centre, weight.detach())
        own = total[hops[h].centre.unique()]
        torch.testing.assert_close(own, torch.ones_like(own))


def test_initial_attention_is_the_plain_mean(
    graph: Tensor, annotation: Tensor, embedding: Tensor
) -> None:
    average = HopAverage(chosen(graph, annotation), annotation, C)
    torch.testing.assert_close(
        average(embedding, AdditiveScorer(P)), average(embedding)
    )
    scored = average(embedding, NeighbourScorer(P))
    torch.testing.assert_close(scored, average(embedding))


def test_hop_zero_is_the_class_mean(
    graph: Tensor, annotation: Tensor, embedding: Tensor, scorer: Scorer
) -> None:
    made = HopAverage(chosen(graph, annotation), annotation, C)(embedding, scorer)
    has = annotation >= 0
    means = class_means(embedding[has], annotation[has], C)
    torch.testing.assert_close(made[:, 0], means)
    for c in range(C):
        torch.testing.assert_close(means[c], embedding[annotation == c].mean(0))


def test_renumbering_nodes_does_not_change_the_prototypes(
    graph: Tensor,
    annotation: Tensor,
    embedding: Tensor,
    scorer: Scorer,
    generator: torch.Generator,
) -> None:
    new = torch.randperm(N, generator=generator)  # new name of each node
    old = torch.argsort(new)
    first = HopAverage(chosen(graph, annotation), annotation, C)(embedding, scorer)
    renamed = HopAverage(chosen(new[graph], annotation[old]), annotation[old], C)
    torch.testing.assert_close(
        renamed(embedding[old], scorer), first, atol=1e-6, rtol=0
    )


def test_a_class_with_one_node_and_a_class_with_none() -> None:
    annotation = torch.tensor([0, 1, 1, -1])
    edges = torch.tensor([[1, 2], [2, 1]])
    average = HopAverage(chosen(edges, annotation), annotation, C)
    assert average.counts.tolist() == [[1, 0, 0], [2, 2, 0], [0, 0, 0]]
    made = average(torch.eye(4))
    assert torch.equal(made[0, 0], torch.eye(4)[0])
    assert not made[0, 1:].any()
    assert not made[2].any()


def test_empty_rings_give_no_prototype_and_finite_gradients() -> None:
    annotation = torch.zeros(3, dtype=torch.int64)
    average = HopAverage(
        chosen(torch.empty(2, 0, dtype=torch.int64), annotation), annotation, C
    )
    f = torch.randn(3, P, requires_grad=True)
    made = average(f, AdditiveScorer(P))
    target = torch.ones(C, L + 1, P)
    present = average.counts > 0
    assert int(present.sum()) == 1
    prototype_distance(made, target, present, is_mean=False).backward()
    assert bool(f.grad.isfinite().all())


def test_segment_softmax_is_softmax_within_each_group() -> None:
    scores = torch.tensor([1000.0, 0.0, 1001.0, -3.0])
    group = torch.tensor([0, 2, 0, 2])
    out = segment_softmax(scores, group, 3)
    torch.testing.assert_close(out[[0, 2]], scores[[0, 2]].softmax(0))
    torch.testing.assert_close(out[[1, 3]], scores[[1, 3]].softmax(0))


def test_the_prototype_term_is_a_sum_of_norms() -> None:
    local = torch.zeros(2, 2, 2)
    target = torch.tensor([[[3.0, 4.0], [9.0, 9.0]], [[0.0, 2.0], [5.0, 12.0]]])
    present = torch.tensor([[True, False], [True, True]])
    # 5 + 2 + 13 = 20; without the absent (9, 9)
    total = prototype_distance(local, target, present, is_mean=False)
    assert float(total) == pytest.approx(20)
    mean = prototype_distance(local, target, present, is_mean=True)
    assert float(mean) == pytest.approx(20 / 3)
    one = prototype_distance(local[:1], target[:1], present[:1], is_mean=True)
    assert float(one) == pytest.approx(5)
    nothing = prototype_distance(local, target, present & False, is_mean=True)
    assert float(nothing) == 0


@pytest.mark.parametrize("scorer_type", [AdditiveScorer, NeighbourScorer])
def test_the_prototype_term_has_gradients_for_embeddings_and_attention(
    graph: Tensor, annotation: Tensor, embedding: Tensor, scorer_type: type[Scorer]
) -> None:
    scorer = scorer_type(P)
    f = embedding.clone().requires_grad_()
    average = HopAverage(chosen(graph, annotation), annotation, C)
    present = average.counts > 0
    loss = prototype_distance(
        average(f, scorer), torch.randn(C, L + 1, P), present, is_mean=False
    )
    loss.backward()
    assert f.grad.abs().sum() > 0
    grads = [p.grad for p in scorer.parameters() if p.grad is not None]
    assert sum(float(g.abs().sum()) for g in grads) > 0


def test_the_gradient_is_zero_where_prototypes_equal_their_targets() -> None:
    local = torch.ones(1, 1, 4, requires_grad=True)
    present = torch.ones(1, 1, dtype=torch.bool)
    prototype_distance(local, torch.ones(1, 1, 4), present, is_mean=False).backward()
    assert torch.equal(local.grad, torch.zeros(1, 1, 4))


def test_node_distance_is_that_of_a_slow_loop(
    graph: Tensor, annotation: Tensor, embedding: Tensor, generator: torch.Generator
) -> None:
    hops = chosen(graph, annotation)
    target = torch.randn(C, L + 1, P, generator=generator)
    present = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    want = 0.0
    for h, pairs in enumerate(hops):
        terms = [
            float((embedding[u] - target[annotation[v], h]).square().mean())
            for v, u in zip(
                pairs.centre.tolist(), pairs.neighbour.tolist(), strict=True
            )
            if present[annotation[v], h]
        ]
        want += sum(terms) / len(terms) if terms else 0.0
    # the fixture's rows have length 1; other lengths change nothing
    got = node_distance(3 * embedding, target, present, hops, annotation)
    assert float(got) == pytest.approx(want, rel=1e-5)


def test_noise_touches_the_stated_share_of_dimensions(
    generator: torch.Generator,
) -> None:
    clean = torch.randn(4, 3, 50, generator=generator)
    noisy = add_noise(clean, share=0.2, generator=generator)
    assert (noisy != clean).sum(-1).tolist() == [[10] * 3] * 4
    assert add_noise(clean, share=0.0, generator=generator) is clean


def test_noise_has_the_standard_deviation_of_the_prototype(
    generator: torch.Generator,
) -> None:
    clean = 7 * torch.randn(1, 1, 20000, generator=generator)
    change = add_noise(clean, share=1.0, generator=generator) - clean
    assert math.isclose(float(change.std()), 7, rel_tol=0.05)


def test_a_hub_has_five_sixths_of_a_star() -> None:
    """Six nodes of one class: the leaves see only the hub, the hub sees the leaves."""
    leaves = torch.arange(1, 6)
    edges = torch.stack([torch.zeros(5, dtype=torch.int64), leaves])
    star = torch.cat([edges, edges.flip(0)], dim=1)
    annotation = torch.zeros(6, dtype=torch.int64)
    average = HopAverage(chosen(star, annotation), annotation, 1)
    shares = average.largest_shares(average.weights(UnitRows(torch.eye(6)), None))
    # hop 1: five centres give the hub weight 1, the hub gives each leaf 1/5
    assert average.counts.tolist() == [[6, 6, 5]]
    torch.testing.assert_close(shares, torch.tensor([[1 / 6, 5 / 6, 1 / 5]]))
    # the prototype of hop 1 is nearly the hub's embedding
    assert float(average(torch.eye(6))[0, 1, 0]) == pytest.approx(5 / 6)


def test_largest_shares_agree_with_a_loop(
    graph: Tensor, annotation: Tensor, embedding: Tensor, scorer: NeighbourScorer
) -> None:
    average = HopAverage(chosen(graph, annotation), annotation, C)
    for attention_of in (None, scorer):
        found = average.weights(UnitRows(embedding), attention_of)
        shares = average.largest_shares(found)
        own = torch.ones(len(average.hops[0].centre))
        sizes = [len(pairs.centre) for pairs in average.hops[1:]]
        each = [own, *found.detach().split(sizes)]
        for hop, (pairs, weights) in enumerate(zip(average.hops, each, strict=True)):
            for c in range(C):
                total: dict[int, float] = {}
                for v, u, w in zip(
                    pairs.centre.tolist(),
                    pairs.neighbour.tolist(),
                    weights.tolist(),
                    strict=True,
                ):
                    if int(annotation[v]) == c:
                        total[u] = total.get(u, 0.0) + w
                most = max(total.values(), default=0.0)
                expected = most / max(1, int(average.counts[c, hop]))
                assert float(shares[c, hop]) == pytest.approx(expected, abs=1e-6)
