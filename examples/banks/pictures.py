"""The two pictures of docs/banks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import networkx as nx
import numpy as np
from generate import PATTERNS, World
from matplotlib.figure import Figure

__all__ = ["draw_patterns", "draw_scores"]

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "banks", "font.size": 9}


def draw_patterns(world: World, path: Path) -> None:
    """Draw one instance of each pattern; colors are banks."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 2.3), layout="constrained")
        axes = figure.subplots(1, len(PATTERNS))
        for kind, (name, ax) in enumerate(zip(PATTERNS, axes, strict=True)):
            graph = nx.DiGraph()
            members = set(np.flatnonzero(world.pattern == kind).tolist())
            for source, target in zip(
                world.source.tolist(), world.target.tolist(), strict=True
            ):
                if source in members and target in members:
                    graph.add_edge(source, target)
            # the largest connected instance that crosses banks
            parts = sorted(nx.weakly_connected_components(graph), key=len)
            crossing = [part for part in parts if len(set(world.bank[list(part)])) > 1]
            part = (crossing or parts)[0]
            shown = graph.subgraph(part)
            layout = nx.circular_layout if name == "cycle" else nx.kamada_kawai_layout
            nx.draw_networkx(
                shown,
                layout(shown),
                ax=ax,
                with_labels=False,
                node_size=60,
                node_color=[COLORS[world.bank[node] % 4] for node in shown],
                edge_color="#777777",
                arrowsize=8,
            )
            ax.set_title(name)
            ax.set_axis_off()
        figure.savefig(path, metadata={"Date": None})


def draw_scores(
    rows: Sequence[Mapping[str, Any]],
    methods: Sequence[str],
    banks: Sequence[str],
    share: float,
    path: Path,
) -> None:
    """Draw the AUPRC of every bank and method, mean over draws and each draw."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 2.8), layout="constrained")
        ax = figure.subplots()
        width = 0.8 / len(banks)
        for number, bank in enumerate(banks):
            for place, method in enumerate(methods):
                values = [
                    100 * row["auprc"]
                    for row in rows
                    if (row["bank"], row["method"]) == (bank, method)
                ]
                at = place + (number - (len(banks) - 1) / 2) * width
                ax.bar(
                    at,
                    np.mean(values),
                    0.9 * width,
                    color=COLORS[number % 4],
                    label=None if place else bank,
                )
                ax.plot([at] * len(values), values, "k.", markersize=3)
        ax.axhline(100 * share, color="#777777", linewidth=1, linestyle="--")
        ax.set_xticks(range(len(methods)), methods)
        ax.set_ylabel("AUPRC, %")
        ax.legend(ncols=len(banks), frameon=False)
        ax.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
