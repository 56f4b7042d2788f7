"""The ``compare`` command: select runs, and compare two sets by paired differences."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import nearest
from flower_fgl.lab.tables.cells import NO_RESULT
from flower_fgl.lab.tables.statistics import PairedTest, paired_test, partition_means
from flower_fgl.runs.files import flatten_config
from flower_fgl.runs.names import in_folder_name, tell_apart
from flower_fgl.runs.run import Run

__all__ = [
    "PER_RUN",
    "Comparison",
    "common_metric",
    "compare_accuracy",
    "compare_runs",
    "main_metric",
    "match_scores",
    "paired_runs",
    "select_runs",
    "side_names",
    "without_seed",
]

PER_RUN = NO_RESULT | {"threads"}
"""Settings that may differ between runs that are averaged over seeds."""
MOST_KEYS = 3
"""Settings in the name of a side; sides that differ in more have the folders' names."""
PAIRED_BY = ("dataset", "partition_sha256", "clients", "seed")

SEEDS = re.compile(r"(^|-)((?:partition-)?seed|draw)\d+(?=-|$)")
"""Part of a run folder's name that a grid over seeds adds."""

DRAW = re.compile(r"-draw\d+")
"""End of a run folder's name in an experiment with draws."""

Key = tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Paired scores of two sets of runs, and what their differences show.

    Parameters
    ----------
    one, other : tuple of float
        Length n: paired scores of A and B.
    test : PairedTest
        Tests of the differences A minus B.
    names : tuple of str
        Names of A and B, see :func:`side_names`.
    unpaired : tuple of int
        Completed runs of A and B that have no partner.
    partitions : int
        Number of different partitions among the pairs, over all datasets; 0 if unknown.
        If it is below the number of tested pairs, the test says less about other
        partitions than its n suggests.
    """

    one: tuple[float, ...]
    other: tuple[float, ...]
    test: PairedTest
    names: tuple[str, str] = ("A", "B")
    unpaired: tuple[int, int] = (0, 0)
    partitions: int = 0

    @property
    def difference(self) -> float:
        """Mean of A minus mean of B."""
        return self.test.difference

    @property
    def shares_partitions(self) -> bool:
        """Whether several of the tested pairs have the same partition."""
        return 0 < self.partitions < self.test.n

    def __repr__(self) -> str:
        """State the difference, its interval and the verdict."""
        test = self.test
        text = f"{' minus '.join(self.names)} = {100 * test.difference:+.2f}"
        text += f", n = {test.n} pairs"
        if self.shares_partitions:
            several = f"{self.partitions} partitions"
            text += f" on {'one partition' if self.partitions == 1 else several}"
        if test.n < len(self.one):
            text += f" ({len(self.one)} runs, averaged on each partition)"
        if not test.why_not:
            low, high = (100 * bound for bound in test.interval)
            text += f", 95 % interval {low:+.2f} to {high:+.2f}"
            text += f", t = {test.t:.3f}, p = {test.p:.4f}"
        return f"{text}: {verdict(self)}"


def select_runs(text: str) -> list[Run]:
    """Read the runs that an argument of the command line selects.

    Parameters
    ----------
    text : str
        Comma-separated paths, or patterns such as ``runs/cora/fedavg-*``, of run folders
        or folders of run folders. The suffix ``:name`` selects the runs of one case of
        an experiment or, if no case has that name, of one method.

    Returns
    -------
    list of Run
        Runs, finished or not.

    Raises
    ------
    RunError
        If a path holds no run, or none with that name, or a run folder is damaged.
    """
    runs: dict[Path, Run] = {}
    for place, name in _places(text):
        place = os.path.expanduser(place)
        folders = [Path(p) for p in sorted(glob.glob(place))] if "*" in place else []
        found = {
            file.parent.resolve(): Run.load(file.parent)
            for folder in folders or [Path(place)]
            for file in _config_files(folder)
        }
        if name:
            known = {str(run.summary["method"]) for run in found.values()}
            known |= {without_seed(path.name) for path in found}
            found = _of_case(found, name) or {
                p: run for p, run in found.items() if run.summary["method"] == name
            }
            if known and not found:
                raise RunError(
                    f'{place} holds no run of "{name}", only of '
                    f"{', '.join(sorted(known))}."
                )
        if not found:
            raise RunError(_no_runs(place))
        runs |= found
    if not runs:
        raise RunError(
            "Each side of a comparison needs at least one run folder, got none."
        )
    return list(runs.values())


def _no_runs(place: str) -> str:
    """Explain why a place of the command line holds no runs."""
    if "*" not in place and not os.path.exists(place):
        return f"{place} does not exist. Pass run folders, or folders of run folders."
    if inside := sorted(
        {str(f.parents[1]) for f in Path(place).glob("*/*/config.toml")}
    ):
        return (
            f"{place} holds no run folder, but folders of run folders. Pass those: "
            f"{' '.join(inside)}."
        )
    if os.path.isfile(place) and place.endswith(".toml"):
        return (
            f"{place} is a file. Pass the folder of its runs, which flower-fgl run wrote: "
            f"runs/{Path(place).stem}."
        )
    if (Path(place) / "tune").is_dir():
        return (
            f"{place} holds a study, but no run folder. Run the tuned experiment file that "
            "flower-fgl tune wrote, and pass the folder of its runs."
        )
    return (
        f"{place} holds no run folder. Pass run folders that `flower-fgl run` "
        "wrote, a folder of run folders, or a quoted pattern."
    )


def _places(text: str) -> list[tuple[str, str]]:
    """Split an argument into paths or patterns, each with its name or ``""``."""
    # A comma may also belong to an existing path, or to the name of a case: then the text
    # after it is not a path.
    if os.path.exists(text):  # Path.exists raises for very long text
        return [(text, "")]
    parts: list[str] = []
    for piece in text.split(","):
        is_place = "*" in piece or ":" in piece or Path(piece.strip()).exists()
        if parts and ":" in parts[-1] and not is_place:
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    stripped = [part.strip() for part in parts if part.strip()]
    return [(place, name) for place, _, name in (p.partition(":") for p in stripped)]


def _of_case(runs: Mapping[Path, Run], name: str) -> dict[Path, Run]:
    """Return the runs whose folder is named after the case, grid values and draw."""
    begin = in_folder_name(name)
    found = {}
    for path, run in runs.items():
        rest = path.name.removeprefix(begin)
        keys = {key.rpartition(".")[2] for key, _ in flatten_config(run.config)}
        is_grid = any(rest.startswith(f"-{key}") for key in keys)
        is_case = not rest or is_grid or DRAW.fullmatch(rest)
        if path.name.startswith(begin) and is_case:
            found[path] = run
    return found


def without_seed(folder: str) -> str:
    """Return the name of a run folder without its seeds."""
    return SEEDS.sub("", folder).removeprefix("-")


def _config_files(folder: Path) -> list[Path]:
    """Return the config files of a run folder, or of all run folders in a folder."""
    file = folder / "config.toml"
    return [file] if file.exists() else sorted(folder.glob("*/config.toml"))


def match_scores(
    pairs: Sequence[tuple[Run, Run]], *, column: str, metric: str
) -> list[tuple[float, float]]:
    """Return the scores of paired runs, in their order.

    Parameters
    ----------
    pairs : sequence of (Run, Run)
        Completed runs of A and B, see :func:`paired_runs`.
    column : str
        Node set: ``test``, ``val``, or one that only some settings score.
    metric : str
        ``accuracy``, ``macro_f1``, ``mean_accuracy``, …

    Raises
    ------
    RunError
        If a run has no such score.
    """
    return [
        (_score(first, column, metric), _score(second, column, metric))
        for first, second in pairs
    ]


def paired_runs(one: Sequence[Run], other: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pair runs with the same dataset, partition, clients and seed.

    Parameters
    ----------
    one, other : sequence of Run
        Completed runs of A and B.

    Returns
    -------
    list of (Run, Run)
        Sorted by dataset, partition, clients and seed; unpaired runs are omitted.

    Raises
    ------
    RunError
        If two runs of one side have the same dataset, partition, clients and seed.
    """
    first, second = _by_key("A", one), _by_key("B", other)
    common = sorted(first.keys() & second.keys(), key=str)
    return [(first[k], second[k]) for k in common]


