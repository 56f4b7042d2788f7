"""Payloads of O-pFGL: class statistics up, a pseudo-graph down."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.algorithms.opfgl.class_statistics import (
    MIN_COUNT,
    ClassStatistics,
    additive_sums,
)
from flower_fgl.algorithms.opfgl.pseudo_graph import PseudoGraph
from flower_fgl.core.errors import PayloadError
from flower_fgl.protocols.arrays import ANY, Layout, read_arrays
from flower_fgl.protocols.base import (
    Payload,
    check_tensor,
    pack_bits,
    unpack_bits,
    write_tensors,
)
from flower_fgl.protocols.secure_aggregation.additive import AdditivePayload

__all__ = ["GraphDownload", "LocalStatistics", "StatisticsSpec", "no_pseudo_graph"]

STATISTICS = "statistics"
PSEUDO_GRAPH = "pseudo-graph"
STATISTICS_LAYOUT: Layout = {
    "mean": (torch.float32, ANY, ANY),
    "variance": (torch.float32, ANY, ANY),
    "counts": (torch.int32, ANY, 2),
    "present": (torch.uint8, ANY),
}
GRAPH_LAYOUT: Layout = {
    "labels": (torch.int32, "s"),
    "features": (torch.float32, "s", "d"),
    "adjacency": (torch.float32, "s", "s"),
}


class StatisticsSpec(NamedTuple):
    """Expected C and D of :class:`LocalStatistics`, and what the client described.

    A node belongs to at most one class, and only training nodes count as labelled.
    """

    classes: int
    width: int
    num_nodes: int
    num_train: int


@dataclass(frozen=True)
class LocalStatistics(AdditivePayload):
    """Class statistics of one client: 4·C_k·(2D + 2) bytes for its C_k classes.

    Mean and variance of width D = (h + 1)·d, and two int32 counts: the nodes and the
    labelled nodes of the class. A bitmap marks the classes that are present, ⌈C/8⌉ bytes
    of record overhead. With secure aggregation the upload is 8·C·(2D + 3) bytes of masked
    sums, whatever classes the client has.
    """

    statistics: ClassStatistics
    records = (STATISTICS,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``statistics``."""
        s = self.statistics
        held = s.count > 0
        counts = torch.stack([s.count[held], s.labelled_count[held]], dim=1)
        tensors = {
            "mean": s.mean[held],
            "variance": s.variance[held],
            "counts": counts.to(torch.int32),
            "present": pack_bits(held),
        }
        return RecordDict({STATISTICS: write_tensors(tensors)})

    def summands(self, weight: float) -> dict[str, Tensor]:
        """Return N, Nμ, (N − 1)s² + Nμ², number of clients and labelled nodes per class."""
        return additive_sums(self.statistics)

    @classmethod
    def summand_shapes(cls, spec: StatisticsSpec) -> dict[str, tuple[int, ...]]:
        """Return the shapes of :meth:`summands`."""
        one, wide = (spec.classes,), (spec.classes, spec.width)
        return {
            "count": one,
            "sum": wide,
            "squares": wide,
            "owners": one,
            "labelled": one,
        }

    @classmethod
    def from_record(cls, content: RecordDict, spec: StatisticsSpec) -> Self:
        """Unpack; the counts must not exceed those that the client described."""
        classes, width = spec.classes, spec.width
        tensors = read_arrays(content, STATISTICS, STATISTICS_LAYOUT)
        held = unpack_bits(f"{STATISTICS}/present", tensors["present"], classes)
        number, out = int(held.sum()), {}
        for name in ("mean", "variance"):
            tensor = tensors[name]
            if tensor.shape[1] != width:
                raise PayloadError(
                    f"Statistics must be {width} wide, got {tensor.shape[1]}. Check that "
                    "all clients have the same features and opfgl.depth."
                )
            check_tensor(f"{STATISTICS}/{name}", tensor, shape=(number, width))
            out[name] = torch.zeros((classes, width))
            out[name][held] = tensor
        if bool((tensors["variance"] < 0).any()):
            least = float(tensors["variance"].min())
            raise PayloadError(f"Class variances must be at least 0, got {least}.")
        counts, shape = tensors["counts"], (number, 2)
        check_tensor(f"{STATISTICS}/counts", counts, shape=shape, dtype=torch.int32)
        _check_counts(counts, spec)
        both = torch.zeros((classes, 2), dtype=torch.int64)
        both[held] = counts.long()
        return cls(ClassStatistics(**out, count=both[:, 0], labelled_count=both[:, 1]))

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Remove classes that are not shared, or have too few labelled nodes."""
        s = self.statistics
        # inferred nodes do not count: the labels that they follow are the owner's secret
        kept = shared & (s.labelled_count >= min_count)
        return type(self)(
            ClassStatistics(
                s.mean * kept[:, None],
                s.variance * kept[:, None],
                s.count * kept,
                s.labelled_count * kept,
            )
        )

    def in_range(self) -> Self:
        """Clamp negative variances to 0."""
        s = self.statistics
        return type(self)(replace(s, variance=s.variance.clamp(min=0)))


@dataclass(frozen=True)
class GraphDownload(Payload):
    """The pseudo-graph: 4·(s·d + s + s²) bytes for s nodes; 0 before it exists."""

    graph: PseudoGraph
    records = (PSEUDO_GRAPH,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``pseudo-graph``, labels as int32."""
        graph = self.graph
        if not len(graph.labels):
            return RecordDict()
        tensors = {
            "features": graph.features,
            "labels": graph.labels.to(torch.int32),
            "adjacency": graph.adjacency,
        }
        return RecordDict({PSEUDO_GRAPH: write_tensors(tensors)})

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[int, int]) -> Self:
        """Unpack; ``spec`` = (C, d), the message may hold no graph."""
        classes, width = spec
        if PSEUDO_GRAPH not in content:
            return cls(no_pseudo_graph(width))
        tensors = read_arrays(content, PSEUDO_GRAPH, GRAPH_LAYOUT, {"d": width})
        labels = tensors["labels"].long()
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise PayloadError(
                f"Labels of the pseudo-graph must be 0 to {classes - 1}, got "
                f"{int(labels.min())} to {int(labels.max())}."
            )
        links = tensors["adjacency"]
        in_range = bool(((links >= 0) & (links <= 1)).all())
        if not in_range or bool(links.diagonal().any()) or not links.equal(links.T):
            raise PayloadError(
                "The adjacency of the pseudo-graph must be symmetric, in [0, 1], with a "
                "zero diagonal."
            )
        return cls(PseudoGraph(tensors["features"], labels, links))


def no_pseudo_graph(num_features: int) -> PseudoGraph:
    """Return the empty pseudo-graph, used before there is one."""
    return PseudoGraph(
        torch.zeros((0, num_features)),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros((0, 0)),
    )


def _check_counts(counts: Tensor, spec: StatisticsSpec) -> None:
    """Reject invalid counts (n, 2) of nodes and labelled nodes."""
    if not len(counts):
        return
    number, labelled = counts.unbind(dim=1)
    if int(number.min()) < MIN_COUNT:
        raise PayloadError(
            f"A class may be uploaded from {MIN_COUNT} nodes on, got {int(number.min())}: "
            "a single node has no variance."
        )
    if int(labelled.min()) < 0 or bool((labelled > number).any()):
        raise PayloadError(
            "Labelled nodes of a class must be between 0 and its number of nodes."
        )
    for what, found, most in (
        ("nodes", number, spec.num_nodes),
        ("labelled nodes", labelled, spec.num_train),
    ):
        if int(found.sum()) > most:
            raise PayloadError(
                f"The statistics are of {int(found.sum())} {what}, but the client "
                f"described {most}."
            )
