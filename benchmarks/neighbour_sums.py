"""Measure FedGCN's sums of neighbours: exactness, bytes, seconds, and what they reveal.

``python benchmarks/neighbour_sums.py`` partitions Cora among 10 clients, runs one round of
FedGCN with and without secure aggregation, and prints one line per partition and setting.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch
from torch import Tensor

from flower_fgl import simulate
from flower_fgl.algorithms.fedgcn import readable_nodes
from flower_fgl.client_apps.base import Fit
from flower_fgl.client_apps.fedgcn import FedGCNClientApp, edges_of, listed_of
from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.datasets.build import load_dataset
from flower_fgl.methods import parse_config
from flower_fgl.nn import GraphInput
from flower_fgl.runs.files import flatten_config


class Watch(FedGCNClientApp):
    """FedGCN's client half, which shows its clients."""

    seen: dict[int, Client]

    def fit(self, client: Client, server_round: int, download: Any) -> Fit:
        """Keep the client, then train."""
        Watch.seen[client.partition_id] = client
        return super().fit(client, server_round, download)


def readable(client: Client, edge_index: Tensor, owner: Tensor, hops: int) -> Tensor:
    """Return which other nodes' features a client can compute from its sums: (N,), bool."""
    edges = edges_of(client)
    rows = edges.ids[listed_of(client)]
    if hops == 2:
        other = client.state.group("sums")["other"]
        rows = torch.cat([rows, edges.outside[other]])
    num_nodes = len(owner)
    place = torch.full((num_nodes,), -1)
    place[rows] = torch.arange(len(rows))
    loops = torch.arange(num_nodes)
    source, target = torch.cat([edge_index, loops.expand(2, -1)], dim=1)
    is_known = owner[source] == client.partition_id
    kept = (place[target] >= 0) & ~is_known
    nodes, column = torch.unique(source[kept], return_inverse=True)
    members = torch.zeros(len(rows), len(nodes))
    members[place[target[kept]], column] = 1.0
    out = torch.zeros(num_nodes, dtype=torch.bool)
    out[nodes[readable_nodes(members)]] = True
    return out


def measure(partition: str, data: str, **values: Any) -> None:
    """Run one round and print its line."""
    hops = values["fedgcn"]["hops"]
    with tempfile.TemporaryDirectory() as folder:
        Watch.seen = {}
        clock = time.process_time()
        run = simulate(
            "fedgcn",
            data,
            clients=10,
            rounds=1,
            partition=partition,
            output_dir=folder,
            **values,
        )
        total = time.process_time() - clock
    dataset: Any = load_dataset(parse_config(dict(flatten_config(run.config))))
    whole = GraphInput(dataset.x, dataset.edge_index)
    exact = whole.propagate(
        dataset.x.to_dense() if dataset.x.layout == torch.sparse_csr else dataset.x,
        "normalised",
    )
    owner = torch.full((dataset.num_nodes,), -1)
    for pid, client in Watch.seen.items():
        owner[client.data.graph.node_ids] = pid
    error, found, outside, beyond = 0.0, 0, 0, 0
    for client in Watch.seen.values():
        ids = client.data.graph.node_ids
        gap = (client.data.inputs[0].x[: len(ids)] - exact[ids]).abs().max()
        error = max(error, float(gap))
        is_readable = readable(client, dataset.edge_index, owner, hops)
        near = edges_of(client).outside
        found, outside = found + int(is_readable[near].sum()), outside + len(near)
        beyond += int(is_readable.sum()) - int(is_readable[near].sum())
    source, target = dataset.edge_index
    cut = float((owner[source] != owner[target]).float().mean())
    first = run.rounds[0]
    sent, received = (first["bytes"][way] for way in ("up", "down"))
    secure = "yes" if values.get("secure_aggregation") else "no"
    print(
        f"| {partition} | {hops} | {values['fedgcn']['min_outside']} | {secure} "
        f"| {cut:.1%} | {first['numbers']['listed_nodes']:.0f} "
        f"| {sum(sent.values()) / 1e7:.3f} | {sum(received.values()) / 1e7:.3f} "
        f"| {error:.1e} | {found / max(outside, 1):.0%} of {outside} | {beyond} "
        f"| {total:.1f} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", default="cora")
    parser.add_argument("--partitions", nargs="+", default=["metis", "dirichlet"])
    args = parser.parse_args()
    from flower_fgl.client_apps import dispatch

    original = dispatch.Dispatcher._app

    def watched(self: Any, method: str) -> Any:
        self._apps.setdefault(method, Watch(self._session))
        return original(self, method)

    dispatch.Dispatcher._app = watched  # type: ignore[method-assign]
    print(
        "| partition | hops | min-outside | secure | edges cut | B | MB up a client "
        "| MB down | largest error of a sum | outside neighbours readable "
        "| other nodes readable | CPU s of the run |\n" + "|---" * 12 + "|"
    )
    for partition in args.partitions:
        for hops, least, secure in (
            (1, 1, False),
            (2, 1, False),
            (2, 1, True),
            (1, 2, False),
            (2, 2, False),
        ):
            measure(
                partition,
                args.dataset,
                fedgcn={"hops": hops, "min_outside": least},
                secure_aggregation=secure,
            )


if __name__ == "__main__":
    main()
