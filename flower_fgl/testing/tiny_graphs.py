"""Generator of a small dataset of graphs in the raw layout of TU Dortmund."""

from __future__ import annotations

from pathlib import Path

__all__ = ["NAME", "write_tiny"]

NAME = "TINY"
"""The dataset is ``tu:TINY``."""


def write_tiny(
    folder: Path, *, num_graphs: int = 30, has_labels: bool = True, hub: int = -1
) -> None:
    """Write rings (class 1) and stars (class 2) of 4 to 6 nodes to a data folder.

    Every other graph is a ring, and the last has no edge. Without labels of nodes the
    dataset has no features. The graph of index ``hub`` gets 20 more nodes.
    """
    raw = folder / "TU" / NAME / "raw"
    raw.mkdir(parents=True)
    pairs: list[tuple[int, int]] = []
    owner: list[int] = []
    kinds: list[int] = []
    for graph in range(num_graphs):
        is_ring = graph % 2 == 0
        size = 4 + graph % 3 + (20 if graph == hub else 0)
        first = len(owner) + 1
        owner += [graph + 1] * size
        kinds += [0] + [1] * (size - 1)
        if graph == num_graphs - 1:
            continue
        for node in range(1, size + is_ring):
            a = first + (node - 1 if is_ring else 0)
            b = first + node % size
            pairs += [(a, b), (b, a)]
    lines = {
        "A": [f"{a}, {b}" for a, b in pairs],
        "graph_indicator": map(str, owner),
        "graph_labels": [str(1 + graph % 2) for graph in range(num_graphs)],
    }
    if has_labels:
        lines["node_labels"] = map(str, kinds)
    for part, rows in lines.items():
        (raw / f"{NAME}_{part}.txt").write_text("\n".join(rows) + "\n")
