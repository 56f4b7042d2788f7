"""Explanation of one setting, for ``flower-fgl settings KEY``."""

import difflib
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, get_type_hints

from flower_fgl.core.config import DATASET_DEFAULTS, SETTING_DEFAULTS
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import help_texts, kebab
from flower_fgl.core.settings import GeneralSettings, SyntheticSettings
from flower_fgl.core.unused_settings import NEEDED
from flower_fgl.methods import METHODS

__all__ = ["all_settings", "explain_setting"]

BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def explain_setting(name: str) -> str:
    """Explain settings: ``lr``, ``fedprox.mu``, or ``mu`` of each method that has it."""
    declared = {one[0]: one[1:] for one in all_settings()}
    key = kebab(name)
    found = [key] if key in declared else []
    found = found or [full for full in declared if full.rpartition(".")[2] == key]
    if not found:
        raise ConfigError(_unknown(name, [*declared, *METHODS]))
    return "\n\n".join(_explain(full, *declared[full]) for full in found)


def all_settings() -> Iterator[tuple[str, Field[Any], type, str]]:
    """Yield key, declaration, type and help text of every setting."""
    tables: dict[str, Any] = {"": GeneralSettings, "synthetic.": SyntheticSettings}
    tables |= {f"{name}.": METHODS[name].settings for name in sorted(METHODS)}
    for prefix, cls in tables.items():
        kinds = get_type_hints(cls) if cls else {}
        for field in fields(cls) if cls else ():
            name = field.name
            yield prefix + kebab(name), field, kinds[name], help_texts(cls)[name]


def _unknown(name: str, known: list[str]) -> str:
    """Return the error for an unknown name: the hint, then the names of its table."""
    close = difflib.get_close_matches(kebab(name), known, n=1, cutoff=0.5)
    hint = f' Did you mean "{close[0]}"?' if close else ""
    table = name.partition(".")[0] + "."
    listed = [key for key in known if key.startswith(table)] if "." in name else []
    listed = listed or [key for key in known if "." not in key and key not in METHODS]
    return (
        f'Unknown setting or method "{name}".{hint} Settings: '
        f"{', '.join(sorted(listed))}."
    )


def _explain(key: str, field: Field[Any], kind: type, text: str) -> str:
    table, dot, name = key.rpartition(".")
    facts, default = field.metadata, field.default
    lines = [f"{key}: {text}", f"  value: {_values(facts, kind)}"]
    if key == "partition":
        from flower_fgl.datasets.partition.partition import describe_rules

        lines += [f"    {rule}: {text}" for rule, text in describe_rules().items()]
    lines.append(f"  default: {_show(default)}")
    if facts["auto"]:
        lines[1] += ", or auto for the method's default"
    others = {
        method: row.defaults[key]
        for method, row in METHODS.items()
        if key in row.defaults
    }
    others |= {
        d: values[key]
        for d, values in (*DATASET_DEFAULTS.items(), *SETTING_DEFAULTS.items())
        if key in values
    }
    if others:
        listed = ", ".join(f"{who} {_show(value)}" for who, value in others.items())
        lines[-1] += f"; other defaults: {listed}"
    if key in NEEDED:
        lines.append(f"  has an effect only with {NEEDED[key][0]}")
    if dot:
        kind_of_table = "dataset" if table == "synthetic" else "method"
        lines.append(f"  has an effect only with {kind_of_table} = {table}")
    example = default
    if default == "":
        example = "~/folder" if facts["is_path"] else "TEXT"
    choose = f"--method {table} " if dot and table != "synthetic" else ""
    python = f"{name.replace('-', '_')}={example!r}"
    if dot:
        python = (
            f"{table.replace('-', '_')}={{{name.replace('-', '_')!r}: {example!r}}}"
        )
    if dot and not table.replace("-", "_").isidentifier():
        python = f"**{{{key!r}: {example!r}}}"
    method = f'"{table}", ' if choose else ""
    toml = f'"{example}"' if kind is str else _show(example)
    if choose:
        toml = f'{toml} method="{table}"'
    return "\n".join(
        [
            *lines,
            f"  command line: flower-fgl run {choose}--set {key}={_show(example)}",
            f"  Python: flower_fgl.simulate({method}{python})",
            f"  Flower: flwr run . --run-config '{key}={toml}'",
        ]
    )


def _values(facts: Any, kind: type) -> str:
    """Describe the values that a setting takes."""
    if facts["choices"]:
        return "one of " + ", ".join(facts["choices"])
    bounds = [f"{text} {facts[k]:g}" for k, text in BOUNDS if facts[k] is not None]
    text = KINDS[kind]
    if facts["is_path"]:
        text = "path; ~ is your home folder"
    return ", ".join([text, *bounds])


def _show(value: Any) -> str:
    """Write a value as TOML does, text without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)
