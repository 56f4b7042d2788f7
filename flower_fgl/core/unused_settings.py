"""Rejection of settings that have no effect."""

import difflib
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from flower_fgl.core.calibration import SCALED
from flower_fgl.core.checks.needs import when
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.model_spec import DIRECTED, TYPED, read_model, split_models
from flower_fgl.core.options import nearest, removed_settings
from flower_fgl.core.settings import TARGETS, UNSEEN_SETTINGS, has_targets
from flower_fgl.core.targets import CLASSES, NUMBERS

__all__ = ["DATA_SETTINGS", "OWNER_SETTINGS", "check_app_table"]
__all__ += ["reject_unread_settings", "reject_unused_settings", "unused_settings"]

Rule = tuple[str, Callable[[RunConfig], Any]]


def _has_validation(split: str) -> bool:
    """Return whether the setting ``split`` gives validation a share."""
    shares = split.split("/")
    return len(shares) == 1 or (len(shares) > 2 and shares[1].strip(" 0.") != "")


def _reads(models: Collection[str]) -> Callable[[RunConfig], Any]:
    """Return the condition that a backbone is among some models."""
    return lambda c: any(read_model(m).name in models for m in split_models(c.model))


_SECURE: Rule = ("secure-aggregation = true", lambda c: c.secure_aggregation)
_PARTITIONED: Rule = (
    "a dataset that is partitioned, not owners",
    lambda config: not config.owners,
)
_NUMBERS: Rule = ('target-kind = "numbers"', lambda c: c.predicts_numbers)
_SHARED: Rule = (
    'target-kind = "numbers" and target-scale = "shared"',
    lambda config: config.predicts_numbers and config.target_scale == "shared",
)
_NOISE: Rule = ("upload-noise above 0", lambda config: config.upload_noise)
_TYPED: Rule = (f"a model among {', '.join(TYPED)}", _reads(TYPED))

NEEDED: Mapping[str, Rule] = {
    "partition": _PARTITIONED,
    "dataset": _PARTITIONED,
    "target": (
        f"a dataset with several labels ({', '.join(TARGETS)}) whose classes are read, or "
        'target-kind = "numbers"',
        lambda config: has_targets(config) or config.predicts == NUMBERS,
    ),
    "dirichlet-alpha": when("partition", "dirichlet"),
    "expansion-hops": when("setting", *UNSEEN_SETTINGS),
    "shots": when("setting", "few-shot"),
    "link-decoder": when("setting", "link"),
    "link-features": when("setting", "link"),
    "link-k": when("setting", "link"),
    "time-cuts": when("setting", "edge"),
    "loss": _NUMBERS,
    "huber-delta": when("loss", "huber"),
    "target-weight": _NUMBERS,
    "target-scale": _NUMBERS,
    "target-mean": when("target-scale", "given"),
    "target-std": when("target-scale", "given"),
    "share-target-statistics": _SHARED,
    "min-target-count": _SHARED,
    "graph-features": when("setting", "graph"),
    "readout": when("setting", "graph"),
    "max-degree": (
        'setting = "graph" and graph-features = "degree"',
        lambda c: c.classifies_graphs and c.graph_features == "degree",
    ),
    "edge-direction": (f"a model among {', '.join(DIRECTED)}", _reads(DIRECTED)),
    "schema-align": _TYPED,
    "target-relation": (
        f'a model among {", ".join(TYPED)}, and setting = "link" or "edge"',
        lambda config: config.has_pairs and _reads(TYPED)(config),
    ),
    "num-bases": ('model = "rgcn" or "rgcn-mean"', _reads(TYPED[:2])),
    "node-embedding": _TYPED,
    "reverse-relations": _TYPED,
    "precision-k": ("positive-class", lambda config: config.positive_class),
    "round-patience": (
        "rounds above 1, and validation nodes in split",
        lambda config: config.rounds > 1 and _has_validation(config.split),
    ),
    "patience": ("check-every above 0", lambda config: config.check_every),
    "coverage": when("calibration", "owner", "shared"),
    "calibrator": (
        'calibration = "owner", and no numbers to predict',
        lambda config: config.calibration == "owner" and config.predicts != NUMBERS,
    ),
    "conformal-score": (
        "calibration of classes; scaled: of numbers",
        lambda config: (
            config.calibration != "none"
            and config.predicts
            == (NUMBERS if config.conformal_score == SCALED else CLASSES)
        ),
    ),
    "final-local-epochs": when("eval-policy", "refresh", "refresh-all"),
    "trimmed-share": when("aggregation", "trimmed-mean"),
    "krum-attackers": when("aggregation", "krum"),
    "krum-keep": when("aggregation", "krum"),
    "norm-bound": when("aggregation", "norm-clip"),
    "server-lr": when("server-optimizer", "momentum", "adam", "yogi", "adagrad"),
    "server-momentum": when("server-optimizer", "momentum", "adam", "yogi"),
    "server-beta2": when("server-optimizer", "adam", "yogi"),
    "server-tau": when("server-optimizer", "adam", "yogi", "adagrad"),
    "server-moments": when("server-optimizer", "adam", "yogi", "adagrad"),
    "upload-delta": _NOISE,
    "upload-noise-model": _NOISE,
    "secure-threshold": _SECURE,
    "secure-fraction-bits": _SECURE,
}
"""Settings that depend on another one: the condition as text and as a function."""
_FILE_SETTINGS = {
    "target",
    "target-kind",
    "setting",
    "model",
    "edge-direction",
    "types",
    "target-node",
    "target-relation",
    "schema-align",
    "time-cuts",
    "shots",
    "split",
    "split-by",
    "graph-features",
    "max-degree",
    "partition-seed",
    "feature-norm",
    "feature-sparsity",
    "edge-sparsity",
    "label-sparsity",
}
DATA_SETTINGS = frozenset(_FILE_SETTINGS) | {
    "dataset",
    "clients",
    "data-dir",
    "partition",
    "dirichlet-alpha",
    "expansion-hops",
    "owners",
    "feature-align",
    "class-align",
}
"""Settings that the clients' graphs depend on, besides the table ``synthetic``."""
OWNER_SETTINGS = frozenset(_FILE_SETTINGS) | {
    "method",
    "share-class-counts",
    "share-target-statistics",
    "share-feature-names",
    "min-class-count",
    "min-target-count",
    "target-scale",
    "target-mean",
    "target-std",
    "upload-clip",
    "upload-noise",
    "upload-noise-model",
    "upload-delta",
    "secure-aggregation",
    "secure-threshold",
    "weight-by",
}
"""Settings that an owner's graph, its description and its protection depend on."""


