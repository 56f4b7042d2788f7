"""Write 26 airlines of OpenFlights as data owners with typed graphs.

python examples/airlines/prepare.py [FOLDER] [--data DIR] [--draws 10]

Writes ``FOLDER/<draw>/openflights/<airline>.npz`` with the kinds ``route``, ``airport`` and
``plane``, whose target is whether a route is a codeshare, and
``FOLDER/<draw>/openflights-padded/<airline>.npz``, in which all kinds have the columns of
all kinds, as ``types = "ignore"`` needs. The draw decides the split of the routes.
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
from tables import CLASSES, Airline, read_airlines, split_routes

from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import ClientGraph, Graph, NodeDataset
from flower_fgl.datasets.graph_files.write import save_client_graph
from flower_fgl.datasets.transforms.typed import NodeTable, TypedTarget, typed_dataset


def node_tables(airline: Airline, *, is_padded: bool) -> dict[str, NodeTable]:
    """Return the nodes of each kind, with the columns of all kinds if ``is_padded``."""
    frames = {
        "route": airline.routes,
        "airport": airline.airports,
        "plane": airline.planes,
    }
    names = [f"{kind}.{name}" for kind, x in frames.items() for name in x.columns]
    tables, start = {}, 0
    for kind, frame in frames.items():
        x, own = frame.to_numpy(np.float32, copy=True), frame.shape[1]
        if is_padded:
            after = len(names) - start - own
            x = np.pad(x, ((0, 0), (start, after)))
        columns = names if is_padded else list(frame.columns)
        tables[kind] = NodeTable(torch.from_numpy(x), tuple(columns))
        start += own
    return tables


def typed_graph(
    airline: Airline, masks: Mapping[str, np.ndarray], *, is_padded: bool
) -> NodeDataset:
    """Return the typed graph of one airline."""
    route = np.arange(len(airline.routes))
    relations = {
        ("route", "departs-from", "airport"): np.stack([route, airline.ends[0]]),
        ("route", "arrives-at", "airport"): np.stack([route, airline.ends[1]]),
        ("route", "flown-by", "plane"): airline.equipment,
    }
    return typed_dataset(
        airline.code,
        node_tables(airline, is_padded=is_padded),
        {triple: torch.from_numpy(edges) for triple, edges in relations.items()},
        "route",
        TypedTarget(
            torch.from_numpy(airline.label),
            Target.classes(CLASSES),
            {name: torch.from_numpy(mask) for name, mask in masks.items()},
        ),
    )


def write(path: Path, dataset: NodeDataset) -> None:
    """Write a typed graph as a graph file."""
    graph = Graph(
        dataset.x,
        dataset.edge_index,
        dataset.y,
        dict(dataset.masks),
        messages=dataset.messages,
        node_type=dataset.node_type,
    )
    client = ClientGraph(
        0,
        graph,
        dataset.target,
        torch.arange(dataset.num_nodes),
        feature_names=dataset.feature_names,
        schema=dataset.schema,
    )
    save_client_graph(path, client)


def find_data(given: Path | None) -> Path:
    """Return the folder of OpenFlights; end the program if it lacks the files."""
    data = given or Path(os.environ.get("FLOWER_FGL_DATA", "")) / "OpenFlights"
    if not (data / "routes.dat.gz").is_file():
        sys.exit(
            f"{data} has no routes.dat.gz. Give the folder of OpenFlights' files with "
            "--data, or set FLOWER_FGL_DATA to the folder that contains OpenFlights."
        )
    return data


def main() -> None:
    """Write the files of all draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("airlines"))
    parser.add_argument("--data", type=Path, help="folder with routes.dat.gz, …")
    parser.add_argument("--draws", type=int, default=10)
    given = parser.parse_args()
    if given.folder.exists():
        sys.exit(f"{given.folder} exists. Name another folder, or remove it.")
    airlines = read_airlines(find_data(given.data))
    for draw in range(given.draws):
        masks = split_routes(airlines, draw)
        for ending, is_padded in (("", False), ("-padded", True)):
            folder = given.folder / str(draw) / f"openflights{ending}"
            folder.mkdir(parents=True)
            for code, airline in airlines.items():
                graph = typed_graph(airline, masks[code], is_padded=is_padded)
                write(folder / f"{code}.npz", graph)
    total = sum(len(one.label) for one in airlines.values())
    share = np.concatenate([one.label for one in airlines.values()]).mean()
    print(
        f"{len(airlines)} airlines, {total:,} routes, {100 * share:.1f} % of them "
        f"codeshares; {given.draws} draws in {given.folder}"
    )


if __name__ == "__main__":
    main()
