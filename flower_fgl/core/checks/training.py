"""Checks of backbones, batches and the device, and of the scale and the loss of numbers."""

from __future__ import annotations

import json
import re
from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.links import EDGE, LINK
from flower_fgl.core.model_spec import (
    BACKBONES,
    SAMPLED,
    SHALLOW,
    ModelName,
    message_direction,
    read_model,
    reads_types,
    split_models,
)
from flower_fgl.core.options import kebab, nearest
from flower_fgl.core.settings import (
    TRACKERS,
    GeneralSettings,
    names_of_trackers,
    read_num_neighbors,
    read_numbers,
)
from flower_fgl.core.targets import CLASSES, NUMBERS

__all__ = ["check_numbers", "check_training"]

FOR_NUMBERS = ["loss", "huber_delta", "target_weight"]
FOR_NUMBERS += ["target_scale", "target_mean", "target_std"]


def check_training(settings: GeneralSettings, method: Any) -> None:
    """Reject backbones, neighbor samples, devices and trackers that cannot work."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", settings.device):
        raise ConfigError(
            f'device must be "auto", "cpu", "cuda" or "cuda:N", got "{settings.device}".'
        )
    for name in names_of_trackers(settings.track):
        if name not in TRACKERS:
            raise ConfigError(f'Unknown tracker "{name}". {nearest(name, TRACKERS)}')
    models = {text: read_model(text) for text in split_models(settings.model)}
    for text, model in models.items():
        _check_model(text, model, settings, method)
    if settings.num_neighbors:
        _check_neighbors(settings, models)
    if reads_types(settings):
        _check_typed(settings)


def _check_model(
    text: str, model: ModelName, settings: GeneralSettings, method: Any
) -> None:
    """Reject a backbone with too few layers, of a wrong width or unfit for the method."""
    layers = model.num_layers or settings.num_layers
    if layers < 2 and model.name in BACKBONES and model.name not in SHALLOW:
        where = "its name" if model.num_layers else "num-layers"
        raise ConfigError(
            f'model "{text}" needs at least 2 layers, got {layers} by {where}. Only '
            f"{', '.join(SHALLOW)} work with one layer."
        )
    width = model.hidden_channels
    if method.shares_embeddings and width not in (None, settings.hidden_channels):
        raise ConfigError(
            f"{settings.method} compares the embeddings of different clients: model "
            f'"{text}" must have the width hidden-channels = '
            f"{settings.hidden_channels}, got {width}. Other methods, e.g. local, "
            "accept any widths."
        )
    if method.models and model.name not in method.models:
        able = '" or "'.join(method.models)
        raise ConfigError(
            f'{settings.method} works with model = "{able}" only, got "{text}".'
        )


def _check_typed(settings: GeneralSettings) -> None:
    """Reject what backbones of typed graphs cannot do."""
    model, has_pairs = settings.model, settings.setting in (LINK, EDGE)
    if settings.setting not in ("transductive", "inductive", LINK, EDGE):
        raise ConfigError(
            f'model = "{model}" reads typed graphs, one at each client: set setting = '
            f'"transductive", "inductive", "link" or "edge", got "{settings.setting}".'
        )
    if has_pairs and settings.schema_align == "private":
        raise ConfigError(
            f'setting = "{settings.setting}" predicts one relation at all owners, but '
            'schema-align = "private" tells none. Use "same" or "name".'
        )
    if settings.setting == LINK and settings.link_features == "degree":
        raise ConfigError(
            f'link-features = "degree" is for plain graphs: remove it for model = '
            f'"{model}".'
        )
    if settings.types == "ignore":
        raise ConfigError(
            f'types = "ignore" leaves one kind of nodes and edges, but model = "{model}" '
            "reads several. Use another model, e.g. gcn."
        )
    if settings.node_embedding and settings.setting not in ("transductive", LINK, EDGE):
        raise ConfigError(
            "node-embedding = true learns a vector for each node of the training graph: "
            f'set setting = "transductive", "link" or "edge", got "{settings.setting}".'
        )
    if settings.node_embedding and settings.evaluate != "local":
        raise ConfigError(
            "With node-embedding = true there is no complete global model: use evaluate = "
            f'"local", got "{settings.evaluate}".'
        )
    if settings.schema_align != "same":
        align = f'schema-align = "{settings.schema_align}"'
        if settings.evaluate != "local":
            raise ConfigError(
                f"With {align} clients have different parts of a model: use evaluate = "
                f'"local", got "{settings.evaluate}".'
            )
        if settings.schema_align == "name" and settings.secure_aggregation:
            raise ConfigError(
                f"{align} uploads other tensors at each owner, which secure-aggregation "
                'cannot sum. Use schema-align = "same" or "private".'
            )
        if settings.schema_align == "name" and settings.aggregation != "mean":
            raise ConfigError(
                f"{align} averages each tensor over the owners that have it: aggregation = "
                f'"{settings.aggregation}" is not possible. Use "mean".'
            )
    for name in ("feature_sparsity", "edge_sparsity", "label_sparsity"):
        if getattr(settings, name):
            raise ConfigError(
                f'{kebab(name)} is for plain graphs: remove it for model = "{model}".'
            )


def _check_neighbors(settings: GeneralSettings, models: dict[str, ModelName]) -> None:
    """Reject ``num-neighbors`` that is malformed or would have no effect."""
    text = settings.num_neighbors
    try:
        numbers = read_num_neighbors(text)
    except ValueError:
        raise ConfigError(
            "num-neighbors must be positive numbers, one per layer and separated by "
            f'commas as in "10,10", got "{text}".'
        ) from None
    if settings.setting == "graph":
        raise ConfigError(
            'num-neighbors is for node classification: remove it for setting = "graph".'
        )
    if not settings.batch_size:
        raise ConfigError(
            "num-neighbors limits what a batch reads: set batch-size, or remove it."
        )
    for name, model in models.items():
        layers = model.num_layers or settings.num_layers
        if message_direction(settings, name):
            what = f'edge-direction = "{settings.edge_direction}"'
            what = what if model.name in SAMPLED else f'model = "{name}"'
            raise ConfigError(f"{what} reads all neighbours: remove num-neighbors.")
        if model.name in SAMPLED and len(numbers) != layers:
            raise ConfigError(
                f'num-neighbors = "{text}" has {len(numbers)} number(s), but model '
                f'"{name}" has {layers} layers: give one number for each layer, the '
                "last layer first."
            )
        if model.name in BACKBONES and model.name not in SAMPLED:
            raise ConfigError(
                f'num-neighbors does not work with model "{name}". Remove it, or use one '
                f"of {', '.join(SAMPLED)}."
            )


def check_numbers(settings: GeneralSettings) -> None:
    """Reject settings of numbers for classes and labels, and a scale that is not given."""
    kind = settings.predicts
    if kind != NUMBERS:
        for name in FOR_NUMBERS:
            if (value := getattr(settings, name)) != getattr(GeneralSettings, name):
                raise ConfigError(_wrong(name, value, "numbers", kind))
    if kind == CLASSES and settings.weight_by == "entries":
        raise ConfigError(_wrong("weight_by", "entries", "labels and numbers", kind))
    if kind == NUMBERS and settings.target_scale == "given":
        _check_given(settings)
    elif kind == NUMBERS and settings.target_scale == "shared":
        _check_shared(settings)


def _wrong(name: str, value: object, wanted: str, kind: str) -> str:
    """Say that a setting is for another kind of target."""
    shown = json.dumps(value, ensure_ascii=False)
    return f"{kebab(name)} = {shown} is for {wanted}, but the targets are {kind}."


def _check_given(settings: GeneralSettings) -> None:
    """Reject means and deviations that are missing, malformed or not as many."""
    found = {}
    for name in ("target_mean", "target_std"):
        text = getattr(settings, name)
        try:
            found[name] = read_numbers(text)
        except ValueError:
            raise ConfigError(
                f'With target-scale = "given", {kebab(name)} must be finite numbers, one '
                f'for each target and separated by commas as in "-3.1,2.4", got "{text}".'
            ) from None
    means, stds = found.values()
    if min(stds) <= 0:
        raise ConfigError(f"target-std must be above 0, got {settings.target_std}.")
    if len(means) != len(stds):
        raise ConfigError(
            f"target-mean has {len(means)} numbers, but target-std has {len(stds)}: give "
            "one of each for every target."
        )


def _check_shared(settings: GeneralSettings) -> None:
    """Reject the exchange of statistics where they may not leave a client."""
    if not settings.share_target_statistics:
        raise ConfigError(
            'share-target-statistics = false, but target-scale = "shared" sends each '
            'owner\'s mean and spread. Set target-scale = "given" or "own".'
        )
    if settings.secure_aggregation:
        raise ConfigError(
            "secure-aggregation = true hides single uploads, but target-scale = "
            '"shared" sends each owner\'s mean and spread. Set target-scale = "given" or '
            '"own".'
        )
