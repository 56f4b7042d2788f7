"""The card of a model: what it was trained on, how good it is, and what is not known.

``card.json`` and ``card.md`` hold the same, beside the aggregated model and beside each
data owner's own. Everything in them comes from the settings and the results of the run.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import first_of, one_line
from flower_fgl.core.score_names import ScoreScale, score_title
from flower_fgl.core.settings import owners_name
from flower_fgl.core.targets import CLASSES
from flower_fgl.methods import METHODS
from flower_fgl.runs.files import CLIENTS_FILE, Row
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.runs.run import names_of_owners
from flower_fgl.runs.writer import finite, replace_file

__all__ = ["CARD", "owner_card", "run_card", "wilson", "write_card"]

CARD = ("card.json", "card.md")
Z = 1.959964
"""Quantile of the normal distribution of intervals of 95 %."""
SHARES = ("accuracy", "coverage")
"""Scores that are shares of independent items, whose interval follows from their number."""
SHOWN = (*SHARES, "set_share", "ece", "ece_calibrated", "brier", "brier_calibrated")
PROTECTION = """min-class-count share-class-counts share-feature-names min-target-count
share-target-statistics upload-clip upload-noise upload-noise-model"""
"""Settings that limit what leaves a data owner."""
FEW_ITEMS = 100
"""Test items below which a score is named as uncertain."""


def wilson(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of n independent items, Wilson (1927)."""
    centre = share + Z * Z / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def run_card(
    config: RunConfig, summary: Row, model: ModelCard | None, folder: Path
) -> dict[str, Any]:
    """Return the card of a completed run: values, rows of a table, or sentences by section.

    ``summary`` is the content of ``summary.json``; ``model`` is ``None`` if the run has
    no aggregated model. The ``clients.jsonl`` of the run's ``folder`` is read.
    """
    calibrated = summary.get("calibrated")
    tuned = summary.get("finetuned")
    best = tuned or summary.get("best") or {}
    # with evaluate = "both" the aggregated model has scores and a best round of its own
    both = summary.get("global", {}).get("best")
    entries = [entry for entry in (best, both, calibrated) if entry]
    rows = list(_client_rows(folder, {entry["round"] for entry in entries}))
    about = {row["partition_id"]: row for row in rows if "num_train" in row}
    names = names_of_owners(rows)
    scope = "global" if config.evaluate == "global" and not tuned else "local"
    scored = _owner_scores(rows, names, best, scope)
    if both:
        scored += _owner_scores(rows, names, both, "global")
    if calibrated:
        scored += _owner_scores(rows, names, calibrated, "global", "calibrated")
    return {
        "Model": _model(config, summary, model),
        "Data": _data(config, summary),
        "Owners": [_owner(row, names.get(pid, "")) for pid, row in about.items()],
        "Scores of owners": scored,
        "Calibration": _calibration(config, model, is_run=True),
        "Privacy": _privacy(config, summary),
        "Limits": _limits(config, summary, about, scored, model),
        "Versions": _versions(summary),
    }


