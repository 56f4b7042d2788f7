"""Splits: which labelled nodes (or graphs) of a client train, validate and test."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_fgl.core.errors import ConfigError, DataError

__all__ = [
    "PUBLIC",
    "SPLITS",
    "SplitFractions",
    "parse_split",
    "published_split",
    "split_nodes",
]

PUBLIC = "public"
"""Name of the split that a data set was published with."""

SPLITS = ("train", "val", "test")
"""Names of the masks of a split."""

MAX_DENOMINATOR = 10**6


class SplitFractions(NamedTuple):
    """Shares of a class that train, validate and test; they add up to 1."""

    train: Fraction
    val: Fraction
    test: Fraction


def parse_split(text: str) -> SplitFractions | None:
    """Read a split such as ``"20/40/40"``.

    Parameters
    ----------
    text : str
        Percentages ``train/val/test``, or ``train/test`` without validation, that add
        up to 100; or ``"public"``.

    Returns
    -------
    SplitFractions or None
        Exact shares; None for ``"public"``, the split a data set was published with.

    Raises
    ------
    ConfigError
        If the text is neither, or the percentages do not add up to 100, or nothing
        would train or test.
    """
    if text.strip() == PUBLIC:
        return None
    percent = [part.strip() for part in text.split("/")]
    is_number = all(re.fullmatch(r"\d+(\.\d+)?", part) for part in percent)
    if len(percent) not in (2, 3) or not is_number:
        raise ConfigError(
            f'split = "{text}" is not understood. Give percentages train/val/test as '
            f'in "20/40/40", train/test as in "90/10", or "{PUBLIC}".'
        )
    shares = [Fraction(part) / 100 for part in percent]
    if len(shares) == 2:
        shares.insert(1, Fraction(0))
    if sum(shares) != 1:
        raise ConfigError(
            f'split = "{text}" adds up to {float(100 * sum(shares)):g}, not to 100. '
            'Give percentages as in "20/40/40".'
        )
    if not (shares[0] and shares[2]):
        raise ConfigError(
            f'split = "{text}" leaves nothing to train on or to test on. Give both a '
            'percentage above 0, as in "20/40/40".'
        )
    return SplitFractions(*shares)


def split_nodes(
    labels: Tensor | NDArray[np.int64],
    fractions: Sequence[Fraction | float],
    *,
    generator: np.random.Generator,
) -> dict[str, Tensor]:
    """Split the nodes (or graphs) of one client class by class.

    Of the n_c shuffled nodes of a class, the first ⌊r_train · n_c⌋ train, the next
    ⌊r_val · n_c⌋ validate and the rest test, so that a rare class may have no training
    node.

    Parameters
    ----------
    labels : Tensor or ndarray of shape (n,), int64
        Classes; -1 where unknown.
    fractions : sequence of three Fraction or float in [0, 1]
        Shares r_train, r_val and r_test, adding up to 1. A float stands for the simple
        fraction it was written as: 0.3 is 3/10, so that no floor falls short.
    generator : numpy.random.Generator
        Source of the shuffle.

    Returns
    -------
    dict of str to Tensor of shape (n,), bool
        Disjoint masks ``train``, ``val`` and ``test``, which cover the nodes of known
        class.

    Raises
    ------
    ValueError
        If the shares are negative or do not add up to 1.
    """
    shares = [Fraction(share).limit_denominator(MAX_DENOMINATOR) for share in fractions]
    if len(shares) != 3 or min(shares) < 0 or sum(shares) != 1:
        raise ValueError(
            "fractions must be three shares of at least 0 that add up to 1, got "
            f"{tuple(map(float, fractions))}."
        )
    label = np.asarray(labels)
    known = generator.permutation(np.flatnonzero(label >= 0))
    node = known[np.argsort(label[known], kind="stable")]  # shuffled, class by class
    counts = np.bincount(label[node])
    start = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.arange(len(node)) - start  # place within the class
    num_train, num_val = (
        counts * share.numerator // share.denominator for share in shares[:2]
    )
    last_train = np.repeat(num_train, counts)
    last_val = np.repeat(num_train + num_val, counts)
    split = np.full(len(label), -1)
    split[node] = np.where(rank < last_train, 0, np.where(rank < last_val, 1, 2))
    return {name: torch.from_numpy(split == i) for i, name in enumerate(SPLITS)}


def published_split(
    masks: Mapping[str, Tensor], node_ids: Tensor | NDArray[np.int64]
) -> dict[str, Tensor]:
    """Restrict the split a data set was published with to one client's nodes.

    Parameters
    ----------
    masks : mapping of str to Tensor of shape (N,), bool
        ``NodeDataset.masks``.
    node_ids : Tensor or ndarray of shape (n,), int64
        Nodes of the client.

    Returns
    -------
    dict of str to Tensor of shape (n,), bool
        Masks ``train``, ``val`` and ``test`` of the client.

    Raises
    ------
    DataError
        If the data set was published without one of the three.
    """
    missing = [name for name in SPLITS if name not in masks]
    if missing:
        raise DataError(
            f'split = "{PUBLIC}" was asked for, but the data set was published without '
            f'a {" or ".join(missing)} mask. Give percentages as in "20/40/40".'
        )
    nodes = torch.as_tensor(node_ids)
    return {name: masks[name][nodes] for name in SPLITS}
