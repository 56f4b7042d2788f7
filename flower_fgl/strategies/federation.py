"""The clients of a run, and the facts that all of them share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from flwr.app import RecordDict

from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import RunError
from flower_fgl.core.schema import Schema
from flower_fgl.core.target_scale import TargetScale, given_scale
from flower_fgl.core.targets import Target
from flower_fgl.protocols.describe import (
    HASHED,
    PRIVATE,
    ClassAgreement,
    Description,
    Rejection,
)
from flower_fgl.protocols.exchanges import AgreedScale
from flower_fgl.runs.model_file import ModelCard

__all__ = ["Federation", "client_lines", "describe_model", "describe_target"]
__all__ += ["node_label"]


@dataclass(frozen=True)
class Federation:
    """The clients of a run, by partition-id, ascending, and Flower's node ids of them.

    ``refused`` are data owners that do not take part; ``turned_away`` are ids of nodes
    that described themselves and are no clients. ``scale`` is that of the numbers to
    predict, if the clients agreed on one. ``schema`` has the kinds and relations of typed
    graphs: with ``schema-align = "same"`` with hashed names, with ``name`` all that some
    client has, with ``private`` none. It is ``None`` for plain graphs.
    """

    clients: Mapping[int, Description]
    nodes: Mapping[int, int]
    refused: tuple[Rejection, ...] = ()
    turned_away: frozenset[int] = frozenset()
    scale: AgreedScale | None = None
    schema: Schema | None = None

    def __post_init__(self) -> None:
        first = next(iter(self.clients.values()), None)
        if first is not None and first.schema and self.schema is None:
            told = [c.told for c in self.clients.values()] if self.has_parts else []
            parts = [one for one in told if one is not None]
            schema = Schema.union(parts) if parts else first.told or Schema("", ())
            object.__setattr__(self, "schema", schema)

    @cached_property
    def has_parts(self) -> bool:
        """Whether clients have typed graphs, each with some of the kinds and relations."""
        text = next((client.schema for client in self.clients.values()), "")
        return text not in ("", PRIVATE) and not text.startswith(HASHED)

    @cached_property
    def partitions(self) -> dict[int, int]:
        """Partition-id of each of Flower's node ids."""
        return {node: pid for pid, node in self.nodes.items()}

    @cached_property
    def trainable(self) -> list[int]:
        """Partition-ids of the clients that have training nodes."""
        return [pid for pid, client in self.clients.items() if client.num_train > 0]

    @cached_property
    def agreements(self) -> dict[int, ClassAgreement]:
        """What every message to a data owner, or of a typed graph's parts, repeats."""
        schema = self.schema.to_text() if self.schema and self.has_parts else ""
        return {
            pid: ClassAgreement(
                pid,
                client.num_partitions,
                client.target.names,
                client.feature_names,
                schema,
            )
            for pid, client in self.clients.items()
            if client.is_owned or schema
        }

    @classmethod
    def of(cls, described: Mapping[int, Description], **more: Any) -> Federation:
        """Build a federation from descriptions by node id, with final numbers."""
        nodes = {client.partition_id: node for node, client in described.items()}
        return cls(
            {pid: described[nodes[pid]] for pid in sorted(nodes)},
            {pid: nodes[pid] for pid in sorted(nodes)},
            **more,
        )

    def joined_by(self, node: int, client: Description) -> Federation:
        """Return the federation with one more client."""
        described = {self.nodes[pid]: old for pid, old in self.clients.items()}
        joined = Federation.of({**described, node: client})
        return replace(self, clients=joined.clients, nodes=joined.nodes)

    def without(self, reasons: Mapping[int, str]) -> Federation:
        """Return the federation without some clients, given with the reasons."""
        refused = [
            Rejection(self.clients[pid].name or f"client {pid}", reason)
            for pid, reason in reasons.items()
        ]
        return replace(
            self,
            clients={p: c for p, c in self.clients.items() if p not in reasons},
            nodes={p: n for p, n in self.nodes.items() if p not in reasons},
            refused=(*self.refused, *refused),
            turned_away=self.turned_away | {self.nodes[pid] for pid in reasons},
        )

    def agreed(self, partition_id: int) -> RecordDict:
        """Return the records with what was agreed, which every message repeats."""
        agreement = self.agreements.get(partition_id)
        content = RecordDict() if agreement is None else agreement.to_record()
        if self.scale is not None:
            content.update(self.scale.to_record())
        return content

    def capacity(self, config: RunConfig) -> int:
        """Return the largest number of clients."""
        return config.clients or self.num_partitions

    def known_scale(self, config: RunConfig) -> TargetScale | None:
        """Return the scale of the aggregated model, ``None`` with each client's own."""
        if config.target_scale == "shared":
            return None if self.scale is None else self.scale.as_scale()
        if config.target_scale == "own":
            return None
        return given_scale(config, self.target.names)

    @property
    def _first(self) -> Description:
        """Any client: all agree on what the properties below return."""
        return next(iter(self.clients.values()))

    @property
    def num_partitions(self) -> int:
        """Number of partition-ids, whether or not each has a client."""
        return self._first.num_partitions

    @property
    def num_features(self) -> int:
        """Feature width d."""
        return self._first.num_features

    @property
    def num_edge_features(self) -> int:
        """Width of the features of classified edges."""
        return self._first.num_edge_features

    @property
    def target(self) -> Target:
        """What all clients predict."""
        return self._first.target

    @property
    def num_classes(self) -> int:
        """Number of classes C, for methods that learn these."""
        return self.target.width

    @property
    def partition_sha256(self) -> str:
        """Hash of the partition; empty when data owners bring their own graphs."""
        return self._first.partition_sha256

    @property
    def is_owned(self) -> bool:
        """Whether data owners bring their own graphs."""
        return self._first.is_owned


