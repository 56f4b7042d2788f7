"""Locations of each dataset's files below the data folder, and their readers.

The locations are those of the library loaders: a folder that these filled works unchanged.
"""

from __future__ import annotations

from flower_fgl.datasets.sources.layout import Layout

__all__ = [
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
    "planetoid",
    "reddit",
    "rozemberczki",
    "tu",
    "twitch",
    "wiki_cs",
]

PLANETOID_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
SAINT_FILES = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")
OGB_TEXT = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")
OGB_SPLITS = ("train", "valid", "test")
TU_PARTS = ("A", "graph_indicator", "graph_labels")

# References, not imports: listing the datasets must not load torch.
PYG_NODES = "flower_fgl.datasets.sources.library_loaders:pyg_nodes"
FILTERED = "flower_fgl.datasets.sources.library_loaders:filtered_nodes"
OGB_GRAPHS = "flower_fgl.datasets.sources.library_loaders:ogb_graphs"
OGB_NODES = "flower_fgl.datasets.sources.library_loaders:ogb_nodes"
TU_GRAPHS = "flower_fgl.datasets.sources.library_loaders:tu_graphs"
COLLAB_NPZ = "flower_fgl.datasets.sources.raw_readers:collab_npz"
FEW_SHOT = "flower_fgl.datasets.sources.raw_readers:few_shot"
TWITCH = "flower_fgl.datasets.sources.raw_readers:twitch"
FOLD_PPI = "flower_fgl.datasets.sources.raw_readers:fold_ppi"


def planetoid(name: str) -> tuple[Layout, ...]:
    """Return the layout of Planetoid's ``name``: ``Planetoid/<name>/raw/ind.<name>.*``."""
    files = tuple(f"raw/ind.{name.lower()}.{part}" for part in PLANETOID_PARTS)
    url = "https://github.com/kimiyoung/planetoid/tree/master/data"
    return (_pyg("Planetoid", f"Planetoid/{name}", files, url, name=name),)


def amazon(name: str) -> tuple[Layout, ...]:
    """Return the layout of ``Amazon/<name>/raw/amazon_electronics_*.npz``."""
    return _npz("Amazon", name, f"amazon_electronics_{name.lower()}.npz")


def coauthor(name: str) -> tuple[Layout, ...]:
    """Return the layout of ``Coauthor/<name>/raw/ms_academic_*.npz``."""
    return _npz("Coauthor", name, f"ms_academic_{name[:3].lower()}.npz")


def citation_full(name: str, *other_folders: str) -> tuple[Layout, ...]:
    """Return the layouts of ``CitationFull/<name>/raw/<name>.npz``, one per folder."""
    return _npz("CitationFull", name, f"{name}.npz", *other_folders)


def _npz(loader: str, name: str, file: str, *other_folders: str) -> tuple[Layout, ...]:
    """Return the layouts of one graph in one ``.npz`` file, one per folder."""
    url = "https://github.com/shchur/gnn-benchmark/tree/master/data/npz"
    if loader == "CitationFull":
        url = "https://github.com/abojchevski/graph2gauss/tree/master/data"
    return tuple(
        _pyg(loader, folder, (f"raw/{file}",), url, name=name)
        for folder in (f"{loader}/{name}", *other_folders)
    )


def graph_saint(loader: str) -> tuple[Layout, ...]:
    """Return the layout of a GraphSAINT dataset: ``<loader>/raw/adj_full.npz`` etc."""
    files = tuple(f"raw/{file}" for file in SAINT_FILES)
    url = "https://drive.google.com/drive/folders/1zycmmDES39zVlbVCYs88JTJ1Wm5FbfLz"
    return (_pyg(loader, loader, files, url),)


def reddit() -> tuple[Layout, ...]:
    """Return the layout of GraphSAGE's Reddit: ``Reddit/raw/reddit_*.npz``."""
    files = ("raw/reddit_data.npz", "raw/reddit_graph.npz")
    url = "https://data.dgl.ai/dataset/reddit.zip"
    return (_pyg("Reddit", "Reddit", files, url),)


def geom_gcn(loader: str, folder: str, name: str) -> tuple[Layout, ...]:
    """Return the layout of Geom-GCN's tables: ``out1_*.txt`` and ten splits.

    They lie in ``Actor/raw``, ``WebKB/<name>/raw`` and
    ``WikipediaNetwork/<name>/geom_gcn/raw``.
    """
    raw = "geom_gcn/raw" if loader == "WikipediaNetwork" else "raw"
    tables = ("out1_node_feature_label.txt", "out1_graph_edges.txt")
    splits = tuple(f"{name}_split_0.6_0.2_{i}.npz" for i in range(10))
    files = tuple(f"{raw}/{file}" for file in (*tables, *splits))
    url = "https://github.com/graphdml-uiuc-jlu/geom-gcn"
    if loader == "Actor":  # the files have another name than the loader
        return (_pyg(loader, folder, files, url),)
    return (_pyg(loader, f"{folder}/{name}", files, url, name=name),)


def heterophilous(name: str) -> tuple[Layout, ...]:
    """Return the layout ``HeterophilousGraphDataset/<name>/raw/<name>.npz``."""
    folder = f"HeterophilousGraphDataset/{name}"
    files = (f"raw/{name}.npz",)
    url = "https://github.com/yandex-research/heterophilous-graphs/tree/main/data"
    if not name.endswith("_filtered"):
        return (_pyg("HeterophilousGraphDataset", folder, files, url, name=name),)
    arguments = {"name": name}
    return (Layout(folder, files, FILTERED, arguments, name, url, can_download=True),)


