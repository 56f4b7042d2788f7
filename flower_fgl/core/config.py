"""``RunConfig``: Flower's flat run config as checked, frozen dataclasses.

Each setting is declared once, as a field made by :func:`option`; ``pyproject.toml`` and
the generated app folder repeat its default (a test compares them). Settings with
``auto=True`` are ``"auto"`` there: the method's default (its paper's value), else that of
the dataset or the task, else the general one. :attr:`RunConfig.sources` records which.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

from flower_fgl.core.checks.needs import check_names, check_needs
from flower_fgl.core.checks.rules import check_data, check_training
from flower_fgl.core.model_spec import (
    EDGE_READERS,
    message_direction,
    read_model,
    split_models,
)
from flower_fgl.core.options import AUTO, Scalar, fields_by_key, kebab, parse_settings
from flower_fgl.core.schema import Schema, TypedModel
from flower_fgl.core.settings import (
    ALL_TARGETS,
    UNSEEN_SETTINGS,
    GeneralSettings,
    SyntheticSettings,
    has_targets,
    is_file,
    main_score_of,
    owners_name,
)
from flower_fgl.core.targets import EDGE, LINK

__all__ = ["RunConfig", "S", "pyproject_table"]

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    S = TypeVar("S", covariant=True, default=Any)
else:  # a default needs Python 3.13
    from typing import TypeVar

    S = TypeVar("S")
"""Settings class of a method; a plain ``RunConfig`` has those of any method."""

INSTEAD: Mapping[str, frozenset[str]] = {
    "participation": frozenset({"participants"}),
    "participants": frozenset({"participation"}),
}
"""Settings that, if the user gives them, disable a method's default of another one."""
DATASET_DEFAULTS: Mapping[str, Mapping[str, Scalar]] = {"synthetic": {"rounds": 20}}
SETTING_DEFAULTS: Mapping[str, Mapping[str, Scalar]] = {LINK: {"weight-decay": 0.0}}
"""Defaults of a task. Weight decay keeps embeddings, and their dot products, near 0."""


