"""Payloads of the describe query before round 1.

Data owners with their own graph files may number classes in any order and need no
partition-id: the server assigns both. Every later message to such a client carries the
:class:`ClassAgreement`, so that the client need not store it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from flwr.app import ConfigRecord, RecordDict

from flower_fgl.core.errors import ConfigError, PayloadError
from flower_fgl.core.feature_names import hash_names
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import CLASSES, KINDS, NUMBERS, Target, TargetKind
from flower_fgl.protocols.base import INFO, Payload

__all__ = [
    "AGREEMENT",
    "MAX_CLASSES",
    "MAX_ITEMS",
    "MAX_PARTITIONS",
    "UNNUMBERED",
    "ClassAgreement",
    "Description",
    "Rejection",
]

AGREEMENT = "agreement"
"""ConfigRecord with the class order and partition-id that the server assigned."""
UNNUMBERED = -1
"""Partition-id of a data owner that the server has yet to number."""
MAX_TEXT = 300
"""Largest number of characters of an owner's name, a class name or a reason."""
MAX_PARTITIONS = 100_000
"""Largest number of clients: lists of this length are built on both sides."""
MAX_ITEMS = 1_000_000_000
"""Largest number of nodes or graphs of a client; it bounds the client's weight."""
MAX_EDGES = 1_000_000_000_000
MAX_FEATURES = 10_000_000
MAX_CLASSES = 10_000
KEY_SIZES = (0, 32, 128)
"""Bytes of no key, of a key, and of a key with an owner's identity and signature."""
SCALES = ("none", "rows", "columns")
EDGE_FEATURES = "num-edge-features"
ENTRIES = "num-entries"
PREPARED = "prepared-sha256"
KIND, UNITS = "target-kind", "target-units"
SCHEMA, TYPE_FEATURES = "schema", "type-features"
PRIVATE, HASHED = "private", "hashed:"
"""Schema of a typed graph whose owner tells none; begin of one with hashed names."""
MAX_SCHEMA = 400_000
"""Largest number of characters of a schema."""
_INTEGERS = {
    "partition-id": MAX_PARTITIONS - 1,
    "num-partitions": MAX_PARTITIONS,
    "num-nodes": MAX_ITEMS,
    "num-edges": MAX_EDGES,
    "num-train": MAX_ITEMS,
    "num-val": MAX_ITEMS,
    "num-test": MAX_ITEMS,
    "num-features": MAX_FEATURES,
}
"""Largest value of each count."""


