"""Write the graph file of an owner, or a vocabulary, from tables and a recipe."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w

from flower_fgl.core.atomic import scratch_path, write_file
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.graph_file import inspect_graph_file
from flower_fgl.datasets.graph_files.problems import show_path
from flower_fgl.datasets.tables.build import Part, encode_part, read_graph
from flower_fgl.datasets.tables.recipe import (
    FEATURES,
    PARTS,
    Place,
    items_of,
    read_recipe,
)
from flower_fgl.datasets.tables.vocabulary import hash_encoding, propose
from flower_fgl.datasets.tables.write import Content, write_archive, write_folder

__all__ = ["prepare_graph", "propose_vocabulary"]


def propose_vocabulary(
    recipe_path: Path, tables: Sequence[Path], output: Path
) -> list[str]:
    """Write a vocabulary with the categories and scales of one owner's tables.

    Returns what was read, as lines of text.
    """
    recipe = read_recipe(recipe_path, needs_vocabulary=False)
    parts = read_graph(recipe, tables)
    found = propose(
        {
            place: {
                name: (of.columns[name], values)
                for name, values in of.values.items()
                if of.columns[name].kind in FEATURES
            }
            for place, of in parts.items()
        }
    )
    _require_new(output)
    write_file(output, tomli_w.dumps(found).encode())
    return [line for of in parts.values() for line in of.lines]


def prepare_graph(
    recipe_path: Path, tables: Sequence[Path], output: Path, *, has_labels: bool = True
) -> list[str]:
    """Write a graph file from an owner's tables.

    Parameters
    ----------
    recipe_path : Path
        Recipe, see :func:`~flower_fgl.datasets.tables.recipe.read_recipe`.
    tables : sequence of Path
        CSV, Parquet, GraphML or ``.npz`` files.
    output : Path
        New ``.npz`` file, or folder of CSV tables; for a typed graph a folder.
    has_labels : bool
        Whether to read labels and splits; without them the graph is for ``predict``.

    Returns
    -------
    list of str
        What was read, filled and dropped, as lines of text.

    Raises
    ------
    DataError
        If the recipe or a table cannot be read, the graph has an error, or the output
        exists or cannot be written.
    """
    _require_new(output)
    recipe = read_recipe(recipe_path, has_labels=has_labels)
    is_archive = output.suffix == ".npz"
    if is_archive and recipe.is_typed:
        raise DataError(
            f"A typed graph is written as a folder, got {show_path(output)}. Give a name "
            "without .npz."
        )
    parts = read_graph(recipe, tables)
    features = {place: encode_part(recipe, place, of) for place, of in parts.items()}
    scratch = scratch_path(output).with_suffix(".npz" if is_archive else "")
    write = write_archive if is_archive else write_folder
    try:
        write(scratch, Content(recipe, parts, features, hash_encoding(recipe)))
        has_label = any(
            "label" in of.values for place, of in parts.items() if place[0] == "nodes"
        )
        _require_valid(scratch, output, needs_labels=has_label)
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


def _require_valid(scratch: Path, output: Path, *, needs_labels: bool) -> None:
    """Reject a graph that ``check-graph`` would refuse, with its reasons."""
    _, problems = inspect_graph_file(scratch, needs_labels=needs_labels)
    if problems:
        shown = "\n".join(problems).replace(str(scratch), str(output))
        raise DataError(f"The graph would have errors, and was not written:\n{shown}")


def _summary(
    parts: Mapping[Place, Part], features: Mapping[Place, Mapping[str, Array]]
) -> list[str]:
    """Count nodes, edges, features, classes and the parts of the split."""
    lines = []
    for place, of in parts.items():
        number, items = len(of.is_foreign), items_of(place)
        lines.append(f"{items}: {number:,}, with {len(features[place]):,} features")
        for name in ("label", "split"):
            if name in of.values:
                counts = Counter(of.values[name].tolist())
                order = [*PARTS, ""] if name == "split" else sorted(counts)
                found = [f"{w or 'none'}: {counts[w]:,}" for w in order if counts[w]]
                lines.append(f"{name} of {items}: {', '.join(found)}")
    return lines
