"""Runs as a notebook shows them: tables, data frames, figures, models and predictions.

Nothing here loads torch, matplotlib or pandas before a method that needs it is called.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import nearest
from flower_fgl.core.score_names import EXTRA_SCORES, SCORE_NAMES
from flower_fgl.lab.tables.compare import (
    Comparisons,
    common_metric,
    common_scale,
    compare_runs,
    frames_per_owner,
    owner_metric,
    paired_runs,
    select_runs,
)
from flower_fgl.lab.tables.statistics import Comparison
from flower_fgl.runs.files import grouped
from flower_fgl.runs.run import RunFolder

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from flower_fgl.nn import Backbone

__all__ = ["Run", "RunSet", "compare", "load"]

log = logging.getLogger(__name__)

ABOUT = ("method", "dataset", "clients", "seed")
TITLES = {"accuracy": "acc", "mean_accuracy": "mean acc", **EXTRA_SCORES}


class Run(RunFolder):
    """Content of a run folder, and what can be made of it.

    ``repr`` is a short table of the results, also as HTML in a notebook.

    Parameters
    ----------
    path : Path
        Run folder.
    config : dict
        All settings; those of a method are a table under its name.
    sources : dict of str to str
        Sources of the settings, by dotted key.
    summary : dict
        Content of ``summary.json``. For a run that is active or was killed, computed from
        the rows written so far.
    rounds, clients : list of dict
        Rows of ``rounds.jsonl`` and ``clients.jsonl``.
    """

    def to_frame(self, per: str = "client") -> pd.DataFrame:
        """Return the scores as a tidy data frame.

        Parameters
        ----------
        per : {"client", "round"}
            One row per round, client, evaluation and node set; or one per round,
            evaluation and node set, with the scores over all clients.

        Returns
        -------
        pandas.DataFrame
            ``round``, ``client`` (partition ID), ``evaluation`` (``local`` or
            ``global``), ``column`` (``val``, ``test``, …), ``num_nodes``, ``accuracy``,
            ``macro_f1`` and further scores in [0, 1], or ``rmse``, ``mae``, … of
            numbers, and the client's training ``loss``. Per round ``phase`` and
            ``status`` replace ``client``; ``seconds``, ``bytes_up`` and ``bytes_down``
            are those of the round. Rounds without evaluation have no row.

        Raises
        ------
        ConfigError
            If ``per`` is unknown.
        """
        import pandas as pd

        if per not in ("client", "round"):
            raise ConfigError(f'per must be "client" or "round", got {per!r}.')
        rows = self.clients if per == "client" else self.rounds
        found = list(_score_rows(rows, per))
        first = [*FIRST[per], "evaluation", "column"]
        scores = dict.fromkeys(["num_nodes", *(() if self.target else SCORE_NAMES)])
        scores |= dict.fromkeys(key for row in found for key in row)
        shown = [key for key in scores if key not in (*first, *LAST[per])]
        return pd.DataFrame(found, columns=[*first, *shown, *LAST[per]])

    def plot(self, picture: str = "convergence") -> Figure:
        """Draw one picture of the report.

        Parameters
        ----------
        picture : str
            ``convergence`` (accuracy and loss by round), ``cost`` (accuracy by bytes and
            seconds), ``clients``, ``labels``, ``bytes``, ``seconds``, …

        Returns
        -------
        matplotlib.figure.Figure
            Shown by a notebook; ``figure.savefig(path)`` writes it.

        Raises
        ------
        ConfigError
            If the run has no such picture.
        """
        from flower_fgl.lab.report.figures import draw_run

        return _picture(draw_run(self), picture)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the HTML report of the run.

        Parameters
        ----------
        out : Path or str, optional
            HTML file or folder; by default ``report.html`` in the run folder.

        Returns
        -------
        Path
            The HTML file.

        Raises
        ------
        RunError
            If it cannot be written.
        """
        from flower_fgl.lab.report.page import write_report

        return write_report([self], None if out is None else Path(out))

    def model(self) -> Backbone:
        """Load the aggregated model of the best validation round.

        Returns
        -------
        Backbone
            A ``torch.nn.Module`` in evaluation mode, on the CPU.

        Raises
        ------
        RunError
            If the run saved no model, e.g. because its method sends no weights, or the
            file is damaged.
        """
        from flower_fgl.runs.saved_model import load_model

        return load_model(self.path).model

    def predict(
        self,
        graph: Path | str | Any,
        *,
        pairs: Any = None,
        top_k: int | None = None,
        only_unknown: bool = False,
        from_time: float | None = None,
    ) -> pd.DataFrame:
        """Predict the items of a graph with :meth:`model`.

        Parameters
        ----------
        graph : Path, str, torch_geometric.data.Data, or a list of these
            An ``.npz`` file, a CSV folder, or an object with ``x`` (N, d) and
            ``edge_index`` (2, M). For a model of whole graphs a set of graphs: a file, or
            a list of objects.
        pairs : path-like, pandas.DataFrame or array-like of shape (P, 2), optional
            For a model of links: the pairs of nodes to score, by their identifiers; a
            table has the columns ``source`` and ``target``.
        top_k : int, optional
            For a model of links, instead of ``pairs``: score the best ``top_k`` partners
            of every node, among the nodes without an edge to it.
        only_unknown : bool
            For a model of edges: predict only edges without a label.
        from_time : float, optional
            For a model of edges: predict only edges from this time on.

        Returns
        -------
        pandas.DataFrame
            One row per item, with the identifiers of the graph: ``node``; ``source``,
            ``target`` and maybe ``time``; or ``graph``. Then ``predicted`` and
            ``p:<class>`` for each class, or the ``score`` of each pair of nodes, whose
            sigmoid is the probability of a link in training. A calibrated model adds the
            conformal ``set``, or ``lower`` and ``upper`` bounds of numbers. A log record
            of level WARNING says what was not checked, or was changed or assumed.

        Raises
        ------
        RunError
            If the model cannot be read.
        ConfigError
            If an option is missing, or is for models of another task.
        DataError
            If the graph or the pairs cannot be read, or do not fit the model.
        """
        from flower_fgl.simulation.prediction import predict_graph

        found = predict_graph(
            self.path,
            graph,
            pairs=pairs,
            top_k=top_k,
            only_unknown=only_unknown,
            from_time=from_time,
        )
        if found.note:
            log.warning("%s", found.note)
        return found.to_frame()

    def _repr_html_(self) -> str:
        titles, rows = self.scores()
        below = [*self.owner_lines(), *self.failures(), f"Run folder: {self.path}"]
        above, below = (
            [f"<p>{html.escape(line)}</p>" for line in lines]
            for lines in (self.headline().split("\n"), below)
        )
        import pandas as pd

        table = pd.DataFrame(rows, columns=titles).to_html(index=False) if rows else ""
        return "".join([*above, table, *below])


