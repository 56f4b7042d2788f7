"""Read a run folder: settings, results, and the rows of rounds and clients."""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from flower_fgl.core.errors import RunError, refuse
from flower_fgl.core.score_names import (
    EXTRA_SCORES,
    NO_SCORES,
    NUMBER_SCORES,
    SETTING_COLUMNS,
    ScoreScale,
    number_scores,
    spread_of_targets,
)
from flower_fgl.core.settings import main_score_of
from flower_fgl.core.targets import NUMBERS
from flower_fgl.runs.files import (
    CLIENTS_FILE,
    CONFIG_FILE,
    ENDED,
    HEADER,
    MEND,
    ROUNDS,
    SUMMARY,
    Row,
    parse_row,
    read_lines,
    read_sources,
    read_text,
    require_whole,
)
from flower_fgl.runs.summary import is_scored, main_scope, select_round, summarise

__all__ = ["RunFolder", "names_of_owners", "require_rounds"]

AUROC = "test AUROC"
STATUSES = ("running", *ENDED)
IN_SUMMARY = [*HEADER, "rounds", "selection", "best", "last", "bytes", "seconds"]


@dataclass(frozen=True, repr=False)
class RunFolder:
    """Content of a run folder; its ``repr`` is a short table of the results.

    :class:`flower_fgl.Run` describes the fields.
    """

    path: Path
    config: dict[str, Any]
    sources: dict[str, str]
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read the folder of a run, finished or not.

        Raises a RunError if the folder or one of its files is missing or damaged. An
        incomplete last line is skipped in a run that is not complete.
        """
        folder = Path(os.path.expanduser(path))
        if not (folder / CONFIG_FILE).is_file():
            raise RunError(
                f"{folder} is not a run folder: it has no {CONFIG_FILE}. Pass a folder "
                "that `flower-fgl run` wrote."
            )
        text = read_text(folder / CONFIG_FILE)
        require_whole(text, folder / CONFIG_FILE)
        try:
            config = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RunError(f"{folder / CONFIG_FILE} is damaged: {error}.") from error
        where = folder / SUMMARY
        summary = parse_row(read_text(where), str(where), "status")
        _require_fitting(config, summary, folder)
        is_finished = summary["status"] == "completed"
        rounds = read_lines(folder / ROUNDS, is_finished=is_finished)
        clients = read_lines(folder / CLIENTS_FILE, is_finished=is_finished)
        if is_finished:
            require_rounds(rounds, summary.get("rounds", 0), folder)
        if summary["status"] == "running":  # active or killed: the rows are newer
            header = {key: summary.get(key) for key in HEADER}
            keys = ("dataset", "owners", "setting", "positive-class")
            metric = main_score_of(*(str(config.get(key, "")) for key in keys))
            summary |= summarise(rounds, status="running", metric=metric, **header)
        elif lacking := [key for key in IN_SUMMARY if key not in summary]:
            raise RunError(
                f'{where} is damaged: it has no "{lacking[0]}". Copy the folder again, or '
                "remove it and run the experiment again."
            )
        return cls(folder, config, read_sources(text), summary, rounds, clients)

    @classmethod
    def of(cls, run: RunFolder) -> Self:
        """Return a run as one of this class."""
        if isinstance(run, cls):
            return run
        return cls(**vars(run))

    @property
    def status(self) -> str:
        """``running`` (active or killed), ``completed``, ``failed`` or ``interrupted``."""
        return str(self.summary["status"])

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, commit, host and device; empty if the run recorded none."""
        return self.summary.get("environment") or {}

    @property
    def best(self) -> dict[str, Any] | None:
        """Scores of the round with the best validation accuracy."""
        return self.summary["best"]  # type: ignore[no-any-return]  # JSON

    @property
    def last(self) -> dict[str, Any] | None:
        """Scores of the last round with an evaluation."""
        return self.summary["last"]  # type: ignore[no-any-return]  # JSON

    @property
    def final(self) -> dict[str, Any] | None:
        """Scores that stand for the run: after fine-tuning, else of the best round."""
        return self.summary.get("finetuned") or self.best

    @property
    def final_scope(self) -> str:
        """Models that :attr:`final` scores: ``local`` or ``global``."""
        return "local" if self.summary.get("finetuned") else main_scope(self.rounds)

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Scores of each selected round that was scored, by the name of the selection."""
        both = self.summary.get("global", {})
        found = {
            "best": self.best,
            "last": self.last,
            "global best": both.get("best"),
            "global last": both.get("last"),
            "finetuned": self.summary.get("finetuned"),
            "calibrated": self.summary.get("calibrated"),
        }
        return {key: entry for key, entry in found.items() if entry}

    @property
    def target(self) -> dict[str, Any]:
        """What a run with numbers predicts, empty for classes and labels.

        Keys: ``kind``, ``names``, ``units``, and ``std``, the standard deviation of each
        target: that by which it was scaled for all owners, else that of the test values.
        """
        found = dict(self.summary.get("target") or {})
        if not found and self.summary.get("metric") in NUMBER_SCORES and self.final:
            # a run in progress, whose summary lacks it
            sets = [entry for entry in self.final.values() if isinstance(entry, dict)]
            found = {"kind": NUMBERS, "names": [""] * len(sets[0]["targets"]["rmse"])}
        if found.get("kind") != NUMBERS:
            return {}
        std = (found.pop("scale", None) or {}).get("std")
        if not std or self.config.get("target-scale") in ("none", "own"):
            test = (self.final or {}).get("test", {})
            std = spread_of_targets(test.get("targets", {}))
        return {**found, "std": std}

    def scale_of(self, metric: str) -> ScoreScale:
        """Return how the values of a score are shown and compared."""
        return ScoreScale.of(metric, self.target)

    def selected_by(self, metric: str) -> RunFolder:
        """Return the run with its best rounds selected by another validation score.

        ``metric`` is ``accuracy``, ``macro_f1``, ``auroc``, ``mean_auroc``, … A
        RunError is raised if no evaluated round has it on validation nodes.
        """
        scored = [row for row in self.rounds if is_scored(row)]
        chosen = select_round(scored, main_scope(scored), metric)
        if metric in NO_SCORES or chosen["selection"] != "validation":
            raise RunError(
                f'{self.path} has no validation score "{metric}" to select a round by. Use '
                "accuracy, macro_f1, auroc for owners and links, or rmse for numbers."
            )
        chosen["selection"] = f"validation {metric}"
        summary = {**self.summary, **chosen}
        if "global" in summary:
            summary["global"] = select_round(scored, "global", metric)
        return replace(self, summary=summary)

    @property
    def owner_names(self) -> dict[int, str]:
        """Names of natural owners by partition-id, which tells equal names apart."""
        return names_of_owners(self.clients)

    def per_owner(
        self, column: str = "test", metric: str = "accuracy", scope: str = ""
    ) -> dict[str, float]:
        """Return each client's score by the name of its owner.

        They are in the order of the partition-ids; a partition of a dataset is named by
        its number, and clients without that score are left out. ``column`` and ``metric``
        are node set and score; ``auroc`` exists for owners and sets of graphs. ``scope``
        is the model (``local``, ``global``) at its own best round, by default the
        personalized one, if it was evaluated. The personalized model is scored after
        fine-tuning, if there was any, else in the best round.
        """
        main, scope = main_scope(self.rounds), scope or self.final_scope
        both = self.best if scope == main else self.summary.get(scope, {}).get("best")
        best = self.final if scope == self.final_scope else both
        if best is None:
            return {}
        names = self.owner_names
        found = {
            names.get(pid, str(pid)): columns.get(column, {}).get(metric)
            for pid, columns in self.client_scores(best["round"], scope).items()
        }
        return {name: float(v) for name, v in found.items() if v is not None}

    def client_scores(self, number: int | None, scope: str) -> dict[int, Row]:
        """Return the scores of clients in a round by partition-id, node set and name."""
        found = {
            int(row["partition_id"]): scores
            for row in self.clients
            if row["round"] == number
            and (scores := (row.get("metrics") or {}).get(scope))
        }
        return dict(sorted(found.items()))

    def owner_metric(self, column: str = "test") -> str:
        """Return ``auroc`` if all scored owners have it, else ``accuracy``.

        Of numbers it is the score that selects the round. An owner whose items of the
        column all belong to one class has no AUROC.
        """
        if self.target:
            return str(self.summary.get("metric", "rmse"))
        areas, scores = (self.per_owner(column, name) for name in ("auroc", "accuracy"))
        return "auroc" if areas and areas.keys() == scores.keys() else "accuracy"

    def __repr__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the results as a text table, with scores in percent."""
        titles, rows = self.scores()
        widths = [6, 9, 10, 9][: 1 if self.target else 4]
        more = titles[len(widths) + 1 :]
        widths += [12 if title == AUROC else max(13, len(title) + 2) for title in more]
        lines = []
        for name, *cells in (titles, *rows):
            right = (f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
            lines.append(f"{name:<20}{''.join(right)}")
        end = f"Run folder: {self.path}"
        below = [*self.target_lines(), *self.owner_lines(), *self.failures(), end]
        return "\n".join([self.headline(), *(lines if rows else []), *below])

    def shown_scores(self) -> list[tuple[str, str, str]]:
        """Return title, node set and score of the columns of a results table."""
        entries = self.entries.values()
        own = {k: t for k, t in SETTING_COLUMNS.items() if k in (self.last or {})}
        tests = {name for entry in entries for name in entry.get("test", {})}
        if self.target:
            main = self.owner_metric()
            keys = [("val", main), *(("test", n) for n in number_scores(self.target))]
            keys += [(column, main) for column in own]
            if "coverage" in tests:
                keys += [("test", "coverage"), ("test", "interval")]
            return [
                (f"{own.get(c, c)} {self.scale_of(n).title}", c, n) for c, n in keys
            ]
        extra = {name: t for name, t in EXTRA_SCORES.items() if name in tests}
        shown = [("val acc", "val", "accuracy"), ("test acc", "test", "accuracy")]
        shown += [("test F1", "test", "macro_f1")]
        shown += [(f"test {title}", "test", name) for name, title in extra.items()]
        shown += [(title, column, "accuracy") for column, title in own.items()]
        if "test_masked" in own:  # few-shot; FedPANO reports plain means over clients
            shown += [
                ("mean of clients", "test", "mean_accuracy"),
                ("mean, own classes", "test_masked", "mean_accuracy"),
            ]
        return shown

    def scores(self) -> tuple[list[str], list[list[str]]]:
        """Return titles and rows of the results table, with scores in percent.

        The first title, of the rows' names, is empty. There is one row for each selected
        round that was scored.
        """
        is_last = self.summary["selection"] == "last"
        names = {
            "best": "last round" if is_last else "best validation",
            "last": "last round",
            "global best": "best, aggregated",
            "global last": "last, aggregated",
        }
        shown = self.shown_scores()
        rows = [
            [
                names.get(key, key),
                str(entry["round"]),
                *(self._cell(entry, column, score) for _, column, score in shown),
            ]
            for key, entry in self.entries.items()
            if key != "last" or not is_last
        ]
        return ["", "round", *(title for title, _, _ in shown)], rows

    def _cell(self, entry: Row, column: str, score: str) -> str:
        """Format a score, a dash if there is none."""
        value = entry.get(column, {}).get(score)
        if self.target:
            return self.scale_of(score).show(value)
        return "-" if value is None else f"{100 * value:.2f}"

    def target_lines(self) -> list[str]:
        """Return the test errors of each of several targets, in its own unit."""
        found = (self.final or {}).get("test", {}).get("targets", {}).get("rmse", ())
        names, units = self.target.get("names", ()), self.target.get("units") or ()
        if len(names) < 2 or len(found) != len(names):
            return []
        each = [
            f"{name} {ScoreScale('rmse').show(value)} {unit}".rstrip()
            for name, value, unit in zip(
                names, found, [*units] or [""] * len(names), strict=True
            )
        ]
        return [f"Targets, test RMSE: {', '.join(each)}"]

    def headline(self) -> str:
        """Return method, dataset, clients, seed, rounds, status, and the error if any."""
        about = self.summary
        # of a graph file the name alone: config.toml holds the path
        dataset = Path(str(about["dataset"])).name or about["dataset"]
        if target := self.config.get("target"):
            dataset = f"{dataset}, target {target}"
        rounds = about["rounds"]
        text = (
            f"{about['method']} on {dataset}, {about['clients'] or '?'} clients, "
            f"seed {about['seed']}, {rounds} round{'' if rounds == 1 else 's'}: "
            f"{self.status}"
        )
        return f"{text}\nerror: {about['error']}" if "error" in about else text

    def owner_lines(self) -> list[str]:
        """Return the worst, the mean and the best natural owner, if there are owners."""
        if not self.config.get("owners"):
            return []
        metric = self.owner_metric()
        scores = self.per_owner(metric=metric)
        if not scores:
            return []
        scale = self.scale_of(metric)
        worst = scale.worst(scores)
        best = max(scores, key=lambda name: scale.goodness(scores[name]))
        mean = sum(scores.values()) / len(scores)
        each = ", ".join(
            f"{name} {scale.show(value)}" for name, value in scores.items()
        )
        return [
            f"Owners, test {scale.title}: {each}",
            f"Worst owner {worst} {scale.show(scores[worst])}, mean {scale.show(mean)}, "
            f"best owner {best} {scale.show(scores[best])}",
        ]

    def failures(self) -> list[str]:
        """Return one line about failed rounds and messages, if there are any."""
        failed = sum(row.get("status") == "failed" for row in self.rounds)
        reasons: dict[str, int] = self.summary.get("failures") or {}
        parts = [f"{failed} of {len(self.rounds)} rounds"] if failed else []
        if reasons:
            number, main = sum(reasons.values()), max(reasons, key=reasons.__getitem__)
            parts.append(f"{number} messages to clients (most often: {main})")
        return [f"Failed: {'; '.join(parts)}. See rounds.jsonl."] if parts else []


def names_of_owners(rows: Iterable[Row]) -> dict[int, str]:
    """Return the names in descriptions of clients, equal ones with the partition-id."""
    names = {
        int(row["partition_id"]): str(row["name"])
        for row in rows
        if "num_train" in row and row.get("name")
    }
    counts = Counter(names.values())
    return {
        pid: name if counts[name] == 1 else f"{name} ({pid})"
        for pid, name in names.items()
    }


def require_rounds(rows: Sequence[Row], count: int, folder: Path) -> None:
    """Raise a RunError if ``rounds.jsonl`` lacks one of the rounds 1 to ``count``."""
    present = {row["round"] for row in rows}
    lost = [number for number in range(1, count + 1) if number not in present]
    if lost:
        raise RunError(
            f"{folder / ROUNDS} is damaged: it lacks round {lost[0]} of {count}"
            f"{f' and {len(lost) - 1} more' if lost[1:] else ''}. {MEND}"
        )


def _require_fitting(config: Row, summary: Row, folder: Path) -> None:
    """Raise an error if the settings and the summary are not of one run."""
    reasons: dict[str, object] = {
        f"{folder} mixes two runs: {key} is {config[key]!r} in {CONFIG_FILE} and "
        f"{summary[key]!r} in {SUMMARY}. {MEND}": summary[key] != config[key]
        for key in {"method", "seed"} & config.keys() & summary.keys()
    }
    where, count = f"{folder / SUMMARY} is damaged", summary.get("rounds", 0)
    reasons |= {
        f"{where}: its status is {summary['status']!r}, none of {', '.join(STATUSES)}. "
        f"{MEND}": summary["status"] not in STATUSES,
        f"{where}: rounds is {count!r}. {MEND}": type(count) is not int,
    }
    entries = {key: summary.get(key) for key in ("best", "last", "finetuned")}
    reasons |= {
        f'{where}: "{key}" holds no scores. {MEND}': entry is not None
        and not (isinstance(entry, dict) and "round" in entry)
        for key, entry in entries.items()
    }
    refuse(reasons, RunError)
