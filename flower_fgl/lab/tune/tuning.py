"""Tune the methods of an experiment file with equal budgets, by validation scores.

Trial 0 of each row is the row as it stands; Optuna's TPE sampler proposes the others from
the row's search space, or they cover the whole space if it has no more points than the
budget. A trial trains on the tuning draws and is compared by the validation score of its
best round.

The proposals depend on the seed, and on the trials of earlier batches only. A study is
therefore the same for any number of processes, and after a kill. A version of Optuna that
proposes other trials cannot continue it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from flower_fgl.core.atomic import hold, write_file
from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar
from flower_fgl.core.score_names import goodness, kind_of_score
from flower_fgl.core.version import VERSION
from flower_fgl.lab.experiments.experiment_file import (
    Experiment,
    PlannedRun,
    effective_settings,
    with_clients,
)
from flower_fgl.lab.experiments.search_space import (
    Choices,
    Dimension,
    nearest_point,
    row_space,
    space_points,
    space_size,
)
from flower_fgl.lab.tables.cells import DEFAULT_SUFFIX
from flower_fgl.lab.tune.trials import CANNOT_WRITE, Outcome, TrialProcesses
from flower_fgl.methods import parse_config
from flower_fgl.runs.environment import find_commit
from flower_fgl.runs.files import check_folder_name, in_folder_name, read_lines
from flower_fgl.runs.writer import writing

__all__ = ["RowStudy", "Trial", "rows_to_tune", "tune"]

BATCH = 4
"""Trials that are proposed together, so that as many can run at once."""
STARTUP = 6
"""Trials before TPE fits its densities; until then proposals are random."""
ATTEMPTS = 100
"""Proposals after which a point that was already tried is taken from the rest."""
JOURNAL = "study.log"
RUNNING = "running"


@dataclass
class Trial:
    """One setting of a row, and its outcomes by tuning draw; number 0 is the row's own."""

    index: int
    settings: Mapping[str, Scalar]
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """Mean validation score over the draws; ``None`` if a run failed."""
        scores = [outcome.score for outcome in self.outcomes.values()]
        found = [score for score in scores if score is not None]
        return fmean(found) if scores and len(found) == len(scores) else None

    @property
    def error(self) -> str:
        """Why a run of the trial failed; empty if none did."""
        errors = [o.error for o in self.outcomes.values() if o.error]
        return errors[0] if errors else ""


OnTrial = Callable[["RowStudy", Trial], None]


@dataclass(frozen=True)
class RowToTune:
    """A row of the experiment before it is tuned.

    ``default`` is its own point in the ``space``; ``run`` is its first run, whose label
    names the row with its grid values.
    """

    name: str
    settings: Mapping[str, Scalar]
    space: Mapping[str, Dimension]
    default: Mapping[str, Scalar]
    run: PlannedRun

    @property
    def label(self) -> str:
        """The row as ``flower-fgl run`` names it."""
        return self.run.label or self.name

    def is_named(self, names: Sequence[str]) -> bool:
        """Return whether the row, its line of the table or its case is among some names."""
        own = {self.name, self.label, self.run.line, self.run.case}
        return not own.isdisjoint(names)


def rows_to_tune(experiment: Experiment) -> list[RowToTune]:
    """Return the rows of an experiment with their search spaces; a ConfigError if wrong."""
    name = experiment.name
    if not experiment.tune:
        raise ConfigError(
            f"{name} has no [tune] table. Add the settings to tune with their values, "
            "e.g. lr = [0.003, 0.01, 0.03]."
        )
    if not experiment.draws:
        raise ConfigError(
            f"{name} has no draws. Add draws = 10 at its top (in place of seeds in "
            "[config] or [grid], if any): tuning runs use another draw than the table."
        )
    if experiment.tuning:
        raise ConfigError(
            f"{name} is tuned already: tune the file it was made from, "
            f"{experiment.tuning.get('experiment', '')}."
        )
    if both := sorted(experiment.tune.keys() & experiment.grid.keys()):
        raise ConfigError(
            f"{name}: {both[0]} is in [grid], which gives each value a row, and in "
            "[tune]. Remove one of them."
        )
    seen: dict[str, RowToTune] = {}
    for run in experiment.runs():
        settings = with_clients(run.given)
        if run.row not in seen:
            try:
                space, default = row_space(experiment.tune, settings, run.case)
            except ConfigError as error:
                raise ConfigError(f'{name}, row "{run.row}": {error}') from error
            seen[run.row] = RowToTune(run.row, settings, space, default, run)
    methods = {str(row.settings.get("method", "fedavg")) for row in seen.values()}
    tables = tuple(
        f"{t}." for t in methods | {str(c["name"]) for c in experiment.cases}
    )
    for key in experiment.tune:
        table, dot, _ = key.partition(".")
        if dot and not key.startswith(tables):
            raise ConfigError(
                f"{name}: tune.{key} belongs to {table}, which is no case, and the rows "
                f"have the methods {', '.join(sorted(methods))}. Remove it."
            )
    _check_folders(name, list(seen))
    return list(seen.values())


