"""Datasets whose items may belong to several targets at once: choice of one target."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.options import nearest
from flower_fgl.core.settings import ALL_TARGETS
from flower_fgl.core.targets import LABELS, NUMBERS, Target
from flower_fgl.datasets.graph_files.target_arrays import target_values
from flower_fgl.datasets.sources.raw_readers import Raw
from flower_fgl.nn.graph_union import GraphBatch, select_rows

__all__ = ["choose_target", "read_targets"]

log = logging.getLogger(__name__)
MOST_NAMES = 30
"""Names of targets that an error lists."""


def read_targets(y: Tensor, name: str) -> Tensor:
    """Convert the labels of several targets (n, T) to int8, and check them.

    1 if an item belongs to the target, 0 if not, NaN (in the result -1) if unknown.

    Raises a DataError if another number occurs.
    """
    values = y.nan_to_num(nan=-1.0) if y.is_floating_point() else y
    known = values[~y.isnan()] if y.is_floating_point() else values
    if bool(((known != 0) & (known != 1)).any()):
        raise DataError(
            f"{name}: expected labels of {y.shape[1]} targets that are 0 or 1, got other "
            "numbers. Download the dataset again."
        )
    return values.to(torch.int8)


def choose_target(raw: Raw, name: str, target: str) -> Raw:
    """Reduce several labels to one, with the classes ``no <target>`` and ``<target>``.

    The target ``all`` keeps all of them, and ``y`` is 0 for items with a known label.
    Numbers are kept too; :func:`expect_target` then chooses. A node without a label
    stays in the graph, with class -1. A graph without one is left out, and a warning
    counts such graphs. A ConfigError says that there is no such target; a DataError
    that no graph has a label.
    """
    names, has_numbers = raw.class_names or (), raw.y.is_floating_point()
    if has_numbers or target == ALL_TARGETS:
        kind = NUMBERS if has_numbers else LABELS
        _, y, targets = target_values(Target(kind, names), raw.y)
        return _labelled(replace(raw, y=y, targets=targets), name, target)
    if target not in names:
        raise ConfigError(
            f'target = "{target}" is not one of {name}. {_list_of(target, names)}'
        )
    y = raw.y[:, names.index(target)].to(torch.int64)
    chosen = replace(raw, y=y, class_names=(f"no {target}", target))
    return _labelled(chosen, name, target)


def _list_of(target: str, names: Sequence[str]) -> str:
    """Return the closest target and the list of targets, or the first of many."""
    if len(names) <= MOST_NAMES:
        return nearest(target, names)
    hint = nearest(target, names).partition("Known:")[0]
    shown = ", ".join(names[:MOST_NAMES])
    return f"{hint}It has {len(names)}: {shown}, …, {names[-1]}."


def _labelled(raw: Raw, name: str, target: str) -> Raw:
    """Leave out the graphs without a label; nodes without one stay."""
    if raw.batch is None or bool((raw.y >= 0).all()):
        return raw
    kept = (raw.y >= 0).nonzero().flatten()
    total = len(raw.y)
    if not len(kept):
        raise DataError(f'{name}: no graph has a label for target = "{target}".')
    log.warning(
        '%s: %s of %s graphs have no label for target = "%s" and are left out.',
        name,
        total - len(kept),
        total,
        target,
    )
    part = GraphBatch(raw.edge_index, raw.batch, total).select(kept)
    return replace(
        raw,
        x=select_rows(raw.x, part.nodes),
        edge_index=part.edge_index,
        batch=part.batch,
        y=raw.y[kept],
        masks={split: mask[kept] for split, mask in raw.masks.items()},
        targets=None if raw.targets is None else raw.targets[kept],
    )
