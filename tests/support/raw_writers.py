"""Write one small graph in the raw layouts in which datasets are published."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.io
import scipy.sparse

# One direction of each edge, except for (0, 1). (3, 3) is a self-loop, (4, 5) occurs
# twice and node 11 is isolated: 9 undirected edges remain.
EDGES = np.array(
    [
        *([0, 1], [1, 0], [1, 2], [0, 2], [3, 3], [3, 4], [4, 5], [4, 5]),
        *([5, 6], [7, 8], [9, 10], [10, 7]),
    ]
)
SIMPLE = {(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (5, 6), (7, 8), (9, 10), (7, 10)}
NUM_NODES = 12
LABELS = np.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2])
ROLES = {"tr": [0, 1, 3, 7], "va": [2, 4, 8], "te": [5, 6, 9, 10, 11]}


def features(width: int = 5) -> np.ndarray:
    """Return positive dense features, float32."""
    values = np.random.default_rng(0).random((NUM_NODES, width), dtype=np.float32)
    return values + 1


def bag_of_words(width: int = 80) -> np.ndarray:
    """Return binary features with 5 % ones."""
    rng = np.random.default_rng(1)
    return (rng.random((NUM_NODES, width)) < 0.05).astype(np.float32)


def adjacency() -> scipy.sparse.csr_matrix:
    """Return a matrix with one entry per row of ``EDGES``; duplicates are not merged."""
    row, col = EDGES.T
    indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=NUM_NODES))])
    order = np.argsort(row, kind="stable")
    ones = np.ones(len(row), dtype=np.float32)
    return scipy.sparse.csr_matrix((ones, col[order], indptr), (NUM_NODES, NUM_NODES))


def write_npz_graph(path: Path) -> None:
    """Write the layout of Amazon, Coauthor, CitationFull: two CSR matrices in an npz."""
    path.parent.mkdir(parents=True)
    arrays = {"labels": LABELS}
    for name, matrix in (
        ("adj", adjacency()),
        ("attr", scipy.sparse.csr_matrix(3 * bag_of_words())),
    ):
        arrays |= {
            f"{name}_data": matrix.data,
            f"{name}_indices": matrix.indices,
            f"{name}_indptr": matrix.indptr,
            f"{name}_shape": np.array(matrix.shape),
        }
    np.savez(path, **arrays)


def write_saint(raw: Path, targets: np.ndarray | None = None) -> None:
    """Write the layout of Flickr and Reddit2: the four files of GraphSAINT.

    With ``targets``, of shape (12, T), it is the layout of Yelp.
    """
    raw.mkdir(parents=True)
    adj = adjacency()
    np.savez(
        raw / "adj_full.npz",
        data=adj.data,
        indices=adj.indices,
        indptr=adj.indptr,
        shape=np.array(adj.shape),
    )
    np.save(raw / "feats.npy", features().astype(np.float64))
    labels = LABELS if targets is None else targets
    class_map = {str(i): row for i, row in enumerate(labels.tolist())}
    (raw / "class_map.json").write_text(json.dumps(class_map))
    (raw / "role.json").write_text(json.dumps(ROLES))


def write_reddit(raw: Path) -> None:
    """Write the layout of Reddit: features, labels and node types, and a COO graph."""
    raw.mkdir(parents=True)
    types = np.zeros(NUM_NODES, dtype=np.int64)
    for number, nodes in enumerate(ROLES.values(), start=1):
        types[nodes] = number
    np.savez(
        raw / "reddit_data.npz", feature=features(), label=LABELS, node_types=types
    )
    scipy.sparse.save_npz(raw / "reddit_graph.npz", adjacency().tocoo())


def write_ogb(folder: Path, class_column: str = "") -> None:
    """Write the layout of ogbn-arxiv and ogbn-products: compressed text."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    tables = {
        "edge": EDGES,
        "node-feat": features(),
        "node-label": LABELS[:, None],
        "node_year": np.full((NUM_NODES, 1), 2015),
        "num-node-list": [[NUM_NODES]],
        "num-edge-list": [[len(EDGES)]],
    }
    for name, table in tables.items():
        _write_gz(raw / f"{name}.csv.gz", table)
    split = "sales_ranking" if "products" in folder.name else "time"
    for ogb, ours in (("train", "tr"), ("valid", "va"), ("test", "te")):
        path = folder / "split" / split / f"{ogb}.csv.gz"
        _write_gz(path, np.array(ROLES[ours])[:, None])
    if class_column:
        path = folder / "mapping" / "labelidx2names.csv.gz"
        path.parent.mkdir()
        pd.DataFrame(
            {"label idx": [2, 0, 1], class_column: ["cs.C", "cs.A", "cs.B"]}
        ).to_csv(path, index=False)


