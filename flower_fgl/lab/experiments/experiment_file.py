"""Experiment files: a grid of runs, and the published values; see docs/experiments.md."""

from __future__ import annotations

import contextlib
import itertools
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from flower_fgl.core.config import INSTEAD
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import Scalar, kebab, load_toml, nearest
from flower_fgl.core.score_names import SETTING_COLUMNS
from flower_fgl.core.settings import TARGETS
from flower_fgl.core.unused_settings import reject_unused_settings, unused_settings
from flower_fgl.lab.experiments.search_space import MACHINE, Dimension, read_space
from flower_fgl.lab.tables.cells import (
    DEFAULT_SUFFIX,
    NO_RESULT,
    PLACE,
    describe_trials,
)
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.runs.files import (
    check_folder_name,
    flatten_config,
    grouped,
    in_folder_name,
    read_text,
    require_whole,
)

DEFAULT_CLIENTS = 10
"""Clients of a run whose settings name no number."""
REPLICATES = ("seed", "partition-seed")
"""Settings over which the results table averages. ``draws`` sets both."""
DRAW = "{draw}"
"""Part of ``owners`` that stands for the number of the draw: files of its own."""

MEASURED = ("method", "owners", *PLACE, "feature-norm")
"""Settings that a published value depends on; if one changes, the value is dropped."""

NOT_TUNED = NO_RESULT | set(MACHINE.split())
"""Settings that an option may change without making a row another than the tuned one."""

PUBLISHED = {"published": "accuracy", "published-macro-f1": "macro_f1"}
PUBLISHED |= {f"published-{kebab(column)}": column for column in SETTING_COLUMNS}
"""Score or column of each table of published values."""

KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("config", "grid", "tune", "tuning", *PUBLISHED), (dict, "table")),
    **dict.fromkeys(("title", "output-dir"), (str, "text")),
}
"""Type of the entries of an experiment file, and its name."""
EXTENDS = "extends"
"""Key of an experiment file: path of another one, relative to the file's own folder."""
KNOWN = {*KINDS, "draws", "tune-draws", "case"}
"""Entries of an experiment file."""

TUNED_ROWS = ("trials", "failed", "settings")
"""Keys of the table [tuning] that hold one value per row."""
NAMED_ROWS = ("lines", "labels")
"""Those that hold the row's name from before its grid values became a case."""

