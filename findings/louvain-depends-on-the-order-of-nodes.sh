#!/usr/bin/env bash
# python-louvain 0.16: with random_state fixed, the communities depend on the order in which nodes were added.
#
# The karate club with its nodes added in ascending order, and with the same edges in a shuffled order, gives other
# communities for the same random_state. With equal order of nodes the order of edges does not matter. Two processes
# that read one edge list in other orders therefore partition a graph differently. An edge attribute "weight", which
# the karate club of networkx has, is used without being asked for.
#
# Output seen:
#   other order of edges: same communities
#   other order of nodes: other communities
#   attribute weight: other communities
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
python3 -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet python-louvain==0.16 networkx==3.6.1 numpy==2.4.6
"$scratch/venv/bin/python" - <<'END'
import random

import community
import networkx

club = networkx.karate_club_graph()
edges = sorted(club.edges)
shuffled = list(edges)
random.Random(1).shuffle(shuffled)


def communities(graph):
    found = {}
    for node, number in community.best_partition(graph, random_state=0).items():
        found.setdefault(number, set()).add(node)
    return set(map(frozenset, found.values()))


def with_nodes(edges):
    graph = networkx.Graph()
    graph.add_nodes_from(sorted(club))
    graph.add_edges_from(edges)
    return graph


first = communities(with_nodes(edges))
for change, graph, same in (
    ("other order of edges", with_nodes(shuffled), True),
    ("other order of nodes", networkx.Graph(shuffled), False),
    ("attribute weight", club, False),
):
    is_same = communities(graph) == first
    print(f"{change}: {'same' if is_same else 'other'} communities")
    assert is_same == same
END
