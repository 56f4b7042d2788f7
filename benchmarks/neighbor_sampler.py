"""Measure neighbours per second of ADPFedGNN's sampler, compared with a loop.

    python benchmarks/neighbor_sampler.py
    python benchmarks/neighbor_sampler.py --nodes 100000 --degree 20 --limits 2 10 50

The loop calls NumPy's ``choice`` for each node with more neighbours than the limit. Both
sample neighbours of every node of a random graph. The fastest repetition counts.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from flower_fgl.algorithms.adpfedgnn.agent import (
    NeighbourLists,
    sample_neighbours,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--degree", type=int, default=20, help="mean degree")
    parser.add_argument("--limits", type=int, nargs="+", default=[2, 5, 10, 20])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def random_graph(nodes: int, degree: int) -> torch.Tensor:
    """Draw random edges; nodes with small numbers are hubs."""
    draw = torch.Generator().manual_seed(0)
    ends = torch.rand(2, nodes * degree, generator=draw, dtype=torch.float64)
    ends[1] **= 2
    return (ends * nodes).long()


def by_loop(
    start: np.ndarray, neighbour: np.ndarray, limit: int, draw: np.random.Generator
) -> int:
    """Sample node by node; return the number of sampled neighbours."""
    drawn = []
    for first, end in itertools.pairwise(start):
        if end - first > limit:
            picks = draw.choice(end - first, limit, replace=False)
            drawn.append(neighbour[first + picks])
        else:
            drawn.append(neighbour[first:end])
    return len(np.concatenate(drawn))


def best_of(repeats: int, draw: Callable[[], int]) -> tuple[int, float]:
    """Return the number of sampled neighbours and the seconds of the fastest repetition."""
    seconds = []
    for _ in range(repeats):
        clock = time.perf_counter()
        count = draw()
        seconds.append(time.perf_counter() - clock)
    return count, min(seconds)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    lists = NeighbourLists.of(
        random_graph(options.nodes, options.degree), options.nodes
    )
    start, neighbour = lists.start.numpy(), lists.neighbour.numpy()
    nodes = torch.arange(options.nodes)
    generator = torch.Generator().manual_seed(1)
    loop_generator = np.random.default_rng(1)
    table = Table(
        "k",
        "neighbours",
        "million/s",
        "loop",
        "ratio",
        title=f"{options.nodes:,} nodes, {options.nodes * options.degree:,} edges",
    )
    for limit in options.limits:
        count, seconds = best_of(
            options.repeats,
            lambda limit=limit: len(
                sample_neighbours(lists, nodes, limit, generator).neighbour
            ),
        )
        looped, slow = best_of(
            1,
            lambda limit=limit: by_loop(start, neighbour, limit, loop_generator),
        )
        assert count == looped
        table.add_row(
            str(limit),
            f"{count:,}",
            f"{count / seconds / 1e6:.1f}",
            f"{looped / slow / 1e6:.2f}",
            f"{slow / seconds:.0f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