__all__ = ["Experiment", "describe_tuning", "read_experiment", "read_tables"]
__all__ += ["effective_settings", "standalone_text", "with_clients"]


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment: the name of its folder, and its flat settings.

    ``row`` of the results table is the same for all seeds; ``label`` adds the keys of
    grid values; ``line`` is ``label`` without the values that define the data, which
    are columns of ``flower-fgl table``. ``case`` is empty without cases. ``given`` are
    the settings of the file, before :func:`effective_settings`.
    """

    name: str
    row: str
    settings: Mapping[str, Scalar]
    label: str = ""
    line: str = ""
    case: str = ""
    given: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A grid of runs; ``name`` is the stem of the file name.

    Each of the ``cases`` is combined with the whole ``grid``. ``draws`` is 0 if the
    grid or the settings choose the seeds. ``published`` holds percentages by score or
    column and table row, ``tuning`` how the settings of a file that ``flower-fgl tune``
    wrote were tuned.
    """

    name: str
    title: str = ""
    config: Mapping[str, Scalar] = field(default_factory=dict)
    cases: Sequence[Mapping[str, Scalar]] = ()
    grid: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    draws: int = 0
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tune: Mapping[str, Dimension] = field(default_factory=dict)
    tune_draws: Sequence[int] = ()
    tuning: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_grid(self) -> bool:
        """Whether the experiment has cases, a grid or draws."""
        return bool(self.cases or self.grid or self.draws)

    def with_options(self, options: Mapping[str, Scalar | list[Scalar]]) -> Experiment:
        """Return the experiment with some settings fixed for all runs, or as a grid.

        A list is a grid setting, in place of the experiment's own values; a grid
        setting stays in the grid with one value, which keeps the names of runs and
        rows. Published values are removed from rows whose method or data an option
        changes, and rows with other settings are no longer tuned.
        """
        if self.draws and (seeds := options.keys() & set(REPLICATES)):
            raise ConfigError(
                f"{self.name} sets {' and '.join(REPLICATES)} of each of its draws. Remove "
                f"{_quoted(sorted(seeds))}, or draws from the file. --draws 1 runs the "
                "first draw only."
            )
        replaced = {key for key, other in INSTEAD.items() if other & options.keys()}
        replaced -= options.keys()
        single = {k: v for k, v in options.items() if not isinstance(v, list)}
        lists = {k: v for k, v in options.items() if isinstance(v, list)}
        gone = replaced | lists.keys()
        fixed = replace(
            self,
            config={
                **{k: v for k, v in self.config.items() if k not in gone},
                **single,
            },
            cases=[
                {k: v for k, v in case.items() if k not in replaced | options.keys()}
                for case in self.cases
            ],
            grid={
                **{k: [single[k]] if k in single else v for k, v in self.grid.items()},
                **lists,
            },
        )
        before = {run.row: run.settings for run in self.runs()}
        unchanged = {
            run.row
            for run in fixed.runs()
            if _picked(run.settings) == _picked(before.get(run.row, {}))
        }
        kept = {
            key: {row: value for row, value in values.items() if row in unchanged}
            for key, values in self.published.items()
        }
        return replace(
            fixed,
            tuning=_tuning_of_unchanged(self, fixed) if self.tuning else {},
            published={key: values for key, values in kept.items() if values},
        )

    def with_cases(self, names: Sequence[str]) -> Experiment:
        """Return the experiment with some of its cases only, in their original order."""
        own = [str(case["name"]) for case in self.cases]
        wrong = [name for name in names if name not in own]
        if wrong:
            raise ConfigError(
                f"{self.name} has no case {_quoted(wrong)}. "
                + (f"Its cases: {_quoted(own)}." if own else "It has no cases.")
            )
        return replace(self, cases=[c for c in self.cases if c["name"] in names])

    def with_draws(self, number: int) -> Experiment:
        """Return the experiment with its first draws; a ConfigError if it has fewer."""
        if not 1 <= number <= self.draws:
            raise ConfigError(
                f"{self.name} has {self.draws} draws, but {number} were asked for."
                if self.draws
                else f"{self.name} has no draws: leave the number of draws out."
            )
        return replace(self, draws=number)

    def _name_of(self, case: str, kind: str) -> str:
        """Return the row of a tuned case in "lines", or "labels"; others have none."""
        names: Mapping[str, str] = self.tuning.get(kind, {})
        row = case.removesuffix(DEFAULT_SUFFIX)
        return names[row] + DEFAULT_SUFFIX * (row != case) if row in names else case

    def runs(self) -> list[PlannedRun]:
        """Return all runs, case by case, in grid order.

        A setting that has no effect in a run is left out of it, so that no run is
        repeated.
        """
        out: dict[str, list[PlannedRun]] = {}
        names = Counter(map(_short, self.grid))
        draws = list(range(self.draws)) or [-1]
        for case in self.cases or [{}]:
            settings = {k: v for k, v in case.items() if k != "name"}
            title = str(case.get("name", settings.get("method", "")))
            for *values, draw in itertools.product(*self.grid.values(), draws):
                given = dict(zip(self.grid, values, strict=True))
                whole = {**self.config, **settings, **given}
                kept = effective_settings(whole, int(draw))
                chosen = {k: v for k, v in given.items() if k in kept}
                parts = [in_folder_name(title)] if title else []
                parts += [_short(k) + in_folder_name(v) for k, v in chosen.items()]
                parts += [f"draw{draw}"] if self.draws else []
                shown = {k: v for k, v in chosen.items() if k not in REPLICATES}
                label = {k: _labelled(k, v, names) for k, v in shown.items()}
                line = [text for k, text in label.items() if k not in PLACE]
                run = PlannedRun(
                    "-".join(parts) or "run",
                    _joined("/", title, *map(str, shown.values())),
                    kept,
                    _joined(", ", self._name_of(title, "labels"), *label.values()),
                    _joined(", ", self._name_of(title, "lines"), *line),
                    str(case.get("name", "")),
                    {**self.config, **settings, **chosen},
                )
                if given == chosen or run not in out.get(run.name, ()):
                    out.setdefault(run.name, []).append(run)
        return [run for runs in out.values() for run in runs]


def _tuning_of_unchanged(before: Experiment, after: Experiment) -> dict[str, Any]:

    def settings_of(experiment: Experiment) -> dict[str, set[tuple[str, Scalar]]]:
        rows = grouped(experiment.runs(), lambda run: run.row)
        return {
            row: {
                s for run in runs for s in run.settings.items() if s[0] not in NOT_TUNED
            }
            for row, runs in rows.items()
        }

    old, new = settings_of(before), settings_of(after)
    tuning = {
        key: {r: v for r, v in value.items() if old.get(r) == new.get(r)}
        if key in TUNED_ROWS
        else value
        for key, value in before.tuning.items()
    }
    return tuning if tuning.get("trials") else {}


