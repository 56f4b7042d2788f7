"""Cells of a results table: one row on one dataset, with the scores of all its draws.

A cell is one line of JSON that holds everything that a table and its notes need: settings,
partition hashes, versions and a hash of the source code, device, tuning budget, and for
each draw rounds, scores, bytes and seconds. It contains no path of a machine.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Self, get_origin

from flower_fgl.core.atomic import write_file
from flower_fgl.core.errors import RunError
from flower_fgl.core.options import Scalar
from flower_fgl.core.score_names import (
    NUMBER_SCORES,
    SETTING_COLUMNS,
    ScoreScale,
    kind_of_score,
)
from flower_fgl.core.settings import main_score_of, owners_name
from flower_fgl.runs.environment import version_label
from flower_fgl.runs.files import flatten_config, grouped, in_folder_name, read_text
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.summary import lost_finetuning, main_scope
from flower_fgl.runs.writer import writing

__all__ = ["CELLS", "DEFAULT_SUFFIX", "MODELS", "NO_RESULT", "PLACE", "Cell", "Draw"]
__all__ += ["describe_published", "describe_trials", "make_cell"]
__all__ += ["read_cells", "write_cells"]

PLACE = (
    "dataset",
    "target",
    "partition",
    "clients",
    "setting",
    "shots",
    "split",
    "split-by",
    "dirichlet-alpha",
    "feature-sparsity",
    "edge-sparsity",
    "label-sparsity",
    "expansion-hops",
)
"""Settings that define the data of a cell: the columns of an overview, not its rows."""
EARLIER = {"split-by": "auto"}
"""Values of cells and runs from before these settings were part of the data."""
MODELS = {
    "own": "",
    "global": "global model",
    "before": "before fine-tuning",
}
"""Evaluated models of a cell, with the suffix of their line in a table. ``own`` is the
clients' personalized model, after fine-tuning if the run has it."""
DEFAULT_SUFFIX = ", default"
"""End of the name of a row that has the settings before tuning."""
FORMAT = 1
CELLS = ".jsonl"
"""Ending of a file of cells, one in each line."""
NO_RESULT = {
    "seed",
    "partition-seed",
    "data-dir",
    "output-dir",
    "run-dir",
    "state-dir",
    "track",
    "resume",
    "checkpoint-every",
    "keep-checkpoint",
    "keep-client-models",
}
"""Settings that a cell leaves out: the seeds, which each draw has, and paths."""
METRICS: tuple[str, ...] = ("accuracy", "macro_f1", "auroc", "auprc", "mrr", "hits")
METRICS += ("micro_f1", "macro_recall", "num_nodes")
METRICS += ("mean_accuracy", "mean_auroc", "mean_auprc")
METRICS += (*NUMBER_SCORES, *(f"mean_{name}" for name in NUMBER_SCORES))
DIGITS = 8
SIGNED = ("r2", "spearman", "mean_r2", "mean_spearman")
"""Shares that may be negative."""

Scores = Mapping[str, Mapping[str, float | int]]
"""Scores by node set and name; ``worst_accuracy`` is that of the worst client."""


@dataclass(frozen=True)
class Draw:
    """Results of one run of a cell.

    ``partition`` is the SHA-256 of the clients' data. ``scores`` are by model
    (:data:`MODELS`), node set and name, at the round best on validation nodes,
    ``best_round``: in [0, 1], or of numbers in the units of the target. ``bytes_up``,
    ``bytes_down`` and ``seconds`` are those of all clients and rounds. ``owners`` are
    test scores by model, name of the natural owner, and name of the score.
    """

    seed: int
    partition_seed: int
    partition: str
    rounds: int
    scores: Mapping[str, Scores]
    best_round: Mapping[str, int]
    bytes_up: int
    bytes_down: int
    seconds: float
    owners: Mapping[str, Mapping[str, Mapping[str, float]]] = field(
        default_factory=dict
    )

    @property
    def key(self) -> tuple[int, int]:
        """What identifies the draw: seed of partition and split, seed of the run."""
        return self.partition_seed, self.seed


