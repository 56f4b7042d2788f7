"""Small sets of graphs as owners' files: random trees with two classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def set_arrays(number: int = 60, seed: int = 0, **changed: Any) -> dict[str, Any]:
    """Return the arrays of a set; ``None`` removes one."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 8, number)
    graph = np.repeat(np.arange(number), sizes)
    first = np.cumsum(sizes) - sizes
    edges = [
        (start + node, start + draw.integers(node))
        for start, size in zip(first, sizes, strict=True)
        for node in range(1, size)
    ]
    y = draw.integers(0, 2, number)
    x = draw.normal(size=(len(graph), 3)) + y[graph][:, None]
    arrays = {
        "x": x,
        "edges": np.array(edges).reshape(-1, 2),
        "graph_of_node": graph,
        "y": y,
        "class_names": np.array(["low", "high"]),
        "feature_names": np.array(["mass", "charge", "size"]),
        "graph_ids": np.array([f"g{k}" for k in range(number)]),
    }
    return {key: a for key, a in (arrays | changed).items() if a is not None}


def write_set(path: Path, number: int = 60, seed: int = 0, **changed: Any) -> Path:
    """Write a set as an ``.npz`` file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **set_arrays(number, seed, **changed))
    return path


def write_tables(folder: Path, **tables: str) -> Path:
    """Write CSV tables, given without indentation, to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in tables.items():
        lines = [line.strip() for line in text.strip().splitlines()]
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
