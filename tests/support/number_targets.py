"""Graph files of data owners that hold numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

NODES = 60


def number_files(
    folder: Path,
    *,
    shift: float = 0.0,
    names: tuple[str, ...] = ("logS", "logP"),
    factors: tuple[float, ...] = (1.0, 1.0, 1.0),
) -> list[dict[str, Any]]:
    """Write a ring of nodes for each owner; return the owners' node configs.

    The numbers follow from the features; a tenth of them is unknown. All are shifted, and
    those of each owner are multiplied by its factor first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    nodes, ring = [], np.arange(NODES)
    for number, (name, factor) in enumerate(zip("abcd", factors, strict=False)):
        draw = np.random.default_rng(number)
        x = draw.normal(size=(NODES, 6)).astype(np.float32)
        y = x[:, : len(names)] * 2.0 + 3.0 + draw.normal(0, 0.1, (NODES, len(names)))
        y[draw.random(y.shape) < 0.1] = np.nan
        path = folder / f"{name}.npz"
        np.savez(
            path,
            x=x,
            edges=np.stack([ring, (ring + 1) % NODES], axis=1),
            y=y * factor + shift,
            target_names=np.array(names),
            target_units=np.array(["mol/L"] * len(names)),
        )
        nodes.append({"graph": str(path)})
    return nodes
