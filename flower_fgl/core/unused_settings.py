"""Rejection of command-line settings that have no effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import removed_settings
from flower_fgl.core.settings_validation import UNSEEN_SETTINGS

__all__ = ["reject_unused_settings"]

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


def reject_unused_settings(keys: Iterable[str], configs: Collection[RunConfig]) -> None:
    """Reject a command-line key that has no effect in any of the runs.

    Files are not checked: their keys may be meant for some cases or grid values only.

    Parameters
    ----------
    keys : iterable of str
        Settings given on the command line.
    configs : collection of RunConfig
        Configurations of all runs.

    Raises
    ------
    ConfigError
        Naming the unused key and the setting it needs.
    """
    names = {config.method for config in configs} | {
        config.dataset for config in configs if not config.owners
    }
    for key in keys:
        table, dot, name = key.partition(".")
        if dot and table not in names:
            kind = "dataset" if table == "synthetic" else "method"
            key_of = "data_name" if kind == "dataset" else kind
            found = ", ".join(sorted({getattr(config, key_of) for config in configs}))
            raise ConfigError(
                f"{key} belongs to {kind} = {table} and has no effect with {kind} = "
                f"{found}. Remove it, or choose {kind} = {table}."
            )
        for config in configs:
            removed = removed_settings(type(config.method_config))
            if table == config.method and name in removed:
                raise ConfigError(
                    f"{key} is no longer a setting: its value is always "
                    f"{removed[name]!r}. Remove it."
                )
        if key in NEEDED and not any(map(NEEDED[key][1], configs)):
            raise ConfigError(
                f"{key} has no effect: it needs {NEEDED[key][0]}. Set that too, or remove "
                f"{key}."
            )
