"""The target of a run, compared with that of a dataset or of an owner's graph."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import DataError
from flower_fgl.core.options import nearest
from flower_fgl.core.settings import ALL_TARGETS
from flower_fgl.core.targets import Target
from flower_fgl.datasets.client_graph import EdgeTable, GraphDataset, NodeDataset

__all__ = ["expect_predicted", "expect_target"]

Held = TypeVar("Held", bound=NodeDataset | GraphDataset | EdgeTable)


def expect_predicted(
    dataset: NodeDataset | GraphDataset, config: RunConfig, where: str
) -> NodeDataset | GraphDataset:
    """Return a dataset with the target of its nodes, graphs or edges in a run."""
    if not config.has_pairs:
        return expect_target(dataset, config, where)
    if isinstance(dataset, GraphDataset) or config.predicts_links or not dataset.edges:
        return dataset
    edges = expect_target(dataset.edges, config, f"{where}, edges")
    return replace(dataset, edges=edges)


def expect_target(dataset: Held, config: RunConfig, where: str) -> Held:
    """Return a dataset with the target that a run predicts.

    Of several numbers the setting ``target`` may choose one. A DataError says that the
    dataset holds another kind of target, or lacks the chosen one.
    """
    target, kind = dataset.target, config.predicts
    if target.kind != kind:
        raise DataError(
            f"{where} holds {target.kind}, but this run predicts {kind}. Set target-kind = "
            f'"{target.kind}" if all owners hold {target.kind}, or save {kind} '
            "(docs/data.md)."
        )
    chosen = config.target
    if not target.has_numbers or chosen in ("", ALL_TARGETS):
        return dataset
    if chosen not in target.names:
        raise DataError(
            f'{where}: target = "{chosen}" is none of its numbers. '
            f"{nearest(chosen, target.names)}"
        )
    place = target.names.index(chosen)
    assert dataset.targets is not None
    values, units = dataset.targets[:, [place]], target.units[place : place + 1]
    return replace(
        dataset,
        target=Target(target.kind, (chosen,), units if any(units) else ()),
        targets=values,
        y=(~values[:, 0].isnan()).to(torch.int64) - 1,
    )
