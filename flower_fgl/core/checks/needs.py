"""What settings need of the method: one table for the checks and for the documentation."""

import difflib
import os
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import REINSTALL, known_names, refusal
from flower_fgl.core.options import fields_by_key, kebab, nearest, removed_settings
from flower_fgl.core.settings import (
    ALL_TARGETS,
    DATASETS,
    TARGETS,
    UNSUPPORTED,
    GeneralSettings,
    SyntheticSettings,
    has_targets,
    is_file,
)
from flower_fgl.core.targets import EDGE, LABELS, LINK

__all__ = ["NEEDS", "Need", "able_methods", "check_names", "check_needs", "when"]


def check_names(
    general: Mapping[str, Any],
    tables: Mapping[str, Any],
    methods: Mapping[str, Any],
) -> None:
    """Reject an unknown method, dataset, table or key, before anything else is parsed."""
    method = str(general.get("method", GeneralSettings.method))
    if method not in methods:
        if reason := refusal("methods", method):
            raise ConfigError(reason)
        raise ConfigError(
            f'Unknown method "{method}". {nearest(method, methods)} {REINSTALL}'
        )
    dataset = str(general.get("dataset", GeneralSettings.dataset))
    if dataset in UNSUPPORTED:
        raise ConfigError(
            f'The dataset "{dataset}" is not supported: {UNSUPPORTED[dataset]}. The '
            "methods here predict one class of each node or graph. Choose a dataset that "
            "flower-fgl datasets lists."
        )
    datasets = {*DATASETS, *known_names("datasets")}
    is_known = dataset in datasets or dataset.startswith(("tu:", "twitch:"))
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
            + f". {REINSTALL}"
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
    key: str, table: str, names: Mapping[str, Set[str]], common: Set[str], method: str
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


def when(key: str, *values: str) -> tuple[str, Callable[[Any], bool]]:
    """Return the condition that a setting has one of some values: its text, and itself."""
    words = " or ".join(f'"{value}"' for value in values)
    name = key.replace("-", "_")
    return f"{key} = {words}", lambda settings: getattr(settings, name) in values


class Need(NamedTuple):
    """One use of a setting, and the methods that it works with."""

    setting: str  # with its value, as the documentation shows it
    is_used: Callable[[GeneralSettings], Any]
    has: Callable[[Any], Any]  # whether the row of a method has what the setting needs
    lacks: str  # what other methods do; follows their name
    can: str = ""  # verb before the list of able methods; empty: the list is of no use
    remedy: str = ""  # what to do besides choosing an able method; may hold {example}
    demand: str = ""  # else "SETTING is not possible"; {rounds} is the run's value

    def error(self, settings: GeneralSettings, methods: Mapping[str, Any]) -> str:
        """Return the error for a method that lacks what the setting needs."""
        values = vars(settings)
        if settings.dataset in TARGETS:
            values = values | {"example": TARGETS[settings.dataset].example}
        able = ", ".join(able_methods(self, methods))
        demand = self.demand or f"{self.setting} is not possible"
        parts = [
            f"{settings.method} {self.lacks}: {demand.format(**values)}.",
            f"These methods {self.can}: {able}." if self.can else "",
            self.remedy.format(**values),
        ]
        return " ".join(filter(None, parts))


def _learns_all(settings: GeneralSettings) -> bool:
    """Return whether a run learns all labels of a dataset with several."""
    return settings.target == ALL_TARGETS and has_targets(settings)


