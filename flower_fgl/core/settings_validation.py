"""Which settings go together, with each other and with the chosen method."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.model_spec import SHALLOW, read_model, split_models
from flower_fgl.core.options import kebab, nearest
from flower_fgl.core.settings import (
    GRAPH_PARTITIONS,
    MIN_SECURE_CLIENTS,
    GeneralSettings,
    is_file,
)

__all__ = [
    "MAX_SHOTS",
    "UNSEEN_SETTINGS",
    "check_names",
    "check_settings",
    "describe_sampling",
    "num_sampled",
]

UNSEEN_SETTINGS = ("closed-set", "open-set")
"""Settings that score nodes which the client did not have in training."""

MAX_SHOTS = 11
"""A class that is kept has 26 nodes or more, of which 15 test (a test compares them)."""


def check_names(
    general: Mapping[str, Any],
    tables: Mapping[str, Any],
    methods: Mapping[str, Any],
    datasets: Iterable[str],
) -> None:
    """Refuse an unknown method, data set or table before anything else is read.

    Parameters
    ----------
    general : mapping of str to object
        General settings by key, those that were given.
    tables : mapping of str to object
        Names of the tables that were given.
    methods : mapping of str to Method
        The table of methods.
    datasets : iterable of str
        Names of known data sets.

    Raises
    ------
    ConfigError
        Naming what is like it.
    """
    method = str(general.get("method", GeneralSettings.method))
    if method not in methods:
        raise ConfigError(f'Unknown method "{method}". {nearest(method, methods)}')
    dataset = str(general.get("dataset", GeneralSettings.dataset))
    is_known = dataset in set(datasets) or dataset.startswith("tu:")
    if not (is_known or is_file(dataset)):
        is_folder = os.path.isdir(dataset)  # False too for a name too long for a path
        raise ConfigError(
            f'Unknown data set "{dataset}". {nearest(dataset, datasets)} '
            "A path to a graph file (.npz or a CSV folder) works as well"
            + (f": for the folder here write ./{dataset}" if is_folder else "")
            + "."
        )
    known = {"synthetic", *(n for n, m in methods.items() if m.settings is not None)}
    for table in tables:
        if table not in known:
            raise ConfigError(f'Unknown settings "{table}.…". {nearest(table, known)}')


def check_settings(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Refuse settings that do not go together.

    Parameters
    ----------
    settings : GeneralSettings
        All general settings, each of which is in its range.
    method : Method
        The row of the chosen method.
    methods : mapping of str to Method
        The table of methods, to name those that can.

    Raises
    ------
    ConfigError
        If ``device`` names none; if the method cannot do what is asked of it; in
        ``graph``, for a partition that cuts one graph, or any sparsity; in
        ``closed-set`` or ``open-set``, for a partition other than METIS, or any
        sparsity; in ``few-shot``, for too many shots, a split, or ``label-sparsity``;
        with ``secure-aggregation``, for fewer than three clients a round; with
        ``min-clients``, for more than ``clients``, fewer than ``min-replies``, or
        ``secure-aggregation``.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", settings.device):
        raise ConfigError(
            f'device must be "auto", "cpu", "cuda" or "cuda:N", got "{settings.device}".'
        )
    _check_method(settings, method)
    _check_graphs(settings, method, methods)
    _check_unseen(settings)
    _check_few_shot(settings)
    _check_secure(settings, method, methods)
    _check_late(settings, method, methods)


def _check_method(settings: GeneralSettings, method: Any) -> None:
    """Refuse what the chosen method cannot do."""
    if settings.evaluate != "local" and not method.has_global_model:
        raise ConfigError(
            f'{settings.method} has no aggregated model: evaluate = "'
            f'{settings.evaluate}" is not possible, use evaluate = "local".'
        )
    names = split_models(settings.model)
    _refuse_depths(settings, names)
    if method.shares_embeddings:
        _refuse_widths(settings, names)
    if "," in settings.model and not method.mixes_models:
        raise ConfigError(
            f'model = "{settings.model}" gives the clients different backbones, which '
            f"{settings.method} cannot average. Use one name."
        )
    if method.is_one_shot and settings.rounds > 1:
        raise ConfigError(
            f"{settings.method} is one upload and one download: rounds must be 1, got "
            f"{settings.rounds}. Set rounds = 1, or leave it out."
        )
    if method.is_one_shot and settings.eval_policy == "refresh":
        raise ConfigError(
            f"{settings.method} has no round to catch up with: use eval-policy = "
            '"stale", or leave it out.'
        )
    if not method.takes_batches and (settings.batch_size or settings.check_every):
        raise ConfigError(
            f"{settings.method} takes steps on all training nodes of a client and keeps "
            "the last: batch-size and check-every must be 0, got "
            f"{settings.batch_size} and {settings.check_every}."
        )
    if method.is_one_shot and settings.batch_size:
        raise ConfigError(
            f"{settings.method} trains on its graph as a whole: batch-size must be 0, got "
            f"{settings.batch_size}."
        )
    if settings.upload_noise and not settings.upload_clip:
        raise ConfigError(
            f"upload-noise = {settings.upload_noise:g} says nothing without a bound on "
            "what a client uploads: set upload-clip."
        )
    if settings.upload_clip and not method.uploads:
        raise ConfigError(
            f"{settings.method} uploads nothing that upload-clip or upload-noise could "
            "act on: leave them out."
        )
    if settings.clients and settings.min_replies > settings.clients:
        raise ConfigError(
            f"min-replies must be at most clients = {settings.clients}, "
            f"got {settings.min_replies}."
        )
    if settings.participants and settings.participation != 1:
        raise ConfigError(
            f"participants = {settings.participants} and participation = "
            f"{settings.participation:g} both say how many clients a round asks. Give one."
        )
    asked = num_sampled(settings, settings.clients)
    if settings.clients and settings.min_replies > asked:
        raise ConfigError(
            f"min-replies is {settings.min_replies}, but {describe_sampling(settings)} asks "
            f"{asked} of {settings.clients} clients a round: no round could end. Lower "
            "min-replies or ask more."
        )


def num_sampled(settings: GeneralSettings, able: int) -> int:
    """Return how many of the clients that can train a round asks."""
    if settings.participants:
        return min(settings.participants, able)
    return math.ceil(settings.participation * able - 1e-9)


def describe_sampling(settings: GeneralSettings) -> str:
    """Name the setting that :func:`num_sampled` obeys, with its value."""
    if settings.participants:
        return f"participants = {settings.participants}"
    return f"participation = {settings.participation:g}"


def _refuse_depths(settings: GeneralSettings, names: Iterable[str]) -> None:
    """Refuse a backbone with fewer layers than it takes."""
    for text in names:
        model = read_model(text)
        layers = model.num_layers or settings.num_layers
        if layers < 2 and model.name not in SHALLOW:
            where = "its name" if model.num_layers else "num-layers"
            raise ConfigError(
                f'model "{text}" needs at least 2 layers, got {layers} by {where}. One is '
                f"enough for {', '.join(SHALLOW)}."
            )


def _refuse_widths(settings: GeneralSettings, names: Iterable[str]) -> None:
    """Refuse embeddings of different widths where they meet."""
    for name in names:
        width = read_model(name).hidden_channels
        if width not in (None, settings.hidden_channels):
            raise ConfigError(
                f'{settings.method} compares the clients\' embeddings, so model "{name}" '
                f"must be hidden-channels = {settings.hidden_channels} wide, got "
                f"{width}. Other methods, e.g. local, take any widths."
            )


def _check_secure(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Refuse secure aggregation where uploads are no summands, or too few."""
    if not settings.secure_aggregation:
        return
    if not method.additive:
        able = ", ".join(sorted(name for name, row in methods.items() if row.additive))
        raise ConfigError(
            f"{settings.method} needs more than the sum of its uploads: "
            f"secure-aggregation = true is not possible. These methods can: {able}."
        )
    asked = num_sampled(settings, settings.clients)
    if settings.clients and asked < MIN_SECURE_CLIENTS:
        raise ConfigError(
            f"secure-aggregation needs {MIN_SECURE_CLIENTS} clients a round: one alone is "
            "no secret, and of two each knows the other's part. clients = "
            f"{settings.clients} and {describe_sampling(settings)} give {asked}."
        )


