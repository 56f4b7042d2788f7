"""Write prepared nodes and edges as a folder of CSV tables, or as an ``.npz`` file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flower_fgl.core.atomic import replacing
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.tables.build import Part
from flower_fgl.datasets.tables.recipe import KEYS, PARTS, Place, Recipe

__all__ = ["Content", "write_archive", "write_folder"]

WHOLE_ID = re.compile(r"0|[1-9][0-9]{0,18}")
"""Ids that keep their text as integers."""
INT64_MAX = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Content:
    """What a graph file holds: nodes and edges, and their features."""

    recipe: Recipe
    parts: Mapping[Place, Part]
    features: Mapping[Place, Mapping[str, Array]]  # by name, float32 or bool, (N,)
    prepared: str  # hash of recipe and vocabulary


def write_folder(folder: Path, content: Content) -> None:
    """Write ``nodes.csv``, ``edges.csv`` and their companions into a new folder.

    A typed graph has one table for each kind of nodes and each relation.
    """
    folder.mkdir()
    recipe = content.recipe
    for place, of in content.parts.items():
        columns: dict[str, Any] = {"id": of.ids}
        if place[0] == "edges":
            columns = {
                key: content.parts[recipe.tables(place)[0].nodes_at(key)].ids[end]
                for key, end in zip(KEYS["edges"], of.pairs.T, strict=True)
            }
        own = {k: of.values[k] for k in ("label", "time", "split") if k in of.values}
        features = {
            name: cells.astype(np.int8) if cells.dtype == np.bool_ else cells
            for name, cells in content.features[place].items()
        }
        path = folder / f"{'/'.join(place)}.csv"
        path.parent.mkdir(exist_ok=True)
        _write_csv(path, columns | own | features)
        if "label" in own and (names := recipe.classes(place)):
            listing = "classes" if place[0] == "nodes" else "edge_classes"
            _write_csv(folder / f"{listing}.csv", {"name": names})
    if recipe.is_typed:
        _write_csv(folder / "relations.csv", _relations(recipe))
    _write_csv(folder / "prepared.csv", {"sha256": [content.prepared]})


def _relations(recipe: Recipe) -> dict[str, list[str]]:
    """Return the columns of ``relations.csv``."""
    tables = [recipe.tables(place) for place in recipe.places if place[0] == "edges"]
    return {
        "relation": [of[0].place[1] for of in tables],
        "source": [of[0].ends[0] for of in tables],
        "target": [of[0].ends[1] for of in tables],
        "private": ["yes" * any(t.private for t in of) for of in tables],
    }


def _write_csv(path: Path, columns: Mapping[str, Any]) -> None:
    """Write one table."""
    import pandas as pd

    pd.DataFrame(columns).to_csv(path, index=False, lineterminator="\n")


def write_archive(path: Path, content: Content) -> None:
    """Write an ``.npz`` file; it has no text ids."""
    nodes, edges = content.parts.values()
    classes = [content.recipe.classes(place) for place in content.parts]
    is_numbered = all(map(WHOLE_ID.fullmatch, nodes.ids))
    is_numbered = is_numbered and max(map(int, nodes.ids)) <= INT64_MAX
    arrays: dict[str, Any] = {"prepared": np.array(content.prepared)}
    order = np.arange(len(nodes.ids))
    if is_numbered:
        numbers = nodes.ids.astype(np.int64)
        order = np.argsort(numbers)  # ids ascend in an .npz file
        arrays["node_ids"] = numbers[order]
    else:
        nodes.lines.append(
            "An .npz file keeps no ids that are text: predictions are numbered by row. "
            "Write a folder to keep the ids."
        )
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    arrays["edges"] = place[edges.pairs]
    nodes = replace(
        nodes, values={k: cells[order] for k, cells in nodes.values.items()}
    )
    features, of_edges = content.features.values()
    arrays["x"] = _matrix(features, len(order))[order]
    arrays["feature_names"] = np.array([*features], dtype=np.str_)
    arrays |= _labels(nodes, classes[0], "y", "")
    if of_edges:
        arrays["edge_attr"] = _matrix(of_edges, len(edges.pairs))
        arrays["edge_attr_names"] = np.array([*of_edges], dtype=np.str_)
    if "label" in edges.values:
        arrays |= _labels(edges, classes[1], "edge_label", "edge_")
    if "time" in edges.values:
        arrays["edge_time"] = edges.values["time"]
    with replacing(path) as file:
        np.savez(file, **arrays)


def _matrix(features: Mapping[str, Array], number: int) -> Array:
    """Return features as one float32 matrix of shape (N, d)."""
    matrix = np.empty((number, len(features)), dtype=np.float32)
    for column, cells in enumerate(features.values()):
        matrix[:, column] = cells
    return matrix


def _labels(of: Part, classes: list[str], label: str, prefix: str) -> dict[str, Array]:
    """Return labels, class names and split as arrays."""
    arrays: dict[str, Array] = {}
    if "label" in of.values:
        words = of.values["label"]
        found = sorted(set(words) - {""})
        if all(name.isdecimal() for name in found):
            found.sort(key=int)
        names = classes or found
        number = {name: place for place, name in enumerate(names)} | {"": -1}
        arrays[label] = np.array([number[word] for word in words], dtype=np.int64)
        arrays[f"{prefix}class_names"] = np.array(names, dtype=np.str_)
        if classes:
            arrays[f"{prefix}declared_classes"] = np.array(names, dtype=np.str_)
    if "split" in of.values:
        split = of.values["split"]
        arrays |= {f"{prefix}{part}_mask": split == part for part in PARTS}
    return arrays
