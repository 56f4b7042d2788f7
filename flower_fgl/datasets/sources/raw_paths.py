"""Locations of each dataset's files below the data folder, and their readers by name.

The locations are those of the library loaders: a folder that these filled works unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

__all__ = [
    "Layout",
    "aifb_arrays",
    "airports",
    "amazon",
    "citation_full",
    "coauthor",
    "collab",
    "few_shot_tables",
    "fold_ppi_arrays",
    "geom_gcn",
    "graph_saint",
    "heterophilous",
    "ogb",
    "ogb_graphs",
    "ogb_typed",
    "planetoid",
    "reddit",
    "rozemberczki",
    "tu",
    "twitch",
    "wiki_cs",
]


PLANETOID_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
SAINT_FILES = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")
TU_PARTS = ("A", "graph_indicator", "graph_labels")
SHCHUR = "https://github.com/shchur/gnn-benchmark/tree/master/data/npz"

# References, not imports: listing the datasets must not load torch.
LIBRARY = "flower_fgl.datasets.sources.library_loaders:"
RAW = "flower_fgl.datasets.sources.raw_readers:"


def planetoid(name: str) -> tuple[Layout, ...]:
    """Return the layout of Planetoid's ``name``: ``Planetoid/<name>/raw/ind.<name>.*``."""
    files = tuple(f"ind.{name.lower()}.{part}" for part in PLANETOID_PARTS)
    url = "https://github.com/kimiyoung/planetoid/tree/master/data"
    return _pyg("Planetoid", f"Planetoid/{name}", files, url, name=name)


def amazon(name: str) -> tuple[Layout, ...]:
    """Return the layout of ``Amazon/<name>/raw/amazon_electronics_*.npz``."""
    file = f"amazon_electronics_{name.lower()}.npz"
    return _pyg("Amazon", f"Amazon/{name}", (file,), SHCHUR, name=name)


def coauthor(name: str) -> tuple[Layout, ...]:
    """Return the layout of ``Coauthor/<name>/raw/ms_academic_*.npz``."""
    file = f"ms_academic_{name[:3].lower()}.npz"
    return _pyg("Coauthor", f"Coauthor/{name}", (file,), SHCHUR, name=name)


def citation_full(name: str, *other_folders: str) -> tuple[Layout, ...]:
    """Return the layouts of ``CitationFull/<name>/raw/<name>.npz``, one per folder."""
    url = "https://github.com/abojchevski/graph2gauss/tree/master/data"
    folders = (f"CitationFull/{name}", *other_folders)
    made = [
        _pyg("CitationFull", at, (f"{name}.npz",), url, name=name) for at in folders
    ]
    return tuple(itertools.chain(*made))


def graph_saint(loader: str) -> tuple[Layout, ...]:
    """Return the layout of a GraphSAINT dataset: ``<loader>/raw/adj_full.npz`` etc."""
    url = "https://drive.google.com/drive/folders/1zycmmDES39zVlbVCYs88JTJ1Wm5FbfLz"
    return _pyg(loader, loader, SAINT_FILES, url)


def reddit() -> tuple[Layout, ...]:
    """Return the layout of GraphSAGE's Reddit: ``Reddit/raw/reddit_*.npz``."""
    files = ("reddit_data.npz", "reddit_graph.npz")
    return _pyg("Reddit", "Reddit", files, "https://data.dgl.ai/dataset/reddit.zip")


def geom_gcn(loader: str, folder: str, name: str) -> tuple[Layout, ...]:
    """Return the layout of Geom-GCN's tables: ``out1_*.txt`` and ten splits.

    They lie in ``Actor/raw``, ``WebKB/<name>/raw`` and
    ``WikipediaNetwork/<name>/geom_gcn/raw``.
    """
    raw = "geom_gcn/raw" if loader == "WikipediaNetwork" else "raw"
    tables = ("out1_node_feature_label.txt", "out1_graph_edges.txt")
    files = (*tables, *(f"{name}_split_0.6_0.2_{i}.npz" for i in range(10)))
    url = "https://github.com/graphdml-uiuc-jlu/geom-gcn"
    if loader == "Actor":  # the files have another name than the loader
        return _pyg(loader, folder, files, url)
    return _pyg(loader, f"{folder}/{name}", files, url, name=name, raw=raw)


def heterophilous(name: str) -> tuple[Layout, ...]:
    """Return the layout ``HeterophilousGraphDataset/<name>/raw/<name>.npz``."""
    loader = "HeterophilousGraphDataset"
    folder, files = f"{loader}/{name}", (f"{name}.npz",)
    url = "https://github.com/yandex-research/heterophilous-graphs/tree/main/data"
    if not name.endswith("_filtered"):
        return _pyg(loader, folder, files, url, name=name)
    return _library("filtered_nodes", folder, (f"raw/{name}.npz",), url, name=name)


