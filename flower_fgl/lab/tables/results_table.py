"""Tables of cells: lines by place, their comparisons, and notes on what is not equal."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flower_fgl.core.errors import ConfigError, RunError
from flower_fgl.core.options import nearest
from flower_fgl.core.score_names import NO_SCORES, ScoreScale, refuse_mixed_kinds
from flower_fgl.lab.tables.cells import (
    DEFAULT_SUFFIX,
    MODELS,
    PLACE,
    Cell,
    describe_trials,
)
from flower_fgl.lab.tables.compare import finetuned_note, one_metric, unequal_settings
from flower_fgl.lab.tables.frame import COSTS, Scores, frame_of_cells
from flower_fgl.lab.tables.ranks import Ranks, rank_rows
from flower_fgl.lab.tables.statistics import Comparison, compare_all, compare_series
from flower_fgl.runs.environment import extension_labels, mixed_versions
from flower_fgl.runs.files import grouped

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Block", "Line", "ResultsTable"]

CONTROL = "local"


@dataclass(frozen=True)
class Line:
    """One evaluated model of a cell, see :data:`~flower_fgl.lab.tables.cells.MODELS`."""

    cell: Cell
    model: str

    @property
    def name(self) -> str:
        """Row of the cell, with the model unless it is the clients' own."""
        return ", ".join(part for part in (self.cell.row, MODELS[self.model]) if part)

    @property
    def is_main(self) -> bool:
        """Whether the line stands for its row: its first model."""
        return self.model == self.cell.models[0]


@dataclass(frozen=True)
class Block:
    """Lines on the same data, in table order.

    ``best`` has the best mean; all others are compared with ``control``. ``target`` is
    that of its cells, with the mean of their spreads.
    """

    name: str
    lines: Sequence[Line]
    target: Mapping[str, Any] = field(default_factory=dict)
    best: Line | None = None
    control: Line | None = None


