"""The ``rehearse`` command: graphs, programs, run and predictions of a rehearsal."""

import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flower_fgl.cli.arguments import show
from flower_fgl.cli.check_graph import inspect_graph
from flower_fgl.cli.partition import export_clients
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError, FglError
from flower_fgl.core.held_kind import with_held_kind
from flower_fgl.core.options import Scalar
from flower_fgl.core.settings import has_targets
from flower_fgl.core.targets import EDGE, LINK
from flower_fgl.core.unused_settings import reject_unused_settings
from flower_fgl.methods import METHODS, parse_config
from flower_fgl.runs.files import Row
from flower_fgl.runs.model_file import read_card
from flower_fgl.runs.run import RunFolder
from flower_fgl.runs.summary import describe_round
from flower_fgl.simulation.flower.flower_simulation import sigterm_as_interrupt
from flower_fgl.simulation.flower.rehearsal import Rehearsal
from flower_fgl.simulation.prediction import predict_graph, task_of, write_table

__all__ = ["Plan", "plan_rehearsal", "run_rehearsal"]

ROUNDS = 3


@dataclass(frozen=True)
class Plan:
    """A checked rehearsal: settings of the run, and each owner's file.

    ``config`` has the number of owners as ``clients``; without ``graphs`` a dataset is
    partitioned.
    """

    values: Mapping[str, Scalar]
    config: RunConfig
    owners: Sequence[str]
    graphs: Mapping[str, Path] = field(default_factory=dict)


def plan_rehearsal(
    graphs: Sequence[Path],
    values: Mapping[str, Scalar],
    pairs: Mapping[str, Scalar],
    *,
    dataset: str,
    clients: int,
) -> Plan:
    """Check the settings and the names of the owners' graphs.

    ``values`` holds ``method``, and ``rounds`` if it was chosen; ``pairs`` further
    settings.
    """
    settings: dict[str, Scalar] = {"rounds": ROUNDS, **values}
    method = METHODS.get(str(values["method"]))
    if method is not None and method.is_one_shot and "rounds" not in values:
        settings["rounds"] = 1
    if doubled := sorted(pairs.keys() & {*settings, "clients", "dataset", "run-dir"}):
        raise ConfigError(
            f"--set {doubled[0]} is not possible in a rehearsal: use its option or "
            "argument."
        )
    settings |= pairs
    found: dict[str, Path] = {}
    for path in graphs:
        owner = path.stem if path.suffix == ".npz" else path.name
        if owner in found:
            raise ConfigError(
                f'Two graphs are named "{owner}": {found[owner]} and {path}. The name of '
                "the file is that of its owner: rename one."
            )
        found[owner] = path.resolve()
    owners = tuple(found) or tuple(f"owner-{k}" for k in range(clients))
    about: dict[str, Scalar] = {"dataset": dataset, "clients": len(owners) or clients}
    config = parse_config(with_held_kind({**about, **settings}, graphs))
    reject_unused_settings(pairs, [config])
    if config.clients < 1:
        raise ConfigError(f"--clients must be at least 1, got {clients}.")
    if not found and has_targets(config):  # the owners' graphs hold this label alone
        del settings["target"]
        settings["positive-class"] = config.positive_class
    return Plan(settings, config, owners, found)


def run_rehearsal(folder: Path, plan: Plan, *, tls: bool, timeout: float) -> RunFolder:
    """Run a rehearsal in an empty folder, print its results, and end what it started."""
    folder = folder.resolve()
    with sigterm_as_interrupt(), Rehearsal(folder, plan.owners, tls=tls) as stage:
        try:
            graphs = plan.graphs or _partitioned(plan, folder / "graphs")
            for owner, graph in graphs.items():
                _check(owner, graph, plan.values)
        except FglError:  # nothing ran: the next try may use the folder, empty again
            for made in folder.iterdir():
                shutil.rmtree(made)
            raise
        show(f"Starting the SuperLink on {stage.address}, and {len(graphs)} SuperNodes")
        stage.start_superlink()
        for owner, graph in graphs.items():
            stage.start_owner(owner, graph)

        def on_round(row: Row) -> None:
            show(f"Round {row['round']}, {row['phase']}: {describe_round(row)}")

        run = RunFolder.load(stage.run(plan.values, timeout, on_round))
        seconds = [row["seconds"]["total"] for row in run.rounds]
        for warning in stage.warnings():
            show(f"Warning: {warning}")
        show(run.table())
        show(f"Seconds per round: median {statistics.median(seconds):.2f}")
        for owner, graph in graphs.items():
            _predict(owner, graph, folder / "owners" / owner)
        show(f"Logs of all programs: {folder}{'/'}*.log")
    return run


def _partitioned(plan: Plan, folder: Path) -> dict[str, Path]:
    """Write one graph file per owner; links are split by the run itself."""
    config = plan.config
    if config.setting == EDGE:
        raise ConfigError(
            f'setting = "{EDGE}" is rehearsed with the graphs of owners only: give a file '
            "or CSV folder of each."
        )
    if config.setting == LINK:
        config = replace(config, setting="transductive", split="default")
    files = export_clients(config, folder)
    return {
        owner: file.rename(folder / f"{owner}.npz")
        for owner, file in zip(plan.owners, files, strict=True)
    }


def _check(owner: str, graph: Path, values: Mapping[str, Scalar]) -> None:
    """Check an owner's graph like ``check-graph``."""
    report = inspect_graph(graph, values)
    if report.description is None:
        raise DataError(
            f"The graph of {owner} cannot be used:\n" + "\n".join(report.problems)
        )
    about, is_set = report.description, values.get("setting") == "graph"
    size = f"{about.num_nodes:,} {'graphs' if is_set else 'nodes'}"
    if values.get("setting") in (LINK, EDGE):
        parts = {"training": about.num_train, "validation": about.num_val}
        parts["test"] = about.num_test
        size = ", ".join(f"{n:,} {part} edges" for part, n in parts.items())
    show(f"{owner}: {graph} can be used ({size})")
    for note in report.notes:
        show(f"  Note: {note}")


def _predict(owner: str, graph: Path, home: Path) -> None:
    """Predict an owner's items, or the best new link of each node, with its model."""
    models = sorted((home / "models").glob("*/model.safetensors"))
    if not models:
        show(f"{owner}: no model")
        return
    folder = models[0].parent
    card = read_card(folder)
    assert card is not None  # the file exists
    top_k = 1 if task_of(card) == "links" else None
    prediction = predict_graph(folder, graph, top_k=top_k)
    table = home / "predictions.csv"
    write_table(prediction, table)
    show(f"{owner}: predictions for {prediction.summary} in {table}")
    if prediction.note:
        show(f"  Note: {prediction.note}")
