"""Names of the scores and of the node sets that a run folder holds; imports no torch."""

from __future__ import annotations

__all__ = ["EXTRA_SCORES", "NO_SCORES", "SCORE_NAMES", "SETTING_COLUMNS"]

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
}
"""Scores that only some tasks have, by name: AUROC and AUPRC for owners, sets of graphs,
edges and datasets with rare classes, the first four for link prediction, the next five
with ``positive-class``, the last one with several labels per item."""
NO_SCORES = {"num_nodes", "threshold", "mean_threshold"}
"""Values that stand beside the scores of a node set, but are none."""
SETTING_COLUMNS = {
    "unseen": "unseen",
    "missing": "missing",
    "new_client": "new client",
    "test_masked": "own classes",
}
"""Node sets that only some settings score, besides ``val`` and ``test``: key to title."""