NEEDS = (
    Need(
        f'target = "{ALL_TARGETS}"',
        _learns_all,
        lambda method: method.multi_label,
        "predicts one class of each item",
        can="predict several labels",
        remedy='Choose one target, e.g. target = "{example}".',
    ),
    Need(
        'target-kind = "labels"',
        lambda s: s.target_kind == LABELS and not _learns_all(s),
        lambda method: method.multi_label,
        "predicts one class of each item",
        can="predict several labels",
    ),
    Need(
        'target-kind = "numbers"',
        lambda s: s.predicts_numbers,
        lambda method: method.numbers,
        "learns classes, and cannot predict numbers",
        can="can",
    ),
    Need(
        *when("evaluate", "mixed"),
        lambda method: method.sends_mixtures,
        "does not mix a model for each client",
        can="do",
        remedy='Or use evaluate = "local".',
    ),
    Need(
        *when("evaluate", "global", "both"),
        lambda method: method.has_global_model,
        "has no global model",
        can="have one",
        remedy='Or use evaluate = "local".',
        demand='evaluate = "{evaluate}" is not possible',
    ),
    Need(
        *when("calibration", "shared"),
        lambda method: method.has_global_model,
        "has no global model",
        can="have one",
        remedy='Or use calibration = "owner".',
    ),
    Need(
        'model = "gcn,gin"',
        lambda s: "," in s.model,
        lambda method: method.mixes_models,
        "cannot average different backbones",
        can="do not average them",
        remedy="Or give one backbone.",
        demand='model = "{model}" is not possible',
    ),
    Need(
        "rounds",
        lambda s: s.rounds > 1,
        lambda method: not method.is_one_shot,
        "is one-shot (one upload, one download)",
        remedy="Set rounds = 1, or remove it.",
        demand="rounds must be 1, got {rounds}",
    ),
    Need(
        "eval-policy",
        lambda s: s.eval_policy != "stale",
        lambda method: not method.is_one_shot,
        "samples all clients in its single round",
        demand='use eval-policy = "stale", or remove it',
    ),
    Need(
        'model = "gine", edge-direction',
        lambda s: s.reads_messages and not s.reads_types,
        lambda method: method.reads_messages,
        "does not pass messages along edges with direction or features",
        can="do",
        demand='model = "{model}" with edge-direction = "{edge_direction}" is not possible',
    ),
    Need(
        'model = "rgcn" and others of typed graphs',
        lambda s: s.reads_types,
        lambda method: method.reads_messages,
        "does not read kinds of nodes and relations",
        can="do",
        demand='model = "{model}" is not possible',
    ),
    Need(
        "num-neighbors",
        lambda s: s.num_neighbors,
        lambda method: method.samples_neighbors,
        "has its own training steps, which do not read num-neighbors",
        can="read it",
        demand="remove it",
    ),
    Need(
        "batch-size, check-every",
        lambda s: s.batch_size or s.check_every,
        lambda method: method.takes_batches,
        "trains on all training nodes of a client at once and keeps the last weights",
        demand="batch-size and check-every must be 0, got {batch_size} and {check_every}",
    ),
    Need(
        "check-every",
        lambda s: s.check_every,
        lambda method: not method.counts_steps,
        "divides by the number of steps that led to a client's weights, and check-every "
        "keeps those of an earlier step",
        demand="check-every must be 0, got {check_every}",
    ),
    Need(
        "check-every",
        lambda s: s.check_every,
        lambda method: not method.sends_last_steps,
        "uploads what the last steps of training predicted, and check-every keeps the "
        "weights of an earlier step",
        demand="check-every must be 0, got {check_every}",
    ),
    Need(
        "batch-size",
        lambda s: s.batch_size,
        lambda method: not method.is_one_shot,
        "trains on each graph as a whole",
        demand="batch-size must be 0, got {batch_size}",
    ),
    Need(
        "upload-clip",
        lambda s: s.upload_clip,
        lambda method: method.uploads,
        "has no uploads to clip or to add noise to",
        demand="remove upload-clip and upload-noise",
    ),
    Need(
        "initial-model",
        lambda s: s.initial_model,
        lambda method: method.robust and method.has_global_model,
        "does not start from the weights of one model",
        can="do",
    ),
    Need(
        *when("feature-align", "project"),
        lambda method: method.keeps_first_layer,
        "cannot leave the first layer of each owner local",
        can="can",
        remedy='If all owners mean the same, use feature-align = "name".',
    ),
    Need(
        'schema-align = "name" or "private"',
        lambda s: s.schema_align != "same",
        lambda method: method.shares_parts,
        "needs the same weights at all clients",
        can="do not",
        demand='schema-align = "{schema_align}" is not possible',
    ),
    Need(
        "node-embedding = true",
        lambda s: s.node_embedding,
        lambda method: method.shares_parts,
        "needs the same weights at all clients",
        can="do not",
        demand="node-embedding = true is not possible",
    ),
    Need(
        'class-align = "local"',
        lambda s: s.has_local_heads,
        lambda method: method.keeps_head,
        "cannot leave the head of each owner local",
        can="can",
        remedy='If all owners mean the same, use class-align = "name".',
    ),
    Need(
        *when("setting", "graph"),
        lambda method: method.graphs,
        "classifies nodes only",
        can="classify graphs",
    ),
    Need(
        *when("setting", LINK),
        lambda method: method.predicts_links,
        "cannot predict links",
        can="can",
    ),
    Need(
        *when("setting", EDGE),
        lambda method: method.predicts_links,
        "cannot classify edges",
        can="can",
    ),
    Need(
        *when("class-weights", "balanced"),
        lambda method: method.weighs_classes,
        "does not read class-weights",
        can="weigh classes",
    ),
    Need(
        "setting",
        lambda s: s.setting not in ("transductive", "few-shot"),
        lambda method: not method.needs_cross_edges,
        "exchanges sums over the edges between clients' training graphs",
        demand='it needs setting = "transductive" or "few-shot", got "{setting}"',
    ),
    Need(
        "feature-norm",
        lambda s: s.feature_norm == "columns",
        lambda method: not method.needs_cross_edges,
        'adds up features of different clients, which feature-norm = "columns" scales '
        "differently on each",
        demand='use "none" or "rows"',
    ),
    Need(
        "secure-aggregation = true",
        lambda s: s.secure_aggregation,
        lambda method: method.additive,
        "needs more than the sum of its uploads",
        can="support it",
    ),
    Need(
        'upload-noise-model = "distributed"',
        lambda s: s.secure_aggregation and s.upload_noise_model == "distributed",
        lambda method: method.additive and method.sums_scaled_uploads,
        "sums other numbers than those that upload-clip bounds",
        can="sum those",
        remedy='Or use upload-noise-model = "local".',
    ),
    Need(
        "min-clients",
        lambda s: s.min_clients,
        lambda method: method.takes_late_clients,
        "needs all clients before round 1",
        can="let clients join later",
        demand="min-clients = {min_clients} is not possible",
    ),
    Need(
        "server-optimizer",
        lambda s: s.server_optimizer != "none",
        lambda method: method.robust,
        "does more with its uploads than averaging weights",
        can="support it",
        demand='server-optimizer = "{server_optimizer}" is not possible',
    ),
    Need(
        "aggregation",
        lambda s: s.aggregation != "mean",
        lambda method: method.robust,
        "does more with its uploads than averaging weights",
        can="support it",
        demand='aggregation = "{aggregation}" is not possible',
    ),
)
"""All needs; the first one that a run does not meet is its error."""


def able_methods(need: Need, methods: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of the methods that have what a setting needs."""
    return sorted(name for name, method in methods.items() if need.has(method))


def check_needs(
    settings: GeneralSettings, method: Any, methods: Mapping[str, Any]
) -> None:
    """Reject the first setting that needs what the method lacks."""
    for need in NEEDS:
        if need.is_used(settings) and not need.has(method):
            raise ConfigError(need.error(settings, methods))
