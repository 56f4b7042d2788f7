"""Keep each owner's personalised model on its own disk.

A SuperNode writes to ``<model-dir>/<run>-<owner>/model.safetensors``: the model of the
round that was best on the owner's own validation nodes (of equal ones the latest), or of
the last round as long as none was scored. ``model-dir`` stands in the node config; owners
who bring a graph have it at ``models`` in the SuperNode's working folder otherwise, and
clients that hold partitions of a data set keep no models without it.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.describe import owner_name
from flower_fgl.core.errors import RunError
from flower_fgl.core.metrics import Scores
from flower_fgl.core.options import Scalar
from flower_fgl.methods import METHODS
from flower_fgl.nn import Backbone
from flower_fgl.runs.files import MODEL
from flower_fgl.runs.model_file import ModelCard, read_card, save_model
from flower_fgl.runs.writer import replace_file

__all__ = ["check_model_folder", "copy_model_of_run", "save_best_model"]

log = logging.getLogger(__name__)
DEFAULT = "models"
CARD_FILE = "model.json"
"""What the model says about itself, beside it."""


def _place(node: Mapping[str, Scalar]) -> Path | None:
    """Return the folder of all models of a node, ``None`` if it keeps none."""
    folder = node.get("model-dir", DEFAULT if "graph" in node else "")
    return Path(str(folder)).expanduser() if folder else None


def check_model_folder(node: Mapping[str, Scalar]) -> None:
    """See that models can be kept, before a run starts.

    Parameters
    ----------
    node : mapping of str to bool, int, float or str
        Node config.

    Raises
    ------
    RunError
        If the folder cannot be made or written to.
    """
    folder = _place(node)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError
    except OSError:
        log.error("Cannot write models to %s.", folder.resolve())
        raise RunError(
            "its folder for models cannot be written. Set model-dir in its node config."
        ) from None


def save_best_model(
    client: Client,
    context: Context,
    model: Backbone,
    scores: Mapping[str, Scores],
    server_round: int,
) -> None:
    """Write the model of this round if it is the one to keep.

    Parameters
    ----------
    client : Client
        Whose model it is.
    context : Context
        Its node config says where models go.
    model : Backbone
        The personalised model.
    scores : mapping of str to Scores
        By column; empty in rounds without evaluation.
    server_round : int
        The round.
    """
    name = _name(context, client.partition_id)
    folder = _folder(context, context.run_id, name)
    if folder is None:
        return
    accuracy = scores["val"].accuracy if "val" in scores else math.nan
    validation = accuracy if math.isfinite(accuracy) else None
    try:
        kept = read_card(folder)
        if kept is not None and not is_better(validation, kept.validation):
            return
        card = card_of(client, model, name, server_round, validation)
        scaling = client.data.graph.scaling
        statistics = None if scaling is None else scaling.statistics
        save_model(folder, model.fixed().state_dict(), card, statistics)
        replace_file(folder / CARD_FILE, f"{card.to_json()}\n".encode())
    except RunError as error:  # the round counts, whether this disk is full or not
        log.warning("The model of round %s was not kept: %s", server_round, error)


def copy_model_of_run(
    context: Context, partition_id: int, run_id: int, server_round: int
) -> None:
    """Go on from the model that was kept when a run was at a checkpoint.

    A model of a later round is left: the rounds after the checkpoint run again.

    Parameters
    ----------
    context : Context
        Of the run that goes on.
    partition_id : int
        Whose model it is.
    run_id : int
        The run that broke off.
    server_round : int
        Round of the checkpoint.
    """
    name = _name(context, partition_id)
    before, now = (_folder(context, run, name) for run in (run_id, context.run_id))
    if before is None or now is None or before == now:
        return
    try:
        card = read_card(before)
        if card is not None and card.round <= server_round:
            now.mkdir(parents=True, exist_ok=True)
            for file in (MODEL, CARD_FILE):
                replace_file(now / file, (before / file).read_bytes())
    except (RunError, OSError) as error:
        log.warning("The model kept before round %s is lost: %s", server_round, error)


def _name(context: Context, partition_id: int) -> str:
    return owner_name(context.node_config) or f"client-{partition_id}"


def _folder(context: Context, run_id: int, name: str) -> Path | None:
    """Return where a run's model of an owner is kept, ``None`` if it is not."""
    place = _place(context.node_config)
    return place and place / re.sub(r"[^\w.-]+", "-", f"{run_id}-{name}")


def is_better(new: float | None, kept: float | None) -> bool:
    """Say whether a model replaces the one that was kept.

    Parameters
    ----------
    new, kept : float in [0, 1], or None
        Accuracy on the owner's validation nodes, ``None`` where it was not scored.
    """
    if kept is None:
        return True
    return new is not None and new >= kept


def card_of(
    client: Client,
    model: Backbone,
    owner: str,
    server_round: int,
    validation: float | None,
) -> ModelCard:
    """Describe a client's model."""
    graph, config = client.data.graph, client.config
    scales = {"none": "none", "rows": "rows", "columns": "kept"}
    return ModelCard(
        method=config.method,
        model=client.model_name,
        num_features=graph.num_features,
        hidden_channels=config.hidden_channels,
        num_layers=config.num_layers,
        class_names=graph.class_names,
        classifies_graphs=config.classifies_graphs,
        scaling=scales[graph.scale],
        round=server_round,
        owner=owner,
        validation=validation,
        rep_norm=getattr(model, "rep_norm", ""),
        settings=config.method_settings() if METHODS[config.method].network else {},
    )
