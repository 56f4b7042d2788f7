"""Reader of a set of graphs stored as a folder of CSV tables, see docs/deployment.md.

With a column ``smiles`` the graphs are those of the molecules, by rdkit and
torch-geometric. Atoms have the 9 categories of ``torch_geometric.utils.from_smiles``,
one-hot: 177 columns named ``atomic_num=6`` etc. Bonds have 3: 30 columns such as
``bond_type=SINGLE``. So another version with other categories differs in the names of its
columns.
"""

from __future__ import annotations

import csv
import os
import shutil
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flower_fgl.core.errors import DataError, ErrorCollector, clip, show_path
from flower_fgl.core.held_kind import EDGES, GRAPHS, NODES, RELATIONS
from flower_fgl.core.options import nearest
from flower_fgl.datasets.graph_files.archive import Array
from flower_fgl.datasets.graph_files.csv_rows import (
    Table,
    Wanted,
    csv_rows,
    read_table,
)
from flower_fgl.datasets.graph_files.csv_tables import (
    End,
    index_ids,
    read_predicted,
    read_prepared_cell,
    split_note,
    unread_tables,
)
from flower_fgl.datasets.graph_files.typed_arrays import schema_arrays
from flower_fgl.datasets.graph_files.typed_csv import edge_notes, read_typed_names
from flower_fgl.datasets.graph_files.write import graph_arrays
from flower_fgl.datasets.transforms.typed import NodeTable, typed_union

__all__ = ["check_number", "drop_unreadable", "inchikeys", "read_set_folder"]


MOST_GRAPHS = 10**6
GRAPH_COLUMNS = ("id", "key", "label", "split", "smiles")
NOT_READ = ("label", "time", "split")
"""Columns that ``edges.csv`` of one graph may have, and that of a set may not."""
OF_GRAPHS = ("label", "key", "smiles", "target")
"""Columns of ``graphs.csv`` that are no features in ``nodes.csv``."""


def read_set_folder(
    folder: Path, wanted: Wanted, attempt: ErrorCollector
) -> dict[str, Array]:
    """Read the tables into arrays named as in an ``.npz`` file with a set of graphs.

    ``smiles`` (G,) are added for a table of molecules, and ``notes`` are sentences on how
    the tables were read. Arrays with an error that was collected are missing.
    """
    path = folder / GRAPHS
    graphs = read_table(
        path,
        ("id",),
        GRAPH_COLUMNS,
        items="graphs",
        needs_features=False,
        target_kind=wanted.kind_of_nodes,
    )
    check_number(len(graphs.lines), graphs.where)  # before other tables fill the memory
    if graphs.feature_names:
        known = (*GRAPH_COLUMNS, "label:NAME", "target", "target:NAME")
        attempt.add(
            f'{graphs.where}: column "{clip(graphs.feature_names[0])}" is not known. '
            f"Features belong into nodes.csv. {nearest(graphs.feature_names[0], known)}"
        )
    index = attempt(index_ids, graphs, "graph")
    arrays: dict[str, Array | None] = {}
    if wanted.needs_labels and not (graphs.targets.read or graphs.text["label"]):
        attempt.add(
            f"{graphs.where} has no column label (the class of each graph), label:NAME or "
            "target. Add one; its cells may be empty."
        )
    elif wanted.needs_labels:
        arrays |= read_predicted(graphs, "graph", folder, attempt)
    ids = graphs.text["id"]
    arrays["graph_ids"] = np.array(ids, dtype=np.str_)
    if keys := graphs.text["key"]:
        pairs = zip(keys, ids, strict=True)
        arrays["graph_keys"] = np.array([key or name for key, name in pairs], np.str_)
    notes = [*unread_tables(folder), *split_note(graphs)]
    arrays |= attempt(read_prepared_cell, folder) or {}
    if graphs.text["smiles"]:
        arrays |= attempt(_read_molecules, graphs, attempt) or {}
    elif index is not None:
        read = _typed_graphs if os.path.exists(folder / RELATIONS) else _graphs
        of = End("graph", GRAPHS, index)
        arrays |= attempt(read, folder, of, attempt, notes) or {}
    arrays["notes"] = np.array(notes, dtype=np.str_)
    return {key: found for key, found in arrays.items() if found is not None}


