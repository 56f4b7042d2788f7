"""Payloads of the describe query before round 1.

Data owners with their own graph files may number classes in any order and need no
partition-id: the server assigns both. Every later message to such a client carries the
:class:`ClassAgreement`, so that the client need not store it.
"""

from collections.abc import Container
from dataclasses import dataclass, fields
from typing import Any, Self

from flwr.app import ConfigRecord, RecordDict

from flower_fgl.core.agreement import hash_names
from flower_fgl.core.errors import ConfigError, PayloadError
from flower_fgl.core.options import kebab
from flower_fgl.core.schema import Schema
from flower_fgl.core.targets import CLASSES, KINDS, NUMBERS, Target, TargetKind
from flower_fgl.protocols.base import INFO, Payload, config_record, find_record

__all__ = ["AGREEMENT", "MAX_CLASSES", "MAX_ITEMS", "MAX_PARTITIONS", "UNNUMBERED"]
__all__ += ["ClassAgreement", "Description", "Rejection"]

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
SCHEMA, TYPE_FEATURES = "schema", "type-features"
PRIVATE, HASHED = "private", "hashed:"
"""Schema of a typed graph whose owner tells none; begin of one with hashed names."""
MAX_SCHEMA = 400_000
"""Largest number of characters of a schema."""
COUNTS = {
    "partition_id": (UNNUMBERED, MAX_PARTITIONS - 1),
    "num_partitions": (0, MAX_PARTITIONS),
    "num_nodes": (0, MAX_ITEMS),
    "num_edges": (0, MAX_EDGES),
    "num_train": (0, MAX_ITEMS),
    "num_val": (0, MAX_ITEMS),
    "num_test": (0, MAX_ITEMS),
    "num_features": (0, MAX_FEATURES),
}
"""Least and largest value of each count."""
TEXTS = ("model", "partition_sha256", "name", "scale", "features_sha256")
OPTIONAL = ("prepared", "about")
"""Lines of text that a description has, and that it may have."""
ALWAYS = {"name", "scale", "public_key", "partition_sha256"}
ALWAYS |= {"feature_names", "features_sha256"}
"""Entries of a description that are sent even if they say nothing."""


