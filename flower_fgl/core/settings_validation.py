"""Checks that settings are compatible with each other and with the chosen method."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import refusal
from flower_fgl.core.links import EDGE, LINK, read_time_cuts
from flower_fgl.core.model_spec import (
    BACKBONES,
    SAMPLED,
    SHALLOW,
    read_model,
    split_models,
)
from flower_fgl.core.options import fields_by_key, kebab, nearest, removed_settings
from flower_fgl.core.settings import (
    ALL_TARGETS,
    EDGE_PARTITIONS,
    GRAPH_PARTITIONS,
    MIN_SECURE_CLIENTS,
    TARGETS,
    TRACKERS,
    UNSUPPORTED,
    GeneralSettings,
    SyntheticSettings,
    has_targets,
    is_file,
    names_of_trackers,
    read_num_neighbors,
)

__all__ = [
    "MAX_SHOTS",
    "UNSEEN_SETTINGS",
    "check_names",
    "check_settings",
    "describe_sampling",
    "has_local_heads",
    "least_uploads",
    "num_sampled",
]

UNSEEN_SETTINGS = ("closed-set", "open-set")
"""Settings that score nodes which clients do not have in training."""

MAX_SHOTS = 11
"""A kept class has at least 26 nodes, 15 of which are test nodes (a test compares)."""


def check_names(
    general: Mapping[str, Any],
    tables: Mapping[str, Any],
    methods: Mapping[str, Any],
    datasets: Iterable[str],
) -> None:
    """Reject an unknown method, dataset, table or key, before anything else is parsed.

    Parameters
    ----------
    general : mapping of str to object
        General settings that were given, by key.
    tables : mapping of str to object
        Tables that were given, by name.
    methods : mapping of str to Method
        The table of methods.
    datasets : iterable of str
        Names of the known datasets.

    Raises
    ------
    ConfigError
        Naming the closest known name, or the table that holds the key.
    """
    method = str(general.get("method", GeneralSettings.method))
    if method not in methods:
        if reason := refusal("methods", method):
            raise ConfigError(reason)
        raise ConfigError(f'Unknown method "{method}". {nearest(method, methods)}')
    dataset = str(general.get("dataset", GeneralSettings.dataset))
    if dataset in UNSUPPORTED:
        raise ConfigError(
            f'The dataset "{dataset}" is not supported: {UNSUPPORTED[dataset]}. The '
            "methods here predict one class of each node or graph. Choose a dataset that "
            "flower-fgl datasets lists."
        )
    is_known = dataset in set(datasets) or dataset.startswith(("tu:", "twitch:"))
    if not (is_known or is_file(dataset)):
        is_folder = os.path.isdir(dataset)  # False too for a name too long for a path
        if os.path.isfile(dataset):
            raise ConfigError(
                f"{dataset} is no graph file: expected an .npz file, or a folder with "
                f"nodes.csv and edges.csv. flower-fgl check-graph {dataset} says how to "
                "convert it."
            )
        raise ConfigError(
            f'Unknown dataset "{dataset}". {nearest(dataset, datasets)} '
            "The path of a graph file (.npz or a CSV folder) is also accepted"
            + (f": for the folder of that name write ./{dataset}" if is_folder else "")
            + "."
        )
    _check_keys(general, tables, methods, method)


def _check_keys(
    general: Mapping[str, Any],
    tables: Mapping[str, Mapping[str, Any]],
    methods: Mapping[str, Any],
    method: str,
) -> None:
    """Reject an unknown setting or table; suggest the right table for a known setting."""
    classes = {n: m.settings for n, m in methods.items() if m.settings is not None}
    classes["synthetic"] = SyntheticSettings
    names = {table: fields_by_key(cls).keys() for table, cls in classes.items()}
    common = fields_by_key(GeneralSettings).keys()
    for table, entries in tables.items():
        if table in methods and table not in names:
            raise ConfigError(
                f'{table} has no settings of its own, got "{table}.{next(iter(entries))}".'
            )
        if table not in names:
            close = difflib.get_close_matches(table, names, n=3, cutoff=0.5)
            fit = [name for name in close if entries.keys() <= names[name]]
            if not fit and entries.keys() <= common:
                first = next(iter(entries))
                raise ConfigError(
                    f'Unknown setting "{table}.{first}". Did you mean "{first}"? It is a '
                    "setting of all methods and stands without a table."
                )
            raise ConfigError(
                f'Unknown settings "{table}.…". '
                + nearest(fit[0] if fit else table, names)
            )
        allowed = names[table] | {*removed_settings(classes[table])}
        for key in sorted(entries.keys() - allowed):
            raise ConfigError(_unknown_key(key, table, names, common, method))
    for key in general:
        if key in names:
            keys = sorted(names[key])
            raise ConfigError(
                f'"{key}" is a table of settings. Set one of its keys: '
                f"{', '.join(f'{key}.{k}' for k in keys)}. In Python: "
                f'{kebab(key).replace("-", "_")}={{"{keys[0].replace("-", "_")}": …}}.'
            )
        if key not in common:
            raise ConfigError(_unknown_key(key, "", names, common, method))


def _unknown_key(
    key: str,
    table: str,
    names: Mapping[str, Set[str]],
    common: Set[str],
    method: str,
) -> str:
    """Return the error for a key that its table lacks, with the right table if any."""
    full = f"{table}.{key}" if table else key
    text = f'Unknown setting "{full}". '
    plain = kebab(key)
    own = names.get(table, set())
    if plain not in common and difflib.get_close_matches(plain, own, n=1, cutoff=0.5):
        return text + nearest(full, {f"{table}.{k}" for k in own})
    found = [plain] if plain in common else []
    first = sorted(names, key=lambda name: (name != method, name))
    found += [f"{name}.{plain}" for name in first if plain in names[name]]
    known = {f"{table}.{k}" for k in names[table]} if table else common
    if f"{method}.{plain}" in found:
        return f'{text}Did you mean "{method}.{plain}"?'
    if found:
        others = f" (or {', '.join(found[1:])})" if found[1:] else ""
        return f'{text}Did you mean "{found[0]}"{others}? {nearest("", known)}'
    return text + nearest(full, known)


def check_settings(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject settings that cannot be combined.

    Parameters
    ----------
    settings : GeneralSettings
        All general settings, each in its range.
    method : Method
        The row of the chosen method.
    methods : mapping of str to Method
        The table of methods, to name alternatives.

    Raises
    ------
    ConfigError
        If ``device`` is malformed, or ``track`` names an unknown tracker; if a dataset
        with several labels lacks ``target``; if the method does not support a setting; with
        ``setting = "graph"``, for a partition of a single graph, or any sparsity; with
        ``closed-set`` or ``open-set``, for a partition other than METIS, or any
        sparsity; with ``few-shot``, for too many shots, a split, or ``label-sparsity``;
        with ``secure-aggregation``, for a threshold of 2/3 or less, or fewer than three
        clients per round; with ``upload-noise-model = "distributed"``, without what it
        needs; with
        ``min-clients``, for more than ``clients``, fewer than ``min-replies``, or
        ``secure-aggregation``; with ``owners``, for a dataset, a partition, any sparsity,
        or layers that the method cannot leave local; with a robust ``aggregation``, for
        a method that does not average weights, ``secure-aggregation``, or too few clients
        per round.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,2})?", settings.device):
        raise ConfigError(
            f'device must be "auto", "cpu", "cuda" or "cuda:N", got "{settings.device}".'
        )
    for name in names_of_trackers(settings.track):
        if name not in TRACKERS:
            raise ConfigError(f'Unknown tracker "{name}". {nearest(name, TRACKERS)}')
    if has_targets(settings):
        _check_target(settings, method, methods)
    _check_method(settings, method)
    _check_mixed(settings, method, methods)
    _check_owners(settings, method, methods)
    _check_graphs(settings, method, methods)
    _check_links(settings, method, methods)
    _check_classes(settings, method, methods)
    _reject_models(settings, method)
    if method.needs_cross_edges:
        _check_cross_edges(settings)
    _check_unseen(settings)
    _check_few_shot(settings)
    _check_secure(settings, method, methods)
    _check_late(settings, method, methods)
    _check_aggregation(settings, method, methods)


def _check_target(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject a missing target, a number out of range, and all where one is needed."""
    (count, example), target = TARGETS[settings.dataset], settings.target
    are_numbers = example.isdecimal()
    if not target:
        names = f"0 to {count - 1}" if are_numbers else "with the names in its files"
        item = "graph" if settings.dataset.startswith("ogbg") else "node"
        raise ConfigError(
            f"{settings.dataset} has {count} targets, {names}, and a {item} may belong to "
            f'several. Choose one with target, e.g. target = "{example}": the run then '
            f'tells the classes "no {example}" and "{example}" apart. target = '
            f'"{ALL_TARGETS}" learns all of them at once.'
        )
    if target == ALL_TARGETS:
        _check_all_targets(settings, method, methods)
        return
    if are_numbers and target not in map(str, range(count)):
        raise ConfigError(
            f'target = "{target}" is not one of {settings.dataset}, whose targets are the '
            f"numbers 0 to {count - 1}."
        )
    classes = (f"no {target}", target)
    if settings.setting != LINK and settings.positive_class not in ("", *classes):
        raise ConfigError(
            f'positive-class = "{settings.positive_class}" is no class of target = '
            f'"{target}": its classes are "{classes[0]}" and "{target}". Use one of them, '
            "or remove positive-class."
        )


