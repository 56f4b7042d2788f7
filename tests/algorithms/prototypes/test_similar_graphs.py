from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_fgl.algorithms.prototypes import similar_graphs
from flower_fgl.algorithms.prototypes.hop_neighbors import Pairs
from flower_fgl.algorithms.prototypes.hop_prototypes import HopAverage
from flower_fgl.algorithms.prototypes.similar_graphs import similar_pairs


def listed(pairs: Pairs) -> list[tuple[int, int]]:
    return list(zip(pairs.centre.tolist(), pairs.neighbour.tolist(), strict=True))


def at_degrees(*degrees: float) -> Tensor:
    """Vectors in the plane; their lengths must not affect the result."""
    turns = torch.tensor(degrees) * math.pi / 180
    length = torch.arange(1.0, len(degrees) + 1)[:, None]
    return length * torch.stack([turns.cos(), turns.sin()], dim=1)


def slow(
    embedding: Tensor, annotation: Tensor, hops: int, limit: int, **options: object
) -> list[list[tuple[int, int]]]:
    """The definition, graph by graph."""
    out: list[list[tuple[int, int]]] = [
        [(v, v) for v in range(len(annotation)) if annotation[v] >= 0]
    ]
    for h in range(1, hops + 1):
        low = 0.9 * 0.8 ** (h - 1)
        top = 0.9 * 0.8 ** (h - 2) if h > 1 and options["mode"] == "ring" else math.inf
        pairs = []
        for v in range(len(annotation)):
            near = []
            for u in range(len(annotation)):
                cos = float(torch.cosine_similarity(embedding[v], embedding[u], dim=0))
                kin = not options["same_class"] or annotation[u] == annotation[v]
                if u != v and annotation[v] >= 0 and kin and low <= cos < top:
                    near.append((-cos, u))
            pairs += [(v, u) for _, u in sorted(near)[:limit]]
        out.append(pairs)
    return out


def test_thresholds_decay_from_hop_to_hop() -> None:
    # cosines with graph 0: cos 20° = 0.940, cos 30° = 0.866, cos 40° = 0.766;
    # ρ_1 = 0.9, ρ_2 = 0.81, ρ_3 = 0.729
    f = at_degrees(0, 20, 30, 40)
    hops = similar_pairs(f, torch.zeros(4, dtype=torch.int64), hops=3, rho=0.9)
    assert listed(hops[0]) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    # 20° and 10° apart are hop 1, 30° hop 2, 40° hop 3
    assert listed(hops[1]) == [
        *[(0, 1), (1, 2), (1, 0), (1, 3)],
        *[(2, 1), (2, 3), (3, 2), (3, 1)],
    ]
    assert listed(hops[2]) == [(0, 2), (2, 0)]
    assert listed(hops[3]) == [(0, 3), (3, 0)]


def test_within_includes_the_nearer_hops() -> None:
    f = at_degrees(0, 20, 30, 40)
    everybody = torch.zeros(4, dtype=torch.int64)
    hops = similar_pairs(f, everybody, hops=3, rho=0.9, mode="within")
    assert [u for v, u in listed(hops[2]) if v == 0] == [1, 2]
    assert [u for v, u in listed(hops[3]) if v == 0] == [1, 2, 3]


def test_a_hop_keeps_the_most_similar_graphs_and_breaks_ties_by_number() -> None:
    f = torch.tensor([[1.0, 0.0], [1.0, 0.9], *[[1.0, 0.5]] * 3])
    everybody = torch.zeros(5, dtype=torch.int64)
    hops = similar_pairs(f, everybody, hops=1, rho=0.5, limit=2)
    assert [u for v, u in listed(hops[1]) if v == 0] == [2, 3]


def test_graphs_of_another_class_are_neighbours_only_without_same_class() -> None:
    f, annotation = at_degrees(0, 1, 2), torch.tensor([0, 1, -1])
    own = similar_pairs(f, annotation, hops=1, rho=0.9)
    assert listed(own[0]) == [(0, 0), (1, 1)]
    assert listed(own[1]) == []
    anybody = similar_pairs(f, annotation, hops=1, rho=0.9, same_class=False)
    assert set(listed(anybody[1])) == {(0, 1), (0, 2), (1, 0), (1, 2)}


@given(
    seed=st.integers(0, 10_000),
    limit=st.sampled_from([1, 3, 32]),
    same_class=st.booleans(),
    mode=st.sampled_from(["ring", "within"]),
)
@settings(max_examples=25, deadline=None)
def test_similar_pairs_equal_a_slow_loop(
    seed: int, limit: int, same_class: bool, mode: str
) -> None:
    draw = torch.Generator().manual_seed(seed)
    f = torch.rand(11, 3, generator=draw)
    annotation = torch.randint(-1, 2, (11,), generator=draw)
    options = {"same_class": same_class, "mode": mode}
    found = similar_pairs(
        f, annotation, hops=3, rho=0.9, decay=0.8, limit=limit, **options
    )
    want = slow(f, annotation, 3, limit, **options)
    assert [listed(pairs) for pairs in found] == want


