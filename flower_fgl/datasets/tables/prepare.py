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
from flower_fgl.datasets.tables.recipe import FEATURES, PARTS, read_recipe
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
    parts = dict(zip(("nodes", "edges"), read_graph(recipe, tables), strict=True))
    found = propose(
        {
            part: {
                name: (of.columns[name], values)
                for name, values in of.values.items()
                if of.columns[name].kind in FEATURES
            }
            for part, of in parts.items()
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
        New ``.npz`` file, or folder of CSV tables.
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
    nodes, edges = read_graph(recipe, tables)
    features = {
        part: encode_part(recipe, part, of)
        for part, of in (("nodes", nodes), ("edges", edges))
    }
    classes = {part: recipe.classes(part) for part in features}
    is_archive = output.suffix == ".npz"
    scratch = scratch_path(output).with_suffix(".npz" if is_archive else "")
    write = write_archive if is_archive else write_folder
    try:
        write(scratch, Content(nodes, edges, features, classes, hash_encoding(recipe)))
        _require_valid(scratch, output, needs_labels="label" in nodes.values)
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
    return [*nodes.lines, *edges.lines, *_summary(nodes, edges, features)]


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
    nodes: Part, edges: Part, features: Mapping[str, Mapping[str, Array]]
) -> list[str]:
    """Count nodes, edges, features, classes and the parts of the split."""
    lines = []
    for part, of in (("nodes", nodes), ("edges", edges)):
        number = len(of.is_foreign)
        lines.append(f"{part}: {number:,}, with {len(features[part]):,} features")
        for name in ("label", "split"):
            if name in of.values:
                counts = Counter(of.values[name].tolist())
                order = [*PARTS, ""] if name == "split" else sorted(counts)
                found = [f"{w or 'none'}: {counts[w]:,}" for w in order if counts[w]]
                lines.append(f"{name} of {part}: {', '.join(found)}")
    return lines