def _check_folders(name: str, rows: Sequence[str]) -> None:
    """Reject rows of the tuned file that would share a folder."""
    named = [(row, f'row "{row}"') for row in rows]
    named += [(f"{row}{DEFAULT_SUFFIX}", f'the default of row "{row}"') for row in rows]
    found: dict[str, str] = {}
    for row, words in named:
        check_folder_name(row, f"{name}: the row")
        folder = in_folder_name(row)
        if folder in found:
            raise ConfigError(
                f"{name}: {found[folder]} and {words} would have the same folder, "
                f"{folder}, in runs of the tuned file. Use names of cases, and grid "
                "values, that differ in letters or digits."
            )
        found[folder] = words


def tune(
    experiment: Experiment,
    rows: Sequence[RowToTune],
    folder: Path,
    *,
    budget: int,
    jobs: int = 1,
    seed: int = 0,
    on_trial: OnTrial | None = None,
    on_note: Callable[[str], None] | None = None,
) -> list[RowStudy]:
    """Run the studies of some rows of an experiment, or what is missing of them.

    Each row gets ``budget`` trials, at least 2, or all points of a smaller space, in
    ``jobs`` processes of one thread. ``on_trial`` gets the study and the trial after
    each trial.
    """
    if budget < 2 or jobs < 1:
        raise ConfigError(
            "--budget must be at least 2 (the first trial is the row as it stands) and "
            f"--jobs at least 1, got {budget} and {jobs}."
        )
    if find_spec("optuna") is None:
        raise ConfigError(
            "tune needs Optuna. Install it: pip install 'flower-fgl[tune]'."
        )
    draws = list(experiment.tune_draws)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with hold(folder), TrialProcesses(jobs, on_note) as processes:
        shutil.rmtree(folder / RUNNING, ignore_errors=True)  # runs of a killed study
        storage = _open_storage(folder / JOURNAL)
        studies = [RowStudy(storage, row, draws, seed) for row in rows]
        for study in studies:
            if len(study.trials) > study.num_trials(budget):
                raise RunError(
                    f'Row "{study.row.label}" already has {len(study.trials)} trials, more '
                    f"than --budget {budget}. All rows get the same number: give "
                    f"--budget {len(study.trials)} or more, or another folder."
                )
            study.check_proposals(budget)
        _run_studies(studies, folder / RUNNING, budget, processes, on_trial)
        shutil.rmtree(folder / RUNNING, ignore_errors=True)
    return studies


def _run_studies(
    studies: Sequence[RowStudy],
    running: Path,
    budget: int,
    processes: TrialProcesses,
    on_trial: OnTrial | None,
) -> None:
    """Keep all processes busy with the trials that the studies propose."""
    waiting: list[tuple[RowStudy, Trial, int]] = []
    while True:
        for study in studies:
            for trial in study.next_batch(budget):
                waiting += [(study, trial, draw) for draw in study.draws]
        while waiting and processes.has_room:
            study, trial, draw = key = waiting.pop(0)
            place = f"{in_folder_name(study.row.name)}-{trial.index}-{draw}"
            settings = {**study.row.settings, **trial.settings}
            settings = effective_settings(settings, draw)
            processes.submit(key, settings, running / place)
        ended = processes.outcomes()
        if not ended:
            return
        for (study, trial, draw), outcome in ended:
            if outcome.error.startswith(CANNOT_WRITE):
                raise RunError(
                    f'{outcome.error} This trial of the row "{study.row.label}" does '
                    "not count. Free disk space, and repeat the command."
                )
            trial.outcomes[draw] = outcome
            if len(trial.outcomes) == len(study.draws):
                study.record(trial)
                if on_trial is not None:
                    on_trial(study, trial)


