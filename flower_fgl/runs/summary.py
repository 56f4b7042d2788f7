"""Summarise a run: best and last round, bytes, seconds and failures."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flower_fgl.core.score_names import goodness, kind_of_score, score_title
from flower_fgl.runs.files import HEADER, Row

__all__ = ["Row", "describe_round", "is_scored", "lost_finetuning", "main_scope"]
__all__ += ["rounds_without_gain", "score_text", "select_round", "summarise"]


def summarise(
    rounds: Sequence[Row],
    *,
    status: str,
    class_names: Sequence[str] | None = None,
    error: str | None = None,
    metric: str = "accuracy",
    **header: Any,
) -> dict[str, Any]:
    """Summarise a run, whose rows so far are ``rounds``, in the format of ``summary.json``.

    ``header`` has the values of ``HEADER``, ``None`` if not known yet. ``metric`` is the
    validation score that selects the best round, unless the rows name another one; the
    summary names it unless it is ``accuracy``. Its ``rounds`` is the last round started,
    ``best`` and ``last`` are ``None`` before the first evaluation; it has ``global`` if
    both kinds of evaluation were run, ``finetuned`` after fine-tuning, and ``calibrated``
    with the scores of a calibrated global model.

    Notes
    -----
    1. ``best`` is the round with the best pooled validation score, the later one
       among equals. Test scores are never used. Failed rounds, fine-tuning, and rounds
       that scored fewer validation nodes than others because replies were lost, do not
       count. Without validation nodes, ``best`` is the last round, and ``selection`` is
       ``"last"``.
    """
    train = [row for row in rounds if row.get("phase") == "train"]
    scored = [row for row in rounds if is_scored(row)]
    scopes = {scope for row in scored for scope in row["metrics"]}
    metric = _metric_of(scored, metric)
    out: dict[str, Any] = {
        **{key: header[key] for key in HEADER},
        "rounds": max((int(row["round"]) for row in train), default=0),
        "status": status,
        **select_round(scored, main_scope(scored), metric),
        **_totals(rounds, train),
    }
    if {"local", "global"} <= scopes:
        out["global"] = select_round(scored, "global", metric)
    if metric != "accuracy":
        out["metric"] = metric
    for row in rounds:
        if row.get("phase") == "finetune" and row.get("metrics", {}).get("local"):
            out["finetuned"] = {"round": row["round"], **row["metrics"]["local"]}
        if row.get("phase") == "calibration" and row.get("metrics", {}).get("global"):
            out["calibrated"] = {"round": row["round"], **row["metrics"]["global"]}
    if class_names is not None:
        out["class_names"] = list(class_names)
    return out if error is None else {**out, "error": error}


def is_scored(row: Row) -> bool:
    """Return whether a row is a successful, evaluated round, and no fine-tuning."""
    is_good_round = row.get("phase") == "train" and row.get("status") == "ok"
    return is_good_round and bool(row.get("metrics"))


def main_scope(rows: Iterable[Row]) -> str:
    """Return which models stand for a run: ``global`` if its rounds scored only those."""
    scopes = {scope for row in rows if is_scored(row) for scope in row["metrics"]}
    return "global" if scopes == {"global"} else "local"


def lost_finetuning(summary: Mapping[str, Any], rounds: Sequence[Row]) -> bool:
    """Return whether clients fine-tuned after the last round, and no score came of it."""
    is_finetuned = any(row.get("phase") == "finetune" for row in rounds)
    return is_finetuned and "finetuned" not in summary


def describe_round(row: Row) -> str:
    """Return loss and scores of a round as :func:`score_text` does, or else its status."""
    return score_text(row) or str(row.get("status", ""))


def score_text(row: Row) -> str:
    """Return loss and scores of a row of ``rounds.jsonl`` as text, empty without them.

    E.g. ``loss 0.512 val 81.3 % test 80.1 %``, or ``val AUROC 81.3 %`` where AUROC
    selects.
    """
    loss = row.get("loss")
    is_trained = row.get("phase") != "calibration"
    parts = [f"loss {loss:.3f}"] if is_trained and loss is not None else []
    modes = row.get("metrics") or {}
    columns = modes.get("local") or modes.get("global") or {}
    metric = str(row.get("metric", "accuracy"))
    title = f" {score_title(metric)}" if metric != "accuracy" else ""
    for column in ("val", "test"):
        value = columns.get(column, {}).get(metric)
        if value is not None and not math.isnan(value):  # NaN without such nodes
            has_units = kind_of_score(metric).has_units
            shown = f"{value:.4g}" if has_units else f"{100 * value:.1f} %"
            parts.append(f"{column}{title} {shown}")
    return "  ".join(parts)


def select_round(scored: Sequence[Row], scope: str, metric: str) -> dict[str, Any]:
    """Return ``selection``, ``best`` and ``last`` of a scope, see :func:`summarise`."""
    rows = [row for row in scored if row["metrics"].get(scope)]
    if not rows:
        return {"selection": "validation", "best": None, "last": None}
    validated = [
        (*score, int(row["round"]), row)
        for row in rows
        if (score := _validation(row, scope, metric)) is not None
    ]
    last = max(rows, key=lambda row: int(row["round"]))
    best = max(validated, key=lambda entry: entry[:3])[3] if validated else last
    return {
        "selection": "validation" if validated else "last",
        "best": {"round": best["round"], **best["metrics"][scope]},
        "last": {"round": last["round"], **last["metrics"][scope]},
    }


def _metric_of(scored: Sequence[Row], metric: str) -> str:
    """Return the score that the rows name, as rows of all scores but accuracy do."""
    return str(next((row["metric"] for row in scored if "metric" in row), metric))


def _validation(row: Row, scope: str, metric: str) -> tuple[int, float] | None:
    """Return the validation nodes and the goodness of their score, None without one."""
    scores = row["metrics"].get(scope, {}).get("val", {})
    value = scores.get(metric)
    if value is None or not math.isfinite(value):
        return None
    return scores.get("num_nodes", 0), goodness(metric, value)


def rounds_without_gain(rounds: Iterable[Row], metric: str = "accuracy") -> int:
    """Count the evaluated rounds since the best validation score, so far.

    0 if the last evaluated round is better than all before it. As in :func:`summarise`,
    rounds that scored fewer validation nodes than others, because replies were lost, do
    not count.
    """
    scored = [row for row in rounds if is_scored(row)]
    main, metric = main_scope(scored), _metric_of(scored, metric)
    best, waited = (0, -math.inf), 0
    for row in scored:
        score = _validation(row, main, metric)
        if score is not None and score > best:
            best, waited = score, 0
        elif score is not None and score[0] == best[0]:
            waited += 1
    return waited


def _totals(rounds: Sequence[Row], train: Sequence[Row]) -> dict[str, Any]:
    """Return bytes, seconds and failures over all rounds."""
    sent = [row.get("bytes", {}) for row in rounds]
    payloads = {
        way: _sum(entry.get(way, {}) for entry in sent) for way in ("up", "down")
    }
    phases = _sum(row.get("seconds", {}) for row in rounds)
    total = phases.pop("total", 0.0)
    each = [
        row["seconds"]["total"] for row in train if "total" in row.get("seconds", {})
    ]
    reasons = (entry["reason"] for row in rounds for entry in row.get("failures", ()))
    return {
        "bytes": {
            "up": sum(payloads["up"].values()),
            "down": sum(payloads["down"].values()),
            "by_payload": payloads,
        },
        "seconds": {
            "total": total,
            "round_median": statistics.median(each) if each else None,
            "by_phase": phases,
        },
        "failures": dict(Counter(reasons)),
    }


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add mappings key by key; keys keep the order of their first appearance."""
    out: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            out[key] = out.get(key, 0) + value
    return out