def _by_key(side: str, runs: Sequence[Run]) -> dict[Key, Run]:
    """Return the runs by dataset, partition, clients and seed; reject duplicates."""
    keyed: dict[Key, Run] = {}
    for run in runs:
        key = tuple(run.summary.get(name) for name in PAIRED_BY)
        if key in keyed:
            raise RunError(
                f"{side} holds two runs with the same dataset, partition, clients and "
                f"seed: {keyed[key].path} and {run.path}. Select one of them, e.g. with "
                '"folder:method" or a pattern.'
            )
        keyed[key] = run
    return keyed


def _score(run: Run, column: str, metric: str) -> float:
    """Return a score that stands for a run."""
    scores: Mapping[str, Any] = run.final or {}
    columns = [name for name in scores if name != "round"]
    if column not in columns:
        raise RunError(
            f'{run.path} has no scores of "{column}". {nearest(column, columns)}'
        )
    value = scores[column].get(metric)
    if value is None:
        raise RunError(
            f'{run.path} has no "{metric}" of "{column}". '
            + nearest(metric, [n for n, v in scores[column].items() if v is not None])
        )
    return float(value)


def compare_runs(
    one: Sequence[Run],
    other: Sequence[Run],
    *,
    column: str = "test",
    metric: str = "accuracy",
) -> Comparison:
    """Compare two methods on the experiments that both completed.

    Parameters
    ----------
    one, other : sequence of Run
        Runs of A and B; those that did not complete are ignored.
    column, metric : str
        Node set and score, see :func:`match_scores`.

    Raises
    ------
    ConfigError
        If one side holds runs of several methods, or with different settings.
    RunError
        If a run is on both sides, if there are fewer than two pairs, or in the cases of
        :func:`paired_runs` and :func:`match_scores`.
    """
    sides = {"A": one, "B": other}
    both = {run.path.resolve() for run in one} & {run.path.resolve() for run in other}
    if both:
        raise RunError(
            f"{min(both)} is on both sides of the comparison: pass two disjoint sets."
        )
    for side, runs in sides.items():
        methods = sorted({str(run.summary["method"]) for run in runs})
        if len(methods) > 1:
            raise ConfigError(
                f"{side} holds runs of {', '.join(methods)}. Select one method: "
                f'"folder:{methods[0]}".'
            )
        _reject_mixed_settings(side, runs)
    done = [[r for r in runs if r.status == "completed"] for runs in sides.values()]
    pairs = paired_runs(*done)
    scores = match_scores(pairs, column=column, metric=metric)
    if len(pairs) < 2:
        left_out = [
            f"{run.path} ({run.status})"
            for runs in sides.values()
            for run in runs
            if run.status != "completed"
        ]
        raise RunError(
            f"A paired t-test needs at least 2 pairs of completed runs with the same "
            f"dataset, partition, clients and seed, got {len(pairs)} of "
            f"{len(done[0])} runs of A and {len(done[1])} of B."
            + (f" Not completed: {', '.join(left_out)}." if left_out else "")
        )
    first, second = zip(*scores, strict=True)
    return Comparison(
        first,
        second,
        test=paired_test(*_replicates(pairs, scores)),
        names=side_names(one, other),
        unpaired=(len(done[0]) - len(pairs), len(done[1]) - len(pairs)),
        partitions=len({str(run.summary["partition_sha256"]) for run, _ in pairs}),
    )