def _check_late(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Refuse clients that join later where all must be there from the start."""
    least = settings.min_clients
    if not least:
        return
    if not method.takes_late_clients:
        able = sorted(name for name, row in methods.items() if row.takes_late_clients)
        raise ConfigError(
            f"{settings.method} needs all clients before round 1: min-clients = {least} is "
            f"not possible. These methods let clients join later: {', '.join(able)}."
        )
    if settings.secure_aggregation:
        raise ConfigError(
            "With secure-aggregation all clients exchange keys before round 1: "
            f"min-clients = {least} is not possible. Leave one of the two out."
        )
    if settings.clients and least > settings.clients:
        raise ConfigError(
            f"min-clients must be at most clients = {settings.clients}, got {least}."
        )
    if settings.min_replies > least:
        raise ConfigError(
            f"With min-clients = {least} rounds of so many clients would fail, since "
            f"min-replies = {settings.min_replies}. Set min-replies to {least} or less."
        )


def _check_graphs(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Refuse a method or a partition rule that cannot do with a set of graphs."""
    if settings.setting != "graph":
        return
    if not method.graphs:
        able = ", ".join(sorted(name for name, row in methods.items() if row.graphs))
        raise ConfigError(
            f'{settings.method} classifies nodes only: setting = "graph" is not '
            f"possible. These methods classify graphs: {able}."
        )
    if settings.partition not in GRAPH_PARTITIONS:
        names = '" or "'.join(GRAPH_PARTITIONS)
        raise ConfigError(
            f'partition = "{settings.partition}" cuts one graph, but setting = "graph" '
            f'deals whole graphs: use partition = "{names}".'
        )
    _refuse_sparsity(
        settings,
        'the nodes of one graph, but setting = "graph" classifies whole graphs',
    )


def _refuse_sparsity(settings: GeneralSettings, why: str) -> None:
    """Refuse to take away from what is not there to take from."""
    for name in ("feature_sparsity", "edge_sparsity", "label_sparsity"):
        if getattr(settings, name):
            raise ConfigError(
                f"{kebab(name)} takes away from {why}: use {kebab(name)} = 0, got "
                f"{getattr(settings, name)}."
            )


def _check_unseen(settings: GeneralSettings) -> None:
    """Refuse what does not go with nodes that are unseen in training."""
    if settings.setting not in UNSEEN_SETTINGS:
        return
    if settings.partition != "metis":
        raise ConfigError(
            f'setting = "{settings.setting}" cuts the graph into the clients and a new '
            f'one with METIS: use partition = "metis", got "{settings.partition}".'
        )
    _refuse_sparsity(
        settings,
        f'what a client has, but setting = "{settings.setting}" scores it on more than '
        "that",
    )


def _check_few_shot(settings: GeneralSettings) -> None:
    """Refuse what does not go with a fixed number of training nodes per class."""
    if settings.setting != "few-shot":
        return
    if settings.shots > MAX_SHOTS:
        raise ConfigError(
            "A client keeps the classes of which it has more than 25 nodes; 15 of them "
            f"test, so that at least 11 are left to train: shots must be at most "
            f"{MAX_SHOTS}, got {settings.shots}."
        )
    if settings.split != "default":
        raise ConfigError(
            'setting = "few-shot" draws the shots and 15 test nodes of each class: '
            f'split = "{settings.split}" is not possible, leave it at "default".'
        )
    if settings.label_sparsity:
        raise ConfigError(
            'label-sparsity takes training nodes away, but setting = "few-shot" gives '
            "every class the same number: use label-sparsity = 0 and fewer shots, got "
            f"{settings.label_sparsity}."
        )
