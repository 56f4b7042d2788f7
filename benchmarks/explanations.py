"""How much scores drop without the edges that an explanation names.

One run of FedAvg for each task; some items of the first owner are explained with the
aggregated model. A row has means over the items that at least ``--least`` edges influence:
how much the score drops without any edge, without the edges that integrated gradients name,
without those of GNNExplainer's masks, and without as many random ones. Numbers drop by
standard deviations.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from flower_fgl import Run, simulate
from flower_fgl.datasets.client_graph import ClientGraph
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.store import open_store
from flower_fgl.methods import parse_config
from flower_fgl.runs.saved_model import load_model
from flower_fgl.simulation.local import run_config_of
from flower_fgl.simulation.prediction import explain_item

CLIENTS = 3
NODES, MEAN_DEGREE = 300, 6
"""Size of each graph with features of edges."""
Case = tuple[str, Run, Path, list[list[str]]]
"""Name of a row, run, graph of an owner, and items."""


def synthetic(
    name: str, folder: Path, settings: dict[str, Any]
) -> tuple[Run, ClientGraph, Path]:
    """Train on the synthetic graph; return the first client and its file."""
    values = run_config_of(
        method="fedavg", dataset="synthetic", clients=CLIENTS, seed=0, settings=settings
    )
    client = open_store(parse_config(values), CLIENTS).load(0)
    path = folder / f"{name}.npz"
    save_client_graph(path, client)
    run = simulate(
        "fedavg", clients=CLIENTS, rounds=5, run_dir=str(folder / name), **settings
    )
    return run, client, path


def write_payments(path: Path, seed: int) -> None:
    """Write a graph whose nodes' numbers follow from the features of their edges.

    ``y_i = Σ_j max(a_ij, 0) · max(x_j, 0) + 0.1 ξ`` over the edges of node i.
    """
    draw = np.random.default_rng(seed)
    ends = draw.integers(NODES, size=(NODES * MEAN_DEGREE // 2, 2))
    ends = ends[ends[:, 0] != ends[:, 1]]
    amount = draw.normal(size=(len(ends), 1)).astype(np.float32)
    x = draw.normal(size=(NODES, 3)).astype(np.float32)
    y = 0.1 * draw.normal(size=NODES)
    for source, target in (ends.T, ends.T[::-1]):
        sent = np.maximum(amount[:, 0], 0) * np.maximum(x[source, 0], 0)
        np.add.at(y, target, sent)
    names = {"target_names": ["received"], "feature_names": ["a", "b", "c"]}
    np.savez(
        path, x=x, edges=ends, edge_attr=amount, y=y[:, None], **names,
        edge_attr_names=["amount"],
    )  # fmt: skip


def cases(folder: Path, number: int) -> Iterator[Case]:
    """Train a model for each row."""
    run, client, path = synthetic("nodes", folder, {})
    ids = client.node_ids[:: len(client.node_ids) // number]
    yield "classes of nodes, GCN", run, path, [[str(k)] for k in ids.tolist()]

    run, client, path = synthetic("links", folder, {"setting": "link"})
    graph = client.graph
    assert graph.pairs is not None
    found = graph.pairs[:, graph.masks["test"] & (graph.y == 1)]
    pairs = client.node_ids[found].T.tolist()
    yield "links, GCN", run, path, [[str(a), str(b)] for a, b in pairs]

    owners = folder / "payments"
    owners.mkdir()
    for owner in range(CLIENTS):
        write_payments(owners / f"{owner}.npz", owner)
    run = simulate(
        "fedavg", owners=str(owners), target_kind="numbers", model="gine", rounds=60,
        dropout=0.0, weight_decay=0.0, run_dir=str(folder / "gine"),
    )  # fmt: skip
    items = [[str(k)] for k in range(number)]
    yield "numbers of nodes, GINE", run, owners / "0.npz", items


def main() -> None:
    """Train, explain, and print the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=30)
    parser.add_argument("--least", type=int, default=20)
    given = parser.parse_args()
    titles = ("items", "edges", "score", "without any edge", "integrated gradients")
    titles += ("masks", "random", "overlap of masks")
    print("| task |", " | ".join(titles), "|")
    print("|---" * (1 + len(titles)) + "|")
    with tempfile.TemporaryDirectory() as name:
        for title, run, path, items in cases(Path(name), given.items):
            found = []
            for item in items:
                one = explain_item(run.path, path, item)
                if len(one.drawing) >= given.least:
                    found.append(one)
                if len(found) == given.items:
                    break
            scale = load_model(run.path).target_scale
            unit = 1.0 if scale is None else float(scale.std[0])
            values = [
                fmean(len(one.drawing) for one in found),
                fmean(one.score for one in found),
                fmean((one.score - one.without_edges) / unit for one in found),
                fmean(one.drop / unit for one in found),
                fmean(one.mask_drop / unit for one in found),
                fmean(fmean(one.random_drops) / unit for one in found),
                fmean(one.overlap for one in found),
            ]
            cells = " | ".join(f"{value:.2f}" for value in values)
            print(f"| {title} | {len(found)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
