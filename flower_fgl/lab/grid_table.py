"""The table of a grid that ``flower-fgl run`` prints: its rows over seeds or draws."""

from __future__ import annotations

from collections.abc import Sequence

from flower_fgl.core.score_names import EXTRA_SCORES, SETTING_COLUMNS, number_scores
from flower_fgl.lab.experiments.experiment_file import Experiment, PlannedRun
from flower_fgl.lab.tables.cells import describe_published
from flower_fgl.lab.tables.frame import Scores, frame_of_runs, place_of
from flower_fgl.runs.run import RunFolder

__all__ = ["missing_classes", "results_table"]


def results_table(
    experiment: Experiment, runs: Sequence[tuple[PlannedRun, RunFolder]]
) -> list[list[dict[str, str]]]:
    """Average the finished runs of a grid over its seeds or draws, by place and title.

    If some runs lack a score, e.g. of an empty node set, the cell states how many have
    it. Published values are left out if the runs used only part of the dataset.
    """
    replicate = "draws" if experiment.draws else "seeds"
    labels = {planned.row: planned.label or planned.row for planned, _ in runs}
    members: dict[str, list[RunFolder]] = {}
    for planned, run in runs:
        members.setdefault(planned.row, []).append(run)
    scores = Scores(frame_of_runs(("", planned.row, run) for planned, run in runs))
    titles = {"accuracy": "published", "macro_f1": "published macro-F1"}
    titles |= {key: f"published {title}" for key, title in SETTING_COLUMNS.items()}
    places: dict[object, list[dict[str, str]]] = {}
    for name, found in members.items():
        row = {"run": labels[name], replicate: str(len(found))}
        for title, key in _columns(found):
            if values := scores.values("", name, *key):
                row[title] = found[0].scale_of(key[2]).show_mean(values)
                if len(values) < len(found):
                    row[title] += f" ({len(values)} of {len(found)})"
        partial = missing_classes(found)
        for score, title in titles.items():
            by_row = experiment.published.get(score) or {}
            if name in by_row:
                own = describe_published(by_row[name])
                row[title] = f"– ({partial})" if partial else own
        places.setdefault(place_of(found[0]), []).append(row)
    return list(places.values())


def _columns(runs: Sequence[RunFolder]) -> list[tuple[str, tuple[str, str, str]]]:
    """Return title, and model, node set and score, of the columns of a row."""
    is_tuned = any(run.summary.get("finetuned") for run in runs)
    best = "before" if is_tuned else "own"
    found = {column for run in runs for column in run.best or {}}
    if runs[0].target:
        main = runs[0].owner_metric()
        scores = number_scores(runs[0].target)
        keys = [(best, "val", main), *((best, "test", name) for name in scores)]
        keys += [(best, column, main) for column in SETTING_COLUMNS if column in found]
        keys += [("global", "test", main)]
        keys += [("own", "test", main)] if is_tuned else []
        words = {"global": "global ", "own": "fine-tuned " if is_tuned else ""}
        return [
            (
                f"{words.get(model, '')}{SETTING_COLUMNS.get(column, column)} "
                f"{runs[0].scale_of(name).title}",
                (model, column, name),
            )
            for model, column, name in keys
        ]
    own = [
        (title, (best, column, "accuracy"))
        for column, title in SETTING_COLUMNS.items()
        if column in found
    ]
    if "test_masked" in found:  # few-shot; FedPANO reports plain means over clients
        own += [
            ("mean of clients", (best, "test", "mean_accuracy")),
            ("mean, own classes", (best, "test_masked", "mean_accuracy")),
        ]
    shown = [
        ("val acc.", (best, "val", "accuracy")),
        ("test acc.", (best, "test", "accuracy")),
        ("test macro-F1", (best, "test", "macro_f1")),
        *((f"test {t}", (best, "test", extra)) for extra, t in EXTRA_SCORES.items()),
        *own,
        ("global test acc.", ("global", "test", "accuracy")),
        *((f"global {title}", ("global", *key[1:])) for title, key in own),
    ]
    if is_tuned:
        shown += [
            ("fine-tuned test acc.", ("own", "test", "accuracy")),
            ("fine-tuned test macro-F1", ("own", "test", "macro_f1")),
        ]
    return shown


def missing_classes(runs: Sequence[RunFolder]) -> str:
    """State how many classes of the dataset the runs have; empty if all of them."""
    from flower_fgl.datasets.sources.registry import SOURCES

    for run in runs:
        source = SOURCES.get(str(run.summary.get("dataset")))
        names = run.summary.get("class_names")
        total = getattr(source and source.statistics, "classes", None)
        if names and total and len(names) < total:
            return f"{len(names)} of {total} classes"
    return ""
