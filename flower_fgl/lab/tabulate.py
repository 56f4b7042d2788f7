"""Make the cells of a results table from run folders, and the table of a grid."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from flower_fgl.core.atomic import write_file
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import AUTO
from flower_fgl.core.score_names import SETTING_COLUMNS
from flower_fgl.core.settings import is_file, owners_name
from flower_fgl.lab.experiments.experiment_file import (
    Experiment,
    PlannedRun,
    read_experiment,
    standalone_text,
    with_clients,
)
from flower_fgl.lab.tables.cells import PLACE, Cell, describe_published, make_cell
from flower_fgl.lab.tables.compare import PER_RUN, group_runs
from flower_fgl.lab.tables.frame import Scores, frame_of_runs, place_of
from flower_fgl.lab.tune.tuned_file import experiment_table, hash_of_study
from flower_fgl.methods import drop_removed
from flower_fgl.runs.files import flatten_config, grouped, read_text
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.writer import writing

__all__ = ["copy_experiment", "missing_classes", "order_runs", "results_table"]
__all__ += ["tabulate_runs"]

ANYWHERE = (PER_RUN - {"seed", "partition-seed"}) | {"device"}
"""Settings that may differ from those of the experiment file."""


def copy_experiment(
    experiment: Experiment, file: Path | None, folder: Path, *, is_changed: bool
) -> Path:
    """Write the experiment file of a grid beside its run folders, as ``<folder>.toml``.

    If options changed it, its settings are written anew; otherwise the file is copied,
    with what it extends.
    """
    path = folder / f"{folder.name}.toml"
    if file is not None and not is_changed:
        data = standalone_text(file).encode()
    else:
        source = f"{experiment.name} with the options of the command line"
        head = f"# Written by flower-fgl run: {source}.\n\n"
        data = (head + tomli_w.dumps(experiment_table(experiment))).encode()
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        if not (path.exists() and path.read_bytes() == data):
            write_file(path, data)
    return path


def order_runs(runs: Sequence[RunFolder]) -> tuple[list[RunFolder], str]:
    """Order runs as the experiment files beside their folders list them, folder by folder.

    Other runs follow in the order given. Also returns the title of the experiment, if
    all runs are of experiments with the same one.
    """
    ordered, titles = [], set()
    for folder, members in _by_folder(runs).items():
        places: dict[str, int] = {}
        title = ""
        with suppress(ConfigError):
            experiment = read_experiment(folder / f"{folder.name}.toml")
            places = {run.name: place for place, run in enumerate(experiment.runs())}
            title = experiment.title
        names = {run.path.name for run in members}
        titles.add(title if names <= places.keys() else "")
        ordered += sorted(
            members, key=lambda run: places.get(run.path.name, len(places))
        )
    return ordered, titles.pop() if len(titles) == 1 else ""


def tabulate_runs(
    runs: Sequence[RunFolder], files: Sequence[Path] = ()
) -> tuple[list[Cell], list[str]]:
    """Group runs into cells, by the experiment file in the folder of each run folder.

    ``files`` are experiment files of folders without a copy, by the name of the folder.
    Also returns what the cells do not hold, one sentence each.
    """
    folders = _by_folder(runs)
    given = {file.stem: file for file in files}
    if other := [file for file in files if given[file.stem] != file]:
        raise ConfigError(
            f"{other[0]} and {given[other[0].stem]} have the same name, which must be that "
            "of the folder of run folders. Pass one of them."
        )
    cells: list[Cell] = []
    notes: list[str] = []
    used = set()
    for folder, members in folders.items():
        file = folder / f"{folder.name}.toml"
        if not file.is_file() and folder.name in given:
            file = given[folder.name]
            used.add(folder.name)
        if file.is_file():
            experiment = replace(read_experiment(file), name=folder.name)
            _check_study(experiment, folder)
            found, missing = _planned_cells(experiment, file, members)
        else:
            found, missing = _unplanned_cells(folder.name, members)
            missing += [
                f"{other} is not used, because the experiment file of the runs in "
                f"{folder.name} is {folder.name}.toml. Give the folder or the file its old "
                "name."
                for other in sorted(folder.glob("*.toml"))
            ]
        cells += found
        notes += missing
    if unused := sorted(given.keys() - used):
        raise RunError(
            f"{given[unused[0]]} is not used: it is for run folders in a folder "
            f'"{unused[0]}" that holds no {unused[0]}.toml. Folders given: '
            f"{', '.join(str(folder) for folder in folders)}."
        )
    if not cells:
        raise RunError(f"No run is complete. {' '.join(notes)}")
    return cells, notes


def _by_folder(runs: Sequence[RunFolder]) -> dict[Path, list[RunFolder]]:
    return grouped(runs, lambda run: run.path.resolve().parent)


def _planned_cells(
    experiment: Experiment, file: Path, runs: Sequence[RunFolder]
) -> tuple[list[Cell], list[str]]:
    """Return the cells of an experiment, and what is missing in them."""
    planned = {run.name: run for run in experiment.runs()}
    rows: dict[str, list[RunFolder]] = {}
    waiting: dict[str, list[str]] = {}
    for run in runs:
        plan = planned.get(run.path.name)
        if plan is None:
            raise RunError(
                f"{run.path} is no run of {file}, whose rows are "
                f"{', '.join(dict.fromkeys(p.label for p in planned.values()))}. Move "
                "the folder, or select rows with FOLDER:NAME."
            )
        _check_settings(plan, run, file)
        if run.status == "completed" and run.best is not None:
            rows.setdefault(plan.row, []).append(run)
        else:
            error = run.summary.get("error")
            why = run.status if not error else f"{run.status}: {error}"
            waiting.setdefault(plan.label, []).append(f"{run.path.name} ({why})")
    plans = grouped(planned.values(), lambda plan: plan.row)
    cells = []
    for order, (row, (plan, *_)) in enumerate(plans.items()):
        if row in rows:
            found = experiment.published
            published = {key: of[row] for key, of in found.items() if row in of}
            notes = []
            if published and (partial := missing_classes(rows[row])):
                published = {}
                notes = [f"Published values are left out: the runs have {partial}."]
            cells.append(
                replace(
                    make_cell(rows[row], experiment=experiment.name, row=plan.line),
                    title=experiment.title,
                    order=order,
                    planned_draws=experiment.draws,
                    published=published,
                    tuning=_tuning_of(experiment, row),
                    notes=notes,
                )
            )
    missing = [
        f"{experiment.name}, {label}: not complete: {', '.join(names)}."
        for label, names in waiting.items()
    ]
    absent = [
        plan.label
        for row, (plan, *_) in plans.items()
        if row not in rows and plan.label not in waiting
    ]
    if absent:
        missing.append(
            f"{experiment.name}: not run or not selected: {'; '.join(absent)}."
        )
    return cells, missing


def _check_settings(plan: PlannedRun, run: RunFolder, file: Path) -> None:
    """Reject a run whose settings are not those of the experiment file."""
    own = drop_removed(dict(flatten_config(run.config)))
    method = str(run.summary["method"])
    wanted = drop_removed(with_clients(plan.settings))
    known = {*wanted, *ANYWHERE}
    if own.get("owners"):
        known.add("clients")  # counted in the folder of the owners
    # what the file no longer sets, a later run would not have
    changed = [
        f"{key} is {own[key]!r}, not set there"
        for key, source in run.sources.items()
        if source == "user" and key in own and key not in known
    ]
    for key, value in wanted.items():
        table, dot, _ = key.partition(".")
        is_other = dot and table not in (method, str(run.config.get("dataset")))
        if is_other or key in ANYWHERE or value == AUTO:
            continue
        found = own.get(key, "absent")
        is_path = key in ("owners", "initial-model")
        if is_path or (key == "dataset" and is_file(str(value))):
            # a run has the absolute path
            is_same = owners_name(str(found)) == owners_name(str(value))
        else:
            is_same = found == value
        if not is_same:
            changed.append(
                f"{key} {'are' if key == 'owners' else 'is'} {found!r}, not {value!r}"
            )
    if changed:
        raise RunError(
            f"{run.path} was run with other settings than {file} has for it "
            f"({'; '.join(changed)}), so it is a run of another experiment. Run the "
            "experiment into another output-dir, or pass the file that the run was made "
            "with."
        )


def _tuning_of(experiment: Experiment, row: str) -> dict[str, Any]:
    """Return how a row was tuned, empty if it was not."""
    tuning = experiment.tuning
    trials: Mapping[str, int] = tuning.get("trials", {})
    if row not in trials:
        return {}
    kept = ("experiment", "budget", "draws", "metric", "study")
    return {
        **{key: tuning[key] for key in kept},
        "trials": trials[row],
        "failed": tuning.get("failed", {}).get(row, 0),
        "settings": list(tuning.get("settings", {}).get(row, [])),
    }


def _check_study(experiment: Experiment, folder: Path) -> None:
    """Reject runs whose settings are not those of the study beside their folder."""
    name = str(experiment.tuning.get("experiment", ""))
    file = folder.parent / name / "tune" / "study.json"
    if not name or not file.is_file():
        return
    try:
        study = json.loads(read_text(file))
        found, digest = str(study["experiment"]), hash_of_study(study)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RunError(f"{file} is damaged: {error}.") from error
    wanted = str(experiment.tuning["study"])
    if found != name or digest != wanted:
        raise RunError(
            f"The runs in {folder} have settings of study {wanted[:12]} of {name}, but "
            f"{file} is now study {digest[:12]} of {found}. Run the tuned file that "
            f"belongs to study {digest[:12]} with another output-dir, or move {file} away."
        )


def _unplanned_cells(
    name: str, runs: Sequence[RunFolder]
) -> tuple[list[Cell], list[str]]:
    """Return the cells of a folder without experiment file, by the runs' settings."""
    done = [run for run in runs if run.status == "completed" and run.best is not None]
    cells = [
        replace(
            make_cell(members, experiment=name, row=label.replace(" · ", ", ")),
            order=order,
        )
        for order, (label, members) in enumerate(group_runs(done, but=PLACE))
    ]
    return cells, [
        f"{run.path.name}: not complete ({run.status})."
        for run in runs
        if run not in done
    ]


