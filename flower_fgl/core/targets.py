"""What a run predicts: classes, labels or numbers of nodes, graphs or pairs; no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CLASSES", "EDGE", "EDGE_SPLIT", "KINDS", "LABELS", "LARGEST_NUMBER", "LINK"]
__all__ += ["LINK_CLASSES", "LINK_SPLIT", "MIN_EDGES", "NUMBERS", "Target"]
__all__ += ["TargetKind", "agree_targets", "differing_unit", "headline"]
__all__ += ["read_time_cuts", "targets_apart"]

LINK = "link"
"""Value of ``setting`` for link prediction."""
LINK_CLASSES = ("no link", "link")
"""Classes of pairs of nodes."""
LINK_SPLIT = "85/5/10"
"""Default split of each client's edges in percent: training, validation, test."""
EDGE = "edge"
"""Value of ``setting`` for the classification of edges."""
EDGE_SPLIT = "60/20/20"
"""Default split of each client's labelled edges in percent."""
MIN_EDGES = 10
"""Fewest edges of a graph that can be split: undirected ones for link prediction, labelled
ones to classify edges."""


def read_time_cuts(text: str) -> tuple[float, float] | None:
    """Return the two times of ``time-cuts``, ``None`` if it is empty.

    Raises a ValueError unless it holds two finite numbers in ascending order.
    """
    if not text.strip():
        return None
    first, second = map(float, text.split(","))
    if not (math.isfinite(first) and math.isfinite(second) and first < second):
        raise ValueError
    return first, second


TargetKind = Literal["classes", "labels", "numbers"]
CLASSES: TargetKind = "classes"
LABELS: TargetKind = "labels"
NUMBERS: TargetKind = "numbers"
KINDS: tuple[TargetKind, ...] = (CLASSES, LABELS, NUMBERS)
LARGEST_NUMBER = 1e15
"""Largest size of a number to predict, that of all real numbers in messages."""


@dataclass(frozen=True)
class Target:
    """What is predicted of each item: a node, a graph, or a pair of nodes.

    One of C classes, any of T labels, or T numbers, by their ``names``. ``units`` are
    those of the numbers, ``""`` where not given; else empty.
    """

    kind: TargetKind
    names: tuple[str, ...]
    units: tuple[str, ...] = ()

    @classmethod
    def classes(cls, names: Sequence[str]) -> Target:
        """Return the target with these classes."""
        return cls(CLASSES, tuple(names))

    @property
    def width(self) -> int:
        """Number of outputs of a model: C or T."""
        return len(self.names)

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of a message or model card, which names all outputs as classes."""
        return {
            "class_names": self.names,
            "target_kind": self.kind,
            "target_units": self.units,
        }

    @property
    def noun(self) -> str:
        """What has the names: a class, a label or a target."""
        return {CLASSES: "class", LABELS: "label", NUMBERS: "target"}[self.kind]

    @property
    def counted(self) -> str:
        """How many there are, in words: ``5 classes``, ``1 number``."""
        kind = self.kind if self.width != 1 else self.kind.removesuffix("s")
        return f"{self.width} {kind}"

    @property
    def has_classes(self) -> bool:
        """Whether each item has one class."""
        return self.kind == CLASSES

    @property
    def has_numbers(self) -> bool:
        """Whether numbers are predicted."""
        return self.kind == NUMBERS


def headline(main_score: str, target: Target) -> str:
    """Return the score that selects rounds and models: several RMSE have no common unit."""
    return "nrmse" if main_score == "rmse" and target.width > 1 else main_score


def agree_targets(owners: Mapping[str, Target]) -> tuple[Target, dict[str, str]]:
    """Return all labels or numbers of data owners, and why some owners do not fit.

    ``owners`` are of one kind, by their labels in messages. Names are sorted; the unit of
    a number is the most frequent one. An owner with another unit does not fit, and of two
    units that are equally frequent neither.
    """
    units: dict[str, Counter[str]] = {}
    for target in owners.values():
        given = target.units or ("",) * target.width
        for name, unit in zip(target.names, given, strict=True):
            units.setdefault(name, Counter()).update([unit] if unit else [])
    names = tuple(sorted(units))
    ranked = {  # sorted by name first: of equal ones the order stays
        name: sorted(sorted(found), key=found.__getitem__, reverse=True) or [""]
        for name, found in units.items()
    }
    most = {name: order[0] for name, order in ranked.items()}
    reasons = {}
    for owner, target in owners.items():
        for name, unit in zip(target.names, target.units, strict=False):
            order, found = ranked[name], units[name]
            rivals = [u for u in order[:2] if u != unit and found[u] >= found[unit]]
            if unit and rivals:
                reasons[owner] = _other_unit(name, unit, rivals[0])
    kind = next(iter(owners.values())).kind
    agreed = tuple(most[name] for name in names)
    return Target(kind, names, agreed if any(agreed) else ()), reasons


def differing_unit(own: Target, agreed: Target) -> str:
    """Return why an owner with another unit of a number does not fit, or empty text."""
    due = dict(zip(agreed.names, agreed.units, strict=False))
    for name, unit in zip(own.names, own.units, strict=False):
        if unit and due.get(name, "") not in ("", unit):
            return _other_unit(name, unit, due[name])
    return ""


def _other_unit(name: str, unit: str, other: str) -> str:
    """Return the reason for another unit than that of most clients."""
    return (
        f'its "{name}" is in {unit}, that of the other clients in {other}. Convert it, or '
        "leave the unit out if it is only another spelling."
    )


def targets_apart(owners: Mapping[str, Target]) -> tuple[str, list[str]]:
    """Find targets that only one of several data owners has.

    Returns why the owners cannot learn from each other, empty if two share a target, and
    a warning for each owner with targets of its own.
    """
    holders = Counter(name for target in owners.values() for name in target.names)
    lone = {
        owner: [name for name in target.names if holders[name] == 1]
        for owner, target in owners.items()
    }
    shown = {owner: ", ".join(names)[:80] for owner, names in lone.items() if names}
    if len(owners) < 2 or not shown:
        return "", []
    if max(holders.values()) == 1:
        text = "; ".join(f"{owner}: {names}" for owner, names in [*shown.items()][:5])
        return (
            f"No target is known at two data owners ({text}), so that they cannot learn "
            "from each other. Name the same target alike at all owners."
        ), []
    return "", [
        f"Only data owner {owner} has targets of the names {names}: it learns them alone. "
        "Check how other owners spell them."
        for owner, names in shown.items()
    ]