@dataclass(frozen=True)
class Description(Payload):
    """Description of a client for the server; contains no node, edge or feature.

    Parameters
    ----------
    partition_id, num_partitions : int
        The client's number and the number of clients; -1 and 0 if the server is to
        number a data owner.
    num_nodes, num_edges : int
        Size of its graph, in nodes and undirected edges. In graph classification,
        ``num_nodes`` counts the graphs of all splits, ``num_edges`` their edges.
    num_train, num_val, num_test : int
        Nodes (or graphs) in its masks.
    num_features : int
        Feature width d.
    class_names : tuple of str
        Length C, in the client's own order; or T names of labels or numbers.
    class_counts : tuple of int
        Training nodes (or graphs) per class; empty without ``share-class-counts``.
    model : str
        Backbone of the client.
    partition_sha256 : str
        Hash of the partition of its graph; empty for a data owner's own file.
    public_key : bytes
        With secure aggregation, see :class:`.messages.PublicKey`; else empty.
    name : str
        Name of the data owner in logs; empty for a partition of a dataset.
    scale : {"none", "rows", "columns"}
        Scaling of the client's features.
    feature_names, features_sha256 : tuple of str, str
        Length d, in the client's own order, and their hash. Empty if the columns have no
        names; the names also without ``share-feature-names``.
    num_edge_features : int
        With ``setting = "edge"``, width a of the features of edges; their names follow
        those of the nodes' features.
    num_entries : int
        With ``weight-by = "entries"``, known training labels or numbers of all targets.
    prepared : str
        Hash of the recipe and vocabulary of the file, if ``flower-fgl prepare`` made it.
    target_kind, target_units : {"classes", "labels", "numbers"}, tuple of str
        What ``class_names`` names, and T units of numbers, if any is given.
    schema : str
        With a typed graph, its schema as far as ``schema-align`` tells it: names hashed
        with ``same``, without private relations and those without edges with ``name``,
        ``"private"`` with ``private``.
    type_features : tuple of str
        With ``schema-align = "name"``, hash of the names of the features of each kind of
        nodes, empty for a kind without names.
    """

    partition_id: int
    num_partitions: int
    num_nodes: int
    num_edges: int
    num_train: int
    num_val: int
    num_test: int
    num_features: int
    class_names: tuple[str, ...]
    class_counts: tuple[int, ...]
    model: str
    partition_sha256: str = ""
    public_key: bytes = b""
    name: str = ""
    scale: str = "none"
    feature_names: tuple[str, ...] = ()
    features_sha256: str = ""
    num_edge_features: int = 0
    num_entries: int = 0
    prepared: str = ""
    target_kind: TargetKind = CLASSES
    target_units: tuple[str, ...] = ()
    schema: str = ""
    type_features: tuple[str, ...] = ()
    records = (INFO,)

    @property
    def told(self) -> Schema | None:
        """The schema that the client tells; ``None`` if it is private or not typed."""
        is_told = self.schema not in ("", PRIVATE)
        return Schema.from_text(self.schema.removeprefix(HASHED)) if is_told else None

    @property
    def is_owned(self) -> bool:
        """Whether the graph is a data owner's own file."""
        return not self.partition_sha256

    @property
    def target(self) -> Target:
        """What the client's graph holds to be predicted."""
        return Target(self.target_kind, self.class_names, self.target_units)

    def to_record(self) -> RecordDict:
        """Pack into the record ``info``."""
        values: dict[str, Any] = {
            key: int(getattr(self, key.replace("-", "_"))) for key in _INTEGERS
        }
        values["class-names"] = list(self.class_names)
        values["class-counts"] = list(self.class_counts)
        values["model"] = self.model
        values["partition-sha256"] = self.partition_sha256
        values["public-key"] = self.public_key
        values["name"], values["scale"] = self.name, self.scale
        values["feature-names"] = list(self.feature_names)
        values["features-sha256"] = self.features_sha256
        if self.num_edge_features:
            values[EDGE_FEATURES] = self.num_edge_features
        if self.num_entries:
            values[ENTRIES] = self.num_entries
        if self.prepared:
            values[PREPARED] = self.prepared
        if self.target_kind != CLASSES:
            values[KIND] = self.target_kind
        if self.target_units:
            values[UNITS] = list(self.target_units)
        if self.schema:
            values[SCHEMA] = self.schema
        if self.type_features:
            values[TYPE_FEATURES] = list(self.type_features)
        return RecordDict({INFO: ConfigRecord(values)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; refuse entries that are malformed, out of range or contradictory."""
        info = _record(content, INFO)
        values: dict[str, Any] = {}
        is_numbered = info.get("partition-id") != UNNUMBERED
        for key, most in _INTEGERS.items():
            lowest = UNNUMBERED if key == "partition-id" else 0
            number = _read_integer(info, key, lowest=lowest, most=most)
            values[key.replace("-", "_")] = number
        num_edge_features = 0
        if EDGE_FEATURES in info:
            num_edge_features = _read_integer(
                info, EDGE_FEATURES, lowest=1, most=MAX_FEATURES
            )
        names = _read_names(info)
        least = values["num_train"]
        num_entries = (
            _read_integer(info, ENTRIES, lowest=least, most=least * len(names))
            if ENTRIES in info
            else 0
        )
        class_counts = _read_counts(info.get("class-counts"), len(names))
        for what, found, whole in (
            ("num-train", values["num_train"], "num_nodes"),
            ("class-counts", sum(class_counts), "num_train"),
        ):
            if found > values[whole]:
                raise PayloadError(
                    f'"{what}" counts {found} nodes, but {whole} is {values[whole]}.'
                )
        if is_numbered and values["partition_id"] >= values["num_partitions"]:
            raise PayloadError(
                f'"partition-id" must be below {values["num_partitions"]}, got '
                f"{values['partition_id']}."
            )
        model, sha256 = _read_text(info, "model"), _read_text(info, "partition-sha256")
        public_key = info.get("public-key")
        if not isinstance(public_key, bytes) or len(public_key) not in KEY_SIZES:
            raise PayloadError(
                f'"public-key" must have {KEY_SIZES} bytes, got {str(public_key)[:50]}.'
            )
        scale = _read_text(info, "scale")
        if scale not in SCALES:
            raise PayloadError(f'"scale" must be one of {SCALES}, got {scale!r}.')
        feature_names = _read_feature_names(info)
        num_names = values["num_features"] + num_edge_features
        if len(feature_names) not in (0, num_names):
            raise PayloadError(
                f'"feature-names" must be {num_names} names or none, got '
                f"{len(feature_names)}."
            )
        features_sha256 = _read_text(info, "features-sha256")
        expected = hash_names(feature_names) if feature_names else features_sha256
        if features_sha256 != expected or len(expected) not in (0, 64):
            raise PayloadError(
                '"features-sha256" must be the hash of the feature names, or empty.'
            )
        prepared = _read_text(info, PREPARED) if PREPARED in info else ""
        if len(prepared) not in (0, 64):
            raise PayloadError(f'"{PREPARED}" must be a hash of 64 characters.')
        kind = _read_kind(info)
        schema, type_features = _read_schema(info)
        return cls(
            schema=schema,
            type_features=type_features,
            feature_names=feature_names,
            features_sha256=features_sha256,
            class_names=names,
            class_counts=class_counts,
            model=model,
            partition_sha256=sha256,
            public_key=public_key,
            name=_read_text(info, "name"),
            scale=scale,
            num_edge_features=num_edge_features,
            num_entries=num_entries,
            prepared=prepared,
            target_kind=kind,
            target_units=_read_units(info, kind, len(names)),
            **values,
        )

    @property
    def num_bytes(self) -> int:
        """8 bytes per count, and the bytes of all texts."""
        names = sum(
            len(name.encode()) for name in (*self.class_names, *self.feature_names)
        )
        texts = [self.model, self.partition_sha256, self.name, self.scale]
        texts += self.target_units
        texts += [self.target_kind] * (self.target_kind != CLASSES)
        texts += [self.schema, *self.type_features]
        names += len(self.features_sha256) + len(self.prepared)
        text = sum(len(value.encode()) for value in texts) + len(self.public_key)
        numbers = len(_INTEGERS) + len(self.class_counts)
        numbers += bool(self.num_edge_features) + bool(self.num_entries)
        return 8 * numbers + names + text


@dataclass(frozen=True)
class Rejection(Payload):
    """Reply of a data owner that cannot take part, without any value of its data."""

    name: str
    reason: str
    records = (INFO,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``info``."""
        return RecordDict(
            {
                INFO: ConfigRecord(
                    {
                        "name": self.name,
                        "unfit": " ".join(self.reason.split())[:MAX_TEXT],
                    }
                )
            }
        )

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; a PayloadError says that an entry is missing or no line of text."""
        info = _record(content, INFO)
        return cls(_read_text(info, "name"), _read_text(info, "unfit"))

    @classmethod
    def is_in(cls, content: RecordDict) -> bool:
        """Return whether a reply is a rejection."""
        return "unfit" in content.config_records.get(INFO, {})

    @property
    def num_bytes(self) -> int:
        """Bytes of the two texts."""
        return len(self.name.encode()) + len(self.reason.encode())


@dataclass(frozen=True)
class ClassAgreement(Payload):
    """Numbering of clients and classes that the server assigns to data owners.

    The C classes and d features are in the common order of all clients; the names of
    features are empty without ``share-feature-names``. ``schema`` is the text of all
    clients' kinds and relations with ``schema-align = "name"``, else empty.
    """

    partition_id: int
    num_partitions: int
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...] = ()
    schema: str = ""
    records = (AGREEMENT,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``agreement``."""
        values: dict[str, Any] = {
            "partition-id": self.partition_id,
            "num-partitions": self.num_partitions,
            "class-names": list(self.class_names),
        }
        if self.feature_names:  # Flower cannot count the bytes of an empty list
            values["feature-names"] = list(self.feature_names)
        if self.schema:
            values[SCHEMA] = self.schema
        return RecordDict({AGREEMENT: ConfigRecord(values)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; a PayloadError says that an entry is missing or out of range."""
        info = _record(content, AGREEMENT)
        most = MAX_PARTITIONS
        number = _read_integer(info, "partition-id", lowest=0, most=most)
        total = _read_integer(info, "num-partitions", lowest=1, most=most)
        if number >= total:
            raise PayloadError(f'"partition-id" must be below {total}, got {number}.')
        schema, _ = _read_schema(info)
        names, features = _read_names(info), _read_feature_names(info)
        return cls(number, total, names, features, schema)

    @property
    def num_bytes(self) -> int:
        """8 bytes per count, and the bytes of the names."""
        names = (*self.class_names, *self.feature_names)
        return 16 + len(self.schema) + sum(len(name.encode()) for name in names)


def _record(content: RecordDict, name: str) -> ConfigRecord:
    info = content.config_records.get(name)
    if info is None:
        raise PayloadError(f'The message has no config record "{name}".')
    return info


def _read_integer(info: ConfigRecord, key: str, *, lowest: int, most: int) -> int:
    value: Any = info.get(key)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not lowest <= value <= most:
        raise PayloadError(
            f'"{key}" must be an integer from {lowest} to {most}, got {value!r}.'
        )
    return int(value)


def _read_text(info: ConfigRecord, key: str) -> str:
    value = info.get(key)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise PayloadError(
            f'"{key}" must be one line of at most {MAX_TEXT} characters, got '
            f"{str(value)[:50]!r}."
        )
    return value


def _read_kind(info: ConfigRecord) -> TargetKind:
    """Read the kind of target, by default classes."""
    found = [kind for kind in KINDS if kind == info.get(KIND, CLASSES)]
    if not found:
        raise PayloadError(
            f'"{KIND}" must be one of {", ".join(KINDS)}, got {str(info.get(KIND))[:50]!r}.'
        )
    return found[0]


def _read_units(info: ConfigRecord, kind: TargetKind, width: int) -> tuple[str, ...]:
    """Read the unit of each number; none for other kinds."""
    values = info.get(UNITS, [])
    units = values if isinstance(values, list) else [None]
    is_text = all(
        isinstance(u, str) and len(u) <= MAX_TEXT and u.isprintable() for u in units
    )
    if not is_text or len(units) not in ((0, width) if kind == NUMBERS else (0,)):
        raise PayloadError(f'"{UNITS}" must be {width} units of numbers, or none.')
    return tuple(map(str, units))


def _read_names(info: ConfigRecord) -> tuple[str, ...]:
    """Read the class names: at least one, all different."""
    values: Any = info.get("class-names")
    if not isinstance(values, list) or not 0 < len(values) <= MAX_CLASSES:
        raise PayloadError(
            f'"class-names" must be a list of 1 to {MAX_CLASSES} names, got {values!r}.'
        )
    for name in values:
        is_text = isinstance(name, str) and name.isprintable()
        if not is_text or len(name) > MAX_TEXT:
            raise PayloadError(
                '"class-names" must be strings, each one line of at most '
                f"{MAX_TEXT} characters, got {name!r}."
            )
    if len(set(values)) < len(values):
        raise PayloadError('"class-names" must differ.')
    return tuple(values)


def _read_feature_names(info: ConfigRecord) -> tuple[str, ...]:
    """Read the feature names: none, or different lines of text."""
    values = info.get("feature-names", [])
    is_list = isinstance(values, list) and all(isinstance(v, str) for v in values)
    names: list[str] = values if is_list else []  # type: ignore[assignment]
    is_text = all(len(name) <= MAX_TEXT and name.isprintable() for name in names)
    if not is_list or not is_text or len(set(names)) < len(names):
        raise PayloadError(
            '"feature-names" must be different lines of text of at most '
            f"{MAX_TEXT} characters each."
        )
    return tuple(names)


def _read_schema(info: ConfigRecord) -> tuple[str, tuple[str, ...]]:
    """Read the schema of a typed graph, and the hashes of its features."""
    text: Any = info.get(SCHEMA, "")
    if not isinstance(text, str) or len(text) > MAX_SCHEMA:
        raise PayloadError(
            f'"{SCHEMA}" must be a text of at most {MAX_SCHEMA:,} characters.'
        )
    number = 0
    if text not in ("", PRIVATE):
        try:
            number = len(Schema.from_text(text.removeprefix(HASHED)).widths)
        except ConfigError as error:
            raise PayloadError(f'"{SCHEMA}": {error}') from error
    values: Any = info.get(TYPE_FEATURES, [])
    is_text = isinstance(values, list) and all(isinstance(v, str) for v in values)
    if not is_text or len(values) not in (0, number) or {*map(len, values)} - {0, 64}:
        raise PayloadError(
            f'"{TYPE_FEATURES}" must be {number} hashes of 64 characters, or none.'
        )
    return text, tuple(values)


def _read_counts(values: object, num_classes: int) -> tuple[int, ...]:
    """Read the training nodes per class: one count per class, or none at all."""
    if isinstance(values, list) and len(values) in (0, num_classes):
        counts = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
        if len(counts) == len(values) and min(counts, default=0) >= 0:
            return tuple(counts)
    raise PayloadError(
        f'"class-counts" must be {num_classes} counts or none, got {values!r}.'
    )
