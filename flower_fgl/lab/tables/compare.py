"""Select runs, and compare two sets of them by paired differences, also by owner."""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import Scalar, nearest
from flower_fgl.core.score_names import NO_SCORES, ScoreScale, refuse_mixed_kinds
from flower_fgl.lab.tables.cells import EARLIER, NO_RESULT
from flower_fgl.lab.tables.statistics import Comparison, compare_all, compare_series
from flower_fgl.runs.files import (
    flatten_config,
    grouped,
    in_folder_name,
    tell_apart,
)
from flower_fgl.runs.run import RunFolder

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COMPARED", "PER_RUN", "Comparisons", "common_metric", "common_scale"]
__all__ += ["compare_runs", "finetuned_note", "frames_per_owner", "gains_per_owner"]
__all__ += ["group_runs", "main_metric", "one_metric", "owner_metric"]
__all__ += ["own_settings", "paired_runs", "place_name", "select_runs", "side_names"]
__all__ += ["unequal_settings", "without_seed"]

PER_RUN = NO_RESULT | {"threads"}
"""Settings that may differ between runs that are averaged over seeds."""
MOST_KEYS = 3
"""Settings in the name of a side; sides that differ in more have the folders' names."""
PAIRED_BY = ("dataset", "partition_sha256", "clients", "seed")
SCORED = ("target", "split", "split-by", "synthetic")
"""Settings that decide which items with which labels are scored; pairs share them."""

SEEDS = re.compile(r"(^|-)((?:partition-)?seed|draw)\d+(?=-|$)")
"""Part of a run folder's name that a grid over seeds adds."""

DRAW = re.compile(r"-draw\d+")
"""End of a run folder's name in an experiment with draws."""

Key = tuple[Any, ...]


class Comparisons(dict[str, Comparison]):
    """Comparisons of two sides by dataset and clients, adjusted together by Holm."""

    def __repr__(self) -> str:
        return "\n".join(f"{place}: {found!r}" for place, found in self.items())


def select_runs(text: str) -> list[RunFolder]:
    """Read the runs, finished or not, that an argument of the command line selects.

    ``text`` holds comma-separated run folders, folders of run folders, or patterns such
    as ``runs/cora/fedavg-*``. The suffix ``:name`` selects the runs of one case of an
    experiment or, if no case has that name, of one method. Raises a RunError without
    runs.
    """
    runs: dict[Path, RunFolder] = {}
    for place, name in _places(text):
        place = os.path.expanduser(place)
        folders = [Path(p) for p in sorted(glob.glob(place))] if "*" in place else []
        found: dict[Path, RunFolder] = {}
        for folder in folders or [Path(place)]:
            is_run = (folder / "config.toml").exists()
            files = sorted(folder.glob("config.toml" if is_run else "*/config.toml"))
            found |= {f.parent.resolve(): RunFolder.load(f.parent) for f in files}
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


def _of_case(runs: Mapping[Path, RunFolder], name: str) -> dict[Path, RunFolder]:
    """Return the runs whose folder is named after the case, grid values and draw."""
    begin = in_folder_name(name)
    found = {}
    for path, run in runs.items():
        rest = path.name.removeprefix(begin)
        keys = {key.rpartition(".")[2] for key, _ in flatten_config(run.config)}
        # a value follows, not the rest of another case's name, such as fedavg-lr-high
        is_grid = any(re.match(rf"-{key}(?!-\D)", rest) for key in keys)
        is_case = not rest or is_grid or DRAW.fullmatch(rest)
        if path.name.startswith(begin) and is_case:
            found[path] = run
    return found


def without_seed(folder: str) -> str:
    """Return the name of a run folder without its seeds."""
    return SEEDS.sub("", folder).removeprefix("-")


