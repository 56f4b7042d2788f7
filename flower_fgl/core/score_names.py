"""Names of scores and node sets, and how scores are compared and shown; loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from flower_fgl.core.errors import RunError

__all__ = [
    "DIAGRAM",
    "EQUAL",
    "EXTRA_SCORES",
    "MARGIN",
    "NOTHING",
    "NO_SCORES",
    "NUMBER_SCORES",
]
__all__ += ["SCORES", "SCORE_NAMES", "SETTING_COLUMNS", "ScoreKind", "ScoreScale"]
__all__ += ["goodness", "is_better", "kind_of_score", "number_scores"]
__all__ += ["refuse_mixed_kinds", "score_title", "spread_of_targets"]

SCORE_NAMES = ("accuracy", "macro_f1", "macro_recall")
"""Names of the node scores, in display order."""
EXTRA_SCORES = {
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "mrr": "MRR",
    "hits": "Hits@K",
    "precision_at_k": "P@K",
    "threshold": "threshold",
    "threshold_precision": "P@threshold",
    "threshold_recall": "R@threshold",
    "threshold_f1": "F1@threshold",
    "micro_f1": "micro-F1",
    "ece": "ECE",
    "brier": "Brier",
    "ece_calibrated": "ECE calibrated",
    "brier_calibrated": "Brier calibrated",
    "coverage": "coverage",
    "set_share": "set share",
}
"""Scores that only some tasks have, by name: AUROC and AUPRC for owners, sets of graphs,
edges and datasets with rare classes, the first four for link prediction, the next five
with ``positive-class``, the next one with several labels per item, the last six with
``calibration``: ``set_share`` is the mean share of all classes in a conformal set."""
LOWER = {"ece", "brier", "ece_calibrated", "brier_calibrated", "set_share"}


class ScoreKind(NamedTuple):
    """Title of a score, whether a lower value is better, and whether it has units.

    Units are those of the target. A score without is shown in percent: also the normalised
    RMSE, a share of the standard deviation of the targets, and R² and Spearman's ρ, which
    may be negative.
    """

    title: str
    is_lower: bool = False
    has_units: bool = False


NUMBER_SCORES = {
    "rmse": ScoreKind("RMSE", is_lower=True, has_units=True),
    "nrmse": ScoreKind("nRMSE", is_lower=True),
    "mae": ScoreKind("MAE", is_lower=True, has_units=True),
    "r2": ScoreKind("R²"),
    "spearman": ScoreKind("Spearman's ρ"),
}
"""Scores of predicted numbers, in display order."""
SCORES = {
    "accuracy": ScoreKind("accuracy"),
    "macro_f1": ScoreKind("macro-F1"),
    "macro_recall": ScoreKind("recall"),
    **{name: ScoreKind(title, name in LOWER) for name, title in EXTRA_SCORES.items()},
    **NUMBER_SCORES,
    "interval": ScoreKind("interval", is_lower=True),
}
"""All scores by name; ``mean_`` and ``worst_`` before a name keep its kind."""
DIAGRAM = 90
"""Numbers of the reliability diagrams of one set of items, before and after calibration."""
NO_SCORES = {"num_nodes", "threshold", "mean_threshold", "targets", "reliability"}
"""Values that stand beside the scores of a node set, but are none."""
SETTING_COLUMNS = {
    "unseen": "unseen",
    "missing": "missing",
    "new_client": "new client",
    "test_masked": "own classes",
}
"""Node sets that only some settings score, besides ``val`` and ``test``: key to title."""


def kind_of_score(name: str) -> ScoreKind:
    """Return the kind of a score, or of its ``mean_`` or ``worst_`` over clients.

    A name that is not in :data:`SCORES`, e.g. of a method of another package, is a share
    of which more is better.
    """
    return SCORES.get(
        name.removeprefix("mean_").removeprefix("worst_"), ScoreKind(name)
    )


def score_title(name: str) -> str:
    """Return the display name of a score."""
    return SCORES[name].title if name in SCORES else name


def goodness(name: str, value: float | None) -> float:
    """Return a number that is larger for a better score, the smallest for NaN or None."""
    if value is None or math.isnan(value):
        return -math.inf
    return -value if kind_of_score(name).is_lower else value


def is_better(name: str, new: float | None, best: float | None) -> bool:
    """Return whether a score is better than another one; NaN never is, and None neither."""
    return goodness(name, new) > goodness(name, best)


MARGIN = 0.01
"""Two methods are tied if their difference is less than one point, or less than this share
of the standard deviation of the target."""
EQUAL = 1e-6
"""Differences whose standard deviation is below it, relative to the same scale, are equal:
cells hold rounded scores."""
NOTHING = "–"


@dataclass(frozen=True)
class ScoreScale:
    """A score such as ``mean_rmse``, with the unit and the spread of its target.

    The unit is empty if unknown. The spread is a standard deviation, NaN if unknown.
    """

    name: str = "accuracy"
    unit: str = ""
    spread: float = math.nan

    @classmethod
    def of(cls, name: str, target: Mapping[str, Any]) -> ScoreScale:
        """Return the scale of a score of a run's or a cell's target, empty for classes."""
        units = set(target.get("units") or ("",))
        known = [value for value in target.get("std") or () if value is not None]
        unit = units.pop() if len(units) == 1 else ""
        return cls(name, unit, fmean(known) if known else math.nan)

    @property
    def kind(self) -> ScoreKind:
        """Title, direction and scale of the score."""
        return kind_of_score(self.name)

    @property
    def is_error(self) -> bool:
        """Whether a lower value is better."""
        return self.kind.is_lower

    @property
    def title(self) -> str:
        """Name of the score, with an arrow if lower is better, and the unit."""
        return self.name_of(score_title(self.name))

    def name_of(self, title: str) -> str:
        """Add the arrow of a score of which less is better, and its unit, to a title."""
        title += " ↓" if self.is_error else ""
        has_unit = self.kind.has_units and self.unit
        return f"{title} ({self.unit})" if has_unit else title

    @property
    def size(self) -> float:
        """Size of the differences that matter: 1 of a share, the spread of a target."""
        return self.spread if self.kind.has_units else 1.0

    @property
    def margin(self) -> float:
        """Difference below which two methods are tied, NaN without a spread."""
        return MARGIN * self.size

    @property
    def margin_text(self) -> str:
        """The margin in words."""
        if self.is_error and self.kind in NUMBER_SCORES.values():
            return "1 % of the target's standard deviation"
        return "one point"

    def goodness(self, value: float | None) -> float:
        """Return a number that is larger for a better value."""
        return goodness(self.name, value)

    def is_better(self, new: float | None, best: float | None) -> bool:
        """Return whether a value is better than another one."""
        return is_better(self.name, new, best)

    def gain(self, one: Any, other: Any) -> Any:
        """Return how much the first value, or each of a frame, is better if positive."""
        return other - one if self.is_error else one - other

    def worst(self, values: Mapping[str, float]) -> str:
        """Return the name with the worst value, the first of equal ones."""
        return min(values, key=lambda name: self.goodness(values[name]))

    def show(self, value: float | None, digits: int = 2, *, sign: str = "") -> str:
        """Format a value: a share in percent, an error in units with four digits."""
        if value is None or math.isnan(value):
            return NOTHING
        form = f"{sign}.4g" if self.kind.has_units else f"{sign}.{digits}f"
        return format(value if self.kind.has_units else 100 * value, form)

    def show_gain(self, value: float | None, digits: int = 2) -> str:
        """Format a difference with its sign."""
        return self.show(value, digits, sign="+").replace("-", "−")

    def show_mean(self, values: Sequence[float], digits: int = 2) -> str:
        """Format values as mean ± standard deviation, a dash without any."""
        if not values:
            return NOTHING
        text = self.show(fmean(values), digits)
        spread = self.show(stdev(values), digits) if len(values) > 1 else ""
        return f"{text} ± {spread}" if spread else text


def number_scores(target: Mapping[str, Any]) -> list[str]:
    """Return the scores of numbers that a table shows: of several, those without units."""
    hidden = ("nrmse",) if len(target["names"]) == 1 else ("rmse", "mae")
    return [name for name in NUMBER_SCORES if name not in hidden]


def spread_of_targets(targets: Mapping[str, Sequence[float | None]]) -> list[float]:
    """Return the deviation of each target about the clients' means, NaN without values."""
    pairs = zip(targets.get("sst", ()), targets.get("num_values", ()), strict=False)
    return [((sst or 0.0) / n) ** 0.5 if n else math.nan for sst, n in pairs]


def refuse_mixed_kinds(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise a RunError unless all rows, by name, predict the same kind of targets."""
    kinds: dict[str, list[str]] = {}
    for name, target in rows:
        names = kinds.setdefault(str(target.get("kind", "classes")), [])
        names += [name] if name not in names else []
    if len(kinds) > 1:
        listed = ", ".join(f"{k} ({', '.join(names)})" for k, names in kinds.items())
        raise RunError(
            f"rows with different target kinds cannot be compared: {listed}."
        )
