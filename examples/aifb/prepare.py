"""Write FedHGN's own cuts of AIFB as data owners with typed graphs.

python examples/aifb/prepare.py [FOLDER] [--data DIR]

Writes ``FOLDER/aifb-edges-3/client-00.npz``, … for the six cuts of Fu and King (IJCAI
2023): random edges and random edge types, among 3, 5 and 10 clients. Persons are
classified by research group; relations that an owner lacks are not in its file.
docs/results/owners.md shows the results.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import HeteroData

from flower_fgl import to_npz

CUTS = tuple((cut, size) for cut in ("edges", "etypes") for size in (3, 5, 10))
PARTS = ("train_mask", "val_mask", "test_mask")


def owner(
    graph: Mapping[str, np.ndarray], cut: Mapping[str, np.ndarray], number: int
) -> HeteroData:
    """Return what one client of a cut holds, its nodes in its own order.

    Parameters
    ----------
    graph : mapping of str to ndarray
        ``aifb.npz``: kinds, relations, and edges by relation.
    cut : mapping of str to ndarray
        Nodes by client and kind, and edges by client, as numbers of ``graph``.
    number : int
        The client.
    """
    data = HeteroData()
    kinds = [str(kind) for kind in graph["node_types"]]
    target = str(graph["target_type"])
    place: dict[str, np.ndarray] = {}
    for column, kind in enumerate(kinds):
        first, end = cut["node_ptr"][number, column : column + 2]
        nodes = cut["node_id"][first:end].astype(np.int64)
        if not len(nodes):
            continue
        place[kind] = np.full(int(graph["num_nodes"][column]), -1)
        place[kind][nodes] = np.arange(len(nodes))
        data[kind].num_nodes = len(nodes)
        if kind == target:
            data[kind].y = torch.from_numpy(graph["y"][nodes].astype(np.int64))
            for part in PARTS:
                data[kind][part] = torch.from_numpy(graph[part][nodes])
    first, end = cut["edge_ptr"][number : number + 2]
    edges = cut["edge_id"][first:end].astype(np.int64)
    relation = np.searchsorted(graph["edge_ptr"], edges, side="right") - 1
    for row in np.unique(relation):
        source, name, to = (part.replace("#", ".") for part in graph["edge_types"][row])
        own = edges[relation == row]
        ends = np.stack(
            [place[source][graph["edge_src"][own]], place[to][graph["edge_dst"][own]]]
        )
        data[source, name, to].edge_index = torch.from_numpy(ends)
    return data


def main() -> None:
    """Write the files of all cuts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("aifb"))
    parser.add_argument("--data", type=Path, help="folder with aifb.npz and cut_*.npz")
    given = parser.parse_args()
    data = given.data or Path(os.environ.get("FLOWER_FGL_DATA", "")) / "AIFB-hetero"
    if not (data / "aifb.npz").is_file():
        sys.exit(
            f"{data} has no aifb.npz. Give the folder of the cuts with --data, or set "
            "FLOWER_FGL_DATA to the folder that contains AIFB-hetero."
        )
    if given.folder.exists():
        sys.exit(f"{given.folder} exists. Name another folder, or remove it.")
    graph = dict(np.load(data / "aifb.npz"))
    for cut, size in CUTS:
        folder = given.folder / f"aifb-{cut}-{size}"
        folder.mkdir(parents=True)
        held = dict(np.load(data / f"cut_random-{cut}_{size}.npz"))
        for number in range(size):
            to_npz(
                owner(graph, held, number),
                folder / f"client-{number:02}.npz",
                target_node=str(graph["target_type"]),
            )
        print(f"{folder}: {size} owners")


if __name__ == "__main__":
    main()