def owner_card(
    config: RunConfig,
    model: ModelCard,
    sizes: Mapping[str, Any],
    scores: Mapping[str, Mapping[str, Any]],
    floors: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the card of a data owner's own model, which stays with the owner.

    ``sizes`` describe its data, ``scores`` are by node set, ``floors`` those in force.
    """
    rows = [_scores(f"own, {name}", each) for name, each in scores.items() if each]
    sections = {
        "Model": _model(config, {}, model),
        "Data": dict(sizes),
        "Scores": rows,
        "Calibration": _calibration(config, model),
        "Privacy": _privacy(config, {})
        | {"floors of the node": dict(floors) or "none"},
        "Limits": _limits(config, {}, {}, rows, model),
    }
    return {title: section for title, section in sections.items() if section}


def write_card(
    folder: Path, card: Mapping[str, Any], *, is_private: bool = False
) -> None:
    """Write ``card.json`` and ``card.md``, or raise a RunError."""
    text = json.dumps(finite(card), indent=2, allow_nan=False, ensure_ascii=False)
    for name, content in zip(CARD, (f"{text}\n", _markdown(card)), strict=True):
        replace_file(folder / name, content.encode(), is_private=is_private)


def _client_rows(folder: Path, rounds: Iterable[int]) -> Iterable[Row]:
    """Yield clients' descriptions, and the rows of some rounds; no other is parsed."""
    starts = tuple(f'{{"round":{number},' for number in rounds)
    path = folder / CLIENTS_FILE
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line[:20].replace(" ", "").startswith(starts) or '"num_train":' in line:
                yield json.loads(line)


def _model(config: RunConfig, summary: Row, model: ModelCard | None) -> dict[str, Any]:
    """Return method, network and target."""
    method = METHODS[config.method]
    found = {
        "method": config.method,
        "source": method.paper,
        "task": config.setting,
        "rounds": summary.get("rounds"),
        "started": summary.get("started"),
        "seed": config.seed,
        "initial model": config.initial_model and Path(config.initial_model).name,
    }
    if model is None:
        found["model"] = "none saved: each owner keeps its own"
    else:
        names, kind = model.target.names, model.target_kind
        found |= {
            "network": f"{model.model}, {model.num_layers} layers of width "
            f"{model.hidden_channels}",
            "features": model.num_features,
            "predicts": config.setting if model.link else model.target.counted,
            kind: first_of(names, 50, "; "),
            "round": model.round,
            "owner": model.owner,
        }
    return {key: value for key, value in found.items() if value not in (None, "")}


def _data(config: RunConfig, summary: Row) -> dict[str, Any]:
    """Return where the data come from, and how they were split."""
    data = summary.get("dataset")
    found = {
        "data": owners_name(config.owners) if config.owners else data,
        "owners": summary.get("clients"),
        "left out": config.without_owners
        and f"{config.without_owners}: trained without them from the start",
        "refused": ", ".join(
            f"{r['name']}: {r['reason']}" for r in summary.get("refused", ())
        ),
        "split (train/val/test)": config.split,
        "times of edges at which validation and test begin": config.time_cuts,
    }
    if not config.owners and data != "own graphs":
        found["partition"] = config.partition
        found["partition hash"] = summary.get("partition_sha256")
    return {key: value for key, value in found.items() if value not in (None, "")}


def _owner(row: Row, name: str) -> dict[str, Any]:
    """Return what an owner told of its data: no more than it chose to."""
    counts = row.get("class_counts") or ()
    out = {
        "owner": name or f"client {row['partition_id']}",
        "about": row.get("about", ""),
        "items": row["num_nodes"],
        "edges": row["num_edges"],
        "train": row["num_train"],
        "val": row["num_val"],
        "test": row["num_test"],
    }
    if row.get("target_kind", CLASSES) == CLASSES:
        out["training items by class"] = ", ".join(map(str, counts)) or "not shared"
    return out


def _owner_scores(
    rows: Iterable[Row],
    names: Mapping[int, str],
    entry: Row,
    scope: str,
    what: str = "",
) -> list[dict[str, Any]]:
    """Return one row of test scores for each owner that sent any."""
    titles = {"local": "own model", "global": "global model"}
    out = []
    for row in rows:
        found = (row.get("metrics") or {}).get(scope)
        if row["round"] != entry.get("round") or not found:
            continue
        pid = row["partition_id"]
        name = names.get(pid) or f"client {pid}"
        test = found.get("test") or {}
        out.append({"owner": name, "model": what or titles[scope], **_scores("", test)})
    return out


def _scores(name: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of one node set, with intervals of shares."""
    n = int(scores.get("num_nodes") or 0)
    found: dict[str, Any] = {"items": n}
    if name:
        found = {"model": name, **found}
    keys = [*SHOWN, *("auroc", "rmse", "mae", "r2", "interval")]
    known = scores.get("targets", {}).get("num_values", [n])
    for key in keys:
        value = scores.get(key)
        if value is None or not n or math.isnan(value):
            continue
        found[key] = round(float(value), 4)
        # numbers, or labels, of one item are not independent
        if len(known) > 1 or "micro_f1" in scores:
            continue
        if key in SHARES:
            found[f"{key} 95 %"] = [round(end, 4) for end in wilson(value, known[0])]
        elif key == "mae":
            # variance of |e| = mean of e² − (mean of |e|)²
            spread = math.sqrt(max(scores["rmse"] ** 2 - value**2, 0) / known[0])
            ends = (max(value - Z * spread, 0.0), value + Z * spread)
            found["mae 95 %"] = [round(end, 4) for end in ends]
    return found


def _calibration(
    config: RunConfig, model: ModelCard | None, *, is_run: bool = False
) -> dict[str, Any]:
    """Return how the saved model, by default an owner's, is calibrated."""
    found = None if model is None else model.calibration
    if found is None or not found.items:
        by_owner = is_run and config.calibration == "owner"
        what = "the owners' own models only" if by_owner else "no"
        return {"calibrated": what, "calibration": config.calibration}
    out: dict[str, Any] = {"calibrated": "yes", "with items of": found.source}
    out["validation items"] = found.items
    if found.score != "residual":
        out["temperature"] = round(found.temperature, 4)
        out["isotonic map"] = "yes" if found.knots else "no"
    if found.coverage:
        out |= {"coverage asked for": found.coverage, "conformal score": found.score}
        out["thresholds"] = [round(value, 6) for value in found.thresholds]
    else:
        out["sets"] = "none: several labels for each item, or too few items"
    return out


def _privacy(config: RunConfig, summary: Row) -> dict[str, Any]:
    """Return what limited the numbers that left the owners."""
    flat = config.flat()
    found: dict[str, Any] = {key: flat[key] for key in PROTECTION.split()}
    found["secure aggregation"] = (
        f"yes: the server saw sums of uploads only; at least {config.secure_threshold:g} "
        "of the clients had to stay"
        if config.secure_aggregation
        else "no: the server saw the upload of each client"
    )
    spent = summary.get("upload_privacy") or {}
    if "epsilon" in spent:
        found["ε of any client"] = f"{spent['epsilon']:.4g}"
        found["δ"] = spent["delta"]
        found["uploads counted"] = spent["uploads"]
        found["assumptions on ε"] = (
            "two uploads of one client, each clipped, are neighbours; all uploads of the "
            "run are counted, no sampling is; it covers uploads only, not scores, counts "
            "or descriptions"
        )
        if "accountant" in spent:
            found["accountant"] = spent["accountant"]
            found["assumptions on ε"] += (
                "; the noise counts only in the sum of all shares"
            )
    else:
        is_noised = bool(config.upload_noise)
        found["ε"] = (
            "see the card of the run" if is_noised else "none: no noise was added"
        )
    return found


def _limits(
    config: RunConfig,
    summary: Row,
    about: Mapping[int, Row],
    scored: Sequence[Mapping[str, Any]],
    model: ModelCard | None,
) -> list[str]:
    """Return what is known to be weak, or is not known."""
    idle = sum(not row["num_train"] for row in about.values())
    silent = len(about) - len({row.get("owner") for row in scored if row["items"]})
    few = [
        str(row.get("owner", "own")) for row in scored if 0 < row["items"] < FEW_ITEMS
    ]
    lost = sum((summary.get("failures") or {}).values())
    found = None if model is None else model.calibration
    source = found.source if found is not None and found.items else ""
    by_owner = bool(about) and config.calibration == "owner"
    models = {row["model"] for row in scored}
    limits = {
        "The scores of owners are those of their own models, not of the aggregated model "
        'that this card describes; evaluate = "global" scores that one.': (
            model is not None and bool(about) and models == {"own model"}
        ),
        f"{idle} of {len(about)} owners had no training items.": idle,
        f"{silent} owners have no test score: it is not known how they fare.": (
            silent > 0
        ),
        f"Fewer than {FEW_ITEMS} test items, so wide intervals: "
        f"{', '.join(dict.fromkeys(few))}.": few,
        **_worst_owner(str(summary.get("metric", "accuracy")), scored),
        f"{lost} replies of clients were dropped; rounds.jsonl names them.": lost,
        "Probabilities are not calibrated, and there are no sets or intervals.": (
            not source and not by_owner
        ),
        "Probabilities of the aggregated model are not calibrated: only the owners' own "
        "models are.": model is not None and by_owner,
        "Coverage holds for all owners together; that of one owner may be lower, see "
        "the scores of owners.": source == "shared",
        "Coverage needs items that are exchangeable with the validation items: later "
        "items, or another part of the graph, may be covered less.": (
            found is not None and found.coverage
        ),
        "Scores are those of nodes that were in the graph during training.": (
            config.setting == "transductive"
        ),
        "One malicious owner could have changed the model: a plain mean.": (
            config.aggregation == "mean"
        ),
        "The weights may reveal training items: there is no ε.": (
            not config.upload_noise
        ),
    }
    return [text for text, holds in limits.items() if holds]


def _worst_owner(metric: str, scored: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Name the owner with the worst score of the first model, if there are several."""
    values = {
        str(r["owner"]): r[metric]
        for r in scored
        if metric in r and "owner" in r and r["model"] == scored[0]["model"]
    }
    if len(values) < 2:
        return {}
    worst = ScoreScale(metric).worst(values)
    mean = sum(values.values()) / len(values)
    return {
        f"The worst owner is {worst}: {score_title(metric)} {values[worst]:.4g}, the "
        f"mean over owners is {mean:.4g}.": True
    }


def _versions(summary: Row) -> dict[str, Any]:
    """Return the versions of the software."""
    environment = summary.get("environment") or {}
    found = dict(environment.get("versions") or {})
    for key in ("commit", "source_sha256", "device"):
        if environment.get(key):
            found[key] = environment[key]
    return found | dict(environment.get("extensions") or {})


def _markdown(card: Mapping[str, Any]) -> str:
    """Return the sections of a card as Markdown."""
    lines = ["# Model card", "", "Generated from the settings and results of the run."]
    for title, section in card.items():
        if not section:
            continue
        lines += ["", f"## {title}", ""]
        if isinstance(section, Mapping):
            rows = [{"": key, "value": value} for key, value in section.items()]
            lines += _table(rows)
        elif isinstance(section[0], str):
            lines += [f"- {_cell(text)}" for text in section]
        else:
            lines += _table(section)
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return rows as a Markdown table; a row may lack columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    heads = [columns, ["---"] * len(columns)]
    cells = [[_cell(row.get(key, "")) for key in columns] for row in rows]
    return [f"| {' | '.join(map(str, each))} |" for each in [*heads, *cells]]


def _cell(value: Any) -> str:
    """Return a value as text; owners choose names, which must not become Markdown."""
    if isinstance(value, Mapping):
        value = ", ".join(f"{key} = {one}" for key, one in value.items())
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (
            " to ".join(map(_cell, value))
            if len(value) == 2
            else ", ".join(map(_cell, value))
        )
    text = one_line(value, 2000)
    return re.sub(r"([\\`*_\[\]<>|#!])", r"\\\1", text)