def _replicates(
    pairs: Sequence[tuple[Run, Run]], scores: Sequence[tuple[float, float]]
) -> list[list[float]]:
    """Return the scores of each side that are independent of each other."""
    runs = [first for first, _ in pairs]
    places = [(run.summary["dataset"], run.summary["clients"]) for run in runs]
    seeds = [run.config.get("partition-seed") for run in runs]
    several = {
        place
        for place in set(places)
        if len({s for p, s in zip(places, seeds, strict=True) if p == place}) > 1
    }
    keys = [
        (place, seed) if place in several else number
        for number, (place, seed) in enumerate(zip(places, seeds, strict=True))
    ]
    return [partition_means(side, keys) for side in zip(*scores, strict=True)]


def side_names(one: Sequence[Run], other: Sequence[Run]) -> tuple[str, str]:
    """Name the two sides of a comparison by what tells them apart.

    Parameters
    ----------
    one, other : sequence of Run
        Runs of A and B, at least one each; those of a side differ in seed and dataset only.

    Returns
    -------
    tuple of str
        The methods; for one method also the settings that differ, ``fedprox (mu=0.1)``;
        for equal or many settings the names of the run folders or of the folders above;
        ``A`` and ``B`` if these are equal too.
    """
    first = [runs[0] for runs in (one, other)]
    labels = tell_apart(
        [{"method": run.summary["method"], **_own_settings(run)} for run in first],
        but={"dataset", "clients"},
    )
    parts = [label.split(" · ") for label in labels]
    by_settings = [
        f"{method} ({', '.join(keys)})" if keys else method for method, *keys in parts
    ]
    is_short = max(map(len, parts)) <= 1 + MOST_KEYS
    by_case = [without_seed(run.path.name) for run in first]
    above = [run.path.resolve().parent.name for run in first]
    for a, b in ([by_settings] if is_short else []) + [by_case, above]:
        if a != b and a and b:
            return a, b
    return "A", "B"