def node_label(node: int, description: Description) -> str:
    """Name a data owner in a log; the node id tells equal names apart."""
    return f'"{description.name}" (node {node})'


def client_lines(
    clients: Iterable[Description], server_round: int = 0
) -> list[dict[str, Any]]:
    """Return the lines of ``clients.jsonl`` that describe clients.

    ``server_round`` is the first round of clients that joined late, else 0.
    """
    lines = []
    for client in clients:
        about = asdict(client)
        del about["public_key"]  # new in every run
        for key in ("num_entries", "prepared", "schema", "type_features", "about"):
            if not about[key]:
                del about[key]
        lines.append({"round": server_round, **about, "trains": client.num_train > 0})
    return lines


def describe_model(
    config: RunConfig, federation: Federation, server_round: int
) -> ModelCard:
    """Return the description of an aggregated model after a round."""
    # a client without training nodes has no statistics, and does not train the model
    scales = {federation.clients[pid].scale for pid in federation.trainable}
    scaling = scales.pop() if len(scales) == 1 else "lost"
    if scaling == "columns":  # a prediction uses the statistics of its own graph
        scaling = "own"
    scale = {"own": "lost", "none": "none"}.get(config.target_scale, "kept")
    named = [c for c in federation.clients.values() if c.features_sha256]
    model = next(iter(federation.clients.values())).model
    return ModelCard(
        method=config.method,
        model=model,
        num_features=federation.num_features,
        hidden_channels=config.hidden_channels,
        num_layers=config.num_layers,
        classifies_graphs=config.classifies_graphs,
        readout=config.readout,
        link=config.decoder(federation.target.width, federation.num_edge_features),
        messages=config.messages(
            model, federation.num_edge_features, federation.schema
        ),
        scaling=scaling,
        round=server_round,
        feature_names=named[0].feature_names if named else (),
        features_sha256=named[0].features_sha256 if named else "",
        **federation.target.entries,
        target_scale=scale if config.predicts_numbers else "",
        prepared=max((client.prepared for client in named), default=""),
    )


def describe_target(config: RunConfig, federation: Federation) -> dict[str, Any]:
    """Return kind, names, units and scale of the target for the summary of a run.

    Mean and deviation of the scale are ``None`` if they are each client's or unknown.
    """
    target = federation.target
    found = {"kind": target.kind, "names": target.names, "units": target.units}
    if not config.predicts_numbers:
        return found
    try:
        scale = federation.known_scale(config)
    except RunError:  # it does not fit, which has ended the run
        scale = None
    about = {
        "kind": config.target_scale,
        "mean": None if scale is None else scale.mean.tolist(),
        "std": None if scale is None else scale.std.tolist(),
    }
    return found | {"scale": about}
