"""What both halves of O-pFGL agree on: class statistics up, a pseudo-graph down.

Yan et al., "Toward Personalized Federated Node Classification in One-shot
Communication", arXiv 2411.11304.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, Self

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from flower_fgl.errors import PayloadError
from flower_fgl.one_shot.pseudo_graph import PseudoGraph
from flower_fgl.one_shot.statistics import (
    ClassStatistics,
    additive_sums,
    check_statistics,
)
from flower_fgl.options import option
from flower_fgl.protocols.base import Payload, check_tensor, read_tensors, write_tensors
from flower_fgl.secure.additive import AdditivePayload

__all__ = [
    "VARIANTS",
    "GraphDownload",
    "LocalStatistics",
    "OPFGLSettings",
    "Variant",
    "no_pseudo_graph",
]

STATISTICS = "statistics"
PSEUDO_GRAPH = "pseudo-graph"
MIN_COUNT = 2
"""n_min, nodes of a class below which a client keeps its statistics to itself."""


@dataclass(frozen=True)
class Variant:
    """What an ablation switches off, Sec. V of the paper.

    Parameters
    ----------
    distill : {"node", "fixed", "none"}
        γ of Eq. (19), the constant β, or no distillation.
    expands : bool
        Whether reliable nodes enter the statistics, Eq. (8).
    weighs_classes : bool
        Whether rare classes weigh more in the cross-entropy.
    starts_anew : bool
        Whether stage 2 starts from initial weights instead of the global model.
    personalises : bool
        Whether there is a stage 2.
    """

    distill: Literal["node", "fixed", "none"] = "node"
    expands: bool = False
    weighs_classes: bool = False
    starts_anew: bool = False
    personalises: bool = True


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "ours": Variant(expands=True),
        "nd-ft-dist": Variant(),
        "ft-dist": Variant(distill="fixed"),
        "ft": Variant(distill="none"),
        "ft-imb": Variant(distill="none", weighs_classes=True),
        "hre-nd-dist": Variant(expands=True, starts_anew=True),
        "global": Variant(distill="none", expands=True, personalises=False),
    }
)
"""The method and its ablations by the name that the setting ``variant`` takes."""


@dataclass(frozen=True)
class OPFGLSettings:
    """Settings of O-pFGL; the defaults are those for Cora cut by Louvain."""

    variant: str = option(
        "ours", "the method or an ablation of it", choices=" ".join(VARIANTS)
    )
    depth: int = option(1, "h, steps of propagation in the statistics", ge=0)
    propagation_steps: int = option(2, "steps of label propagation", ge=0)
    propagation_share: float = option(
        0.9, "a, weight of the neighbours in label propagation", ge=0, le=1
    )
    reliable_confidence: float = option(
        0.95, "f_th, soft label from which a node is reliable, Eq. (7)", ge=0, le=1
    )
    reliable_degree: int = option(
        20, "d_th, neighbours from which a node is reliable, Eq. (7)", ge=0
    )
    reliable_classes: int = option(
        1, "K, classes of largest homophily with reliable nodes, Eq. (7)", ge=0
    )
    denominator: str = option(
        "n-1",
        "divisor of the pooled sum of squares, Eq. (9): N - 1, or N less the clients "
        "that hold the class",
        choices="n-1 n-mc",
    )
    node_share: float = option(
        0.0, "p, pseudo-nodes per labelled node of a class; 0: one node", ge=0, le=1
    )
    server_steps: int = option(3000, "T_c, steps of the generator", ge=0)
    lr_features: float = option(5e-3, "the generator's step for X'", gt=0)
    lr_links: float = option(1e-3, "the generator's step for the link predictor", gt=0)
    link_channels: int = option(
        128, "width of the link predictor; 256 for arxiv, Flickr and Reddit", ge=1
    )
    link_threshold: float = option(
        0.01, "δ, weight below which a link is dropped", ge=0, le=1
    )
    links: str = option(
        "soft", "whether links keep their weight or all weigh 1", choices="soft hard"
    )
    alignment_weight: float = option(10.0, "weight of Eq. (11)", ge=0)
    smoothness_weight: float = option(0.1, "weight of Eq. (12)", ge=0)
    smoothness: str = option(
        "separate",
        "whether Eq. (12) is minimised as printed, which separates linked nodes, or "
        "maximised as in graph condensation",
        choices="separate attract",
    )
    lr_global: float = option(1e-4, "client learning rate of stage 1", gt=0)
    lr_personal: float = option(5e-5, "client learning rate of stage 2", gt=0)
    beta: float = option(0.2, "β of Eq. (19); of ft-dist: γ itself", ge=0)
    gamma_min: float = option(0.0, "smallest γ, Eq. (19)", ge=0)
    gamma_max: float = option(0.15, "largest γ, Eq. (19)", ge=0)


@dataclass(frozen=True)
class LocalStatistics(AdditivePayload):
    """Class statistics of one client: 4·C_k·(2D + 2) bytes for its C_k classes.

    Mean and variance of width D = (h + 1)·d, the nodes behind them, and how many of
    those carry a label, as int32. Which classes there are travels as one bit each,
    ⌈C/8⌉ bytes of the record's own overhead. With secure aggregation 8·C·(2D + 3) bytes
    of masked sums, whatever the client holds.

    Parameters
    ----------
    statistics : ClassStatistics
        On the CPU; a class with count 0 is not sent.
    """

    statistics: ClassStatistics
    records = (STATISTICS,)

    def to_record(self) -> RecordDict:
        """Pack into the record ``statistics``."""
        s = self.statistics
        held = s.count > 0
        bits = np.packbits(held.numpy())
        counts = torch.stack([s.count[held], s.labelled_count[held]], dim=1)
        tensors = {
            "mean": s.mean[held],
            "variance": s.variance[held],
            "counts": counts.to(torch.int32),
            "present": torch.from_numpy(bits),
        }
        return RecordDict({STATISTICS: write_tensors(tensors)})

    def summands(self, weight: float) -> dict[str, Tensor]:
        """Return N, Nμ, (N − 1)s² + Nμ², owners and labelled nodes of every class."""
        count, total, squares, owners = additive_sums(self.statistics)
        labelled = self.statistics.labelled_count.double()
        return {
            "count": count,
            "sum": total,
            "squares": squares,
            "owners": owners,
            "labelled": labelled,
        }

    @classmethod
    def summand_shapes(cls, spec: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of :meth:`summands` for ``spec`` = (C, D)."""
        one, wide = spec[:1], spec
        return {
            "count": one,
            "sum": wide,
            "squares": wide,
            "owners": one,
            "labelled": one,
        }

    @classmethod
    def from_record(cls, content: RecordDict, spec: tuple[int, int]) -> Self:
        """Unpack, expecting at most ``spec`` = (C, D).

        Raises
        ------
        PayloadError
            If an array is missing or too many, has the wrong type or shape (another
            feature width or depth), a mean or variance is not finite, a variance is
            negative, or a count is below 2 or smaller than the labelled nodes in it.
        """
        classes, width = spec
        tensors = read_tensors(content, STATISTICS, is_checked=False)
        if set(tensors) != {"mean", "variance", "counts", "present"}:
            raise PayloadError(
                f'Record "{STATISTICS}" must hold mean, variance, counts and present, '
                f"got {sorted(tensors)}."
            )
        held = _read_present(tensors["present"], classes)
        number = int(held.sum())
        out = {}
        for name in ("mean", "variance"):
            tensor = tensors[name]
            if tensor.dim() == 2 and tensor.shape[1] != width:
                raise PayloadError(
                    f"Statistics must be {width} wide, got {tensor.shape[1]}: do all "
                    "clients have the same features and opfgl.depth?"
                )
            check_tensor(f"{STATISTICS}/{name}", tensor, shape=(number, width))
            out[name] = torch.zeros((classes, width))
            out[name][held] = tensor
        counts = check_tensor(
            f"{STATISTICS}/counts",
            tensors["counts"],
            shape=(number, 2),
            dtype=torch.int32,
        ).long()
        _check_counts(counts)
        both = torch.zeros((classes, 2), dtype=torch.int64)
        both[held] = counts
        count, labelled = both.unbind(dim=1)
        check_statistics(out["mean"], out["variance"], count)
        return cls(ClassStatistics(out["mean"], out["variance"], count, labelled))

    def withhold(self, shared: Tensor, min_count: int) -> Self:
        """Leave out classes that are not shared, and statistics of too few nodes."""
        s = self.statistics
        kept = shared & (s.count >= min_count)
        return type(self)(
            ClassStatistics(
                s.mean * kept[:, None],
                s.variance * kept[:, None],
                s.count * kept,
                s.labelled_count * kept,
            )
        )

    def in_range(self) -> Self:
        """Put negative variances at 0."""
        s = self.statistics
        return type(self)(replace(s, variance=s.variance.clamp(min=0)))

    @property
    def num_bytes(self) -> int:
        """4·C_k·(2D + 2)."""
        number = int((self.statistics.count > 0).sum())
        return 4 * number * (2 * self.statistics.mean.shape[1] + 2)


