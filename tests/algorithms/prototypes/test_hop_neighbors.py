from __future__ import annotations

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_fgl.algorithms.prototypes import two_steps
from flower_fgl.algorithms.prototypes.hop_neighbors import (
    Pairs,
    annotate,
    ring_pairs,
    select_pairs,
)


def as_set(pairs: Pairs) -> set[tuple[int, int]]:
    return set(zip(pairs.centre.tolist(), pairs.neighbour.tolist(), strict=True))


def both_ways(edges: list[tuple[int, int]]) -> torch.Tensor:
    both = sorted({(u, v) for u, v in edges} | {(v, u) for u, v in edges})
    return torch.tensor(both, dtype=torch.int64).reshape(-1, 2).T.contiguous()


@given(seed=st.integers(0, 200), p=st.sampled_from([0.0, 0.1, 0.3, 0.8]))
@settings(max_examples=25, deadline=None)
def test_rings_hold_the_nodes_at_exactly_that_distance(seed: int, p: float) -> None:
    graph = nx.gnp_random_graph(12, p, seed=seed)
    distance = dict(nx.all_pairs_shortest_path_length(graph))
    for mode in ("ring", "within"):
        hops = ring_pairs(both_ways(list(graph.edges)), 12, 3, mode=mode)
        for h, pairs in enumerate(hops):
            want = {
                (v, u)
                for v in distance
                for u, d in distance[v].items()
                if d == h or (mode == "within" and 0 < d < h)
            }
            assert as_set(pairs) == want
            assert len(pairs.centre) == len(want)
            assert bool((pairs.centre.diff() >= 0).all())


@given(
    seed=st.integers(0, 200),
    p=st.sampled_from([0.0, 0.1, 0.3, 0.8]),
    most_pairs=st.sampled_from([0, 10, 40]),
    mode=st.sampled_from(["ring", "within"]),
)
@settings(max_examples=25, deadline=None)
def test_nodes_beyond_the_memory_bound_are_unlisted_and_the_others_complete(
    seed: int, p: float, most_pairs: int, mode: str
) -> None:
    graph = nx.gnp_random_graph(12, p, seed=seed)
    edges = both_ways(list(graph.edges))
    whole = ring_pairs(edges, 12, 2, mode=mode)
    part = ring_pairs(edges, 12, 2, mode=mode, most_pairs=most_pairs)
    assert whole[2].unlisted is None
    missing = [] if part[2].unlisted is None else part[2].unlisted.tolist()
    assert as_set(part[1]) == as_set(whole[1])
    assert as_set(part[2]) == {(v, u) for v, u in as_set(whole[2]) if v not in missing}
    assert len(part[2].centre) <= most_pairs
    assert bool((part[2].centre.diff() >= 0).all())


@pytest.mark.parametrize("block", [1, 30])
def test_blocks_of_rows_do_not_change_the_rings(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = both_ways(list(nx.gnp_random_graph(20, 0.2, seed=1).edges))
    whole = ring_pairs(edges, 20, 2)
    monkeypatch.setattr(two_steps, "BLOCK", block)
    parts = ring_pairs(edges, 20, 2)
    assert torch.equal(whole[2].centre, parts[2].centre)
    assert torch.equal(whole[2].neighbour, parts[2].neighbour)


def test_hops_beyond_the_diameter_are_empty() -> None:
    hops = ring_pairs(both_ways([(0, 1)]), 3, 4)
    assert [len(pairs.centre) for pairs in hops] == [3, 2, 0, 0, 0]


def test_num_bytes_includes_cached_tensors() -> None:
    pairs = Pairs(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 0]))
    assert pairs.num_bytes == 2 * 3 * 8
    assert pairs.start(3).tolist() == [0, 2, 3, 3]
    swapped, order = pairs.reverse()
    assert as_set(swapped) == {(1, 0), (2, 0), (0, 1)}
    assert order.tolist() == [2, 0, 1]
    # three more arrays of three numbers, and four starts
    assert pairs.num_bytes == (2 * 3 + 3 * 3 + 4) * 8


def test_a_graph_without_edges_has_only_hop_zero() -> None:
    hops = ring_pairs(torch.empty(2, 0, dtype=torch.int64), 4, 2)
    assert [len(pairs.centre) for pairs in hops] == [4, 0, 0]


