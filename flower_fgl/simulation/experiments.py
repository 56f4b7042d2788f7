"""Experiment files: settings that give a published number, over a grid.

::

    title = "FedAvg and Local on Cora"
    output-dir = "runs/cora"           # optional
    [config]                           # any run-config keys
    dataset = "cora"
    clients = 10
    [[case]]                           # optional: named bundles of settings
    name = "fedavg, reset"
    method = "fedavg"
    optimizer-state = "reset"
    [grid]                             # every combination, for every case, is one run
    seed = [0, 1, 2]
    [published]                        # test accuracy in percent, by row of the table:
    "fedavg, reset" = 79.4             # the case and grid values without seeds, "/"
    [published-macro-f1]               # optional: the same for test macro-F1
    [published-unseen]                 # optional: the accuracy of another column:
                                       # unseen, missing, new-client, test-masked
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from flower_fgl.core.config import INSTEAD
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar, kebab, nearest
from flower_fgl.core.score_names import SETTING_COLUMNS
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.names import in_folder_name
from flower_fgl.runs.run import Run

REPLICATES = ("seed", "partition-seed")
"""Grid keys over which the results table averages."""

MEASURED = (
    "method",
    "dataset",
    "clients",
    "setting",
    "shots",
    "partition",
    "split",
)
"""What a published value is of: on other data, or of another method, there is none."""

__all__ = ["Experiment", "read_experiment", "results_table"]


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment.

    Parameters
    ----------
    name : str
        Name of its folder.
    row : str
        Row of the results table: the same for all seeds.
    settings : mapping
        Flat run config.
    """

    name: str
    row: str
    settings: Mapping[str, Scalar]


@dataclass(frozen=True)
class Experiment:
    """A grid of runs.

    Parameters
    ----------
    name : str
        The file's stem.
    title : str
        What it reproduces.
    config : mapping
        Flat settings common to all runs.
    cases : sequence of mapping
        Named bundles of settings, each run over the whole grid.
    grid : mapping of str to list
        Settings of which every combination is run.
    published, published_f1 : mapping of str to float
        Published test accuracy and macro-F1 in percent, by cell name.
    published_columns : mapping of str to mapping of str to float
        Published accuracy in percent of the columns that only some settings have, by
        column (``unseen``, ``missing``, …) and cell name.
    """

    name: str
    title: str = ""
    config: Mapping[str, Scalar] = field(default_factory=dict)
    cases: Sequence[Mapping[str, Scalar]] = ()
    grid: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    published: Mapping[str, float] = field(default_factory=dict)
    published_f1: Mapping[str, float] = field(default_factory=dict)
    published_columns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def is_grid(self) -> bool:
        """Whether there is more than one run."""
        return bool(self.cases or self.grid)

    def with_options(self, options: Mapping[str, Scalar]) -> Experiment:
        """Return the experiment with some settings fixed for all runs.

        One of the grid stays in it, with one value: names of runs and rows stay. What an
        option takes the place of, as ``participants`` does of ``participation``, goes;
        so do published values of rows that an option takes to another method or other
        data.
        """
        gone = {key for key, other in INSTEAD.items() if other & options.keys()}
        gone -= options.keys()
        fixed = replace(
            self,
            config={
                **{k: v for k, v in self.config.items() if k not in gone},
                **options,
            },
            cases=[
                {k: v for k, v in case.items() if k not in gone | options.keys()}
                for case in self.cases
            ],
            grid={k: [options[k]] if k in options else v for k, v in self.grid.items()},
        )
        before = {run.row: run.settings for run in self.runs()}
        same = {
            run.row
            for run in fixed.runs()
            if all(
                run.settings.get(key) == before.get(run.row, {}).get(key)
                for key in MEASURED
            )
        }

        def of_same(values: Mapping[str, float]) -> dict[str, float]:
            return {row: value for row, value in values.items() if row in same}

        return replace(
            fixed,
            published=of_same(self.published),
            published_f1=of_same(self.published_f1),
            published_columns={
                column: of_same(values)
                for column, values in self.published_columns.items()
            },
        )

    def with_cases(self, names: Sequence[str]) -> Experiment:
        """Return the experiment with some of its cases only, in its order.

        Raises
        ------
        ConfigError
            If it has no case of a name.
        """
        own = [str(case["name"]) for case in self.cases]
        wrong = [name for name in names if name not in own]
        if wrong:
            raise ConfigError(
                f"{self.name} has no case {_quoted(wrong)}. "
                + (f"It has {_quoted(own)}." if own else "It has no cases.")
            )
        return replace(self, cases=[c for c in self.cases if c["name"] in names])

    def runs(self) -> list[PlannedRun]:
        """Return every run, case by case, in grid order."""
        out = []
        for case in self.cases or [{}]:
            settings = {k: v for k, v in case.items() if k != "name"}
            title = str(case.get("name", settings.get("method", "")))
            for values in itertools.product(*self.grid.values()):
                chosen = dict(zip(self.grid, values, strict=True))
                parts = [in_folder_name(title)] if title else []
                parts += [_short(k) + in_folder_name(v) for k, v in chosen.items()]
                row = [title] if title else []
                row += [str(v) for k, v in chosen.items() if k not in REPLICATES]
                out.append(
                    PlannedRun(
                        "-".join(parts) or "run",
                        "/".join(row) or "run",
                        {**self.config, **settings, **chosen},
                    )
                )
        return out


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _short(key: str) -> str:
    return "" if key == "method" else key.rpartition(".")[2]


