"""Calibrate a saved model with items whose truth its user knows."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flower_fgl.algorithms.calibration import fit
from flower_fgl.core.calibration import CONFORMAL, Calibration, least_items
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.options import nearest
from flower_fgl.datasets.graph_files.csv_rows import csv_rows, read_number
from flower_fgl.datasets.graph_files.problems import clip, show_path
from flower_fgl.runs.model_file import save_model
from flower_fgl.runs.saved_model import SavedModel, load_model
from flower_fgl.simulation.prediction.predict import Wanted, predict_items
from flower_fgl.simulation.prediction.table import LINKED, Prediction, task_of

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
    """Calibrate a model with labelled items, and save it with the result.

    Parameters
    ----------
    model : Path
        Model folder of a data owner, or a run folder. Its own calibration does not count.
    graph : Path, str, or object
        Graph that holds the items, as for ``predict``.
    labels : Path
        CSV table with the columns that identify items in predictions, and ``label``; with
        several numbers or labels a column for each of them, empty if unknown.
    output : Path
        Folder of the calibrated model, which only the owner of the process may read.
    coverage : float in (0, 1)
        Share of the sets or intervals that are to hold the truth.
    score : {"lac", "aps", "raps"}
        Conformal score of classes.
    from_time : float, optional
        For a model of edges, as for ``predict``: messages pass over earlier edges.
    is_isotonic : bool
        Whether half of the items give an isotonic map of the probabilities.

    Returns
    -------
    Calibration
        What ``output`` holds.

    Raises
    ------
    RunError
        If the model cannot be read or written.
    ConfigError
        If ``coverage`` or ``score`` is out of range, or ``output`` is the model's folder.
    DataError
        If the table is malformed, names an item that the graph lacks or a class that the
        model does not know, or has too few rows.
    """
    if not 0 < coverage < 1:
        raise ConfigError(f"--coverage must be > 0 and < 1, got {coverage}.")
    if score not in CONFORMAL:
        raise ConfigError(f'Unknown score "{score}". {nearest(score, CONFORMAL)}')
    saved = load_model(model)
    if output.resolve() in (model.resolve(), model.resolve().parent):
        raise ConfigError(
            "--output must not be the folder of the model. Name another one."
        )
    saved = replace(saved, card=replace(saved.card, calibration=None))
    outputs, y = _items(saved, graph, labels, from_time)
    least = least_items(coverage)
    if len(y) < least:
        raise DataError(
            f"{show_path(labels)} has {len(y)} labelled items; coverage = {coverage:g} "
            f"needs at least {least}. Add rows, or lower the coverage."
        )
    u = torch.rand(
        len(y), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    found = fit(
        outputs,
        y,
        u,
        coverage=coverage,
        score=score,
        has_numbers=saved.card.target.has_numbers,
        is_isotonic=is_isotonic,
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
    saved: SavedModel, graph: Path | str | Any, labels: Path, from_time: float | None
) -> tuple[Tensor, Tensor]:
    """Return outputs (n, C) and truth (n,) or (n, C) of the rows of a table."""
    card, task = saved.card, task_of(saved.card)
    is_single = card.target_kind == "classes" or len(card.class_names) == 1
    columns = ["label"] if is_single else list(card.class_names)
    keys = ["source", "target"] if task in ("links", "edges") else [task[:-1]]
    where = show_path(labels)
    rows = list(_rows(labels, keys, columns))
    pairs = [row[1] for row in rows] if task == "links" else None
    found = predict_items(saved, graph, Wanted(pairs, from_time=from_time))
    places = _places(found, keys)
    chosen, truth = [], []
    for line, item, cells in rows:
        if item not in places:
            shown = " - ".join(map(clip, item))
            raise DataError(
                f"{where}, line {line}: the graph has no {task[:-1]} {shown}. Correct it, "
                "or remove the line."
            )
        chosen.append(places[item])
        truth.append(_truth(saved, cells, f"{where}, line {line}"))
    values = found.values[chosen]
    if card.target.has_numbers:
        return values, torch.tensor(truth, dtype=torch.float64).view(len(truth), -1)
    if task == "links":  # the score of a pair is the difference of two logits
        return torch.cat([torch.zeros_like(values), values], dim=1), torch.tensor(truth)
    safe = values.to(torch.float64).clamp(min=TINY)
    if card.multi_label:
        return torch.logit(safe, eps=TINY), torch.tensor(truth, dtype=torch.float64)
    return safe.log(), torch.tensor(truth, dtype=torch.int64)


def _rows(
    path: Path, keys: Sequence[str], columns: Sequence[str]
) -> Iterator[tuple[int, tuple[str, ...], list[str]]]:
    """Yield line number, identifiers and labels of each row of a table."""
    rows = csv_rows(Path(os.path.expanduser(path)), (*keys, *columns))
    _, header = next(rows)
    places = [header.index(name) for name in (*keys, *columns)]
    for line, row in rows:
        cells = [row[k].strip() for k in places]
        yield line, tuple(cells[: len(keys)]), cells[len(keys) :]


def _places(found: Prediction, keys: Sequence[str]) -> Mapping[tuple[str, ...], int]:
    """Return the row of each item by its identifiers; of equal ones the last."""
    columns = [[str(one) for one in found.items[key].tolist()] for key in keys]
    return {item: place for place, item in enumerate(zip(*columns, strict=True))}


def _truth(saved: SavedModel, cells: Sequence[str], where: str) -> Any:
    """Return the class, the labels or the numbers of a row."""
    card = saved.card
    if card.target_kind == "classes":
        names = LINKED if task_of(card) == "links" else card.class_names
        (cell,) = cells
        if task_of(card) == "links" and cell in ("0", "1"):
            return int(cell)
        if cell not in names:
            raise DataError(
                f'{where}: "{clip(cell)}" is no class of the model. {nearest(cell, names)}'
            )
        return names.index(cell)
    numbers = [read_number(cell) if cell else math.nan for cell in cells]
    for cell, number in zip(cells, numbers, strict=True):
        if number is None or (card.multi_label and number not in (0, 1) and cell):
            wanted = "0 or 1" if card.multi_label else "a number"
            raise DataError(
                f'{where}: "{clip(cell)}" must be {wanted}, or empty if it is unknown.'
            )
    return numbers
