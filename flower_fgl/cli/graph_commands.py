"""Commands that make and read graphs: prepare, partition, export, check-graph, predict."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flower_fgl.cli.arguments import (
    Clients,
    Dataset,
    GraphFile,
    GraphPath,
    ModelFolder,
    NpzFolder,
    Rule,
    SettingPairs,
    console,
    data_config,
    make_table,
    parse_pairs,
    show,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError, show_path
from flower_fgl.core.held_kind import with_held_kind
from flower_fgl.core.node_settings import (
    NodeSettings,
    broken_floors,
    parse_node_config,
    read_node_config,
)
from flower_fgl.core.unused_settings import (
    OWNER_SETTINGS,
    reject_unread_settings,
    reject_unused_settings,
)
from flower_fgl.methods import METHODS, parse_config

__all__ = ["check_graph", "export", "identity", "import_partition", "partition"]
__all__ += ["predict", "prepare"]


def partition(
    dataset: Dataset = None,
    clients: Clients = None,
    rule: Rule = None,
    settings: SettingPairs = None,
    out: Path | None = typer.Option(
        None,
        help="Write a heat map of classes by client to this PNG file.",
        dir_okay=False,
    ),
) -> None:
    """Partition a dataset and describe each client's data."""
    config = data_config(dataset, clients, rule, settings, command="partition")
    from flower_fgl.cli.partition import describe_clients, write_heat_map

    description = describe_clients(config)
    sets = ("train", "val", "test", *description.columns)
    table = make_table("client", description.items, *sets, "classes", "exp(entropy)")
    for row in description.rows:
        table.add_row(*row)
    console.print(table)
    show(description.summary)
    if out is not None:
        write_heat_map(description, out)
        show(f"Heat map: {out}")


def export(
    folder: NpzFolder,
    dataset: Dataset = None,
    clients: Clients = None,
    rule: Rule = None,
    settings: SettingPairs = None,
) -> None:
    """Partition a dataset into one graph file per client.

    Use the .npz files to rehearse a deployment, in which each client is a data owner.
    """
    config = data_config(dataset, clients, rule, settings, command="export")
    from flower_fgl.cli.partition import export_clients

    for path in export_clients(config, folder):
        show(str(path))


def import_partition(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of a partition of OpenFGL, with data_0.pt, or of a FedGB dataset."
        ),
    ],
    folder: NpzFolder,
) -> None:
    """Convert a partition of OpenFGL or FedGB into one graph file per client.

    Run it with --set owners=FOLDER. Only tensors are read from the files: none of their
    code runs.
    """
    from flower_fgl.datasets.published_partition import convert_partition

    for path in convert_partition(source, folder):
        show(str(path))


def check_graph(
    graph: GraphPath,
    settings: SettingPairs = None,
    node_config: str = typer.Option(
        "", help="The --node-config with which the SuperNode will start."
    ),
    drop_unreadable: Path | None = typer.Option(
        None,
        help="Only write graphs.csv to this new folder, without the lines whose SMILES "
        "cannot be read.",
    ),
) -> None:
    """Check the file of a data owner: a graph, or a set of graphs.

    Lists all problems of the file, and everything that the server would learn about it
    before round 1. With --node-config, also text there that Flower drops, what makes the
    SuperNode refuse its own node config, and the floors that a run with these settings
    does not reach.
    """
    if drop_unreadable is not None:
        from flower_fgl.datasets.graph_files.set_csv import drop_unreadable as drop

        show(f"{drop_unreadable}: left out {drop(graph, drop_unreadable):,} lines.")
        return
    pairs = parse_pairs(settings or [])
    settled = with_held_kind(pairs, [graph])
    config = parse_config(settled)
    reject_unread_settings(pairs, OWNER_SETTINGS, "check-graph")
    reject_unused_settings(pairs, [config])
    node, notes = check_node_config(node_config, config, graph)
    from flower_fgl.cli.check_graph import inspect_graph
    from flower_fgl.cli.leaving import describe_leaving, learned_by_server

    report = inspect_graph(graph, pairs, node)
    for number, problem in enumerate(report.problems, start=1):
        show(f"Problem {number}: {problem}")
    for text in notes:
        show(f"Note: {text}.")
    for note in report.notes:
        show(f"Note: {note}")
    where, number = show_path(graph), len(report.problems)
    if report.description is None:
        show(f"{where} cannot be used. Number of problems: {number}.")
        raise typer.Exit(1)
    show(f"{where} can be used.")
    for line in report.parts:
        show(line)
    for line in describe_leaving(report.description, settled, node):
        show(line)
    show("The same as fields of the message before round 1:")
    full = learned_by_server(report.description)
    bare = learned_by_server(replace(report.description, class_counts=()))
    for key, value in full.items():
        if bare[key] == value:
            show(f"  {key} = {'(empty)' if value in ('', b'') else value}")
        else:
            show(f"  {key} = {value}   (share-class-counts = true)")
            show(f"  {key} = {bare[key]}   (share-class-counts = false)")
    show("partition-id -1: the server assigns the number, which determines the model.")
    show(
        "public-key: with secure-aggregation = true a random key (32 bytes); with an "
        "identity also the public identity and its signature (128 bytes)."
    )