def results_table(
    experiment: Experiment, runs: Sequence[tuple[PlannedRun, RunFolder]]
) -> list[list[dict[str, str]]]:
    """Average the finished runs of a grid over its seeds or draws, by place and title.

    If some runs lack a score, e.g. of an empty node set, the cell states how many have
    it. Published values are left out if the runs used only part of the dataset.
    """
    replicate = "draws" if experiment.draws else "seeds"
    members = grouped(runs, lambda pair: pair[0].row)
    scores = Scores(frame_of_runs(("", planned.row, run) for planned, run in runs))
    titles = {"accuracy": "published", "macro_f1": "published macro-F1"}
    titles |= {key: f"published {title}" for key, title in SETTING_COLUMNS.items()}
    places: dict[object, list[dict[str, str]]] = {}
    for name, pairs in members.items():
        found = [run for _, run in pairs]
        row = {"run": pairs[0][0].label or name, replicate: str(len(found))}
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
    shown = list(dict.fromkeys(key for run in runs for key in run.shown_scores()))
    main = {"mean_accuracy", *(n for _, column, n in shown if column == "val")}
    found = [(title, (best, column, score)) for title, column, score in shown]
    found += [
        (f"global {title}", ("global", column, score))
        for title, column, score in shown
        if column != "val" and score in main
    ]
    if is_tuned:
        tests = [key for key in shown if key[1] == "test"]
        found += [(f"fine-tuned {t}", ("own", column, n)) for t, column, n in tests]
    return found


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