class RowStudy:
    """The study of one row, kept in Optuna's storage of all studies of the experiment.

    ``draws`` are the tuning draws, ``seed`` is that of the proposals; ``trials`` holds
    the finished ones by index.
    """

    def __init__(
        self, storage: Any, row: RowToTune, draws: Sequence[int], seed: int
    ) -> None:
        import optuna  # only this command needs the extra

        self.row, self.draws, self.seed = row, list(draws), seed
        self._main = parse_config(row.settings).main_score
        self.trials: list[Trial] = []
        self._num_running = 0
        self._distributions = {
            key: _distribution(dimension, row.default[key])
            for key, dimension in row.space.items()
        }
        with _quiet():
            self._study = optuna.create_study(
                storage=storage,
                study_name=row.name,
                direction=self._direction,
                load_if_exists=True,
            )
        self._check()
        for kept in self._study.get_trials(deepcopy=False):
            outcomes = {
                int(draw): Outcome(**value)
                for draw, value in kept.user_attrs["outcomes"].items()
            }
            index = kept.user_attrs["index"]
            self.trials.append(Trial(index, dict(kept.params), outcomes))
        self.trials.sort(key=lambda trial: trial.index)

    @property
    def metric(self) -> str:
        """Score of the trials, as their runs name it: of several numbers it is nRMSE."""
        outcomes = (o for trial in self.trials for o in trial.outcomes.values())
        return next((o.metric for o in outcomes if o.metric), self._main)

    @property
    def _direction(self) -> Literal["minimize", "maximize"]:
        """Which scores Optuna prefers."""
        return "minimize" if kind_of_score(self.metric).is_lower else "maximize"

    @property
    def best(self) -> Trial:
        """Trial with the best score, the earliest among equals; RunError if none."""
        scored = [trial for trial in self.trials if trial.score is not None]
        if not scored:
            raise RunError(
                f'All {len(self.trials)} trials of row "{self.row.label}" failed. The '
                f"first one: {self.trials[0].error} Trials are kept: once the reason is "
                "removed, rename the row to tune it anew."
            )
        return max(scored, key=lambda trial: goodness(self.metric, trial.score))

    @property
    def commits(self) -> list[str]:
        """Commits of this package with which trials ran."""
        return list(self._study.user_attrs.get("commits", []))

    @property
    def optuna_versions(self) -> list[str]:
        """Versions of Optuna that continued the study, the first one first."""
        return list(self._study.user_attrs.get("optuna", []))

    def check_proposals(self, budget: int) -> None:
        """Record the version of Optuna; a RunError if it proposes other trials."""
        import optuna

        before, now = self.optuna_versions, str(optuna.__version__)
        if now in before or len(self.trials) >= self.num_trials(budget):
            return
        # if the budget covers the space, the rest of it is tried
        for begin in () if self._covers(budget) else range(0, len(self.trials), BATCH):
            proposed = self._propose(begin)
            for trial in self.trials[begin : begin + BATCH]:
                if self._nearest_point(trial.settings) != proposed[trial.index - begin]:
                    made = (
                        f"Optuna {' and '.join(before)}" if before else "another Optuna"
                    )
                    raise RunError(
                        f'The output folder holds a study of row "{self.row.label}" whose '
                        f"trial {trial.index} was proposed by {made}. Optuna {now} "
                        "proposes another one, and the trials of one study must not be "
                        "mixed. Install the version that made it, move the folder tune "
                        "away, or set another output-dir."
                    )
        self._study.set_user_attr("optuna", [*before, now])

    def num_trials(self, budget: int) -> int:
        """Return the number of trials of a budget: less if the space has fewer points."""
        return min(budget, space_size(self.row.space, self.row.default) or budget)

    def _covers(self, budget: int) -> bool:
        """Return whether the budget has a trial for each point of the space."""
        size = space_size(self.row.space, self.row.default)
        return size is not None and size <= budget

    def next_batch(self, budget: int) -> list[Trial]:
        """Propose the next trials; none while trials of a batch are running."""
        done = {trial.index for trial in self.trials}
        missing = [k for k in range(self.num_trials(budget)) if k not in done]
        if self._num_running or not missing:
            return []
        begin = missing[0] // BATCH * BATCH
        batch = [k for k in missing if k < begin + BATCH]
        if self._covers(budget):
            points = zip(batch, self._untried(self.trials), strict=False)
            out = [Trial(index, point) for index, point in points]
        else:
            proposed = self._propose(begin)
            out = [Trial(k, proposed[k - begin]) for k in batch]
        self._num_running = len(out)
        return out

    def record(self, trial: Trial) -> None:
        """Store a finished trial."""
        outcomes = {str(draw): asdict(o) for draw, o in trial.outcomes.items()}
        attrs = {"index": trial.index, "outcomes": outcomes}
        self._study.add_trial(self._kept(trial, attrs))
        self._num_running -= 1
        self.trials.append(trial)
        self.trials.sort(key=lambda t: t.index)

    def _kept(self, trial: Trial, attrs: Mapping[str, Any] | None = None) -> Any:
        """Return Optuna's form of a finished trial."""
        from optuna.trial import TrialState, create_trial

        return create_trial(
            state=TrialState.FAIL if trial.score is None else TrialState.COMPLETE,
            value=trial.score,
            params=dict(trial.settings),
            distributions=self._distributions,
            user_attrs=dict(attrs or {}),
        )

    def _propose(self, begin: int) -> list[dict[str, Scalar]]:
        """Propose one batch from the trials of the batches before it."""
        import optuna

        before = [trial for trial in self.trials if trial.index < begin]
        with _quiet():
            scratch = optuna.create_study(
                direction=self._direction,
                sampler=optuna.samplers.TPESampler(
                    seed=self._seed(begin),
                    n_startup_trials=STARTUP,
                    constant_liar=True,
                    multivariate=True,  # by default False in Optuna 4, True in 5
                ),
            )
            for trial in before:
                if trial.score is not None:
                    scratch.add_trial(self._kept(trial))
            out: list[dict[str, Scalar]] = [] if begin else [dict(self.row.default)]
            tried = [self._nearest_point(trial.settings) for trial in before]
            for _ in range(ATTEMPTS):
                if len(out) == BATCH:
                    break
                asked = scratch.ask(self._distributions)
                point = self._nearest_point(asked.params)
                if point in tried or point in out:
                    scratch.tell(asked, state=optuna.trial.TrialState.FAIL)
                else:
                    out.append(point)
        while len(out) < BATCH:  # TPE repeats its favourites in a small space
            rest = self._untried([*before, *(Trial(-1, point) for point in out)])
            untried = next(rest, None)
            if untried is None:  # fewer points than a batch has: all of them
                break
            out.append(untried)
        return out

    def _untried(self, trials: Sequence[Trial]) -> Iterator[dict[str, Scalar]]:
        """Yield the other points of a finite space: the default, then in random order."""
        points = space_points(self.row.space, self.row.default)
        points.remove(dict(self.row.default))
        random.Random(self._seed(0)).shuffle(points)
        tried = [self._nearest_point(trial.settings) for trial in trials]
        yield from (p for p in [dict(self.row.default), *points] if p not in tried)

    def _nearest_point(self, settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return a point without rounding errors, which would make it another one."""
        return nearest_point(self.row.space, self.row.default, settings)

    def _seed(self, begin: int) -> int:
        text = f"{self.seed}/{self.row.name}/{begin}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")

    def _check(self) -> None:
        """Store what the study depends on, or compare it with what is stored."""
        from optuna.distributions import distribution_to_json

        space = self._distributions.items()
        now = {
            "settings": dict(self.row.settings),
            "space": {k: json.loads(distribution_to_json(d)) for k, d in space},
            "draws": self.draws,
            "seed": self.seed,
            "flower-fgl": VERSION,
        }
        before = self._study.user_attrs.get("made-with")
        if before is None:
            self._study.set_user_attr("made-with", now)
        elif changed := [key for key in now if before.get(key) != now[key]]:
            key = changed[0]
            raise RunError(
                f'The output folder holds a study of row "{self.row.label}" that was made '
                f"otherwise: {_difference(key, before.get(key), now[key])}. Move the "
                "folder tune away, or set another output-dir."
            )
        commits = self.commits
        commit = find_commit(Path(__file__).resolve().parents[3])
        if commit and commit not in commits:
            self._study.set_user_attr("commits", [*commits, commit])


def _difference(key: str, before: Any, now: Any) -> str:
    """Name what differs between a stored study and the experiment."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        names = sorted(
            k for k in before.keys() | now.keys() if before.get(k) != now.get(k)
        )
        verb = "differs" if key == "space" else "differ"
        return f"its {key} {verb} in {', '.join(names)}"
    return f"its {key} {'are' if key == 'draws' else 'is'} {before}, now {now}"


