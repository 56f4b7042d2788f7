"""Splits of a client's labelled nodes (or graphs) into train, val and test masks."""

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
from flower_fgl.core.seeds import numpy_generator

__all__ = [
    "PUBLIC",
    "SPLITS",
    "SplitFractions",
    "draw_split",
    "parse_split",
    "published_split",
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

    The shares are exact; the result is ``None`` for ``"public"``, the split published
    with a dataset. A ConfigError says that the text has another form, the percentages
    do not add up to 100, or the training or test share is 0.
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


def strata(
    y: Tensor,
    targets: Tensor | None,
    num_bins: int = 0,
    fractions: Sequence[Fraction] = (Fraction(1, 5),),
) -> Tensor:
    """Return groups of items that a stratified split treats alike, (I,), int64.

    They are the classes ``y``, of several labels or numbers the known items, and of a
    single number bins of about equal size: ``num_bins``, by default at most 10 and as many
    as the smallest of the ``fractions`` has items, so that none gets an empty part: one
    for 5 known values with 20/40/40, for 10 with 80/10/10. Unknown items have -1.
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
    fractions: Sequence[Fraction | float],
    *,
    generator: np.random.Generator,
) -> dict[str, Tensor]:
    """Split the nodes (or graphs) of one client class by class.

    Of the n_c shuffled nodes of a class, the first ⌊r_train · n_c⌋ are for training, the
    next ⌊r_val · n_c⌋ for validation and the rest for testing. A rare class may therefore
    have no training node. ``labels`` (n,) are -1 if unknown.

    Parameters
    ----------
    fractions : sequence of three Fraction or float in [0, 1]
        Shares r_train, r_val and r_test, adding up to 1. A float is read as the simple
        fraction it was written as, e.g. 0.3 as 3/10, so rounding down is exact.

    Returns
    -------
    dict of str to Tensor of shape (n,), bool
        Disjoint masks ``train``, ``val`` and ``test`` that cover the nodes of known class.

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
    rank = np.arange(len(node)) - start  # position within the class
    num_train, num_val = (
        counts * share.numerator // share.denominator for share in shares[:2]
    )
    last_train = np.repeat(num_train, counts)
    last_val = np.repeat(num_train + num_val, counts)
    split = np.full(len(label), -1)
    split[node] = np.where(rank < last_train, 0, np.where(rank < last_val, 1, 2))
    return {name: torch.from_numpy(split == i) for i, name in enumerate(SPLITS)}


def draw_split(
    y: Tensor,
    targets: Tensor | None,
    fractions: Sequence[Fraction],
    *,
    seed: int,
    partition_id: int = 0,
) -> dict[str, Tensor]:
    """Split the items of a client by :func:`split_nodes` of their :func:`strata`."""
    labels = strata(y, targets, fractions=fractions)
    generator = numpy_generator(seed, 0, partition_id, "split")
    return split_nodes(labels, fractions, generator=generator)


def published_split(
    masks: Mapping[str, Tensor], node_ids: Tensor | NDArray[np.int64]
) -> dict[str, Tensor]:
    """Restrict the published split of a dataset to one client's nodes ``node_ids`` (n,).

    A DataError names the masks without which the dataset was published.
    """
    if missing := [name for name in SPLITS if name not in masks]:
        raise DataError(
            f'split = "{PUBLIC}" needs a published split, but the dataset was published '
            f'without a {" or ".join(missing)} mask. Give percentages as in "20/40/40".'
        )
    nodes = torch.as_tensor(node_ids)
    return {name: masks[name][nodes] for name in SPLITS}
