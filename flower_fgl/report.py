"""Write the report: one HTML file of pictures and tables from one or more run folders.

The page holds everything it shows (pictures are inline SVG images) and runs nothing: no
script, no network. Whatever comes from a run is escaped. A run that was killed or
failed is shown as far as it got, and says so on top.
"""

from __future__ import annotations

import base64
import json
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from flower_fgl import plots
from flower_fgl.errors import RunError
from flower_fgl.metrics import METRICS, SETTING_COLUMNS
from flower_fgl.runs import Run, flatten, replace_file

__all__ = ["write_report"]

TEMPLATE = "report.html.j2"
PER_RUN = {"seed", "partition-seed", "output-dir", "run-dir", "state-dir"}
"""Settings in which runs that are averaged over seeds may differ."""
NAN = float("nan")
NBSP = "\u00a0"


def write_report(runs: Sequence[Run], out: Path | None = None) -> Path:
    """Write the report of one run, or a page that compares several.

    Parameters
    ----------
    runs : sequence of Run
        At least one.
    out : Path or None
        The file to write, or a folder to write it into. By default ``report.html`` in
        the folder of the only run, ``comparison.html`` next to the first of several.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    RunError
        If there is no run, the file cannot be written, or this copy of the package has
        no template.
    """
    if not runs:
        raise RunError("A report needs at least one run folder, got none.")
    name = "report.html" if len(runs) == 1 else "comparison.html"
    folder = runs[0].path if len(runs) == 1 else runs[0].path.resolve().parent
    path = out or folder / name
    if path.is_dir():
        path = path / name
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "column_name": _column_name,
        "percent": percent,
        "size": show_bytes,
        "time": show_seconds,
    }
    try:
        template = environment.get_template(TEMPLATE)
    except jinja2.TemplateNotFound as error:
        raise RunError(
            "This copy of flower_fgl holds no report template (an app bundle carries "
            f"no HTML). Use the installed command: flower-fgl report {runs[0].path}"
        ) from error
    context = _one(runs[0]) if len(runs) == 1 else _several(runs)
    page = template.render(
        runs=runs,
        columns=_columns(runs),
        own_columns=_own_columns(runs),
        metrics=_metrics(runs),
        items=_items(runs),
        **context,
    )
    replace_file(path, page.encode(errors="replace"))
    return path


def percent(value: float | None) -> str:
    """Format a fraction for people: ``0.7931`` as ``79.3``, ``None`` as a dash."""
    return "–" if value is None else f"{100 * value:.1f}"


def show_bytes(num_bytes: float) -> str:
    """Format bytes for people, in decimal units."""
    factor, unit = plots.scale_bytes(num_bytes)
    digits = ".0f" if unit == "B" else ".3g"
    return f"{num_bytes / factor:{digits}}{NBSP}{unit}"


def show_seconds(value: float | None) -> str:
    """Format seconds for people, in milliseconds below one."""
    if value is None:
        return "–"
    if value < 1:
        return f"{1000 * value:.3g}{NBSP}ms"
    return f"{value:.3g}{NBSP}s" if value < 100 else f"{value:.0f}{NBSP}s"


def _one(run: Run) -> dict[str, Any]:
    """Collect what the template shows of one run."""
    accuracy = _client_accuracy(run)
    held = sorted(
        (
            {**row, "test": accuracy.get(row["partition_id"])}
            for row in run.clients
            if row["round"] == 0
        ),
        key=lambda row: int(row["partition_id"]),
    )
    pictures = _progress([_curve(run, "")])
    if accuracy:
        values = [_number(value) for value in accuracy.values()]
        figure = plots.client_bars(
            list(accuracy), values, _test_accuracy(run), items=_items([run])
        )
        pictures["clients"] = _picture(figure)
    if counted := [row for row in held if row.get("class_counts")]:
        counts = [row["class_counts"] for row in counted]
        numbers = [str(c) for c in range(len(counts[0]))]
        names = counted[0].get("class_names") or run.summary.get("class_names")
        ids = [row["partition_id"] for row in counted]
        pictures["labels"] = _picture(
            plots.label_heat_map(counts, names or numbers, ids, items=_items([run]))
        )
    return {
        "title": _about(run),
        "labels": [_about(run)],
        "pictures": pictures | _costs([run], [""]),
        "scores": _scores(run),
        "held": held,
        "groups": [],
        "differing": [],
        "dropped": _dropped(run),
        "settings": [
            (key, _shown(value), run.sources.get(key, ""))
            for key, value in flatten(run.config)
        ],
        "commands": [_command(run)],
    }