class RunSet(Sequence[Run]):
    """Several runs, in order: those of an experiment, or of a folder.

    Parameters
    ----------
    runs : sequence of Run
        The runs.
    """

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._runs = [Run.of(run) for run in runs]

    @classmethod
    def load(cls, text: Path | str) -> RunSet:
        """Read all runs in a folder, or those that a pattern selects.

        Parameters
        ----------
        text : Path or str
            Comma-separated run folders, folders of run folders, or patterns such as
            ``runs/cora/fedavg-*``; ``FOLDER:NAME`` selects one case or method.

        Raises
        ------
        RunError
            If there is no run, or a run folder is damaged.
        """
        return cls(select_runs(str(text)))

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, place: int) -> Run: ...
    @overload
    def __getitem__(self, place: slice) -> RunSet: ...
    def __getitem__(self, place: int | slice) -> Run | RunSet:
        if isinstance(place, slice):
            return RunSet(self._runs[place])
        return self._runs[place]

    def by_method(self) -> dict[str, RunSet]:
        """Return the runs of each method, by its name."""
        methods = grouped(self, lambda run: str(run.summary["method"]))
        return {name: RunSet(runs) for name, runs in methods.items()}

    def to_frame(self, per: str = "run") -> pd.DataFrame:
        """Return the scores of all runs as one tidy data frame.

        Parameters
        ----------
        per : {"run", "score", "round", "client"}
            One row per run with its best round, or after fine-tuning; one per run,
            evaluated model, node set and score of that round, of which all tables are
            made; or the rows of :meth:`Run.to_frame`.

        Returns
        -------
        pandas.DataFrame
            ``run`` (name of its folder), ``method``, ``dataset``, ``clients`` and ``seed``
            stand before the scores. Per run these are ``status``, ``round``,
            ``<column>_<score>``, ``bytes_up``, ``bytes_down`` and ``seconds``.

        Raises
        ------
        ConfigError
            If ``per`` is unknown.
        """
        import pandas as pd

        if per not in ("run", "score", "round", "client"):
            raise ConfigError(
                f'per must be "run", "score", "round" or "client", got {per!r}.'
            )
        if per == "score":
            from flower_fgl.lab.tables.frame import frame_of_runs

            frame = frame_of_runs(
                (run.summary["dataset"], number, run) for number, run in enumerate(self)
            ).rename(columns={"place": "dataset", "row": "run"})
            runs = [self[number] for number in frame["run"]]
            frame.insert(2, "method", [run.summary["method"] for run in runs])
            return frame.assign(run=[run.path.name for run in runs])
        if per == "run":
            return pd.DataFrame([{**_about(run), **_best(run)} for run in self])
        frames = []
        for run in self:
            frame = run.to_frame(per)
            for place, (key, value) in enumerate(_about(run).items()):
                # a run's number of clients beside the column of one client
                name = "num_clients" if key == "clients" else key
                frame.insert(place, name, value)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def per_owner(
        self, against: str = "local", *, column: str = "test", metric: str = ""
    ) -> pd.DataFrame:
        """Compare the methods owner by owner: who gains from federating, who loses.

        Parameters
        ----------
        against : str
            Method that the gains refer to.
        column : str
            Node set: ``test`` or ``val``.
        metric : str
            ``auroc``, ``accuracy``, …; by default AUROC if all runs have it.

        Returns
        -------
        pandas.DataFrame
            One row per owner and method: ``owner``, ``method``, ``score`` (mean over the
            runs) and ``gain`` (mean paired gain over ``against``, positive is better; NaN
            for that method itself and without pairs).

        Raises
        ------
        ConfigError
            If runs of a method have different settings.
        RunError
            If two runs of a method have the same data and seed, or the runs have
            different owners.
        """
        import pandas as pd

        groups = self.by_method()
        for group in groups.values():
            paired_runs(group, ())  # no run is there twice
        names = list(groups)
        base = names.index(against) if against in names else None
        means, gains = frames_per_owner(
            [list(group) for group in groups.values()],
            base,
            column=column,
            metric=metric or owner_metric(self, column),
        )
        return pd.DataFrame(
            {
                "owner": means.index.repeat(len(names)),
                "method": names * len(means),
                "score": means.to_numpy().ravel(),
                "gain": gains.to_numpy().ravel(),
            }
        )

    def plot(self, picture: str = "convergence") -> Figure:
        """Draw one picture of the comparison; see :meth:`Run.plot`.

        Raises
        ------
        ConfigError
            If the runs have no such picture.
        """
        if len(self) == 1:
            return self[0].plot(picture)
        from flower_fgl.lab.report.page import comparison_figures

        return _picture(comparison_figures(self), picture)

    def report(self, out: Path | str | None = None, *, against: str = "") -> Path:
        """Write one HTML page that compares the runs.

        Parameters
        ----------
        out : Path or str, optional
            HTML file or folder; by default ``comparison.html`` beside the run folders.
        against : str
            Mark runs that are significantly better than this method.

        Raises
        ------
        RunError
            If there is no run, or the file cannot be written.
        """
        from flower_fgl.lab.report.page import write_report

        place = None if out is None else Path(out)
        return write_report(self, place, against=against)

    def table(self) -> str:
        """Return one line per run, with its scores in percent.

        They are those of its best round, or after fine-tuning if the run has it.
        """
        return str(self._table().to_string(index=False))

    def _table(self) -> pd.DataFrame:
        """Return one row of texts per run."""
        import pandas as pd

        metric = common_metric(self._runs)
        scale = common_scale(metric, self._runs)
        score = scale.title if scale.is_error else TITLES.get(metric, metric)
        rows = []
        for run in self:
            best = run.final or {}
            scores = [best.get(column, {}).get(metric) for column in ("val", "test")]
            shown = ["-" if s is None else scale.show(s) for s in scores]
            rows.append([*(str(run.summary[key]) for key in ABOUT), *shown])
        return pd.DataFrame(rows, columns=[*ABOUT, f"val {score}", f"test {score}"])

    def __repr__(self) -> str:
        return self.table() if self._runs else "no runs"

    def _repr_html_(self) -> str:
        return str(self._table().to_html(index=False)) if self._runs else "no runs"


