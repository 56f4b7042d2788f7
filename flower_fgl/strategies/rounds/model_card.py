"""The description of the aggregated model saved by a run, and of what it predicts."""

from __future__ import annotations

from typing import Any

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.strategies.federation import Federation
from flower_fgl.strategies.rounds.target_exchange import known_scale

__all__ = ["describe_model", "describe_target"]


def describe_model(
    config: RunConfig, federation: Federation, server_round: int
) -> ModelCard:
    """Return the description of an aggregated model after a round."""
    # a client without training nodes has no statistics, and does not train the model
    scales = {federation.clients[pid].scale for pid in federation.trainable}
    scaling = scales.pop() if len(scales) == 1 else "lost"
    if scaling == "columns":  # a prediction uses the statistics of its own graph
        scaling = "own"
    scale = {"own": "lost", "none": "none"}.get(config.target_scale, "kept")
    named = [c for c in federation.clients.values() if c.features_sha256]
    model = next(iter(federation.clients.values())).model
    return ModelCard(
        method=config.method,
        model=model,
        num_features=federation.num_features,
        hidden_channels=config.hidden_channels,
        num_layers=config.num_layers,
        class_names=federation.class_names,
        classifies_graphs=config.classifies_graphs,
        readout=config.readout,
        link=config.decoder(federation.num_classes, federation.num_edge_features),
        messages=config.messages(
            model, federation.num_edge_features, federation.schema
        ),
        scaling=scaling,
        round=server_round,
        feature_names=named[0].feature_names if named else (),
        features_sha256=named[0].features_sha256 if named else "",
        target_kind=config.predicts,
        target_units=federation.target.units,
        target_scale=scale if config.predicts_numbers else "",
        prepared=max((client.prepared for client in named), default=""),
    )


def describe_target(config: RunConfig, federation: Federation) -> dict[str, Any]:
    """Return kind, names, units and scale of the target for the summary of a run.

    Mean and deviation of the scale are ``None`` if they are each client's or unknown.
    """
    target = federation.target
    found = {"kind": target.kind, "names": target.names, "units": target.units}
    if not config.predicts_numbers:
        return found
    try:
        scale = known_scale(config, federation)
    except RunError:  # it does not fit, which has ended the run
        scale = None
    about = {
        "kind": config.target_scale,
        "mean": None if scale is None else scale.mean.tolist(),
        "std": None if scale is None else scale.std.tolist(),
    }
    return found | {"scale": about}
