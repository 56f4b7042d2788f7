"""Splits of a client's labelled nodes (or graphs) into train, val and test masks.

They are random within each class, follow a keyed hash of an identifier, by which equal
items are in one part at every owner, or have K training nodes and 15 queries per class
(FedPANO).
"""

import hashlib
import hmac
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.seeds import numpy_generator
from flower_fgl.datasets.client_graph import Graph
from flower_fgl.datasets.partition.partition import IntArray

__all__ = [
    "PUBLIC",
    "SPLITS",
    "SplitFractions",
    "draw_few_shot",
    "draw_split",
    "edge_keys",
    "few_shot_labels",
    "keyed_split",
    "parse_split",
    "published_split",
    "shares_of",
    "split_nodes",
    "strata",
]


PUBLIC = "public"
"""Name of the split that was published with a dataset."""
SPLITS = ("train", "val", "test")
"""Names of the masks of a split."""
MOST_BINS = 10
"""Bins of a number in a split; each has an item of every part."""
MAX_DENOMINATOR = 10**6


class SplitFractions(NamedTuple):
    """Shares of a class for training, validation and test; they add up to 1."""

    train: Fraction
    val: Fraction
    test: Fraction


def parse_split(text: str) -> SplitFractions | None:
    """Parse percentages ``train/val/test``, or ``train/test`` without validation.

    The shares are exact; the result is ``None`` for ``"public"``.
    """
    if text.strip() == PUBLIC:
        return None
    percent = [part.strip() for part in text.split("/")]
    is_number = all(re.fullmatch(r"\d+(\.\d+)?", part) for part in percent)
    if len(percent) not in (2, 3) or not is_number:
        raise ConfigError(
            f'split = "{text}" is not valid. Give percentages train/val/test as in '
            f'"20/40/40", train/test as in "90/10", or "{PUBLIC}".'
        )
    shares = [Fraction(part) / 100 for part in percent]
    if len(shares) == 2:
        shares.insert(1, Fraction(0))
    if sum(shares) != 1:
        raise ConfigError(
            f'split = "{text}" adds up to {float(100 * sum(shares)):g}, expected 100. '
            'Give percentages as in "20/40/40".'
        )
    if not (shares[0] and shares[2]):
        raise ConfigError(
            f'split = "{text}" has no training or no test nodes. Give both a percentage '
            'above 0, as in "20/40/40".'
        )
    return SplitFractions(*shares)


def shares_of(
    config: RunConfig, default: str, masks: Collection[str] = ()
) -> SplitFractions | None:
    """Return the shares of a run's split, ``None`` for one that was published.

    ``split = "default"`` is that of the ``masks``, if there are any, or ``default``; keyed
    splits replace masks.
    """
    split = config.split
    if split == "default":
        split = PUBLIC if masks and config.split_by in ("auto", "random") else default
    return parse_split(split)


def strata(
    y: Tensor,
    targets: Tensor | None,
    num_bins: int = 0,
    fractions: Sequence[Fraction] = (Fraction(1, 5),),
) -> Tensor:
    """Return groups of items that a stratified split treats alike, (I,), int64.

    They are the classes ``y``, of several labels or numbers the known items, and of a
    single number ``num_bins`` bins of about equal size, by default at most 10 and as many
    as the smallest of the ``fractions`` has items, so that none gets an empty part. Unknown
    items have -1.
    """
    is_number = targets is not None and targets.is_floating_point()
    if targets is None or not is_number or targets.shape[1] != 1:
        return y
    known = y >= 0
    number = int(known.sum())
    least = min(fraction for fraction in fractions if fraction)
    count = num_bins or max(1, min(MOST_BINS, int(number * least)))
    group = torch.full_like(y, -1)
    rank = targets[known, 0].argsort(stable=True).argsort()
    group[known] = rank * count // max(number, 1)
    return group


