"""Table of datasets: name → citation, task, split, published statistics, files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import Table, version_of
from flower_fgl.datasets.sources import raw_paths
from flower_fgl.datasets.sources.layout import Layout

__all__ = ["GRAPH_SPLIT", "MORRIS", "SOURCES", "Source", "Statistics"]


@dataclass(frozen=True)
class Statistics:
    """Published statistics of a dataset; ``None`` if no reliable number is published.

    Parameters
    ----------
    nodes : int, optional
        Nodes N, of all graphs together.
    edges : int, optional
        Undirected edges E, without self-loops and duplicates.
    features : int, optional
        Feature width d.
    classes : int, optional
        Classes C.
    entries : int, optional
        Columns of ``edge_index`` in the published files, before the conversion to an
        undirected simple graph.
    graphs : int, optional
        Graphs (graph classification) or networks (Fold-PPI).
    """

    nodes: int | None = None
    edges: int | None = None
    features: int | None = None
    classes: int | None = None
    entries: int | None = None
    graphs: int | None = None


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


GRAPH_SPLIT = "90/0/10"
"""Default split of graph classification: train and test, no validation."""


def _nodes(
    title: str,
    split: str,
    where: tuple[Layout, ...],
    statistics: tuple[int, int | None, int, int],
    *,
    entries: int | None = None,
    networks: int | None = None,
) -> Source:
    """Make the row of a node dataset from its (N, E, d, C)."""
    published = Statistics(*statistics, entries=entries, graphs=networks)
    return Source(title, "node", split, published, where)


def _graphs(
    name: str,
    where: tuple[Layout, ...],
    num_graphs: int,
    statistics: tuple[int, int, int, int],
) -> Source:
    """Make the row of a graph dataset from its number of graphs and (N, E, d, C)."""
    published = Statistics(*statistics, graphs=num_graphs)
    return Source(f"{name}, {MORRIS}", "graph", GRAPH_SPLIT, published, where)


YANG = "citation network, Yang et al., ICML 2016"
SHCHUR = "Shchur et al., arXiv:1811.05868"
BOJCHEVSKI = "Bojchevski and Günnemann, ICLR 2018"
HU = "Hu et al., NeurIPS 2020"
MORRIS = "TU Dortmund, Morris et al., arXiv:2007.08663"

_OWN: dict[str, Source] = {
    "synthetic": Source(
        "Contextual stochastic block model, see datasets/sources/synthetic.py",
        "node",
        "20/40/40",
        Statistics(),
    ),
    "cora": _nodes(
        f"Cora, {YANG}", "20/40/40", raw_paths.planetoid("Cora"), (2708, 5278, 1433, 7)
    ),
    "citeseer": _nodes(
        f"CiteSeer, {YANG}",
        "20/40/40",
        raw_paths.planetoid("CiteSeer"),
        (3327, 4552, 3703, 6),
    ),
    "pubmed": _nodes(
        f"PubMed, {YANG}",
        "20/40/40",
        raw_paths.planetoid("PubMed"),
        (19717, 44324, 500, 3),
    ),
    "cora-full": _nodes(
        f"Cora with 70 classes, {BOJCHEVSKI}",
        "20/40/40",
        raw_paths.citation_full("cora", "CoraFull/cora", "CoraFull"),
        (19793, 63421, 8710, 70),
    ),
    "cora-ml": _nodes(
        f"Machine-learning papers of Cora, {BOJCHEVSKI}",
        "20/40/40",
        raw_paths.citation_full("cora_ml"),
        (2995, 8158, 2879, 7),
    ),
    "citeseer-full": _nodes(
        f"CiteSeer, {BOJCHEVSKI}",
        "20/40/40",
        raw_paths.citation_full("citeseer"),
        (4230, 5337, 602, 6),
    ),
    "dblp": _nodes(
        f"DBLP, {BOJCHEVSKI}",
        "20/40/40",
        raw_paths.citation_full("dblp"),
        (17716, 52867, 1639, 4),
    ),
    "computers": _nodes(
        f"Amazon co-purchases, computers, {SHCHUR}",
        "20/40/40",
        raw_paths.amazon("Computers"),
        (13752, 245861, 767, 10),
    ),
    "photo": _nodes(
        f"Amazon co-purchases, photo, {SHCHUR}",
        "20/40/40",
        raw_paths.amazon("Photo"),
        (7650, 119081, 745, 8),
    ),
    "cs": _nodes(
        f"Co-authors in computer science, {SHCHUR}",
        "20/40/40",
        raw_paths.coauthor("CS"),
        (18333, 81894, 6805, 15),
    ),
    "physics": _nodes(
        f"Co-authors in physics, {SHCHUR}",
        "20/40/40",
        raw_paths.coauthor("Physics"),
        (34493, 247962, 8415, 5),
    ),
    "flickr": _nodes(
        "Flickr images, Zeng et al., ICLR 2020",
        "60/20/20",
        raw_paths.graph_saint("Flickr"),
        (89250, None, 500, 7),
        entries=899756,
    ),
    "reddit": _nodes(
        "Reddit posts, Hamilton et al., NIPS 2017; needs about 10 GB of memory",
        "80/10/10",
        raw_paths.reddit(),
        (232965, 57307946, 602, 41),
    ),
    "reddit2": _nodes(
        "Reddit posts, fewer edges, Zeng et al., ICLR 2020",
        "65/10/25",
        raw_paths.graph_saint("Reddit2"),
        (232965, None, 602, 41),
        entries=23213838,
    ),
    "ogbn-arxiv": _nodes(
        f"arXiv computer science papers, {HU}",
        "60/20/20",
        raw_paths.ogb("ogbn-arxiv", "arxiv"),
        (169343, 1157799, 128, 40),
        entries=1166243,
    ),
    "ogbn-products": _nodes(
        f"Amazon products, {HU}; needs about 16 GB of memory",
        "10/5/85",
        raw_paths.ogb("ogbn-products", "products", is_large=True),
        (2449029, 61859012, 100, 47),
        entries=123718280,
    ),
    "ogbn-papers100m": _nodes(
        f"Papers with citations, {HU}; needs about 256 GB of memory",
        "public",
        raw_paths.ogb(
            "ogbn-papers100M", "papers100M-bin", is_binary=True, is_large=True
        ),
        (111059956, None, 128, 172),
        entries=1615685872,
    ),
    "mutag": _graphs("MUTAG", raw_paths.tu("MUTAG"), 188, (3371, 3721, 7, 2)),
    "proteins": _graphs(
        "PROTEINS", raw_paths.tu("PROTEINS"), 1113, (43471, 81044, 3, 2)
    ),
    "nci1": _graphs("NCI1", raw_paths.tu("NCI1"), 4110, (122747, 132753, 37, 2)),
    "imdb-binary": _graphs(
        "IMDB-BINARY",
        raw_paths.tu("IMDB-BINARY"),
        1000,
        (19773, 96531, 0, 2),
    ),
    "collab": _graphs("COLLAB", raw_paths.collab(), 5000, (372474, 12286079, 0, 3)),
    "amazon-clothing": _nodes(
        "Amazon co-purchases for few-shot learning, Ding et al., CIKM 2020",
        "20/40/40",
        raw_paths.few_shot_tables("Amazon_clothing"),
        (24919, 91680, 9034, 77),
    ),
    "dblp-few-shot": _nodes(
        "DBLP with 137 classes for few-shot learning, Ding et al., CIKM 2020",
        "20/40/40",
        raw_paths.few_shot_tables("dblp"),
        (40672, None, 7202, 137),
    ),
    "fold-ppi": _nodes(
        "Protein networks of 144 tissues, Huang and Zitnik, NeurIPS 2020",
        "20/40/40",
        raw_paths.fold_ppi_arrays(),
        (274606, None, 512, 29),
        networks=144,
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
``tu:NAME``."""
