"""Write the report: one HTML page with figures and tables of one or more runs.

The page is self-contained: figures are inline SVG images, and there are no scripts and no
network requests. All text from runs is escaped.
"""

import base64
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from flower_fgl.core.errors import RunError
from flower_fgl.core.score_names import ScoreScale, refuse_mixed_kinds, score_title
from flower_fgl.lab import plots
from flower_fgl.lab.report import numbers
from flower_fgl.lab.report.figures import draw_run, draw_runs, draw_sweeps, to_data_uri
from flower_fgl.lab.report.groups import (
    Line,
    find_sweeps,
    has_one_objective,
    lines_of,
    over_seeds,
)
from flower_fgl.lab.tables.compare import common_scale, frames_per_owner, owner_metric
from flower_fgl.lab.units import show_bytes, show_seconds
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.writer import replace_file, writing

__all__ = ["comparison_figures", "owner_table", "write_report"]

TEMPLATE = "report.html.j2"
MANY = 6
"""With more runs than this, the tables of single runs are folded."""
MISSING = "–"
"""Value of a setting that a run does not have."""
EMPTY: dict[str, Any] = {
    **dict.fromkeys(("scores", "held", "sweeps", "differing", "calibration"), ()),
    "mixture": None,
    "has_means": False,
    "has_losses": True,
}
"""Parts of the page that either one run or several do not have."""
PLACES = {"output-dir", "run-dir", "state-dir", "data-dir"}
"""Settings that say where files are, which no comparison shows."""


def write_report(
    runs: Sequence[RunFolder],
    out: Path | None = None,
    *,
    against: str = "",
    pictures: Path | None = None,
    nodes: Figure | None = None,
    title: str = "",
) -> Path:
    """Write the report of one run, or a comparison of several runs; return the HTML file.

    ``out`` is a file or folder; by default ``report.html`` in the folder of a single
    run, or ``comparison.html`` next to the folder of the first of several. A mark shows
    results that are significantly better than the method ``against``. All figures are
    also written as SVG files to ``pictures``. ``nodes`` are embeddings of some clients'
    nodes.
    """
    if not runs:
        raise RunError("A report needs at least one run folder, got none.")
    refuse_mixed_kinds((str(run.summary["method"]), run.target) for run in runs)
    name = "report.html" if len(runs) == 1 else "comparison.html"
    folder = runs[0].path if len(runs) == 1 else runs[0].path.resolve().parent
    path = out or folder / name
    if path.is_dir():
        path = path / name
    try:
        template = _environment(Path(__file__).parent).get_template(TEMPLATE)
    except jinja2.TemplateNotFound as error:
        raise RunError(
            "This copy of flower_fgl has no report template, because an app bundle "
            "contains no HTML. Use the installed command: flower-fgl report "
            f"{runs[0].path}"
        ) from error
    groups = over_seeds(runs, against)
    context = _one(runs[0]) if len(runs) == 1 else _several(runs)
    figures = context["pictures"] | ({} if nodes is None else {"nodes": nodes})
    context["pictures"] = {key: to_data_uri(value) for key, value in figures.items()}
    narrow = draw_narrow(runs)
    context["narrow"] = {key: to_data_uri(value) for key, value in narrow.items()}
    context["against"] = against
    if title and len(runs) > 1:
        context["title"] = title
    page = template.render(
        **{**EMPTY, **context},
        runs=runs,
        groups=groups,
        ranks={group["rank"] for group in groups},
        dropped=[
            {**entry, "run": label}
            for run, label in zip(runs, context["labels"], strict=True)
            for entry in numbers.dropped_replies(run)
        ],
        commands=[_command(run) for run in runs],
        columns=numbers.columns_of(runs),
        own_columns=numbers.own_columns_of(runs),
        own_by_setting=numbers.settings_of(runs),
        metrics=numbers.metrics_of(runs),
        items=numbers.item_kind(runs),
        owners=owner_table(runs, lines_of(runs, context["labels"]), against or "local"),
        idle=numbers.idle_clients(runs[0]),
        many=MANY,
        score=numbers.shown_score(runs),
        scale=common_scale(numbers.shown_score(runs), runs),
        has_finetuned=any(run.summary.get("finetuned") for run in runs),
        has_few_shot=any(run.config.get("setting") == "few-shot" for run in runs),
    )
    # the pictures come first: if they cannot be written, the page stays as it was
    if pictures is not None:
        _keep_pictures(context["pictures"], pictures)
    replace_file(path, page.encode(errors="replace"))
    return path


@lru_cache(maxsize=1)
def _environment(folder: Path) -> jinja2.Environment:
    """Return the environment of the folder's template, which it compiles only once."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "column_name": numbers.column_name,
        "percent": lambda value: ScoreScale().show(value, 1),
        "capitalise": plots.first_upper,
        "gained": lambda value, score: ScoreScale(score).show(value, 1, sign="+"),
        "shown": lambda value, score: ScoreScale(score).show(value, 1),
        "size": show_bytes,
        "titled": score_title,
        "time": show_seconds,
    }
    return environment


def draw_narrow(runs: Sequence[RunFolder]) -> dict[str, Figure]:
    """Draw the figures of the page for phones."""
    with plots.narrow_figures():
        return draw_run(runs[0]) if len(runs) == 1 else comparison_figures(runs)


def _keep_pictures(images: Mapping[str, str], folder: Path) -> None:
    """Write the figures of a page, which are data URIs, to SVG files."""
    with writing(folder, "choose"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        content = base64.b64decode(image.partition(",")[2])
        replace_file(folder / f"{name}.svg", content)


def _one(run: RunFolder) -> dict[str, Any]:
    """Return the template's context for one run."""
    scores = numbers.client_scores(run, numbers.shown_score([run]))
    held = sorted(
        (
            {**row, "test": scores.get(row["partition_id"])}
            for row in run.clients
            if "num_train"
            in row  # the description of the data, from when the client joined
        ),
        key=lambda row: int(row["partition_id"]),
    )
    return {
        "title": numbers.about(run),
        "labels": [numbers.about(run)],
        "pictures": draw_run(run),
        "scores": numbers.score_rows(run),
        "mixture": numbers.last_mixture(run),
        "held": held,
        "calibration": numbers.calibration_rows(run),
        "settings": [
            (key, _shown(value), run.sources.get(key, ""))
            for key, value in _read_settings(run).items()
        ],
    }