@dataclass(frozen=True)
class Cell:
    """One row of an experiment on one dataset, with all its draws.

    ``place`` holds the settings of the data (:data:`PLACE`), ``settings`` the others
    without seeds and paths. ``planned_draws`` is 0 if the experiment file chooses
    seeds. ``published`` are shares in percent: ``accuracy``, ``macro_f1``, or the
    accuracy of a column such as ``unseen``. ``tuning`` is empty if the row is not
    tuned.

    ``selection`` is ``validation`` if scores are those of the best validation round,
    with the name of the score if it is not the runs' own; else ``last``. ``device`` and
    each entry of ``host`` (processor, cores, memory, operating system) are texts with "
    and " if the runs used several. ``notes`` stand below a table with the cell.
    ``target`` has ``kind``, ``names``, ``units`` and the mean ``std`` of predicted
    numbers, else it is empty. ``extensions`` are source hashes of the packages that add its
    method, backbone or dataset, by name and version.
    """

    experiment: str
    title: str
    row: str
    method: str
    place: Mapping[str, Scalar]
    settings: Mapping[str, Scalar]
    draws: Sequence[Draw]
    order: int = 0
    planned_draws: int = 0
    published: Mapping[str, float] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)
    selection: str = "validation"
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    source_sha256: str = ""
    engine: str = ""
    device: str = ""
    host: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = field(default_factory=list)
    target: Mapping[str, Any] = field(default_factory=dict)
    extensions: Mapping[str, str] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """Models that every draw evaluated, in the order of :data:`MODELS`."""
        return [m for m in MODELS if all(m in draw.scores for draw in self.draws)]

    @property
    def is_finetuned(self) -> bool:
        """Whether the clients' own models are scored after fine-tuning."""
        return any(draw.best_round.get("own", 0) > draw.rounds for draw in self.draws)

    @property
    def main_metric(self) -> str:
        """Score that papers on the cell's setting report."""
        if self.target:
            return "rmse" if len(self.target["names"]) == 1 else "nrmse"
        setting = str(self.place.get("setting", ""))
        if setting == "few-shot":
            return "mean_accuracy"
        dataset, owners = self.place.get("dataset", ""), self.settings.get("owners", "")
        positive = {**self.settings, **self.place}.get("positive-class", "")
        return main_score_of(str(dataset), str(owners), setting, str(positive))

    @property
    def place_key(self) -> tuple[Scalar | None, ...]:
        """The values of :data:`PLACE`, which cells of one comparison share.

        The last one has the settings of synthetic graphs.
        """
        made = {k: v for k, v in self.settings.items() if k.startswith("synthetic.")}
        return (*map(self.held, PLACE), str(sorted(made.items()) or ""))

    def held(self, key: str) -> Scalar | None:
        """Return a setting of the data, also of a cell from before it was one."""
        return self.place.get(key, self.settings.get(key, EARLIER.get(key)))

    def pooled(self, model: str, column: str) -> tuple[float, int] | None:
        """Return the share of correct nodes of all draws together, and their number.

        The nodes of the new client count once for the global model, though each client
        scores them, and once for each client's own model.
        """
        found = [draw.scores.get(model, {}).get(column, {}) for draw in self.draws]
        hits = [
            (round(scores["accuracy"] * scores["num_nodes"]), int(scores["num_nodes"]))
            for scores in found
            if scores.get("num_nodes") and scores.get("accuracy") is not None
        ]
        total = sum(number for _, number in hits)
        if not total:
            return None
        share = sum(hit for hit, _ in hits) / total
        if column == "new_client" and model == "global":
            total //= int(self.place.get("clients") or 1)
        return share, total

    @classmethod
    def from_json(cls, text: str, where: str) -> Self:
        """Read a cell of the file ``where``; a RunError if it is damaged or was edited."""
        try:
            table = json.loads(text)
            if not isinstance(table, dict) or "format" not in table:
                raise RunError(
                    f"{where} is no row of a results table in JSON. Pass files that "
                    "flower-fgl table --cells wrote."
                )
            if table.pop("format") != FORMAT:
                raise RunError(
                    f"{where} has a format that this version cannot read. Update "
                    "flower-fgl, or write the cell again with flower-fgl table --cells."
                )
            draws = [Draw(**draw) for draw in table["draws"]]
            cell = cls(**{**table, "draws": draws})
            _check_cell(cell)
        except RunError:  # a ValueError, too
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else error
            raise RunError(
                f"{where} is damaged or was edited: {what}. Write it again with flower-fgl "
                "table --cells."
            ) from error
        return replace(cell, draws=sorted(draws, key=lambda draw: draw.key))

    def to_json(self) -> str:
        """Return the cell as one line of JSON."""
        table = {"format": FORMAT, **asdict(self)}
        for key in ("target", "extensions"):
            if not table[key]:
                del table[key]
        return json.dumps(table, ensure_ascii=False, allow_nan=False) + "\n"


