"""``METHODS``, the table of all methods, and the parser of their settings."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from flower_fgl.core import options
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError
from flower_fgl.core.extensions import Table
from flower_fgl.core.held_kind import with_held_kind
from flower_fgl.core.options import Scalar
from flower_fgl.methods.method import Method

__all__ = ["METHODS", "drop_removed", "parse_config"]


def _collect() -> dict[str, Method]:
    """Collect the ``METHOD`` of every module in this package, by name."""
    package = __name__.rpartition(".")[0]
    folder = list(import_module(package).__path__)
    modules = (
        import_module(f"{package}.{found.name}")
        for found in iter_modules(folder)
        if f"{package}.{found.name}" != __name__
    )
    rows = [module.METHOD for module in modules if hasattr(module, "METHOD")]
    return {row.name: row for row in sorted(rows, key=lambda row: row.name)}


def _read(name: str, row: object) -> Method:
    """Check a row of another package."""
    if not isinstance(row, Method):
        raise ConfigError(
            f"expected a flower_fgl.methods.Method, got {type(row).__name__}"
        )
    if row.name != name:
        raise ConfigError(f'the Method has another name, "{row.name}"')
    return row


METHODS: Table[Method] = Table("methods", _collect(), _read)
"""All methods by name: ours sorted, then those of other packages."""


def parse_config(values: Mapping[str, Scalar]) -> RunConfig:
    """Parse a flat run config and check it with all methods, see ``RunConfig.parse``.

    ``target-kind = "auto"`` becomes the kind that the graph files of the run hold, unless
    these are classes.
    """
    known = with_held_kind(values)
    config = RunConfig.parse(known, METHODS)
    if known is values:
        return config
    return replace(config, sources={**config.sources, "target-kind": "data set"})


def drop_removed(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Leave out the former settings of all methods from a flat run config.

    Raises a ConfigError if a removed key has another value than its fixed one.
    """
    kept = {}
    for key, value in values.items():
        table, _, name = key.partition(".")
        settings = METHODS[table].settings if table in METHODS else None
        if options.drop_removed(settings, {name: value}, prefix=table):
            kept[key] = value
    return kept