def airports(name: str) -> tuple[Layout, ...]:
    """Return the layout ``Airports/<name>/raw/*-airports.*``."""
    files = (f"raw/{name}-airports.edgelist", f"raw/labels-{name}-airports.txt")
    url = "https://github.com/leoribeiro/struc2vec/tree/master/graph"
    return (_pyg("Airports", f"Airports/{name}", files, url, name=name),)


def rozemberczki(loader: str, file: str, name: str = "") -> tuple[Layout, ...]:
    """Return the layout ``<loader>/raw/<file>``, or ``<loader>/<name>/raw/<file>``."""
    folder = f"{loader}/{name}" if name else loader
    url = "https://graphmining.ai/datasets/ptg/" + ("twitch/" * bool(name)) + file
    return (_pyg(loader, folder, (f"raw/{file}",), url, name=name),)


def wiki_cs() -> tuple[Layout, ...]:
    """Return the layout ``WikiCS/raw/data.json``."""
    url = "https://github.com/pmernyei/wiki-cs-dataset/tree/master/dataset"
    layout = _pyg("WikiCS", "WikiCS", ("raw/data.json",), url, is_undirected=True)
    return (layout,)


def _pyg(
    loader: str,
    folder: str,
    files: tuple[str, ...],
    url: str,
    *,
    name: str = "",
    **settings: bool,
) -> Layout:
    """Return the layout of a node dataset of ``torch_geometric.datasets``."""
    arguments: dict[str, str | bool] = {"loader": loader, **settings}
    arguments |= {"name": name} if name else {}
    return Layout(
        folder, files, PYG_NODES, arguments, name or ".", url, can_download=True
    )


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
    raw = ["data.npz", "node-label.npz"]
    if not is_binary:
        parts = [
            part if has_features or part != "node-feat" else "edge-feat"
            for part in OGB_TEXT
        ]
        raw = [f"{part}.csv.gz" for part in parts]
    files = ("RELEASE_v1.txt", *(f"raw/{file}" for file in raw))
    url = f"http://snap.stanford.edu/ogb/data/nodeproppred/{archive}.zip"
    return _ogb(files, OGB_NODES, url, is_large, name=name)


def ogb_graphs(
    name: str, archive: str, *, is_large: bool = False
) -> tuple[Layout, ...]:
    """Return the layout of a graph dataset of OGB: ``ogbg_…/raw`` and ``…/split``.

    Arguments as in :func:`ogb`.
    """
    parts = ["edge", "num-node-list", "num-edge-list", "graph-label"]
    parts += ["node-feat"] if "-mol" in name else []
    split = "scaffold" if "-mol" in name else "species"
    files = ("RELEASE_v1.txt", *(f"raw/{part}.csv.gz" for part in parts))
    files += tuple(f"split/{split}/{part}.csv.gz" for part in OGB_SPLITS)
    place = "csv_mol_download/" if "-mol" in name else ""
    url = f"http://snap.stanford.edu/ogb/data/graphproppred/{place}{archive}.zip"
    return _ogb(files, OGB_GRAPHS, url, is_large, name=name, split=split)


def _ogb(
    files: tuple[str, ...], reader: str, url: str, is_large: bool, **arguments: str
) -> tuple[Layout, ...]:
    """Return the layout of a dataset of OGB."""
    folder = arguments["name"].replace("-", "_")
    can_download = not is_large
    layout = Layout(folder, files, reader, arguments, folder, url, can_download)
    return (layout,)


def tu(name: str) -> tuple[Layout, ...]:
    """Return the layout of a TU dataset: ``TU/<name>/raw/<name>_A.txt`` etc."""
    files = tuple(f"raw/{name}_{part}.txt" for part in TU_PARTS)
    url = f"https://www.chrsmrrs.com/graphkerneldatasets/{name}.zip"
    arguments = {"name": name}
    return (
        Layout(f"TU/{name}", files, TU_GRAPHS, arguments, name, url, can_download=True),
    )


def twitch(name: str) -> tuple[Layout, ...]:
    """Return the layouts of one Twitch country: ``Twitch/raw/musae_<name>_edges.csv`` etc.

    ``owners/Twitch-raw/raw`` is the folder that the experiments on owners name.
    """
    parts = ("edges.csv", "features.json", "target.csv")
    files = tuple(f"musae_{name}_{part}" for part in parts)
    url = "https://github.com/benedekrozemberczki/datasets#twitch-social-networks"
    return tuple(
        Layout(folder, files, TWITCH, {"name": name}, url=url)
        for folder in ("Twitch/raw", "owners/Twitch-raw/raw")
    )


def collab() -> tuple[Layout, ...]:
    """Return the layouts of COLLAB: as a TU dataset, or ``TU/COLLAB/COLLAB.npz``."""
    return (*tu("COLLAB"), Layout("TU/COLLAB", ("COLLAB.npz",), COLLAB_NPZ))


def few_shot_tables(prefix: str) -> tuple[Layout, ...]:
    """Return the layouts of a GPN dataset: ``<prefix>_network`` and two tables.

    The files lie in ``FewShot/<prefix>`` or ``FewShot``, or without the training table
    in ``FewShot/<prefix>_partial``.
    """
    network, train, test = (
        f"{prefix}_{part}" for part in ("network", "train.mat", "test.mat")
    )
    whole: dict[str, str | bool] = {"prefix": prefix}
    url = "https://github.com/kaize0409/GPN_Graph-Few-shot"
    return (
        Layout(f"FewShot/{prefix}", (network, train, test), FEW_SHOT, whole, url=url),
        Layout("FewShot", (network, train, test), FEW_SHOT, whole, url=url),
        Layout(
            f"FewShot/{prefix}_partial",
            (network, test),
            FEW_SHOT,
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
    return (Layout("FoldPPI", ("fold_ppi.npz",), FOLD_PPI, url=url),)