def test_blocks_of_rows_do_not_change_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(0)
    f = torch.rand(20, 4, generator=draw)
    annotation = torch.randint(-1, 3, (20,), generator=draw)
    whole = similar_pairs(f, annotation, hops=2, rho=0.95)
    monkeypatch.setattr(similar_graphs, "BLOCK", 50)
    parts = similar_pairs(f, annotation, hops=2, rho=0.95)
    assert [listed(p) for p in whole] == [listed(p) for p in parts]
    assert len(whole[1].centre) > 0


def test_no_gradient_flows_and_nothing_is_changed() -> None:
    f = at_degrees(0, 20, 30).requires_grad_()
    before = f.detach().clone()
    similar_pairs(f, torch.zeros(3, dtype=torch.int64), hops=2, rho=0.9)
    assert torch.equal(f, before)
    assert f.grad is None


@pytest.mark.parametrize("count", [0, 1])
def test_no_graph_or_a_single_one_has_no_neighbours(count: int) -> None:
    annotation = torch.zeros(count, dtype=torch.int64)
    hops = similar_pairs(torch.ones(count, 3), annotation, hops=2, rho=0.9)
    assert [len(pairs.centre) for pairs in hops] == [count, 0, 0]


def test_a_graph_whose_embedding_is_zero_has_no_neighbours() -> None:
    f = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.1]])
    hops = similar_pairs(f, torch.zeros(3, dtype=torch.int64), hops=4, rho=0.9)
    assert all(0 not in (v, u) for pairs in hops[1:] for v, u in listed(pairs))


def test_renumbering_graphs_does_not_change_the_prototypes() -> None:
    draw = torch.Generator().manual_seed(4)
    f = torch.rand(30, 6, generator=draw)
    annotation = torch.randint(0, 2, (30,), generator=draw)
    order = torch.randperm(30, generator=draw)
    made = []
    for g, classes in ((f, annotation), (f[order], annotation[order])):
        pairs = similar_pairs(g, classes, hops=2, rho=0.95, limit=4)
        made.append(HopAverage(pairs, classes, 2)(g))
    torch.testing.assert_close(made[0], made[1])


def pooled() -> tuple[Tensor, Tensor]:
    """Embeddings of two classes as a mean after ReLU gives them, and their classes."""
    draw = torch.Generator().manual_seed(0)
    annotation = torch.arange(60) % 2
    apart = torch.randn(2, 16, generator=draw)[annotation]
    noise = torch.randn(60, 16, generator=draw)
    return (20 + apart + 0.5 * noise).relu(), annotation


def test_embeddings_pooled_after_relu_are_told_apart_by_rank() -> None:
    f, annotation = pooled()
    unit = torch.nn.functional.normalize(f, dim=1)
    assert (unit @ unit.T).min() > 0.98  # whatever the class
    options = {"hops": 2, "rho": 0.9, "limit": 99, "same_class": False}
    plain = similar_pairs(f, annotation, **options)
    assert [len(pairs.centre) for pairs in plain] == [60, 60 * 59, 0]
    ranked = similar_pairs(f, annotation, **options, is_ranked=True)
    # a tenth of the pairs, and 0.9 − 0.81 = 9 % more
    assert len(ranked[1].centre) == pytest.approx(0.10 * 60 * 59, abs=4)
    assert len(ranked[2].centre) == pytest.approx(0.09 * 60 * 59, abs=4)
    for pairs in ranked[1:]:
        same = annotation[pairs.centre] == annotation[pairs.neighbour]
        assert bool(same.all())


def test_ranks_are_those_of_the_centred_cosines() -> None:
    f = at_degrees(0, 20, 30, 40)
    annotation = torch.tensor([0, 0, -1, 0])
    unit = torch.nn.functional.normalize(f - f.mean(0), dim=1)
    cosines = (unit @ unit.T)[~torch.eye(4, dtype=torch.bool)]
    low = float(cosines.quantile(0.5))
    want = [
        (v, u)
        for v in (0, 1, 3)
        for u in (0, 1, 3)
        if u != v and float(unit[v] @ unit[u]) >= low
    ]
    ranked = similar_pairs(f + 100, annotation, hops=1, rho=0.5, is_ranked=True)
    assert sorted(listed(ranked[1])) == want
    assert want


@pytest.mark.parametrize("count", [0, 1, 2])
def test_ranks_of_few_graphs(count: int) -> None:
    annotation = torch.zeros(count, dtype=torch.int64)
    f = torch.arange(3.0 * count).view(count, 3)
    hops = similar_pairs(f, annotation, hops=2, rho=0.9, is_ranked=True)
    assert [len(pairs.centre) for pairs in hops] == [count, 2 * (count == 2), 0]


def test_ranks_of_many_graphs_come_from_some_of_their_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    f, annotation = pooled()
    options = {"hops": 1, "rho": 0.9, "limit": 99, "is_ranked": True}
    whole = len(similar_pairs(f, annotation, **options)[1].centre)
    monkeypatch.setattr(similar_graphs, "BLOCK", 60 * 20)
    part = len(similar_pairs(f, annotation, **options)[1].centre)
    assert part == pytest.approx(whole, rel=0.3)