def write_mag(folder: Path) -> None:
    """Write the layout of ogbn-mag: 4 kinds of nodes, of which papers have features."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    (folder / "RELEASE_v2.txt").write_text("")
    sizes = {"author": 4, "field_of_study": 3, "institution": 2, "paper": NUM_NODES}
    pd.DataFrame({kind: [size] for kind, size in sizes.items()}).to_csv(
        raw / "num-node-dict.csv.gz", index=False
    )
    relations = {
        ("author", "affiliated_with", "institution"): [[0, 1], [1, 0], [2, 1]],
        ("author", "writes", "paper"): [[3, 11], [0, 2], [0, 2]],
        ("paper", "cites", "paper"): EDGES.tolist(),
        ("paper", "has_topic", "field_of_study"): [[7, 2]],
    }
    for triple, edges in relations.items():
        place = raw / "relations" / "___".join(triple)
        _write_gz(place / "edge.csv.gz", edges)
        _write_gz(place / "num-edge-list.csv.gz", [[len(edges)]])
        _write_gz(place / "edge_reltype.csv.gz", [[0]] * len(edges))
    _write_gz(raw / "triplet-type-list.csv.gz", [*reversed(relations)])
    for part in ("feat", "label"):
        table = {kind: [kind == "paper"] for kind in sizes}
        path = raw / f"nodetype-has-{part}.csv.gz"
        pd.DataFrame(table).to_csv(path, index=False)
    _write_gz(raw / "node-feat" / "paper" / "node-feat.csv.gz", features())
    _write_gz(raw / "node-feat" / "paper" / "node_year.csv.gz", [[2015]] * NUM_NODES)
    _write_gz(raw / "node-label" / "paper" / "node-label.csv.gz", LABELS[:, None])
    for ogb, ours in (("train", "tr"), ("valid", "va"), ("test", "te")):
        path = folder / "split" / "time" / "paper" / f"{ogb}.csv.gz"
        _write_gz(path, np.array(ROLES[ours])[:, None])


def write_proteins(folder: Path, labels: np.ndarray) -> None:
    """Write the layout of ogbn-proteins: attributes of edges, and several labels."""
    write_ogb(folder)
    raw = folder / "raw"
    (raw / "node-feat.csv.gz").unlink()
    (raw / "node_year.csv.gz").rename(raw / "species.csv.gz")
    _write_gz(raw / "edge-feat.csv.gz", np.arange(2 * len(EDGES)).reshape(-1, 2) / 4)
    _write_gz(raw / "node-label.csv.gz", labels)
    (folder / "split" / "time").rename(folder / "split" / "species")


def write_papers100m(folder: Path) -> None:
    """Write the binary layout of ogbn-papers100M, where nodes may have no class."""
    raw = folder / "raw"
    raw.mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    np.savez(
        raw / "data.npz",
        edge_index=EDGES.T,
        num_nodes_list=np.array([NUM_NODES]),
        num_edges_list=np.array([len(EDGES)]),
        node_feat=features(),
        node_year=np.full((NUM_NODES, 1), 2015),
    )
    label = LABELS[:, None].astype(np.float32)
    label[11] = np.nan
    np.savez(raw / "node-label.npz", node_label=label)
    for ogb, ours in (("train", "tr"), ("valid", "va"), ("test", "te")):
        nodes = [node for node in ROLES[ours] if node != 11]
        path = folder / "split" / "time" / f"{ogb}.csv.gz"
        _write_gz(path, np.array(nodes)[:, None])


def _mask(role: str) -> np.ndarray:
    """Return the nodes of a role as a boolean mask."""
    return np.isin(np.arange(NUM_NODES), ROLES[role])


def write_geom_gcn(raw: Path, name: str, *, lists_indices: bool = False) -> None:
    """Write the layout of Geom-GCN: two tables with a header, and ten splits.

    The features of Actor are the indices of the ones, those of other datasets 0 and 1.
    """
    raw.mkdir(parents=True)
    words = bag_of_words(8)
    words[:, 7] = 1
    lines = ["node_id\tfeature\tlabel"]
    for node, row in enumerate(words.astype(int)):
        cells = row.nonzero()[0] if lists_indices else row
        lines.append(f"{node}\t{','.join(map(str, cells))}\t{LABELS[node]}")
    (raw / "out1_node_feature_label.txt").write_text("\n".join(lines) + "\n")
    edges = ["node_id\tnode_id", *(f"{u}\t{v}" for u, v in EDGES)]
    (raw / "out1_graph_edges.txt").write_text("\n".join(edges) + "\n")
    for i in range(10):
        roles = {"train": "tr", "val": "va", "test": "te"}
        if i:  # only the first split is read
            roles = {"train": "te", "val": "va", "test": "tr"}
        masks = {f"{n}_mask": _mask(role).astype(int) for n, role in roles.items()}
        np.savez(raw / f"{name}_split_0.6_0.2_{i}.npz", **masks)


def write_heterophilous(raw: Path, name: str) -> None:
    """Write the layout of Platonov et al.: one npz with ten splits."""
    raw.mkdir(parents=True)
    masks = {
        f"{ours}_masks": np.stack([_mask(first), *[_mask(other)] * 9])
        for ours, first, other in (
            ("train", "tr", "te"),
            ("val", "va", "va"),
            ("test", "te", "tr"),
        )
    }
    np.savez(
        raw / f"{name}.npz",
        node_features=features(),
        node_labels=LABELS,
        edges=EDGES,
        **masks,
    )


def write_airports(raw: Path, name: str) -> None:
    """Write the layout of struc2vec: an edge list and a table of labels."""
    raw.mkdir(parents=True)
    edges = "".join(f"{1000 + u} {1000 + v}\n" for u, v in EDGES)
    (raw / f"{name}-airports.edgelist").write_text(edges)
    labels = "".join(f"{1000 + i} {c}\n" for i, c in enumerate(LABELS))
    (raw / f"labels-{name}-airports.txt").write_text("node label\n" + labels)


def write_rozemberczki(path: Path) -> None:
    """Write the layout of Twitch, LastFM, Deezer and Facebook: three arrays."""
    path.parent.mkdir(parents=True)
    np.savez(path, features=features(), target=LABELS, edges=EDGES)


def write_wiki_cs(raw: Path) -> None:
    """Write the layout of Wiki-CS: one JSON file with twenty splits."""
    raw.mkdir(parents=True)
    links: list[list[int]] = [[] for _ in range(NUM_NODES)]
    for u, v in EDGES:
        links[u].append(int(v))
    splits = [_mask("tr"), *[_mask("te")] * 19]
    data = {
        "features": features().tolist(),
        "labels": LABELS.tolist(),
        "links": links,
        "train_masks": [mask.tolist() for mask in splits],
        "val_masks": [_mask("va").tolist()] * 20,
        "stopping_masks": [_mask("va").tolist()] * 20,
        "test_mask": _mask("te").tolist(),
    }
    (raw / "data.json").write_text(json.dumps(data))


def atoms() -> np.ndarray:
    """Return nine attributes per atom in the ranges of OGB."""
    widths = [119, 5, 12, 12, 10, 6, 6, 2, 2]
    return np.random.default_rng(3).integers(0, widths, (NUM_NODES, 9))


def write_ogb_graphs(
    folder: Path,
    split: str,
    *,
    has_atoms: bool = True,
    labels: object = None,
    targets: Sequence[str] = (),
    bonds: object = None,
) -> None:
    """Write the layout of ogbg-molhiv and ogbg-ppa: graphs of 7, 4 and 1 nodes.

    With ``targets``, the names of the columns of ``labels``, it is that of ogbg-moltox21.
    ``bonds`` are the attributes of the edges.
    """
    (folder / "raw").mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    graph = np.searchsorted([7, 11], EDGES[:, 0], side="right")
    first = np.array([0, 7, 11])
    tables = {
        "edge": EDGES - first[graph][:, None],
        "num-node-list": np.array([[7], [4], [1]]),
        "num-edge-list": np.bincount(graph, minlength=3)[:, None],
        "graph-label": np.array([[0], [1], [0]]) if labels is None else labels,
    }
    tables |= {"node-feat": atoms()} if has_atoms else {}
    tables |= {} if bonds is None else {"edge-feat": bonds}
    for name, table in tables.items():
        _write_gz(folder / "raw" / f"{name}.csv.gz", table)
    if targets:
        table = pd.DataFrame(labels, columns=list(targets))
        (folder / "mapping").mkdir()
        path = folder / "mapping" / "mol.csv.gz"
        table.assign(smiles="C", mol_id="TOX1").to_csv(path, index=False)
    for number, part in enumerate(("train", "valid", "test")):
        _write_gz(folder / "split" / split / f"{part}.csv.gz", [[number]])


def write_few_shot(folder: Path, prefix: str, *, has_train: bool = True) -> None:
    """Write GPN's layout: a network, and tables of the base and the novel classes."""
    folder.mkdir(parents=True)
    lines = "".join(f"{u}\t{v}\n" for u, v in EDGES)
    (folder / f"{prefix}_network").write_text(lines)
    published = np.array([4.0, 7.0, 9.0])[LABELS]
    words = scipy.sparse.csc_matrix(2.0 * bag_of_words())
    parts = {"test": LABELS == 1}
    if has_train:
        parts["train"] = LABELS != 1
    for part, is_in in parts.items():
        index = np.random.default_rng(2).permutation(np.flatnonzero(is_in))
        scipy.io.savemat(
            folder / f"{prefix}_{part}.mat",
            {
                "Index": index[None, :],
                "Attributes": words[index],
                "Label": published[index][:, None],
            },
        )


