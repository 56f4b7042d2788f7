"""Write the graph file of an owner, or a vocabulary, from tables and a recipe."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from flower_fgl.core.atomic import replacing, scratch_path, write_file
from flower_fgl.core.errors import DataError, show_path
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.graph_file import inspect_graph_file
from flower_fgl.datasets.graph_files.graph_set import inspect_graph_set
from flower_fgl.datasets.graph_files.own_split import PARTS
from flower_fgl.datasets.tables.build import Part, encode_part, propose, read_graph
from flower_fgl.datasets.tables.columns import hash_encoding
from flower_fgl.datasets.tables.recipe import (
    KEYS,
    OF_GRAPHS,
    Place,
    Recipe,
    items_of,
    read_recipe,
)

__all__ = ["prepare_graph", "propose_vocabulary"]


WHOLE_ID = re.compile(r"0|[1-9][0-9]{0,18}")
"""Ids that keep their text as integers."""
INT64_MAX = np.iinfo(np.int64).max
Features = Mapping[Place, Mapping[str, Array]]
"""Features of nodes and edges by place and name, float32 or bool of shape (N,)."""


def propose_vocabulary(
    recipe_path: Path, tables: Sequence[Path], output: Path
) -> list[str]:
    """Write a vocabulary with the categories and scales of one owner's tables.

    Returns what was read, as lines of text.
    """
    recipe = read_recipe(recipe_path, needs_vocabulary=False)
    parts = read_graph(recipe, tables)
    vocabulary = propose(parts)
    _require_new(output)
    write_file(output, tomli_w.dumps(vocabulary).encode())
    return [line for of in parts.values() for line in of.lines]


def prepare_graph(
    recipe_path: Path, tables: Sequence[Path], output: Path, *, has_labels: bool = True
) -> list[str]:
    """Write a graph file from an owner's tables: CSV, Parquet, GraphML or ``.npz`` files.

    ``recipe_path`` is as in :func:`~flower_fgl.datasets.tables.recipe.read_recipe`, and
    ``output`` a new ``.npz`` file, or folder of CSV tables; a folder for a typed graph or a
    set of graphs.
    Without ``has_labels``, labels and splits are not read, and the graph is for
    ``predict``; edges keep their times if the recipe lists their classes. Returns what was
    read, filled and dropped, as lines of text. A DataError says that the recipe or a table
    cannot be read, the graph has an error, or the output exists or cannot be written.
    """
    _require_new(output)
    recipe = read_recipe(recipe_path, has_labels=has_labels)
    is_archive = output.suffix == ".npz"
    if is_archive and (recipe.is_typed or recipe.graphs):
        what = "set of graphs" if recipe.graphs else "typed graph"
        raise DataError(
            f"A {what} is written as a folder, got {show_path(output)}. Give a name "
            "without .npz."
        )
    parts = read_graph(recipe, tables)
    features = {place: encode_part(recipe, place, of) for place, of in parts.items()}
    scratch = scratch_path(output).with_suffix(".npz" if is_archive else "")
    write = write_archive if is_archive else write_folder
    try:
        write(scratch, recipe, parts, features)
        has_label = any(
            "label" in of.values for place, of in parts.items() if place[0] != "edges"
        )
        inspect = inspect_graph_set if recipe.graphs else inspect_graph_file
        _, problems = inspect(scratch, needs_labels=has_label)
        if problems:
            shown = "\n".join(problems).replace(str(scratch), str(output))
            raise DataError(
                f"The graph would have errors, and was not written:\n{shown}"
            )
        scratch.rename(output)
    except OSError as error:
        raise DataError(
            f"Cannot write {show_path(output)}: {error.strerror}."
        ) from error
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.unlink(missing_ok=True)
    lines = [line for of in parts.values() for line in of.lines]
    return lines + _summary(parts, features)


def _require_new(output: Path) -> None:
    """Reject an output that exists: a second command must not mix two graphs."""
    if os.path.lexists(output):
        raise DataError(
            f"{show_path(output)} exists. Remove it, or choose another name."
        )
    if not output.absolute().parent.is_dir():
        raise DataError(f"The folder of {show_path(output)} does not exist. Create it.")


def _summary(parts: Mapping[Place, Part], features: Features) -> list[str]:
    """Count graphs, nodes, edges, features, classes and the parts of the split."""
    lines = []
    for place, of in parts.items():
        number, items = len(of.is_foreign), items_of(place)
        with_features = f", with {len(features[place]):,} features"
        lines.append(f"{items}: {number:,}{with_features * (place[0] != 'graphs')}")
        for name in ("label", "split"):
            if name in of.values:
                counts = Counter(of.values[name].tolist())
                order = [*PARTS, ""] if name == "split" else sorted(counts)
                found = [f"{w or 'none'}: {counts[w]:,}" for w in order if counts[w]]
                lines.append(f"{name} of {items}: {', '.join(found)}")
    return lines


def write_folder(
    folder: Path, recipe: Recipe, parts: Mapping[Place, Part], features: Features
) -> None:
    """Write ``nodes.csv``, ``edges.csv`` and their companions into a new folder.

    A typed graph has one table for each kind of nodes and each relation, a set of graphs
    ``graphs.csv``.
    """
    folder.mkdir()
    for place, of in parts.items():
        columns: dict[str, Any] = {"id": of.ids}
        if place[0] == "edges":
            columns = {
                key: parts[recipe.tables(place)[0].nodes_at(key)].ids[end]
                for key, end in zip(KEYS["edges"], of.pairs.T, strict=True)
            }
        if recipe.graphs and place[0] != "graphs":
            keyed = {key: _graph_and_id(ids) for key, ids in columns.items()}
            graph, _ = next(iter(keyed.values()))
            columns = {"graph": graph} | {key: ids for key, (_, ids) in keyed.items()}
        own = {k: of.values[k] for k in OF_GRAPHS if k in of.values}
        encoded = {
            name: cells.astype(np.int8) if cells.dtype == np.bool_ else cells
            for name, cells in features[place].items()
        }
        path = folder / f"{'/'.join(place)}.csv"
        path.parent.mkdir(exist_ok=True)
        _write_csv(path, columns | own | encoded)
        if "label" in own and (names := recipe.classes(place)):
            listing = "edge_classes" if place[0] == "edges" else "classes"
            _write_csv(folder / f"{listing}.csv", {"name": names})
    if recipe.is_typed:
        _write_csv(folder / "relations.csv", _relations(recipe))
    _write_csv(folder / "prepared.csv", {"sha256": [_hash(recipe, parts)]})


def _hash(recipe: Recipe, parts: Mapping[Place, Part]) -> str:
    """Return the hash that owners compare."""
    return hash_encoding(recipe, {place: of.columns for place, of in parts.items()})


def _graph_and_id(keys: Array) -> tuple[list[str], list[str]]:
    """Return graph and id of nodes from their keys in a set."""
    parts = [key.partition(":") for key in keys]
    return [graph for graph, _, _ in parts], [name for _, _, name in parts]


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


def write_archive(
    path: Path, recipe: Recipe, parts: Mapping[Place, Part], features: Features
) -> None:
    """Write an ``.npz`` file; it has no text ids."""
    nodes, edges = parts.values()
    classes = [recipe.classes(place) for place in parts]
    is_numbered = all(map(WHOLE_ID.fullmatch, nodes.ids))
    is_numbered = is_numbered and max(map(int, nodes.ids)) <= INT64_MAX
    arrays: dict[str, Any] = {"prepared": np.array(_hash(recipe, parts))}
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
    of_nodes, of_edges = features.values()
    arrays["x"] = _matrix(of_nodes)[order]
    arrays["feature_names"] = np.array([*of_nodes], dtype=np.str_)
    arrays |= _labels(nodes, classes[0], "y", "")
    if of_edges:
        arrays["edge_attr"] = _matrix(of_edges)
        arrays["edge_attr_names"] = np.array([*of_edges], dtype=np.str_)
    if "label" in edges.values:
        arrays |= _labels(edges, classes[1], "edge_label", "edge_")
    if "time" in edges.values:
        arrays["edge_time"] = edges.values["time"]
    with replacing(path) as file:
        np.savez(file, **arrays)


def _matrix(features: Mapping[str, Array]) -> Array:
    """Return features as one float32 matrix of shape (N, d)."""
    return np.column_stack([*features.values()]).astype(np.float32, copy=False)


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