def split_nodes(
    labels: Tensor | NDArray[np.int64],
    fractions: Sequence[Fraction],
    *,
    generator: np.random.Generator,
) -> dict[str, Tensor]:
    """Split the nodes (or graphs) of one client class by class.

    Of the n_c shuffled nodes of a class, the first ⌊r_train · n_c⌋ are for training, the
    next ⌊r_val · n_c⌋ for validation and the rest for testing. A rare class may therefore
    have no training node. ``labels`` (n,) are -1 if unknown; the masks cover the others. A
    share such as 0.3333333 is read as the simple fraction that it rounds, 1/3.
    """
    shares = [share.limit_denominator(MAX_DENOMINATOR) for share in fractions[:2]]
    label = np.asarray(labels)
    node, rank, counts = _by_class(label, np.flatnonzero(label >= 0), generator)
    num_train, num_val = (
        counts * share.numerator // share.denominator for share in shares
    )
    last_train = np.repeat(num_train, counts)
    last_val = np.repeat(num_train + num_val, counts)
    split = np.full(len(label), -1)
    split[node] = np.where(rank < last_train, 0, np.where(rank < last_val, 1, 2))
    return {name: torch.from_numpy(split == i) for i, name in enumerate(SPLITS)}


def _by_class(
    labels: IntArray, nodes: IntArray, generator: np.random.Generator
) -> tuple[IntArray, IntArray, IntArray]:
    """Shuffle nodes, and sort them by class.

    The place of each node in its class follows, and the number of nodes of each class.
    """
    shuffled = generator.permutation(nodes)
    node = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels[node])
    rank = np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts, counts)
    return node, rank, counts


