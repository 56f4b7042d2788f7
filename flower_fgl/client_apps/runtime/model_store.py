"""Storage of each client's personalized model on the disk of its SuperNode.

The file is ``<model-dir>/<run>-<owner>-<key>/model.safetensors``, of mode 0600 in a
folder of mode 0700. The key follows from the owner's name and the path of its graph.
"""

import hashlib
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context

from flower_fgl.client_apps.runtime.client import Client
from flower_fgl.client_apps.runtime.data import models_folder, owner_key, owner_name
from flower_fgl.core.agreement import hash_names, whole_recipe
from flower_fgl.core.atomic import make_private_folder
from flower_fgl.core.errors import RunError
from flower_fgl.core.metrics import AnyScores
from flower_fgl.core.node_settings import floors_in_force
from flower_fgl.core.options import Scalar
from flower_fgl.core.score_names import is_better
from flower_fgl.core.targets import CLASSES
from flower_fgl.methods import METHODS
from flower_fgl.nn import Backbone, state_shapes
from flower_fgl.runs.card import CARD, owner_card, write_card
from flower_fgl.runs.files import MODEL
from flower_fgl.runs.model_file import ModelCard, read_card, save_model
from flower_fgl.runs.writer import replace_file

__all__ = ["copy_model_of_run", "model_folder", "save_best_model"]

log = logging.getLogger(__name__)
FLOWER = logging.getLogger("flwr")
"""Flower's logger, whose records of level INFO are in the SuperNode's log."""
CLIENT_MODELS = "clients"
"""Folder of a simulation's run folder in which it keeps the clients' models."""
LONGEST_NAME = 40
"""Characters of an owner's name in a folder name, which has at most 255 bytes."""
CARD_FILE = "model.json"
"""File with the model's description, beside the model."""


def save_best_model(
    client: Client,
    context: Context,
    model: Backbone,
    scores: Mapping[str, AnyScores],
    server_round: int,
) -> None:
    """Store the model of a round if no better one is stored; of equal ones the latest.

    ``scores`` by column are empty in rounds without evaluation: until a round is scored,
    the last model is stored. If it cannot be written, a warning is logged.
    """
    name = _client_name(context, client.partition_id)
    folder = model_folder(context.node_config, context.run_id, name)
    if client.config.keep_client_models and "graph" not in context.node_config:
        name = client.data.graph.name or name
        shown = f"{client.partition_id}-{readable(name)}"
        folder = Path(client.config.run_dir) / CLIENT_MODELS / shown
    if folder is None:
        return
    main = client.config.main_score
    value = scores["val"].selected(main) if "val" in scores else math.nan
    validation = value if math.isfinite(value) else None
    try:
        kept = read_card(folder)
        if kept is not None and not takes_place(main, validation, kept.validation):
            return
        card = card_of(client, model, name, server_round, validation)
        if client.config.calibration == "owner":
            card = replace(card, calibration=client.calibrate(model))
        scaling = client.data.graph.scaling
        save_model(
            folder,
            model.fixed().state_dict(),
            card,
            None if scaling is None else scaling.statistics,
            edge_scaling=None if scaling is None else scaling.edge_statistics,
            target_scale=client.data.scale,
            is_private=True,
        )
        text = f"{card.to_json()}\n"
        replace_file(folder / CARD_FILE, text.encode(), is_private=True)
        found = {name: each.as_dict() for name, each in scores.items()}
        floors = floors_in_force(context.node_config)
        about = owner_card(client.config, card, _sizes(client), found, floors)
        write_card(folder, about, is_private=True)
        if kept is None:
            FLOWER.info("The model of %s is stored in %s", name, folder.resolve())
    except RunError as error:  # e.g. a full disk must not fail the round
        log.warning("The model of round %s was not stored: %s", server_round, error)