def airports(name: str) -> tuple[Layout, ...]:
    """Return the layout ``Airports/<name>/raw/*-airports.*``."""
    files = (f"{name}-airports.edgelist", f"labels-{name}-airports.txt")
    url = "https://github.com/leoribeiro/struc2vec/tree/master/graph"
    return _pyg("Airports", f"Airports/{name}", files, url, name=name)


def rozemberczki(loader: str, file: str, name: str = "") -> tuple[Layout, ...]:
    """Return the layout ``<loader>/raw/<file>``, or ``<loader>/<name>/raw/<file>``."""
    folder = f"{loader}/{name}" if name else loader
    url = "https://graphmining.ai/datasets/ptg/" + ("twitch/" * bool(name)) + file
    return _pyg(loader, folder, (file,), url, name=name)


def wiki_cs() -> tuple[Layout, ...]:
    """Return the layout ``WikiCS/raw/data.json``."""
    url = "https://github.com/pmernyei/wiki-cs-dataset/tree/master/dataset"
    return _pyg("WikiCS", "WikiCS", ("data.json",), url, is_undirected=True)


def _pyg(
    loader: str,
    folder: str,
    files: tuple[str, ...],
    url: str,
    *,
    name: str = "",
    raw: str = "raw",
    **settings: bool,
) -> tuple[Layout, ...]:
    """Return the layout of a node dataset of ``torch_geometric.datasets``."""
    arguments: dict[str, str | bool] = {"loader": loader, **settings}
    arguments |= {"name": name} if name else {}
    files = tuple(f"{raw}/{file}" for file in files)
    reader = f"{LIBRARY}pyg_nodes"
    return (Layout(folder, files, reader, arguments, name or ".", url, True),)


def ogb(
    name: str,
    archive: str,
    *,
    is_binary: bool = False,
    is_large: bool = False,
    has_features: bool = True,
) -> tuple[Layout, ...]:
    """Return the layout of an OGB dataset: ``ogbn_…/raw``, ``…/split``, ``…/mapping``.

    ``archive`` is its zip file without the extension. ``is_binary``: ``raw`` holds ``.npz``
    files instead of compressed text. ``is_large``: above 1 GB, where OGB prompts on the
    terminal before it downloads; this would block a worker, so such a dataset must be
    downloaded by hand. Without ``has_features``, edges have attributes.
    """
    features = "node-feat" if has_features else "edge-feat"
    parts = ("edge", features, "node-label", "num-node-list", "num-edge-list")
    raw = [f"{part}.csv.gz" for part in parts]
    raw = ["data.npz", "node-label.npz"] if is_binary else raw
    files = ("RELEASE_v1.txt", *(f"raw/{file}" for file in raw))
    url = f"http://snap.stanford.edu/ogb/data/nodeproppred/{archive}.zip"
    folder = name.replace("-", "_")
    return _library(
        "ogb_nodes", folder, files, url, can_download=not is_large, name=name
    )


def ogb_typed(name: str, archive: str, kind: str) -> tuple[Layout, ...]:
    """Return the layout of a typed graph of OGB, whose nodes of one kind have classes.

    ``ogbn_…/raw`` has a folder for each relation. The files are downloaded by hand.
    """
    tables = ("num-node-dict", "triplet-type-list", f"node-feat/{kind}/node-feat")
    files = (*tables, f"node-label/{kind}/node-label")
    split = tuple(f"split/time/{kind}/{p}.csv.gz" for p in ("train", "valid", "test"))
    return _library(
        "ogb_typed",
        name.replace("-", "_"),
        ("RELEASE_v2.txt", *(f"raw/{file}.csv.gz" for file in files), *split),
        f"http://snap.stanford.edu/ogb/data/nodeproppred/{archive}.zip",
        can_download=False,
        name=name,
        kind=kind,
    )


def ogb_graphs(
    name: str, archive: str, *, is_large: bool = False
) -> tuple[Layout, ...]:
    """Return the layout of a graph dataset of OGB: ``ogbg_…/raw`` and ``…/split``.

    Arguments as in :func:`ogb`.
    """
    is_molecule = "-mol" in name
    parts = ["edge", "num-node-list", "num-edge-list", "graph-label"]
    parts += ["node-feat"] * is_molecule
    split = "scaffold" if is_molecule else "species"
    files = ("RELEASE_v1.txt", *(f"raw/{part}.csv.gz" for part in parts))
    files += tuple(f"split/{split}/{p}.csv.gz" for p in ("train", "valid", "test"))
    url = "http://snap.stanford.edu/ogb/data/graphproppred/"
    url += f"{'csv_mol_download/' * is_molecule}{archive}.zip"
    return _library(
        "ogb_graphs",
        name.replace("-", "_"),
        files,
        url,
        can_download=not is_large,
        name=name,
        split=split,
    )


