"""Names of the scores and of the node sets that a run folder holds; imports no torch."""

from __future__ import annotations

from collections.abc import Container

__all__ = ["EXTRA_SCORES", "SCORE_NAMES", "SETTING_COLUMNS", "selection_metric"]

SCORE_NAMES = ("accuracy", "macro_f1", "macro_recall")
"""Names of the node scores, in display order."""
EXTRA_SCORES = {"auroc": "AUROC", "auprc": "AUPRC", "mrr": "MRR", "hits": "Hits@K"}
"""Scores that only some tasks have, by name: AUROC for owners and sets of graphs, all for
link prediction."""
SETTING_COLUMNS = {
    "unseen": "unseen",
    "missing": "missing",
    "new_client": "new client",
    "test_masked": "own classes",
}
"""Node sets that only some settings score, besides ``val`` and ``test``: key to title."""


def selection_metric(scores: Container[str]) -> str:
    """Return the score of a node set by which rounds and settings are selected.

    Parameters
    ----------
    scores : container of str
        Names of the scores of a node set.

    Returns
    -------
    str
        ``auroc`` for link prediction, which alone has ``auprc``; else ``accuracy``.
    """
    return "auroc" if "auprc" in scores else "accuracy"
