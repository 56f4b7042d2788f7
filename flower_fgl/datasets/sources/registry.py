"""Table of datasets: name → citation, task, split, published statistics, files."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import Table, version_of
from flower_fgl.core.settings import NUMBER_DATASETS, TARGETS
from flower_fgl.datasets.sources import raw_paths as at
from flower_fgl.datasets.sources.raw_paths import Layout

__all__ = ["GRAPH_SPLIT", "MORRIS", "SOURCES", "TWITCH", "Source", "Statistics"]


@dataclass(frozen=True)
class Statistics:
    """Published statistics of a dataset; ``None`` if no reliable number is published."""

    nodes: int | None = None  # N, of all graphs together
    edges: int | None = None  # undirected, without self-loops and duplicates
    features: int | None = None  # width d
    classes: int | None = None  # C
    entries: int | None = None  # columns of ``edge_index`` in the published files
    graphs: int | None = None  # of a set, or networks (Fold-PPI)
    targets: int | None = None  # labels T, if an item may have several at once


@dataclass(frozen=True)
class Source:
    """One dataset.

    Parameters
    ----------
    title : str
        Content and citation.
    task : {"node", "graph"}
        Unit of classification.
    split : str
        Default split: train/val/test percentages per client and class, or ``public``.
    statistics : Statistics
        Compared with the files at every load.
    layouts : tuple of Layout
        Possible locations of its files, with their readers; empty for ``synthetic``.
    loader : str or callable
        Of a dataset of another package, instead of ``layouts``: ``module:function``, or
        the function. It takes no argument and returns a ``torch_geometric.data.Data``
        with one graph, a list of them for graph classification, or a
        :class:`NodeDataset` or :class:`GraphDataset`.
    version : str
        Changes with the data, so that stored partitions of other data are not used; of an
        installed package, its name and version.
    """

    title: str
    task: Literal["node", "graph"]
    split: str
    statistics: Statistics
    layouts: tuple[Layout, ...] = ()
    loader: str | Callable[[], Any] = ""
    version: str = ""


NODE_SPLIT = "20/40/40"
"""Default split of node datasets."""
GRAPH_SPLIT = "90/0/10"
"""Default split of graph classification: train and test, no validation."""


def _nodes(
    title: str,
    where: tuple[Layout, ...],
    statistics: tuple[int, int | None, int, int],
    *,
    split: str = NODE_SPLIT,
    entries: int | None = None,
    networks: int | None = None,
    targets: int | None = None,
) -> Source:
    """Make the row of a node dataset from its (N, E, d, C)."""
    published = Statistics(
        *statistics, entries=entries, graphs=networks, targets=targets
    )
    return Source(title, "node", split, published, where)


def _graphs(
    name: str,
    num_graphs: int,
    statistics: tuple[int, int, int, int],
    where: tuple[Layout, ...] = (),
) -> Source:
    """Make the row of a TU dataset from its number of graphs and (N, E, d, C)."""
    published = Statistics(*statistics, graphs=num_graphs)
    where = where or at.tu(name)
    return Source(f"{name}, {MORRIS}", "graph", GRAPH_SPLIT, published, where)


def _ogb_graphs(
    name: str, num_graphs: int, features: int, classes: int | None, *, archive: str
) -> Source:
    """Make the row of a graph dataset of OGB, whose split is published."""
    kind = "Species of a protein network" if name == "ogbg-ppa" else "Molecules"
    targets = TARGETS[name].number if name in TARGETS else None
    targets = 1 if name in NUMBER_DATASETS else targets
    published = Statistics(
        features=features, classes=classes, graphs=num_graphs, targets=targets
    )
    where = at.ogb_graphs(name, archive, is_large=name == "ogbg-ppa")
    return Source(f"{kind}, {HU}", "graph", "public", published, where)


YANG = "citation network, Yang et al., ICML 2016"
SHCHUR = "Shchur et al., arXiv:1811.05868"
BOJCHEVSKI = "Bojchevski and Günnemann, ICLR 2018"
PEI = "Pei et al., ICLR 2020"
PLATONOV = "Platonov et al., ICLR 2023"
ROZEMBERCZKI = "Rozemberczki et al., 2021 and 2020"
HU = "Hu et al., NeurIPS 2020"
MORRIS = "TU Dortmund, Morris et al., arXiv:2007.08663"

_OWN: dict[str, Source] = {
    "synthetic": Source(
        "Contextual stochastic block model, see datasets/sources/synthetic.py",
        "node",
        "20/40/40",
        Statistics(),
    ),
    "cora": _nodes(f"Cora, {YANG}", at.pyg("Planetoid", "Cora"), (2708, 5278, 1433, 7)),
    "citeseer": _nodes(
        f"CiteSeer, {YANG}", at.pyg("Planetoid", "CiteSeer"), (3327, 4552, 3703, 6)
    ),
    "pubmed": _nodes(
        f"PubMed, {YANG}", at.pyg("Planetoid", "PubMed"), (19717, 44324, 500, 3)
    ),
    "cora-full": _nodes(
        f"Cora with 70 classes, {BOJCHEVSKI}",
        at.pyg("CitationFull", "cora", folders=("CoraFull/cora", "CoraFull")),
        (19793, 63421, 8710, 70),
    ),
    "cora-ml": _nodes(
        f"Machine-learning papers of Cora, {BOJCHEVSKI}",
        at.pyg("CitationFull", "cora_ml"),
        (2995, 8158, 2879, 7),
    ),
    "citeseer-full": _nodes(
        f"CiteSeer, {BOJCHEVSKI}",
        at.pyg("CitationFull", "citeseer"),
        (4230, 5337, 602, 6),
    ),
    "dblp": _nodes(
        f"DBLP, {BOJCHEVSKI}", at.pyg("CitationFull", "dblp"), (17716, 52867, 1639, 4)
    ),
    "computers": _nodes(
        f"Amazon co-purchases, computers, {SHCHUR}",
        at.pyg("Amazon", "Computers"),
        (13752, 245861, 767, 10),
    ),
    "photo": _nodes(
        f"Amazon co-purchases, photo, {SHCHUR}",
        at.pyg("Amazon", "Photo"),
        (7650, 119081, 745, 8),
    ),
    "cs": _nodes(
        f"Co-authors in computer science, {SHCHUR}",
        at.pyg("Coauthor", "CS"),
        (18333, 81894, 6805, 15),
    ),
    "physics": _nodes(
        f"Co-authors in physics, {SHCHUR}",
        at.pyg("Coauthor", "Physics"),
        (34493, 247962, 8415, 5),
    ),
    "flickr": _nodes(
        "Flickr images, Zeng et al., ICLR 2020",
        at.pyg("Flickr"),
        (89250, None, 500, 7),
        split="60/20/20",
        entries=899756,
    ),
    "reddit": _nodes(
        "Reddit posts, Hamilton et al., NIPS 2017; needs about 10 GB of memory",
        at.pyg("Reddit"),
        (232965, 57307946, 602, 41),
        split="80/10/10",
    ),
    "reddit2": _nodes(
        "Reddit posts, fewer edges, Zeng et al., ICLR 2020",
        at.pyg("Reddit2"),
        (232965, None, 602, 41),
        split="65/10/25",
        entries=23213838,
    ),
    "yelp": _nodes(
        "Yelp reviewers, Zeng et al., ICLR 2020; 100 targets; needs about 10 GB of "
        "memory",
        at.pyg("Yelp"),
        (716847, None, 300, 2),
        split="75/10/15",
        entries=13954819,
        targets=100,
    ),
    "actor": _nodes(
        f"Actors that occur on the same page, {PEI}",
        at.pyg("Actor"),
        (7600, None, 932, 5),
        split="48/32/20",
        entries=30019,
    ),
    "chameleon": _nodes(
        f"Wikipedia pages about chameleons, {PEI}; has duplicate nodes",
        at.pyg("WikipediaNetwork", "chameleon"),
        (2277, None, 2325, 5),
        split="48/32/20",
        entries=36101,
    ),
    "squirrel": _nodes(
        f"Wikipedia pages about squirrels, {PEI}; has duplicate nodes",
        at.pyg("WikipediaNetwork", "squirrel"),
        (5201, None, 2089, 5),
        split="48/32/20",
        entries=217073,
    ),
    "chameleon-filtered": _nodes(
        f"Chameleon without duplicate nodes, {PLATONOV}",
        at.filtered("chameleon_filtered"),
        (890, 8854, 2325, 5),
        split="48/32/20",
    ),
    "squirrel-filtered": _nodes(
        f"Squirrel without duplicate nodes, {PLATONOV}",
        at.filtered("squirrel_filtered"),
        (2223, 46998, 2089, 5),
        split="48/32/20",
    ),
    **{
        name: _nodes(
            f"Web pages of a university, {PEI}",
            at.pyg("WebKB", name),
            (nodes, None, 1703, 5),
            split="48/32/20",
            entries=entries,
        )
        for name, nodes, entries in (
            ("cornell", 183, 298),
            ("texas", 183, 325),
            ("wisconsin", 251, 515),
        )
    },
    **{
        name: _nodes(
            f"{title}, {PLATONOV}",
            at.pyg("HeterophilousGraphDataset", name.replace("-", "_")),
            statistics,
            split="50/25/25",
        )
        for name, title, statistics in (
            ("roman-empire", "Words of an article", (22662, 32927, 300, 18)),
            ("amazon-ratings", "Products and their ratings", (24492, 93050, 300, 5)),
            ("minesweeper", "Cells of a grid with mines", (10000, 39402, 7, 2)),
            ("tolokers", "Workers and bans", (11758, 519000, 10, 2)),
            ("questions", "Users of a forum", (48921, 153540, 301, 2)),
        )
    },
    **{
        f"airports-{name}": _nodes(
            "Flights between airports, Ribeiro et al., KDD 2017; a feature per airport",
            at.pyg("Airports", name),
            (nodes, None, nodes, 4),
        )
        for name, nodes in (("usa", 1190), ("brazil", 131), ("europe", 399))
    },
    **{
        f"twitch-{name}": _nodes(
            f"Streamers of one language, {ROZEMBERCZKI}",
            at.pyg("Twitch", name.upper()),
            (nodes, None, 128, 2),
            entries=entries,
        )
        for name, nodes, entries in (
            ("de", 9498, 315774),
            ("en", 7126, 77774),
            ("es", 4648, 123412),
            ("fr", 6551, 231883),
            ("pt", 1912, 64510),
            ("ru", 4385, 78993),
        )
    },
    "lastfm-asia": _nodes(
        f"Friends on LastFM, {ROZEMBERCZKI}",
        at.pyg("LastFMAsia"),
        (7624, None, 128, 18),
        entries=55612,
    ),
    "deezer-europe": _nodes(
        f"Friends on Deezer, {ROZEMBERCZKI}",
        at.pyg("DeezerEurope"),
        (28281, None, 128, 2),
        entries=185504,
    ),
    "facebook-page-page": _nodes(
        f"Pages that like each other, {ROZEMBERCZKI}",
        at.pyg("FacebookPagePage"),
        (22470, None, 128, 4),
        entries=342004,
    ),
    "wiki-cs": _nodes(
        "Wikipedia articles on computer science, Mernyei and Cangea, 2020",
        at.pyg("WikiCS", is_undirected=True),
        (11701, None, 300, 10),
    ),
    "ogbn-arxiv": _nodes(
        f"arXiv computer science papers, {HU}",
        at.ogb("ogbn-arxiv", "arxiv"),
        (169343, 1157799, 128, 40),
        split="60/20/20",
        entries=1166243,
    ),
    "ogbn-products": _nodes(
        f"Amazon products, {HU}; needs about 16 GB of memory",
        at.ogb("ogbn-products", "products", is_large=True),
        (2449029, 61859012, 100, 47),
        split="10/5/85",
        entries=123718280,
    ),
    "ogbn-papers100m": _nodes(
        f"Papers with citations, {HU}; needs about 256 GB of memory",
        at.ogb("ogbn-papers100M", "papers100M-bin", is_binary=True, is_large=True),
        (111059956, None, 128, 172),
        split="public",
        entries=1615685872,
    ),
    "ogbn-proteins": _nodes(
        f"Proteins of eight species, {HU}; 112 targets; needs about 16 GB of memory",
        at.ogb("ogbn-proteins", "proteins", has_features=False),
        (132534, None, 8, 2),
        split="65/16/19",
        entries=79122504,
        targets=112,
    ),
    "ogbn-mag": _nodes(
        f"Typed graph of papers and their authors, {HU}",
        at.ogb_typed("ogbn-mag", "mag", "paper"),
        (1939743, None, 128, 349),
        split="public",
        entries=21111007,
    ),
    "mutag": _graphs("MUTAG", 188, (3371, 3721, 7, 2)),
    "proteins": _graphs("PROTEINS", 1113, (43471, 81044, 3, 2)),
    "nci1": _graphs("NCI1", 4110, (122747, 132753, 37, 2)),
    "imdb-binary": _graphs("IMDB-BINARY", 1000, (19773, 96531, 0, 2)),
    "collab": _graphs("COLLAB", 5000, (372474, 12286079, 0, 3), at.COLLAB),
    **{
        f"ogbg-{name}": _ogb_graphs(f"ogbg-{name}", *numbers, archive=archive)
        for name, archive, *numbers in (
            ("molhiv", "hiv", 41127, 174, 2),
            ("molbace", "bace", 1513, 174, 2),
            ("molbbbp", "bbbp", 2039, 174, 2),
            ("molclintox", "clintox", 1477, 174, 2),
            ("molmuv", "muv", 93087, 174, 2),
            ("molpcba", "pcba", 437929, 174, 2),
            ("molsider", "sider", 1427, 174, 2),
            ("moltox21", "tox21", 7831, 174, 2),
            ("moltoxcast", "toxcast", 8576, 174, 2),
            ("molesol", "esol", 1128, 174, None),
            ("molfreesolv", "freesolv", 642, 174, None),
            ("mollipo", "lipophilicity", 4200, 174, None),
            ("ppa", "ogbg_ppi_medium", 158100, 0, 37),
        )
    },
    "amazon-clothing": _nodes(
        "Amazon co-purchases for few-shot learning, Ding et al., CIKM 2020",
        at.few_shot_tables("Amazon_clothing"),
        (24919, 91680, 9034, 77),
    ),
    "dblp-few-shot": _nodes(
        "DBLP with 137 classes for few-shot learning, Ding et al., CIKM 2020",
        at.few_shot_tables("dblp"),
        (40672, None, 7202, 137),
    ),
    "fold-ppi": _nodes(
        "Protein networks of 144 tissues, Huang and Zitnik, NeurIPS 2020",
        (at.FOLD_PPI,),
        (274606, None, 512, 29),
        networks=144,
    ),
    "aifb": _nodes(
        "Typed graph of a research institute, Ristoski et al., ISWC 2016",
        (at.AIFB,),
        (7262, None, 0, 4),
        split="public",
        entries=24405,
    ),
}


def _read(name: str, row: object) -> Source:
    """Check a row of another package."""
    if not isinstance(row, Source):
        raise ConfigError(
            "expected a flower_fgl.datasets.sources.registry.Source, got "
            f"{type(row).__name__}"
        )
    if bool(row.layouts) == bool(row.loader):
        raise ConfigError("the Source needs either layouts or a loader")
    return replace(row, version=row.version or version_of("datasets", name))


SOURCES: Table[Source] = Table("datasets", _OWN, _read)
"""All named datasets: ours, then those of other packages; ``find_source`` adds
``tu:NAME`` and ``twitch:NAME``."""

TWITCH = {
    "DE": (9498, 153138),
    "ENGB": (7126, 35324),
    "ES": (4648, 59382),
    "FR": (6549, 112666),
    "PTBR": (1912, 31299),
    "RU": (4385, 37304),
    "TW": (2772, 63462),
}
"""Nodes and edges of the Twitch countries, the owners of one natural federation."""