def _picked(settings: Mapping[str, Scalar]) -> list[Scalar | None]:
    """Return the settings that a published value depends on."""
    return [settings.get(key) for key in MEASURED]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _joined(by: str, *parts: str) -> str:
    """Join the parts of a name that are not empty."""
    return by.join(part for part in parts if part) or "run"


def _require(
    is_right: object, path: Path, what: str, found: object, hint: str = ""
) -> None:
    """Reject a wrong entry of a file: what it must be, what it is, and what to do."""
    if not is_right:
        raise ConfigError(f"{path}: {what}, got {found!r}.{hint}")


def _short(key: str) -> str:
    """Return the prefix of a grid value in the name of a run folder."""
    return "" if key == "method" else key.rpartition(".")[2]


def _labelled(key: str, value: Scalar, names: Mapping[str, int]) -> str:
    """Return ``key=value`` for the table; a method, which needs no key, stands alone."""
    short = _short(key)
    return f"{short if names[short] == 1 else key}={value}" if short else str(value)


def effective_settings(
    settings: Mapping[str, Scalar], draw: int = -1
) -> dict[str, Scalar]:
    """Return those of the settings that have an effect, with the seeds of a draw.

    ``{draw}`` in ``owners`` becomes its number.
    """
    out = dict(settings)
    with contextlib.suppress(ConfigError):  # reported later, with the name of the run
        unused = set(unused_settings(settings, parse_config(settings)))
        out = {k: v for k, v in settings.items() if k not in unused}
    if draw >= 0:
        out |= dict.fromkeys(REPLICATES, draw)
        if DRAW in (owners := str(out.get("owners", ""))):
            out["owners"] = owners.replace(DRAW, str(draw))
    return out


def _reject_tables(path: Path, table: Mapping[str, Any]) -> None:
    """Reject a table that neither an experiment file nor a ``config.toml`` holds."""
    names = {"synthetic", *(n for n, m in METHODS.items() if m.settings is not None)}
    for name, value in table.items():
        if isinstance(value, Mapping) and name not in {*names, *METHODS, "sources"}:
            raise ConfigError(
                f"{path}: unknown table [{name}]. {nearest(name, KNOWN | names)} Put "
                "settings of all runs into [config]."
            )


def read_experiment(path: Path) -> Experiment:
    """Read an experiment file, or the ``config.toml`` of a run folder."""
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder. Pass an experiment file; or, to repeat a run, the "
            "config.toml of its run folder; --resume continues one."
        )
    table = read_tables(path)
    check_folder_name(path.stem, f"{path}: the experiment")
    if not table:
        raise ConfigError(f"{path} is empty. Add at least a [config] table.")
    has_cases = any(isinstance(value, list) for value in table.values())
    is_experiment = has_cases or set(table) & (KNOWN - {"output-dir"})
    if is_experiment and set(table) - KNOWN:
        wrong = sorted(set(table) - KNOWN)
        raise ConfigError(
            f"{path}: unknown top-level {', '.join(wrong)} in an experiment file. "
            f"{nearest(wrong[0], KNOWN)} Put settings of all runs into [config]."
        )
    if not (set(table) <= KNOWN and set(table) & KNOWN):
        # the config.toml of a run folder, which holds the settings at top level
        _reject_tables(path, table)
        settings = {k: v for k, v in table.items() if k != "sources"}
        if settings.get("dataset") in TARGETS and (
            settings.get("positive-class") == settings.get("target")
        ):  # the default, which follows the target when an option changes it
            settings.pop("positive-class", None)
        return Experiment(path.stem, config=dict(flatten_config(settings)))
    for key, (kind, name) in KINDS.items():
        value = table.get(key, kind())
        shown = f"[{key}]" if kind is dict else key
        _require(isinstance(value, kind), path, f"{shown} must be a {name}", value)
    config = dict(flatten_config(table.get("config", {})))
    if "output-dir" in table:
        if "output-dir" in config:
            raise ConfigError(f"{path}: output-dir is there twice. Remove one of them.")
        config["output-dir"] = table["output-dir"]
    grid = dict(flatten_config(table.get("grid", {})))
    cases = _read_cases(path, table.get("case", []))
    draws = table.get("draws", 0)
    is_number = type(draws) is int and 0 <= draws <= 1000
    _require(is_number, path, "draws must be a number from 0 to 1000", draws)
    _check_settings(path, config, cases, grid, draws)
    if table.get("tuning"):
        _check_tuning(path, table["tuning"], draws)
    experiment = Experiment(
        path.stem,
        title=str(table.get("title", "")),
        config=config,
        cases=cases,
        grid=grid,
        draws=draws,
        tune=read_space(path, table.get("tune", {})),
        tune_draws=_read_tune_draws(path, table, draws),
        tuning=dict(table.get("tuning", {})),
    )
    runs = experiment.runs()
    given = [*config, *grid, *(key for case in cases for key in case if key != "name")]
    kept = {key for run in runs for key in run.settings}
    if unused := [key for key in given if key not in kept]:
        configs = [parse_config(run.settings) for run in runs]
        reject_unused_settings(unused, configs, where=f"{path}: ")
    return replace(experiment, published=_read_published(path, table, runs))


