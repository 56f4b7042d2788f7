"""Notes of ``check-graph`` on numbers to predict; no note holds a value."""

from __future__ import annotations

from torch import Tensor

from flower_fgl.core.target_scale import moments
from flower_fgl.datasets.client_graph import ClientGraph

__all__ = ["number_notes"]

FEW = 5
"""Training values below which a target's mean and spread say little."""
FAR = 10.0
"""Standard deviations from the mean beyond which a value is named."""


def number_notes(graph: ClientGraph, items: str) -> list[str]:
    """Return notes on unknown, few, equal and far values of each target.

    ``items`` are ``nodes``, ``edges`` or ``graphs``.
    """
    values, masks = graph.graph.targets, graph.graph.masks
    assert values is not None
    training = moments(values[masks["train"]])
    notes = []
    for place, found in enumerate(moments(values)):
        name, number = graph.target.names[place], len(values)
        if found.count < number:
            share = 1 - found.count / number
            notes.append(f'"{name}" is unknown for {share:.1%} of the {items}.')
        if training[place].count < FEW:
            notes.append(
                f'"{name}" has {training[place].count} training values, fewer than {FEW}.'
            )
        if found.count and not found.m2:
            notes.append(f'All {found.count} known values of "{name}" are equal.')
        column = values[:, place]
        notes += _far_values(name, column[~column.isnan()])
    return notes


def _far_values(name: str, known: Tensor) -> list[str]:
    """Return a note if the smallest or largest value is far from all other values."""
    if not known.numel():
        return []
    notes = []
    for which, value in (("smallest", known.min()), ("largest", known.max())):
        rest = known[known != value]  # a marker of unknown values is often repeated
        (others,) = moments(rest[:, None])
        if others.m2 and abs(float(value) - others.mean) > FAR * others.spread:
            notes.append(
                f'The {which} value of "{name}" ({len(known) - len(rest)} times) is more '
                f"than {FAR:.0f} standard deviations from the mean of the others. Check "
                "the unit; if it marks an unknown value, leave it out (NaN, an empty cell)."
            )
    return notes
