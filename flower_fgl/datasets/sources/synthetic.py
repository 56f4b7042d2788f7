"""Contextual stochastic block model: a graph for experiments without a download.

It follows Deshpande et al. (NeurIPS 2018) and adds latent communities with their own
preferred classes, so that its parts have different class distributions.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.seeds import torch_generator
from flower_fgl.core.settings import SyntheticSettings
from flower_fgl.core.targets import NUMBERS, Target
from flower_fgl.datasets.client_graph import NodeDataset
from flower_fgl.datasets.transforms.canonical import (
    compact_features,
    sorted_distinct,
    undirected_simple,
)
from flower_fgl.datasets.transforms.typed import NodeTable, TypedTarget, typed_dataset

__all__ = ["SyntheticSettings", "synthetic_dataset", "with_kinds", "with_numbers"]

Ints = np.ndarray[Any, np.dtype[np.int64]]

BLOCK_SHARE = 0.9
"""Share of edges inside one block, before duplicates are redrawn."""
BLOCK_DRAWS = 20
"""Draws after which edges may end anywhere."""
MAX_DENSITY = 0.5
"""Maximum edge density among node pairs of the same class, and of different classes."""


def synthetic_dataset(settings: SyntheticSettings, seed: int = 0) -> NodeDataset:
    """Sample a graph with communities, classes and noisy features, equal for equal seeds.

    ``seed`` must be equal on every machine of a federation. Of E = round(N · degree / 2)
    distinct edges, round(E · homophily) lie inside a class; both counts are exact. A
    ConfigError says that the edges exceed half of the node pairs, either of the same class
    or of different classes.

    Notes
    -----
    1. Node v has a uniform one of B latent communities b(v) of N/B nodes each, and class c
       with probability (1 - block_skew) / C + block_skew · [c = b(v) mod C].
    2. An edge starts at a uniform node u and ends at a uniform node of the same class
       (or of another one), in u's block with probability 0.9 and anywhere otherwise.
       Self-loops and duplicate edges are redrawn, so the counts are exact.
    3. x_v = m_c + feature_noise · z with m_c, z standard normal.
    """
    num_nodes, num_classes = settings.nodes, settings.classes
    rng = np.random.default_rng(seed)
    block = rng.permutation(np.arange(num_nodes) % settings.blocks)
    y = rng.integers(num_classes, size=num_nodes)
    is_favoured = rng.random(num_nodes) < settings.block_skew
    y[is_favoured] = block[is_favoured] % num_classes

    num_edges = round(num_nodes * settings.degree / 2)
    num_same = round(num_edges * settings.homophily)
    _check_density(y, num_classes, num_same, num_edges - num_same)
    scopes = (_Scope(y, block, num_classes), _Scope(y, block * 0, num_classes))
    keys = [
        _draw_edges(rng, scopes, wanted, is_same=is_same)
        for wanted, is_same in ((num_same, True), (num_edges - num_same, False))
    ]
    pairs = np.stack(np.divmod(np.concatenate(keys), num_nodes))
    means = rng.standard_normal((num_classes, settings.features), dtype=np.float32)
    x = rng.standard_normal((num_nodes, settings.features), dtype=np.float32)
    x *= np.float32(settings.feature_noise)
    x += means[y]
    return NodeDataset(
        name="synthetic",
        x=compact_features(torch.from_numpy(x)),
        edge_index=undirected_simple(torch.from_numpy(pairs), num_nodes),
        y=torch.from_numpy(y),
        target=Target.classes([str(c) for c in range(num_classes)]),
    )


def with_numbers(dataset: NodeDataset, seed: int) -> NodeDataset:
    """Give each node a number that follows from its features and its neighbours'.

    ``y_i = w · Σ_j x_j / sqrt(d_i + 1) + 0.5 ξ`` over node i and its d_i neighbours, with
    w of variance 1/d and ξ standard normal, drawn from the seed.
    """
    draw = np.random.default_rng([seed, 1])
    weight = draw.standard_normal(dataset.num_features) / np.sqrt(dataset.num_features)
    row, column = dataset.edge_index
    share = dataset.x.to_dense().double() @ torch.from_numpy(weight)
    total = share.index_add(0, row, share[column])
    degree = torch.bincount(row, minlength=dataset.num_nodes)
    noise = torch.from_numpy(draw.standard_normal(dataset.num_nodes))
    values = total / (degree + 1).double().sqrt() + 0.5 * noise
    return replace(
        dataset,
        y=torch.zeros(dataset.num_nodes, dtype=torch.int64),
        target=Target(NUMBERS, ("target",)),
        targets=values[:, None],
    )


def with_kinds(dataset: NodeDataset, seed: int) -> NodeDataset:
    """Return a typed graph for backbones of typed graphs, drawn from the seed of the data.

    The nodes become the kind ``item``, which is predicted, and their edges the relation
    ``near``, listed once. Nodes of the kind ``group``, one for ten items and without
    features, belong to one class each; the relation ``in`` joins an item to a group of its
    class with a probability of 0.8, else to any.
    """
    generator = torch_generator(seed, 0, 0, "synthetic kinds")
    number, classes = dataset.num_nodes, dataset.target.width
    groups = max(2 * classes, number // 10)
    per_class = groups // classes
    wanted = torch.where(
        torch.rand(number, generator=generator) < 0.8,
        dataset.y,
        torch.randint(0, classes, (number,), generator=generator),
    )
    place = torch.randint(0, per_class, (number,), generator=generator)
    near = dataset.edge_index[:, dataset.edge_index[0] < dataset.edge_index[1]]
    tables = {
        "group": NodeTable(torch.empty(groups, 0)),
        "item": NodeTable(dataset.x, dataset.feature_names),
    }
    relations = {
        ("item", "in", "group"): torch.stack(
            [torch.arange(number), wanted + classes * place]
        ),
        ("item", "near", "item"): near,
    }
    target = TypedTarget(dataset.y, dataset.target, dataset.masks, dataset.targets)
    return typed_dataset(dataset.name, tables, relations, "item", target)


class _Scope:
    """Nodes sorted by (group, class); samples the other ends of edges in a group."""

    def __init__(self, y: Ints, group: Ints, num_classes: int) -> None:
        cell = group * num_classes + y
        self.order = np.argsort(cell, kind="stable")
        num_groups = int(group.max(initial=0)) + 1
        cells = np.bincount(cell, minlength=num_groups * num_classes)
        cell_start = np.concatenate([[0], np.cumsum(cells)])
        self.own_start, self.own_size = cell_start[cell], cells[cell]
        self.start = cell_start[group * num_classes]
        self.size = cell_start[(group + 1) * num_classes] - self.start

    def partners(self, rng: np.random.Generator, u: Ints, *, is_same: bool) -> Ints:
        """Sample one neighbour per node of ``u``; the node itself if there is none."""
        own_start, own_size = self.own_start[u], self.own_size[u]
        start = own_start if is_same else self.start[u]
        size = own_size if is_same else self.size[u] - own_size
        place = start + (rng.random(len(u)) * size).astype(np.int64)
        if not is_same:
            place += own_size * (place >= own_start)  # skip the node's own class
        place = np.where(size > 0, place, 0)
        return np.where(size > 0, self.order[place], u)


def _draw_edges(
    rng: np.random.Generator,
    scopes: tuple[_Scope, _Scope],
    wanted: int,
    *,
    is_same: bool,
) -> Ints:
    """Sample ``wanted`` distinct edges, encoded as ``lower · N + higher``."""
    num_nodes = len(scopes[0].order)
    found = np.empty(0, dtype=np.int64)
    draws = 0
    # this ends: _check_density leaves half of the pairs free, but blocks may be full
    while missing := wanted - len(found):
        block_share = BLOCK_SHARE if draws < BLOCK_DRAWS else 0.0
        draws += 1
        u = rng.integers(num_nodes, size=missing + missing // 8 + 16)
        v = scopes[1].partners(rng, u, is_same=is_same)
        is_inside = rng.random(len(u)) < block_share
        v[is_inside] = scopes[0].partners(rng, u[is_inside], is_same=is_same)
        keys = (np.minimum(u, v) * num_nodes + np.maximum(u, v))[u != v]
        keys = sorted_distinct(keys)
        keys = keys[~np.isin(keys, found, assume_unique=True, kind="sort")]
        found = np.concatenate([found, rng.permutation(keys)[:missing]])
    return found


def _check_density(y: Ints, num_classes: int, num_same: int, num_other: int) -> None:
    """Reject a graph that is too dense for rejection sampling."""
    sizes = np.bincount(y, minlength=num_classes)
    same_pairs = int((sizes * (sizes - 1) // 2).sum())
    other_pairs = len(y) * (len(y) - 1) // 2 - same_pairs
    for kind, wanted, pairs in (
        ("inside a class", num_same, same_pairs),
        ("between classes", num_other, other_pairs),
    ):
        if wanted > MAX_DENSITY * pairs:
            raise ConfigError(
                f"synthetic: requested {wanted:,} edges {kind}, but {len(y):,} nodes "
                f"have only {pairs:,} such pairs, and at most half may be edges. Lower "
                "synthetic.degree or raise synthetic.nodes."
            )
