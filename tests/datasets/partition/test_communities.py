from __future__ import annotations

import logging

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_fgl.core.errors import DataError
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.partition.assign import (
    group_nodes,
    louvain_communities,
    merge_communities,
    metis_communities,
)
from flower_fgl.datasets.partition.partition import partition_nodes


def both_ways(pairs):
    pairs = np.array(sorted({*pairs, *((v, u) for u, v in pairs)}), dtype=np.int64)
    return np.ascontiguousarray(pairs.reshape(-1, 2).T)


def star(num_nodes):
    return both_ways([(0, leaf) for leaf in range(1, num_nodes)])


def cliques(*sizes):
    """Disjoint cliques, joined in a chain by one edge each."""
    pairs, first = [], 0
    for size in sizes:
        members = range(first, first + size)
        pairs += [(u, v) for u in members for v in members if u < v]
        if first:
            pairs.append((first - 1, first))
        first += size
    return both_ways(pairs)


def consecutive(sizes):
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def merge_by_the_letter(communities, num_clients, delta):
    """Merge communities by a slow, independent implementation of the rule."""
    total = sum(map(len, communities))
    target = total // num_clients
    cap = target - delta
    chunks, waiting = [], [list(community) for community in communities]
    while waiting:
        community = waiting.pop(0)
        chunks.append(community[:cap])
        if community[cap:]:
            waiting.append(community[cap:])  # after all other communities
    chunks.sort(key=lambda chunk: -len(chunk))
    clients = [[] for _ in range(num_clients)]
    active, p = list(clients), 0
    for chunk in chunks:
        while len(active) > 1 and len(active[p]) >= target:
            active.pop(p)
            p = p % len(active)
        steps = 0
        while len(active[p]) + len(chunk) >= target + delta:
            p = (p + 1) % len(active)
            steps += 1
            if steps == len(active):
                p = [len(client) for client in active].index(min(map(len, active)))
                break
        active[p].extend(chunk)
    return [sorted(client) for client in clients]


def test_a_merge_of_twelve_nodes_agrees_with_the_hand_computed_sizes_five_and_seven(
    caplog,
):
    # cap = 12 // 2 - 1 = 5: communities of 8 and 4 give chunks 5, 3, 4, sorted 5, 4, 3.
    # Client 0 takes 5; 4 does not fit there (9 >= 7) and goes to client 1; 3 fits
    # neither (8 >= 7, 7 >= 7) and falls back to client 1, the smaller.
    with caplog.at_level(logging.INFO):
        merged = merge_communities(consecutive([8, 4]), 2, max_size_difference=1)
    assert [part.tolist() for part in merged] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9, 10, 11],
    ]
    assert "1 of 3 chunks fitted no client" in caplog.text


def test_chunks_of_one_community_are_not_listed_one_after_the_other():
    # cap = 12 // 2 - 3 = 3: both communities give two chunks of 3. First the first ones
    # of both: client 0 takes 0-2 and 6-8, is full, and client 1 takes the second ones.
    merged = merge_communities(consecutive([6, 6]), 2, max_size_difference=3)
    assert [part.tolist() for part in merged] == [
        [0, 1, 2, 6, 7, 8],
        [3, 4, 5, 9, 10, 11],
    ]
    # a third chunk comes after all second ones: 0-2, 9-11, 3-5, 12-14 | 6-8
    merged = merge_communities(consecutive([9, 6]), 2, max_size_difference=4)
    assert merged[0].tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11]
    assert merged[1].tolist() == [6, 7, 8, 12, 13, 14]


def test_a_merge_in_which_every_chunk_fits_logs_no_fallback(caplog):
    with caplog.at_level(logging.INFO):
        merged = merge_communities(consecutive([5, 5]), 2, max_size_difference=1)
    assert [len(part) for part in merged] == [5, 5]
    assert caplog.text == ""


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    num_clients=st.integers(1, 8),
    delta=st.integers(0, 10),
)
def test_the_merge_agrees_with_a_slow_reference_implementation(
    sizes, num_clients, delta
):
    num_clients = min(num_clients, sum(sizes))
    communities = consecutive(sizes)
    merged = merge_communities(communities, num_clients, max_size_difference=delta)
    target = sum(sizes) // num_clients
    used = delta if delta < target else target // 2
    expected = merge_by_the_letter(communities, num_clients, used)
    assert [part.tolist() for part in merged] == expected