def read_experiment(path: Path) -> Experiment:
    """Read an experiment file.

    Parameters
    ----------
    path : Path
        A TOML file with ``[config]``, or a run folder's ``config.toml``.

    Returns
    -------
    Experiment

    Raises
    ------
    ConfigError
        If the file is missing, no TOML, or holds something else.
    """
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder. Give an experiment file, or {path / 'config.toml'} of a "
            "run; --resume continues one."
        )
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"Cannot read experiment {path}: {error.strerror}."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    known = {"title", "output-dir", "config", "case", "grid"}
    columns = {column: f"published-{kebab(column)}" for column in SETTING_COLUMNS}
    known |= {"published", "published-macro-f1", *columns.values()}
    if not table:
        raise ConfigError(f"{path} is empty. It needs at least a table [config].")
    has_cases = any(isinstance(value, list) for value in table.values())
    is_experiment = has_cases or set(table) & (known - {"output-dir"})
    if is_experiment and set(table) - known:
        wrong = sorted(set(table) - known)
        raise ConfigError(
            f"{path}: unknown {', '.join(wrong)} beside the tables of an experiment. "
            f"{nearest(wrong[0], known)} Settings of all runs go into [config]."
        )
    if not (set(table) <= known and set(table) & known):
        # a run folder's config.toml: the settings themselves
        settings = {k: v for k, v in table.items() if k != "sources"}
        return Experiment(path.stem, config=dict(flatten_config(settings)))
    grid = dict(flatten_config(table.get("grid", {})))
    place = {k: str(table[k]) for k in ("output-dir",) if k in table}
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{path}: grid.{key} must be a list, got {values!r}.")
    experiment = Experiment(
        path.stem,
        title=str(table.get("title", "")),
        config=dict(flatten_config(table.get("config", {}))) | place,
        cases=_read_cases(path, table.get("case", [])),
        grid=grid,
        published=_percentages(table, "published"),
        published_f1=_percentages(table, "published-macro-f1"),
        published_columns={c: _percentages(table, key) for c, key in columns.items()},
    )
    rows = {run.row for run in experiment.runs()}
    for key in sorted(known & set(table)):
        if key.startswith("published") and (wrong := sorted(set(table[key]) - rows)):
            raise ConfigError(
                f'{path}: [{key}] names "{wrong[0]}", which is no row of the table. '
                f"{nearest(wrong[0], rows)}"
            )
    return experiment


def _percentages(table: Mapping[str, Any], name: str) -> dict[str, float]:
    return {cell: float(value) for cell, value in table.get(name, {}).items()}


