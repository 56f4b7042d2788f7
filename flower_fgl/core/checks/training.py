"""Checks of backbones and batches, of numbers, and of the clients of a round."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from flower_fgl.core.calibration import CONFORMAL, DIFFUSED, SCALED
from flower_fgl.core.errors import ConfigError
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
    MIN_SECURE_CLIENTS,
    TRACKERS,
    GeneralSettings,
    names_of_trackers,
    read_num_neighbors,
    read_numbers,
)
from flower_fgl.core.targets import CLASSES, EDGE, LINK, NUMBERS

__all__ = ["check_numbers", "check_rounds", "check_training", "describe_sampling"]
__all__ += ["least_uploads", "num_sampled"]


def num_sampled(settings: GeneralSettings, able: int) -> int:
    """Return how many of the ``able`` trainable clients a round samples."""
    if settings.participants:
        return min(settings.participants, able)
    return math.ceil(settings.participation * able - 1e-9)


def describe_sampling(settings: GeneralSettings) -> str:
    """Return the setting that :func:`num_sampled` uses, with its value."""
    if settings.participants:
        return f"participants = {settings.participants}"
    return f"participation = {settings.participation:g}"


def least_uploads(settings: GeneralSettings) -> int:
    """Return the number of uploads that ``aggregation`` needs to outvote an attacker."""
    if settings.aggregation == "krum":
        return 2 * settings.krum_attackers + 3
    return 1 if settings.aggregation == "mean" else 3


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
    if settings.setting not in ("transductive", "inductive", LINK, EDGE, "graph"):
        raise ConfigError(
            f'model = "{model}" reads typed graphs: set setting = "transductive", '
            f'"inductive", "link", "edge" or "graph", got "{settings.setting}".'
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
    if settings.schema_align != "same":
        align = f'schema-align = "{settings.schema_align}"'
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
                text = _wrong(name, value, "numbers", kind)
                if settings.target_kind == "auto":  # a deployment learns it later
                    text += ' Set target-kind = "numbers" if the data owners hold them.'
                raise ConfigError(text)
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


def check_rounds(settings: GeneralSettings, method: Any) -> None:
    """Reject too few clients for a round, and a protection that would protect nothing."""
    if settings.evaluate != "local":
        reasons = _without_global_model(settings)
        _refuse(reasons, 'evaluate = "local"', settings.evaluate)
    if settings.evaluate == "mixed" and settings.eval_policy != "stale":
        raise ConfigError(
            'evaluate = "mixed" scores the downloads before they are trained, but '
            f'eval-policy = "{settings.eval_policy}" trains them. Use eval-policy = '
            '"stale".'
        )
    if settings.upload_noise and not settings.upload_clip:
        raise ConfigError(
            f"upload-noise = {settings.upload_noise:g} is a multiple of upload-clip, which "
            "is 0: set upload-clip."
        )
    if settings.clients_per_node > 1 and not settings.clients:
        raise ConfigError(
            f"clients-per-node = {settings.clients_per_node} needs the number of all "
            "clients: set clients."
        )
    _check_sampling(settings, method)
    if settings.upload_noise_model == "distributed":
        _check_distributed(settings)
    if settings.secure_aggregation:
        _check_secure(settings)
    if settings.calibration == "shared":
        _check_calibration(settings)
    if settings.calibration == "owner":
        _check_conformal_score(settings)
    if settings.min_clients:
        _check_late(settings)
    if settings.aggregation != "mean":
        _check_aggregation(settings)


def _check_sampling(settings: GeneralSettings, method: Any) -> None:
    """Reject rounds that sample more clients than there are, or too few."""
    if settings.clients and settings.min_replies > settings.clients:
        raise ConfigError(
            f"min-replies must be at most clients = {settings.clients}, "
            f"got {settings.min_replies}."
        )
    if settings.participants and settings.participation != 1:
        raise ConfigError(
            f"participants = {settings.participants} and participation = "
            f"{settings.participation:g} both set the number of sampled clients. Give one."
        )
    is_chosen = settings.participants != method.defaults.get("participants", 0)
    if is_chosen and settings.clients and settings.participants > settings.clients:
        raise ConfigError(
            f"participants must be at most clients = {settings.clients}, got "
            f"{settings.participants}."
        )
    sampled = num_sampled(settings, settings.clients)
    if settings.clients and settings.min_replies > sampled:
        raise ConfigError(
            f"min-replies is {settings.min_replies}, but {describe_sampling(settings)} "
            f"samples {sampled} of {settings.clients} clients per round, so every round "
            "would fail. Lower min-replies or sample more clients."
        )


def _without_global_model(settings: GeneralSettings) -> dict[str, object]:
    """Return reasons why no client has all weights of a model, with whether they hold."""
    none, align = "there is no complete global model", settings.schema_align
    return {
        f'With feature-align = "project" {none}': (
            settings.owners and settings.feature_align == "project"
        ),
        f'With class-align = "local" {none}': settings.has_local_heads,
        f"With node-embedding = true {none}": settings.node_embedding,
        f'With schema-align = "{align}" clients have different parts of a model': (
            align != "same"
        ),
    }


def _refuse(reasons: Mapping[str, object], instead: str, got: str) -> None:
    """Raise an error with the first reason that holds."""
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f'{reason}: use {instead}, got "{got}".')


def _check_calibration(settings: GeneralSettings) -> None:
    """Reject a common calibration without a complete global model, or beside noise."""
    reasons = _without_global_model(settings) | {
        'With target-scale = "own" the global model predicts no numbers in their units': (
            settings.predicts == NUMBERS and settings.target_scale == "own"
        ),
        "upload-noise protects uploads, and the sums of a calibration have no noise": (
            settings.upload_noise
        ),
        "isotonic maps need the items themselves": settings.calibrator == "isotonic",
        f'conformal-score = "{settings.conformal_score}" needs the items themselves': (
            settings.conformal_score in (DIFFUSED, SCALED)
        ),
    }
    _refuse(reasons, 'calibration = "owner"', settings.calibration)


def _check_conformal_score(settings: GeneralSettings) -> None:
    """Reject a conformal score of another kind of items."""
    score, has_numbers = settings.conformal_score, settings.predicts == NUMBERS
    if score == SCALED and not has_numbers:
        raise ConfigError(
            f'conformal-score = "{SCALED}" scales intervals of numbers, and the run '
            f"predicts {settings.predicts}. Use {', '.join(CONFORMAL)}."
        )
    is_of_nodes = settings.setting not in ("graph", LINK, EDGE)
    is_of_nodes = is_of_nodes and not reads_types(settings)
    if score == DIFFUSED and not is_of_nodes and settings.predicts == CLASSES:
        raise ConfigError(
            f'conformal-score = "{DIFFUSED}" mixes scores of neighbouring nodes of one '
            'kind, and this run has none to predict. Use "aps".'
        )


def _check_distributed(settings: GeneralSettings) -> None:
    """Reject distributed noise where it would protect nothing."""
    needed = {
        "secure-aggregation = true": settings.secure_aggregation,
        "upload-clip above 0": settings.upload_clip,
        "upload-noise above 0": settings.upload_noise,
        'weight-by = "equal"': settings.weight_by == "equal",
    }
    missing = [text for text, is_set in needed.items() if not is_set]
    if missing:
        raise ConfigError(
            'upload-noise-model = "distributed" adds shares of the noise that are only '
            f"enough in a secure sum of equally weighted uploads: set {missing[0]}, or "
            'use upload-noise-model = "local".'
        )


def _check_secure(settings: GeneralSettings) -> None:
    """Reject secure aggregation for non-additive uploads or too few clients."""
    if 3 * settings.secure_threshold <= 2:
        raise ConfigError(
            "secure-threshold must be above 2/3, so that a server cannot show two groups "
            f"of clients different lists, got {settings.secure_threshold:g}. Remove it, "
            "or set it to 0.67 or more."
        )
    sampled = num_sampled(settings, settings.clients)
    if settings.clients and sampled < MIN_SECURE_CLIENTS:
        raise ConfigError(
            f"secure-aggregation needs {MIN_SECURE_CLIENTS} clients per round: with one or "
            "two, the sum reveals individual updates. clients = "
            f"{settings.clients} and {describe_sampling(settings)} give {sampled}."
        )


def _check_late(settings: GeneralSettings) -> None:
    """Reject ``min-clients`` if all clients are needed from the start."""
    least = settings.min_clients
    if settings.secure_aggregation:
        raise ConfigError(
            "With secure-aggregation all clients exchange keys before round 1: "
            f"min-clients = {least} is not possible. Remove one of the two."
        )
    if settings.clients and least > settings.clients:
        raise ConfigError(
            f"min-clients must be at most clients = {settings.clients}, got {least}."
        )
    if settings.min_replies > least:
        raise ConfigError(
            f"Rounds with min-clients = {least} clients would always fail, since "
            f"min-replies = {settings.min_replies}. Set min-replies to {least} or less."
        )


def _check_aggregation(settings: GeneralSettings) -> None:
    """Reject a robust aggregation that the method, masks or few clients rule out."""
    rule = settings.aggregation
    if settings.secure_aggregation:
        raise ConfigError(
            f'aggregation = "{rule}" compares single uploads, which secure-aggregation '
            "hides from the server. Remove one of the two."
        )
    sampled = num_sampled(settings, settings.clients)
    least = least_uploads(settings)
    if settings.clients and sampled < least:
        raise ConfigError(
            f'aggregation = "{rule}" needs {least} uploads per round'
            + (f" (2·{settings.krum_attackers} + 3)" if rule == "krum" else "")
            + f", but clients = {settings.clients} and {describe_sampling(settings)} give "
            f"{sampled}."
        )
