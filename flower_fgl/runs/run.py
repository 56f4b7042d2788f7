"""Read a run folder: settings, results, and the rows of rounds and clients."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_fgl.core.errors import RunError
from flower_fgl.core.score_names import SETTING_COLUMNS
from flower_fgl.runs.files import (
    CLIENTS_FILE,
    CONFIG_FILE,
    HEADER,
    ROUNDS,
    SUMMARY,
    Row,
    parse_row,
    read_lines,
    read_sources,
    read_text,
)
from flower_fgl.runs.summary import summarise

__all__ = ["Run"]


@dataclass(frozen=True, repr=False)
class Run:
    """Content of a run folder; its ``repr`` is a short table of the results.

    Parameters
    ----------
    path : Path
        Run folder.
    config : dict
        All settings; those of a method are a table under its name.
    sources : dict of str to str
        Sources of the settings, by dotted key.
    summary : dict
        Summary as :func:`summarise` returns it. For a run that is active or was killed,
        computed from the rows written so far.
    rounds, clients : list of dict
        Rows of ``rounds.jsonl`` and ``clients.jsonl``.
    """

    path: Path
    config: dict[str, Any]
    sources: dict[str, str]
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path | str) -> Run:
        """Read the folder of a run, finished or not.

        Parameters
        ----------
        path : Path or str
            Run folder.

        Raises
        ------
        RunError
            If the folder or one of its files is missing or damaged. An incomplete last
            line is skipped.
        """
        folder = Path(path)
        if not (folder / CONFIG_FILE).is_file():
            raise RunError(
                f"{folder} is not a run folder: it has no {CONFIG_FILE}. Pass a folder "
                "that `flower-fgl run` wrote."
            )
        text = read_text(folder / CONFIG_FILE)
        try:
            config = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise RunError(f"{folder / CONFIG_FILE} is damaged: {error}.") from error
        summary = parse_row(
            read_text(folder / SUMMARY), str(folder / SUMMARY), "status"
        )
        rounds = read_lines(folder / ROUNDS)
        clients = read_lines(folder / CLIENTS_FILE)
        if summary["status"] == "running":  # active or killed: the rows are newer
            header = {key: summary.get(key) for key in HEADER}
            summary |= summarise(rounds, status="running", **header)
        return cls(folder, config, read_sources(text), summary, rounds, clients)

    @property
    def status(self) -> str:
        """``running`` (active or killed), ``completed``, ``failed`` or ``interrupted``."""
        return str(self.summary["status"])

    @property
    def best(self) -> dict[str, Any] | None:
        """Scores of the round with the best validation accuracy."""
        return self.summary["best"]  # type: ignore[no-any-return]  # JSON

    @property
    def last(self) -> dict[str, Any] | None:
        """Scores of the last round with an evaluation."""
        return self.summary["last"]  # type: ignore[no-any-return]  # JSON

    def per_owner(
        self, column: str = "test", metric: str = "accuracy"
    ) -> dict[str, float]:
        """Return each client's score in the best round, by the name of its owner.

        Parameters
        ----------
        column, metric : str
            Node set and score; ``auroc`` exists for owners and sets of graphs.

        Returns
        -------
        dict of str to float
            By name, in the order of the partition-ids; a partition of a dataset is named
            by its number. Clients without that score are left out.
        """
        if self.best is None:
            return {}
        scopes = {scope for row in self.rounds for scope in row.get("metrics", {})}
        scope = "global" if scopes == {"global"} else "local"
        names = {
            row["partition_id"]: row.get("name") or str(row["partition_id"])
            for row in self.clients
            if "num_train" in row
        }
        found: dict[int, float] = {}
        for row in self.clients:
            scores = row.get("metrics", {}).get(scope, {}).get(column, {})
            value = scores.get(metric)
            if row["round"] == self.best["round"] and value is not None:
                found[row["partition_id"]] = float(value)
        return {names.get(pid, str(pid)): found[pid] for pid in sorted(found)}

    def __repr__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the results as a text table, with scores in percent."""
        about = self.summary
        scored = [
            (
                "last round" if about["selection"] == "last" else "best validation",
                self.best,
            )
        ]
        if about["selection"] == "validation":
            scored.append(("last round", self.last))
        both = about.get("global", {})
        scored += [(f"{key}, aggregated", both.get(key)) for key in ("best", "last")]
        scored.append(("finetuned", about.get("finetuned")))
        lines = [f"{'':<20}{'round':>6}{'val acc':>9}{'test acc':>10}{'test F1':>9}"]
        is_ranked = any("auroc" in (e or {}).get("test", {}) for _, e in scored)
        lines[0] += f"{'test AUROC':>12}" if is_ranked else ""
        own = {k: t for k, t in SETTING_COLUMNS.items() if k in (self.last or {})}
        lines[0] += "".join(f"{title:>13}" for title in own.values())
        for name, entry in scored:
            if entry:
                val = _percent(entry, "val", "accuracy")
                test = _percent(entry, "test", "accuracy")
                f1 = _percent(entry, "test", "macro_f1")
                line = f"{name:<20}{entry['round']:>6}{val:>9}{test:>10}{f1:>9}"
                area = _percent(entry, "test", "auroc")
                line += f"{area:>12}" if is_ranked else ""
                more = (_percent(entry, column, "accuracy") for column in own)
                lines.append(line + "".join(f"{value:>13}" for value in more))
        head = (
            f"{about['method']} on {about['dataset']}, "
            f"{about['clients'] or '?'} clients, "
            f"seed {about['seed']}, {about['rounds']} rounds: {self.status}"
        )
        lines += self._owner_lines("auroc" if is_ranked else "accuracy")
        why = [f"error: {about['error']}"] if "error" in about else []
        failures = self._failures()
        end = f"Run folder: {self.path}"
        return "\n".join([head, *why, *(lines if lines[1:] else []), *failures, end])

    def _owner_lines(self, metric: str) -> list[str]:
        """Return the worst, the mean and the best natural owner, if there are owners."""
        if not self.config.get("owners"):
            return []
        scores = self.per_owner(metric=metric)
        if not scores:
            return []
        worst, best = (
            min(scores, key=scores.__getitem__),
            max(scores, key=scores.__getitem__),
        )
        mean = sum(scores.values()) / len(scores)
        each = ", ".join(f"{name} {100 * value:.2f}" for name, value in scores.items())
        title = "AUROC" if metric == "auroc" else "accuracy"
        return [
            f"Owners, test {title}: {each}",
            f"Worst owner {worst} {100 * scores[worst]:.2f}, mean {100 * mean:.2f}, "
            f"best owner {best} {100 * scores[best]:.2f}",
        ]

    def _failures(self) -> list[str]:
        """Return one line about failed rounds and messages, if there are any."""
        failed = sum(row.get("status") == "failed" for row in self.rounds)
        reasons: dict[str, int] = self.summary.get("failures") or {}
        parts = [f"{failed} of {len(self.rounds)} rounds"] if failed else []
        if reasons:
            main = max(reasons, key=reasons.__getitem__)
            parts.append(
                f"{sum(reasons.values())} messages to clients (most often: {main})"
            )
        return [f"Failed: {'; '.join(parts)}. See rounds.jsonl."] if parts else []


def _percent(entry: Row, column: str, metric: str) -> str:
    """Format a score in percent, a dash if there is none."""
    value = entry.get(column, {}).get(metric)
    return "-" if value is None else f"{100 * value:.2f}"