def check_number(number: int, where: str) -> None:
    """Reject too many graphs."""
    if number > MOST_GRAPHS:
        raise DataError(
            f"{where} holds {number:,} graphs, the limit is {MOST_GRAPHS:,}. Split the "
            "file, or leave some out."
        )


class _Nodes(NamedTuple):
    """The nodes of one table: their graphs (n,), and an index of graphs and ids."""

    path: Path
    graph: Array
    index: Any
    x: Array | None
    names: list[str]


def _read_nodes(path: Path, graphs: End, attempt: ErrorCollector) -> _Nodes:
    """Read a table of nodes of all graphs."""
    ids = ("graph", "id")
    columns = (*ids, "split")
    nodes = read_table(path, ids, columns, needs_features=False)
    names = nodes.feature_names
    misplaced = [name for name in names if name.partition(":")[0] in OF_GRAPHS]
    misplaced += ["split"] if nodes.text["split"] else []
    misplaced += nodes.parts.values()
    if misplaced:
        raise DataError(
            f'{nodes.where}: column "{clip(misplaced[0])}" is about graphs: it belongs '
            "into graphs.csv. If it is a feature of nodes, rename it."
        )
    graph = graphs.rows_in(nodes)
    own = _index(graph, nodes.text["id"])
    is_faulty = own.duplicated() | (own.get_level_values(1) == "")
    if is_faulty.any():
        row = int(is_faulty.argmax())
        name = nodes.text["id"][row]
        fault = "is already taken by a line above" if name else "is empty"
        raise DataError(
            f'{nodes.where}, line {nodes.lines[row]}: the id "{clip(name)}" of a node of '
            f'graph "{clip(nodes.text["graph"][row])}" {fault}. Give each node of a graph '
            "its own id."
        )
    return _Nodes(path, graph, own, nodes.features(attempt), names)


def _index(graph: Array, ids: Sequence[str]) -> Any:
    """Return the pandas index of some nodes by graph and id."""
    import pandas as pd

    return pd.MultiIndex.from_arrays([graph, ids])


