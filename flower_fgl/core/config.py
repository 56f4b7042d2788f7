"""Settings: Flower's flat run config to checked, frozen dataclasses.

Flower hands over a flat mapping of strings, numbers and booleans and checks no types.
Each setting is declared once, as a field made by :func:`option`; ``pyproject.toml`` and
the generated app folder repeat its default (a test compares them).

A general setting whose field says ``auto`` may be left to the method: its value in
``pyproject.toml`` is ``"auto"``, which stands for the method's own default (its paper's
value), else for the data set's, else for the general one. Which of them was taken is kept
in :attr:`RunConfig.sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from flower_fgl.core.errors import ConfigError
from flower_fgl.core.options import AUTO, Scalar, kebab, parse_settings
from flower_fgl.core.settings import DATASETS, GeneralSettings, SyntheticSettings
from flower_fgl.core.settings_validation import (
    UNSEEN_SETTINGS,
    check_names,
    check_settings,
)

__all__ = ["RunConfig", "pyproject_table"]

INSTEAD: Mapping[str, frozenset[str]] = {
    "participation": frozenset({"participants"}),
    "participants": frozenset({"participation"}),
}
"""Settings whose own value puts a method's default of another out of force."""
DATASET_DEFAULTS: Mapping[str, Mapping[str, Scalar]] = {"synthetic": {"rounds": 20}}


@dataclass(frozen=True)
class RunConfig(GeneralSettings):
    """Everything one run is told.

    Parameters
    ----------
    synthetic : SyntheticSettings
        Settings of the synthetic data set.
    hyper : object or None
        Settings of the method (its ``config`` dataclass), ``None`` if it has none.
    sources : mapping of str to str
        Where each general value came from: ``user``, ``method``, ``data set`` or
        ``default``.
    """

    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)
    method_config: Any = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def classifies_graphs(self) -> bool:
        """Whether whole graphs are classified instead of nodes."""
        return self.setting == "graph"

    @property
    def has_unseen(self) -> bool:
        """Whether nodes are scored that the client did not have in training."""
        return self.setting in UNSEEN_SETTINGS

    def scale_of_features(self, *, is_dense: bool) -> str:
        """Resolve ``feature-norm = "default"`` to what the setting's paper does.

        Parameters
        ----------
        is_dense : bool
            Whether features are strided; sparse ones would fill up if they were shifted.

        Returns
        -------
        {"none", "rows", "columns"}
            By rows where unseen nodes are scored (FedLoG Appendix A.12), by columns in
            the inductive setting (O-pFGL's published code) if features are dense.
        """
        if self.feature_norm != "default":
            return self.feature_norm
        if self.has_unseen:
            return "rows"
        return "columns" if self.setting == "inductive" and is_dense else "none"

    @classmethod
    def parse(
        cls,
        values: Mapping[str, Scalar],
        methods: Mapping[str, Any],
        *,
        datasets: Iterable[str] = DATASETS,
    ) -> RunConfig:
        """Read Flower's flat run config.

        Parameters
        ----------
        values : mapping of str to bool, int, float or str
            Flat keys: ``rounds``, ``fedprox.mu``, ``synthetic.nodes``; missing ones take
            their default.
        methods : mapping of str to Method
            The table of methods, each with ``settings`` (a dataclass or ``None``) and
            ``defaults`` (general settings it brings).
        datasets : iterable of str
            Names of known data sets.

        Returns
        -------
        RunConfig

        Raises
        ------
        ConfigError
            For an unknown method, data set or key, a wrong type or range.
        """
        general = {k: v for k, v in values.items() if "." not in k}
        tables: dict[str, dict[str, Scalar]] = {}
        for key, value in values.items():
            if "." in key:
                table, _, name = key.partition(".")
                tables.setdefault(table, {})[name] = value
        check_names(general, tables, methods, datasets)
        chosen = str(general.get("method", GeneralSettings.method))
        method = methods[chosen]
        general, sources = _fill(general, method.defaults)
        settings = {
            name: parse_settings(entry.settings, tables.get(name, {}), prefix=name)
            for name, entry in methods.items()
            if entry.settings is not None
        }
        _refuse_without_table(general, chosen, method.settings)
        read = parse_settings(GeneralSettings, general)
        check_settings(read, method, methods)
        return cls(
            **vars(read),
            synthetic=parse_settings(
                SyntheticSettings, tables.get("synthetic", {}), prefix="synthetic"
            ),
            method_config=settings.get(chosen),
            sources=sources,
        )

    def flat(self) -> dict[str, Scalar]:
        """Return the flat run config that gives this configuration again."""
        return self._by_key(getattr)

    def method_settings(self) -> dict[str, Scalar]:
        """Return the method's settings by kebab-case key, without its name."""
        start = f"{self.method}."
        flat = self.flat().items()
        return {k.removeprefix(start): v for k, v in flat if k.startswith(start)}

    def general_defaults(self) -> dict[str, Scalar]:
        """Return what a run made before a setting existed had in its place.

        The general defaults, not those of the method or data set.
        """
        return self._by_key(lambda settings, name: getattr(type(settings), name))

    def _by_key(self, value_of: Callable[[Any, str], Scalar]) -> dict[str, Scalar]:
        out: dict[str, Scalar] = {
            kebab(f.name): value_of(self, f.name) for f in fields(GeneralSettings)
        }
        for table, settings in (
            ("synthetic", self.synthetic),
            (self.method, self.method_config),
        ):
            if is_dataclass(settings):
                out |= {
                    f"{table}.{kebab(f.name)}": value_of(settings, f.name)
                    for f in fields(settings)
                }
        return out