def _read_settings(run: RunFolder) -> dict[str, Any]:
    """Return the settings of a run without those of data that it does not read."""
    config = dict(flatten_config(run.config))
    if config.get("dataset") == "synthetic" and not config.get("owners"):
        return config
    return {k: v for k, v in config.items() if not k.startswith("synthetic.")}


def comparison_figures(runs: Sequence[RunFolder]) -> dict[str, Figure]:
    """Draw the figures of the page that compares several runs, by their name in it."""
    methods = list(dict.fromkeys(str(run.summary["method"]) for run in runs))
    pictures = draw_runs(lines_of(runs, _labels(runs)))
    return pictures | draw_sweeps(find_sweeps(runs), methods)


def _several(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return the template's context for a comparison of several runs."""
    labels = _labels(runs)
    flat = [
        {k: _shown(v) for k, v in _read_settings(run).items() if k not in PLACES}
        for run in runs
    ]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    table = [(key, [config.get(key, MISSING) for config in flat]) for key in keys]
    differing = [(key, values) for key, values in table if len(set(values)) > 1]
    if len(runs) > MANY:  # a method's own settings only where its runs differ in them
        differing = [
            (key, values)
            for key, values in differing
            if "." not in key or len({c[key] for c in flat if key in c}) > 1
        ]
    return {
        "title": f"{len(runs)} runs compared",
        "labels": labels,
        "pictures": comparison_figures(runs),
        "has_means": len(lines_of(runs, labels)) < len(runs),
        "has_losses": has_one_objective(runs),
        "sweeps": find_sweeps(runs),
        "differing": differing,
        "settings": [
            (key, next(value for value in values if value != MISSING), "")
            for key, values in table
            if (key, values) not in differing
        ],
    }


def _shown(value: Any) -> str:
    """Format a setting as JSON, but non-empty strings without quotes."""
    return value if value and isinstance(value, str) else json.dumps(value)


def _labels(runs: Sequence[RunFolder]) -> list[str]:
    """Name runs by method and by the values that distinguish them."""
    forms = {"method": "{}", "dataset": "{}", "seed": "seed {}"}
    varying = [k for k in forms if len({run.summary[k] for run in runs}) > 1]
    shown = dict.fromkeys(["method", *varying])
    labels = [
        " · ".join(forms[key].format(run.summary[key]) for key in shown) for run in runs
    ]
    # cases of an experiment have the same method but different folder names
    counts = Counter(labels)
    labels = [
        f"{label} ({run.path.name})" if counts[label] > 1 else label
        for label, run in zip(labels, runs, strict=True)
    ]
    counts = Counter(labels)
    return [
        f"{n}: {label}" if counts[label] > 1 else label
        for n, label in enumerate(labels, 1)
    ]


def _command(run: RunFolder) -> str:
    """Return the command that reproduces a run."""
    words = ["flower-fgl", "run", str(run.path / "config.toml")]
    if run.summary["clients"] and not run.config.get("clients"):
        words += ["--clients", str(run.summary["clients"])]
    if run.summary["engine"] in ("local", "ray"):
        words += ["--engine", run.summary["engine"]]
    return shlex.join(words)


TITLES = {"auroc": "area under the ROC curve (AUROC)", "accuracy": "accuracy"}


def owner_table(
    runs: Sequence[RunFolder], lines: Sequence[Line], against: str
) -> dict[str, Any]:
    """Return the template's table of owners, with a column for each line.

    The gains refer to the line of the method ``against``, if exactly one has it. The
    table is empty unless all runs have the same natural owners, and scores of them.
    """
    owners = {run.config.get("owners") or "" for run in runs}
    if "" in owners or len({run.summary["dataset"] for run in runs}) > 1:
        return {}
    metric = owner_metric(runs)
    scale = common_scale(metric, runs)
    bases = [n for n, line in enumerate(lines) if line.method == against]
    base = bases[0] if len(bases) == 1 and len(lines) > 1 else None
    means, gains = frames_per_owner([line.runs for line in lines], base, metric=metric)
    if means.empty:
        return {}
    worst = []
    for number in means:
        scores = means[number].dropna().to_dict()
        last = scale.worst(scores) if scores else ""
        worst.append((last, scores.get(last)))
    return {
        "metric": TITLES.get(metric, scale.title),
        "scale": scale,
        "lines": [line.label or line.method for line in lines],
        "base": base,
        "rows": list(zip(means.index, means.values, gains.values, strict=True)),
        "worst": worst,
        "mean": means.mean().tolist(),
        "winners": list(zip((gains > 0).sum(), gains.count(), strict=True)),
    }
