"""The split that a ``torch_geometric.data.Data`` holds, under its usual names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.own_split import PARTS, split_names

__all__ = ["own_masks"]


def own_masks(
    data: Any, name: str, of: str = "", *, size: int | None = None
) -> dict[str, Tensor]:
    """Return the split of a graph's nodes, or with ``of`` = ``edge_`` of its edges.

    ``size`` is the number of nodes, by default that of the rows of ``x``.
    The attributes are bool, such as ``train_mask``, or numbers of items, such as
    ``valid_idx``. The masks are ``train``, ``val`` and ``test``; there are none without
    a split. A DataError says that a part is missing or malformed, that two attributes
    differ, or that an attribute looks like a split that cannot be read.
    """
    if size is None:
        size = int(data.edge_index.shape[1] if of else data.x.shape[0])
    held = {
        key: value
        for key, value in data.to_dict().items()
        if ("edge" in key) == bool(of)
        and isinstance(value, Tensor | np.ndarray | list | tuple | dict)
        and getattr(value, "shape", (1,)) != ()
    }
    parts, whole = split_names(held)
    whole = [k for k in whole if isinstance(held[k], dict) or len(held[k]) == size]
    if whole:
        raise DataError(
            f"{name}: {whole[0]} looks like a split, which cannot be read in this form. "
            f"Set data.{of}train_mask, data.{of}val_mask and data.{of}test_mask, bool of "
            f"shape ({size},); torch_geometric.utils.index_to_mask makes them from "
            "numbers."
        )
    if not parts:
        return {}
    for part in PARTS:
        if part not in parts:
            found = [key for keys in parts.values() for key in keys]
            raise DataError(
                f"{name} has {', '.join(found)} but no {of}{part}_mask. Add it (all False "
                "without any), or remove the masks: a split is then sampled."
            )
    return {part: _part(held, parts[part], size, name) for part in PARTS}


def _part(held: dict[str, Any], keys: Sequence[str], size: int, name: str) -> Tensor:
    """Return one part of the split; attributes that hold the same part must agree."""
    masks = [_mask(held[key], key, size, name) for key in keys]
    if any(not torch.equal(masks[0], mask) for mask in masks[1:]):
        raise DataError(f"{name}: {' and '.join(keys)} differ. Remove one of them.")
    return masks[0]


def _mask(value: Any, key: str, size: int, name: str) -> Tensor:
    """Return one attribute as a mask."""
    try:
        values = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):  # a dict, texts, or lists of lists
        values = torch.empty(0, 0, 0)
    if values.dim() == 2:
        raise DataError(
            f"{name}: {key} holds {values.shape[1]} splits. Choose one, e.g. "
            f"data.{key} = data.{key}[:, 0]."
        )
    if values.dtype == torch.bool or "mask" in key.lower():
        return values
    is_real = values.is_floating_point() or values.is_complex()
    if values.dim() == 1 and not (is_real and values.numel()):  # floats are the default
        mask = torch.zeros(size, dtype=torch.bool)
        numbers = values.to(torch.int64)
        if bool(((numbers >= 0) & (numbers < size)).all()):
            mask[numbers] = True
        if int(mask.sum()) == len(numbers):
            return mask
    raise DataError(
        f"{name}: {key} must be a mask, bool of shape ({size},), or a list of different "
        f"numbers from 0 to {size - 1}."
    )