def copy_model_of_run(
    context: Context, partition_id: int, run_id: int, server_round: int
) -> None:
    """Copy the best model of an interrupted run, ``run_id``, into the resumed run.

    A model of a round after the checkpoint is not copied, since that round runs again. A
    model that this run has saved is never replaced: the server sends the query. If the
    model cannot be copied, a warning is logged and the run resumes.
    """
    name = _client_name(context, partition_id)
    before, now = (
        model_folder(context.node_config, run, name) for run in (run_id, context.run_id)
    )
    if before is None or now is None or before == now:
        return
    try:
        card = read_card(before)
        is_early = card is not None and card.round <= server_round
        if is_early and read_card(now) is None:
            make_private_folder(now)
            files = [MODEL, CARD_FILE, *CARD]  # an earlier version wrote no card
            for file in filter(lambda name: (before / name).exists(), files):
                data = (before / file).read_bytes()
                replace_file(now / file, data, is_private=True)
    except (RunError, OSError) as error:
        log.warning(
            "The model stored up to round %s cannot be copied to the resumed run: %s",
            server_round,
            error,
        )


def _client_name(context: Context, partition_id: int) -> str:
    """Return the data owner's name, or ``client-<partition_id>``."""
    return owner_name(context.node_config) or f"client-{partition_id}"


def model_folder(node: Mapping[str, Scalar], run_id: int, name: str) -> Path | None:
    """Return the folder of a client's model of a run, ``None`` if the node stores none."""
    folder = models_folder(node)
    if folder is None:
        return None
    # names such as "x y" and "x-y" have the same readable part
    shown = readable(name)
    whole = f"{name}\n{owner_key(node)}"
    key = hashlib.sha256(whole.encode()).hexdigest()[:8]
    return folder / f"{run_id}-{shown}-{key}"


def readable(name: str) -> str:
    """Return the readable part of an owner's folder name."""
    return re.sub(r"[^\w.-]+", "-", name)[:LONGEST_NAME]


def _sizes(client: Client) -> dict[str, Any]:
    """Return numbers of items of a client's graph, for its own card."""
    graph = client.data.graph
    counts = (
        graph.class_counts("train").tolist() if graph.target.kind == CLASSES else []
    )
    names = zip(graph.target.names, counts, strict=False)
    return {
        "items": graph.num_items,
        "train": int(client.data.training.index.numel()),
        **client.data.sizes,
        "training items by class": ", ".join(f"{name} {n}" for name, n in names),
    }


def takes_place(score: str, new: float | None, kept: float | None) -> bool:
    """Return whether a model replaces another by its validation score, equal ones too.

    The scores are ``None`` if not scored; a model without one replaces no other one.
    """
    return not is_better(score, kept, new)


def card_of(
    client: Client,
    model: Backbone,
    owner: str,
    server_round: int,
    validation: float | None,
) -> ModelCard:
    """Return the description of a client's model."""
    graph, config = client.data.graph, client.config
    # a method with a network of its own may train the plain backbone first
    has_own = METHODS[config.method].network and (
        state_shapes(model.fixed()) != client.state_shapes()
    )
    scales = {"none": "none", "rows": "rows", "columns": "kept"}
    return ModelCard(
        method=config.method,
        model=client.model_name,
        num_features=graph.num_features,
        hidden_channels=config.hidden_channels,
        num_layers=config.num_layers,
        classifies_graphs=config.classifies_graphs,
        readout=config.readout,
        link=config.decoder(graph.target.width, graph.num_edge_features),
        messages=config.messages(
            client.model_name,
            graph.num_edge_features,
            graph.schema,
            graph.graph.num_nodes,
        ),
        scaling=scales[graph.scale],
        round=server_round,
        owner=owner,
        validation=validation,
        rep_norm=getattr(model, "rep_norm", ""),
        settings=config.method_settings() if has_own else {},
        feature_names=graph.feature_names,
        features_sha256=hash_names(graph.feature_names),
        **graph.target.entries,
        target_scale="" if client.data.scale is None else "kept",
        prepared=whole_recipe(graph.prepared),
    )