def _check_all_targets(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject what needs a single class of each item, with ``target = "all"``."""
    text = f'target = "{ALL_TARGETS}"'
    instead = f'Choose one target, e.g. target = "{TARGETS[settings.dataset].example}".'
    if not method.multi_label:
        able = ", ".join(sorted(n for n, row in methods.items() if row.multi_label))
        raise ConfigError(
            f"{settings.method} predicts one class of each item: {text} is not possible. "
            f"These methods predict several labels: {able}. {instead}"
        )
    free = {
        "setting": ("transductive", "inductive", "graph"),
        "partition": EDGE_PARTITIONS,
    }
    for name, able_values in free.items():
        if (value := getattr(settings, name)) not in able_values:
            raise ConfigError(
                f'{name} = "{value}" needs one class of each item: with {text} use one of '
                f"{', '.join(able_values)}. {instead}"
            )
    for name in ("class_weights", "positive_class"):
        if getattr(settings, name) != getattr(GeneralSettings, name):
            raise ConfigError(
                f"{kebab(name)} is about one class of each item, but {text} has several "
                f"labels: remove {kebab(name)}. {instead}"
            )


def _check_mixed(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject ``evaluate = "mixed"`` where no mixture can be scored."""
    if settings.evaluate != "mixed":
        return
    if not method.sends_mixtures:
        able = sorted(name for name, row in methods.items() if row.sends_mixtures)
        raise ConfigError(
            f"{settings.method} does not mix a model for each client, so evaluate = "
            f'"mixed" is not possible. These methods do: {", ".join(able)}. Use evaluate '
            '= "local".'
        )
    if settings.eval_policy != "stale":
        raise ConfigError(
            'evaluate = "mixed" scores the downloads before they are trained, but '
            f'eval-policy = "{settings.eval_policy}" trains them. Use eval-policy = '
            '"stale".'
        )


def _check_method(settings: GeneralSettings, method: Any) -> None:
    """Reject settings that the chosen method does not support."""
    is_global = settings.evaluate in ("global", "both")
    if is_global and not method.has_global_model:
        raise ConfigError(
            f'{settings.method} has no global model, so evaluate = "'
            f'{settings.evaluate}" is not possible. Use evaluate = "local".'
        )
    names = split_models(settings.model)
    _reject_depths(settings, names)
    if method.shares_embeddings:
        _reject_widths(settings, names)
    if "," in settings.model and not method.mixes_models:
        raise ConfigError(
            f'model = "{settings.model}" gives the clients different backbones, which '
            f"{settings.method} cannot average. Give one backbone."
        )
    if method.is_one_shot and settings.rounds > 1:
        raise ConfigError(
            f"{settings.method} is one-shot (one upload, one download): rounds must be 1, "
            f"got {settings.rounds}. Set rounds = 1, or remove it."
        )
    if method.is_one_shot and settings.eval_policy != "stale":
        raise ConfigError(
            f"{settings.method} samples all clients in its single round: use eval-policy = "
            '"stale", or remove it.'
        )
    if settings.num_neighbors:
        _check_neighbors(settings, method)
    if not method.takes_batches and (settings.batch_size or settings.check_every):
        raise ConfigError(
            f"{settings.method} trains on all training nodes of a client at once and keeps "
            "the last weights: batch-size and check-every must be 0, got "
            f"{settings.batch_size} and {settings.check_every}."
        )
    if method.counts_steps and settings.check_every:
        raise ConfigError(
            f"{settings.method} divides by the number of steps that led to a client's "
            "weights, and check-every keeps those of an earlier step: check-every must be "
            f"0, got {settings.check_every}."
        )
    if method.sends_last_steps and settings.check_every:
        raise ConfigError(
            f"{settings.method} uploads what the last steps of training predicted, and "
            "check-every keeps the weights of an earlier step: check-every must be 0, got "
            f"{settings.check_every}."
        )
    if method.is_one_shot and settings.batch_size:
        raise ConfigError(
            f"{settings.method} trains on each graph as a whole: batch-size must be 0, got "
            f"{settings.batch_size}."
        )
    if settings.upload_noise and not settings.upload_clip:
        raise ConfigError(
            f"upload-noise = {settings.upload_noise:g} is a multiple of upload-clip, which "
            "is 0: set upload-clip."
        )
    if settings.upload_clip and not method.uploads:
        raise ConfigError(
            f"{settings.method} has no uploads to clip or to add noise to: remove "
            "upload-clip and upload-noise."
        )
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


def _check_neighbors(settings: GeneralSettings, method: Any) -> None:
    """Raise an error if ``num-neighbors`` is malformed or would have no effect."""
    text = settings.num_neighbors
    try:
        numbers = read_num_neighbors(text)
    except ValueError:
        raise ConfigError(
            "num-neighbors must be positive numbers, one per layer and separated by "
            f'commas as in "10,10", got "{text}".'
        ) from None
    if not method.samples_neighbors:
        raise ConfigError(
            f"{settings.method} has its own training steps, which do not read "
            "num-neighbors: remove it."
        )
    if settings.setting == "graph":
        raise ConfigError(
            'num-neighbors is for node classification: remove it for setting = "graph".'
        )
    if not settings.batch_size:
        raise ConfigError(
            "num-neighbors limits what a batch reads: set batch-size, or remove it."
        )
    for name in split_models(settings.model):
        model = read_model(name)
        if model.name in SAMPLED:
            layers = model.num_layers or settings.num_layers
            if len(numbers) != layers:
                raise ConfigError(
                    f'num-neighbors = "{text}" has {len(numbers)} number(s), but model '
                    f'"{name}" has {layers} layers: give one number for each layer, the '
                    "last layer first."
                )
        elif model.name in BACKBONES:
            raise ConfigError(
                f'num-neighbors does not work with model "{name}". Remove it, or use one '
                f"of {', '.join(SAMPLED)}."
            )


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


def _reject_depths(settings: GeneralSettings, names: Iterable[str]) -> None:
    """Reject a backbone with fewer layers than it needs."""
    for text in names:
        model = read_model(text)
        layers = model.num_layers or settings.num_layers
        if layers < 2 and model.name in BACKBONES and model.name not in SHALLOW:
            where = "its name" if model.num_layers else "num-layers"
            raise ConfigError(
                f'model "{text}" needs at least 2 layers, got {layers} by {where}. Only '
                f"{', '.join(SHALLOW)} work with one layer."
            )


def _reject_widths(settings: GeneralSettings, names: Iterable[str]) -> None:
    """Reject embeddings of different widths if the method compares them."""
    for name in names:
        width = read_model(name).hidden_channels
        if width not in (None, settings.hidden_channels):
            raise ConfigError(
                f"{settings.method} compares the embeddings of different clients: model "
                f'"{name}" must have the width hidden-channels = '
                f"{settings.hidden_channels}, got {width}. Other methods, e.g. local, "
                "accept any widths."
            )


def _reject_models(settings: GeneralSettings, method: Any) -> None:
    """Reject a backbone that the method does not work with."""
    for text in split_models(settings.model):
        if method.models and read_model(text).name not in method.models:
            able = '" or "'.join(method.models)
            raise ConfigError(
                f'{settings.method} works with model = "{able}" only, got "{text}".'
            )


def _check_cross_edges(settings: GeneralSettings) -> None:
    """Reject settings under which edges between clients have no meaning."""
    name = settings.method
    if settings.setting not in ("transductive", "few-shot"):
        raise ConfigError(
            f"{name} exchanges sums over the edges between clients' training graphs: it "
            f'needs setting = "transductive" or "few-shot", got "{settings.setting}".'
        )
    if settings.feature_norm == "columns":
        raise ConfigError(
            f"{name} adds up features of different clients, which feature-norm = "
            '"columns" scales differently on each: use "none" or "rows".'
        )


def _check_secure(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject secure aggregation for non-additive uploads or too few clients."""
    if settings.upload_noise_model == "distributed":
        _check_distributed(settings, method)
    if not settings.secure_aggregation:
        return
    if not method.additive:
        able = ", ".join(sorted(name for name, row in methods.items() if row.additive))
        raise ConfigError(
            f"{settings.method} needs more than the sum of its uploads: "
            f"secure-aggregation = true is not possible. These methods support it: {able}."
        )
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


def least_uploads(settings: GeneralSettings) -> int:
    """Return the number of uploads that ``aggregation`` needs to outvote an attacker."""
    if settings.aggregation == "krum":
        return 2 * settings.krum_attackers + 3
    return 1 if settings.aggregation == "mean" else 3


def _check_aggregation(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject a robust aggregation that the method, masks or few clients rule out."""
    rule = settings.aggregation
    if rule == "mean":
        return
    if not method.robust:
        able = ", ".join(sorted(name for name, row in methods.items() if row.robust))
        raise ConfigError(
            f"{settings.method} does more with its uploads than averaging weights: "
            f'aggregation = "{rule}" is not possible. These methods support it: {able}.'
        )
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


def _check_distributed(settings: GeneralSettings, method: Any) -> None:
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
    if method.additive and not method.sums_scaled_uploads:
        raise ConfigError(
            f"{settings.method} sums other numbers than those that upload-clip bounds: "
            'use upload-noise-model = "local".'
        )


def _check_late(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject ``min-clients`` if all clients are needed from the start."""
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


def has_local_heads(settings: GeneralSettings) -> bool:
    """Return whether each owner has its own classes, and keeps its head."""
    is_default = settings.class_align == "default" and settings.setting == "graph"
    return bool(settings.owners) and (settings.class_align == "local" or is_default)


def _check_owners(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject what contradicts ``owners``, and layers that a method cannot keep local."""
    if not settings.owners:
        for name in ("feature_align", "class_align"):
            if getattr(settings, name) != getattr(GeneralSettings, name):
                raise ConfigError(
                    f"{kebab(name)} is about the graphs of owners: set owners too, or "
                    f"remove {kebab(name)}."
                )
        return
    for name in ("dataset", "partition"):
        if getattr(settings, name) != getattr(GeneralSettings, name):
            raise ConfigError(
                f'owners = "{settings.owners}" brings the graphs of the clients: '
                f'{name} = "{getattr(settings, name)}" is not possible. Remove one of '
                "the two."
            )
    _reject_sparsity(settings, "a partition, but an owner's graph is used unchanged")
    kept = {
        'feature-align = "project"': (
            settings.feature_align == "project",
            "keeps_first_layer",
            "first layer",
            'feature-align = "name"',
        ),
        'class-align = "local"': (
            has_local_heads(settings),
            "keeps_head",
            "head",
            'class-align = "name"',
        ),
    }
    for text, (is_on, flag, part, instead) in kept.items():
        if is_on and not getattr(method, flag):
            able = sorted(name for name, row in methods.items() if getattr(row, flag))
            raise ConfigError(
                f"{settings.method} cannot leave the {part} of each owner local: {text} "
                f"is not possible. These methods can: {', '.join(able)}. If all owners "
                f"mean the same, use {instead}."
            )
        if is_on and settings.evaluate != "local":
            raise ConfigError(
                f"With {text} there is no complete global model: use evaluate = "
                f'"local", got "{settings.evaluate}".'
            )


def _check_links(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject a method that takes no pairs of nodes, and what such a task lacks."""
    if settings.setting not in (LINK, EDGE):
        return
    if not method.predicts_links:
        able = ", ".join(sorted(n for n, row in methods.items() if row.predicts_links))
        what = "predict links" if settings.setting == LINK else "classify edges"
        raise ConfigError(
            f'{settings.method} cannot {what}: setting = "{settings.setting}" is not '
            f"possible. These methods can: {able}."
        )
    if settings.num_neighbors:
        raise ConfigError(
            f'setting = "{settings.setting}" embeds the whole graph in each step: '
            "num-neighbors is not possible. Remove it."
        )
    if settings.setting == EDGE:
        _check_edges(settings)
    elif settings.split == "public":
        raise ConfigError(
            'setting = "link" splits the edges of each client: split = "public" is not '
            'possible. Use percentages of the edges, e.g. "85/5/10".'
        )
    _reject_sparsity(settings, "all features, edges and labels of a client")


def _check_edges(settings: GeneralSettings) -> None:
    """Reject malformed times, and a partition that needs classes of nodes."""
    try:
        read_time_cuts(settings.time_cuts)
    except ValueError:
        raise ConfigError(
            "time-cuts must be two numbers, the times at which validation and test "
            f'begin, the second one later, as in "400,500", got "{settings.time_cuts}".'
        ) from None
    if settings.partition not in EDGE_PARTITIONS:
        raise ConfigError(
            f'partition = "{settings.partition}" is not for setting = "edge", since it '
            'reads more than the edges: use partition = "metis", "louvain" or "uniform".'
        )


def _check_classes(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject class weights and a positive class where they mean nothing."""
    if settings.setting == LINK:
        for name in ("class_weights", "positive_class"):
            if getattr(settings, name) != getattr(GeneralSettings, name):
                raise ConfigError(
                    f'{kebab(name)} is not for setting = "link", which draws as many '
                    f"pairs without a link as there are links: remove {kebab(name)}."
                )
    if settings.class_weights == "balanced" and not method.weighs_classes:
        able = ", ".join(sorted(n for n, row in methods.items() if row.weighs_classes))
        raise ConfigError(
            f'{settings.method} does not read class-weights = "balanced". These methods '
            f"do: {able}."
        )


def _check_graphs(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject a method or partition rule that does not support graph classification."""
    if settings.setting != "graph":
        return
    if not settings.owners and is_file(settings.dataset):
        raise ConfigError(
            f"{settings.dataset} holds one graph, for the classification of its nodes or "
            'edges or for link prediction: setting = "graph" is not possible. Use another '
            'setting, or a dataset of task "graph", which flower-fgl datasets lists.'
        )
    if not method.graphs:
        able = ", ".join(sorted(name for name, row in methods.items() if row.graphs))
        raise ConfigError(
            f'{settings.method} classifies nodes only: setting = "graph" is not '
            f"possible. These methods classify graphs: {able}."
        )
    if not settings.owners and settings.partition not in GRAPH_PARTITIONS:
        names = '" or "'.join(GRAPH_PARTITIONS)
        raise ConfigError(
            f'partition = "{settings.partition}" partitions a single graph, but setting = '
            '"graph" assigns whole graphs to clients: use a dataset of task "graph", '
            f'which flower-fgl datasets lists, and partition = "{names}".'
        )
    _reject_sparsity(
        settings,
        'the nodes of one graph, but setting = "graph" classifies whole graphs',
    )


def _reject_sparsity(settings: GeneralSettings, why: str) -> None:
    """Reject the sparsity settings; ``why`` says which data they would remove."""
    for name in ("feature_sparsity", "edge_sparsity", "label_sparsity"):
        if getattr(settings, name):
            raise ConfigError(
                f"{kebab(name)} removes data from {why}: use {kebab(name)} = 0, got "
                f"{getattr(settings, name)}."
            )


def _check_unseen(settings: GeneralSettings) -> None:
    """Reject settings that the closed-set and open-set settings do not support."""
    if settings.setting not in UNSEEN_SETTINGS:
        return
    if settings.partition != "metis":
        raise ConfigError(
            f'setting = "{settings.setting}" partitions the graph among the clients and a '
            f'new one with METIS: use partition = "metis", got "{settings.partition}".'
        )
    _reject_sparsity(
        settings,
        f'the graph of a client, but setting = "{settings.setting}" also scores nodes '
        "outside it",
    )


def _check_few_shot(settings: GeneralSettings) -> None:
    """Reject settings that the few-shot setting does not support."""
    if settings.setting != "few-shot":
        return
    if settings.shots > MAX_SHOTS:
        raise ConfigError(
            "A client keeps the classes with more than 25 nodes. Of these, 15 are test "
            "nodes, which leaves at least 11 for training: shots must be at most "
            f"{MAX_SHOTS}, got {settings.shots}."
        )
    if settings.split != "default":
        raise ConfigError(
            'setting = "few-shot" draws the training nodes and 15 test nodes per class: '
            f'split = "{settings.split}" is not possible. Use split = "default".'
        )
    if settings.label_sparsity:
        raise ConfigError(
            'label-sparsity removes training nodes, but setting = "few-shot" has the same '
            "number in every class: use label-sparsity = 0 and fewer shots, got "
            f"{settings.label_sparsity}."
        )
