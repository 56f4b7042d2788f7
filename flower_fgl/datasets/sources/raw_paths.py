"""Where the files of each data set lie below the data folder, and who reads them.

The places are those of the stock loaders, so that a folder filled by them, or by hand
as their documentation says, can be used as it is.
"""

from __future__ import annotations

from flower_fgl.datasets.sources.download import Layout
from flower_fgl.datasets.sources.library_loaders import ogb_nodes, pyg_nodes, tu_graphs
from flower_fgl.datasets.sources.raw_readers import collab_npz, few_shot, fold_ppi

__all__ = [
    "amazon",
    "citation_full",
    "coauthor",
    "collab",
    "few_shot_tables",
    "fold_ppi_arrays",
    "graph_saint",
    "ogb",
    "planetoid",
    "reddit",
    "tu",
]

PLANETOID_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
SAINT_FILES = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")
OGB_TEXT = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")
TU_PARTS = ("A", "graph_indicator", "graph_labels")


def planetoid(name: str) -> tuple[Layout, ...]:
    """Lay out Planetoid's ``name``: ``Planetoid/<name>/raw/ind.<name>.*``."""
    files = tuple(f"raw/ind.{name.lower()}.{part}" for part in PLANETOID_PARTS)
    read = pyg_nodes("Planetoid", name=name)
    url = "https://github.com/kimiyoung/planetoid/tree/master/data"
    return (Layout(f"Planetoid/{name}", files, read, name, url, can_download=True),)


def amazon(name: str) -> tuple[Layout, ...]:
    """Lay out Amazon's ``name``: ``Amazon/<name>/raw/amazon_electronics_*.npz``."""
    return _npz("Amazon", name, f"amazon_electronics_{name.lower()}.npz")


def coauthor(name: str) -> tuple[Layout, ...]:
    """Lay out Coauthor's ``name``: ``Coauthor/<name>/raw/ms_academic_*.npz``."""
    return _npz("Coauthor", name, f"ms_academic_{name[:3].lower()}.npz")


def citation_full(name: str, *other_folders: str) -> tuple[Layout, ...]:
    """Lay out CitationFull's ``name``: ``CitationFull/<name>/raw/<name>.npz``."""
    return _npz("CitationFull", name, f"{name}.npz", *other_folders)


def _npz(loader: str, name: str, file: str, *other_folders: str) -> tuple[Layout, ...]:
    """Lay out one graph in one ``.npz`` file."""
    read = pyg_nodes(loader, name=name)
    url = "https://github.com/shchur/gnn-benchmark/tree/master/data/npz"
    if loader == "CitationFull":
        url = "https://github.com/abojchevski/graph2gauss/tree/master/data"
    return tuple(
        Layout(folder, (f"raw/{file}",), read, name, url, can_download=True)
        for folder in (f"{loader}/{name}", *other_folders)
    )


def graph_saint(loader: str) -> tuple[Layout, ...]:
    """Lay out a set of GraphSAINT: ``<loader>/raw/adj_full.npz`` and so on."""
    files = tuple(f"raw/{file}" for file in SAINT_FILES)
    url = "https://drive.google.com/drive/folders/1zycmmDES39zVlbVCYs88JTJ1Wm5FbfLz"
    return (Layout(loader, files, pyg_nodes(loader), ".", url, can_download=True),)


def reddit() -> tuple[Layout, ...]:
    """Lay out GraphSAGE's Reddit: ``Reddit/raw/reddit_data.npz`` and its graph."""
    files = ("raw/reddit_data.npz", "raw/reddit_graph.npz")
    url = "https://data.dgl.ai/dataset/reddit.zip"
    return (Layout("Reddit", files, pyg_nodes("Reddit"), ".", url, can_download=True),)


def ogb(
    name: str, archive: str, *, is_binary: bool = False, is_large: bool = False
) -> tuple[Layout, ...]:
    """Lay out an OGB set: ``ogbn_…/raw``, ``ogbn_…/split``, ``ogbn_…/mapping``.

    Parameters
    ----------
    name : str
        Its name at OGB, e.g. ``"ogbn-arxiv"``.
    archive : str
        Name of its zip file, without the ending.
    is_binary : bool
        Whether ``raw`` holds ``.npz`` files instead of compressed text.
    is_large : bool
        Whether it is above 1 GB, where OGB asks on the terminal before it downloads.
        Nobody answers in a worker: such a set has to be fetched by hand.

    Returns
    -------
    tuple of Layout
    """
    raw = ["data.npz", "node-label.npz"]
    if not is_binary:
        raw = [f"{part}.csv.gz" for part in OGB_TEXT]
    folder = name.replace("-", "_")
    files = ("RELEASE_v1.txt", *(f"raw/{file}" for file in raw))
    url = f"http://snap.stanford.edu/ogb/data/nodeproppred/{archive}.zip"
    return (
        Layout(folder, files, ogb_nodes(name), folder, url, can_download=not is_large),
    )


def tu(name: str) -> tuple[Layout, ...]:
    """Lay out a TU set: ``TU/<name>/raw/<name>_A.txt`` and so on."""
    files = tuple(f"raw/{name}_{part}.txt" for part in TU_PARTS)
    url = f"https://www.chrsmrrs.com/graphkerneldatasets/{name}.zip"
    return (Layout(f"TU/{name}", files, tu_graphs(name), name, url, can_download=True),)


def collab() -> tuple[Layout, ...]:
    """Lay out COLLAB: as a TU set, or as ``TU/COLLAB/COLLAB.npz``."""
    return (*tu("COLLAB"), Layout("TU/COLLAB", ("COLLAB.npz",), collab_npz))


def few_shot_tables(prefix: str) -> tuple[Layout, ...]:
    """Lay out a set of GPN: ``FewShot/<prefix>/<prefix>_network`` and two tables.

    They may also lie in ``FewShot`` itself; ``FewShot/<prefix>_partial`` may lack the
    training table.
    """
    network, train, test = (
        f"{prefix}_{part}" for part in ("network", "train.mat", "test.mat")
    )
    whole, partial = few_shot(prefix), few_shot(prefix, is_partial=True)
    url = "https://github.com/kaize0409/GPN_Graph-Few-shot"
    return (
        Layout(f"FewShot/{prefix}", (network, train, test), whole, url=url),
        Layout("FewShot", (network, train, test), whole, url=url),
        Layout(
            f"FewShot/{prefix}_partial",
            (network, test),
            partial,
            url=url,
            is_partial=True,
        ),
    )


def fold_ppi_arrays() -> tuple[Layout, ...]:
    """Lay out Fold-PPI: ``FoldPPI/fold_ppi.npz``, converted from G-Meta's files."""
    url = (
        "https://github.com/mims-harvard/G-Meta (fold_PPI; convert it as the docstring "
        "of flower_fgl.datasets.sources.raw_readers.fold_ppi says)"
    )
    return (Layout("FoldPPI", ("fold_ppi.npz",), fold_ppi, url=url),)