def _check_cell(cell: Cell) -> None:
    """Check the types and ranges of all values of a cell; else a ValueError."""
    _check_types(cell, "the cell")
    for draw in cell.draws:
        _check_types(draw, "a draw")
    if "dataset" not in cell.place:
        raise ValueError('"place" names no dataset')
    needed = {"budget", "draws", "metric", "study"}
    if cell.tuning and (lacking := needed - cell.tuning.keys()):
        raise ValueError(f'"tuning" lacks {", ".join(sorted(lacking))}')
    for value in cell.published.values():
        most = math.inf if cell.target else 100
        _check_number(value, 0, most, "a published value")
    if not cell.draws:
        raise ValueError("it has no draw")
    if len({draw.key for draw in cell.draws}) < len(cell.draws):
        raise ValueError("a draw is there twice")
    for draw in cell.draws:
        _check_number(draw.seconds, 0, math.inf, '"seconds"')
        for model, columns in draw.scores.items():
            for column, scores in columns.items():
                for metric, value in scores.items():
                    is_open = kind_of_score(metric).is_lower or metric == "num_nodes"
                    least = -math.inf if metric in SIGNED else 0
                    most = math.inf if is_open else 1
                    name = f"{metric} of {model}, {column},"
                    _check_number(value, least, most, name)


def _check_types(part: Any, name: str) -> None:
    """Check that texts, whole numbers and tables are such."""
    for entry in fields(part):
        value, kind = getattr(part, entry.name), get_origin(entry.type) or entry.type
        wanted = kind if kind in (str, int, Mapping) else object
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise ValueError(f'"{entry.name}" of {name} cannot be {value!r}')


