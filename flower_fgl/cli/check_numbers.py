"""Notes of ``check-graph`` on numbers to predict; no note holds a value."""

from __future__ import annotations

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
        away = (column[~column.isnan()] - found.mean).abs()
        if found.m2 and (far := float(away.max()) / found.spread) > FAR:
            notes.append(
                f'The largest value of "{name}" is {far:.0f} standard deviations from the '
                "mean. Check the unit."
            )
    return notes
