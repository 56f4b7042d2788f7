"""Locations of each dataset's files below the data folder, and their readers by name.

The locations are those of the library loaders: a folder that these filled works unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flower_fgl.datasets.sources.raw_readers import Raw

__all__ = ["AIFB", "COLLAB", "FOLD_PPI", "Layout", "few_shot_tables", "filtered"]
__all__ += ["ogb", "ogb_graphs", "ogb_typed", "pyg", "tu", "twitch"]

PLANETOID = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
SAINT = ("adj_full.npz", "feats.npy", "class_map.json", "role.json")
SAINT_URL = "https://drive.google.com/drive/folders/1zycmmDES39zVlbVCYs88JTJ1Wm5FbfLz"
SHCHUR = "https://github.com/shchur/gnn-benchmark/tree/master/data/npz"
PLATONOV = "https://github.com/yandex-research/heterophilous-graphs/tree/main/data"
PTG = "https://graphmining.ai/datasets/ptg/"
GEOM_GCN = (
    "https://github.com/graphdml-uiuc-jlu/geom-gcn",
    *("out1_node_feature_label.txt", "out1_graph_edges.txt"),
    *(f"{{name}}_split_0.6_0.2_{number}.npz" for number in range(10)),
)
OGB_PARTS = ("train", "valid", "test")
TU_PARTS = ("A", "graph_indicator", "graph_labels")
RAW_FOLDERS = {"WikipediaNetwork": "geom_gcn/raw"}
LOADERS = {
    # the files have another name than the loader
    "Actor": tuple(part.replace("{name}", "film") for part in GEOM_GCN),
    "Airports": (
        "https://github.com/leoribeiro/struc2vec/tree/master/graph",
        *("{name}-airports.edgelist", "labels-{name}-airports.txt"),
    ),
    "Amazon": (SHCHUR, "amazon_electronics_{low}.npz"),
    "CitationFull": (
        "https://github.com/abojchevski/graph2gauss/tree/master/data",
        "{name}.npz",
    ),
    "Coauthor": (SHCHUR, "ms_academic_{low:.3}.npz"),
    "DeezerEurope": (f"{PTG}deezer_europe.npz", "deezer_europe.npz"),
    "FacebookPagePage": (f"{PTG}facebook.npz", "facebook.npz"),
    "Flickr": (SAINT_URL, *SAINT),
    "HeterophilousGraphDataset": (PLATONOV, "{name}.npz"),
    "LastFMAsia": (f"{PTG}lastfm_asia.npz", "lastfm_asia.npz"),
    "Planetoid": (
        "https://github.com/kimiyoung/planetoid/tree/master/data",
        *(f"ind.{{low}}.{part}" for part in PLANETOID),
    ),
    "Reddit": (
        "https://data.dgl.ai/dataset/reddit.zip",
        *("reddit_data.npz", "reddit_graph.npz"),
    ),
    "Reddit2": (SAINT_URL, *SAINT),
    "Twitch": (f"{PTG}twitch/{{name}}.npz", "{name}.npz"),
    "WebKB": GEOM_GCN,
    "WikipediaNetwork": GEOM_GCN,
    "WikiCS": (
        "https://github.com/pmernyei/wiki-cs-dataset/tree/master/dataset",
        "data.json",
    ),
    "Yelp": (SAINT_URL, *SAINT),
}
"""Address and raw files of the classes of ``torch_geometric.datasets``."""

# References, not imports: listing the datasets must not load torch.
LIBRARY = "flower_fgl.datasets.sources.library_loaders:"
RAW = "flower_fgl.datasets.sources.raw_readers:"


@dataclass(frozen=True)
class Layout:
    """One form in which a dataset may lie on disk.

    ``folder`` is below the data folder, and ``files`` are required in it. ``reader`` is a
    reference ``module:function``, which :meth:`read` imports, so that the table of
    datasets loads without torch; ``arguments`` are its keywords. ``leaf`` is the name
    that a library loader gives ``folder`` below its root, ``.`` if both are the same; the
    reader then gets a root it may write to. With ``None`` it gets ``folder`` itself and
    only reads. ``url`` says where the files are published, and ``can_download`` that the
    reader downloads missing ones. If it ``is_partial``, parts of the published dataset
    are absent, so its statistics differ.
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
        """Import the reader and read ``folder``, or the root of a library loader."""
        return resolve_name(self.reader)(root, **self.arguments)  # type: ignore[no-any-return]