def write_tu(
    folder: Path, name: str, *, node_labels: bool = True, attributes: bool = False
) -> None:
    """Write TU Dortmund's layout: graphs of 7, 4 and 1 nodes, numbered from 1."""
    raw = folder / name / "raw"
    raw.mkdir(parents=True)
    edges = EDGES[EDGES[:, 0] != EDGES[:, 1]]
    graph = np.repeat([1, 2, 3], [7, 4, 1])
    both = np.concatenate([edges, edges[:, ::-1]]) + 1
    tables = {"A": both, "graph_indicator": graph[:, None]}
    tables["graph_labels"] = np.array([[-1], [1], [-1]])
    if node_labels:
        tables["node_labels"] = (LABELS + 3)[:, None]
    if attributes:
        tables["node_attributes"] = features(2)
    for part, table in tables.items():
        rows = "\n".join(", ".join(str(value) for value in row) for row in table)
        (raw / f"{name}_{part}.txt").write_text(rows + "\n")


def write_collab(path: Path) -> None:
    """Write the graphs of :func:`write_tu` as ``COLLAB.npz``."""
    path.parent.mkdir(parents=True)
    pairs = np.array(sorted(SIMPLE))
    graph = np.searchsorted([7, 11], pairs[:, 0], side="right")
    first = np.array([0, 7, 11])
    np.savez(
        path,
        num_nodes=np.array([7, 4, 1], dtype=np.int32),
        y=np.array([0, 1, 0], dtype=np.int8),
        edge_ptr=np.concatenate([[0], np.cumsum(np.bincount(graph, minlength=3))]),
        edge_u=(pairs[:, 0] - first[graph]).astype(np.int16),
        edge_v=(pairs[:, 1] - first[graph]).astype(np.int16),
    )


