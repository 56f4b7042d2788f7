from __future__ import annotations

import itertools
import subprocess
import sys

import networkx as nx
import pytest
import torch
from torch import Tensor

from flower_fgl.algorithms.prototypes import hop_neighbors, two_steps
from flower_fgl.algorithms.prototypes.hop_neighbors import ring_pairs, select_pairs
from tests.algorithms.prototypes.test_hop_neighbors import both_ways

# node 0 has the neighbours 1, 2 and 3. Three walks reach node 4, one walk each of the
# nodes 5 to 8. The edge 1-2 adds walks to the neighbours. Node 9 has another class.
EDGES = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 4), (2, 4), (3, 4)]
EDGES += [(1, 5), (1, 6), (2, 7), (3, 8), (3, 9)]
RING, WITHIN = (4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8)


def copies(number: int) -> tuple[Tensor, Tensor]:
    """Return edges and classes of many copies of the graph, of ten nodes each."""
    first = 10 * torch.arange(number)
    edges = (both_ways(EDGES)[:, None] + first[:, None]).flatten(1)
    annotation = torch.zeros(10 * number, dtype=torch.int64)
    annotation[9::10] = 1
    return edges, annotation


def drawn_sets(mode: str, number: int) -> dict[tuple[int, ...], int]:
    """Count the sets of two neighbours that node 0 draws in each copy."""
    edges, annotation = copies(number)
    hops = ring_pairs(edges, 10 * number, 2, mode=mode, most_pairs=0)
    assert hops[2].unlisted is not None
    kept = select_pairs(
        hops,
        annotation,
        same_class=True,
        limit=2,
        generator=torch.Generator().manual_seed(0),
        mode=mode,
    )[2]
    of_first = kept.centre % 10 == 0
    assert kept.centre[of_first].tolist() == [10 * (i // 2) for i in range(2 * number)]
    assert bool((kept.neighbour // 10 == kept.centre // 10).all())
    sets = (kept.neighbour[of_first] % 10).view(-1, 2).sort(dim=1).values
    seen: dict[tuple[int, ...], int] = {}
    for pair in sets.tolist():
        seen[tuple(pair)] = seen.get(tuple(pair), 0) + 1
    return seen


@pytest.mark.parametrize(
    ("draws", "most_walks"),
    [
        pytest.param(30, 4, id="walks suffice"),
        pytest.param(1, 4, id="some do not"),
        pytest.param(30, 0, id="too many walks"),
    ],
)
@pytest.mark.parametrize(("mode", "nodes"), [("ring", RING), ("within", WITHIN)])
def test_every_set_of_two_step_neighbours_is_drawn_equally_often(
    mode: str,
    nodes: tuple[int, ...],
    draws: int,
    most_walks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(two_steps, "DRAWS", draws)
    monkeypatch.setattr(hop_neighbors, "MOST_WALKS", most_walks)
    sets = list(itertools.combinations(nodes, 2))
    seen = drawn_sets(mode, 100 * len(sets))
    assert set(seen) == set(sets)
    # 100 each, standard deviation below 10
    assert max(abs(count - 100) for count in seen.values()) < 45


def test_walks_alone_give_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_steps, "DRAWS", 60)
    edges, annotation = copies(1)
    hops = ring_pairs(edges, 10, 2, most_pairs=0)
    start, neighbour = hops[1].start(10), hops[1].neighbour.long()
    walks = two_steps.TwoStepWalks(start, neighbour, annotation, "ring")
    nodes = torch.zeros(2000, dtype=torch.int64)
    generator = torch.Generator().manual_seed(0)
    found, neighbours = walks.draw(nodes, True, 2, generator)
    assert len(found) == 2000  # no node needs a list
    seen = torch.bincount(neighbours.flatten(), minlength=10)
    # 2000 × 2/5 = 800 each, standard deviation √(2000 · 0.4 · 0.6) = 22
    assert not seen[[0, 1, 2, 3, 9]].any()
    assert (seen[list(RING)] - 800).abs().max() < 100


@pytest.mark.parametrize("mode", ["ring", "within"])
@pytest.mark.parametrize("same_class", [True, False])
@pytest.mark.parametrize("block", [1, 1 << 22])
def test_drawn_pairs_are_among_the_listed_ones_and_as_many(
    mode: str, same_class: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_steps, "BLOCK", block)
    edges = both_ways(list(nx.barabasi_albert_graph(60, 2, seed=3).edges))
    draw = torch.Generator().manual_seed(1)
    annotation = torch.randint(-1, 2, (60,), generator=draw)
    chosen = []
    for most_pairs in (1 << 24, 0, 400):
        hops = ring_pairs(edges, 60, 2, mode=mode, most_pairs=most_pairs)
        generator = torch.Generator().manual_seed(2)
        chosen.append(
            select_pairs(
                hops,
                annotation,
                same_class=same_class,
                limit=5,
                generator=generator,
                mode=mode,
            )[2]
        )
    whole = ring_pairs(edges, 60, 2, mode=mode)[2]
    allowed = set(zip(whole.centre.tolist(), whole.neighbour.tolist(), strict=True))
    degrees = [torch.bincount(pairs.centre, minlength=60) for pairs in chosen]
    for pairs, degree in zip(chosen, degrees, strict=True):
        found = list(zip(pairs.centre.tolist(), pairs.neighbour.tolist(), strict=True))
        assert set(found) <= allowed
        assert len(set(found)) == len(found)
        assert torch.equal(degree, degrees[0])
        assert bool((pairs.centre.diff() >= 0).all())
    assert int(degrees[0].max()) == 5


def test_walks_of_two_steps_are_counted() -> None:
    graph = nx.barabasi_albert_graph(30, 3, seed=0)
    adjacency = ring_pairs(both_ways(list(graph.edges)), 30, 1)[1]
    nodes = torch.tensor([0, 3, 29])
    table = two_steps.count_walks(adjacency.adjacency(30), nodes)
    for row, node in zip(table.tolist(), nodes.tolist(), strict=True):
        for other, found in enumerate(row):
            number = len(set(graph[node]) & set(graph[other]))
            if graph.has_edge(node, other):
                assert found == ~number
            else:
                assert found == (number if other != node else 0)


@pytest.mark.parametrize("mode", ["ring", "within"])
@pytest.mark.parametrize("same_class", [True, False])
@pytest.mark.parametrize("most_walks", [0, 1, 4])
def test_kept_numbers_of_walks_do_not_change_the_draw(
    mode: str, same_class: bool, most_walks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hop_neighbors, "MOST_WALKS", most_walks)
    edges = both_ways(list(nx.barabasi_albert_graph(80, 3, seed=3).edges))
    draw = torch.Generator().manual_seed(1)
    annotation = torch.randint(-1, 2, (80,), generator=draw)
    chosen = []
    for most_bytes in (0, 1 << 27):
        monkeypatch.setattr(hop_neighbors, "MOST_BYTES", most_bytes)
        hops = ring_pairs(edges, 80, 2, mode=mode, most_pairs=400)
        generator = torch.Generator().manual_seed(2)
        for _ in range(2):  # the second time, the numbers are those of the first
            pairs = select_pairs(
                hops,
                annotation,
                same_class=same_class,
                limit=4,
                generator=generator,
                mode=mode,
            )[2]
        chosen.append(pairs)
        before = 2 * hops[1].centre.nbytes
        assert (hops[1].num_bytes > before + 2 * 80 * 10) == bool(most_bytes)
    assert torch.equal(chosen[0].centre, chosen[1].centre)
    assert torch.equal(chosen[0].neighbour, chosen[1].neighbour)


@pytest.mark.parametrize("mode", ["ring", "within"])
@pytest.mark.parametrize("edges", [[], [(0, 1), (1, 2)]])
def test_nodes_without_walks_draw_nothing(
    mode: str, edges: list[tuple[int, int]]
) -> None:
    # nodes 3 and 4 have no edge: their walks start at the end of the list of pairs
    adjacency = ring_pairs(both_ways(edges), 5, 1)[1]
    drawn = hop_neighbors.draw_two_steps(
        adjacency,
        torch.arange(5),
        torch.zeros(5, dtype=torch.int64),
        same_class=True,
        limit=1,
        mode=mode,
        generator=torch.Generator().manual_seed(0),
    )
    degree = torch.bincount(drawn.centre, minlength=5).tolist()
    if not edges:
        assert degree == [0, 0, 0, 0, 0]
    else:
        assert degree == ([1, 0, 1, 0, 0] if mode == "ring" else [1, 1, 1, 0, 0])


STAR = """
import resource, torch
from flower_fgl.algorithms.prototypes.hop_neighbors import select_pairs
from flower_fgl.algorithms.prototypes.hop_neighbors import ring_pairs
from flower_fgl.algorithms.prototypes import two_steps

def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

leaves = torch.arange(1, 8001)
hub = torch.zeros_like(leaves)
edges = torch.stack([torch.cat([hub, leaves]), torch.cat([leaves, hub])])
before = megabytes()
hops = ring_pairs(edges, 8001, 2)
pairs = select_pairs(
    hops, torch.zeros(8001, dtype=torch.int64), same_class=True, limit=32,
    generator=torch.Generator().manual_seed(0),
)[2]
degree = torch.bincount(pairs.centre, minlength=8001)
assert int(degree[0]) == 0, degree[0]
assert bool((degree[1:] == 32).all())
assert bool((pairs.neighbour != pairs.centre).all()) and bool((pairs.neighbour > 0).all())
print(megabytes() - before)
"""


@pytest.mark.thorough
def test_a_star_of_8000_leaves_needs_little_memory() -> None:
    # all 8,000 · 7,999 pairs take 2.3 GB with the matrices from which they are made
    done = subprocess.run(
        [sys.executable, "-c", STAR], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 500