def _check_number(value: Any, least: float, most: float, name: str) -> None:
    """Reject what is no finite number between two bounds."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        bounds = f"between {least} and {most}" if most < math.inf else "of 0 or more"
        raise ValueError(f"{name} must be a number {bounds}, got {value!r}")


def make_cell(runs: Sequence[RunFolder], *, experiment: str, row: str) -> Cell:
    """Make a cell of completed runs with scores that differ in their draw only."""
    ordered = sorted(runs, key=_draw_of)
    for before, after in pairwise(ordered):
        if _draw_of(before) == _draw_of(after):
            raise RunError(
                f'Row "{row}" of {experiment} has two runs of the same draw: '
                f"{before.path} and {after.path}. Pass one of them."
            )
    first = ordered[0]
    origin = _one_version(ordered, f'Row "{row}" of {experiment}')
    flat = _settings_of(first)
    for run in ordered[1:]:
        other = _settings_of(run)
        keys = sorted(k for k in flat | other if flat.get(k) != other.get(k))
        if keys:
            raise RunError(
                f'Row "{row}" of {experiment} holds runs of different settings '
                f"({', '.join(keys)}): {first.path} and {run.path}. Pass the runs of "
                "one setting."
            )
    environments = [run.environment for run in ordered]
    hosts = [environment.get("host") or {} for environment in environments]
    return Cell(
        experiment=experiment,
        title="",
        row=row,
        method=str(first.summary["method"]),
        place={key: flat[key] for key in PLACE if flat.get(key, "") != ""},
        settings={k: v for k, v in flat.items() if k not in (*PLACE, "method")},
        draws=[_make_draw(run) for run in ordered],
        selection=str(first.summary.get("selection", "validation")),
        engine=str(first.summary.get("engine") or ""),
        device=str(_each_once(e.get("device", "") for e in environments)),
        host={
            key: _each_once(host.get(key) for host in hosts)
            for key in dict.fromkeys(key for host in hosts for key in host)
        },
        target=_mean_target(ordered),
        **origin,
    )


def _mean_target(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """Return what runs predict, with the spreads averaged over them."""
    found = [run.target for run in runs]
    each = zip(*(target.get("std") or () for target in found), strict=False)
    std = [fmean(values) for values in each if None not in values]
    return {**found[0], "std": [_stored("rmse", s) for s in std]} if found[0] else {}


def _stored(name: str, value: float) -> float:
    """Round a score for a cell: a share to eight decimals, an error to nine digits."""
    has_units = kind_of_score(name).has_units
    return float(f"{value:.9g}") if has_units else round(value, DIGITS)


def _each_once(values: Iterable[Any]) -> Any:
    """Return the value of all runs, or a text with each of several values once."""
    different = list(dict.fromkeys(values))
    if len(different) == 1:
        return different[0]
    return " and ".join(str(value or "unknown") for value in different)


def _draw_of(run: RunFolder) -> tuple[int, int]:
    """Return what identifies a draw: seed and partition seed."""
    seed = int(run.summary.get("seed") or 0)
    return int(run.config.get("partition-seed", 0)), seed


def _settings_of(run: RunFolder) -> dict[str, Scalar]:
    """Return the settings that a cell holds; of graph files only their names."""
    method, dataset = str(run.summary["method"]), str(run.summary["dataset"])
    out: dict[str, Scalar] = {}
    for key, value in flatten_config(run.config):
        table, dot, _ = key.partition(".")
        is_other = dot and table not in (method, dataset)
        if key not in NO_RESULT and not is_other:
            out[key] = Path(str(value)).name if key == "initial-model" else value
    out["dataset"] = Path(dataset.replace("\\", "/")).name
    if "owners" in out:
        out["owners"] = owners_name(str(out["owners"]))
    out["clients"] = int(run.summary.get("clients") or 0)
    return out


def _one_version(runs: Sequence[RunFolder], name: str) -> dict[str, Any]:
    """Return versions, commit and source hash; reject runs of several."""
    seen = grouped(runs, lambda run: version_label(run.environment))
    if len(seen) > 1:
        listed = "; ".join(
            f"{', '.join(run.path.name for run in members)}: {label}"
            for label, members in seen.items()
        )
        raise RunError(
            f"{name} mixes runs of {len(seen)} code versions ({listed}). Run the "
            "experiment again with one version, or pass the runs of one version only."
        )
    environment = runs[0].environment
    commits = {str(run.environment.get("commit", "")) for run in runs}
    return {
        "versions": dict(environment.get("versions") or {}),
        "commit": ", ".join(sorted(commits)),
        "source_sha256": str(environment.get("source_sha256", "")),
        "extensions": dict(environment.get("extensions") or {}),
    }


def _make_draw(run: RunFolder) -> Draw:
    seed_of_data, seed = _draw_of(run)
    summary = run.summary
    own, both = run.best, summary.get("global", {}).get("best")
    if main_scope(run.rounds) == "global":
        own, both = None, run.best
    tuned = summary.get("finetuned")
    if lost_finetuning(summary, run.rounds):
        raise RunError(
            f"{run.path.name}: the fine-tuning after the last round has no scores, so the "
            "run shows only the rounds before it. Remove its folder and run it again with "
            "other settings."
        )
    entries = {
        "own": (tuned or own, "local"),
        "global": (both, "global"),
        "before": (own if tuned else None, "local"),
    }
    found = {
        model: (entry, _worst(run, entry, scope))
        for model, (entry, scope) in entries.items()
        if entry
    }
    return Draw(
        seed=seed,
        partition_seed=seed_of_data,
        partition=str(summary.get("partition_sha256") or ""),
        rounds=int(summary["rounds"]),
        scores={
            m: _rounded(entry, worst, str(summary.get("metric", "accuracy")))
            for m, (entry, worst) in found.items()
        },
        best_round={m: int(entry["round"]) for m, (entry, _) in found.items()},
        bytes_up=int(summary["bytes"]["up"]),
        bytes_down=int(summary["bytes"]["down"]),
        seconds=round(float(summary["seconds"]["total"]), 2),
        owners={m: _of_owners(run, entries[m][1]) for m in found if m != "before"}
        if run.config.get("owners")
        else {},
    )


def _of_owners(run: RunFolder, scope: str) -> dict[str, dict[str, float]]:
    """Return each owner's test scores in the selected round."""
    out: dict[str, dict[str, float]] = {}
    for metric in ("accuracy", "auroc", "auprc", *NUMBER_SCORES):
        for name, value in run.per_owner("test", metric, scope).items():
            out.setdefault(name, {})[metric] = _stored(metric, value)
    return out