@dataclass(frozen=True)
class RunConfig(GeneralSettings, Generic[S]):
    """All settings of one run, ``RunConfig[FedPGSettings]`` of one with FedPG."""

    synthetic: SyntheticSettings = field(default_factory=SyntheticSettings)
    method_config: S = None  # type: ignore[assignment]
    """Settings of the method (its settings dataclass), ``None`` if it has none."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Origin of each value: ``user``, ``method``, ``data set``, ``setting``, or else
    ``default``."""
    unread: tuple[str, ...] = ()  # general settings without effect on the method
    needs_cross_edges: bool = False
    """Whether the method needs each client's edges to nodes of other clients."""
    main_score: str = "accuracy"
    """Score by which rounds and settings are compared, ``accuracy``, ``auroc`` or ``rmse``;
    it follows from the dataset, the setting and the kind of target. See
    :func:`flower_fgl.core.targets.headline`."""

    @property
    def classifies_graphs(self) -> bool:
        """Whether the run classifies whole graphs instead of nodes."""
        return self.setting == "graph"

    @property
    def graph_readout(self) -> bool | str:
        """Argument ``readout`` of the run's backbones."""
        return self.classifies_graphs and self.readout

    @property
    def has_unseen(self) -> bool:
        """Whether the run also scores nodes that clients do not have in training."""
        return self.setting in UNSEEN_SETTINGS

    @property
    def predicts_links(self) -> bool:
        """Whether the run predicts edges instead of classes."""
        return self.setting == LINK

    @property
    def classifies_edges(self) -> bool:
        """Whether the run classifies edges instead of nodes."""
        return self.setting == EDGE

    def decoder(self, num_outputs: int, num_edge_features: int) -> str:
        """Return the decoder of pairs of nodes; empty if the run has no pairs.

        :func:`flower_fgl.nn.link.make_decoder` reads it. ``num_outputs`` is the number
        C of classes of the edges, ``num_edge_features`` the width a of their features.
        """
        if self.classifies_edges:
            return f"edge:{num_outputs}x{num_edge_features}"
        return self.link_decoder if self.predicts_links else ""

    def messages(
        self,
        model: str,
        num_edge_features: int,
        schema: Schema | None = None,
        num_nodes: int = 0,
    ) -> str:
        """Return direction and width of the messages of a backbone, or its schema, as text.

        Empty for a backbone that reads undirected edges without features. ``num_nodes``
        counts the nodes that have a learned vector with ``node-embedding``.
        """
        if schema is not None:
            number = num_nodes if self.node_embedding else 0
            return TypedModel(
                schema, self.num_bases, self.reverse_relations, number
            ).to_text()
        direction = message_direction(self, model)
        return f"{direction}:{num_edge_features}" if direction else ""

    @property
    def reads_edge_features(self) -> bool:
        """Whether the messages of a backbone of the run contain features of edges."""
        return any(read_model(m).name in EDGE_READERS for m in split_models(self.model))

    @property
    def keeps_layers(self) -> bool:
        """Whether the first layer or the head of each owner stays local."""
        return self.feature_align == "project" or self.has_local_heads

    @property
    def num_nodes(self) -> int:
        """Number of Flower's nodes that host the clients, 0 if ``clients`` is unset."""
        return -(-self.clients // self.clients_per_node)

    @property
    def data_name(self) -> str:
        """Name of the data in run folders and tables: the dataset, or the owners."""
        return owners_name(self.owners) if self.owners else self.dataset

    def scale_of_features(self, *, is_dense: bool) -> str:
        """Resolve ``feature-norm`` to ``none``, ``rows`` or ``columns``.

        The default is ``rows`` if unseen nodes are scored (FedLoG Appendix A.12),
        ``columns`` in the inductive setting with dense features (O-pFGL's published code;
        shifting sparse ones would fill them), and ``none`` otherwise.
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
    ) -> RunConfig:
        """Parse and check Flower's flat run config; missing keys take their default.

        ``values`` have flat keys such as ``rounds``, ``fedprox.mu``, ``synthetic.nodes``;
        ``methods`` is the table of methods. Raises a ConfigError for an unknown name, a
        wrong type, a value out of range, or settings that cannot be combined.
        """
        general = {k: v for k, v in values.items() if "." not in k}
        tables: dict[str, dict[str, Scalar]] = {}
        for key in (key for key in values if "." in key):
            table, _, name = key.partition(".")
            tables.setdefault(table, {})[name] = values[key]
        check_names(general, tables, methods)
        if is_file(str(general.get("dataset", ""))):
            general["dataset"] = os.path.expanduser(str(general["dataset"]))
        chosen = str(general.get("method", GeneralSettings.method))
        method = methods[chosen]
        general, sources = _fill(general, method.defaults)
        settings = {
            name: parse_settings(
                methods[name].settings, tables.get(name, {}), prefix=name
            )
            for name in (tables.keys() & methods.keys()) | {chosen}
            if methods[name].settings is not None
        }
        method_config: Any = settings.get(chosen)
        read = parse_settings(GeneralSettings, general)
        check_data(read)
        check_needs(read, method, methods)
        check_training(read, method)
        is_one = has_targets(read) and read.target != ALL_TARGETS
        if not read.positive_class and is_one and read.setting != LINK:
            read = replace(read, positive_class=read.target)
            sources["positive-class"] = "data set"
        synthetic = parse_settings(
            SyntheticSettings, tables.get("synthetic", {}), prefix="synthetic"
        )
        for table, own in (("synthetic", synthetic), (chosen, method_config)):
            for f in fields(own) if own is not None else ():  # without other defaults
                is_default = getattr(own, f.name) == f.default
                sources[f"{table}.{kebab(f.name)}"] = (
                    "default" if is_default else "user"
                )
        return cls(
            **vars(read),
            synthetic=synthetic,
            method_config=method_config,
            sources=sources,
            unread=method.unread,
            needs_cross_edges=method.needs_cross_edges,
            main_score=main_score_of(
                read.dataset,
                read.owners,
                read.setting,
                read.positive_class,
                read.predicts,
            ),
        )

    def flat(self) -> dict[str, Scalar]:
        """Return the flat run config that parses to this configuration."""
        out: dict[str, Scalar] = {
            kebab(f.name): getattr(self, f.name) for f in fields(GeneralSettings)
        }
        for table, settings in (
            ("synthetic", self.synthetic),
            (self.method, self.method_config),
        ):
            if is_dataclass(settings):
                out |= {
                    f"{table}.{kebab(f.name)}": getattr(settings, f.name)
                    for f in fields(settings)
                }
        return out

    def method_settings(self) -> dict[str, Scalar]:
        """Return the method's settings by kebab-case key, without the method's name."""
        start = f"{self.method}."
        flat = self.flat().items()
        return {k.removeprefix(start): v for k, v in flat if k.startswith(start)}

    def general_defaults(self) -> dict[str, Scalar]:
        """Return the general defaults, which a run made before a setting existed used."""
        own: Any = self.method_config
        return RunConfig(method=self.method, method_config=own and type(own)()).flat()


def _fill(
    general: Mapping[str, Scalar], method_defaults: Mapping[str, Scalar]
) -> tuple[dict[str, Scalar], dict[str, str]]:
    """Resolve ``"auto"``; also return the origin of each general value."""
    has_owners = bool(general.get("owners", GeneralSettings.owners))
    dataset = "" if has_owners else str(general.get("dataset", GeneralSettings.dataset))
    stated = {key for key, value in general.items() if value != AUTO}
    method_defaults = {
        key: value
        for key, value in method_defaults.items()
        if not stated & INSTEAD.get(key, frozenset())
    }
    layers: list[tuple[str, Mapping[str, Scalar]]] = [
        ("method", method_defaults),
        ("data set", DATASET_DEFAULTS.get(dataset, {})),
        ("setting", SETTING_DEFAULTS.get(str(general.get("setting", "")), {})),
    ]
    if general.get("setting") == "graph" and not has_owners:
        layers += [("setting", {"partition": "uniform"})]
    filled = dict(general)
    sources = {}
    for key, f in fields_by_key(GeneralSettings).items():
        is_auto = f.metadata["auto"]
        given = general.get(key, AUTO if is_auto else f.default)
        if is_auto and given == AUTO:
            general_default: Mapping[str, Any] = {key: f.default}
            known = [*layers, ("default", general_default)]
            found = ((name, row[key]) for name, row in known if key in row)
            sources[key], filled[key] = next(found)
        else:
            is_default = not is_auto and given == f.default
            sources[key] = "default" if is_default else "user"
    return filled, sources


def pyproject_table(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Build ``[tool.flwr.app.config]`` of ``pyproject.toml``, with one table per method."""
    table: dict[str, Any] = {
        key: AUTO if f.metadata["auto"] else f.default
        for key, f in fields_by_key(GeneralSettings).items()
    }
    rows = {name: method.settings for name, method in sorted(methods.items())}
    for name, own in {"synthetic": SyntheticSettings, **rows}.items():
        if own is not None:
            table[name] = {key: f.default for key, f in fields_by_key(own).items()}
    return table