def check_app_table(folders: Iterable[str]) -> None:
    """Reject a misspelt ``[tool.flwr.app.config]``, which Flower ignores in silence.

    The first of the ``folders`` (``sys.path``) whose ``pyproject.toml`` describes a
    Flower app counts.
    """
    for folder in folders:
        try:
            text = (Path(folder) / "pyproject.toml").read_text("utf-8")
            app = dict(tomllib.loads(text)["tool"]["flwr"]["app"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for name, entries in app.items():
            is_ours = isinstance(entries, Mapping) and name != "config"
            if is_ours and difflib.get_close_matches(name, ["config"], cutoff=0.6):
                raise ConfigError(
                    f"Flower ignores the table [tool.flwr.app.{name}] of the app's "
                    "pyproject.toml. Did you mean [tool.flwr.app.config]?"
                )
        return


def unused_settings(keys: Iterable[str], config: RunConfig) -> list[str]:
    """Return those of the given settings that have no effect in one run."""
    return [key for key in keys if _why_unused(key, [config])]


def reject_unused_settings(
    keys: Iterable[str], configs: Collection[RunConfig], *, where: str = ""
) -> None:
    """Reject a setting that the user gave and that has no effect in any of the runs.

    ``where`` names the file of the settings, which may hold former ones.
    """
    for key in keys:
        if reason := _why_unused(key, configs):
            raise ConfigError(where + reason)
        if where:
            continue
        table, _, name = key.partition(".")
        for config in configs:
            removed = removed_settings(type(config.method_config))
            if table == config.method and name in removed:
                raise ConfigError(
                    f"{key} is no longer a setting: its value is always "
                    f"{removed[name]!r}. Remove it."
                )


def reject_unread_settings(
    keys: Iterable[str], read: Collection[str], command: str
) -> None:
    """Reject a setting that is not in ``read`` for a command which trains nothing."""
    for key in keys:
        if key.partition(".")[0] not in read:
            raise ConfigError(
                f"{key} has no effect in flower-fgl {command}, which trains nothing: "
                f"remove it. {nearest('', read).replace('Known', 'Settings that it reads')}"
            )


def _why_unused(key: str, configs: Collection[RunConfig]) -> str:
    """Return why a setting has no effect in any of the runs; empty if it has one."""
    table, dot, _ = key.partition(".")
    if dot:
        kind = "dataset" if table == "synthetic" else "method"
        name = "data_name" if kind == "dataset" else kind
        found = sorted({str(getattr(config, name)) for config in configs})
        if any(
            table == config.method or (table == config.dataset and not config.owners)
            for config in configs
        ):
            return ""
        return (
            f"{key} belongs to {kind} = {table} and has no effect with {kind} = "
            f"{', '.join(found)}. Remove it, or choose {kind} = {table}."
        )
    if key in NEEDED and not any(map(NEEDED[key][1], configs)):
        need = NEEDED[key][0]
        return f"{key} has no effect: it needs {need}. Set that too, or remove {key}."
    if all(key in config.unread for config in configs):
        names = ", ".join(sorted({config.method for config in configs}))
        return f"{key} has no effect with method = {names}: remove it."
    return ""
