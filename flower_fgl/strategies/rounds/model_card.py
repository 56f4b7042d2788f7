"""The description of the aggregated model saved by a run."""

from __future__ import annotations

from flower_fgl.core.config import RunConfig
from flower_fgl.runs.model_file import ModelCard
from flower_fgl.strategies.federation import Federation

__all__ = ["describe_model"]


def describe_model(
    config: RunConfig, federation: Federation, server_round: int
) -> ModelCard:
    """Return the description of an aggregated model after a round."""
    # a client without training nodes has no statistics, and does not train the model
    scales = {federation.clients[pid].scale for pid in federation.trainable}
    scaling = scales.pop() if len(scales) == 1 else "lost"
    if scaling == "columns":  # each data owner's SuperNode saves its own statistics
        is_owned = any(client.is_owned for client in federation.clients.values())
        scaling = "lost" if is_owned else "own"
    named = [c for c in federation.clients.values() if c.features_sha256]
    return ModelCard(
        method=config.method,
        model=next(iter(federation.clients.values())).model,
        num_features=federation.num_features,
        hidden_channels=config.hidden_channels,
        num_layers=config.num_layers,
        class_names=federation.class_names,
        classifies_graphs=config.classifies_graphs,
        link=config.decoder(federation.num_classes, federation.num_edge_features),
        scaling=scaling,
        round=server_round,
        feature_names=named[0].feature_names if named else (),
        features_sha256=named[0].features_sha256 if named else "",
        multi_label=config.is_multi_label,
        prepared=max((client.prepared for client in named), default=""),
    )
