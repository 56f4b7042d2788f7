"""Files of data owners: which file or folder is the data of one owner; loads no torch."""

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["EDGES", "GRAPHS", "NODES", "RELATIONS", "find_owner", "is_owner"]
__all__ += ["name_of_file", "owners_in"]

NODES, EDGES, GRAPHS = "nodes.csv", "edges.csv", "graphs.csv"
RELATIONS = "relations.csv"
TABLES = (NODES, GRAPHS, RELATIONS)
"""Tables by which the folder of one owner is recognized."""


def is_owner(path: Path) -> bool:
    """Return whether a path is a graph file, or a folder with the tables of one owner."""
    if os.path.isdir(path):
        return any(os.path.exists(path / table) for table in TABLES)
    return path.suffix == ".npz"


def owners_in(folder: Path) -> Iterator[Path]:
    """Yield the graph files and CSV folders in a folder, but no hidden ones."""
    visible = (path for path in folder.iterdir() if not path.name.startswith("."))
    return filter(is_owner, visible)


def name_of_file(path: Path) -> str:
    """Return the name of an owner: that of its folder, or of its file without ``.npz``."""
    return path.name.removesuffix(".npz")


def find_owner(text: str, data_dir: Path | None) -> Path | None:
    """Return an existing path, in the working folder or in the data folder."""
    path = Path(os.path.expanduser(text))
    places = (path,) if data_dir is None else (path, data_dir / path)
    # Path.exists raises an error for long names
    return next((place for place in places if os.path.exists(place)), None)
