"""Checks that methods, datasets, tables and settings exist."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Set
from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import REINSTALL, refusal
from flower_fgl.core.options import fields_by_key, kebab, nearest, removed_settings
from flower_fgl.core.settings import (
    UNSUPPORTED,
    GeneralSettings,
    SyntheticSettings,
    is_file,
)

__all__ = ["check_names"]


def check_names(
    general: Mapping[str, Any],
    tables: Mapping[str, Any],
    methods: Mapping[str, Any],
    datasets: Iterable[str],
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
