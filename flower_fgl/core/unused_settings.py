"""Rejection of settings that have no effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import removed_settings
from flower_fgl.core.settings_validation import UNSEEN_SETTINGS

__all__ = ["reject_unused_settings", "unused_settings"]

Rule = tuple[str, Callable[[RunConfig], Any]]

_SECURE: Rule = (
    "secure-aggregation = true",
    lambda config: config.secure_aggregation,
)

_PARTITIONED: Rule = (
    "a dataset that is partitioned, not owners",
    lambda config: not config.owners,
)


def _aggregation(rule: str) -> Rule:
    """Return the condition that ``aggregation`` is a rule."""
    return f'aggregation = "{rule}"', lambda config: config.aggregation == rule


NEEDED: Mapping[str, Rule] = {
    "partition": _PARTITIONED,
    "dataset": _PARTITIONED,
    "dirichlet-alpha": (
        'partition = "dirichlet"',
        lambda config: config.partition == "dirichlet",
    ),
    "expansion-hops": (
        'setting = "closed-set" or "open-set"',
        lambda config: config.setting in UNSEEN_SETTINGS,
    ),
    "shots": ('setting = "few-shot"', lambda config: config.setting == "few-shot"),
    "round-patience": ("rounds above 1", lambda config: config.rounds > 1),
    "patience": ("check-every above 0", lambda config: config.check_every),
    "final-local-epochs": (
        'eval-policy = "refresh" or "refresh-all"',
        lambda config: config.eval_policy != "stale",
    ),
    "trimmed-share": _aggregation("trimmed-mean"),
    "krum-attackers": _aggregation("krum"),
    "krum-keep": _aggregation("krum"),
    "norm-bound": _aggregation("norm-clip"),
    "upload-delta": ("upload-noise above 0", lambda config: config.upload_noise),
    "upload-noise-model": ("upload-noise above 0", lambda config: config.upload_noise),
    "secure-threshold": _SECURE,
    "secure-fraction-bits": _SECURE,
}
"""Settings that depend on another one: the condition as text and as a function."""


def unused_settings(keys: Iterable[str], config: RunConfig) -> list[str]:
    """Return those of the given settings that have no effect in one run.

    Parameters
    ----------
    keys : iterable of str
        Settings that were given.
    config : RunConfig
        Configuration of the run.
    """
    return [key for key in keys if _why_unused(key, [config])]


def reject_unused_settings(keys: Iterable[str], configs: Collection[RunConfig]) -> None:
    """Reject a setting that has no effect in any of the runs.

    Parameters
    ----------
    keys : iterable of str
        Settings that the user gave.
    configs : collection of RunConfig
        Configurations of all runs.

    Raises
    ------
    ConfigError
        Naming the unused key and the setting it needs, or a former setting.
    """
    for key in keys:
        if reason := _why_unused(key, configs):
            raise ConfigError(reason)
        table, _, name = key.partition(".")
        for config in configs:
            removed = removed_settings(type(config.method_config))
            if table == config.method and name in removed:
                raise ConfigError(
                    f"{key} is no longer a setting: its value is always "
                    f"{removed[name]!r}. Remove it."
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
    return ""