def _graphs(
    folder: Path, graphs: End, attempt: ErrorCollector, notes: list[str]
) -> dict[str, Array | None]:
    """Return nodes and edges, with the nodes in the order of ``graphs.csv``."""
    nodes = _read_nodes(folder / NODES, graphs, attempt)
    order = np.argsort(nodes.graph, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    arrays: dict[str, Array | None] = {
        "graph_of_node": nodes.graph[order],
        "x": None if nodes.x is None else nodes.x[order],
        "feature_names": np.array(nodes.names, dtype=np.str_),
    }
    found = attempt(_edges, folder / EDGES, graphs, (nodes, nodes))
    if found is not None:
        pairs, table = found
        features = table.features(attempt) if table.feature_names else None
        arrays |= {"edges": rank[pairs], "edge_attr": features}
        arrays["edge_attr_names"] = np.array(table.feature_names, dtype=np.str_)
    return arrays


def _typed_graphs(
    folder: Path, graphs: End, attempt: ErrorCollector, notes: list[str]
) -> dict[str, Array | None]:
    """Return the nodes of all kinds and the edges of all relations, with their schema."""
    names = read_typed_names(folder, Wanted(), attempt, is_set=True)
    if names is None:
        return {}
    schema, listed = names
    nodes = {
        kind: attempt(_read_nodes, folder / "nodes" / f"{kind}.csv", graphs, attempt)
        for kind in schema.node_types
    }
    relations = {}
    for one in listed:
        source, target = nodes[one.triple[0]], nodes[one.triple[2]]
        if source is None or target is None:
            continue
        found = attempt(_edges, folder / one.file, graphs, (source, target))
        if found is not None:
            relations[one.triple] = edges = torch.from_numpy(found[0].T)
            unread = found[1].feature_names
            notes += edge_notes(one.file, unread, edges, len(target.graph))
    if attempt.problems:
        return {}
    held = {kind: one for kind, one in nodes.items() if one is not None}
    union, batch = typed_union(
        folder.name,
        {
            kind: NodeTable(torch.from_numpy(one.x), tuple(one.names))
            for kind, one in held.items()
            if one.x is not None
        },
        relations,
        {kind: torch.from_numpy(one.graph) for kind, one in held.items()},
        schema.private,
    )
    arrays: dict[str, Array | None] = graph_arrays(union.graph({}))
    return arrays | {
        **schema_arrays(union.schema),
        "graph_of_node": batch.numpy(),
        "feature_names": np.array(union.feature_names, dtype=np.str_),
    }


def _edges(
    path: Path, graphs: End, nodes: tuple[_Nodes, _Nodes]
) -> tuple[Array, Table]:
    """Return the edges (M, 2) as rows of the tables of their two ends, and their table."""
    ends = ("source", "target")
    table = read_table(path, ("graph", *ends), ("graph", *ends, *NOT_READ))
    if unread := [name for name in NOT_READ if table.text[name]]:
        raise DataError(
            f"{table.where}: column {unread[0]} would not be read: only whole graphs are "
            "labelled. Remove it, or rename it if it is a feature of the edges."
        )
    graph = graphs.rows_in(table)
    found = np.stack(
        [
            of.index.get_indexer(_index(graph, table.text[end]))
            for end, of in zip(ends, nodes, strict=True)
        ],
        axis=1,
    )
    if len(unknown := np.argwhere(found < 0)):
        row, side = unknown[0].tolist()
        raise DataError(
            f"{table.where}, line {table.lines[row]}: {ends[side]} "
            f'"{clip(table.text[ends[side]][row])}" is not an id of a node of graph '
            f'"{clip(table.text["graph"][row])}" in {nodes[side].path.name}. Correct it, '
            "or add a line there."
        )
    return found, table


MOST_FAULTS = 20
"""Faulty rows that are reported."""
SKELETON = 14
"""Characters of an InChIKey that stand for atoms and bonds, without stereo marks."""
CHARGES = (-5, 6)
"""Charges of an atom that torch-geometric's table holds."""


def _read_molecules(graphs: Table, attempt: ErrorCollector) -> dict[str, Array]:
    """Convert the column ``smiles`` to the arrays of a set; name 20 faulty rows."""
    for name in (NODES, EDGES):
        if os.path.exists(graphs.path.parent / name):
            raise DataError(
                f"{graphs.where} has a column smiles, from which the graphs are made: "
                f"{name} would not be read. Remove the column or the table."
            )
    parse = _smiles_reader(graphs.where)
    from torch_geometric.utils.smiles import e_map, x_map

    # numbers of all molecules one after the other: a million molecules fit in memory
    atoms, kinds, ends, sizes = bytearray(), bytearray(), array("q"), array("q")
    faults, start = [], 0
    for line, smiles in graphs.cells("smiles"):
        molecule = parse(smiles)
        if isinstance(molecule, str):
            faults.append(f"{graphs.where}, line {line}: {molecule}")
            continue
        codes, pairs, of_bonds = molecule
        atoms += codes.astype(np.uint8).tobytes()
        kinds += of_bonds.astype(np.uint8).tobytes()
        ends.frombytes((pairs + start).tobytes())
        sizes.append(len(codes))
        start += len(codes)
    for fault in faults[:MOST_FAULTS]:
        attempt.add(fault)
    if faults:
        raise DataError(
            f"{graphs.where}: {len(faults):,} of {len(graphs.lines):,} SMILES cannot be "
            "used. flower-fgl check-graph --drop-unreadable FOLDER writes the others to a "
            "new folder."
        )
    columns, names = _columns(atoms, x_map)
    of_bonds, bond_names = _columns(kinds, e_map)
    edge_attr = np.zeros((len(of_bonds), len(bond_names)), dtype=np.uint8)
    rows = np.arange(len(of_bonds))
    for column in of_bonds.T:
        edge_attr[rows, column] = 1
    return {
        "graph_of_node": np.repeat(np.arange(len(sizes)), sizes),
        "edges": np.frombuffer(ends, dtype=np.int64).reshape(-1, 2),
        "smiles": np.array(graphs.text["smiles"], dtype=object),
        "x_indptr": np.arange(len(columns) + 1) * columns.shape[1],
        "x_indices": columns.ravel(),
        "x_data": np.ones(columns.size, dtype=np.float32),
        "x_shape": np.array([len(columns), len(names)]),
        "feature_names": np.array(names, dtype=np.str_),
        "edge_attr": edge_attr,
        "edge_attr_names": np.array(bond_names, dtype=np.str_),
    }


def _smiles_reader(where: str) -> Callable[[str], tuple[Array, Array, Array] | str]:
    """Return a function that converts one SMILES, or says what is wrong with it.

    It returns atoms (n, 9), bonds (2m, 2) and their kinds (2m, 3).
    """
    chemistry = _rdkit(where)
    # torch-geometric takes a second to load, and only molecules need it
    from torch_geometric.utils import from_smiles

    def read(smiles: str) -> tuple[Array, Array, Array] | str:
        try:
            data = from_smiles(smiles)
        except ValueError as error:
            low, high = CHARGES
            atoms = chemistry.MolFromSmiles(smiles).GetAtoms()
            charges = [atom.GetFormalCharge() for atom in atoms]
            if odd := [charge for charge in charges if not low <= charge <= high]:
                return (
                    f"the charge {odd[0]:+d} of an atom is outside −{-low} … {high}. "
                    "Remove the line."
                )
            return (
                f'"{clip(smiles)}" has an atom or bond that torch-geometric does not know '
                f"({clip(error)}). Remove the line."
            )
        if not data.num_nodes:  # also of text that rdkit cannot read
            return (
                f'"{clip(smiles)}" is not a SMILES that rdkit can read. Correct it, or '
                "remove the line."
            )
        return data.x.numpy(), data.edge_index.numpy().T, data.edge_attr.numpy()

    return read


def _rdkit(where: str) -> Any:
    """Return ``rdkit.Chem`` without its log; raise an error if it is missing."""
    try:
        from rdkit import Chem, rdBase
    except ImportError as error:
        raise DataError(
            f"{where} has a column smiles, which needs rdkit. Install it: pip install "
            "'flower-fgl[molecules]'."
        ) from error
    rdBase.DisableLog("rdApp.*")
    return Chem


def _columns(
    codes: bytearray, kinds: Mapping[str, Sequence[Any]]
) -> tuple[Array, list[str]]:
    """Return the columns (n, k) that are 1 in each row of k categories, and all names."""
    first = np.cumsum([0, *(len(values) for values in kinds.values())])[:-1]
    names = [f"{key}={value}" for key, values in kinds.items() for value in values]
    columns = np.frombuffer(codes, dtype=np.uint8).reshape(-1, len(kinds))
    return columns + first.astype(np.int32), names


def inchikeys(smiles: Sequence[str], where: str, *, is_skeleton: bool) -> list[str]:
    """Return the InChIKey of each molecule, or the part of it that stands for its skeleton.

    The SMILES have been read before. A molecule for which there is no InChIKey, such as one
    with an unknown atom, has its canonical SMILES instead. ``where`` names the file.
    """
    chemistry, length = _rdkit(where), SKELETON if is_skeleton else None
    return [
        chemistry.MolToInchiKey(molecule)[:length] or chemistry.MolToSmiles(molecule)
        for molecule in map(chemistry.MolFromSmiles, smiles)
    ]


def drop_unreadable(folder: Path, out: Path) -> int:
    """Copy the tables of a set without rows whose SMILES cannot be used; count these."""
    source = folder / GRAPHS
    rows = csv_rows(source, ("id", "smiles"))
    _, header = next(rows)
    parse, place = _smiles_reader(show_path(source)), header.index("smiles")
    found = [row for _, row in rows]
    kept = [row for row in found if not isinstance(parse(row[place].strip()), str)]
    try:
        out.mkdir(parents=True)
        for table in folder.glob("*.csv"):
            shutil.copyfile(table, out / table.name)
        with open(out / GRAPHS, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *kept])
    except OSError as error:
        raise DataError(
            f"Cannot write to {show_path(out)}: {error.strerror}. Choose a new folder."
        ) from error
    return len(found) - len(kept)