def paired_runs(
    one: Sequence[RunFolder], other: Sequence[RunFolder]
) -> list[tuple[RunFolder, RunFolder]]:
    """Pair the runs with the same dataset, partition, clients and seed, sorted by these.

    They also share their :data:`SCORED` settings.
    """
    sides: dict[str, dict[Key, RunFolder]] = {"A": {}, "B": {}}
    for (side, keyed), runs in zip(sides.items(), (one, other), strict=True):
        for run in runs:
            held = {**EARLIER, **run.config}
            key = *map(run.summary.get, PAIRED_BY), *(str(held.get(k)) for k in SCORED)
            if (before := keyed.setdefault(key, run)) is not run:
                raise RunError(
                    f"{side} holds two runs with the same dataset, partition, clients and "
                    f"seed: {before.path} and {run.path}. Select one of them, e.g. with "
                    '"folder:method" or a pattern.'
                )
    first, second = sides.values()
    return [
        (first[k], second[k]) for k in sorted(first.keys() & second.keys(), key=str)
    ]


def _require_score(run: RunFolder, column: str, metric: str) -> None:
    """Raise a RunError if a run lacks the score that stands for it."""
    scores: Mapping[str, Any] = run.final or {}
    columns = [name for name in scores if name != "round"]
    if column not in columns:
        raise RunError(
            f'{run.path} has no scores of "{column}". {nearest(column, columns)}'
        )
    known = {name for name, value in scores[column].items() if value is not None}
    if metric not in known - NO_SCORES:
        raise RunError(
            f'{run.path} has no score "{metric}" of "{column}". '
            f"{nearest(metric, known - NO_SCORES)}"
        )


def compare_runs(
    one: Sequence[RunFolder],
    other: Sequence[RunFolder],
    *,
    column: str = "test",
    metric: str = "accuracy",
) -> Comparisons:
    """Compare two methods on the experiments that both completed, dataset by dataset.

    Raises a ConfigError or RunError if runs of a side differ in more than seed and
    dataset, the sides do not fit together, or a run has no such score.
    """
    sides = {"A": one, "B": other}
    _check_sides(one, other)
    done = [[r for r in runs if r.status == "completed"] for runs in sides.values()]
    pairs = paired_runs(*done)
    for run in (run for pair in pairs for run in pair):
        _require_score(run, column, metric)
    if len(pairs) < 2:
        left_out = [
            f"{run.path} ({run.status})"
            for runs in sides.values()
            for run in runs
            if run.status != "completed"
        ]
        raise RunError(
            f"A paired t-test needs at least 2 pairs of completed runs with the same "
            f"dataset, partition, clients, split, target and seed, got {len(pairs)} of "
            f"{len(done[0])} runs of A and {len(done[1])} of B."
            + (f" Not completed: {', '.join(left_out)}." if left_out else "")
        )
    # loads pandas, which selecting runs does not need
    from flower_fgl.lab.tables.frame import Scores, frame_of_runs

    found = Comparisons()
    scores = Scores(
        frame_of_runs(
            (place_name(pair[0]), side, run)
            for pair in pairs
            for side, run in enumerate(pair)
        )
    )
    for place, here in grouped(pairs, lambda pair: place_name(pair[0])).items():
        first, second = (
            scores.series(place, side, "own", column, metric) for side in (0, 1)
        )
        second.index = first.index  # the pairs are in the same order
        scale = common_scale(metric, [run for pair in here for run in pair])
        tested = compare_series(first, second, scale)
        assert tested is not None
        all_here = ([place_name(run) for run in runs].count(place) for runs in done)
        lone, other_lone = (number - len(here) for number in all_here)
        found[place] = replace(
            tested, names=side_names(one, other), unpaired=(lone, other_lone)
        )
    return Comparisons(zip(found, compare_all(list(found.values())), strict=True))


def _check_sides(one: Sequence[RunFolder], other: Sequence[RunFolder]) -> None:
    """Reject sides that share a run, or of which one has several methods or settings."""
    refuse_mixed_kinds(
        (str(run.summary["method"]), run.target) for run in (*one, *other)
    )
    both = {run.path.resolve() for run in one} & {run.path.resolve() for run in other}
    if both:
        raise RunError(
            f"{min(both)} is on both sides of the comparison: pass two disjoint sets."
        )
    for side, runs in (("A", one), ("B", other)):
        methods = sorted({str(run.summary["method"]) for run in runs})
        if len(methods) > 1:
            raise ConfigError(
                f"{side} holds runs of {', '.join(methods)}. Select one method: "
                f'"folder:{methods[0]}".'
            )
        _reject_mixed_settings(side, runs)