@dataclass(frozen=True)
class GraphDownload(Payload):
    """The pseudo-graph: 4·(s·d + s + s²) bytes for its s nodes; 0 before there is one.

    Parameters
    ----------
    graph : PseudoGraph
        On the CPU.
    """

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
        """Unpack, expecting nothing, or a graph of ``spec`` = (C, d).

        Raises
        ------
        PayloadError
            If an array is missing or too many, has the wrong type or shape or a
            non-finite number, a label is no class, or the adjacency is not symmetric
            in [0, 1] with a zero diagonal.
        """
        classes, width = spec
        if PSEUDO_GRAPH not in content:
            return cls(no_pseudo_graph(width))
        tensors = read_tensors(content, PSEUDO_GRAPH, is_checked=False)
        if set(tensors) != {"features", "labels", "adjacency"}:
            raise PayloadError(
                f'Record "{PSEUDO_GRAPH}" must hold features, labels and adjacency, '
                f"got {sorted(tensors)}."
            )
        size = tensors["labels"].numel()
        labels = check_tensor(
            f"{PSEUDO_GRAPH}/labels",
            tensors["labels"],
            shape=(size,),
            dtype=torch.int32,
        ).long()
        if size and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
            raise PayloadError(
                f"Labels of the pseudo-graph must be 0 to {classes - 1}, got "
                f"{int(labels.min())} to {int(labels.max())}."
            )
        for name, columns in (("features", width), ("adjacency", size)):
            shape = (size, columns)
            check_tensor(f"{PSEUDO_GRAPH}/{name}", tensors[name], shape=shape)
        links = tensors["adjacency"]
        in_range = bool(((links >= 0) & (links <= 1)).all())
        if not in_range or bool(links.diagonal().any()) or not links.equal(links.T):
            raise PayloadError(
                "The adjacency of the pseudo-graph must be symmetric, in [0, 1], with a "
                "zero diagonal."
            )
        return cls(PseudoGraph(tensors["features"], labels, links))

    @property
    def num_bytes(self) -> int:
        """4·(s·d + s + s²)."""
        size, width = self.graph.features.shape
        return 4 * (size * width + size + size * size)


def no_pseudo_graph(num_features: int) -> PseudoGraph:
    """Return the graph without nodes that stands for none."""
    return PseudoGraph(
        torch.zeros((0, num_features)),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros((0, 0)),
    )


def _read_present(bits: Tensor, classes: int) -> Tensor:
    """Read which of the classes a client sent."""
    name = f"{STATISTICS}/present"
    check_tensor(name, bits, shape=(-(-classes // 8),), dtype=torch.uint8)
    flat = np.unpackbits(bits.numpy()).astype(bool)
    if flat[classes:].any():
        raise PayloadError(f'"{name}" names classes beyond the {classes} agreed on.')
    return torch.from_numpy(flat[:classes])


def _check_counts(counts: Tensor) -> None:
    """Refuse counts (n, 2) of nodes and labelled nodes that cannot be."""
    if not len(counts):
        return
    number, labelled = counts.unbind(dim=1)
    if int(number.min()) < MIN_COUNT:
        raise PayloadError(
            f"A class is uploaded from {MIN_COUNT} nodes on, got {int(number.min())}: "
            "a single node has no variance."
        )
    if int(labelled.min()) < 0 or bool((labelled > number).any()):
        raise PayloadError("Labelled nodes of a class must be 0 up to its nodes.")
