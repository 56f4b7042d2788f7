"""Split by a keyed hash of an identifier: equal items are in one part at every owner."""

from __future__ import annotations

import hashlib
import hmac
import unicodedata
from collections.abc import Iterable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from flower_fgl.datasets.splits.split import SPLITS

__all__ = ["edge_keys", "keyed_split", "keyed_uniform"]

BETWEEN = "\u001f"
"""Character between the identifiers of the ends of an edge."""


def keyed_uniform(key: str, seed: int) -> float:
    """Return a number in [0, 1) that only an identifier and ``partition-seed`` determine.

    It is the first 8 bytes (big-endian) of the HMAC-SHA256 of the identifier, divided
    by 2^64. The identifier, e.g. an account number or an InChIKey, is stripped and
    NFC-normalized; capital letters count. The seed makes draws differ; it hides no
    identifier.
    """
    text = unicodedata.normalize("NFC", key.strip())
    secret = f"flower-fgl/split/{seed}".encode()
    digest = hmac.digest(secret, text.encode(), hashlib.sha256)
    return int.from_bytes(digest[:8], "big") / 2**64


def keyed_split(
    keys: Iterable[str], known: Tensor, fractions: Sequence[Fraction], *, seed: int
) -> dict[str, Tensor]:
    """Split items by :func:`keyed_uniform` of their identifiers, for ``partition-seed``.

    Items with a number below r_test are test items, those below r_test + r_val
    validation items, and the others training items. So r_val never moves a test item.
    ``keys`` are the n identifiers; items with the same one are in one part. Only items
    with a ``known`` label, (n,) bool, are in a mask, and ``fractions`` are the expected
    shares of the three masks.
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