def _own_settings(run: Run) -> dict[str, Any]:
    """Return the settings of a run that may tell it from others of its method."""
    return {k: v for k, v in flatten_config(run.config) if k not in PER_RUN}


def _reject_mixed_settings(side: str, runs: Sequence[Run]) -> None:
    """Reject runs on one dataset and number of clients with different settings."""
    seen: dict[Key, dict[str, Any]] = {}
    for run in runs:
        own = _own_settings(run)
        place = (run.summary.get("dataset"), run.summary.get("clients"))
        first = seen.setdefault(place, own)
        keys = sorted(
            k for k in first.keys() | own.keys() if first.get(k) != own.get(k)
        )
        if keys:
            values = ", ".join(f"{k} {first.get(k)} and {own.get(k)}" for k in keys)
            raise ConfigError(
                f"{side} holds runs that differ in more than their seeds ({values}), so a "
                "test over all of them is meaningless. Select the runs of one setting"
                f"{_pattern(runs[0])}."
            )


def _pattern(run: Run) -> str:
    """Return an example pattern that selects a run with all its seeds, if there is one."""
    name = SEEDS.sub(r"\1\2*", run.path.name)
    place = run.path.parent / name
    return f', e.g. with a pattern: "{place}"' if name != run.path.name else ""


def compare_accuracy(one: Sequence[Run], other: Sequence[Run]) -> PairedTest | None:
    """Test the difference of two methods in test accuracy.

    Few-shot runs are compared by the mean of the clients' accuracies, which papers on that
    setting report.

    Parameters
    ----------
    one, other : sequence of Run
        Completed runs of A and B.

    Returns
    -------
    PairedTest or None
        ``None`` if no run of A has a partner in B.

    Raises
    ------
    RunError
        In the cases of :func:`paired_runs` and :func:`match_scores`.
    """
    metric = common_metric([*one, *other])
    pairs = paired_runs(one, other)
    scores = match_scores(pairs, column="test", metric=metric)
    return paired_test(*_replicates(pairs, scores)) if pairs else None


def main_metric(run: Run) -> str:
    """Return the test score that papers on a run's setting report."""
    is_few_shot = run.config.get("setting") == "few-shot"
    return (
        "mean_accuracy" if is_few_shot else str(run.summary.get("metric", "accuracy"))
    )


def common_metric(runs: Sequence[Run]) -> str:
    """Return the :func:`main_metric` of all runs, ``accuracy`` if they differ."""
    metrics = {main_metric(run) for run in runs}
    return metrics.pop() if len(metrics) == 1 else "accuracy"


def describe_scores(scores: Sequence[float]) -> str:
    """Format scores as mean ± standard deviation in percent."""
    return f"{100 * fmean(scores):.2f} ± {100 * stdev(scores):.2f}"


def verdict(comparison: Comparison) -> str:
    """State in words which side is better, or what the runs can and cannot show."""
    test = comparison.test
    if test.why_not:
        return f"not testable: {test.why_not}"
    if test.is_significant:
        side = comparison.names[0 if test.difference > 0 else 1]
        tied = ", by less than one point" if test.is_tied else ""
        return f"{side} is significantly better at 95 %{tied}"
    found = f"a difference of {100 * test.detectable:.1f} points would be found in 80 %"
    if test.is_tied:
        return f"tied within one point (p = {test.p_equivalent:.3f}); {found}"
    return f"no significant difference at 95 %, and not tied within one point; {found}"
