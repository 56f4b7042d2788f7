"""Calibrate a saved model with items whose truth its user knows."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms.calibration import Surroundings, fit
from flower_fgl.core.calibration import (
    CONFORMAL,
    DIFFUSED,
    SCALED,
    Calibration,
    least_items,
)
from flower_fgl.core.errors import ConfigError, DataError, clip, show_path
from flower_fgl.core.options import nearest
from flower_fgl.datasets.graph_files.csv_rows import read_finite
from flower_fgl.runs.model_file import ModelCard, save_model
from flower_fgl.runs.saved_model import SavedModel, load_model
from flower_fgl.simulation.prediction.predict import (
    Wanted,
    conformal_draws,
    predict_items,
)
from flower_fgl.simulation.prediction.read import has_column, read_graph, table_cells
from flower_fgl.simulation.prediction.table import Prediction, task_of

__all__ = ["calibrate_model"]

TINY = 1e-12
"""Least probability of which the logarithm is taken."""


def calibrate_model(
    model: Path,
    graph: Path | str | Any,
    labels: Path,
    output: Path,
    *,
    coverage: float = 0.9,
    score: str = "aps",
    from_time: float | None = None,
    is_isotonic: bool = False,
) -> Calibration:
    """Calibrate a model with labelled items, save it with the result, and return that.

    ``model`` is the model folder of a data owner, or a run folder; its own calibration
    does not count. ``graph`` and, for a model of edges, ``from_time`` are as for
    ``predict``. ``labels`` is a CSV table with the columns that identify items in
    predictions, and ``label``; with several numbers or labels a column for each of them,
    empty if unknown. ``output`` is the folder of the calibrated model, which only the
    owner of the process may read. ``coverage``, in (0, 1), is the share of the sets or
    intervals that are to hold the truth, and ``score`` the conformal score: ``lac``,
    ``aps``, ``raps`` or ``daps`` of classes, ``scaled`` of numbers. With ``is_isotonic``
    half of the items give an isotonic map of the probabilities.

    A RunError says that the model cannot be read or written; a ConfigError that
    ``coverage`` or ``score`` is out of range, or ``output`` is the model's folder; a
    DataError that the table is malformed, names an item that the graph lacks or a class
    that the model does not know, or has too few rows.
    """
    if not 0 < coverage < 1:
        raise ConfigError(f"--coverage must be > 0 and < 1, got {coverage}.")
    if score not in (*CONFORMAL, SCALED):
        known = (*CONFORMAL, SCALED)
        raise ConfigError(f'Unknown score "{score}". {nearest(score, known)}')
    saved = load_model(model)
    _check_score(saved.card, score)
    if output.resolve() in (model.resolve(), model.resolve().parent):
        raise ConfigError(
            "--output must not be the folder of the model. Name another one."
        )
    saved = replace(saved, card=replace(saved.card, calibration=None))
    is_diffused = score == DIFFUSED
    outputs, y, around = _items(saved, graph, labels, from_time, is_diffused)
    least = least_items(coverage)
    if len(y) < least:
        raise DataError(
            f"{show_path(labels)} has {len(y)} labelled items; coverage = {coverage:g} "
            f"needs at least {least}. Add rows, or lower the coverage."
        )
    found = fit(
        outputs,
        y,
        conformal_draws(len(y)),
        coverage=coverage,
        score=score,
        has_numbers=saved.card.target.has_numbers,
        is_isotonic=is_isotonic,
        around=around,
    )
    save_model(
        output,
        saved.model.state_dict(),
        replace(saved.card, calibration=found),
        saved.scaling,
        edge_scaling=saved.edge_scaling,
        target_scale=saved.target_scale,
        is_private=True,
    )
    return found


def _items(
    saved: SavedModel,
    graph: Path | str | Any,
    labels: Path,
    from_time: float | None,
    is_diffused: bool,
) -> tuple[Tensor, Tensor, Surroundings | None]:
    """Return outputs (n, C) and truth (n,) or (n, C) of a table, maybe with the graph."""
    card, task = saved.card, task_of(saved.card)
    is_single = card.target_kind == "classes" or len(card.target.names) == 1
    columns = ["label"] if is_single else list(card.target.names)
    keys = ["source", "target"] if task in ("links", "edges") else [task[:-1]]
    if task == "edges" and has_column(labels, "time"):
        keys.append("time")
    rows = [
        (place, tuple(cells[: len(keys)]), cells[len(keys) :])
        for place, cells in table_cells(labels, (*keys, *columns))
    ]
    if not rows:
        raise DataError(f"{show_path(labels)} has no labelled items. Add rows.")
    pairs = [item for _, item, _ in rows] if task == "links" else None
    found = predict_items(saved, graph, Wanted(pairs, from_time=from_time))
    keys = [key for key in keys if key in found.items]
    places, listed = _places(found, keys), dict[tuple[str, ...], str]()
    chosen, truth = [], []
    for place, item, cells in rows:
        item = tuple(starmap(_spelled, zip(keys, item, strict=False)))
        shown = " - ".join(map(clip, item))
        own = places.get(item, ())
        if not own:
            raise DataError(
                f"{place}: the graph has no {task[:-1]} {shown}. Correct it, or remove the "
                "line."
            )
        if len(own) > 1 and task == "edges":
            raise DataError(
                f"{place}: the graph has {len(own)} edges {shown}, and nothing says which "
                "one is meant. Add the column time of the predictions, or remove the line."
            )
        if listed.setdefault(item, place) != place:
            raise DataError(
                f"{place}: {task[:-1]} {shown} is also in {listed[item]}. Keep one line."
            )
        chosen.append(own[0])
        truth.append(_truth(saved, cells, place))
    values = found.values[chosen]
    if card.target.has_numbers:
        numbers = torch.tensor(truth, dtype=torch.float64).view(len(truth), -1)
        return values, numbers, None
    if task == "links":  # the score of a pair is the difference of two logits
        both = torch.cat([torch.zeros_like(values), values], dim=1)
        return both, torch.tensor(truth), None
    every = found.values.to(torch.float64).clamp(min=TINY)
    if card.multi_label:
        labels_of = torch.tensor(truth, dtype=torch.float64)
        return torch.logit(every[chosen], eps=TINY), labels_of, None
    around = None
    if is_diffused:
        owned, _ = read_graph(graph, card)
        u, index = conformal_draws(len(every)), torch.tensor(chosen)
        around = Surroundings(every.log(), owned.dataset.edge_index, u, index)
    return every[chosen].log(), torch.tensor(truth, dtype=torch.int64), around


def _check_score(card: ModelCard, score: str) -> None:
    """Reject a conformal score of another kind of items."""
    has_numbers = card.target.has_numbers
    if score == SCALED and not has_numbers:
        raise ConfigError(
            f'The score "{SCALED}" is for models of numbers. Use one of '
            f"{', '.join(CONFORMAL)}."
        )
    is_of_nodes = task_of(card) == "nodes" and not card.is_typed
    if score == DIFFUSED and not is_of_nodes and card.target_kind == "classes":
        raise ConfigError(
            f'The score "{DIFFUSED}" mixes scores of neighbouring nodes of one kind, and '
            'the model predicts others. Use "aps".'
        )


def _places(
    found: Prediction, keys: Sequence[str]
) -> Mapping[tuple[str, ...], Sequence[int]]:
    """Return the rows of each item by its identifiers."""
    columns = [
        [_spelled(key, str(one)) for one in found.items[key].tolist()] for key in keys
    ]
    places: dict[tuple[str, ...], list[int]] = {}
    for place, item in enumerate(zip(*columns, strict=True)):
        places.setdefault(item, []).append(place)
    return places


def _spelled(key: str, cell: str) -> str:
    """Return an identifier in one spelling: a time may be 3 or 3.0."""
    number = read_finite(cell) if key == "time" else None
    return cell if number is None else f"{number:.15g}"


def _truth(saved: SavedModel, cells: Sequence[str], where: str) -> Any:
    """Return the class, the labels or the numbers of a row."""
    card = saved.card
    if card.target_kind == "classes":
        names, (cell,) = card.target.names, cells
        if task_of(card) == "links" and cell in ("0", "1"):
            return int(cell)
        if cell not in names:
            raise DataError(
                f'{where}: "{clip(cell)}" is no class of the model. {nearest(cell, names)}'
            )
        return names.index(cell)
    numbers = [read_finite(cell) if cell else math.nan for cell in cells]
    for cell, number in zip(cells, numbers, strict=True):
        if number is None or (card.multi_label and number not in (0, 1) and cell):
            wanted = "0 or 1" if card.multi_label else "a finite number"
            raise DataError(
                f'{where}: "{clip(cell)}" must be {wanted}, or empty if it is unknown.'
            )
    return numbers