def _check_settings(
    path: Path,
    config: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    grid: Mapping[str, Any],
    draws: int,
) -> None:
    """Reject lists outside of ``[grid]``, others in it, and settings given twice."""
    own = {f'case "{case["name"]}"': case for case in cases}
    for where, settings in {"[config]": config, **own}.items():
        hint = " Lists of values belong into [grid]."
        for key, value in settings.items():
            what = f"{key} of {where} must be one value"
            _require(not isinstance(value, list), path, what, value, hint)
    for key, values in grid.items():
        what = f"grid.{key} must be a list of values"
        _require(isinstance(values, list) and values, path, what, values)
        for value in values:
            what = f"each value of grid.{key} must be a single one"
            _require(not isinstance(value, list | Mapping), path, what, value)
        for where, case in own.items():
            if key in case:
                raise ConfigError(
                    f"{path}: {where} sets {key}, which [grid] varies. Remove one of them."
                )
    for where, settings in {"[config]": config, "[grid]": grid, **own}.items():
        if draws and (seeds := [key for key in REPLICATES if key in settings]):
            raise ConfigError(
                f"{path}: {where} sets {seeds[0]}, but draws = {draws} sets "
                f"{' and '.join(REPLICATES)}. Remove one of them."
            )
        if DRAW in str(settings.get("owners", "")) and not draws:
            raise ConfigError(
                f"{path}: owners of {where} contains {DRAW}, but the file has no draws. "
                "Set draws, or name a folder without it."
            )


def _read_tune_draws(path: Path, table: Mapping[str, Any], draws: int) -> list[int]:
    """Return the draws of the tuning runs; by default the first one after the table's."""
    found = table.get("tune-draws", [draws])
    are_draws = isinstance(found, list) and all(
        type(draw) is int and draw >= 0 for draw in found
    )
    what = f"tune-draws must be a list of distinct draws such as [{draws}]"
    is_set = are_draws and 0 < len(set(found)) == len(found)
    _require(is_set, path, what, found)
    if own := [draw for draw in found if draw < draws]:
        raise ConfigError(
            f"{path}: tune-draws {own} are draws of the table, which has 0 to {draws - 1}: "
            f"no draw may choose its own settings. Use {draws} or more."
        )
    return list(found)


def _check_tuning(path: Path, tuning: Mapping[str, Any], draws: int) -> None:
    """Reject a table [tuning] that flower-fgl tune did not write, or other draws."""
    needed = {"experiment": str, "budget": int, "draws": list, "metric": str}
    needed |= {"study": str}
    if lacking := needed.keys() - tuning.keys():
        raise ConfigError(
            f"{path}: [tuning] lacks {', '.join(sorted(lacking))}. flower-fgl tune writes "
            "this table; the search space is called [tune]."
        )
    for key, kind in (needed | dict.fromkeys((*TUNED_ROWS, *NAMED_ROWS), dict)).items():
        what = f"[tuning] {key} must be as flower-fgl tune wrote it"
        value = tuning.get(key, kind())
        _require(type(value) is kind, path, what, value)
    numbers = [*tuning["draws"], *tuning.get("trials", {}).values()]
    are_whole = all(type(number) is int for number in numbers)
    what = "draws and trials in [tuning] must be whole numbers"
    _require(are_whole, path, what, numbers)
    if own := [draw for draw in tuning["draws"] if draw < draws]:
        raise ConfigError(
            f"{path}: the rows were tuned on draw {own[0]}, so the table can have draws 0 "
            f"to {own[0] - 1} only: no draw may choose its own settings. Set draws = "
            f"{own[0]} or less, or tune again."
        )