def identity(
    path: Path = typer.Argument(
        ..., help="Private key; created if the file is missing.", dir_okay=False
    ),
) -> None:
    """Print the public key of a data owner's identity.

    Other owners pin it: peers.toml of their node config holds one line
    `name = "public key"` for each owner.
    """
    from flower_fgl.protocols.secure_aggregation.identities import load_identity

    show(load_identity(path.absolute()).text)


def check_node_config(
    node_config: str, config: RunConfig, graph: Path
) -> tuple[NodeSettings, list[str]]:
    """Check a SuperNode's node config as the node does; return it and notes on it.

    These name the settings that are below its floors, and another graph than the checked.
    """
    if not node_config:
        return NodeSettings(), []
    values = read_node_config(node_config)
    node = parse_node_config(values)
    from flower_fgl.cli.check_graph import inspect_graph
    from flower_fgl.client_apps.runtime.describe import check_node

    check_node({"graph": str(graph), **values}, config, creates=False)
    weaker = broken_floors(
        node,
        config.flat(),
        uploads=METHODS[config.method].uploads,
        predicts_numbers=config.predicts_numbers,
        known_methods=METHODS,
    )
    notes = [f"this node refuses a run with these settings: {text}" for text in weaker]
    if not node.graph:
        notes.append("the node config names no graph: a SuperNode without it has none")
    elif os.path.realpath(node.graph) != os.path.realpath(graph):
        # not the kind of target that the other graph holds
        known = {**config.flat(), "target-kind": config.predicts}
        problems = " ".join(inspect_graph(Path(node.graph), known).problems)
        if problems:
            raise DataError(f"The graph of the node config cannot be used: {problems}")
        notes.append("the node config names another graph than the one checked here")
    return node, notes


def predict(
    model: ModelFolder,
    graph: GraphFile,
    output: Path = typer.Option(
        ..., help="Table to write: .csv or .parquet.", dir_okay=False
    ),
    pairs: Path | None = typer.Option(
        None,
        help="For links: CSV file with the pairs to score, columns source and target.",
        dir_okay=False,
    ),
    top_k: int | None = typer.Option(
        None, help="For links: score the best K partners of every node instead."
    ),
    only_unknown: bool = typer.Option(
        False, "--only-unknown", help="For edges: predict only those without a label."
    ),
    from_time: float | None = typer.Option(
        None, "--from", help="For edges: predict only those from this time on."
    ),
) -> None:
    """Predict nodes, edges, links or graphs with a saved model.

    The model decides which. Writes one row per item, with the identifiers of the file.
    """
    from flower_fgl.simulation.prediction import (
        check_ending,
        predict_graph,
        write_table,
    )

    check_ending(output)
    prediction = predict_graph(
        model,
        graph,
        pairs=pairs,
        top_k=top_k,
        only_unknown=only_unknown,
        from_time=from_time,
    )
    write_table(prediction, output)
    if prediction.note:
        show(f"Note: {prediction.note}")
    card = prediction.card
    kind = f"of {card.owner}" if card.owner else "aggregated"
    show(
        f"{prediction.summary}: {output}\n"
        f"model: {card.method}, {card.model}, round {card.round}, {kind}"
    )
    if prediction.calibrated:
        show(f"calibration: {prediction.calibrated}")


def prepare(
    recipe: Path = typer.Argument(
        ..., help="Recipe (TOML): what the columns mean.", dir_okay=False
    ),
    tables: list[Path] = typer.Argument(
        ..., help="CSV, Parquet, GraphML or .npz files."
    ),
    output: Path | None = typer.Option(
        None, help="New folder of CSV tables, or new .npz file, to write."
    ),
    propose: Path | None = typer.Option(
        None,
        help="Write a vocabulary from these tables instead, for all parties to share.",
        dir_okay=False,
    ),
    no_labels: bool = typer.Option(
        False,
        "--no-labels",
        help="Prepare tables without labels, for flower-fgl predict.",
    ),
) -> None:
    """Make a graph file from an owner's tables.

    The recipe declares each column: number, category, date, yes/no, id, label, time, or in
    a set of graphs graph or key, or ignore. docs/prepare.md describes it, and
    examples/recipes has some.
    """
    if (output is None) == (propose is None):
        raise ConfigError(
            "Give either --output, a graph file to write, or --propose, a vocabulary to "
            "write."
        )
    from flower_fgl.datasets.tables.prepare import prepare_graph, propose_vocabulary

    if propose is not None:
        for line in propose_vocabulary(recipe, tables, propose):
            show(line)
        show(
            f"{propose} holds the values of categories, and mean, standard deviation and "
            "median of numbers. Read it before you send it to the other parties."
        )
    if output is not None:
        for line in prepare_graph(recipe, tables, output, has_labels=not no_labels):
            show(line)
        then = "flower-fgl predict" if no_labels else f"flower-fgl check-graph {output}"
        show(f"{output} is written. Next: {then}")