def draw_split(
    y: Tensor,
    targets: Tensor | None,
    fractions: Sequence[Fraction],
    *,
    seed: int,
    partition_id: int = 0,
    keys: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """Split the items of a client by their identifiers, or at random in their strata."""
    if keys is not None:
        return keyed_split(keys, y >= 0, fractions, seed=seed)
    labels = strata(y, targets, fractions=fractions)
    generator = numpy_generator(seed, 0, partition_id, "split")
    return split_nodes(labels, fractions, generator=generator)


def published_split(
    masks: Mapping[str, Tensor], node_ids: Tensor | NDArray[np.int64]
) -> dict[str, Tensor]:
    """Restrict the published split of a dataset to one client's nodes (n,)."""
    if missing := [name for name in SPLITS if name not in masks]:
        raise DataError(
            f'split = "{PUBLIC}" needs a published split, but the dataset was published '
            f'without a {" or ".join(missing)} mask. Give percentages as in "20/40/40".'
        )
    nodes = torch.as_tensor(node_ids)
    return {name: masks[name][nodes] for name in SPLITS}


BETWEEN = "\u001f"
"""Character between the identifiers of the ends of an edge."""


def keyed_uniform(key: str, seed: int) -> float:
    """Return a number in [0, 1) that only an identifier and ``partition-seed`` determine.

    It is the first 8 bytes (big-endian) of the HMAC-SHA256 of the identifier, stripped and
    NFC-normalized, divided by 2^64. The seed makes draws differ; it hides no identifier.
    """
    text = unicodedata.normalize("NFC", key.strip())
    secret = f"flower-fgl/split/{seed}".encode()
    digest = hmac.digest(secret, text.encode(), hashlib.sha256)
    return int.from_bytes(digest[:8], "big") / 2**64


def keyed_split(
    keys: Iterable[str], known: Tensor, fractions: Sequence[Fraction], *, seed: int
) -> dict[str, Tensor]:
    """Split items of ``known`` label (n,) by :func:`keyed_uniform` of their identifiers.

    Numbers below r_test are test items, those below r_test + r_val validation items, and
    the others training items. So r_val never moves a test item.
    """
    _, r_val, r_test = fractions
    u = torch.tensor([keyed_uniform(key, seed) for key in keys], dtype=torch.float64)
    is_test = u < float(r_test)
    is_val = ~is_test & (u < float(r_test + r_val))
    parts = (~is_test & ~is_val, is_val, is_test)
    return {name: part & known for name, part in zip(SPLITS, parts, strict=True)}


def edge_keys(pairs: Tensor, ids: Sequence[str]) -> list[str]:
    """Return the identifier of each edge (2, M): those of its ends, in sorted order."""
    return [BETWEEN.join(sorted((ids[a], ids[b]))) for a, b in pairs.T.tolist()]


NUM_QUERIES = 15
"""Test nodes per class."""
MORE_THAN = 25
"""A client keeps the classes with more nodes than this."""
MIN_CLASSES = 2
"""Minimum number of classes of a client; with fewer it does not participate."""
MAX_DRAWS = 100
"""Maximum number of attempts to sample candidate classes."""


def eligible_classes(
    labels: IntArray, num_classes: int, candidates: IntArray | None = None
) -> IntArray:
    """Return the classes with more than 25 nodes, Y_i of FedPANO, ascending.

    There are none if fewer than two are eligible, as one class cannot be classified.
    """
    counts = np.bincount(labels[labels >= 0], minlength=num_classes)
    is_kept = counts > MORE_THAN
    if candidates is not None:
        is_kept &= np.isin(np.arange(num_classes), candidates)
    kept = np.flatnonzero(is_kept).astype(np.int64)
    return kept if len(kept) >= MIN_CLASSES else kept[:0]


def draw_candidates(
    labels: IntArray, num_classes: int, *, generator: np.random.Generator
) -> IntArray:
    """Sample ⌊C/3⌋ classes, ascending, for one network, FedPANO's rule for Fold-PPI.

    At least two are eligible, unless 100 attempts find no such sample; the client then does
    not participate.
    """
    for _ in range(MAX_DRAWS):
        sampled = np.sort(
            generator.choice(num_classes, num_classes // 3, replace=False)
        )
        if len(eligible_classes(labels, num_classes, sampled)):
            break
    return sampled


def few_shot_split(
    labels: IntArray, classes: IntArray, shots: int, *, generator: np.random.Generator
) -> dict[str, Tensor]:
    """Sample training and test nodes of each class, FedPANO Sec. 4.1.

    Each of ``classes`` (C_i,) has at least ``shots`` + 15 nodes. In a random order of each
    class, ``train`` (n,) holds the first K = ``shots`` nodes and ``test`` the last 15;
    ``val`` is empty. A larger K samples a superset of the training nodes.
    """
    chosen = np.flatnonzero(np.isin(labels, classes))
    node, rank, counts = _by_class(labels, chosen, generator)
    size = np.repeat(counts, counts)
    masks = {name: np.zeros(len(labels), dtype=np.bool_) for name in SPLITS}
    masks["train"][node[rank < shots]] = True
    masks["test"][node[rank >= size - NUM_QUERIES]] = True
    return {name: torch.from_numpy(mask) for name, mask in masks.items()}


def draw_few_shot(
    labels: Tensor,
    num_classes: int,
    shots: int,
    *,
    has_networks: bool,
    seed: int,
    partition_id: int,
) -> dict[str, Tensor]:
    """Choose a client's classes and sample its few-shot split, FedPANO Sec. 4.1.

    With ``has_networks`` only a third of the classes are candidates, as in Fold-PPI. All
    masks are empty if fewer than two classes are eligible.
    """
    label, candidates = labels.numpy(), None
    if has_networks:
        draw = numpy_generator(seed, 0, partition_id, "candidate classes")
        candidates = draw_candidates(label, num_classes, generator=draw)
    classes = eligible_classes(label, num_classes, candidates)
    draw = numpy_generator(seed, 0, partition_id, "few-shot")
    return few_shot_split(label, classes, shots, generator=draw)


def few_shot_labels(graph: Graph) -> Tensor:
    """Return the classes (N,) with -1 for every node outside all masks."""
    is_used = torch.stack(list(graph.masks.values())).any(dim=0)
    return graph.y.masked_fill(~is_used, -1)