def _read_published(
    path: Path, table: Mapping[str, Any], runs: Sequence[PlannedRun]
) -> dict[str, dict[str, float]]:
    """Return the published values of the file by score or column, and table row."""
    rows = {run.row: run.row for run in runs} | {run.label: run.row for run in runs}
    found: dict[str, dict[str, float]] = {}
    for name in sorted(PUBLISHED.keys() & table.keys()):
        for row, value in table[name].items():
            is_share = type(value) in (int, float) and 0 <= value <= 100
            what = f'[{name}] "{row}" must be a percentage from 0 to 100'
            hint = " A row with a dot in its name needs quotes."
            _require(is_share, path, what, value, hint)
            if row not in rows:
                raise ConfigError(
                    f'{path}: [{name}] names "{row}", which is not a row of the table. '
                    f"{nearest(row, {run.label for run in runs})}"
                )
            found.setdefault(PUBLISHED[name], {})[rows[row]] = float(value)
    return found


def _read_cases(path: Path, cases: Any) -> list[dict[str, Scalar]]:
    """Return the settings of each ``[[case]]``; reject missing and repeated names."""
    if not isinstance(cases, list) or not all(isinstance(c, Mapping) for c in cases):
        raise ConfigError(f"{path}: each case must be a [[case]] table.")
    flat = [dict(flatten_config(case)) for case in cases]
    names = [case.get("name") for case in flat]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ConfigError(f"{path}: every [[case]] needs a unique name, got {names}.")
    for case in flat:
        name = str(case["name"])
        what = "the name of a case must be one line of text"
        _require(len(name.splitlines()) < 2, path, what, name)
        check_folder_name(name, f"{path}: the case")
    return flat


def with_clients(settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return settings with the default number of clients, unless owners are counted."""
    default = {} if settings.get("owners") else {"clients": DEFAULT_CLIENTS}
    return {**default, **settings}


def describe_tuning(tuning: Mapping[str, Any]) -> str:
    """Describe the table ``[tuning]`` in one line, empty if the table is."""
    if not tuning:
        return ""
    trials = tuning.get("trials", {}).items()
    fewer = ", ".join(f"{row} {n}" for row, n in trials if n < tuning["budget"])
    text = f"{describe_trials(tuning)}; study {str(tuning['study'])[:12]}"
    return f"{text}; fewer trials: {fewer}" if fewer else text


def read_tables(path: Path, extending: Sequence[Path] = ()) -> dict[str, Any]:
    """Read an experiment file, merged with the file that it extends, and so on.

    Tables are merged key by key. Any other value, lists, all ``[[case]]`` together and
    a range of ``[tune]`` included, replaces the one of the file it extends. An extended
    file has no published values or tuned settings, which belong to one dataset.
    ``extending`` are the files that lead to this one.
    """
    table = _load(path, extending)
    own = sorted(k for k in table if k.startswith("published") or k == "tuning")
    if extending and own:
        raise ConfigError(
            f"{extending[-1]} extends {path}, which has [{own[0]}]: its values are those "
            "of one dataset. Move this table into the files that extend it."
        )
    if EXTENDS not in table:
        return table
    name = table.pop(EXTENDS)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{path}: {EXTENDS} must be the path of an experiment file beside this one, "
            f'such as "base.toml", got {name!r}.'
        )
    base, way = path.parent / name, [*extending, path]
    if base.resolve() in [file.resolve() for file in way]:
        names = " extends ".join(str(file) for file in [*way, base])
        raise ConfigError(f"Experiment files extend each other: {names}.")
    return _merged(read_tables(base, way), table)


def standalone_text(path: Path) -> str:
    """Return the file's own text, or the merged tables if it extends another file."""
    if EXTENDS not in _load(path):
        return read_text(path)
    table = read_tables(path)
    if "grid" in table:  # not nested: a table would come last, and the order names runs
        table["grid"] = dict(flatten_config(table["grid"]))
    return f"# Written by flower-fgl run: {path.name} and what it extends.\n\n" + (
        tomli_w.dumps(table)
    )


def _load(path: Path, extending: Sequence[Path] = ()) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8-sig")
        require_whole(text, path)
        return load_toml(text)
    except OSError as error:
        what = f"{path}, which {extending[-1]} extends" if extending else str(path)
        raise ConfigError(
            f"Cannot read experiment {what}: {error.strerror}."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a TOML file: it holds no text.") from error


def _merged(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return two tables as one; where both have a value that is no table, the second's."""
    out = dict(base)
    for key, value in table.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        is_range = both and {"low", "high"} & (value.keys() | out[key].keys())
        out[key] = _merged(out[key], value) if both and not is_range else value
    return out