@dataclass
class ResultsTable:
    """Rows by dataset, with paired comparisons over the draws.

    ``column`` is a node set, ``metric`` a score or cost, by default the cells' main
    score. ``against`` is the row or method that the others are compared with, by
    default ``local``. Of each row the first ``draws`` are used, 0 for all. ``labels``
    are display names of rows, of parts of their names, of datasets and partitions.

    Raises a ConfigError if no cell has the column, metric or row; a RunError if cells
    are of different kinds, or the rows of one dataset are not unique or not paired.
    """

    cells: Sequence[Cell]
    column: str = "test"
    metric: str = ""
    against: str = ""
    draws: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.cells:
            raise RunError("A table needs at least one cell, got none.")
        refuse_mixed_kinds((cell.row, cell.target) for cell in self.cells)
        experiments = grouped(self.cells, lambda cell: cell.experiment).values()
        cells = [c for same in experiments for c in sorted(same, key=lambda c: c.order)]
        most = max(len(cell.draws) for cell in cells)
        if self.draws > most:
            raise ConfigError(
                f"--draws {self.draws} is too many: the rows have {most}."
            )
        if self.draws:
            cells = [replace(cell, draws=cell.draws[: self.draws]) for cell in cells]
        self.cells = cells
        self.metric = self.metric or one_metric(cell.main_metric for cell in cells)
        for group in self._places.values():
            self._check_names(group)
            _check_draws(group)
        scored = [s for c in cells for d in c.draws for s in d.scores.values()]
        known = {column for scores in scored for column in scores}
        if self.column not in known:
            raise ConfigError(
                f'No row has scores of "{self.column}". '
                f"{nearest(self.column, sorted(known))}"
            )
        lines = [line for block in self.blocks for line in block.lines]
        if self.metric in NO_SCORES or not any(map(self.values, lines)):
            names = {name for scores in scored for name in scores.get(self.column, ())}
            raise ConfigError(
                f'No row has a score "{self.metric}" of "{self.column}". '
                f"{nearest(self.metric, {*names, *COSTS} - NO_SCORES)}"
            )

    @property
    def is_cost(self) -> bool:
        """Whether the table shows bytes or seconds instead of scores."""
        return self.metric in COSTS

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The scores and costs of all draws, see :mod:`~flower_fgl.lab.tables.frame`."""
        return frame_of_cells(self.cells)

    @cached_property
    def _scores(self) -> Scores:
        """The frame by row and score."""
        return Scores(self.frame)

    @cached_property
    def _places(self) -> dict[tuple[Any, ...], list[Cell]]:
        """Cells by the data they are measured on."""
        return grouped(self.cells, lambda cell: cell.place_key)

    @cached_property
    def blocks(self) -> list[Block]:
        """Lines by data, with the best one and the control."""
        made = {k for c in self.cells for k in c.settings if k.startswith("synthetic.")}
        varying = [
            key
            for key in (*PLACE, *sorted(made))
            if key == "dataset" or len({c.held(key) for c in self.cells}) > 1
        ]
        out = []
        for cells in self._places.values():
            parts = []
            for key in varying:
                value = cells[0].held(key)
                text = self.labels.get(str(value), str(value))
                if key not in ("dataset", "partition", "setting"):
                    text = f"{text} clients" if key == "clients" else f"{key} {text}"
                parts += [] if value is None else [text]
            known = [cell.target["std"] for cell in cells if cell.target.get("std")]
            std = [fmean(each) for each in zip(*known, strict=False)]
            lines = [
                Line(cell, model)
                for cell in cells
                for model in cell.models
                if model != "before"
            ]
            target = {**cells[0].target, "std": std}
            best, control = self._best(lines), self._control(lines)
            out.append(Block(", ".join(parts), lines, target, best, control))
        if self.against and all(block.control is None for block in out):
            raise ConfigError(self._no_control(out))
        return out

    def scale_of(self, block: Block, metric: str = "") -> ScoreScale:
        """Return how a score of a block is shown and compared, by default the table's."""
        return ScoreScale.of(metric or self.metric, block.target)

    @property
    def scale(self) -> ScoreScale:
        """The table's score, with the unit of all its blocks if they share one."""
        scales = {self.scale_of(block).unit for block in self.blocks}
        return ScoreScale(self.metric, scales.pop() if len(scales) == 1 else "")

    def _no_control(self, blocks: Sequence[Block]) -> str:
        """Say why no block has the line to compare with."""
        name = self.against
        if self.is_cost:
            return f"Costs are not compared: use --against or --metric {self.metric}."
        lines = [line for block in blocks for line in block.lines]
        rows = dict.fromkeys(line.cell.row for line in lines)
        same = dict.fromkeys(x.cell.row for x in lines if x.cell.method == name)
        if len(same) > 1:
            return f'Several rows are of method "{name}": {"; ".join(same)}. Name one.'
        if name in rows:
            return f'Row "{name}" has no {self.metric} of "{self.column}" in all draws.'
        if any(line.name == name for line in lines):
            return f'"{name}" is one of several models of a row. Name the row.'
        return f'No row or method "{name}" to compare with. {nearest(name, rows)}'

    def _best(self, lines: Sequence[Line]) -> Line | None:
        """Return the line with the best mean, if there are several."""
        scored = [line for line in lines if self.values(line)]
        if self.is_cost or len(scored) < 2:
            return None
        scale = ScoreScale(self.metric)
        return max(scored, key=lambda line: scale.goodness(fmean(self.values(line))))

    def _control(self, lines: Sequence[Line]) -> Line | None:
        """Return the line to compare with: of a row, else of the only row of a method."""
        wanted = self.against or CONTROL
        main = [line for line in lines if line.is_main and self.values(line)]
        named = [line for line in main if line.cell.row == wanted] or [
            line
            for line in main
            if line.cell.method == wanted and not line.cell.row.endswith(DEFAULT_SUFFIX)
        ]
        return named[0] if len(named) == 1 and not self.is_cost else None

    def _key(self, line: Line, metric: str, column: str) -> tuple[Hashable, ...]:
        """Return the key of a value of a line in the frame."""
        about = (line.cell.place_key, line.cell.row)
        metric = metric or self.metric
        if metric in COSTS:
            return (*about, "", "", metric)
        return (*about, line.model, column or self.column, metric)

    def values(self, line: Line, metric: str = "", column: str = "") -> list[float]:
        """Return one value of a line per draw; empty if a draw has none."""
        found = self._scores.values(*self._key(line, metric, column))
        return found if len(found) == len(line.cell.draws) else []

    @cached_property
    def _tests(self) -> dict[tuple[int, int], Comparison]:
        """All comparisons of the table, by the identity of both lines."""
        pairs: dict[tuple[int, int], Comparison] = {}
        for block in self.blocks:
            for other in (block.control, block.best):
                for line in block.lines:
                    key = (id(line), id(other))
                    is_known = key in pairs or key[::-1] in pairs
                    if other is None or line is other or is_known:
                        continue
                    one, two = (
                        self._scores.series(*self._key(side, "", ""))
                        for side in (line, other)
                    )
                    found = compare_series(one, two, self.scale_of(block))
                    if found is not None and self.values(line):
                        pairs[key] = found
        compared = dict(zip(pairs, compare_all(list(pairs.values())), strict=True))
        return compared | {key[::-1]: one.reverse() for key, one in compared.items()}

    def versus(self, line: Line, other: Line | None) -> Comparison | None:
        """Return the comparison of a line with the best one or the control of its block."""
        return self._tests.get((id(line), id(other)))

    @property
    def num_tests(self) -> int:
        """Number of comparisons that Holm's method adjusts for."""
        tested = [v for v in self._tests.values() if not math.isnan(v.p)]
        return len(tested) // 2

    def ranks(self) -> tuple[Ranks | None, list[str]]:
        """Rank the rows over the datasets; also return the rows that a block lacks.

        Each row has its first model; settings before tuning are left out. Blocks of one
        dataset are no independent replicates: their scores are averaged.
        """
        if self.is_cost or len(self.blocks) < 2:
            return None, []
        rows: dict[str, dict[str, float]] = {}
        datasets: dict[str, list[str]] = {}
        for block in self.blocks:
            dataset = str(block.lines[0].cell.place["dataset"])
            datasets.setdefault(dataset, []).append(block.name)
            for line in block.lines:
                if line.is_main and (values := self.values(line)):
                    name = self.label(line.cell.row)
                    mean = self.scale.goodness(fmean(values))
                    rows.setdefault(name, {})[block.name] = mean
        tuned = {self.label(cell.row) for cell in _without_defaults(self.cells)}
        whole = {
            name: [
                fmean(found[block] for block in blocks) for blocks in datasets.values()
            ]
            for name, found in rows.items()
            if len(found) == len(self.blocks) and name in tuned
        }
        missing = [name for name in rows if name not in whole and name in tuned]
        return (rank_rows(whole) if len(whole) > 1 else None), missing

    def label(self, name: str) -> str:
        """Return the display name of a row or line; its parts have labels of their own."""
        return self.labels.get(name) or ", ".join(
            self.labels.get(part, part) for part in name.split(", ")
        )

    def _check_names(self, cells: Sequence[Cell]) -> None:
        """Reject two cells of the same row, and two rows that have the same label."""
        seen: dict[str, Cell] = {}
        for cell in cells:
            label = self.label(cell.row)
            before = seen.setdefault(label, cell)
            if before.row != cell.row:
                raise ConfigError(
                    f'Rows "{before.row}" and "{cell.row}" have the same label, "{label}". '
                    "Give them different ones."
                )
            if before is not cell:
                names = f"{before.experiment} and {cell.experiment}"
                if before.experiment == cell.experiment:
                    names = f"two copies of experiment {cell.experiment}"
                raise RunError(
                    f'Row "{cell.row}" on {cell.place["dataset"]} comes twice, from '
                    f"{names}. Pass one of them, or make a table of each."
                )

    def warnings(self) -> list[str]:
        """Name what is not equal in the rows of one comparison, one sentence each."""
        found: dict[str, list[str]] = {}
        for block in self.blocks:
            cells = list({id(line.cell): line.cell for line in block.lines}.values())
            for text in self._unequal(cells):
                found.setdefault(text, []).append(block.name)
        return [
            *self._mixed_rows(),
            *(
                text
                if len(names) == len(self.blocks)
                else f"{'; '.join(names)}: {text}"
                for text, names in found.items()
            ),
        ]

    def _mixed_rows(self) -> list[str]:
        """Name rows that have not the same method, or scored model, in all blocks."""
        lines = [(b.name, x) for b in self.blocks for x in b.lines if x.is_main]
        out = []
        for name, same in grouped(lines, lambda at: self.label(at[1].cell.row)).items():
            methods = grouped(same, lambda at: at[1].cell.method)
            models = grouped(same, lambda at: MODELS[at[1].model] or "own model")
            for what, groups in (("method", methods), ("model", models)):
                if len(groups) > 1:
                    listed = {
                        value: [place for place, _ in found]
                        for value, found in groups.items()
                    }
                    out.append(f"the {what} of row {name} is {_listed(listed)}")
        return out

    def _unequal(self, cells: Sequence[Cell]) -> list[str]:
        """Name what is not equal in the cells of one block."""
        # the settings before tuning are those of the tuned row, or were tuned
        cells = _without_defaults(cells)
        settings = {self.label(cell.row): cell.settings for cell in cells}
        tuned = {
            self.label(cell.row): frozenset(cell.tuning.get("settings", ()))
            for cell in cells
        }
        out = unequal_settings(settings, tuned)
        for text, value_of in (
            ("tuning budget: trials are", lambda c: str(c.tuning.get("trials", 0))),
            ("code versions: rows were measured with", _code_of),
            ("versions: rows were measured with", _versions_of),
            (
                "devices: seconds were measured on",
                lambda c: f"{c.device or 'unknown'}, {c.host.get('cpu')}",
            ),
            ("selection: the round is chosen by", lambda c: c.selection),
        ):
            groups = self._by(cells, value_of)
            if len(groups) > 1:
                out.append(f"{text} {_listed(groups)}")
        out += mixed_versions(
            {self.label(cell.row): {"extensions": cell.extensions} for cell in cells}
        )
        lost = [cell for cell in cells if cell.tuning.get("failed")]
        if lost:
            failed = self._by(
                lost, lambda c: f"{c.tuning['failed']} of {c.tuning.get('trials')}"
            )
            out.append(f"failed trials: {_listed(failed)}")
        # all rows have the same draws
        for draws in grouped(cells[0].draws, lambda draw: draw.partition).values():
            seeds = sorted({draw.partition_seed for draw in draws})
            if len(seeds) > 1:
                names = " and ".join(map(str, seeds))
                out.append(
                    f"partition: partition seeds {names} give the same partition"
                )
        return out

    def _by(self, cells: Sequence[Cell], value_of: Any) -> dict[str, list[str]]:
        """Return the names of rows by a value of their cells."""
        groups = grouped(cells, value_of).items()
        return {value: [self.label(c.row) for c in same] for value, same in groups}

    def facts(self) -> list[str]:
        """Describe draws, tuning and versions of the table, one sentence each."""
        numbers = sorted({len(cell.draws) for cell in self.cells})
        listed = " or ".join(map(str, numbers))
        out = [
            "Scores are of one draw, so they have no ± and no difference is tested."
            if numbers == [1]
            else f"± is the standard deviation over {listed} {_kind_of(self.cells)}"
        ]
        rows = [c.row for c in self.cells if c.method == CONTROL]
        is_compared = self.against or any(block.control for block in self.blocks)
        if len(set(rows)) > 1 and not is_compared and not self.is_cost:
            out.append(
                f"No row is compared with {CONTROL}, because several rows are of this "
                f"method: {'; '.join(dict.fromkeys(rows))}. Name one with --against."
            )
        selections = {cell.selection for cell in self.cells}
        if len(selections) == 1 and not self.is_cost:
            (selection,) = selections
            title = selection.replace("mean_auroc", "AUROC, averaged over owners")
            rounds = {
                "last": "last round",
                "validation": "round best on validation nodes",
            }
            which = rounds.get(selection, f"round best by {title}")
            out.append(f"Scores are those of the {which}.")
        tuned = {self.label(c.row): None for c in self.cells if c.is_finetuned}
        if tuned and not self.is_cost:
            out.append(finetuned_note(tuned))
        for block in self.blocks:
            for line in block.lines:
                number = len(line.cell.draws)
                known = len(self._scores.values(*self._key(line, "", "")))
                if not self.is_cost and 0 < known < number:
                    out.append(
                        f"{self.label(line.name)} on {block.name} has no {self.metric} in "
                        f"{number - known} of {number} draws: it has no mean."
                    )
        planned = {c.planned_draws for c in self.cells if c.planned_draws}
        if planned and max(planned) > max(numbers):
            out.append(f"The experiment plans {max(planned)} draws.")
        studies = grouped((c.tuning for c in self.cells if c.tuning), describe_trials)
        for text, tunings in studies.items():
            names = dict.fromkeys(str(tuning["study"])[:12] for tuning in tunings)
            kind = "study" if len(names) == 1 else "studies"
            out.append(f"Tuned rows: {text} ({kind} {', '.join(names)}).")
        if not studies:
            # run folders that no experiment file made have no title
            source = "those of the experiment file, " * any(c.title for c in self.cells)
            out.append(f"Settings are {source}not tuned.")
        versions = dict.fromkeys(
            f"{_versions_of(cell)}, {_code_of(cell)}".removeprefix(", ")
            for cell in self.cells
        )
        added = {
            e
            for cell in self.cells
            for e in extension_labels({"extensions": cell.extensions})
        }
        versions |= dict.fromkeys(sorted(added))
        out.append(f"Measured with {'; '.join(versions)}.")
        return out