def _library(
    reader: str,
    folder: str,
    files: tuple[str, ...],
    url: str,
    *,
    can_download: bool = True,
    **arguments: str,
) -> tuple[Layout, ...]:
    """Return the layout of a reader that gets the folder above that of the dataset."""
    leaf, reader = folder.rpartition("/")[2], f"{LIBRARY}{reader}"
    return (Layout(folder, files, reader, arguments, leaf, url, can_download),)


def tu(name: str) -> tuple[Layout, ...]:
    """Return the layout of a TU dataset: ``TU/<name>/raw/<name>_A.txt`` etc."""
    files = tuple(f"raw/{name}_{part}.txt" for part in TU_PARTS)
    url = f"https://www.chrsmrrs.com/graphkerneldatasets/{name}.zip"
    return _library("tu_graphs", f"TU/{name}", files, url, name=name)


def twitch(name: str) -> tuple[Layout, ...]:
    """Return the layouts of one Twitch country: ``Twitch/raw/musae_<name>_edges.csv`` etc.

    ``owners/Twitch-raw/raw`` is the folder that the experiments on owners name.
    """
    parts = ("edges.csv", "features.json", "target.csv")
    files = tuple(f"musae_{name}_{part}" for part in parts)
    url = "https://github.com/benedekrozemberczki/datasets#twitch-social-networks"
    return tuple(
        Layout(folder, files, f"{RAW}twitch", {"name": name}, url=url)
        for folder in ("Twitch/raw", "owners/Twitch-raw/raw")
    )


def collab() -> tuple[Layout, ...]:
    """Return the layouts of COLLAB: as a TU dataset, or ``TU/COLLAB/COLLAB.npz``."""
    return (*tu("COLLAB"), Layout("TU/COLLAB", ("COLLAB.npz",), f"{RAW}collab_npz"))


def few_shot_tables(prefix: str) -> tuple[Layout, ...]:
    """Return the layouts of a GPN dataset: ``<prefix>_network`` and two tables.

    The files lie in ``FewShot/<prefix>`` or ``FewShot``, or without the training table
    in ``FewShot/<prefix>_partial``.
    """
    files = tuple(f"{prefix}_{part}" for part in ("network", "train.mat", "test.mat"))
    whole: dict[str, str | bool] = {"prefix": prefix}
    url, reader = "https://github.com/kaize0409/GPN_Graph-Few-shot", f"{RAW}few_shot"
    return (
        Layout(f"FewShot/{prefix}", files, reader, whole, url=url),
        Layout("FewShot", files, reader, whole, url=url),
        Layout(
            f"FewShot/{prefix}_partial",
            files[::2],
            reader,
            whole | {"is_partial": True},
            url=url,
            is_partial=True,
        ),
    )


def fold_ppi_arrays() -> tuple[Layout, ...]:
    """Return the layout of Fold-PPI: ``FoldPPI/fold_ppi.npz``, converted from G-Meta."""
    url = (
        "https://github.com/mims-harvard/G-Meta (fold_PPI; convert it as described in "
        "the docstring of flower_fgl.datasets.sources.raw_readers.fold_ppi)"
    )
    return (Layout("FoldPPI", ("fold_ppi.npz",), f"{RAW}fold_ppi", url=url),)


def aifb_arrays() -> tuple[Layout, ...]:
    """Return the layout of AIFB: ``AIFB-hetero/aifb.npz``, converted from DGL's file."""
    url = (
        "https://github.com/cynricfu/FedHGN (data/aifb-hetero; convert it to the arrays of "
        "flower_fgl.datasets.sources.raw_readers.aifb)"
    )
    return (Layout("AIFB-hetero", ("aifb.npz",), f"{RAW}aifb", url=url),)


if TYPE_CHECKING:
    from flower_fgl.datasets.sources.raw_readers import Raw


@dataclass(frozen=True)
class Layout:
    """One form in which a dataset may lie on disk.

    Parameters
    ----------
    folder : str
        Folder below the data folder.
    files : tuple of str
        Required files, relative to ``folder``.
    reader : str
        Reference ``module:function`` to the reader. :meth:`read` imports it, so the
        table of datasets loads without torch.
    arguments : mapping of str to str or bool
        Keyword arguments of the reader, besides its first argument, a folder.
    leaf : str or None
        Name that a library loader gives ``folder`` below its root; ``.`` if root and
        folder are the same. The reader then gets a root it may write to. With ``None``
        the reader gets ``folder`` itself and only reads.
    url : str
        Where the files are published.
    can_download : bool
        Whether the reader downloads missing files.
    is_partial : bool
        Whether parts of the published dataset are absent, so its statistics differ.
    """

    folder: str
    files: tuple[str, ...]
    reader: str
    arguments: Mapping[str, str | bool] = field(default_factory=dict)
    leaf: str | None = None
    url: str = ""
    can_download: bool = False
    is_partial: bool = False

    def read(self, root: Path) -> Raw:
        """Import the reader and read ``folder``, or the root of a library loader.

        Readers raise any kind of error.
        """
        return resolve_name(self.reader)(root, **self.arguments)  # type: ignore[no-any-return]
