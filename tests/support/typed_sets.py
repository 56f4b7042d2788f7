"""Sets of small typed graphs: molecules of atoms and rings, of two classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch_geometric.data import HeteroData

from tests.support.typed_graphs import write_tables

BOND, HAS = ("atom", "bond", "atom"), ("ring", "has", "atom")
NAMES = ("safe", "toxic")


def molecules(
    number: int, seed: int = 0, *, has_rings: bool = True
) -> list[HeteroData]:
    """Return molecules, of which every third lacks rings; atoms show the class."""
    draw, graphs = torch.Generator().manual_seed(seed), []
    for k in range(number):
        size = int(torch.randint(2, 6, (1,), generator=draw))
        graph = HeteroData()
        graph["atom"].x = torch.randn(size, 2, generator=draw).round(decimals=3) + k % 2
        other = [int(torch.randint(i, (1,), generator=draw)) for i in range(1, size)]
        graph[BOND].edge_index = torch.tensor([[*range(1, size)], other])
        if has_rings and k % 3:
            graph["ring"].num_nodes = 1
            graph[HAS].edge_index = torch.tensor([[0, 0], [0, 1]])
        graph.y = torch.tensor([k % 2])
        graphs.append(graph)
    return graphs


def set_tables(graphs: Sequence[HeteroData]) -> dict[str, str]:
    """Return the tables of molecules."""
    lines: dict[str, list[str]] = {
        "graphs.csv": ["id,label"],
        "nodes/atom.csv": ["graph,id,mass,charge"],
        "nodes/ring.csv": ["graph,id"],
        "edges/bond.csv": ["graph,source,target"],
        "edges/has.csv": ["graph,source,target"],
    }
    for k, graph in enumerate(graphs):
        lines["graphs.csv"].append(f"m{k},{NAMES[int(graph.y)]}")
        for i, (mass, charge) in enumerate(graph["atom"].x.tolist()):
            lines["nodes/atom.csv"].append(f"m{k},{i},{mass:.3f},{charge:.3f}")
        rings = graph["ring"].num_nodes if "ring" in graph.node_types else 0
        lines["nodes/ring.csv"] += [f"m{k},{i}" for i in range(rings)]
        for table, triple in (("edges/bond.csv", BOND), ("edges/has.csv", HAS)):
            if triple in graph.edge_types:
                ends = graph[triple].edge_index.T.tolist()
                lines[table] += [f"m{k},{a},{b}" for a, b in ends]
    has_rings = len(lines["nodes/ring.csv"]) > 1
    if not has_rings:
        del lines["nodes/ring.csv"], lines["edges/has.csv"]
    lines["relations.csv"] = ["relation,source,target", "bond,atom,atom"]
    lines["relations.csv"] += ["has,ring,atom"] * has_rings
    return {name: "\n".join([*rows, ""]) for name, rows in lines.items()}


def set_owners(folder: Path, *sizes: int, without_rings: int = -1) -> str:
    """Write one folder of tables for each owner, one of which may lack rings."""
    for number, size in enumerate(sizes):
        graphs = molecules(size, number, has_rings=number != without_rings)
        write_tables(folder / f"own{number}", set_tables(graphs))
    return str(folder)
