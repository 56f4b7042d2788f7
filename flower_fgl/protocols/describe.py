"""The query exchange before round 1: what a client says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from flwr.app import ConfigRecord, RecordDict

from flower_fgl.errors import PayloadError
from flower_fgl.protocols.base import INFO, Payload

__all__ = ["Description"]

KEY_BYTES = 32
_INTEGERS = (
    "partition-id",
    "num-partitions",
    "num-nodes",
    "num-edges",
    "num-train",
    "num-val",
    "num-test",
    "num-features",
)


@dataclass(frozen=True)
class Description(Payload):
    """What the server may know of a client; no node, edge or feature is among it.

    Parameters
    ----------
    partition_id, num_partitions : int
        The client's number and how many there are.
    num_nodes, num_edges : int
        Size of its graph, in nodes and undirected edges. Where whole graphs are
        classified, ``num_nodes`` counts what carries a label: its graphs, all splits
        together, and ``num_edges`` the edges of all of them.
    num_train, num_val, num_test : int
        Nodes (or graphs) in its masks.
    num_features : int
        Feature width d.
    class_names : tuple of str
        Length C.
    class_counts : tuple of int
        Training nodes (or graphs) per class, empty if ``share-class-counts`` is off.
    model : str
        Backbone the client builds.
    partition_sha256 : str
        Hash of the partition its graph belongs to; empty for an owner's own file.
    public_key : bytes
        With secure aggregation 32 bytes, the key to which shares are sealed; else empty.
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
    records = (INFO,)

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
        return RecordDict({INFO: ConfigRecord(values)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: Any = None) -> Self:
        """Unpack and check counts and lengths.

        Raises
        ------
        PayloadError
            If an entry is missing, of the wrong type, negative or inconsistent.
        """
        info = content.config_records.get(INFO)
        if info is None:
            raise PayloadError(f'The reply has no config record "{INFO}".')
        values: dict[str, Any] = {}
        for key in _INTEGERS:
            value = info.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PayloadError(f'"{key}" must be a count, got {value!r}.')
            values[key.replace("-", "_")] = value
        names, counts = info.get("class-names"), info.get("class-counts")
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise PayloadError(f'"class-names" must be strings, got {names!r}.')
        class_counts = _read_counts(counts, len(names))
        if values["partition_id"] >= values["num_partitions"] or not names:
            raise PayloadError(
                f'"partition-id" must be below {values["num_partitions"]} and there must '
                f"be a class, got {values['partition_id']} and {len(names)} classes."
            )
        model, sha256 = info.get("model"), info.get("partition-sha256")
        if not isinstance(model, str) or not isinstance(sha256, str):
            raise PayloadError('"model" and "partition-sha256" must be strings.')
        public_key = info.get("public-key")
        if not isinstance(public_key, bytes) or len(public_key) not in (0, KEY_BYTES):
            raise PayloadError(
                f'"public-key" must be {KEY_BYTES} bytes or none, got {public_key!r}.'
            )
        return cls(
            class_names=tuple(str(name) for name in names),
            class_counts=class_counts,
            model=model,
            partition_sha256=sha256,
            public_key=public_key,
            **values,
        )

    @property
    def num_bytes(self) -> int:
        """8 bytes a count, and the names."""
        names = sum(len(name.encode()) for name in self.class_names)
        text = len(self.model.encode()) + len(self.partition_sha256)
        counts = len(_INTEGERS) + len(self.class_counts)
        return 8 * counts + names + text + len(self.public_key)


def _read_counts(values: object, num_classes: int) -> tuple[int, ...]:
    """Check the training nodes per class: one count a class, or none at all."""
    if isinstance(values, list) and len(values) in (0, num_classes):
        counts = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
        if len(counts) == len(values) and min(counts, default=0) >= 0:
            return tuple(counts)
    raise PayloadError(
        f'"class-counts" must be {num_classes} counts or none, got {values!r}.'
    )