@dataclass(frozen=True)
class Description(Payload):
    """Description of a client for the server; contains no node, edge or feature."""

    partition_id: int  # -1 if the server is to number a data owner
    num_partitions: int  # number of clients, 0 if such an owner does not state it
    num_nodes: int  # in graph classification, the graphs of all splits
    num_edges: int  # undirected; in graph classification, those of all graphs
    num_train: int  # nodes (or graphs) in the masks
    num_val: int
    num_test: int
    num_features: int  # feature width d
    class_names: tuple[str, ...]  # length C, in the client's own order; or T targets
    class_counts: tuple[int, ...]  # training nodes; empty without share-class-counts
    model: str  # backbone
    partition_sha256: str = ""  # empty for a data owner's own file
    public_key: bytes = b""  # see PublicKey; empty without secure aggregation
    name: str = ""  # of the data owner; empty for a partition of a dataset
    scale: str = "none"  # of the features: "none", "rows" or "columns"
    feature_names: tuple[str, ...] = ()  # length d; only with share-feature-names
    features_sha256: str = ""  # of the names in their order; empty without names
    num_edge_features: int = 0  # with setting = "edge"; named after the nodes' features
    num_entries: int = 0  # with weight-by = "entries": known labels or numbers to train
    prepared: str = ""  # hash of recipe and vocabulary of flower-fgl prepare
    target_kind: TargetKind = CLASSES  # what class_names names
    target_units: tuple[str, ...] = ()  # of T numbers, if any is given
    schema: str = ""
    """Schema of a typed graph as far as ``schema-align`` tells it: names hashed with
    ``same``, without private relations and those without edges with ``name``, and
    ``"private"`` with ``private``."""
    type_features: tuple[str, ...] = ()
    """With ``schema-align = "name"``, hash of the names of the features of each kind of
    nodes, empty for a kind without names; and of those of predicted edges, if they have
    features."""
    about: str = ""  # of the owner's data, in its own words
    records = (INFO,)

    @property
    def told(self) -> Schema | None:
        """The schema that the client tells; ``None`` if it is private or not typed."""
        is_told = self.schema not in ("", PRIVATE)
        return Schema.from_text(self.schema.removeprefix(HASHED)) if is_told else None

    @property
    def shown(self) -> str:
        """The data owner's name, or the partition-id."""
        return self.name or f"partition-id {self.partition_id}"

    @property
    def is_owned(self) -> bool:
        """Whether the graph is a data owner's own file."""
        return not self.partition_sha256

    @property
    def target(self) -> Target:
        """What the client's graph holds to be predicted."""
        return Target(self.target_kind, self.class_names, self.target_units)

    def to_record(self) -> RecordDict:
        """Pack into the record ``info``; some entries only if they say something."""
        values: dict[str, Any] = {
            _key(f.name): list(value) if isinstance(value, tuple) else value
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default or f.name in ALWAYS
        }
        return RecordDict({INFO: ConfigRecord(values)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; refuse entries that are malformed, out of range or contradictory."""
        info = config_record(content, INFO)
        found: dict[str, Any] = {
            name: _read_integer(info, kebab(name), *limits)
            for name, limits in COUNTS.items()
        }
        names, least = _read_target_names(info), found["num_train"]
        for name, *limits in (
            ("num_edge_features", 1, MAX_FEATURES),
            ("num_entries", least, least * len(names)),
        ):
            if kebab(name) in info:
                found[name] = _read_integer(info, kebab(name), *limits)
        found["class_counts"] = _read_counts(info.get("class-counts"), len(names))
        found |= {name: _read_text(info, kebab(name)) for name in TEXTS}
        width = found["num_features"] + found.get("num_edge_features", 0)
        found["feature_names"] = _read_lines(
            info, "feature-names", f"{width} different names or none", (0, width)
        )
        found["target_kind"] = kind = info.get("target-kind", CLASSES)
        found["target_units"] = _read_lines(
            info,
            "target-units",
            f"{len(names)} units of numbers or none",
            (0, len(names)) if kind == NUMBERS else (0,),
            differ=False,
        )
        found["schema"], found["type_features"] = _read_schema(info)
        found |= {name: _read_text(info, _key(name), "") for name in OPTIONAL}
        key: Any = info.get("public-key")
        client = cls(**found, class_names=names, public_key=key)
        client._check()
        return client

    def _check(self) -> None:
        """Refuse entries that are malformed or contradict each other."""
        for what, number, whole in (
            ("num-train", self.num_train, "num_nodes"),
            ("class-counts", sum(self.class_counts), "num_train"),
        ):
            if number > getattr(self, whole):
                raise PayloadError(
                    f'"{what}" counts {number} nodes, but {whole} is '
                    f"{getattr(self, whole)}."
                )
        least = UNNUMBERED if self.is_owned else 0
        if not least <= self.partition_id < self.num_partitions:
            raise PayloadError(
                f'"partition-id" must be at least {least} and below '
                f"{self.num_partitions}, got {self.partition_id}."
            )
        key = self.public_key
        if not isinstance(key, bytes) or len(key) not in KEY_SIZES:
            raise PayloadError(
                f'"public-key" must have {KEY_SIZES} bytes, got {str(key)[:50]}.'
            )
        if self.scale not in SCALES:
            raise PayloadError(f'"scale" must be one of {SCALES}, got {self.scale!r}.')
        if self.target_kind not in KINDS:
            raise PayloadError(
                f'"target-kind" must be one of {", ".join(KINDS)}, got '
                f"{str(self.target_kind)[:50]!r}."
            )
        expected, names = self.features_sha256, self.feature_names
        if (names and hash_names(names) != expected) or len(expected) not in (0, 64):
            raise PayloadError(
                '"features-sha256" must be the hash of the feature names, or empty.'
            )
        if len(self.prepared) not in (0, 64):
            raise PayloadError('"prepared-sha256" must be a hash of 64 characters.')


@dataclass(frozen=True)
class Rejection(Payload):
    """Reply of a data owner that cannot take part, without any value of its data."""

    name: str
    reason: str
    records = (INFO,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``info``."""
        reason = " ".join(self.reason.split())[:MAX_TEXT]
        return RecordDict({INFO: ConfigRecord({"name": self.name, "unfit": reason})})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; a PayloadError says that an entry is missing or no line of text."""
        info = config_record(content, INFO)
        return cls(_read_text(info, "name"), _read_text(info, "unfit"))

    @classmethod
    def is_in(cls, content: RecordDict) -> bool:
        """Return whether a reply is a rejection."""
        return "unfit" in (find_record(content, INFO, ConfigRecord) or {})


@dataclass(frozen=True)
class ClassAgreement(Payload):
    """Numbering of clients and classes that the server assigns to data owners.

    The C classes and d features are in the common order of all clients; the names of
    features are empty without ``share-feature-names``. ``schema`` is the text of all
    clients' kinds and relations with ``schema-align = "name"``, else empty.
    """

    partition_id: int
    num_partitions: int
    names: tuple[str, ...]
    feature_names: tuple[str, ...] = ()
    schema: str = ""
    records = (AGREEMENT,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``agreement``."""
        values: dict[str, Any] = {
            "partition-id": self.partition_id,
            "num-partitions": self.num_partitions,
            "class-names": list(self.names),
        }
        if self.feature_names:  # Flower cannot count the bytes of an empty list
            values["feature-names"] = list(self.feature_names)
        if self.schema:
            values[SCHEMA] = self.schema
        return RecordDict({AGREEMENT: ConfigRecord(values)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack; a PayloadError says that an entry is missing or out of range."""
        info = config_record(content, AGREEMENT)
        number = _read_integer(info, "partition-id", 0, MAX_PARTITIONS)
        total = _read_integer(info, "num-partitions", 1, MAX_PARTITIONS)
        if number >= total:
            raise PayloadError(f'"partition-id" must be below {total}, got {number}.')
        sizes = range(MAX_FEATURES + 1)
        features = _read_lines(info, "feature-names", "different names or none", sizes)
        schema, _ = _read_schema(info)
        return cls(number, total, _read_target_names(info), features, schema)


def _key(name: str) -> str:
    """Return the key of a description's entry."""
    return "prepared-sha256" if name == "prepared" else kebab(name)


def _read_integer(info: ConfigRecord, key: str, lowest: int, most: int) -> int:
    """Read an integer in a range."""
    value: Any = info.get(key)
    if type(value) is not int or not lowest <= value <= most:
        raise PayloadError(
            f'"{key}" must be an integer from {lowest} to {most}, got {value!r}.'
        )
    return value


def _is_line(value: object) -> bool:
    """Return whether a value is one line of text."""
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()


def _read_text(info: ConfigRecord, key: str, default: str | None = None) -> str:
    """Read one line of text."""
    value = info.get(key, default)
    if not _is_line(value):
        raise PayloadError(
            f'"{key}" must be one line of at most {MAX_TEXT} characters, got '
            f"{str(value)[:50]!r}."
        )
    return str(value)


def _read_lines(
    info: ConfigRecord,
    key: str,
    expected: str,
    sizes: Container[int],
    *,
    differ: bool = True,
) -> tuple[str, ...]:
    """Read a list of lines of text, by default none."""
    values: Any = info.get(key, [])
    if (
        not isinstance(values, list)
        or len(values) not in sizes
        or not all(map(_is_line, values))
        or (differ and len(set(values)) < len(values))
    ):
        raise PayloadError(
            f'"{key}" must be {expected}, each one line of at most {MAX_TEXT} '
            f"characters, got {str(values)[:50]}."
        )
    return tuple(values)


def _read_target_names(info: ConfigRecord) -> tuple[str, ...]:
    """Read the names of the outputs: at least one."""
    expected = f"1 to {MAX_CLASSES} different names"
    return _read_lines(info, "class-names", expected, range(1, MAX_CLASSES + 1))


def _read_schema(info: ConfigRecord) -> tuple[str, tuple[str, ...]]:
    """Read the schema of a typed graph, and the hashes of its features."""
    text: Any = info.get(SCHEMA, "")
    if not isinstance(text, str) or len(text) > MAX_SCHEMA:
        raise PayloadError(
            f'"{SCHEMA}" must be a text of at most {MAX_SCHEMA:,} characters.'
        )
    sizes = {0}
    if text not in ("", PRIVATE):
        try:
            found = Schema.from_text(text.removeprefix(HASHED))
            sizes |= {len(found.widths), len(found.widths) + bool(found.predicted)}
        except ConfigError as error:
            raise PayloadError(f'"{SCHEMA}": {error}') from error
    values: Any = info.get(TYPE_FEATURES, [])
    is_text = isinstance(values, list) and all(isinstance(v, str) for v in values)
    if not is_text or len(values) not in sizes or {*map(len, values)} - {0, 64}:
        raise PayloadError(
            f'"{TYPE_FEATURES}" must be {" or ".join(map(str, sorted(sizes)))} hashes of '
            "64 characters."
        )
    return text, tuple(values)


def _read_counts(values: object, number: int) -> tuple[int, ...]:
    """Read the training nodes per class: one count per class, or none at all."""
    if isinstance(values, list) and len(values) in (0, number):
        counts = [v for v in values if type(v) is int and v >= 0]
        if len(counts) == len(values):
            return tuple(counts)
    raise PayloadError(
        f'"class-counts" must be {number} counts or none, got {str(values)[:50]}.'
    )