def test_a_tiny_graph_lowers_the_size_difference_and_logs_it(caplog):
    with caplog.at_level(logging.INFO):
        merge_communities(consecutive([10, 10]), 2)
    assert "too few for a size difference of 20; using 5" in caplog.text


def test_groups_list_their_nodes_in_ascending_order_and_may_be_empty():
    groups = group_nodes(np.array([2, 0, 2, 0, 0]), 4)
    assert [group.tolist() for group in groups] == [[1, 3, 4], [], [0, 2], []]


@pytest.mark.parametrize("num_parts", [2, 4, 9, 12])
def test_metis_finds_cliques_by_bisection_and_k_way(num_parts):
    size = 12
    parts = metis_communities(
        cliques(*[size] * num_parts), size * num_parts, num_parts, seed=42
    )
    found = {tuple(part) for part in parts}
    assert found == {tuple(nodes) for nodes in consecutive([size] * num_parts)}


def test_metis_cuts_recursively_up_to_eight_parts_and_k_way_above(monkeypatch):
    import pymetis

    asked = []
    original = pymetis.part_graph

    def spy(num_parts, adjacency, **options):
        asked.append((num_parts, options["recursive"], options["options"].seed))
        return original(num_parts, adjacency, **options)

    monkeypatch.setattr(pymetis, "part_graph", spy)
    for num_parts in (2, 8, 9):
        metis_communities(cliques(30, 30), 60, num_parts, seed=7)
    assert asked == [(2, True, 7), (8, True, 7), (9, False, 7)]


def test_metis_partitions_of_neighbouring_seeds_differ() -> None:
    generator = np.random.default_rng(0)
    ends = generator.integers(0, 3000, (2, 9000))
    ends = ends[:, ends[0] != ends[1]]
    edges = np.concatenate([ends, ends[::-1]], axis=1)
    found = {
        tuple(map(tuple, metis_communities(edges, 3000, 10, seed=seed)))
        for seed in (0, 1, 2, 3)
    }
    assert len(found) == 4  # METIS itself gives one partition for 0 and 1


def test_metis_does_not_depend_on_the_order_of_edges_or_on_duplicates():
    edges = cliques(7, 9, 8)
    shuffled = np.random.default_rng(0).permutation(edges.T).T
    doubled = np.concatenate([shuffled, edges], axis=1)
    expected = metis_communities(edges, 24, 3, seed=1)
    for variant in (shuffled, doubled):
        found = metis_communities(variant, 24, 3, seed=1)
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_an_empty_metis_part_is_an_error_with_advice():
    assert any(len(part) == 0 for part in metis_communities(star(12), 12, 10, seed=42))
    edges = torch.from_numpy(star(12))
    nothing = torch.zeros(12, 1)
    y, target = torch.zeros(12, dtype=torch.int64), Target.classes(("a",))
    dataset = NodeDataset("star", nothing, edges, y, target)
    with pytest.raises(DataError, match=r"12 nodes and 11 edges\. Use fewer"):
        partition_nodes(dataset, "metis", 10, seed=42)


def test_louvain_finds_cliques_in_the_order_of_their_first_node():
    communities = louvain_communities(cliques(6, 8, 7), 21, seed=3)
    expected = consecutive([6, 8, 7])
    assert [found.tolist() for found in communities] == [e.tolist() for e in expected]


def test_louvain_does_not_depend_on_the_order_of_edges():
    # python-louvain's communities depend on the order in which nodes are added
    club = np.array(networkx.karate_club_graph().edges).T
    edges = np.concatenate([club, club[::-1]], axis=1)
    expected = [found.tolist() for found in louvain_communities(edges, 34, seed=0)]
    for draw in range(5):
        shuffled = np.random.default_rng(draw).permutation(edges.T).T
        found = louvain_communities(shuffled, 34, seed=0)
        assert [part.tolist() for part in found] == expected


def test_louvain_makes_an_isolated_node_its_own_community():
    communities = louvain_communities(cliques(4, 4), 10, seed=0)
    assert [found.tolist() for found in communities][-2:] == [[8], [9]]


def test_louvain_without_edges_makes_every_node_a_community():
    communities = louvain_communities(np.empty((2, 0), np.int64), 3, seed=0)
    assert [found.tolist() for found in communities] == [[0], [1], [2]]
