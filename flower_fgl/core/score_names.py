"""Names of the scores and of the node sets that a run folder holds; imports no torch."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

__all__ = ["EXTRA_SCORES", "NO_SCORES", "NUMBER_SCORES", "SCORES", "SCORE_NAMES"]
__all__ += ["SETTING_COLUMNS", "ScoreKind", "goodness", "is_better", "kind_of_score"]
__all__ += ["score_title"]

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
    """Title of a score, which direction is better, and its scale.

    A ``share`` is shown in percent: also the normalised RMSE, a share of the standard
    deviation of the targets, and R² and Spearman's ρ, which may be negative. A score in
    ``units`` has those of its target.
    """

    title: str
    direction: Literal["higher", "lower"] = "higher"
    scale: Literal["share", "units"] = "share"

    @property
    def is_lower(self) -> bool:
        """Whether a lower value is better."""
        return self.direction == "lower"

    @property
    def has_units(self) -> bool:
        """Whether the score has the units of the target."""
        return self.scale == "units"


NUMBER_SCORES = {
    "rmse": ScoreKind("RMSE", "lower", "units"),
    "nrmse": ScoreKind("nRMSE", "lower"),
    "mae": ScoreKind("MAE", "lower", "units"),
    "r2": ScoreKind("R²"),
    "spearman": ScoreKind("Spearman's ρ"),
}
"""Scores of predicted numbers, in display order."""
SCORES = {
    "accuracy": ScoreKind("accuracy"),
    "macro_f1": ScoreKind("macro-F1"),
    "macro_recall": ScoreKind("recall"),
    **{
        name: ScoreKind(title, "lower" if name in LOWER else "higher")
        for name, title in EXTRA_SCORES.items()
    },
    **NUMBER_SCORES,
    "interval": ScoreKind("interval", "lower"),
}
"""All scores by name; ``mean_`` and ``worst_`` before a name keep its kind."""
NO_SCORES = {"num_nodes", "threshold", "mean_threshold", "targets"}
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