def _distribution(dimension: Dimension, default: Scalar) -> Any:
    """Return Optuna's form of a dimension."""
    from optuna import distributions

    if isinstance(dimension, Choices):
        return distributions.CategoricalDistribution(dimension.values)
    low, high, log, step = astuple(dimension)
    with warnings.catch_warnings():  # a last step that ends below the upper bound
        warnings.filterwarnings("ignore", message=".*not divisible by `step`")
        if isinstance(default, int):
            return distributions.IntDistribution(
                int(low), int(high), log=log, step=int(step) or 1
            )
        return distributions.FloatDistribution(low, high, log=log, step=step or None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide Optuna's log lines and its note that an option is experimental."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)


def _open_storage(path: Path) -> Any:
    """Open the journal of all studies; drop a line that a kill left incomplete."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    class HeldLock(JournalFileOpenLock):
        """The caller holds the folder; Optuna's own lock would outlive a kill."""

        def acquire(self) -> bool:
            return True

        def release(self) -> None:
            pass

    read_lines(path, key="op_code")  # names a damaged line, which Optuna does not
    if path.exists() and not (data := path.read_bytes()).endswith(b"\n"):
        write_file(path, data[: data.rfind(b"\n") + 1])
    return JournalStorage(JournalFileBackend(str(path), HeldLock(str(path))))
