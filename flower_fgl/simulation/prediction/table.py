"""Table of predictions: one row per item, as a data frame, CSV or Parquet file."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from flower_fgl.algorithms.calibration import half_widths
from flower_fgl.core.errors import ConfigError, first_of
from flower_fgl.core.schema import Schema, TypedModel
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.runs.writer import replace_file

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Prediction", "check_ending", "schema_of", "task_of", "write_table"]

ENDINGS = (".csv", ".parquet")
FORMULA = tuple("=+-@\t＝＋－＠")
"""Starts of a cell that a spreadsheet evaluates; some do so for the wide forms, too."""
NUMBER = r"[+-]?[0-9]+(\.[0-9]+)?"


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """Predictions of a model for the items of a graph, or of a set of graphs.

    ``items`` are the columns (I,) that identify each item, with the owner's identifiers:
    ``node``; ``source``, ``target`` and maybe ``time``; or ``graph``. ``values`` (I, C) are
    probabilities of classes, whose rows sum to 1; of labels, each of its own; numbers in
    the units of the training data, float64; or for links the score (I, 1) of each pair,
    whose sigmoid is the probability in training. ``note`` says what was not checked, or was
    changed or assumed. ``sets`` (I, C), bool, are conformal sets of classes, of pairs ``no
    link`` and ``link``; ``None`` without.
    """

    items: Mapping[str, Any]
    values: Tensor
    card: ModelCard
    note: str = ""
    sets: Tensor | None = None

    @property
    def predicted(self) -> list[str]:
        """Most probable class of each item, by name.

        Of several labels per item, those with a probability of at least 0.5, separated by
        semicolons; a name that has one is in quotation marks.
        """
        names = self.card.target.names
        if self.card.multi_label:
            likely = (self.values >= 0.5).tolist()
            return _joined(names, likely)
        return [names[k] for k in self.values.argmax(dim=1).tolist()]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per item.

        Returns
        -------
        pandas.DataFrame of I rows
            The columns of ``items``; then ``predicted`` and ``p:<class>`` for each class;
            for numbers ``predicted``, or ``predicted:<name>`` for each of several; or
            ``score`` for links. A calibrated model adds ``set``, the classes of the
            conformal set, written as in :attr:`predicted`; for numbers ``lower`` and
            ``upper``, or ``lower:<name>`` and ``upper:<name>``.
        """
        import pandas as pd

        frame = pd.DataFrame(dict(self.items))
        if task_of(self.card) == "links":
            columns = ["score"]
        elif not self.card.target.has_numbers:
            frame["predicted"] = self.predicted
            columns = [f"p:{name}" for name in self.card.target.names]
        elif self.card.target.width == 1:
            columns = ["predicted"]
        else:
            columns = [f"predicted:{name}" for name in self.card.target.names]
        if self.sets is not None:
            frame["set"] = _joined(self.card.target.names, self.sets.tolist())
        values = pd.DataFrame(self.values.numpy(), columns=columns)
        found = self.card.calibration
        if found is None or not self.card.target.has_numbers or not found.thresholds:
            return pd.concat([frame, values], axis=1)
        half = half_widths(self.values, found).numpy()
        bounds = [
            pd.DataFrame(
                values.to_numpy() + sign * half,
                columns=[name.replace("predicted", bound, 1) for name in columns],
            )
            for bound, sign in (("lower", -1), ("upper", 1))
        ]
        return pd.concat([frame, values, *bounds], axis=1)

    @property
    def calibrated(self) -> str:
        """Say how the probabilities, sets and bounds were calibrated; empty if not."""
        found = self.card.calibration
        if found is None or not found.items:
            return ""
        whose = "all owners" if found.source == "shared" else "the owner"
        text = f"temperature {found.temperature:.3g}, "
        text += "isotonic, " if found.knots else ""
        text += f"neighbours {found.diffusion:g}, " if found.diffusion else ""
        text = "" if self.card.target.has_numbers else text
        if found.coverage:
            text += f"coverage {found.coverage:g} ({found.score}), "
        return f"{text}from {found.items:,} validation items of {whose}"

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        note = f"\n{self.note}" if self.note else ""
        card = self.card
        return f"{self.summary} ({card.method}, {card.model}, round {card.round}){note}"

    @property
    def summary(self) -> str:
        """Say how many items there are, and what is predicted: ``60 nodes, 3 classes``."""
        task, target = task_of(self.card), self.card.target
        if task == "links":
            return f"{len(self):,} pairs of nodes"
        if not target.has_numbers:
            return f"{len(self):,} {task}, {target.width} classes"
        units = target.units or ("",) * target.width
        shown = [f"{name} ({unit})" if unit else name
                 for name, unit in zip(target.names, units, strict=True)]  # fmt: skip
        return f"{len(self):,} {task}: {first_of(shown)}"


def _joined(names: Sequence[str], rows: Sequence[Sequence[bool]]) -> list[str]:
    """Return the chosen names of each row as text that can be split again."""
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    shown = [q if {*';"'} & {*n} else n for n, q in zip(names, quoted, strict=True)]
    return ["; ".join(compress(shown, row)) for row in rows]


def task_of(card: ModelCard) -> str:
    """Return what a model predicts: ``nodes``, ``graphs``, ``edges`` or ``links``."""
    if card.link:
        return "edges" if card.link.startswith("edge:") else "links"
    return "graphs" if card.classifies_graphs else "nodes"


def schema_of(card: ModelCard) -> Schema | None:
    """Return the kinds and relations that a model reads, ``None`` if it reads none."""
    typed = TypedModel.from_text(card.messages)
    return typed.schema if typed else None


def check_ending(path: Path) -> None:
    """Raise a ConfigError unless a table can be written to a path of this ending."""
    if path.suffix not in ENDINGS:
        raise ConfigError(
            f"--output must end in {' or '.join(ENDINGS)}, got {path.name}. Rename it."
        )
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"{path.name} needs pyarrow. Install it with pip install 'flower-fgl[tables]', "
            "or write a .csv file."
        )


def write_table(prediction: Prediction, path: Path) -> None:
    """Write the rows of :meth:`Prediction.to_frame` as CSV or Parquet.

    Numbers have 6 significant digits in CSV. The file is replaced atomically and has mode
    0600; a RunError is raised if that fails. Other owners choose names of classes, so in
    CSV a text that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    check_ending(path)
    frame = prediction.to_frame()
    if path.suffix == ".parquet":
        binary = io.BytesIO()
        frame.to_parquet(binary, index=False)
        data = binary.getvalue()
    else:
        for name in frame:
            digits = 15 if name in prediction.items else 6
            frame[name] = _as_texts(frame[name].to_numpy(), digits)
        data = frame.to_csv(index=False, lineterminator="\n").encode()
    replace_file(path, data, is_private=True)


def _as_texts(column: Any, digits: int) -> Any:
    """Return a column as it is written: numbers with some digits, texts no formulas."""
    if column.dtype.kind in "iu":
        return column
    if column.dtype.kind == "f":
        return [f"{value:.{digits}g}" for value in column.tolist()]
    known = {name: _as_text(name) for name in set(column)}
    return np.array([known[name] for name in column], dtype=object)


def _as_text(cell: str) -> str:
    """Put an apostrophe before a text that a spreadsheet would take for a formula."""
    is_formula = cell.startswith(FORMULA) and not re.fullmatch(NUMBER, cell)
    return f"'{cell}" if is_formula else cell