def _refuse_without_table(
    general: Mapping[str, Scalar], method: str, settings: Any
) -> None:
    """Refuse a setting of the method's own that was given without its name."""
    known = {kebab(f.name) for f in fields(GeneralSettings)}
    own = {kebab(f.name) for f in fields(settings)} if settings else set()
    for key in general:
        if key in own - known:
            raise ConfigError(
                f'Unknown setting "{key}". Did you mean "{method}.{key}"?'
            )


def _fill(
    general: Mapping[str, Scalar], method_defaults: Mapping[str, Scalar]
) -> tuple[dict[str, Scalar], dict[str, str]]:
    """Resolve ``"auto"`` and say where each general value came from."""
    dataset = str(general.get("dataset", GeneralSettings.dataset))
    stated = {key for key, value in general.items() if value != AUTO}
    method_defaults = {
        key: value
        for key, value in method_defaults.items()
        if not stated & INSTEAD.get(key, frozenset())
    }
    layers = [
        ("method", method_defaults),
        ("data set", DATASET_DEFAULTS.get(dataset, {})),
    ]
    filled = dict(general)
    sources = {}
    for f in fields(GeneralSettings):
        key = kebab(f.name)
        is_auto = f.metadata["auto"]
        given = general.get(key, AUTO if is_auto else f.default)
        if not (is_auto and given == AUTO):
            is_default = not is_auto and given == f.default
            sources[key] = "default" if is_default else "user"
            continue
        for source, defaults in layers:
            if key in defaults:
                filled[key] = defaults[key]
                sources[key] = source
                break
        else:
            filled[key] = getattr(GeneralSettings, f.name)
            sources[key] = "default"
    return filled, sources


def pyproject_table(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Build ``[tool.flwr.app.config]`` as ``pyproject.toml`` must hold it.

    Parameters
    ----------
    methods : mapping of str to Method
        The table of methods.

    Returns
    -------
    dict
        General keys first, then one table for each method with settings of its own.
    """
    table: dict[str, Any] = {
        kebab(f.name): AUTO if f.metadata["auto"] else f.default
        for f in fields(GeneralSettings)
    }
    table["synthetic"] = {kebab(f.name): f.default for f in fields(SyntheticSettings)}
    for name, method in sorted(methods.items()):
        if method.settings is not None:
            table[name] = {kebab(f.name): f.default for f in fields(method.settings)}
    return table