def _check_owners(runs: Sequence[RunFolder]) -> None:
    """Reject runs whose owners of one name are not the same in all of them."""
    datasets = sorted({str(run.summary["dataset"]) for run in runs})
    if len(datasets) > 1:
        raise RunError(
            f"The runs have the owners of several datasets ({', '.join(datasets)}). Pass "
            "the runs of one of them."
        )
    hashes = {run.summary.get("partition_sha256") for run in runs}
    unnamed = [r for r in runs if not (r.config.get("owners") or r.owner_names)]
    if len(hashes) > 1 and unnamed:
        raise RunError(
            f"The runs have {len(hashes)} partitions, and client 0 of one holds other data "
            "than client 0 of another. Pass the runs of one partition, or runs with owners."
        )


def common_scale(metric: str, runs: Sequence[RunFolder]) -> ScoreScale:
    """Return the scale of a score of runs on the same data, with their mean spread."""
    scales = [run.scale_of(metric) for run in runs]
    units = {scale.unit for scale in scales}
    known = [scale.spread for scale in scales if not math.isnan(scale.spread)]
    return ScoreScale(
        metric,
        units.pop() if len(units) == 1 else "",
        fmean(known) if known else math.nan,
    )


def place_name(run: RunFolder) -> str:
    """Name the data of a run."""
    return f"{run.summary['dataset']}, {run.summary['clients']} clients"