def _without_defaults(cells: Sequence[Cell]) -> list[Cell]:
    """Leave out the settings before tuning of rows that are there after it, too."""
    rows = {cell.row for cell in cells}
    return [
        cell
        for cell in cells
        if not cell.row.endswith(DEFAULT_SUFFIX)
        or cell.row.removesuffix(DEFAULT_SUFFIX) not in rows
    ]


def _kind_of(cells: Sequence[Cell]) -> str:
    """Say what the draws of cells vary, as the end of a sentence."""
    seeds = {draw.seed for cell in cells for draw in cell.draws}
    partitions = {draw.partition_seed for cell in cells for draw in cell.draws}
    if len(partitions) == 1:
        return (
            "draws of the initial model, on one partition and split: tests say nothing "
            "about other partitions."
        )
    if any(len({d.partition_seed for d in c.draws}) < len(c.draws) for c in cells):
        return (
            f"runs with {len(partitions)} partitions and splits, some of which several "
            "runs share. Tests compare the means of each partition."
        )
    if len(seeds) == 1:
        return "draws of partition and split."
    return "draws of partition, split and initial model."


def _check_draws(cells: Sequence[Cell]) -> None:
    """Reject rows on the same data with other draws, or other partitions of a draw."""
    draws = {
        cell.row: {draw.key: draw.partition for draw in cell.draws} for cell in cells
    }
    everything = set().union(*draws.values())
    lacking = {row: sorted(everything - found.keys()) for row, found in draws.items()}
    if any(lacking.values()):
        listed = "; ".join(
            f'"{row}" lacks {", ".join(_draw_name(key) for key in keys)}'
            for row, keys in lacking.items()
            if keys
        )
        raise RunError(
            f"Rows on {cells[0].place['dataset']} have unequal draws: {listed}. Run the "
            "experiment again to complete it, or use --draws N for the first N draws of "
            "all rows."
        )
    for key in sorted(everything):
        held = {row: found[key] for row, found in draws.items()}
        partitions = grouped(held, held.__getitem__)
        if len(partitions) > 1:
            listed = "; ".join(
                f"{', '.join(rows)}: {hash_ or 'unknown'}"
                for hash_, rows in partitions.items()
            )
            raise RunError(
                f"Rows on {cells[0].place['dataset']} have different partitions in "
                f"{_draw_name(key)}, so that their scores are not paired ({listed}). Run "
                "them again with the same data and version."
            )


def _draw_name(key: tuple[int, int]) -> str:
    partition_seed, seed = key
    if partition_seed == seed:
        return f"draw {seed}"
    return f"seed {seed} of partition {partition_seed}"


def _versions_of(cell: Cell) -> str:
    return ", ".join(f"{name} {version}" for name, version in cell.versions.items())


def _code_of(cell: Cell) -> str:
    """Return the code version of a cell: source hash and commit."""
    parts = [f"source {cell.source_sha256[:12]}"] if cell.source_sha256 else []
    parts += [f"commit {cell.commit[:12]}"] if cell.commit else []
    if cell.commit and not cell.source_sha256:
        parts.append("no source hash recorded")
    return ", ".join(parts) or "unknown"


def _listed(groups: Mapping[str, Sequence[str]]) -> str:
    """List values with the names of their rows."""
    return "; ".join(f"{value} ({'; '.join(names)})" for value, names in groups.items())