def _worst(
    run: RunFolder, entry: Mapping[str, Any], scope: str
) -> dict[str, dict[str, float]]:
    """Return the worst score of a client in the selected round, by node set and name."""
    lowest: dict[str, dict[str, float]] = {}
    names = dict.fromkeys(["accuracy", str(run.summary.get("metric", "accuracy"))])
    for columns in run.client_scores(entry["round"], scope).values():
        for column, scores in columns.items():
            mine = lowest.setdefault(column, {})
            for name in names:
                if (value := scores.get(name)) is not None:
                    known = (mine.get(f"worst_{name}", value), value)
                    mine[f"worst_{name}"] = min(known, key=ScoreScale(name).goodness)
    return lowest


def _rounded(
    entry: Mapping[str, Any], worst: Mapping[str, Mapping[str, float]], metric: str
) -> dict[str, dict[str, float | int]]:
    """Return the scores that a cell keeps; of validation only what selects the round."""
    out: dict[str, dict[str, float | int]] = {}
    for column in ("val", "test", *SETTING_COLUMNS):
        if column not in entry:
            continue
        names = METRICS if column != "val" else ("accuracy", metric, "num_nodes")
        kept = {name: entry[column].get(name) for name in names}
        if column != "val":
            kept |= worst.get(column, {})
        out[column] = {k: _stored(k, v) for k, v in kept.items() if v is not None}
    return out


def write_cells(cells: Sequence[Cell], folder: Path) -> dict[Path, list[Cell]]:
    """Write the cells of each experiment to ``<folder>/<experiment>.jsonl``.

    Returns the files, each with the rows that it had before and that were not written
    now: they are kept. If a row is there twice at one place, none is written.
    """
    found: dict[Path, dict[tuple[Any, ...], Cell]] = {}
    for cell in cells:
        path = folder / f"{in_folder_name(cell.experiment)}{CELLS}"
        rows = found.setdefault(path, {})
        if (key := (cell.row, cell.place_key)) in rows:
            raise RunError(
                f'The row "{cell.row}" of {cell.experiment} is there twice for one '
                "dataset and partition. Rename one of them, or write them into two "
                "folders."
            )
        rows[key] = cell
    kept = {
        path: [
            cell
            for cell in (read_cells(path) if path.is_file() else ())
            if (cell.row, cell.place_key) not in rows
        ]
        for path, rows in found.items()
    }
    for path, rows in found.items():
        whole = sorted([*rows.values(), *kept[path]], key=lambda cell: cell.order)
        with writing(path, "choose a file in"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, "".join(cell.to_json() for cell in whole).encode())
    return kept


def read_cells(path: Path) -> list[Cell]:
    """Read the cells of a file, or of a folder and the folders in it."""
    files = [path] if path.is_file() else sorted(path.rglob(f"*{CELLS}"))
    if not files:
        raise RunError(
            f"{path} holds no cells. Write them with flower-fgl table RUNS --cells."
        )
    out = []
    for file in files:
        lines = [line for line in read_text(file).split("\n") if line]
        out += [
            Cell.from_json(line, f"{file}, line {number},")
            for number, line in enumerate(lines, start=1)
        ]
    return out


def describe_published(value: float) -> str:
    """Format a published value in percent, with the second digit only if it has one."""
    return f"{value:.1f}" if value == round(value, 1) else f"{value:.2f}"


def describe_trials(tuning: Mapping[str, Any]) -> str:
    """Say how a row was tuned, see :attr:`Cell.tuning`, without the study."""
    draws = ", ".join(str(draw) for draw in tuning["draws"])
    kind = "draw" if len(tuning["draws"]) == 1 else "draws"
    return (
        f"best of {tuning['budget']} trials per row by {tuning['metric']} on {kind} "
        f"{draws}"
    )