def load(folder: Path | str) -> Run:
    """Read the folder of a run, finished or not.

    Parameters
    ----------
    folder : Path or str
        Run folder; :meth:`RunSet.load` reads a folder of run folders.

    Returns
    -------
    Run
        Settings and results.

    Raises
    ------
    RunError
        If the folder or one of its files is missing or damaged.
    """
    return Run.load(Path(folder).expanduser())


def compare(
    one: str | Path | RunFolder | Sequence[RunFolder],
    other: str | Path | RunFolder | Sequence[RunFolder],
    *,
    column: str = "test",
    metric: str = "",
) -> Comparison | Comparisons:
    """Compare two methods by the paired differences of their runs.

    Parameters
    ----------
    one, other : str, Path, Run, or sequence of Run
        Runs of A and B, or text that selects them as for :meth:`RunSet.load`.
    column : str
        Node set: ``test``, ``val``, …
    metric : str
        ``accuracy``, ``macro_f1``, …; by default accuracy, or ``mean_accuracy`` for
        few-shot runs.

    Returns
    -------
    Comparison or Comparisons
        Its text names both methods, or the settings that differ, and says which is
        better, whether they are tied, or what the runs cannot show. Runs on several
        datasets, or numbers of clients, give one comparison for each, by name.

    Raises
    ------
    ConfigError
        If one side holds runs of several methods, or with different settings.
    RunError
        If there are fewer than two pairs of runs with the same dataset, partition, clients
        and seed, or a run has no such score.
    """
    sides = [_runs(side) for side in (one, other)]
    metric = metric or common_metric([run for side in sides for run in side])
    found = compare_runs(*sides, column=column, metric=metric)
    return found if len(found) > 1 else next(iter(found.values()))