def side_names(one: Sequence[RunFolder], other: Sequence[RunFolder]) -> tuple[str, str]:
    """Name the two sides of a comparison, whose runs differ in seed and dataset only.

    The names are the methods, with settings that differ: ``fedprox (mu=0.1)``; or those
    of the run folders or of the folders above; ``A`` and ``B`` if these are equal too.
    """
    first = [runs[0] for runs in (one, other)]
    labels = tell_apart(
        [{"method": run.summary["method"], **own_settings(run)} for run in first],
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


def own_settings(run: RunFolder) -> dict[str, Any]:
    """Return the settings of a run, by dotted key, that may differ from those of others."""
    return {k: v for k, v in flatten_config(run.config) if k not in PER_RUN}


def settings_of_each(runs: Iterable[RunFolder]) -> list[dict[str, Any]]:
    """Return :func:`own_settings` of runs; ``{draw}`` in ``owners`` counts as one value."""
    settings = [(_of_any_draw(run), own_settings(run)) for run in runs]
    for text, same in grouped(settings, lambda pair: pair[0]).items():
        if len({own.get("owners") for _, own in same}) > 1:
            for _, own in same:
                own["owners"] = text
    return [own for _, own in settings]


def _of_any_draw(run: RunFolder) -> str:
    """Return ``owners`` with ``{draw}`` in place of the number of the run's draw."""
    owners, seed = str(run.config.get("owners", "")), run.config.get("seed")
    is_draw = seed is not None and run.config.get("partition-seed") == seed
    return re.sub(rf"(?<!\d){seed}(?!\d)", "{draw}", owners) if is_draw else owners


def group_runs(
    runs: Iterable[RunFolder],
    *,
    but: Collection[str] = (),
    smallest: int = 1,
    varying: str = "",
) -> list[tuple[str, list[RunFolder]]]:
    """Group runs that differ only in their seeds, named by what tells them apart.

    The names are of the method, and the settings in which groups of it differ, but some.
    With a ``varying`` setting, runs of a group differ in it too. Groups have at least
    ``smallest`` runs, or values of that setting.
    """
    groups: dict[str, list[RunFolder]] = {}
    configs: dict[str, dict[str, Any]] = {}
    values: dict[str, set[Any]] = {}
    listed = list(runs)
    for run, own in zip(listed, settings_of_each(listed), strict=True):
        config = {"method": run.summary["method"], **own}
        value = config.pop(varying) if varying else run.path
        place = "" if varying == "clients" else place_name(run)
        key = json.dumps([place, sorted(config.items())])
        groups.setdefault(key, []).append(run)
        values.setdefault(key, set()).add(value)
        configs[key] = config
    kept = {key: group for key, group in groups.items() if len(values[key]) >= smallest}
    labels = tell_apart([configs[key] for key in kept], but=but)
    return list(zip(labels, kept.values(), strict=True))


def _reject_mixed_settings(side: str, runs: Sequence[RunFolder]) -> None:
    """Reject runs on one dataset and number of clients with different settings."""
    seen: dict[Key, dict[str, Any]] = {}
    for run, own in zip(runs, settings_of_each(runs), strict=True):
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


def _pattern(run: RunFolder) -> str:
    """Return an example pattern that selects a run with all its seeds, if there is one."""
    name = SEEDS.sub(r"\1\2*", run.path.name)
    place = run.path.parent / name
    return f', e.g. with a pattern: "{place}"' if name != run.path.name else ""


def main_metric(run: RunFolder) -> str:
    """Return the test score that papers on a run's setting report."""
    is_few_shot = run.config.get("setting") == "few-shot"
    return (
        "mean_accuracy" if is_few_shot else str(run.summary.get("metric", "accuracy"))
    )


def common_metric(runs: Sequence[RunFolder]) -> str:
    """Return the :func:`main_metric` of all runs, ``accuracy`` if they differ."""
    return one_metric(main_metric(run) for run in runs)


def one_metric(metrics: Iterable[str]) -> str:
    """Return the only one of several scores, else ``nrmse`` of numbers or ``accuracy``."""
    found = set(metrics)
    if len(found) == 1:
        return found.pop()
    return "nrmse" if "nrmse" in found else "accuracy"


COMPARED = {
    subject: tuple(keys.split())
    for subject, keys in {
        "backbone": """model hidden-channels num-layers dropout readout link-decoder
            edge-direction num-bases node-embedding reverse-relations schema-align""",
        "features": "feature-norm graph-features link-features types",
        "optimizer": """optimizer lr optimizer-state batch-size num-neighbors
            clip-gradient loss huber-delta target-weight class-weights""",
        "weight decay": "weight-decay",
        "training": """initial-model rounds round-patience local-epochs check-every
            patience participation participants weight-by aggregation trimmed-share
            krum-attackers krum-keep norm-bound server-optimizer server-lr server-momentum
            server-beta2 server-tau server-moments""",
        "protection": """upload-clip upload-noise upload-noise-model min-class-count
            min-target-count share-class-counts share-target-statistics""",
        "evaluation": """evaluate evaluate-every eval-policy final-local-epochs
            absent-classes target-scale link-k precision-k positive-class""",
    }.items()
}
"""General settings that a fair comparison shares, by subject. Methods may have other
defaults of them."""


def unequal_settings(
    rows: Mapping[str, Mapping[str, Scalar]],
    tuned: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Name the general settings in which rows of one comparison differ, one sentence each.

    ``tuned`` holds the settings that a row chose on validation nodes, in which it is
    not compared; nor is it in those of its name.
    """
    chosen = tuned or {}
    out = []
    for subject, keys in COMPARED.items():
        for key in keys:
            values: dict[str, list[str]] = {}
            for name, settings in rows.items():
                is_named = any(part.startswith(f"{key}=") for part in name.split(", "))
                is_chosen = is_named or key in chosen.get(name, ())
                if key in settings and not is_chosen:
                    values.setdefault(_shown(settings[key]), []).append(name)
            if len(values) > 1:
                listed = ", ".join(
                    f"{value} ({'; '.join(names)})" for value, names in values.items()
                )
                advice = f" (--set {key}={next(iter(values))} makes them equal)"
                out.append(
                    f"{subject}: {key} is {listed}{advice * (subject == 'backbone')}"
                )
    return out


def finetuned_note(names: Iterable[str]) -> str:
    """Say whose scores are taken after the last round."""
    return (
        f"Scores of {'; '.join(names)} are taken after the fine-tuning or second step "
        "that follows the last round."
    )


def _shown(value: Scalar) -> str:
    """Format a value; equal numbers have equal text."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if value and isinstance(value, str) else json.dumps(value)


def owner_metric(runs: Sequence[RunFolder], column: str = "test") -> str:
    """Return the owners' score that all scored runs have, else ``accuracy``."""
    return one_metric(run.owner_metric(column) for run in runs if run.best is not None)


def _owner_scores(runs: Sequence[RunFolder], column: str, metric: str) -> pd.DataFrame:
    """Return a row of owners' scores for each run."""
    import pandas as pd

    return pd.DataFrame([run.per_owner(column, metric) for run in runs], dtype=float)


def frames_per_owner(
    groups: Sequence[Sequence[RunFolder]],
    base: int | None = None,
    *,
    column: str = "test",
    metric: str = "accuracy",
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Score groups of runs, which differ in their seeds, by owner; gains over ``base``.

    Both frames have a row for each owner and a column for each group. NaN stands for an
    owner without scores or pairs. Runs that are not completed count only in a group
    that has no other. Raises a ConfigError or RunError if a group has several settings,
    or the runs have different owners.
    """
    import pandas as pd

    for runs in groups:
        _reject_mixed_settings("A group", runs)
    _check_owners([run for runs in groups for run in runs])
    done = [[r for r in runs if r.status == "completed"] or runs for runs in groups]
    found = [_owner_scores(runs, column, metric).mean() for runs in done]
    means = pd.concat(found, axis=1)
    gains = pd.DataFrame(index=means.index, columns=means.columns, dtype=float)
    for number, runs in enumerate(groups):
        if base is not None and number != base:
            with suppress(RunError):  # no pairs: the table shows the scores alone
                gains[number] = gains_per_owner(
                    groups[base], runs, column=column, metric=metric
                )["gain"]
    return means, gains


def gains_per_owner(
    one: Sequence[RunFolder], other: Sequence[RunFolder], *, column: str, metric: str
) -> pd.DataFrame:
    """Compare two methods owner by owner, by descending gain of B over A (usually Local).

    The frame has the mean scores ``one`` and ``other`` of each owner in paired runs, the
    ``gain``, the number of ``pairs``, and in how many of them B is better (``wins``). A
    RunError says that no two runs form a pair, that the runs have different owners, or
    that no owner has the score in both; a ConfigError that a side has several methods
    or settings.
    """
    import pandas as pd

    _check_sides(one, other)
    _check_owners([*one, *other])
    done = [[run for run in runs if run.status == "completed"] for runs in (one, other)]
    pairs = paired_runs(*done)
    if not pairs:
        raise RunError(
            "No completed run of A has the dataset, partition, clients and seed of a run "
            "of B. Run both methods with the same partition-seed and seed."
        )
    sides = (_owner_scores(runs, column, metric) for runs in zip(*pairs, strict=True))
    first, second = next(sides).align(next(sides), join="inner", axis=1)
    gains = ScoreScale(metric).gain(second, first)
    known = gains.notna()
    frame = pd.DataFrame(
        {
            "one": first[known].mean(),
            "other": second[known].mean(),
            "gain": gains.mean(),
            "pairs": known.sum(),
            "wins": (gains > 0).sum(),
        }
    ).rename_axis("owner")
    frame = frame[frame["pairs"] > 0]
    if frame.empty or metric in NO_SCORES:
        raise RunError(
            f'No owner has a score "{metric}" of "{column}" in both runs of a pair. Use '
            "--metric accuracy, macro_f1, auroc or rmse, and --column test or val."
        )
    return frame.sort_index().sort_values("gain", ascending=False, kind="stable")