def pyg(
    loader: str, name: str = "", *, folders: tuple[str, ...] = (), **settings: bool
) -> tuple[Layout, ...]:
    """Return the layouts of a node dataset of ``torch_geometric.datasets``.

    The default folder is ``<loader>``, or ``<loader>/<name>``; others may follow it.
    """
    url, *files = (part.format(name=name, low=name.lower()) for part in LOADERS[loader])
    folder = RAW_FOLDERS.get(loader, "raw")
    raw = tuple(f"{folder}/{file}" for file in files)
    named: dict[str, str | bool] = {"name": name} if name else {}
    arguments = {"loader": loader, **settings, **named}
    reader, first = f"{LIBRARY}pyg_nodes", f"{loader}/{name}" if name else loader
    return tuple(
        Layout(folder, raw, reader, arguments, name or ".", url, True)
        for folder in (first, *folders)
    )


def filtered(name: str) -> tuple[Layout, ...]:
    """Return the layout ``HeterophilousGraphDataset/<name>/raw/<name>.npz``."""
    folder = f"HeterophilousGraphDataset/{name}"
    return _library("filtered_nodes", folder, (f"raw/{name}.npz",), PLATONOV, name=name)


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
    raw = [f"raw/{part}.csv.gz" for part in parts]
    raw = ["raw/data.npz", "raw/node-label.npz"] if is_binary else raw
    return _ogb("ogb_nodes", name, f"nodeproppred/{archive}", raw, is_large=is_large)


def ogb_typed(name: str, archive: str, kind: str) -> tuple[Layout, ...]:
    """Return the layout of a typed graph of OGB, whose nodes of one kind have classes.

    ``ogbn_…/raw`` has a folder for each relation. The files are downloaded by hand.
    """
    tables = ["num-node-dict", "triplet-type-list", f"node-feat/{kind}/node-feat"]
    parts = [f"raw/{part}" for part in (*tables, f"node-label/{kind}/node-label")]
    parts += [f"split/time/{kind}/{part}" for part in OGB_PARTS]
    files = [f"{part}.csv.gz" for part in parts]
    where = f"nodeproppred/{archive}"
    return _ogb("ogb_typed", name, where, files, is_large=True, release=2, kind=kind)


def ogb_graphs(
    name: str, archive: str, *, is_large: bool = False
) -> tuple[Layout, ...]:
    """Return the layout of a graph dataset of OGB: ``ogbg_…/raw`` and ``…/split``.

    Arguments as in :func:`ogb`.
    """
    is_molecule = "-mol" in name
    parts = ["edge", "num-node-list", "num-edge-list", "graph-label"]
    parts = [f"raw/{part}" for part in parts + ["node-feat"] * is_molecule]
    split = "scaffold" if is_molecule else "species"
    files = [*parts, *(f"split/{split}/{part}" for part in OGB_PARTS)]
    files = [f"{part}.csv.gz" for part in files]
    where = f"graphproppred/{'csv_mol_download/' * is_molecule}{archive}"
    return _ogb("ogb_graphs", name, where, files, is_large=is_large, split=split)


def _ogb(
    reader: str,
    name: str,
    archive: str,
    files: list[str],
    *,
    is_large: bool,
    release: int = 1,
    **arguments: str,
) -> tuple[Layout, ...]:
    """Return the layout of a dataset of OGB with the marker of its release."""
    files = [f"RELEASE_v{release}.txt", *files]
    url = f"http://snap.stanford.edu/ogb/data/{archive}.zip"
    folder = name.replace("-", "_")
    return _library(
        reader, folder, files, url, can_download=not is_large, name=name, **arguments
    )


def _library(
    reader: str,
    folder: str,
    files: Iterable[str],
    url: str,
    *,
    can_download: bool = True,
    **arguments: str,
) -> tuple[Layout, ...]:
    """Return the layout of a reader that gets the folder above that of the dataset."""
    leaf, reader = folder.rpartition("/")[2], f"{LIBRARY}{reader}"
    return (Layout(folder, tuple(files), reader, arguments, leaf, url, can_download),)


def tu(name: str) -> tuple[Layout, ...]:
    """Return the layout of a TU dataset: ``TU/<name>/raw/<name>_A.txt`` etc."""
    files = [f"raw/{name}_{part}.txt" for part in TU_PARTS]
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


COLLAB = (*tu("COLLAB"), Layout("TU/COLLAB", ("COLLAB.npz",), f"{RAW}collab_npz"))
"""COLLAB as a TU dataset, or ``TU/COLLAB/COLLAB.npz``."""
FOLD_PPI = Layout(
    "FoldPPI",
    ("fold_ppi.npz",),
    f"{RAW}fold_ppi",
    url="https://github.com/mims-harvard/G-Meta (fold_PPI; convert it as described in "
    "the docstring of flower_fgl.datasets.sources.raw_readers.fold_ppi)",
)
"""Fold-PPI, converted from G-Meta."""
AIFB = Layout(
    "AIFB-hetero",
    ("aifb.npz",),
    f"{RAW}aifb",
    url="https://github.com/cynricfu/FedHGN (data/aifb-hetero; convert it to the arrays of "
    "flower_fgl.datasets.sources.raw_readers.aifb)",
)
"""AIFB, converted from DGL's file."""