def _several(runs: Sequence[Run]) -> dict[str, Any]:
    """Collect what the template shows of several runs side by side."""
    labels = _labels(runs)
    curves = [_curve(run, label) for run, label in zip(runs, labels, strict=True)]
    per_client = [
        [_number(value) for value in _client_accuracy(run).values()] for run in runs
    ]
    pictures = _progress(curves)
    if any(per_client):
        pooled = [_test_accuracy(run) for run in runs]
        pictures["clients"] = _picture(plots.client_spread(labels, per_client, pooled))
    flat = [{k: _shown(v) for k, v in flatten(run.config)} for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    table = [(key, [config.get(key, "–") for config in flat]) for key in keys]
    differing = [(key, values) for key, values in table if len(set(values)) > 1]
    return {
        "title": f"{len(runs)} runs compared",
        "labels": labels,
        "pictures": pictures | _costs(runs, labels),
        "scores": [],
        "held": [],
        "groups": _over_seeds(runs),
        "dropped": [
            {**entry, "run": label}
            for run, label in zip(runs, labels, strict=True)
            for entry in _dropped(run)
        ],
        "differing": differing,
        "settings": [
            (key, values[0], "")
            for key, values in table
            if (key, values) not in differing
        ],
        "commands": [_command(run) for run in runs],
    }


def _picture(figure: Figure) -> str:
    """Return an image as a data URI, which keeps its names and ids to itself."""
    return (
        "data:image/svg+xml;base64," + base64.b64encode(plots.to_svg(figure)).decode()
    )


def _progress(curves: Sequence[plots.Curve]) -> dict[str, str]:
    """Draw the curves if any of them has a point."""
    if not any(curve.rounds or curve.loss_rounds for curve in curves):
        return {}
    pictures = {"convergence": _picture(plots.convergence(curves))}
    if any(curve.columns for curve in curves):
        pictures["columns"] = _picture(plots.column_curves(curves))
    return pictures


def _number(value: float | None) -> float:
    return NAN if value is None else value


def _shown(value: Any) -> str:
    """Write a setting as in TOML, but strings without quotes unless empty."""
    return value if value and isinstance(value, str) else json.dumps(value)


def _about(run: Run) -> str:
    return f"{run.summary['method']} on {run.summary['dataset']}"


def _labels(runs: Sequence[Run]) -> list[str]:
    """Name runs by what tells them apart."""
    facts = {
        key: [str(run.summary[key]) for run in runs] for key in ("dataset", "seed")
    }
    labels = [str(run.summary["method"]) for run in runs]
    for key, values in facts.items():
        if len(set(values)) > 1:
            shown = [f"seed {v}" if key == "seed" else v for v in values]
            labels = [f"{a} · {b}" for a, b in zip(labels, shown, strict=True)]
    twins = Counter(labels)
    return [
        f"{n}: {label}" if twins[label] > 1 else label
        for n, label in enumerate(labels, 1)
    ]


def _scope(run: Run) -> str:
    """Return the kind of evaluation that ``best`` and ``last`` are of."""
    scopes = {scope for row in run.rounds for scope in row.get("metrics", {})}
    return "global" if scopes == {"global"} else "local"


def _items(runs: Sequence[Run]) -> str:
    """Name what the runs classify."""
    kinds = {run.config.get("setting") == "graph" for run in runs}
    if len(kinds) > 1:
        return "nodes or graphs"
    return "graphs" if True in kinds else "nodes"


def _metrics(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return keys and names of the scores to show; AUROC where a run has it."""
    shown = [("accuracy", "accuracy"), ("macro_f1", "macro-F1")]
    shown += [("macro_recall", "recall"), ("mean_accuracy", "per client")]
    if any("auroc" in (run.best or {}).get("test", {}) for run in runs):
        shown.append(("auroc", "AUROC"))
    return shown


def _columns(runs: Sequence[Run]) -> list[str]:
    """Name the node sets that were scored, in the order in which they are shown."""
    scored = (run.best or {} for run in runs)
    found = dict.fromkeys(key for entry in scored for key in entry if key != "round")
    first = [name for name in ("val", "test", *SETTING_COLUMNS) if name in found]
    return first + [name for name in found if name not in first]


def _own_columns(runs: Sequence[Run]) -> list[str]:
    """Name the node sets that the settings of the runs score besides the usual."""
    return [name for name in _columns(runs) if name in SETTING_COLUMNS]


def _column_name(column: str) -> str:
    """Write a column for people."""
    return {"val": "validation", **SETTING_COLUMNS}.get(column, column)


def _curve(run: Run, label: str) -> plots.Curve:
    train = [row for row in run.rounds if row.get("phase") == "train"]
    scored = [row for row in train if row.get("metrics", {}).get(_scope(run))]
    own = _own_columns([run])
    columns = {
        name: [
            _number(row["metrics"][_scope(run)].get(name, {}).get("accuracy"))
            for row in scored
        ]
        for name in ("val", "test", *own)
    }
    shown = ("test", *own) if own else ()
    has_loss = [row for row in train if row.get("loss") is not None]
    return plots.Curve(
        label=label,
        rounds=[row["round"] for row in scored],
        val=columns["val"],
        test=columns["test"],
        loss_rounds=[row["round"] for row in has_loss],
        loss=[row["loss"] for row in has_loss],
        best_round=run.best["round"] if run.best else None,
        columns={_column_name(name): columns[name] for name in shown},
    )


def _client_accuracy(run: Run) -> dict[int, float | None]:
    """Return each client's test accuracy in the best round, by partition-id."""
    if run.best is None:
        return {}
    found = {
        int(row["partition_id"]): row["metrics"][_scope(run)].get("test", {})
        for row in run.clients
        if row["round"] == run.best["round"] and row.get("metrics", {}).get(_scope(run))
    }
    return {pid: found[pid].get("accuracy") for pid in sorted(found)}


def _test_accuracy(run: Run) -> float | None:
    value: float | None = (run.best or {}).get("test", {}).get("accuracy")
    return value


def _scores(run: Run) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the rows of the table of results."""
    both = run.summary.get("global", {})
    chosen = (
        "best validation round"
        if run.summary["selection"] == "validation"
        else f"last round (no validation {_items([run])})"
    )
    rows = [
        (chosen, run.best),
        ("last round", run.last),
        ("best round, aggregated model", both.get("best")),
        ("last round, aggregated model", both.get("last")),
        ("after fine-tuning", run.summary.get("finetuned")),
    ]
    return [(name, entry) for name, entry in rows if entry]


def _costs(runs: Sequence[Run], labels: Sequence[str]) -> dict[str, str]:
    """Draw bytes by payload and seconds by phase, where there are any."""
    out = {}
    ways = [("up", "to server"), ("down", "to clients")]
    sent = [run.summary["bytes"]["by_payload"][way] for run in runs for way, _ in ways]
    names = [f"{label} {text}".strip() for label in labels for _, text in ways]
    totals = [sum(part.values()) for part in sent]
    if any(totals):
        factor, unit = plots.scale_bytes(max(totals))
        out["bytes"] = _picture(plots.stacked_bars(names, _parts(sent, factor), unit))
    spent = [run.summary["seconds"]["by_phase"] for run in runs]
    if any(sum(part.values()) for part in spent):
        rows = [label or "all rounds" for label in labels]
        out["seconds"] = _picture(plots.stacked_bars(rows, _parts(spent, 1.0), "s"))
    return out


def _parts(
    rows: Sequence[Mapping[str, float]], factor: float
) -> dict[str, list[float]]:
    """Turn one mapping per bar into one list per part."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: [row.get(key, 0) / factor for row in rows] for key in keys}


def _dropped(run: Run) -> list[dict[str, Any]]:
    """Count dropped replies by reason, with the clients and rounds concerned."""
    out: dict[str, dict[str, Any]] = {}
    for row in run.rounds:
        for failure in row.get("failures", ()):
            reason = failure["reason"]
            entry = out.setdefault(reason, {"count": 0, "clients": set(), "rounds": []})
            entry["count"] += 1
            entry["clients"].add(failure.get("partition_id"))
            entry["rounds"].append(row["round"])
    return [
        {
            "reason": reason,
            "count": entry["count"],
            "clients": ", ".join(str(pid) for pid in sorted(entry["clients"], key=str)),
            "first": min(entry["rounds"]),
            "last": max(entry["rounds"]),
        }
        for reason, entry in out.items()
    ]


def _over_seeds(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Average completed runs that differ in their seeds only."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.status == "completed" and _test_accuracy(run) is not None:
            config = {k: v for k, v in flatten(run.config) if k not in PER_RUN}
            key = json.dumps(
                [_about(run), run.summary["clients"], sorted(config.items())]
            )
            groups.setdefault(key, []).append(run)
    return [
        {
            "name": _about(group[0]),
            "clients": group[0].summary["clients"],
            "seeds": ", ".join(str(run.summary["seed"]) for run in group),
            **{
                f"{column}_{metric}": _mean_std(group, column, metric)
                for column in ("val", "test", *SETTING_COLUMNS)
                for metric in METRICS
            },
        }
        for group in groups.values()
        if len(group) > 1
    ]


def _mean_std(group: Sequence[Run], column: str, metric: str) -> str:
    values = [(run.best or {}).get(column, {}).get(metric) for run in group]
    known = [100 * value for value in values if value is not None]
    if len(known) < 2:
        return "–"
    return f"{statistics.mean(known):.1f} ± {statistics.stdev(known):.1f}"


def _command(run: Run) -> str:
    """Return the command that gives the same numbers again."""
    words = ["flower-fgl", "run", str(run.path / "config.toml")]
    if run.summary["clients"] and not run.config.get("clients"):
        words += ["--clients", str(run.summary["clients"])]
    if run.summary["engine"] in ("local", "ray"):
        words += ["--engine", run.summary["engine"]]
    return shlex.join(words)