def _read_cases(path: Path, cases: Any) -> list[dict[str, Scalar]]:
    """Check ``[[case]]``: tables, each with a name of its own."""
    if not isinstance(cases, list) or not all(isinstance(c, Mapping) for c in cases):
        raise ConfigError(f"{path}: write each case as a table, [[case]].")
    flat = [dict(flatten_config(case)) for case in cases]
    names = [case.get("name") for case in flat]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ConfigError(f"{path}: every [[case]] needs its own name, got {names}.")
    return flat


def results_table(
    experiment: Experiment, runs: Sequence[tuple[PlannedRun, Run]]
) -> list[dict[str, str]]:
    """Average the finished runs of a grid over seeds.

    Parameters
    ----------
    experiment : Experiment
        The grid.
    runs : sequence of (PlannedRun, Run)
        Finished runs.

    Returns
    -------
    list of dict
        One row per cell: validation and test accuracy and macro-F1 in percent, mean ±
        standard deviation over seeds, and the published value, unless the runs had a
        part of the set only. A score that some of the runs lack, such as that of a node
        set without nodes, says how many have it.
    """
    cells: dict[str, list[Run]] = {}
    for planned, run in runs:
        cells.setdefault(planned.row, []).append(run)
    rows = []
    for cell, members in cells.items():
        row = {"run": cell, "seeds": str(len(members))}
        for title, path in (
            ("val acc.", ("best", "val", "accuracy")),
            ("test acc.", ("best", "test", "accuracy")),
            ("test macro-F1", ("best", "test", "macro_f1")),
            ("test AUROC", ("best", "test", "auroc")),
            *_own_columns(members),
            ("global test acc.", ("global", "best", "test", "accuracy")),
            *_own_columns(members, "global"),
            ("fine-tuned test acc.", ("finetuned", "test", "accuracy")),
            ("fine-tuned test macro-F1", ("finetuned", "test", "macro_f1")),
        ):
            values = [_dig(run.summary, path) for run in members]
            present = [v for v in values if v is not None and not math.isnan(v)]
            if present:
                row[title] = percent(present)
                if len(present) < len(values):
                    row[title] += f" ({len(present)} of {len(values)})"
        published = {
            "published": experiment.published,
            "published macro-F1": experiment.published_f1,
        } | {
            f"published {SETTING_COLUMNS[column]}": values_by_cell
            for column, values_by_cell in experiment.published_columns.items()
        }
        what_is_there = _part_of_set(members)
        for title, values_by_cell in published.items():
            if cell in values_by_cell:
                row[title] = what_is_there or f"{values_by_cell[cell]:.1f}"
        rows.append(row)
    return rows


def _part_of_set(runs: Sequence[Run]) -> str:
    """Say what the runs' data lack of the set that is published; empty if nothing."""
    from flower_fgl.datasets.sources.registry import SOURCES

    for run in runs:
        source = SOURCES.get(str(run.summary.get("dataset")))
        names = run.summary.get("class_names")
        whole = getattr(source and source.statistics, "classes", None)
        if names and whole and len(names) < whole:
            return f"– ({len(names)} of {whole} classes)"
    return ""


def _own_columns(runs: Sequence[Run], *under: str) -> list[tuple[str, tuple[str, ...]]]:
    """Name what the runs' setting scores besides, and where it stands in a summary.

    With few shots also the plain means over clients, which FedPANO reports. ``under`` is
    where the best round stands, ``("global",)`` for the aggregated model's.
    """
    found = {column for run in runs for column in run.best or {}}
    own: list[tuple[str, tuple[str, ...]]] = [
        (title, ("best", column, "accuracy"))
        for column, title in SETTING_COLUMNS.items()
        if column in found
    ]
    if "test_masked" in found:
        own += [
            ("mean of clients", ("best", "test", "mean_accuracy")),
            ("mean, own classes", ("best", "test_masked", "mean_accuracy")),
        ]
    return [(" ".join((*under, title)), (*under, *path)) for title, path in own]


def _dig(table: Any, path: Sequence[str]) -> float | None:
    for key in path:
        if not isinstance(table, Mapping) or key not in table:
            return None
        table = table[key]
    return None if table is None else float(table)


def percent(values: Sequence[float]) -> str:
    """Format fractions as ``mean ± standard deviation`` in percent."""
    mean = 100 * fmean(values)
    if len(values) < 2:
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {100 * stdev(values):.2f}"