class PickledGraph:
    """Picklable replacement for a DGL graph, with ``edges()``."""

    def __init__(self, edges: np.ndarray) -> None:
        self._edges = edges

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        return self._edges[:, 0], self._edges[:, 1]


def write_g_meta(folder: Path) -> None:
    """Write the layout of G-Meta: pickled graphs, features and labels of 3 networks."""
    folder.mkdir(parents=True)
    first = np.array([0, 7, 11, 12])
    network = np.searchsorted([7, 11], EDGES[:, 0], side="right")
    graphs = [PickledGraph(EDGES[network == g] - first[g]) for g in range(3)]
    (folder / "graph_dgl.pkl").write_bytes(pickle.dumps(graphs))
    values = np.empty(3, dtype=object)
    for g in range(3):
        values[g] = features()[first[g] : first[g + 1]]
    np.save(folder / "features.npy", values, allow_pickle=True)
    names = {}
    for node in range(NUM_NODES - 1):  # the last node has no category
        g = int(np.searchsorted(first, node, side="right")) - 1
        names[f"{g}_{node - first[g]}"] = ["a.1", "b.1", "c.2"][LABELS[node]]
    (folder / "label.pkl").write_bytes(pickle.dumps(names))


def _write_gz(path: Path, table: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(table).to_csv(path, header=False, index=False, compression="gzip")