def test_neighbours_of_another_class_are_omitted() -> None:
    hops = ring_pairs(both_ways([(0, 1), (1, 2)]), 3, 1)
    annotation = torch.tensor([0, 0, 1])
    draw = torch.Generator()
    own = select_pairs(hops, annotation, same_class=True, limit=9, generator=draw)
    assert as_set(own[1]) == {(0, 1), (1, 0)}
    anybody = select_pairs(hops, annotation, same_class=False, limit=9, generator=draw)
    assert as_set(anybody[1]) == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_nodes_without_class_are_neither_centre_nor_neighbour() -> None:
    hops = ring_pairs(both_ways([(0, 1), (1, 2)]), 3, 1)
    kept = select_pairs(
        hops,
        torch.tensor([0, -1, 0]),
        same_class=True,
        limit=9,
        generator=torch.Generator(),
    )
    assert as_set(kept[0]) == {(0, 0), (2, 2)}
    assert as_set(kept[1]) == set()


def test_nodes_beyond_the_limit_keep_a_seeded_sample_and_others_all() -> None:
    star = both_ways([(0, leaf) for leaf in range(1, 41)])
    hops = ring_pairs(star, 41, 2)
    annotation = torch.zeros(41, dtype=torch.int64)

    def draw(seed: int) -> list[Pairs]:
        generator = torch.Generator().manual_seed(seed)
        return select_pairs(
            hops, annotation, same_class=True, limit=8, generator=generator
        )

    first, again, other = draw(1), draw(1), draw(2)
    degree = torch.bincount(first[1].centre, minlength=41)
    assert degree.tolist() == [8] + [1] * 40
    assert torch.bincount(first[2].centre, minlength=41).tolist() == [0] + [8] * 40
    assert as_set(first[1]) == as_set(again[1])
    assert as_set(first[1]) != as_set(other[1])
    assert as_set(first[1]) <= as_set(hops[1])


def test_every_neighbour_is_drawn_equally_often() -> None:
    star = both_ways([(0, leaf) for leaf in range(1, 11)])
    hops = ring_pairs(star, 11, 1)
    annotation = torch.zeros(11, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    seen = torch.zeros(11)
    for _ in range(1000):
        kept = select_pairs(
            hops, annotation, same_class=True, limit=3, generator=generator
        )[1]
        seen += torch.bincount(kept.neighbour[kept.centre == 0], minlength=11)
    # 1000 × 3/10 = 300 draws each, standard deviation √(1000 · 0.3 · 0.7) = 14.5
    assert seen[1:].sub(300).abs().max() < 60


def drawn_sets(
    num_leaves: int, num_same: int, limit: int
) -> dict[tuple[int, ...], int]:
    """Count the sets of neighbours a hub keeps over 1500 rounds."""
    star = both_ways([(0, leaf) for leaf in range(1, num_leaves + 1)])
    hops = ring_pairs(star, num_leaves + 1, 1)
    annotation = torch.ones(num_leaves + 1, dtype=torch.int64)
    annotation[: num_same + 1] = 0
    generator = torch.Generator().manual_seed(0)
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(1500):
        kept = select_pairs(
            hops, annotation, same_class=True, limit=limit, generator=generator
        )[1]
        key = tuple(sorted(kept.neighbour[kept.centre == 0].tolist()))
        seen[key] = seen.get(key, 0) + 1
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize(
    "num_leaves", [pytest.param(7, id="draws suffice"), pytest.param(40, id="or not")]
)
def test_every_set_of_neighbours_is_drawn_equally_often(num_leaves: int) -> None:
    # 6 neighbours of the class, 2 kept: 15 sets, 1500 / 15 = 100 each, standard
    # deviation √(1500 · 1/15 · 14/15) = 9.7; six draws of 40 seldom meet two of the 6
    seen = drawn_sets(num_leaves, num_same=6, limit=2)
    assert len(seen) == 15
    assert all(len(key) == 2 and max(key) <= 6 for key in seen)
    assert max(abs(count - 100) for count in seen.values()) < 45


def test_a_hub_with_as_many_neighbours_as_the_limit_keeps_all() -> None:
    assert drawn_sets(30, num_same=3, limit=3) == {(1, 2, 3): 1500}


def test_training_labels_take_precedence_over_predictions() -> None:
    logits = torch.tensor([[4.0, 0.0], [0.0, 4.0], [0.1, 0.0]])
    index, labels = torch.tensor([0]), torch.tensor([1])
    assert annotate(logits, index, labels, min_confidence=0.0).tolist() == [1, 1, 0]
    # softmax(0.1, 0) = 0.525: too unsure
    assert annotate(logits, index, labels, min_confidence=0.7).tolist() == [1, 1, -1]


@pytest.mark.parametrize("hops", [0, 5])
def test_the_result_has_the_requested_number_of_hops(hops: int) -> None:
    assert len(ring_pairs(both_ways([(0, 1)]), 2, hops)) == hops + 1