def _runs(side: str | Path | RunFolder | Sequence[RunFolder]) -> Sequence[RunFolder]:
    if isinstance(side, str | Path):
        return select_runs(str(side))
    if isinstance(side, RunFolder):
        return [side]
    runs = list(side) if isinstance(side, Iterable) else [side]
    for run in runs:
        if not isinstance(run, RunFolder):
            raise ConfigError(
                "Each side of a comparison is a Run, a sequence of Runs or a folder of "
                f"runs, not {type(run).__name__}."
            )
    return runs


def _picture(pictures: Mapping[str, Figure], name: str) -> Figure:
    if name not in pictures:
        raise ConfigError(
            f'There is no picture "{name}" of these runs. {nearest(name, pictures)}'
        )
    return pictures[name]


FIRST = {"client": ["round", "client"], "round": ["round", "phase", "status"]}
"""Columns of a frame before the scores."""
LAST = {"client": ["loss"], "round": ["loss", "seconds", "bytes_up", "bytes_down"]}
"""Columns of a frame after the scores."""


def _score_rows(
    rows: Sequence[Mapping[str, Any]], per: str
) -> Iterator[dict[str, Any]]:
    """Yield the scores by round or client, evaluation and node set."""
    for row in rows:
        known = {**row, "client": row.get("partition_id")}
        if per == "round":
            known["seconds"] = row.get("seconds", {}).get("total")
            for way in ("up", "down"):
                sent = row.get("bytes", {}).get(way, {})
                known[f"bytes_{way}"] = sum(sent.values())
        for mode, columns in (row.get("metrics") or {}).items():
            for column, scores in columns.items():
                yield {
                    **{key: known.get(key) for key in FIRST[per]},
                    "evaluation": mode,
                    "column": column,
                    **_own(scores),
                    **{key: known.get(key) for key in LAST[per]},
                }


def _own(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of all targets together."""
    return {name: value for name, value in scores.items() if name != "targets"}


def _about(run: Run) -> dict[str, Any]:
    """Return what tells a run from others."""
    return {"run": run.path.name} | {key: run.summary[key] for key in ABOUT}


def _best(run: Run) -> dict[str, Any]:
    """Return status, scores that stand for a run, and its costs."""
    best = run.final or {}
    return {
        "status": run.status,
        "round": best.get("round"),
        **{
            f"{column}_{metric}": value
            for column, scores in best.items()
            if column != "round"
            for metric, value in _own(scores).items()
        },
        **{f"bytes_{way}": run.summary["bytes"][way] for way in ("up", "down")},
        "seconds": run.summary["seconds"]["total"],
    }
